"""`shardwright plan`: what a model holds and sends under a strategy, without a device."""

from __future__ import annotations

import argparse

from shardwright.cli.arguments import EXIT_CODES, add_mesh, add_output, add_strategy, make_parser
from shardwright.cli.check import fix_by_tensors, report
from shardwright.cli.check_model import Checked
from shardwright.cli.exit_codes import finding_problems
from shardwright.cli.fix import MARKS, add_fix_options, check_fix_options
from shardwright.cli.inputs import Setting, read_count, read_setting, read_slice, strategy_label
from shardwright.cli.plan_advice import too_large_state
from shardwright.cli.plan_checks import limit_failures, read_forbidden, read_limit
from shardwright.cli.plan_programs import fix_by_programs, run_programs
from shardwright.cli.programs import add_model_options
from shardwright.cli.reference import is_config
from shardwright.cli.show import SEVERITIES, print_json, print_lines, width_of
from shardwright.cli.tensors import read_tensors
from shardwright.cli.verify import add_verify_options, check_verify_options
from shardwright.errors import StrategyError
from shardwright.manager.manager import PartitionManager
from shardwright.plan.hardware import Topology
from shardwright.plan.layout import lay_out
from shardwright.plan.state import StateBytes, count_tensors
from shardwright.resolution.patterns import compile_pattern
from shardwright.show.plan import state_text
from shardwright.vocabulary.modes import MODE_TRAIN, mode_name, parse_mode

