"""`shardwright diff`: what another strategy, mesh or mode changes in a tree, or in a plan."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.cli.arguments import (
    EXIT_CODES,
    SHAPE_FIX,
    STRATEGY_HELP,
    add_output,
    make_parser,
)
from shardwright.cli.inputs import Setting, read_count, read_setting
from shardwright.cli.programs import plan_program, read_programs
from shardwright.cli.show import print_json, print_lines, width_of
from shardwright.cli.tensors import read_tensors
from shardwright.errors import Problem, StrategyError, render
from shardwright.plan.compare import Comparison, Placed, Row, compare
from shardwright.plan.compare_plans import PLAN_FIX, PlanComparison, compare_plans
from shardwright.plan.hardware import parse_topology, read_hardware
from shardwright.plan.planner import PlanReport
from shardwright.resolution.problems import suggest_for_missing_size, without_repeats
from shardwright.show.changes import changes_text
from shardwright.show.tables import table
from shardwright.strategy.foreign_files import read_json
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.lowering import describe
from shardwright.vocabulary.modes import MODE_NAMES, mode_name, parse_mode
from shardwright.vocabulary.units import bytes_text

# Growth is red, because bytes are a cost.
_GROWS = {r"\+[0-9][0-9,]*(?: \(.*\))?$": "red", r"-[0-9][0-9,]*(?: \(.*\))?$": "green"}
_EPILOG = f"""\
Give two strategies, or one strategy and --mesh, --devices, --mode or --topology twice: first the
left side, then the right. Bytes are exact and per device. The bytes of a weight are those of its
stored shard. --model compares what a program holds and sends; --plan compares two files that
`shardwright plan --json` wrote.

examples:
  shardwright diff fsdp fsdp_tp --tensors model.toml --mesh dp:1,fsdp:2,tp:4
  shardwright diff fsdp_tp --tensors model.toml --mesh fsdp:4,tp:2 --mesh fsdp:2,tp:4
  shardwright diff fsdp_tp --tensors model.toml --devices 8 --mode train --mode decode
  shardwright diff fsdp fsdp_tp --model model.py:programs --mesh fsdp:2,tp:4
  shardwright diff --plan before.json --plan after.json --exit-code
  shardwright diff --plan before.json --plan after.json --markdown > comment.md

