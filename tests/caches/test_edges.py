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
    "no kind": ({"kind": None}, "kind: None is not a kind of cache\n  fix   kinds are dense"),
    "order": (
        {"order": "interleaved"},
        r"order='interleaved' is not a RowOrder\n  fix   pass caches.RowOrder",
    ),
    "order of fractions": (
        {"order": RowOrder(block=2.0, shards=2)},
        "block must be a positive integer, got 2.0",
    ),  # type: ignore[arg-type]
    "order of truth": (
        {"order": RowOrder(block=True)},
        "block must be a positive integer, got True",
    ),
    "order without a block": (
        {"order": RowOrder(shards=2)},
        r"RowOrder\(shards=2\) has no block size",
    ),
    "page_size of text": (
        {"kind": "paged", "page_size": "4"},
        "^page_size must be a positive integer, got '4'\n  fix   pass page_size=4",
    ),
    "page_size of truth": (
        {"kind": "paged", "page_size": True},
        "page_size must be a positive integer, got True",
    ),
    "half a page": (
        {"kind": "paged", "page_size": 2, "pages": 2.5},
        "pages must be a positive integer, got 2.5\n  fix   pass pages=2",
    ),
    "a list": ({"kind": "quantized", "stored": ["int8"]}, r"stored: stored=\['int8'\]"),
}


@pytest.mark.parametrize("name", MAKING)
def test_init_with_invalid_options(name: str) -> None:
    options, message = MAKING[name]
    with pytest.raises(CacheError, match=message):
        make(**options)


def test_dtype_that_jax_would_narrow() -> None:
    with pytest.raises(
        CacheError, match='without x64, JAX stores float64 as float32\n  fix   pass "float32"'
    ):
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
    with pytest.raises(StrategyError, match="unknown mode 'decoding'"):
        make(mode="decoding")
    assert make(mode="decode").spec.mode is None


