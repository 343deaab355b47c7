"""The rule of `shard_map`. Collectives inside it are equations of the jaxpr."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

from shardwright import _jax
from shardwright.plan.collectives.collective import Kind
from shardwright.plan.walk.buffers import add_local
from shardwright.plan.walk.control import UNKNOWN_RUNS
from shardwright.plan.walk.entries import TEMPORARY, Buffer
from shardwright.plan.walk.equations import (
    called_jaxpr,
    gather_key,
    holds_primitive,
    live_equations,
    nested_jaxprs,
    run_bodies,
)
from shardwright.plan.walk.events import Event, WalkLocation, Work
from shardwright.plan.walk.ledger import SHARED
from shardwright.plan.walk.step import PlanStep
from shardwright.plan.walk.values import (
    Dims,
    Origin,
    ShardedValue,
    axes_of,
    merged_origins,
    shards,
)
from shardwright.resolution.pipeline import STAGES
from shardwright.trees.tensors import whole_bytes

_KINDS: Final = {
    "psum": Kind.ALL_REDUCE,
    "psum2": Kind.ALL_REDUCE,
    "psum_invariant": Kind.ALL_REDUCE,
    "unreduced_psum": Kind.ALL_REDUCE,
    "pmax": Kind.ALL_REDUCE,
    "pmin": Kind.ALL_REDUCE,
    "all_gather": Kind.ALL_GATHER,
    "all_gather_invariant": Kind.ALL_GATHER,
    "all_gather_reduced": Kind.ALL_GATHER,
    "reduce_scatter": Kind.REDUCE_SCATTER,
    "unreduced_reduce_scatter": Kind.REDUCE_SCATTER,
    "all_to_all": Kind.ALL_TO_ALL,
    "ragged_all_to_all": Kind.RAGGED_ALL_TO_ALL,
    "ppermute": Kind.PERMUTE,
    "pbroadcast": Kind.BROADCAST,
}
# Primitives that occur only in a `shard_map` and send nothing.
_LOCAL: Final = frozenset(
    {
        *("axis_size", "pvary", "pcast", "preduced"),
        # In JAX 0.10, these two names end in `_p`.
        *("reduced_vary_cast", "reduced_vary_cast_p"),
        *("vary_unreduced_cast", "vary_unreduced_cast_p"),
        *("all_gather_done", "psum_done", "reduce_scatter_done"),
        *("all_to_all_done", "pbroadcast_done", "ppermute_done"),
    }
)
# In a `shard_map`, the FLOPs of these primitives are not counted. So they are listed as unknown.
_UNCOUNTED: Final = frozenset({"conv_general_dilated"})
_SUMS: Final = frozenset({"psum", "psum2", "psum_invariant"})
# Collectives that keep the shape of their operands, in a `shard_map` over some mesh axes.
SHAPE_KEPT: Final = tuple(
    name for name, kind in _KINDS.items() if kind in (Kind.ALL_REDUCE, Kind.PERMUTE)
)


def collective(step: PlanStep) -> list[ShardedValue]:
    """Follow a collective over Manual mesh axes. Other mesh axes may shard its operands."""
    axes = _mesh_axes(step.equation, step)
    values = [step.whole(at) for at in range(len(step.values))]
    for value, aval in zip(values, step.avals, strict=True):
        step.ledger.note(
            _KINDS[step.name],
            axes,
            step.ledger.local_bytes(aval, value.dims),
            step.location,
            dtype=str(aval.dtype),
            origins=value.origins,
        )
    return values


def shard_map(step: PlanStep) -> list[ShardedValue]:
    """Follow a `shard_map`: operands move to its input specs, then its body runs."""
    parameters, sizes = step.parameters, step.ledger.sizes
    manual = step.ledger.renamed(_jax.newly_manual_axes(parameters))
    # `_follow` notes the collectives of a body, but does not follow its values. In a pipeline and
    # its layers, use `_over_some`, which follows the values: carries are large, and only
    # `_over_some` counts each carry once. It has no rules for kernels and for some collectives, so
    # a body that has a kernel or a collective is not plain.
    body = getattr(parameters["jaxpr"], "jaxpr", parameters["jaxpr"])
    is_plain = step.ledger.in_stage and not any(
        holds_primitive(body, name) for name in (*_KINDS, "pallas_call")
    )
    if set(sizes).difference(manual) or STAGES in manual or is_plain:
        return _over_some(step, manual)
    for at, (spec, aval) in enumerate(zip(parameters["in_specs"], step.avals, strict=True)):
        dims = step.ledger.dims_of(spec, aval.ndim)
        step.ledger.move(
            step.values[at], aval, dims, step.location, origins=step.values[at].origins
        )
    origins = merged_origins(step.values)
    _follow(body, step, step.location, origins)
    timeline = step.ledger.timeline
    operands = [value.buffer for value in step.values]
    buffers = (
        [None] * len(step.results) if timeline is None else add_local(body, operands, timeline)
    )
    return [
        ShardedValue(dims=step.ledger.dims_of(spec, aval.ndim), origins=origins, buffer=buffer)
        for spec, aval, buffer in zip(parameters["out_specs"], step.results, buffers, strict=True)
    ]


def _over_some(step: PlanStep, manual: tuple[str, ...]) -> list[ShardedValue]:
    """Follow a `shard_map` over some mesh axes.

    The other mesh axes shard the values of its body as they do outside of a `shard_map`.
    """
    ledger, values = step.ledger, []
    for at, (spec, aval) in enumerate(zip(step.parameters["in_specs"], step.avals, strict=True)):
        rest = _without(step.values[at], manual)
        own = ledger.dims_of(spec, aval.ndim)
        dims = tuple((*first, *others) for first, others in zip(own, rest.dims, strict=True))
        moved = _without(step.move(at, dims), manual)
        values.append(dataclasses.replace(moved, buffer=_given(step, at, dims)))
    body = getattr(step.parameters["jaxpr"], "jaxpr", step.parameters["jaxpr"])
    with ledger.inside(manual):
        ends = step.walk(body, values)
        ends = [
            ledger.settle(end, variable.aval, step.location)
            for end, variable in zip(ends, body.outvars, strict=True)
        ]
    specs = zip(step.parameters["out_specs"], ends, step.results, strict=True)
    return [
        end.with_dims(
            (*first, *others)
            for first, others in zip(ledger.dims_of(spec, aval.ndim), end.dims, strict=True)
        )
        for spec, end, aval in specs
    ]


def _given(step: PlanStep, at: int, dims: Dims) -> Buffer | None:
    """Return the buffer of an operand in the body: a copy if it is in another sharding there."""
    buffer, timeline = step.values[at].buffer, step.ledger.timeline
    if buffer is None or timeline is None or step.values[at].dims == dims:
        return buffer
    copy = Buffer(size=step.ledger.local_bytes(step.avals[at], dims), kind=TEMPORARY)
    timeline.add([buffer], [copy])
    return copy


def _without(value: ShardedValue, axes: tuple[str, ...]) -> ShardedValue:
    return value.with_dims([axis for axis in dim if axis not in axes] for dim in value.dims)


def _follow(jaxpr: Any, step: PlanStep, location: WalkLocation, origins: dict[str, Origin]) -> None:
    """Note the collectives of a jaxpr whose shapes are local."""
    ledger = step.ledger
    gathers: dict[Any, tuple[Any, list[Event]]] = {}
    equal: dict[Any, Any] = {}
    for equation in live_equations(jaxpr):
        key = gather_key(equation, equal)
        if key is not None and key in gathers:
            # XLA removes common subexpressions, such as the second gather of a tied table.
            equal[equation.outvars[0]], sent = gathers[key]
            ledger.doubt({axis for event in sent for axis in event.mesh_axes}, location, SHARED)
            continue
        first = len(ledger.events)
        # An asynchronous collective is counted at the equation that starts it.
        name, parameters = equation.primitive.name.removesuffix("_start"), equation.params
        kind = _KINDS.get(name)
        if name in _SUMS and _is_scattered(equation, jaxpr, step):
            kind = Kind.REDUCE_SCATTER
        if kind is not None:
            mesh_axes = _mesh_axes(equation, step)
            devices = shards([axis for axis in mesh_axes if axis in ledger.mesh], ledger.mesh)
            for variable in equation.invars:
                dtype = variable.aval.dtype
                size = whole_bytes(variable.aval.size, dtype)
                size *= devices if kind is Kind.ALL_GATHER else 1
                ledger.note(kind, mesh_axes, size, location, dtype=str(dtype), origins=origins)
            if parameters.get("axis_index_groups") is not None:
                ledger.unknown[f"{name} (in groups)"] += 1
        elif name in ("dot_general", "ragged_dot_general"):
            _count(equation, step, location)
        # A kernel with a DMA may send bytes that no equation shows, so it is unknown.
        elif name == "pallas_call" and not _moves_data(equation.params["jaxpr"]):
            _count_kernel(equation, step, location)
        elif name == "while":
            before = len(ledger.events), ledger.work
            for loop in reversed(run_bodies(equation)):
                _follow(loop.jaxpr, step, location, origins)
            if (len(ledger.events), ledger.work) != before:
                ledger.unknown[UNKNOWN_RUNS] += 1
        elif name == "scan":
            (loop,) = run_bodies(equation)
            inner = dataclasses.replace(location, runs=location.runs * (loop.rounds or 0))
            _follow(loop.jaxpr, step, inner, origins)
        elif (body := called_jaxpr(equation)) is not None:
            _follow(body, step, location, origins)
        elif name == "cond":
            # Any branch may run, so note the collectives of all branches. Only one branch runs, so
            # `Work.either` does not add up their work.
            done, of_branches = ledger.work, []
            for branch in run_bodies(equation):
                ledger.work = Work()
                _follow(branch.jaxpr, step, dataclasses.replace(location, maybe=True), origins)
                of_branches.append(ledger.work)
            ledger.work = done + Work.either(of_branches)
        elif name in _UNCOUNTED or (name not in step.scope.known and name not in _LOCAL):
            ledger.unknown[name] += 1
        if key is not None:
            gathers[key] = equation.outvars[0], ledger.events[first:]


def _is_scattered(equation: Any, jaxpr: Any, step: PlanStep) -> bool:
    """Tell whether compilers turn an all-reduce of a `shard_map` into a reduce-scatter.

    They do if the `shard_map` returns the sum, and a later constraint shards the result over all
    mesh axes of the sum.
    """
    body = step.parameters["jaxpr"]
    results = equation.outvars
    # An inner jaxpr, such as a loop's body, has results that are not results of the `shard_map`.
    if jaxpr is not getattr(body, "jaxpr", body) or len(results) != 1:
        return False
    axes = _mesh_axes(equation, step)
    goals = [
        goal
        for variable, goal in zip(jaxpr.outvars, step.wanted, strict=True)
        if variable is results[0]
    ]
    return len(goals) == 1 and goals[0] is not None and axes_of(goals[0]) >= set(axes)


def _mesh_axes(equation: Any, step: PlanStep) -> tuple[str, ...]:
    axes = equation.params.get("axes", equation.params.get("axis_name"))
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    # An integer stands for a dim that `vmap` added. No mesh axis shards such a dim.
    return step.ledger.renamed(name for name in names if isinstance(name, str))


def _count(equation: Any, step: PlanStep, location: WalkLocation) -> None:
    """Count a matmul. In a ragged matmul, each row is multiplied by the matrix of its group."""
    left, right, *_ = (variable.aval for variable in equation.invars)
    result = equation.outvars[0].aval
    ragged = equation.params.get("ragged_dot_dimension_numbers")
    numbers = (
        equation.params["dimension_numbers"] if ragged is None else (ragged.dot_dimension_numbers)
    )
    (contracted, _), _ = numbers
    inner = math.prod(left.shape[dim] for dim in contracted)
    if ragged is not None and set(ragged.lhs_ragged_dimensions) & set(contracted):
        inner = -(-inner // result.shape[0])  # each row is contracted only once, for its group
    sizes = [whole_bytes(aval.size, aval.dtype) for aval in (left, right, result)]
    step.ledger.count_matmul(result.size * inner, sizes, location, dtypes=(left.dtype, right.dtype))


def _count_kernel(equation: Any, step: PlanStep, location: WalkLocation) -> None:
    """Count the matmuls of a Pallas kernel: those of one step of its grid, times all steps.

    A kernel has branches that skip a block, or compute it with or without a mask. So at most one
    branch of its body runs in a step. The walk counts the branch with the most operations.
    """
    parameters, variables = equation.params, (*equation.invars, *equation.outvars)
    # A dynamic size of a grid is unknown before the program runs, and counts as one step.
    steps = math.prod(size for size in parameters["grid_mapping"].grid if isinstance(size, int))
    always, most = _matmuls_of(parameters["jaxpr"])
    sizes = [whole_bytes(each.aval.size, each.aval.dtype) for each in variables]
    runs = 2 * steps * location.runs
    step.ledger.work += Work(
        flops=(always + most) * runs,
        min_flops=always * runs,
        matmul_bytes=sum(sizes) * location.runs,
    )


def _matmuls_of(jaxpr: Any) -> tuple[int, int]:
    """Return a kernel's multiplications outside of branches, and those of its largest branch.

    The counts are for one block, because the jaxpr of a kernel has the shapes of blocks.
    """
    always, most = 0, 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            always += equation.outvars[0].aval.size * math.prod(shape[dim] for dim in contracted)
        elif equation.primitive.name == "cond":
            most = max(most, *(sum(_matmuls_of(branch.jaxpr)) for branch in run_bodies(equation)))
        elif (body := called_jaxpr(equation)) is not None:
            inner = _matmuls_of(body)
            always, most = always + inner[0], max(most, inner[1])
    return always, most


def _moves_data(jaxpr: Any) -> bool:
    """Tell whether a kernel copies data by itself, maybe to other devices."""
    return any(
        equation.primitive.name == "dma_start" or any(map(_moves_data, nested_jaxprs(equation)))
        for equation in jaxpr.eqns
    )
