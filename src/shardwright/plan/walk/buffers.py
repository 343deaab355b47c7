"""Create the buffers of an equation's results, and add the equation to the timeline."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
from jax.extend.core import Literal

from shardwright import _jax
from shardwright.dims.bodies import Runs, bodies
from shardwright.dims.primitives import (
    CONSTRAINTS,
    CUTS,
    ELEMENTWISE,
    NAMES,
    REDUCTIONS,
    SCATTERS,
)
from shardwright.plan.walk.entries import LOOPS, TEMPORARY, Buffer, Padded, Peak
from shardwright.plan.walk.equations import called_jaxpr, for_gpus, live_equations, run_bodies
from shardwright.plan.walk.fusion import roots
from shardwright.plan.walk.liveness import Timeline
from shardwright.plan.walk.padding import (
    is_cut,
    keep_copies,
    padded_copies,
    turned_copies,
    with_one_row,
)
from shardwright.plan.walk.step import PlanStep
from shardwright.plan.walk.values import ShardedValue, axes_of, local_elements, on_host
from shardwright.trees.tensors import whole_bytes

# Primitives that a compiler fuses into all their uses.
_CHEAP: Final = frozenset(
    {
        *("convert_element_type", "reshape", "squeeze", "expand_dims", "transpose"),
        *("broadcast_in_dim", "copy", "copy_p", "stop_gradient", "neg", "reduce_precision"),
    }
)
# Primitives that a compiler fuses into their use if there is only one use.
_FUSED: Final = (ELEMENTWISE | _CHEAP | (CUTS - {"sort", "top_k"})) - {"device_put"}
# Primitives that are so expensive that XLA does not always compute them twice to save memory.
_COSTLY: Final = frozenset(
    {"exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "erf", "pow"}
)
_WRITES: Final = SCATTERS | {"dynamic_update_slice"}
_LOOPS: Final = frozenset({"scan", "while"})
_READ_FROM_MEMORY: Final = _LOOPS | {"pallas_call"}  # no operand is fused into these primitives
_PARTS: Final = 8  # parts of a result that a collective matmul holds: four for each direction
_HELD: Final = 4  # at least this many of these parts are in memory
# A collective matmul has at least this many operations for each byte of a part. The bound was the
# same for v5e and v5p, for rings of 4, 8 and 16 devices, for both float types and for all sizes.
_MIN_FLOPS: Final = 4216
_PAIR: Final = 2  # two devices never run a collective matmul
_ANGLES: Final = frozenset({"sin", "cos"})


def with_buffers(step: PlanStep, results: Iterable[ShardedValue]) -> list[ShardedValue]:
    """Return the results of an equation with their buffers. Add the equation to the timeline."""
    values, ledger = list(results), step.ledger
    if ledger.timeline is None or step.name == "shard_map":
        return values  # the equations of a `shard_map` are in the timeline already
    if step.name in _ANGLES:
        size = ledger.local_bytes(step.results[0], values[0].dims)
        read = [value.buffer for value in step.values if value.buffer is not None]
        buffer = None if values[0].free else ledger.timeline.angle(step.name, size, read)
        return [dataclasses.replace(values[0], buffer=buffer)]
    if _changes_nothing(step, values):
        pairs = zip(values, step.values, strict=False)
        return [dataclasses.replace(value, buffer=old.buffer) for value, old in pairs]
    given = [value.buffer for value in step.values]
    if step.name == "gather":
        # Copy the table before the operands are read: the copy replaces the stored table.
        given[0] = _rows_of_table(step)
    operands = tuple(each for each in given if each is not None)
    _mark_reduced(step.name, operands)
    _mark_turned(step.equation, operands)
    if step.name == "scan" and ledger.tiled:
        operands += tuple(_copies(step))
    births: list[Buffer | None] = [
        None
        # Kernels compute constants and iotas themselves, so these have no buffer.
        if value.free or _is_written_carry(step)
        else _labeled(
            _born(
                step.name,
                ledger.local_bytes(aval, value.dims),
                operands,
                # An all-reduce returns the whole sum, so the whole sum is in memory.
                owed=bool(value.owed and (later is None or value.owed & axes_of(later))),
                fused=_is_one_hot(step),
            ),
            aval.dtype,
            ledger.local_shape(aval, value.dims),
            step.location.source,
        )
        for value, aval, later in zip(values, step.results, step.wanted, strict=True)
    ]
    if step.name == "dynamic_update_slice" and step.values[0].free and births[0] is not None:
        # If XLA pads a slice's gradient in the kernel that adds it, the gradient takes no memory.
        births[0].min_bytes = 0
    if step.name == "dot_general":
        single = with_one_row(step.equation, [{0}, {1}])
        keep_copies((step.values[at].buffer for (at,) in single), ledger.timeline)
        shapes = [*map(ledger.local_shape, step.avals, (value.dims for value in step.values))]
        _mark_row(step.equation, births[0], shapes, tiled=ledger.tiled)
        _mark_summed(step)
    copies = padded_copies(step.equation, births, ledger.timeline)
    copies += turned_copies(step.name, births)
    held, sent = _hold_parts(step, births, _parts(step, values))
    if step.name == "dot_general" and step.location.recomputed:
        # With remat, the backward pass may run in another order; see `_REMAT` of `liveness`.
        ledger.timeline.recomputes = True
    if step.name == "scan":
        _shard_sums(step, births)
    in_stage = step.name == "scan" and ledger.in_stage
    carries = births[: bodies(step.equation)[0].carried] if in_stage else []
    _unadded(step, values, births)
    _mark_hosted(step, values, births, operands)
    ledger.timeline.add(
        operands,
        [birth for birth in (*births, *copies, *sent) if birth is not None],
        in_place=_overwritten(step.equation, [value.buffer for value in step.values]),
        inner=ledger.inner,
        loop=step.name in _LOOPS,
        matmul=step.name == "dot_general",
        # The result of a constraint is the moved operand, which must not count twice.
        moved=0 if step.name in CONSTRAINTS else ledger.moved,
        parts=held,
        # XLA may copy an argument from the host at the start, or when it is first read (measured
        # for the optimizer state of an 8B step on v5p: both happen).
        early=step.name == "device_put"
        and any(each.host and _is_argument(each) for each in operands),
        carries=[birth for birth in carries if birth is not None],
        after=_whole_sum(step, values),
    )
    born = zip(values, births, strict=True)
    return [dataclasses.replace(value, buffer=buffer) for value, buffer in born]


def _hold_parts(
    step: PlanStep, births: Sequence[Buffer | None], parts: int
) -> tuple[int, list[Buffer]]:
    """Shrink the buffer of a sum to the parts that are in memory after the matmul.

    A collective matmul holds parts of the sum in place of the whole sum. As measured, these are at
    least four parts on a ring of eight devices, and three on a ring of four. While the matmul runs,
    it holds at most eight parts on a ring of eight. On a ring of four it holds at most six: two
    that it computes, two that it receives and two that it adds. On a ring of eight, the matmul is
    a loop, for which XLA copies the left operand.

    Returns:
      The fewest bytes of parts, and the buffers that are in memory only while the matmul runs.
    """
    # An equation that is not a matmul, such as a print, may have no results.
    if step.name != "dot_general" or not step.ledger.tiled or (total := births[0]) is None:
        return 0, []
    if not parts:
        if step.wanted[0] is not None:
            total.min_bytes = total.size  # a reduce-scatter reads the whole sum
        return 0, []
    part, whole = parts // _PARTS, total.size
    loop = whole > _HELD * part
    held = (_HELD if loop else _HELD - 1) * part
    total.size = max(whole - parts, min(whole, held))
    total.dtype, total.shape = "", ()  # a few parts have no single shape
    sizes = [max(parts if loop else 2 * held, whole) - total.size]
    if loop:
        sizes.append(step.ledger.local_bytes(step.avals[0], step.values[0].dims))
    return held, [Buffer(size=size, kind=TEMPORARY) for size in sizes]


def _is_argument(buffer: Buffer) -> bool:
    return buffer.kind not in (TEMPORARY, LOOPS)


def _labeled(buffer: Buffer, dtype: Any, shape: tuple[int, ...], source: str) -> Buffer:
    buffer.dtype, buffer.shape, buffer.source = str(dtype), shape, source
    return buffer


def _mark_hosted(
    step: PlanStep,
    results: Sequence[ShardedValue],
    births: Sequence[Buffer | None],
    operands: Sequence[Buffer],
) -> None:
    """Note the bytes that results take in the memory of the host."""
    for birth, value, aval in zip(births, results, step.results, strict=True):
        if birth is not None:
            birth.host = step.ledger.host_bytes(aval, value.dims)
    if _is_written_carry(step):
        for each in {root for operand in operands for root in (operand, *roots(operand))}:
            if not _is_argument(each):
                each.host = 0  # the device writes the value straight into the carry


def _is_written_carry(step: PlanStep) -> bool:
    """Tell whether an equation writes a part of a loop's carry.

    XLA writes such a part in place. The carry is counted outside of the loop. So neither the carry
    nor the result has a buffer here.
    """
    return step.name in _WRITES and not step.values[0].free and step.values[0].buffer is None


def _mark_reduced(name: str, operands: Iterable[Buffer]) -> None:
    if name in REDUCTIONS:
        for operand in operands:
            operand.reduced = True


def _mark_turned(equation: Any, operands: Iterable[Buffer]) -> None:
    """Mark a matmul's result if a transpose moves its last dim: no kernel has its whole rows.

    Grouped queries are an example: `bqgrk,bsgk->bgrqs` is a matmul `[b, g, s, q, r]`, transposed.
    """
    if equation.primitive.name == "transpose":
        order = equation.params["permutation"]
        if order and order[-1] != len(order) - 1:
            for root in (each for operand in operands for each in roots(operand)):
                # Roots may also be arguments. Only matmuls have a row (see `_mark_row`), so
                # arguments are not marked.
                root.turned = root.row > 0


def _is_one_hot(step: PlanStep) -> bool:
    """Tell whether a scatter writes one element into each row of a constant.

    Instead of this scatter, XLA compares positions. An example is the derivative of picking the
    logit of each label.
    """
    if step.name not in SCATTERS or not step.values[0].free:
        return False
    numbers, update = step.parameters["dimension_numbers"], step.avals[2]
    if len(numbers.scatter_dims_to_operand_dims) > 1 or numbers.update_window_dims:
        return False
    return bool(update.size * step.avals[0].shape[-1] == step.avals[0].size)


def _shard_sums(step: PlanStep, births: Sequence[Buffer | None]) -> None:
    """Note the fewest bytes of each carry of a scan.

    If a carry starts as a constant and is sharded after the loop, XLA may also shard it in the
    loop. So the fewest bytes are those of one shard. The sum of the gradients of microbatches is an
    example.
    """
    constants, carries, _ = _jax.scan_parts(step.parameters)
    starts = step.values[constants : constants + carries]
    for start, later, aval, birth in zip(starts, step.wanted, step.results, births, strict=False):
        if start.free and later is not None and birth is not None:
            birth.min_bytes = min(birth.min_bytes, step.ledger.local_bytes(aval, later))


def _parts(step: PlanStep, results: Sequence[ShardedValue]) -> int:
    """Return the bytes of the parts that a collective matmul holds, or 0 for another equation.

    Compilers for TPUs run a matmul and the reduce-scatter of its result as one loop (collective
    matmul) if the matmul takes long enough, see `_MIN_FLOPS`. The loop sends both ways along the
    ring. For each direction, the loop holds four parts of the result: two that it computes, one
    that it sends and one that it receives. The parts are added where the result is read, so some of
    them are still in memory during the next matmul, see `_hold_parts`.
    """
    if step.name != "dot_general" or step.wanted[0] is None or not step.ledger.tiled:
        return 0
    ring = results[0].owed & axes_of(step.wanted[0])
    devices = math.prod(step.ledger.sizes[axis] for axis in ring)
    (contracted, _), _ = step.parameters["dimension_numbers"]
    shape = step.ledger.local_shape(step.avals[0], step.values[0].dims)
    flops = 2 * math.prod(shape[at] for at in contracted)  # for each element of the result
    if devices <= _PAIR or devices * flops < _MIN_FLOPS * step.results[0].dtype.itemsize:
        return 0
    return _PARTS * step.ledger.local_bytes(step.results[0], step.wanted[0])


def _whole_sum(step: PlanStep, results: Sequence[ShardedValue]) -> Buffer | None:
    """Return the operand of a reduce-scatter, or None if a collective matmul makes the operand.

    If no collective matmul makes the operand, XLA's schedulers run the reduce-scatter as soon as
    its operand is computed, since this frees memory.
    """
    if step.name not in CONSTRAINTS or not step.ledger.tiled:
        return None
    total = step.values[0].buffer
    if total is None or not step.values[0].owed & results[0].mesh_axes:
        return None
    return total if all(each.min_bytes for each in roots(total)) else None


def _unadded(
    step: PlanStep, results: Sequence[ShardedValue], births: Sequence[Buffer | None]
) -> None:
    """Count the parts of a reduce-scatter's result. Compilers add them where the result is read."""
    if step.name not in CONSTRAINTS or births[0] is None or not step.ledger.tiled:
        return
    before, result, birth = step.values[0], results[0], births[0]
    if not before.owed & result.mesh_axes:
        return
    total = _whole_sum(step, results)
    if total is None:
        # If the sum is converted to a wider type, its parts still have the narrower type.
        dtype = before.widened_from or step.results[0].dtype
        elements = local_elements(step.results[0].shape, result.dims, step.ledger.sizes)
        extra = _PARTS // 2 * whole_bytes(elements, np.dtype(dtype)) - birth.size
    elif is_cut(total.shape):
        return
    else:
        # XLA all-reduces the sum right before the equation that reads a slice of it.
        extra = 2 * total.size - birth.size
    copy, timeline = Buffer(size=extra, kind=TEMPORARY), step.ledger.timeline
    assert timeline is not None
    timeline.padded[birth] = Padded(buffer=copy, late=False)
    timeline.add([], [copy], after=birth)