@pytest.mark.parametrize(("shards", "fitting"), [(1, 2), (3, 6)])
def test_order_must_match_shards_of_rows(shards: int, fitting: int, tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    order, pm = RowOrder(block=1, shards=shards), manager_of("dp:1,sp:2")
    message = (
        rf"order distributes the rows over {shards} shards, but the rows have 2 shards, over sp\n"
        rf"  fix   create the cache with RowOrder\(block=1, shards={fitting}\)"
    )
    with pm:
        with pytest.raises(CacheError, match=message):
            make(capacity=12, mode="decode", order=order)
        filled = make(capacity=12, mode="prefill", order=order)
        for move in (caches.reshard, caches.plan_reshard):
            with pytest.raises(CacheError, match=message):
                move(filled, "decode")
        cache = make(capacity=12, mode="decode", order=RowOrder(block=1, shards=4))
        assert_spec(cache, cache.axes(), mode="decode")
    alone = make(capacity=12, order=order)
    caches.save(alone, tmp_path / "cache")
    with pytest.raises(CacheError, match=message):
        caches.reshard(alone, "decode", manager=pm)
    with pytest.raises(CacheError, match=message):
        caches.restore(tmp_path / "cache", manager=pm, mode="decode")
    assert caches.restore(tmp_path / "cache", manager=pm, mode="prefill").spec.order == order


NUMBERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "ragged": (
        lambda cache: cache.free([[0], [1, 2]]),
        r"slots=\[\[0\], \[1, 2\]\] is not a list of integers",
    ),
    "too long a number": (
        lambda cache: cache.rewind([2**70, 0]),
        "lengths is object, not integers",
    ),
    "group of a fraction": (
        lambda cache: cache.reorder([0, 0], group=2.0),
        "group must be a positive integer, got 2.0",
    ),
    "group of truth": (
        lambda cache: cache.reorder([0, 0], group=True),
        "group must be a positive integer, got True",
    ),
    "group as text": (
        lambda cache: cache.reorder([0, 0], group="2"),
        "group must be a positive integer, got '2'",
    ),
    "group of the program's": (
        lambda cache: cache.reorder([0, 0], group=cache.length[0]),
        "^group must be a positive integer, got .*\n  fix   pass a Python int",
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_invalid_slot_numbers(name: str) -> None:
    operation, message = NUMBERS[name]
    for run in (operation, jax.jit(operation)):
        with pytest.raises(CacheError, match=message):
            run(make())


def test_list_of_traced_slots() -> None:
    cache = make().append(K, K).require()
    change = jax.jit(lambda cache, slot: cache.free([slot, 1]))(cache, 0)
    assert change.cache.length.tolist() == [0, 0]
    assert cache.free([jnp.int32(1), 5]).reasons() == {1: Refusal.SLOT_OUT_OF_RANGE}


def test_operation_on_donated_cache() -> None:
    cache, source = make(), make()
    jax.jit(lambda cache: cache.append(K, K), donate_argnums=0)(cache)
    with pytest.raises(CacheError, match="cache: its arrays are deleted: they were donated"):
        cache.append(K, K)
    jax.tree.map(lambda x: x.delete(), source)
    with pytest.raises(CacheError, match="source: its arrays are deleted"):
        make().insert(source, [0, 1])


def test_operation_on_cache_of_another_mesh() -> None:
    small, large = (
        manager_of("dp:2,sp:1").for_mode("decode"),
        manager_of("dp:2,sp:2").for_mode("decode"),
    )
    with large:
        cache = make().append(K, K).require()
    with small:
        message = (
            r"it is on the mesh \{'dp': 2, 'sp': 2\}, and the manager has the mesh "
            r"\{'dp': 2, 'sp': 1\} of other devices\n  fix   move the cache with"
        )
        with pytest.raises(CacheError, match="cache: " + message):
            cache.free([0])
        with pytest.raises(CacheError, match="source: " + message):
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
    with pytest.raises(
        CacheError, match=r"refused has shape \(3, 2\): these are changes of several caches"
    ):
        together.reasons()
    for at in range(3):
        first, alone = jax.tree.map(lambda x, at=at: x[at], together), twice(caches_[at], keys[at])
        assert first.reasons() == alone.reasons()
        for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(alone), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("cache", [None, {"k": K}])
def test_attention_without_cache(cache: Any) -> None:
    with pytest.raises(
        AttentionError, match=r"cache is .*, not a cache\n  fix   create one with caches.init"
    ):
        append_and_attend(K, K, K, cache)
    with pytest.raises(AttentionError, match=r"cache is .*, not a cache"):
        next_positions(cache)


@pytest.mark.parametrize("q_length", [0, -1, 2.0, True])
def test_next_positions_of_invalid_q_length(q_length: Any) -> None:
    with pytest.raises(
        AttentionError,
        match=(
            f"q_length must be a positive integer, got {q_length}\n  fix   pass the number of rows"
        ),
    ):
        next_positions(make(), q_length=q_length)


def test_position_beyond_32_bits() -> None:
    pages = np.ones((2, 2, 1, 2), np.float32)
    given: dict[str, Any] = {
        "block_tables": np.zeros((2, 1), np.int32),
        "lengths": np.ones(2, np.int32),
    }
    with pytest.raises(
        AttentionError, match="positions has 4294967296, outside -2147483648 to 2147483647"
    ):
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
        with pytest.raises(CacheError, match="cache is NoneType, not a cache"):
            move(None, "decode", manager=relayout())  # type: ignore[type-var]
        with pytest.raises(CacheError, match="manager is str\n  fix   pass a PartitionManager"):
            move(make(), "decode", manager="fsdp")  # type: ignore[arg-type]


# Saved and restored.


def damage(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    about = json.loads((path / "cache" / "metadata").read_text())
    change(about)
    (path / "cache" / "metadata").write_text(json.dumps(about))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no arrays": (
        lambda path: shutil.rmtree(path / "arrays"),
        "the arrays saved at .* cannot be read",
    ),
    "no data": (
        lambda path: [shutil.rmtree(part) for part in (path / "arrays").iterdir() if part.is_dir()],
        "the arrays saved at",
    ),
    "unknown field": (
        lambda path: damage(path, lambda about: about["spec"].update(future=1)),
        "the spec of the cache saved at .* cannot be read",
    ),
    "missing field": (
        lambda path: damage(path, lambda about: about["spec"].pop("batch")),
        "the spec of the cache saved at .* cannot be read",
    ),
    "other shape": (
        lambda path: damage(
            path, lambda about: about["arrays"].update(k=[[2, 8, 1, 2], "float32"])
        ),
        "the arrays saved at",
    ),
    "lost array": (
        lambda path: damage(path, lambda about: about["arrays"].pop("v")),
        "the arrays saved at",
    ),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.full(but=["no arrays", "lost array"])
def test_restore_of_damaged_cache(name: str, tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    harm, message = DAMAGE[name]
    caches.save(make(), tmp_path / "cache")
    harm(tmp_path / "cache")
    with pytest.raises(CacheError, match=f"(?s){message}.*restore another one"):
        caches.restore(tmp_path / "cache")
    # orbax leaves a coroutine that is never awaited. Collect it here, not in a later test.
    gc.collect()


def test_refused_save_writes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    gone = make()
    jax.tree.map(lambda x: x.delete(), gone)
    for cache in (gone, jax.eval_shape(make)):
        with pytest.raises(CacheError, match="cache: some of its arrays are deleted"):
            caches.save(cache, tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CacheError, match="path is NoneType"):
        caches.save(make(), None)  # type: ignore[arg-type]
    caches.save(make().append(K, K).require(), tmp_path / "cache")
    with pytest.raises(StrategyError, match="unknown mode 'decoding'"):
        caches.restore(tmp_path / "cache", mode="decoding")
    with pytest.raises(CacheError, match="a cache can be restored only outside of jit"):
        jax.jit(lambda: caches.restore(tmp_path / "cache"))()


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_failed_save_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orbax = pytest.importorskip("orbax.checkpoint")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(orbax.PyTreeCheckpointHandler, "save", fail, raising=True)
        patch.setattr(orbax.PyTreeCheckpointHandler, "async_save", fail, raising=False)
        with pytest.raises(CacheError, match="could not be written") as caught:
            caches.save(make(), tmp_path / "cache")
    assert str(caught.value.__cause__) == "disk full"
    caches.save(make().append(K, K).require(), tmp_path / "cache")
    assert caches.restore(tmp_path / "cache").length.tolist() == [2, 2]
