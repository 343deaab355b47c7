"""Follow an equation. The table in `dims` says how dims of operands and results correspond."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from shardwright.dims.table import Correspondence, FactorRole
from shardwright.plan.walk.factors import AxesByFactor, fitting, placed, spread
from shardwright.plan.walk.step import PlanStep
from shardwright.plan.walk.values import ShardedValue, axes_of, merged_origins, shards

Choose: TypeAlias = Callable[[PlanStep, Correspondence, Mapping[int, AxesByFactor]], AxesByFactor]


def most_sharded(
    step: PlanStep, known: Correspondence, held: Mapping[int, AxesByFactor]
) -> AxesByFactor:
    """Return the sharding of the operand with the most shards. On a tie, return the first."""
    del known
    return max(
        held.values(), key=lambda own: shards(axes_of(tuple(own.values())), step.ledger.sizes)
    )


def follow(
    step: PlanStep,
    known: Correspondence,
    values: Sequence[ShardedValue],
    *,
    choose: Choose = most_sharded,
    doubt: str = "",
) -> list[ShardedValue]:
    """Bring the operands to one sharding, and return the results. Sums stay partial.

    Args:
      step: The equation.
      known: How its dims correspond.
      values: Its operands, each a complete sum unless the equation may run on the terms of the sum.
      choose: Returns the sharding that is kept if operands differ.
      doubt: The fix to show for a mesh axis over which an operand is gathered, because a compiler
        may not gather it. With "", no doubt is noted.
    """
    sizes = step.ledger.sizes
    live = [at for at, value in enumerate(values) if not value.free and any(known.operands[at])]
    if not live and known.adds and len(values) == 1:  # a scalar, maybe a partial sum
        return [values[0].with_dims(spread(known, each, {}, sizes)) for each in known.results]
    if not live:
        return step.anywhere() if all(value.free for value in values) else step.replicated()
    held = {at: placed(known, known.operands[at], values[at].dims, sizes) for at in live}
    order = fitting(known, choose(step, known, held), sizes)
    if doubt:
        given_up: set[str] = set()
        for at, own in held.items():
            kept = spread(known, known.operands[at], fitting(known, own, sizes), sizes)
            pairs = zip(values[at].dims, kept, strict=True)
            given_up.update(*(axes for axes, left in pairs if axes != left))
        step.doubt(given_up, doubt)
    moved = {}
    for at in live:
        dims = spread(known, known.operands[at], order, sizes)
        moved[at] = values[at] if values[at].dims == dims else step.move(at, dims)
    # `with_dims` keeps `owed`, so a partial sum passes without being completed.
    if known.adds and len(values) == 1:
        return [moved[0].with_dims(spread(known, each, order, sizes)) for each in known.results]
    groups = tuple(
        frozenset(axes)
        for factor, axes in order.items()
        if known.roles[factor] is not FactorRole.KEPT
    )
    origins = merged_origins(values[at] for at in live)
    return [
        ShardedValue(
            dims=spread(known, result, order, sizes),
            owed=frozenset().union(*groups),
            groups=groups,
            origins=origins,
        )
        for result in known.results
    ]
