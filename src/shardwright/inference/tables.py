"""Name the dims of tables that are looked up by tokens, positions or constants; name logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from shardwright.inference.atoms import AtomDim, finest, size_of
from shardwright.inference.evidence import EquationLocation, Evidence
from shardwright.inference.facts import Facts, TableLookup
from shardwright.inference.names import LENGTHS, Names, learned, outputs_of, summed_over, unnamed
from shardwright.inference.step import ArrayFacts
from shardwright.vocabulary.axes import EMBED, EMPTY, LENGTH, VOCAB

# If a table has at most 1/8 as many rows as the largest table, its indices are taken as types or
# positions, not as tokens.
_SMALL_TABLE: Final = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Tables that are looked up by one kind of index: one table, or tables with equally many rows.

    Attributes:
      lookups: The lookups.
      is_tokens: Whether the program shows that the indices are tokens.
    """

    lookups: Sequence[TableLookup]
    is_tokens: bool

    @property
    def rows(self) -> int:
        """Number of rows of each table."""
        return _rows(self.lookups[0])


def name_tables(names: Names, results: Sequence[ArrayFacts]) -> None:
    """Name the dims of tables that are looked up by tokens."""
    for tables in _tables(names.facts, results):
        for lookup in tables.lookups if tables.is_tokens else ():
            why = Evidence("a table looked up by the inputs", lookup.location)
            names.give(lookup.key, VOCAB, why, sure=True)
            _name_row(names, lookup, guess=False)


def guess_tables(names: Names, results: Sequence[ArrayFacts]) -> None:
    """Guess the names of tables that are looked up by inputs that need not be tokens."""
    every = _tables(names.facts, results)
    largest = max((tables.rows for tables in every), default=0)
    for tables in every:
        is_small = tables.rows * _SMALL_TABLE <= largest
        for lookup in tables.lookups:
            size = "a smaller" if is_small else "a"
            why = Evidence(f"{size} table, looked up by the inputs", lookup.location)
            names.give(lookup.key, EMPTY if is_small else VOCAB, why, guess=True)
            _name_row(names, lookup, guess=True)


def _name_row(names: Names, lookup: TableLookup, *, guess: bool) -> None:
    """Name the row of a table EMBED.

    The name is a guess if the row has several dims. It is also a guess if the table is square and
    no matmul with a weight sums over the row: such rows may be logits, as in a table of bigrams.
    """
    dims = [dim for dim in lookup.row if finest(dim)]
    is_square = len(dims) == 1 and size_of(finest(dims[0])) == _rows(lookup)
    read = summed_over(names.facts.projections)
    if len(dims) > 1 or (is_square and read.isdisjoint(finest(dims[0]))):
        guess = True
    for dim in dims:
        why = Evidence("rows of a table looked up by the inputs", lookup.location)
        names.give(dim, EMBED, why, sure=not guess, guess=guess)


def _tables(facts: Facts, results: Sequence[ArrayFacts]) -> list[Tables]:
    """Return the tables that are looked up by the inputs, grouped by kind of index.

    The indices of a table are tokens in any of these cases:

    - The last dim of the logits is the dim that the indices select along, as in a tied model.
    - The indices have a length, and only this table has as many rows as there are logits.
    - The indices have a length, and the model reads no other inputs.
    """
    groups = _grouped(
        lookup for lookup in facts.lookups if not lookup.of_data and lookup.depends_on == "inputs"
    )
    ends = [dim for dim, _ in _ends(facts, results)]
    tied = {atom for dim in ends for atom in finest(dim)}
    summed = summed_over(facts.projections)
    # A dim that is contracted with a weight is a residual or a hidden dim, not logits.
    counts = {
        size_of(finest(dim)) for dim in ends if learned(dim) and summed.isdisjoint(finest(dim))
    }
    # In a tied model, the output projection is the token table itself.
    is_tied = [any(not tied.isdisjoint(finest(each.key)) for each in group) for group in groups]
    fitting = [_rows(group[0]) in counts and _has_length(group) for group in groups]
    is_alone = len(groups) == 1 and _has_length(groups[0])
    # If the model also reads features, the indices of a table may be positions, not tokens.
    is_alone = is_alone and not any(matmul.reads_inputs for matmul in facts.projections)
    is_alone = is_alone and not any(
        atom.given for lookup in groups[0] for dim in lookup.row for atom in finest(dim)
    )
    return [
        Tables(
            lookups=group,
            is_tokens=is_tied[at]
            or is_alone
            or (fitting[at] and fitting.count(True) == 1 and not any(is_tied)),
        )
        for at, group in enumerate(groups)
    ]


