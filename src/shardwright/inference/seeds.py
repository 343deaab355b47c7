"""Read the seeds of inference: the axes of the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np

from shardwright.errors import RankMismatchError, StrategyError
from shardwright.inference.atoms import Atom, AtomDim, new_dim
from shardwright.inference.evidence import Evidence
from shardwright.inference.origins import ActivationOrigin
from shardwright.inference.step import ArrayFacts
from shardwright.trees.paths import path_text
from shardwright.vocabulary.axes import canonical_axis
from shardwright.vocabulary.merged_dims import MergedDim

# Arrays that the refusal of a wrong number of seeds lists.
_LISTED: Final = 12


def read_seeds(inputs: Sequence[Any], seeds: Any) -> list[ArrayFacts]:
    """Return the arrays of the inputs, with the names of the seeds.

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
    leaves, _ = jax.tree_util.tree_flatten_with_path(tuple(inputs))
    arrays = [(path_text(path), np.shape(leaf)) for path, leaf in leaves]
    if len(seeds) != len(arrays):
        listed = [f"{path} {shape}" for path, shape in arrays[:_LISTED]]
        more = [f"{len(arrays) - _LISTED} more"] if len(arrays) > _LISTED else []
        raise StrategyError(
            f"{len(seeds)} seeds for {len(arrays)} arrays of the inputs, by number and path: "
            + "; ".join(listed + more),
            fix="pass one entry per array, such as seeds=[(BATCH, LENGTH), None]",
        )
    pairs = zip(arrays, seeds, strict=True)
    return [_seeded(at, shape, seed) for at, ((_, shape), seed) in enumerate(pairs)]


def _seeded(at: int, shape: tuple[int, ...], seed: Any) -> ArrayFacts:
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
    for dim in dims:
        for atom in dim:
            atom.given = True
    return ArrayFacts(dims=dims, data=True, origin=ActivationOrigin(), inputs=frozenset({at}))


def _dim(at: int, size: int, axis: Any) -> AtomDim:
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
