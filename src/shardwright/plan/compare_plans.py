"""Compare two plans of a program: changes of memory, time and traffic, by line of the model."""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Final

from shardwright.errors import StrategyError
from shardwright.plan.collectives.collective import Kind
from shardwright.plan.planner import PlanReport
from shardwright.plan.walk.events import Event
from shardwright.vocabulary.shown import data_of

# Line of a model, `model.py:12` -> what a plan says about this line.
SaysByLine = Mapping[str, frozenset[Hashable]]

PLAN_FIX: Final = "write it with: shardwright plan MODEL --strategy F --mesh M --json > FILE"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantityChange:
    """A quantity of one device, in both plans.

    Attributes:
      name: Its name, such as `memory at most` or `sent for BATCH`.
      unit: `B`, `s`, `FLOP`, or "" for text.
      before: Value in the left plan. None if that plan does not have it.
      after: Value in the right plan. None if that plan does not have it.
    """

    name: str
    unit: str
    before: float | str | None
    after: float | str | None

    @property
    def changed(self) -> bool:
        """Whether the values of both plans differ."""
        return self.before != self.after


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of one kind, from one line, over the same axes.

    Attributes:
      kind: Kind of collective.
      mesh_axes: Mesh axes that they run over.
      axes: Semantic axes that cause them.
      source: Line of the model in the right plan. If only the left plan has the line, the line in
        the left plan.
      moved_from: The line in the left plan, if the line has moved; else "".
      before: Number of runs in the left plan, and bytes that a device sends in all of these runs.
      after: Number of runs in the right plan, and bytes that a device sends in all of these runs.
    """

    kind: Kind
    mesh_axes: tuple[str, ...]
    axes: tuple[str, ...]
    source: str
    before: tuple[int, int]
    after: tuple[int, int]
    moved_from: str = ""

    @property
    def changed(self) -> bool:
        """Whether the values of both plans differ."""
        return self.before != self.after


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanComparison:
    """Two plans of one program, compared.

    Attributes:
      before: Strategy, mesh and slice of the left plan.
      after: Strategy, mesh and slice of the right plan.
      changes: One entry for each quantity.
      traffic: One entry for each group of collectives, the largest difference first.
      gone: Places where only the left plan is unsure.
      new: Places where only the right plan is unsure.
      moved: Line of the model in the left plan -> the same line in the right plan, if its number
        differs. A moved line alone is not a change.
    """

    before: str
    after: str
    changes: tuple[QuantityChange, ...]
    traffic: tuple[Traffic, ...]
    gone: tuple[str, ...]
    new: tuple[str, ...]
    moved: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Whether the plans differ."""
        counts = [row.changed for row in self.changes] + [row.changed for row in self.traffic]
        return any(counts) or bool(self.gone or self.new)

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        return data_of(self)


def compare_plans(
    before: PlanReport | Mapping[str, Any], after: PlanReport | Mapping[str, Any]
) -> PlanComparison:
    """Compare two plans of a program.

    Args:
      before: A plan, or what its `to_json` returned.
      after: A plan under another strategy, mesh or slice, or of a changed program.

    Raises:
      StrategyError: The data is not that of a plan.
    """
    left, right = (
        each.to_json() if isinstance(each, PlanReport) else each for each in (before, after)
    )
    try:
        return _compare(left, right)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise StrategyError(
            f"the data is not that of a plan ({problem:.80})", fix=PLAN_FIX
        ) from error


def _compare(left: Mapping[str, Any], right: Mapping[str, Any]) -> PlanComparison:
    quantities = _quantities(left), _quantities(right)
    sent = _sent_by_axis(left), _sent_by_axis(right)
    names = dict.fromkeys((*quantities[0], *quantities[1]))
    changes = [
        QuantityChange(
            name=name,
            unit=unit,
            before=quantities[0].get((name, unit)),
            after=quantities[1].get((name, unit)),
        )
        for name, unit in names
    ]
    changes += [
        QuantityChange(name=f"sent for {axis}", unit="B", before=sent[0][axis], after=sent[1][axis])
        for axis in sorted({*sent[0], *sent[1]})
    ]
    moved = moved_lines(_lines(left), _lines(right))
    places = _places(left, moved)
    unsure = _unsure(left, places), _unsure(right, {})
    return PlanComparison(
        before=_label(left),
        after=_label(right),
        changes=tuple(changes),
        traffic=tuple(_traffic(left, right, moved)),
        gone=tuple(sorted(unsure[0] - unsure[1])),
        new=tuple(sorted(unsure[1] - unsure[0])),
        moved=moved,
    )


def _label(plan: Mapping[str, Any]) -> str:
    layout = plan.get("layout")
    parts = [f"{plan['strategy']} on {plan['mesh']}"] if "mesh" in plan else []
    parts += [] if layout is None else [str(layout["topology"])]
    return ", ".join(parts) or "state"


def _quantities(plan: Mapping[str, Any]) -> dict[tuple[str, str], float | str]:
    """Return the value of each quantity of a plan by name and unit.

    A plan of tensors has fewer quantities than a plan of a program.
    """
    held = plan["state"]["by_category"].items()
    rows: list[tuple[str, str, Any]] = [
        (str(category), "B", sums["per_device"]) for category, sums in held
    ]
    for name in ("memory", "time"):
        span = plan.get(name)
        if span is not None:
            unit = "B" if name == "memory" else "s"
            rows += [(f"{name} at {end}", unit, span[end]) for end in ("low", "high")]
    rows += [
        (name, unit, plan.get(key))
        for key, name, unit in (
            ("verdict", "verdict", ""),
            ("flops", "operations of matmuls", "FLOP"),
            ("matmul_bytes", "bytes of matmuls", "B"),
            ("sent_bytes", "sent", "B"),
        )
    ]
    words = {"memory at low": "memory at least", "memory at high": "memory at most"}
    words |= {"time at low": "time at least", "time at high": "time at most"}
    return {
        (words.get(name, name), unit): str(value) if unit == "" else value
        for name, unit, value in rows
        if value is not None
    }


