"""Resharding a cache runs the planned collectives and keeps the content."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright import _jax, caches
from shardwright.caches import plan_reshard, reshard
from shardwright.caches.sharding import axes_by_dim
from shardwright.errors import CacheError, IndivisibleError, MeshSpecError
from shardwright.plan.collectives.read import read_collectives
from shardwright.reshard import MoveKind, plan_moves, run_moves
from shardwright.testing import assert_sharding, assert_spec, cpu_mesh
from tests.raising import raises

RULES = """
[rules]
batch = "{batch}"
kv_length = "{length}"
kv_head = "{head}"
page = "-"
[modes.decode]
batch = "dp"
kv_length = "-"
kv_head = "tp"
page = "dp"
"""
MESH = "dp:2,tp:4"
SIZES = {"dp": 2, "tp": 4}
SHAPE = (8, 16, 4, 4)
BYTES = 8 * 16 * 4 * 4 * 4 // 8  # of a shard over both


def manager_of(
    batch: str = "-",
    length: str = "dp+tp",
    head: str = "-",
    *,
    mesh: str = MESH,
    axis_types: Any = "auto",
) -> Any:
    rules = sw.Strategy.loads(RULES.format(batch=batch, length=length, head=head))
    return sw.PartitionManager(rules, mesh=cpu_mesh(mesh, axis_types=axis_types)).for_mode(
        "prefill"
    )


def make(kind: str = "dense", **changes: Any) -> Any:
    options = {
        "batch": 8,
        "capacity": 16,
        "kv_heads": 4,
        "head_dim": 4,
        "dtype": "float32",
        **changes,
    }
    return caches.init(kind, **options)


def filled(kind: str = "dense", **changes: Any) -> Any:
    cache = make(kind, **changes)
    shape = (cache.batch, 5, cache.spec.kv_heads, cache.spec.head_dim)
    k = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    valid = np.arange(5)[None] < np.arange(1, cache.batch + 1)[:, None]
    return cache.append(k, -k, valid=valid).require()


# Name -> source, target, the collectives of each array and the bytes that a device sends.
CASES: dict[str, tuple[P, P, list[str], int]] = {
    "one dim to another": (P("dp", "tp"), P("dp", None, "tp"), ["all_to_all"], BYTES * 3 // 4),
    "two axes of one dim to two": (
        P(None, ("dp", "tp")),
        P("dp", None, "tp"),
        ["all_to_all"] * 2,
        BYTES // 2 + BYTES * 3 // 4,
    ),
    "two axes together": (P(("dp", "tp")), P(None, ("dp", "tp")), ["all_to_all"], BYTES * 7 // 8),
    "the major axis of two": (
        P(None, ("dp", "tp")),
        P("dp", "tp"),
        ["permute", "all_to_all"],
        BYTES + BYTES // 2,
    ),
    "cut, nothing sent": (P(), P("dp", None, "tp"), [], 0),
    "cut first": (P("dp"), P(None, "dp", "tp"), ["all_to_all"], BYTES // 2),
    "gathered last": (
        P("dp", "tp"),
        P(None, None, "tp"),
        ["all_to_all", "all_gather"],
        BYTES * 3 // 4 + BYTES,
    ),
    "two axes swap": (P(("dp", "tp")), P(("tp", "dp")), ["permute"], BYTES),
    "as it was": (P("dp", None, "tp"), P("dp", None, "tp"), [], 0),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.full(
    but=[
        "auto-one dim to another",
        "auto-two axes together",
        "auto-two axes swap",
        "explicit-cut, nothing sent",
        "explicit-gathered last",
    ]
)
def test_plan_sends_least_and_matches_program(name: str, axis_types: str) -> None:
    source, target, wanted, sent = CASES[name]
    moves = plan_moves(
        axes_by_dim(source, 4), axes_by_dim(target, 4), shape=SHAPE, itemsize=4, mesh=SIZES
    )
    assert sorted(move.kind for move in moves if move.kind is not MoveKind.SLICE) == sorted(wanted)
    assert sum(move.bytes for move in moves) == sent
    mesh = cpu_mesh(MESH, axis_types=axis_types)
    x = jax.device_put(
        np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE), NamedSharding(mesh, source)
    )
    run = jax.jit(
        _jax.call_shard_map(
            lambda x: run_moves(x, moves, SIZES), mesh=mesh, in_specs=(source,), out_specs=target
        )
    )
    program = run.lower(x).compile()
    collectives = read_collectives(program, mesh=mesh)
    assert sorted(each.kind for each in collectives) == sorted(wanted)
    assert sum(each.wire_bytes for each in collectives) == sent
    np.testing.assert_array_equal(run(x), np.arange(np.prod(SHAPE)).reshape(SHAPE))
    assert_sharding(run(x), NamedSharding(mesh, target))


@pytest.mark.full
def test_plan_exists_between_all_specs() -> None:
    mesh, sizes = cpu_mesh("dp:2,tp:2"), {"dp": 2, "tp": 2}
    places: list[Any] = []
    for dims in itertools.product(range(-1, 3), repeat=2):
        for order in (("dp", "tp"), ("tp", "dp")):
            at = dict(zip(("dp", "tp"), dims, strict=True))
            places.append(
                tuple(tuple(name for name in order if at[name] == dim) for dim in range(3))
            )
    places = list(dict.fromkeys(places))
    x = np.arange(4 * 4 * 8, dtype=np.int32).reshape(4, 4, 8)
    random = np.random.default_rng(0)
    for source, target in random.permutation(list(itertools.product(range(len(places)), repeat=2)))[
        :24
    ]:
        a, b = places[source], places[target]
        moves = plan_moves(a, b, shape=x.shape, itemsize=4, mesh=sizes)
        local = 4 * x.size // np.prod([sizes[name] for axes in a for name in axes] or [1])
        assert sum(move.bytes for move in moves) <= 3 * local
        specs = [P(*(axes or None for axes in place)) for place in (a, b)]
        run = _jax.call_shard_map(
            lambda x, moves=moves: run_moves(x, moves, sizes),
            mesh=mesh,
            in_specs=(specs[0],),
            out_specs=specs[1],
        )
        np.testing.assert_array_equal(jax.jit(run)(x), x, err_msg=str((a, b, moves)))


@pytest.mark.parametrize("kind", ["dense", "sliding", "quantized", "paged"])
@pytest.mark.full(but=["dense"])
def test_resharded_cache_keeps_content(kind: str) -> None:
    changes = {"sliding": {"window": 8}, "paged": {"page_size": 4}}.get(kind, {})
    alone = filled(kind, **changes)
    pm = manager_of()
    with pm:
        cache = filled(kind, **changes)
        moved = reshard(cache, "decode")
        inside = jax.jit(lambda cache: reshard(cache, "decode"))(cache)
    assert moved.spec.mode == sw.MODE_DECODE
    for actual in (moved, inside):
        assert_spec(actual, actual.axes(), manager=pm, mode="decode")
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(alone), strict=True):
            np.testing.assert_array_equal(a, b)
    with pm.for_mode("decode"):
        k = jnp.ones((8, 1, 4, 4))
        after = moved.append(k, k).require()
        assert_spec(after, after.axes(), mode="decode")
    assert after.length.tolist() == (alone.length + 1).tolist()


def test_plan_sends_less_than_partitioner() -> None:
    pm = manager_of()
    with pm:
        cache = make()
        program = jax.jit(lambda cache: reshard(cache, "decode")).lower(cache).compile()
        plan = plan_reshard(cache, "decode")
    collectives = read_collectives(program, mesh=pm.mesh)
    assert {each.kind for each in collectives} == {"all_to_all"}
    assert (
        plan.bytes
        == sum(each.wire_bytes for each in collectives)
        == 2 * (BYTES // 2 + BYTES * 3 // 4)
    )
    naive = (
        jax.jit(lambda x: x, out_shardings=NamedSharding(pm.mesh, P("dp", None, "tp")))
        .lower(cache.k)
        .compile()
    )
    assert 2 * sum(each.wire_bytes for each in read_collectives(naive, mesh=pm.mesh)) > plan.bytes


def test_plan_text() -> None:
    with manager_of():
        plan = plan_reshard(make(), "decode")
    assert str(plan).splitlines()[:4] == [
        "to decode: 4 collectives, 2,560 B sent by each device",
        "  length  P() -> P('dp')",
        "    slice dp, - -> dim 0, 0 B sent, P('dp')",
        "  k  P(None, ('dp', 'tp')) -> P('dp', None, 'tp')",
    ]


def test_reshard_copies_to_another_mesh() -> None:
    alone = filled()
    pm, other = manager_of(), manager_of(mesh="dp:1,tp:2")
    with pm:
        cache = filled()
    for source in (alone, cache):
        moved = reshard(source, "decode", manager=other)
        assert_spec(moved, moved.axes(), manager=other, mode="decode")
        np.testing.assert_array_equal(moved.k, alone.k)
        with raises(CacheError, "mesh", path="length"):
            plan_reshard(source, "decode", manager=other)
    with raises(CacheError, "jit", path="manager"):
        jax.jit(lambda cache: reshard(cache, "decode", manager=other))(alone)


def test_donated_cache_is_deleted() -> None:
    pm = manager_of()
    with pm:
        cache = filled()
        moved = reshard(cache, "decode", donate=True)
    assert cache.length.is_deleted() or cache.k.is_deleted()
    assert moved.length.tolist() == [1, 2, 3, 4, 5, 5, 5, 5]


def test_invalid_arguments() -> None:
    with raises(CacheError, "cache", path="manager", fix="with manager:"):
        reshard(make(), "decode")
    pm = manager_of(length="dp")
    with pm:
        odd = make(kv_heads=6)
        with raises(IndivisibleError, "tp=4", size=6, fix="kv_head"):
            reshard(odd, "decode")
    with raises(CacheError, "manager", path="mode", fix="decode"):
        reshard(
            make(),
            manager=sw.PartitionManager(
                sw.Strategy.loads(RULES.format(batch="-", length="-", head="-")),
                mesh=cpu_mesh(MESH),
            ),
        )


def test_plan_needs_no_devices() -> None:
    rules = sw.Strategy.loads(RULES.format(batch="-", length="dp+tp", head="-"))
    with manager_of():
        wanted = plan_reshard(make(), "decode")
    with sw.PartitionManager(rules, mesh=sw.abstract_mesh(MESH)).for_mode("prefill"):
        shapes = jax.eval_shape(make)
        assert plan_reshard(shapes, "decode") == wanted
        with raises(MeshSpecError, "manager", "mesh", fix="create_mesh"):
            reshard(shapes, "decode")
