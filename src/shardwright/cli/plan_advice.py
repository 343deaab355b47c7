"""Say why a program does not fit into the memory of a chip, and what would help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from shardwright.cli.plan_checks import what_holds
from shardwright.manager.manager import PartitionManager
from shardwright.plan.fit import Verdict
from shardwright.plan.fitting import (
    FittingMesh,
    find_larger_mesh,
    find_other_mesh,
    find_smaller_rules,
)
from shardwright.plan.hardware import Topology
from shardwright.plan.planner import (
    PlanReport,
    Program,
    host_too_small,
    price,
    trace_program,
)
from shardwright.plan.state import StateBytes
from shardwright.plan.verify.run import Verification
from shardwright.vocabulary.modes import MODE_TRAIN, MODES, mode_name
from shardwright.vocabulary.units import bytes_text

if TYPE_CHECKING:
    from shardwright.strategy.model import Strategy

_LARGE: Final = 0.05  # other rules are named if they save more than this share of chip memory


def too_large_text(
    program: Program,
    manager: PartitionManager,
    report: PlanReport,
    verification: Verification | None = None,
    strategy: Strategy | None = None,
) -> str:
    """Say why a program does not fit, with one line for each thing that would help.

    A mesh or a rule is proposed only after the program was planned with it.

    Args:
      program: A program that does not fit.
      manager: Strategy, mesh and mode of the program.
      report: Plan of the program on a slice.
      verification: The plan beside the compiled program, if it was compiled.
      strategy: The strategy of the manager. Without one, no other rules are tried.
    """
    mode = mode_name(manager.mode or MODES[0])
    fixes = list(_fixes(program, manager, report, strategy))
    lines = [f"mode {mode} does not fit{_why(report, verification)}"]
    lines += [f"  fix   {fixes[0]}", *(f"        {fix}" for fix in fixes[1:])]
    return "\n".join(lines)


def _why(report: PlanReport, verification: Verification | None) -> str:
    """Return the numbers behind the verdict."""
    if report.layout is None:
        return ""
    topology, state = report.layout.topology, report.state.of()
    if host_too_small(report):
        needed, known = bytes_text(report.memory.host), bytes_text(topology.chip.host_bytes)
        return f": it needs {needed} of the host's {known} for each device"
    # The state is larger than the memory of all devices together: no mesh and no rule helps.
    if state.total > topology.devices * topology.chip.hbm_bytes:
        return what_holds(report.state, topology)
    held = f"the state takes {bytes_text(state.per_device)}"
    usable = f"{bytes_text(topology.chip.hbm_bytes)} per device"
    # According to the plan, the program may fit. So only the numbers of the compiler explain the
    # verdict.
    if verification is not None and report.verdict is not Verdict.DOES_NOT_FIT:
        needed = f"the compiled program needs {bytes_text(verification.most_bytes)} of {usable}"
        return f": {needed}, though the plan says at most {bytes_text(report.memory.high)}"
    if verification is not None:
        needed = f"the compiled program needs {bytes_text(verification.most_bytes)} of {usable}"
        return f": {needed}, and {held} of it"
    needed = f"it needs at least {bytes_text(report.memory.low)} of {usable}"
    return f": {needed}, and {held} of it"


def _fixes(
    program: Program, manager: PartitionManager, report: PlanReport, strategy: Strategy | None
) -> Iterator[str]:
    """Yield what would help, one line each."""
    if report.layout is None:
        yield "add --topology to know which mesh is large enough"
        return
    topology, state = report.layout.topology, report.state.of()
    if host_too_small(report):
        yield "shard more, or keep less on the host in [memory]"
        return
    usable = topology.chip.hbm_bytes
    mesh: FittingMesh | None = None
    # If not even one copy of the state fits into the slice, no mesh of this slice can hold the
    # state.
    if report.verdict is Verdict.DOES_NOT_FIT and state.total <= topology.devices * usable:
        mesh = find_other_mesh(program, manager, topology)
    mesh = mesh or find_larger_mesh(program, manager, topology, held=state.total)
    if mesh is not None and report.verdict is not Verdict.DOES_NOT_FIT:
        yield f"try {mesh}, and compile it with --verify: this plan is too low"
    elif mesh is not None and mesh.verdict is Verdict.FITS:
        yield f"use {mesh}, where the plan fits"
    elif mesh is not None:
        yield f"try {mesh}, where the plan is close: compile it with --verify"

    def needed(other: PartitionManager) -> int:
        return price(other, trace_program(other, program, topology), program).memory.low

    if strategy is not None:
        below = report.memory.low - _LARGE * usable
        rules = find_smaller_rules(strategy, manager, report.state, needed, below=below)
        yield from [] if rules is None else [str(rules)]
    # If the values of the step take more memory than the state, sharding the state helps little.
    if report.memory.low - state.per_device > state.per_device:
        smaller = "a smaller batch, or shorter prompts or caches"
        if manager.mode in (MODE_TRAIN, None):
            smaller = "a smaller batch or length, more rematerialization, or a loss in chunks"
        yield f"reduce the values of the step: {smaller}"
    elif mesh is None:
        yield "shard more, hold less, or use chips with more memory"


def too_large_state(
    state: StateBytes,
    topology: Topology,
    strategy: Strategy,
    manager: PartitionManager,
    count: Callable[[PartitionManager], StateBytes],
) -> str:
    """Say why a state alone does not fit, with one line for each thing that would help.

    Args:
      state: The state.
      topology: The slice.
      strategy: The strategy of the manager.
      manager: Strategy, mesh and mode.
      count: Counts the state under a manager.
    """
    held = state.of()
    if held.total > topology.devices * topology.chip.hbm_bytes:
        return what_holds(state, topology)
    needed, usable = bytes_text(held.per_device), bytes_text(topology.chip.hbm_bytes)
    rules = find_smaller_rules(
        strategy,
        manager,
        state,
        lambda other: count(other).of().per_device,
        below=held.per_device - _LARGE * topology.chip.hbm_bytes,
    )
    fixes = [*([] if rules is None else [str(rules)]), "shard more, or hold less"]
    lines = [f": it takes {needed} of {usable} per device", f"  fix   {fixes[0]}"]
    return "\n".join([*lines, *(f"        {fix}" for fix in fixes[1:])])
