"""Create the buffers of an equation's results, and add the equation to the timeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from jax.extend.core import Literal

from shardwright import _jax
from shardwright.dims.bodies import Runs, bodies
from shardwright.dims.primitives import CONSTRAINTS, ELEMENTWISE, NAMES, REDUCTIONS, SCATTERS
from shardwright.plan.walk.equations import called_jaxpr, live_equations, run_bodies
from shardwright.plan.walk.liveness import LOOPS, TEMPORARY, Buffer, Peak, Timeline
from shardwright.plan.walk.padding import keep_copies, padded_copies, with_one_row
from shardwright.plan.walk.step import Step
from shardwright.plan.walk.values import Value
from shardwright.trees.tensors import whole_bytes

# A compiler fuses these into all their uses.
_CHEAP: Final = frozenset(
    {
        *("convert_element_type", "reshape", "squeeze", "expand_dims", "transpose"),
        *("broadcast_in_dim", "copy", "copy_p", "stop_gradient", "neg", "reduce_precision"),
    }
)
# A compiler fuses these into their use if there is only one.
_FUSED: Final = (
    ELEMENTWISE
    | _CHEAP
    | {"slice", "pad", "concatenate", "rev", "dynamic_slice", "split", "stack", "tile"}
)
_WRITES: Final = SCATTERS | {"dynamic_update_slice"}
_LOOPS: Final = frozenset({"scan", "while"})
_READ_FROM_MEMORY: Final = _LOOPS | {"pallas_call"}  # no operand is fused into these
_ANGLES: Final = frozenset({"sin", "cos"})


def with_buffers(step: Step, results: Iterable[Value]) -> list[Value]:
    """Return the results of an equation with their buffers, and add it to the timeline."""
    values, ledger = list(results), step.ledger
    if ledger.timeline is None or step.name == "shard_map":
        return values  # the equations of a `shard_map` are in the timeline already
    if step.name in _ANGLES:
        return [dataclasses.replace(values[0], buffer=_angle(step, values[0]))]
    if _changes_nothing(step, values):
        pairs = zip(values, step.values, strict=False)
        return [dataclasses.replace(value, buffer=old.buffer) for value, old in pairs]
    operands = tuple(value.buffer for value in step.values if value.buffer is not None)
    _mark_reduced(step.name, operands)
    if step.name == "scan":
        operands += tuple(_copies(step))
    births: list[Buffer | None] = [
        None
        if value.free
        else _labeled(
            _born(
                step.name,
                ledger.local_bytes(aval, value.dims),
                operands,
                owed=bool(value.owed),
            ),
            aval.dtype,
            ledger.local_shape(aval, value.dims),
            step.site.source,
        )
        for value, aval in zip(values, step.results, strict=True)
    ]
    if step.name == "dot_general":
        single = with_one_row(step.equation, [{0}, {1}])
        keep_copies((step.values[at].buffer for (at,) in single), ledger.timeline)
    copies = padded_copies(step.equation, births, ledger.timeline)
    ledger.timeline.add(
        operands,
        [birth for birth in (*births, *copies) if birth is not None],
        in_place=_overwritten(step.equation, [value.buffer for value in step.values]),
        inner=ledger.inner,
        loop=step.name in _LOOPS,
        # The result of a constraint is the moved operand, which must not count twice.
        moved=0 if step.name in CONSTRAINTS else ledger.moved,
    )
    pairs_of = zip(values, births, strict=True)
    return [dataclasses.replace(value, buffer=birth) for value, birth in pairs_of]


def _labeled(buffer: Buffer, dtype: Any, shape: tuple[int, ...], source: str) -> Buffer:
    buffer.dtype, buffer.shape, buffer.source = str(dtype), shape, source
    return buffer


def _mark_reduced(name: str, operands: Iterable[Buffer]) -> None:
    if name in REDUCTIONS:
        for operand in operands:
            operand.reduced = True


def _angle(step: Step, result: Value) -> Buffer | None:
    """Return the buffer of a sine or cosine, or None if it takes no memory."""
    assert step.ledger.timeline is not None
    if result.free:
        return None
    size = step.ledger.local_bytes(step.results[0], result.dims)
    operands = [value.buffer for value in step.values if value.buffer is not None]
    return step.ledger.timeline.angle(step.name, size, operands)


def _copies(step: Step) -> list[Buffer]:
    """Return the copies of stacked weights that a scan reads, and add new ones to the timeline.

    Compilers for TPUs copy such a stack to another layout before the first loop that multiplies by
    it. Later loops read the same copy.
    """
    ledger = step.ledger
    assert ledger.timeline is not None
    copied = _split_weights(bodies(step.equation)[0].jaxpr)
    copies = []
    for at, value in enumerate(step.values):
        weight = value.buffer
        if weight is None or weight.kind in (TEMPORARY, LOOPS):
            continue
        if at in copied and weight not in ledger.copies:
            ledger.copies[weight] = Buffer(size=weight.size, kind=TEMPORARY)
            ledger.timeline.add([weight], [ledger.copies[weight]])
        if weight in ledger.copies:
            copies.append(ledger.copies[weight])
    return copies


def _split_weights(jaxpr: Any) -> set[int]:
    """Return the positions of the inputs of which a product keeps the last dim and another one."""
    return _product_inputs(jaxpr, _split)


def _split(equation: Any, read: Sequence[set[int]]) -> list[set[int]]:
    """Return the inputs behind those operands of which a product keeps the last dim and another.

    Args:
      equation: A product.
      read: For each operand, the positions of the inputs that it is computed from.
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


