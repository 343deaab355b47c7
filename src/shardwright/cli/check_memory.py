"""Check `[memory]` for `shardwright check`: compare a strategy with the programs of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from shardwright.errors import did_you_mean
from shardwright.lints.finding import Code, Finding, Severity
from shardwright.manager.manager import PartitionManager
from shardwright.mesh.build import abstract_mesh
from shardwright.plan.planner import Program, read_arguments, trace_program
from shardwright.plan.walk.equations import nested_jaxprs
from shardwright.resolution.request import ShardingRequest
from shardwright.strategy.model import Strategy
from shardwright.vocabulary.axes import STANDARD_MESH_AXES, Role
from shardwright.vocabulary.modes import MODE_TRAIN


def check_memory(strategy: Strategy, programs: Mapping[str, Program]) -> Iterator[Finding]:
    """Yield optimizer state on the host that is not donated, and saved names that nothing has.

    Args:
      strategy: The strategy.
      programs: Programs by mode. Only training has optimizer state, and saves values.

    Raises:
      ShardingError: The program does not resolve under the strategy.
    """
    program = programs.get(MODE_TRAIN)
    if program is None:
        return
    # On mesh axes of one device every size divides.
    sizes = dict.fromkeys((*STANDARD_MESH_AXES, *strategy.mesh), 1)
    manager = PartitionManager(strategy, mesh=abstract_mesh(sizes), mode=MODE_TRAIN)
    if manager.rules.memory:
        yield from _not_donated(strategy, manager, program)
    if strategy.memory.saved:
        yield from _unused_names(strategy, set(_names(trace_program(manager, program).jaxpr)))


def _not_donated(
    strategy: Strategy, manager: PartitionManager, program: Program
) -> Iterator[Finding]:
    arguments = [at for at, tree in enumerate(program.shapes) for _ in jax.tree.leaves(tree)]
    found: dict[int, Any] = {}
    for at, given in zip(arguments, read_arguments(manager, program), strict=True):
        if at in program.donated or not isinstance(given, ShardingRequest):
            continue
        resolution = manager.answer(given)
        if resolution.on_host and resolution.role is Role.STATE:
            found.setdefault(at, resolution.memory)
    for at, rule in found.items():
        key = (*rule.table.split("."), rule.key)
        yield Finding(
            code=Code.STATE_NOT_DONATED,
            severity=Severity.WARNING,
            source=strategy.source(*key),
            key=".".join(key),
            message=f"argument {at} of the training program has optimizer state on the host and is "
            "not donated, so the host holds the old and the new state",
            fix=f"donate it: Program(..., donated=({at},)); pm.jit_step donates its state",
        )


def _unused_names(strategy: Strategy, known: set[str]) -> Iterator[Finding]:
    for name in strategy.memory.saved:
        if name not in known:
            key = ("memory", "saved", name)
            names = f"its names are {', '.join(sorted(known))}" if known else "it has none"
            yield Finding(
                code=Code.UNUSED_SAVED,
                severity=Severity.WARNING,
                source=strategy.source(*key),
                key=".".join(key),
                message=f"no checkpoint_name of the training program is {name!r}",
                fix=did_you_mean(name, known) or f"drop the line; {names}",
            )


def _names(jaxpr: Any) -> Iterator[str]:
    """Yield the names of `checkpoint_name` in a jaxpr."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            yield equation.params["name"]
        for inner in nested_jaxprs(equation):
            yield from _names(inner)
