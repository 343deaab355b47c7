"""Create the buffers of an equation's results, and add the equation to the timeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Final

from jax.extend.core import Literal

from shardwright import _jax
from shardwright.plan.walk.equations import live_equations
from shardwright.plan.walk.liveness import LOOPS, TEMPORARY, Buffer, Peak, Timeline
from shardwright.plan.walk.primitives import CONSTRAINTS, ELEMENTWISE, NAMES
from shardwright.plan.walk.step import Step
from shardwright.plan.walk.values import Value

# A compiler fuses these into every use.
_CHEAP: Final = frozenset(
    {
        *("convert_element_type", "reshape", "squeeze", "expand_dims", "transpose"),
        *("broadcast_in_dim", "copy", "copy_p", "stop_gradient", "neg", "reduce_precision"),
    }
)
# It fuses these into a single use.
_FUSED: Final = (
    ELEMENTWISE | _CHEAP | {"slice", "pad", "concatenate", "rev", "dynamic_slice", "split"}
)
_WRITES: Final = frozenset(
    {
        *("dynamic_update_slice", "scatter", "scatter-add", "scatter_add"),
        *("scatter-max", "scatter-min", "scatter-mul"),
    }
)
_LOOPS: Final = frozenset({"scan", "while"})
_JAXPRS: Final = ("jaxpr", "call_jaxpr", "fun_jaxpr", "body_jaxpr")


def with_buffers(step: Step, results: Iterable[Value]) -> list[Value]:
    """Return the results of an equation with their buffers, and add it to the timeline."""
    values, ledger = list(results), step.ledger
    if ledger.timeline is None:
        return values
    if _changes_nothing(step, values):
        pairs = zip(values, step.values, strict=False)
        return [dataclasses.replace(value, buffer=old.buffer) for value, old in pairs]
    operands = tuple(value.buffer for value in step.values if value.buffer is not None)
    births: list[Buffer | None] = [
        None if value.free else _born(step.name, ledger.local_bytes(aval, value.dims), operands)
        for value, aval in zip(values, step.results, strict=True)
    ]
    ledger.timeline.add(
        operands,
        [birth for birth in births if birth is not None],
        in_place=_overwritten(step.name, [value.buffer for value in step.values], step.parameters),
        inner=ledger.inner,
        loop=step.name in _LOOPS,
        # The result of a constraint is the moved copy, so these bytes count once.
        moved=0 if step.name in CONSTRAINTS else ledger.moved,
    )
    pairs_of = zip(values, births, strict=True)
    return [dataclasses.replace(value, buffer=birth) for value, birth in pairs_of]


def _changes_nothing(step: Step, values: Sequence[Value]) -> bool:
    if step.name in NAMES:
        return True
    if step.name not in CONSTRAINTS:
        return False
    before = step.values[0]
    return before.dims == values[0].dims and not before.free


def _born(name: str, size: int, operands: tuple[Buffer, ...]) -> Buffer:
    return Buffer(
        size=size,
        kind=LOOPS if name in _LOOPS else TEMPORARY,
        operands=operands if name in _FUSED else None,
        cheap=name in _CHEAP,
    )


def _overwritten(
    name: str, operands: Sequence[Buffer | None], parameters: dict[str, Any]
) -> list[Buffer]:
    """Return the operands whose memory the result may take."""
    chosen: Sequence[Buffer | None] = ()
    if name in ELEMENTWISE:
        chosen = operands
    elif name in _WRITES:
        chosen = operands[:1]
    elif name == "scan":
        constants, carries, _ = _jax.scan_parts(parameters)
        chosen = operands[constants : constants + carries]
    return [buffer for buffer in chosen if buffer is not None]


def local_peak(jaxpr: Any) -> Peak:
    """Return the peak of a jaxpr whose shapes are local, such as the body of a `shard_map`.

    Its inputs are not counted, but the copies that products need of them are: their layout is that
    of the caller, and a batched product reads its batch dims first.
    """
    peak = _local_peak(jaxpr)
    used = _batched(jaxpr)
    copies = sum(_bytes(variable.aval) for at, variable in enumerate(jaxpr.invars) if at in used)
    kinds = {**peak.kinds, TEMPORARY: peak.kinds.get(TEMPORARY, 0) + copies}
    return Peak(low=peak.low, high=peak.high + copies, kinds=kinds)


def _batched(jaxpr: Any) -> set[int]:
    """Return the positions of the inputs whose batch dims a product needs first."""
    sources: dict[Any, set[int]] = {variable: {at} for at, variable in enumerate(jaxpr.invars)}
    found: set[int] = set()
    for equation in live_equations(jaxpr):
        name, bodies = equation.primitive.name, _bodies(equation.params)
        read: list[set[int]] = [
            set() if isinstance(variable, Literal) else sources.get(variable, set())
            for variable in equation.invars
        ]
        if name == "dot_general":
            found.update(*_relaid(equation, read))
            continue
        for body in bodies:
            # The operands before those of the body are the index of a branch.
            given = read[len(read) - len(body.invars) :]
            found.update(*(given[at] for at in _batched(body)))
        if name in _FUSED or (bodies and name not in _LOOPS):
            sources.update(dict.fromkeys(equation.outvars, _of_size(equation, read)))
    return found


def _relaid(equation: Any, read: Sequence[set[int]]) -> list[set[int]]:
    """Return the inputs behind the operands whose batch dims do not come first."""
    batch = equation.params["dimension_numbers"][1]
    found = []
    for each, variable, dims in zip(read, equation.invars, batch, strict=True):
        long = [at for at, size in enumerate(variable.aval.shape) if size > 1]
        own = {at for at in dims if at in long}
        if own != set(long[: len(own)]):
            found.append(each)
    return found


def _of_size(equation: Any, read: Sequence[set[int]]) -> set[int]:
    """Return the inputs behind the operands that are about as large as the largest result."""
    largest = max(_bytes(variable.aval) for variable in equation.outvars)
    pairs = zip(read, equation.invars, strict=True)
    return set().union(*(each for each, variable in pairs if 4 * _bytes(variable.aval) >= largest))


def _local_peak(jaxpr: Any) -> Peak:
    timeline = Timeline()
    held: dict[Any, Buffer] = {}
    for equation in live_equations(jaxpr):
        name = equation.primitive.name
        operands = [
            None if isinstance(variable, Literal) else held.get(variable)
            for variable in equation.invars
        ]
        used = tuple(buffer for buffer in operands if buffer is not None)
        births = [_born(name, _bytes(variable.aval), used) for variable in equation.outvars]
        held.update(zip(equation.outvars, births, strict=True))
        timeline.add(
            used,
            births,
            in_place=_overwritten(name, operands, equation.params),
            inner=_inner_peak(equation.params),
            loop=name in _LOOPS,
        )
    results = [
        held[each] for each in jaxpr.outvars if not isinstance(each, Literal) and each in held
    ]
    return timeline.peak(results, within=True)


def _bytes(aval: Any) -> int:
    return int(aval.size * aval.dtype.itemsize) if hasattr(aval, "dtype") else 0


def _inner_peak(parameters: dict[str, Any]) -> Peak:
    return Peak.most(_local_peak(body) for body in _bodies(parameters))


def _bodies(parameters: dict[str, Any]) -> list[Any]:
    held = [parameters[key] for key in _JAXPRS if parameters.get(key) is not None]
    held += parameters.get("branches", ())
    bodies = [getattr(body, "jaxpr", body) for body in held]
    return [body for body in bodies if hasattr(body, "eqns")]
