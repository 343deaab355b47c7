"""Attention over a paged cache equals the oracle, which has no pages."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright import caches
from shardwright.attention import dot_product_attention, paged_attention
from shardwright.testing import cpu_mesh
from tests.attention.conformance import QUICK

BATCH, CAPACITY, WIDTH, HEADS, KV_HEADS, DIM, V_DIM = 4, 20, 6, 4, 2, 8, 12
RULES = """
[rules]
batch = "dp"
query_length = "-"
head = "tp"
kv_head = "tp"
page = "sp"
"""
Sequences = list[list[tuple[np.ndarray, np.ndarray]]]


def some(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values of a chunk."""
    random = np.random.default_rng(seed)
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, V_DIM))
    q, k, v = (
        random.standard_normal((BATCH, WIDTH, *shape)).astype(np.float32) for shape in shapes
    )
    return q, k, v


@jax.jit
def oracle(q: jax.Array, k: jax.Array, v: jax.Array, position: jax.Array) -> jax.Array:
    """One query of one sequence; keys after it are not seen."""
    args = (q[None, None], k[None], v[None])
    return dot_product_attention(
        *args, positions=position[None, None], causal=True, mode="decode", implementation="vanilla"
    )[0, 0]


def expected(q: np.ndarray, sequences: Sequences, counts: list[int]) -> np.ndarray:
    """The last queries of each sequence over all of its tokens; 0 for padding."""
    actual = np.zeros((*q.shape[:3], V_DIM), np.float32)
    for slot, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        k, v = (
            np.zeros((CAPACITY, KV_HEADS, DIM), np.float32),
            np.zeros((CAPACITY, KV_HEADS, V_DIM), np.float32),
        )
        for position, (key, value) in enumerate(sequence):
            k[position], v[position] = key, value
        for i in range(count):
            actual[slot, i] = oracle(q[slot, i], k, v, jnp.int32(len(sequence) - count + i))
    return actual


def append_and_attend(cache: Any, q: Any, k: Any, v: Any, counts: Any) -> tuple[Any, Any]:
    change = cache.append(k, v, valid=jnp.arange(WIDTH)[None] < counts[:, None])
    view = change.cache.view()
    return change, paged_attention(
        q, view.k, view.v, block_tables=view.tables, lengths=view.lengths, q_lengths=counts
    )


def make(*, page_size: int) -> Any:
    sizes = {
        "batch": BATCH,
        "capacity": CAPACITY,
        "kv_heads": KV_HEADS,
        "head_dim": DIM,
        "v_dim": V_DIM,
        "dtype": "float32",
    }
    return caches.init("paged", **sizes, page_size=page_size, pages=48 if page_size == 1 else 24)


def check_story(page_size: int, *, manager: Any = None, rtol: float = 2e-6) -> None:
    """Prefill and decode in one call, a shared prefix, a rewind across pages, empty slots."""
    # The reference runs outside of the manager.
    within = contextlib.nullcontext() if manager is None else manager
    step = jax.jit(append_and_attend, donate_argnums=0, compiler_options=QUICK)
    sequences: Sequences = [[] for _ in range(BATCH)]

    def attend(cache: Any, counts: list[int], seed: int) -> Any:
        q, k, v = some(seed)
        with within:
            change, o = step(cache, q, k, v, np.asarray(counts, np.int32))
            cache = change.require()
        for slot, count in enumerate(counts):
            sequences[slot] += [(k[slot, i], v[slot, i]) for i in range(count)]
        np.testing.assert_allclose(o, expected(q, sequences, counts), rtol=rtol, atol=rtol)
        return cache

    with within:
        cache = make(page_size=page_size)
    cache = attend(cache, [6, 0, 3, 0], 0)
    cache = attend(cache, [1, 0, 6, 4], 1)  # one decodes, one goes on with its prompt, one begins
    with within:
        cache = cache.share([2], [1], lengths=[8]).require()
    sequences[1] = sequences[2][:8]
    cache = attend(cache, [1, 2, 1, 0], 2)  # both write to what was one page
    lengths = [len(sequence) for sequence in sequences]
    lengths[0], lengths[2] = 4, 9
    with within:
        cache = cache.rewind(lengths).require()
    for slot, length in enumerate(lengths):
        del sequences[slot][length:]
    cache = attend(cache, [5, 1, 1, 1], 3)
    with within:
        cache = cache.free([3]).require().reorder([0, 2, 2, 3]).require()
    sequences[1], sequences[3] = list(sequences[2]), []
    cache = attend(cache, [1, 1, 1, 0], 4)
    assert cache.length.tolist() == [len(sequence) for sequence in sequences]


@pytest.mark.parametrize(
    "page_size",
    [pytest.param(1, marks=pytest.mark.full), 3, pytest.param(32, marks=pytest.mark.full)],
)
def test_one_device(page_size: int) -> None:
    check_story(page_size)


@pytest.mark.parametrize("axis_types", ["auto", pytest.param("explicit", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param("dp:1,sp:1,tp:2", marks=pytest.mark.full, id="kv heads"),
        pytest.param("dp:1,sp:8,tp:1", marks=pytest.mark.full, id="pages"),
        pytest.param("dp:2,sp:2,tp:2", id="batch, pages and kv heads"),
    ],
)
@pytest.mark.parametrize("pages", ["sp", "dp+sp"])
@pytest.mark.full
@pytest.mark.pairwise
def test_sharded_pages(pages: str, mesh: str, axis_types: Any) -> None:
    rules = RULES.replace('page = "sp"', f'page = "{pages}"')
    manager = sw.PartitionManager(
        sw.Strategy.loads(rules), mesh=cpu_mesh(mesh, axis_types=axis_types)
    ).for_mode("decode")
    check_story(3, manager=manager)
