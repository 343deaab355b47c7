"""The decoder with the caches of the library, as an engine calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from decoder.config import DecoderConfig
from decoder.model import blocks
from shardwright import serving
from shardwright.attention import append_and_attend, next_positions


def cache_shape(config: DecoderConfig, *, window: int | None = None) -> serving.CacheShape:
    """Return the shape of the cache of one token."""
    return serving.CacheShape(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=config.dtype,
        window=window,
    )


def served(config: DecoderConfig, *, implementation: str | None = None) -> Callable[..., Any]:
    """Return the model as a `serving.Model`. It reads every kind of cache.

    Args:
      config: Sizes.
      implementation: The implementation of attention. Defaults to that of the strategy, else
        to `auto`.
    """

    def model(
        params: dict[str, Any], tokens: jax.Array, caches: Any, valid: jax.Array
    ) -> tuple[jax.Array, list[Any]]:
        positions = next_positions(caches[0], q_length=tokens.shape[1], valid=valid)

        def mix(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
            done = append_and_attend(q, k, v, cache, valid=valid, implementation=implementation)
            return done.o, done.cache

        return blocks(
            params, tokens, config, positions=jnp.maximum(positions, 0), held=caches, mix=mix
        )

    return model
