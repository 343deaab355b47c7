"""Few queries and many keys, both sharded over the same mesh axes: a chunk of a long prompt."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright import caches
from shardwright.attention import append_and_attend, dot_product_attention, explain
from shardwright.plan.collectives.read import read_collectives
from shardwright.testing import assert_collectives, cpu_mesh

Q_AXES = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)
KV_AXES = (sw.BATCH, sw.QUERY_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM)
RULES = '[rules]\nbatch = "-"\nhead = "-"\nquery_length = "{}"\nkv_length = "{}"\n'
HEADS, KV_HEADS, DIM, CHUNK = 8, 2, 16, 32


def manager_of(mesh: str, *, queries: str = "sp", keys: str = "sp") -> sw.PartitionManager:
    rules = sw.Strategy.loads(RULES.format(queries, keys))
    return sw.PartitionManager(rules, mesh=cpu_mesh(mesh)).for_mode("prefill")


def operands(*, rows: int = 96) -> dict[str, jax.Array]:
    random = np.random.default_rng(5)
    shapes = {
        "q": (2, CHUNK, HEADS, DIM),
        "k": (2, rows, KV_HEADS, DIM),
        "v": (2, rows, KV_HEADS, DIM),
        "bias": (1, HEADS, CHUNK, rows),
        "sinks": (HEADS,),
    }
    return {
        name: jnp.asarray(random.normal(size=shape), jnp.float32) for name, shape in shapes.items()
    }


@pytest.mark.parametrize(
    ("mesh", "queries", "keys"),
    [("sp:4", "sp", "sp"), ("dp:2,sp:4", "dp+sp", "sp"), ("dp:2,sp:4", "sp+dp", "dp+sp")],
)
@pytest.mark.full
def test_values_and_gradients(mesh: str, queries: str, keys: str) -> None:
    arrays = operands()
    mask = jax.random.bernoulli(jax.random.key(6), 0.7, (2, 1, CHUNK, 96))
    positions = 64 + jnp.tile(jnp.arange(CHUNK, dtype=jnp.int32), (2, 1))
    rows = jnp.tile(jnp.arange(96, dtype=jnp.int32), (2, 1))

    def loss(arrays: dict[str, jax.Array], implementation: str) -> Any:
        output = dot_product_attention(
            **arrays,
            mask=mask,
            positions=positions,
            kv_positions=rows,
            causal=True,
            return_lse=True,
            mode="prefill",
            implementation=implementation,
        )
        return jnp.sum(jnp.sin(output.o)) + jnp.sum(jnp.sin(output.lse)), output

    graded = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    wanted = graded(arrays, "vanilla")
    with manager_of(mesh, queries=queries, keys=keys):
        actual = graded(arrays, "flash_decode")
    for part, other in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(part, other, rtol=2e-5, atol=2e-5)


def chunk_program(
    manager: sw.PartitionManager, *, capacity: int, count: int, batch: int = 1
) -> Any:
    """Compile a step that appends some tokens to a cache and attends to all of it."""

    def shape(heads: int, axes: Any) -> jax.ShapeDtypeStruct:
        dims = (batch, count, heads, DIM)
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=manager.sharding(axes, shape=dims))

    def step(q: Any, k: Any, v: Any, cache: Any) -> Any:
        result = append_and_attend(q, k, v, cache, mode=manager.mode)
        return result.o, result.cache

    with manager:
        cache = caches.init(
            kind="dense",
            batch=batch,
            capacity=capacity,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype="float32",
        )
        keys = shape(KV_HEADS, KV_AXES)
        return (
            jax.jit(step, donate_argnums=3).lower(shape(HEADS, Q_AXES), keys, keys, cache).compile()
        )


@pytest.mark.full
@pytest.mark.parametrize("capacity", [1024, 8192])
def test_bytes_do_not_depend_on_capacity(capacity: int) -> None:
    strategy = sw.Strategy.preset("serve_long_context")
    manager = sw.PartitionManager(strategy, mesh=cpu_mesh("sp:8")).for_mode("prefill")
    compiled = chunk_program(manager, capacity=capacity, count=CHUNK)
    own_rows = 4 * CHUNK // 8
    check = {"axis": "sp", "mesh": manager.mesh}
    # The queries, the new keys and values to write, the positions; then the partial results.
    gathered = 8 * own_rows * (HEADS * DIM + 2 * KV_HEADS * DIM + 1)
    assert_collectives(compiled, all_gather=4, bytes=gathered, **check)
    results = 8 * own_rows * HEADS * (DIM + 1)
    assert_collectives(compiled, all_to_all=1, bytes=results, **check)
    assert_collectives(compiled, all_gather=4, all_to_all=1, only=True, mesh=manager.mesh)


def test_auto_choice_sends_fewer_bytes() -> None:
    manager = manager_of("sp:4")
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in operands().items()}
    many = {**shapes, "k": _longer(shapes["k"]), "v": _longer(shapes["v"])}
    del shapes["bias"], many["bias"]
    with manager:
        few_keys, many_keys = explain(**shapes), explain(**many)
    assert few_keys.name == "allgather_kv"
    assert (many_keys.name, many_keys.why) == (
        "flash_decode",
        "0.0483 MiB of queries and results are fewer than 0.75 MiB of keys and values",
    )
    assert many_keys.alternatives[0] == "allgather_kv"


def _longer(keys: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    batch, _, *rest = keys.shape
    return jax.ShapeDtypeStruct((batch, 2048, *rest), keys.dtype)


@pytest.mark.full
@pytest.mark.parametrize("capacity", [1024, 8192])
def test_bytes_per_token_beside_decode(capacity: int) -> None:
    """A chunk of 64 tokens, the engine's default, beside a token for each of eight slots."""
    strategy = sw.Strategy.preset("serve_long_context")
    sent = []
    for mode, batch, count in (("prefill", 1, 64), ("decode", 8, 1)):
        manager = sw.PartitionManager(strategy, mesh=cpu_mesh("sp:8")).for_mode(mode)
        compiled = chunk_program(manager, capacity=capacity, count=count, batch=batch)
        found = read_collectives(compiled, manager.mesh)
        sent.append(sum(each.total_wire_bytes for each in found))
    assert sent == [73_696, 30_464]
    assert sent[0] <= 4 * sent[1]
    assert sent[0] / 64 <= sent[1] / 8
