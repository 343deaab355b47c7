"""The errors that shardwright raises, and the layout of their messages.

An error holds a list of `Problem`s: what failed and where, which rule decided it, and how to fix
it. All problems of a tree or a file are collected and raised as one error, in the class of the
first problem.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

# Limits on the text that a message quotes, in characters.
LONGEST_TEXT: Final = 1000
LONGEST_LINE: Final = 160
# `did_you_mean` ignores names longer than LONGEST_NAME, and all names after the first MOST_NAMES.
# Comparing two names takes time proportional to the product of their lengths.
LONGEST_NAME: Final = 64
MOST_NAMES: Final = 2000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewValue:
    """An edit of a strategy file: a key gets another value.

    Attributes:
      table: Key path of the table, such as `("modes", "decode")`.
      key: The key, which the table may not have yet.
      value: The new value of the key.
      source: File and line of the value that the edit replaces, or empty.
    """

    table: tuple[str, ...]
    key: str
    value: str
    source: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rename:
    """An edit of a strategy file: a misspelled name on the line of the problem is replaced."""

    old: str
    new: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    Attributes:
      error: The exception class to raise for this problem.
      what: The failure in one line, without its location.
      path: The tensor's path in its tree, or the key path in a file. Empty if the problem has no
        path.
      dim: Position of the dim, or None.
      axis: Semantic axis by its short name (`HEAD`), or empty.
      size: Number of elements of the dim, or None.
      mesh_axes: The mesh axes of the failed sharding.
      shards: Product of the sizes of `mesh_axes`, or None.
      rule: The rule that decided, as text with its source, or empty. A composite has one line per
        member.
      fix: How to fix it, or empty; one line per alternative.
      snippet: Source lines with a caret, or empty.
      edit: The edit that the first words of `fix` describe, for `--fix`. None if there is none.
    """

    error: type[ShardingError]
    what: str
    path: str = ""
    dim: int | None = None
    axis: str = ""
    size: int | None = None
    mesh_axes: tuple[str, ...] = ()
    shards: int | None = None
    rule: str = ""
    fix: str = ""
    snippet: str = ""
    edit: NewValue | Rename | None = None

    def __post_init__(self) -> None:
        for name in ("what", "path", "rule", "fix"):
            text = getattr(self, name)
            if len(text) > LONGEST_TEXT:
                object.__setattr__(self, name, shortened(text, LONGEST_TEXT))
        if len(self.snippet) > LONGEST_LINE:
            object.__setattr__(self, "snippet", _window(self.snippet))

    def __str__(self) -> str:
        dim = "" if self.dim is None else f"dim {self.dim}"
        place = " ".join(visible(part) for part in (self.path, dim, self.axis) if part)
        what = _visible_lines(self.what)
        # A message such as `heads must be a positive integer` already begins with its place, so do
        # not repeat the place. Always write the place `a`, because "a" may also be the first word
        # of a sentence.
        is_said = what.startswith((f"{place} ", f"{place}=")) and place != "a"
        lines = [what if is_said or not place else f"{place}: {what}"]
        lines += [f"  {line}" for line in snippet_lines(self.snippet)]
        for mark, text in (("rule", self.rule), ("fix", self.fix)):
            for at, line in enumerate(_visible_lines(text).splitlines()):
                lines.append(f"        {line}" if at else f"  {mark:4}  {line}")
        return "\n".join(lines)


