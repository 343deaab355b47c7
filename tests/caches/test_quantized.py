"""The quantized cache: error bounds, half the bytes, and the same result for every sharding."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright import caches
from shardwright.attention import dot_product_attention
from shardwright.caches import QuantizedCache, quantize
from shardwright.errors import CacheError
from shardwright.testing import assert_no_collectives, assert_sharding, cpu_mesh
from tests.raising import raises

STORED = ("int8", "float8_e4m3fn", "float8_e5m2")
# Largest error of an element, relative to its row's largest element and to itself: half a step.
ABSOLUTE = {"int8": 0.5 / 127, "float8_e4m3fn": 2.0**-10 / 448, "float8_e5m2": 2.0**-17 / 57344}
RELATIVE = {"int8": 0.0, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
ROUNDING = 1e-6  # of float32
RULES = (
    '[rules]\nbatch = "dp"\nquery_length = "-"\nkv_length = "sp"\nhead = "tp"\nkv_head = "tp | -"\n'
)
MESHES = {
    "batch": "dp:4,sp:1,tp:1",
    "heads": "dp:1,sp:1,tp:2",
    "length": "dp:1,sp:4,tp:1",
    "all": "dp:2,sp:2,tp:2",
}
BATCH, CAPACITY, HEADS, DIM = 4, 64, 2, 16


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def init(stored: str = "int8", **options: Any) -> QuantizedCache:
    sizes = {
        "batch": BATCH,
        "capacity": CAPACITY,
        "kv_heads": HEADS,
        "head_dim": DIM,
        "dtype": "float32",
    }
    cache: QuantizedCache = caches.init("quantized", stored=stored, **{**sizes, **options})
    return cache


def read(cache: Any) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values as numbers."""
    view = cache.view()
    k, v = (np.asarray(x, np.float32) for x in (view.k, view.v))
    if view.k_scale is None:
        return k, v
    return k * np.asarray(view.k_scale)[..., None], v * np.asarray(view.v_scale)[..., None]


def attend(q: Any, cache: Any, *, implementation: str = "blockwise") -> jax.Array:
    view = cache.view()
    output: jax.Array = dot_product_attention(
        q,
        view.k,
        view.v,
        k_scale=view.k_scale,
        v_scale=view.v_scale,
        lengths=view.lengths,
        mode="decode",
        causal=True,
        implementation=implementation,
    )
    return output


def bits(cache: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(cache)]


def error_of_rows(x: Any, stored: str) -> np.ndarray:
    """The largest error of each element of rows."""
    magnitude = np.abs(np.asarray(x, np.float32))
    return ABSOLUTE[stored] * magnitude.max(axis=-1, keepdims=True) + RELATIVE[stored] * magnitude


# Rows.


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 3e38])
def test_rounding_error_of_elements(stored: str, size: float) -> None:
    x = normal(50, 3, 32) / 6 * size
    quantized = quantize(x, stored)
    assert (quantized.values.dtype, quantized.scale.dtype) == (jnp.dtype(stored), jnp.float32)
    back = np.asarray(quantized.values, np.float32) * np.asarray(quantized.scale)[..., None]
    assert (np.abs(back - x) <= error_of_rows(x, stored) * (1 + 1e-5) + ROUNDING * np.abs(x)).all()
    most = np.abs(x).max(axis=-1)
    np.testing.assert_allclose(
        np.abs(back).max(axis=-1), most, rtol=2e-6
    )  # the largest stays what it is


@pytest.mark.parametrize("stored", STORED)
def test_rows_of_zeros_and_tiny_numbers(stored: str) -> None:
    quantized = quantize(jnp.stack([jnp.zeros(8), jnp.full(8, 1e-38), jnp.full(8, 1e-45)]), stored)
    np.testing.assert_array_equal(np.asarray(quantized.values, np.float32), 0.0)
    np.testing.assert_array_equal(quantized.scale, 1.0)


def test_invalid_dtype() -> None:
    for make in (lambda: init("int4"), lambda: quantize(jnp.ones(4), "int4")):
        with raises(CacheError, "int4", "dtype", "quantized", path="stored", fix="int8"):
            make()


