"""Measurements as text, Markdown and JSON, with the machine and the versions."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shardwright
from benchmarks.timing import Row
from shardwright.show.tables import table

HEAD = (
    "subject",
    "case",
    "measured",
    "beside",
    "value",
    "target",
    "",
    "time",
    "its time",
    "spread",
)


def context(*, peers: dict[str, str]) -> dict[str, str]:
    """Return the machine and the versions."""
    return {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "cpu": _cpu(),
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "shardwright": shardwright.__version__,
        **peers,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def text(rows: Sequence[Row]) -> str:
    """Return an aligned table."""
    return "\n".join(table([HEAD, *map(_cells, rows)], width=10_000))


def markdown(rows: Sequence[Row], where: dict[str, str]) -> str:
    """Return a page with the context and a table."""
    lines = ["# Speed", "", *(f"- {key}: {value}" for key, value in where.items()), ""]
    lines += [
        (
            "Medians of interleaved repetitions of processor time in one run (attention: of all "
            "threads; import: of wall time)."
        ),
        (
            "A ratio is the median of the ratios of the repetitions. It is not the ratio of the "
            "two median times in its row."
        ),
        "`spread` is the interquartile range divided by the median.",
        "",
    ]
    cells = [HEAD, tuple("---" for _ in HEAD), *map(_cells, rows)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells), ""])


def data(rows: Sequence[Row], where: dict[str, str]) -> dict[str, Any]:
    """Return everything as plain data."""
    return {"context": where, "rows": [row.to_json() for row in rows]}


def _cells(row: Row) -> tuple[str, ...]:
    value = f"{row.value:.2f} {row.unit}"
    target = "" if row.target is None else f"{row.target} {row.unit}"
    beside = "" if row.against_seconds is None else _time(row.against_seconds)
    return (
        row.subject,
        row.case,
        row.what,
        row.against,
        value,
        target,
        row.verdict,
        _time(row.seconds),
        beside,
        f"{row.spread:.0%}",
    )


def _time(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
