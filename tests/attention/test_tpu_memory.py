"""Memory of attention over 16,384 tokens on eight TPUs, compared with plain JAX."""

from __future__ import annotations

import pytest

from tests import tpu_compile
from tests.attention.tpu_memory import (
    BATCH,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LENGTH,
    PLAIN,
    SHARDS,
    Compiled,
    measure,
)

pytestmark = tpu_compile.MARKS
MB = 10**6
SHARD = BATCH * LENGTH // SHARDS * KV_HEADS * 2 * HEAD_DIM  # elements of one rank's keys and values


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    actual = measure("ring", "ulysses", "allgather_kv", PLAIN)
    for program in actual.values():
        print(
            f"{program.name:30} {program.temporary / MB:8.1f} MB of temporary memory per device, "
            f"forward and backward; {program.counts}"
        )
    return actual


def test_ring(compiled: dict[str, Compiled]) -> None:
    ring = compiled["ring"]
    assert ring.temporary <= 16 * MB
    assert ring.kernels == 6  # forward, queries, keys; in the loop and after it
    # Keys in bfloat16, seven times forward and seven times backward. Their gradients in float32
    # seven times, and once more, to their owner, in bfloat16.
    assert ring.counts["permute"] == 22
    assert ring.sent["permute"] == SHARD * (2 * 14 + 4 * 7 + 2)


def test_ulysses(compiled: dict[str, Compiled]) -> None:
    assert compiled["ulysses"].temporary <= 4 * MB
    assert compiled["ulysses"].kernels == 3
    assert compiled["ulysses"].counts["all_to_all"] == 8
    # q and o whole, k and v with one head per rank; in bfloat16, forward and backward.
    assert compiled["ulysses"].sent[
        "all_to_all"
    ] == 2 * 2 * BATCH * LENGTH // SHARDS * HEAD_DIM * 2 * (HEADS + KV_HEADS)


def test_gathered_keys(compiled: dict[str, Compiled]) -> None:
    gathered = compiled["allgather_kv"]
    assert gathered.temporary <= 256 * MB
    assert gathered.kernels == 3
    # Keys and values forward, again backward, and the positions.
    assert (gathered.counts["all_gather"], gathered.counts["reduce_scatter"]) == (3, 1)
    assert gathered.sent["reduce_scatter"] == SHARD * SHARDS * 4


def test_plain_jax_needs_fifty_times_more(compiled: dict[str, Compiled]) -> None:
    assert compiled[PLAIN].temporary > 50 * compiled["ring"].temporary
