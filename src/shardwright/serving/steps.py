"""What runs on devices: five functions to be compiled, with the caches donated, and the arrays that they pass on.

Prefill reads a chunk of every prompt in a cache of its own, insert moves those that are read into slots, decode gives every
active slot its next token, clear empties rows or slots. None depends on how many sequences there are: nothing is compiled twice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from shardwright import caches
from shardwright.caches.base import KVCache
from shardwright.caches.sharding import ambient_sharding
from shardwright.errors import ServingError
from shardwright.serving.sampling import Draw, sample
from shardwright.vocabulary.axes import BATCH, EMPTY

Caches = tuple[KVCache, ...]
# What stands for a token where there is none: the logits are not numbers; a cache took nothing of what it was given, or other than that.
NO_NUMBER, REFUSED, MISCOUNTED = -1, -2, -3


class Model(Protocol):
    """What is served: reads tokens after those that the caches hold, and puts theirs in."""

    def __call__(
        self, params: Any, tokens: jax.Array, caches: Any, valid: jax.Array, /
    ) -> tuple[jax.Array, Sequence[KVCache]]:
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
      active: `[slots]` bool, which hold a sequence; the same everywhere.
      draw: how each draws; the same everywhere.
    """

    caches: Caches
    last: jax.Array
    active: jax.Array
    draw: Draw


def make_caches(
    kind: str, shape: CacheShape, *, batch: int, capacity: int | None, options: Mapping[str, Any]
) -> Caches:
    """Make an empty cache for every layer, under the ambient manager."""
    sizes = {
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "v_dim": shape.v_dim,
        "dtype": shape.dtype,
        "window": shape.window,
    }
    return tuple(
        caches.init(kind, batch=batch, capacity=capacity, **sizes, **options)
        for _ in range(shape.layers)
    )


def make_slots(held: Caches) -> Slots:
    """Return slots without sequences, around empty caches."""
    last, active, draw = _born(held[0].batch, held[0].spec.mode)
    return Slots(caches=held, last=last, active=active, draw=draw)


def _nothing(batch: int, mode: str | None) -> tuple[jax.Array, jax.Array, Draw]:
    zeros, ones = jnp.zeros(batch, jnp.int32), jnp.ones(batch)
    draw = Draw(
        temperature=jnp.zeros(batch),
        top_k=zeros + 1,
        top_p=ones,
        seed=zeros.astype(jnp.uint32),
        index=zeros,
    )
    return _by_slot(zeros, mode), *_everywhere((zeros.astype(bool), draw), mode)


_born = jax.jit(_nothing, static_argnums=(0, 1))


def read(
    model: Model, params: Any, tokens: Any, held: Caches, valid: Any
) -> tuple[jax.Array, Caches]:
    """Return what a model does: logits `[batch, q_length, vocab]`, and the caches.

    Raises:
      ServingError: it does not return what `Model` says.
    """
    found: Any = model(params, tokens, held, valid)
    fix = "return (logits [batch, q_length, vocab], one cache per layer, as append_and_attend gives them)"
    shapes = (
        [getattr(part, "shape", None) for part in found]
        if isinstance(found, tuple) and len(found) == 2
        else [None]
    )
    if (
        shapes[0] is None
        or len(shapes[0]) != 3
        or shapes[0][:2] != tokens.shape
        or not shapes[0][2]
    ):
        said = type(found).__name__ if shapes[0] is None else shapes[0]
        raise ServingError(
            f"the model returned {said} for tokens of shape {tokens.shape}", path="model", fix=fix
        )
    logits, new = found
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ServingError(
            f"the model returned logits of {logits.dtype}",
            path="model",
            fix="return floating point, one logit per token",
        )
    theirs, ours = (
        [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(part)] for part in (new, held)
    )
    if (
        not isinstance(new, (list, tuple))
        or theirs != ours
        or [type(one) for one in new] != [type(one) for one in held]
    ):
        raise ServingError(
            "the model returned other caches than it was given", path="model", fix=fix
        )
    for layer, (one, before) in enumerate(zip(new, held, strict=True)):
        if one.length is before.length:
            what = (
                f"the model returned the cache of layer {layer} as it was given, without the tokens"
            )
            raise ServingError(
                what,
                path="model",
                fix="return done.cache, where done is what append_and_attend gives",
            )
    return logits, tuple(new)


