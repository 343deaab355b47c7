"""Multi-head latent attention, of DeepSeek-V2 and V3, for the reference decoder.

Keys and values of all heads are projections of one latent vector per token (arXiv:2405.04434).
Without a cache, keys and values are computed from the latent. A cache stores only the latent. With
a cache, the projections are applied to the queries and to the output instead, so that all heads
read one row per token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.attention.api import dot_product_attention
from shardwright.layers import norm
from shardwright.layers.dtypes import FLOAT32, Dtypes
from shardwright.layers.placement import OPERAND, RESIDUAL, place, use
from shardwright.layers.rope import rope
from shardwright.manager.einsum import einsum
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.axes import (
    BATCH,
    EMBED,
    EMPTY,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    KV_LENGTH,
    QUERY_LENGTH,
)

QUERIES = (BATCH, QUERY_LENGTH, HEAD, HEAD_DIM)
ROWS = (BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM)
_LATENT = (BATCH, QUERY_LENGTH, EMPTY)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Sizes of latent attention.

    Attributes:
      embed: Size of the residual.
      heads: Number of heads.
      query_rank: Size of the latent of the queries. None if one matmul, without a latent, gives the
        queries.
      rank: Size of the latent of keys and values.
      plain_dim: Size of the part of a head that is not rotated.
      rope_dim: Size of the rotated part, which all heads of the keys share.
      value_dim: Size of a value.
      dtypes: Dtypes of the parameters and matmuls.
    """

    embed: int
    heads: int
    query_rank: int | None
    rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    dtypes: Dtypes = FLOAT32

    @property
    def head_dim(self) -> int:
        """Size of a query and a key."""
        return self.plain_dim + self.rope_dim


def specs(config: LatentConfig) -> dict[str, Any]:
    """Return the parameters of the block as `ArraySpec`s."""

    def spec(shape: tuple[int, ...], *axes: str) -> ArraySpec:
        return ArraySpec(shape, config.dtypes.param, axes)

    heads, dim = config.heads, config.head_dim
    tree: dict[str, Any] = {
        "norm": norm.specs(norm.RMS, config.embed, config.dtypes),
        "down": spec((config.embed, config.rank + config.rope_dim), EMBED, EMPTY),
        "down_norm": norm.specs(norm.RMS, config.rank, config.dtypes),
        "key": spec((config.rank, heads, config.plain_dim), EMPTY, HEAD, HEAD_DIM),
        "value": spec((config.rank, heads, config.value_dim), EMPTY, HEAD, HEAD_DIM),
        "out": spec((heads, config.value_dim, config.embed), HEAD, HEAD_DIM, EMBED),
    }
    if config.query_rank is None:
        return {**tree, "query": spec((config.embed, heads, dim), EMBED, HEAD, HEAD_DIM)}
    return {
        **tree,
        "query_down": spec((config.embed, config.query_rank), EMBED, EMPTY),
        "query_norm": norm.specs(norm.RMS, config.query_rank, config.dtypes),
        "query": spec((config.query_rank, heads, dim), EMPTY, HEAD, HEAD_DIM),
    }


def cache_shape(config: LatentConfig, *, batch: int, capacity: int) -> jax.ShapeDtypeStruct:
    """Return the cache of a layer: one row per token, for all heads."""
    shape = (batch, capacity, 1, config.rank + config.rope_dim)
    return jax.ShapeDtypeStruct(shape, config.dtypes.cache)


def apply(
    config: LatentConfig, params: Any, x: Any, *, cache: Any = None
) -> tuple[jax.Array, jax.Array | None]:
    """Return what the block adds to the residual `x`, and the cache with the rows of the tokens.

    The tokens are written from the start of the cache, since a plan does not depend on positions.
    """
    w = jax.tree.map(lambda leaf: leaf.astype(config.dtypes.compute), use(params, specs(config)))
    x = norm.apply(norm.RMS, w["norm"], place(x, RESIDUAL), dtype=config.dtypes.compute)
    x = place(x, OPERAND)
    positions = jnp.arange(x.shape[1])[None]
    latent = x if "query_down" not in w else einsum("bse,er->bsr", x, w["query_down"], out=_LATENT)
    if "query_norm" in w:
        latent = norm.apply(norm.RMS, w["query_norm"], latent)
    q = einsum("bsr,rhd->bshd", latent, w["query"], out=QUERIES)
    # Only a part of a head is rotated. For the other part, the key projection can move to the
    # queries; see below.
    q, q_rope = q[..., : config.plain_dim], rope(q[..., config.plain_dim :], positions)
    both = einsum("bse,er->bsr", x, w["down"], out=_LATENT)
    rows = norm.apply(norm.RMS, w["down_norm"], both[..., : config.rank])
    # All heads share one rotated key, so its dim of heads has size 1.
    k_rope = rope(both[..., None, config.rank :], positions)
    # The scale is that of the whole head, although the latent is longer.
    scale = config.head_dim**-0.5
    if cache is None:
        k = einsum("bsr,rhd->bshd", rows, w["key"], out=QUERIES)
        v = einsum("bsr,rhd->bshd", rows, w["value"], out=QUERIES)
        k_rope = jnp.broadcast_to(k_rope, (*k.shape[:-1], config.rope_dim))
        q, k = (place(jnp.concatenate(pair, -1), QUERIES) for pair in ((q, q_rope), (k, k_rope)))
        mixed = dot_product_attention(q, k, v, causal=True, scale=scale, positions=positions_of(x))
    else:
        new = place(
            jnp.concatenate([rows[..., None, :], k_rope], -1), (*_LATENT[:2], KV_HEAD, EMPTY)
        )
        cache = place(
            jax.lax.dynamic_update_slice_in_dim(cache, new.astype(cache.dtype), 0, 1), ROWS
        )
        # (q · (W c)) = ((q W) · c): the key projection moves to the queries.
        q = einsum("bshd,rhd->bshr", q, w["key"], out=QUERIES)
        q = place(jnp.concatenate([q, q_rope], -1), QUERIES)
        # Every head reads the same row: one kv head, whose values are the start of its keys.
        mixed = dot_product_attention(
            q, cache, cache[..., : config.rank], causal=q.shape[1] > 1, scale=scale
        )
        # Project the weighted mean of latents to the weighted mean of values.
        mixed = einsum("bshr,rhd->bshd", mixed, w["value"], out=QUERIES)
    mixed = place(mixed.astype(config.dtypes.compute), QUERIES)
    return einsum("bshd,hde->bse", mixed, w["out"], out=RESIDUAL), cache


def positions_of(x: Any) -> jax.Array:
    """Return positions that depend on `x`, so that a trace computes masks inside each layer.

    In a layer with remat, JAX moves computations that do not depend on parameters out of the layer.
    Masks of blockwise attention would then be kept for all layers, with as many bytes as the
    attention logits.
    """
    positions, _ = jax.lax.optimization_barrier((jnp.arange(x.shape[1]), x))
    return jnp.broadcast_to(positions, x.shape[:2])
