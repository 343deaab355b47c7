"""Caches by shape are bounded; recent shapes return the identical object."""

from __future__ import annotations

import concurrent.futures
import gc
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.manager.place import decide_array
from shardwright.resolution import recent
from shardwright.resolution.recent import KEPT, Recent
from shardwright.resolution.request import ShardingRequest


def manager() -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=sw.abstract_mesh("dp:2,tp:4"))


def test_the_last_values_are_identical() -> None:
    cache = Recent()
    values = [object() for _ in range(KEPT)]
    for at, value in enumerate(values):
        assert cache.keep(at, value) is value
    for more in range(KEPT - 1):
        cache.keep(("more", more), object())
        assert cache[0] is values[0], "asked for again and again, it stays"
    assert all(cache[at] is None or cache[at] is value for at, value in enumerate(values))
    assert cache.keep(0, object()) is values[0]


@pytest.mark.parametrize("start", [0, 1, KEPT // 2, KEPT - 1])
def test_promised_number_of_values_is_kept(start: int) -> None:
    cache = Recent()
    for at in range(start):
        cache.keep(("before", at), object())
    values = [cache.keep(at, object()) for at in range(KEPT)]
    assert [cache[at] for at in range(KEPT)] == values
    assert len(cache) + len(cache._older) <= 2 * KEPT


def test_threads_get_one_object() -> None:
    cache = Recent()

    def ask(_: int) -> list[Any]:
        return [cache[key] or cache.keep(key, object()) for key in range(2000)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(ask, range(4))
    assert all(value == first for value in others)


@pytest.mark.parametrize("what", ["resolve", "explain", "sharding", "shardings", "shard"])
@pytest.mark.full(but=["resolve"])
def test_many_shapes_take_bounded_memory(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "KEPT", 100)
    pm = manager()
    x = (sw.BATCH, sw.EMBED)

    def ask(size: int) -> Any:
        shape = (8 * size, 64)
        if what == "shardings":
            return pm.shardings(jax.ShapeDtypeStruct(shape, jnp.float32), x)
        if what == "shard":
            return decide_array(pm, ShardingRequest(x, shape))
        return getattr(pm, what)(*x, shape=shape)

    first = ask(1)
    tracemalloc.start()
    for size in range(2, 200):
        ask(size)
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    for size in range(200, 600):
        ask(size)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 100_000, "400 shapes of 1.1 kB"
    assert ask(1) == first


def test_identical_answers_for_ten_thousand_shapes() -> None:
    pm = manager()

    def ask(size: int) -> Any:
        return pm.explain(sw.BATCH, sw.EMBED, shape=(8 * size, 64))

    answers = [ask(size) for size in range(1, 10_001)]
    assert all(ask(size) is answer for size, answer in enumerate(answers, 1))
