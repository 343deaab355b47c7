"""Where each key of a file stands: `file:line`, as messages and rules show it."""

from __future__ import annotations

from collections.abc import Mapping

KeyPath = tuple[str, ...]
# The file's own place is that of the empty path.
Origin = dict[KeyPath, str]


def source_of(path: KeyPath, origin: Mapping[KeyPath, str]) -> str:
    """Return the `file:line` of a key, or of the nearest table that holds it, or an empty string."""
    return next(
        (origin[path[:end]] for end in range(len(path), -1, -1) if path[:end] in origin), ""
    )


def where(path: KeyPath, origin: Mapping[KeyPath, str]) -> str:
    """Return `file:line key.path`, as far as they are known."""
    return f"{source_of(path, origin)} {'.'.join(path)}".strip()
