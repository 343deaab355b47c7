"""The paged cache: refusals, shared pages, inserts, and what its programs send and copy."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright import caches
from shardwright.caches import PagedCache, Refusal, RowOrder
from shardwright.errors import CacheError
from shardwright.testing import assert_collectives, assert_no_collectives, assert_sharding, cpu_mesh
from tests.attention.conformance import QUICK
from tests.raising import facts, raises

HEADS, DIM, V_DIM = 2, 4, 6
BATCH, CAPACITY, PAGE_SIZE, PAGES = 4, 12, 4, 6


def make(
    *, batch: int = BATCH, capacity: int = CAPACITY, kind: str = "paged", **options: Any
) -> Any:
    if kind == "paged":
        options = {"page_size": PAGE_SIZE, "pages": PAGES} | options
    return caches.init(
        kind,
        batch=batch,
        capacity=capacity,
        kv_heads=HEADS,
        head_dim=DIM,
        v_dim=V_DIM,
        dtype="float32",
        **options,
    )


def some(
    batch: int, count: int, *, seed: int = 0, heads: int = HEADS
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values."""
    random = np.random.default_rng(seed)
    k, v = (
        random.standard_normal((batch, count, heads, dim)).astype(np.float32)
        for dim in (DIM, V_DIM)
    )
    return k, v


def ragged(*counts: int, width: int) -> np.ndarray:
    return np.arange(width)[None] < np.asarray(counts)[:, None]


def put(cache: Any, *counts: int, seed: int = 0) -> Any:
    """Append tokens to each slot, in chunks of one length, so that all tests share a program."""
    return cache.append(
        *some(cache.batch, CAPACITY + 1, seed=seed), valid=ragged(*counts, width=CAPACITY + 1)
    )


def filled(*counts: int) -> Any:
    """A cache whose slots have these lengths."""
    return put(make(), *counts).require()


