"""Show findings as plain data."""

from __future__ import annotations

from typing import Any

from shardwright.lints.finding import Finding
from shardwright.show.plain import named
from shardwright.vocabulary.shown import data_of


@data_of.register(Finding)
def _finding(finding: Finding) -> dict[str, Any]:
    """Return a finding. The line is a number, or None."""
    file, _, line = finding.source.rpartition(":")
    known = line.isdecimal() and bool(file)
    return {
        **named(finding, "code", "severity"),
        "file": (file if known else finding.source) or None,
        "line": int(line) if known else None,
        "key": finding.key or None,
        **named(finding, "message", "fix"),
        **({"snippet": finding.snippet} if finding.snippet else {}),
    }