def _mark_row(
    equation: Any,
    result: Buffer | None,
    shapes: Sequence[tuple[int, ...]],
    *,
    tiled: bool = False,
) -> None:
    """Note the size of the matmul operand that has the last dim of the result."""
    if result is None:
        return
    contracted, batch = (dims[1] for dims in equation.params["dimension_numbers"])
    # The result of a `dot_general` ends with the free dims of the right operand. If that operand
    # has none, the last dim is from the left one.
    at = 1 if len(shapes[1]) > len(contracted) + len(batch) else 0
    batch = equation.params["dimension_numbers"][1][at]
    size = math.prod(size for dim, size in enumerate(shapes[at]) if dim not in batch)
    result.row = whole_bytes(size, equation.invars[at].aval.dtype)
    result.weight = size if tiled else 0


def _mark_summed(step: PlanStep) -> None:
    """Unmark the matmuls whose last dim a matmul sums over: only their rows may be made inside it.

    A TPU runs `g @ w.T` inside the kernel of `x.T @ (g @ w.T)`, which sums over rows.
    """
    (contracted, _) = step.parameters["dimension_numbers"]
    for value, aval, dims in zip(step.values, step.avals, contracted, strict=True):
        if value.buffer is not None and aval.ndim - 1 in dims:
            for root in roots(value.buffer):
                root.weight = 0


