"""Which microbatch each stage of a pipeline works on in each tick, as data."""

from __future__ import annotations

import dataclasses

from shardwright.resolution.pipeline import Pipeline, Schedule


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """What a stage does in a tick.

    Attributes:
      forward: Number of the microbatch whose forward pass it runs, or None.
      backward: Number of the microbatch whose backward pass it runs, or None; after `forward`.
      chunk: Number of the chunk of its layers that it runs.
    """

    forward: int | None = None
    backward: int | None = None
    chunk: int = 0


ScheduleTable = tuple[tuple[StageWork, ...], ...]  # [tick][stage]


def schedule_table(pipeline: Pipeline, stages: int) -> ScheduleTable:
    """Return what each stage does in each tick of a training step.

    With m microbatches, R repeats and S stages, gpipe and circular run m R + S - 1 ticks forward,
    and the same ticks backward in reverse. 1f1b runs m + 2 S - 2 ticks: the last stage runs a
    microbatch backward in the tick in which it has run it forward.

    Args:
      pipeline: `[pipeline]` of a strategy whose schedule is not "none".
      stages: Size of pp.
    """
    count, turns = pipeline.microbatches, pipeline.microbatches * pipeline.repeats
    forward_ticks = turns + stages - 1

    def work(tick: int, stage: int) -> StageWork:
        if pipeline.schedule is Schedule.ONE_F_ONE_B:
            # A gradient comes from the next stage one tick after that stage has made it.
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
    """Return the largest number of inputs of chunks that each stage keeps for a backward pass."""
    held, most = [0] * len(table[0]), [0] * len(table[0])
    for row in table:
        for stage, work in enumerate(row):
            held[stage] += work.forward is not None
            most[stage] = max(most[stage], held[stage])
            held[stage] -= work.backward is not None
    return tuple(most)


def bubble(table: ScheduleTable) -> float:
    """Return the share of the stages' time in which they wait for others.

    In a tick in which no stage runs forward, or none backward, that pass takes no time.
    """
    passes = [[work.forward for work in row] for row in table]
    passes += [[work.backward for work in row] for row in table]
    used = [row for row in passes if any(number is not None for number in row)]
    busy = sum(number is not None for row in used for number in row)
    return 1 - busy / (len(used) * len(table[0]))
