"""What follows from a weight's decisions: where its parts lie, and where optimizer state lies beyond it. Pure.

Whether a size divides is the resolver's to judge: it hands in `fits`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from shardwright import _jax
from shardwright.errors import IndivisibleError, Problem, RankMismatchError, ShapeRequiredError
from shardwright.resolution.decisions import DimDecision, Outcome, Resolution
from shardwright.resolution.rules import Fallback, Indivisible, Policy, Rule
from shardwright.vocabulary.annotations import PartOf
from shardwright.vocabulary.lowering import Dim, describe

Fits = Callable[[int, tuple[str, ...]], bool]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Decisions taken over from others, what is wrong with them, and what there is to say about them."""

    decisions: tuple[DimDecision, ...]
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


def take_part(
    whole: Resolution,
    part: PartOf,
    shape: Sequence[int] | None,
    *,
    path: str | None,
    fits: Fits,
    policy: Policy,
) -> Taken:
    """Take the decisions of a whole array's dims for a part of it.

    A dim that is shorter than the one it follows, such as a number of blocks, must divide over the same mesh axes: a block is
    never split.
    """
    if whole.problems:
        return Taken(
            decisions=(),
            problems=tuple(
                dataclasses.replace(one, path=path or one.path) for one in whole.problems
            ),
        )
    if shape is None:
        what = "a part of an array has a size of its own"
        return Taken(
            decisions=(),
            problems=(
                Problem(error=ShapeRequiredError, what=what, path=path or "", fix="pass shape="),
            ),
        )
    if len(shape) != len(
        part.dims
    ):  # which the policy rank = "fit" lets through: a part is not cut to fit
        what = f"{describe(part)} has {len(part.dims)} dims, the array has {len(shape)}: shape {tuple(shape)}"
        fix = "write one entry per dim, None for a dim that is not sharded"
        return Taken(
            decisions=(),
            problems=(Problem(error=RankMismatchError, what=what, path=path or "", fix=fix),),
        )
    decisions: list[DimDecision] = []
    problems: list[Problem] = []
    for at, (of, size) in enumerate(zip(part.dims, shape, strict=True)):
        if of is None:
            decisions.append(DimDecision(dim=at, label="", size=size, outcome=Outcome.EMPTY))
            continue
        made = dataclasses.replace(whole.decisions[of], dim=at, size=size)
        try:
            split = size != part.shape[of] and not fits(size, made.mesh_axes)
        except _jax.Inconclusive:
            what = f"whether {size} parts divide over {'+'.join(made.mesh_axes)} is not known"
            fix = "say more of the size, such as 8*b, or annotate the dim EMPTY"
            problems.append(
                Problem(
                    error=ShapeRequiredError,
                    what=what,
                    path=path or "",
                    dim=at,
                    axis=made.label,
                    fix=fix,
                )
            )
            decisions.append(dataclasses.replace(made, outcome=Outcome.FAILED, mesh_axes=()))
            continue
        if split:
            if policy.indivisible is Indivisible.ERROR:
                problems.append(
                    dataclasses.replace(_split_block(made, part.shape[of]), path=path or "")
                )
                made = dataclasses.replace(made, outcome=Outcome.FAILED, mesh_axes=())
            else:
                made = _shortened(made, fits, policy.indivisible)
        decisions.append(made)
    followed = [str(of) for of in part.dims if of is not None]
    name = whole.path or whole.annotation
    notes = (
        ()
        if len(followed) == len(part.dims) == len(part.shape) or not followed
        else (f"dims {', '.join(followed)} of {name}",)
    )
    return Taken(decisions=tuple(decisions), problems=tuple(problems), notes=whole.notes + notes)


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
    blocks = (
        f"{size} blocks of {whole // size}"
        if size and whole % size == 0
        else f"size {size} (of {whole})"
    )
    return Problem(
        error=IndivisibleError,
        what=f"{blocks} do not divide over {over}, where the whole dim lies: a block may not be split",
        dim=decision.dim,
        axis=decision.label,
        size=size,
        mesh_axes=decision.mesh_axes,
        rule="" if decision.rule is None else str(decision.rule),
        fix="choose a block size whose number of blocks divides, or annotate the dim EMPTY",
    )


