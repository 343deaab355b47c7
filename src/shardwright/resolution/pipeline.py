"""`[pipeline]` of a strategy, and which layers a stage holds."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Annotated

from shardwright.errors import StrategyError
from shardwright.resolution.decisions import DimDecision
from shardwright.vocabulary.axes import LAYERS, PARALLELISM_AXES, PP, axis_label
from shardwright.vocabulary.read import choice, integer, read_fields

STAGES = PARALLELISM_AXES[PP]  # the mesh axis over which a pipeline runs


class Schedule(enum.StrEnum):
    """In which order the stages run the microbatches.

    NONE has no stages: the layers are stored over pp, and gathered to run as without it. GPIPE
    sends all microbatches through the stages once, CIRCULAR once for each chunk of a stage's
    layers. ONE_F_ONE_B alternates forward and backward passes, so that a stage keeps few inputs.
    """

    NONE = "none"
    GPIPE = "gpipe"
    CIRCULAR = "circular"
    ONE_F_ONE_B = "1f1b"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How the layers of a stack run over the mesh axis pp.

    Attributes:
      schedule: The schedule.
      microbatches: Number of microbatches of a batch.
      repeats: Number of chunks of layers of a stage.

    Raises:
      StrategyError: A value is not valid.
    """

    schedule: Annotated[Schedule, choice(Schedule)]
    microbatches: Annotated[int, integer(fix="write microbatches = 8")] = 1
    repeats: Annotated[int, integer(fix="write repeats = 1")] = 1

    def __post_init__(self) -> None:
        read_fields(self, error=StrategyError)

    @property
    def runs(self) -> bool:
        """Whether microbatches run through stages."""
        return self.schedule is not Schedule.NONE

    def __str__(self) -> str:
        return f"{self.schedule}, {self.microbatches} microbatches, {self.repeats} repeats"


def stage_notes(
    pipeline: Pipeline | None, decisions: Sequence[DimDecision], stages: int
) -> Iterator[str]:
    """Yield which layers each stage holds, for each dim of layers that is sharded over pp.

    Args:
      pipeline: `[pipeline]`, or None, which has no notes.
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
            # The first two and the last one show the pattern.
            held = [
                f"stage {stage}: {_layers_of(stage, size // stages, size, pipeline.repeats)}"
                for stage in (shown if stages <= 4 else (0, 1, stages - 1))
            ]
            if stages > 4:
                held.insert(2, "...")
            yield f"layers of {'; '.join(held)}"


def _layers_of(stage: int, chunk: int, size: int, repeats: int) -> str:
    """Return the numbers of a stage's layers as text; `size` layers are those of one repeat."""
    firsts = [repeat * size + stage * chunk for repeat in range(repeats)]
    return ", ".join(
        f"{first}-{first + chunk - 1}" if chunk > 1 else f"{first}" for first in firsts
    )
