"""Run the steps of a plan on a shard, inside `shard_map`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax

from shardwright.reshard.plan import AxesByDim, Move, MoveKind, shard_count


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
        # JAX splits the first dim (`target`) and concatenates along the second one (`source`).
        swapped: jax.Array = jax.lax.all_to_all(
            x, move.mesh_axes, move.target, move.source, tiled=True
        )
        return swapped
    if move.kind is MoveKind.ALL_GATHER:
        assert move.source is not None
        # By default JAX types a gathered array as varying, and a replicated output spec is refused.
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
    device_before = _devices_by_block(move.before, move.mesh_axes, mesh)
    device_after = _devices_by_block(move.after, move.mesh_axes, mesh)
    return [(device, device_after[block]) for block, device in device_before.items()]


def _devices_by_block(
    dims: AxesByDim, mesh_axes: Sequence[str], mesh: Mapping[str, int]
) -> dict[tuple[int, ...], int]:
    """Return the device of each block. A block is given by its number along every dimension."""
    sizes = [mesh[name] for name in mesh_axes]
    devices = {}
    for device in range(math.prod(sizes)):
        coordinates, rest = {}, device
        for name, size in zip(reversed(mesh_axes), reversed(sizes), strict=True):
            rest, coordinates[name] = divmod(rest, size)
        block = []
        for axes in dims:
            number = 0
            for name in axes:
                number = number * mesh[name] + coordinates[name]
            block.append(number)
        devices[tuple(block)] = device
    return devices
