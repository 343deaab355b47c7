"""Name the dims along which weights are stacked: layers and experts."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.inference.atoms import AtomDim, finest, size_of
from shardwright.inference.evidence import Evidence
from shardwright.inference.facts import Facts, Matmul, TableLookup
from shardwright.inference.names import Names, learned, unnamed
from shardwright.vocabulary.axes import EXPERT, HEAD, HEAD_DIM, LAYERS, VOCAB


def name_layers(names: Names) -> None:
    """Name the dim of stacked layers: a scan over this dim multiplies its carry by weights."""
    for scan in names.facts.scans:
        if scan.is_of_layers:
            names.give(scan.dim, LAYERS, Evidence("scanned over", scan.location), sure=True)


def guess_scanned(names: Names) -> None:
    """Guess the names of the other dims along which scans run over parameters.

    If the scan also runs over activations, such as the weights that a router gives to experts, the
    dim is EXPERT. Otherwise it is LAYERS.
    """
    for scan in names.facts.scans:
        why = Evidence("scanned over, but not as layers", scan.location)
        names.give(scan.dim, EXPERT if scan.is_routed else LAYERS, why, guess=True)


def name_experts(names: Names) -> None:
    """Name the dim along which every expert has weights of its own.

    A router chooses along this dim: by `top_k`, by one-hot rows, by groups of a ragged matmul, or
    by selecting matrices. Any other dim of the same size that a router chooses along is EXPERT too.

    Without a router, a weight that has one matrix per block of a dim is block-diagonal. A gate of
    RG-LRU or xLSTM is such a weight. The guess is that its blocks are heads.
    """
    facts = names.facts
    chosen = {atom for use in facts.top_k if learned(use.dim) for atom in finest(use.dim)}
    experts: list[AtomDim] = []
    for matmul in facts.projections:
        for dim in matmul.batch:
            why = Evidence("every index has a weight of its own", matmul.location)
            atoms = finest(dim)
            is_routed = matmul.groups or any(atom.routed or atom in chosen for atom in atoms)
            blocks = [] if is_routed else _blocks(dim, matmul)
            if blocks:
                names.give(dim, HEAD, why, guess=True)
                for block in blocks:
                    names.give(block, HEAD_DIM, why, guess=True)
                continue
            names.give(dim, EXPERT, why, guess=not is_routed)
            experts += [dim] if is_routed else []
    for matmul in matmuls_of_selected(facts):
        (key,) = matmul.batch
        names.give(key, EXPERT, Evidence("matrices are selected by a router", matmul.location))
        experts.append(key)
    # If a scatter sends the tokens to the experts, no operation relates the dim of the router's
    # scores to the expert dim of the weights. So compare sizes.
    sizes = {
        size_of(finest(dim)) for dim in experts if all(atom.name == EXPERT for atom in finest(dim))
    }
    choices = [(use.dim, use.location, "top_k chooses along it") for use in facts.top_k]
    choices += [(use.dim, use.location, "argmax chooses along it") for use in facts.largest]
    choices += [
        (lookup.key, lookup.location, "rows are selected by a router") for lookup in _routed(facts)
    ]
    for dim, location, reason in choices:
        if learned(dim) and unnamed(dim) and size_of(finest(dim)) in sizes:
            names.give(dim, EXPERT, Evidence(reason, location))


def _blocks(dim: AtomDim, matmul: Matmul) -> list[AtomDim]:
    """Return the contracted dims that come from the same dim of a parameter as `dim`."""
    places = {place for atom in finest(dim) for place in atom.params}
    return [
        each
        for each in matmul.contracted
        if any(not places.isdisjoint(atom.params) for atom in finest(each))
    ]


def guess_chosen(names: Names) -> None:
    """Guess the names of other dims that a router chooses along.

    Selected vectors come from a codebook or a memory, so their table is named like a table of
    tokens.
    """
    for lookup in _routed(names.facts):
        why = Evidence("vectors are selected by activations", lookup.location)
        names.give(lookup.key, VOCAB, why, guess=True)
    for use in names.facts.top_k:
        if learned(use.dim) and unnamed(use.dim):
            why = Evidence("top_k chooses along it", use.location)
            names.give(use.dim, EXPERT, why, guess=True)


def _routed(facts: Facts) -> Iterator[TableLookup]:
    return (
        lookup for lookup in facts.lookups if not lookup.of_data and lookup.depends_on == "both"
    )


def matmuls_of_selected(facts: Facts) -> Iterator[Matmul]:
    """Yield the matmuls with matrices that a router selects, as `Matmul`s with a weight.

    The dim of experts is a batch dim, as in a matmul with the weights of all experts.
    """
    for lookup in _routed(facts):
        row = {atom for dim in lookup.row for atom in finest(dim)}
        for matmul in facts.activations:
            free = (*matmul.left, *matmul.right)
            made = tuple(dim for dim in free if finest(dim) and row.issuperset(finest(dim)))
            # The selected row is a matrix: one of its dims is summed over, and another dim is in
            # the result.
            if made and not row.isdisjoint(
                atom for dim in matmul.contracted for atom in finest(dim)
            ):
                yield Matmul(
                    batch=(lookup.key,),
                    contracted=matmul.contracted,
                    left=tuple(dim for dim in free if dim not in made),
                    right=made,
                    location=matmul.location,
                )
