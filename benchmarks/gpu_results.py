"""The results of `make gpu` as tables of docs/development/gpus.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# What is shown of the details of a row, in this order: key, text before, text after, decimals.
_DETAILS = (
    ("equal", "", " equal to the oracle", 0),
    ("refused", "", " refused", 0),
    ("of", "of ", "", 0),
    ("chosen", "`auto` takes `", "`", 0),
    ("seconds", "", " ms", 3),
    ("share_of_matmul", "", " of the matmul's FLOP/s", 2),
)


def read_sections(file: Path) -> tuple[dict[str, list[Row]], dict[str, str]]:
    """Return the rows of each section, and the context: the device and the versions."""
    data = json.loads(file.read_text(encoding="utf-8"))
    return data["sections"], data["context"]


def table(sections: dict[str, list[Row]]) -> str:
    """Return a Markdown table of all rows.

    >>> print(table({"peaks": [{"case": "copy", "value": 4.21e3, "unit": "GB/s"}]}))
    | what | measured | target | verdict | details |
    | --- | --- | --- | --- | --- |
    | copy | 4,210 GB/s | | | |
    """
    lines = ["| what | measured | target | verdict | details |", "| --- | --- | --- | --- | --- |"]
    for rows in sections.values():
        lines += [_line(row) for row in rows if "skipped" not in row]
    return "\n".join(" ".join(line.split()) for line in lines)


def _line(row: Row) -> str:
    target = row.get("target")
    bound, verdict = "", ""
    if target is not None:
        bound = f"{target[0].replace('>=', '≥').replace('<=', '≤')} {target[1]:g}"
        verdict = "ok" if row["met"] else "MISSED"
    details = ", ".join(
        f"{before}{_detail(row[key], key, decimals)}{after}"
        for key, before, after, decimals in _DETAILS
        if row.get(key) is not None
    )
    if "low" in row:
        details = f"planned {_gigabytes(row['low'])} to {_gigabytes(row['high'])}"
    if row.get("planned"):
        low, high = (1e3 * seconds for seconds in row["planned"])
        details += f", planned {low:.1f} to {high:.1f} ms"
    return f"| {row['case']} | {_value(row)} | {bound} | {verdict} | {details} |"


def _value(row: Row) -> str:
    value, unit = row["value"], row["unit"]
    if unit == "B":
        return _gigabytes(value)
    digits = f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"
    return f"{digits} {'x the ' * unit.startswith('speed')}{unit}"


def _detail(value: Any, key: str, decimals: int) -> str:
    if isinstance(value, str):
        return value
    return f"{1e3 * value if key == 'seconds' else value:,.{decimals}f}"


def _gigabytes(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
