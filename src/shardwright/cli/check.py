"""`shardwright check`: lint strategies, alone or against a mesh, tensors or programs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from shardwright.cli.arguments import (
    EXIT_CODES,
    STRATEGY_HELP,
    add_mesh,
    add_output,
    add_strategy,
    make_parser,
)
from shardwright.cli.check_model import Checked, check_model, is_model, programs_of
from shardwright.cli.fix import (
    MARKS,
    Fixed,
    Tried,
    add_fix_options,
    check_fix_options,
    fix_file,
)
from shardwright.cli.inputs import (
    Setting,
    make_setting,
    read_mesh_text,
    read_strategy,
    strategy_label,
)
from shardwright.cli.models import add_model
from shardwright.cli.show import SEVERITIES, print_json, print_lines, width_of
from shardwright.cli.tensors import read_tensors
from shardwright.errors import MeshSpecError, ShardingError, did_you_mean, snippet_lines
from shardwright.lints.catalogue import Code, Finding, Severity, lint
from shardwright.lints.finding import from_problem
from shardwright.lints.subject import make_subject
from shardwright.manager.manager import PartitionManager
from shardwright.mesh.build import abstract_mesh
from shardwright.plan.planner import Program, read_arguments, trace_program
from shardwright.plan.walk.equations import nested_jaxprs
from shardwright.resolution.request import ShardingRequest
from shardwright.show.tables import wrap
from shardwright.strategy.files import strategy_names
from shardwright.strategy.model import Strategy
from shardwright.vocabulary.axes import STANDARD_MESH_AXES, Role
from shardwright.vocabulary.modes import MODE_TRAIN

_EPILOG = f"""\
Each strategy is checked on its own. --tensors also compares it with the tensors of a model and, if
the sizes of the mesh are known, checks that every tensor fits.

file.py:function is a model. The axes of its parameters are compared with those that `shardwright
infer` infers. --params names a function of the file that returns ArraySpecs or, with --axes,
arrays. Without --params, file.py:function must return programs, as for `shardwright plan`.

