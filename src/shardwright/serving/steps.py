"""The compiled functions that run on devices. The caches are donated to these functions.

`prefill` reads a chunk of every prompt into a row of the prefill batch. `insert` copies each
completely read prompt into its slot. If a prompt was read only in part, `park` copies it into its
slot, and `resume` copies it back. `decode` gives every active slot its next token. `clear` and
`clear_slots` empty rows and slots. `prefill_pages` and `decode_pages` do the same in pages that the
host assigns; there, nothing has to be inserted or cleared. No shape depends on the number of
sequences, so nothing is compiled twice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

from shardwright import caches
from shardwright.caches.base import KVCache
from shardwright.caches.paged.assigned import AssignedPages
from shardwright.caches.paged.cache import PagedCache
from shardwright.caches.sharding import ambient_sharding
from shardwright.caches.spec import CacheSpec
from shardwright.errors import ServingError
from shardwright.serving.sampling import Sampled, draw_of, limits_of, logprobs_of, sample
from shardwright.vocabulary.axes import BATCH, EMPTY

Caches = tuple[KVCache, ...]
# The pages of keys and of values of each layer.
Pools = tuple[tuple[jax.Array, jax.Array], ...]
S = TypeVar("S")
# Codes that a step returns instead of a token. NO_NUMBER: a logit is NaN or +inf, or all are -inf.
# REFUSED: a cache refused the tokens. MISCOUNTED: a cache grew by another number of tokens.
NO_NUMBER, REFUSED, MISCOUNTED = -1, -2, -3


class Model(Protocol):
    """A model.

    It reads new tokens, which follow the tokens in the caches, and appends their keys and values.
    """

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
    """The sizes of the keys and values that a model stores in a cache.

    Attributes:
      layers: Number of layers. Each layer has a cache.
      kv_heads: Number of heads of keys and values.
      head_dim: Size of a key.
      v_dim: Size of a value. None means `head_dim`.
      dtype: Dtype in which the model computes keys and values.
      window: Number of positions that a query sees. None means all.
    """

    layers: int
    kv_heads: int
    head_dim: int
    v_dim: int | None = None
    dtype: Any = "bfloat16"
    window: int | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotState:
    """The state of decoding.

    A slot is active, which means that decode gives it a token, until it has written as many tokens
    as its rules allow.

    Attributes:
      caches: One per layer.
      ends: `[slots, 2]` int32: the latest token of each slot, and how many tokens the slot has
        written.
      rules: `[5, slots]` uint32, as `rules_of` returns them; the limit of an empty slot is 0.
        Replicated. Decode does not change the rules.
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


def create_slots(caches: Caches) -> SlotState:
    """Return slots without sequences, with empty caches."""
    ends, rules = _empty_slots(caches[0].batch, caches[0].spec.mode)
    return SlotState(caches=caches, ends=ends, rules=rules)


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
    """Check that a model returned the caches that it was given, with tokens appended."""

    def types(caches: Any) -> list[Any]:
        arrays = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(caches)]
        return [*(type(cache) for cache in caches), *arrays]

    if not isinstance(new, (list, tuple)) or types(new) != types(old):
        raise ServingError(
            "the model returned other caches than it was given", path="model", fix=_RETURN
        )
    for layer, (after, before) in enumerate(zip(new, old, strict=True)):
        # An append always makes a new array `length`, even if it appends only padding. So the same
        # array means that the model did not append.
        if after.length is before.length:
            raise ServingError(
                f"the model returned the cache of layer {layer} unchanged, without the tokens",
                path="model",
                fix="return done.cache, where done is the result of append_and_attend",
            )


def prefill(
    model: Model, rows: Caches, params: Any, tokens: jax.Array, entries: jax.Array, rules: jax.Array
) -> tuple[Caches, Sampled]:
    """Read the next tokens of each prompt, and draw the token that follows these tokens.

    Args:
      model: The model.
      rows: Caches of the prefill batch, one per layer; donated.
      params: Weights.
      tokens: `[rows, chunk]` int32.
      entries: `[2, rows]` int32: how many tokens of each row are not padding, and 1 for a row that
        continues a prompt. Rows that do not continue a prompt are emptied first.
      rules: `[5, rows]`, as in `SlotState`; the limits are not read.

    Returns:
      The caches, and `[rows]` tokens: a token, NO_NUMBER, REFUSED or MISCOUNTED. Ignore the entry
      of a row without tokens.
    """
    count = tokens.shape[0]
    # A row that continues a prompt must not be emptied: `count`, which is no row, replaces its
    # number.
    empty = jnp.where(entries[1] > 0, count, jnp.arange(count, dtype=jnp.int32))
    # Empty rows in the same program, so that a new prompt needs no extra call.
    return _read_chunk(model, clear(rows, empty), params, tokens, entries[0], rules)


