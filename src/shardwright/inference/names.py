"""Name dims by how the program uses them.

Rules run in order. The first rule that names a dim decides. A rule that may be wrong marks its
names as guesses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardwright.inference.atoms import Atom, Dim, finest
from shardwright.inference.evidence import Evidence, Site
from shardwright.inference.facts import Clash, Facts, Lookup, Piece, Product
from shardwright.inference.step import Value
from shardwright.vocabulary.axes import (
    BATCH,
    EMBED,
    EMPTY,
    EXPERT,
    HEAD,
    KV_LENGTH,
    LAYERS,
    LENGTH,
    MLP_INTERMEDIATE,
    QUERY_LENGTH,
    VOCAB,
)

# The names of positions.
LENGTHS = frozenset({LENGTH, QUERY_LENGTH, KV_LENGTH})
# A table with at most 1/8 of the rows of the largest table holds types or positions, not tokens.
_SMALL_TABLE = 8


class Names:
    """Name dims, and record names that contradict each other."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def give(self, dim: Iterable[Atom], axis: str, evidence: Evidence, **options: bool) -> bool:
        """Name the unnamed factors of a dim; return whether one was named.

        Args:
          dim: The dim. If a factor has another name already, nothing is named.
          axis: The name.
          evidence: Why.
          **options: `guess` marks the name as a guess. `sure` records a conflict if a factor has
            another name that is not a guess.
        """
        atoms = finest(dim)
        others = [atom for atom in atoms if atom.name not in ("", axis)]
        if others:
            first = others[0]
            if options.get("sure") and not first.guess and first.evidence is not None:
                self.facts.conflicts.append(
                    Clash(
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


def name_tables(names: Names, result: Value | None, *, has_other_inputs: bool) -> None:
    """Name the dims of tables that are looked up by tokens.

    That the inputs are tokens is certain if the logits count along the same dim, or along as many
    elements as one of the tables has rows. It is also certain if there is no other table and no
    other input, and the inputs have a length. Otherwise VOCAB is a guess, because the inputs may be
    positions, steps of diffusion or classes.
    """
    lookups = [lookup for lookup in names.facts.lookups if not lookup.of_data]
    tables = [lookup for lookup in lookups if lookup.depends_on == "inputs"]
    ends = [] if result is None or not result.dims else finest(result.dims[-1])
    keys = {tuple(finest(lookup.key)): _rows(lookup) for lookup in tables}
    is_alone = len(keys) == 1 and not has_other_inputs
    for lookup in tables:
        key = tuple(finest(lookup.key))
        is_tied = list(key) == ends
        counts = len(ends) == 1 and ends[0].learned and ends[0].size == keys[key]
        is_counted = counts and [*keys.values()].count(keys[key]) == 1
        has_length = any(atom.name in LENGTHS for dim in lookup.index for atom in finest(dim))
        is_certain = is_tied or is_counted or (is_alone and has_length)
        _name_table(names, lookup, tables, guess=not is_certain)


def name_other_tables(names: Names) -> None:
    """Name the dims of tables that are looked up by positions, by constants or by a router."""
    for lookup in (lookup for lookup in names.facts.lookups if not lookup.of_data):
        if lookup.depends_on == "both":
            # A selected row of one dim may belong to a codebook or to a memory.
            is_guess = len(lookup.row) < 2
            why = Evidence("rows are selected by a router", lookup.site)
            names.give(lookup.key, EXPERT, why, guess=is_guess)
        elif lookup.depends_on == "neither":
            _name_positions(names, lookup)


def _name_table(names: Names, lookup: Lookup, tables: Sequence[Lookup], *, guess: bool) -> None:
    largest = max(_rows(other) for other in tables)
    is_small = _rows(lookup) * _SMALL_TABLE <= largest
    if is_small:
        why = Evidence("a smaller table, looked up by the inputs", lookup.site)
        names.give(lookup.key, EMPTY, why, guess=True)
    else:
        why = Evidence("a table looked up by the inputs", lookup.site)
        names.give(lookup.key, VOCAB, why, sure=not guess, guess=guess)
    for dim in lookup.row:
        why = Evidence("rows of a table looked up by the inputs", lookup.site)
        names.give(dim, EMBED, why, sure=not is_small, guess=is_small)


def _rows(lookup: Lookup) -> int:
    size = 1
    for atom in finest(lookup.key):
        size *= atom.size
    return size


def _name_positions(names: Names, lookup: Lookup) -> None:
    counted = [dim for dim in lookup.index if any(atom.counts for atom in finest(dim))]
    if len(counted) == 1:
        why = Evidence("a table looked up by positions", lookup.site)
        names.give(lookup.key, LENGTH, why)
    else:
        why = Evidence("a table looked up by distances or constants", lookup.site)
        names.give(lookup.key, EMPTY, why)


def name_stacks(names: Names) -> None:
    """Name the dim that a scan over parameters runs along.

    It is LAYERS if weights are applied to the carry. Otherwise the scan adds up its steps, as over
    experts, or runs along pieces of a weight.
    """
    for use in names.facts.scans:
        if not learned(use.dim):
            continue
        why = Evidence("scanned over", use.site)
        if use.number in names.facts.stacked:
            names.give(use.dim, LAYERS, why, sure=True)
        else:
            names.give(use.dim, EXPERT if use.has_data else LAYERS, why, guess=True)


def name_experts(names: Names) -> None:
    """Name the dim along which every expert has weights of its own."""
    routed: set[Atom] = set()
    projections = names.facts.projections
    # Sizes of dims along which every index has a weight of its own.
    sizes = {atom.size for product in projections for atom in finest(_joined(product.batch))}
    has_experts = any(product.groups for product in projections) or any(
        lookup.depends_on == "both" and len(lookup.row) > 1 for lookup in names.facts.lookups
    )
    for use in names.facts.top_k:
        if learned(use.dim):
            # A memory, and the sampling of tokens, choose along a dim too.
            is_guess = not has_experts and sizes.isdisjoint(atom.size for atom in finest(use.dim))
            why = Evidence("top_k chooses along it", use.site)
            names.give(use.dim, EXPERT, why, guess=is_guess)
            routed.update(finest(use.dim))
    for product in names.facts.projections:
        for dim in product.batch:
            why = Evidence("every index has a weight of its own", product.site)
            is_routed = product.groups or any(atom.counts or atom in routed for atom in finest(dim))
            names.give(dim, EXPERT, why, guess=not is_routed)


def name_windows(names: Names) -> None:
    """Name the window dims of a convolution's kernel EMPTY, so that they are replicated."""
    for use in names.facts.windows:
        names.give(use.dim, EMPTY, Evidence("window of a convolution", use.site))


def name_residual(names: Names) -> None:
    """Name the residual stream EMBED, if no table of tokens has named it."""
    outputs, summed = _outputs(names.facts.projections), _summed(names.facts.projections)
    if any(atom.name == EMBED for atom in (*outputs, *summed)):
        return
    links = [atom for atom in outputs if atom in summed and not atom.name]
    streams = [atom for atom in links if atom.residual]
    if streams or links:
        stream = max(streams or links, key=lambda atom: len(atom.params))
        why = Evidence("the residual stream: most weights read or write it", outputs[stream])
        names.give((stream,), EMBED, why, guess=not streams)


def name_logits(names: Names, result: Value | None) -> None:
    """Name VOCAB: the last dim of the first result, and dims that labels select from.

    The name is a guess unless a table of tokens has as many rows, because the last dim of a
    classifier's result is its classes.
    """
    rows = {_rows(lookup) for lookup in names.facts.lookups if _is_vocab(lookup)}
    ends = [] if result is None or not result.dims else [(result.dims[-1], _maker(names, result))]
    ends += [
        (lookup.key, lookup.site)
        for lookup in names.facts.lookups
        if lookup.of_data and lookup.depends_on == "inputs"
    ]
    for dim, site in ends:
        if learned(dim) and unnamed(dim):
            sizes = [atom.size for atom in finest(dim)]
            is_known = len(sizes) == 1 and sizes[0] in rows
            reason = "logits: as many as the table of tokens has rows" if is_known else "logits"
            names.give(dim, VOCAB, Evidence(reason, site), guess=not is_known)


def _is_vocab(lookup: Lookup) -> bool:
    return any(atom.name == VOCAB for atom in finest(lookup.key))


def _maker(names: Names, result: Value) -> Site | None:
    """Return the last product with a weight that has the last dim of a result, or None."""
    outputs = _outputs(reversed(names.facts.projections))
    return next((outputs[atom] for atom in finest(result.dims[-1]) if atom in outputs), None)


def name_hidden(names: Names) -> None:
    """Name the hidden dims of an MLP.

    A weight makes them from EMBED, an activation function is applied to them, and another weight
    makes EMBED from them. Softmax is nonlinear along heads too. But a weight after it sums over
    heads and head dims together, so products that sum over several factors are left out.
    """
    projections = names.facts.projections
    outputs = _outputs([product for product in projections if _has(product.contracted, EMBED)])
    summed = _summed(
        product
        for product in projections
        if _has(product.right, EMBED) and len(finest(_joined(product.contracted))) == 1
    )
    for atom, site in _with_pieces(outputs, names.facts.pieces).items():
        if atom in summed and not atom.name and atom.nonlinear:
            reason = "from EMBED through an activation function to EMBED"
            names.give((atom,), MLP_INTERMEDIATE, Evidence(reason, site))


def guess_links(names: Names) -> None:
    """Guess the name of each dim that one weight makes and another weight sums over.

    The first of these cases that fits decides:

    - Activations are added along the dim, and queries or keys are made from it: EMBED, another
      residual stream.
    - An activation function is applied to the dim: MLP_INTERMEDIATE.
    - Activations are added along the dim: EMBED.
    - Otherwise it is a low rank, which is replicated.
    """
    projections = names.facts.projections
    outputs, summed = _outputs(projections), _summed(projections)
    read_by_heads = _summed(each for each in projections if _has(each.right, HEAD))
    for atom, site in _with_pieces(outputs, names.facts.pieces).items():
        if atom not in summed or atom.name:
            continue
        axis, what = EMPTY, "a low rank"
        if atom.residual and atom in read_by_heads:
            axis, what = EMBED, "another residual stream, which attention reads"
        elif atom.nonlinear:
            axis, what = MLP_INTERMEDIATE, "with an activation function"
        elif atom.residual:
            axis, what = EMBED, "another residual stream"
        why = Evidence(f"between two weights: {what}", site)
        names.give((atom,), axis, why, guess=True)


def _with_pieces(outputs: Mapping[Atom, Site], pieces: Iterable[Piece]) -> dict[Atom, Site]:
    """Return the equation of each atom, and the same equation for the pieces cut from it."""
    every = dict(outputs)
    for piece in pieces:
        for atom in finest(piece.whole):
            if atom in every:
                every |= dict.fromkeys(finest(piece.dim), every[atom])
    return every


def _joined(dims: Iterable[Dim]) -> Dim:
    return tuple(atom for dim in dims for atom in dim)


def _has(dims: Iterable[Dim], axis: str) -> bool:
    return any(atom.name == axis for dim in dims for atom in finest(dim))


def _outputs(projections: Iterable[Product]) -> dict[Atom, Site]:
    """Return the output dims of weights, each with its first equation."""
    outputs: dict[Atom, Site] = {}
    for product in projections:
        for dim in product.right:
            for atom in finest(dim):
                outputs.setdefault(atom, product.site)
    return outputs


def _summed(projections: Iterable[Product]) -> set[Atom]:
    """Return the dims over which products with weights sum, without the batch."""
    return {
        atom
        for product in projections
        for dim in product.contracted
        for atom in finest(dim)
        if atom.name != BATCH
    }


def name_rows(names: Names, dims: Iterable[Dim]) -> None:
    """Name dims of parameters EMPTY if single rows are taken from them.

    If it is a whole dim, the name is a guess, because it may be the dim of layers. If it is a
    factor, such as the 3 in `3 * heads * head_dim`, it is the number of fused weights.
    """
    factors = {atom for dim in dims if len(finest(dim)) > 1 for atom in finest(dim)}
    for use in names.facts.rows:
        atoms = finest(use.dim)
        if unnamed(use.dim) and all(atom.params for atom in atoms):
            why = Evidence("single rows are taken", use.site)
            names.give(use.dim, EMPTY, why, guess=not factors.issuperset(atoms))


def name_by_size(names: Names, dims: Iterable[Dim], sizes: Mapping[int, str]) -> None:
    """Name dims that are open or guesses by sizes from the model's config."""
    for dim in dims:
        for atom in finest(dim):
            if atom.size in sizes:
                if atom.guess:
                    atom.name, atom.guess = "", False
                why = Evidence(f"size {atom.size} is in sizes")
                names.give((atom,), sizes[atom.size], why)
