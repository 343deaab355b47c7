"""Derive the decisions of parts of a weight, and of optimizer state, from those of the weight.

`decide` decides whether a size divides. The resolver passes that function in as `fits`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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
from shardwright.resolution.rules import Fallback, Indivisible, Policy, Rule
from shardwright.vocabulary.annotations import PartOf
from shardwright.vocabulary.lowering import Dim, describe

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
    It must divide over the same mesh axes, so that no block is split.

    Args:
      whole: Resolution of the whole array.
      part: Which dims of the whole the part follows.
      shape: Shape of the part, or None if unknown.
      path: Path of the part, for messages.
      fits: Tells whether a size divides over mesh axes.
      policy: What to do if it does not.
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
        decision, problem = _followed(decision, part.shape[of], fits, policy.indivisible)
        decisions.append(decision)
        if problem is not None:
            problems.append(dataclasses.replace(problem, path=path or ""))
    return Derived(
        decisions=tuple(decisions),
        problems=tuple(problems),
        notes=whole.notes + _part_notes(whole, part),
    )


def _followed(
    decision: DimDecision, whole: int, fits: Fits, policy: Indivisible
) -> tuple[DimDecision, Problem | None]:
    """Return the decision of one dim of a part, and a problem or None.

    Args:
      decision: Decision of the dim that the part's dim follows, with the position and the size of
        the part's dim.
      whole: Size of the dim that is followed.
      fits: Tells whether a size divides over mesh axes.
      policy: What to do if it does not.
    """
    size: Any = decision.size
    failed = dataclasses.replace(decision, outcome=Outcome.FAILED, mesh_axes=())
    try:
        # A dim of the same size has been judged with the whole, perhaps by its policy.
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
    if policy is Indivisible.ERROR:
        return failed, _split_block(decision, whole)
    return _shortened(decision, fits, policy), None


def _part_notes(whole: Resolution, part: PartOf) -> tuple[str, ...]:
    """Return a note about which dims of the whole a part follows, unless it follows all or none."""
    followed = [str(of) for of in part.dims if of is not None]
    if not followed or len(followed) == len(part.dims) == len(part.shape):
        return ()
    return (f"dims {', '.join(followed)} of {whole.path or whole.annotation}",)


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
        what=f"{blocks} do not divide over {over}, as the whole dim does: a block may not be split",
        dim=decision.dim,
        axis=decision.label,
        size=size,
        mesh_axes=decision.mesh_axes,
        rule="" if decision.rule is None else str(decision.rule),
        fix="choose a block size whose number of blocks divides, or annotate the dim EMPTY",
    )


def add_zero1(
    param: Derived,
    rule: Rule | None,
    *,
    dims: Sequence[Dim],
    path: str | None,
    sizes: Mapping[str, int],
    fits: Fits,
) -> Derived:
    """Shard optimizer state over mesh axes that its parameter does not use.

    Candidates are tried in order. The free mesh axes of a candidate are those that do not shard the
    parameter. A candidate without free mesh axes is skipped. The first dim that also divides over
    all free mesh axes is sharded over them, as its minor axes. Dims annotated `EMPTY` are never
    sharded.

    Args:
      param: Decisions of the parameter.
      rule: Candidates in order, or None to add no mesh axes. If the rule ends in `-`, state that no
        candidate fits is sharded like its parameter.
      dims: Lowered dims.
      path: Path of the state.
      sizes: Size of each mesh axis.
      fits: Tells whether a size divides over mesh axes.
    """
    if rule is None or param.problems:
        return param
    # This is stage 1 of ZeRO (arXiv:1910.02054). A dim of each state is sharded, and not a flat
    # buffer of all states, so that each state keeps its shape and has a spec.
    taken = {axis for decision in param.decisions for axis in decision.mesh_axes}
    able = [decision for decision in param.decisions if decision.outcome is not Outcome.EMPTY]
    tried = []
    for candidate in rule.candidates if able else ():
        live = tuple(axis for axis in candidate if sizes.get(axis, 1) > 1)
        free = tuple(axis for axis in live if axis not in taken)
        if not free:
            why = f"in the mesh, no axis of {'+'.join(candidate)} has more than one device"
            if live:
                why = f"the parameter is already sharded over {'+'.join(live)}"
            param = _noted(param, f"{rule.ref}: {why}")
            continue
        chosen = _first_fitting(able, free, rule, dims=dims, fits=fits)
        if isinstance(chosen, Problem):
            problem = dataclasses.replace(chosen, path=path or "")
            return dataclasses.replace(param, problems=(problem,))
        if chosen is not None:
            return _widened(param, chosen, free, rule)
        tried.append(free)
    # If no candidate had free mesh axes, no size is at fault, and that is no error.
    if not tried or rule.fallback is Fallback.REPLICATED:
        notes = [f"{rule.ref}: no dim also divides over {'+'.join(free)}" for free in tried]
        return _noted(param, *notes)
    tries = [(_judged(decision, dims), (*decision.mesh_axes, *tried[0])) for decision in able]
    problem = _none_fits(tries, tried[0], rule, sizes, path or "")
    return dataclasses.replace(param, problems=(problem,))


def _first_fitting(
    able: Sequence[DimDecision],
    free: tuple[str, ...],
    rule: Rule,
    *,
    dims: Sequence[Dim],
    fits: Fits,
) -> DimDecision | Problem | None:
    """Return the first dim that also divides over `free`, or None.

    Return a problem if a size is unknown or symbolic, so that the dim cannot be determined.
    """
    unknown = Problem(
        error=ShapeRequiredError,
        what="which dim zero1 shards depends on the sizes",
        rule=str(rule.ref),
        fix="pass shape=, with symbolic sizes as multiples, such as 8*b",
    )
    # With one size unknown, an earlier or a later dim may be the first that divides.
    if any(_judged(decision, dims) is None for decision in able):
        return unknown
    for decision in able:
        size = _judged(decision, dims)
        try:
            if size is not None and fits(size, (*decision.mesh_axes, *free)):
                return decision
        except _jax.Inconclusive:
            what = f"which dim zero1 shards depends on the size {size}"
            return dataclasses.replace(unknown, what=what, dim=decision.dim)
    return None


def _judged(decision: DimDecision, dims: Sequence[Dim]) -> int | None:
    """Return the size that must divide. For a merged dim it is the size of the first member."""
    dim = dims[decision.dim]
    return dim.merged[0][1] if dim.merged and dim.size == decision.size else decision.size


def _noted(derived: Derived, *notes: str) -> Derived:
    return dataclasses.replace(derived, notes=(*derived.notes, *notes))


def _widened(param: Derived, chosen: DimDecision, free: tuple[str, ...], rule: Rule) -> Derived:
    # As minor axes, so that the state of a device belongs to its own shard of the parameter.
    wider = dataclasses.replace(chosen, mesh_axes=(*chosen.mesh_axes, *free), zero1=free)
    decisions = tuple(
        wider if decision.dim == chosen.dim else decision for decision in param.decisions
    )
    note = f"{rule.ref}: {'+'.join(free)} on dim {chosen.dim} {chosen.label}"
    return _noted(dataclasses.replace(param, decisions=decisions), note)


def _none_fits(
    tries: Sequence[tuple[int | None, tuple[str, ...]]],
    free: tuple[str, ...],
    rule: Rule,
    sizes: Mapping[str, int],
    path: str,
) -> Problem:
    tried = [
        f"{size} over {', '.join(f'{axis}={sizes[axis]}' for axis in axes)}" for size, axes in tries
    ]
    return Problem(
        error=IndivisibleError,
        what=(
            f"no dim of this optimizer state also divides over {'+'.join(free)}: {'; '.join(tried)}"
        ),
        path=path,
        rule=str(rule.ref),
        mesh_axes=free,
        fix=(
            f'end zero1 in a fallback, zero1 = "{rule.ref.text} | -", which shards such state '
            f"like its parameter"
        ),
    )
