"""`shardwright search`: the best meshes and rules of a model on a slice, without a device."""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.cli.arguments import EXIT_CODES, add_output, make_parser
from shardwright.cli.exit_codes import code_of, finding_problems
from shardwright.cli.inputs import read_count, read_strategy
from shardwright.cli.programs import add_model_options, read_options, read_programs
from shardwright.cli.relayout import relayout_lines
from shardwright.cli.show import ProgressLine, print_json, print_lines, width_of
from shardwright.cli.verify import add_compiler_options, cache_folder, check_verify_options
from shardwright.errors import ShardingError, StrategyError
from shardwright.plan.hardware import Topology, parse_topology, read_hardware
from shardwright.plan.planner import Program
from shardwright.plan.search.result import STOPPED, Candidate, SearchReport
from shardwright.plan.search.run import WALKS, search_variants
from shardwright.plan.search.settings import parse_alternatives, read_vary
from shardwright.plan.search.verify import verify_front
from shardwright.plan.verify.compiler import TIMEOUT
from shardwright.show.search import search_text, verified_text
from shardwright.strategy.foreign_files import cannot
from shardwright.vocabulary.modes import MODE_TRAIN, mode_name, parse_mode

_EPILOG = f"""\
MODEL is file.py:function or a config.json, as for `shardwright plan`. A candidate is a strategy on
a mesh of the slice. Each candidate is resolved, and the best ones are planned. The table has the
candidates that no other one beats in both time and memory. There is one search for train, and one
for all other modes, which share a strategy. Without --strategy, the search for train
tries the presets fsdp_tp and fsdp_tp_sp, and moe_ep if the model has experts. The search for other
modes tries serve_tp and serve_long_context.

examples:
  shardwright search config.json --topology v5p:4x4x4
  shardwright search model.py:programs --strategy fsdp --strategy fsdp_tp --topology v5p:4x4x4
  shardwright search model.py:programs --strategy fsdp_tp --topology v5e:4x8 --axes fsdp,tp \\
      --mode decode --out found
  shardwright search model.py:programs --strategy fsdp_tp --topology v5p:4x4x4 \\
      --mode train,prefill,decode --vary head --vary "params.embed = fsdp, -" --pin mesh.dp=1
  shardwright search model.py:programs --strategy fsdp --topology v5e:4x4 --set remat=none,full

exit codes: 0 found; 1 no candidate fits, by its plan or by the compiler;
{EXIT_CODES}."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    command = make_parser(
        "search", "Find meshes and strategies for a model. Needs no devices.", epilog=_EPILOG
    )
    add_search_options(command, topology_required=True)
    command.add_argument(
        "--walks",
        type=read_count,
        default=WALKS,
        metavar="N",
        help=f"plan at most N programs: those that a quick estimate ranks fastest, and those with "
        f"the smallest state (default: {WALKS})",
    )
    command.add_argument(
        "--out",
        metavar="DIR",
        help="write each candidate of the table as a strategy file; DIR is created if it is absent",
    )
    command.add_argument(
        "--verify",
        type=read_count,
        metavar="K",
        help="compile the K fastest candidates, and order them by their compiled programs",
    )
    add_compiler_options(command)
    command.add_argument(
        "--rows", type=read_count, metavar="N", help="show only the N fastest candidates"
    )
    add_output(command)
    return command


def add_search_options(command: argparse.ArgumentParser, *, topology_required: bool) -> None:
    """Add the options that say what is searched."""
    command.add_argument("model", metavar="MODEL", help="file.py:function, or a config.json")
    command.add_argument(
        "--strategy",
        action="append",
        metavar="STRATEGY",
        help="a strategy to try, as for plan; repeat it to try several (default: presets that suit "
        "the modes)",
    )
    command.add_argument(
        "--topology",
        required=topology_required,
        metavar="T",
        help="v5p:4x4x4, or 16xh100:8 for hosts of GPUs",
    )
    command.add_argument(
        "--hardware", metavar="FILE", help="a .toml file that adds chips, or replaces their values"
    )
    command.add_argument(
        "--mode", "--modes", metavar="A,B", help="search for these modes (default: all)"
    )
    add_model_options(command, several=True)
    command.add_argument(
        "--axes",
        metavar="A,B",
        help="mesh axes that may have several devices (default: all of each strategy)",
    )
    command.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="KEY=RULE",
        help="a setting that every candidate has, such as head=tp, params.embed=fsdp or mesh.tp=4",
    )
    command.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="try alternatives of a rule, such as 'head = tp, -'; a KEY alone tries the strategy's "
        "own rule and '-' (replicated)",
    )
    command.add_argument(
        "--orders", action="store_true", help="also try every order of the mesh axes"
    )


def run(arguments: argparse.Namespace) -> int:
    """Search, print and return the exit code.

    Raises:
      ShardingError: The arguments are invalid, or an input cannot be read.
    """
    topology = parse_topology(arguments.topology, read_hardware(arguments.hardware))
    # Make the folder of --out before the search, which may take minutes.
    if arguments.out is not None:
        _make_folder(arguments.out)
    notes: list[str] = []
    variants = read_variants(arguments, topology.devices, notes)
    groups = mode_groups(arguments, next(iter(variants.values())))
    check_verify_options(arguments, topology)
    progress = ProgressLine()
    reports, errors = search_groups(
        arguments, topology, groups, variants, progress, walks=arguments.walks
    )
    written = {
        name: []
        if arguments.out is None
        else _write(report.front[: arguments.rows], arguments.out, name if len(groups) > 1 else "")
        for name, report in reports.items()
    }
    verified = {
        name: ()
        if not arguments.verify
        else verify_front(
            report,
            variants,
            most=arguments.verify,
            platform=arguments.compiler,
            effort=arguments.effort or "low",
            timeout=arguments.verify_timeout or TIMEOUT,
            cache=cache_folder(arguments.verify_cache),
            progress=progress,
        )
        for name, report in reports.items()
    }
    progress.close()
    if arguments.json:
        data = [
            {
                "mode": name,
                **report.to_json(),
                "files": written[name],
                "verified": [each.to_json() for each in verified[name]],
            }
            for name, report in reports.items()
        ]
        print_json(data[0] if len(data) == 1 else {"searches": data})
    else:
        width = width_of(arguments.width)
        lines = ["", *dict.fromkeys(notes)] if notes else []
        for name, report in reports.items():
            text = search_text(report, rows=arguments.rows, width=width)
            lines += ["", f"mode {name}", *text.split("\n")]
            if verified[name]:
                lines += ["", *verified_text(verified[name], width=width).split("\n")]
            lines += [f"wrote {file}" for file in written[name]]
        print_lines(lines[1:])
        # `front` is sorted: first the candidates that fit, from the fastest to the slowest.
        best = [report.front[0] for report in reports.values() if report.front]
        # The weights move from the candidate of train to the candidate of the other modes.
        if len(best) == 2:
            train, serve = best
            programs = variants[train.variant], variants[serve.variant]
            print_lines(["", *relayout_lines(train, serve, *programs)])
    print_errors(errors)
    # The results of the groups without errors are printed already. The exit code says that the
    # answer is incomplete.
    if errors:
        return max(map(code_of, errors.values()))
    bad = [not report.candidates for report in reports.values()]
    # Without --verify nothing is compiled, and the plans alone decide.
    bad += [not any(each.fits for each in compiled) for compiled in verified.values() if compiled]
    return 1 if any(bad) else 0


def print_errors(errors: Mapping[str, ShardingError]) -> None:
    """Print the errors of the groups of modes that were not searched."""
    for name, problem in errors.items():
        print(f"shardwright: mode {name} was not searched: {problem}", file=sys.stderr)


def search_groups(
    arguments: argparse.Namespace,
    topology: Topology,
    groups: Mapping[str, Sequence[str]],
    variants: Mapping[str, Mapping[str, Program]],
    progress: ProgressLine,
    *,
    walks: int,
    keep_large: bool = False,
) -> tuple[dict[str, SearchReport], dict[str, ShardingError]]:
    """Search for each group of modes. Return the results and the errors, both by group.

    Raises:
      ShardingError: An option is invalid, or every group has an error.
    """
    options: dict[str, Any] = {
        "axes": None if arguments.axes is None else arguments.axes.replace(" ", "").split(","),
        "pins": arguments.pin,
        "vary": read_vary(map(parse_alternatives, arguments.vary)),
        "orders": arguments.orders,
        "keep_large": keep_large,
        "walks": walks,
    }
    strategies = None  # presets that suit the modes
    if arguments.strategy is not None:
        strategies = {label: strategy for strategy, label in map(read_strategy, arguments.strategy)}
    reports: dict[str, SearchReport] = {}
    errors: dict[str, ShardingError] = {}
    with _stoppable(progress) as shown, _fewer_collections():
        for name, modes in groups.items():
            if reports and any(STOPPED in report.dropped for report in reports.values()):
                continue  # Ctrl-C ended the search before this one
            programs = {
                label: {mode: each[mode] for mode in modes} for label, each in variants.items()
            }
            try:
                reports[name] = search_variants(
                    programs, strategies, topology=topology, progress=shown, **options
                )
            except ShardingError as error:
                errors[name] = error  # keep it, so that the results of other searches are shown
    if not reports:
        progress.close()
        with finding_problems():
            raise next(iter(errors.values()))
    return reports, errors


@contextlib.contextmanager
def _stoppable(show: ProgressLine) -> Iterator[Callable[[object], bool]]:
    """Yield a progress function.

    The first Ctrl-C stops the search. The second Ctrl-C ends the command.
    """
    stopped: list[int] = []

    def stop(number: int, _: object) -> None:
        stopped.append(number)
        # With the old handler back, a second Ctrl-C raises KeyboardInterrupt.
        signal.signal(signal.SIGINT, before)

    def shown(state: object) -> bool:
        show(state)
        # A search stops as soon as its `progress` function returns False. It keeps the candidates
        # that it has planned.
        return not stopped

    # Python lets only the main thread set a handler.
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, stop) if is_main else None
    try:
        yield shown
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _fewer_collections() -> Iterator[None]:
    """Run Python's collector of cyclic garbage less often: it took a tenth of the search time.

    Traces and plans consist of about a million objects, which live as long as the search does.
    """
    before = gc.get_threshold()
    gc.set_threshold(50_000, 5, 5)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def read_variants(
    arguments: argparse.Namespace, devices: int, notes: list[str]
) -> dict[str, dict[str, Program]]:
    """Return the programs by mode, for each combination of the options of the function."""
    options = read_options(arguments)
    several = [name for name, values in options.items() if len(values) > 1]
    variants = {}
    # Without options, `itertools.product` gives one empty combination, whose label is empty.
    for chosen in itertools.product(*options.values()):
        settings = dict(zip(options, chosen, strict=True))
        label = ", ".join(f"{name}={settings[name]}" for name in several)
        variants[label] = read_programs(
            arguments.model,
            devices=devices,
            options=settings,
            notes=notes,
        )
    return variants


def mode_groups(
    arguments: argparse.Namespace, programs: Mapping[str, Program]
) -> dict[str, list[str]]:
    """Return the groups of modes that share a strategy: train, and all others."""
    if arguments.mode in (None, "all"):
        modes = list(programs)
    else:
        modes = [parse_mode(mode) for mode in arguments.mode.replace(" ", "").split(",")]
    for mode in modes:
        if mode not in programs:
            raise StrategyError(
                f"{arguments.model} has no mode {mode_name(mode)}",
                fix=f"its modes are {', '.join(map(mode_name, programs))}",
            )
    train = [mode for mode in modes if mode == MODE_TRAIN]
    others = [mode for mode in dict.fromkeys(modes) if mode != MODE_TRAIN]
    return {"+".join(map(mode_name, group)): group for group in (train, others) if group}


def _make_folder(name: str) -> None:
    """Create the folder of `--out`, so that a finished search can be written.

    Raises:
      StrategyError: The folder cannot be created or written.
    """
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("create", name, error) from error
    if not os.access(name, os.W_OK | os.X_OK):
        raise StrategyError(f"cannot write in {name!r}", fix="check its permissions")


def _write(candidates: Sequence[Candidate], folder: str, group: str) -> list[str]:
    """Write candidates as strategy files, and return the names of the files.

    A name has the rank, group of modes, strategy, mesh and variant. Empty parts are left out.
    """
    written = []
    for number, candidate in enumerate(candidates, 1):
        parts = (group, candidate.name, candidate.mesh, candidate.variant)
        # The names of meshes have colons and commas, which not every file system allows in file
        # names.
        words = re.sub(r"[^A-Za-z0-9]+", "-", "-".join(part for part in parts if part))
        name = f"{number:02}-{words}"
        # Errors and reports show the name of a strategy, so give it the name of its file.
        strategy = candidate.strategy | type(candidate.strategy)(name=name)
        written.append(str(strategy.dump(Path(folder) / f"{name}.toml")))
    return written
