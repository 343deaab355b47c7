"""Plan programs under every mesh of a slice and every setting of rules, and keep the best.

Every candidate is resolved, and its state is counted. A walk over the trace of a candidate then
plans this candidate. In a small space, all candidates are walked. In a large space, three quarters
of the walks are for the candidates that a closed form of the time ranks first (see `rank`). The
last quarter is for the candidates with the smallest state. A trace takes the most time, and most
meshes need a trace of their own. So, where the program allows it, one trace on a single device is
used to rank all candidates. Only candidates that are walked get a trace of their own. Nothing is
compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardwright.errors import ProgramError, ShardingError, StrategyError
from shardwright.manager.manager import PartitionManager
from shardwright.mesh.build import abstract_mesh
from shardwright.plan.fit import Verdict
from shardwright.plan.hardware import Topology, parse_topology, read_hardware
from shardwright.plan.layout import Layout, lay_out
from shardwright.plan.planner import (
    PlanReport,
    Program,
    host_too_small,
    price,
    program_state,
    trace_program,
)
from shardwright.plan.renaming import Renaming, find_renaming
from shardwright.plan.search.rank import (
    AnnotationRequest,
    ResolvedAnnotation,
    closed_form,
    read_annotations,
    resolve_all,
)
from shardwright.plan.search.result import STOPPED, Candidate, SearchReport
from shardwright.plan.search.settings import read_pins, read_vary
from shardwright.plan.search.space import Point, Space, default_strategies
from shardwright.plan.search.unused import UnusedAxes
from shardwright.plan.trace import Trace, is_typed
from shardwright.resolution.partition_specs import entry_names
from shardwright.resolution.pipeline import STAGES
from shardwright.resolution.request import ShardingRequest
from shardwright.vocabulary.axes import BATCH, LENGTH, QUERY_LENGTH
from shardwright.vocabulary.modes import MODE_TRAIN, parse_mode
from shardwright.vocabulary.units import bytes_text

if TYPE_CHECKING:
    from shardwright.strategy.model import Strategy

# Number of programs that are walked by default. The walks take 20 seconds for a decoder. On
# 2xv5p:4x4x4, 16xh100:8 and 4xgb200:72, all candidates of an 8B decoder were walked once: the ten
# best were among the programs that are walked by default.
WALKS: Final = 40
_TOO_LARGE: Final = "does not fit"
_TOO_LARGE_ON_HOST: Final = "does not fit into the memory of the host"
_UNUSED: Final = "a mesh axis that no tensor is sharded over"


def search(
    program: Program | Mapping[str, Program],
    strategies: Mapping[str, Strategy] | None = None,
    *,
    topology: str | Topology,
    mode: str | None = None,
    axes: Sequence[str] | None = None,
    pins: Sequence[str] = (),
    vary: Mapping[str, Sequence[str | None]] | None = None,
    orders: bool = False,
    keep_large: bool = False,
    walks: int = WALKS,
    progress: Callable[[SearchProgress], object] | None = None,
) -> SearchReport:
    """Plan programs under every mesh of a slice and every strategy.

    A candidate is a strategy on a mesh. It is dropped and counted if it does not resolve, does not
    fit, is the same program as another candidate of its strategy, or has a mesh axis that no tensor
    can be sharded over. In the result, candidates that fit come before those that may fit (verdict
    `close`). Both are sorted by the upper end of the estimated time, then by the upper end of the
    memory. If a strategy has Explicit `axis_types`, its candidates are traced one by one, and those
    that JAX refuses come last. The same arguments always give the same result.

    Args:
      program: The program to plan, or one program per mode. One strategy serves all of them.
      strategies: Name -> strategy with a `[mesh]`. Defaults to the presets `fsdp_tp` and
        `fsdp_tp_sp`, and `moe_ep` for a program with experts; for programs that do not train, to
        `serve_tp` and `serve_long_context`.
      topology: The slice, such as `v5p:4x4x4`, or the hosts of GPUs, such as `16xh100:8`.
      mode: Runtime mode of a single program. Defaults to train.
      axes: Mesh axes that may have a size above 1. A strategy may lack some. Defaults to those that
        a rule gives to a tensor of the program.
      pins: Settings that every candidate has, such as `head = tp`, `params.embed = fsdp`,
        `policy.zero1 = dp`, `memory.state = host` or `mesh.tp = 4`.
      vary: Settings and their alternatives: `{"head": ("tp", "-")}`. None keeps the setting of the
        strategy. A pin of the same setting replaces the alternatives.
      orders: Whether to try every order of the mesh axes. The order decides which links they use.
      keep_large: Whether to plan and keep candidates that do not fit. They come after all others.
      walks: How many walks to run at most. Candidates that differ only in the order of axes share a
        walk.
      progress: Called for each candidate when it is judged, and again when it is planned. If it
        returns False, the search ends, and the result has the candidates that were planned until
        then.

    Raises:
      StrategyError: A strategy has no mesh, there is no candidate, or there are too many.
      MeshSpecError: There is no such slice, or `axes` names a mesh axis that no strategy has.
      ShardingError: A pin is invalid, two pins contradict each other, an alternative fits no
        strategy, or no candidate resolves. If none resolves, this is the error of the first
        candidate.
    """
    slice_ = parse_topology(topology, read_hardware()) if isinstance(topology, str) else topology
    if isinstance(program, Program):
        programs = {MODE_TRAIN if mode is None else parse_mode(mode): program}
    else:
        programs = {parse_mode(key): each for key, each in program.items()}
    if not programs:
        raise StrategyError("there is no program to search", fix="give one program per mode")
    space = Space(
        strategies=default_strategies(programs) if strategies is None else strategies,
        devices=slice_.devices,
        axes=axes,
        pins=read_pins(pins),
        vary=read_vary((vary or {}).items()),
        orders=orders,
        modes=tuple(programs),
    )
    found = _Search(
        space=space,
        programs=programs,
        topology=slice_,
        keep_large=keep_large,
        progress=progress,
    )
    return found.run(walks)


def search_variants(
    variants: Mapping[str, Program | Mapping[str, Program]],
    strategies: Mapping[str, Strategy] | None = None,
    *,
    topology: str | Topology,
    **options: Any,
) -> SearchReport:
    """Search several variants of a program, such as two batch sizes, and compare all candidates.

    Args:
      variants: Label -> program, or one program per mode, as in `search`. Labels are shown with the
        candidates.
      strategies: Name -> strategy with a `[mesh]`. Defaults to those of `search`.
      topology: The slice.
      **options: Other options of `search`. `walks` is the limit for each variant.

    Raises:
      ShardingError: `search` raises an error for every variant. This is the first of these errors.
    """
    reports: dict[str, SearchReport] = {}
    # A variant that fails, such as a batch that does not divide, does not end the search of other
    # variants.
    errors: list[ShardingError] = []
    for label, program in variants.items():
        try:
            reports[label] = search(program, strategies, topology=topology, **options)
        except ShardingError as error:
            errors.append(error)
    if not reports:
        raise errors[0] if errors else StrategyError("there is no variant", fix="give one")
    candidates = [
        dataclasses.replace(candidate, variant=label)
        for label, report in reports.items()
        for candidate in report.candidates
    ]
    dropped = sum((Counter(report.dropped) for report in reports.values()), Counter())
    examples: dict[str, str] = {}
    for label, report in reports.items():
        for reason, text in report.examples.items():
            examples.setdefault(reason, f"{label}, {text}" if label else text)
    return SearchReport(
        topology=next(iter(reports.values())).topology,
        candidates=tuple(sorted(candidates, key=lambda each: each.order)),
        dropped=_ordered(dropped),
        walked=sum(report.walked for report in reports.values()),
        skipped=sum(report.skipped for report in reports.values()),
        examples=examples,
        fixed_axes=next(iter(reports.values())).fixed_axes,
        refused=tuple(
            (f"{label}, {point}" if label else point, why)
            for label, report in reports.items()
            for point, why in report.refused
        ),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchProgress:
    """The progress of a search.

    Attributes:
      doing: `judged` or `planned`.
      done: Number of candidates so far.
      all: Number of candidates in all.
    """

    doing: str
    done: int
    all: int

    def __str__(self) -> str:
        return f"{self.doing} {self.done} of {self.all} candidates"


# Key of a candidate's program: the sizes of the mesh and, for each mode, the number of a trace, the
# specs that the program asked for, the rules of memory, and the mesh axes of each annotation. A key
# from the candidate's own trace is exact. A key from the trace on one device may be inexact,
# because this trace may lack annotations, such as those of an exchange between experts.
_ProgramKey = tuple[Any, ...]


class _Shared(NamedTuple):
    """A trace that fits a candidate, with its number, annotations and renamed mesh axes."""

    number: int
    trace: Trace
    requests: tuple[AnnotationRequest, ...]
    renaming: Renaming


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Resolved:
    """A candidate that resolves and whose state fits.

    Attributes:
      point: The candidate.
      strategy: Its strategy, with its mesh.
      layout: Assignment of its mesh axes to the slice.
      specs: The resolved annotations of the trace that gave the candidate its rank. Candidates with
        equal specs are one group, and are walked together.
      rank: Seconds by the closed form.
      held: Bytes of its state on one device.
    """

    point: Point
    strategy: Strategy
    layout: Layout
    specs: _ProgramKey
    rank: float
    held: int


@dataclasses.dataclass(slots=True, kw_only=True)
class _Search:
    """One search. Traces and walks are kept, since many candidates share them.

    Attributes:
      space: The candidates.
      programs: Program by mode.
      topology: The slice.
      keep_large: Whether candidates that do not fit are kept.
      progress: Called for each candidate.
      traces: Mode -> its traces, each with its annotations.
      single: Mode -> the trace on one device with its annotations, for programs with `any_mesh`.
      shared: Modes that have one trace which fits every candidate.
      walks: Key of a walked program -> its plans by mode. Candidates that differ only in the order
        of axes share them.
      flops: Upper bound of the operations of all devices, by mode.
      tokens: Tokens of one run, by mode; 0 if no argument has BATCH and a length.
      dropped: Reason -> number of candidates.
      examples: Reason -> a candidate that was dropped for it, with its error.
      refused: Candidates that JAX refuses, and why.
      first_error: Error of the first candidate that failed.
      smallest: Of the candidates that do not fit, the fewest bytes that one of them needs.
      stopped: Whether `progress` has ended the search.
    """

    space: Space
    programs: Mapping[str, Program]
    topology: Topology
    keep_large: bool = False
    progress: Callable[[SearchProgress], object] | None = None
    traces: dict[str, list[tuple[Trace, tuple[AnnotationRequest, ...]]]] = dataclasses.field(
        default_factory=dict
    )
    single: dict[str, tuple[Trace, tuple[AnnotationRequest, ...]]] = dataclasses.field(
        default_factory=dict
    )
    shared: set[str] = dataclasses.field(default_factory=set)
    walks: dict[_ProgramKey, dict[str, PlanReport]] = dataclasses.field(default_factory=dict)
    flops: dict[str, float] = dataclasses.field(default_factory=dict)
    tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    examples: dict[str, str] = dataclasses.field(default_factory=dict)
    refused: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    first_error: ShardingError | None = None
    smallest: float = math.inf
    stopped: bool = False

    def run(self, most: int) -> SearchReport:
        """Judge every candidate, walk the best, and return the result."""
        points = self.space.points()
        # A pin that no strategy accepts would drop every candidate for the same reason.
        self.space.check_settings()
        groups: dict[_ProgramKey, list[_Resolved]] = {}
        for each in self._resolve_all(points):
            groups.setdefault(each.specs, []).append(each)
        candidates = self._walk_best(groups, most)
        # A candidate that is too large has resolved. So if there is one, the settings are valid.
        resolves = self.walks or _TOO_LARGE in self.dropped or self.stopped
        if self.first_error is not None and not resolves:
            raise self.first_error
        skipped = sum(map(len, groups.values()))
        if skipped:
            self.dropped["not planned: ranked too low"] += skipped
        return SearchReport(
            topology=self.topology,
            candidates=tuple(sorted(candidates, key=lambda each: each.order)),
            dropped=_ordered(self.dropped),
            walked=len(self.walks),
            skipped=skipped + self.dropped[STOPPED],
            examples=self.examples,
            fixed_axes=self.space.fixed_axes,
            refused=tuple(self.refused),
        )

    def _drop(self, point: Point, error: ShardingError) -> None:
        """Count a candidate that fails. Equal reasons are counted together."""
        self.first_error = self.first_error or error
        first = error.problems[0]
        if isinstance(error, ProgramError):
            self.refused.append((str(point), str(first)))
            return
        reason = f"{first.error.__name__} {first.axis}" if first.axis else first.error.__name__
        self.dropped[reason] += 1
        self.examples.setdefault(reason, f"{point}: {first}")

    def _drop_planned(self, candidate: Candidate, point: Point) -> None:
        """Count a candidate that does not fit into the memory of the chip or of the host."""
        reports = candidate.reports.values()
        if any(map(host_too_small, reports)):
            self.dropped[_TOO_LARGE_ON_HOST] += 1
            needed = bytes_text(max(report.memory.host for report in reports))
            usable = bytes_text(self.topology.chip.host_bytes)
            self.examples.setdefault(_TOO_LARGE_ON_HOST, f"{point}: {needed} of {usable}")
            return
        self._drop_large(point, max(report.memory.low for report in reports))

    def _drop_large(self, point: Point, needed: int) -> None:
        """Count a candidate that does not fit.

        The candidate that needs the least memory is kept as the example.
        """
        self.dropped[_TOO_LARGE] += 1
        if needed < self.smallest:
            self.smallest = needed
            usable = bytes_text(self.topology.chip.hbm_bytes)
            self.examples[_TOO_LARGE] = f"{point}: at least {bytes_text(needed)} of {usable}"

    def _report(self, doing: str, done: int, of: int) -> None:
        if self.progress is not None:
            answer = self.progress(SearchProgress(doing=doing, done=done, all=of))
            self.stopped = self.stopped or answer is False

    def _resolve_all(self, points: Sequence[Point]) -> list[_Resolved]:
        resolved: list[_Resolved] = []
        strategies: dict[Any, Strategy | ShardingError] = {}
        unused = UnusedAxes(self.space, self.programs)
        for number, point in enumerate(points, 1):
            if self.stopped:
                self.dropped[STOPPED] += 1
                continue
            self._report("judged", number, len(points))
            try:
                strategy = self._strategy(point, strategies)
                if idle := [axis for axis in unused.of(strategy) if point.sizes.get(axis, 1) > 1]:
                    self.dropped[_UNUSED] += 1
                    self.examples.setdefault(_UNUSED, f"{point}: {', '.join(idle)}")
                    continue
                each = self._resolve(point, strategy)
            except ShardingError as error:
                self._drop(point, error)
                continue
            if each is not None:
                resolved.append(each)
        return resolved

    def _strategy(self, point: Point, known: dict[Any, Strategy | ShardingError]) -> Strategy:
        """Return the strategy of a point, without its mesh. Points with equal settings share it."""
        key = (point.name, tuple(point.settings.items()))
        if key not in known:
            try:
                known[key] = self.space.strategy(point.name, point.settings)
            except ShardingError as error:
                # Keep the error too: each mesh of the strategy would raise the same error again.
                known[key] = error
        result = known[key]
        if isinstance(result, ShardingError):
            raise result
        return result

    def _resolve(self, point: Point, base: Strategy) -> _Resolved | None:
        """Resolve a candidate. If its state does not fit, count it as dropped and return None."""
        layout = lay_out(self.topology, point.sizes)
        strategy = base | type(base)(mesh=dict(point.sizes), dcn=dict(layout.crossing))
        manager = _manager(strategy, point)
        # Check the state first, because it needs no new trace. The annotations below may need a
        # trace per mesh.
        held = max(self._held(manager.for_mode(mode), mode) for mode in self.programs)
        if held > self.topology.chip.hbm_bytes and not self.keep_large:
            self._drop_large(point, held)
            return None
        sizes = {axis: size for axis, size in point.sizes.items() if size > 1}
        # Specs name mesh axes without sizes, so the sizes are part of the key.
        rank, specs = 0.0, [tuple(sorted(sizes.items()))]
        for mode in self.programs:
            in_mode = manager.for_mode(mode)
            shared = self._judged_by(in_mode, mode)
            resolved = resolve_all(in_mode, shared.requests, sizes)
            specs.append(_key(shared, in_mode, resolved))
            rank += closed_form(resolved, in_mode, layout, flops=self.flops[mode])
        return _Resolved(
            point=point,
            strategy=strategy,
            layout=layout,
            specs=tuple(specs),
            rank=rank,
            held=held,
        )

    def _held(self, manager: PartitionManager, mode: str) -> int:
        """Return the bytes of the arguments on one device. All traces of a mode agree on them."""
        program = self.programs[mode]
        if program.any_mesh and mode not in self.single and not is_typed(manager):
            one = manager.having(mesh=abstract_mesh(dict.fromkeys(manager.mesh.axis_names, 1)))
            traced = trace_program(one, program, self.topology)
            self._count(one, traced, mode)
            self.single[mode] = traced, read_annotations(traced)
        elif mode not in self.single and not self.traces.get(mode):
            self._trace(manager, mode)
        traced, _ = self.single[mode] if mode in self.single else self.traces[mode][0]
        return program_state(manager, traced, program).of().per_device

    def _judged_by(self, manager: PartitionManager, mode: str) -> _Shared:
        """Return the trace by whose annotations a candidate is ranked.

        This is the trace on one device. In three cases, it is a trace that fits the candidate:
        there is no trace on one device, the mesh has Explicit axes, or the layers run in several
        stages, which a trace on one device does not have.
        """
        settings = manager.rules.pipeline
        stages = manager.sizes.get(STAGES, 1) if settings is not None and settings.runs else 1
        if mode in self.single and stages == 1:
            single = _Shared(-1, *self.single[mode], {})
            if not is_typed(manager):
                return single
            # If the requests do not resolve, a trace would fail too, but only after nearly a
            # second.
            resolve_all(manager, single.requests, manager.mesh.shape)
        return self._trace(manager, mode)

    def _trace(self, manager: PartitionManager, mode: str) -> _Shared:
        """Return a trace that fits a candidate."""
        traces, program = self.traces.setdefault(mode, []), self.programs[mode]
        for number, (traced, requests) in enumerate(traces):
            renaming = self._renaming(traced, manager, mode)
            if renaming is not None:
                return _Shared(number, traced, requests, renaming)
        renaming, merged = None, self._merged(manager, mode)
        if merged is not None:
            # If this trace fails, the candidate's own trace below raises the error to show.
            with contextlib.suppress(ShardingError):
                traced = trace_program(merged, program, self.topology)
                renaming = self._renaming(traced, manager, mode)
        if renaming is None:
            traced, renaming = trace_program(manager, program, self.topology), {}
            self._count(manager, traced, mode)
        if traced.fits_all:
            self.shared.add(mode)
        traces.append((traced, read_annotations(traced)))
        return _Shared(len(traces) - 1, *traces[-1], renaming)

    def _merged(self, manager: PartitionManager, mode: str) -> PartitionManager | None:
        """Return a manager whose trace fits more candidates than this manager's trace, or None.

        On its mesh, axes that shard a dim together are one axis: `dp:36,fsdp:4` becomes `dp:144`.
        """
        if mode not in self.single or is_typed(manager):
            return None
        asked = [known.request for known in self.single[mode][0].answers]
        specs = [manager.answer(request).spec for request in asked]
        sizes = dict(manager.mesh.shape)
        for entry in (entry for spec in specs if spec is not None for entry in spec):
            large = [name for name in entry_names(entry) if sizes[name] > 1]
            for name in large[1:]:
                sizes[large[0]] *= sizes[name]
                sizes[name] = 1
        merged = manager.having(mesh=abstract_mesh(sizes))
        pairs = zip((merged.answer(request).spec for request in asked), specs, strict=True)
        # If a dim is sharded over only some of the merged axes, it has another number of shards on
        # the merged mesh. The trace then does not fit this manager.
        fits = find_renaming(pairs, sizes, manager.mesh.shape) is not None
        return merged if fits and sizes != manager.mesh.shape else None

    def _count(self, manager: PartitionManager, traced: Trace, mode: str) -> None:
        """Count the operations and the tokens of a mode, once for all candidates."""
        if mode not in self.flops:
            # Devices may repeat work, so with several devices this is an upper bound.
            flops = price(manager, traced, self.programs[mode]).walked.flops
            self.flops[mode] = float(flops * manager.mesh.size)
            self.tokens[mode] = max(map(_tokens, traced.inputs), default=0)

    def _renaming(self, traced: Trace, manager: PartitionManager, mode: str) -> Renaming | None:
        """Return how axes of a trace are renamed for a candidate, or None if the trace differs."""
        # If a trace fits all managers, it depends on no mesh axes, so no mesh axes are renamed.
        if mode in self.shared and traced.moves_alike(manager) and not is_typed(manager):
            return {}
        if self.programs[mode].any_mesh:
            return traced.renaming(manager)
        return {} if traced.fits(manager) else None

    def _walk_best(self, groups: dict[_ProgramKey, list[_Resolved]], most: int) -> list[Candidate]:
        """Walk the groups that rank best, and remove them from `groups`."""
        ranked = _ranked(groups, most)
        best = set(ranked[:most])
        # Keep the order of the space, which begins with meshes of few large axes. A trace of such a
        # mesh also fits meshes in which several small axes replace a large one. The reverse is not
        # true (`find_renaming`).
        chosen, others = deque(each for each in groups if each in best), deque(ranked[most:])
        of, done = sum(len(groups[specs]) for specs in chosen), 0
        candidates = []
        seen: set[Any] = set()
        while chosen:
            failed = 0
            group = groups.pop(chosen.popleft())
            for each in group:
                if self.stopped:
                    self.dropped[STOPPED] += 1
                    continue
                done += 1
                try:
                    candidate = self._walk(each, seen)
                except ShardingError as error:
                    self._drop(each.point, error)
                    failed += 1
                else:
                    candidates += [] if candidate is None else [candidate]
                self._report("planned", done, of)
            # Only the walk shows that a candidate cannot be traced. If all candidates of a group
            # fail, the next group is walked in its place.
            if failed == len(group) and others:
                chosen.append(others.popleft())
                of += len(groups[chosen[-1]])
        return candidates

    def _walk(self, each: _Resolved, seen: set[Any]) -> Candidate | None:
        """Walk a candidate.

        If it does not fit or repeats another candidate, count it and return None.

        Args:
          each: The candidate.
          seen: Keys of the programs that were walked before. The key of this candidate's program is
            added.

        Raises:
          ShardingError: The program cannot be traced under the candidate.
        """
        manager = _manager(each.strategy, each.point)
        sizes = {axis: size for axis, size in each.point.sizes.items() if size > 1}
        traces: dict[str, _Shared] = {}
        key: _ProgramKey = (tuple(sorted(sizes.items())),)
        for mode in self.programs:
            in_mode = manager.for_mode(mode)
            traces[mode] = shared = self._trace(in_mode, mode)
            key += (_key(shared, in_mode, resolve_all(in_mode, shared.requests, sizes)),)
        # Some settings change nothing, so several points of a strategy can have the same program.
        layout = each.layout
        program_on_links = (each.point.name, key, repr((layout.parts, layout.crossing)))
        if program_on_links in seen:
            self.dropped["same program as another"] += 1
            return None
        seen.add(program_on_links)
        if key not in self.walks:
            self.walks[key] = {
                mode: price(
                    manager.for_mode(mode),
                    shared.trace,
                    self.programs[mode],
                    renaming=shared.renaming,
                )
                for mode, shared in traces.items()
            }
        mesh = ",".join(f"{axis}:{size}" for axis, size in each.point.sizes.items())
        # Candidates with one program may order the mesh axes differently. The order decides their
        # links but not what is sent, so a shared walk gets the layout of this candidate.
        reports = {
            mode: dataclasses.replace(
                report, strategy=each.strategy.name, mesh=mesh, layout=each.layout
            )
            for mode, report in self.walks[key].items()
        }
        candidate = Candidate(
            name=each.point.name,
            sizes=each.point.sizes,
            settings=each.point.settings,
            strategy=each.strategy,
            reports=reports,
            position=list(self.space.strategies).index(each.point.name),
            tokens={mode: count for mode, count in self.tokens.items() if count},
        )
        if candidate.verdict is Verdict.DOES_NOT_FIT and not self.keep_large:
            self._drop_planned(candidate, each.point)
            return None
        return candidate


def _key(
    shared: _Shared, manager: PartitionManager, resolved: Sequence[ResolvedAnnotation]
) -> tuple[Any, ...]:
    """Return the values, besides the sizes of the mesh, that a walk of one mode depends on."""
    traced = shared.trace
    answers: tuple[Any, ...] = ()
    if not traced.fits_all:
        # The program asked the manager for specs or sizes while it was traced. Its equations depend
        # on these answers, so the answers are part of the key.
        answers = (
            tuple(sorted(manager.mesh.shape.items())),
            manager.mesh.axis_types,
            *(manager.answer(known.request).spec for known in traced.answers),
        )
    # Each candidate on an Explicit mesh has a trace of its own, so the number of the trace would
    # make every key different. Leave out this number: traces with equal answers have equal
    # equations.
    number = -1 if traced.typed_for is not None else shared.number
    memory = (manager.rules.memory, manager.rules.saved)
    return number, answers, memory, tuple(each.dims for each in resolved)


def _ranked(groups: Mapping[_ProgramKey, Sequence[_Resolved]], most: int) -> list[_ProgramKey]:
    """Return all groups.

    The first `most` are those to walk: three quarters by rank, a quarter by state.
    """
    # Candidates of a group differ in their links. The best candidate gives the rank of the group.
    rank = {specs: min(each.rank for each in group) for specs, group in groups.items()}
    held = {specs: min(each.held for each in group) for specs, group in groups.items()}
    # Sorting is stable, so equal ranks keep the order of the space.
    fastest = sorted(groups, key=lambda specs: rank[specs])
    smallest = sorted(groups, key=lambda specs: (held[specs], rank[specs]))
    # The rank is a closed form that ignores memory, so a quarter of the walks goes to small states.
    order = dict.fromkeys(fastest[: most - most // 4])
    for specs in smallest:
        if len(order) >= most:
            break
        order[specs] = None
    return list(order | dict.fromkeys(fastest))


def _manager(strategy: Strategy, point: Point) -> PartitionManager:
    mesh = abstract_mesh(dict(point.sizes), axis_types=strategy.axis_types)
    return PartitionManager(strategy, mesh=mesh)


def _tokens(given: Any) -> int:
    """Return the tokens of an argument: its size of BATCH times its length, or 0."""
    if not isinstance(given, ShardingRequest) or not isinstance(given.annotation, tuple):
        return 0
    sizes: dict[Any, int] = dict(zip(given.annotation, given.shape or (), strict=False))
    lengths = (sizes.get(axis, 0) for axis in (LENGTH, QUERY_LENGTH))
    return sizes.get(BATCH, 0) * next(filter(None, lengths), 0)


def _ordered(dropped: Counter[str]) -> dict[str, int]:
    return dict(sorted(dropped.items(), key=lambda item: (-item[1], item[0])))