def visible(text: str) -> str:
    r"""Return text with an escape for each character that is not printable.

    Names may come from files of other people. A terminal executes control characters, a line break
    pretends to be another line of a report, and a mark of text direction reverses the text after
    it, in HTML too.

    >>> print(visible("ok\x1b[2J"))
    ok\x1b[2J
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def _visible_lines(text: str) -> str:
    return "\n".join(map(visible, text.split("\n")))


def snippet_lines(snippet: str) -> list[str]:
    """Return the lines of a snippet as they are printed."""
    # Replace each character that is not printable by one space, so that the caret stays under its
    # column.
    return [
        "".join(char if char.isprintable() else " " for char in line)
        for line in (snippet.split("\n") if snippet else ())
    ]


class ShardingError(ValueError):
    """Base of every deliberate error.

    `problems` has all problems. `resolution` is the `Resolution` that `explain` would return, or
    None. The fields of the first problem (`path`, `dim`, `axis`, `size`, `mesh_axes`, `shards`,
    `rule`, `fix`) are attributes too.
    """

    def __init__(
        self,
        what: str = "",
        *,
        problems: Sequence[Problem] = (),
        resolution: Any = None,
        **fields: Any,
    ) -> None:
        self.problems = tuple(problems) or (Problem(error=type(self), what=what, **fields),)
        super().__init__(render(self.problems))
        self.resolution = resolution

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` read attributes before `__init__` has run. Without the test of
        # `__dict__`, reading `problems` would call this method again without end.
        if name in _PROBLEM_FIELDS and "problems" in self.__dict__:
            return getattr(self.problems[0], name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        # By default, an exception is rebuilt from its message alone, which would lose its problems.
        rebuild = functools.partial(type(self), problems=self.problems, resolution=self.resolution)
        return rebuild, ()


class UnknownAxisError(ShardingError):
    """A name is neither an axis of the vocabulary nor an axis that the strategy declares."""


class MissingMeshAxisError(ShardingError):
    """A rule names a mesh axis that the mesh does not have."""


class IndivisibleError(ShardingError):
    """The size of a dimension is not a multiple of the number of shards."""


class AxisConflictError(ShardingError):
    """Two dims of an array want the same mesh axis."""


class RankMismatchError(ShardingError):
    """An annotation and an array differ in rank, or a merged dim is not the product of its
    members.
    """


class ShapeRequiredError(ShardingError):
    """The sharding depends on a size that is not known."""


class ManualAxisError(ShardingError):
    """A constraint inside `shard_map` names a Manual mesh axis that the value does not vary
    over.
    """


class MeshMismatchError(ShardingError):
    """The manager's mesh differs from the mesh of the context, or from that of the strategy."""


class AgreementError(ShardingError):
    """Processes differ in rules, policy, mesh, specs, shapes or data, or a process is missing."""


class NoManagerError(ShardingError):
    """A function needs a manager, and none is entered."""


class StrategyError(ShardingError):
    """A strategy, a rule, a mode or a role is invalid."""


class MeshSpecError(ShardingError):
    """A mesh cannot be built: invalid text or sizes, too few devices, a tensor axis across
    slices.
    """


class ProgramError(ShardingError):
    """A compiled program cannot be read, or lacks the requested information."""


class AttentionError(ShardingError):
    """An attention call is invalid, or no implementation supports it."""


class CacheError(ShardingError):
    """A KV cache is created or used in a way that it does not support, or it refused a change."""


class CheckpointError(ShardingError):
    """A checkpoint, of this library or of another one, cannot be written or read, or does not fit
    the state that it is restored to.
    """


class MoveError(ShardingError):
    """A move of arrays between shardings failed before it was complete.

    Attributes:
      tree: The tree after the failure. Some arrays have moved, the others have not. Move this tree
        again to resume.
      moved: Paths of the arrays that have moved.
    """

    def __init__(
        self, what: str = "", *, tree: Any = None, moved: Sequence[str] = (), **fields: Any
    ) -> None:
        super().__init__(what, **fields)
        self.tree = tree
        self.moved = tuple(moved)


class LayerError(ShardingError):
    """A layer or an operator is used in a way that it does not support."""


class ServingError(ShardingError):
    """A request can never be served, or an engine is used in a way that it does not support."""


class QueueFullError(ServingError):
    """The queue is full. Submit the request again later."""


_PROBLEM_FIELDS = frozenset(f.name for f in dataclasses.fields(Problem))


def render(problems: Sequence[Problem]) -> str:
    """Return the message of one problem, or of several as a numbered list."""
    if len(problems) == 1:
        return str(problems[0])
    blocks = []
    for number, problem in enumerate(problems, 1):
        first, *rest = str(problem).splitlines()
        blocks.append("\n".join([f" {number}. {first}", *(f"    {line}" for line in rest)]))
    return "\n".join([f"{len(problems)} problems", *blocks])


