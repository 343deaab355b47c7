"""Prefill interleaves the chunks of prompts, also on its own mesh or with its own weights."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from decoder.config import decoder_specs

from shardwright import _jax, serving
from shardwright.serving import Request, arrays
from tests.serving.test_same_text import TINY, alone, engine, manager_of, requests, weights

APART = {"mesh": "single", "weights": "serve_tp"}
CASES = [
    (kind, own)
    for kind in ("paged", "dense", "sliding", "quantized")
    for own in APART
    # Dense rows with weights of their own always took turns.
    if (kind, own) not in {("sliding", "weights"), ("quantized", "weights")}
]


def apart(kind: str, own: str, **options: Any) -> serving.Engine:
    """Return an engine whose prefill has its own mesh, or only its own weights."""
    first = manager_of(APART[own])
    slots = first if own == "weights" else manager_of("serve_tp")
    params = first.shard(weights(), decoder_specs(TINY), role="param")
    given = {"slots": 4, "prefill_params": params, **options}
    return engine(kind, slots, **given, **({} if own == "weights" else {"prefill_manager": first}))


@pytest.mark.full
@pytest.mark.parametrize(("kind", "own"), CASES)
@pytest.mark.alternate
def test_a_short_prompt_waits_for_one_chunk_of_each_long_one(kind: str, own: str) -> None:
    running = apart(kind, own, prefill_chunk=1)
    running.compile()
    long = [Request(prompt=[at + 1] * 40, max_new_tokens=2) for at in range(2)]
    short = Request(prompt=[7] * 3, max_new_tokens=1)
    handles = [running.submit(request) for request in long]
    running.step()
    handle, steps = running.submit(short), 0
    with _jax.watch_compilations() as compilations:
        while handle.completion is None:
            running.step()
            steps += 1
        results = [each.result() for each in [*handles, handle]]
    assert compilations.compiled == []
    assert steps <= 4 * len(long) + 3 + 1
    single = engine(kind, manager_of("single"), slots=1)
    expected = [single.run([request])[0] for request in [*long, short]]
    assert [done.tokens for done in results] == [done.tokens for done in expected]
    held = running.cache_usage()
    assert (set(held.slot_lengths), set(held.row_lengths), held.pages) == ({0}, {0}, 0)


@pytest.mark.parametrize(("kind", "own"), CASES)
@pytest.mark.full
def test_texts_do_not_change(kind: str, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, park = [], arrays.SlotArrays.park

    def counted(self: Any, into: Any) -> Any:
        turns.append(len(into))
        return park(self, into)

    monkeypatch.setattr(arrays.SlotArrays, "park", counted)
    running = apart(kind, own, prefill_chunk=2, prefill_rows=2)
    result = running.run(requests(12))
    assert sum(turns) > 5
    assert [done.tokens for done in result] == [done.tokens for done in alone(kind, 12)]


@pytest.mark.full
def test_pages_of_other_slots_are_not_read() -> None:
    """A prompt that comes back from its pages copies the rows of its slot alone."""
    running = apart("paged", "weights", slots=8)
    held = running._arrays
    caches = held.slots.caches
    with manager_of("serve_tp").for_mode("prefill"):
        rows = held._setup.create_rows()
        lowered = arrays._resume.lower(rows, caches, jax.numpy.zeros(1, "int32"))
    largest = max(
        (leaf.shape for leaf in jax.tree.leaves(lowered.out_info) if len(leaf.shape) == 4),
        key=lambda shape: shape[0],
    )
    assert largest[0] == 1
    rows_of_all = "8x64x4x8xf32"
    assert rows_of_all not in lowered.as_text()
    assert "1x64x4x8xf32" in lowered.as_text()