def _read_chunk(
    model: Model, rows: Caches, params: Any, tokens: jax.Array, counts: jax.Array, rules: jax.Array
) -> tuple[Caches, Sampled]:
    valid = jnp.arange(tokens.shape[1], dtype=jnp.int32) < counts[:, None]
    logits, new = read(model, params, tokens, rows, valid)
    # The logits of the last token of each row. If a row has no tokens, its result is ignored.
    last = jnp.take_along_axis(logits, jnp.maximum(counts, 1)[:, None, None] - 1, axis=1)[:, 0]
    return new, next_tokens(last, rows, new, counts, rules, jnp.zeros_like(counts))


def insert(
    slots: SlotState, source: Caches, entries: jax.Array, following: Sampled, rules: jax.Array
) -> tuple[SlotState, jax.Array]:
    """Copy completely read prompts into their slots.

    Args:
      slots: Donated.
      source: Caches of the prefill batch.
      entries: `[2, rows]` int32: the slot of each row, and the first token that follows its prompt.
        A negative token means that the token is in `following`. A row is not copied if its slot
        number is past the last slot.
      following: `[rows]`, as `prefill` returns it.
      rules: `[5, rows]`, as in `SlotState`.

    Returns:
      The slots, and `[rows]` int8 codes of `Refusal`.
    """
    mode = slots.caches[0].spec.mode
    into, first = replicated((entries[0], entries[1]), mode)
    # Replace the code of an error by token 0, because a code must not be looked up in the
    # embedding. The host will read the code from `following`, and end the request.
    first = jnp.maximum(jnp.where(first < 0, replicated(following.tokens, mode), first), 0)
    caches, codes = _replaced(slots.caches, source, into)
    refused = replicated(codes, mode)
    # A slot that refused its prompt must not become active.
    into = jnp.where(refused == 0, into, slots.ends.shape[0])
    # Every device has all new tokens and sets those of its own slots, so nothing is sent.
    named = into[:, None] == jnp.arange(slots.ends.shape[0], dtype=jnp.int32)
    last = by_slot(jnp.max(jnp.where(named, first[:, None], 0), axis=0), mode)
    is_new = by_slot(jnp.any(named, axis=0), mode)[:, None]
    ends = jnp.where(is_new, jnp.stack([last, jnp.ones_like(last)], axis=1), slots.ends)
    rules = slots.rules.at[:, into].set(replicated(rules, mode), mode="drop")
    return _placed(SlotState(caches=caches, ends=ends, rules=rules)), refused


