"""Assert that a function compiles only once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, Sharding

from shardwright._jax import Compilations, watch_compilations
from shardwright.errors import ShardingError
from shardwright.manager import context
from shardwright.plan.memory import leaf_bytes
from shardwright.resolution.partition_specs import canonical_spec, spec_text
from shardwright.show.tables import table
from shardwright.testing.placements import sharding_text
from shardwright.testing.programs import function_name
from shardwright.trees.paths import path_text
from shardwright.vocabulary.units import bytes_text

_HEAD = ("argument", "in the first call", "per device", "now", "per device")


def assert_no_retrace(
    f: Callable[..., Any], *calls: Sequence[Any] | Callable[[Any], Sequence[Any]]
) -> None:
    """Call a function several times, and assert that only the first call traces or compiles.

    `assert_no_retrace(step, (state, batch), lambda out: (out, batch))` passes the result of a step
    to the next step. The assertion fails if the result has another sharding than the argument,
    because the second call then compiles again.

    Args:
      f: a jitted function, or a function that calls jitted functions.
      *calls: the arguments of each call, or a function that makes them from the result of the call
        before. There must be at least two calls.

    Raises:
      AssertionError: a later call traced or compiled. The message has JAX's reasons and the
        arguments that changed.
      TypeError: there are fewer than two calls, a call is not a tuple or list of arguments, or
        nothing is jitted.
    """
    __tracebackhide__ = True
    if len(calls) < 2:
        raise TypeError(
            f"assert_no_retrace got {len(calls)} calls: the first call always traces; pass "
            f"the arguments of two or more calls"
        )
    first: Sequence[Any] = ()
    result = None
    with context.APART(object()):  # hides programs that other tests have compiled
        for number, call in enumerate(calls, 1):
            args = _arguments(call, result, number)
            seen = _seen(args)
            with watch_compilations() as compilations:
                result = f(*args)
            if number == 1:
                first = seen
                _check_jitted(f, compilations)
            elif compilations.traced or compilations.compiled:
                raise AssertionError(_message(f, number, compilations, first, seen))


def _check_jitted(f: Callable[..., Any], compilations: Compilations) -> None:
    """Check that the first call ran a jitted function; otherwise there is nothing to count."""
    __tracebackhide__ = True
    # JAX jits its own operations too, but gives reasons only for functions that users jit.
    # Only jitted functions have `clear_cache`.
    if hasattr(f, "clear_cache") or (
        compilations.reasons
        if compilations.explained
        else compilations.traced or compilations.compiled
    ):
        return
    if isinstance(f, jax.stages.Compiled):
        what, fix = "is already compiled and never traces again", "pass the jitted function"
    else:
        ran = ", ".join(dict.fromkeys(compilations.traced))
        operations = f": it ran {ran} one by one" if ran else ""
        what = f"is not jitted and calls no jitted function{operations}"
        fix = "pass jax.jit(f), created once, or a function that calls it in this thread"
    raise TypeError(
        f"assert_no_retrace has nothing to count: {function_name(f)} {what}\n  fix   {fix}"
    )


def _arguments(call: Any, result: Any, number: int) -> Sequence[Any]:
    """Return the arguments of a call. Refuse an array or a named tuple, although both unpack."""
    __tracebackhide__ = True
    args = call(result) if callable(call) else call
    if type(args) not in (tuple, list):
        source = (
            f"the function of call {number} returned" if callable(call) else f"call {number} is"
        )
        raise TypeError(
            f"{source} one {type(args).__name__}, not the arguments of a call\n"
            "  fix   write each call as a tuple: assert_no_retrace(f, (x,), (x,)), or lambda "
            "out: (out,)"
        )
    return args  # type: ignore[no-any-return]


def _seen(args: Sequence[Any]) -> list[tuple[str, str, str]]:
    """Return (path, description, bytes per device) of each argument, before a call donates it."""
    return [
        (path_text(path) or "-", _text(value), _bytes(value))
        for path, value in jax.tree_util.tree_flatten_with_path(tuple(args))[0]
    ]


def _text(value: Any) -> str:
    if not hasattr(value, "dtype"):
        return type(value).__name__
    shape = "x".join(map(str, np.shape(value))) or "scalar"
    weak = " weak" if getattr(value, "weak_type", False) else ""
    sharding = _sharding_text(value.sharding) if isinstance(value, jax.Array) else "numpy"
    return f"{value.dtype}{weak} {shape} {sharding}"


def _sharding_text(sharding: Sharding) -> str:
    """Return a text with what JAX compares of a sharding: spec, axis types and memory kind."""
    text = sharding_text(sharding)
    if isinstance(sharding, NamedSharding):
        if not (sharding.spec.unreduced or sharding.spec.reduced):
            # a trailing None in a spec changes nothing
            text = spec_text(canonical_spec(sharding.spec.partitions))
        if AxisType.Explicit in sharding.mesh.axis_types:
            text += " explicit"
    return text if sharding.memory_kind in (None, "device") else f"{text} {sharding.memory_kind}"


def _bytes(value: Any) -> str:
    try:
        return bytes_text(leaf_bytes(value, getattr(value, "sharding", None)).per_device)
    except ShardingError:
        return "-"


def _message(
    f: Any, number: int, compilations: Compilations, first: Sequence[Any], now: Sequence[Any]
) -> str:
    events = [
        f"{verb} {', '.join(dict.fromkeys(names))}"
        for verb, names in (("traced", compilations.traced), ("compiled", compilations.compiled))
        if names
    ]
    lines = [f"call {number} of {function_name(f)} {' and '.join(events)}"]
    before = {path: (text, size) for path, text, size in first}
    changed = [(path, before.get(path, ("absent", "-")), (text, size)) for path, text, size in now]
    rows = [(path, *old, *new) for path, old, new in changed if old != new]
    rows += [
        (path, text, size, "absent", "-")
        for path, text, size in first
        if path not in {path_now for path_now, _, _ in now}
    ]
    if rows:
        lines += ["", *table([_HEAD, *rows])]
        lines.append(
            "  fix   call it with the same shapes, dtypes and shardings; if an argument is an "
            "earlier result, pass out_shardings= to jit"
        )
    else:
        lines.append("  no argument changed its shape, dtype or sharding")
        lines.append(
            "  fix   jit once, outside the call; check static arguments, closures and the "
            "ambient context"
        )
    reasons = [
        f"  {line}" for reason in compilations.reasons for line in ["", *reason.splitlines()]
    ]
    *lines, fix = lines
    return "\n".join([*lines, *reasons, fix])