def _copies(step: PlanStep) -> list[Buffer]:
    """Return the copies of stacked weights that a scan reads, and add new ones to the timeline.

    Compilers for TPUs copy such a stack to another layout before the first loop that multiplies by
    it. Later loops read the same copy.
    """
    ledger = step.ledger
    assert ledger.timeline is not None
    copied = _matmul_inputs(bodies(step.equation)[0].jaxpr, _split, for_gpus())
    copies = []
    for at, value in enumerate(step.values):
        weight = value.buffer
        # Only arguments have a fixed layout. XLA lays other arrays out as their readers need.
        if weight is None or not _is_argument(weight):
            continue
        if at in copied and weight not in ledger.copies:
            ledger.copies[weight] = Buffer(size=weight.size, kind=TEMPORARY)
            ledger.timeline.add([weight], [ledger.copies[weight]])
        if weight in ledger.copies:
            copies.append(ledger.copies[weight])
    return copies


def _rows_of_table(step: PlanStep) -> Buffer | None:
    """Return the table of a lookup, or a copy in row order if the table is stored by columns.

    A copy is added to the timeline. Later lookups read the same copy.
    """
    ledger, table = step.ledger, step.values[0].buffer
    assert ledger.timeline is not None
    if table is None or not table.across:
        return table
    if table not in ledger.copies:
        ledger.copies[table] = Buffer(size=table.size, kind=TEMPORARY, min_bytes=table.size)
        ledger.timeline.add([table], [ledger.copies[table]])
    return ledger.copies[table]


