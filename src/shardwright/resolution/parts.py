"""Derive the decisions of a part of a weight, such as its scales, from those of the weight.

Whether a size divides is decided in `decide`: the resolver passes the method `Decider.fits` to this
module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from shardwright import _jax
from shardwright.errors import (
    IndivisibleError,
    Problem,
    RankMismatchError,
    ShapeRequiredError,
    ShardingError,
)
from shardwright.resolution.decisions import DimDecision, Outcome, Resolution
from shardwright.resolution.rules import Indivisible, Policy
from shardwright.vocabulary.annotations import PartOf
from shardwright.vocabulary.lowering import describe

Fits = Callable[[int, tuple[str, ...]], bool]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """Decisions of a request, its problems, and notes for its explanation."""

    decisions: tuple[DimDecision, ...]
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


def _failed(error: type[ShardingError], what: str, *, path: str | None, fix: str) -> Derived:
    problem = Problem(error=error, what=what, path=path or "", fix=fix)
    return Derived(decisions=(), problems=(problem,))


def take_part(
    whole: Resolution,
    part: PartOf,
    shape: Sequence[int] | None,
    *,
    path: str | None,
    fits: Fits,
    policy: Policy,
) -> Derived:
    """Derive the decisions of a part from those of the whole array.

    A dim of the part may be shorter than the dim that it follows: a number of blocks, for instance.
    The dim of the part must divide over the same mesh axes, so that no block is split.

    Args:
      whole: Resolution of the whole array.
      part: For each dim of the part, the dim of the whole array that it follows.
      shape: Shape of the part, or None if unknown.
      path: Path of the part, for messages.
      fits: Tells whether a size divides over mesh axes.
      policy: What to do if the size does not divide.
    """
    if whole.problems:
        problems = [
            dataclasses.replace(problem, path=path or problem.path) for problem in whole.problems
        ]
        return Derived(decisions=(), problems=tuple(problems))
    if shape is None:
        what = "a part of an array needs its own shape"
        return _failed(ShapeRequiredError, what, path=path, fix="pass shape=")
    # The policy rank = "fit" accepts another rank, but a part cannot be cut to fit.
    if len(shape) != len(part.dims):
        what = f"{describe(part)} has rank {len(part.dims)}, and the array has rank {len(shape)}: "
        what += f"shape {tuple(shape)}"
        fix = "write one entry per dim, and None for a dim that is not sharded"
        return _failed(RankMismatchError, what, path=path, fix=fix)
    decisions: list[DimDecision] = []
    problems = []
    for position, (of, size) in enumerate(zip(part.dims, shape, strict=True)):
        if of is None:
            decisions.append(DimDecision(dim=position, label="", size=size, outcome=Outcome.EMPTY))
            continue
        decision = dataclasses.replace(whole.decisions[of], dim=position, size=size)
        decision, problem = _followed(decision, part.shape[of], fits, policy)
        decisions.append(decision)
        if problem is not None:
            problems.append(dataclasses.replace(problem, path=path or ""))
    notes = whole.notes
    followed = [str(of) for of in part.dims if of is not None]
    # A part that follows all dims or none needs no note.
    if followed and not len(followed) == len(part.dims) == len(part.shape):
        notes += (f"dims {', '.join(followed)} of {whole.path or whole.annotation}",)
    return Derived(decisions=tuple(decisions), problems=tuple(problems), notes=notes)


def _followed(
    decision: DimDecision, whole: int, fits: Fits, policy: Policy
) -> tuple[DimDecision, Problem | None]:
    """Return the decision of one dim of a part, and a problem or None.

    Args:
      decision: Decision of the dim that the part's dim follows. Its position and size are already
        those of the part's dim.
      whole: Size of the dim that is followed.
      fits: Tells whether a size divides over mesh axes.
      policy: What to do if the size does not divide.
    """
    size: Any = decision.size
    failed = dataclasses.replace(decision, outcome=Outcome.FAILED, mesh_axes=())
    try:
        # A dim of the same size was already decided as a dim of the whole, possibly by a policy.
        if size == whole or fits(size, decision.mesh_axes):
            return decision, None
    except _jax.Inconclusive:
        over = "+".join(decision.mesh_axes)
        return failed, Problem(
            error=ShapeRequiredError,
            what=f"it is unknown whether {size} parts divide over {over}",
            dim=decision.dim,
            axis=decision.label,
            fix="write the size as a multiple, such as 8*b, or annotate the dim EMPTY",
        )
    if policy.indivisible is Indivisible.ERROR:
        return failed, _split_block(decision, whole)
    return _shortened(decision, fits, policy.indivisible), None


_SHORTENED = {
    Indivisible.PREFIX: Outcome.POLICY_PREFIX,
    Indivisible.REPLICATE: Outcome.POLICY_REPLICATE,
    Indivisible.DROP: Outcome.POLICY_DROP,
}


def _shortened(decision: DimDecision, fits: Fits, policy: Indivisible) -> DimDecision:
    axes = decision.mesh_axes
    ends = range(len(axes) - 1, -1, -1) if policy is Indivisible.PREFIX else (0,)
    best = next(axes[:end] for end in ends if not end or fits(decision.size or 0, axes[:end]))
    return dataclasses.replace(decision, outcome=_SHORTENED[policy], mesh_axes=best)


def _split_block(decision: DimDecision, whole: int) -> Problem:
    size, over = decision.size or 0, "+".join(decision.mesh_axes)
    blocks = f"size {size} (of {whole})"
    if size and whole % size == 0:
        blocks = f"{size} blocks of {whole // size}"
    return Problem(
        error=IndivisibleError,
        what=f"{blocks} do not divide over {over}, although the whole dim does: a block may not be "
        "split",
        dim=decision.dim,
        axis=decision.label,
        size=size,
        mesh_axes=decision.mesh_axes,
        rule=str(decision.rule or ""),
        fix="choose a block size whose number of blocks divides, or annotate the dim EMPTY",
    )
