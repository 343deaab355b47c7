"""Moves that stop halfway, and leaves and dtypes that a move would change: each is refused."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.errors import MoveError, ShardingError
from shardwright.reshard.exchange import sends_of
from shardwright.reshard.grid import grid_of
from shardwright.reshard.pieces import cut
from shardwright.testing import cpu_mesh
from tests.raising import Facts, facts, raises

AXES = (sw.EMBED, sw.MLP_INTERMEDIATE)


def train() -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=cpu_mesh("fsdp:2,tp:4"))


def serve() -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset("serve_tp"), mesh=cpu_mesh("dp:4,tp:2"))


def numbers(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(16, 32)).astype(np.float32)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("donate", [False, True])
def test_interrupted_move_can_be_resumed(stop: type[BaseException], donate: bool) -> None:
    """Ctrl-C keeps its type, and its cause has the arrays that have moved."""
    values = {"a": numbers(1), "b": numbers(2), "c": numbers(3)}
    tree = train().reshard(values, AXES)

    def interrupt(progress: Any) -> None:
        if progress.path == "b":
            raise stop

    with pytest.raises(stop) as caught:
        serve().reshard(tree, AXES, donate=donate, progress=interrupt)
    failure = caught.value.__cause__
    assert isinstance(failure, MoveError)
    assert failure.moved == ("a",)
    assert tree["a"].is_deleted() is donate
    assert f"after 1 of 3 arrays: {stop.__name__}" in str(failure)
    resumed = serve().reshard(failure.tree, AXES, donate=donate)
    for name, value in values.items():
        np.testing.assert_array_equal(resumed[name], value)
    assert resumed["a"] is failure.tree["a"]


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("int8", facts("int8", "JAX", path="dtype", fix="jnp.bfloat16")),
        (bool, facts("bool", "JAX", path="dtype", fix="jnp.bfloat16")),
        ("complex64", facts("complex64", "JAX", path="dtype", fix="jnp.bfloat16")),
        (np.longdouble, facts("float128", "JAX", path="dtype", fix="jnp.bfloat16")),
        ("banana", facts("banana", path="dtype", fix="jnp.bfloat16")),
        (3, facts(3, path="dtype", fix="jnp.bfloat16")),
        ("float64", facts("JAX", "float32", "float64", path="dtype", fix="float32")),
    ],
)
def test_invalid_dtypes(dtype: Any, message: Facts) -> None:
    x = train().reshard(numbers(), AXES)
    for call in (serve().plan_reshard, serve().reshard):
        with raises(ShardingError, message) as caught:
            call({"a": x}, AXES, dtype=dtype)
        assert "fix  " in str(caught.value)
    with jax.enable_x64(True):
        assert serve().plan_reshard({"a": x}, AXES, dtype="float64").target_bytes == 8 * 512 * 4


@pytest.mark.parametrize("target", ["moves", "stays"])
def test_deleted_sources_are_named(target: str) -> None:
    pm = serve() if target == "moves" else train()
    tree = train().reshard({"a": numbers(1), "b": numbers(2)}, AXES)
    tree["b"].delete()
    with raises(ShardingError, "deleted", "donated", path="b") as caught:
        pm.reshard(tree, AXES, donate=True)
    assert "fix   pass the arrays that the last step or the last move returned" in str(caught.value)
    assert not tree["a"].is_deleted()


@pytest.mark.parametrize(
    "leaf", [2**70, -(2**70), "x", object(), np.array(["a"]), np.longdouble(1)]
)
def test_leaves_that_are_no_numbers(leaf: Any) -> None:
    message = facts("JAX", path="a")
    for call in (serve().plan_reshard, serve().reshard):
        with raises(ShardingError, message) as caught:
            call({"a": leaf, "b": 1.5}, {"a": (sw.EMPTY,) * np.ndim(leaf), "b": ()})
        assert "fix   leave it out of the tree" in str(caught.value)


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.parametrize("donate", [False, True])
def test_axis_of_size_one_is_part_of_the_sharding(axis_types: Any, donate: bool) -> None:
    """The result has the sharding that was asked for, and shares the shards of the source."""
    mesh = cpu_mesh("dp:1,tp:4", axis_types=axis_types)
    source, target = (NamedSharding(mesh, spec) for spec in (P("tp", "dp"), P("tp", None)))
    pm = sw.PartitionManager(sw.Strategy.preset("serve_tp"), mesh=mesh)
    tree = {
        "x": jax.device_put(numbers(), source),
        "int4": jax.device_put(jnp.zeros((0, 32), jnp.uint4), source),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), (4, 2)), source),
    }
    moved = pm.reshard(tree, dict.fromkeys(tree, target), donate=donate)
    for name, leaf in tree.items():
        assert moved[name].sharding == target
        assert jax.typeof(moved[name]) == jax.typeof(jax.device_put(leaf, target))
    np.testing.assert_array_equal(moved["x"], numbers())
    pointers = [
        [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
        for x in (tree["x"], moved["x"])
    ]
    assert pointers[0] == pointers[1]
    assert pm.plan_reshard(tree, dict.fromkeys(tree, target)).bytes_sent == 0
    again = pm.reshard(moved, dict.fromkeys(tree, target), donate=donate)
    assert all(again[name] is moved[name] for name in tree)


def test_copies_send_equally_much() -> None:
    """Two devices hold each half, and two others need it: each copy is sent once."""
    mesh = cpu_mesh("a:2,b:2")
    for source, target in ((P("a"), P()), (P("b"), P()), (P(None, "a"), P("b"))):
        grids = [grid_of(NamedSharding(mesh, spec), (8, 8)) for spec in (source, target)]
        senders = [send.sender for send in sends_of(*grids) if not send.stays]
        counts = collections.Counter(senders)
        assert [counts[device] for device in range(4)] == [len(senders) // 4] * 4


@pytest.mark.parametrize("dtype", ["int2", "uint2"])
def test_arrays_of_two_bits_are_refused(dtype: str) -> None:
    """A collective on such an array ends the process; jax.device_put is right."""
    mesh = cpu_mesh("fsdp:4")
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=mesh)
    values = (np.arange(256) % 2).reshape(16, 16).astype(jnp.dtype(dtype))
    source, target = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P(None, "fsdp"))
    x = jax.device_put(values, source)
    for call in (pm.reshard, pm.plan_reshard):
        for value in (x, values):
            with raises(ShardingError, dtype, "XLA", path="a", fix="jax.device_put") as caught:
                call({"a": value}, {"a": target})
            assert "jax.device_put(x, sharding)" in caught.value.fix
    assert pm.reshard({"a": x}, {"a": source})["a"] is x
    np.testing.assert_array_equal(np.asarray(jax.device_put(x, target)), values)


def test_plans_say_how_four_bits_count() -> None:
    mesh = cpu_mesh("fsdp:4")
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=mesh)
    source, target = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    for dtype, note in (("int4", "an element of int4 counts as a byte"), ("int8", "")):
        x = jax.device_put(jnp.zeros((16, 16), dtype), source)
        plan = pm.plan_reshard({"a": x, "mask": jnp.zeros(4, bool)}, {"a": target, "mask": target})
        assert plan.leaves[0].route.bytes_sent == 3 * x.nbytes
        assert (note in str(plan)) if note else ("counts as a byte" not in str(plan))


def test_targets_may_be_arrays_with_shardings() -> None:
    tree = train().reshard({"a": numbers(1), "b": numbers(2)}, AXES)
    pm = serve()
    like = pm.reshard({"a": numbers(), "b": numbers()}, AXES)
    structs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
    )
    mixed = {"a": structs["a"], "b": like["b"].sharding}
    for targets in (like, structs, mixed):
        moved = pm.reshard(tree, targets)
        for name, seed in (("a", 1), ("b", 2)):
            assert moved[name].sharding == like[name].sharding
            np.testing.assert_array_equal(moved[name], numbers(seed))
    plan = pm.plan_reshard(structs, structs, source=tree)
    assert plan.bytes_sent == pm.plan_reshard(tree, AXES).bytes_sent


def test_pieces_cover_a_leaf_within_the_limit() -> None:
    """A piece is at most `limit` bytes, if more than one row fits, and no row is left out."""
    for rows in (*range(2, 40), 97, 128):
        for limit in (1, 7, 16, 37, 50):
            piece = cut((rows, 3), [(1, 1)], largest=rows * 3, limit=limit)
            assert piece.bytes <= max(limit, 3 if piece.dim == 0 else rows)
            if piece.dim is not None:
                starts = [piece.start(number) for number in range(piece.count)]
                covered = {start + at for start in starts for at in range(piece.size)}
                assert covered == set(range((rows, 3)[piece.dim]))


def test_an_array_of_the_limit_moves_whole() -> None:
    counts = ((1, 2), (2, 1))
    whole, cut_once = (cut((8, 4), counts, largest=128, limit=limit) for limit in (128, 127))
    assert (whole.dim, whole.bytes) == (None, 128)
    assert (cut_once.dim, cut_once.count, cut_once.bytes) == (0, 2, 64)