def raise_problems(problems: Sequence[Problem], *, resolution: Any = None) -> None:
    """If there are problems, raise one error with all of them, in the class of the first."""
    if problems:
        raise problems[0].error(problems=problems, resolution=resolution)


def under(name: str, error: ShardingError) -> list[Problem]:
    """Return the problems of an error, with the name of an argument in front of each path."""
    return [
        dataclasses.replace(problem, path=f"{name} {problem.path}".strip())
        for problem in error.problems
    ]


def in_file(problem: Problem, file: str) -> Problem:
    """Return a problem whose fix says in which table and file to write a new rule.

    Args:
      problem: The problem. If its rule is already in `file`, the problem is returned unchanged.
      file: The file in which the user changes rules, or text that describes this file. It is not
        the file of the rule if the rule comes from a preset.
    """
    edit = problem.edit
    if not isinstance(edit, NewValue) or edit.source.rpartition(":")[0] in ("", file):
        return problem
    place = f"a fallback belongs in [{'.'.join(edit.table)}] of {file}"
    return dataclasses.replace(problem, fix=f"{problem.fix}; {place}")


def located(error: ShardingError, source: str) -> ShardingError:
    """Return an error whose problems name a line of the user's code, `model.py:12`."""
    if not source:
        return error
    problems = [
        dataclasses.replace(problem, what=f"{problem.what} at {source}")
        for problem in error.problems
    ]
    return type(error)(problems=problems, resolution=error.resolution)


def shortened(text: str, most: int) -> str:
    """Cut text to about `most` characters: keep both ends, and say how many are left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def _window(snippet: str) -> str:
    """Return a snippet with its lines cut around the column of the caret on the last line."""
    *lines, caret = snippet.split("\n")
    if caret.strip() != "^":
        return "\n".join(shortened(line, LONGEST_LINE) for line in (*lines, caret))
    at = len(caret) - 1
    start = max(0, at - LONGEST_LINE // 2)
    front = "..." if start else ""
    end = start + LONGEST_LINE
    cut = [f"{front}{line[start:end]}{'...' if len(line) > end else ''}" for line in lines]
    return "\n".join([*cut, " " * (at - start + len(front)) + "^"])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?` for the closest known name, or an empty string."""
    return hint_text([close] if (close := closest(name, known)) else [])


def hint_text(meant: Sequence[str]) -> str:
    """Return `did you mean 'x' or 'y'?` for the names that may be meant, or an empty string."""
    return f"did you mean {' or '.join(map(repr, meant))}?" if meant else ""


def closest(name: str, known: Iterable[str]) -> str:
    """Return the closest known name, or an empty string.

    A name that differs only in case is the closest. If several names are equally close, the name
    with the longest common prefix is returned, because people rarely mistype the first letter.
    """
    names = [other for other in itertools.islice(known, MOST_NAMES) if len(other) <= LONGEST_NAME]
    if len(name) > LONGEST_NAME:
        return ""
    same = next((other for other in names if other.lower() == name.lower()), None)
    return same or _closest(name, names)


def same_spelling(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?` for the known name with the same letters and digits, or nothing.

    Names of model families are close to each other, so the closest name may be that of another
    family. Case, punctuation and doubled letters do not count.
    """

    def letters(name: str) -> str:
        return re.sub(r"([a-z])\1+", r"\1", re.sub(r"[^a-z0-9]", "", name.lower()))

    same = next((other for other in known if letters(other) == letters(name)), None)
    return f"did you mean {same!r}?" if same else ""


def _closest(name: str, names: Sequence[str]) -> str:
    # The matcher caches its analysis of `b`, so pass the fixed name as `b`.
    matcher = difflib.SequenceMatcher(b=name)
    # 0.6 is the default cutoff of `difflib.get_close_matches`.
    best = (0.6, 0, "")
    for other in names:
        matcher.set_seq1(other)
        # Compare the cheap upper bounds first, as `difflib.get_close_matches` does.
        if matcher.real_quick_ratio() >= best[0] and matcher.quick_ratio() >= best[0]:
            pairs = zip(name, other, strict=False)
            alike = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            best = max(best, (matcher.ratio(), alike, other))
    return best[2]
