"""Read the seeds of inference: the axes of the inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shardwright.errors import RankMismatchError, StrategyError
from shardwright.inference.atoms import Atom, Dim, new_dim
from shardwright.inference.evidence import Evidence
from shardwright.inference.roots import Root
from shardwright.inference.step import Value
from shardwright.vocabulary.axes import canonical_axis
from shardwright.vocabulary.merged_dims import MergedDim


def read_seeds(shapes: Sequence[tuple[int, ...]], seeds: Any) -> list[Value]:
    """Return the inputs, with the names of the seeds.

    Raises:
      StrategyError: There are not as many seeds as arrays, or a seed is not a tuple of axes.
      RankMismatchError: A seed does not have one axis per dim.
    """
    if not isinstance(seeds, (tuple, list)):
        raise StrategyError(
            f"seeds is {type(seeds).__name__}, not a list",
            path="seeds",
            fix="pass one entry per array, such as seeds=[(BATCH, LENGTH), None]",
        )
    if len(seeds) != len(shapes):
        raise StrategyError(
            f"{len(seeds)} seeds for {len(shapes)} arrays of the inputs",
            fix="pass one entry per array, such as seeds=[(BATCH, LENGTH), None]",
        )
    return [_seeded(at, *pair) for at, pair in enumerate(zip(shapes, seeds, strict=True))]


def _seeded(at: int, shape: tuple[int, ...], seed: Any) -> Value:
    if seed is not None and not isinstance(seed, (tuple, list)):
        raise StrategyError(
            f"seed {at} is {seed!r}, not a tuple of axes",
            fix="write one axis per dim, such as (BATCH, LENGTH), or None for the array",
        )
    if seed is not None and len(seed) != len(shape):
        raise RankMismatchError(
            f"seed {at} has {len(seed)} axes, the array has shape {tuple(shape)}",
            fix="write one axis per dim, and None for a dim of unknown axis",
        )
    entries = [None] * len(shape) if seed is None else seed
    dims = tuple(_dim(at, *pair) for pair in zip(shape, entries, strict=True))
    for atom in _atoms(dims):
        atom.given = True
    return Value(dims=dims, data=True, root=Root(), inputs=frozenset({at}))


def _dim(at: int, size: int, axis: Any) -> Dim:
    if axis is None:
        return new_dim(size)
    why = Evidence(f"seed of input {at}")
    if isinstance(axis, str):
        return (Atom(size, name=canonical_axis(axis), evidence=why),)
    if not isinstance(axis, MergedDim):
        raise StrategyError(
            f"seed {at} has the axis {axis!r}, which is not the name of one axis",
            fix="write one name per dim; for a dim that flattens several, write their sizes too: "
            "merged((BATCH, 8), (LENGTH, 32))",
        )
    if axis.size != size:
        raise StrategyError(
            f"seed {at} has {axis.size} elements in {axis.members}, the dim has {size}",
            fix="write the sizes that the dim flattens",
        )
    return tuple(Atom(count, name=name, evidence=why) for name, count in axis.members)


def _atoms(dims: Iterable[Dim]) -> list[Atom]:
    return [atom for dim in dims for atom in dim]
