"""Findings of lints: code, severity, place, message and fix."""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import Any

from shardwright.errors import (
    MissingMeshAxisError,
    NewValue,
    Problem,
    Rename,
    UnknownAxisError,
)
from shardwright.vocabulary.shown import data_of


class Severity(enum.StrEnum):
    """Severity of a finding, worst first."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Code(enum.StrEnum):
    """Kind of a finding. The names are stable: scripts and pages refer to them."""

    INVALID = "invalid"
    UNKNOWN_AXIS = "unknown_axis"
    UNKNOWN_MESH_AXIS = "unknown_mesh_axis"
    UNRESOLVED = "unresolved"
    MORE_SHARDS_THAN_HEADS = "more_shards_than_heads"
    UNREACHABLE_CANDIDATE = "unreachable_candidate"
    SHADOWED_RULE = "shadowed_rule"
    SHADOWED_TENSORS = "shadowed_tensors"
    MODE_CHANGES_NOTHING = "mode_changes_nothing"
    WEIGHTS_MOVE = "weights_move"
    NOT_GATHERED = "not_gathered"
    GATHERED_IN_DECODE = "gathered_in_decode"
    DCN_MINOR = "dcn_minor"
    SHARED_MESH_AXIS = "shared_mesh_axis"
    UNEVEN_MICROBATCHES = "uneven_microbatches"
    IDLE_MESH_AXIS = "idle_mesh_axis"
    IDLE_ZERO1 = "idle_zero1"
    IDLE_LARGEST_DIM = "idle_largest_dim"
    NO_RULE = "no_rule"
    UNUSED_TENSORS = "unused_tensors"
    UNUSED_RULE = "unused_rule"
    OTHER_NAME = "other_name"
    STATE_NOT_DONATED = "state_not_donated"
    UNUSED_SAVED = "unused_saved"
    SPATIAL_AND_CHANNEL = "spatial_and_channel"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that looks wrong.

    Attributes:
      code: Kind of the finding.
      severity: error (it will fail), warning (it is probably not intended) or note (it has no
        effect).
      message: What is wrong, in one line.
      fix: How to fix it.
      source: `file:line`, or empty if the finding is not about a line of a file.
      key: Key path in the file, or path and dim of a tensor.
      snippet: Source lines with a caret, or empty.
      edit: The edit that `--fix` makes, or None.
    """

    code: Code
    severity: Severity
    message: str
    fix: str
    source: str = ""
    key: str = ""
    snippet: str = ""
    edit: NewValue | Rename | None = None

    @property
    def where(self) -> str:
        """File, line and key path, as far as they are known."""
        return f"{self.source} {self.key}".strip()

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain data; the line is a number, or None."""
        return data_of(self)

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.severity} {self.code}: {self.message}" + (
            f"\n  fix   {self.fix}" if self.fix else ""
        )


_PLACE = re.compile(
    r"(?P<source>(?:.*\.(?:toml|json)|<(?:toml|json)>)(?::[0-9]+)?)(?: (?P<key>.*))?"
)
_MODE = re.compile(r", mode [a-z]+\)$", re.MULTILINE)


def from_problem(problem: Problem) -> Finding:
    """Turn a problem of a file, whose path is `file:line key.path`, into a finding."""
    kinds = {UnknownAxisError: Code.UNKNOWN_AXIS, MissingMeshAxisError: Code.UNKNOWN_MESH_AXIS}
    place = _PLACE.fullmatch(problem.path)
    return Finding(
        code=kinds.get(problem.error, Code.INVALID),
        severity=Severity.ERROR,
        message=problem_text(problem),
        fix=problem.fix,
        source=place["source"] if place else "",
        key=(place["key"] or "") if place else problem.path,
        snippet=problem.snippet,
        edit=problem.edit,
    )


def problem_text(problem: Problem) -> str:
    """Return a problem in one line, with its rule and without the mode."""
    rule = " and ".join(_MODE.sub(")", problem.rule).splitlines())
    return " ".join(f"{problem.what}{f'; rule {rule}' if rule else ''}".split())


def dim_key(path: str, dim: int | None, label: str) -> str:
    """Return the key of a finding about a dim of a tensor, such as `blocks/q dim 1 HEAD`."""
    return " ".join(part for part in (path, "" if dim is None else f"dim {dim}", label) if part)
