"""What each stage of a pipeline does in each tick of a training step, by schedule."""

from __future__ import annotations

from shardwright.resolution.pipeline import Pipeline, Schedule, bubble, schedule_table
from tools.pictures.svg import Box, Picture

STAGES, MICROBATCHES, REPEATS = 4, 4, 2
LEFT, SIDE, HEIGHT = 76, 18, 22
SCHEDULES = (
    Pipeline(schedule=Schedule.GPIPE, microbatches=MICROBATCHES),
    Pipeline(schedule=Schedule.ONE_F_ONE_B, microbatches=MICROBATCHES),
    Pipeline(schedule=Schedule.CIRCULAR, microbatches=MICROBATCHES, repeats=REPEATS),
)


def draw() -> str:
    """Return the picture: one table of stages and ticks for each schedule."""
    title = f"The schedules of {STAGES} stages and {MICROBATCHES} microbatches"
    picture = Picture(title=title, width=500, height=482)
    picture.text(20, 32, title, kind="title")
    legend = "Yellow: forward; grey: backward, with the microbatch."
    picture.text(20, 54, legend, kind="soft")
    legend = "Empty: the stage waits. In a circular pipeline a tick is half"
    picture.text(20, 72, legend, kind="soft")
    picture.text(20, 90, "as long: a stage has two chunks of layers.", kind="soft")
    for row, pipeline in enumerate(SCHEDULES):
        _schedule(picture, 116 + row * 120, pipeline)
    return picture.render()


def _schedule(picture: Picture, y: float, pipeline: Pipeline) -> None:
    table = schedule_table(pipeline, STAGES)
    share = f"bubble {bubble(table):.0%}"
    # A chunk of a circular schedule has fewer layers, so its ticks are shorter.
    side = SIDE / pipeline.repeats if pipeline.repeats > 1 else SIDE
    picture.text(20, y + 12, f"{pipeline.schedule}: {share}", kind="code")
    x = float(LEFT)
    for row in table:
        # A tick has a forward and a backward pass. A pass that no stage runs takes no time.
        passes = [
            [(work.forward, "mine") for work in row],
            [(work.backward, "part") for work in row],
        ]
        for each in passes:
            if all(number is None for number, _ in each):
                continue
            for stage, (number, kind) in enumerate(each):
                cell = Box(x=x, y=y + 20 + stage * HEIGHT, width=side, height=HEIGHT)
                picture.box(cell, kind="room" if number is None else kind)
                if number is not None:
                    picture.label(cell, str(number))
            x += side
    for stage in range(STAGES):
        picture.text(20, y + 36 + stage * HEIGHT, f"stage {stage}", kind="soft")
