"""Edge cases of caches: dtypes, meshes, orders, large numbers, donated and damaged caches."""

from __future__ import annotations

import dataclasses
import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardwright as sw
from shardwright import caches
from shardwright.attention import append_and_attend, next_positions, paged_attention
from shardwright.caches import Refusal, RowOrder
from shardwright.errors import AttentionError, CacheError, StrategyError
from shardwright.testing import assert_spec, cpu_mesh
from tests.raising import facts, raises

SIZES: dict[str, Any] = {
    "batch": 2,
    "capacity": 4,
    "kv_heads": 1,
    "head_dim": 2,
    "dtype": "float32",
}
K = np.arange(8, dtype=np.float32).reshape(2, 2, 1, 2)
RULES = '[rules]\nbatch = "dp"\nkv_length = "sp"\nkv_head = "-"\n[modes.prefill]\nkv_length = "-"'


def make(kind: str = "dense", **options: Any) -> Any:
    return caches.init(kind, **SIZES | options)


def manager_of(mesh: str) -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.loads(RULES), mesh=cpu_mesh(mesh))


MAKING: dict[str, tuple[dict[str, Any], str]] = {
    "no kind": ({"kind": None}, facts("None", path="kind", fix="dense")),
    "order": (
        {"order": "interleaved"},
        facts("interleaved", path="order", fix="caches.RowOrder"),
    ),
    "order without a block": (
        {"order": RowOrder(shards=2)},
        facts("RowOrder", "shards", 2, path="order", fix="RowOrder"),
    ),
    "page_size of text": (
        {"kind": "paged", "page_size": "4"},
        facts("page_size", 4, fix=("page_size", "4")),
    ),
    "page_size of truth": (
        {"kind": "paged", "page_size": True},
        facts("page_size", "True", fix="page_size"),
    ),
    "half a page": (
        {"kind": "paged", "page_size": 2, "pages": 2.5},
        facts("pages", "2.5", fix=("pages", "2")),
    ),
    "a list": ({"kind": "quantized", "stored": ["int8"]}, facts("int8", path="stored")),
}


@pytest.mark.parametrize("name", MAKING)
def test_init_with_invalid_options(name: str) -> None:
    options, message = MAKING[name]
    with raises(CacheError, message):
        make(**options)


def test_dtype_that_jax_would_narrow() -> None:
    with raises(CacheError, "JAX", "float64", path="dtype", fix=("float32", "jax_enable_x64")):
        make(dtype="float64")
    with jax.enable_x64(True):
        cache = (
            make(dtype="float64")
            .append(K.astype(np.float64) + 1e-12, K.astype(np.float64))
            .require()
        )
        assert cache.k.dtype == np.float64
        assert cache.k[0, 0, 0, 0] == 1e-12


def test_mode_is_checked_without_manager() -> None:
    with raises(StrategyError, "mode", "decoding", fix="decode"):
        make(mode="decoding")
    assert make(mode="decode").spec.mode is None


