"""`Effect`: what `shard`, `hint` and `gather` add to a trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, Final, NamedTuple

import jax

from shardwright.manager import constraint
from shardwright.manager.constraint import Placement
from shardwright.resolution.decisions import Resolution
from shardwright.resolution.request import ShardingRequest


class Decided(NamedTuple):
    """The decision for one array. A manager caches it by annotation, shape and ambient mesh.

    Attributes:
      request: The request, in the mode of the call, else of the manager.
      placement: Spec of the array on the current mesh. None if all mesh axes are Manual:
        `shard_map` has applied them.
      manual: The resolution, if a dim is sharded over Manual mesh axes. None otherwise.
      strict: Whether a dim that does not fit is an error.
    """

    request: ShardingRequest
    placement: Placement | None
    manual: Resolution | None
    strict: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Effect:
    """What a manager adds to a trace: constraints, or annotations for a plan.

    Attributes:
      place: Function `(x, decided) -> x` that adds the decision for an array.
      gather: Function `(w, use, stored) -> w` that adds two decisions for a weight: for its use,
        and for the stored weight.
      token: Part of JAX's cache keys: managers share programs only if their tokens are equal.
      record: Called with every request that adds nothing to the trace, because Python code may
        branch on its answer. None to record nothing.
    """

    place: Callable[[Any, Decided], Any]
    gather: Callable[[Any, Decided, Decided], Any]
    token: Hashable
    record: Callable[[ShardingRequest, Resolution], None] | None = None


def constrain(x: Any, decided: Decided) -> Any:
    """Constrain an array inside a trace."""
    placement = decided.placement
    if placement is None:
        return x
    if placement.plain:
        # Nearly all calls return here, and a trace makes thousands of them.
        return jax.lax.with_sharding_constraint(x, placement.sharding)
    return constraint.constrain(x, placement)


def constrain_weight(w: Any, use: Decided, stored: Decided) -> Any:
    """Constrain a weight to the spec of its use, and its gradient to the stored spec."""
    assert use.placement is not None
    assert stored.placement is not None
    return constraint.gather(w, use.placement, stored.placement)


CONSTRAIN: Final = Effect(constrain, constrain_weight, token="constrain")
