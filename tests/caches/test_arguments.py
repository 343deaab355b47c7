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
        r"k: shape \(1, 1, 2, 2\), not \(2, 1, 2, 2\)",
    ),
    "shape of v": (
        lambda cache: cache.append(K, K[..., :1]),
        r"v: shape \(2, 1, 2, 1\), not \(2, 1, 2, 2\)",
    ),
    "lengths of k and v": (
        lambda cache: cache.append(K, K.repeat(3, 1)),
        r"v: shape \(2, 3, 2, 2\), not \(2, 1, 2, 2\)",
    ),
    "no tokens": (
        lambda cache: cache.append(K[:, :0], K[:, :0]),
        r"k: shape \(2, 0, 2, 2\), not \(2, 1, 2, 2\)",
    ),
    "dtype": (
        lambda cache: cache.append(K.astype(np.float16), K),
        (
            r"k: dtype float16, not float32"
            r"\n  fix   if the cast is intended.*CacheShape\(...\)\) with dtype=\"float16\""
        ),
    ),
    "lists": (lambda cache: cache.append([[1.0]], K), "k: it is list, not an array"),
    "both": (lambda cache: cache.append(K[:1], K.astype(np.float16)), "2 problems"),
    "valid": (
        lambda cache: cache.append(K, K, valid=np.ones((2, 1))),
        "valid: dtype float64, not bool",
    ),
    "shape of valid": (
        lambda cache: cache.append(K, K, valid=np.ones(2, bool)),
        r"valid: shape \(2,\), not \(2, 1\)",
    ),
    "slots that are not integers": (
        lambda cache: cache.free([0.5]),
        "slots is float64, not integers",
    ),
    "slots of two dims": (
        lambda cache: cache.free(np.zeros((1, 2), np.int32)),
        r"slots has shape \(1, 2\), not \(n,\)",
    ),
    "no slots": (
        lambda cache: cache.free(np.zeros(0, np.int32)),
        r"slots has shape \(0,\), not \(n,\)",
    ),
    "lengths": (lambda cache: cache.rewind([1]), r"lengths has shape \(1,\), not \(2,\)"),
    "parents": (lambda cache: cache.reorder([1, 0, 1]), r"parents has shape \(3,\), not \(2,\)"),
    "group": (
        lambda cache: cache.reorder([1, 0], group=3),
        "2 slots do not divide into groups of 3",
    ),
    "a slot too few": (
        lambda cache: cache.insert(cache, [0]),
        (
            r"(?s)slots has shape \(1,\), not \(2,\).*one integer per sequence of the "
            r"source; 2 is not a slot, and skips a sequence"
        ),
    ),
    "no cache": (lambda cache: cache.insert(K, [0]), "source is ndarray, not a cache"),
    "other heads": (
        lambda cache: cache.insert(
            caches.init("dense", **SIZES | {"kv_heads": 1, "dtype": "bfloat16"}), [0, 1]
        ),
        (
            r"(?s)kv_heads is 1, and that of the cache is 2.*dtype is bfloat16, and "
            r"that of the cache is float32"
        ),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_operations(name: str) -> None:
    operation, message = WRONG[name]
    cache = caches.init("dense", **SIZES)
    with pytest.raises(CacheError, match=message):
        operation(cache)
    with pytest.raises(CacheError, match=message):
        jax.jit(operation)(cache)


MAKING: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"kind": "dens"}, "'dens' is not a kind of cache\n  fix   did you mean 'dense'"),
    "size": (
        {"kv_heads": 0},
        "^kv_heads must be a positive integer, got 0\n  fix   pass kv_heads=1$",
    ),
    "no capacity": ({"capacity": None}, "neither capacity nor window is given"),
    "truth": ({"batch": True}, "batch must be a positive integer, got True"),
    "window": (
        {"kind": "sliding", "window": 5},
        "a window of 5 positions needs as many rows, and capacity is 4",
    ),
    "no window": (
        {"kind": "sliding"},
        (
            r"a sliding cache needs a window"
            r"\n  fix   pass window= \(in an engine: CacheShape\(window=...\)\)"
        ),
    ),
    "sliding that reports": (
        {"kind": "sliding", "window": 4, "overflow": "report"},
        "a sliding cache is a ring, but overflow='report'",
    ),
    "overflow": (
        {"overflow": "rign"},
        "'rign' is not an overflow policy\n  fix   did you mean 'ring'",
    ),
    "dtype": ({"dtype": "int8"}, "int8 is not a floating-point dtype"),
    "no dtype": ({"dtype": "floaty"}, "'floaty' is not a dtype"),
    "order": (
        {"order": RowOrder(block=3, shards=2)},
        "4 rows do not divide into blocks of 3 on 2 shards",
    ),
    "option": ({"page_size": 4}, "a dense cache has no option 'page_size'\n  fix   leave it out"),
    "another name": (
        {"capacity": None, "max_length": 8},
        "a dense cache has no option 'max_length'\n  fix   pass the rows per slot as capacity",
    ),
    "mistyped argument": (
        {"overflows": "ring"},
        "no option 'overflows'\n  fix   did you mean 'overflow'",
    ),
    "mistyped option": (
        {"kind": "paged", "pagesize": 4},
        "a paged cache has no option 'pagesize'\n  fix   did you mean 'page_size'",
    ),
}


@pytest.mark.parametrize("name", MAKING)
def test_init(name: str) -> None:
    changed, message = MAKING[name]
    with pytest.raises(CacheError, match=message):
        caches.init(**{"kind": "dense", **SIZES, **changed})


def test_window_above_capacity_without_ring() -> None:
    assert caches.init("dense", window=9, **SIZES).spec.window == 9


RULES = '[rules]\nbatch = "dp"\nkv_length = "sp"\nkv_head = "tp | -"\n'


def manager_of(mesh: str, **options: Any) -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.loads(RULES), mesh=cpu_mesh(mesh), **options)


def test_manager_without_mode() -> None:
    with (
        manager_of("dp:2"),
        pytest.raises(CacheError, match="neither the call nor the manager has a mode"),
    ):
        caches.init("dense", **SIZES)


def test_indivisible_capacity() -> None:
    with (
        manager_of("sp:8", mode="decode"),
        pytest.raises(
            IndivisibleError, match="k dim 1 KV_LENGTH: size 4 does not divide over sp=8"
        ),
    ):
        caches.init("dense", **SIZES)


def test_abstract_mesh() -> None:
    manager = sw.PartitionManager(
        sw.Strategy.loads(RULES), mesh=sw.abstract_mesh("dp:2"), mode="decode"
    )
    with manager:
        with pytest.raises(MeshSpecError, match="the manager's mesh is abstract"):
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
        with pytest.raises(
            CacheError, match="a shard_map around the call has split the cache over dp"
        ):
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
