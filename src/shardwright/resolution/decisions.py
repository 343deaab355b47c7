"""Decisions: why each dim has its mesh axes, as data.

The spec is computed from the decisions, so an explanation always agrees with the applied spec.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from jax.sharding import PartitionSpec

from shardwright.errors import Problem, raise_problems
from shardwright.resolution.partition_specs import (
    UNCONSTRAINED,
    canonical_spec,
    entry_names,
    entry_of,
)
from shardwright.vocabulary.axes import Memory, Role
from shardwright.vocabulary.modes import mode_name
from shardwright.vocabulary.shown import data_of, html_of, text_of


class Reason(enum.StrEnum):
    """Why a mesh axis or a whole candidate was skipped."""

    MISSING = "missing"
    SIZE_ONE = "size_one"
    EMPTY = "empty"
    TAKEN = "taken"
    INDIVISIBLE = "indivisible"
    NO_RULE = "no_rule"


class Outcome(enum.StrEnum):
    """How a dim was decided."""

    CHOSEN = "chosen"
    EMPTY = "empty"
    REPLICATED = "replicated"
    UNCONSTRAINED = "unconstrained"
    NO_RULE = "no_rule"
    NO_MESH_AXIS = "no_mesh_axis"
    POLICY_PREFIX = "policy_prefix"
    POLICY_REPLICATE = "policy_replicate"
    POLICY_DROP = "policy_drop"
    POLICY_FIRST_DIM = "policy_first_dim"
    POLICY_NEXT = "policy_next"
    POLICY_MISSING = "policy_missing"
    FAILED = "failed"


class ModeFrom(enum.StrEnum):
    """Where the mode of a request comes from."""

    CALL = "call"
    MANAGER = "manager"
    LAYOUT = "layout"
    LAYOUT_DIM = "layout_dim"
    DEFAULT = "default"

    __hash__ = str.__hash__


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RuleRef:
    """A rule as text, and where it is written.

    Attributes:
      key: The axis, as strategy files name it, for instance `kv_head`.
      text: The rule itself, for instance `tp | -`.
      table: Key path of the table, for instance `modes.decode`.
      source: File and line, or another origin such as `default`.
      members: For a composite, the rules of its members. Each of the other fields then has the
        texts of all members, joined.
    """

    key: str
    text: str
    table: str = ""
    source: str = ""
    members: tuple[RuleRef, ...] = ()

    @property
    def written(self) -> str:
        """The rule as it is in a file. For a composite, the rules of the members."""
        return "; ".join(f'{ref.key} = "{ref.text}"' for ref in self.members or (self,))

    @property
    def place(self) -> str:
        """File, line and table. For a composite, the places of the members."""
        places = [
            " ".join(part for part in (ref.source, f"[{ref.table}]" if ref.table else "") if part)
            for ref in self.members or (self,)
        ]
        return "; ".join(places if len({*places}) > 1 else places[:1])

    def __str__(self) -> str:
        if self.members:
            return "\n".join(map(str, self.members))
        place = ", ".join(
            part for part in (self.source, f"[{self.table}]" if self.table else "") if part
        )
        return f'{self.key} = "{self.text}"' + (f"   ({place})" if place else "")

    def to_json(self) -> dict[str, Any]:
        """Return the rule as plain data. Only a composite has `members`."""
        return data_of(self)


def rule_text(rule: RuleRef, mode: str) -> str:
    """Return a rule as text, with the place where it is written and the mode.

    A composite has one line per member.
    """
    if rule.members:
        return "\n".join(rule_text(member, mode) for member in rule.members)
    text = str(rule)
    mark = f"mode {mode_name(mode)}"
    return f"{text[:-1]}, {mark})" if text.endswith(")") else f"{text}   ({mark})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A mesh axis or a candidate that was skipped before a decision.

    Attributes:
      reason: Why it was skipped.
      candidate: The candidate as written, or empty if a member of a composite has no rule.
      mesh_axis: The mesh axis that was removed from the candidate, or empty if the whole candidate
        was skipped.
      detail: The values, for instance `6 % 4 != 0`. For `NO_RULE`, the member that has no rule.
    """

    reason: Reason
    candidate: tuple[str, ...]
    mesh_axis: str = ""
    detail: str = ""

    def __str__(self) -> str:
        if self.mesh_axis:
            return (
                f"{self.mesh_axis} "
                f"{'is not in the mesh' if self.reason is Reason.MISSING else 'has size 1'}"
            )
        if self.reason is Reason.NO_RULE:
            return f"{self.detail} has no rule"
        name = "+".join(self.candidate)
        return f"{name}: {self.detail or 'no mesh axis left'}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DimDecision:
    """How one dim was decided.

    Attributes:
      dim: Position.
      label: The dim's axes as messages show them.
      size: Number of elements, or None if no shape was given.
      outcome: How it was decided.
      mesh_axes: The mesh axes that the dim is sharded over, major first. Manual ones are included.
      rule: The rule that decided, or None. If the dim has all of its mesh axes from a policy, this
        is the rule of the policy.
      skipped: Mesh axes and candidates that were skipped before the decision, in order.
      gathered: Mesh axes that shard the stored weight, but over which the weight is gathered for
        its use.
      largest_dim: Mesh axes among `mesh_axes` or `gathered` that `policy.largest_dim` added.
      zero1: Mesh axes among `mesh_axes` that optimizer state has in addition to its parameter.
      manual: Mesh axes among `mesh_axes` that an enclosing `shard_map` has already applied.
      unchecked: Whether divisibility was not checked, because no size was given or because JAX
        cannot tell for a symbolic size.
    """

    dim: int
    label: str
    size: int | None
    outcome: Outcome
    mesh_axes: tuple[str, ...] = ()
    rule: RuleRef | None = None
    skipped: tuple[Skip, ...] = ()
    gathered: tuple[str, ...] = ()
    largest_dim: tuple[str, ...] = ()
    zero1: tuple[str, ...] = ()
    manual: tuple[str, ...] = ()
    unchecked: bool = False

    @property
    def entry(self) -> Any:
        """The dim's entry in the spec: None, one mesh axis, a tuple of them, or `UNCONSTRAINED`."""
        if self.outcome is Outcome.UNCONSTRAINED:
            return UNCONSTRAINED
        if not self.manual:
            return entry_of(self.mesh_axes)
        return entry_of(tuple(axis for axis in self.mesh_axes if axis not in self.manual))

    @property
    def why(self) -> str:
        """The decision in one line, with all mesh axes and candidates that were skipped."""
        outcome = {
            Outcome.CHOSEN: "",
            Outcome.EMPTY: "not sharded by annotation",
            Outcome.REPLICATED: "replicated by rule",
            Outcome.UNCONSTRAINED: "left to the compiler by rule",
            Outcome.NO_RULE: "no rule: replicated",
            Outcome.NO_MESH_AXIS: "no mesh axis left: replicated",
            Outcome.POLICY_PREFIX: 'policy indivisible = "prefix"',
            Outcome.POLICY_REPLICATE: 'policy indivisible = "replicate"',
            Outcome.POLICY_DROP: 'policy indivisible = "drop"',
            Outcome.POLICY_FIRST_DIM: 'policy conflict = "first_dim"',
            Outcome.POLICY_NEXT: 'policy conflict = "next": replicated',
            Outcome.POLICY_MISSING: 'policy missing = "replicate"',
            Outcome.FAILED: "failed",
        }[self.outcome]
        # A skip with the reason EMPTY follows one skip for each mesh axis of its candidate. These
        # skips already give the reason.
        skips = dict.fromkeys(str(skip) for skip in self.skipped if skip.reason is not Reason.EMPTY)
        parts = [*skips, *([outcome] if outcome else [])]
        for policy, added in (("largest_dim", self.largest_dim), ("zero1", self.zero1)):
            if added:
                parts.append(f"{'+'.join(added)} by {policy}")
        if self.gathered:
            parts.append("gathered over " + "+".join(self.gathered))
        if self.manual:
            parts.append("+".join(self.manual) + " already applied by shard_map")
        if self.unchecked:
            known = "given" if self.size is None else "known"
            parts.append(f"size not {known}: not checked")
        return "; ".join(parts) or "first candidate fits"

    def to_json(self) -> dict[str, Any]:
        """Return the decision as plain data."""
        return data_of(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """A spec, and the decision behind each of its entries.

    Attributes:
      annotation: The annotation as text.
      decisions: One per dim, in order.
      mode: The mode in which the request was resolved.
      mode_from: Where the mode comes from.
      role: activation, param, use or state.
      path: The tensor's path, or empty.
      problems: The problems of the request, or empty.
      notes: Remarks that concern no single dim, such as that an annotation was fitted to another
        rank.
      memory: The line of `[memory]` that decides where the array lives. None if no line names the
        array: it then lives on the device, as every scalar does.
      unreduced: For an `Unreduced` annotation, the decision of the dim that was summed over: the
        sum stays unreduced over the mesh axes of this decision. None for other annotations.
      mesh: Name and size of each mesh axis, for the picture in a notebook, or empty if unknown.
      spec: The spec, or None if there are problems.
    """

    annotation: str
    decisions: tuple[DimDecision, ...]
    mode: str
    mode_from: ModeFrom
    role: Role
    path: str = ""
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    memory: RuleRef | None = None
    unreduced: DimDecision | None = None
    mesh: tuple[tuple[str, int], ...] = dataclasses.field(default=(), compare=False, repr=False)
    spec: PartitionSpec | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        spec = None
        if not self.problems:
            sums = () if self.unreduced is None else entry_names(self.unreduced.entry)
            entries = [decision.entry for decision in self.decisions]
            spec = canonical_spec(entries, frozenset(sums))
        object.__setattr__(self, "spec", spec)

    @property
    def ok(self) -> bool:
        """Whether the request has a spec."""
        return not self.problems

    @property
    def on_host(self) -> bool:
        """Whether the array lives in host memory."""
        return self.memory is not None and self.memory.text == Memory.HOST

    def require(self) -> PartitionSpec:
        """Return the spec.

        Raises:
          ShardingError: There are problems. The error has all of them, and its class is that of
            the first problem.
        """
        raise_problems(self.problems, resolution=self)
        assert self.spec is not None
        return self.spec

    def to_json(self) -> dict[str, Any]:
        """Return the resolution as plain data. The spec is one list of mesh axes per dim."""
        return data_of(self)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        return html_of(self)

    def __str__(self) -> str:
        return text_of(self)
