"""The two compiled functions of a paged engine. The pools are donated to them.

`prefill` reads a chunk of some prompts into their pages. `decode` gives every active slot its next
tokens. In each call, the host passes tables, lengths and how to draw: everything but the pools, and
the tokens that it has not read. So nothing has to be inserted or cleared, and all layers share one
table.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

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
      state: `[3, batch]` int32: the number of tokens in the cache; the latest token, which is
        negative if only the devices know it; and the number of tokens that the sequence has
        written.
      rules: `[5, batch]` uint32, as `rules_of` returns them.
    """

    tables: Any
    state: Any
    rules: Any


def pools_of(caches: Caches) -> Pools:
    """Return the pools of paged caches, one per layer."""
    pools = []
    for cache in caches:
        assert isinstance(cache, PagedCache | AssignedPages)
        pools.append((cache.k_pages, cache.v_pages))
    return tuple(pools)


@functools.partial(jax.jit, static_argnums=(0, 1))
def empty_last(slots: int, mode: str | None) -> jax.Array:
    """Return `[slots]` int32 zeros, replicated."""
    last: jax.Array = steps.replicated(jnp.zeros(slots, jnp.int32), mode)
    return last


def prefill(
    model: Model,
    spec: CacheSpec,
    pools: Pools,
    last: jax.Array,
    params: object,
    tokens: jax.Array,
    entries: jax.Array,
    batch: Batch,
) -> tuple[Pools, jax.Array, Drawn]:
    """Read the next tokens of prompts, and draw the token that follows the last one.

    Args:
      model: The model.
      spec: Spec of a cache with this batch.
      pools: Donated.
      last: `[slots]` int32, the latest token of each slot. Donated.
      params: Weights.
      tokens: `[batch, chunk]` int32.
      entries: `[2, batch]` int32: how many tokens of each row are not padding, and the slot whose
        latest token the row draws. Rows without a slot have a number past the last slot.
      batch: The sequences.

    Returns:
      The pools, the latest tokens, and `[batch]` tokens as in `steps.prefill`.
    """
    caches, counts = layers(spec, pools, batch.tables, batch.state[0]), entries[0]
    new, following = steps.prefill(model, caches, params, tokens, counts, batch.rules)
    drawn, into = steps.replicated((jnp.maximum(following.tokens, 0), entries[1]), spec.mode)
    last = last.at[into].set(drawn, mode="drop")
    return pools_of(new), steps.replicated(last, spec.mode), following


def decode(
    model: Model,
    spec: CacheSpec,
    most: int,
    pools: Pools,
    last: jax.Array,
    params: object,
    batch: Batch,
) -> tuple[Pools, jax.Array, Drawn]:
    """Give every slot its next tokens.

    Args:
      model: The model.
      spec: Spec of a cache with this batch.
      most: Largest number of tokens that a slot gets in one call.
      pools: Donated.
      last: `[slots]` int32, the latest token of each slot, as far as `batch` does not have it.
        Donated.
      params: Weights.
      batch: The sequences. Their tables have pages for these tokens. A slot whose limit is 0 gets
        none.

    Returns:
      The pools, the latest tokens, and `[most, batch]` tokens or codes. Ignore those of a sequence
      after its limit.
    """
    given, rules = steps.replicated((batch.state, batch.rules), spec.mode)
    # The state is the carry of a loop, so it must keep one sharding.
    state = steps.replicated(given.at[1].set(jnp.where(given[1] < 0, last, given[1])), spec.mode)

    def step(carry: tuple[Pools, jax.Array], _: Any) -> tuple[tuple[Pools, jax.Array], Drawn]:
        pools, (lengths, last, index) = carry
        counts = (index < limits_of(rules)).astype(jnp.int32)
        caches = layers(spec, pools, batch.tables, lengths)
        valid = steps.replicated(counts > 0, spec.mode)[:, None]
        logits, new = steps.read(model, params, last[:, None], caches, valid)
        drawn = steps.next_tokens(logits[:, 0], caches, new, counts, rules, index)
        last = steps.replicated(jnp.maximum(drawn.tokens, 0), spec.mode)
        state = jnp.stack([lengths + counts, last, index + counts])
        return (pools_of(new), steps.replicated(state, spec.mode)), drawn

    if most == 1:
        (pools, state), drawn = step((pools, state), None)
        return pools, state[1], jax.tree.map(lambda x: x[None], drawn)
    (pools, state), drawn = jax.lax.scan(step, (pools, state), length=most)
    return pools, state[1], drawn


def layers(spec: CacheSpec, pools: Pools, tables: Any, lengths: Any) -> Caches:
    """Return one cache per layer. Their tables and lengths are the same arrays."""
    tables, lengths = steps.replicated((tables, lengths), spec.mode)
    return tuple(
        AssignedPages(spec=spec, length=lengths, k_pages=k, v_pages=v, tables=tables)
        for k, v in pools
    )
