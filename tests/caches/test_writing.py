"""Scatters and gathers of rows, over shards and without, against loops of NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.caches import scatter
from shardwright.caches.sharding import CacheSharding, PlacedArrays
from shardwright.testing import cpu_mesh

SLOTS, ROWS = 4, 6
# Of one cache: the batch has one sharding everywhere, rows and heads need not.
SPECS = {"k": P("dp", "sp", "tp"), "v": P("dp", None, None, "tp"), "scale": P("dp", "sp")}
EVERYWHERE = dict.fromkeys(SPECS, P())
SPECS_BY_KIND = {
    "no manager": EVERYWHERE,
    "auto": SPECS,
    "explicit": SPECS,
    "whole": EVERYWHERE,
    "two mesh axes": {"k": P(("sp", "dp"), "tp"), "v": P(("sp", "dp")), "scale": P(("sp", "dp"))},
}
KINDS = list(SPECS_BY_KIND)


def sharding_of(kind: str) -> CacheSharding:
    """The sharding of a cache on eight devices; without a manager nothing is sharded."""
    if kind == "no manager":
        return CacheSharding(manager=None, mode=None)
    mesh = cpu_mesh("dp:2,sp:2,tp:2", axis_types="explicit" if kind == "explicit" else "auto")
    return CacheSharding(
        manager=sw.PartitionManager(sw.Strategy(rules={"batch": "dp"}), mesh=mesh),
        mode=sw.MODE_DECODE,
    )


def arrays(*leading: int, first: float) -> dict[str, np.ndarray]:
    """Buffers of all ranks, in which every number occurs once."""
    shapes = {"k": (*leading, 2, 3), "v": (*leading, 2, 2), "scale": (*leading, 2)}
    return {
        name: first + np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        for name, shape in shapes.items()
    }


def run(kind: str, write: Any, buffers: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
    """The buffers after one jitted write, which keeps their shardings."""
    sharding, specs = sharding_of(kind), SPECS_BY_KIND[kind]

    def program(buffers: Any, *arguments: Any) -> Any:
        placed = PlacedArrays(arrays=buffers, specs=specs, sharding=sharding)
        return write(placed, *arguments, **options)

    buffers, *rest = (jax.tree.map(jnp.asarray, tree) for tree in (buffers, *arguments))
    if sharding.manager is None:
        written = program(buffers, *rest)
    else:
        with sharding.manager:
            placed = {name: sharding.place_as(x, specs[name]) for name, x in buffers.items()}
            written = jax.jit(program)(placed, *rest)
        for name, x in written.items():
            assert x.sharding.is_equivalent_to(placed[name].sharding, x.ndim), name
    return {name: np.asarray(x) for name, x in written.items()}


def assert_equal(actual: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert actual.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full(but=["explicit"])
def test_append_rows_per_slot(kind: str) -> None:
    """A row number of `ROWS` or more is dropped; rows may go to any shard of the rows."""
    buffers, new = arrays(SLOTS, ROWS, first=0.0), arrays(SLOTS, 3, first=-1000.0)
    rows = np.array([[0, 5, 3], [6, 2, 7], [3, 6, 0], [13, 6, 9]], np.int32)
    wanted = {name: array.copy() for name, array in buffers.items()}
    for name, array in wanted.items():
        for slot, at in np.ndindex(rows.shape):
            if rows[slot, at] < ROWS:
                array[slot, rows[slot, at]] = new[name][slot, at]
    assert_equal(run(kind, scatter.append_rows, buffers, new, rows), wanted)


@pytest.mark.full(but=["a slot per entry-explicit"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "slots",
    [[[3], [7], [0]], [[3, 3, 0, 1], [4, 2, 2, 9], [0, 1, 3, 1]]],
    ids=["a slot per entry", "a slot per row"],
)
def test_scatter_rows_into_any_slots(kind: str, slots: Any) -> None:
    buffers, new = arrays(SLOTS, ROWS, first=0.0), arrays(3, 4, first=-1000.0)
    numbers, rows = (
        np.array(slots, np.int32),
        np.array([[1, 5, 0, 6], [0, 1, 2, 3], [4, 5, 9, 2]], np.int32),
    )
    wanted = {name: array.copy() for name, array in buffers.items()}
    for name, array in wanted.items():
        for (entry, at), slot in np.ndenumerate(np.broadcast_to(numbers, rows.shape)):
            if slot < SLOTS and rows[entry, at] < ROWS:
                array[slot, rows[entry, at]] = new[name][entry, at]
    assert_equal(run(kind, scatter.scatter_rows, buffers, new, numbers, rows), wanted)


@pytest.mark.full(but=["8-parents3-auto"])
@pytest.mark.parametrize("kind", ["no manager", "auto", "two mesh axes"])
@pytest.mark.parametrize(
    ("group", "parents"),
    [
        (1, [0, 1, 2, 3, 4, 5, 6, 7]),
        (2, [1, 1, 2, 2, 5, 4, 7, 6]),
        (4, [3, 0, 0, 2, 7, 4, 5, 5]),
        (8, [7, 0, 3, 3, 2, 1, 5, 6]),
    ],
)
def test_take_slots_copies_parents(kind: str, group: int, parents: list[int]) -> None:
    """Groups on one shard and on several, with two shards of four slots and four shards of two."""
    buffers = arrays(8, ROWS, first=0.0)
    wanted = {name: array[parents] for name, array in buffers.items()}
    assert_equal(
        run(kind, scatter.take_slots, buffers, np.array(parents, np.int32), group=group), wanted
    )


@pytest.mark.parametrize(("group", "gathers"), [(1, False), (2, False), (4, False), (8, True)])
def test_take_slots_gathers_only_across_shards(group: int, gathers: bool) -> None:
    sharding = sharding_of("auto")
    assert sharding.manager is not None

    def take(buffers: Any, parents: Any) -> Any:
        placed = PlacedArrays(arrays=buffers, specs=SPECS, sharding=sharding)
        return scatter.take_slots(placed, parents, group=group)

    with sharding.manager:
        buffers = {
            name: sharding.place_as(jnp.asarray(array), SPECS[name])
            for name, array in arrays(8, ROWS, first=0.0).items()
        }
        text = jax.jit(take).lower(buffers, jnp.arange(8, dtype=jnp.int32)).as_text()
    assert ("all_gather" in text) == gathers


def test_take_slots_of_a_group_across_shards() -> None:
    """Three slots per shard and groups of two: the second group has a slot on each shard."""
    buffers, parents = arrays(6, ROWS, first=0.0), [1, 0, 3, 2, 5, 5]
    expected = {name: array[parents] for name, array in buffers.items()}
    taken = run("auto", scatter.take_slots, buffers, np.array(parents, np.int32), group=2)
    assert_equal(taken, expected)
