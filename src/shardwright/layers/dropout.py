"""Dropout whose mask does not depend on the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright import _jax
from shardwright.errors import LayerError
from shardwright.vocabulary.read import RATE, read_value


def dropout(x: Any, key: Any, rate: float, *, shared: Sequence[int] = ()) -> Any:
    """Set elements to 0 with probability `rate`, and divide the other elements by `1 - rate`.

    The mask depends on the key and the global shape only, not on the sharding. Inside a `shard_map`
    it depends on the shape of the shard, so each shard needs a key of its own.

    Args:
      x: Floats.
      key: A JAX key. None drops nothing.
      rate: From 0 (nothing is dropped) up to, but not including, 1.
      shared: Dims along which all elements share one mask value.

    Raises:
      LayerError: The rate is outside of [0, 1), or a shared dim does not exist. Or, inside a
        `shard_map`, shards have the same key.
    """
    read_value("rate", rate, RATE, error=LayerError)
    if key is None or rate == 0:
        return x
    _check_shards(x, key)
    if any(not -x.ndim <= dim < x.ndim for dim in shared):
        raise LayerError(
            f"shared={tuple(shared)} names a dim that x of shape {x.shape} lacks",
            path="shared",
            fix=f"write dims from 0 to {x.ndim - 1}",
        )
    broadcast = {dim % x.ndim for dim in shared}
    shape = tuple(1 if dim in broadcast else size for dim, size in enumerate(x.shape))
    # With `jax_threefry_partitionable`, the default of JAX, the random bits of an element depend
    # only on the key and its global index.
    keep = jax.random.bernoulli(key, 1 - rate, shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype))


def _check_shards(x: Any, key: Any) -> None:
    """Refuse a key that is equal on all shards of x, if `shard_map` tracks which values vary."""
    if not _jax.tracks_varying():
        return
    if same := tuple(sorted(_jax.varying_axes(x) - _jax.varying_axes(key))):
        raise LayerError(
            f"the shards over {'+'.join(same)} have the same key, so all of them would drop the "
            "same elements",
            path="key",
            fix=f"pass jax.random.fold_in(key, jax.lax.axis_index({same})); in layers.accumulate, "
            "take key= in the loss; if x is the same on these shards, pass "
            f'jax.lax.pcast(key, {same}, to="varying")',
        )