exit codes: 0 compared; 1 an array has no spec on one side, or with --exit-code something differs;
{EXIT_CODES}."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    command = make_parser(
        "diff",
        "Compare how tensors are sharded, or what a program sends, under two strategies, meshes or "
        "modes. Needs no devices.",
        epilog=_EPILOG,
    )
    command.add_argument(
        "strategies", nargs="*", metavar="STRATEGY", help=f"one or two; {STRATEGY_HELP}"
    )
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--tensors", metavar="FILE", help="a .toml or .json file of named tensors")
    what.add_argument("--model", metavar="MODEL", help="file.py:function, as for plan")
    what.add_argument(
        "--plan", action="append", metavar="FILE", help="a plan as JSON; give --plan twice"
    )
    command.add_argument(
        "--mesh",
        action="append",
        metavar="M",
        help="such as dp:1,fsdp:2,tp:4 (default: each strategy's own)",
    )
    command.add_argument(
        "--devices",
        action="append",
        type=read_count,
        metavar="N",
        help="number of devices, if a mesh has a -1",
    )
    command.add_argument(
        "--mode",
        action="append",
        choices=MODE_NAMES,
        help="runtime mode (default: compare every mode)",
    )
    command.add_argument(
        "--topology",
        action="append",
        metavar="T",
        help="with --model: the slice, or the hosts of GPUs, such as v5p:4x4x4 or 16xh100:8",
    )
    command.add_argument(
        "--hardware", metavar="FILE", help="a .toml file of chips; with --topology"
    )
    command.add_argument(
        "--rows", type=read_count, metavar="N", help="show only N collectives; with --model, --plan"
    )
    command.add_argument(
        "--exit-code", action="store_true", help="exit with 1 if something differs"
    )
    command.add_argument(
        "--markdown", action="store_true", help="print Markdown; with --model, --plan"
    )
    add_output(command)
    return command


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of the comparison: its setting and its mode (None: all modes)."""

    setting: Setting
    mode: str | None

    def __str__(self) -> str:
        return str(self.setting) + (f" in {self.mode}" if self.mode else "")

    def to_json(self) -> dict[str, Any]:
        """Return the side as plain data."""
        return {"strategy": self.setting.strategy, "mesh": self.setting.sizes, "mode": self.mode}


def run(arguments: argparse.Namespace) -> int:
    """Compare, print and return the exit code.

    Raises:
      ShardingError: The arguments are invalid, or an input cannot be read.
    """
    if arguments.markdown and arguments.json:
        raise StrategyError("--markdown and --json exclude each other", fix="leave one out")
    if arguments.plan is not None:
        return run_files(arguments)
    if not arguments.strategies:
        raise StrategyError("no strategy is given", fix="give one or two, such as fsdp fsdp_tp")
    strategies, meshes = _two("STRATEGY", arguments.strategies), _two("--mesh", arguments.mesh)
    devices, modes = _two("--devices", arguments.devices), _two("--mode", arguments.mode)
    topologies = _two("--topology", arguments.topology)
    # The two values of an option are equal if it was given once, or not at all.
    sides = (strategies, meshes, devices, modes, topologies)
    if all(left == right for left, right in sides):
        raise StrategyError(
            "both sides are the same",
            fix="give two strategies, or --mesh, --devices or --mode twice",
        )
    if arguments.model is not None:
        return run_model(arguments, tuple(zip(*sides, strict=True)))
    for option in ("topology", "hardware", "rows", "markdown"):
        if getattr(arguments, option):
            raise StrategyError(
                f"--{option} is for programs, and --tensors only gives arrays",
                fix=f"leave --{option} out, or compare a program: --model file.py:function",
            )
    left, right = (
        Side(
            setting=read_setting(strategies[at], mesh=meshes[at], devices=devices[at]),
            mode=modes[at],
        )
        for at in (0, 1)
    )
    managers = [
        side.setting.manager.for_mode(side.mode) if side.mode else side.setting.manager
        for side in (left, right)
    ]
    comparison = compare(managers[0], managers[1], tensors=read_tensors(arguments.tensors))
    if arguments.json:
        print_json(
            {
                "before": left.to_json(),
                "after": right.to_json(),
                "tensors": [_row_json(row) for row in comparison.rows],
                "totals": [
                    {
                        "role": str(total.role),
                        "mode": mode_name(total.mode),
                        "bytes_before": total.before,
                        "bytes_after": total.after,
                        "uncounted": total.uncounted,
                    }
                    for total in comparison.totals()
                ],
                "changed": len({row.tensor.path for row in comparison.changed}),
                "ok": comparison.ok,
            }
        )
    else:
        print_lines(report(comparison, left, right, width=width_of(arguments.width)), marks=_GROWS)
    return 1 if not comparison.ok or (arguments.exit_code and comparison.changed) else 0


def _two(name: str, values: Sequence[Any] | None) -> tuple[Any, Any]:
    """Return the values of the left and the right side. A single value is used for both."""
    if not values:
        return None, None
    if len(values) > 2:
        raise StrategyError(
            f"{name} is given {len(values)} times",
            fix="give one value for both sides, or one value for each side",
        )
    return values[0], values[-1]


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "path": row.tensor.path,
        "axes": describe(row.tensor.axes),
        "role": str(row.role),
        "mode": mode_name(row.mode),
        "mode_after": mode_name(row.mode_after),
        "changed": row.changed,
        "before": _placed_json(row.before),
        "after": _placed_json(row.after),
    }


def _placed_json(placed: Placed) -> dict[str, Any]:
    spec = None if placed.mesh_axes is None else [list(axes) for axes in placed.mesh_axes]
    problems = [str(problem) for problem in placed.found.problems]
    shards = None if placed.shards is None else list(placed.shards)
    return {
        "spec": spec,
        "shards": shards,
        "memory": "host" if placed.found.on_host else "device",
        "bytes_per_device": placed.bytes,
        "problems": problems,
    }


# The report: a table per role and per group of modes with the same differences.


def report(comparison: Comparison, left: Side, right: Side, *, width: int) -> list[str]:
    """Return the differences, the totals and the problems as lines."""
    lines = [f"- {left}", f"+ {right}"]
    for role in (Role.PARAM, Role.STATE, Role.ACTIVATION):
        # The modes in which the tensors have the same differences share a table.
        groups: dict[tuple[Any, ...], list[str]] = {}
        for mode in dict.fromkeys(row.mode for row in comparison.rows if row.role is role):
            rows = [row for row in comparison.rows if row.role is role and row.mode == mode]
            groups.setdefault(tuple(map(_cells, rows)), []).append(mode)
        for modes in groups.values():
            lines += ["", *_section(comparison, role, modes, width=width)]
    problems = _problems(comparison)
    return lines + (["", *render(problems).splitlines()] if problems else [])


def _section(comparison: Comparison, role: Role, modes: Sequence[str], *, width: int) -> list[str]:
    # The modes of a group have equal cells, so only the cells of the first mode are read.
    rows = [row for row in comparison.rows if row.role is role and row.mode == modes[0]]
    changed = [row for row in rows if row.changed]
    names = "all modes" if len(modes) == len(MODE_NAMES) else ", ".join(map(mode_name, modes))
    if rows[0].mode != rows[0].mode_after:
        names = f"{mode_name(rows[0].mode)} -> {mode_name(rows[0].mode_after)}"
    head = f"{role}, {names}: {len(changed)} of {len(rows)} differ"
    total = next(
        total for total in comparison.totals() if (total.role, total.mode) == (role, modes[0])
    )
    total_row = (
        "total",
        "",
        "",
        "",
        f"{total.before:,}",
        f"{total.after:,}",
        _signed(total.after - total.before),
    )
    has_bytes = any(row.grows is not None for row in rows)
    body = [_HEAD, *map(_cells, changed), *([total_row] if has_bytes else [])]
    # A narrow terminal has no room for the second column, the axes.
    if width < _ROOM:
        body = [(cells[0], *cells[2:]) for cells in body]
    lines = table(body, indent="  ", width=width, prose=1) if changed else []
    if has_bytes:
        grows = total.after - total.before
        share = f" ({grows / total.before:+.1%})" if grows and total.before else ""
        after = f" -> {bytes_text(total.after)}{share}" if grows else ", unchanged"
        uncounted = f", {total.uncounted} not counted" if total.uncounted else ""
        lines.append(f"  per device: {bytes_text(total.before)}{after}{uncounted}")
    return [head, *lines]


_HEAD = ("tensor", "axes", "before", "after", "bytes before", "bytes after", "change")
_ROOM = 110  # characters per line; in narrower terminals, the column of axes is left out


def _cells(row: Row) -> tuple[str, ...]:
    counts = [
        "" if count is None else f"{count:,}" for count in (row.before.bytes, row.after.bytes)
    ]
    change = "" if row.grows is None else _signed(row.grows)
    placements = [_placement_text(row.before), _placement_text(row.after)]
    if not row.moved:  # the mesh axes are the same, but have other sizes
        placements = [_counts(row.before), _counts(row.after)]
    return (row.tensor.path, describe(row.tensor.axes), *placements, *counts, change)


def _signed(count: int) -> str:
    return f"{count:+,}" if count else "0"


def _placement_text(placed: Placed) -> str:
    if placed.mesh_axes is None:
        return "!"
    spec = ", ".join("+".join(axes) or "-" for axes in placed.mesh_axes) or "()"
    return f"{spec} on host" if placed.found.on_host else spec


def _counts(placed: Placed) -> str:
    """Return the mesh axes and the number of shards of each dim: `fsdp/2, tp/4`."""
    dims = zip(placed.mesh_axes or (), placed.shards or (), strict=True)
    return ", ".join(f"{'+'.join(axes)}/{count}" if axes else "-" for axes, count in dims) or "()"


def _problems(comparison: Comparison) -> list[Problem]:
    """Return the problems of both sides. A problem that several modes have is returned once."""
    every = [
        problem
        for row in comparison.rows
        for side in (row.before, row.after)
        for problem in side.found.problems
    ]
    # The default fix names --shape, which this command does not have.
    return without_repeats(suggest_for_missing_size(every, SHAPE_FIX))


# Colors of growth, which `diff` writes as a share (+5.0%) or as a factor (x 3).
GROWS = {r"(?:\+[0-9.]+%|x [0-9.]+)$": "red", r"-[0-9.]+%$": "green"}

# Key: a mode, or two modes such as "train -> decode". Value: the plans of both sides.
Pairs = dict[str, tuple[Any, Any]]


def run_files(arguments: argparse.Namespace) -> int:
    """Compare the plans of two files, mode by mode, and return the exit code.

    Raises:
      StrategyError: A file is not a plan, or the files have no mode in common.
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
                fix=f"leave {name} out, or plan again with --model file.py:function",
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
            # In Markdown, the empty line makes the line after it a paragraph of its own.
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
        # The JSON of a single plan does not name its mode. Call the mode `any`, so that two such
        # files have a mode in common.
        plans = {"any": data}
    else:
        plans = {}
    if not plans or not all(isinstance(plan, dict) for plan in plans.values()):
        raise StrategyError(f"{name!r} is not a plan", fix=PLAN_FIX)
    return plans
