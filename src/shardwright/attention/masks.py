"""Masks as values (rules and arrays), evaluated by position on any block. True = attend.

A query at position p and a key at position r attend to each other if all of these hold:

- `r >= 0`: a negative position marks a row without a key (padding, or an empty row of a cache);
- causal: `r <= p`;
- window (left, right): `p - left <= r <= p + right`, None for no bound. A window of W tokens that
  counts the query itself is `(W - 1, 0)`;
- chunk C: `p // C == r // C`;
- segments: the two rows have equal ids;
- lengths: `r < length` of the sequence;
- a dense mask, if given, says True;
- the bias, if given, is more than -2e38 (`bias_hides`).

Masks use positions and not row numbers. Therefore no extra rules are needed for a permuted batch, a
shard of a sequence, or a cache.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from shardwright.errors import AttentionError
from shardwright.vocabulary.integers import as_integer, read_integer

# A bias of at most this number hides a key: -inf, finfo.min of float32 or bfloat16,
# DEFAULT_MASK_VALUE. A bias that is to be added, even -1e9, is far larger.
_HIDING_BIAS = -2e38
T = TypeVar("T", int, jax.Array)
Window = tuple[int | None, int | None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MaskRules:
    """The static part of a mask, which depends only on positions. Hashable.

    Attributes:
      causal: Whether a query sees only keys up to its own position.
      window: (left, right): how many positions a query sees before and after its own, each None for
        no bound. None means no window.
      chunk: Positions per chunk, or None. A query sees only keys of its own chunk.
    """

    causal: bool = False
    window: Window | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            object.__setattr__(self, "window", _read_window(self.window))
        if self.chunk is not None:
            fix = "pass the number of positions per chunk, such as 8192"
            chunk = read_integer("chunk", self.chunk, error=AttentionError, fix=fix)
            object.__setattr__(self, "chunk", chunk)

    @property
    def positional(self) -> bool:
        """Whether the rules depend on the position of a query."""
        return self.causal or self.window is not None or self.chunk is not None

    @property
    def bounds(self) -> Window:
        """How far a query sees to the left and to the right; None for no bound."""
        left, right = self.window or (None, None)
        return left, 0 if self.causal else right

    def __and__(self, other: MaskRules) -> MaskRules:
        window, chunk = self.window or other.window, self.chunk or other.chunk
        if self.window is not None and other.window is not None:
            left, right = (
                min((side for side in sides if side is not None), default=None)
                for sides in zip(self.window, other.window, strict=True)
            )
            window = left, right
        if self.chunk is not None and other.chunk is not None:
            chunk, longer = sorted((self.chunk, other.chunk))
            if longer % chunk:
                raise AttentionError(
                    f"chunks of {chunk} and of {longer} positions do not nest",
                    fix="use chunks of equal lengths, or one that is a multiple of the other",
                )
        return MaskRules(causal=self.causal or other.causal, window=window, chunk=chunk)


def _read_window(window: Any) -> Window:
    sides = window if isinstance(window, (tuple, list)) and len(window) == 2 else (-1,)
    read = tuple(None if side is None else as_integer(side) for side in sides)
    bad = [
        side
        for side, given in zip(read, sides, strict=True)
        if given is not None and (side is None or not 0 <= side < 2**30)
    ]
    if bad:
        raise AttentionError(
            f"window={window!r} is not a pair of lengths, each from 0 to 2**30 - 1 or None",
            fix="pass (left, right), with None for no bound: (w - 1, 0) is the query's own token "
            "and w - 1 before it, (w, w) is w on each side",
        )
    left, right = read
    return left, right


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("q_segment_ids", "kv_segment_ids", "lengths", "dense"),
    meta_fields=("rules",),
)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mask:
    """A mask as a value: rules by position, and arrays. It is a pytree. Combine masks with `&`.

    >>> (causal() & window(left=3)).rules
    MaskRules(causal=True, window=(3, None), chunk=None)

    Attributes:
      rules: The mask rules, which are static.
      q_segment_ids: `[batch, q_length]` int, or None.
      kv_segment_ids: `[batch, kv_length]` int. None if and only if `q_segment_ids` is None.
      lengths: `[batch]` int, or None. Keys at positions from this length on are hidden.
      dense: Bool `[batch, heads, q_length, kv_length]`, where each dim has its full size or 1; or
        None.
    """

    rules: MaskRules = MaskRules()
    q_segment_ids: Any = None
    kv_segment_ids: Any = None
    lengths: Any = None
    dense: Any = None

    def check_segments(self) -> None:
        """Check that either both queries and keys have segment ids, or neither.

        The constructor cannot check this, because JAX also builds this pytree with leaves that are
        not arrays.

        Raises:
          AttentionError: Only one of the two has segment ids.
        """
        if (self.q_segment_ids is None) == (self.kv_segment_ids is None):
            return
        has, lacks = ("q", "kv") if self.kv_segment_ids is None else ("kv", "q")
        what = f"a mask has {has}_segment_ids without {lacks}_segment_ids"
        raise AttentionError(
            what,
            path="mask",
            fix="give the mask both, or build it with segments(q_segment_ids, kv_segment_ids)",
        )

    def __and__(self, other: Mask) -> Mask:
        self.check_segments()
        other.check_segments()
        if self.q_segment_ids is not None and other.q_segment_ids is not None:
            raise AttentionError(
                "both masks have segments",
                fix="combine the segment ids of both masks, and call segments() once",
            )
        segmented = self if self.q_segment_ids is not None else other
        return Mask(
            rules=self.rules & other.rules,
            q_segment_ids=segmented.q_segment_ids,
            kv_segment_ids=segmented.kv_segment_ids,
            lengths=_either(jnp.minimum, self.lengths, other.lengths),
            dense=_either(jnp.logical_and, self.dense, other.dense),
        )


def _either(combine: Any, a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return combine(a, b)


def full() -> Mask:
    """Return the mask that hides nothing."""
    return Mask()


def causal() -> Mask:
    """Return the mask that hides later positions from a query."""
    return Mask(rules=MaskRules(causal=True))


def window(left: int | None = None, right: int | None = None) -> Mask:
    """Return the mask that shows `left` positions before a query and `right` after it.

    None means no bound.
    """
    return Mask(rules=MaskRules(window=(left, right)))


def chunk(length: int) -> Mask:
    """Return the mask that shows a query only positions in its own chunk of `length`."""
    return Mask(rules=MaskRules(chunk=length))


def segments(q_segment_ids: Any, kv_segment_ids: Any = None) -> Mask:
    """Return the mask that shows rows with equal ids to each other.

    Args:
      q_segment_ids: `[batch, q_length]` int.
      kv_segment_ids: `[batch, kv_length]` int. Defaults to those of the queries.
    """
    return Mask(
        q_segment_ids=q_segment_ids,
        kv_segment_ids=q_segment_ids if kv_segment_ids is None else kv_segment_ids,
    )


def lengths(valid: Any) -> Mask:
    """Return the mask that shows sequence b only keys at positions below `valid[b]`."""
    return Mask(lengths=valid)


def dense(attend: Any) -> Mask:
    """Return a mask from a bool array, True = attend.

    Args:
      attend: `[batch, heads, q_length, kv_length]`, where each dim has its full size or 1.
    """
    return Mask(dense=attend)


def pair_attends(rules: MaskRules, q: Any, kv: Any) -> Any:
    """Return which pairs of query and key attend under the mask rules.

    Args:
      rules: The static part of the mask.
      q: Positions of queries, an integer array of JAX or NumPy.
      kv: Positions of keys. They broadcast with the positions of the queries.

    Returns:
      Bool, in the shape to which q and kv broadcast, or a shape that broadcasts to it.
    """
    attends = kv >= 0
    # `rules.bounds` is inlined here, since traced kernels call this function most often.
    left, right = rules.window or (None, None)
    right = 0 if rules.causal else right
    if left is not None:
        attends = attends & (kv >= q - left)
    if right is not None:
        attends = attends & (kv <= q + right)
    if rules.chunk is not None:
        attends = attends & (kv // rules.chunk == q // rules.chunk)
    return attends


def allowed(
    rules: MaskRules,
    q_positions: jax.Array,
    kv_positions: jax.Array,
    *,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    lengths: jax.Array | None = None,
    dense: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Evaluate a mask on a block of rows.

    Args:
      rules: The mask rules, which are static.
      q_positions: `[batch or 1, q_length]` of the block's queries.
      kv_positions: `[batch or 1, kv_length]` of the block's keys.
      q_segment_ids: `[batch, q_length]`, or None.
      kv_segment_ids: `[batch, kv_length]`; None if and only if `q_segment_ids` is None.
      lengths: `[batch]`, or None.
      dense: The block of the dense mask, or None.
      bias: The block of the bias, or None.

    Returns:
      Bool, broadcastable to `[batch, heads, q_length, kv_length]`.
    """
    seen: jax.Array = pair_attends(
        rules, q_positions[:, None, :, None], kv_positions[:, None, None, :]
    )
    if q_segment_ids is not None:
        assert kv_segment_ids is not None, "queries and keys both have segment ids, or neither"
        seen = seen & (q_segment_ids[:, None, :, None] == kv_segment_ids[:, None, None, :])
    if lengths is not None:
        seen = seen & (kv_positions[:, None, None, :] < lengths[:, None, None, None])
    if dense is not None:
        seen = seen & dense
    return seen if bias is None else seen & ~bias_hides(bias)