def _changes_nothing(step: Step, values: Sequence[Value]) -> bool:
    if step.name in NAMES:
        return True
    if step.name not in CONSTRAINTS:
        return False
    before = step.values[0]
    return before.dims == values[0].dims and not before.free


def _born(name: str, size: int, operands: tuple[Buffer, ...], *, owed: bool = False) -> Buffer:
    """Return the buffer of a result.

    Args:
      name: The primitive.
      size: Bytes of the result.
      operands: What it is computed from.
      owed: Whether the result is a partial sum. A compiler may add it up over devices part by part.
    """
    least = 0 if owed or name in _LOOPS else size
    if name in CONSTRAINTS:  # a compiler may gather the result part by part
        least = min([size, *(each.size if each.operands else each.least for each in operands)])
    return Buffer(
        size=size,
        kind=LOOPS if name in _LOOPS else TEMPORARY,
        operands=operands if name in _FUSED else None,
        cheap=name in _CHEAP,
        least=least,
    )


def _overwritten(equation: Any, operands: Sequence[Buffer | None]) -> list[Buffer]:
    """Return the operands whose memory the result may take."""
    name = equation.primitive.name
    chosen: Sequence[Buffer | None] = ()
    if name in ELEMENTWISE:
        chosen = operands
    elif name in _WRITES:
        chosen = operands[:1]
    elif name == "scan":
        (loop,) = bodies(equation)
        chosen = operands[loop.fixed : loop.fixed + loop.carried]
    elif name == "pallas_call":
        chosen = [operands[at] for at, _ in equation.params["input_output_aliases"]]
    return [buffer for buffer in chosen if buffer is not None]


def add_local(
    jaxpr: Any, operands: Sequence[Buffer | None], timeline: Timeline
) -> list[Buffer | None]:
    """Add a jaxpr whose shapes are local, such as the body of a `shard_map`, to a timeline.

    A compiler copies an input if a product needs its batch dims first and they are not first.

    Args:
      jaxpr: The equations.
      operands: The buffer of each input, or None if it takes no memory.
      timeline: Where the equations are added.

    Returns:
      The buffer of each result, or None if it takes no memory.
    """
    batched = _batched(jaxpr)
    keep_copies((operands[at] for at in _product_inputs(jaxpr, with_one_row)), timeline)
    inputs = list(operands)
    for at, variable in enumerate(jaxpr.invars):
        if at in batched:
            copy = Buffer(size=_bytes(variable.aval), kind=TEMPORARY)
            timeline.add([each for each in [operands[at]] if each is not None], [copy])
            inputs[at] = copy
    return _add_local(jaxpr, inputs, timeline)


def _batched(jaxpr: Any) -> set[int]:
    """Return the positions of the inputs of products whose batch dims do not come first."""
    return _product_inputs(jaxpr, _relaid)


def _product_inputs(
    jaxpr: Any, choose: Callable[[Any, Sequence[set[int]]], list[set[int]]]
) -> set[int]:
    """Return the positions of the inputs behind those operands of products that `choose` chooses.

    Args:
      jaxpr: The equations.
      choose: Called with a product, and for each operand the positions of the inputs that it is
        computed from. Returns the positions for the chosen operands.
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
            found.update(*(given[at] for at in _product_inputs(body, choose)))
        if name in _FUSED or name in CONSTRAINTS or (bodies and name not in _LOOPS):
            sources.update(dict.fromkeys(equation.outvars, _of_size(equation, read)))
    return found


def _relaid(equation: Any, read: Sequence[set[int]]) -> list[set[int]]:
    """Return the inputs behind those operands of a product whose batch dims do not come first."""
    batch = equation.params["dimension_numbers"][1]
    found = []
    for each, variable, dims in zip(read, equation.invars, batch, strict=True):
        long = [at for at, size in enumerate(variable.aval.shape) if size > 1]
        own = {at for at in dims if at in long}
        if own != set(long[: len(own)]):
            found.append(each)
    return found


def _of_size(equation: Any, read: Sequence[set[int]]) -> set[int]:
    """Return the inputs behind those operands that are not much smaller than the largest result."""
    largest = max(_bytes(variable.aval) for variable in equation.outvars)
    pairs = zip(read, equation.invars, strict=True)
    return set().union(*(each for each, variable in pairs if 4 * _bytes(variable.aval) >= largest))


def _local_peak(jaxpr: Any) -> Peak:
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
            _labeled(_born(name, _bytes(aval), used), _dtype(aval), aval.shape, source)
            for aval in (variable.aval for variable in equation.outvars)
        ]
        held.update(zip(equation.outvars, births, strict=True))
        timeline.add(
            used,
            [*births, *padded_copies(equation, births, timeline)],
            in_place=_overwritten(equation, operands),
            inner=Peak.most(map(_local_peak, _bodies(equation))),
            loop=name in _READ_FROM_MEMORY,
        )
    return [buffer(variable) for variable in jaxpr.outvars]


def _dtype(aval: Any) -> Any:
    return getattr(aval, "dtype", "")


def _bytes(aval: Any) -> int:
    return whole_bytes(aval.size, aval.dtype) if hasattr(aval, "dtype") else 0


def _bodies(equation: Any) -> list[Any]:
    """Return the jaxprs that an equation runs: of a loop, a `cond` or a call."""
    found = run_bodies(equation)
    return [body.jaxpr for body in found if body.runs is not Runs.BEFORE_EACH_ROUND]
