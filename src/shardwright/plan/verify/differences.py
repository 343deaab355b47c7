"""Compare the bytes that a plan and its compiled program send, and name the reasons.

A reason is a pattern of the compiled program that adds or saves a known number of bytes. Bytes
without such a pattern are reported as not explained.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from shardwright.plan.collectives.collective import Collective, Kind
from shardwright.plan.collectives.hlo import bytes_of
from shardwright.plan.walk.events import Event
from shardwright.vocabulary.shown import data_of

_EQUAL: Final = 0.02  # a difference up to this share needs no reason
_SMALL: Final = 0.01  # reasons for less than this share are left out
_LOOKUPS: Final = ("scatter-add", "scatter", "gather")
# kinds that a collective matmul replaces
_MOVED: Final = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
_FLOATS: Final = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceCause:
    """A reason why a compiled program sends other bytes than planned.

    Attributes:
      what: The change that the compiler made, as text.
      adds: Bytes that one device sends in all runs for this reason; negative if the reason saves
        bytes.
      sources: Lines of the model where the compiled program has this pattern.
    """

    what: str
    adds: int
    sources: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The bytes that one device sends over some mesh axes, as planned and as compiled.

    Attributes:
      mesh_axes: The mesh axes.
      planned: Bytes by kind of collective in all runs, by the plan.
      compiled: Bytes by kind of collective in all runs of the compiled program.
      reasons: Why the bytes differ.
    """

    mesh_axes: tuple[str, ...]
    planned: Mapping[Kind, int]
    compiled: Mapping[Kind, int]
    reasons: tuple[DifferenceCause, ...]

    @property
    def difference(self) -> int:
        """Bytes that the compiled program sends beyond the plan; negative if it sends less."""
        return sum(self.compiled.values()) - sum(self.planned.values())

    @property
    def equal(self) -> bool:
        """Whether the totals are within 2% of each other."""
        return abs(self.difference) <= _EQUAL * max(sum(self.planned.values()), 1)

    @property
    def unexplained(self) -> int:
        """Bytes of the difference that no reason accounts for."""
        return self.difference - sum(reason.adds for reason in self.reasons)

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return data_of(self)


def compare_traffic(
    events: Sequence[Event],
    collectives: Sequence[Collective],
    *,
    cpu: bool,
    unknown: Collection[str] = (),
) -> tuple[Sent, ...]:
    """Compare a plan's collectives with those of the compiled program, by mesh axes.

    Collectives that run an unknown number of times are left out.

    Args:
      events: Collectives of the plan.
      collectives: Collectives of the compiled program.
      cpu: Whether the program was compiled for CPUs. That compiler turns reduce-scatters into
        all-reduces.
      unknown: Names of the primitives for which the plan has no rule.
    """
    planned: dict[tuple[str, ...], list[Event]] = defaultdict(list)
    compiled: dict[tuple[str, ...], list[Collective]] = defaultdict(list)
    for event in events:
        planned[event.mesh_axes].append(event)
    for collective in collectives:
        if collective.count is not None:
            compiled[collective.mesh_axes].append(collective)
    return tuple(
        _sent(axes, planned[axes], compiled[axes], cpu=cpu, unknown=unknown)
        for axes in dict.fromkeys((*planned, *compiled))
    )


def _sent(
    axes: tuple[str, ...],
    events: Sequence[Event],
    collectives: Sequence[Collective],
    *,
    cpu: bool,
    unknown: Collection[str],
) -> Sent:
    planned: Counter[Kind] = Counter()
    compiled: Counter[Kind] = Counter()
    for event in events:
        planned[event.kind] += event.total_wire_bytes
    for collective in collectives:
        compiled[collective.kind] += _wire(collective)
    row = Sent(mesh_axes=axes, planned=dict(planned), compiled=dict(compiled), reasons=())
    if row.equal and planned.keys() == compiled.keys():
        return row
    reasons = [*_known_reasons(row, events, collectives)]
    scattered = planned[Kind.REDUCE_SCATTER] - compiled[Kind.REDUCE_SCATTER]
    summed = compiled[Kind.ALL_REDUCE] - planned[Kind.ALL_REDUCE]
    # The compiler for CPUs has no reduce-scatter. Compilers for TPUs all-reduce small arrays, too.
    if scattered > 0 and (summed >= 2 * scattered or (cpu and not compiled[Kind.REDUCE_SCATTER])):
        # An all-reduce sends twice the bytes of a reduce-scatter, so it adds as many bytes as the
        # missing reduce-scatter was planned to send.
        sources = dict.fromkeys(each.source for each in events if each.kind is Kind.REDUCE_SCATTER)
        where = "on CPUs" if cpu else "of small arrays"
        what = f"reduce-scatters are all-reduces {where}, which send twice the bytes"
        reasons.append(DifferenceCause(what=what, adds=scattered, sources=tuple(sources)))
    explained = dataclasses.replace(row, reasons=tuple(reasons))
    reasons += _last_reasons(explained, events, collectives, cpu)
    unexplained = dataclasses.replace(row, reasons=tuple(reasons)).unexplained
    lines = {event.source for event in events}
    others = [each for each in collectives if _line(each) not in lines]
    if unknown and others and unexplained > 0:
        what = f"not planned: no rule for {', '.join(sorted(unknown))}"
        reasons.append(_reason(what, others, min(unexplained, sum(map(_wire, others)))))
    threshold = _SMALL * max(sum(planned.values()), sum(compiled.values()))
    large = tuple(reason for reason in reasons if abs(reason.adds) > threshold)
    return dataclasses.replace(row, reasons=large)


