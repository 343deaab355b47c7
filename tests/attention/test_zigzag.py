"""The zigzag order: where rows go, that they come back, and that it makes causal work equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwright.attention import zigzag
from shardwright.attention.masks import MaskRules, block_is_empty
from shardwright.errors import AttentionError
from shardwright.testing import cpu_mesh
from tests.raising import facts, raises


def test_shard_holds_early_and_late_chunk() -> None:
    np.testing.assert_array_equal(
        zigzag.positions(12, shards=3), [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    )
    np.testing.assert_array_equal(zigzag.positions(6, shards=1), np.arange(6))
    assert zigzag.positions(12, shards=3).dtype == zigzag.positions(6, shards=1).dtype == np.int32


def test_one_shard_keeps_its_order() -> None:
    np.testing.assert_array_equal(zigzag.positions(7, shards=1), np.arange(7))
    np.testing.assert_array_equal(zigzag.permute(np.eye(5), shards=1), np.eye(5))


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_unpermute_restores_rows(shards: int) -> None:
    batch = {"tokens": np.arange(48).reshape(2, 24), "mask": jnp.arange(96.0).reshape(2, 24, 2)}
    there = zigzag.permute(batch, shards=shards)
    np.testing.assert_array_equal(there["tokens"][0], zigzag.positions(24, shards=shards))
    assert isinstance(there["tokens"], np.ndarray)
    back = zigzag.unpermute(there, shards=shards)
    for name, array in batch.items():
        np.testing.assert_array_equal(back[name], array)


def test_another_dim() -> None:
    np.testing.assert_array_equal(zigzag.permute(np.arange(4), shards=1, dim=0), np.arange(4))
    np.testing.assert_array_equal(
        zigzag.permute(np.eye(8), shards=2, dim=-1)[0], np.eye(8)[0][zigzag.positions(8, shards=2)]
    )
    np.testing.assert_array_equal(
        zigzag.permute(np.eye(8)[:, :3], shards=2, dim=-2),
        np.eye(8)[zigzag.positions(8, shards=2), :3],
    )


@pytest.mark.full(but=["auto"])
@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_unpermute_restores_rows_and_sharding(axis_types: str) -> None:
    mesh = cpu_mesh("dp:2,sp:4", axis_types=axis_types)
    sharding, plain = (
        NamedSharding(mesh, P("dp", "sp")),
        np.arange(2 * 16 * 3.0, dtype=np.float32).reshape(2, 16, 3),
    )
    placed = jax.device_put(plain, sharding)
    there = zigzag.permute({"k": placed}, shards=4)["k"]
    np.testing.assert_array_equal(there, zigzag.permute(plain, shards=4))
    back = zigzag.unpermute(there, shards=4)
    np.testing.assert_array_equal(back, plain)
    assert there.sharding.is_equivalent_to(sharding, 3)
    assert back.sharding.is_equivalent_to(sharding, 3)


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.full(but=["auto"])
def test_gradient_through_unpermute(axis_types: str) -> None:
    mesh = cpu_mesh("dp:2,sp:4", axis_types=axis_types)
    weights = np.arange(16, dtype=np.float32)[:, None]

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(zigzag.unpermute(x, shards=4) ** 2 * weights)

    x = zigzag.permute(np.arange(2 * 16 * 3.0, dtype=np.float32).reshape(2, 16, 3), shards=4)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("dp", "sp")))
        for taken in (jax.grad(loss), jax.jit(jax.grad(loss))):
            np.testing.assert_allclose(
                taken(placed), 2 * x * zigzag.permute(weights, shards=4, dim=0), rtol=1e-6
            )


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_equal_causal_work_on_every_rank(shards: int) -> None:
    """Blocks of half a shard: two of four in each turn, three in the own. In order: none to all."""
    half = 4
    places = zigzag.positions(2 * half * shards, shards=shards).reshape(shards, 2, half)

    def work(rank: int, source: int) -> int:
        pairs = ((q, kv) for q in places[rank] for kv in places[source])
        return sum(
            not block_is_empty(
                MaskRules(causal=True), (int(q.min()), int(q.max())), (int(kv.min()), int(kv.max()))
            )
            for q, kv in pairs
        )

    for turn in range(shards):
        assert {work(rank, (rank - turn) % shards) for rank in range(shards)} == {
            3 if turn == 0 else 2
        }


def test_indivisible_length() -> None:
    message = facts(10, 2, 3, fix="2")
    with raises(AttentionError, message):
        zigzag.positions(10, shards=3)
    with raises(AttentionError, message):
        zigzag.permute({"tokens": np.zeros((1, 10))}, shards=3)


def test_one_chunk_per_shard_is_refused() -> None:
    with raises(AttentionError, 9, 2, 3, fix="3"):
        zigzag.positions(9, shards=3)


def test_no_shards() -> None:
    with raises(AttentionError, "shards", 0, fix="shards"):
        zigzag.positions(10, shards=0)


@pytest.mark.parametrize("dim", [1, 2, -2, -3])
def test_array_without_length(dim: int) -> None:
    with raises(AttentionError, dim, "(3,)", path="batch/weight", fix="dim"):
        zigzag.permute({"batch": {"weight": np.zeros(3)}}, shards=3, dim=dim)


def test_rows_of_an_array_like() -> None:
    """Whatever JAX reads as an array is taken, and comes back as an array of JAX."""

    class Rows:
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            return np.arange(8, dtype=np.float32)[None]

    taken = zigzag.permute({"rows": Rows()}, shards=2)["rows"]
    assert isinstance(taken, jax.Array)
    np.testing.assert_array_equal(taken, zigzag.permute(np.asarray(Rows()), shards=2))
