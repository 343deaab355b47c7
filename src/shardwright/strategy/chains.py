"""Arrays of tables of rules: `[[rules]]` and `[[params]]`.

All candidates of a name are its chain. In an array, a later table may continue a chain, so the
chains of two names can interleave. An array without interleaved chains means the same as one table,
and is replaced by a table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from shardwright.errors import Problem
from shardwright.strategy.origin import KeyPath, KeySources, problem_at, source_of
from shardwright.vocabulary.axes import canonical_axis, file_name

ARRAYS: Final = ("rules", "params")
TEXT: Final = {"type": "object", "additionalProperties": {"type": "string"}}
SCHEMA: Final = {"anyOf": [TEXT, {"type": "array", "items": TEXT}]}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableCandidates:
    """The candidates of a name in one table: a part of its chain, with the line of this part."""

    name: str
    text: str
    source: str = ""


class InterleavedRules(Mapping[str, str]):
    """A mapping from each name to its whole chain, for an array in which chains interleave.

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
    data: Mapping[str, Any], origin: KeySources
) -> tuple[dict[str, Any], KeySources, list[Problem]]:
    """Simplify the arrays of rules. Return the new data, its origin, and the arrays' problems.

    An array whose chains do not interleave becomes one table. A malformed array becomes an empty
    table.
    """
    changed, sources, problems = dict(data), origin, []
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
        changed[name], sources = _simplified(name, entries_of(name, value, origin), sources)
    return changed, sources, problems


def _array_problems(name: str, value: Sequence[Any], origin: KeySources) -> list[Problem]:
    """Return the problems of an array: values of wrong types, and keys that have two spellings."""
    problems = []

    def add(what: str, fix: str, *path: str) -> None:
        problems.append(problem_at((name, *path), origin, what, fix))

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


def entries_of(name: str, value: Any, origin: KeySources) -> list[TableCandidates]:
    """Return the entries of a table of rules, or of an array of such tables, in their order."""
    tables: list[tuple[KeyPath, Any]] = [((name,), value)]
    if not isinstance(value, Mapping):
        tables = [((name, str(at)), table) for at, table in enumerate(value or ())]
    return [
        TableCandidates(
            name=file_name(canonical_axis(key)), text=text, source=source_of((*path, key), origin)
        )
        for path, table in tables
        for key, text in table.items()
    ]


def _joined(parts: Sequence[TableCandidates]) -> TableCandidates:
    """Join the entries of one name into one entry."""
    if len(parts) == 1:
        return parts[0]
    return TableCandidates(
        name=parts[0].name,
        text=" | ".join(part.text for part in parts),
        source=", ".join(dict.fromkeys(part.source for part in parts if part.source)),
    )


def _simplified(
    name: str, parts: Sequence[TableCandidates], origin: KeySources
) -> tuple[dict[str, str] | list[dict[str, str]], KeySources]:
    """Return a table (or an array, if chains interleave) of the entries, and the new origin."""
    runs: list[list[TableCandidates]] = []
    for part in parts:
        if runs and runs[-1][0].name == part.name:
            runs[-1].append(part)
        else:
            runs.append([part])
    tables: list[list[TableCandidates]] = [[]]
    for entry in map(_joined, runs):
        # A table of TOML cannot have a key twice, so a name that comes again starts a new table.
        if entry.name in [other.name for other in tables[-1]]:
            tables.append([])
        tables[-1].append(entry)
    sources = {path: source for path, source in origin.items() if path[:1] != (name,)}
    if (name,) in origin or (name, "0") in origin:
        sources[(name,)] = origin.get((name,), origin.get((name, "0"), ""))
    # The source of an axis lists the lines of all entries of its chain.
    for axis in {entry.name: None for entry in parts}:
        whole = _joined([entry for entry in parts if entry.name == axis])
        sources[name, axis] = whole.source
    if len(tables) == 1:
        return {entry.name: entry.text for entry in tables[0]}, sources
    for at, table in enumerate(tables):
        sources[name, str(at)] = table[0].source
        for entry in table:
            sources[name, str(at), entry.name] = entry.source
    return [{entry.name: entry.text for entry in table} for table in tables], sources


def overlaid(
    name: str, base: Any, over: Any, *, below: KeySources, above: KeySources
) -> tuple[list[dict[str, str]], list[str]]:
    """Overlay two tables of rules. At least one of them is an array.

    The chain of a name in `over` replaces the whole chain of the name in `base`, and comes at the
    place where the chain in `base` begins. Names that `base` does not have come last.

    Returns:
      The entries as an array, and the source of each entry.
    """
    upper = entries_of(name, over, above)
    names = {entry.name for entry in upper}
    result: list[TableCandidates] = []
    replaced: set[str] = set()
    for entry in entries_of(name, base, below):
        if entry.name not in names:
            result.append(entry)
        elif entry.name not in replaced:
            replaced.add(entry.name)
            result.append(_joined([each for each in upper if each.name == entry.name]))
    result += [entry for entry in upper if entry.name not in replaced]
    return [{entry.name: entry.text} for entry in result], [entry.source for entry in result]
