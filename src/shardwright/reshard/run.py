"""Run the steps of a plan on a shard, inside `shard_map`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from shardwright.reshard.grid import blocks_of
from shardwright.reshard.plan import Move, MoveKind, shard_count


def run_moves(x: jax.Array, moves: Sequence[Move], mesh: Mapping[str, int]) -> jax.Array:
    """Return the shard of this device after all steps.

    Args:
      x: The shard before the first step.
      moves: Steps from `plan_moves`.
      mesh: Sizes of the mesh axes.
    """
    for move in moves:
        x = _run(x, move, mesh)
    return x


def _run(x: jax.Array, move: Move, mesh: Mapping[str, int]) -> jax.Array:
    if move.kind is MoveKind.ALL_TO_ALL:
        assert move.source is not None
        assert move.target is not None
        # JAX splits the dim `target`, its third argument, and concatenates along the dim `source`.
        swapped: jax.Array = jax.lax.all_to_all(
            x, move.mesh_axes, move.target, move.source, tiled=True
        )
        return swapped
    if move.kind is MoveKind.ALL_GATHER:
        assert move.source is not None
        # By default JAX types a gathered array as varying, and then refuses a replicated output
        # spec.
        gathered: jax.Array = jax.lax.all_gather(
            x, move.mesh_axes, axis=move.source, tiled=True, to="invarying"
        )
        return gathered
    if move.kind is MoveKind.SLICE:
        assert move.target is not None
        size = x.shape[move.target] // shard_count(move.mesh_axes, mesh)
        return jax.lax.dynamic_slice_in_dim(
            x, jax.lax.axis_index(move.mesh_axes) * size, size, move.target
        )
    sent: jax.Array = jax.lax.ppermute(x, move.mesh_axes, permutation(move, mesh))
    return sent


def permutation(move: Move, mesh: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return the pairs (sender, receiver) of a permute.

    Devices are numbered over the mesh axes of the step.
    """
    sizes = {name: mesh[name] for name in move.mesh_axes}
    receivers = {block: device for device, block in enumerate(blocks_of(move.after, sizes))}
    senders = enumerate(blocks_of(move.before, sizes))
    return [(device, receivers[block]) for device, block in senders]
