"""Run an implementation on a described call: jitted where nothing traces, its output laid as the specs say."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from shardwright import _jax, placement
from shardwright.attention._shards import asked
from shardwright.attention.call import AttentionCall, Layout, Operands, Result


def serve(implementation: Any, operands: Operands, call: AttentionCall) -> Result:
    """Return what an implementation finds, in the caller's layout.

    Args:
      implementation: an `AttentionImpl` class that supports the call.
      operands: global arrays, BTHD.
      call: what they are.
    """
    # shard_map by itself traces and compiles anew at every eager call.
    run = _run if _jax.in_trace() else _jitted
    found: Result = run(implementation, operands, call)
    return found


def _run(implementation: Any, operands: Operands, call: AttentionCall) -> Result:
    found = asked(implementation.run(operands, call), call)
    o = _lay(found.o, call)
    return dataclasses.replace(found, o=o if call.layout is Layout.BTHD else jnp.swapaxes(o, 1, 2))


_jitted = functools.partial(jax.jit, static_argnums=(0, 2))(_run)


def _lay(o: jax.Array, call: AttentionCall) -> jax.Array:
    """Make the output lie as q does, whatever the partitioner would choose."""
    if call.mesh is None or not call.specs.mesh_axes:
        return o
    laid: jax.Array = placement.place(o, placement.make_placement(call.specs.output, call.mesh, _jax.ambient_mesh()))
    return laid
