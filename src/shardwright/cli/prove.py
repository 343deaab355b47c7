"""`shardwright prove`: are two programs compiled to the same partitioned program?"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from shardwright.cli.arguments import EXIT_CODES, STRATEGY_HELP, add_mesh, add_output, make_parser
from shardwright.cli.check_model import is_model
from shardwright.cli.exit_codes import finding_problems
from shardwright.cli.inputs import Setting, read_count, read_setting
from shardwright.cli.programs import read_programs
from shardwright.cli.python_files import user_code
from shardwright.cli.show import print_json, print_lines
from shardwright.cli.verify import prepare_compiler
from shardwright.errors import StrategyError
from shardwright.plan.hardware import Topology, parse_topology, read_hardware
from shardwright.plan.verify.compiler import TIMEOUT
from shardwright.plan.verify.prove import Differing, ProgramSide, Proof, lower_program, prove
from shardwright.vocabulary.modes import mode_name

_EPILOG = f"""\
A and B are two strategies and --model is what they shard; or A and B are two functions, as
file.py:function, and --strategy shards both. Functions are those that `shardwright plan` takes.
Names, ids and metadata do not count, nor does the order of independent instructions. Nothing runs:
the programs are compiled in a process of their own, for virtual CPUs or for a slice of TPUs.

examples:
  shardwright prove fsdp_tp mine.toml --model model.py:programs --mesh fsdp:2,tp:4
  shardwright prove before/model.py:programs model.py:programs --strategy fsdp_tp --mesh fsdp:8
  shardwright prove model.py:by_hand model.py:annotated --strategy fsdp_tp --topology v5e:2x4

exit codes: 0 the programs are the same in each mode; 1 they differ, or an array has no spec;
{EXIT_CODES}."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    command = make_parser(
        "prove",
        "Compile two programs, and say whether they are the same. Needs no devices.",
        epilog=_EPILOG,
    )
    for name in ("A", "B"):
        command.add_argument(
            name.lower(), metavar=name, help=f"file.py:function, or {STRATEGY_HELP}"
        )
    command.add_argument(
        "--model", metavar="MODEL", help="if A and B are strategies: the model, file.py:function"
    )
    command.add_argument(
        "--strategy", metavar="STRATEGY", help="if A and B are functions: their strategy"
    )
    add_mesh(command)
    command.add_argument(
        "--topology", metavar="T", help="compile for this slice of TPUs, such as v5p:4x4x4"
    )
    command.add_argument("--hardware", metavar="FILE", help="a .toml file of chips")
    command.add_argument("--mode", metavar="MODE", help="compare only this mode (default: each)")
    command.add_argument(
        "--timeout",
        type=read_count,
        default=int(TIMEOUT),
        metavar="SECONDS",
        help="stop a compile that takes longer (default: 600)",
    )
    add_output(command)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Compile both sides, compare, print and return the exit code.

    Raises:
      ShardingError: The arguments are invalid, or a side cannot be compiled.
    """
    topology = None
    if arguments.topology is not None:
        topology = parse_topology(arguments.topology, read_hardware(arguments.hardware))
    prepare_compiler(topology)
    devices = arguments.devices if topology is None else topology.devices
    left, right = (
        _lowered(
            model, read_setting(strategy, mesh=arguments.mesh, devices=devices), arguments, topology
        )
        for model, strategy in _sides(arguments)
    )
    if left.keys() != right.keys():
        modes = " and ".join(", ".join(map(mode_name, side)) for side in (left, right))
        raise StrategyError(
            f"the sides have different modes: {modes}",
            fix="compare a mode that both sides have: --mode train",
        )
    proofs = {
        mode_name(mode): prove(
            left[mode], right[mode], topology=topology, timeout=arguments.timeout
        )
        for mode in left
    }
    is_same = all(proof.same for proof in proofs.values())
    if arguments.json:
        data = {mode: dataclasses.asdict(proof) for mode, proof in proofs.items()}
        print_json({"modes": data, "same": is_same})
    else:
        names = (arguments.a, arguments.b)
        print_lines(line for mode, proof in proofs.items() for line in _lines(mode, proof, names))
    return 0 if is_same else 1


def _sides(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the model and the strategy of each side.

    Raises:
      StrategyError: The arguments are neither two functions with a strategy, nor two strategies
        with a function.
    """
    both = (arguments.a, arguments.b)
    models = [is_model(text) for text in both]
    if all(models) and arguments.strategy and not arguments.model:
        return [(text, arguments.strategy) for text in both]
    if not any(models) and arguments.model and not arguments.strategy:
        return [(arguments.model, text) for text in both]
    raise StrategyError(
        f"{both[0]!r} and {both[1]!r} are not two strategies with --model, or two functions with "
        "--strategy",
        fix="write fsdp mine.toml --model model.py:programs, or "
        "old.py:programs new.py:programs --strategy fsdp",
    )


def _lowered(
    model: str, setting: Setting, arguments: argparse.Namespace, topology: Topology | None
) -> dict[str, ProgramSide]:
    """Return the programs of one side by mode, traced and exported."""
    before = set(sys.modules)
    try:
        programs = read_programs(model, arguments.mode, devices=setting.manager.mesh.size)
        lowered = {}
        for mode, program in programs.items():
            with finding_problems(), user_code(f"{model} for {mode_name(mode)}"):
                lowered[mode] = lower_program(
                    setting.manager.for_mode(mode), program, topology=topology
                )
        return lowered
    finally:
        # Forget the modules of this side: the other side may have other versions of these files.
        folder = Path(model.rpartition(":")[0]).resolve().parent
        for name in set(sys.modules) - before:
            file = str(getattr(sys.modules[name], "__file__", None) or "")
            is_installed = "site-packages" in file or name.partition(".")[0] == "shardwright"
            if file and not is_installed and Path(file).resolve().is_relative_to(folder):
                del sys.modules[name]


def _lines(mode: str, proof: Proof, names: tuple[str, str]) -> Iterator[str]:
    by = f", compiled by {proof.compiler}" if proof.compiler else ", before it is partitioned"
    if proof.same:
        count = f" with {proof.collectives[0]} collectives" if proof.compiler else ""
        yield f"mode {mode}: the same program{count}{by}"
        return
    yield f"mode {mode}: the programs differ{by}"
    if proof.what:
        yield f"  {proof.what}"
    marks = dict(zip("AB", names, strict=True))
    for (mark, name), side in zip(marks.items(), (proof.left, proof.right), strict=True):
        if proof.left or proof.right:
            yield f"  {mark}  {os.path.basename(name)}: {_operation_text(side)}"
    if proof.cause is not None:
        cause = proof.cause
        axes = " or ".join(dict.fromkeys(axis for axis in cause.axes if axis))
        yield f"  {cause.place} dim {cause.dim}{f' {axes}' if axes else ''} is sharded differently"
        for mark, spec, rule in zip("AB", cause.specs, cause.rules, strict=True):
            yield f"    {mark}  {spec}  {rule}".rstrip()


def _operation_text(side: Differing | None) -> str:
    if side is None:
        return "no instruction that the other one lacks"
    over = f" over {'+'.join(side.mesh_axes)}" if side.mesh_axes else ""
    source = f" at {os.path.basename(side.source)}" if side.source else ""
    return f"{side.op}{over}{source}"
