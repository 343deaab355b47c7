"""Masks by position, on whole arrays and on blocks, against a loop over pairs."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from shardwright import AttentionError
from shardwright.attention import masks
from shardwright.attention.masks import MaskRules
from tests.raising import Facts, facts, raises

RULES = [
    MaskRules(),
    MaskRules(causal=True),
    MaskRules(window=(3, 2)),
    MaskRules(window=(None, 1)),
    MaskRules(causal=True, window=(2, None)),
    MaskRules(causal=True, window=(2, 4)),
    MaskRules(chunk=4),
    MaskRules(causal=True, chunk=3, window=(1, 0)),
]
RANGES = [
    (low, high) for low in (-6, -1, 0, 2, 5, 8) for high in (-5, -1, 0, 3, 6, 11) if low <= high
]


def attends(rules: MaskRules, p: int, r: int) -> bool:
    left, right = rules.window or (None, None)
    return (
        r >= 0
        and (not rules.causal or r <= p)
        and (left is None or r >= p - left)
        and (right is None or r <= p + right)
        and (rules.chunk is None or p // rules.chunk == r // rules.chunk)
    )


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_mask_follows_its_rules(rules: MaskRules) -> None:
    q, kv = np.array([[7, -2, 0, 3, 11, 5]]), np.array([[0, 9, -1, 4, 3, 2, 7, 11]])
    want = [[attends(rules, int(p), int(r)) for r in kv[0]] for p in q[0]]
    np.testing.assert_array_equal(
        np.broadcast_to(masks.allowed(rules, jnp.asarray(q), jnp.asarray(kv)), (1, 1, 6, 8))[0, 0],
        want,
    )


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_block_answers_hold_for_each_pair(rules: MaskRules) -> None:
    counts = {"empty": 0, "full": 0}
    for q, kv in itertools.product(RANGES, RANGES):
        pairs = [
            attends(rules, p, r) for p in range(q[0], q[1] + 1) for r in range(kv[0], kv[1] + 1)
        ]
        empty, full = masks.block_is_empty(rules, q, kv), masks.block_is_full(rules, q, kv)
        assert isinstance(empty, bool)
        assert isinstance(full, bool)
        assert not (empty and any(pairs))
        assert full == all(pairs)
        # Where only bounds or only chunks decide, the answer is exact.
        if kv[1] < 0 or (kv[0] >= 0 and (rules.chunk is None or rules.bounds == (None, None))):
            assert empty == (not any(pairs))
        counts["empty"] += empty
        counts["full"] += full
    assert all(counts.values())


def test_traced_block_gets_the_same_answer() -> None:
    rules = RULES[-1]
    for q, kv in itertools.product(RANGES, RANGES):
        traced = masks.block_is_empty(
            rules, (jnp.int32(q[0]), jnp.int32(q[1])), (jnp.int32(kv[0]), jnp.int32(kv[1]))
        )
        assert bool(traced) == masks.block_is_empty(rules, q, kv)


def test_segments_lengths_and_dense_mask_combine() -> None:
    seen = masks.allowed(
        MaskRules(causal=True),
        jnp.arange(4)[None],
        jnp.arange(4)[None],
        q_segment_ids=jnp.array([[0, 0, 1, 1]]),
        kv_segment_ids=jnp.array([[0, 0, 1, 1]]),
        lengths=jnp.array([3]),
        dense=jnp.array([[[[True, True, True, True]], [[False, True, True, True]]]]),
    )
    np.testing.assert_array_equal(
        seen[0, 0].astype(int), [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]]
    )
    np.testing.assert_array_equal(
        seen[0, 1].astype(int), [[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]]
    )


def test_unordered_segments_and_far_lengths() -> None:
    rows = jnp.arange(4)[None]
    ids, kv_ids = jnp.array([[2, 1, 1, 0]]), jnp.array([[0, 2, 1, 1]])
    seen = masks.allowed(MaskRules(), rows, rows, q_segment_ids=ids, kv_segment_ids=kv_ids)
    np.testing.assert_array_equal(
        seen[0, 0].astype(int), [[0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1], [1, 0, 0, 0]]
    )
    seen = masks.allowed(MaskRules(), rows, rows, lengths=jnp.array([1]))
    np.testing.assert_array_equal(
        np.broadcast_to(seen, (1, 1, 4, 4))[0, 0].astype(int), [[1, 0, 0, 0]] * 4
    )


def test_masks_combine() -> None:
    both = (
        masks.causal()
        & masks.window(left=5)
        & masks.window(left=3, right=7)
        & masks.chunk(8)
        & masks.chunk(4)
    )
    assert both.rules == MaskRules(causal=True, window=(3, 7), chunk=4)
    kept = masks.lengths(jnp.array([4, 9])) & masks.full() & masks.lengths(jnp.array([6, 2]))
    np.testing.assert_array_equal(kept.lengths, [4, 2])
    held = (
        masks.dense(jnp.array([[[[True, False]]]]))
        & masks.dense(jnp.array([[[[True, True]]]]))
        & masks.segments(jnp.zeros((1, 2), int))
    )
    np.testing.assert_array_equal(held.dense, [[[[True, False]]]])
    assert held.kv_segment_ids is held.q_segment_ids


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ((2, 9), (3, 7), (2, 7)),
        ((5, None), (3, None), (3, None)),
        ((None, 4), (None, 0), (None, 0)),
        ((None, None), (3, 7), (3, 7)),
        (None, (3, 7), (3, 7)),
        (None, None, None),
    ],
)
def test_windows_combine_side_by_side(one: Any, other: Any, both: Any) -> None:
    assert (MaskRules(window=one) & MaskRules(window=other)).window == both
    assert (MaskRules(window=other) & MaskRules(window=one)).window == both


def test_arrays_combine_from_either_side() -> None:
    """A field that one mask has is taken from it; a field that both have is combined."""
    q, kv = jnp.array([[1, 1, 2]]), jnp.array([[1, 2]])
    for ids in (masks.segments(q, kv) & masks.causal(), masks.causal() & masks.segments(q, kv)):
        assert ids.q_segment_ids is q
        assert ids.kv_segment_ids is kv
        assert ids.rules == MaskRules(causal=True)
    first_dense, other = (
        jnp.array([[[[True, True, False, False]]]]),
        jnp.array([[[[True, False, True, False]]]]),
    )
    for first, second in ((first_dense, other), (other, first_dense)):
        np.testing.assert_array_equal(
            (masks.dense(first) & masks.dense(second)).dense, [[[[True, False, False, False]]]]
        )
    for mask in (masks.full() & masks.dense(first_dense), masks.dense(first_dense) & masks.full()):
        assert mask.dense is first_dense
        assert mask.lengths is None
    for mask in (masks.full() & masks.lengths(q), masks.lengths(q) & masks.full()):
        assert mask.lengths is q
        assert mask.dense is None


def test_positional_rules() -> None:
    assert not MaskRules().positional
    for rules in (MaskRules(causal=True), MaskRules(window=(0, 0)), MaskRules(chunk=4)):
        assert rules.positional is True


def test_limits_of_lengths() -> None:
    """The smallest and the largest length that is taken."""
    assert MaskRules(chunk=1).chunk == 1
    for window in ((0, 0), (2**30 - 1, 2**30 - 1), [np.int32(2), None]):
        assert MaskRules(window=window).window == tuple(window)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: masks.window(left=-1),
            facts("window", "(-1, None)", fix="(w - 1, 0)"),
        ),
        (lambda: masks.window(right=-1), facts("window", -1)),
        (
            lambda: MaskRules(window=4),  # type: ignore[arg-type]
            facts("window", 4, "None", fix=("1", "0", "None")),
        ),
        (
            lambda: MaskRules(window=(1.5, 0)),  # type: ignore[arg-type]
            facts("1.5", 0),
        ),
        (
            lambda: MaskRules(window=(1,)),  # type: ignore[arg-type]
            facts("window", "(1,)", "lengths"),
        ),
        (
            lambda: MaskRules(window=(1, 2, 3)),  # type: ignore[arg-type]
            facts("window", "(1, 2, 3)", "lengths"),
        ),
        (lambda: MaskRules(window=(True, 0)), facts("True", 0)),
        (
            lambda: MaskRules(window=(2**30, 0)),
            facts("(1073741824, 0)", 2, 30, fix="None"),
        ),
        (
            lambda: MaskRules(window=(0, 2**31)),
            facts("(0, 2147483648)", 2, 30),
        ),
        (
            lambda: masks.chunk(0),
            facts("chunk", 0, fix="8192"),
        ),
        (lambda: masks.chunk(True), facts("chunk", "True")),
        (
            lambda: masks.chunk(4.0),  # type: ignore[arg-type]
            facts("chunk", "4.0"),
        ),
        (
            lambda: masks.chunk(4) & masks.chunk(6),
            facts(4, 6, fix="lengths"),
        ),
        (
            lambda: masks.segments(1) & masks.segments(2),
            facts("masks", "segments", fix="ids"),
        ),
        (
            lambda: masks.Mask(kv_segment_ids=1) & masks.segments(2),
            facts("kv_segment_ids", "q_segment_ids", path="mask", fix="q_segment_ids"),
        ),
        (
            lambda: masks.full() & masks.Mask(q_segment_ids=1),
            facts("q_segment_ids", "kv_segment_ids", path="mask", fix="q_segment_ids"),
        ),
    ],
)
def test_bad_mask_is_refused(make: Any, says: Facts) -> None:
    with raises(AttentionError, says):
        make()


def test_a_chunk_is_kept_beside_other_rules() -> None:
    rules = MaskRules(causal=True, chunk=4)
    assert (masks.chunk(4) & masks.causal()).rules == rules
    assert (masks.causal() & masks.chunk(4)).rules == rules


def test_masks_with_arrays_compare_by_identity() -> None:
    """As arrays do not compare to one truth value, neither do masks compare field by field."""
    ends = jnp.array([1, 2])
    mask = masks.lengths(ends)
    assert mask == mask
    assert mask != masks.lengths(ends)
    assert len({mask, masks.lengths(ends)}) == 2
