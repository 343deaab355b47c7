"""What each operation does to rows and lengths; refused slots keep every bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import shardwright as sw
from shardwright import caches
from shardwright.caches import Refusal, RowOrder
from shardwright.errors import CacheError
from shardwright.testing import cpu_mesh
from tests.caches.model import keys_of, slots_of, values_of
from tests.raising import raises

SIZES: dict[str, Any] = {"kv_heads": 2, "head_dim": 2, "v_dim": 3, "dtype": "float32"}
RULES = '[rules]\nbatch = "dp"\nkv_length = "sp"\n'


def make(kind: str = "dense", *, batch: int = 3, **options: Any) -> Any:
    return caches.init(
        kind, batch=batch, **({"capacity": 6} if kind == "dense" else {}) | SIZES | options
    )


def append(cache: Any, tokens: Any, valid: Any = None) -> Any:
    tokens = np.asarray(tokens)
    return cache.append(keys_of(tokens, cache.spec), values_of(tokens, cache.spec), valid=valid)


def filled(lengths: list[int], *, first: int = 0, **options: Any) -> Any:
    """A cache whose slot b holds `lengths[b]` tokens: first + 10 b, first + 10 b + 1, …"""
    cache = make(batch=len(lengths), **options)
    tokens = first + 10 * np.arange(len(lengths))[:, None] + np.arange(max(lengths))
    return append(cache, tokens, np.arange(max(lengths)) < np.array(lengths)[:, None]).require()


def held(cache: Any) -> list[list[int]]:
    """The tokens of each slot in order."""
    return [[slot.held[position] for position in sorted(slot.held)] for slot in slots_of(cache)]


def assert_same_bits(value: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(other), strict=True):
        assert (a.dtype, np.asarray(a).tobytes()) == (b.dtype, np.asarray(b).tobytes())


def test_append_skips_padding_anywhere() -> None:
    valid = np.array([[True, False, True], [False, False, True], [False, False, False]])
    change = append(make(), [[0, 1, 2], [10, 11, 12], [20, 21, 22]], valid)
    assert held(change.cache) == [[0, 2], [12], []]
    np.testing.assert_array_equal(change.positions, [[0, -1, 1], [-1, -1, 0], [-1, -1, -1]])
    assert change.reasons() == {}


def test_overflowing_slot_is_unchanged() -> None:
    cache = filled([5, 4, 0])
    change = append(cache, [[100, 101]] * 3)
    assert change.reasons() == {0: Refusal.OVERFLOW}
    np.testing.assert_array_equal(change.overflow, [True, False, False])
    np.testing.assert_array_equal(change.positions, [[-1, -1], [4, 5], [0, 1]])
    assert_same_bits(
        (change.cache.k[0], change.cache.v[0], change.cache.length[0]),
        (cache.k[0], cache.v[0], cache.length[0]),
    )
    assert held(change.cache)[1:] == [[10, 11, 12, 13, 100, 101], [100, 101]]


@pytest.mark.full(but=["options1-3"])
@pytest.mark.parametrize("count", [1, 3, 7, 20])
@pytest.mark.parametrize(
    "options",
    [
        {"overflow": "ring"},
        {"overflow": "ring", "order": RowOrder(block=2, shards=3)},
        {"capacity": 20},
    ],
)
def test_tokens_at_once_equal_one_by_one(options: dict[str, Any], count: int) -> None:
    tokens = np.arange(count)[None] + 100 * np.arange(3)[:, None]
    at_once = append(make(**options), tokens)
    assert (
        held(at_once.cache)[1]
        == [100 + token for token in range(count)][-at_once.cache.spec.capacity :]
    )
    np.testing.assert_array_equal(at_once.positions[0], np.arange(count))
    single = make(**options)
    for at in range(count):
        single = append(single, tokens[:, at : at + 1]).cache
    assert_same_bits(single, at_once.cache)


def test_ring_refuses_rewind_to_overwritten_rows() -> None:
    cache = append(
        make("sliding", window=3, capacity=5), np.arange(10)[None] + np.zeros((3, 1), int)
    ).cache
    change = cache.rewind([7, 6, 11])
    # A query at 7 sees 5 and 6, which are still held. At 6 it would see 4, which 9 has overwritten.
    assert change.reasons() == {1: Refusal.OVERWRITTEN, 2: Refusal.LENGTH_OUT_OF_RANGE}
    assert held(change.cache) == [[5, 6], [5, 6, 7, 8, 9], [5, 6, 7, 8, 9]]
    # Overwritten rows stay overwritten: a second rewind is refused too.
    assert change.cache.rewind([6, 10, 10]).reasons() == {0: Refusal.OVERWRITTEN}
    again = append(change.cache, [[70, 80]] * 3).cache
    assert held(again)[0] == [5, 6, 70, 80]
    assert again.rewind([0, 0, 0]).reasons() == {}
    np.testing.assert_array_equal(again.rewind([0, 0, 0]).cache.view().positions, -1)


def test_insert_into_free_slots() -> None:
    cache, source = filled([2, 0, 0, 0, 0, 0]), filled([3, 1, 2, 2, 1, 1], first=500)
    change = cache.insert(source, [4, 0, 2, 2, 6, -1])
    wanted = {
        1: Refusal.SLOT_IN_USE,
        2: Refusal.SLOT_TWICE,
        3: Refusal.SLOT_TWICE,
        4: Refusal.SLOT_OUT_OF_RANGE,
        5: Refusal.SLOT_OUT_OF_RANGE,
    }
    assert change.reasons() == wanted
    assert held(change.cache) == [[0, 1], [], [], [], [500, 501, 502], []]
    for slot in (0, 1, 2, 3, 5):
        assert_same_bits(
            (change.cache.k[slot], change.cache.v[slot]), (cache.k[slot], cache.v[slot])
        )


@pytest.mark.full
def test_insert_of_long_or_overwritten_sequence() -> None:
    long = append(
        make(batch=2, overflow="ring"),
        np.arange(8)[None] + np.array([[0], [100]]),
        np.arange(8) < [[8], [4]],
    ).cache
    cache = make(batch=4)
    change = cache.insert(long, [1, 2])
    assert change.reasons() == {0: Refusal.OVERFLOW}
    assert held(change.cache) == [[], [], [100, 101, 102, 103], []]
    large = caches.init("dense", batch=4, capacity=16, **SIZES)
    assert large.insert(long, [1, 2]).reasons() == {0: Refusal.POSITIONS_MISSING}
    assert held(make("sliding", batch=4, window=4).insert(long, [3, 0]).require()) == [
        [100, 101, 102, 103],
        [],
        [],
        [4, 5, 6, 7],
    ]
    assert make("sliding", batch=4, window=8).insert(long, [3, 0]).reasons() == {
        0: Refusal.POSITIONS_MISSING
    }


@pytest.mark.full
def test_paged_source() -> None:
    source = append(
        make("paged", batch=2, capacity=8, page_size=2),
        [[1, 2, 3], [4, 5, 6]],
        np.array([[True] * 3, [True, False, False]]),
    ).cache
    assert held(make(batch=3).insert(source, [2, 0]).require()) == [[4], [], [1, 2, 3]]


def test_freeing() -> None:
    change = filled([2, 1, 3, 0]).free(np.array([2, 0, 0, 3, 4, -1, 2**40]))
    twice, absent = Refusal.SLOT_TWICE, Refusal.SLOT_OUT_OF_RANGE
    assert change.reasons() == {
        1: twice,
        2: twice,
        3: Refusal.SLOT_EMPTY,
        4: absent,
        5: absent,
        6: absent,
    }
    assert held(change.cache) == [[0, 1], [10], [], []]


def test_rewind_then_diverge() -> None:
    change = filled([4, 3, 2]).rewind([1, 4, -1])
    assert change.reasons() == {1: Refusal.LENGTH_OUT_OF_RANGE, 2: Refusal.LENGTH_OUT_OF_RANGE}
    assert held(append(change.cache, [[7], [8], [9]]).cache) == [
        [0, 7],
        [10, 11, 12, 8],
        [20, 21, 9],
    ]


def test_beams() -> None:
    cache = filled([1, 2, 3, 4])
    assert held(cache.reorder([3, 3, 0, 1]).require()) == [
        [30, 31, 32, 33],
        [30, 31, 32, 33],
        [0],
        [10, 11],
    ]
    change = cache.reorder([1, 2, 3, -1], group=2)
    assert change.reasons() == {1: Refusal.SLOT_OUT_OF_RANGE, 3: Refusal.SLOT_OUT_OF_RANGE}
    assert held(change.cache) == [[10, 11], [10, 11], [30, 31, 32, 33], [30, 31, 32, 33]]


@pytest.mark.full
@pytest.mark.parametrize("group", [None, 4])
def test_beams_over_several_shards(group: int | None) -> None:
    parents = [3, 0, 0, 2, 7, 4, 5, 5]
    wanted = held(filled([1, 2, 3, 4, 5, 6, 1, 2]).reorder(parents, group=group).require())
    manager = sw.PartitionManager(sw.Strategy.loads(RULES), mesh=cpu_mesh("dp:4,sp:2")).for_mode(
        "decode"
    )
    with manager:
        assert (
            held(filled([1, 2, 3, 4, 5, 6, 1, 2]).reorder(parents, group=group).require()) == wanted
        )


def test_beams_in_group_on_two_shards() -> None:
    """Three slots per shard: slots 2 and 3 are one group, on two shards."""
    parents = [1, 0, 3, 2, 5, 4]
    manager = sw.PartitionManager(sw.Strategy.loads(RULES), mesh=cpu_mesh("dp:2")).for_mode(
        "decode"
    )
    with manager:
        change = filled([1, 2, 3, 4, 5, 6]).reorder(parents, group=2)
    assert held(change.require()) == [
        [10 * parent + at for at in range(parent + 1)] for parent in parents
    ]


class TestErrorPolicy:
    """`overflow="error"`: refusals raise errors."""

    def test_outside_jit(self) -> None:
        cache = filled([5, 2, 6], overflow="error")
        with raises(CacheError, 0, 1, 2, fix="report"):
            append(cache, [[1, 2]] * 3)
        with raises(CacheError, 1, 2, fix="report"):
            cache.free([0, 1, 1])
        assert held(append(cache, [[1]] * 3, np.array([[True], [True], [False]])).cache)[0] == [
            0,
            1,
            2,
            3,
            4,
            1,
        ]

    @pytest.mark.full(but=["auto"])
    @pytest.mark.parametrize("axis_types", [None, "auto", "explicit"])
    def test_inside_jit(self, axis_types: Any) -> None:
        tokens = np.arange(4)[:, None] * np.ones((1, 4), int)

        def check() -> None:
            cache = make(batch=4, overflow="error")
            checked = checkify.checkify(jax.jit(lambda cache, k, v: cache.append(k, v)))
            error, change = checked(
                cache,
                jnp.asarray(keys_of(tokens, cache.spec)),
                jnp.asarray(values_of(tokens, cache.spec)),
            )
            error.throw()
            error, _ = checked(
                change.cache,
                jnp.asarray(keys_of(tokens, cache.spec)),
                jnp.asarray(values_of(tokens, cache.spec)),
            )
            with pytest.raises(
                checkify.JaxRuntimeError,
                match=r"a cache refused entries, by these codes: \[1 1 1 1\] \(1 the tokens exceed",
            ):
                error.throw()

        if axis_types is None:
            check()
        else:
            manager = sw.PartitionManager(
                sw.Strategy.loads(RULES), mesh=cpu_mesh("dp:4,sp:2", axis_types=axis_types)
            ).for_mode("decode")
            with manager:
                check()


def test_require_raises_refusals() -> None:
    with raises(CacheError, "entry", 1, "slot", fix="reasons()"):
        filled([1, 0]).free([0, 1]).require()


def test_refusals_are_unknown_while_tracing() -> None:
    with raises(CacheError, "traced", path="refused", fix="ok"):
        jax.jit(lambda cache: cache.free([0]).require())(make())


def test_empty_slot_has_no_positions() -> None:
    view = make("sliding", window=4).view()
    np.testing.assert_array_equal(view.positions, -1)
    np.testing.assert_array_equal(
        make(order=RowOrder(block=1, shards=2)).view().positions, [[0, 2, 4, 1, 3, 5]]
    )