@pytest.mark.parametrize("stored", STORED)
def test_half_the_bytes_of_bfloat16(stored: str) -> None:
    sizes = {"batch": 2, "capacity": 32, "kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}
    ours, dense = caches.init("quantized", stored=stored, **sizes), caches.init("dense", **sizes)
    held, plain = (cache.k.nbytes + cache.v.nbytes for cache in (ours, dense))
    held += ours.k_scale.nbytes + ours.v_scale.nbytes
    assert held / plain == (1 + 4 / 128) / 2
    assert held / plain <= 0.52


# Attention.


@pytest.mark.full(but=["int8"])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.ci
def test_error_of_logits(stored: str) -> None:
    """|q·(k' - k)| is at most sum |q_i| e_i, where e_i is the error of element i."""
    q, k = normal(BATCH, 1, HEADS, 128, seed=1), normal(BATCH, 32, HEADS, 128, seed=2)
    cache = init(stored, head_dim=128).append(k, k).require()
    logits = np.einsum("bthd,bshd->bhs", q, read(cache)[0][:, :32])
    exact = np.einsum("bthd,bshd->bhs", q, k)
    bound = np.einsum("bthd,bshd->bhs", np.abs(q), error_of_rows(k, stored))
    assert (np.abs(logits - exact) <= bound * (1 + 1e-4) + 1e-4).all()
    # The errors of elements are independent. For normal rows of 128 elements their root mean square
    # is scale / sqrt(12), with a scale of about 2.7 / 127 of the root mean square: 0.6 %. For
    # float8 it is 0.4 of half a step.
    usual = np.linalg.norm(logits - exact) / np.linalg.norm(exact)
    assert usual < {"int8": 0.008, "float8_e4m3fn": 0.03, "float8_e5m2": 0.06}[stored]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.full
@pytest.mark.ci
def test_attention_error_against_bfloat16_cache(stored: str) -> None:
    """An error d of logits changes outputs by (e^(2d) - 1) max |v| at most."""
    heads, dim, count = 8, 128, 48
    q = jnp.asarray(normal(BATCH, 1, heads, dim, seed=1, dtype=jnp.bfloat16))
    k, v = (normal(BATCH, count, HEADS, dim, seed=seed, dtype=jnp.bfloat16) for seed in (2, 3))
    sizes = {
        "batch": BATCH,
        "capacity": CAPACITY,
        "kv_heads": HEADS,
        "head_dim": dim,
        "dtype": "bfloat16",
    }
    ours = caches.init("quantized", stored=stored, **sizes).append(k, v).require()
    dense = caches.init("dense", **sizes).append(k, v).require()
    actual, wanted = (np.asarray(attend(q, cache), np.float32) for cache in (ours, dense))
    grouped = np.abs(np.asarray(q, np.float32)).reshape(BATCH, HEADS, -1, dim)
    d = np.einsum("bkgd,bskd->bkgs", grouped, error_of_rows(k, stored)).max(axis=-1) / np.sqrt(dim)
    largest = np.abs(np.asarray(v, np.float32)).max(axis=(1, 3))[..., None]
    bound = (np.exp(2 * d) - 1) * largest + error_of_rows(v, stored).max(axis=(1, 3))[..., None]
    rounding = 2.0**-7 * largest  # weights and outputs in bfloat16
    assert (
        np.abs(actual - wanted).reshape(BATCH, HEADS, -1, dim) <= (bound + rounding)[..., None]
    ).all()
    usual = np.linalg.norm(actual - wanted) / np.linalg.norm(wanted)
    assert usual < {"int8": 0.015, "float8_e4m3fn": 0.06, "float8_e5m2": 0.12}[stored]


def test_decode_step_copies_no_cache() -> None:
    temporary = {}
    for capacity in (2048, 16384):
        cache = jax.eval_shape(functools.partial(init, capacity=capacity, head_dim=64))
        q = jax.ShapeDtypeStruct((BATCH, 1, 8, 64), jnp.float32)
        memory = jax.jit(attend).lower(q, cache).compile().memory_analysis()
        temporary[capacity] = memory.temp_size_in_bytes
    held = BATCH * 16384 * HEADS * 64  # keys in int8
    # Only the positions of the rows (4 bytes each) and counters of blocks grow with the capacity.
    assert temporary[16384] - temporary[2048] <= 4 * (16384 - 2048) + 1024
    assert temporary[16384] < held / 2


# No drift.


@functools.partial(jax.jit, static_argnums=1)
def step_by_step(cache: Any, every: int, k: Any, v: Any) -> tuple[Any, Any]:
    """Append tokens one by one; return the last cache, and the first rows at intervals."""

    def some(cache: Any, kv: Any) -> tuple[Any, Any]:
        cache = jax.lax.scan(
            lambda cache, kv: (cache.append(*(x[:, None] for x in kv)).cache, None), cache, kv
        )[0]
        return cache, {name: x[:, :every] for name, x in cache.buffers.items()}

    count = k.shape[1] // every
    in_parts = tuple(jnp.moveaxis(x, 1, 0).reshape(count, every, BATCH, HEADS, DIM) for x in (k, v))
    return jax.lax.scan(some, cache, in_parts)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.full
def test_thousand_steps_do_not_drift(stored: str) -> None:
    k, v = (normal(BATCH, 1000, HEADS, DIM, seed=seed) for seed in (4, 5))
    empty = init(stored, capacity=1000)
    after, first = step_by_step(empty, 40, k, v)
    for x in first.values():
        rows = np.asarray(x)
        assert all(part.tobytes() == rows[0].tobytes() for part in rows)
    at_once = empty.append(k, v).require()
    assert bits(after) == bits(at_once)
    q = normal(BATCH, 1, 4, DIM, seed=6)
    exact = attend(
        q,
        caches.init(
            "dense", batch=BATCH, capacity=1000, kv_heads=HEADS, head_dim=DIM, dtype="float32"
        )
        .append(k, v)
        .cache,
    )
    stepped, fresh = (np.abs(attend(q, cache) - exact).max() for cache in (after, at_once))
    assert 0 < stepped <= fresh


# Sources.


def test_insert_copies_rows_of_same_dtype() -> None:
    k = normal(2, 9, HEADS, DIM)
    source = init(batch=2, capacity=16).append(k, -k).require()
    cache = init().insert(source, [3, 1]).require()
    for name, rows in cache.buffers.items():
        assert (
            np.asarray(rows)[[3, 1], :9].tobytes()
            == np.asarray(source.buffers[name])[:, :9].tobytes()
        ), name
    np.testing.assert_array_equal(cache.length, [0, 9, 0, 9])


def test_insert_quantizes_other_sources() -> None:
    k = normal(2, 9, HEADS, DIM)
    sizes = {"batch": 2, "capacity": 16, "kv_heads": HEADS, "head_dim": DIM, "dtype": "float32"}
    dense, float8 = (
        caches.init("dense", **sizes).append(k, -k).require(),
        init("float8_e4m3fn", batch=2).append(k, -k).require(),
    )
    from_dense, from_float8 = (
        init().insert(source, [0, 2]).require() for source in (dense, float8)
    )
    assert bits(from_dense) == bits(
        init().insert(init(batch=2).append(k, -k).require(), [0, 2]).require()
    )
    want = read(float8)[0][:, :9]
    assert from_float8.k.dtype == jnp.int8
    assert (
        np.abs(read(from_float8)[0][[0, 2], :9] - want) <= error_of_rows(want, "int8") * (1 + 1e-5)
    ).all()
    into_dense = caches.init("dense", **sizes).insert(float8, [1, 0]).require()
    np.testing.assert_array_equal(read(into_dense)[0][[1, 0], :9], want)


# Everywhere.


def operations(cache: Any, k: Any) -> list[Any]:
    """A cache after each of several operations."""
    actual = [cache]
    for operation in (
        lambda cache: cache.append(k[:, :7], -k[:, :7]),
        lambda cache: cache.append(
            k[:, :4], k[:, :4], valid=np.arange(4) < np.array([4, 1, 0, 3])[:, None]
        ),
        lambda cache: cache.rewind(cache.length - 2),
        lambda cache: cache.reorder([1, 1, 3, 3], group=2),
        lambda cache: cache.free([2]),
        lambda cache: cache.append(-k, k),
    ):
        actual.append(jax.jit(operation)(actual[-1]).require())
    return actual


# Two cells by default, all of them in the slow suite.
QUICK = {("all", "auto", "report"), ("length", "explicit", "ring")}
CELLS = [
    (mesh, types, overflow)
    for mesh in MESHES
    for types in ("auto", "explicit")
    for overflow in ("report", "ring")
]


@pytest.mark.parametrize(
    ("mesh", "axis_types", "overflow"),
    [pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.full) for cell in CELLS],
)
@pytest.mark.full
@pytest.mark.pairwise
def test_sharded_equals_unsharded(mesh: str, axis_types: Any, overflow: str) -> None:
    k = normal(BATCH, 12, HEADS, DIM)
    capacity = 16 if overflow == "ring" else CAPACITY
    alone = operations(init(overflow=overflow, capacity=capacity), k)
    q = normal(BATCH, 2, 4, DIM, seed=9)
    with sw.PartitionManager(
        sw.Strategy.loads(RULES), mesh=cpu_mesh(MESHES[mesh], axis_types=axis_types)
    ).for_mode("decode") as manager:
        cache = init(overflow=overflow, capacity=capacity)
        placed = jax.tree.map(lambda x: x.sharding, cache)
        sharded = operations(cache, k)
        actual = jax.jit(functools.partial(attend, implementation="flash_decode"))(q, sharded[1])
    assert_sharding(sharded[-1], placed)
    assert manager is not None
    assert [bits(item) for item in sharded] == [bits(item) for item in alone]
    np.testing.assert_allclose(actual, attend(q, alone[1]), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.full(but=["1"])
def test_append_sends_nothing_and_writes_in_place(count: int) -> None:
    temporary = []
    with sw.PartitionManager(sw.Strategy.loads(RULES), mesh=cpu_mesh(MESHES["all"])).for_mode(
        "decode"
    ):
        for capacity in (CAPACITY, 64 * CAPACITY):
            cache, new = init(capacity=capacity), jnp.ones((BATCH, count, HEADS, DIM))
            compiled = (
                jax.jit(lambda cache, k, v: cache.append(k, v), donate_argnums=0)
                .lower(cache, new, new)
                .compile()
            )
            assert_no_collectives(compiled)
            memory = compiled.memory_analysis()
            assert memory.alias_size_in_bytes == sum(
                x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(cache)
            )
            temporary.append(memory.temp_size_in_bytes)
    assert temporary[0] == temporary[1]
