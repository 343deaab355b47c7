"""What a walk chooses where XLA has a choice, in programs of one or two equations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import shardwright as sw
from shardwright.plan.collectives.read import read_collectives
from shardwright.plan.walk.events import Walked
from shardwright.plan.walk.program import walk_jaxpr
from shardwright.plan.walk.values import Dims, ShardedValue
from tests.plan.against_xla import FOLDED, Bytes

INTS = jnp.int32
SIZES = {"a": 2, "b": 4}
# An operand: its shape, the mesh axes of each dim, and its dtype if it is not float32.
Operand = tuple[Any, ...]


def on(sizes: Mapping[str, int], *entries: Any) -> NamedSharding:
    return NamedSharding(sw.create_mesh(sizes), PartitionSpec(*entries))


def planned(function: Callable[..., Any], operands: Sequence[Operand], sizes: Any) -> Walked:
    jaxpr = jax.jit(function).trace(*map(shape_of, operands)).jaxpr.jaxpr
    return walk_jaxpr(jaxpr, [ShardedValue(dims=dims_of(each)) for each in operands], sizes)


def shape_of(operand: Operand, sharding: Any = None) -> Any:
    dtype = operand[2] if len(operand) > 2 else jnp.float32
    return jax.ShapeDtypeStruct(operand[0], dtype, sharding=sharding)


def dims_of(operand: Operand) -> Dims:
    return tuple((entry,) if isinstance(entry, str) else entry or () for entry in operand[1])


def check(
    function: Callable[..., Any], *operands: Operand, sizes: Any = SIZES, marked: bool = False
) -> list[str]:
    """Check a plan's marks, and that it equals XLA's program. Return the kinds of its events."""
    walked = planned(function, operands, sizes)
    assert walked.complete
    assert bool(walked.choices) is marked
    events: Bytes = Counter()
    for event in walked.events:
        kind = FOLDED.get(str(event.kind), str(event.kind))
        events[kind, event.mesh_axes] += event.logical_bytes * event.runs
    given = [shape_of(each, on(sizes, *each[1])) for each in operands]
    compiled: Bytes = Counter()
    for each in read_collectives(jax.jit(function).lower(*given).compile(), sw.create_mesh(sizes)):
        kind = FOLDED.get(str(each.kind), str(each.kind))
        compiled[kind, each.mesh_axes] += each.total_bytes or 0
    assert events == compiled
    return [str(event.kind) for event in walked.events]


@pytest.mark.parametrize(("a", "b", "gathers"), [(2, 4, 2), (2, 2, 2), (4, 2, 1)])
def test_matmuls_that_share_a_gather(a: int, b: int, gathers: int) -> None:
    """A layer and the gradient of its weight gather `x` over `b`.

    They keep `a` on a free dim and on a contracted one. They share the gather if `a` is larger.
    """
    sizes = {"a": a, "b": b}

    def both(x: Any, w: Any, g: Any) -> Any:
        y = lax.with_sharding_constraint(x @ w, on(sizes, "a", None, "b"))
        gradient = jnp.einsum("sti,sto->io", x, g)
        return y, lax.with_sharding_constraint(gradient, on(sizes, None, "b"))

    x, w = ((16, 32, 64), ("a", None, "b")), ((64, 128), (None, "b"))
    kinds = check(both, x, w, ((16, 32, 128), ("a", None, "b")), sizes=sizes)
    assert kinds.count("all_gather") == gathers


@pytest.mark.parametrize("result", [(None, None), ("c", None)])
def test_two_contracted_dims_are_two_sums(result: Any) -> None:
    sizes = {"a": 2, "b": 2, "c": 2}

    def matmul(x: Any, w: Any) -> Any:
        y = jnp.einsum("sij,ijo->so", x, w)
        return lax.with_sharding_constraint(y, on(sizes, *result))

    x, w = ((16, 32, 8), (result[0], "a", "b")), ((32, 8, 64), ("a", "b", None))
    assert check(matmul, x, w, sizes=sizes) == ["all_reduce"] * 2


@pytest.mark.parametrize(
    ("x", "w", "kind"),
    [
        # Bytes of the result on one device: fewer than those of `x`, as many, and fewer only
        # because `w` shards it over `a`.
        (((16, 64), ("b", "a")), ((64, 8), (None, None)), "all_reduce"),
        (((32, 8), ("a", "b")), ((8, 8), (None, None)), "all_gather"),
        (((16, 64), (None, "b")), ((64, 96), (None, "a")), "all_reduce"),
    ],
)
def test_smaller_of_a_sum_and_a_gather(x: Operand, w: Operand, kind: str) -> None:
    assert check(lambda x, w: x @ w, x, w) == [kind]


@pytest.mark.parametrize(("rows", "marked"), [(24, True), (32, False)])
def test_scattered_parts_are_whole_tiles(rows: int, marked: bool) -> None:
    """A TPU pads parts of 12 rows, and may permute their edges. Parts of 16 are two tiles."""

    def matmul(x: Any, w: Any) -> Any:
        return lax.with_sharding_constraint(x @ w, on({"a": 2}, "a"))

    operands = [((rows, 64), (None, "a")), ((64, 256), ("a", None))]
    walked = planned(matmul, operands, {"a": 2})
    assert [str(event.kind) for event in walked.events] == ["reduce_scatter"]
    assert bool(walked.choices) is marked


def test_operands_that_differ_in_a_mesh_axis_are_marked() -> None:
    x, y = ((16, 16), ("a", None)), ((16, 16), (None, "a"))
    assert planned(lambda x, y: x + y, [x, y], SIZES).choices
    assert not planned(lambda x, y: x + y, [x, x], SIZES).choices


@pytest.mark.parametrize(
    ("function", "operands"),
    [
        # XLA gathers `x`, since `a` repeats the product. The plan sums, which has fewer bytes.
        (lambda x, w: x @ w, [((16, 64), (None, "b")), ((64, 32), (None, None))]),
        # XLA carries the constraint back through both products, and gathers `w` over `a`.
        (
            lambda x, w, v: lax.with_sharding_constraint((x @ w) @ v, on(SIZES, "a")),
            [
                ((64, 128), (None, None)),
                ((128, 256), ("a", "b")),
                ((256, 64), ("b", "a")),
            ],
        ),
    ],
)
def test_product_that_xla_may_gather_is_marked(function: Any, operands: Any) -> None:
    walked = planned(function, operands, SIZES)
    assert {"dot_general" in each.fix for each in walked.choices} == {True}


def test_sum_is_not_scattered_if_its_dims_are_gathered() -> None:
    """The constraint shards the sum over `b`, and no dim over `a`, which shards the sum now."""

    def layer(x: Any, w: Any) -> Any:
        return lax.with_sharding_constraint(jnp.tanh(x @ w), on(SIZES, None, "b"))

    kinds = check(layer, ((32, 64), ("a", "b")), ((64, 128), ("b", None)))
    assert kinds == ["all_reduce", "all_gather"]


def test_only_a_scattered_sum_stays_partial() -> None:
    """Two sums can be added before they are sent, which two largest elements cannot."""

    def rows(index: Any, x: Any, *, add: bool) -> Any:
        at = jnp.zeros((8, 64)).at[index]
        twice = jnp.zeros((8, 64)).at[index]
        return at.add(x) + twice.add(x) if add else at.max(x) + twice.max(-x)

    operands = ((32,), (None,), INTS), ((32, 64), ("b", None))
    largest = check(lambda index, x: rows(index, x, add=False), *operands)
    assert largest == ["all_reduce"] * 2
    # XLA merges such sums on TPUs, and not on CPUs.
    sums = planned(lambda index, x: rows(index, x, add=True), operands, SIZES)
    assert [(str(event.kind), event.logical_bytes) for event in sums.events] == [
        ("all_reduce", 8 * 64 * 4)
    ]


def test_sums_of_a_scatter_and_of_a_matmul_are_sent_apart() -> None:
    """The gradients of a table that embeds and predicts. TPUs do not merge them either."""

    def tied(index: Any, x: Any, y: Any, z: Any) -> Any:
        return jnp.zeros((8, 64)).at[index].add(x) + jnp.einsum("bv,be->ve", y, z)

    rows = ((32, 64), ("b", None))
    operands = ((32,), ("b",), INTS), rows, ((32, 8), ("b", None)), rows
    assert check(tied, *operands) == ["all_reduce"] * 2


def test_constrained_sums_are_sent_apart_or_together() -> None:
    """As for a weight that is gathered twice. TPUs add the terms first, CPUs do not."""

    def twice(x: Any, y: Any) -> Any:
        first, second = jnp.einsum("be,bm->em", x, y), jnp.einsum("be,bm->em", y, jnp.sin(x))
        whole = on(SIZES, None, None)
        return lax.with_sharding_constraint(first, whole) + lax.with_sharding_constraint(
            second, whole
        )

    rows = ((32, 64), ("b", None))
    assert check(twice, rows, rows, marked=True) == ["all_reduce"] * 2


def test_carry_of_zeros_that_becomes_a_sum() -> None:
    """The body returns a partial sum, with the dims of the zeros. It is completed in each round."""

    def last(x: Any, w: Any) -> Any:
        return lax.scan(lambda _, x: (x @ w, None), jnp.zeros((16, 64)), x)[0]

    operands = ((3, 16, 32), (None, None, "b")), ((32, 64), ("b", None))
    assert check(last, *operands) == ["all_reduce"]


@pytest.mark.parametrize(
    ("old", "new", "entries"),
    [
        ((12, 8), (8, 12), (None, "a")),
        ((12, 8), (8, 12), (None, ("a", "b"))),
        ((16, 24), (24, 16), (None, "b")),
        ((4, 8, 6), (4, 6, 8), ("b", None, "a")),
        ((8, 4, 4), (4, 32), (None, None, "a")),
    ],
)
def test_dim_that_a_reshape_cuts_is_gathered(old: Any, new: Any, entries: Any) -> None:
    kinds = check(lambda x: jnp.tanh(x.reshape(new)), (old, entries), marked=True)
    assert kinds == ["all_gather"]


def test_partial_scalar_that_gets_dims_is_summed() -> None:
    def total(x: Any) -> Any:
        return lax.expand_dims(lax.reshape(jnp.sum(x), (1,)), (0,)) * 2

    assert check(total, ((16, 64), (None, "b"))) == ["all_reduce"]


@pytest.mark.parametrize(("rows", "marked"), [(1, False), (4, True), (64, False)])
def test_writes_of_several_rows_to_a_sharded_dim_are_marked(rows: int, marked: bool) -> None:
    """XLA gathers the operand where the rows may be on two devices, and sends nothing for one."""

    def write(x: Any, update: Any, at: Any) -> Any:
        return jnp.tanh(lax.dynamic_update_slice(x, update, (at, 0)))

    operands = ((64, 32), ("b", None)), ((rows, 32), (None, None)), ((), (), INTS)
    walked = planned(write, operands, SIZES)
    assert bool(walked.choices) == marked
    shardings = [on(SIZES, *each[1]) for each in operands]
    shapes = [shape_of(each, sharding) for each, sharding in zip(operands, shardings, strict=True)]
    compiled = jax.jit(write, out_shardings=on(SIZES, "b")).lower(*shapes).compile()
    assert bool(read_collectives(compiled, sw.create_mesh(SIZES))) == marked