def bias_hides(bias: jax.Array) -> jax.Array:
    """Tell where a bias hides a key: where the bias is at most -2e38. NaN hides nothing."""
    return bias.astype(jnp.float32) <= _HIDING_BIAS


def block_is_empty(rules: MaskRules, q: tuple[T, T], kv: tuple[T, T]) -> Any:
    """Return whether the mask rules hide the whole block.

    False does not mean that a pair attends: the positions of a block need not be contiguous, and
    segment ids, lengths and dense masks are not read.

    Args:
      rules: The static part of the mask.
      q: Smallest and largest position of the block's queries. If they are arrays, so is the result.
      kv: Smallest and largest position of the block's keys.
    """
    (q_low, q_high), (kv_low, kv_high) = q, kv
    left, right = rules.bounds
    empty = kv_high < 0
    if left is not None:
        empty = empty | (kv_high < q_low - left)
    if right is not None:
        empty = empty | (kv_low > q_high + right)
    if rules.chunk is not None:
        empty = (
            empty
            | (kv_high // rules.chunk < q_low // rules.chunk)
            | (kv_low // rules.chunk > q_high // rules.chunk)
        )
    return empty


def block_is_full(rules: MaskRules, q: tuple[T, T], kv: tuple[T, T]) -> Any:
    """Return whether the mask rules show the whole block; see `block_is_empty`.

    False does not mean that a pair is hidden.
    """
    (q_low, q_high), (kv_low, kv_high) = q, kv
    left, right = rules.bounds
    # The extreme pairs decide: the last query with the first key, and the first query with the last
    # key.
    full = kv_low >= 0
    if left is not None:
        full = full & (kv_low >= q_high - left)
    if right is not None:
        full = full & (kv_high <= q_low + right)
    if rules.chunk is not None:
        # true if all queries and all keys are in one chunk
        same = (q_low // rules.chunk == q_high // rules.chunk) & (
            kv_low // rules.chunk == kv_high // rules.chunk
        )
        full = full & same & (q_low // rules.chunk == kv_low // rules.chunk)
    return full
