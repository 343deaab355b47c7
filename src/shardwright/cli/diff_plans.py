"""`shardwright diff` of two plans: of one program under two strategies, or of two files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.cli.inputs import read_setting
from shardwright.cli.programs import plan_program, read_programs
from shardwright.cli.show import print_json, print_lines, width_of
from shardwright.errors import StrategyError
from shardwright.plan.compare_plans import PLAN_FIX, PlanComparison, compare_plans
from shardwright.plan.hardware import parse_topology, read_hardware
from shardwright.plan.planner import PlanReport
from shardwright.show.changes import changes_text
from shardwright.strategy.foreign_files import read_json
from shardwright.vocabulary.modes import mode_name, parse_mode

# As in `diff`: a share in percent, or a factor.
GROWS = {r"(?:\+[0-9.]+%|x [0-9.]+)$": "red", r"-[0-9.]+%$": "green"}

# Mode, or "mode -> mode" -> the plans of both sides.
Pairs = dict[str, tuple[Any, Any]]


def run_files(arguments: argparse.Namespace) -> int:
    """Compare the plans of two files, mode by mode, and return the exit code.

    Raises:
      StrategyError: A file is not a plan, or no mode is in both.
    """
    if len(arguments.plan) != 2:
        raise StrategyError(
            f"--plan is given {len(arguments.plan)} times, but diff compares two plans",
            fix="write --plan before.json --plan after.json",
        )
    for option in ("strategies", "mesh", "devices", "topology", "hardware"):
        if getattr(arguments, option):
            name = "STRATEGY" if option == "strategies" else f"--{option}"
            raise StrategyError(
                f"{name} cannot change a plan that is read from a file",
                fix="leave it out, or plan again with --model file.py:function",
            )
    left, right = (_read_plans(name) for name in arguments.plan)
    if arguments.mode:
        names = [mode_name(parse_mode(mode)) for mode in arguments.mode]
        # A mode that is given once is for both sides.
        for plans, mode in ((left, names[0]), (right, names[-1])):
            if mode not in plans:
                fix = f"the modes are {', '.join(plans)}"
                raise StrategyError(f"a plan has no mode {mode}", fix=fix)
        pairs = {_pair_name(names[0], names[-1]): (left[names[0]], right[names[-1]])}
        return _show(arguments, pairs, {})
    pairs = {mode: (left[mode], right[mode]) for mode in left if mode in right}
    if not pairs:
        both = " and ".join(", ".join(plans) for plans in (left, right))
        raise StrategyError(
            f"the plans have no mode in common: {both}",
            fix="name a mode for each side: --mode train --mode decode",
        )
    only = {
        "before": [mode for mode in left if mode not in right],
        "after": [mode for mode in right if mode not in left],
    }
    return _show(arguments, pairs, only)


def run_model(arguments: argparse.Namespace, sides: tuple[tuple[Any, ...], ...]) -> int:
    """Plan a model on both sides, compare mode by mode, and return the exit code.

    Args:
      arguments: The command's arguments.
      sides: Strategy, mesh, devices, mode and topology of each side. None means not given.

    Raises:
      ShardingError: A program does not resolve on one side.
    """
    plans = [_plan_side(arguments, *side) for side in sides]
    left, right = plans
    if left.keys() == right.keys():
        pairs: Pairs = {mode: (left[mode], right[mode]) for mode in left}
    else:  # one mode on each side
        (before, first), (after, second) = (next(iter(plan.items())) for plan in plans)
        pairs = {_pair_name(before, after): (first, second)}
    return _show(arguments, pairs, {})


def _plan_side(
    arguments: argparse.Namespace,
    strategy: str,
    mesh: str | None,
    devices: int | None,
    mode: str | None,
    topology: str | None,
) -> dict[str, PlanReport]:
    """Return the plans of one side by mode."""
    slice_ = None
    if topology is not None:
        if devices is not None:
            raise StrategyError(
                "--topology and --devices exclude each other", fix="leave out --devices"
            )
        slice_ = parse_topology(topology, read_hardware(arguments.hardware))
    setting = read_setting(
        strategy, mesh=mesh, devices=devices if slice_ is None else slice_.devices
    )
    slice_ = None if slice_ is None else setting.on(slice_)
    return {
        mode_name(key): plan_program(
            program,
            setting.manager.for_mode(key),
            f"{arguments.model} for {mode_name(key)}",
            topology=slice_,
        )
        for key, program in read_programs(
            arguments.model, mode, devices=setting.manager.mesh.size
        ).items()
    }


def _pair_name(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"


def _show(arguments: argparse.Namespace, pairs: Pairs, only: Mapping[str, list[str]]) -> int:
    """Compare and print each pair of plans, and return the exit code."""
    compared = {mode: compare_plans(*pair) for mode, pair in pairs.items()}
    unpaired = {side: modes for side, modes in only.items() if modes}
    if arguments.json:
        modes = {mode: comparison.to_json() for mode, comparison in compared.items()}
        print_json({"modes": modes, "only": dict(only), "changed": _changed(compared, unpaired)})
    else:
        lines: list[str] = []
        for mode, comparison in compared.items():
            text = changes_text(comparison, rows=arguments.rows, width=width_of(arguments.width))
            if arguments.markdown:
                lines += ["", f"### Plan of {mode}", "", "```text", *text.split("\n"), "```"]
            else:
                lines += ["", f"mode {mode}", *text.split("\n")]
        for side, names in unpaired.items():
            # A paragraph of its own in Markdown.
            lines += [""] * arguments.markdown + [f"only {side}: mode {', '.join(names)}"]
        print_lines(lines[1:], marks=GROWS)
    return 1 if arguments.exit_code and _changed(compared, unpaired) else 0


def _changed(compared: Mapping[str, PlanComparison], unpaired: Mapping[str, list[str]]) -> bool:
    return bool(unpaired) or any(comparison.changed for comparison in compared.values())


def _read_plans(name: str) -> dict[str, Any]:
    """Return the plans of a file by mode.

    The file has the output of `plan --json`, or of one `PlanReport.to_json()`.

    Raises:
      StrategyError: The file cannot be read, or is not a plan.
    """
    data = read_json(Path(name), fix=PLAN_FIX)
    if isinstance(data, dict) and isinstance(data.get("modes"), dict) and data["modes"]:
        plans: dict[str, Any] = data["modes"]
    elif isinstance(data, dict) and "state" in data:
        # A plan alone does not say its mode. Two such files are compared under this name.
        plans = {"any": data}
    else:
        plans = {}
    if not plans or not all(isinstance(plan, dict) for plan in plans.values()):
        raise StrategyError(f"{name!r} is not a plan", fix=PLAN_FIX)
    return plans
