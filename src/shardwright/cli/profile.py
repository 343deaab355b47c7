"""`shardwright profile`: how long a program took on its devices, beside its plan."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from shardwright.cli.arguments import EXIT_CODES, add_output, make_parser
from shardwright.cli.inputs import read_count, read_setting
from shardwright.cli.plan import add_plan_options, read_topology
from shardwright.cli.plan_programs import model_options
from shardwright.cli.programs import plan_program, read_programs
from shardwright.cli.show import print_json, print_lines, width_of
from shardwright.errors import StrategyError
from shardwright.plan.profile.fit import fitted_chip
from shardwright.show.profile import profile_html
from shardwright.strategy import files
from shardwright.vocabulary.modes import mode_name

_EPILOG = f"""\
TRACE is a file *.xplane.pb, or the folder that was passed to jax.profiler.trace. The newest profile
of a folder is read. MODEL is file.py:function or a config.json, as for `shardwright plan`. Its plan
must be that of the program in the profile: the same sizes, strategy, mesh and mode.

examples:
  shardwright profile /tmp/trace --plan model.py:programs --strategy fsdp_tp \\
      --mesh fsdp:16,tp:4 --topology v5p:4x4x4 --mode train
  shardwright profile /tmp/trace --plan model.py:programs --strategy fsdp --mesh fsdp:8 \\
      --topology v5e:2x4 --fit measured.toml

exit codes: 0 shown; {EXIT_CODES}."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    command = make_parser(
        "profile",
        "Show the time that a program took on its devices, by semantic axis, beside its plan.",
        epilog=_EPILOG,
    )
    command.add_argument("trace", metavar="TRACE", help="folder of a profile, or a *.xplane.pb")
    command.add_argument(
        "--plan", required=True, metavar="MODEL", help="file.py:function, or a config.json"
    )
    add_plan_options(command)
    command.add_argument(
        "--program",
        metavar="NAME",
        help="name of the program, such as jit_step (default: the one that took most time)",
    )
    command.add_argument(
        "--fit",
        metavar="FILE",
        help="also write the measured rates of the chip as a .toml file for --hardware",
    )
    command.add_argument("--html", metavar="FILE", help="also write one HTML page")
    command.add_argument(
        "--rows",
        type=read_count,
        metavar="N",
        help="show the N largest rows of collectives and of source lines (default: 10)",
    )
    add_output(command)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Plan the model, read the profile, print both and return the exit code.

    Raises:
      ShardingError: The arguments are invalid, or an input cannot be read.
    """
    topology = read_topology(arguments)
    devices = arguments.devices if topology is None else topology.devices
    setting = read_setting(arguments.strategy, mesh=arguments.mesh, devices=devices)
    topology = None if topology is None else setting.on(topology)
    notes: list[str] = []
    programs = read_programs(
        arguments.plan,
        arguments.mode,
        devices=setting.manager.mesh.size,
        options=model_options(arguments),
        notes=notes,
    )
    if len(programs) > 1:
        raise StrategyError(
            "a profile is compared with one program, but --plan has several modes",
            fix=f"add --mode; the modes are {', '.join(map(mode_name, programs))}",
        )
    ((mode, program),) = programs.items()
    manager = setting.manager.for_mode(mode)
    label = f"{arguments.plan} for {mode_name(mode)}"
    report = plan_program(program, manager, label, topology=topology)
    profile = manager.profile(arguments.trace, report, program=arguments.program)
    if arguments.fit is not None:
        files.write_text(Path(arguments.fit), fitted_chip(profile))
    if arguments.html is not None:
        title = f"Profile of {os.path.basename(arguments.plan)}"
        files.write_text(Path(arguments.html), profile_html(profile, title=title))
    if arguments.json:
        print_json({**profile.to_json(), "notes": notes})
    else:
        text = profile.text(rows=arguments.rows, width=width_of(arguments.width))
        print_lines([*notes, *text.split("\n")])
    return 0
