"""Tables of rules that are written as arrays: `[[rules]]` and `[[params]]`.

In an array a name may occur again and go on with its chain, so that the chains of two names can
interleave. Where they do not, an array means the same as one table, and becomes one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from shardwright.errors import Problem, StrategyError
from shardwright.strategy.origin import KeyPath, Origin, source_of, where
from shardwright.vocabulary.axes import canonical_axis, file_name

ARRAYS: Final = ("rules", "params")
TEXT: Final = {"type": "object", "additionalProperties": {"type": "string"}}
SCHEMA: Final = {"anyOf": [TEXT, {"type": "array", "items": TEXT}]}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Candidates of one name that are written together, and where."""

    name: str
    text: str
    source: str = ""


class InterleavedRules(Mapping[str, str]):
    """The whole chain of each name, where the chains of several names interleave.

    Attributes:
      tables: The tables of the array, in order.
    """

    __slots__ = ("_chains", "tables")

    def __init__(self, tables: Sequence[Mapping[str, str]]) -> None:
        self.tables = tuple(dict(table) for table in tables)
        chains: dict[str, list[str]] = {}
        for table in self.tables:
            for name, text in table.items():
                chains.setdefault(name, []).append(text)
        self._chains = {name: " | ".join(texts) for name, texts in chains.items()}

    def __getitem__(self, name: str) -> str:
        return self._chains[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._chains)

    def __len__(self) -> int:
        return len(self._chains)

    def __repr__(self) -> str:
        return f"InterleavedRules({list(self.tables)!r})"


def normalized(
    data: Mapping[str, Any], origin: Origin
) -> tuple[dict[str, Any], Origin, list[Problem]]:
    """Return data whose arrays are as short as they can be, its origin, and the problems of arrays
    that are malformed. A malformed array is left out of the data.
    """
    changed, places, problems = dict(data), origin, []
    for name in ARRAYS:
        value = data.get(name)
        if isinstance(value, InterleavedRules):
            value = list(value.tables)
        if not isinstance(value, (list, tuple)):
            continue
        faults = _array_problems(name, value, origin)
        if faults:
            changed[name] = {}
            problems += faults
            continue
        changed[name], places = _written(name, pieces(name, value, origin), places)
    return changed, places, problems


def _array_problems(name: str, value: Sequence[Any], origin: Origin) -> list[Problem]:
    """Return the problems of an array's tables: of their types, and keys in two spellings."""
    problems = []

    def add(what: str, fix: str, *path: str) -> None:
        at = where((name, *path), origin)
        problems.append(Problem(error=StrategyError, what=what, path=at, fix=fix))

    for at, table in enumerate(value):
        if not isinstance(table, Mapping):
            add(f"expected a table, got {table!r}", f"write [[{name}]] above each table", str(at))
            continue
        spelled = [file_name(canonical_axis(key)) if isinstance(key, str) else key for key in table]
        for key, text in table.items():
            if not isinstance(key, str) or not isinstance(text, str):
                fix = 'write text, such as "tp | -"'
                add(f"expected text, got {text!r}", fix, str(at), str(key))
            elif spelled.count(file_name(canonical_axis(key))) > 1:
                what = f"{key!r} is written twice in one table, in two spellings"
                add(what, "keep one of them", str(at), key)
    return problems


def pieces(name: str, value: Any, origin: Origin) -> list[Piece]:
    """Return the pieces of a table of rules, or of an array of such tables, as they are written."""
    tables: list[tuple[KeyPath, Any]] = [((name,), value)]
    if not isinstance(value, Mapping):
        tables = [((name, str(at)), table) for at, table in enumerate(value or ())]
    return [
        Piece(
            name=file_name(canonical_axis(key)), text=text, source=source_of((*path, key), origin)
        )
        for path, table in tables
        for key, text in table.items()
    ]


def _joined(parts: Sequence[Piece]) -> Piece:
    """Join the pieces of one name."""
    if len(parts) == 1:
        return parts[0]
    return Piece(
        name=parts[0].name,
        text=" | ".join(part.text for part in parts),
        source=", ".join(dict.fromkeys(part.source for part in parts if part.source)),
    )


def _written(
    name: str, parts: Sequence[Piece], origin: Origin
) -> tuple[dict[str, str] | list[dict[str, str]], Origin]:
    """Return pieces as one table if no chains interleave, else as an array; and the origin."""
    runs: list[list[Piece]] = []
    for part in parts:
        if runs and runs[-1][0].name == part.name:
            runs[-1].append(part)
        else:
            runs.append([part])
    tables: list[list[Piece]] = [[]]
    for piece in map(_joined, runs):
        if piece.name in [other.name for other in tables[-1]]:
            tables.append([])
        tables[-1].append(piece)
    places = {path: place for path, place in origin.items() if path[:1] != (name,)}
    if (name,) in origin or (name, "0") in origin:
        places[(name,)] = origin.get((name,), origin.get((name, "0"), ""))
    # The whole chain of a name is written wherever its pieces are.
    for axis in {piece.name: None for piece in parts}:
        whole = _joined([piece for piece in parts if piece.name == axis])
        places[name, axis] = whole.source
    if len(tables) == 1:
        return {piece.name: piece.text for piece in tables[0]}, places
    for at, table in enumerate(tables):
        places[name, str(at)] = table[0].source
        for piece in table:
            places[name, str(at), piece.name] = piece.source
    return [{piece.name: piece.text for piece in table} for table in tables], places


def overlaid(
    name: str, base: Any, over: Any, *, below: Origin, above: Origin
) -> tuple[list[dict[str, str]], list[str]]:
    """Overlay tables of rules, of which at least one is an array.

    A chain of `over` replaces the whole chain of its name at its first place. New names come last.

    Returns:
      The pieces as an array, and the source of each.
    """
    new = pieces(name, over, above)
    names = {piece.name for piece in new}
    result: list[Piece] = []
    replaced: set[str] = set()
    for piece in pieces(name, base, below):
        if piece.name not in names:
            result.append(piece)
        elif piece.name not in replaced:
            replaced.add(piece.name)
            result.append(_joined([part for part in new if part.name == piece.name]))
    result += [piece for piece in new if piece.name not in replaced]
    return [{piece.name: piece.text} for piece in result], [piece.source for piece in result]
