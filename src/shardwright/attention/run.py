"""Run an implementation on a call, check its result, and shard the output by the specs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from shardwright import _jax
from shardwright.attention.call import AttentionCall, DimOrder, Operands, Result
from shardwright.attention.implementation import Implementation
from shardwright.errors import AttentionError
from shardwright.manager import constraint


def attention(implementation: Implementation, operands: Operands, call: AttentionCall) -> Result:
    """Return the result of an implementation, in the caller's layout.

    `run` is this function jitted. JAX shows a compiled program under the name of its function, so
    this function is called `attention`.

    Args:
      implementation: An implementation that supports the call.
      operands: Global arrays, BTHD.
      call: The call that describes them.
    """
    if call.kv_dtype is not None:
        operands = _without_gradient(operands, call)
    # Plans and profiles read the name of the implementation from this scope.
    with jax.named_scope(f"attention_{implementation.name}"):
        result = implementation.run(operands, call)
    _check(result, implementation, call)
    o = result.o
    if call.mesh is not None and call.specs.mesh_axes:
        # Shard the output like q. Otherwise the partitioner might choose another sharding.
        placement = constraint.make_placement(call.specs.output, call.mesh, _jax.ambient_mesh())
        o = constraint.place(o, placement)
    if call.layout is DimOrder.BHTD:
        o = jnp.swapaxes(o, 1, 2)
    return Result(o=o, lse=result.lse, weights=result.weights).only(call)


# Use `jit` inside a trace too, so that the layers of a model share one trace if their calls are
# equal. Outside a trace, `shard_map` without `jit` would trace and compile again at every call.
run = functools.partial(jax.jit, static_argnums=(0, 2))(attention)

# On TPUs, XLA's partitioner aborts if a function with a `shard_map` in it is called twice inside
# another `shard_map`. So inside a `shard_map`, the layers share the trace, but the program has a
# copy of the function for each layer.
run_inline = functools.partial(jax.jit, static_argnums=(0, 2), inline=True)(attention)


def _check(result: Any, implementation: Implementation, call: AttentionCall) -> None:
    """Check that an implementation returned what the call asks for.

    A user may have written the implementation.

    Raises:
      AttentionError: The value is not a `Result`, or one of its arrays is missing or has a wrong
        shape or dtype.
    """
    name = implementation.name
    if not isinstance(result, Result):
        raise AttentionError(
            f"{name} returned a {type(result).__name__}",
            fix="return attention.Result(o=o), o as [batch, length, heads, v_dim]",
        )
    rows = (call.batch, call.heads, call.q_length)
    shapes: dict[str, tuple[int, ...]] = {"o": (call.batch, call.q_length, call.heads, call.v_dim)}
    if call.return_lse:
        shapes["lse"] = rows
    if call.return_weights:
        shapes["weights"] = (*rows, call.kv_length)
    dtypes = {"o": call.dtype, "lse": "float32", "weights": ""}
    for field, shape in shapes.items():
        array, dtype = getattr(result, field), dtypes[field]
        if array is None or array.shape != shape or (dtype and array.dtype != dtype):
            has = "no" if array is None else f"{array.dtype} {array.shape} as"
            raise AttentionError(
                f"{name} returned {has} {field}",
                fix=f"return {field} as {dtype} {shape}".replace("  ", " "),
            )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _without_gradient(operands: Operands, call: AttentionCall) -> Operands:
    del call
    return operands


@_without_gradient.defjvp
def _raise_for_gradient(call: AttentionCall, primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise AttentionError(
        f"attention to {call.kv_dtype} keys and values reads a cache and has no gradient",
        fix="train with unquantized keys and values, "
        "or pass the arguments through jax.lax.stop_gradient",
    )
