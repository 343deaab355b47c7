"""The result of inference: the axes of parameters, and the evidence for each axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.errors import Problem, StrategyError, raise_problems
from shardwright.inference.constraints import Constraint
from shardwright.inference.evidence import Evidence
from shardwright.vocabulary.axes import axis_label
from shardwright.vocabulary.merged_dims import axis_text
from shardwright.vocabulary.shown import WIDTH, data_of, text_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InferredDim:
    """One dim of a parameter.

    Attributes:
      path: Path of the parameter.
      dim: Position of the dim.
      size: Number of elements.
      axis: Axis, or `merged(...)`. EMPTY if no rule names the dim.
      evidence: Why the dim has this axis, with the primitive and the line of the model.
      guess: Whether a default rule chose the axis.
      is_open: Whether no rule names the dim.
      classes: A number for each factor of the dim. Factors with equal numbers are the same dim,
        in one parameter or in several.
    """

    path: str
    dim: int
    size: int
    axis: Any
    evidence: Evidence
    guess: bool
    is_open: bool
    classes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NameConflict:
    """Two operations that name one dim differently.

    Attributes:
      path: Path of a parameter that has the dim, or empty.
      dim: Position of the dim in this parameter, or None.
      first: One of the names, and the evidence for it.
      second: The other name, and the evidence for it.
      meeting: The operation that uses two dims with these names as one dim. None if a single dim
        got both names.
    """

    path: str
    dim: int | None
    first: tuple[str, Evidence]
    second: tuple[str, Evidence]
    meeting: Evidence | None

    @property
    def text(self) -> str:
        """The conflict in one line, with the source lines of both operations."""
        place = f"{self.path} dim {self.dim}: " if self.dim is not None else ""
        names = [f"{axis_label(axis)}: {evidence}" for axis, evidence in (self.first, self.second)]
        meeting = f"; {self.meeting}" if self.meeting is not None else ""
        return f"{place}two names: {' and '.join(names)}{meeting}"

    def problem(self) -> Problem:
        """Return the conflict as a problem."""
        text = dataclasses.replace(self, path="", dim=None).text
        return Problem(
            error=StrategyError,
            what=text,
            path=self.path,
            dim=self.dim,
            fix="check the seeds; if they are right, annotate this array by hand",
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """The axes of all parameters of a model, and why. `print(inferred)` shows a table.

    Attributes:
      annotations: Tree like the parameters, with one annotation per array. A dim that no rule names
        is EMPTY.
      evidence: Every dim of every parameter, with its axis and the reason for it.
      conflicts: Dims that two operations name differently.
      unknown: Primitives that inference does not understand, and kernels without a function in
        `kernels=`, such as `pallas_call my_kernel`.
      constraints: The intermediates that `sw.constrained` constrains.
      unconstrained: Reason -> number of intermediates that get no constraint for this reason.
      program: The operations of the traced program: primitive and ranks of the results.
    """

    annotations: Any
    evidence: tuple[InferredDim, ...]
    conflicts: tuple[NameConflict, ...]
    unknown: tuple[str, ...]
    constraints: tuple[Constraint, ...] = ()
    unconstrained: Mapping[str, int] = dataclasses.field(default_factory=dict)
    program: tuple[str, ...] = ()

    @property
    def open(self) -> tuple[InferredDim, ...]:
        """The dims that no rule names."""
        return tuple(dim for dim in self.evidence if dim.is_open)

    @property
    def guesses(self) -> tuple[InferredDim, ...]:
        """The dims that a default rule named."""
        return tuple(dim for dim in self.evidence if dim.guess)

    def __str__(self) -> str:
        return text_of(self)

    def text(self, *, width: int = WIDTH) -> str:
        """Return the table. `width` is the width of a line in characters."""
        return text_of(self, width=width)

    def summary(self, *, width: int = WIDTH) -> str:
        """Return the table with guesses and open dims only, and the totals."""
        return text_of(self, form="summary", width=width)

    def toml(self) -> str:
        """Return path rules as TOML, for a person to review and commit.

        `sw.match_paths(params, tomllib.loads(text).items())` reads them.

        Raises:
          StrategyError: Two operations name one dim differently.
        """
        raise_problems([conflict.problem() for conflict in self.conflicts])
        return text_of(self, form="toml")

    def to_json(self) -> dict[str, Any]:
        """Return everything as data for JSON."""
        return data_of(self)

    def problems(self) -> list[Problem]:
        """Return a problem for each conflict, open dim and guess."""
        names: dict[int, list[str]] = {}
        for dim in (*self.open, *self.guesses):
            own = names.setdefault(dim.size, [])
            if (name := _name(dim)) not in own:
                own.append(name)
        opened = [
            _problem(dim, "no rule names this dim", _fix(dim, names[dim.size])) for dim in self.open
        ]
        guesses = [
            _problem(dim, f"{_name(dim)} is a guess: {dim.evidence}", _fix(dim, names[dim.size]))
            for dim in self.guesses
        ]
        return [*(conflict.problem() for conflict in self.conflicts), *opened, *guesses]


def _name(dim: InferredDim) -> str:
    return "?" if dim.is_open else axis_text(dim.axis)


def _fix(dim: InferredDim, names: Sequence[str]) -> str:
    """Return how to name an open dim or a guess.

    Args:
      dim: The dim.
      names: The names of all open dims and guesses of this size. `sizes=` would give one name to
        all of them.
    """
    if len(names) > 1:
        return (
            f"correct its rule in the text of toml(): dims of size {dim.size} have several names "
            f"here ({', '.join(names)}), and sizes= would give all of them one name"
        )
    if dim.is_open:
        return "name it in seeds= or sizes="
    return (
        f"if the guess is right, write sizes={{{dim.size}: {_name(dim)!r}}}, or review the rules "
        "that toml() returns"
    )


def _problem(dim: InferredDim, what: str, fix: str) -> Problem:
    return Problem(
        error=StrategyError, what=what, path=dim.path, dim=dim.dim, size=dim.size, fix=fix
    )
