"""`shardwright search`: the best meshes and strategies of a model on a slice, without a device."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from shardwright.cli.arguments import EXIT_CODES, add_output, make_parser
from shardwright.cli.inputs import read_count, read_strategy
from shardwright.cli.programs import read_programs
from shardwright.cli.show import print_json, print_lines, width_of
from shardwright.errors import StrategyError
from shardwright.plan.hardware import parse_topology, read_hardware
from shardwright.plan.report.search import search_text
from shardwright.plan.search import SearchReport, mesh_text, search
from shardwright.vocabulary.modes import mode_name

_EPILOG = f"""\
MODEL is file.py:function, as for `shardwright plan`. Every mesh of the slice is planned under every
strategy. The table has the candidates that no other one beats in both time and memory.

examples:
  shardwright search model.py:programs --strategy fsdp --strategy fsdp_tp --topology v5p:4x4x4
  shardwright search model.py:programs --strategy fsdp_tp --topology v5e:4x8 --axes fsdp,tp \\
      --mode decode --out found

exit codes: 0 found; 1 no candidate fits;
{EXIT_CODES}."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    command = make_parser(
        "search", "Find meshes and strategies for a model. Needs no devices.", epilog=_EPILOG
    )
    command.add_argument("model", metavar="MODEL", help="file.py:function")
    command.add_argument(
        "--strategy",
        action="append",
        required=True,
        metavar="STRATEGY",
        help="a strategy to try, as for plan; repeat it for more",
    )
    command.add_argument(
        "--topology", required=True, metavar="T", help="the slice, such as v5p:4x4x4"
    )
    command.add_argument(
        "--hardware", metavar="FILE", help="a .toml file that adds chips, or replaces their values"
    )
    command.add_argument(
        "--axes", metavar="A,B", help="mesh axes that may vary (default: all of each strategy)"
    )
    command.add_argument("--mode", metavar="MODE", help="the mode, if the model has several")
    command.add_argument(
        "--out", metavar="DIR", help="write each candidate of the table as a strategy file"
    )
    command.add_argument("--rows", type=read_count, metavar="N", help="show only the N fastest")
    add_output(command)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Search, print and return the exit code.

    Raises:
      ShardingError: The question is invalid.
    """
    programs = read_programs(arguments.model, arguments.mode)
    if len(programs) > 1:
        raise StrategyError(
            f"{arguments.model} has {len(programs)} modes, and a search is for one",
            fix=f"--mode {' or '.join(map(mode_name, programs))}",
        )
    ((mode, program),) = programs.items()
    strategies = {label: strategy for strategy, label in map(read_strategy, arguments.strategy)}
    axes = None if arguments.axes is None else arguments.axes.replace(" ", "").split(",")
    found = search(
        program,
        strategies,
        topology=parse_topology(arguments.topology, read_hardware(arguments.hardware)),
        mode=mode,
        axes=axes,
    )
    written = [] if arguments.out is None else _write(found, Path(arguments.out), arguments.rows)
    if arguments.json:
        print_json({"mode": mode_name(mode), **found.to_json(), "files": written})
    else:
        text = search_text(found, rows=arguments.rows, width=width_of(arguments.width))
        lines = [f"mode {mode_name(mode)}", *text.split("\n")]
        print_lines([*lines, *(f"wrote {name}" for name in written)])
    return 0 if found.candidates else 1


def _write(found: SearchReport, folder: Path, rows: int | None) -> list[str]:
    """Write the front as strategy files, the fastest first, and return their names."""
    if not folder.is_dir():
        raise StrategyError(f"no folder {str(folder)!r}", fix="create it")
    written = []
    for number, candidate in enumerate(found.front[:rows], 1):
        name = re.sub(r"[^A-Za-z0-9]+", "-", f"{candidate.name}-{mesh_text(candidate.sizes)}")
        path = candidate.strategy.dump(folder / f"{number:02}-{name}.toml")
        written.append(str(path))
    return written
