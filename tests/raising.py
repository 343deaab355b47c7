"""Assert an error by its class and its facts. Only golden files hold the prose of a message."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from types import EllipsisType
from typing import Any

import pytest

from shardwright.errors import Problem, ShardingError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a problem must say, whatever its wording.

    Attributes:
      what: Names and numbers that stand in `what`.
      path: The path, equal; `...` if it may be any.
      fix: Names and numbers that stand in `fix`.
      count: The number of problems of the error; None if it may be any.
      texts: What stands in `rule` and in `snippet`.
      fields: Other fields of the problem, equal.
    """

    what: tuple[str, ...]
    path: str | EllipsisType
    fix: tuple[str, ...]
    count: int | None
    texts: Mapping[str, tuple[str, ...]]
    fields: Mapping[str, Any]

    def absent(self, problem: Problem) -> list[str]:
        """Return what a problem does not say."""
        texts = {"what": self.what, "fix": self.fix, **self.texts}
        absent = [
            f"{name}: {fact}"
            for name, said in texts.items()
            for fact in said
            if not _stands(fact, getattr(problem, name))
        ]
        fields = dict(self.fields) if self.path is ... else {"path": self.path, **self.fields}
        return absent + [
            f"{name}={value!r}" for name, value in fields.items() if getattr(problem, name) != value
        ]


def facts(
    *what: object,
    path: str | EllipsisType = "",
    fix: object = (),
    count: int | None = None,
    **fields: Any,
) -> Facts:
    """Return facts, for a table of cases: `facts("tp=4", 6, path="up/kernel", fix="mlp")`."""
    texts = {name: _texts(fields.pop(name)) for name in ("rule", "snippet") if name in fields}
    return Facts(
        what=_texts(what), path=path, fix=_texts(fix), count=count, texts=texts, fields=fields
    )


@contextlib.contextmanager
def raises(
    error: type[BaseException] | tuple[type[BaseException], ...],
    *what: object,
    path: str | EllipsisType = "",
    fix: object = (),
    count: int | None = None,
    **fields: Any,
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Assert that the block raises the class, and that one problem of the error has all facts.

    A fact is a name, a size, an argument: what stays when somebody rewords the message. Each
    problem of the error must have a fix.

    Args:
      error: The class, or several.
      *what: Facts in `what` of the problem; or values of `facts`, or one tuple of them, each for a
        problem of its own.
      path: Path of the problem; `...` for any.
      fix: A fact in `fix`, or a tuple of them.
      count: The number of problems.
      **fields: Other fields of the problem: `rule` and `snippet`, each a fact in that text or a
        tuple of them; `dim`, `axis`, `size`, `mesh_axes`, `shards`, each equal.
    """
    given = what[0] if len(what) == 1 and isinstance(what[0], tuple) else what
    if not given or not isinstance(given[0], Facts):
        given = (facts(*what, path=path, fix=fix, count=count, **fields),)
    elif path or fix or fields or count is not None:
        raise TypeError("raises() takes facts(...), or keywords, not both")
    if not all(map(_says_something, given)):
        raise TypeError("raises() needs a fact: a name, a size or a path of the error")
    with pytest.raises(error) as caught:
        yield caught
    problems = _problems(caught.value)
    for wanted in given:
        assert wanted.count in (None, len(problems)), f"{len(problems)} problems:\n{caught.value}"
        closest = min((wanted.absent(problem) for problem in problems), key=len)
        assert not closest, f"the message lacks {closest}:\n{caught.value}"
    unfixed = [problem.what for problem in problems if not problem.fix]
    assert not unfixed, f"no fix: {unfixed}"


def _says_something(fact: Facts) -> bool:
    named = fact.path if fact.path is not ... else ""
    return bool(fact.what or named or fact.fix or fact.texts or fact.fields)


def _problems(error: BaseException) -> tuple[Problem, ...]:
    """Return the problems of an error, or those that an assertion's text lays out alike."""
    if isinstance(error, ShardingError):
        return error.problems
    what, _, fix = str(error).partition("\n  fix   ")
    return (Problem(error=ShardingError, what=what, fix=fix or "none"),)


def _texts(given: object) -> tuple[str, ...]:
    return tuple(map(str, given if isinstance(given, tuple) else (given,)))


def _stands(fact: str, text: str) -> bool:
    """Return whether a fact stands in a text, as a whole name or number."""
    before = r"(?<![\w.])" if re.match(r"\w", fact) else ""
    after = r"(?!\w|\.\d)" if re.search(r"\w$", fact) else ""
    return re.search(f"{before}{re.escape(fact)}{after}", text) is not None