def _grouped(lookups: Iterable[TableLookup]) -> list[list[TableLookup]]:
    """Group lookups of one table.

    Lookups by the same inputs in tables with equal numbers of rows are one group too.
    """
    groups: list[list[TableLookup]] = []
    for lookup in lookups:
        key, kind = finest(lookup.key), (lookup.inputs, _rows(lookup))
        for group in groups:
            if any(
                finest(other.key) == key or (other.inputs, _rows(other)) == kind for other in group
            ):
                group.append(lookup)
                break
        else:
            groups.append([lookup])
    return groups


def _has_length(group: Iterable[TableLookup]) -> bool:
    return any(
        atom.name in LENGTHS for lookup in group for dim in lookup.index for atom in finest(dim)
    )


def _rows(lookup: TableLookup) -> int:
    return size_of(finest(lookup.key))


def _ends(
    facts: Facts, results: Sequence[ArrayFacts]
) -> Iterator[tuple[AtomDim, EquationLocation | None]]:
    """Yield the last dim of the first result, and the dims that labels select from."""
    if results and results[0].dims:
        last = results[0].dims[-1]
        # `outputs_of` keeps the first matmul of a dim. Matmuls are passed in reverse order, so it
        # keeps the last one.
        outputs = outputs_of(reversed(facts.projections))
        yield last, next((outputs[atom] for atom in finest(last) if atom in outputs), None)
    for lookup in facts.lookups:
        if lookup.of_data and lookup.depends_on == "inputs":
            yield lookup.key, lookup.location


def name_logits(names: Names, results: Sequence[ArrayFacts]) -> None:
    """Give the name VOCAB to the last dim of the first result, and to dims that labels select from.

    The name is a guess unless a table of tokens has as many rows: in the result of a classifier,
    the last dim is the classes. If `top_k` or argmax chooses along a dim with as many elements as a
    table of tokens has rows, as in a sampler, this dim is VOCAB too.
    """
    facts = names.facts
    rows = {
        _rows(lookup)
        for lookup in facts.lookups
        if any(atom.name == VOCAB and not atom.guess for atom in finest(lookup.key))
    }
    # A sampler chooses among tokens, but a router also chooses along a dim by `top_k`. So a dim
    # of `chosen` is VOCAB only if it has the size of a table of tokens.
    chosen = [(use.dim, use.location) for use in (*facts.top_k, *facts.largest)]
    ends = list(_ends(facts, results))
    for at, (dim, location) in enumerate((*chosen, *ends)):
        if learned(dim) and unnamed(dim):
            sizes = [atom.size for atom in finest(dim)]
            is_known = len(sizes) == 1 and sizes[0] in rows
            reason = "logits: as many as the table of tokens has rows" if is_known else "logits"
            if is_known or at >= len(chosen):
                names.give(dim, VOCAB, Evidence(reason, location), guess=not is_known)


def name_other_tables(names: Names) -> None:
    """Name the dims of tables that are looked up by positions or constants."""
    for lookup in names.facts.lookups:
        if not lookup.of_data and lookup.depends_on == "neither":
            _name_positions(names, lookup)


def _name_positions(names: Names, lookup: TableLookup) -> None:
    # Indices that are positions increase along one dim. Distances, as in T5, increase along two
    # dims: those of queries and of keys.
    counted = [dim for dim in lookup.index if any(atom.counts for atom in finest(dim))]
    if len(counted) == 1:
        why = Evidence("a table looked up by positions", lookup.location)
        is_length = any(atom.name in LENGTHS for atom in finest(counted[0]))
        names.give(lookup.key, LENGTH, why, guess=not is_length)
    else:
        why = Evidence("a table looked up by distances or constants", lookup.location)
        names.give(lookup.key, EMPTY, why)
