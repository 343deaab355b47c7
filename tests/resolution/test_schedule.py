"""Tables of schedules: each stage does all of its work, in an order that its inputs allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.resolution.pipeline import Pipeline, Schedule, bubble, most_inputs, schedule_table

STAGED = [schedule for schedule in Schedule if schedule is not Schedule.NONE]


@given(st.sampled_from(STAGED), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_every_stage_does_its_work_in_order(
    schedule: Schedule, stages: int, each: int, repeats: int
) -> None:
    repeats = repeats if schedule is Schedule.CIRCULAR else 1
    count = stages * each
    settings = Pipeline(schedule=schedule, microbatches=count, repeats=repeats)
    table = schedule_table(settings, stages)
    forward: dict[tuple[int, int], int] = {}  # (microbatch, place of a chunk) -> tick
    backward: dict[tuple[int, int], int] = {}
    for tick, row in enumerate(table):
        assert len(row) == stages
        for stage, work in enumerate(row):
            place = work.chunk * stages + stage
            if work.forward is not None:
                assert (work.forward, place) not in forward
                forward[work.forward, place] = tick
            if work.backward is not None:
                assert (work.backward, place) not in backward
                backward[work.backward, place] = tick
    wanted = {(number, place) for number in range(count) for place in range(stages * repeats)}
    assert forward.keys() == backward.keys() == wanted
    for number, place in wanted:
        assert forward[number, place] <= backward[number, place]
        if place % stages:
            # What a stage sends is read in the next tick, since nothing keeps it.
            assert forward[number, place] == forward[number, place - 1] + 1
            assert backward[number, place - 1] == backward[number, place] + 1
        elif place:
            # It waits at stage 0.
            assert forward[number, place] > forward[number, place - 1]
            assert backward[number, place - 1] > backward[number, place]
    turns = count * repeats
    assert bubble(table) == pytest.approx((stages - 1) / (turns + stages - 1))
    if schedule is Schedule.ONE_F_ONE_B:
        assert len(table) == count + 2 * stages - 2
        most = [min(2 * (stages - stage) - 1, count) for stage in range(stages)]
        assert most_inputs(table) == tuple(most)
    else:
        # Twice `total_iterations` of MaxText's layers/pipeline.py, without its delay of results.
        assert len(table) == 2 * (turns + stages - 1)
        assert set(most_inputs(table)) == {turns}