def park(slots: SlotState, source: Caches, into: jax.Array) -> tuple[SlotState, jax.Array]:
    """Copy partly read prompts into their slots. The slots stay inactive.

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
    """Copy partly read prompts from their slots back into the prefill batch.

    Args:
      rows: Caches of the prefill batch, donated.
      source: Caches of the slots, or of another prefill batch.
      slots: `[rows]` int32, the slot that each row gets. A row does not change if its slot number
        is past the last slot.

    Returns:
      The caches, and `[rows]` int8 codes of `Refusal`.
    """
    count, batch = slots.shape[0], source[0].batch
    own = jnp.arange(count, dtype=jnp.int32)
    if isinstance(source[0], PagedCache):
        # Other slots are not read, because a copy of the rows of all slots may not fit into memory.
        named = tuple(cache.only(slots) for cache in source if isinstance(cache, PagedCache))
        return _replaced(rows, named, jnp.where(slots < batch, own, count))
    # `insert` needs the target of each row of the source, so invert `slots`. Slots that `slots`
    # does not name get the target `count`, which is no row.
    into = jnp.full(batch, count, jnp.int32).at[slots].set(own, mode="drop")
    rows, codes = _replaced(rows, source, into)
    codes = replicated(codes, rows[0].spec.mode)
    return rows, codes.at[slots].get(mode="fill", fill_value=0)


def _replaced(caches: Caches, source: Caches, into: jax.Array) -> tuple[Caches, jax.Array]:
    """Replace the sequences in slots `into` of the caches by copies of those in `source`.

    Return the caches, and codes of `Refusal`.
    """
    changes = [
        # An insert refuses a slot that holds a sequence, so empty the slot first. The refusal to
        # empty an empty slot is dropped here.
        cache.free(into).cache.insert(filled, into)
        for cache, filled in zip(caches, source, strict=True)
    ]
    codes = functools.reduce(jnp.maximum, (change.refused for change in changes))
    return tuple(change.cache for change in changes), codes


def decode(
    model: Model, most: int, caches: Caches, ends: jax.Array, rules: jax.Array, params: Any
) -> tuple[Caches, jax.Array, Sampled]:
    """Give every active slot its next tokens.

    Args:
      model: The model.
      most: Largest number of tokens that a slot gets in one call.
      caches: As in `SlotState`. Donated.
      ends: As in `SlotState`. Donated.
      rules: As in `SlotState`.
      params: Weights.

    Returns:
      The caches, the ends, and `[most, slots]` tokens: a token, NO_NUMBER, REFUSED or MISCOUNTED.
      Ignore the entries of a slot past its limit.
    """
    mode = caches[0].spec.mode

    def step(state: tuple[Caches, jax.Array]) -> tuple[tuple[Caches, jax.Array], Sampled]:
        caches, ends = state
        last, index = by_slot(ends[:, 0], mode), by_slot(ends[:, 1], mode)
        active = index < by_slot(limits_of(rules), mode)
        caches, sampled = _decode_one(model, params, caches, last, active, rules, index)
        # Replace the code of an error by token 0, because a code must not be looked up in the
        # embedding. The host ends the request.
        ends = jnp.stack([jnp.maximum(sampled.tokens, 0), index + active], axis=1)
        return (caches, rows_by_slot(ends, mode)), sampled

    (caches, ends), sampled = _repeat(most, step, (caches, ends))
    return caches, ends, sampled


def _decode_one(
    model: Model,
    params: Any,
    caches: Caches,
    last: jax.Array,
    active: jax.Array,
    rules: jax.Array,
    index: jax.Array,
) -> tuple[Caches, Sampled]:
    logits, new = read(model, params, last[:, None], caches, active[:, None])
    counts = active.astype(jnp.int32)
    return new, next_tokens(logits[:, 0], caches, new, counts, rules, index)


def _repeat(count: int, step: Callable[[S], tuple[S, Sampled]], state: S) -> tuple[S, Sampled]:
    """Return the state after `count` steps, and the tokens of all steps, stacked."""
    if count == 1:
        state, sampled = step(state)
        return state, jax.tree.map(lambda x: x[None], sampled)
    # A slot may reach its limit before the last step: `active` is computed anew in each step.
    return jax.lax.scan(lambda state, _: step(state), state, length=count)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedBatch:
    """The sequences of a call, in few arrays, because each transfer from the host costs time.

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


def prefill_pages(
    model: Model,
    spec: CacheSpec,
    pools: Pools,
    last: jax.Array,
    params: Any,
    tokens: jax.Array,
    entries: jax.Array,
    batch: PagedBatch,
) -> tuple[Pools, jax.Array, Sampled]:
    """Read the next tokens of prompts into their pages, and draw the token that follows.

    Args:
      model: The model.
      spec: Spec of a cache for `batch`.
      pools: Donated.
      last: `[slots]` int32, the latest token of each slot. Donated.
      params: Weights.
      tokens: `[batch, chunk]` int32.
      entries: `[2, batch]` int32: how many tokens of each row are not padding, and the slot whose
        latest token the row draws. If the row draws no such token, the slot number is past the last
        slot.
      batch: The sequences.

    Returns:
      The pools, the latest tokens, and `[batch]` tokens as in `prefill`.
    """
    caches = layers(spec, pools, batch.tables, batch.state[0])
    new, sampled = _read_chunk(model, caches, params, tokens, entries[0], batch.rules)
    tokens, into = replicated((jnp.maximum(sampled.tokens, 0), entries[1]), spec.mode)
    last = replicated(last, spec.mode).at[into].set(tokens, mode="drop")
    return pools_of(new), by_slot(last, spec.mode), sampled


def decode_pages(
    model: Model,
    spec: CacheSpec,
    most: int,
    pools: Pools,
    last: jax.Array,
    params: Any,
    batch: PagedBatch,
) -> tuple[Pools, jax.Array, Sampled]:
    """Give every slot its next tokens, in pages.

    Args:
      model: The model.
      spec: Spec of a cache for `batch`.
      most: Largest number of tokens that a slot gets in one call.
      pools: Donated.
      last: `[slots]` int32, the latest token of each slot. It is read for the slots whose latest
        token is not in `batch`. Donated.
      params: Weights.
      batch: The sequences. Their tables already have pages for the tokens that this call draws. A
        slot whose limit is 0 gets no token.

    Returns:
      The pools, the latest tokens, and `[most, batch]` tokens or codes. Ignore the tokens of a
      sequence past its limit.
    """
    mode = spec.mode
    # Rows 0 and 2 of `state` are the lengths and the numbers of written tokens. They are replicated
    # like the tables, so that no layer gathers them. The latest tokens are sharded like the slots:
    # every device has the tokens that it drew.
    counters, rules = replicated((batch.state[::2], batch.rules), mode)
    given = by_slot(batch.state[1], mode)
    last = by_slot(jnp.where(given < 0, last, given), mode)

    def step(
        state: tuple[Pools, jax.Array, jax.Array],
    ) -> tuple[tuple[Pools, jax.Array, jax.Array], Sampled]:
        pools, last, counters = state
        lengths, index = counters
        active = replicated(index < limits_of(rules), mode)
        caches = layers(spec, pools, batch.tables, lengths)
        caches, sampled = _decode_one(model, params, caches, last, active, rules, index)
        # As in `decode`, replace the code of an error by token 0, which can be looked up.
        last = by_slot(jnp.maximum(sampled.tokens, 0), mode)
        return (pools_of(caches), last, replicated(counters + active, mode)), sampled

    (pools, last, _), sampled = _repeat(most, step, (pools, last, counters))
    return pools, last, sampled


