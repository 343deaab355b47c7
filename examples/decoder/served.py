"""The decoder behind the library's caches, as an engine calls it: the same blocks, other cache calls."""

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
    """Return what the model keeps of a token."""
    return serving.CacheShape(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=config.dtype,
        window=window,
    )


def served(config: DecoderConfig, *, implementation: str | None = None) -> Callable[..., Any]:
    """Return the model as `serving.Model` has it. It reads caches of any kind, with or without a window.

    Args:
      config: sizes.
      implementation: of attention; absent: what the strategy names, else the best.
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
