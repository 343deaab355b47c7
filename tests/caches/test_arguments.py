"""Invalid arguments of caches raise errors before anything is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright import caches
from shardwright.caches import RowOrder
from shardwright.errors import CacheError, IndivisibleError, MeshSpecError
from shardwright.testing import assert_spec, cpu_mesh
from tests.raising import facts, raises

SIZES: dict[str, Any] = {
    "batch": 2,
    "capacity": 4,
    "kv_heads": 2,
    "head_dim": 2,
    "dtype": "float32",
}
K = np.zeros((2, 1, 2, 2), np.float32)

WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "shape of k": (
        lambda cache: cache.append(K[:1], K),
        facts("(1, 1, 2, 2)", "(2, 1, 2, 2)", path="k", fix="q_length"),
    ),
    "shape of v": (
        lambda cache: cache.append(K, K[..., :1]),
        facts("(2, 1, 2, 1)", "(2, 1, 2, 2)", path="v", fix="q_length"),
    ),
    "lengths of k and v": (
        lambda cache: cache.append(K, K.repeat(3, 1)),
        facts("(2, 3, 2, 2)", "(2, 1, 2, 2)", path="v", fix="q_length"),
    ),
    "no tokens": (
        lambda cache: cache.append(K[:, :0], K[:, :0]),
        facts("(2, 0, 2, 2)", "(2, 1, 2, 2)", path="k", fix="q_length"),
    ),
    "dtype": (
        lambda cache: cache.append(K.astype(np.float16), K),
        facts("float16", "float32", path="k", fix=("k.astype", "float32")),
    ),
    "lists": (lambda cache: cache.append([[1.0]], K), facts("list", path="k", fix="float32")),
    "both": (
        lambda cache: cache.append(K[:1], K.astype(np.float16)),
        facts("(1, 1, 2, 2)", "(2, 1, 2, 2)", path="k", fix="q_length", count=2),
    ),
    "valid": (
        lambda cache: cache.append(K, K, valid=np.ones((2, 1))),
        facts("float64", "bool", path="valid", fix="valid.astype"),
    ),
    "shape of valid": (
        lambda cache: cache.append(K, K, valid=np.ones(2, bool)),
        facts("(2,)", "(2, 1)", path="valid", fix="q_length"),
    ),
    "slots that are not integers": (
        lambda cache: cache.free([0.5]),
        facts("float64", path="slots", fix="int32"),
    ),
    "slots of two dims": (
        lambda cache: cache.free(np.zeros((1, 2), np.int32)),
        facts("(1, 2)", path="slots"),
    ),
    "no slots": (
        lambda cache: cache.free(np.zeros(0, np.int32)),
        facts("(0,)", path="slots"),
    ),
    "lengths": (lambda cache: cache.rewind([1]), facts("(1,)", "(2,)", path="lengths")),
    "parents": (lambda cache: cache.reorder([1, 0, 1]), facts("(3,)", "(2,)", path="parents")),
    "group": (
        lambda cache: cache.reorder([1, 0], group=3),
        facts(2, 3, path="group"),
    ),
    "a slot too few": (
        lambda cache: cache.insert(cache, [0]),
        facts("(1,)", "(2,)", path="slots", fix="2"),
    ),
    "no cache": (lambda cache: cache.insert(K, [0]), facts(path="source", fix="caches.init")),
    "other heads": (
        lambda cache: cache.insert(
            caches.init("dense", **SIZES | {"kv_heads": 1, "dtype": "bfloat16"}), [0, 1]
        ),
        (
            (
                facts("kv_heads", 1, 2, path="source", fix="kv_heads"),
                facts("bfloat16", "float32", path="source", fix="dtype"),
            )
        ),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_operations(name: str) -> None:
    operation, message = WRONG[name]
    cache = caches.init("dense", **SIZES)
    with raises(CacheError, message):
        operation(cache)
    with raises(CacheError, message):
        jax.jit(operation)(cache)


MAKING: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"kind": "dens"}, facts("dens", path="kind", fix="dense")),
    "size": (
        {"kv_heads": 0},
        facts(0, path="kv_heads", fix=("kv_heads", "1")),
    ),
    "no capacity": ({"capacity": None}, facts("window", path="capacity")),
    "truth": ({"batch": True}, facts("True", path="batch", fix="batch")),
    "window": (
        {"kind": "sliding", "window": 5},
        facts(5, 4, path="window"),
    ),
    "no window": (
        {"kind": "sliding"},
        facts("cache", path="window", fix="CacheShape"),
    ),
    "sliding that reports": (
        {"kind": "sliding", "window": 4, "overflow": "report"},
        facts("cache", "report", path="overflow", fix="dense"),
    ),
    "overflow": (
        {"overflow": "rign"},
        facts("rign", path="overflow", fix="ring"),
    ),
    "dtype": ({"dtype": "int8"}, facts("int8", path="dtype", fix="bfloat16")),
    "no dtype": ({"dtype": "floaty"}, facts("floaty", path="dtype", fix="bfloat16")),
    "order": (
        {"order": RowOrder(block=3, shards=2)},
        facts(4, 3, 2, path="order"),
    ),
    "option": ({"page_size": 4}, facts("dense", "cache", "page_size", path="init", fix="leave")),
    "another name": (
        {"capacity": None, "max_length": 8},
        facts("dense", "cache", "max_length", path="init", fix="slot"),
    ),
    "mistyped argument": (
        {"overflows": "ring"},
        facts("option", "overflows", path="init", fix="overflow"),
    ),
    "mistyped option": (
        {"kind": "paged", "pagesize": 4},
        facts("paged", "cache", "pagesize", path="init", fix="page_size"),
    ),
}


@pytest.mark.parametrize("name", MAKING)
def test_init(name: str) -> None:
    changed, message = MAKING[name]
    with raises(CacheError, message):
        caches.init(**{"kind": "dense", **SIZES, **changed})


def test_window_above_capacity_without_ring() -> None:
    assert caches.init("dense", window=9, **SIZES).spec.window == 9


RULES = '[rules]\nbatch = "dp"\nkv_length = "sp"\nkv_head = "tp | -"\n'


def manager_of(mesh: str, **options: Any) -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.loads(RULES), mesh=cpu_mesh(mesh), **options)


def test_manager_without_mode() -> None:
    with (
        manager_of("dp:2"),
        raises(CacheError, "manager", path="mode", fix="pm.for_mode"),
    ):
        caches.init("dense", **SIZES)


def test_indivisible_capacity() -> None:
    with (
        manager_of("sp:8", mode="decode"),
        raises(
            IndivisibleError, "sp=8", path="k", dim=1, axis="KV_LENGTH", size=4, fix="kv_length"
        ),
    ):
        caches.init("dense", **SIZES)


def test_abstract_mesh() -> None:
    manager = sw.PartitionManager(
        sw.Strategy.loads(RULES), mesh=sw.abstract_mesh("dp:2"), mode="decode"
    )
    with manager:
        with raises(MeshSpecError, "manager", "mesh", fix="create_mesh"):
            caches.init("dense", **SIZES)
        assert jax.eval_shape(lambda: caches.init("dense", **SIZES)).k.shape == (2, 4, 2, 2)


@pytest.mark.parametrize("kind", ["dense", "sliding"])
def test_cache_keeps_the_sharding_of_its_mode(
    kind: str,
) -> None:
    manager = manager_of("dp:2,sp:2,tp:2", mode="decode")
    with manager:
        cache = caches.init(kind, window=4, **SIZES)
        inside = jax.jit(lambda: caches.init(kind, window=4, **SIZES))()
    for item in (cache, inside):
        assert_spec(item, item.axes(), manager=manager, role="activation")
    with manager.for_mode("train"):
        assert_spec(
            cache.append(K, K).cache,
            cache.axes(),
            manager=manager,
            mode="decode",
            role="activation",
        )


def test_shard_map_that_splits_cache() -> None:
    manager = manager_of("dp:2", mode="decode")
    with manager:
        cache = caches.init("dense", **SIZES)
        split = jax.shard_map(
            lambda k: cache.append(k, k).cache.k, in_specs=jax.P(), out_specs=jax.P("dp")
        )
        with raises(CacheError, "shard_map", "dp", fix="shard_map"):
            jax.jit(split)(K)


def test_shard_map_over_another_axis() -> None:
    rules = '[mesh]\nstage = 2\ndp = 2\n[rules]\nbatch = "dp"\nlayers = "stage"\n'
    with sw.PartitionManager(
        sw.Strategy.loads(rules), mesh=cpu_mesh("stage:2,dp:2"), mode="decode"
    ):
        cache = caches.init("dense", **SIZES)
        both = jax.shard_map(
            lambda k: cache.append(k, k).cache.k[None],
            in_specs=jax.P(),
            out_specs=jax.P("stage"),
            axis_names={"stage"},
            check_vma=False,
        )
        actual = jax.jit(both)(K + 1)
    np.testing.assert_array_equal(
        actual, np.broadcast_to(cache.append(K + 1, K).cache.k, (2, *cache.k.shape))
    )


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.uint64, np.int8])
def test_numbers_beyond_32_bits_are_out_of_range(dtype: Any) -> None:
    cache = caches.init("dense", **SIZES).append(K, K).cache
    slots = np.array([np.iinfo(dtype).max, 0], dtype)
    assert list(cache.free(slots).reasons()) == [0]
    if dtype is np.int64:
        assert list(cache.free(np.array([2**32, 1 - 2**33])).reasons()) == [0, 1]
        with jax.enable_x64(True):
            assert list(
                jax.jit(lambda cache, slots: cache.free(slots))(
                    cache, jnp.array([2**32, 1])
                ).reasons()
            ) == [0]