def _split(equation: Any, read: Sequence[set[int]]) -> list[set[int]]:
    """Return the items of `read` for operands of which the last dim and another dim are free.

    A free dim is neither contracted nor a batch dim. Dims of size 1 do not count.

    Args:
      equation: A matmul.
      read: For each operand, the positions of the jaxpr's inputs that it is computed from.
    """
    found = []
    for each, variable, *dims in zip(
        read, equation.invars, *equation.params["dimension_numbers"], strict=True
    ):
        shape = variable.aval.shape
        kept = [at for at in range(len(shape)) if at not in (*dims[0], *dims[1])]
        if len(shape) - 1 in kept and sum(shape[at] > 1 for at in kept) > 1:
            found.append(each)
    return found


def _changes_nothing(step: PlanStep, values: Sequence[ShardedValue]) -> bool:
    if step.name in NAMES:
        return True
    is_move = step.name == "device_put" and len(values) == 1
    if step.name not in CONSTRAINTS and not is_move:
        return False
    if on_host(step.avals[0]) != on_host(step.results[0]):
        return False
    before = step.values[0]
    # A value that every device can make (`free`) has no buffer that the result could overwrite.
    return before.dims == values[0].dims and not before.free


def _born(
    name: str,
    size: int,
    operands: tuple[Buffer, ...],
    *,
    owed: bool = False,
    fused: bool = False,
) -> Buffer:
    """Return the buffer of a result.

    Args:
      name: The primitive.
      size: Bytes of the result.
      operands: Buffers that it is computed from.
      owed: Whether the result is a partial sum. A compiler may add it up over devices part by part.
      fused: Whether a compiler may fuse the result, even if the primitive is not in `_FUSED`.
    """
    fused = fused or name in _FUSED
    return Buffer(
        size=size,
        kind=LOOPS if name in _LOOPS else TEMPORARY,
        operands=operands if fused else None,
        cheap=name in _CHEAP,
        min_bytes=0 if owed else size,
        across=name in CONSTRAINTS and any(each.across for each in operands),
        # Computing a fused chain again repeats the exponential inside it.
        costly=name in _COSTLY or (fused and any(each.costly for each in operands)),
    )


