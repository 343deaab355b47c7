"""Random operations, valid and invalid, on caches and on a plain Python model of them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright import caches
from shardwright.caches import RowOrder
from shardwright.testing import cpu_mesh
from tests.caches.model import Model, keys_of, slots_of, values_of

BATCH, TOKENS, CAPACITY = 4, 5, 12
SIZES: dict[str, Any] = {"kv_heads": 2, "head_dim": 2, "v_dim": 1, "dtype": "float32"}
CACHES: dict[str, dict[str, Any]] = {
    "dense": {"kind": "dense", "capacity": CAPACITY},
    "ring": {"kind": "dense", "capacity": CAPACITY, "overflow": "ring"},
    "sliding": {"kind": "sliding", "window": 5, "capacity": CAPACITY},
    "sliding, no row more than the window": {"kind": "sliding", "window": 4},
    "interleaved": {"kind": "dense", "capacity": CAPACITY, "order": RowOrder(block=3, shards=2)},
    "interleaved ring": {
        "kind": "sliding",
        "window": 5,
        "capacity": CAPACITY,
        "order": RowOrder(block=3, shards=2),
    },
}
RULES = """
[rules]
batch = "dp"
kv_length = "sp"
kv_head = "tp | -"
"""
OPERATIONS = ("append", "append", "append", "insert", "free", "rewind", "rewind", "reorder")


@functools.partial(jax.jit, donate_argnums=1)
def step(operation: Any, cache: Any, source: Any, tokens: Any, valid: Any, numbers: Any) -> Any:
    """One program for all operations; arguments that an operation does not need are padding."""
    k, v = (jnp.asarray(x, jnp.float32) for x in tokens)

    def codes(change: Any) -> Any:
        return change.cache, sw.hint(
            change.refused, sw.EMPTY
        )  # over Explicit axes the branches must agree on its sharding

    branches = (
        lambda cache: codes(cache.append(k, v, valid=valid)),
        lambda cache: codes(cache.insert(source.append(k, v, valid=valid).cache, numbers)),
        lambda cache: codes(cache.free(numbers)),
        lambda cache: codes(cache.rewind(numbers)),
        lambda cache: codes(cache.reorder(numbers, group=2)),
    )
    return jax.lax.switch(operation, branches, cache)


class Run:
    """A cache and its reference model."""

    def __init__(self, *, source: str = "dense", **options: Any) -> None:
        self.cache = caches.init(batch=BATCH, **SIZES, **options)
        self.model = Model(self.cache.spec)
        rows = {"window": 3, "capacity": 4} if source == "sliding" else {"capacity": TOKENS + 1}
        self.source = caches.init(source, batch=BATCH, **rows, **SIZES)
        self.random = np.random.default_rng(0)
        self.token = 0
        self.done: list[str] = []

    def random_step(self) -> None:
        operation = OPERATIONS[self.random.integers(len(OPERATIONS))]
        tokens = np.arange(self.token, self.token + BATCH * TOKENS).reshape(BATCH, TOKENS)
        self.token += BATCH * TOKENS
        valid = self.random.random((BATCH, TOKENS)) < self.random.random()
        numbers = self.numbers(operation)
        wanted = self.on_model(operation, tokens, valid, numbers)
        branch = ("append", "insert", "free", "rewind", "reorder").index(operation)
        spec = self.cache.spec
        pair = (keys_of(tokens, spec), values_of(tokens, spec))
        self.cache, refused = step(
            branch, self.cache, self.source, pair, valid, numbers.astype(np.int32)
        )
        assert np.asarray(refused).tolist() == wanted, (operation, valid, numbers)
        self.done += [operation] * (not all(wanted))

    def numbers(self, operation: str) -> np.ndarray:
        if operation == "rewind":  # mostly a few tokens, sometimes nonsense
            lengths = np.array([slot.length for slot in self.model.slots])
            return lengths - np.where(
                self.random.random(BATCH) < 0.8,
                self.random.integers(0, 4, BATCH),
                self.random.integers(-2, 30, BATCH),
            )
        if operation == "reorder":
            return (
                np.arange(BATCH) // 2 * 2
                + self.random.integers(0, 2, BATCH)
                + (self.random.random(BATCH) < 0.1) * self.random.integers(-9, 9)
            )
        return np.where(
            self.random.random(BATCH) < 0.7,
            self.random.permutation(BATCH),
            self.random.integers(-3, BATCH + 3, BATCH),
        )

    def on_model(
        self, operation: str, tokens: np.ndarray, valid: np.ndarray, numbers: np.ndarray
    ) -> list[Any]:
        given = [row[mask].tolist() for row, mask in zip(tokens, valid, strict=True)]
        if operation == "append":
            return self.model.append(given)
        if operation == "insert":
            source = Model(self.source.spec)
            source.append(given)
            return self.model.insert(source.slots, numbers.tolist())
        if operation == "reorder":
            return self.model.reorder(numbers.tolist(), 2)
        return {"free": self.model.free, "rewind": self.model.rewind}[operation](numbers.tolist())

    def check(self) -> None:
        assert slots_of(self.cache) == self.model.slots


def run(run: Run, steps: int) -> None:
    for _ in range(steps):
        run.random_step()
        run.check()
    assert set(run.done) == set(OPERATIONS), "an operation never did anything"


@pytest.mark.full
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.ci
def test_few_hundred_operations(name: str) -> None:
    run(Run(**CACHES[name]), 200)


@pytest.mark.parametrize("name", ["sliding", "dense"])
@pytest.mark.full
@pytest.mark.ci
def test_ring_sources(name: str) -> None:
    run(Run(source="sliding", **CACHES[name]), 200)


SHARDED = [
    ("dense", "auto"),
    ("interleaved ring", "explicit"),
    pytest.param("dense", "explicit", marks=pytest.mark.full),
    pytest.param("interleaved ring", "auto", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("name", "axis_types"), SHARDED)
@pytest.mark.full(but=["dense-auto"])
def test_sharded_over_batch_length_and_heads(name: str, axis_types: Any) -> None:
    manager = sw.PartitionManager(
        sw.Strategy.loads(RULES), mesh=cpu_mesh("dp:2,sp:2,tp:2", axis_types=axis_types)
    ).for_mode("decode")
    with manager:
        run(Run(**CACHES[name]), 40)


@pytest.mark.full
@pytest.mark.parametrize("name", CACHES)
def test_ten_thousand_operations(name: str) -> None:
    run(Run(**CACHES[name]), 10_000)
