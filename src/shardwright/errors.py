"""Every error that shardwright raises, and the one way its message is laid out.

An error is a list of `Problem`s: what failed and where, which rule said so, how to fix it. Trees
and files collect all of theirs and raise once, with the class of the first.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final

# A message quotes what is wrong. It does not repeat a line of 100 kB.
LONGEST_TEXT: Final = 1000
LONGEST_LINE: Final = 160
# Names beyond these are not compared: the comparison of two names takes time that grows with the
# product of their lengths.
LONGEST_NAME: Final = 64
MOST_NAMES: Final = 2000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    Attributes:
      error: the exception class that a lone problem of this kind raises.
      what: the failure in one line, without its place.
      path: the tensor's path in its tree, or the key path in a file; empty when there is none.
      dim: position of the dimension, or None.
      axis: semantic axis as people write it (`HEAD`), or empty.
      size: number of elements of the dimension, or None.
      mesh_axes: the mesh axes concerned.
      shards: product of their sizes, or None.
      rule: the rule that decided, as text with its source, or empty; of a composite one line per
        member.
      fix: how to fix it, or empty; one line per way to do it.
      snippet: source lines with a caret, or empty.
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

    def __post_init__(self) -> None:
        for name in ("what", "path", "rule", "fix"):
            text = getattr(self, name)
            if len(text) > LONGEST_TEXT:
                object.__setattr__(self, name, shortened(text, LONGEST_TEXT))
        if len(self.snippet) > LONGEST_LINE:
            object.__setattr__(self, "snippet", _window(self.snippet))

    def __str__(self) -> str:
        dim = "" if self.dim is None else f"dim {self.dim}"
        place = " ".join(part for part in (self.path, dim, self.axis) if part)
        lines = [f"{place}: {self.what}" if place else self.what]
        lines += [f"  {line}" for line in self.snippet.splitlines()]
        for mark, text in (("rule", self.rule), ("fix", self.fix)):
            for at, line in enumerate(text.splitlines()):
                lines.append(f"        {line}" if at else f"  {mark:4}  {line}")
        return "\n".join(lines)


class ShardingError(ValueError):
    """Base of every deliberate error. `problems` holds them all; `resolution` is what `explain`
    would show.

    The fields of the first problem (`path`, `dim`, `axis`, `size`, `mesh_axes`, `shards`, `rule`,
    `fix`) are attributes too.
    """

    def __init__(
        self,
        what: str = "",
        *,
        problems: Sequence[Problem] = (),
        resolution: Any = None,
        **fields: Any,
    ) -> None:
        found = tuple(problems) or (Problem(error=type(self), what=what, **fields),)
        super().__init__(render(found))
        self.problems = found
        self.resolution = resolution

    def __getattr__(self, name: str) -> Any:
        if name in _PROBLEM_FIELDS and "problems" in self.__dict__:
            return getattr(self.problems[0], name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.problems, self.resolution)


class UnknownAxisError(ShardingError):
    """A name that is neither an axis of the vocabulary nor one that the strategy declares."""


class MissingMeshAxisError(ShardingError):
    """A rule names a mesh axis that the mesh does not have."""


class IndivisibleError(ShardingError):
    """A dimension's size is not a multiple of the number of shards."""


class AxisConflictError(ShardingError):
    """Two dims of one array want the same mesh axis, or one semantic axis occurs twice."""


class RankMismatchError(ShardingError):
    """An annotation and an array differ in rank, or a merged dim is not its members' product."""


class ShapeRequiredError(ShardingError):
    """The answer depends on a size that was not given."""


class ManualAxisError(ShardingError):
    """A constraint inside `shard_map` names a Manual mesh axis that the value does not vary
    over.
    """


class MeshMismatchError(ShardingError):
    """Two meshes that must agree do not: manager and context, or manager and strategy."""


class NoManagerError(ShardingError):
    """A free function was called where no manager is entered."""


class StrategyError(ShardingError):
    """A strategy, a rule, a mode or a role that does not make sense."""


class MeshSpecError(ShardingError):
    """A mesh that cannot be built: bad text, bad sizes, too few devices, a tensor axis across
    slices.
    """


class ProgramError(ShardingError):
    """A compiled program that cannot be read, or that does not tell what is asked."""


class AttentionError(ShardingError):
    """An attention call that makes no sense, or that no implementation can serve as asked."""


class CacheError(ShardingError):
    """A KV cache that is asked for what it cannot hold, or a refused change of one."""


class LayerError(ShardingError):
    """A layer or an operator that is asked for what it does not do."""


class ServingError(ShardingError):
    """A request that can never be served, or an engine that is asked for what it does not do."""


class QueueFullError(ServingError):
    """A request that came while as many wait as may: it can come again later."""


_PROBLEM_FIELDS = frozenset(f.name for f in dataclasses.fields(Problem))


def _rebuild(
    cls: type[ShardingError], problems: tuple[Problem, ...], resolution: Any
) -> ShardingError:
    return cls(problems=problems, resolution=resolution)


def render(problems: Sequence[Problem]) -> str:
    """Lay out one problem as it is, several as a numbered list."""
    if len(problems) == 1:
        return str(problems[0])
    blocks = []
    for number, problem in enumerate(problems, 1):
        first, *rest = str(problem).splitlines()
        blocks.append("\n".join([f" {number}. {first}", *(f"    {line}" for line in rest)]))
    return "\n".join([f"{len(problems)} problems", *blocks])


def raise_problems(problems: Sequence[Problem], *, resolution: Any = None) -> None:
    """Raise the first problem's class with all of them; do nothing if there are none."""
    if problems:
        raise problems[0].error(problems=problems, resolution=resolution)


def shortened(text: str, most: int) -> str:
    """Return text of at most about `most` characters: its beginning and its end, and how much is
    left out.
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def _window(snippet: str) -> str:
    """Return a snippet whose lines are cut around the caret, which is the end of the last line."""
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
    """Return `did you mean 'x'?` for the closest known name, or an empty string.

    A name that differs in case alone is the closest. Of equally close names the one with the longer
    common beginning counts, because people rarely mistype the first letter.
    """
    names = [one for one in itertools.islice(known, MOST_NAMES) if len(one) <= LONGEST_NAME]
    if len(name) > LONGEST_NAME:
        return ""
    close = next((one for one in names if one.lower() == name.lower()), None) or _closest(
        name, names
    )
    return f"did you mean {close!r}?" if close else ""


def _closest(name: str, names: Sequence[str]) -> str:
    matcher = difflib.SequenceMatcher(b=name)
    best = (0.6, 0, "")
    for one in names:
        matcher.set_seq1(one)
        # The cheap upper bounds first, as `difflib.get_close_matches` does.
        if matcher.real_quick_ratio() >= best[0] and matcher.quick_ratio() >= best[0]:
            alike = sum(
                1
                for _ in itertools.takewhile(
                    lambda pair: pair[0] == pair[1], zip(name, one, strict=False)
                )
            )
            best = max(best, (matcher.ratio(), alike, one))
    return best[2]