def _events(plan: Mapping[str, Any]) -> list[Event]:
    return [Event.from_json(data) for data in plan.get("events", ())]


def _sent_by_axis(plan: Mapping[str, Any]) -> Counter[str]:
    sent: Counter[str] = Counter()
    for event in _events(plan):
        for axis in event.axes or ("specs by hand",):
            sent[axis] += event.total_wire_bytes
    return sent


def _lines(plan: Mapping[str, Any]) -> dict[str, frozenset[Hashable]]:
    """Return what a plan says about each line of the model, without the line's number."""
    lines: dict[str, Counter[Hashable]] = {}
    for event in _events(plan):
        # Leave out `rules`: their line numbers in the strategy file may differ between the plans.
        says = dataclasses.replace(event, source="", rules=())
        lines.setdefault(event.source, Counter())[says] += 1
    for source, mark in _marks(plan):
        lines.setdefault(source, Counter())[mark] += 1
    # Return frozensets, because `SequenceMatcher` needs values that have a hash.
    return {source: frozenset(says.items()) for source, says in lines.items()}


def _places(plan: Mapping[str, Any], moved: Mapping[str, str]) -> dict[str, str]:
    """Return the text for each line of the left plan that is not shown with its own number.

    A line that moved is shown with its new number. If a line is gone, and another line now has its
    number, the old line is marked `(before)`.
    """
    taken = set(moved.values())
    gone = {source for source in _lines(plan) if source in taken and source not in moved}
    return {**moved, **{source: f"{source} (before)" for source in gone}}


def _marks(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the line and the mark of each place where a plan is unsure."""
    for each in plan.get("choices", ()):
        yield each["source"], f"chosen: {each['mesh_axis']}"
    for each in plan.get("idle", ()):
        yield each["source"], f"idle: {'+'.join(each['mesh_axes'])}"


def _unsure(plan: Mapping[str, Any], places: Mapping[str, str]) -> set[str]:
    """Return each place where a plan is unsure, as text."""
    marks = {f"{mark} at {places.get(source, source)}" for source, mark in _marks(plan)}
    return marks | {f"incomplete: no rule for {name}" for name in plan.get("unknown", ())}


def _traffic(
    left: Mapping[str, Any], right: Mapping[str, Any], moved: Mapping[str, str]
) -> list[Traffic]:
    places, origins = _places(left, moved), {new: old for old, new in moved.items()}
    placed = [
        dataclasses.replace(event, source=places.get(event.source, event.source))
        for event in _events(left)
    ]
    # The number of runs and the sent bytes, by kind, mesh axes, axes and source line.
    totals: list[dict[tuple[Kind, tuple[str, ...], tuple[str, ...], str], tuple[int, int]]]
    totals = [{}, {}]
    for events, total in zip((placed, _events(right)), totals, strict=True):
        for event in events:
            key = (event.kind, event.mesh_axes, event.axes, event.source)
            runs, sent = total.get(key, (0, 0))
            total[key] = runs + event.runs, sent + event.total_wire_bytes
    rows = [
        Traffic(
            kind=kind,
            mesh_axes=mesh_axes,
            axes=axes,
            source=source,
            before=totals[0].get((kind, mesh_axes, axes, source), (0, 0)),
            after=totals[1].get((kind, mesh_axes, axes, source), (0, 0)),
            moved_from=origins.get(source, ""),
        )
        for kind, mesh_axes, axes, source in dict.fromkeys((*totals[0], *totals[1]))
    ]
    return sorted(rows, key=lambda row: -abs(row.after[1] - row.before[1]))


def moved_lines(before: SaysByLine, after: SaysByLine) -> dict[str, str]:
    """Return the new place of each line that moved within its file.

    A line of the left plan and a line of the right plan are the same line if both plans say the
    same about them. If this holds for several lines of a file, their order in the file decides.

    Args:
      before: The lines of the left plan.
      after: The lines of the right plan.

    >>> moved_lines({"a.py:3": frozenset({"x"})}, {"a.py:4": frozenset({"x"})})
    {'a.py:3': 'a.py:4'}
    """
    moved: dict[str, str] = {}
    for file in dict.fromkeys(source.rpartition(":")[0] for source in before):
        left, right = (
            # Leave out lines about which both plans say the same, because these lines did not move.
            [each for each in _lines_of(file, lines) if before.get(each) != after.get(each)]
            for lines in (before, after)
        )
        # In files of 200 lines or more, `autojunk` would ignore lines that occur often.
        matcher = difflib.SequenceMatcher(
            None, [before[each] for each in left], [after[each] for each in right], autojunk=False
        )
        for start, other, size in matcher.get_matching_blocks():
            moved.update(zip(left[start : start + size], right[other : other + size], strict=True))
    return moved


def _lines_of(file: str, lines: SaysByLine) -> list[str]:
    """Return the lines of a file in the order of their numbers."""
    numbered = [source for source in lines if source.rpartition(":")[0] == file]
    numbers = {source: source.rpartition(":")[2] for source in numbered}
    # A collective without a line, such as the sum of a gradient, has an empty source.
    return sorted(numbered, key=lambda each: int(numbers[each]) if numbers[each].isdecimal() else 0)