def _overwritten(equation: Any, operands: Sequence[Buffer | None]) -> list[Buffer]:
    """Return the operands whose memory the result may take."""
    name = equation.primitive.name
    chosen: Sequence[Buffer | None] = ()
    if name in ELEMENTWISE and name != "device_put":
        chosen = operands
    elif name in _WRITES:
        chosen = operands[:1]
    elif name == "scan":
        (loop,) = bodies(equation)
        # A loop updates its carries in place, so it overwrites their first values.
        chosen = operands[loop.fixed : loop.fixed + loop.carried]
    elif name == "pallas_call":
        chosen = [operands[at] for at, _ in equation.params["input_output_aliases"]]
    return [buffer for buffer in chosen if buffer is not None]


def add_local(
    jaxpr: Any, operands: Sequence[Buffer | None], timeline: Timeline
) -> list[Buffer | None]:
    """Add a jaxpr whose shapes are local, such as the body of a `shard_map`, to a timeline.

    If a matmul needs the batch dims of an input first, and other dims are first, a compiler copies
    the input.

    Args:
      jaxpr: The equations.
      operands: The buffer of each input, or None if it takes no memory.
      timeline: Where the equations are added.

    Returns:
      The buffer of each result, or None if it takes no memory.
    """
    batched = _matmul_inputs(jaxpr, _relaid, for_gpus())
    single = _matmul_inputs(jaxpr, with_one_row, for_gpus())
    keep_copies((operands[at] for at in single), timeline)
    inputs = list(operands)
    for at, variable in enumerate(jaxpr.invars):
        if at in batched:
            copy = Buffer(size=_bytes(variable.aval), kind=TEMPORARY)
            timeline.add([each for each in [operands[at]] if each is not None], [copy])
            inputs[at] = copy
    return _add_local(jaxpr, inputs, timeline)