def _wire(collective: Collective) -> int:
    return collective.total_wire_bytes or 0


def _known_reasons(
    row: Sent, events: Sequence[Event], collectives: Sequence[Collective]
) -> Iterator[DifferenceCause]:
    """Yield the reasons whose numbers of bytes can be computed from the collectives."""
    if gathers := [each for each in collectives if each.gathers and each.kind is Kind.ALL_REDUCE]:
        yield _reason(
            "gathers are all-reduces that sum slices into zeros, and send twice the bytes",
            gathers,
            sum(map(_wire, gathers)) // 2,
        )
    permutes = (
        []
        if Kind.PERMUTE in row.planned
        else [
            each
            for each in collectives
            if each.kind is Kind.PERMUTE
            and each.op_name.rpartition("/")[2].startswith("dot_general")
        ]
    )
    converted = _converted(events, collectives, permutes)
    if permutes:
        missing = {
            kind: row.planned.get(kind, 0) - row.compiled.get(kind, 0)
            for kind in _MOVED
            if row.planned.get(kind, 0) > row.compiled.get(kind, 0)
        }
        # Count bytes in the planned element type: the bytes that another element type adds are in
        # a reason of their own, below.
        parts = sum(converted[id(each)].planned for each in permutes)
        kinds = " and ".join(missing) or "other collectives"
        yield _reason(
            f"permutes inside matmuls (collective matmul) in place of {kinds}",
            permutes,
            parts - sum(missing.values()),
        )
    for what in sorted({each.what for each in converted.values()} - {""}):
        members = [each for each in collectives if converted[id(each)].what == what]
        adds = sum(_wire(each) - converted[id(each)].planned for each in members)
        yield _reason(what, members, adds)
    lookups = [each for each in collectives if each.op_name.rpartition("/")[2] in _LOOKUPS]
    for kind in sorted({each.kind for each in lookups}):
        members = [each for each in lookups if each.kind is kind]
        # Leave out the bytes that a wider element type adds: they have a reason of their own.
        same_kind = [each for each in collectives if each.kind is kind]
        wider = sum(_wire(each) - converted[id(each)].planned for each in same_kind)
        more = row.compiled[kind] - wider - row.planned.get(kind, 0)
        if more > 0:
            yield _reason(
                f"{kind} of rows and indices, for lookups and their gradients",
                members,
                min(more, sum(map(_wire, members))),
            )


class _Converted(NamedTuple):
    """Bytes that a collective would send in the planned element type, and the change of type."""

    planned: int
    what: str


def _converted(
    events: Sequence[Event], collectives: Sequence[Collective], permutes: Sequence[Collective]
) -> dict[int, _Converted]:
    """Return the bytes of each collective in its planned element type, by its `id`.

    Two different collectives may be equal as data, so they cannot be keys themselves.
    """
    at_line: dict[str, set[str]] = defaultdict(set)
    for event in events:
        at_line[event.source].add(event.dtype)
    moved = {event.dtype for event in events if event.kind in _MOVED}
    converted = {}
    for each in collectives:
        # Permutes of a collective matmul are at the line of the matmul, not of the gather.
        types = moved if each in permutes else at_line.get(_line(each), set())
        dtype = next(iter(types)) if len(types) == 1 else ""
        sent, planned = _itemsize(each.wire_dtype), _itemsize(_FLOATS.get(dtype, ""))
        converted[id(each)] = _Converted(_wire(each), "")
        if sent and planned and _FLOATS[dtype] != each.wire_dtype:
            what = f"{dtype} values are sent as {each.wire_dtype}"
            converted[id(each)] = _Converted(_wire(each) * planned // sent, what)
    return converted


def _itemsize(dtype: str) -> int | None:
    """Return the size in bytes of an element type as HLO names it; None for several types."""
    return bytes_of(dtype, 1) if dtype in _FLOATS.values() else None


def _line(collective: Collective) -> str:
    """Return the source line as a plan writes it, without folders."""
    return collective.source.rpartition("/")[2]


def _last_reasons(
    row: Sent, events: Sequence[Event], collectives: Sequence[Collective], cpu: bool
) -> Iterator[DifferenceCause]:
    """Yield a reason for all bytes that are not explained yet, if one fits the program."""
    unexplained = row.unexplained
    if unexplained <= _EQUAL * max(sum(row.planned.values()), 1):
        return
    remat = [each for each in collectives if "rematted_computation" in each.op_name]
    remat = [each for each in remat if each.kind in (Kind.ALL_GATHER, Kind.PERMUTE)]
    if remat and Kind.ALL_GATHER in row.planned:
        yield _reason("weights are gathered again for rematerialization", remat, unexplained)
        return
    sums = [each for each in collectives if each.kind is Kind.ALL_REDUCE and not each.gathers]
    planned = [event for event in events if event.kind is Kind.ALL_REDUCE]
    # Only a planned all-reduce can become several all-reduces.
    lines = {event.source for event in planned}
    merged = [each for each in sums if _line(each) in lines]
    if cpu and sum(map(_wire, merged)) > sum(event.total_wire_bytes for event in planned):
        adds = min(unexplained, sum(map(_wire, merged)))
        yield _reason("several all-reduces that a compiler for TPUs merges", merged, adds)


def _reason(what: str, collectives: Sequence[Collective], adds: int) -> DifferenceCause:
    sources = tuple(dict.fromkeys(_line(each) for each in collectives if each.source))
    return DifferenceCause(what=what, adds=adds, sources=sources)
