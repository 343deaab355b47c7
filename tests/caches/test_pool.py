"""Random operations on pages against a plain model: pages, refusals and rows after each."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.caches import CacheSpec, Change, dense
from shardwright.caches.paged import cache
from shardwright.caches.paged.cache import PagedCache
from tests.caches.page_model import NAMES, Operation, PageModel, apply, random_operation

BATCH, PAGES, PAGE_SIZE, CAPACITY, MOST, ENTRIES = 6, 17, 3, 20, 7, 3
SPEC = CacheSpec(batch=BATCH, capacity=CAPACITY, kv_heads=1, head_dim=1, v_dim=2, dtype="float32")
SOURCE = dataclasses.replace(SPEC, batch=ENTRIES, capacity=MOST)
ORDER = tuple(dict.fromkeys(NAMES))


def empty() -> tuple[PagedCache, PageModel]:
    model = PageModel.empty(batch=BATCH, pages=PAGES, page_size=PAGE_SIZE, capacity=CAPACITY)
    return cache.make(SPEC, pages=PAGES, page_size=PAGE_SIZE), model


def keys(tokens: Any) -> jax.Array:
    """`[..., 1, 1]` keys that identify their tokens."""
    return tokens[..., None, None].astype(jnp.float32)


def values(tokens: Any) -> jax.Array:
    return jnp.concatenate([-keys(tokens), 2 * keys(tokens)], axis=-1)


def take_step(
    cache: PagedCache, at: jax.Array, arguments: dict[str, jax.Array]
) -> Change[PagedCache]:
    """One operation of any kind, in one program for all. Refusals are padded to the batch."""

    def append(cache: PagedCache) -> Change[PagedCache]:
        tokens = arguments["tokens"]
        return cache.append(keys(tokens), values(tokens), valid=tokens >= 0)

    def insert(cache: PagedCache) -> Change[PagedCache]:
        tokens = arguments["tokens"][:ENTRIES]
        lengths = jnp.sum(tokens >= 0, axis=1, dtype=jnp.int32)
        source = dataclasses.replace(
            dense.make(SOURCE), k=keys(tokens), v=values(tokens), length=lengths
        )
        return cache.insert(source, arguments["slots"])

    operations = {
        "append": append,
        "insert": insert,
        "free": lambda cache: cache.free(arguments["slots"]),
        "rewind": lambda cache: cache.rewind(arguments["per_slot"]),
        "reorder": lambda cache: cache.reorder(arguments["per_slot"]),
        "share": lambda cache: cache.share(
            arguments["sources"], arguments["slots"], lengths=arguments["lengths"]
        ),
    }

    def one(operation: Any) -> Any:
        def run(cache: PagedCache) -> Change[PagedCache]:
            change = operation(cache)
            refused = jnp.zeros(BATCH, jnp.int8).at[: change.refused.shape[0]].set(change.refused)
            return Change(cache=change.cache, refused=refused)

        return run

    return jax.lax.switch(at, [one(operations[name]) for name in ORDER], cache)


def padded(operation: Operation) -> tuple[int, dict[str, np.ndarray]]:
    given = operation.arguments
    tokens = np.full((BATCH, MOST), -1, np.int32)
    # Tokens of an append may be anywhere in their row.
    for i, new in enumerate(given.get("tokens", given.get("sequences", []))):
        at = (
            sorted(random.Random(sum(new)).sample(range(MOST), len(new)))
            if operation.name == "append"
            else range(len(new))
        )
        tokens[i, list(at)] = new
    per_slot = given.get("lengths") if operation.name == "rewind" else given.get("parents")
    arguments = {
        "tokens": tokens,
        "per_slot": per_slot or [0] * BATCH,
        "slots": given.get("slots", [0] * ENTRIES),
    }
    arguments |= {
        "sources": given.get("sources", [0] * ENTRIES),
        "lengths": (given.get("lengths") or [0] * ENTRIES)[:ENTRIES],
    }
    return ORDER.index(operation.name), {
        name: np.asarray(x, np.int32) for name, x in arguments.items()
    }


# Compiled once for all tests; the second consumes the cache that it gets.
leaving = jax.jit(take_step)
consuming = jax.jit(take_step, donate_argnums=0)


def check(cache: PagedCache, model: PageModel) -> None:
    """No page leaks, every slot reads its tokens, and the pages are those of the model."""
    actual = jax.tree.map(np.asarray, cache)
    assert actual.length.tolist() == [len(sequence) for sequence in model.sequences]
    used = [
        actual.tables[slot, : -(-length // PAGE_SIZE)] for slot, length in enumerate(actual.length)
    ]
    counted = np.bincount(np.concatenate(used).astype(np.int64), minlength=PAGES)
    assert actual.references.tolist() == counted.tolist()
    assert int(np.sum(actual.references == 0)) == len(model.free_list)
    assert [table.tolist() for table in used] == model.tables
    for slot, sequence in enumerate(model.sequences):
        assert model.read(slot) == sequence, "the model itself"
        k, v = (
            x[used[slot]].reshape(-1, x.shape[-1])[: len(sequence)]
            for x in (actual.k_pages, actual.v_pages)
        )
        np.testing.assert_array_equal(k[:, 0], np.asarray(sequence, np.float32))
        np.testing.assert_array_equal(v, np.stack([-k[:, 0], 2 * k[:, 0]], axis=1))


def run(*, steps: int, seed: int, program: Any = leaving) -> dict[str, int]:
    """Run operations and check after each; return how often each operation and refusal occurred.

    Before every fourth operation another one runs, and its result is dropped, as if a request had
    failed. The cache is a value, so the old one is still valid.
    """
    chance = random.Random(seed)
    cache, model = empty()
    seen: Counter[str] = Counter()
    for step in range(steps):
        # float32 represents integers below 2**24.
        ask = functools.partial(
            random_operation, first=1 + step * BATCH * MOST % 2**23, most=MOST, entries=ENTRIES
        )
        if chance.random() < 0.25:
            before = jax.tree.map(np.array, cache)
            leaving(cache, *padded(ask(chance, model)))
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, cache), before)
        operation = ask(chance, model)
        change = program(cache, *padded(operation))
        cache, wanted = change.cache, apply(model, operation)
        assert change.refused[: len(wanted)].tolist() == wanted, operation
        check(cache, model)
        seen.update([operation.name, *(why.name for why in wanted)])
    return seen


REASONS = {
    "OVERFLOW",
    "SLOT_OUT_OF_RANGE",
    "SLOT_TWICE",
    "SLOT_IN_USE",
    "SLOT_EMPTY",
    "NO_FREE_PAGE",
    "LENGTH_OUT_OF_RANGE",
}


def test_random_operations() -> None:
    assert set(run(steps=400, seed=0)) == {*ORDER, *REASONS, "NONE"}


@pytest.mark.full
def test_ten_thousand_donating_operations() -> None:
    seen = run(steps=10_000, seed=1, program=consuming)
    assert set(seen) == {*ORDER, *REASONS, "NONE"}
    assert min(seen.values()) > 50
