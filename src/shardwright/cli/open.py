"""`shardwright open`: the plans of many candidates as one HTML page for a reader to explore."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from pathlib import Path

from shardwright.cli.arguments import EXIT_CODES, make_parser
from shardwright.cli.exit_codes import OK, code_of
from shardwright.cli.inputs import read_count, read_setting, read_slice
from shardwright.cli.programs import plan_program
from shardwright.cli.search import (
    add_search_options,
    mode_groups,
    print_errors,
    read_variants,
    search_groups,
)
from shardwright.cli.show import ProgressLine, print_lines
from shardwright.errors import ShardingError, StrategyError
from shardwright.plan.hardware import Topology
from shardwright.plan.planner import Program
from shardwright.plan.search.result import Candidate
from shardwright.show.explore import page_html
from shardwright.show.search import count_lines
from shardwright.strategy import files
from shardwright.vocabulary.modes import mode_name

_EPILOG = f"""\
MODEL is file.py:function or a config.json, as for `shardwright plan`. The page has sliders for the
mesh. It shows the memory and the traffic of each candidate, and the rule behind each dim of each
tensor. The page is one file that loads no other file. With --topology, the candidates are those of
`shardwright search`, including those that do not fit. With --mesh, the candidates are the given
strategies on the given meshes.

examples:
  shardwright open config.json --topology v5p:4x4x4
  shardwright open model.py:programs --strategy mine.toml --strategy fsdp_tp --topology v5e:4x8
  shardwright open model.py:programs --strategy mine.toml --mesh fsdp:8 --mesh fsdp:4,tp:2

exit codes: 0 written; 1 an array has no spec, or Ctrl-C ended the search before it planned a
candidate;
{EXIT_CODES}."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    command = make_parser(
        "open", "Write plans as one HTML page to explore. Needs no devices.", epilog=_EPILOG
    )
    add_search_options(command, topology_required=False)
    command.add_argument(
        "--mesh",
        action="append",
        metavar="M",
        help="plan this mesh, such as fsdp:16,tp:4, and do not search; repeat the option for more",
    )
    command.add_argument(
        "--candidates",
        type=read_count,
        default=60,
        metavar="N",
        help="show at most N candidates for train, and N for the other modes (default: 60)",
    )
    command.add_argument(
        "--out",
        default="plan.html",
        metavar="FILE",
        help="file to write; an existing file is replaced (default: plan.html)",
    )
    return command


def run(arguments: argparse.Namespace) -> int:
    """Plan, write the page and return the exit code.

    Raises:
      ShardingError: The arguments are invalid, or an input cannot be read.
    """
    topology = read_slice(arguments.topology, arguments.hardware)
    errors: dict[str, ShardingError] = {}
    notes: list[str] = []
    candidates: list[Candidate] = []
    if arguments.mesh is not None:
        variants, candidates = _given(arguments, topology, notes)
    elif topology is None:
        raise StrategyError(
            "nothing says which meshes to plan",
            fix="add --topology v5p:4x4x4 (for GPUs, 2xh100:8) to search all of its meshes, or "
            "give some: --strategy fsdp_tp --mesh fsdp:4,tp:2",
        )
    else:
        variants = read_variants(arguments, topology.devices, notes)
        progress = ProgressLine()
        groups = mode_groups(arguments, next(iter(variants.values())))
        # Plan as many programs as the page shows. If the search planned more, it might find better
        # candidates, but would take longer.
        reports, errors = search_groups(
            arguments,
            topology,
            groups,
            variants,
            progress,
            walks=arguments.candidates,
            keep_large=True,
        )
        progress.close()
        for name, report in reports.items():
            shown = report.candidates[: arguments.candidates]
            left = len(report.candidates) - len(shown)
            notes += [f"{name}: {line.strip()}" for line in count_lines(report)]
            notes += [f"{name}: not on this page: {left} slower candidates"] if left else []
            candidates += shown
    if not candidates:
        print_lines(["no candidate was planned"])
        return 1
    title = f"Plans of {os.path.basename(arguments.model)}"
    # The variants of a model share most notes, so list equal notes once.
    page = page_html(candidates, variants, title=title, notes=list(dict.fromkeys(notes)))
    files.write_text(Path(arguments.out), page)
    modes = dict.fromkeys(mode_name(mode) for each in candidates for mode in each.reports)
    print_lines(
        [
            f"planned {len(candidates)} candidates for {', '.join(modes)}",
            f"wrote {arguments.out}: open it in a browser",
        ]
    )
    print_errors(errors)
    return max(map(code_of, errors.values()), default=OK)


def _given(
    arguments: argparse.Namespace, topology: Topology | None, notes: list[str]
) -> tuple[dict[str, dict[str, Program]], list[Candidate]]:
    """Plan the given strategies on the given meshes.

    Raises:
      ShardingError: The arguments are invalid, or an input cannot be read.
    """
    if arguments.strategy is None:
        raise StrategyError("--mesh needs a strategy", fix="add --strategy fsdp_tp")
    for option in ("axes", "pin", "vary", "orders"):
        if getattr(arguments, option):
            raise StrategyError(
                f"--{option} is for a search, but --mesh gives the meshes",
                fix=f"leave out --{option}, or give --topology and no --mesh",
            )
    settings = [
        read_setting(strategy, mesh=mesh, devices=None if topology is None else topology.devices)
        for strategy in arguments.strategy
        for mesh in arguments.mesh
    ]
    # This number is the batch of a `config.json`, and the devices of every mesh must divide it.
    devices = math.lcm(*(setting.manager.mesh.size for setting in settings))
    variants = read_variants(arguments, devices, notes)
    modes = [
        mode
        for group in mode_groups(arguments, next(iter(variants.values()))).values()
        for mode in group
    ]
    candidates = []
    for label, programs in variants.items():
        for setting in settings:
            candidate = Candidate(
                name=setting.strategy,
                sizes=setting.sizes,
                strategy=setting.combined,
                reports={},
                variant=label,
            )
            reports = {
                mode: plan_program(
                    programs[mode],
                    candidate.manager.for_mode(mode),
                    f"{arguments.model} for {mode_name(mode)}",
                    topology=None if topology is None else setting.on(topology),
                )
                for mode in modes
            }
            candidates.append(dataclasses.replace(candidate, reports=reports))
    return variants, candidates
