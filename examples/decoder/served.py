"""The decoder as an engine calls it."""

from __future__ import annotations

from typing import Any

from decoder.config import DecoderConfig
from decoder.model import forward
from shardwright import serving


def cache_shape(config: DecoderConfig, *, window: int | None = None) -> serving.CacheShape:
    """Return the shape of the cache of one token."""
    return serving.CacheShape(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=config.dtype,
        window=window,
    )


def served(config: DecoderConfig) -> serving.Model:
    """Return the model as a `serving.Model`. It reads every kind of cache."""

    def model(params: Any, tokens: Any, caches: Any, valid: Any) -> Any:
        return forward(params, tokens, config, caches=caches, valid=valid)

    return model