def prefill(
    model: Model, rows: Caches, params: Any, tokens: jax.Array, counts: jax.Array, draw: Draw
) -> tuple[Caches, jax.Array]:
    """Read the next tokens of prompts, and draw what would follow the last one.

    Args:
      model: what is served.
      rows: a cache per layer, of the rows of the prefill batch; donated.
      params: weights.
      tokens: `[rows, chunk]` int32.
      counts: `[rows]` int32, how many of them are tokens.
      draw: how the rows draw.

    Returns:
      The caches, and `[rows]` int32 tokens, NO_NUMBER, REFUSED or MISCOUNTED; anything for a row without tokens.
    """
    valid = jnp.arange(tokens.shape[1], dtype=jnp.int32) < counts[:, None]
    logits, new = read(model, params, tokens, rows, valid)
    last = jnp.take_along_axis(logits, jnp.maximum(counts, 1)[:, None, None] - 1, axis=1)[:, 0]
    return new, _next(last, rows, new, counts, draw)


def insert(
    slots: Slots, source: Caches, into: jax.Array, first: jax.Array, draw: Draw
) -> tuple[Slots, jax.Array]:
    """Move prompts that were read into slots.

    Args:
      slots: donated.
      source: of the prefill batch.
      into: `[rows]` int32 slots; their number or more: nowhere.
      first: `[rows]` int32, the first token of each.
      draw: how they draw, which they have done once.

    Returns:
      The slots, and `[rows]` int8 codes of `Refusal`.
    """
    mode = slots.caches[0].spec.mode
    changes = [cache.insert(one, into) for cache, one in zip(slots.caches, source, strict=True)]
    refused = _everywhere(
        functools.reduce(jnp.maximum, (change.refused for change in changes)), mode
    )
    into = jnp.where(refused == 0, into, slots.active.shape[0])
    given = (
        first,
        jnp.ones_like(into, dtype=bool),
        dataclasses.replace(draw, index=jnp.ones_like(draw.index)),
    )
    old = (_everywhere(slots.last, mode), slots.active, slots.draw)
    last, active, drawing = jax.tree.map(
        lambda x, new: x.at[into].set(new, mode="drop"), old, _everywhere(given, mode)
    )
    held = tuple(change.cache for change in changes)
    return _laid(Slots(caches=held, last=last, active=active, draw=drawing)), refused


def decode(model: Model, slots: Slots, params: Any) -> tuple[Slots, jax.Array]:
    """Give every active slot its next token.

    Args:
      model: what is served.
      slots: donated.
      params: weights.

    Returns:
      The slots, and `[slots]` int32 tokens, NO_NUMBER, REFUSED or MISCOUNTED; anything for a slot that is not active.
    """
    mode = slots.caches[0].spec.mode
    counts = slots.active.astype(jnp.int32)
    logits, new = read(
        model, params, slots.last[:, None], slots.caches, _by_slot(slots.active, mode)[:, None]
    )
    tokens = _next(logits[:, 0], slots.caches, new, counts, slots.draw)
    draw = dataclasses.replace(slots.draw, index=slots.draw.index + counts)
    return _laid(
        Slots(caches=new, last=jnp.maximum(tokens, 0), active=slots.active, draw=draw)
    ), tokens


def clear(held: Caches, which: jax.Array) -> Caches:
    """Empty rows of caches, which are donated; `which` is `[n]` int32, where their number or more stands for none."""
    return tuple(cache.free(which).cache for cache in held)


def clear_slots(slots: Slots, which: jax.Array) -> Slots:
    """Empty slots, which are donated; see `clear`."""
    return _laid(
        dataclasses.replace(
            slots,
            caches=clear(slots.caches, which),
            active=slots.active.at[which].set(False, mode="drop"),
        )
    )


def _next(logits: jax.Array, old: Caches, new: Caches, counts: jax.Array, draw: Draw) -> jax.Array:
    mode = old[0].spec.mode
    drawn = sample(ambient_sharding(mode).place(logits, (BATCH, EMPTY)), draw)
    counts = _by_slot(counts, mode)
    # Whatever the model does with a refusal, a cache that refuses keeps its length.
    grown = jnp.stack(
        [after.length - before.length for before, after in zip(old, new, strict=True)]
    )
    code = jnp.where(jnp.all((grown == counts) | (grown == 0), axis=0), REFUSED, MISCOUNTED)
    return _by_slot(jnp.where(jnp.all(grown == counts, axis=0), drawn, code), mode)


def _laid(slots: Slots) -> Slots:
    # What the partitioner would choose may differ from function to function, and each would be compiled for each.
    mode = slots.caches[0].spec.mode
    active, draw = _everywhere((slots.active, slots.draw), mode)
    return Slots(caches=slots.caches, last=_by_slot(slots.last, mode), active=active, draw=draw)


def _by_slot(x: jax.Array, mode: str | None) -> jax.Array:
    return ambient_sharding(mode).place(x, (BATCH,))


def _everywhere(x: Any, mode: str | None) -> Any:
    return jax.tree.map(lambda leaf: ambient_sharding(mode).place(leaf, (EMPTY,)), x)
