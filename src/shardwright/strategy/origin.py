"""Where each key of a strategy was written: `file:line`, as messages and rules show it."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.errors import Problem, Rename, ShardingError, StrategyError

KeyPath = tuple[str, ...]
# Key path -> `file:line`. The empty path has the name of the file.
KeySources = dict[KeyPath, str]


def source_of(path: KeyPath, origin: Mapping[KeyPath, str]) -> str:
    """Return `file:line` of a key or of its nearest enclosing table with a line, else ""."""
    return next(
        (origin[path[:end]] for end in range(len(path), -1, -1) if path[:end] in origin), ""
    )


def where(path: KeyPath, origin: Mapping[KeyPath, str]) -> str:
    """Return `file:line key.path`, without the parts that are unknown."""
    return f"{source_of(path, origin)} {'.'.join(path)}".strip()


def problem_at(
    path: KeyPath,
    origin: Mapping[KeyPath, str],
    what: str,
    fix: str,
    *,
    error: type[ShardingError] = StrategyError,
    rule: object = "",
    edit: Rename | None = None,
) -> Problem:
    """Return a problem of a key. `rule` is the rule that the file has under this key."""
    line = where(path, origin)
    return Problem(error=error, what=what, path=line, rule=str(rule), fix=fix, edit=edit)