@pytest.mark.parametrize(("shards", "fitting"), [(1, 2), (3, 6)])
def test_order_must_match_shards_of_rows(shards: int, fitting: int, tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    order, pm = RowOrder(block=1, shards=shards), manager_of("dp:1,sp:2")
    message = facts(shards, 2, "sp", path="order", fix=f"RowOrder(block=1, shards={fitting})")
    with pm:
        with raises(CacheError, message):
            make(capacity=12, mode="decode", order=order)
        filled = make(capacity=12, mode="prefill", order=order)
        for move in (caches.reshard, caches.plan_reshard):
            with raises(CacheError, message):
                move(filled, "decode")
        cache = make(capacity=12, mode="decode", order=RowOrder(block=1, shards=4))
        assert_spec(cache, cache.axes(), mode="decode")
    alone = make(capacity=12, order=order)
    caches.save(alone, tmp_path / "cache")
    with raises(CacheError, message):
        caches.reshard(alone, "decode", manager=pm)
    with raises(CacheError, message):
        caches.restore(tmp_path / "cache", manager=pm, mode="decode")
    assert caches.restore(tmp_path / "cache", manager=pm, mode="prefill").spec.order == order


NUMBERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "ragged": (
        lambda cache: cache.free([[0], [1, 2]]),
        facts("[0]", "[1, 2]", path="slots", fix="int32"),
    ),
    "too long a number": (
        lambda cache: cache.rewind([2**70, 0]),
        facts("object", path="lengths", fix="int32"),
    ),
    "group of a fraction": (
        lambda cache: cache.reorder([0, 0], group=2.0),
        facts("2.0", path="group"),
    ),
    "group of truth": (
        lambda cache: cache.reorder([0, 0], group=True),
        facts("True", path="group"),
    ),
    "group as text": (
        lambda cache: cache.reorder([0, 0], group="2"),
        facts(2, path="group"),
    ),
    "group of the program's": (
        lambda cache: cache.reorder([0, 0], group=cache.length[0]),
        facts("group", "int32", path="group", fix="int"),
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_invalid_slot_numbers(name: str) -> None:
    operation, message = NUMBERS[name]
    for run in (operation, jax.jit(operation)):
        with raises(CacheError, message):
            run(make())


def test_list_of_traced_slots() -> None:
    cache = make().append(K, K).require()
    change = jax.jit(lambda cache, slot: cache.free([slot, 1]))(cache, 0)
    assert change.cache.length.tolist() == [0, 0]
    assert cache.free([jnp.int32(1), 5]).reasons() == {1: Refusal.SLOT_OUT_OF_RANGE}


def test_operation_on_donated_cache() -> None:
    cache, source = make(), make()
    jax.jit(lambda cache: cache.append(K, K), donate_argnums=0)(cache)
    with raises(CacheError, "deleted", "donated", path="cache"):
        cache.append(K, K)
    jax.tree.map(lambda x: x.delete(), source)
    with raises(CacheError, "deleted", path="source"):
        make().insert(source, [0, 1])


def test_operation_on_cache_of_another_mesh() -> None:
    small, large = (
        manager_of("dp:2,sp:1").for_mode("decode"),
        manager_of("dp:2,sp:2").for_mode("decode"),
    )
    with large:
        cache = make().append(K, K).require()
    with small:
        said = ("{'dp': 2, 'sp': 2}", "{'dp': 2, 'sp': 1}")
        with raises(CacheError, *said, path="cache", fix="caches.reshard"):
            cache.free([0])
        with raises(CacheError, *said, path="source", fix="caches.reshard"):
            make().insert(cache, [0, 1])
        moved = caches.reshard(cache)
        assert moved.append(K, K).require().length.tolist() == [4, 4]
        assert make().insert(moved, [1, 0]).ok.all()


@pytest.mark.parametrize("kind", ["sliding", "quantized"])
def test_positions_of_a_ring_do_not_wrap(kind: str) -> None:
    ring = make(kind, overflow="ring", window=3)
    most = 2**31 - 1
    ring = dataclasses.replace(
        ring,
        length=jnp.array([most - 1, most - 2], jnp.int32),
        start=jnp.array([most - 5, most - 6], jnp.int32),
    )
    change = ring.append(K, K)
    assert change.reasons() == {0: Refusal.OVERFLOW}
    assert change.cache.length.tolist() == [most - 1, most]
    assert change.positions is not None
    assert change.positions.tolist() == [[-1, -1], [most - 2, most - 1]]


@pytest.mark.parametrize("kind", ["dense", "sliding", "quantized", "paged"])
@pytest.mark.full(but=["dense"])
def test_operations_need_no_implicit_promotion(kind: str) -> None:
    options = {"sliding": {"window": 3}, "paged": {"page_size": 3}}.get(kind, {})
    with jax.numpy_dtype_promotion("strict"):
        cache = make(kind, **options).append(K, K).require()
        cache = (
            make(kind, **options)
            .insert(cache, [1, 0])
            .cache.reorder([1, 1])
            .cache.rewind([1, 2])
            .cache
        )
        actual = append_and_attend(K, K, K, cache).cache
    assert actual.length.tolist() == [3, 4]


@pytest.mark.parametrize("kind", ["dense", "sliding", "quantized", "paged"])
@pytest.mark.full
def test_stacked_caches_equal_single_caches(kind: str) -> None:
    options = {"sliding": {"window": 3}, "paged": {"page_size": 3, "pages": 3}}.get(kind, {})
    caches_, keys = [make(kind, **options)] * 3, jnp.stack([K, K + 1, K + 2]).astype(jnp.float32)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *caches_)

    def twice(cache: Any, keys: Any) -> Any:
        change = cache.append(keys, keys).cache.append(keys, keys)
        return (
            change.cache.rewind(jnp.array([1, 4]))
            .cache.reorder(jnp.array([1, 0]))
            .cache.append(keys, keys)
        )

    together = jax.vmap(twice)(stacked, keys)
    with raises(CacheError, "(3, 2)", path="refused", fix="jax.tree.map"):
        together.reasons()
    for at in range(3):
        first, alone = jax.tree.map(lambda x, at=at: x[at], together), twice(caches_[at], keys[at])
        assert first.reasons() == alone.reasons()
        for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(alone), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("cache", [None, {"k": K}])
def test_attention_without_cache(cache: Any) -> None:
    with raises(AttentionError, path="cache", fix="caches.init"):
        append_and_attend(K, K, K, cache)
    with raises(AttentionError, path="cache", fix="caches.init"):
        next_positions(cache)


@pytest.mark.parametrize("q_length", [0, -1, 2.0, True])
def test_next_positions_of_invalid_q_length(q_length: Any) -> None:
    with raises(AttentionError, q_length, "q_length", fix="rows"):
        next_positions(make(), q_length=q_length)


def test_position_beyond_32_bits() -> None:
    pages = np.ones((2, 2, 1, 2), np.float32)
    given: dict[str, Any] = {
        "block_tables": np.zeros((2, 1), np.int32),
        "lengths": np.ones(2, np.int32),
    }
    with raises(AttentionError, 4294967296, -2147483648, 2147483647, path="positions", fix="int32"):
        paged_attention(K[:, :1], pages, pages, positions=np.array([[2**32], [0]]), **given)


# Moved.


def relayout() -> sw.PartitionManager:
    prefill = 'batch = "-"\nkv_length = "dp+tp"\nkv_head = "-"'
    decode = 'batch = "dp"\nkv_length = "-"\nkv_head = "tp"'
    rules = f"[rules]\n{prefill}\n[modes.decode]\n{decode}"
    return sw.PartitionManager(sw.Strategy.loads(rules), mesh=cpu_mesh("dp:2,tp:2"))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_reshard_with_donation_deletes_source(mode: str) -> None:
    pm = relayout()
    keys = np.concatenate([K, K + 1], axis=2)
    with pm.for_mode("prefill"):
        cache = make(batch=2, capacity=8, kv_heads=2).append(keys, keys).require()
        moved = caches.reshard(cache, mode, donate=True)
    assert all(array.is_deleted() for array in jax.tree.leaves(cache))
    assert moved.length.tolist() == [2, 2]
    np.testing.assert_array_equal(np.asarray(moved.k)[:, :2], keys)
    assert_spec(moved, moved.axes(), manager=pm, mode=mode)


@pytest.mark.full(but=["False"])
@pytest.mark.parametrize("donate", [False, True])
def test_reshard_to_another_mesh(donate: bool, tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    large, small = manager_of("dp:2,sp:2"), manager_of("dp:2,sp:1")
    apart = sw.PartitionManager(
        sw.Strategy.loads(RULES), mesh=Mesh(np.array(jax.devices()[6:]).reshape(2, 1), ("dp", "sp"))
    )
    with large.for_mode("decode"):
        cache = make().append(K, K).require()
        caches.save(cache, tmp_path / "cache")
        actual = [
            caches.reshard(cache, manager=small, mode="decode", donate=donate),
            caches.restore(tmp_path / "cache", manager=small, mode="decode"),
            caches.reshard(cache, manager=apart, mode="decode", donate=donate),
        ]
    assert all(array.is_deleted() == donate for array in jax.tree.leaves(cache))
    for moved, manager in zip(actual, (small, small, apart), strict=True):
        assert_spec(moved, moved.axes(), manager=manager, mode="decode")
        np.testing.assert_array_equal(np.asarray(moved.k)[:, :2], K)


def test_reshard_with_invalid_arguments() -> None:
    for move in (caches.reshard, caches.plan_reshard):
        with raises(CacheError, "None", path="cache", fix="caches.init"):
            move(None, "decode", manager=relayout())  # type: ignore[type-var]
        with raises(CacheError, "str", path="manager", fix="PartitionManager"):
            move(make(), "decode", manager="fsdp")  # type: ignore[arg-type]


# Saved and restored.


def damage(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    about = json.loads((path / "cache" / "metadata").read_text())
    change(about)
    (path / "cache" / "metadata").write_text(json.dumps(about))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no arrays": (
        lambda path: shutil.rmtree(path / "arrays"),
        facts("cache", path="path", fix="restore"),
    ),
    "no data": (
        lambda path: [shutil.rmtree(part) for part in (path / "arrays").iterdir() if part.is_dir()],
        facts("cache", path="path", fix="restore"),
    ),
    "unknown field": (
        lambda path: damage(path, lambda about: about["spec"].update(future=1)),
        facts("spec", "cache", path="path", fix="restore"),
    ),
    "missing field": (
        lambda path: damage(path, lambda about: about["spec"].pop("batch")),
        facts("spec", "cache", path="path", fix="restore"),
    ),
    "other shape": (
        lambda path: damage(
            path, lambda about: about["arrays"].update(k=[[2, 8, 1, 2], "float32"])
        ),
        facts("cache", path="path", fix="restore"),
    ),
    "lost array": (
        lambda path: damage(path, lambda about: about["arrays"].pop("v")),
        facts("cache", path="path", fix="restore"),
    ),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.full(but=["lost array"])
def test_restore_of_damaged_cache(name: str, tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    harm, message = DAMAGE[name]
    caches.save(make(), tmp_path / "cache")
    harm(tmp_path / "cache")
    with raises(CacheError, message):
        caches.restore(tmp_path / "cache")
    # orbax leaves a coroutine that is never awaited. Collect it here, not in a later test.
    gc.collect()


def test_refused_save_writes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    gone = make()
    jax.tree.map(lambda x: x.delete(), gone)
    for cache in (gone, jax.eval_shape(make)):
        with raises(CacheError, "deleted", path="cache"):
            caches.save(cache, tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []
    with raises(CacheError, "NoneType", path="path"):
        caches.save(make(), None)  # type: ignore[arg-type]
    caches.save(make().append(K, K).require(), tmp_path / "cache")
    with raises(StrategyError, "mode", "decoding", fix="decode"):
        caches.restore(tmp_path / "cache", mode="decoding")
    with raises(CacheError, "cache", "jit"):
        jax.jit(lambda: caches.restore(tmp_path / "cache"))()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_failed_save_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orbax = pytest.importorskip("orbax.checkpoint")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(orbax.PyTreeCheckpointHandler, "save", fail, raising=True)
        patch.setattr(orbax.PyTreeCheckpointHandler, "async_save", fail, raising=False)
        with raises(CacheError, "disk full", path="path", fix="permissions") as caught:
            caches.save(make(), tmp_path / "cache")
    assert str(caught.value.__cause__) == "disk full"
    caches.save(make().append(K, K).require(), tmp_path / "cache")
    assert caches.restore(tmp_path / "cache").length.tolist() == [2, 2]
