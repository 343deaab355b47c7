"""Masks by position, on whole arrays and on blocks, against a loop over pairs."""

from __future__ import annotations

import itertools
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from shardwright import AttentionError
from shardwright.attention import masks
from shardwright.attention.masks import MaskRules

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
RANGES = [(low, high) for low in (-6, -1, 0, 2, 5, 8) for high in (-5, -1, 0, 3, 6, 11) if low <= high]


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
def test_a_mask_is_what_its_rules_say_of_each_pair(rules: MaskRules) -> None:
    q, kv = np.array([[7, -2, 0, 3, 11, 5]]), np.array([[0, 9, -1, 4, 3, 2, 7, 11]])
    want = [[attends(rules, int(p), int(r)) for r in kv[0]] for p in q[0]]
    np.testing.assert_array_equal(np.broadcast_to(masks.allowed(rules, jnp.asarray(q), jnp.asarray(kv)), (1, 1, 6, 8))[0, 0], want)


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_what_is_said_of_a_block_holds_for_each_of_its_pairs(rules: MaskRules) -> None:
    said = {"empty": 0, "full": 0}
    for q, kv in itertools.product(RANGES, RANGES):
        pairs = [attends(rules, p, r) for p in range(q[0], q[1] + 1) for r in range(kv[0], kv[1] + 1)]
        empty, full = masks.block_is_empty(rules, q, kv), masks.block_is_full(rules, q, kv)
        assert isinstance(empty, bool)
        assert isinstance(full, bool)
        assert not (empty and any(pairs))
        assert full == all(pairs)
        if rules.chunk is None and kv[0] >= 0:  # where nothing but the bounds decides, the answer is exact
            assert empty == (not any(pairs))
        said["empty"] += empty
        said["full"] += full
    assert all(said.values())


def test_a_traced_block_gets_the_same_answer() -> None:
    rules = RULES[-1]
    for q, kv in itertools.product(RANGES, RANGES):
        traced = masks.block_is_empty(rules, (jnp.int32(q[0]), jnp.int32(q[1])), (jnp.int32(kv[0]), jnp.int32(kv[1])))
        assert bool(traced) == masks.block_is_empty(rules, q, kv)


def test_segments_lengths_and_a_dense_mask_all_must_agree() -> None:
    seen = masks.allowed(
        MaskRules(causal=True),
        jnp.arange(4)[None],
        jnp.arange(4)[None],
        q_segment_ids=jnp.array([[0, 0, 1, 1]]),
        kv_segment_ids=jnp.array([[0, 0, 1, 1]]),
        lengths=jnp.array([3]),
        dense=jnp.array([[[[True, True, True, True]], [[False, True, True, True]]]]),
    )
    np.testing.assert_array_equal(seen[0, 0].astype(int), [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]])
    np.testing.assert_array_equal(seen[0, 1].astype(int), [[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]])


def test_masks_combine() -> None:
    both = masks.causal() & masks.window(left=5) & masks.window(left=3, right=7) & masks.chunk(8) & masks.chunk(4)
    assert both.rules == MaskRules(causal=True, window=(3, 7), chunk=4)
    kept = masks.lengths(jnp.array([4, 9])) & masks.full() & masks.lengths(jnp.array([6, 2]))
    np.testing.assert_array_equal(kept.lengths, [4, 2])
    held = masks.dense(jnp.array([[[[True, False]]]])) & masks.dense(jnp.array([[[[True, True]]]])) & masks.segments(jnp.zeros((1, 2), int))
    np.testing.assert_array_equal(held.dense, [[[[True, False]]]])
    assert held.kv_segment_ids is held.q_segment_ids


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: masks.window(left=-1), "window=(-1, None) has a negative side"),
        (lambda: MaskRules(window=4), "window=4 is not a pair of lengths\n  fix   pass (left, right): (w - 1, 0) sees w tokens"),  # type: ignore[arg-type]
        (lambda: MaskRules(window=(1.5, 0)), "window=(1.5, 0) is not a pair of lengths"),  # type: ignore[arg-type]
        (lambda: MaskRules(window=(2**31, 0)), "window=(2147483648, 0) is longer than any position"),
        (lambda: masks.chunk(0), "chunk=0 is not a length"),
        (lambda: masks.chunk(4) & masks.chunk(6), "chunks of 4 and of 6 positions do not nest"),
        (lambda: masks.segments(1) & masks.segments(2), "both masks have segments"),
    ],
)
def test_a_mask_that_makes_no_sense_is_refused(make: Any, says: str) -> None:
    with pytest.raises(AttentionError, match=re.escape(says)):
        make()
