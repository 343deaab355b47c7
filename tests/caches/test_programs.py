"""What the compiled operations send, hold and copy: appends send nothing, and write in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright import caches
from shardwright.caches import RowOrder
from shardwright.testing import assert_collectives, assert_no_collectives, assert_sharding, cpu_mesh

RULES = """
[rules]
batch = "dp"
query_length = "-"
kv_length = "sp"
head = "tp"
kv_head = "tp | -"
[modes.prefill]
query_length = "sp"
"""
BATCH, CAPACITY, HEADS, DIM = 8, 1024, 4, 16
MESHES = {
    "batch": "dp:8,sp:1,tp:1",
    "heads": "dp:1,sp:1,tp:4",
    "length": "dp:1,sp:8,tp:1",
    "batch and length": "dp:2,sp:4,tp:1",
    "batch, length and heads": "dp:2,sp:2,tp:2",
}
QUICK = {("batch, length and heads", 1), ("length", 4), ("batch, length and heads", 256)}
CACHES: dict[str, dict[str, Any]] = {
    "dense": {"kind": "dense"},
    "sliding": {"kind": "sliding", "window": 512},
    "interleaved": {"kind": "dense", "order": RowOrder(block=16, shards=8)},
}


def manager_of(mesh: str, axis_types: Any = "auto", mode: str = "decode") -> sw.PartitionManager:
    return sw.PartitionManager(
        sw.Strategy.loads(RULES), mesh=cpu_mesh(mesh, axis_types=axis_types)
    ).for_mode(mode)


def make(name: str = "dense", *, batch: int = BATCH, capacity: int = CAPACITY) -> Any:
    # On a CPU, XLA scatters bfloat16 into a float32 copy.
    return caches.init(
        batch=batch,
        capacity=capacity,
        kv_heads=HEADS,
        head_dim=DIM,
        dtype="float32",
        **CACHES[name],
    )


def tokens(count: int, manager: sw.PartitionManager | None = None, *, batch: int = BATCH) -> Any:
    """Keys of new tokens, sharded as in a layer, where the query length may be sharded."""
    shape = (batch, count, HEADS, DIM)
    sharding = (
        None
        if manager is None
        else manager.sharding((sw.BATCH, sw.QUERY_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM), shape=shape)
    )
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def append(cache: Any, k: Any, v: Any, valid: Any = None) -> Any:
    return cache.append(k, v, valid=valid)


@pytest.mark.parametrize("options", [{"kind": "dense"}, {"kind": "paged", "page_size": 4}])
def test_append_of_tokens_sums_no_constant(options: dict[str, Any]) -> None:
    """XLA for GPUs sums a constant of many rows for minutes while it compiles."""
    cache = caches.init(batch=2, capacity=8, kv_heads=1, head_dim=4, dtype="float32", **options)
    rows = jnp.ones((2, 3, 1, 4))

    def appended(valid: Any = None) -> str:
        return str(jax.make_jaxpr(append)(cache, rows, rows, valid))

    assert "cumsum[axis=1" not in appended()
    assert "cumsum[axis=1" in appended(jnp.ones((2, 3), bool))


def bytes_per_device(tree: Any) -> int:
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


# A few cells by default, all of them in the slow suite.
CELLS = [
    pytest.param(mesh, types, count, marks=[] if (mesh, count) in QUICK else pytest.mark.full)
    for mesh in MESHES
    for types in ("auto", "explicit")
    for count in (1, 4, 256)
]


@pytest.mark.parametrize(("mesh", "axis_types", "count"), CELLS)
@pytest.mark.full(but=["length-auto-4"])
@pytest.mark.pairwise
def test_append_sends_nothing_and_writes_in_place(mesh: str, axis_types: str, count: int) -> None:
    manager = manager_of(MESHES[mesh], axis_types)
    temporary = []
    with manager:
        for capacity in (CAPACITY, 4 * CAPACITY):
            cache, new = make(capacity=capacity), tokens(count, manager)
            compiled = (
                jax.jit(append, donate_argnums=0)
                .lower(cache, new, new, jax.ShapeDtypeStruct((BATCH, count), bool))
                .compile()
            )
            assert_no_collectives(compiled)
            memory = compiled.memory_analysis()
            assert memory.alias_size_in_bytes == bytes_per_device(cache)
            temporary.append(memory.temp_size_in_bytes)
    assert temporary[0] == temporary[1]
    assert (
        temporary[0]
        <= 1.1 * 2 * new.dtype.itemsize * np.prod(new.sharding.shard_shape(new.shape)) + 1024
    )


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.parametrize("name", ["sliding", "interleaved"])
@pytest.mark.full(but=["sliding-auto"])
def test_append_to_ring_or_interleaved_rows(name: str, axis_types: str) -> None:
    manager = manager_of("dp:1,sp:8,tp:1", axis_types)
    with manager:
        cache, new = make(name), tokens(4, manager)
        compiled = jax.jit(append, donate_argnums=0).lower(cache, new, new).compile()
    assert_no_collectives(compiled)
    assert compiled.memory_analysis().alias_size_in_bytes == bytes_per_device(cache)


@pytest.mark.full(but=["explicit"])
@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.ci
def test_append_of_length_sharded_tokens_sends_only_them(axis_types: str) -> None:
    manager = manager_of("dp:2,sp:4,tp:1", axis_types, mode="prefill")
    with manager:
        cache, new = make(), tokens(256, manager)
        assert new.sharding.spec == P("dp", "sp")
        step = jax.jit(append, donate_argnums=0)
        moved = 2 * BATCH // 2 * 256 * HEADS * DIM * 4  # keys and values of a batch shard, whole
        assert_collectives(step, cache, new, new, all_gather=2, only=True, bytes=moved, axis="sp")


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.full(but=["auto"])
def test_arrays_keep_their_shardings(axis_types: str) -> None:
    random = np.random.default_rng(0)
    k = random.standard_normal((BATCH, 40, HEADS, DIM)).astype(np.float32)
    alone = make("sliding").append(k, -k).cache.append(-k, k).cache
    with manager_of("dp:2,sp:2,tp:2", axis_types):
        cache = make("sliding")
        placed = jax.tree.map(lambda x: x.sharding, cache)
        for step in (append, jax.jit(append)):
            after = step(step(cache, k, -k).cache, -k, k).cache
            assert_sharding(after, placed)
            jax.tree.map(
                np.testing.assert_array_equal, jax.tree.leaves(after), jax.tree.leaves(alone)
            )
        moved = (
            after.rewind(after.length - 1)
            .cache.free([0, 1])
            .cache.reorder(list(range(BATCH)))
            .cache
        )
        moved = moved.insert(make("sliding", batch=2).append(k[:2], k[:2]).cache, [0, 1]).require()
        assert_sharding(moved, placed)


@pytest.mark.full(but=["auto"])
@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.ci
def test_beams_on_one_shard_send_nothing(axis_types: str) -> None:
    parents = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    with manager_of("dp:2,sp:2,tp:2", axis_types):
        cache = make()
        assert_no_collectives(
            jax.jit(lambda cache, parents: cache.reorder(parents, group=4)), cache, parents
        )
        shard = 2 * BATCH * CAPACITY // 2 * HEADS // 2 * DIM * 4
        small = range(shard, shard + 1024)
        assert_collectives(
            jax.jit(lambda cache, parents: cache.reorder(parents)),
            cache,
            parents,
            all_gather=range(1, 9),
            only=True,
            bytes=small,
        )


@pytest.mark.full(but=["auto"])
@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.ci
def test_insert_sends_new_rows_and_writes_in_place(axis_types: str) -> None:
    with manager_of("dp:2,sp:2,tp:2", axis_types):
        cache, source = make(), make(batch=2, capacity=64)
        insert = jax.jit(lambda cache, source, slots: cache.insert(source, slots), donate_argnums=0)
        slots = jax.ShapeDtypeStruct((2,), jnp.int32)
        compiled = insert.lower(cache, source, slots).compile()
        rows = 2 * 2 * 64 * HEADS // 2 * DIM * 4  # those of all slots, of a shard's heads
        assert_collectives(compiled, bytes=range(rows, 2 * rows + 4096))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == bytes_per_device(cache)
    assert memory.temp_size_in_bytes < bytes_per_device(cache) / 4


@pytest.mark.parametrize("kind", ["dense", "quantized", "interleaved"])
@pytest.mark.parametrize("axis_types", ["auto", pytest.param("explicit", marks=pytest.mark.full)])
@pytest.mark.full(but=["auto-dense"])
def test_insert_of_equal_rows_sends_nothing(kind: str, axis_types: str) -> None:
    """Each row goes to the row of the same number, on the shard where it is."""
    options: dict[str, Any] = CACHES.get(kind, {"kind": kind})
    sizes = {"capacity": CAPACITY, "kv_heads": HEADS, "head_dim": DIM, "dtype": "float32"}
    with manager_of("dp:1,sp:8,tp:1", axis_types):
        cache, source = (caches.init(**options, batch=batch, **sizes) for batch in (4, 1))
        insert = jax.jit(lambda cache, source, slots: cache.insert(source, slots), donate_argnums=0)
        slots = jax.ShapeDtypeStruct((1,), jnp.int32)
        compiled = insert.lower(cache, source, slots).compile()
        assert_no_collectives(compiled)
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == bytes_per_device(cache)
        assert memory.temp_size_in_bytes < 2 * bytes_per_device(cache)
        k = np.random.default_rng(0).standard_normal((1, 300, HEADS, DIM)).astype(np.float32)
        filled = source.append(k, -k).require()
        inserted = insert(cache, filled, jnp.array([2])).require()
    held = filled.view().positions < 300
    for name, x in inserted.buffers.items():
        np.testing.assert_array_equal(
            np.asarray(x)[2][np.asarray(held)[0]], np.asarray(filled.buffers[name])[held]
        )
    assert inserted.length.tolist() == [0, 0, 300, 0]


def test_free_and_rewind_touch_no_rows() -> None:
    numbers = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    with manager_of("dp:2,sp:2,tp:2"):
        cache = make()
        freed, rewound = (
            jax.jit(operation, donate_argnums=0).lower(cache, numbers).compile()
            for operation in (
                lambda cache, slots: cache.free(slots),
                lambda cache, lengths: cache.rewind(lengths),
            )
        )
    for compiled in (freed, rewound):
        assert compiled.memory_analysis().alias_size_in_bytes == bytes_per_device(cache)
        assert compiled.memory_analysis().temp_size_in_bytes < 4096
    assert_collectives(freed, bytes=range(256))  # lengths
    assert_no_collectives(rewound)


PREFILL = """
[rules]
batch = "dp"
kv_length = "-"
kv_head = "tp"
[modes.prefill]
batch = "-"
kv_length = "dp+tp"
kv_head = "-"
"""


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.parametrize(
    "kind",
    ["sliding", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("dense", "quantized"))],
)
@pytest.mark.full
def test_insert_from_prefill_layout_into_decode(kind: str, axis_types: Any) -> None:
    random = np.random.default_rng(0)
    k, v = (random.standard_normal((3, 16, HEADS, DIM)).astype(np.float32) for _ in range(2))
    valid = np.arange(16) < np.array([[16], [5], [9]])
    sizes = {"kv_heads": HEADS, "head_dim": DIM, "dtype": "float32"}
    kept = {"window": 8} if kind == "sliding" else {"capacity": 32}

    def both(at: str | None, into: str | None) -> Any:
        source = (
            caches.init("dense", batch=3, capacity=16, mode=at, **sizes)
            .append(k, v, valid=valid)
            .cache
        )
        return source, caches.init(kind, batch=4, mode=into, **kept, **sizes).insert(
            source, [3, 0, 1]
        )

    alone = both(None, None)[1].require()
    pm = sw.PartitionManager(
        sw.Strategy.loads(PREFILL), mesh=cpu_mesh("dp:2,tp:2", axis_types=axis_types)
    )
    with pm:
        for run in (both, jax.jit(both, static_argnums=(0, 1))):
            source, change = run("prefill", "decode")
            cache = change.require()
            assert_sharding(
                (source.k, cache.k, cache.length),
                (P(None, ("dp", "tp")), P("dp", None, "tp"), P("dp")),
            )
            jax.tree.map(
                np.testing.assert_array_equal, jax.tree.leaves(cache), jax.tree.leaves(alone)
            )


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.full(but=["auto"])
def test_caches_of_all_layers_as_one_tree(axis_types: Any) -> None:
    k = np.random.default_rng(0).standard_normal((3, BATCH, 2, HEADS, DIM)).astype(np.float32)
    with manager_of("dp:2,sp:2,tp:2", axis_types):
        layers = [make(capacity=8) for _ in range(3)]
        one_by_one = [cache.append(new, -new).cache for cache, new in zip(layers, k, strict=True)]
        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)

        @jax.jit
        def scan(stacked: Any, k: Any) -> Any:
            return jax.lax.scan(
                lambda total, layer: (total + 1, layer[0].append(layer[1], -layer[1]).cache),
                0,
                (stacked, k),
            )[1]

        after = scan(stacked, k)
        mapped = jax.jit(jax.vmap(lambda cache, k: cache.append(k, -k).cache))(stacked, k)
    for at, cache in enumerate(one_by_one):
        for actual in (after, mapped):
            layer = [x[at] for x in jax.tree.leaves(actual)]
            jax.tree.map(np.testing.assert_array_equal, layer, jax.tree.leaves(cache))
