"""The two compiled functions of a paged engine. The pools are donated to them.

`prefill` reads a chunk of some prompts into their pages. `decode` gives every active slot its next
tokens. In each call, the host passes everything except the pools: tables, lengths, last tokens and
how to draw. So nothing has to be inserted or cleared, and all layers share one table.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.caches.paged.assigned import AssignedPages
from shardwright.caches.paged.cache import PagedCache
from shardwright.caches.spec import CacheSpec
from shardwright.serving import steps
from shardwright.serving.sampling import Draw, Drawn
from shardwright.serving.steps import Caches, Model

# The pages of keys and of values of each layer.
Pools = tuple[tuple[jax.Array, jax.Array], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The sequences of a call, as arrays of the host.

    Attributes:
      tables: `[batch, pages_per_slot]` int32.
      lengths: `[batch]` int32, number of tokens in the cache.
      draw: How each sequence draws its next token.
    """

    tables: jax.Array | np.ndarray
    lengths: jax.Array | np.ndarray
    draw: Draw


def pools_of(caches: Caches) -> Pools:
    """Return the pools of paged caches, one per layer."""
    pools = []
    for cache in caches:
        assert isinstance(cache, PagedCache | AssignedPages)
        pools.append((cache.k_pages, cache.v_pages))
    return tuple(pools)


def prefill(
    model: Model,
    spec: CacheSpec,
    pools: Pools,
    params: object,
    tokens: jax.Array,
    counts: jax.Array,
    batch: Batch,
) -> tuple[Pools, Drawn]:
    """Read the next tokens of prompts, and draw the token that follows the last one.

    Args:
      model: The model.
      spec: Spec of a cache with this batch.
      pools: Donated.
      params: Weights.
      tokens: `[batch, chunk]` int32.
      counts: `[batch]` int32, how many tokens of each row are not padding.
      batch: The sequences.

    Returns:
      The pools, and `[batch]` tokens as in `steps.prefill`.
    """
    caches = layers(spec, pools, batch)
    new, following = steps.prefill(model, caches, params, tokens, counts, batch.draw)
    return pools_of(new), following


def decode(
    model: Model,
    spec: CacheSpec,
    most: int,
    pools: Pools,
    params: object,
    last: jax.Array,
    left: jax.Array,
    batch: Batch,
) -> tuple[Pools, Drawn]:
    """Give every slot its next tokens.

    Args:
      model: The model.
      spec: Spec of a cache with this batch.
      most: Largest number of tokens that a slot gets in one call.
      pools: Donated.
      params: Weights.
      last: `[batch]` int32, the latest token of each slot.
      left: `[batch]` int32, tokens that each slot gets; 0 for a slot that is not active.
      batch: The sequences. Their tables have pages for these tokens.

    Returns:
      The pools, and `[most, batch]` tokens or codes. Ignore those past `left`.
    """

    def step(
        carry: tuple[Pools, jax.Array, Batch], at: jax.Array
    ) -> tuple[tuple[Pools, jax.Array, Batch], Drawn]:
        pools, last, batch = carry
        counts = (at < left).astype(jnp.int32)
        caches = layers(spec, pools, batch)
        valid = steps.replicated(counts > 0, spec.mode)[:, None]
        logits, new = steps.read(model, params, last[:, None], caches, valid)
        drawn = steps.next_tokens(logits[:, 0], caches, new, counts, batch.draw)
        draw = dataclasses.replace(batch.draw, index=batch.draw.index + counts)
        lengths = batch.lengths + counts
        after = dataclasses.replace(batch, lengths=lengths, draw=draw)
        # The last tokens are the carry of a loop, so they must keep one sharding.
        last = steps.replicated(jnp.maximum(drawn.tokens, 0), spec.mode)
        return (pools_of(new), last, after), drawn

    carry = (pools, steps.replicated(last, spec.mode), batch)
    if most == 1:
        (pools, _, _), drawn = step(carry, jnp.int32(0))
        return pools, jax.tree.map(lambda x: x[None], drawn)
    (pools, _, _), drawn = jax.lax.scan(step, carry, jnp.arange(most, dtype=jnp.int32))
    return pools, drawn


def layers(spec: CacheSpec, pools: Pools, batch: Batch) -> Caches:
    """Return one cache per layer. Their tables and lengths are the same arrays."""
    tables, lengths = steps.replicated((batch.tables, batch.lengths), spec.mode)
    return tuple(
        AssignedPages(spec=spec, length=lengths, k_pages=k, v_pages=v, tables=tables)
        for k, v in pools
    )
