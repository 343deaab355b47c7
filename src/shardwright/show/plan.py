"""Show plans: the state, the memory, the collectives, the time, and where a plan is unsure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from shardwright.plan.fit import Verdict, judge
from shardwright.plan.hardware import Chip
from shardwright.plan.layout import Layout
from shardwright.plan.links import SecondsRange
from shardwright.plan.planner import PlanReport
from shardwright.plan.state import Category, StateBytes, StateLeaf
from shardwright.plan.time import TimeRange
from shardwright.plan.walk.entries import CONSTANTS, LOOPS, RESULTS, TEMPORARY, Live, Peak
from shardwright.plan.walk.events import Event
from shardwright.show.memory import SUMS
from shardwright.show.plain import named, plain
from shardwright.show.tables import remarked_table, table, wrap
from shardwright.vocabulary.axes import axis_label
from shardwright.vocabulary.shown import WIDTH, data_of, text_of
from shardwright.vocabulary.units import bytes_text, seconds_text

EVENT_HEAD: Final = ("times", "collective", "over", "axis", "bytes", "sent", "where")
LIVE_HEAD: Final = ("at the peak", "values", "of each", "for", "where")
STATE_HEAD: Final = ("state", "arrays", "per device", "on all devices", "copies")
CAUSE_HEAD: Final = ("replicated over", "could save", "arrays", "rule", "why")
_TIME_HEAD: Final = ("time", "at least", "at most", "assumed")
_CAUSES: Final = 5  # how many of the rules that replicate state are shown by default
_VERDICTS: Final = {
    Verdict.FITS: "fits",
    Verdict.DOES_NOT_FIT: "does not fit",
    Verdict.CLOSE: "close: compile the program to know",
}
# Values that a program creates while it runs. Values of all other kinds are arguments, which are in
# the table of state.
_MADE: Final = (TEMPORARY, LOOPS, RESULTS, CONSTANTS)


@text_of.register(PlanReport)
def plan_text(report: PlanReport, *, rows: int | None = None, width: int = WIDTH) -> str:
    """Return a plan as text. For the options, see `PlanReport.text`."""
    lines = [f"strategy {report.strategy or '-'} on {report.mesh}"]
    lines += ["" if report.layout is None else f"{report.layout}\n"]
    if report.state.leaves:
        lines += [state_text(report.state, rows=rows, width=width)]
        if Category.GRADIENTS in report.state.categories:
            lines.append("gradients exist only during the step; below, they are temporary")
        lines.append("")
    chip = None if report.layout is None else report.layout.topology.chip
    complete = report.walked.complete
    lines += [*fit_lines(report.memory, chip, complete=complete, width=width), ""]
    lines += event_lines(report.events, rows=rows, width=width)
    if report.layout is not None and report.layout.crossing:
        group = report.layout.topology.group
        lines.append(f"of these to other {group}s: {bytes_text(report.slice_bytes)}")
    lines += map(str, report.attention)
    if report.time is not None and report.layout is not None:
        rows_of_time = [
            (name, *map(seconds_text, ends), how)
            for name, *ends, how in time_rows(report.time, report.layout)
        ]
        lines += ["", *remarked_table([_TIME_HEAD, *rows_of_time], width=width)]
    lines += unsure_lines(report)
    return "\n".join(lines)


def unsure_lines(report: PlanReport) -> list[str]:
    """Return the places where a plan is unsure, with the fix of each if there is one."""
    walked = report.walked
    unknown = sorted(walked.unknown.items())
    untimed = []
    chip = None if report.layout is None else report.layout.topology.chip
    if chip is not None and not chip.host_rate and report.host_bytes:
        fix = f"give [{chip.name}] a host_gbps in a file of --hardware"
        moved = bytes_text(report.host_bytes)
        untimed = [f"not timed: {moved} between device and host\n  fix   {fix}"]
    # Use a set, because an unrolled model reaches the same line once for each layer.
    idle = {(item.source, "+".join(item.mesh_axes)) for item in walked.idle}
    return [
        *(
            f"incomplete: no rule for {name} ({count})\n"
            "  fix   compile the program to count the rest: --verify, or verify_plan"
            for name, count in unknown
        ),
        *(
            f"chosen: {choice.mesh_axis} at {choice.source}\n  fix   {choice.fix}"
            for choice in walked.choices
        ),
        *(f"idle: {axes} at {source}" for source, axes in sorted(idle)),
        *untimed,
    ]


def state_text(state: StateBytes, *, rows: int | None = None, width: int = WIDTH) -> str:
    """Return a table of bytes by category, and a table of the rules that replicate the most bytes.

    Args:
      state: The state.
      rows: How many rules to show. Defaults to 5.
      width: Characters per line.
    """
    lines = table(
        [STATE_HEAD, *(state_row(state, category) for category in state.categories)], width=width
    )
    causes = cause_rows(state)
    shown = causes[: _CAUSES if rows is None else rows]
    if shown:
        lines += ["", *remarked_table([CAUSE_HEAD, *shown], width=width)]
    if len(shown) < len(causes):
        lines.append(f"and {len(causes) - len(shown)} more")
    lines += [f"not counted: {text}" for text in state.missing]
    return "\n".join(lines)


def state_row(state: StateBytes, category: Category) -> tuple[str, ...]:
    """Return the cells of a category, in the order of `STATE_HEAD`."""
    tree = state.of(category)
    return (
        str(category),
        str(len(tree.leaves)),
        bytes_text(tree.per_device)
        + (f", {bytes_text(tree.host_per_device)} on host" if tree.host_per_device else ""),
        bytes_text(tree.held),
        f"{bytes_text(tree.replicated)} ({tree.replicated_share:.1%})",
    )


def cause_rows(state: StateBytes) -> list[tuple[str, ...]]:
    """Return one row per mesh axis and rule, the largest possible saving first."""
    return [
        (axis, bytes_text(saves), str(count), rule, why)
        for saves, count, (axis, rule, why) in _causes(state)
    ]


def _causes(state: StateBytes) -> list[tuple[int, int, tuple[str, str, str]]]:
    """Per cause, return the bytes to save, the number of arrays, and (mesh axis, rule, reason)."""
    saved: dict[tuple[str, str, str], list[int]] = {}
    for leaf in state.leaves:
        if leaf.category is Category.INPUTS or not leaf.bytes.shape:
            continue  # inputs are often replicated on purpose, and scalars cannot be sharded
        for cause in leaf.causes:
            place = f"   ({cause.place})" if cause.place else ""
            key = (cause.mesh_axis, f"{cause.rule or '-'}{place}", cause.why)
            saved.setdefault(key, []).append(cause.saves)
    causes = [(sum(each), len(each), key) for key, each in saved.items()]
    return sorted(causes, key=lambda cause: -cause[0])


def live_rows(live: Sequence[Live], *, rows: int = 5) -> list[tuple[str, ...]]:
    """Return the cells of the largest values that a program makes, in the order of `LIVE_HEAD`."""
    made = [each for each in live if each.kind in _MADE][:rows]
    return [
        (
            bytes_text(each.size),
            str(each.count),
            # An entry without a dtype stands for operands of collectives, which may have several
            # types.
            f"{each.dtype}[{','.join(map(str, each.shape))}]" if each.dtype else "moved operands",
            each.kind,
            each.source or "-",
        )
        for each in made
    ]


def fit_lines(
    peak: Peak, chip: Chip | None, *, complete: bool = True, width: int = WIDTH
) -> list[str]:
    """Return lines on memory: the range, the parts of its upper end, and the verdict.

    Args:
      peak: The range of the peak.
      chip: The chip, or None for no verdict.
      complete: Whether every primitive of the program has a rule.
      width: Characters per line.
    """
    kinds = sorted(peak.kinds.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in kinds)
    lines = [
        f"memory per device: {bytes_text(peak.low)} to {bytes_text(peak.high)}",
        *wrap(f"at most {parts}", width, first="  ", rest="    "),
    ]
    if chip is not None:
        verdict = judge(peak, chip.hbm_bytes, complete=complete, host=chip.host_bytes)
        pool = f" ({chip.pool_share:.0%} of its memory)" if chip.domain else ""
        usable = f"{bytes_text(chip.hbm_bytes)} usable on {chip.name}{pool}"
        lines.append(f"  {usable}: {_VERDICTS[verdict]}")
    if peak.host:
        lines.append(f"memory of the host for each device: {bytes_text(peak.host)}")
        if chip is not None:
            known = f"{bytes_text(chip.host_bytes)} on {chip.name}" if chip.host_bytes else ""
            lines[-1] += f" of {known or f'a size that is not known of {chip.name}'}"
    live = live_rows(peak.live)
    return [*lines, *(remarked_table([LIVE_HEAD, *live], indent="  ", width=width) if live else [])]


def event_lines(
    events: Sequence[Event], *, rows: int | None = None, width: int = WIDTH
) -> list[str]:
    """Return a table of collectives, most bytes first, and the sum of their bytes.

    Args:
      events: Collectives of a plan.
      rows: How many rows to show. Defaults to all.
      width: Characters per line.
    """
    groups = grouped_events(events)
    if not groups:
        return ["nothing is sent"]
    shown = groups if rows is None else groups[:rows]
    table = remarked_table([EVENT_HEAD, *map(event_row, shown)], width=width)
    if len(shown) < len(groups):
        table.append(f"and {len(groups) - len(shown)} more")
    # If it is unknown whether a collective runs, the sum is an upper bound.
    most = "at most " if any(event.maybe for event in events) else ""
    return [*table, f"sent per device: {most}{bytes_text(sent_bytes(events))}"]


def grouped_events(events: Sequence[Event]) -> list[list[Event]]:
    """Return groups of collectives with equal kind, axes, bytes and line, most bytes sent first."""
    groups: dict[tuple[Any, ...], list[Event]] = {}
    for event in events:
        # If it is unknown whether a collective runs, its row has a "≤". So such collectives do not
        # share a row with others.
        key = (
            *(event.kind, event.mesh_axes, event.axes, event.logical_bytes, event.source),
            event.maybe,
        )
        groups.setdefault(key, []).append(event)
    return sorted(groups.values(), key=sent_bytes, reverse=True)


def sent_bytes(events: Sequence[Event]) -> int:
    """Return the bytes that one device sends in all runs of some collectives."""
    return sum(event.total_wire_bytes for event in events)


def event_row(events: Sequence[Event]) -> tuple[str, ...]:
    """Return the cells of a group, in the order of `EVENT_HEAD`."""
    event = events[0]
    times = sum(each.runs for each in events)
    return (
        f"≤{times}" if event.maybe else str(times),
        str(event.kind),
        "+".join(event.mesh_axes),
        ", ".join(map(axis_label, event.axes)) or "-",
        bytes_text(event.logical_bytes),
        bytes_text(sent_bytes(events)),
        event.source,
    )


def time_rows(time: TimeRange, layout: Layout) -> list[tuple[str, float, float, str]]:
    """Return each part of an estimate: name, fewest and most seconds, and the assumption."""
    chip = layout.topology.chip
    # For GPUs, the text names only the rate of bfloat16. `estimate_time` also uses those of float8
    # and float32.
    kind = " in bfloat16" if chip.domain else ""
    parts = [
        ("matmuls", time.matmuls, f"{chip.flops / 1e12:g} TFLOP/s{kind}, at 100% to 50%"),
        (
            "memory",
            time.memory,
            f"{chip.hbm_rate / 1e9:g} GB/s; each argument once, at most all operands",
        ),
    ]
    if time.host.high:
        how = f"{chip.host_rate / 1e9:g} GB/s one way; at best both ways at once"
        parts.append(("host link", time.host, how))
    for axes, span in time.links.items():
        parts.append(("+".join(axes), span, _rates_text(axes, layout)))
    whole = SecondsRange(low=time.low, high=time.high)
    # `whole` is not the sum of the parts, because at best all of them overlap.
    parts.append(("all", whole, "from full overlap to none; not calibrated"))
    return [(name, span.low, span.high, assumed) for name, span, assumed in parts]


def _rates_text(axes: tuple[str, ...], layout: Layout) -> str:
    slow, fast = layout.rates(axes)
    chip, group, texts = layout.topology.chip, layout.topology.group, []
    if fast:  # 0 for mesh axes that only cross slices
        rates = f"{slow / 1e9:g}" if slow == fast else f"{slow / 1e9:g} to {fast / 1e9:g}"
        hops = "" if chip.domain else ", 1 µs per hop at most"
        texts.append(f"{rates} GB/s one way{hops}")
    if layout.slices_of(axes) > 1:
        texts.append(f"{chip.dcn_rate / 1e9:g} GB/s between {group}s")
    return "; ".join([*texts, *(["latency of NCCL at most"] if chip.domain else [])])


@data_of.register(PlanReport)
def plan_data(report: PlanReport) -> dict[str, Any]:
    """Return a plan as plain data."""
    walked = report.walked
    return {
        # The order of these calls is the order of the keys in the JSON.
        **named(report, "strategy", "mesh", "layout", "state", "memory", "verdict", "time"),
        **named(walked, "complete", "unknown"),
        **named(report, "attention", "events"),
        **named(walked, "choices", "idle", "flops", "matmul_bytes"),
        **named(report, "sent_bytes", "slice_bytes", "host_bytes"),
    }


@data_of.register(StateBytes)
def _state_bytes(state: StateBytes) -> dict[str, Any]:
    """Return sums by category, and all arrays."""
    sums = {str(each): named(state.of(each), *SUMS) for each in state.categories}
    share = named(state.stored, "replicated_share")
    return {"by_category": sums, **share, **named(state, "missing", "leaves")}


@data_of.register(StateLeaf)
def _state_leaf(leaf: StateLeaf) -> dict[str, Any]:
    return {**named(leaf, "category"), **plain(leaf.bytes), **named(leaf, "causes")}


@data_of.register(Layout)
def _layout(layout: Layout) -> dict[str, Any]:
    return {"topology": str(layout.topology), **named(layout, "crossing", "parts")}


@data_of.register(TimeRange)
def _time(time: TimeRange) -> dict[str, Any]:
    """Return the range and its parts, in seconds."""
    links = {"+".join(axes): plain(span) for axes, span in time.links.items()}
    return {**named(time, "low", "high", "matmuls", "memory", "host"), "links": links}
