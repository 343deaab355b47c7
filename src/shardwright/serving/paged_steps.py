"""The two compiled functions of a paged engine. The pools are donated to them.

`prefill` reads a chunk of some prompts into their pages. `decode` gives every active slot its next
tokens. In each call, the host passes everything except the pools: tables, lengths, last tokens and
how to draw. So nothing has to be inserted or cleared, and all layers share one table.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.caches.paged.assigned import AssignedPages
from shardwright.caches.paged.cache import PagedCache
from shardwright.caches.spec import CacheSpec
from shardwright.serving import steps
from shardwright.serving.sampling import Drawn, limits_of
from shardwright.serving.steps import Caches, Model

# The pages of keys and of values of each layer.
Pools = tuple[tuple[jax.Array, jax.Array], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The sequences of a call, as arrays of the host: few, because each costs time.

    Attributes:
      tables: `[batch, pages_per_slot]` int32.
      state: `[3, batch]` int32: the number of tokens in the cache, the latest token, and the number
        of tokens that the sequence has written.
      rules: `[5, batch]` uint32, as `rules_of` returns them.
    """

    tables: jax.Array | np.ndarray
    state: jax.Array | np.ndarray
    rules: jax.Array | np.ndarray


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
    caches = layers(spec, pools, batch.tables, batch.state[0])
    new, following = steps.prefill(model, caches, params, tokens, counts, batch.rules)
    return pools_of(new), following


def decode(
    model: Model,
    spec: CacheSpec,
    most: int,
    pools: Pools,
    params: object,
    batch: Batch,
) -> tuple[Pools, Drawn]:
    """Give every slot its next tokens.

    Args:
      model: The model.
      spec: Spec of a cache with this batch.
      most: Largest number of tokens that a slot gets in one call.
      pools: Donated.
      params: Weights.
      batch: The sequences. Their tables have pages for these tokens. A slot whose limit is 0 gets
        none.

    Returns:
      The pools, and `[most, batch]` tokens or codes. Ignore those of a sequence after its limit.
    """
    # The state is the carry of a loop, so it must keep one sharding.
    state, rules = steps.replicated((batch.state, batch.rules), spec.mode)

    def step(carry: tuple[Pools, jax.Array], _: Any) -> tuple[tuple[Pools, jax.Array], Drawn]:
        pools, (lengths, last, index) = carry
        counts = (index < limits_of(rules)).astype(jnp.int32)
        caches = layers(spec, pools, batch.tables, lengths)
        valid = steps.replicated(counts > 0, spec.mode)[:, None]
        logits, new = steps.read(model, params, last[:, None], caches, valid)
        drawn = steps.next_tokens(logits[:, 0], caches, new, counts, rules, index)
        state = jnp.stack([lengths + counts, jnp.maximum(drawn.tokens, 0), index + counts])
        return (pools_of(new), steps.replicated(state, spec.mode)), drawn

    if most == 1:
        (pools, _), drawn = step((pools, state), None)
        return pools, jax.tree.map(lambda x: x[None], drawn)
    (pools, _), drawn = jax.lax.scan(step, (pools, state), length=most)
    return pools, drawn


def layers(spec: CacheSpec, pools: Pools, tables: Any, lengths: Any) -> Caches:
    """Return one cache per layer. Their tables and lengths are the same arrays."""
    tables, lengths = steps.replicated((tables, lengths), spec.mode)
    return tuple(
        AssignedPages(spec=spec, length=lengths, k_pages=k, v_pages=v, tables=tables)
        for k, v in pools
    )