# A search walks one trace dozens of times, and only the sizes of shards differ.
@functools.lru_cache(maxsize=1024)
def _matmul_inputs(
    jaxpr: Any, choose: Callable[[Any, Sequence[set[int]]], list[set[int]]], for_gpus: bool
) -> frozenset[int]:
    """Return the positions of the inputs that some operands of matmuls are computed from.

    Args:
      jaxpr: The equations.
      choose: Chooses these operands of one matmul. Its arguments are the matmul, and a list that
        has, for each operand, the positions of the inputs that the operand is computed from. It
        returns the items of this list for the operands that it chooses.
      for_gpus: Whether the walk is for GPUs, which decides the branches that run. `for_gpus` is a
        part of the key of the cache.
    """
    sources: dict[Any, set[int]] = {variable: {at} for at, variable in enumerate(jaxpr.invars)}
    found: set[int] = set()
    for equation in live_equations(jaxpr):
        name, bodies = equation.primitive.name, _bodies(equation)
        read: list[set[int]] = [
            set() if isinstance(variable, Literal) else sources.get(variable, set())
            for variable in equation.invars
        ]
        if name == "dot_general":
            found.update(*choose(equation, read))
            continue
        for body in bodies:
            # A `cond` has one operand more than its branches: the index of the branch.
            given = read[len(read) - len(body.invars) :]
            found.update(*(given[at] for at in _matmul_inputs(body, choose, for_gpus)))
        # A loop returns new arrays. So a matmul that reads them does not read an input directly.
        if name in _FUSED or name in CONSTRAINTS or (bodies and name not in _LOOPS):
            # Keep only operands that are not much smaller than the largest result.
            largest = max(_bytes(variable.aval) for variable in equation.outvars)
            pairs = zip(read, equation.invars, strict=True)
            behind = [each for each, operand in pairs if 4 * _bytes(operand.aval) >= largest]
            sources.update(dict.fromkeys(equation.outvars, set[int]().union(*behind)))
    return frozenset(found)


def _relaid(equation: Any, read: Sequence[set[int]]) -> list[set[int]]:
    """Return the items of `read` for operands whose batch dims do not come first; see `_split`."""
    batch = equation.params["dimension_numbers"][1]
    found = []
    for each, variable, dims in zip(read, equation.invars, batch, strict=True):
        # Dims of size 1 do not change the order of elements in memory.
        long = [at for at, size in enumerate(variable.aval.shape) if size > 1]
        own = {at for at in dims if at in long}
        if own != set(long[: len(own)]):
            found.append(each)
    return found


# Local shapes do not depend on the candidate of a search, so all candidates share these peaks.
@functools.lru_cache(maxsize=256)
def _local_peak(jaxpr: Any, for_gpus: bool) -> Peak:
    del for_gpus  # part of the key: `for_gpus` decides padding, and which branches run
    timeline = Timeline()
    results = _add_local(jaxpr, [None] * len(jaxpr.invars), timeline)
    return timeline.peak([each for each in results if each is not None], within=True)


def _add_local(
    jaxpr: Any, inputs: Sequence[Buffer | None], timeline: Timeline
) -> list[Buffer | None]:
    """Add equations whose shapes are local, and return the buffers of the results."""
    held: dict[Any, Buffer | None] = dict(zip(jaxpr.invars, inputs, strict=True))

    def buffer(variable: Any) -> Buffer | None:
        return None if isinstance(variable, Literal) else held.get(variable)

    for equation in live_equations(jaxpr):
        name, called = equation.primitive.name, called_jaxpr(equation)
        operands = [buffer(variable) for variable in equation.invars]
        if called is not None:
            given = operands[len(operands) - len(called.invars) :]
            results = _add_local(called, given, timeline)
            held.update(zip(equation.outvars, results, strict=True))
            continue
        used = tuple(each for each in operands if each is not None)
        _mark_reduced(name, used)
        source = _jax.source_line(equation) or ""
        births = [
            _labeled(
                _born(name, _bytes(aval), used), getattr(aval, "dtype", ""), aval.shape, source
            )
            # The result of an asynchronous collective is a future, whose `inner_aval` is the array.
            for aval in (getattr(each.aval, "inner_aval", each.aval) for each in equation.outvars)
        ]
        held.update(zip(equation.outvars, births, strict=True))
        if name == "dot_general":
            _mark_row(equation, births[0], [variable.aval.shape for variable in equation.invars])
        timeline.add(
            used,
            [*births, *padded_copies(equation, births, timeline)],
            in_place=_overwritten(equation, operands),
            inner=Peak.most(_local_peak(body, for_gpus()) for body in _bodies(equation)),
            loop=name in _READ_FROM_MEMORY,
            matmul=name == "dot_general",
        )
    return [buffer(variable) for variable in jaxpr.outvars]


def _bytes(aval: Any) -> int:
    # A token, which orders effects, has no element type.
    return whole_bytes(aval.size, aval.dtype) if hasattr(aval, "dtype") else 0


def _bodies(equation: Any) -> list[Any]:
    """Return the jaxprs that a loop, a `cond` or a call runs, without conditions of `while`."""
    found = run_bodies(equation)
    return [body.jaxpr for body in found if body.runs is not Runs.BEFORE_EACH_ROUND]
