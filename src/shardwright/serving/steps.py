"""The compiled functions that run on devices. The caches are donated to them.

`prefill` reads a chunk of every prompt into a row of the prefill batch. `insert` copies prompts
that are completely read into slots. `park` copies a prompt that is partly read into its slot, and
`resume` copies it back. `decode` gives every active slot its next token. `clear` and `clear_slots`
empty rows and slots. No shape depends on the number of sequences, so nothing is compiled twice.
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
from shardwright.caches.paged.cache import PagedCache
from shardwright.caches.sharding import ambient_sharding
from shardwright.errors import ServingError
from shardwright.serving.sampling import Drawn, draw_of, limits_of, logprobs_of, sample
from shardwright.vocabulary.axes import BATCH, EMPTY

Caches = tuple[KVCache, ...]
# Codes that a step returns instead of a token. NO_NUMBER: a logit is NaN or +inf, or all are -inf.
# REFUSED: a cache refused the tokens. MISCOUNTED: a cache grew by another number of tokens.
NO_NUMBER, REFUSED, MISCOUNTED = -1, -2, -3


class Model(Protocol):
    """A model. It reads the tokens after those in the caches, and appends their keys and values."""

    def __call__(
        self, params: Any, tokens: jax.Array, caches: Any, valid: jax.Array, /
    ) -> tuple[jax.Array, Sequence[KVCache]]:
        """Return logits `[batch, q_length, vocab]`, and the caches after the tokens.

        Args:
          params: Weights.
          tokens: `[batch, q_length]` int32.
          caches: One per layer.
          valid: `[batch, q_length]` bool, True for tokens and False for padding.
        """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The sizes of what a model stores in a cache for a token.

    Attributes:
      layers: Number of layers. Each layer has a cache.
      kv_heads: Number of heads of keys and values.
      head_dim: Size of a key.
      v_dim: Size of a value. None means `head_dim`.
      dtype: Dtype of keys and values, as the model computes them.
      window: Number of positions that attention sees. None means all.
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
    """The state of decoding.

    A slot is active, which means that decode gives it a token, until it has written as many tokens
    as its rules allow.

    Attributes:
      caches: One per layer.
      ends: `[slots, 2]` int32: the latest token of each slot, and how many tokens it has written.
      rules: `[5, slots]` uint32, as `rules_of` returns them; the limit of an empty slot is 0.
        Replicated. Decode only reads them.
    """

    caches: Caches
    ends: jax.Array
    rules: jax.Array


def create_caches(
    kind: str, shape: CacheShape, *, batch: int, capacity: int | None, options: Mapping[str, Any]
) -> Caches:
    """Create an empty cache for every layer, sharded by the ambient manager."""
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


def create_slots(caches: Caches) -> Slots:
    """Return slots without sequences, with empty caches."""
    ends, rules = _empty_slots(caches[0].batch, caches[0].spec.mode)
    return Slots(caches=caches, ends=ends, rules=rules)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _empty_slots(batch: int, mode: str | None) -> tuple[jax.Array, jax.Array]:
    ends, rules = jnp.zeros((batch, 2), jnp.int32), jnp.zeros((5, batch), jnp.uint32)
    return rows_by_slot(ends, mode), replicated(rules, mode)


def read(
    model: Model, params: Any, tokens: Any, caches: Caches, valid: Any
) -> tuple[jax.Array, Caches]:
    """Call the model. Return logits `[batch, q_length, vocab]` and the caches after the tokens.

    Raises:
      ServingError: The model does not return what `Model` describes.
    """
    returned: Any = model(params, tokens, caches, valid)
    logits, new = _check_pair(returned, tokens)
    _check_caches(new, caches)
    return logits, tuple(new)


_RETURN = (
    "return (logits [batch, q_length, vocab], one cache per layer, as append_and_attend gives them)"
)


def _check_pair(returned: Any, tokens: Any) -> tuple[jax.Array, Any]:
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    shape = getattr(returned[0], "shape", None) if is_pair else None
    if shape is None or len(shape) != 3 or shape[:2] != tokens.shape or not shape[2]:
        given = type(returned).__name__ if shape is None else f"logits of shape {shape}"
        raise ServingError(
            f"the model returned {given} for tokens of shape {tokens.shape}",
            path="model",
            fix=_RETURN,
        )
    logits, new = returned
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ServingError(
            f"the model returned logits of {logits.dtype}",
            path="model",
            fix="return floating-point logits, one per token of the vocabulary",
        )
    return logits, new


def _check_caches(new: Any, old: Caches) -> None:
    """Check that a model returned the caches that it was given, after an append."""

    def types(caches: Any) -> list[Any]:
        arrays = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(caches)]
        return [*(type(cache) for cache in caches), *arrays]

    if not isinstance(new, (list, tuple)) or types(new) != types(old):
        raise ServingError(
            "the model returned other caches than it was given", path="model", fix=_RETURN
        )
    for layer, (after, before) in enumerate(zip(new, old, strict=True)):
        if after.length is before.length:
            raise ServingError(
                f"the model returned the cache of layer {layer} unchanged, without the tokens",
                path="model",
                fix="return done.cache, where done is the result of append_and_attend",
            )


def prefill(
    model: Model, rows: Caches, params: Any, tokens: jax.Array, counts: jax.Array, rules: jax.Array
) -> tuple[Caches, Drawn]:
    """Read the next tokens of prompts, and draw the token that follows the last one.

    Args:
      model: The model.
      rows: Caches of the prefill batch, one per layer; donated.
      params: Weights.
      tokens: `[rows, chunk]` int32.
      counts: `[rows]` int32, how many tokens of each row are not padding.
      rules: `[5, rows]`, as in `Slots`; the limits are not read.

    Returns:
      The caches, and `[rows]` tokens: a token, NO_NUMBER, REFUSED or MISCOUNTED. Ignore the entry
      of a row without tokens.
    """
    valid = jnp.arange(tokens.shape[1], dtype=jnp.int32) < counts[:, None]
    logits, new = read(model, params, tokens, rows, valid)
    last = jnp.take_along_axis(logits, jnp.maximum(counts, 1)[:, None, None] - 1, axis=1)[:, 0]
    return new, next_tokens(last, rows, new, counts, rules, jnp.zeros_like(counts))


def insert(
    slots: Slots, source: Caches, entries: jax.Array, following: Drawn, rules: jax.Array
) -> tuple[Slots, jax.Array]:
    """Copy prompts that are completely read into slots.

    Args:
      slots: Donated.
      source: Caches of the prefill batch.
      entries: `[2, rows]` int32: the slot of each row, and its first generated token, which is
        negative if it is that in `following`. A row with a number past the last slot is not copied.
      following: `[rows]`, as `prefill` returns it.
      rules: `[5, rows]`, as in `Slots`.

    Returns:
      The slots, and `[rows]` int8 codes of `Refusal`.
    """
    mode = slots.caches[0].spec.mode
    into, first = replicated((entries[0], entries[1]), mode)
    # A code instead of a token: the host will read it, and end the request.
    first = jnp.maximum(jnp.where(first < 0, replicated(following.tokens, mode), first), 0)
    caches, codes = _replaced(slots.caches, source, into)
    refused = replicated(codes, mode)
    into = jnp.where(refused == 0, into, slots.ends.shape[0])
    new = replicated(jnp.stack([first, jnp.ones_like(first)], axis=1), mode)
    ends = replicated(slots.ends, mode).at[into].set(new, mode="drop")
    rules = slots.rules.at[:, into].set(replicated(rules, mode), mode="drop")
    return _placed(Slots(caches=caches, ends=ends, rules=rules)), refused


def park(slots: Slots, source: Caches, into: jax.Array) -> tuple[Slots, jax.Array]:
    """Copy prompts that are partly read into their slots, which stay inactive.

    Args:
      slots: Donated.
      source: Caches of the prefill batch.
      into: `[rows]` int32, as in `insert`.

    Returns:
      The slots, and `[rows]` int8 codes of `Refusal`.
    """
    caches, codes = _replaced(slots.caches, source, into)
    return _placed(dataclasses.replace(slots, caches=caches)), codes


def resume(rows: Caches, source: Caches, slots: jax.Array) -> tuple[Caches, jax.Array]:
    """Copy prompts that are partly read from their slots into the prefill batch.

    Args:
      rows: Caches of the prefill batch, donated.
      source: Caches of the slots, or of another prefill batch.
      slots: `[rows]` int32, the slot that each row gets. A row with a number past the last slot
        does not change.

    Returns:
      The caches, and `[rows]` int8 codes of `Refusal`.
    """
    count, batch = slots.shape[0], source[0].batch
    own = jnp.arange(count, dtype=jnp.int32)
    if isinstance(source[0], PagedCache):
        # Other slots are not read, because a copy of all slots' rows may not fit.
        named = tuple(cache.only(slots) for cache in source if isinstance(cache, PagedCache))
        return _replaced(rows, named, jnp.where(slots < batch, own, count))
    into = jnp.full(batch, count, jnp.int32).at[slots].set(own, mode="drop")
    rows, codes = _replaced(rows, source, into)
    codes = replicated(codes, rows[0].spec.mode)
    return rows, codes.at[slots].get(mode="fill", fill_value=0)


def _replaced(caches: Caches, source: Caches, into: jax.Array) -> tuple[Caches, jax.Array]:
    """Replace sequences in the caches by copies. Return the caches, and codes of `Refusal`."""
    changes = [
        cache.free(into).cache.insert(filled, into)
        for cache, filled in zip(caches, source, strict=True)
    ]
    codes = functools.reduce(jnp.maximum, (change.refused for change in changes))
    return tuple(change.cache for change in changes), codes


def decode(
    model: Model, most: int, caches: Caches, ends: jax.Array, rules: jax.Array, params: Any
) -> tuple[Caches, jax.Array, Drawn]:
    """Give every active slot its next tokens.

    Args:
      model: The model.
      most: Largest number of tokens that a slot gets in one call.
      caches: As in `Slots`. Donated.
      ends: As in `Slots`. Donated.
      rules: As in `Slots`.
      params: Weights.

    Returns:
      The caches, the ends, and `[most, slots]` tokens: a token, NO_NUMBER, REFUSED or MISCOUNTED.
      Ignore the entries of a slot after its limit.
    """

    def step(state: tuple[Caches, jax.Array], _: Any) -> tuple[tuple[Caches, jax.Array], Drawn]:
        caches, ends, drawn = _decode_one(model, *state, rules, params)
        return (caches, ends), drawn

    if most == 1:
        (caches, ends), drawn = step((caches, ends), None)
        return caches, ends, jax.tree.map(lambda x: x[None], drawn)
    (caches, ends), drawn = jax.lax.scan(step, (caches, ends), length=most)
    return caches, ends, drawn


def _decode_one(
    model: Model, caches: Caches, ends: jax.Array, rules: jax.Array, params: Any
) -> tuple[Caches, jax.Array, Drawn]:
    mode = caches[0].spec.mode
    last, index = by_slot(ends[:, 0], mode), by_slot(ends[:, 1], mode)
    active = index < by_slot(limits_of(rules), mode)
    logits, new = read(model, params, last[:, None], caches, active[:, None])
    counts = active.astype(jnp.int32)
    drawn = next_tokens(logits[:, 0], caches, new, counts, rules, index)
    ends = jnp.stack([jnp.maximum(drawn.tokens, 0), index + counts], axis=1)
    return new, rows_by_slot(ends, mode), drawn


def clear(caches: Caches, rows: jax.Array) -> Caches:
    """Empty rows of caches, which are donated.

    Args:
      caches: One per layer.
      rows: `[n]` int32. Numbers past the last row are ignored.
    """
    return tuple(cache.free(rows).cache for cache in caches)


def clear_slots(slots: Slots, cleared: jax.Array) -> Slots:
    """Empty slots, which are donated.

    Args:
      slots: All slots.
      cleared: `[n]` int32. Numbers past the last slot are ignored.
    """
    rules = slots.rules.at[0, cleared].set(0, mode="drop")
    return _placed(dataclasses.replace(slots, caches=clear(slots.caches, cleared), rules=rules))


def next_tokens(
    logits: jax.Array,
    old: Caches,
    new: Caches,
    counts: jax.Array,
    rules: jax.Array,
    index: jax.Array,
) -> Drawn:
    """Draw the next tokens, or return codes where a cache did not grow by `counts`."""
    mode = old[0].spec.mode
    rules = replicated(rules, mode)
    # Every device has the temperatures of all slots. To reduce those of its own takes a collective.
    is_greedy = jnp.all(draw_of(rules, index).temperature == 0)
    draw = jax.tree.map(lambda leaf: by_slot(leaf, mode), draw_of(rules, index))
    logits = rows_by_slot(logits, mode)
    tokens = by_slot(sample(logits, draw, is_greedy=is_greedy), mode)
    logprobs = by_slot(logprobs_of(logits, jnp.maximum(tokens, 0)), mode)
    counts = by_slot(counts, mode)
    # The model may ignore a refusal, but a cache that refuses keeps its length.
    growth = jnp.stack(
        [after.length - before.length for before, after in zip(old, new, strict=True)]
    )
    code = jnp.where(jnp.all((growth == counts) | (growth == 0), axis=0), REFUSED, MISCOUNTED)
    tokens = by_slot(jnp.where(jnp.all(growth == counts, axis=0), tokens, code), mode)
    return Drawn(packed=rows_by_slot(Drawn.of(tokens, logprobs).packed, mode))


def _placed(slots: Slots) -> Slots:
    # Without a constraint, the partitioner may choose another sharding in every function. Then each
    # function would be compiled again for the result of every other one.
    mode = slots.caches[0].spec.mode
    ends, rules = rows_by_slot(slots.ends, mode), replicated(slots.rules, mode)
    return Slots(caches=slots.caches, ends=ends, rules=rules)


def by_slot(x: jax.Array, mode: str | None) -> jax.Array:
    """Return an array `[batch]`, sharded like the caches of a mode."""
    return ambient_sharding(mode).place(x, (BATCH,))


def rows_by_slot(x: jax.Array, mode: str | None) -> jax.Array:
    """Return an array `[batch, n]`, whose rows are sharded like the caches of a mode."""
    return ambient_sharding(mode).place(x, (BATCH, EMPTY))


def replicated(x: Any, mode: str | None) -> Any:
    """Return a tree of arrays, replicated over the mesh."""
    return jax.tree.map(
        lambda leaf: ambient_sharding(mode).place(leaf, (EMPTY,) * jnp.ndim(leaf)), x
    )
