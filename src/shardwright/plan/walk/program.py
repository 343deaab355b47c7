"""Walk a jaxpr from its inputs to its outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from jax.extend.core import Literal
from jax.sharding import NamedSharding

from shardwright import _jax
from shardwright.dims.primitives import (
    CONSTRAINTS,
    CUMULATIVE,
    CUTS,
    ELEMENTWISE,
    REDUCTIONS,
    SCATTERS,
    SOURCES,
    VIEWS,
    WINDOWS,
)
from shardwright.plan.walk import control, convolutions, elementwise, indexing, matmuls, shapes
from shardwright.plan.walk.buffers import with_buffers
from shardwright.plan.walk.demands import demands, far_demands
from shardwright.plan.walk.entries import CONSTANTS, RESULTS, TEMPORARY, Buffer, Peak
from shardwright.plan.walk.equations import (
    constants,
    count_uses,
    gather_key,
    live_equations,
    needed_whole,
)
from shardwright.plan.walk.events import Event, Walked, WalkLocation
from shardwright.plan.walk.ledger import SHARED, Ledger
from shardwright.plan.walk.manual import SHAPE_KEPT, collective, shard_map
from shardwright.plan.walk.masks import EquationIds, equal_masks, required_dims, shared_mask
from shardwright.plan.walk.padding import is_across
from shardwright.plan.walk.peers import Peers, is_scattered
from shardwright.plan.walk.step import PlanRule, PlanStep, Scope
from shardwright.plan.walk.types import add_typed_demands, as_typed, with_owed, with_typed_constants
from shardwright.plan.walk.values import (
    KEEP,
    Dims,
    Origin,
    ShardedValue,
    anywhere,
    axes_of,
    explicit_axes,
    merged_origins,
    most_runs,
    on_host,
    shards,
    typed_dims,
)

_RULES: Final[Mapping[str, PlanRule]] = {
    **dict.fromkeys(ELEMENTWISE, elementwise.elementwise),
    "device_put": shapes.device_put,
    **dict.fromkeys(REDUCTIONS, elementwise.reduction),
    **dict.fromkeys(CONSTRAINTS, shapes.constraint),
    **dict.fromkeys(SOURCES, PlanStep.anywhere),
    "bitcast_convert_type": elementwise.bitcast,
    **dict.fromkeys(VIEWS, shapes.view),
    **dict.fromkeys((*CUTS, *CUMULATIVE), shapes.cut),
    "slice": shapes.slice_,
    "dynamic_update_slice": indexing.dynamic_update_slice,
    "gather": indexing.gather,
    "scatter": indexing.scatter,
    "scatter-add": indexing.scatter,
    "scatter_add": indexing.scatter,
    "scatter-max": indexing.scatter,
    "scatter-min": indexing.scatter,
    "scatter-mul": indexing.scatter,
    "dot_general": matmuls.dot_general,
    "ragged_dot_general": matmuls.ragged_dot,
    "conv_general_dilated": convolutions.convolution,
    **dict.fromkeys(WINDOWS, convolutions.pool),
    "scan": control.scan,
    "while": control.while_loop,
    "cond": control.cond,
    "shard_map": shard_map,
    **dict.fromkeys(SHAPE_KEPT, collective),
    "debug_print": shapes.callback,
    "debug_callback": shapes.callback,
}
_MASKS: Final = "this mask is computed twice; with shard(...), annotate what is computed from it"
_UNEVEN: Final = "shard the returned value with shard(...): its mesh axes do not divide a dim"
# For these primitives, the rule itself sets `runs`, which is how often a result is computed.
_LOOPS: Final = frozenset({"scan", "while", "cond"})
# XLA partitions these primitives by the types of all operands, including constants.
_PARTITIONED: Final = (
    frozenset({"dot_general", "ragged_dot_general", "reshard", "gather"}) | SCATTERS
)


class ShardingWalker:
    """Follows shardings through a jaxpr and through the jaxprs inside it."""

    def __init__(
        self,
        ledger: Ledger,
        target: Callable[[Any, Ledger], ShardedValue | None],
        *,
        masks: Mapping[EquationIds, Dims] = MappingProxyType({}),
        mask_origins: Mapping[str, Origin] = MappingProxyType({}),
    ) -> None:
        self.ledger = ledger
        self._target = target
        self._masks = masks
        self._mask_origins = mask_origins

    def run(
        self,
        jaxpr: Any,
        inputs: Sequence[ShardedValue],
        *,
        location: WalkLocation | None = None,
        wanted: Sequence[Dims | None] | None = None,
        ledger: Ledger | None = None,
    ) -> list[ShardedValue]:
        """Walk a jaxpr and return the values of its outputs.

        Args:
          jaxpr: The equations.
          inputs: One value per input.
          location: Where the jaxpr runs. Defaults to the start of the program.
          wanted: Per output, the sharding that its consumer requires, or None.
          ledger: Where events are noted. Defaults to the walker's.
        """
        notes = self.ledger if ledger is None else ledger
        outer = location or WalkLocation()

        def target(equation: Any) -> ShardedValue | None:
            return self._target(equation, notes)

        goals = wanted or [None] * len(jaxpr.outvars)
        equations = list(live_equations(jaxpr))
        asked = demands(jaxpr, goals, sizes=notes.sizes, target=_target_dims(target, notes.sizes))
        results = (variable for equation in equations for variable in equation.outvars)
        add_typed_demands(asked, [*jaxpr.invars, *results], notes.sizes)
        scope = Scope(
            ledger=notes,
            asked=asked,
            suggested=far_demands(jaxpr, asked, notes.sizes),
            uses=count_uses(equations, jaxpr.outvars),
            needed_whole=needed_whole(equations),
            target=target,
            follow=self.run,
            known=_RULES,
            masks=self._masks,
            mask_origins=self._mask_origins,
        )
        held: dict[Any, ShardedValue] = dict(zip(jaxpr.invars, inputs, strict=True))
        # Each device has a whole copy of each array that a program closes over.
        held |= {variable: anywhere(_rank(variable)) for variable in jaxpr.constvars}

        def value(variable: Any) -> ShardedValue:
            return anywhere(_rank(variable)) if isinstance(variable, Literal) else held[variable]

        peers = Peers(equations)
        gathers: dict[Any, tuple[Any, list[Event]]] = {}
        equal: dict[Any, Any] = {}
        for equation in equations:
            key = gather_key(equation, equal)
            if key is not None and key in gathers:
                # XLA removes common subexpressions, such as the second gather of a tied table.
                result, sent = gathers[key]
                equal[equation.outvars[0]], held[equation.outvars[0]] = result, held[result]
                if explicit_axes(result.aval) or equation.primitive.name == "shard_map":
                    axes = {axis for event in sent for axis in event.mesh_axes}
                    source = _jax.source_line(equation) or outer.source
                    notes.doubt(axes, dataclasses.replace(outer, source=source), SHARED)
                continue
            if is_scattered(equation):
                peers.ask(equation.outvars[0], scope.asked, held)
            source = _jax.source_line(equation) or outer.source
            step = PlanStep(
                equation=equation,
                values=[value(variable) for variable in equation.invars],
                location=dataclasses.replace(
                    outer,
                    source=source,
                    recomputed=outer.recomputed or _jax.is_recomputed(equation),
                ),
                scope=scope,
            )
            # The rule of the equation sets `moved` and `inner`, and `with_buffers` reads them.
            notes.moved, notes.inner = 0, Peak()
            before = len(notes.events)
            held.update(zip(equation.outvars, _follow(step), strict=True))
            if key is not None:
                gathers[key] = equation.outvars[0], notes.events[before:]
        return [value(variable) for variable in jaxpr.outvars]


def _target_dims(
    target: Callable[[Any], ShardedValue | None], sizes: Mapping[str, int]
) -> Callable[[Any], Dims | None]:
    """Return a function that returns the sharding of a constraint.

    The function returns None if the constraint leaves the sharding of a dim as it is.
    """

    def dims(equation: Any) -> Dims | None:
        result = equation.outvars[0].aval
        if equation.primitive.name == "reshard" and explicit_axes(result) >= sizes.keys():
            return typed_dims(result, ((),) * result.ndim, sizes)
        goal = target(equation)
        return None if goal is None or KEEP in goal.dims else goal.dims

    return dims


def _rank(variable: Any) -> int:
    return len(variable.aval.shape)


def _follow(step: PlanStep) -> Sequence[ShardedValue]:
    """Return the results of an equation, each with its buffer."""
    called = control.call(step)
    if called is not None:
        return called
    rule = _RULES.get(step.name)
    if rule is not None:
        step = step if step.name in _LOOPS else with_owed(step)
        if step.name in _PARTITIONED:
            step = with_typed_constants(step)
        results = [value.pruned() for value in rule(step)]
        if step.name not in _LOOPS:
            # XLA moves loop-invariant code out of loops. So an equation runs as often as the
            # operand that is computed most often.
            runs = most_runs(step.values)
            results = [
                value if value.runs == runs else dataclasses.replace(value, runs=runs)
                for value in results
            ]
        results = as_typed(step, results)
        if step.place in step.scope.masks:
            # A mask gets the sharding that its uses and the uses of equal masks require.
            masks, origins = step.scope.masks[step.place], step.scope.mask_origins
            mask = shared_mask(results[0], masks, origins)
            own = results[0].mesh_axes | axes_of(step.wanted[0] or ())
            step.doubt(mask.mesh_axes - own, _MASKS)
            results = [mask]
        return with_buffers(step, results)
    step.ledger.unknown[step.name] += 1
    return with_buffers(step, step.replicated())


def written_target(equation: Any, ledger: Ledger) -> ShardedValue | None:
    """Return the sharding to which a constraint with a PartitionSpec moves its operand."""
    parameters = equation.params
    sharding = parameters.get("sharding", parameters.get("dst_sharding"))
    if not isinstance(sharding, NamedSharding):
        return None
    aval = equation.invars[0].aval
    if equation.primitive.name == "reshard":
        # A `reshard` keeps all Auto mesh axes. The Explicit ones are in the type of its result.
        return ShardedValue(dims=(KEEP,) * aval.ndim)
    dims = ledger.dims_of(sharding.spec, aval.ndim)
    origin = Origin(source=_jax.source_line(equation))
    return ShardedValue(dims=dims, origins={axis: origin for dim in dims for axis in dim})


def _with_memory(
    ledger: Ledger,
    variables: Sequence[Any],
    inputs: Sequence[ShardedValue],
    kinds: Sequence[str] | None,
) -> list[ShardedValue]:
    """Return the inputs of a program with their buffers."""
    assert ledger.timeline is not None
    buffers = [
        Buffer(
            size=ledger.local_bytes(variable.aval, value.dims),
            kind=kind,
            dtype=str(variable.aval.dtype),
            shape=ledger.local_shape(variable.aval, value.dims),
            host=ledger.host_bytes(variable.aval, value.dims),
        )
        for variable, value, kind in zip(
            variables, inputs, kinds or ["inputs"] * len(inputs), strict=True
        )
    ]
    for buffer in buffers:
        buffer.across = is_across(buffer)
    ledger.timeline.add(births=buffers)
    pairs = zip(inputs, buffers, strict=True)
    return [dataclasses.replace(value, buffer=buffer) for value, buffer in pairs]


def _with_constants(ledger: Ledger, jaxpr: Any) -> list[Buffer]:
    """Return the buffers of the arrays that the program closes over. Each device has them whole."""
    assert ledger.timeline is not None
    buffers = [
        Buffer(
            size=ledger.local_bytes(variable.aval, ((),) * _rank(variable)),
            kind=CONSTANTS,
            dtype=str(variable.aval.dtype),
            shape=variable.aval.shape,
        )
        for variable in constants(jaxpr)
    ]
    ledger.timeline.add(births=buffers)
    return buffers


def _even(ledger: Ledger, value: ShardedValue, aval: Any) -> ShardedValue:
    """Return an output as XLA returns it: a dim keeps as many of its first axes as divide it."""
    dims = []
    for size, axes in zip(aval.shape, value.dims, strict=True):
        kept = axes
        while size % shards(kept, ledger.sizes):
            kept = kept[:-1]
        if kept and kept != axes:
            # XLA gathers over the other mesh axes. Without the padding, the shards begin at other
            # rows, so XLA sends some rows too.
            ledger.doubt(axes, WalkLocation(), _UNEVEN)
        dims.append(kept)
    return dataclasses.replace(value, dims=tuple(dims))


def _given_out(
    ledger: Ledger, value: ShardedValue, goal: ShardedValue | None, aval: Any, *, to_host: bool
) -> ShardedValue:
    """Move an output to its sharding and its memory, and return it with its buffer.

    A slice or a copy to the host is made as soon as the value is computed. A gathered copy is made
    at the end of the program.
    """
    sent = len(ledger.events)
    if goal is None:
        goal = _even(ledger, value, aval)
    moved = ledger.move(value, aval, goal.dims, WalkLocation(), origins=goal.origins)
    before = value.buffer
    to_host = to_host and not on_host(aval)
    if moved.dims == value.dims and before is not None and not to_host:
        return dataclasses.replace(moved, buffer=before)
    assert ledger.timeline is not None
    if before is not None and len(ledger.events) > sent:
        before.operands = None  # a collective reads the value from memory
    buffer = Buffer(
        size=ledger.local_bytes(aval, moved.dims),
        kind=RESULTS,
        dtype=str(aval.dtype),
        shape=ledger.local_shape(aval, moved.dims),
        host=ledger.host_bytes(aval, moved.dims),
    )
    if to_host:
        ledger.cross_host_link(aval, moved if before is None else value, 1)
        buffer.size, buffer.host = 0, buffer.size
    early = before if before is not None and buffer.size <= before.size else None
    ledger.timeline.add([] if before is None else [before], [buffer], after=early)
    return dataclasses.replace(moved, buffer=buffer)


def walk_jaxpr(
    jaxpr: Any,
    inputs: Sequence[ShardedValue],
    sizes: Mapping[str, int],
    *,
    outputs: Sequence[ShardedValue | None] | None = None,
    target: Callable[[Any, Ledger], ShardedValue | None] = written_target,
    kinds: Sequence[str] | None = None,
    donated: Sequence[bool] | None = None,
    to_host: Sequence[bool] | None = None,
    renaming: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> Walked:
    """Walk a traced program and return what it sends and computes.

    Args:
      jaxpr: `jax.jit(f).trace(...).jaxpr.jaxpr`.
      inputs: One value per input of the jaxpr.
      sizes: Mesh axis -> size, in mesh order.
      outputs: Sharding that each output is moved to, or None if it stays as it is.
      target: Called with an equation and a ledger. Returns the sharding that a constraint moves its
        operand to.
      kinds: Memory category of each input. Defaults to `inputs` for all.
      donated: Per input, whether the program may overwrite it. By default, it may not.
      to_host: Per output, whether it is returned in the memory of the host. Defaults to none.
      renaming: Mesh axis in the `shard_map`s of the jaxpr -> the mesh axes that replace it.
    """
    ledger = Ledger(sizes, renaming)
    inputs = _with_memory(ledger, jaxpr.invars, inputs, kinds)
    closed_over = _with_constants(ledger, jaxpr)
    goals = outputs or [None] * len(jaxpr.outvars)
    wanted = [None if goal is None else goal.dims for goal in goals]
    masks = required_dims(
        jaxpr,
        equal_masks(jaxpr),
        wanted,
        sizes=ledger.sizes,
        target=_target_dims(lambda equation: target(equation, ledger), ledger.sizes),
    )
    # `required_dims` returns no origins. So each mesh axis gets its origin from the outputs and
    # inputs.
    ends = [value for value in (*goals, *inputs) if value is not None]
    walker = ShardingWalker(ledger, target, masks=masks, mask_origins=merged_origins(ends))
    results = walker.run(jaxpr, inputs, wanted=wanted)
    results = [
        _given_out(ledger, value, goal, variable.aval, to_host=hosted)
        for goal, value, variable, hosted in zip(
            goals, results, jaxpr.outvars, to_host or [False] * len(goals), strict=True
        )
    ]
    overwritten = donated or [False] * len(inputs)
    kept = [value.buffer for value, given in zip(inputs, overwritten, strict=True) if not given]
    kept += closed_over
    buffers = [value.buffer for value in results if value.buffer is not None]
    for buffer in buffers:
        # Outputs that are not inputs count as results.
        if buffer.kind == TEMPORARY:
            buffer.kind = RESULTS
    assert ledger.timeline is not None
    return Walked(
        memory=ledger.timeline.peak(buffers, kept=[each for each in kept if each is not None]),
        events=tuple(ledger.events),
        choices=tuple(ledger.choices),
        idle=tuple(ledger.idle),
        unknown=dict(ledger.unknown),
        work=ledger.work,
    )
