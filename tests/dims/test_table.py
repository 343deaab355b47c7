"""The table of dims against the primitives themselves, evaluated by JAX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardwright.dims.table import Correspondence, FactorRole, FactorsByDim, correspondence

ROWS = lax.GatherDimensionNumbers((1,), (0,), (0,))
BATCHES = lax.GatherDimensionNumbers((2,), (1,), (1,), (0,), (0,))
ADDED = lax.ScatterDimensionNumbers((1,), (0,), (0,))
BATCHED = lax.ScatterDimensionNumbers((2,), (1,), (1,), (0,), (0,))
# Programs of one equation. The second operand of a gather or a scatter has the indices.
CASES: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "tanh": (jnp.tanh, ((4, 6),)),
    "add": (lax.add, ((4, 6), (4, 6))),
    "clamp by scalars": (lax.clamp, ((), (4, 6), ())),
    "convert": (lambda x: x.astype(jnp.bfloat16), ((4, 6),)),
    "neg": (lax.neg, ((4, 6),)),
    "transpose": (lambda x: x.transpose(2, 0, 1), ((2, 3, 4),)),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (2, 3, 4), (0, 2)), ((2, 4),)),
    "broadcast of a dim": (lambda x: lax.broadcast_in_dim(x, (2, 4), (0, 1)), ((2, 1),)),
    "broadcast to dims of 1": (lambda x: lax.broadcast_in_dim(x, (2, 1, 4), (0, 2)), ((2, 4),)),
    "join": (lambda x: lax.reshape(x, (8, 3)), ((2, 4, 3),)),
    "split a dim": (lambda x: lax.reshape(x, (2, 4, 3)), ((8, 3),)),
    "move a boundary": (lambda x: lax.reshape(x, (16, 8)), ((8, 16),)),
    "no common factor": (lambda x: lax.reshape(x, (5, 3, 8)), ((5, 4, 6),)),
    "some common factors": (lambda x: lax.reshape(x, (8, 12)), ((12, 8),)),
    "dims of 1": (lambda x: lax.reshape(x, (1, 8, 1, 3)), ((2, 1, 4, 3),)),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), ((2, 1, 3),)),
    "expand_dims": (lambda x: lax.expand_dims(x, (0, 2)), ((2, 3),)),
    "sum": (lambda x: lax.reduce_sum_p.bind(x, axes=(0, 2), out_sharding=None), ((2, 3, 4),)),
    "max": (lambda x: lax.reduce_max_p.bind(x, axes=(1,), out_sharding=None), ((2, 3, 4),)),
    "argmax": (lambda x: lax.argmax(x, 1, jnp.int32), ((2, 3, 4),)),
    "reduce": (lambda x, y: lax.reduce(x, y, lambda a, b: a + b * 2, (1,)), ((2, 3, 4), ())),
    "slice": (lambda x: x[:, 1:3], ((4, 3),)),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (0, 1), (4, 2)), ((4, 3),)),
    "pad": (lambda x, y: lax.pad(x, y, ((0, 0, 0), (1, 0, 0))), ((4, 3), ())),
    "pad that shifts": (lambda x, y: lax.pad(x, y, ((1, -1, 0), (0, 0, 0))), ((4, 3), ())),
    "concatenate": (lambda x, y: lax.concatenate((x, y), 1), ((4, 3), (4, 2))),
    "stack": (lambda x, y: lax.stack((x, y), 1), ((4, 3), (4, 3))),
    "dynamic_update_slice": (lambda x, y: lax.dynamic_update_slice(x, y, (0, 1)), ((4, 3), (4, 2))),
    "split": (lambda x: lax.split(x, (1, 2), 1), ((4, 3),)),
    "top_k": (lambda x: lax.top_k(x, 2), ((4, 3),)),
    "tile": (lambda x: jnp.tile(x, (1, 3)), ((4, 3),)),
    "unstack": (lambda x: lax.unstack(x, 1), ((4, 3, 2),)),
    "matmul": (
        lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))),
        ((2, 3, 4), (2, 4, 5)),
    ),
    "gather": (lambda x, at: lax.gather(x, at, ROWS, (1, 3), mode="clip"), ((4, 3), (5, 1))),
    "gather of parts": (
        lambda x, at: lax.gather(x, at, ROWS, (1, 2), mode="clip"),
        ((4, 3), (5, 1)),
    ),
    "gather of batches": (
        lambda x, at: lax.gather(x, at, BATCHES, (1, 1, 3), mode="clip"),
        ((2, 4, 3), (2, 5, 1)),
    ),
    "scatter-add": (
        lambda x, at, y: lax.scatter_add(x, at, y, ADDED, mode="clip"),
        ((4, 3), (5, 1), (5, 3)),
    ),
    "scatter-add of batches": (
        lambda x, at, y: lax.scatter_add(x, at, y, BATCHED, mode="clip"),
        ((2, 4, 3), (2, 5, 1), (2, 5, 3)),
    ),
    "scatter-max": (
        lambda x, at, y: lax.scatter_max(x, at, y, ADDED, mode="clip"),
        ((4, 3), (5, 1), (5, 3)),
    ),
    "cumsum": (lambda x: lax.cumsum(x, 1), ((2, 3, 4),)),
    "sort": (lambda x, y: lax.sort((x, y), dimension=0), ((4, 3), (4, 3))),
    "rev": (lambda x: lax.rev(x, (0,)), ((4, 3),)),
}

# Programs that may run on the terms of a sum.
ADDS = {
    *("add", "convert", "neg", "transpose", "broadcast to dims of 1", "join", "split a dim"),
    *("move a boundary", "no common factor", "some common factors", "dims of 1"),
    *("squeeze", "expand_dims"),
}
# Dims of the first operand and of the first result that need elements of other shards.
CHANGED = {
    "no common factor": (1, 2),
    "some common factors": (0, 1),
    **dict.fromkeys(
        ["slice", "dynamic_slice", "pad", "concatenate", "split", "top_k", "tile", "unstack"],
        (1,),
    ),
    **dict.fromkeys(["gather of parts", "cumsum", "dynamic_update_slice"], (1,)),
    **dict.fromkeys(["pad that shifts", "sort", "rev"], (0,)),
}


def known_of(name: str) -> tuple[Correspondence, Any, list[Any]]:
    function, shapes = CASES[name]
    arrays = [
        np.random.default_rng(at).normal(size=shape).astype(np.float32)
        for at, shape in enumerate(shapes)
    ]
    if "ather" in name or "catter" in name:
        arrays[1] = np.random.default_rng(1).integers(0, 4, shapes[1])
    (equation,) = jax.make_jaxpr(function)(*arrays).jaxpr.eqns
    known = correspondence(equation)
    assert known is not None
    return known, jax.jit(function), arrays


def slices(shape: tuple[int, ...], side: FactorsByDim, known: Correspondence, factor: int) -> Any:
    """Return the numbers of the elements at each index of a factor, or None if it has no dim."""
    axes = [(each, known.sizes[each]) for factors in side for each in factors or (-1,)]
    if factor not in (each for each, _ in axes):
        return None
    whole = iter(shape)
    sizes = []
    for factors in side:
        size = next(whole)
        sizes += [known.sizes[each] for each in factors] or [size]
    position = [each for each, _ in axes].index(factor)
    numbers = np.arange(int(np.prod(shape))).reshape(sizes)
    return [np.take(numbers, at, axis=position).ravel() for at in range(known.sizes[factor])]


def changes(function: Any, arrays: list[Any], at: int, elements: Any) -> Iterator[set[int]]:
    """Yield the elements of each result that depend on some elements of an operand."""
    other = [array.copy() for array in arrays]
    other[at].flat[elements] = 3 - np.arange(len(elements))
    pairs = zip(jax.tree.leaves(function(*arrays)), jax.tree.leaves(function(*other)), strict=True)
    for before, after in pairs:
        yield {*np.flatnonzero(np.asarray(before).ravel() != np.asarray(after).ravel()).tolist()}


@pytest.mark.parametrize("name", CASES)
def test_parts_of_results_depend_on_equal_parts_of_operands(name: str) -> None:
    known, function, arrays = known_of(name)
    results = [np.asarray(leaf) for leaf in jax.tree.leaves(function(*arrays))]
    for factor, role in enumerate(known.roles):
        if role is FactorRole.CHANGED:
            continue
        # Operands after the arrays are literals.
        for at, side in enumerate(known.operands[: len(arrays)]):
            parts = slices(arrays[at].shape, side, known, factor)
            for number, elements in enumerate(parts or ()):
                found = changes(function, arrays, at, elements)
                for result, own, changed in zip(results, known.results, found, strict=True):
                    of_result = slices(result.shape, own, known, factor)
                    if role is FactorRole.KEPT:
                        assert changed <= {*of_result[number].tolist()}
                    elif role is not FactorRole.PICKED:
                        assert of_result is None


@pytest.mark.parametrize("name", CASES)
def test_partial_sums_pass_where_the_table_says(name: str) -> None:
    known, function, arrays = known_of(name)
    assert known.adds == (name in ADDS)
    # Integers, whose sums are exact.
    first, second = ([np.round(array * at) for array in arrays] for at in (3, 5))
    if known.adds:
        total = function(*(a + b for a, b in zip(first, second, strict=True)))
        np.testing.assert_array_equal(total, function(*first) + function(*second))


@pytest.mark.parametrize("name", CASES)
def test_only_dims_that_need_other_shards_are_changed(name: str) -> None:
    known, _, _ = known_of(name)
    changed = {factor for factor, role in enumerate(known.roles) if role is FactorRole.CHANGED}
    # The dim that `unstack` needs whole is none of the results.
    for side, dims in (
        (known.operands[0], CHANGED),
        (known.results[0], {**CHANGED, "unstack": ()}),
    ):
        found = tuple(dim for dim, factors in enumerate(side) if changed & {*factors})
        assert found == dims.get(name, ())


def test_reshape_by_hand() -> None:
    known, _, _ = known_of("some common factors")
    assert known.operands == (((0, 1), (2,)),)
    assert known.results == (((0, 3), (4,)),)
    assert known.sizes == (4, 3, 8, 2, 12)
    assert known.roles == (FactorRole.KEPT, *[FactorRole.CHANGED] * 4)
