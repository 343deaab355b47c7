"""Moves between two shardings, against XLA: equal collectives, or marked before the compile."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardwright as sw
from shardwright.plan.collectives.read import read_collectives
from shardwright.plan.walk.program import walk_jaxpr
from shardwright.plan.walk.values import Dims, ShardedValue

SHAPE = (64, 64)
CUBE = (16, 32, 64)
Rows = list[tuple[str, tuple[str, ...], int, int]]
# Moves that XLA does in parts of a mesh axis. The walk says that it may be wrong there.
MARKED = {"2x4": 4, "4x2": 4, "2x2": 0}
MARKED_CUBE = {"2x4": 36, "4x2": 36, "2x2": 24}


def specs(rank: int) -> Iterator[Dims]:
    """Yield every sharding of the dims of an array over two mesh axes, in each order."""
    for places in itertools.product((None, *range(rank)), repeat=2):
        dims: list[list[str]] = [[] for _ in range(rank)]
        for axis, at in zip(("dp", "sp"), places, strict=True):
            if at is not None:
                dims[at].append(axis)
        yield tuple(map(tuple, dims))
        if places[0] is not None and places[0] == places[1]:
            yield tuple(tuple(reversed(dim)) for dim in dims)


def compiled(
    held: Dims, goal: Dims, mesh: jax.sharding.Mesh, shape: tuple[int, ...] = SHAPE
) -> Rows:
    def sharding(dims: Dims) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*dims))

    def move(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x * 2, sharding(held)) * 3

    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    step = jax.jit(move, in_shardings=sharding(held), out_shardings=sharding(goal))
    return sorted(
        (str(each.kind), each.mesh_axes, each.total_bytes or 0, each.total_wire_bytes or 0)
        for each in read_collectives(step.lower(x).compile(), mesh)
    )


@functools.cache
def identity(shape: tuple[int, ...]) -> jax.core.Jaxpr:
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.jit(lambda x: x * 6).trace(x).jaxpr.jaxpr


def planned(
    held: Dims, goal: Dims, sizes: dict[str, int], shape: tuple[int, ...] = SHAPE
) -> tuple[Rows, bool]:
    walked = walk_jaxpr(
        identity(shape), [ShardedValue(dims=held)], sizes, outputs=[ShardedValue(dims=goal)]
    )
    events = walked.events
    rows = sorted(
        (str(each.kind), each.mesh_axes, each.logical_bytes, each.wire_bytes) for each in events
    )
    return rows, bool(walked.choices)


def check_all(text: str, *, shape: tuple[int, ...] = SHAPE, every: int = 1) -> None:
    sizes = dict(zip(("dp", "sp"), map(int, text.split("x")), strict=True))
    mesh = sw.create_mesh(sizes)
    pairs = [pair for pair in itertools.product(specs(len(shape)), repeat=2) if pair[0] != pair[1]]
    assert len(pairs) == (110 if shape == SHAPE else 342)
    marked = 0
    for held, goal in pairs[::every]:
        rows, unsure = planned(held, goal, sizes, shape)
        marked += unsure
        if not unsure:
            assert rows == compiled(held, goal, mesh, shape), (held, goal)
    assert marked <= (MARKED if shape == SHAPE else MARKED_CUBE)[text]


def test_moves_equal_xla() -> None:
    check_all("2x4", every=9)
    check_all("2x4", shape=CUBE, every=29)


@pytest.mark.full
@pytest.mark.parametrize("sizes", MARKED)
def test_every_move_between_two_dims_equals_xla(sizes: str) -> None:
    check_all(sizes)


# Moves between two dims have all sizes of the mesh.
@pytest.mark.full
@pytest.mark.parametrize("sizes", ["2x4", pytest.param("4x2", marks=pytest.mark.product), "2x2"])
def test_every_move_between_three_dims_equals_xla(sizes: str) -> None:
    check_all(sizes, shape=CUBE)


def test_moves_by_hand() -> None:
    sizes = {"dp": 2, "sp": 4}
    whole = 64 * 64 * 4

    def kinds(held: Dims, goal: Dims) -> dict[str, int]:
        return {kind: size for kind, _, size, _ in planned(held, goal, sizes)[0]}

    # The last mesh axis of a dim goes: a gather. The first one goes: a permute comes first.
    assert kinds((("dp", "sp"), ()), (("dp",), ())) == {"all_gather": whole // 2}
    permuted = {"all_gather": whole // 4, "permute": whole // 8}
    assert kinds((("dp", "sp"), ()), (("sp",), ())) == permuted
    # The last mesh axis moves behind another: an all-to-all. The first one: a permute, too.
    assert kinds((("dp", "sp"), ()), (("dp",), ("sp",))) == {"all_to_all": whole // 8}
    permuted = {"all_to_all": whole // 8, "permute": whole // 8}
    assert kinds((("dp", "sp"), ()), (("sp",), ("dp",))) == permuted
    # One mesh axis in place of another: a permute of the smaller shards.
    assert kinds((("dp",), ()), (("sp",), ())) == {"permute": whole // 4}
    assert kinds((("dp",), ()), (("dp", "sp"), ())) == {}
