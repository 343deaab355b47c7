"""Read the axes that the caller gives: `seeds` for inputs, and `sizes` for dims of parameters."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from shardwright.errors import Problem, RankMismatchError, StrategyError, raise_problems
from shardwright.inference.atoms import Atom, AtomDim, AtomDims, finest, new_dim, size_of
from shardwright.inference.evidence import Evidence
from shardwright.inference.facts import ActivationOrigin
from shardwright.inference.names import Names
from shardwright.inference.spelling import Spelled
from shardwright.inference.step import ArrayFacts
from shardwright.trees.paths import path_text
from shardwright.vocabulary.axes import canonical_axis
from shardwright.vocabulary.integers import read_integer
from shardwright.vocabulary.merged_dims import MergedDim, axis_text

# If the number of seeds is wrong, the error lists at most this many arrays.
_LISTED: Final = 12


def read_seeds(inputs: Sequence[Any], seeds: Any) -> list[ArrayFacts]:
    """Return what is known about each array of the inputs: its dims, with names from the seeds.

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
            fix="write one name per dim; if a dim flattens several axes, write their sizes too: "
            "merged((BATCH, 8), (LENGTH, 32))",
        )
    if axis.size != size:
        raise StrategyError(
            f"seed {at} has {axis.size} elements in {axis.members}, the dim has {size}",
            fix="write sizes whose product is the size of the dim",
        )
    return tuple(Atom(count, name=name, evidence=why) for name, count in axis.members)


_FIX: Final = 'write sizes={11008: "MLP_INTERMEDIATE"} or {"layers/*/gate dim 0": "HEAD"}'
_BY_PLACE: Final = "its place is in sizes"


@dataclasses.dataclass(frozen=True, slots=True)
class GivenSizes:
    """Axes by the size of a dim, and by its place.

    A place is a pair: the number of a parameter, and the number of a dim of this parameter.
    """

    by_size: Mapping[int, str]
    by_place: Mapping[tuple[int, int], str]

    def name(self, names: Names, params: Sequence[AtomDims]) -> None:
        """Give the caller's names to factors of dims that have no name or only a guessed name.

        Raises:
          StrategyError: A size fits no dim of a parameter, and no factor of such a dim.
        """
        unmet = dict(self.by_size)
        for leaf, dims in enumerate(params):
            for at, dim in enumerate(dims):
                atoms = finest(dim)
                whole = self.by_place.get((leaf, at)) if len(atoms) == 1 else None
                for atom in atoms:
                    unmet.pop(atom.size, None)
                    axis, reason = self._given(whole, atom.size)
                    if axis is None:
                        continue
                    # `give` names only dims without a name. So drop guesses first: the caller knows
                    # better.
                    if atom.guess:
                        atom.name, atom.guess = "", False
                    names.give((atom,), axis, Evidence(reason))
        whole_sizes = {size_of(finest(dim)) for dims in params for dim in dims}
        problems = [
            Problem(
                error=StrategyError,
                what=f"no dim of a parameter has the size {size}",
                path="sizes",
                fix=_FIX,
            )
            for size in unmet
            if size not in whole_sizes
        ]
        raise_problems(problems)

    def spell(self, leaf: int, row: Sequence[Spelled], shape: Sequence[int]) -> list[Spelled]:
        """Replace entries that have no name, or a guessed name, by the axes that the caller gives.

        A dim of several factors, such as heads times head dims, gets its axis here, and not in
        `name`: a name of its factors would name other dims too.

        Raises:
          StrategyError: The program gives another axis to a dim that `sizes` names by its path.
        """
        entries = list(row)
        for at, (entry, size) in enumerate(zip(row, shape, strict=True)):
            place = self.by_place.get((leaf, at))
            axis, reason = self._given(place, size)
            if axis is not None and (entry.guess or entry.is_open):
                entries[at] = Spelled(axis, Evidence(reason))
            # `spelling.spell` may rename the EMBED of a vector to NORM. Then the axis that the
            # caller gives by place differs from the axis of the entry, but does not contradict it.
            elif place not in (None, entry.axis) and entry.evidence.reason != _BY_PLACE:
                raise StrategyError(
                    f"sizes gives dim {at} the axis {axis_text(place)}, but the program uses it as "
                    f"{axis_text(entry.axis)}: {entry.evidence}",
                    path="sizes",
                    fix="leave this dim out of sizes",
                )
        return entries

    def _given(self, place: str | None, size: int) -> tuple[str | None, str]:
        """Return the axis that the caller gives to a dim, by place or else by size, and why."""
        if place is not None:
            return place, _BY_PLACE
        return self.by_size.get(size), f"size {size} is in sizes"


def read_sizes(sizes: Any, paths: Sequence[str], shapes: Sequence[Sequence[int]]) -> GivenSizes:
    """Read the argument `sizes=`.

    Args:
      sizes: The value of the argument.
      paths: Path of each parameter.
      shapes: Shape of each parameter.

    Raises:
      StrategyError: `sizes` is not a mapping, a key is neither a size nor the place of a dim, or no
        parameter has a dim at this place.
    """
    if not isinstance(sizes, Mapping):
        raise StrategyError(
            f"sizes is {type(sizes).__name__}, not a mapping", path="sizes", fix=_FIX
        )
    by_size: dict[int, str] = {}
    by_place: dict[tuple[int, int], str] = {}
    for key, axis in sizes.items():
        if not isinstance(key, str):
            size = read_integer("sizes", key, error=StrategyError, fix=_FIX)
            by_size[size] = canonical_axis(axis)
            continue
        pattern, found, dim = key.rpartition(" dim ")
        places = {
            (leaf, int(dim)): canonical_axis(axis)
            for leaf, path in enumerate(paths)
            if found and dim.isdecimal()
            if pattern == (path or "(root)") or fnmatch.fnmatchcase(path, pattern)
            if int(dim) < len(shapes[leaf])
        }
        if not places:
            raise StrategyError(
                f"no parameter has the dim {key!r:.80}",
                path="sizes",
                fix=f"{_FIX}; * matches any text",
            )
        by_place |= places
    return GivenSizes(by_size, by_place)
