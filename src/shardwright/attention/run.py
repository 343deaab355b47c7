"""Run an implementation on a described call: jitted where nothing traces, its output laid as the specs say."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from shardwright import _jax
from shardwright.attention.call import AttentionCall, Layout, Operands, Result
from shardwright.attention.parts.shards import asked
from shardwright.errors import AttentionError
from shardwright.manager import constraint


def serve(implementation: Any, operands: Operands, call: AttentionCall) -> Result:
    """Return what an implementation finds, in the caller's layout.

    Args:
      implementation: an `AttentionImpl` class that supports the call.
      operands: global arrays, BTHD.
      call: what they are.
    """
    # shard_map by itself traces and compiles anew at every eager call.
    eager, traced = (
        (_jitted, _run) if call.kv_dtype is None else (_jitted_quantised, _run_quantised)
    )
    found: Result = (traced if _jax.in_trace() else eager)(implementation, operands, call)
    return found


def _run(implementation: Any, operands: Operands, call: AttentionCall) -> Result:
    found = implementation.run(operands, call)
    _check(found, implementation, call)
    found = asked(found, call)
    o = _lay(found.o, call)
    return dataclasses.replace(found, o=o if call.layout is Layout.BTHD else jnp.swapaxes(o, 1, 2))


def _check(found: Any, implementation: Any, call: AttentionCall) -> None:
    """Check that an implementation returned what was asked of it: it may be the user's own.

    Raises:
      AttentionError: it is no `Result`, or an array of it is missing or has another shape or dtype.
    """
    name = implementation.__name__
    if not isinstance(found, Result):
        raise AttentionError(
            f"{name} returned a {type(found).__name__}",
            fix="return attention.Result(o=o), o as [batch, length, heads, v_dim]",
        )
    rows, heads = (call.batch, call.q_length), (call.batch, call.heads, call.q_length)
    wanted: dict[str, tuple[tuple[int, ...], str]] = {
        "o": ((*rows, call.heads, call.v_dim), call.dtype)
    }
    if call.return_lse:
        wanted["lse"] = (heads, "float32")
    if call.return_weights:
        wanted["weights"] = ((*heads, call.kv_length), "")
    for field, (shape, dtype) in wanted.items():
        array = getattr(found, field)
        if array is None or array.shape != shape or (dtype and array.dtype != dtype):
            has = "no" if array is None else f"{array.dtype} {array.shape} as"
            raise AttentionError(
                f"{name} returned {has} {field}",
                fix=f"the call asks for {dtype} {shape}".replace("  ", " "),
            )


_jitted = functools.partial(jax.jit, static_argnums=(0, 2))(_run)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 2))
def _run_quantised(implementation: Any, operands: Operands, call: AttentionCall) -> Result:
    return _run(implementation, operands, call)


@_run_quantised.defjvp
def _no_gradient(implementation: Any, call: AttentionCall, primals: Any, tangents: Any) -> Any:
    del implementation, primals, tangents
    what = f"attention to {call.kv_dtype} keys and values reads a cache and has no gradient"
    raise AttentionError(
        what,
        fix="train with keys that are not quantised; jax.lax.stop_gradient around the arguments if none is wanted",
    )


_jitted_quantised = functools.partial(jax.jit, static_argnums=(0, 2))(_run_quantised)


def _lay(o: jax.Array, call: AttentionCall) -> jax.Array:
    """Make the output lie as q does, whatever the partitioner would choose."""
    if call.mesh is None or not call.specs.mesh_axes:
        return o
    laid: jax.Array = constraint.place(
        o, constraint.make_placement(call.specs.output, call.mesh, _jax.ambient_mesh())
    )
    return laid
