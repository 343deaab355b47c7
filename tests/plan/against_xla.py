"""Bytes per kind and mesh axes: what a plan states, and what the program compiled for CPUs has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

import shardwright as sw
from shardwright.plan.collectives.read import read_collectives
from shardwright.plan.planner import PlanReport

# XLA:CPU makes no reduce-scatter: it has an all-reduce, of which each device keeps its part.
FOLDED = {"reduce_scatter": "all_reduce"}

Bytes = Counter[tuple[str, tuple[str, ...]]]


def planned_bytes(report: PlanReport) -> Bytes:
    """Return the bytes of a plan's events."""
    sent: Bytes = Counter()
    for event in report.events:
        kind = FOLDED.get(str(event.kind), str(event.kind))
        sent[kind, event.mesh_axes] += event.logical_bytes * event.runs
    return sent


def compiled_bytes(
    pm: sw.PartitionManager,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    outputs: Any = None,
) -> Bytes:
    """Return the bytes of the collectives of a compiled function.

    Args:
      pm: A manager with devices.
      function: The function.
      arguments: Shapes with shardings.
      outputs: Annotations of the results. Defaults to what the compiler chooses.
    """
    with pm:
        options = {}
        if outputs is not None:
            result = jax.eval_shape(function, *arguments)
            options["out_shardings"] = pm.shardings(result, outputs, role=None)
        compiled = jax.jit(function, **options).lower(*arguments).compile()
    sent: Bytes = Counter()
    for collective in read_collectives(compiled, pm.mesh):
        kind = FOLDED.get(str(collective.kind), str(collective.kind))
        sent[kind, collective.mesh_axes] += collective.total_bytes or 0
    return sent