examples:
  shardwright check mine.toml
  shardwright check strategies/*.toml --strict
  shardwright check "fsdp_tp | mine.toml" --tensors model.toml --mesh dp:2,fsdp:2,tp:4
  shardwright check mine.toml --tensors model.toml --mesh fsdp:2,tp:4 --fix --dry-run
  shardwright check model.py:forward --params init --axes axes.toml \\
      --input "int32[8,32] BATCH LENGTH"

exit codes: 0 no errors; 1 errors, with --strict also warnings;
{EXIT_CODES}."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    command = make_parser("check", "Find mistakes in a strategy. Needs no devices.", epilog=_EPILOG)
    what = f"{STRATEGY_HELP}; or a model, as file.py:function"
    command.add_argument("strategies", nargs="*", metavar="STRATEGY", help=what)
    add_strategy(command, required=False, what="a strategy, as for explain")
    command.add_argument(
        "--tensors",
        metavar="FILE",
        help="a .toml or .json file of named tensors to check against",
    )
    add_mesh(command)
    add_model(command, required=False)
    command.add_argument(
        "--axes", metavar="FILE", help="a .toml file of path rules that annotate the parameters"
    )
    command.add_argument("--strict", action="store_true", help="fail on warnings too")
    add_fix_options(command)
    add_output(command)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Check, print and return the exit code.

    Raises:
      ShardingError: The arguments are invalid, or an input cannot be read.
    """
    strategies = [
        *arguments.strategies,
        *([arguments.strategy] if arguments.strategy else []),
    ]
    if not strategies:
        # argparse cannot require one of two arguments: STRATEGY or --strategy.
        parser().error("the following arguments are required: STRATEGY")
    check_fix_options(arguments)
    tensors = None if arguments.tensors is None else read_tensors(arguments.tensors)
    own_axes, settings, results = _read_settings(strategies, arguments)
    programs = [programs_of(text, arguments) for text in strategies if is_model(text)]
    for text in strategies:
        if is_model(text):
            results += check_model(text, arguments, own_axes=own_axes, settings=settings)
        elif arguments.fix:
            fixed = fix_by_tensors(text, tensors, arguments, devices=arguments.devices)
            print_lines([*fixed.report(dry=arguments.dry_run), ""], marks=MARKS)
            results.append(Checked(strategy=strategy_label(text), findings=fixed.tried.findings))
        else:
            checked = _check(text, tensors, arguments.mesh, arguments.devices)
            results.append(_with_memory(checked, text, programs))
    failed = any(result.fails(strict=arguments.strict) for result in results)
    if arguments.json:
        print_json(
            {
                "strategies": [
                    {
                        "strategy": result.strategy,
                        "findings": [finding.to_json() for finding in result.findings],
                        "ok": not result.fails(strict=arguments.strict),
                    }
                    for result in results
                ],
                "ok": not failed,
            }
        )
    else:
        print_lines(report(results, width=width_of(arguments.width)), marks=SEVERITIES)
    return 1 if failed else 0


def _read_settings(
    texts: Sequence[str], arguments: argparse.Namespace
) -> tuple[set[str], list[Setting], list[Checked]]:
    """Return what the models of the command line need from its strategies.

    This is the set of axes that the strategies declare, and each strategy as a `Setting` on its
    mesh. A strategy whose mesh has an unknown size gets a note in place of a setting.
    """
    own_axes: set[str] = set()
    settings: list[Setting] = []
    notes: list[Checked] = []
    for text in itertools.filterfalse(is_model, texts if any(map(is_model, texts)) else ()):
        # Skip a strategy that cannot be read: `_check` reports it.
        with contextlib.suppress(ShardingError):
            strategy, label = read_strategy(text)
            own_axes.update(strategy.axes)
            try:
                mesh, devices = arguments.mesh, arguments.devices
                settings.append(make_setting(strategy, label, mesh=mesh, devices=devices))
            except MeshSpecError as error:
                note = Finding(
                    code=Code.UNRESOLVED,
                    severity=Severity.NOTE,
                    message=f"the arrays of the model are not resolved: {error.problems[0].what}",
                    fix=error.fix,
                    key="mesh",
                )
                notes.append(Checked(strategy=label, findings=(note,)))
    return own_axes, settings, notes


def fix_by_tensors(
    text: str, tensors: Any, arguments: argparse.Namespace, *, devices: int | None
) -> Fixed:
    """Fix a strategy file, so that tensors resolve on the mesh of the command line.

    Raises:
      ShardingError: The file cannot be read or written, or no file is named.
    """

    def try_with(strategy: Any) -> Tried:
        mesh = read_mesh_text(strategy, arguments.mesh, devices)
        found = lint(strategy, tensors, mesh=mesh)
        resolved = {
            (at, answer.mode): answer.resolution.spec
            for at, answer in enumerate(make_subject(strategy, tensors, mesh).answers)
            if answer.resolution.ok
        }
        return Tried(findings=found, results=resolved)

    return fix_file(text, try_with, devices=devices, dry=arguments.dry_run)


def _check(text: str, tensors: Any, mesh: str | None, devices: int | None) -> Checked:
    # `read_strategy` returns no label if it fails, so make one first.
    label = strategy_label(text)
    try:
        strategy, label = read_strategy(text)
    except ShardingError as error:
        # A problem inside a file is a finding. A missing file is an error of usage (exit code 2).
        # The path of a problem inside a file begins with the name of this file, which is one of the
        # files of the overlay.
        names = tuple(os.path.basename(name) for name in strategy_names(text) if name)
        if not all(problem.path.startswith(names) for problem in error.problems):
            raise
        return Checked(
            strategy=label, findings=tuple(from_problem(problem) for problem in error.problems)
        )
    return Checked(
        strategy=label,
        findings=lint(strategy, tensors, mesh=read_mesh_text(strategy, mesh, devices)),
    )


def _with_memory(checked: Checked, text: str, programs: Sequence[Mapping[str, Program]]) -> Checked:
    """Add the findings of `check_memory`, which need the programs of the command line."""
    if checked.fails(strict=False):
        return checked
    strategy, _ = read_strategy(text)
    found = [finding for each in programs for finding in check_memory(strategy, each)]
    return dataclasses.replace(checked, findings=(*checked.findings, *found))


def report(results: Sequence[Checked], *, width: int) -> list[str]:
    """Return the report: a block per finding, and a line with the number of findings."""
    lines: list[str] = []
    for result in results:
        lines += [result.strategy] if len(results) > 1 or not result.findings else []
        for finding in result.findings:
            lines += _block(finding, width=width)
        lines += [
            f"  {_counts_text(result.findings)}"
            if not result.findings
            else _counts_text(result.findings),
            "",
        ]
    return lines[:-1]


def _block(finding: Finding, *, width: int) -> list[str]:
    place = finding.where or "(no place)"
    lines = [f"{place}: {finding.severity} {finding.code}"]
    lines += wrap(finding.message, max(width - 2, 20))
    lines += snippet_lines(finding.snippet)
    if finding.fix:
        lines += wrap(f"fix  {finding.fix}", max(width - 2, 20), rest="     ")
    return [lines[0], *(f"  {line}" for line in lines[1:])]


def _counts_text(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    words = [
        f"{counts[severity]} {severity}{'' if counts[severity] == 1 else 's'}"
        for severity in Severity
        if counts[severity]
    ]
    return ", ".join(words) or "no findings"


def check_memory(strategy: Strategy, programs: Mapping[str, Program]) -> Iterator[Finding]:
    """Yield findings: state on the host that is not donated, and unused names in `[memory.saved]`.

    Args:
      strategy: The strategy.
      programs: Programs by mode. Only the training program is checked, because only this program
        has optimizer state and saves values for its backward pass.

    Raises:
      ShardingError: The program does not resolve under the strategy.
    """
    program = programs.get(MODE_TRAIN)
    if program is None:
        return
    # Give each mesh axis one device, so that no dim is indivisible.
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
            fix=f"donate argument {at}: Program(..., donated=({at},)); pm.jit_step donates its "
            "state",
        )


def _unused_names(strategy: Strategy, known: set[str]) -> Iterator[Finding]:
    for name in strategy.memory.saved:
        if name not in known:
            key = ("memory", "saved", name)
            names = f"the names are {', '.join(sorted(known))}" if known else "there are no names"
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
