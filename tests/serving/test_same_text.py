"""A request gets the same text on every mesh and beside any other request."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from decoder.config import DecoderConfig, decoder_specs
from decoder.model import forward
from decoder.served import cache_shape, served

import shardwright as sw
from shardwright import _jax, caches, serving
from shardwright.serving import Finish, Request, Sampling, arrays
from shardwright.testing import cpu_mesh

TINY = DecoderConfig(layers=1, embed=32, heads=8, kv_heads=4, head_dim=8, mlp=64)
MODEL = served(TINY)
CAPACITY, WINDOW = 64, 16
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"cache": "dense", "capacity": CAPACITY},
    "sliding": {"cache": "sliding", "capacity": 24},
    "quantized": {"cache": "quantized", "capacity": CAPACITY},
    "paged": {
        "cache": "paged",
        "capacity": CAPACITY,
        "cache_options": {"page_size": 8, "pages": 24},
    },
}
MESHES = {"single": "dp:1", "serve_tp": "dp:2,tp:4", "serve_long_context": "dp:2,sp:2,tp:2"}
QUICK = {("dense", "serve_tp"), ("sliding", "serve_long_context"), ("paged", "serve_tp")}


@functools.cache
def weights() -> Any:
    pm = sw.PartitionManager(sw.Strategy.preset("single"), mesh=cpu_mesh("dp:1"))
    # Logits differ widely, so that the order of a sum does not change the most likely token.
    return jax.tree.map(
        lambda x: 1.5 * np.asarray(x), pm.init(decoder_specs(TINY), jax.random.key(3))
    )


def requests(count: int) -> list[Request]:
    """Prompts of different lengths, greedy and sampled, some with stop sequences."""
    draw = np.random.default_rng(7)
    values = []
    for at in range(count):
        sampling = (
            Sampling(temperature=0.8, top_k=40 if at % 4 == 1 else None, top_p=0.9, seed=at)
            if at % 2
            else Sampling()
        )
        prompt = draw.integers(0, 256, int(draw.integers(1, 40)))
        values.append(
            Request(
                prompt=prompt,
                max_new_tokens=int(draw.integers(1, 14)),
                sampling=sampling,
                stop=[at, [at, at]],
            )
        )
    return values


def engine(kind: str, manager: sw.PartitionManager, **options: Any) -> serving.Engine:
    shape = cache_shape(TINY, window=WINDOW if kind == "sliding" else None)
    params = manager.shard(weights(), decoder_specs(TINY), role="param")
    given = {"prefill_chunk": 8, **KINDS[kind], **options}
    return serving.Engine(MODEL, params, shape=shape, manager=manager, **given)


@functools.cache
def alone(kind: str, count: int) -> list[serving.Completion]:
    single = engine(kind, manager_of("single"), slots=1)
    return [single.run([request])[0] for request in requests(count)]


def manager_of(strategy: str) -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset(strategy), mesh=cpu_mesh(MESHES[strategy]))


def assert_same(
    kind: str, strategy: str, count: int, *, slots: int, **options: Any
) -> serving.Engine:
    together = engine(kind, manager_of(strategy), slots=slots, prefill_rows=2, **options)
    together.compile()
    with _jax.watch_compilations() as compilations:
        result = together.run(requests(count))
    assert compilations.compiled == []
    assert [done.tokens for done in result] == [done.tokens for done in alone(kind, count)]
    assert [done.finish for done in result] == [done.finish for done in alone(kind, count)]
    held = together.cache_usage()
    assert (set(held.slot_lengths), set(held.row_lengths), held.pages) == ({0}, {0}, 0)
    return together


def cells(*, quick: bool) -> list[tuple[str, str]]:
    return [
        (kind, strategy)
        for kind in KINDS
        for strategy in MESHES
        if ((kind, strategy) in QUICK) == quick
    ]


@pytest.mark.parametrize(("kind", "strategy"), cells(quick=True))
@pytest.mark.full
def test_text_equals_request_alone(kind: str, strategy: str) -> None:
    assert_same(kind, strategy, 12, slots=4)


@pytest.mark.parametrize("strategy", ["serve_tp", "serve_long_context"])
@pytest.mark.parametrize("kind", ["dense", "sliding", "quantized"])
@pytest.mark.full
@pytest.mark.alternate
def test_prompts_that_take_turns_keep_their_texts(
    kind: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, park = [], arrays.SlotArrays.park

    def counted(self: Any, into: Any) -> Any:
        turns.append(len(into))
        return park(self, into)

    monkeypatch.setattr(arrays.SlotArrays, "park", counted)
    assert_same(kind, strategy, 12, slots=8, prefill_chunk=2)
    assert sum(turns) > 5


# The next test has the same cells with more requests.
@pytest.mark.product
@pytest.mark.parametrize(("kind", "strategy"), cells(quick=False))
def test_text_equals_request_alone_on_all_meshes(kind: str, strategy: str) -> None:
    assert_same(kind, strategy, 12, slots=4)


@pytest.mark.full
@pytest.mark.parametrize("strategy", MESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_sixty_four_texts_equal_requests_alone(kind: str, strategy: str) -> None:
    assert_same(kind, strategy, 64, slots=16)


@pytest.mark.parametrize(
    "kind",
    [
        "dense",
        pytest.param("paged", marks=pytest.mark.full),
        pytest.param("sliding", marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_prefill_on_its_own_mesh_changes_no_text(kind: str) -> None:
    first = manager_of("single")
    params = first.shard(weights(), decoder_specs(TINY), role="param")
    apart = engine(
        kind, manager_of("serve_tp"), slots=4, prefill_manager=first, prefill_params=params
    )
    assert [done.tokens for done in apart.run(requests(12))] == [
        done.tokens for done in alone(kind, 12)
    ]


@pytest.mark.full
def test_ring_of_window_size_changes_no_text() -> None:
    """Chunks overwrite what their own queries see, in a batch of one prompt."""
    given = requests(12)
    shape, pm = cache_shape(TINY, window=WINDOW), manager_of("single")
    params = pm.shard(weights(), decoder_specs(TINY), role="param")
    sizes = {"slots": 1, "prefill_chunk": 8}
    tight, wide = (
        serving.Engine(
            MODEL, params, shape=shape, manager=pm, cache="sliding", capacity=capacity, **sizes
        )
        for capacity in (None, CAPACITY)
    )
    assert [done.tokens for done in tight.run(given)] == [done.tokens for done in wide.run(given)]


@pytest.mark.parametrize("kind", ["dense", "paged"])
@pytest.mark.full(but=["dense"])
def test_greedy_text_equals_uncached_argmax(kind: str) -> None:
    tokens = np.zeros((12, CAPACITY), np.int32)
    given = requests(12)
    for row, request, done in zip(tokens, given, alone(kind, 12), strict=True):
        row[: len(request.prompt)] = request.prompt
        row[len(request.prompt) :][: len(done.tokens)] = done.tokens
    pm = manager_of("single")
    with pm:
        logits, _ = jax.jit(forward, static_argnums=2)(
            pm.shard(weights(), decoder_specs(TINY), role="param"), tokens, TINY
        )
    likeliest = np.argmax(np.asarray(logits), axis=-1)
    checked = 0
    for row, request, done in zip(likeliest, given, alone(kind, 12), strict=True):
        if not request.sampling.temperature:
            assert row[len(request.prompt) - 1 :][: len(done.tokens)].tolist() == list(done.tokens)
            checked += len(done.tokens)
    assert checked > 20
    assert {done.finish for done in alone(kind, 12)} <= {Finish.LENGTH, Finish.STOP}


@pytest.mark.parametrize("mesh", ["sp:8", "sp:4,tp:2"])
def test_page_pool_of_a_long_context_is_no_larger_than_rows(mesh: str) -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("serve_long_context"), mesh=cpu_mesh(mesh))
    per_device = {}
    for kind in ("dense", "paged"):
        with pm.for_mode("decode"):
            sizes = {"batch": 2, "capacity": 1024, "kv_heads": 2, "head_dim": 8}
            cache = caches.init(kind, **sizes)
        buffers = jax.tree.leaves(cache.buffers)
        assert not any(array.is_fully_replicated for array in buffers)
        shards = (array.addressable_shards[0].data.nbytes for array in buffers)
        per_device[kind] = sum(shards)
    assert per_device["paged"] <= 1.05 * per_device["dense"]
