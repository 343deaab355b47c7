"""Match each collective of a compiled program with planned ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from shardwright.plan.collectives.collective import Collective, Kind
from shardwright.plan.walk.events import Event

# Kind of a compiled collective -> planned kinds that it may replace. XLA for CPUs runs a
# reduce-scatter as an all-reduce, and a collective matmul is a loop of permutes.
_REPLACED: Final[Mapping[Kind, tuple[Kind, ...]]] = {
    Kind.ALL_REDUCE: (Kind.REDUCE_SCATTER,),
    Kind.REDUCE_SCATTER: (Kind.ALL_REDUCE,),
    Kind.ALL_GATHER: (Kind.ALL_REDUCE,),
    Kind.PERMUTE: (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL),
}


def planned_for(
    collective: Collective, parts: Collection[int], events: Sequence[Event]
) -> tuple[Event, ...]:
    """Return the events of a plan that a collective agrees with best; none if it was not planned.

    They run over the same mesh axes. At least one of source line, bytes and argument path must be
    equal, unless the compiler kept neither a line nor a name.

    Args:
      collective: Collective of the compiled program.
      parts: Logical bytes of each of its arrays. A compiler combines collectives.
      events: Collectives of the plan.
    """
    kinds = (collective.kind, *_REPLACED.get(collective.kind, ()))
    if collective.gathers:
        kinds = (Kind.ALL_GATHER,)
    line = collective.source.rpartition("/")[2]

    def agreement(event: Event) -> tuple[int, int]:
        # The name of an argument in the program is `params['blocks']['up']`, and its path is
        # `blocks/up`.
        steps = [f"['{step}']" for step in event.path.split("/") if step]
        equal = (
            event.source == line != "",
            event.logical_bytes in parts,
            bool(steps) and "".join(steps) in collective.op_name,
        )
        return sum(equal), -kinds.index(event.kind)

    near = [
        event for event in events if event.mesh_axes == collective.mesh_axes and event.kind in kinds
    ]
    best = max(map(agreement, near), default=(0, 0))
    if best[0] == 0 and (line or collective.op_name):
        return ()
    return tuple(event for event in near if agreement(event) == best)
