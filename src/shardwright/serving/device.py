"""What runs on devices: five compiled functions, with the caches donated, and the arrays that they pass on.

Prefill reads a chunk of every prompt in a cache of its own, insert moves those that are read into slots, decode gives every
active slot its next token, clear empties rows or slots. None depends on how many sequences there are: nothing is compiled twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from shardwright import caches, context
from shardwright.axes import BATCH, EMPTY
from shardwright.caches.base import Change, KVCache
from shardwright.caches.shards import ambient_shards
from shardwright.manager import PartitionManager
from shardwright.modes import MODE_DECODE, MODE_INSERT, MODE_PREFILL
from shardwright.serving.sampling import Draw, sample

Caches = tuple[KVCache, ...]
# What a token array says where there is no token, beside -1 for logits that are not numbers: REFUSED minus the code.
REFUSED = -1000


class Model(Protocol):
    """What is served: reads tokens after those that the caches hold, and puts theirs in."""

    def __call__(self, params: Any, tokens: jax.Array, caches: Any, valid: jax.Array, /) -> tuple[jax.Array, Sequence[KVCache]]:
        """Return logits `[batch, q_length, vocab]` and the caches with the tokens' keys and values in them.

        Args:
          params: weights.
          tokens: `[batch, q_length]` int32.
          caches: one per layer.
          valid: `[batch, q_length]` bool, which are tokens; the others are padding.
        """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What a model keeps of a token.

    Attributes:
      layers: caches, one per layer.
      kv_heads: heads of keys and values.
      head_dim: size of a key.
      v_dim: size of a value; None: `head_dim`.
      dtype: of keys and values as the model makes them.
      window: positions that attention sees; None for all.
    """

    layers: int
    kv_heads: int
    head_dim: int
    v_dim: int | None = None
    dtype: Any = "bfloat16"
    window: int | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slots:
    """What decoding carries from step to step.

    Attributes:
      caches: one per layer.
      last: `[slots]` int32, the token that each has just been given.
      active: `[slots]` bool, which hold a sequence.
      draw: how each draws.
    """

    caches: Caches
    last: jax.Array
    active: jax.Array
    draw: Draw


def make_caches(kind: str, shape: CacheShape, *, batch: int, capacity: int | None, options: Mapping[str, Any]) -> Caches:
    """Make an empty cache for every layer, under the ambient manager."""
    sizes = {"kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "v_dim": shape.v_dim, "dtype": shape.dtype, "window": shape.window}
    return tuple(caches.init(kind, batch=batch, capacity=capacity, **sizes, **options) for _ in range(shape.layers))


def make_slots(held: Caches) -> Slots:
    """Return slots without sequences."""
    batch = held[0].batch

    @functools.partial(jax.jit, static_argnums=0)
    def born(mode: str | None) -> tuple[jax.Array, jax.Array, Draw]:
        zeros = jnp.zeros(batch, jnp.int32)
        draw = Draw(temperature=jnp.zeros(batch), top_k=zeros + 1, top_p=jnp.ones(batch), seed=jnp.zeros(batch, jnp.uint32), index=zeros)
        laid: tuple[jax.Array, jax.Array, Draw] = _by_slot((zeros, jnp.zeros(batch, bool), draw), mode)
        return laid

    last, active, draw = born(held[0].spec.mode)
    return Slots(caches=held, last=last, active=active, draw=draw)


def prefill(model: Model, params: Any, held: Caches, tokens: Any, counts: Any, draw: Draw) -> tuple[Caches, jax.Array]:
    """Read the next tokens of prompts, and draw what would follow the last one.

    Args:
      model: what is served.
      params: its weights.
      held: a cache per layer, of the rows of the prefill batch.
      tokens: `[rows, chunk]` int32.
      counts: `[rows]` int32, how many of them are tokens.
      draw: how the rows draw.

    Returns:
      The caches, and `[rows]` int32 tokens, or what was refused.
    """
    valid = jnp.arange(tokens.shape[1], dtype=jnp.int32) < counts[:, None]
    logits, new = model(params, tokens, held, valid)
    last = jnp.take_along_axis(logits, jnp.maximum(counts, 1)[:, None, None] - 1, axis=1)[:, 0]
    return tuple(new), _drawn(last, held, tuple(new), counts, draw)


def insert(slots: Slots, source: Caches, into: jax.Array, first: jax.Array, draw: Draw) -> tuple[Slots, jax.Array]:
    """Move prompts that were read into slots.

    Args:
      slots: donated.
      source: of the prefill batch.
      into: `[rows]` int32 slots; their number or more: nowhere.
      first: `[rows]` int32, the first token of each.
      draw: how they draw; they have drawn one.

    Returns:
      The slots, and `[rows]` int8 codes of `Refusal`.
    """
    mode = slots.caches[0].spec.mode
    changes = [cache.insert(one, into) for cache, one in zip(slots.caches, source, strict=True)]
    refused = functools.reduce(jnp.maximum, (change.refused for change in changes))
    into = jnp.where(refused == 0, into, slots.last.shape[0])
    first, draw = _everywhere((first, draw), mode)
    draw = dataclasses.replace(draw, index=jnp.ones_like(draw.index))
    old = _everywhere((slots.last, slots.active, slots.draw), mode)
    given = (first, jnp.ones_like(into, dtype=bool), draw)
    last, active, drawing = _by_slot(jax.tree.map(lambda x, new: x.at[into].set(new, mode="drop"), old, given), mode)
    return Slots(caches=tuple(change.cache for change in changes), last=last, active=active, draw=drawing), refused


def decode(model: Model, slots: Slots, params: Any) -> tuple[Slots, jax.Array]:
    """Give every active slot its next token.

    Returns:
      The slots, and `[slots]` int32 tokens, or what was refused; anything for a slot that is not active.
    """
    mode = slots.caches[0].spec.mode
    logits, held = model(params, slots.last[:, None], slots.caches, slots.active[:, None])
    counts = slots.active.astype(jnp.int32)
    tokens = _by_slot(_drawn(logits[:, 0], slots.caches, tuple(held), counts, slots.draw), mode)
    draw = dataclasses.replace(slots.draw, index=slots.draw.index + counts)
    return Slots(caches=tuple(held), last=jnp.where(slots.active, jnp.maximum(tokens, 0), 0), active=slots.active, draw=draw), tokens


def clear(held: Caches, which: jax.Array) -> Caches:
    """Empty rows of caches; `[n]` int32, their number or more stands for none."""
    return tuple(cache.free(which).cache for cache in held)


def clear_slots(slots: Slots, which: jax.Array) -> Slots:
    """Empty slots; see `clear`."""
    mode = slots.caches[0].spec.mode
    active = _everywhere(slots.active, mode).at[which].set(False, mode="drop")
    return dataclasses.replace(slots, caches=clear(slots.caches, which), active=_by_slot(active, mode))
