"""Attention to a cache equals attention to a list of tokens, for every kind, sharding and chunk."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright import caches
from shardwright.attention import append_and_attend, dot_product_attention, next_positions
from shardwright.caches import Refusal, RowOrder
from shardwright.errors import AttentionError, CacheError
from shardwright.plan.collectives.read import read_collectives
from shardwright.testing import assert_no_collectives, assert_sharding, assert_spec, cpu_mesh
from tests.attention.conformance import QUICK
from tests.raising import raises

RULES = """
[rules]
batch = "dp"
query_length = "-"
kv_length = "sp"
page = "{page}"
head = "tp"
kv_head = "tp | -"
[modes.prefill]
query_length = "sp"
"""
BATCH, HEADS, KV_HEADS, DIM, V_DIM, WINDOW = 4, 4, 2, 8, 6, 6
CACHES: dict[str, dict[str, Any]] = {
    "dense": {"kind": "dense", "capacity": 48},
    "dense with a window": {"kind": "dense", "capacity": 48, "window": WINDOW},
    "interleaved": {"kind": "dense", "capacity": 48, "order": RowOrder(block=2, shards=4)},
    "ring": {"kind": "dense", "capacity": 8, "overflow": "ring"},
    "sliding": {"kind": "sliding", "window": WINDOW, "capacity": 8},
    "quantized": {"kind": "quantized", "capacity": 48},
    "quantized ring": {"kind": "quantized", "window": WINDOW, "capacity": 8, "overflow": "ring"},
    "paged": {"kind": "paged", "capacity": 48, "page_size": 4},
}
# Name -> mesh, rule of the pages.
PLACES = {
    "one device": ("dp:1,sp:1,tp:1", "-"),
    "batch": ("dp:4,sp:1,tp:1", "-"),
    "heads": ("dp:1,sp:1,tp:2", "-"),
    "more shards than kv heads": ("dp:1,sp:1,tp:4", "-"),
    "length": ("dp:1,sp:4,tp:1", "sp"),
    "all of them": ("dp:2,sp:2,tp:2", "sp"),
}


def manager_of(place: str, mode: str = "decode", axis_types: Any = "auto") -> sw.PartitionManager:
    mesh, page = PLACES[place]
    return sw.PartitionManager(
        sw.Strategy.loads(RULES.format(page=page)), mesh=cpu_mesh(mesh, axis_types=axis_types)
    ).for_mode(mode)


def make(name: str, **changes: Any) -> Any:
    return caches.init(
        **{
            "batch": BATCH,
            "kv_heads": KV_HEADS,
            "head_dim": DIM,
            "v_dim": V_DIM,
            "dtype": "float32",
            **CACHES[name],
            **changes,
        }
    )


def tokens(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = (
        (BATCH, count, HEADS, DIM),
        (BATCH, count, KV_HEADS, DIM),
        (BATCH, count, KV_HEADS, V_DIM),
    )
    q, k, v = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    return q, k, v


class Lists:
    """The oracle: for each slot a list of keys and values. Nothing of it is a cache or sharded."""

    LIMIT = 48

    def __init__(self, cache: Any, **options: Any) -> None:
        self.window = cache.spec.window
        self.stored = cache.k.dtype if isinstance(cache, caches.QuantizedCache) else None
        self.held: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(BATCH)]
        self.options = options

    def rows(self, x: np.ndarray) -> np.ndarray:
        if self.stored is None:
            return x
        quantized = caches.quantize(jnp.asarray(x), self.stored)
        return np.asarray(quantized.values, np.float32) * np.asarray(quantized.scale)[..., None]

    def step(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        valid: np.ndarray | None = None,
        refused: Any = (),
    ) -> np.ndarray:
        """The output; exactly 0 for padding rows, and for slots that refused."""
        is_token = np.ones(q.shape[:2], bool) if valid is None else valid
        positions = np.full(q.shape[:2], -1, np.int32)
        k, v = self.rows(k), self.rows(v)
        for b, slot in enumerate(self.held):
            for i in np.flatnonzero(is_token[b]) if b not in refused else ():
                positions[b, i] = len(slot)
                slot.append((k[b, i], v[b, i]))
        keys, values = (
            np.zeros((BATCH, self.LIMIT, KV_HEADS, dim), np.float32) for dim in (DIM, V_DIM)
        )
        for b, slot in enumerate(self.held):
            for at, (key, value) in enumerate(slot):
                keys[b, at], values[b, at] = key, value
        lengths = np.array([len(slot) for slot in self.held], np.int32)
        window = None if self.window is None else (self.window - 1, None)
        options = {
            "causal": True,
            "window": window,
            "mode": "decode",
            "implementation": "vanilla",
        } | self.options
        output = dot_product_attention(
            q,
            keys,
            values,
            positions=np.maximum(positions, 0),
            kv_positions=np.arange(self.LIMIT),
            lengths=lengths,
            **options,
        )
        return np.where(positions[:, :, None, None] >= 0, np.asarray(output), 0)

    def rewind(self, lengths: list[int]) -> None:
        self.held = [slot[:length] for slot, length in zip(self.held, lengths, strict=True)]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """A cache and its oracle, step by step; every step is compared."""

    manager: Any
    cache: Any
    lists: Lists
    run: Any

    def step(self, count: int, seed: int, valid: np.ndarray | None = None) -> Any:
        q, k, v = tokens(count, seed)
        valid = np.ones((BATCH, count), bool) if valid is None else valid
        with self.manager:
            result = self.run(q, k, v, self.cache, valid=valid)
        refused = [b for b, why in result.change.reasons().items() if why]
        wanted = self.lists.step(q, k, v, valid, refused)
        np.testing.assert_allclose(result.o, wanted, rtol=1e-5, atol=1e-5)
        rows = np.asarray(result.change.positions) < 0
        assert (np.asarray(result.o)[rows] == 0).all()
        self.cache = result.cache
        assert self.cache.length.tolist() == [len(slot) for slot in self.lists.held]
        return result

    def rewind(self, lengths: list[int]) -> None:
        with self.manager:
            self.cache = self.cache.rewind(lengths).require()
        self.lists.rewind(lengths)


def session(name: str, manager: Any = None, *, jitted: bool = True, **options: Any) -> Session:
    manager = contextlib.nullcontext() if manager is None else manager
    with manager:
        cache = make(name)
    run = functools.partial(append_and_attend, **options)
    if jitted:
        run = jax.jit(run, donate_argnums=3, compiler_options=QUICK)
    return Session(manager=manager, cache=cache, lists=Lists(cache, **options), run=run)


RAGGED = np.array([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1]], bool)


def serve(here: Session) -> None:
    """A ragged prefill, drafts that are rejected, one token, and a chunk longer than any window."""
    here.step(4, seed=1, valid=RAGGED)
    here.step(4, seed=2)
    lengths = [slot - 2 for slot in here.cache.length.tolist()]
    here.rewind(lengths)
    here.step(1, seed=3)
    here.step(16, seed=4)
    here.step(1, seed=5)
    here.step(4, seed=6, valid=RAGGED)


# Each kind of cache is on each mesh that shards its length, and on one that does not.
FULL_CELLS = {
    (name, place)
    for at, name in enumerate(CACHES)
    for place in ("length", "all of them", ("batch", "heads", "more shards than kv heads")[at % 3])
}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(*cell, marks=() if cell in FULL_CELLS else pytest.mark.product)
        for cell in itertools.product(CACHES, PLACES)
    ],
)
@pytest.mark.full(but=["dense-all of them"])
def test_equals_attention_to_lists_of_tokens(name: str, place: str) -> None:
    here = session(name, manager_of(place))
    placed = jax.tree.map(lambda x: x.sharding, here.cache)
    serve(here)
    assert_sharding(here.cache, placed)


@pytest.mark.parametrize(
    "name",
    [
        "dense",
        pytest.param("sliding", marks=pytest.mark.full),
        pytest.param("paged", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.full
@pytest.mark.ci
def test_prefill_with_sharded_queries(name: str, axis_types: str) -> None:
    manager = manager_of("length" if name != "paged" else "heads", "prefill", axis_types)
    here = session(name, manager)
    actual = here.step(4, seed=1, valid=RAGGED)
    assert_spec(actual.o, sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM, manager=manager)
    here.step(16, seed=2)
    here.step(4, seed=3)


@pytest.mark.full
@pytest.mark.parametrize("name", ["dense", "sliding", "quantized", "paged"])
def test_explicit_meshes(name: str) -> None:
    serve(session(name, manager_of("all of them", axis_types="explicit")))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "sliding" else pytest.mark.full) for name in CACHES],
)
@pytest.mark.full
def test_without_manager_and_trace(name: str) -> None:
    serve(session(name, jitted=False))


@pytest.mark.parametrize(
    "name",
    [
        "sliding",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("dense", "quantized ring", "paged")
        ),
    ],
)
@pytest.mark.full
def test_chunk_equals_single_steps(name: str) -> None:
    q, k, v = tokens(20, seed=7)
    with manager_of("length"):
        start = append_and_attend(*tokens(4, seed=8), make(name)).cache
        single = jax.jit(append_and_attend, compiler_options=QUICK)
        outputs, cache = [], start
        for at in range(20):
            actual = single(*(x[:, at : at + 1] for x in (q, k, v)), cache)
            cache = actual.cache
            outputs.append(actual.o)
        together = single(q, k, v, start)
    np.testing.assert_allclose(together.o, jnp.concatenate(outputs, axis=1), rtol=1e-5, atol=1e-5)
    assert together.cache.length.tolist() == cache.length.tolist() == [24] * BATCH
    if name != "paged":  # whose pages are numbered as they are taken
        jax.tree.map(np.testing.assert_array_equal, together.cache, cache)


@pytest.mark.parametrize("name", ["dense", "sliding", "paged"])
@pytest.mark.full(but=["dense"])
def test_options_reach_the_arithmetic(name: str) -> None:
    options = {
        "softcap": 2.0,
        "scale": 0.5,
        "sinks": np.linspace(-1.0, 1.0, HEADS, dtype=np.float32),
    }
    here = session(name, chunk=7, **options)
    here.step(4, seed=1)
    here.step(4, seed=2, valid=RAGGED)


@pytest.mark.parametrize("name", ["dense", pytest.param("paged", marks=pytest.mark.full)])
def test_refusing_slots_get_zeros_and_stay(name: str) -> None:
    here = session(name)
    here.step(44, seed=1, valid=np.arange(44)[None] < np.array([[44], [8], [40], [0]]))
    before = np.asarray(here.cache.length)
    actual = here.step(8, seed=2)
    assert actual.change.reasons() == {0: Refusal.OVERFLOW}
    assert actual.cache.length.tolist() == [44, 16, 48, 8]
    assert before.tolist() == [44, 8, 40, 0]
    assert (actual.o[0] == 0).all()
    assert bool(jnp.any(actual.o[1:] != 0, axis=(2, 3)).all())


@pytest.mark.full
def test_rows_without_token_may_hold_anything() -> None:
    q, k, v = tokens(4, seed=1)
    wild = [np.where(RAGGED[:, :, None, None], x, np.nan).astype(np.float32) for x in (q, k, v)]
    for name in ("dense", "paged"):
        result = append_and_attend(*wild, make(name), valid=RAGGED)
        wanted = append_and_attend(q, k, v, make(name), valid=RAGGED)
        np.testing.assert_array_equal(result.o, wanted.o)
        assert (np.asarray(result.o)[~RAGGED] == 0).all()


@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, None) for name in ("dense", "sliding", "quantized", "paged")]
    + [
        ("dense", "vanilla"),
        ("sliding", "vanilla"),
        ("quantized", "vanilla"),
        ("dense", "sdpa"),
        ("sliding", "sdpa"),
    ],
)
@pytest.mark.full(but=["dense-None"])
@pytest.mark.ci
def test_remains_of_earlier_sequence_are_hidden(name: str, implementation: str | None) -> None:
    q, k, v = (jnp.asarray(x) for x in tokens(6))
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, DIM - V_DIM)))
    cache = (
        make(name, v_dim=DIM)
        .append(k, jnp.full_like(v, jnp.nan))
        .require()
        .free(np.arange(BATCH))
        .require()
    )
    result = append_and_attend(q[:, :2], k[:, :2], v[:, :2], cache, implementation=implementation)
    fresh = append_and_attend(
        q[:, :2], k[:, :2], v[:, :2], make(name, v_dim=DIM), implementation=implementation
    )
    np.testing.assert_array_equal(result.o, fresh.o)
    assert np.isfinite(result.o).all()


@pytest.mark.parametrize("implementation", ["vanilla", "blockwise", "sdpa"])
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.full), 2])
def test_missing_rows_may_hold_nan(batch: int, implementation: str) -> None:
    q, k, v = (jax.random.normal(jax.random.key(at), (batch, 4, 2, 8)) for at in range(3))
    options = {
        "positions": jnp.arange(4),
        "kv_positions": jnp.array([0, -1, 1, 2]),
        "mode": "decode",
        "implementation": implementation,
    }
    output = dot_product_attention(q, k, v.at[:, 1].set(jnp.nan), **options)
    np.testing.assert_array_equal(
        output, dot_product_attention(q, k, v.at[:, 1].set(0.0), **options)
    )
    assert np.isfinite(output).all()


def test_not_causal_rows_without_token_get_zeros() -> None:
    here = session("dense", jitted=False, causal=False)
    here.step(4, seed=1, valid=RAGGED)
    here.step(4, seed=2)


def abstract(count: int, manager: sw.PartitionManager) -> Any:
    """New tokens as a layer has them."""
    axes = (
        (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM),
        *((sw.BATCH, sw.QUERY_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM),) * 2,
    )
    return [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=manager.sharding(names, shape=x.shape))
        for x, names in zip(tokens(count), axes, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("dense", 1),
        *(
            pytest.param(name, 4, marks=[] if name == "dense" else pytest.mark.full)
            for name in ("dense", "quantized", "sliding", "paged")
        ),
    ],
)
@pytest.mark.full
def test_decode_bytes_do_not_grow_with_cache(name: str, count: int) -> None:
    sent = []
    for capacity in (64, 512):
        changes = {"window": capacity - 4} if name == "sliding" else {}
        sent.append(sent_by(name, count, capacity=capacity, **changes))
    assert sent[0]
    assert sent[0] == sent[1]
    # Outputs and logsumexps of all heads and shards, at most.
    if name != "paged":
        assert sum(moved for _, moved in sent[0]) <= 4 * BATCH * count * HEADS * (V_DIM + 1) * 4


def sent_by(name: str, count: int, **changes: Any) -> list[tuple[Any, int]]:
    """The collectives of a step over a sharded length: kinds and bytes."""
    manager = manager_of("length")
    with manager:
        step = jax.jit(append_and_attend, donate_argnums=3)
        program = step.lower(*abstract(count, manager), make(name, **changes)).compile()
    return [(each.kind, each.wire_bytes) for each in read_collectives(program, mesh=manager.mesh)]


@pytest.mark.full(but=["dense-heads"])
@pytest.mark.parametrize("place", ["batch", "heads"])
@pytest.mark.parametrize(
    "name",
    [
        "dense",
        pytest.param("sliding", marks=pytest.mark.full),
        pytest.param("quantized", marks=pytest.mark.full),
    ],
)
@pytest.mark.ci
def test_no_communication_over_batch_or_heads(name: str, place: str) -> None:
    manager = manager_of(place)
    with manager:
        program = (
            jax.jit(append_and_attend)
            .lower(*abstract(4, manager), make(name))
            .compile(compiler_options=QUICK)
        )
        assert_no_collectives(program)


@pytest.mark.full
def test_chunk_after_ring_sends_no_ring_rows() -> None:
    longer, shorter = ({"window": window, "capacity": 512} for window in (512, 508))
    assert (
        sent_by("sliding", 4, **longer) == sent_by("sliding", 4, **shorter) == sent_by("dense", 4)
    )


def test_next_positions() -> None:
    cache = append_and_attend(*tokens(4), make("sliding"), valid=RAGGED).cache
    assert next_positions(cache).tolist() == [[3], [0], [3], [4]]
    valid = np.array([[True, False, True]] * BATCH)
    positions = next_positions(cache, q_length=3, valid=valid)
    assert positions.tolist() == [[3, -1, 4], [0, -1, 1], [3, -1, 4], [4, -1, 5]]
    np.testing.assert_array_equal(
        positions, append_and_attend(*tokens(3), cache, valid=valid).change.positions
    )
    with manager_of("batch"):
        assert_spec(jax.jit(next_positions)(make("dense")), sw.BATCH, sw.EMPTY)
    with raises(AttentionError, "float32", path="valid", fix="(4, 1)"):
        next_positions(cache, valid=np.ones((BATCH, 1), np.float32))
    with raises(AttentionError, "(4, 3)", path="valid", fix="pass bool of shape (4, 2)"):
        next_positions(cache, q_length=2, valid=valid)


def test_bad_arguments() -> None:
    q, k, v = tokens(4)
    with raises(AttentionError, "q_length", "(4, 3)", "(4, 4)", path="q"):
        append_and_attend(q[:, :3], k, v, make("dense"))
    with raises(CacheError, "float16", "float32", path="k", fix="k.astype"):
        append_and_attend(q, k.astype(np.float16), v, make("dense"))
    for window, seen in (((6, 0), "6"), ((None, 0), "all")):
        with raises(AttentionError, seen, "positions", "ring", path="window"):
            append_and_attend(q, k, v, make("sliding"), window=window)
    with raises(AttentionError, "vanilla", "paged_attention", path="implementation"):
        append_and_attend(q, k, v, make("paged"), implementation="vanilla")
    with raises(AttentionError, "insert", fix="decode"):
        append_and_attend(q, k, v, make("dense"), mode="insert")


def test_cache_is_not_resharded_silently() -> None:
    q, k, v = tokens(4)
    rules = RULES.format(page="-") + 'kv_length = "-"\n'
    pm = sw.PartitionManager(sw.Strategy.loads(rules), mesh=cpu_mesh("dp:1,sp:4,tp:1")).for_mode(
        "decode"
    )
    with pm:
        cache = make("dense")
        with raises(AttentionError, "decode", "sp", "prefill", path="mode", fix="caches.reshard"):
            append_and_attend(q, k, v, cache, mode="prefill")
