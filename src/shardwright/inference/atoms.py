"""Dims as ordered factors, and which dims are the same.

A dim is a tuple of atoms, the major atom first. An atom is split if another part of the program
uses its factors, as in a reshape from `heads * head_dim` to `(heads, head_dim)`. If an operation
aligns two atoms, they are in one class, as in union-find.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from shardwright.dims.table import equal_products
from shardwright.inference.evidence import Evidence


# Atoms are compared and hashed by identity, because two dims of equal size may be different dims.
@dataclasses.dataclass(slots=True, eq=False)
class Atom:
    """One factor of a dim.

    Attributes:
      size: Number of elements.
      name: Axis, or empty if it has no name yet.
      evidence: Why it has this name.
      guess: Whether a default rule chose the name.
      whole: The dim that this atom is a slice of, or None.
      learned: Whether it is a factor of a parameter's dim, or of a slice of such a dim.
      counts: Whether the numbers of an iota increase along it.
      nonlinear: Whether an activation function was applied to it.
      residual: Whether it is a dim of a residual addition, `x + f(x)`.
      routed: Whether activations choose elements along it, by one-hot rows or by a scatter.
      given: Whether it is a dim of an input.
      resized: Whether it is the result of an operation on activations that changes the size of a
        dim, such as a stride or a concatenation.
      is_shards: Whether it counts the shards of a `shard_map`. If so, this factor and the next
        factor are one dim, with one name.
      params: The dims of parameters that it is part of, as pairs (number of the parameter, number
        of the dim).
      parts: Its (major, minor) factors, or None if it is not split.
      same: The next atom on the way to the representative of its class, or None if it is the
        representative itself.
    """

    size: int
    name: str = ""
    evidence: Evidence | None = None
    guess: bool = False
    whole: AtomDim | None = None
    learned: bool = False
    counts: bool = False
    nonlinear: bool = False
    residual: bool = False
    routed: bool = False
    given: bool = False
    resized: bool = False
    is_shards: bool = False
    params: frozenset[tuple[int, int]] = frozenset()
    parts: tuple[Atom, Atom] | None = None
    same: Atom | None = None

    def split(self, major: int, *, keep_name: bool = False) -> None:
        """Split into factors of sizes (major, size // major).

        The factors inherit the flags and the `params` of this atom.

        Args:
          major: Size of the first factor.
          keep_name: Give both factors the name of this atom, and set `is_shards` of the first one.
            By default the factors have no name.
        """
        self.parts = (self._factor(major), self._factor(self.size // major))
        if keep_name:
            for part in self.parts:
                part.name, part.evidence, part.guess = self.name, self.evidence, self.guess
            self.parts[0].is_shards = True

    def _factor(self, size: int) -> Atom:
        return Atom(
            size,
            learned=self.learned,
            counts=self.counts,
            nonlinear=self.nonlinear,
            residual=self.residual,
            routed=self.routed,
            given=self.given,
            resized=self.resized,
            is_shards=self.is_shards,
            params=self.params,
        )

    def absorb(self, other: Atom) -> None:
        """Merge another atom into this one, and take over what is known about the other atom."""
        if not self.name:
            self.name, self.evidence, self.guess = other.name, other.evidence, other.guess
        self.whole = self.whole or other.whole
        self.learned |= other.learned
        self.counts |= other.counts
        self.nonlinear |= other.nonlinear
        self.residual |= other.residual
        self.routed |= other.routed
        self.given |= other.given
        self.resized |= other.resized
        self.is_shards |= other.is_shards
        self.params |= other.params
        other.same = self


AtomDim = tuple[Atom, ...]
AtomDims = tuple[AtomDim, ...]


def new_dim(size: int) -> AtomDim:
    """Return a dim about which nothing is known."""
    return (Atom(size),)


def new_dims(shape: Iterable[int]) -> AtomDims:
    """Return the dims of an array about which nothing is known."""
    return tuple(new_dim(size) for size in shape)


def finest(dim: Iterable[Atom]) -> list[Atom]:
    """Return the finest known factors of a dim, each the representative of its class.

    Factors of size 1 are left out, since they do not change the order of the elements.
    """
    factors: list[Atom] = []
    for member in dim:
        atom = member
        # Follow `same` first: only the last atom, the representative, may have `parts`.
        while atom.same is not None:
            atom = atom.same
        if atom.parts is not None:
            factors += finest(atom.parts)
        elif atom.size != 1:
            factors.append(atom)
    return factors


def size_of(dim: Iterable[Atom]) -> int:
    """Return the number of elements of a dim."""
    size = 1
    for atom in dim:
        size *= atom.size
    return size


def unify(left: AtomDim, right: AtomDim, on_conflict: Callable[[Atom, Atom], None]) -> None:
    """Record that two dims are the same.

    Args:
      left: A dim.
      right: Another dim. Nothing is recorded if the sizes differ.
      on_conflict: Called for two atoms with different names, which are not united.
    """
    if left == right:
        return
    lefts, rights = finest(left), finest(right)
    if lefts == rights or size_of(lefts) != size_of(rights):
        return
    while lefts and rights:
        first, second = lefts[0], rights[0]
        if first is not second and first.size != second.size:
            larger, smaller = (first, second) if first.size > second.size else (second, first)
            if larger.size % smaller.size or (larger.name and not smaller.is_shards):
                # A named factor, such as HEAD_DIM, is not split, except by a `shard_map`. So these
                # two factors differ, and nothing is known about the factors after them.
                return
            # Factors are major first, so the larger atom begins with the smaller one.
            larger.split(smaller.size, keep_name=smaller.is_shards)
            # The split atom may occur again further to the right, on either side, so compute both
            # lists again.
            lefts, rights = finest(lefts), finest(rights)
            continue
        if first is not second:
            if first.name and second.name and first.name != second.name:
                on_conflict(first, second)
                return
            # Read both `whole`s before `absorb`, which keeps only one of the two.
            wholes = first.whole, second.whole
            first.absorb(second)
            if wholes[0] is not None and wholes[1] is not None:
                # If two slices are one dim, the dims that they are cut from are one dim too.
                unify(wholes[0], wholes[1], on_conflict)
        lefts, rights = lefts[1:], rights[1:]


def regroup(dims: Sequence[AtomDim], shape: Sequence[int]) -> AtomDims:
    """Return the dims of an array after a reshape, which keeps the order of all factors.

    A factor that belongs to two of the new dims is split. If it cannot be split, nothing is known
    about the new dims of its group.
    """
    regrouped: list[AtomDim] = []
    for before, after in equal_products([size_of(dim) for dim in dims], shape):
        # A reshape mixes factors only inside a group of neighboring dims: the sizes of the group
        # have the same product before and after the reshape.
        factors = finest([atom for at in before for atom in dims[at]])
        regrouped += _cut(factors, [shape[at] for at in after])
    return tuple(regrouped)


def _cut(factors: list[Atom], shape: Sequence[int]) -> Sequence[AtomDim]:
    """Return dims of these sizes, made of factors in order.

    If the factors cannot be cut into these sizes, all dims are new.
    """
    cut: list[AtomDim] = []
    for size in shape:
        members: list[Atom] = []
        while (missing := size // size_of(members)) > 1:
            if not factors:
                return new_dims(shape)
            first = factors[0]
            if missing % first.size == 0:
                members.append(first)
                factors = factors[1:]
            elif first.size % missing or first.name:
                return new_dims(shape)  # a named factor is not split
            else:
                first.split(missing)
                factors = finest(factors)
        cut.append(tuple(members))
    return cut
