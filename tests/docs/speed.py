"""The tables of the page on speed, from the files that the benchmarks wrote."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_TABLE = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_CONTEXT = ("jax", "python", "machine", "cpu", "date")

Row = Mapping[str, Any]
_Key = tuple[str, str, str, str]


def read_results(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return each file of results by its name without `.json`."""
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.json"))
    }


def with_tables(text: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a page with the text between its markers written from the results.

    Markers are `<!-- results: SUBJECT -->`, with `machines` and `missed` for the tables of all,
    each up to `<!-- end -->`.

    Raises:
      AssertionError: a subject with targets has no marker, or a marker no such subject.
    """
    subjects = list(
        dict.fromkeys(row["subject"] for run in results.values() for row in _with_targets(run))
    )
    marked = [actual[2] for actual in _TABLE.finditer(text)]
    assert sorted(marked) == sorted([*subjects, "machines", "missed"]), (
        f"the results have {subjects}, the page {marked}"
    )
    value = {"machines": _machines(results), "missed": _missed(results)}
    value |= {subject: _table(subject, results) for subject in subjects}
    return _TABLE.sub(lambda actual: f"{actual[1]}\n{value[actual[2]]}\n\n{actual[3]}", text)


def _with_targets(run: Mapping[str, Any]) -> list[Row]:
    return [row for row in run["rows"] if row["target"] is not None]


def _key(row: Row) -> _Key:
    return (row["case"], row["what"], row["against"] or "-", _target(row))


def _target(row: Row) -> str:
    target = row["target"]
    sign, bound = (
        ("≤", target["at_most"]) if target["at_most"] is not None else ("≥", target["at_least"])
    )
    return f"{sign} {bound:g} {row['unit']}"


def _value(row: Row) -> str:
    if row["verdict"] == "ok":
        return f"{row['value']:.2f} {row['unit']}"
    # Three digits, since what misses a target narrowly looks as if it met it.
    return f"**{row['value']:.3f} {row['unit']}, missed**"


def _table(subject: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a row for each target of a subject, with a column for each run that measured it."""
    by_run = {
        name: {_key(row): row for row in _with_targets(run) if row["subject"] == subject}
        for name, run in results.items()
    }
    by_run = {name: rows for name, rows in by_run.items() if rows}
    keys = list(dict.fromkeys(key for rows in by_run.values() for key in rows))
    body = [
        [*key, *(_value(rows[key]) if key in rows else "" for rows in by_run.values())]
        for key in keys
    ]
    return _markdown([["case", "measured", "beside", "target", *by_run], *body])


def _machines(results: Mapping[str, Mapping[str, Any]]) -> str:
    return _markdown(
        [
            ["run", *_CONTEXT],
            *([name, *(run["context"][key] for key in _CONTEXT)] for name, run in results.items()),
        ]
    )


def _missed(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return how many targets each run meets, and each one missed. The tables have its case."""
    lines = []
    for name, run in results.items():
        rows = _with_targets(run)
        missed = [row for row in rows if row["verdict"] != "ok"]
        lines.append(
            f"- `{name}`: {len(rows) - len(missed)} of {len(rows)} targets "
            f"met{', missed:' if missed else '.'}"
        )
        lines += [
            textwrap.fill(
                f"- {row['subject']}, {row['what']}{_beside(row)}: {row['value']:.3f} "
                f"{row['unit']}, not {_target(row)}",
                width=100,
                initial_indent="    ",
                subsequent_indent="      ",
                break_on_hyphens=False,
            )
            for row in missed
        ]
    return "\n".join(lines)


def _beside(row: Row) -> str:
    return f" beside {row['against']}" if row["against"] else ""


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))