def layers(spec: CacheSpec, pools: Pools, tables: Any, lengths: Any) -> Caches:
    """Return one cache per layer. The caches share the arrays of tables and lengths."""
    tables, lengths = replicated((tables, lengths), spec.mode)
    return tuple(
        AssignedPages(spec=spec, length=lengths, k_pages=k, v_pages=v, tables=tables)
        for k, v in pools
    )


def pools_of(caches: Caches) -> Pools:
    """Return the pools of paged caches, one per layer."""
    pools = []
    for cache in caches:
        assert isinstance(cache, PagedCache | AssignedPages)
        pools.append((cache.k_pages, cache.v_pages))
    return tuple(pools)


@functools.partial(jax.jit, static_argnums=(0, 1))
def no_tokens(slots: int, mode: str | None) -> jax.Array:
    """Return `[slots]` int32 zeros, the latest tokens of slots without sequences."""
    return by_slot(jnp.zeros(slots, jnp.int32), mode)


def clear(caches: Caches, rows: jax.Array) -> Caches:
    """Empty rows of caches.

    Args:
      caches: One per layer. Donated.
      rows: `[n]` int32. Numbers past the last row are ignored.
    """
    return tuple(cache.free(rows).cache for cache in caches)


def clear_slots(slots: SlotState, cleared: jax.Array) -> SlotState:
    """Empty slots.

    Args:
      slots: All slots. Donated.
      cleared: `[n]` int32. Numbers past the last slot are ignored.
    """
    # A limit of 0 makes a slot inactive.
    rules = slots.rules.at[0, cleared].set(0, mode="drop")
    return _placed(dataclasses.replace(slots, caches=clear(slots.caches, cleared), rules=rules))


def next_tokens(
    logits: jax.Array,
    old: Caches,
    new: Caches,
    counts: jax.Array,
    rules: jax.Array,
    index: jax.Array,
) -> Sampled:
    """Draw the next tokens. If a cache did not grow by `counts`, return a code as the token."""
    mode = old[0].spec.mode
    rules = replicated(rules, mode)
    # Every device has the temperatures of all slots. If `is_greedy` and `draw` shared one array,
    # XLA would shard it by slot, and `jnp.all` would need a collective. So compute `draw_of` twice.
    # The rules of empty slots are zeros, so such slots count as greedy.
    is_greedy = jnp.all(draw_of(rules, index).temperature == 0)
    draw = jax.tree.map(lambda leaf: by_slot(leaf, mode), draw_of(rules, index))
    logits = rows_by_slot(logits, mode)
    tokens = by_slot(sample(logits, draw, is_greedy=is_greedy), mode)
    logprobs = by_slot(logprobs_of(logits, jnp.maximum(tokens, 0)), mode)
    # Compare lengths, because the model may ignore a refusal: a cache that refuses keeps its
    # length. Compare layer by layer and not stacked: XLA then computes all layers in one pass over
    # the slots.
    grew = grew_or_not = jnp.ones_like(by_slot(counts, mode), bool)
    for before, after in zip(old, new, strict=True):
        growth = by_slot(after.length - before.length, mode)
        grew = grew & (growth == by_slot(counts, mode))
        grew_or_not = grew_or_not & ((growth == by_slot(counts, mode)) | (growth == 0))
    tokens = jnp.where(grew, tokens, jnp.where(grew_or_not, REFUSED, MISCOUNTED))
    return Sampled(packed=rows_by_slot(Sampled.of(by_slot(tokens, mode), logprobs).packed, mode))


def _placed(slots: SlotState) -> SlotState:
    # Without a constraint, XLA may choose another sharding in every function. Then each function
    # would be compiled again for the result of every other function.
    mode = slots.caches[0].spec.mode
    ends, rules = rows_by_slot(slots.ends, mode), replicated(slots.rules, mode)
    return SlotState(caches=slots.caches, ends=ends, rules=rules)


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
