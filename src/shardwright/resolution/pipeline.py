"""`[pipeline]` of a strategy: the layers of each stage, and the microbatch of a stage per tick."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Annotated

from shardwright.errors import IndivisibleError, Problem, StrategyError
from shardwright.resolution.decisions import DimDecision
from shardwright.vocabulary.axes import LAYERS, PARALLELISM_AXES, PP, axis_label
from shardwright.vocabulary.read import choice, integer, read_fields

STAGES = PARALLELISM_AXES[PP]  # the mesh axis over which a pipeline runs


class Schedule(enum.StrEnum):
    """In which order the stages run the microbatches.

    NONE has no stages: the layers are stored over pp, and gathered before they run. GPIPE sends all
    microbatches through the stages once. CIRCULAR sends them through the stages once for each chunk
    of a stage's layers. ONE_F_ONE_B alternates forward and backward passes, so that a stage keeps
    the inputs of few microbatches.
    """

    NONE = "none"
    GPIPE = "gpipe"
    CIRCULAR = "circular"
    ONE_F_ONE_B = "1f1b"


class GatherWeights(enum.StrEnum):
    """When FSDP gathers the weights of a stage.

    TICK gathers them for each chunk that runs. ONCE gathers them before the first tick, and keeps
    the gathered weights in memory during the step.
    """

    TICK = "tick"
    ONCE = "once"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How the layers of a stack run over the mesh axis pp.

    Attributes:
      schedule: The schedule.
      microbatches: Number of microbatches of a batch.
      repeats: Number of chunks into which the layers of a stage are divided.
      gather: When weights are gathered.

    Raises:
      StrategyError: A value is not valid.
    """

    schedule: Annotated[Schedule, choice(Schedule)]
    microbatches: Annotated[int, integer(fix="write microbatches = 8")] = 1
    repeats: Annotated[int, integer(fix="write repeats = 1")] = 1
    gather: Annotated[GatherWeights, choice(GatherWeights)] = GatherWeights.TICK

    def __post_init__(self) -> None:
        read_fields(self, error=StrategyError)

    @property
    def runs(self) -> bool:
        """Whether microbatches run through stages."""
        return self.schedule is not Schedule.NONE

    def __str__(self) -> str:
        return f"{self.schedule}, {self.microbatches} microbatches, {self.repeats} repeats"


def microbatch_problem(pipeline: Pipeline, stages: int) -> Problem | None:
    """Return the problem of microbatches that do not divide over pp, or None if they do."""
    count = pipeline.microbatches
    if count % stages == 0:
        return None
    return Problem(
        error=IndivisibleError,
        what=f"{count} microbatches do not divide over {STAGES}={stages}, and all stages store the "
        "same number of microbatches",
        path="microbatches",
        fix=f"write microbatches = {-(-count // stages) * stages} under [pipeline]",
    )


def stage_notes(
    pipeline: Pipeline | None, decisions: Sequence[DimDecision], stages: int
) -> Iterator[str]:
    """Yield which layers each stage holds, for each dim of layers that is sharded over pp.

    Args:
      pipeline: `[pipeline]`. If it is None, nothing is yielded.
      decisions: Decisions of an array.
      stages: Size of pp.
    """
    if pipeline is None:
        return
    for decision in decisions:
        if decision.label != axis_label(LAYERS) or decision.mesh_axes != (STAGES,):
            continue
        if not pipeline.runs:
            yield 'schedule = "none" gathers the layers over pp before they run'
        elif decision.size is not None:
            size, shown = decision.size, range(stages)
            # Show the first two stages and the last one, which are enough to see the pattern.
            held = [
                f"stage {stage}: {_layers_of(stage, size // stages, size, pipeline.repeats)}"
                for stage in (shown if stages <= 4 else (0, 1, stages - 1))
            ]
            if stages > 4:
                held.insert(2, "...")
            repeats = pipeline.repeats
            each = f"{size} layers in each of {repeats} repeats: " if repeats > 1 else ""
            yield f"{each}layers of {'; '.join(held)}"


def _layers_of(stage: int, chunk: int, size: int, repeats: int) -> str:
    """Return the indices of a stage's layers as text. Each repeat has `size` layers."""
    firsts = [repeat * size + stage * chunk for repeat in range(repeats)]
    return ", ".join(
        f"{first}-{first + chunk - 1}" if chunk > 1 else f"{first}" for first in firsts
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """The work of a stage in a tick, which is a step that all stages run at the same time.

    Attributes:
      forward: Index of the microbatch whose forward pass it runs, or None.
      backward: Index of the microbatch whose backward pass it runs, after the forward pass; or
        None.
      chunk: Index of the chunk of its layers that it runs.
    """

    forward: int | None = None
    backward: int | None = None
    chunk: int = 0


ScheduleTable = tuple[tuple[StageWork, ...], ...]  # [tick][stage]


def schedule_table(pipeline: Pipeline, stages: int) -> ScheduleTable:
    """Return the work of each stage in each tick of a training step.

    With m microbatches, R repeats and S stages, gpipe and circular run m R + S - 1 ticks forward,
    then as many ticks backward, in reverse order. 1f1b runs m + 2 S - 2 ticks: the last stage runs
    the forward and the backward pass of a microbatch in the same tick.

    Args:
      pipeline: `[pipeline]` of a strategy whose schedule is not "none".
      stages: Size of pp.
    """
    count, turns = pipeline.microbatches, pipeline.microbatches * pipeline.repeats
    forward_ticks = turns + stages - 1

    def work(tick: int, stage: int) -> StageWork:
        if pipeline.schedule is Schedule.ONE_F_ONE_B:
            # A gradient comes from the next stage one tick after that stage has computed it.
            forward, backward = tick - stage, tick - (2 * stages - 2 - stage)
            return StageWork(
                forward=forward if 0 <= forward < count else None,
                backward=backward if 0 <= backward < count else None,
            )
        is_back = tick >= forward_ticks
        turn = (2 * forward_ticks - 1 - tick if is_back else tick) - stage
        if not 0 <= turn < turns:
            return StageWork()
        chunk, number = divmod(turn, count)
        if is_back:
            return StageWork(backward=number, chunk=chunk)
        return StageWork(forward=number, chunk=chunk)

    one_pass = pipeline.schedule is Schedule.ONE_F_ONE_B
    ticks = count + 2 * stages - 2 if one_pass else 2 * forward_ticks
    return tuple(tuple(work(tick, stage) for stage in range(stages)) for tick in range(ticks))


def most_inputs(table: ScheduleTable) -> tuple[int, ...]:
    """For each stage, return the largest number of inputs that it keeps for backward passes."""
    held, most = [0] * len(table[0]), [0] * len(table[0])
    for row in table:
        for stage, work in enumerate(row):
            held[stage] += work.forward is not None
            most[stage] = max(most[stage], held[stage])
            held[stage] -= work.backward is not None
    return tuple(most)


def bubble(table: ScheduleTable) -> float:
    """Return the share of their time that stages spend waiting for other stages.

    A tick has a forward and a backward pass. A pass that no stage runs takes no time.
    """
    passes = [[work.forward for work in row] for row in table]
    passes += [[work.backward for work in row] for row in table]
    used = [row for row in passes if any(number is not None for number in row)]
    busy = sum(number is not None for row in used for number in row)
    return 1 - busy / (len(used) * len(table[0]))
