"""Count the bytes that are sent if the weights of a model move to another strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from shardwright.errors import ShardingError
from shardwright.manager.manager import PartitionManager
from shardwright.mesh.build import abstract_mesh
from shardwright.plan.planner import Program
from shardwright.plan.search.result import Candidate
from shardwright.plan.state import Category, read_holds
from shardwright.reshard.tree import plan_reshard
from shardwright.vocabulary.units import bytes_text


def relayout_lines(
    source: Candidate,
    target: Candidate,
    before: Mapping[str, Program],
    after: Mapping[str, Program],
) -> list[str]:
    """Return a line with the bytes that are sent to move the weights between two candidates.

    Args:
      source: The candidate to train with.
      target: The candidate to serve with.
      before: Programs of the source by mode.
      after: Programs of the target by mode.

    The moved arrays are those of the source's program. Both programs must have the same number of
    parameters.
    """
    name = f"from {source.name} on {source.mesh} to {target.name} on {target.mesh}"
    # The modes of a candidate share the weights, so take its first mode.
    modes = next(iter(source.reports)), next(iter(target.reports))
    weights = _weights(before[modes[0]]), _weights(after[modes[1]])
    if weights[0] is None or weights[1] is None:
        return [f"{name}: bytes unknown, since holds= does not name one argument as parameters"]
    tree, specs = weights[0]
    # The structures may differ: perhaps only one of the programs stacks the layers.
    if _numbers(tree) != _numbers(weights[1][0]):
        why = "the two programs have different numbers of parameters"
        return [f"{name}: bytes unknown, since {why}"]
    managers = [
        PartitionManager(each.strategy, mesh=abstract_mesh(dict(each.sizes))).for_mode(mode)
        for each, mode in zip((source, target), modes, strict=True)
    ]
    try:
        plan = plan_reshard(managers[1], tree, specs, source=managers[0])
    except ShardingError as error:
        return [f"{name}: bytes unknown: {error}"]
    devices = managers[1].mesh.size
    sent = f"{bytes_text(plan.bytes_sent)} in all, {bytes_text(plan.bytes_sent // devices)}"
    return [f"moving the weights {name} sends {sent} per device"]


def _weights(program: Program) -> tuple[Any, Any] | None:
    """Return the argument that `holds` names as parameters, and its annotations."""
    if program.holds is None or program.specs is None:
        return None
    for tree, spec, names in zip(program.shapes, program.specs, program.holds, strict=True):
        categories = read_holds((tree,), (names,))
        if spec is not None and set(categories) == {Category.PARAMETERS}:
            return tree, spec
    return None


def _numbers(tree: Any) -> int:
    """Return the number of elements of all arrays of a tree."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
