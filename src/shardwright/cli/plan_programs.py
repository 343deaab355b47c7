"""`shardwright plan` of a Python file: plan, compile (with --verify), check and print each mode."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from shardwright.cli.exit_codes import FoundError
from shardwright.cli.fix import Fixed, Tried, fix_file
from shardwright.cli.inputs import Setting, make_setting, strategy_label
from shardwright.cli.plan_advice import too_large_text
from shardwright.cli.plan_checks import limit_failures
from shardwright.cli.programs import plan_program, read_options, read_programs
from shardwright.cli.show import print_json, print_lines, width_of
from shardwright.cli.verify import verify_programs
from shardwright.errors import ShardingError, StrategyError
from shardwright.lints.finding import Finding, from_problem
from shardwright.plan.collectives.collective import Collective
from shardwright.plan.fit import Verdict
from shardwright.plan.hardware import Topology
from shardwright.plan.planner import PlanReport
from shardwright.plan.verify.run import Verification
from shardwright.plan.walk.events import Event
from shardwright.show.verification import verification_text
from shardwright.vocabulary.modes import mode_name
from shardwright.vocabulary.units import bytes_text

Breach = tuple[str, Event | Collective]
_NAMED: Final = 3  # how many tensors a line about forbidden collectives names


def run_programs(arguments: argparse.Namespace, setting: Setting, topology: Topology | None) -> int:
    """Plan the programs of a file, print, and return the exit code.

    Raises:
      ShardingError: The arguments are invalid, or an input cannot be read.
    """
    notes: list[str] = []
    programs = read_programs(
        arguments.model,
        arguments.mode,
        devices=setting.manager.mesh.size,
        options=model_options(arguments),
        notes=notes,
    )
    # Check --forbid before the plans, which take longest.
    for rule in arguments.forbid:
        if rule.mode is not None and rule.mode not in programs:
            what = f"--forbid {rule.text!r} names a mode that is not planned"
            raise StrategyError(what, fix=f"the modes are {', '.join(map(mode_name, programs))}")
    reports = {
        mode: plan_program(
            program,
            setting.manager.for_mode(mode),
            f"{arguments.model} for {mode_name(mode)}",
            topology=topology,
            file=setting.file,
        )
        for mode, program in programs.items()
    }
    verified: dict[str, Verification] = {}
    failures: list[str] = []
    if arguments.verify:
        verified, failures = verify_programs(arguments, setting, topology, programs)
    breaches = list(_breaches(arguments, reports, verified))
    failures += limit_failures(
        arguments,
        {mode: report.state for mode, report in reports.items()},
        {
            # The memory of the compiled program replaces the upper end of the plan.
            mode: verified[mode].most_bytes if mode in verified else report.memory.high
            for mode, report in reports.items()
        },
        topology,
    )
    failures += [
        too_large_text(
            programs[mode],
            setting.manager.for_mode(mode),
            report,
            verified.get(mode),
            strategy=setting.combined,
        )
        for mode, report in reports.items()
        if (verified.get(mode) or report).verdict is Verdict.DOES_NOT_FIT
    ]
    incomplete = any(not report.walked.complete for report in reports.values())
    failed = bool(breaches or failures or incomplete)
    if arguments.json:
        print_json(
            {
                "modes": {
                    mode_name(mode): {
                        **report.to_json(),
                        **({"verified": verified[mode].to_json()} if mode in verified else {}),
                    }
                    for mode, report in reports.items()
                },
                "notes": notes,
                "forbidden": [{"rule": rule, "event": event.to_json()} for rule, event in breaches],
                "failed": failures,
                "ok": not failed,
            }
        )
    else:
        texts = [*notes, *_lines(arguments, reports, verified), *_breach_lines(breaches), *failures]
        print_lines(line for text in texts for line in text.split("\n"))
    return 1 if failed else 0


def fix_by_programs(arguments: argparse.Namespace, devices: int | None) -> Fixed:
    """Fix a strategy file, so that programs resolve on the mesh of the command line.

    Raises:
      StrategyError: The strategy cannot be read or written, or has no file.
    """

    def try_with(strategy: Any) -> Tried:
        setting = make_setting(
            strategy, strategy_label(arguments.strategy), mesh=arguments.mesh, devices=devices
        )
        programs = read_programs(
            arguments.model,
            arguments.mode,
            devices=setting.manager.mesh.size,
            options=model_options(arguments),
        )
        findings: list[Finding] = []
        planned = {}
        for mode, program in programs.items():
            label = f"{arguments.model} for {mode_name(mode)}"
            try:
                report = plan_program(program, setting.manager.for_mode(mode), label)
            except (ShardingError, FoundError) as error:
                refused = error.error if isinstance(error, FoundError) else error
                findings += map(from_problem, refused.problems)
                continue
            # Compare what is sent, and not whole events: an event also has the text of its rule,
            # which a fix may change.
            sent = [
                (event.kind, event.mesh_axes, event.total_wire_bytes) for event in report.events
            ]
            planned[mode] = (report.state.of(), sent)
        return Tried(findings=tuple(findings), results=planned)

    return fix_file(arguments.strategy, try_with, devices=devices, dry=arguments.dry_run)


def model_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the model with their values.

    Raise an error if an option has several values.
    """
    options = read_options(arguments)
    for name, values in options.items():
        if len(values) > 1:
            raise StrategyError(
                f"--set {name} has {len(values)} values, but a plan takes one",
                fix=f"write --set {name}={values[0]}; shardwright search compares several values",
            )
    return {name: values[0] for name, values in options.items()}


def _breaches(
    arguments: argparse.Namespace,
    reports: Mapping[str, PlanReport],
    verified: Mapping[str, Verification],
) -> Iterator[Breach]:
    """Yield the forbidden collectives of each compiled program, or else of its plan."""
    for mode, report in reports.items():
        collectives: tuple[Event | Collective, ...] = report.events
        # A program that the compiler refuses has no collectives to check, so those of the plan are
        # checked.
        if mode in verified and not verified[mode].compiled.refused:
            collectives = verified[mode].compiled.collectives
        for event in collectives:
            yield from (
                (rule.text, event) for rule in arguments.forbid if rule.matches(event, mode)
            )


def _breach_lines(breaches: Iterable[Breach]) -> list[str]:
    """Return a line for each group of forbidden collectives that differ only in their tensors."""
    tensors: dict[str, list[str]] = {}
    for rule, event in breaches:
        over, source = "+".join(event.mesh_axes), event.source.rpartition("/")[2]
        sent = event.total_wire_bytes
        size = "an unknown number of bytes" if sent is None else bytes_text(sent)
        text = f"forbidden by {rule}: {event.kind} over {over} sends {size} at {source}"
        # A compiled collective does not know the path of a tensor.
        tensors.setdefault(text, []).append(getattr(event, "path", ""))
    lines = []
    for text, paths in tensors.items():
        named = [path for path in dict.fromkeys(paths) if path]
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        each = f", {len(paths)} times" if len(paths) > 1 else ""
        lines.append(text + each + (f" ({', '.join(named[:_NAMED])}{more})" if named else ""))
    return lines


def _lines(
    arguments: argparse.Namespace,
    reports: Mapping[str, PlanReport],
    verified: Mapping[str, Verification],
) -> Iterator[str]:
    width = width_of(arguments.width)
    for number, (mode, report) in enumerate(reports.items()):
        if number:
            yield ""
        yield f"mode {mode_name(mode)}"
        yield from report.text(rows=arguments.rows, width=width).split("\n")
        if mode in verified:
            yield ""
            yield from verification_text(verified[mode], width=width).split("\n")