def read(cache: PagedCache, slot: int) -> tuple[np.ndarray, np.ndarray]:
    """The keys and values of a slot, row by row."""
    length, size = int(cache.length[slot]), cache.page_size
    used = np.asarray(cache.tables[slot])[: -(-length // size)]
    k, v = (
        np.asarray(x)[used].reshape(-1, *x.shape[2:])[:length]
        for x in (cache.k_pages, cache.v_pages)
    )
    return k, v


def assert_holds(cache: PagedCache, slot: int, *parts: tuple[np.ndarray, np.ndarray]) -> None:
    for actual, *wanted in zip(read(cache, slot), *parts, strict=True):
        np.testing.assert_array_equal(actual, np.concatenate(wanted))


def tokens(
    slot: int, count: int, *, seed: int = 0, batch: int = BATCH
) -> tuple[np.ndarray, np.ndarray]:
    """The first keys and values that `put` gives to a slot."""
    k, v = some(batch, CAPACITY + 1, seed=seed)
    return k[slot, :count], v[slot, :count]


def assert_unchanged(cache: Any, before: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, cache, before)


# What is refused.


def test_slot_gets_all_its_pages_or_none() -> None:
    change = put(make(), 12, 5, 8, 3)
    cache = change.cache
    assert change.reasons() == {2: Refusal.NO_FREE_PAGE}
    assert cache.length.tolist() == [12, 5, 0, 3]
    assert int(cache.free_pages()) == 0
    assert change.positions[2].tolist() == [-1] * (CAPACITY + 1)
    assert change.positions[1].tolist() == [0, 1, 2, 3, 4] + [-1] * (CAPACITY - 4)
    # The last page of the slot has room, although no page is free.
    change = put(cache, 0, 1, 0, 1, seed=1)
    assert change.reasons() == {}
    assert_holds(change.cache, 3, tokens(3, 3), tokens(3, 1, seed=1))
    full = put(change.cache, 1, 0, 1, 1, seed=2)
    assert full.reasons() == {0: Refusal.OVERFLOW, 2: Refusal.NO_FREE_PAGE, 3: Refusal.NO_FREE_PAGE}
    assert full.overflow.tolist() == [True, False, False, False]
    assert_unchanged(full.cache, change.cache)
    with raises(CacheError, 0, 1, 3, fix="reasons()"):
        full.require()


def test_capacity_limits_slot_despite_free_pages() -> None:
    cache = put(make(page_size=5), 11, 3, 0, 0).require()
    change = put(cache, 2, 2, 0, 0)
    assert change.reasons() == {0: Refusal.OVERFLOW}
    assert change.cache.length.tolist() == [11, 5, 0, 0]


def test_free_refuses_repeated_and_missing_slots() -> None:
    cache = filled(5, 5, 3, 0)
    freed = cache.free([1, 2]).require()
    assert freed.free([1, 0]).reasons() == {0: Refusal.SLOT_EMPTY}
    assert int(freed.free_pages()) == int(cache.free_pages()) + 3
    wrong = cache.free(np.array([-1, 4, 2**40, 0, 0]))
    out = Refusal.SLOT_OUT_OF_RANGE
    assert wrong.reasons() == {0: out, 1: out, 2: out, 3: Refusal.SLOT_TWICE, 4: Refusal.SLOT_TWICE}
    assert_unchanged(wrong.cache, cache)


def test_refused_shares() -> None:
    cache = filled(5, 0, 0, 4)
    change = cache.share([0, 0, 0, 9, 0], [1, 3, 2, 2, -1], lengths=[6, 1, 1, 1, 1])
    assert change.reasons() == {
        0: Refusal.LENGTH_OUT_OF_RANGE,
        1: Refusal.SLOT_IN_USE,
        2: Refusal.SLOT_TWICE,
        3: Refusal.SLOT_OUT_OF_RANGE,
        4: Refusal.SLOT_OUT_OF_RANGE,
    }
    assert change.cache.length.tolist() == [5, 0, 0, 4]
    assert cache.share([1, 0], [2, 1]).reasons() == {0: Refusal.SLOT_EMPTY}
    with raises(CacheError, "(1,)", "(2,)", path="sources"):
        cache.share([0], [1, 2])


def test_refused_rewinds_and_reorders() -> None:
    cache = filled(5, 0, 3, 2)
    change = cache.rewind([6, 0, -1, 2])
    assert change.reasons() == {0: Refusal.LENGTH_OUT_OF_RANGE, 2: Refusal.LENGTH_OUT_OF_RANGE}
    assert_unchanged(change.cache, cache)
    change = cache.reorder([0, -1, 1, 3], group=2)
    assert change.reasons() == {1: Refusal.SLOT_OUT_OF_RANGE, 2: Refusal.SLOT_OUT_OF_RANGE}
    assert_unchanged(change.cache, cache)
    with raises(CacheError, 4, 3, path="group"):
        cache.reorder([0, 1, 2, 3], group=3)


def test_policy_error_raises_refusals() -> None:
    cache = make(overflow="error")
    with raises(CacheError, "entry", 2, "pages", fix="report"):
        put(cache, 12, 5, 8, 3)
    error, _ = jax.jit(checkify.checkify(lambda cache: put(cache, 12, 5, 8, 3).cache))(cache)
    with pytest.raises(
        checkify.JaxRuntimeError, match=f"{int(Refusal.NO_FREE_PAGE)} too few pages are free"
    ):
        error.throw()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no rows": ({"page_size": 0}, facts("page_size", 0, fix="page_size")),
    "no pages": ({"pages": 0}, facts("pages", 0, fix="pages")),
    "ring": ({"overflow": "ring"}, facts("paged", "cache", path="overflow", fix="sliding")),
    "order": (
        {"order": RowOrder(block=2, shards=2)},
        facts("paged", "cache", path="order", fix="page"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_pages(name: str) -> None:
    options, message = WRONG[name]
    with raises(CacheError, message):
        make(**options)


# Shared pages.


def test_first_write_to_shared_page_copies_it() -> None:
    cache = filled(6, 0, 0, 0)
    shared = cache.share([0, 0], [1, 2], lengths=[6, 3]).require()
    assert int(shared.free_pages()) == int(cache.free_pages())
    assert shared.references.tolist() == [3, 2, 0, 0, 0, 0]
    after = put(shared, 0, 2, 2, 0, seed=1).require()
    # Slot 1 copied its second page, slot 2 its first and took one more.
    assert after.references.tolist() == [2, 1, 1, 1, 1, 0]
    assert_holds(after, 0, tokens(0, 6))
    assert_holds(after, 1, tokens(0, 6), tokens(1, 2, seed=1))
    assert_holds(after, 2, tokens(0, 3), tokens(2, 2, seed=1))


def test_last_writer_of_shared_page_needs_no_copy() -> None:
    cache = filled(3, 12, 0, 0).share([0, 0], [2, 3]).require()
    assert int(cache.free_pages()) == 2
    after = put(cache, 1, 0, 1, 1, seed=1).require()
    assert [int(after.tables[slot, 0]) for slot in (0, 2, 3)] == [4, 5, 0]
    for slot in (0, 2, 3):
        assert_holds(after, slot, tokens(0, 3), tokens(slot, 1, seed=1))


def test_last_user_writes_shared_page_in_place() -> None:
    cache = filled(6, 0, 3, 0).share([0, 2], [1, 3]).require().free([0, 2]).require()
    after = put(cache, 0, 1, 0, 1, seed=1).require()
    np.testing.assert_array_equal(after.tables, cache.tables)
    assert int(after.free_pages()) == int(cache.free_pages()) == 3
    assert_holds(after, 1, tokens(0, 6), tokens(1, 1, seed=1))


def test_rewind_gives_back_unshared_pages() -> None:
    cache = filled(10, 0, 1, 0).share([0, 2], [1, 3], lengths=[5, 1]).require()
    assert cache.references.tolist() == [2, 2, 1, 2, 0, 0]
    back = cache.rewind([4, 5, 1, 1]).require()
    assert back.references.tolist() == [2, 1, 0, 2, 0, 0]
    after = put(back, 1, 1, 0, 0, seed=1).require()
    assert after.references.tolist() == [2, 1, 1, 2, 0, 0]
    assert_holds(after, 0, tokens(0, 4), tokens(0, 1, seed=1))
    assert_holds(after, 1, tokens(0, 5), tokens(1, 1, seed=1))


def test_beams_copy_no_rows() -> None:
    cache = filled(6, 5, 4, 0)
    reordered = cache.reorder([1, 1, 3, 2], group=2).require()
    assert_unchanged((reordered.k_pages, reordered.v_pages), (cache.k_pages, cache.v_pages))
    assert reordered.length.tolist() == [5, 5, 0, 4]
    # The pages of the beam without a child are free; those of its parent belong to two slots.
    assert reordered.references.tolist() == [0, 0, 2, 2, 1, 0]
    for slot, parent in enumerate([1, 1, 3, 2]):
        assert_holds(reordered, slot, read(cache, parent))


# Insert.


SOURCES = {
    "dense": {"kind": "dense"},
    "interleaved": {"kind": "dense", "capacity": 12, "order": RowOrder(block=2, shards=3)},
    "ring": {"kind": "dense", "overflow": "ring"},
    "paged": {"kind": "paged", "page_size": 5},
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.full(but=["dense"])
def test_insert_from_every_kind(name: str) -> None:
    source = put(make(batch=3, **SOURCES[name]), 9, 0, 6).require()
    cache = put(make(), 0, 1, 0, 0).require()
    after = cache.insert(source, np.array([3, 2, 0], np.int32)).require()
    assert after.length.tolist() == [6, 1, 0, 9]
    assert int(after.free_pages()) == 0
    assert_holds(after, 3, tokens(0, 9, batch=3))
    assert_holds(after, 0, tokens(2, 6, batch=3))
    assert_holds(after, 1, tokens(1, 1))


@pytest.mark.full
def test_insert_dequantizes_quantized_source() -> None:
    source = put(make(batch=3, kind="quantized"), 9, 0, 6).require()
    after = make().insert(source, [0, 1, 2]).require()
    view = source.view()
    assert_holds(
        after,
        2,
        tuple(
            np.asarray(x * scale[..., None])[2, :6]
            for x, scale in ((view.k, view.k_scale), (view.v, view.v_scale))
        ),
    )


@pytest.mark.full
def test_refused_inserts() -> None:
    cache = filled(0, 3, 0, 0)
    lost = put(make(batch=3, kind="dense", overflow="ring", capacity=4), 6, 3, 4).require()
    assert cache.insert(lost, [0, 2, 3]).reasons() == {0: Refusal.POSITIONS_MISSING}
    source = put(make(batch=4, kind="dense", capacity=13), 13, 8, 5, 4).require()
    change = cache.insert(source, [0, 2, 2, 1])
    assert change.reasons() == {
        0: Refusal.OVERFLOW,
        1: Refusal.SLOT_TWICE,
        2: Refusal.SLOT_TWICE,
        3: Refusal.SLOT_IN_USE,
    }
    assert_unchanged(change.cache, cache)
    change = cache.insert(
        dataclasses.replace(source, length=jnp.array([12, 9, 5, 0], jnp.int32)), [0, 2, 3, 7]
    )
    assert change.reasons() == {1: Refusal.NO_FREE_PAGE, 3: Refusal.SLOT_OUT_OF_RANGE}
    assert change.cache.length.tolist() == [12, 3, 0, 5]
    with raises(CacheError, "kv_heads", 1, 2, path="source", fix="kv_heads"):
        cache.insert(
            caches.init(
                "dense", batch=1, capacity=4, kv_heads=1, head_dim=DIM, v_dim=V_DIM, dtype="float32"
            ),
            [0],
        )


# On meshes.


RULES = """
[rules]
batch = "dp | -"
query_length = "-"
head = "tp"
kv_head = "tp | -"
page = "sp"
"""
MESHES = {
    "kv heads": "dp:1,sp:1,tp:4",
    "pages": "dp:1,sp:8,tp:1",
    "pages and kv heads": "dp:1,sp:2,tp:2",
    "batch": "dp:4,sp:1,tp:1",
    "batch, pages and kv heads": "dp:2,sp:2,tp:2",
}


def mostly_slow(quick: str) -> list[Any]:
    """All meshes; all but one are marked full, because they take minutes to compile."""
    return [
        name if name == quick else pytest.param(name, marks=pytest.mark.full) for name in MESHES
    ]


def manager_of(mesh: str, axis_types: Any = "auto") -> sw.PartitionManager:
    return sw.PartitionManager(
        sw.Strategy.loads(RULES), mesh=cpu_mesh(MESHES[mesh], axis_types=axis_types)
    ).for_mode("decode")


def pool(*, pages: int = 1024) -> Any:
    return caches.init(
        "paged",
        batch=8,
        capacity=512,
        kv_heads=4,
        head_dim=16,
        dtype="float32",
        page_size=16,
        pages=pages,
    )


def append(cache: Any, k: Any, v: Any, valid: Any = None) -> Any:
    return cache.append(k, v, valid=valid)


def compile_append(
    manager: sw.PartitionManager, count: int, *, pages: int = 1024
) -> tuple[Any, Any]:
    shape = (8, count, 4, 16)
    sharding = manager.sharding(
        (sw.BATCH, sw.QUERY_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM), shape=shape
    )
    new = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    cache = pool(pages=pages)
    return cache, jax.jit(append, donate_argnums=0).lower(
        cache, new, new, jax.ShapeDtypeStruct((8, count), bool)
    ).compile()


def bytes_per_device(tree: Any) -> int:
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    "count", [pytest.param(1, marks=pytest.mark.full), 4, pytest.param(256, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.parametrize("mesh", mostly_slow("batch, pages and kv heads"))
@pytest.mark.full(but=["batch, pages and kv heads-auto-4"])
@pytest.mark.pairwise
def test_append_sends_no_pages_and_writes_in_place(mesh: str, axis_types: str, count: int) -> None:
    manager = manager_of(mesh, axis_types)
    sizes = dict(manager.mesh.shape)
    with manager:
        cache, compiled = compile_append(manager, count)
        rows = 2 * 8 * count * (4 // sizes["tp"]) * 16 * 4
        integers = 4 * (cache.length.size + cache.tables.size)
        if sizes["dp"] > 1:
            assert_collectives(
                compiled, all_gather=4, only=True, axis="dp", bytes=rows + integers, trips=0
            )
        else:
            assert_no_collectives(compiled, axis=("dp", "tp"))
        if sizes["sp"] > 1:
            # Only shared pages that are written to are sent: as many as slots could need, if any.
            assert_collectives(compiled, all_reduce=0, axis="sp", only=True, trips=0)
            assert_collectives(compiled, all_reduce=range(1, 3), axis="sp", only=True, trips=1)
            assert_collectives(
                compiled, axis="sp", bytes=2 * 8 * 16 * (4 // sizes["tp"]) * 16 * 4, trips=1
            )
        else:
            assert_no_collectives(compiled, axis="tp")
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == bytes_per_device(cache)


@pytest.mark.parametrize("mesh", mostly_slow("kv heads"))
@pytest.mark.full
def test_no_temporary_grows_with_pages(mesh: str) -> None:
    with manager_of(mesh) as manager:
        (few, single), (many, other) = (
            compile_append(manager, 4, pages=pages) for pages in (256, 4096)
        )
    grown = other.memory_analysis().temp_size_in_bytes - single.memory_analysis().temp_size_in_bytes
    # Except integers, of which a page has a few.
    assert (
        grown
        <= 16 * (4096 - 256)
        < (bytes_per_device(many.k_pages) - bytes_per_device(few.k_pages)) / 4
    )


@pytest.mark.full(but=["free", "share"])
@pytest.mark.parametrize("name", ["free", "rewind", "reorder", "share"])
@pytest.mark.ci
def test_other_operations_touch_no_page(name: str) -> None:
    integers = jax.ShapeDtypeStruct((8,), jnp.int32)
    arguments = (integers, integers) if name == "share" else (integers,)
    with manager_of("pages and kv heads"):
        cache = pool()
        compiled = (
            jax.jit(lambda cache, *numbers: getattr(cache, name)(*numbers), donate_argnums=0)
            .lower(cache, *arguments)
            .compile()
        )
        assert_no_collectives(compiled)
    assert compiled.memory_analysis().alias_size_in_bytes == bytes_per_device(cache)
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 1024


@functools.partial(jax.jit, compiler_options=QUICK)
def history(cache: Any, source: Any) -> Any:
    """Operations of every kind, and the refusals of each."""
    k, v = some(8, 9, heads=4)
    refusals = []

    def then(change: Any) -> Any:
        refusals.append(change.refused)
        return change.cache

    cache = then(cache.append(k, v, valid=ragged(9, 3, 0, 7, 0, 0, 0, 1, width=9)))
    cache = then(cache.share([0, 3], [2, 5], lengths=[7, 7]))
    cache = then(cache.append(k[:, :2], v[:, :2], valid=ragged(1, 2, 2, 1, 0, 1, 0, 0, width=2)))
    cache = then(cache.reorder([1, 1, 2, 3, 4, 4, 3, 7]))
    cache = then(cache.append(k[:, :4], v[:, :4], valid=ragged(1, 2, 3, 1, 0, 0, 1, 0, width=4)))
    cache = then(cache.rewind([5, 4, 8, 3, 0, 0, 10, 1]))
    cache = then(cache.free([7, 4]))
    return then(cache.insert(source, [4, 7])), refusals


@pytest.mark.parametrize("axis_types", ["auto", pytest.param("explicit", marks=pytest.mark.full)])
@pytest.mark.parametrize("mesh", mostly_slow("batch, pages and kv heads"))
@pytest.mark.full
@pytest.mark.alternate
def test_sharded_equals_unsharded_and_stays_placed(mesh: str, axis_types: str) -> None:
    sizes = {"capacity": 12, "kv_heads": 4, "head_dim": DIM, "v_dim": V_DIM, "dtype": "float32"}
    empty = functools.partial(caches.init, "paged", **sizes, page_size=3)
    k, v = some(2, 6, heads=4)
    source = empty(batch=2).append(k, v, valid=ragged(6, 4, width=6)).require()
    wanted, refused = history(empty(batch=8), source)
    with manager_of(mesh, axis_types):
        cache = empty(batch=8)
        placed = jax.tree.map(lambda x: x.sharding, cache)
        # The source is paged too, with the sharding of the cache.
        leaves, there = jax.tree.leaves(source), empty(batch=2)
        arrays = [
            jax.device_put(x, y.sharding)
            for x, y in zip(leaves, jax.tree.leaves(there), strict=True)
        ]
        actual, refusal_codes = history(
            cache, jax.tree.unflatten(jax.tree.structure(there), arrays)
        )
        assert_sharding(actual, placed)
    assert wanted.length.tolist() == [5, 4, 8, 3, 6, 0, 9, 4]
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.tree.leaves((actual, refusal_codes)),
        jax.tree.leaves((wanted, refused)),
    )


@pytest.mark.full
def test_copied_page_keeps_every_bit() -> None:
    odd = np.array([0x80000000, 0x7FC12345, 0xFF800001, 1], np.uint32).view(np.float32)
    with manager_of("pages"):
        cache = caches.init(
            "paged",
            batch=2,
            capacity=16,
            kv_heads=1,
            head_dim=4,
            dtype="float32",
            page_size=4,
            pages=8,
        )
        row = jnp.asarray(odd).reshape(1, 1, 1, 4)
        new = jnp.broadcast_to(row, (2, 1, 1, 4))
        cache = (
            cache.append(new, new, valid=ragged(1, 0, width=1)).require().share([0], [1]).require()
        )
        cache = cache.append(new, new).require()
    assert cache.tables[:, 0].tolist() == [1, 0]
    for slot in (0, 1):
        np.testing.assert_array_equal(
            read(cache, slot)[0].view(np.uint32)[0, 0], odd.view(np.uint32)
        )


def test_specs() -> None:
    with manager_of("batch, pages and kv heads"):
        cache = pool()
    assert (cache.k_pages.sharding.spec, cache.v_pages.sharding.spec) == (P("sp", None, "tp"),) * 2
    assert (
        cache.tables.sharding.spec,
        cache.length.sharding.spec,
        cache.references.sharding.spec,
    ) == (P("dp"), P("dp"), P())


@pytest.mark.parametrize("mesh", ["dp:1,sp:8", "dp:2,sp:4", "dp:4,sp:2"])
def test_a_pool_is_as_small_as_a_dense_cache(mesh: str) -> None:
    """On each device, under the preset for long contexts, with pages for all slots."""
    strategy = sw.Strategy.preset("serve_long_context")
    sizes: dict[str, Any] = {"batch": 8, "capacity": 512, "kv_heads": 2, "head_dim": 16}
    with sw.PartitionManager(strategy, mesh=cpu_mesh(mesh), mode="decode"):
        paged = caches.init("paged", **sizes, page_size=16)
        dense = caches.init("dense", **sizes)
    held = bytes_per_device(dense.buffers)
    assert held == bytes_per_device({name: dense.buffers[name] for name in ("k", "v")})
    assert bytes_per_device([paged.k_pages, paged.v_pages]) <= 1.05 * held
