"""Show what inference found: as a table, as a file of path rules, and as plain data."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from jax.sharding import PartitionSpec

from shardwright.inference.constrained import Constrained
from shardwright.inference.constraints import Constraint
from shardwright.inference.inferred import Inferred, InferredDim
from shardwright.show.tables import table, wrap
from shardwright.vocabulary.axes import axis_label
from shardwright.vocabulary.merged_dims import MergedDim, axis_text
from shardwright.vocabulary.shown import WIDTH, data_of, text_of

Form = Literal["table", "summary", "toml"]
ReportRow = tuple[InferredDim, ...]
# Least width of a column of prose, in characters.
_LEAST_ROOM = 24
_NUMBER = re.compile(r"\d+")


@text_of.register(Inferred)
def inferred_text(inferred: Inferred, *, form: Form = "table", width: int = WIDTH) -> str:
    """Return the axes of parameters as text.

    Args:
      inferred: The result.
      form: `table`; `summary`, which leaves out arrays whose axes are all sure; or `toml`, the path
        rules.
      width: Characters per line of a table.
    """
    if form == "toml":
        return toml_text(inferred)
    return table_text(inferred, width=width, is_summary=form == "summary")


def table_text(inferred: Inferred, *, width: int, is_summary: bool) -> str:
    """Return a line per dim below the path of its array, the conflicts, and a line of totals.

    Arrays are one entry if they have the same shape and axes, and if their paths differ only in a
    number, such as that of the layer.

    Args:
      inferred: The result.
      width: Characters per line.
      is_summary: Leave out entries that have neither guesses nor open dims (dims without a name).
    """
    rules = list(path_rules(inferred))
    if is_summary:
        rules = [rule for rule in rules if any(dim.guess or dim.is_open for dim in rule.dims)]
    cells = [
        (str(dim.dim), str(dim.size), "?" if dim.is_open else axis_text(dim.axis))
        for rule in rules
        for dim in rule.dims
    ]
    # Measure all entries, so that the columns of different arrays are aligned.
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for rule in rules:
        arrays = f"  ({rule.arrays} arrays)" if rule.arrays > 1 else ""
        lines.append(f"{rule.label or '(root)'}{arrays}")
        for dim in rule.dims:
            cell = cells.pop(0)
            padded = [text.ljust(size) for text, size in zip(cell, widths, strict=True)]
            evidence = f"guess: {dim.evidence}" if dim.guess else str(dim.evidence)
            head = f"  {'  '.join(padded)}  "
            # Align all lines of the evidence with its first line.
            room = len(head) + max(width - len(head), _LEAST_ROOM)
            lines += wrap(evidence, room, first=head, rest=" " * len(head))
    lines += [conflict.text for conflict in inferred.conflicts]
    if inferred.unknown:
        lines.append(f"not understood: {', '.join(inferred.unknown)}")
    return "\n".join([*lines, counts_text(inferred)])


def counts_text(inferred: Inferred) -> str:
    """Return the numbers of named and open dims, guesses and conflicts, as text."""
    total, guesses = len(inferred.evidence), len(inferred.guesses)
    named = total - len(inferred.open)
    return (
        f"{named} of {total} dims named, {guesses} of them by guess; "
        f"{len(inferred.open)} open; {len(inferred.conflicts)} conflicts"
    )


def by_path(inferred: Inferred) -> dict[str, ReportRow]:
    """Return the dims of each array."""
    rows: dict[str, list[InferredDim]] = {}
    for dim in inferred.evidence:
        rows.setdefault(dim.path, []).append(dim)
    return {path: tuple(row) for path, row in rows.items()}


def toml_text(inferred: Inferred) -> str:
    """Return path rules as TOML, one line per pattern, with a comment for guesses and open dims."""
    lines = [
        "# Axes of parameters, inferred by shardwright. Review every line.",
        "# sw.match_paths(params, tomllib.loads(text).items()) reads it.",
    ]
    for rule in path_rules(inferred):
        axes = ", ".join(_toml_axis(dim.axis) for dim in rule.dims)
        remarks = [f"{rule.arrays} arrays"] if rule.arrays > 1 else []
        for what, dims in (
            ("guess", [dim for dim in rule.dims if dim.guess]),
            ("open", [dim for dim in rule.dims if dim.is_open]),
        ):
            if dims:
                numbers = ", ".join(str(dim.dim) for dim in dims)
                remarks.append(f"{what}: dim {numbers}")
        comment = f"  # {'; '.join(remarks)}" if remarks else ""
        lines.append(f"{_toml_key(rule.pattern)} = [{axes}]{comment}")
    return "\n".join(lines) + "\n"


def _toml_axis(axis: Any) -> str:
    if isinstance(axis, MergedDim):
        members = [f"[{json.dumps(axis_label(name))}, {size}]" for name, size in axis.members]
        return f"[{', '.join(members)}]"
    return json.dumps(axis_label(axis))


def _toml_key(pattern: str) -> str:
    # A literal string of TOML has no escapes, so the backslashes of a pattern stay as they are.
    is_literal = "'" not in pattern and pattern.isprintable()
    return f"'{pattern}'" if is_literal else json.dumps(pattern)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PathRule:
    """The axes of one array, or of the same array of every layer.

    Attributes:
      pattern: Regular expression of the paths.
      label: The path as people read it, with `*` for any number.
      dims: The dims of the array, or of the first array if the rule covers several.
      arrays: Number of arrays.
    """

    pattern: str
    label: str
    dims: ReportRow
    arrays: int


def path_rules(inferred: Inferred) -> Iterator[PathRule]:
    """Yield the rules that annotate the parameters. One rule may cover all layers."""
    rows = by_path(inferred)
    groups: dict[str, list[str]] = {}
    # Paths that differ in their numbers only may belong to the layers of one stack.
    for path in rows:
        groups.setdefault(_NUMBER.sub("0", path), []).append(path)
    for paths in groups.values():
        counting = _counting(paths, rows)
        alike: dict[str, list[str]] = {}
        for path in paths:
            alike.setdefault(_with_wildcards(path, counting, "*"), []).append(path)
        for label, members in alike.items():
            is_single = len(members) == 1
            yield PathRule(
                pattern=_pattern(members[0], frozenset() if is_single else counting),
                label=members[0] if is_single else label,
                dims=rows[members[0]],
                arrays=len(members),
            )


def _counting(paths: Sequence[str], rows: Mapping[str, ReportRow]) -> frozenset[int]:
    """Return the positions, in similar paths, of the numbers that affect no shape and no axis."""
    every = frozenset(range(len(_NUMBER.findall(paths[0]))))
    # First try all numbers, then all but one: first without the last number, because in
    # `layers/3/heads/0/w` the layers usually agree, and the heads of a layer may differ.
    for candidate in (every, *(every - {at} for at in sorted(every, reverse=True))):
        meanings: dict[str, set[Any]] = {}
        for path in paths:
            meaning = tuple((dim.size, dim.axis, dim.guess, dim.is_open) for dim in rows[path])
            meanings.setdefault(_with_wildcards(path, candidate, "*"), set()).add(meaning)
        if all(len(meaning) == 1 for meaning in meanings.values()):
            return candidate
    return frozenset()


def _with_wildcards(path: str, counting: frozenset[int], wildcard: str) -> str:
    """Return a path with a wildcard for the numbers at these positions."""
    numbers = itertools.count()
    return _NUMBER.sub(lambda match: wildcard if next(numbers) in counting else match[0], path)


def _pattern(path: str, counting: frozenset[int]) -> str:
    numbers = itertools.count()
    # With a group in the pattern, `split` also returns the numbers themselves.
    parts = re.split(r"(\d+)", path)
    escaped = [
        "[0-9]+" if part.isdigit() and next(numbers) in counting else re.escape(part)
        for part in parts
    ]
    # `match_paths` searches, so `w` would match `w_out` too without the anchors.
    return f"^{''.join(escaped)}$"


@data_of.register(Inferred)
def inferred_data(inferred: Inferred) -> dict[str, Any]:
    """Return everything as plain data."""
    return {
        "dims": [
            {
                "path": dim.path,
                "dim": dim.dim,
                "size": dim.size,
                "axis": None if dim.is_open else axis_text(dim.axis),
                "guess": dim.guess,
                "reason": dim.evidence.reason,
                "primitive": dim.evidence.primitive,
                "source": dim.evidence.source,
            }
            for dim in inferred.evidence
        ],
        "conflicts": [conflict.text for conflict in inferred.conflicts],
        "not_understood": list(inferred.unknown),
        "open": len(inferred.open),
        "guesses": len(inferred.guesses),
    }


@text_of.register(Constrained)
def constrained_text(
    constrained: Constrained,
    *,
    specs: Sequence[tuple[Constraint, PartitionSpec]] | None = None,
    width: int = WIDTH,
) -> str:
    """Return a line per constraint, or a table if their specs are known."""
    constraints = constrained.inferred.constraints
    if specs is None:
        counts = collections.Counter(map(str, constraints))
        lines = [f"{line}, {count} times" if count > 1 else line for line, count in counts.items()]
        return "\n".join([*lines, f"{len(constraints)} constraints"])
    rows = [("written in", "what", "axes", "shape", "spec")]
    for each, spec in specs:
        axes = " ".join(axis_text(axis) for axis in each.axes)
        shape = "x".join(map(str, each.shape))
        rows.append((each.source, each.kind, axes, shape, str(spec)))
    # Layers that run the same source lines give equal rows. Show each row once.
    return "\n".join(table(list(dict.fromkeys(rows)), width=width))
