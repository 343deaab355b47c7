"""Show plans of several candidates as one HTML page, where a reader chooses and compares plans.

The page is one file that loads no other file. It contains the data as JSON, and the script
`explore.js`, which draws the data.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from jax.sharding import NamedSharding

from shardwright.errors import visible
from shardwright.manager.manager import PartitionManager
from shardwright.plan.planner import PlanReport, Program, read_arguments, trace_program
from shardwright.plan.search.rank import AnnotationRequest, read_annotations
from shardwright.plan.search.result import Candidate
from shardwright.plan.state import StateLeaf
from shardwright.plan.walk.values import local_elements
from shardwright.resolution.decisions import DimDecision
from shardwright.resolution.partition_specs import entry_names
from shardwright.resolution.request import ShardingRequest
from shardwright.resolution.resolver import left_open
from shardwright.show.html import html_text
from shardwright.show.plain import plain
from shardwright.show.plan import grouped_events, live_rows, sent_bytes, time_rows, unsure_lines
from shardwright.trees.tensors import whole_bytes
from shardwright.vocabulary.axes import Role, axis_label
from shardwright.vocabulary.modes import mode_name, parse_mode

# A number that is a whole component of a path, such as 12 in `layers/12/mlp`.
_NUMBER: Final = re.compile(r"(?<![^/])\d+(?![^/])")
_INSIDE: Final = {Role.ACTIVATION: "activations", Role.USE: "weights in use"}


def page_html(
    candidates: Sequence[Candidate],
    variants: Mapping[str, Mapping[str, Program]],
    *,
    title: str = "Plan",
    notes: Sequence[str] = (),
) -> str:
    """Return plans as one HTML page, in which a reader chooses one candidate or compares two.

    Args:
      candidates: The candidates, the best first, such as those of `search`.
      variants: Label -> programs by mode, as they were planned. The label is `Candidate.variant`.
      title: Title of the page, such as the name of the model.
      notes: Notes for the reader, such as assumptions about the model.

    >>> page = page_html((), {}, title="a < b")
    >>> "a &lt; b" in page, "<script>alert" in page
    (True, False)
    """
    parts = importlib.resources.files("shardwright.show")
    style = (parts / "explore.css").read_text(encoding="utf-8")
    script = (parts / "explore.js").read_text(encoding="utf-8")
    # Only a script with this hash runs, so no name from a file can run as a script.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'"
    # In a script element, "<" is the only character that can end the data.
    data = json.dumps(
        _printable(page_data(candidates, variants, notes=notes)), separators=(",", ":")
    ).replace("<", r"\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}; img-src data:">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # If a page has no icon, browsers ask the server for one.
        f'<link rel="icon" href="data:,"><title>{html_text(title)}</title>\n'
        f"<style>\n{style}</style></head>\n<body><h1>{html_text(title)}</h1>\n"
        '<noscript><p>This page needs JavaScript to draw its data.</p></noscript><main id="page">'
        f'</main>\n<script type="application/json" id="data">{data}</script>\n'
        f"<script>{script}</script></body></html>\n"
    )


def page_data(
    candidates: Sequence[Candidate],
    variants: Mapping[str, Mapping[str, Program]],
    *,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the data of the page. The arguments are those of `page_html`.

    Candidates refer to tensors, decisions, collectives and texts by positions in lists, because
    many candidates share them.
    """
    pools = {name: _Pool() for name in ("tensors", "decisions", "collectives", "texts")}
    programs = {
        (label, parse_mode(mode)): program
        for label, by_mode in variants.items()
        for mode, program in by_mode.items()
    }
    # Annotations do not depend on the strategy or the mesh, so take them from the first candidate
    # for all candidates.
    inside: dict[tuple[str, str], list[AnnotationRequest]] = {}
    for candidate in candidates:
        for mode, report in candidate.reports.items():
            key = candidate.variant, mode
            if key not in inside:
                topology = None if report.layout is None else report.layout.topology
                manager = candidate.manager.for_mode(mode)
                traced = trace_program(manager, programs[key], topology)
                inside[key] = [each for each in read_annotations(traced) if each.runs]
    shown = [
        {
            "strategy": candidate.name,
            "variant": candidate.variant,
            "settings": list(candidate.settings.items()),
            # Use pairs, because a JavaScript object puts integer keys first.
            "mesh": list(candidate.sizes.items()),
            "modes": {
                mode_name(mode): _plan(
                    report,
                    [
                        *_tensors(
                            report,
                            programs[candidate.variant, mode],
                            candidate.manager.for_mode(mode),
                            pools,
                        ),
                        *_annotated(
                            inside[candidate.variant, mode],
                            candidate.manager.for_mode(mode),
                            pools,
                        ),
                    ],
                    pools,
                )
                for mode, report in candidate.reports.items()
            },
        }
        for candidate in candidates
    ]
    first = next((each.report.layout for each in candidates), None)
    topology = None if first is None else first.topology
    return {
        "topology": None if topology is None else str(topology),
        "chip": None if topology is None else topology.chip.name,
        "usable": None if topology is None else topology.chip.hbm_bytes,
        "notes": list(notes),
        "candidates": shown,
        **{name: pool.values for name, pool in pools.items()},
    }


