"""Show resolutions: a table of decisions, and a picture of which device holds which part."""

from __future__ import annotations

import html
import math
from typing import Any, Final

from shardwright.errors import Problem
from shardwright.resolution.decisions import DimDecision, Outcome, Resolution, RuleRef
from shardwright.resolution.partition_specs import UNCONSTRAINED, entry_names, spec_text
from shardwright.show.html import MOST_CELLS, MOST_DEVICES, html_table, html_text
from shardwright.show.plain import named
from shardwright.show.tables import remarked_table
from shardwright.show.visualize import visualize
from shardwright.vocabulary.axes import EMPTY
from shardwright.vocabulary.modes import mode_name
from shardwright.vocabulary.shown import data_of, html_of, text_of

HEAD: Final = ("dim", "axis", "size", "mesh axes", "rule", "written in", "why")


def row(decision: DimDecision) -> tuple[str, ...]:
    """Return a decision as cells under `HEAD`."""
    ref = decision.rule
    rule = "" if ref is None else ref.written
    place = "" if ref is None else ref.place
    size = "" if decision.size is None else str(decision.size)
    return (
        str(decision.dim),
        decision.label or EMPTY,
        size,
        mesh_axes_text(decision),
        rule,
        place,
        decision.why,
    )


def mesh_axes_text(decision: DimDecision) -> str:
    """Return a dim's mesh axes as text: `-` if replicated, `?` if unconstrained, `!` if failed."""
    if decision.outcome is Outcome.FAILED:
        return "!"
    if decision.outcome is Outcome.UNCONSTRAINED:
        return "?"
    return "+".join(decision.mesh_axes) or "-"


@text_of.register(Resolution)
def resolution_text(resolution: Resolution) -> str:
    """Return a resolution as text: its spec, and a row per dim."""
    spec = "failed" if resolution.spec is None else spec_text(resolution.spec)
    lines = [f"{_title(resolution, '  ')}  ->  {spec}"]
    lines += remarked_table([HEAD, *map(row, resolution.decisions)], indent="  ")
    lines += [f"  {memory_text(resolution.memory)}"] if resolution.memory is not None else []
    lines += [f"  {sum_text(resolution.unreduced)}"] if resolution.unreduced is not None else []
    lines += [f"  note: {note}" for note in resolution.notes]
    for problem in resolution.problems:
        lines += [f"  {line}" for line in str(problem).splitlines()]
    return "\n".join(lines)


def memory_text(rule: RuleRef) -> str:
    """Return the memory in which an array lives, and the rule that puts it there."""
    return f"lives on the {rule.text}: {rule}"


def sum_text(decision: DimDecision) -> str:
    """Return over which mesh axes a sum stays unreduced, and why."""
    if decision.outcome is Outcome.CHOSEN and decision.rule is not None:
        return f"unreduced over {mesh_axes_text(decision)}, as {decision.label}: {decision.rule}"
    return f"nothing is unreduced over {decision.label}: {decision.why}"


@html_of.register(Resolution)
def resolution_html(resolution: Resolution) -> str:
    """Return a resolution as HTML: its spec, the picture if it is small enough, and the table."""
    spec = "failed" if resolution.spec is None else spec_text(resolution.spec)
    title = _title(resolution, ": ")
    parts = [f"<div><b>{html_text(title)}</b> → <code>{html_text(spec)}</code></div>"]
    rows = map(row, resolution.decisions)
    parts += [_picture(resolution), html_table(HEAD, rows, inline=True)]
    if resolution.memory is not None:
        parts.append(f"<div>{html_text(memory_text(resolution.memory))}</div>")
    if resolution.unreduced is not None:
        parts.append(f"<div>{html_text(sum_text(resolution.unreduced))}</div>")
    parts += [f"<div>note: {html_text(note)}</div>" for note in resolution.notes]
    # Do not use `html_text`, which would escape the line breaks of a problem.
    parts += [f"<pre>{html.escape(str(problem))}</pre>" for problem in resolution.problems]
    return f"<div>{''.join(parts)}</div>"


def _title(resolution: Resolution, gap: str) -> str:
    title = f"{resolution.annotation} as {resolution.role} in {mode_name(resolution.mode)}"
    return f"{resolution.path}{gap}{title}" if resolution.path else title


def _picture(resolution: Resolution) -> str:
    """Return an SVG with the numbers of the devices that hold each part, or an empty string.

    There is no picture of a failed resolution, of a mesh with more than 64 devices, or of more than
    two sharded dims. `sw.visualize` draws large meshes, and arrays with more sharded dims.
    """
    sizes = dict(resolution.mesh)
    if resolution.spec is None or not sizes or math.prod(sizes.values()) > MOST_DEVICES:
        return ""
    drawn = visualize(resolution)
    if len(drawn.dims) > 2 or max((dim.blocks for dim in drawn.dims), default=1) > MOST_CELLS:
        return ""
    return drawn.plain_html()


@data_of.register(Resolution)
def resolution_data(resolution: Resolution) -> dict[str, Any]:
    """Return a resolution as plain data. The spec is one list of mesh axes per dim."""
    return {
        "annotation": resolution.annotation,
        "path": resolution.path,
        "mode": mode_name(resolution.mode),
        "mode_from": str(resolution.mode_from),
        "role": str(resolution.role),
        "ok": resolution.ok,
        "spec": None
        if resolution.spec is None
        else [
            "?" if decision.entry is UNCONSTRAINED else list(entry_names(decision.entry))
            for decision in resolution.decisions
        ],
        "dims": [decision_data(decision) for decision in resolution.decisions],
        "problems": [_problem_data(problem) for problem in resolution.problems],
        "notes": list(resolution.notes),
        "memory": None if resolution.memory is None else rule_data(resolution.memory),
        **(
            {}
            if resolution.unreduced is None
            else {"unreduced": decision_data(resolution.unreduced)}
        ),
    }


@data_of.register(DimDecision)
def decision_data(decision: DimDecision) -> dict[str, Any]:
    """Return the decision of a dim as plain data."""
    size = decision.size
    return {
        "dim": decision.dim,
        "axis": decision.label,
        # JSON has no symbolic sizes of `jax.export`, such as `2*b`.
        "size": size if size is None or type(size) is int else str(size),
        "mesh_axes": list(decision.mesh_axes),
        **named(decision, "outcome", "rule"),
        **named(decision, "skipped", "gathered", "largest_dim", "zero1", "manual", "unchecked"),
    }


@data_of.register(RuleRef)
def rule_data(rule: RuleRef) -> dict[str, Any]:
    """Return a rule as plain data. Only a composite has `members`."""
    names = ("key", "text", "table", "source")
    members = {"members": list(map(rule_data, rule.members))} if rule.members else {}
    return {**{name: getattr(rule, name) for name in names}, **members}


def _problem_data(problem: Problem) -> dict[str, Any]:
    fields = {
        name: getattr(problem, name)
        for name in ("what", "path", "dim", "axis", "size", "shards", "rule", "fix")
    }
    return {
        "error": problem.error.__name__,
        "message": str(problem),
        **fields,
        "mesh_axes": list(problem.mesh_axes),
    }