_EPILOG = f"""\
MODEL is file.py:function, the config.json of a Hugging Face model, or a file of named tensors. The
function returns a shardwright.plan.Program, or a dict of them by mode. A Program is a function, the
shapes of its arguments and their annotations. For a config.json, the command plans a reference
decoder of the same sizes; --set gives its length, remat, chunks (of the loss), repeats (those of
[pipeline]), param (a dtype) and capacity (of experts). For a file of tensors (.toml or .json), the
command only counts the bytes of the state.

examples:
  shardwright plan model.py:programs --strategy fsdp_tp --mesh fsdp:16,tp:4
  shardwright plan model.py:programs --strategy mine.toml --mesh fsdp:64 --mode train --rows 10
  shardwright plan model.py:programs --strategy serve_tp --mesh tp:8 \\
      --forbid "all_gather@decode>1MiB"
  shardwright plan config.json --strategy fsdp_tp --mesh fsdp:16,tp:4 --topology v5p:4x4x4 \\
      --batch 256 --set length=8192
  shardwright plan model.toml --strategy fsdp --mesh fsdp:64 --optimizer-copies 2 \\
      --max-replicated 2%
  shardwright plan model.py:programs --strategy fsdp_tp --mesh fsdp:16,tp:4 \\
      --topology v5p:4x4x4 --verify
  shardwright plan model.py:programs --strategy mine.toml --mesh fsdp:16,tp:4 --fix --dry-run

exit codes: 0 planned; 1 an array has no spec, a check fails, a program does not fit, or a plan is
incomplete or cannot be verified;
{EXIT_CODES}."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    command = make_parser(
        "plan",
        "Show what a model holds on each device and sends between them. Needs no devices.",
        epilog=_EPILOG,
    )
    command.add_argument(
        "model", metavar="MODEL", help="file.py:function, a config.json, or a file of tensors"
    )
    add_plan_options(command)
    command.add_argument(
        "--optimizer-copies",
        type=read_count,
        metavar="N",
        help="for a file of tensors: arrays that the optimizer keeps for each parameter, such as 2 "
        "for Adam",
    )
    command.add_argument(
        "--cache",
        metavar="PATTERN",
        help="for a file of tensors: count activations whose path matches PATTERN as caches",
    )
    command.add_argument(
        "--forbid",
        action="append",
        default=[],
        type=read_forbidden,
        metavar="KIND@MODE>BYTES",
        help="fail if a collective of this kind sends more than these bytes in this mode, such as "
        "all_gather@decode>1MiB; mode and bytes may be left out; repeat the option to forbid "
        "several",
    )
    command.add_argument(
        "--max-hbm",
        type=read_limit,
        metavar="SIZE",
        help="fail if a device may need more memory than SIZE: bytes such as 16GiB, or a share of "
        "the chip's memory such as 90%%",
    )
    command.add_argument(
        "--max-replicated",
        type=read_limit,
        metavar="SHARE",
        help="fail if copies are more than SHARE of the state: a share such as 2%%, or bytes such "
        "as 1GiB",
    )
    add_verify_options(command)
    add_fix_options(command)
    command.add_argument(
        "--rows",
        type=read_count,
        metavar="N",
        help="show only the N largest rows of collectives and of replicated state",
    )
    add_output(command)
    return command


def add_plan_options(command: argparse.ArgumentParser) -> None:
    """Add the options for the strategy, the mesh and the hardware of a plan."""
    add_strategy(command, required=True)
    add_mesh(command)
    command.add_argument(
        "--topology",
        metavar="T",
        help="the slice, or the hosts of GPUs, to plan for: v5p:4x4x4, or 16xh100:8",
    )
    command.add_argument(
        "--hardware", metavar="FILE", help="a .toml file that adds chips, or replaces their values"
    )
    command.add_argument(
        "--mode",
        metavar="MODE",
        help="plan only this mode (default: every mode; for a file of tensors: train)",
    )
    add_model_options(command, several=False)


def run(arguments: argparse.Namespace) -> int:
    """Plan, print and return the exit code.

    Raises:
      ShardingError: The arguments are invalid, or an input cannot be read.
    """
    topology = read_topology(arguments)
    check_verify_options(arguments, topology)
    check_fix_options(arguments)
    devices = arguments.devices if topology is None else topology.devices
    # A .json file is the configuration of a model, or a file of tensors.
    is_tensors = arguments.model.endswith((".toml", ".json")) and not is_config(arguments.model)
    if arguments.fix:
        code = _fix(arguments, devices, is_tensors=is_tensors)
        if arguments.dry_run:
            return code
    setting = read_setting(arguments.strategy, mesh=arguments.mesh, devices=devices)
    topology = None if topology is None else setting.on(topology)
    if is_tensors:
        return _run_tensors(arguments, setting, topology)
    for option in ("optimizer_copies", "cache"):
        if getattr(arguments, option) is not None:
            raise StrategyError(
                f"--{option.replace('_', '-')} is for a file of tensors",
                fix=f"leave --{option.replace('_', '-')} out; holds= of a Program says what each "
                "argument is",
            )
    return run_programs(arguments, setting, topology)


def _fix(arguments: argparse.Namespace, devices: int | None, *, is_tensors: bool) -> int:
    """Edit the strategy and print the difference. Return 1 if it still has an error, else 0."""
    if is_tensors:
        tensors = read_tensors(arguments.model)
        fixed = fix_by_tensors(arguments.strategy, tensors, arguments, devices=devices)
    else:
        fixed = fix_by_programs(arguments, devices)
    print_lines([*fixed.report(dry=arguments.dry_run), ""], marks=MARKS)
    label = strategy_label(arguments.strategy)
    checked = Checked(strategy=label, findings=fixed.tried.findings)
    if arguments.dry_run:
        print_lines(report([checked], width=width_of(arguments.width)), marks=SEVERITIES)
    return 1 if checked.fails(strict=False) else 0


def read_topology(arguments: argparse.Namespace) -> Topology | None:
    """Return the slice that the mesh is on, or None.

    Raises:
      StrategyError: The options do not fit each other.
    """
    if None not in (arguments.topology, arguments.devices):
        raise StrategyError(
            "--topology and --devices exclude each other", fix="leave out --devices"
        )
    return read_slice(arguments.topology, arguments.hardware)


def _run_tensors(arguments: argparse.Namespace, setting: Setting, topology: Topology | None) -> int:
    """Count the state of a file of tensors."""
    # A file of tensors has no program that could send, be compiled or take options.
    for option in ("forbid", "verify", "batch", "set"):
        if getattr(arguments, option):
            raise StrategyError(
                f"--{option} needs a function, but MODEL is a file of tensors",
                fix="pass file.py:function as MODEL",
            )
    mode = MODE_TRAIN if arguments.mode is None else parse_mode(arguments.mode)
    tensors = read_tensors(arguments.model)
    pattern = None if arguments.cache is None else compile_pattern(arguments.cache)
    manager = setting.manager.for_mode(mode)

    # `count` is a function, because the advice counts the state under other rules too.
    def count(manager: PartitionManager) -> StateBytes:
        return count_tensors(
            manager,
            tensors,
            caches=[tensor.path for tensor in tensors if pattern and pattern.search(tensor.path)],
            copies=arguments.optimizer_copies or 0,
            train=mode == MODE_TRAIN,
        )

    with finding_problems(setting.file):
        state = count(manager)
    layout = None if topology is None else lay_out(topology, setting.sizes)
    needed = state.of().per_device
    failures = limit_failures(arguments, {mode: state}, {mode: needed}, topology)
    # `needed` leaves out activations, so it is a lower bound. If the state does not fit, no program
    # with this state fits.
    if topology is not None and needed > topology.chip.hbm_bytes:
        why = too_large_state(state, topology, setting.combined, manager, count)
        failures.append(f"mode {mode_name(mode)} does not fit{why}")
    failed = bool(failures or state.missing)
    if arguments.json:
        plan = {
            "strategy": setting.strategy,
            "mesh": ",".join(f"{axis}:{size}" for axis, size in setting.sizes.items()),
            "layout": None if layout is None else layout.to_json(),
            "state": state.to_json(),
        }
        modes = {mode_name(mode): plan}
        print_json({"modes": modes, "failed": failures, "ok": not failed})
        return 1 if failed else 0
    lines = [f"mode {mode_name(mode)}", str(setting)]
    lines += [*([] if layout is None else [str(layout)]), ""]
    lines += state_text(state, rows=arguments.rows, width=width_of(arguments.width)).split("\n")
    lines += [
        "collectives and activations need a function: pass file.py:function as MODEL",
        *(line for text in failures for line in text.split("\n")),
    ]
    print_lines(lines)
    return 1 if failed else 0