class _Pool:
    """Distinct values, which are referred to by position."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._positions: dict[str, int] = {}

    def add(self, value: Any) -> int:
        position = self._positions.setdefault(json.dumps(value), len(self.values))
        if position == len(self.values):
            self.values.append(value)
        return position


def _plan(
    report: PlanReport, tensors: list[list[Any]], pools: Mapping[str, _Pool]
) -> dict[str, Any]:
    memory, time, texts = report.memory, report.time, pools["texts"]
    # The parts of the time have the same names as in the text of a plan. Here, the time of the
    # whole run comes first.
    spans: list[tuple[str, float, float, str]] = []
    if time is not None and report.layout is not None:
        *parts, whole = time_rows(time, report.layout)
        spans = [whole, *parts]
    return {
        "verdict": plain(report.verdict),
        "memory": [memory.low, memory.high],
        "kinds": sorted(memory.kinds.items(), key=lambda item: -item[1]),
        "live": [[texts.add(cell) for cell in row] for row in live_rows(memory.live)],
        "time": [[name, low, high] for name, low, high, _ in spans],
        "sent": report.sent_bytes,
        "between": report.slice_bytes,
        "group": "" if report.layout is None else report.layout.topology.group,
        "copies": report.state.stored.replicated_share,
        "events": [
            [
                pools["collectives"].add(
                    {
                        "kind": str(event.kind),
                        "over": list(event.mesh_axes),
                        "axes": [axis_label(axis) for axis in event.axes],
                        "where": event.source,
                        "maybe": event.maybe,
                    }
                ),
                sum(each.runs for each in group),
                event.logical_bytes,
                sent_bytes(group),
            ]
            for group in grouped_events(report.events)
            for event in group[:1]
        ],
        "tensors": tensors,
        "remarks": [
            texts.add(" ".join(text.split()))
            for text in [*map(str, report.attention), *unsure_lines(report)]
        ],
    }


def _tensors(
    report: PlanReport, program: Program, manager: PartitionManager, pools: Mapping[str, _Pool]
) -> list[list[Any]]:
    """Return a row per kind of array: tensor, number of arrays, bytes of each, decisions of dims.

    Arrays of one row differ only in the numbers in their paths, such as the number of the layer.
    """
    # Candidates that differ only in the order of mesh axes share one report, with the rules of the
    # candidate that was walked. So take the decisions from the candidate's own manager. `zip`
    # leaves out the gradients, which come after the arguments.
    given = read_arguments(manager, program)
    rows: dict[tuple[Any, ...], list[StateLeaf]] = {}
    for leaf, source in zip(report.state.leaves, given, strict=False):
        counted = leaf.bytes
        pattern = _NUMBER.sub("*", counted.path)
        decisions = tuple(map(pools["decisions"].add, _decisions(source, leaf, manager)))
        key = (pattern, leaf.category, counted.shape, counted.dtype, counted.per_device, decisions)
        rows.setdefault(key, []).append(leaf)
    return [
        [
            pools["tensors"].add(
                {
                    "path": pattern if len(leaves) > 1 else leaves[0].bytes.path,
                    "category": str(category),
                    "shape": list(shape),
                    "dtype": dtype,
                }
            ),
            len(leaves),
            size,
            list(decisions),
        ]
        for (pattern, category, shape, dtype, size, decisions), leaves in rows.items()
    ]


def _annotated(
    requests: Sequence[AnnotationRequest], manager: PartitionManager, pools: Mapping[str, _Pool]
) -> list[list[Any]]:
    """Return rows as `_tensors` does, for activations and for weights as they are used.

    An annotation without a path has its source line in place of the path. Equal annotations share a
    row.
    """
    rows: dict[tuple[Any, ...], dict[str, None]] = {}
    for each in requests:
        resolution = manager.answer(each.request)
        if resolution.role not in _INSIDE:
            continue  # `_tensors` has rows for gradients and stored weights
        decisions = (resolution if each.strict else left_open(resolution)).decisions
        shape = tuple(each.request.shape or ())
        dims = tuple(decision.mesh_axes for decision in decisions)
        size = whole_bytes(local_elements(shape, dims, manager.mesh.shape), np.dtype(each.dtype))
        positions = tuple(map(pools["decisions"].add, map(_decision, decisions)))
        key = (_INSIDE[resolution.role], shape, each.dtype, size, positions)
        name = _NUMBER.sub("*", each.request.path or "") or each.source
        rows.setdefault(key, {})[name] = None
    return [
        [
            pools["tensors"].add(
                {
                    "path": ", ".join(filter(None, names)),
                    "category": category,
                    "shape": list(shape),
                    "dtype": dtype,
                }
            ),
            1,
            size,
            list(positions),
        ]
        for (category, shape, dtype, size, positions), names in rows.items()
    ]


def _decision(decision: DimDecision) -> dict[str, Any]:
    """Return the axis and the mesh axes of a dim, the rule, its place in a file, and the reason."""
    return {
        "axis": decision.label,
        "over": list(decision.mesh_axes),
        "rule": "" if decision.rule is None else decision.rule.written,
        "place": "" if decision.rule is None else decision.rule.place,
        "why": decision.why,
    }


def _decisions(
    source: ShardingRequest | NamedSharding | None, leaf: StateLeaf, manager: PartitionManager
) -> list[dict[str, Any]]:
    """Return a decision for each dim of an argument, even if the argument has its own sharding."""
    if isinstance(source, ShardingRequest):
        return [_decision(decision) for decision in manager.answer(source).decisions]
    spec = () if leaf.bytes.spec is None else leaf.bytes.spec.partitions
    entries = [*spec, *[None] * (len(leaf.bytes.shape) - len(spec))]
    why = "not annotated" if source is None else "the argument has this sharding"
    return [
        {"axis": "", "over": list(entry_names(entry)), "rule": "", "place": "", "why": why}
        for entry in entries
    ]


def _printable(value: Any) -> Any:
    """Return plain data with an escape for each character of its texts that is not printable."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {name: _printable(each) for name, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, (list, tuple)) else value
