"""Name dims by how the program uses them.

Rules run in order. The first rule that names a dim decides. A rule that may be wrong marks its
names as guesses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from shardwright.inference.atoms import Atom, AtomDim, finest
from shardwright.inference.evidence import EquationLocation, Evidence
from shardwright.inference.facts import AtomConflict, DimSlice, Facts, Matmul
from shardwright.vocabulary.axes import (
    BATCH,
    EMBED,
    EMPTY,
    HEAD,
    KV_LENGTH,
    LENGTH,
    MLP_INTERMEDIATE,
    QUERY_LENGTH,
)

# The lengths of the residual stream, of queries and of keys. Seeds may use any of these axes, so
# the rules treat all three alike.
LENGTHS: Final = frozenset({LENGTH, QUERY_LENGTH, KV_LENGTH})


class Names:
    """Name dims, and record names that contradict each other."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def give(self, dim: Iterable[Atom], axis: str, evidence: Evidence, **options: bool) -> bool:
        """Name the unnamed factors of a dim. Return whether any factor was named.

        Args:
          dim: The dim. If one of its factors already has another name, no factor is named.
          axis: The name.
          evidence: Why the dim has this name.
          **options: `guess` marks the name as a guess. `sure` records a conflict if a factor has
            another name that is not a guess.
        """
        atoms = finest(dim)
        # The most certain rules run first, so an existing name is more certain than a new one.
        others = [atom for atom in atoms if atom.name not in ("", axis)]
        if others:
            first = others[0]
            if options.get("sure") and not first.guess and first.evidence is not None:
                self.facts.conflicts.append(
                    AtomConflict(
                        params=first.params,
                        first=(first.name, first.evidence),
                        second=(axis, evidence),
                        meeting=None,
                    )
                )
            return False
        unnamed = [atom for atom in atoms if not atom.name]
        for atom in unnamed:
            atom.name, atom.evidence = axis, evidence
            atom.guess = options.get("guess", False)
        return bool(unnamed)


def unnamed(dim: Iterable[Atom]) -> bool:
    """Tell whether a dim has factors, and none of them has a name."""
    atoms = finest(dim)
    return bool(atoms) and not any(atom.name for atom in atoms)


def learned(dim: Iterable[Atom]) -> bool:
    """Tell whether a factor of a dim comes from a parameter."""
    return any(atom.learned for atom in finest(dim))


def name_windows(names: Names) -> None:
    """Name the window dims of a convolution's kernel EMPTY, so that they are replicated."""
    for use in names.facts.windows:
        names.give(use.dim, EMPTY, Evidence("window of a convolution", use.location))


def name_residual(names: Names) -> None:
    """Name the residual stream EMBED, unless a dim already has this name from a table of tokens."""
    outputs, summed = outputs_of(names.facts.projections), summed_over(names.facts.projections)
    if any(atom.name == EMBED for atom in (*outputs, *summed)):
        return
    links = [atom for atom in outputs if atom in summed and not atom.name]
    streams = [atom for atom in links if atom.residual]
    if streams or links:
        # The dim of a latent or of a low rank also links weights, but only a few. All blocks read
        # the residual stream.
        stream = max(streams or links, key=lambda atom: len(atom.params))
        why = Evidence("the residual stream: most weights read or write it", outputs[stream])
        names.give((stream,), EMBED, why, guess=not streams)


def name_hidden(names: Names) -> None:
    """Name the hidden dims of an MLP.

    A weight maps EMBED to a hidden dim, an activation function is applied to it, and another weight
    maps it to EMBED. Attention looks similar: its softmax is also nonlinear, and the operand of the
    softmax has heads, which come from a weight. But the matmul with the weight after attention sums
    over two factors, heads and head dims. So as the second matmul of an MLP, only a matmul that
    sums over a single factor counts.
    """
    projections = names.facts.projections
    outputs = outputs_of([matmul for matmul in projections if _has(matmul.contracted, EMBED)])
    summed = summed_over(
        matmul
        for matmul in projections
        if _has(matmul.right, EMBED) and sum(len(finest(dim)) for dim in matmul.contracted) == 1
    )
    for atom, location in with_slices(outputs, names.facts.slices).items():
        if atom in summed and not atom.name and atom.nonlinear:
            reason = "from EMBED through an activation function to EMBED"
            names.give((atom,), MLP_INTERMEDIATE, Evidence(reason, location))


def guess_links(names: Names) -> None:
    """Guess the name of each dim that comes from one weight and is contracted with another one.

    The first of these cases that fits decides:

    - The dim is in a residual addition, and queries or keys are computed from it: EMBED, another
      residual stream.
    - An activation function is applied to the dim: MLP_INTERMEDIATE.
    - The dim is in a residual addition: EMBED.
    - Otherwise: EMPTY, which replicates the dim. It is probably a low rank.
    """
    projections = names.facts.projections
    outputs, summed = outputs_of(projections), summed_over(projections)
    read_by_heads = summed_over(each for each in projections if _has(each.right, HEAD))
    for atom, location in with_slices(outputs, names.facts.slices).items():
        if atom not in summed or atom.name:
            continue
        axis, what = EMPTY, "a low rank"
        if atom.residual and atom in read_by_heads:
            axis, what = EMBED, "another residual stream, which attention reads"
        elif atom.nonlinear:
            axis, what = MLP_INTERMEDIATE, "with an activation function"
        elif atom.residual:
            axis, what = EMBED, "another residual stream"
        why = Evidence(f"between two weights: {what}", location)
        names.give((atom,), axis, why, guess=True)


def with_slices(
    outputs: Mapping[Atom, EquationLocation], slices: Iterable[DimSlice]
) -> dict[Atom, EquationLocation]:
    """Return `outputs`, and the slices of its atoms. A slice has the equation of its atom."""
    every = dict(outputs)
    # Slices are in program order, so each slice comes before the slices that are cut from it. One
    # pass is enough.
    for dim_slice in slices:
        for atom in finest(dim_slice.whole):
            if atom in every:
                every |= dict.fromkeys(finest(dim_slice.dim), every[atom])
    return every


def _has(dims: Iterable[AtomDim], axis: str) -> bool:
    return any(atom.name == axis for dim in dims for atom in finest(dim))


def outputs_of(projections: Iterable[Matmul]) -> dict[Atom, EquationLocation]:
    """Return the output dims of weights, each with the first matmul that makes the dim."""
    outputs: dict[Atom, EquationLocation] = {}
    for matmul in projections:
        for dim in matmul.right:
            for atom in finest(dim):
                outputs.setdefault(atom, matmul.location)
    return outputs


def summed_over(projections: Iterable[Matmul]) -> set[Atom]:
    """Return the dims over which matmuls with weights sum, except the batch."""
    return {
        atom
        for matmul in projections
        for dim in matmul.contracted
        for atom in finest(dim)
        if atom.name != BATCH
    }


def name_rows(names: Names, dims: Iterable[AtomDim]) -> None:
    """Name a dim of a parameter EMPTY if the program takes single elements along it.

    For a whole dim, the name is a guess, because the dim may be LAYERS. For a factor of a dim, such
    as the 3 in `3 * heads * head_dim`, the name is certain: the factor is the number of fused
    weights.
    """
    factors = {atom for dim in dims if len(finest(dim)) > 1 for atom in finest(dim)}
    for use in names.facts.rows:
        atoms = finest(use.dim)
        if unnamed(use.dim) and all(atom.params for atom in atoms):
            why = Evidence("single rows are taken", use.location)
            names.give(use.dim, EMPTY, why, guess=not factors.issuperset(atoms))
