"""Entering and leaving a manager, compared with `jax.set_mesh` alone."""

from __future__ import annotations

from typing import Any

import jax

import shardwright as sw
from benchmarks import timing
from benchmarks.timing import Row, Target
from shardwright.testing.meshes import cpu_mesh

TIMES = 1000
# A manager enters the mesh, its key in JAX's caches, and its own stack.
TARGET = Target(at_most=3.5)


def run(*, peers: bool, repeats: int) -> list[Row]:
    """Measure `with pm: pass` a thousand times per repetition."""
    del peers
    mesh = cpu_mesh("dp:1,fsdp:2,sp:1,ep:1,tp:4")
    manager = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh)
    cases = {
        "with pm": timing.always(lambda: _enter(manager)),
        "with jax.set_mesh": timing.always(lambda: _set_mesh(mesh)),
    }
    return [
        timing.ratio(
            timing.interleave(cases, repeats=repeats),
            "with pm",
            against="with jax.set_mesh",
            subject="enter",
            case=f"{TIMES:,} times, 8 CPU devices",
            target=TARGET,
        )
    ]


def _enter(manager: Any) -> None:
    for _ in range(TIMES):
        with manager:
            pass


def _set_mesh(mesh: Any) -> None:
    for _ in range(TIMES):
        with jax.set_mesh(mesh):
            pass
