"""Entering and leaving a manager, compared with `jax.set_mesh` alone."""

from __future__ import annotations

import statistics
from typing import Any

import jax

import shardwright as sw
from benchmarks import timing
from benchmarks.timing import Row, Target
from shardwright.testing.meshes import cpu_mesh

TIMES = 1000
TARGET = Target(at_most=5.0)


def run(*, peers: bool, repeats: int) -> list[Row]:
    """Measure `with pm: pass` a thousand times per repetition; the target is in microseconds."""
    del peers
    mesh = cpu_mesh("dp:1,fsdp:2,sp:1,ep:1,tp:4")
    manager = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh)
    cases = {
        "with pm": timing.always(lambda: _enter(manager)),
        "with jax.set_mesh": timing.always(lambda: _set_mesh(mesh)),
    }
    times = {
        name: [each / TIMES for each in seconds]
        for name, seconds in timing.interleave(cases, repeats=repeats).items()
    }
    return [_row(times, "with pm", TARGET), _row(times, "with jax.set_mesh", None)]


def _row(times: dict[str, list[float]], name: str, target: Target | None) -> Row:
    seconds = statistics.median(times[name])
    return Row(
        subject="enter",
        case=f"{TIMES:,} times, 8 CPU devices",
        what=name,
        value=seconds * 1e6,
        unit="us",
        seconds=seconds,
        spread=timing.spread(times[name]),
        repeats=len(times[name]),
        target=target,
    )


def _enter(manager: Any) -> None:
    for _ in range(TIMES):
        with manager:
            pass


def _set_mesh(mesh: Any) -> None:
    for _ in range(TIMES):
        with jax.set_mesh(mesh):
            pass