def add_zero1(
    param: Taken,
    rule: Rule | None,
    *,
    dims: Sequence[Dim],
    path: str | None,
    sizes: Mapping[str, int],
    fits: Fits,
) -> Taken:
    """Shard optimizer state over mesh axes that its parameter leaves free: by the first candidate that one dim takes whole.

    A candidate of which the parameter leaves nothing free is passed over. The first dim that divides takes them, minor to what
    it has. Dims that the annotation keeps whole are left alone, and so is an array that has no others.

    Args:
      param: where the parameter lies.
      rule: candidates in order; with `-` at the end an array that none fits stays as it is. None adds nothing.
      dims: the lowered dims.
      path: the state's path.
      sizes: mesh axis -> size.
      fits: whether a size divides over mesh axes.
    """
    if rule is None or param.problems:
        return param
    taken = {axis for decision in param.decisions for axis in decision.mesh_axes}
    able = [decision for decision in param.decisions if decision.outcome is not Outcome.EMPTY]
    tried = []
    for candidate in rule.candidates if able else ():
        live = tuple(axis for axis in candidate if sizes.get(axis, 1) > 1)
        free = tuple(axis for axis in live if axis not in taken)
        if live and not free:
            param = _noted(param, f"{rule.ref}: the parameter lies over {'+'.join(live)} already")
            continue
        if not free:
            param = _noted(
                param,
                f"{rule.ref}: of {'+'.join(candidate)} the mesh has no axis of more than one device",
            )
            continue
        if any(_judged(decision, dims) is None for decision in able):
            what = "which dim zero1 shards depends on the sizes"
            problem = Problem(
                error=ShapeRequiredError,
                what=what,
                path=path or "",
                rule=str(rule.ref),
                fix="pass shape=",
            )
            return dataclasses.replace(param, problems=(problem,))
        for decision in able:
            size = _judged(decision, dims)
            try:
                fitting = size is not None and fits(size, (*decision.mesh_axes, *free))
            except _jax.Inconclusive:
                what = f"which dim zero1 shards depends on the size {size}"
                fix = "say more of it, such as 8*b"
                problem = Problem(
                    error=ShapeRequiredError,
                    what=what,
                    path=path or "",
                    dim=decision.dim,
                    rule=str(rule.ref),
                    fix=fix,
                )
                return dataclasses.replace(param, problems=(problem,))
            if fitting:
                return _widened(param, decision, free, rule)
        tried.append(free)
    if not tried or rule.fallback is Fallback.REPLICATED:
        return _noted(
            param, *(f"{rule.ref}: no dim divides over {'+'.join(free)} too" for free in tried)
        )
    tries = [(_judged(decision, dims), (*decision.mesh_axes, *tried[0])) for decision in able]
    return dataclasses.replace(
        param, problems=(_none_fits(tries, tried[0], rule, sizes, path or ""),)
    )


def _judged(decision: DimDecision, dims: Sequence[Dim]) -> int | None:
    """Return the size that must divide: of a merged dim that of its first member."""
    dim = dims[decision.dim]
    return dim.merged[0][1] if dim.merged and dim.size == decision.size else decision.size


def _noted(taken: Taken, *notes: str) -> Taken:
    return dataclasses.replace(taken, notes=(*taken.notes, *notes))


def _widened(param: Taken, one: DimDecision, free: tuple[str, ...], rule: Rule) -> Taken:
    wider = dataclasses.replace(one, mesh_axes=(*one.mesh_axes, *free), zero1=free)
    found = tuple(wider if decision.dim == one.dim else decision for decision in param.decisions)
    return _noted(
        dataclasses.replace(param, decisions=found),
        f"{rule.ref}: {'+'.join(free)} on dim {one.dim} {one.label}",
    )


def _none_fits(
    tries: Sequence[tuple[int | None, tuple[str, ...]]],
    free: tuple[str, ...],
    rule: Rule,
    sizes: Mapping[str, int],
    path: str,
) -> Problem:
    said = [
        f"{size} over {', '.join(f'{axis}={sizes[axis]}' for axis in axes)}" for size, axes in tries
    ]
    return Problem(
        error=IndivisibleError,
        what=f"no dim of this optimizer state divides over {'+'.join(free)} too: {'; '.join(said)}",
        path=path,
        rule=str(rule.ref),
        mesh_axes=free,
        fix=f'end zero1 in a fallback, zero1 = "{rule.ref.text} | -", which leaves such state where its parameter lies',
    )
