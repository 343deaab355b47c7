"""`shardwright check`: lint strategies, alone or against a mesh and a tree of named tensors."""

from __future__ import annotations

import argparse
import dataclasses
import os
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from shardwright.cli.arguments import (
    EXIT_CODES,
    STRATEGY_HELP,
    add_output,
    add_strategies,
    make_parser,
)
from shardwright.cli.inputs import (
    read_count,
    read_mesh_text,
    read_strategy,
    strategy_names,
)
from shardwright.cli.show import SEVERITIES, print_json, print_lines, width_of
from shardwright.cli.tensors import read_tensors
from shardwright.errors import ShardingError
from shardwright.lints.catalogue import Finding, Severity, lint
from shardwright.lints.finding import from_problem

_EPILOG = f"""\
Each strategy is checked on its own. Without --tensors only the file is looked at; with it, also what a model uses, and
with a mesh of known sizes also whether every tensor fits.

examples:
  shardwright check mine.toml
  shardwright check strategies/*.toml --strict
  shardwright check "fsdp_tp | mine.toml" --tensors model.toml --mesh dp:2,fsdp:2,tp:4

exit codes: 0 nothing, or only warnings and notes; 1 errors, with --strict also warnings;
{EXIT_CODES}."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    made = make_parser(
        "check", "Say what looks wrong about a strategy. Needs no devices.", epilog=_EPILOG
    )
    add_strategies(made, "*", STRATEGY_HELP)
    made.add_argument(
        "--strategy",
        action="append",
        metavar="STRATEGY",
        help="a strategy, as explain takes it; again: an overlay on the one before",
    )
    made.add_argument(
        "--tensors",
        metavar="FILE",
        help="a .toml or .json file of named tensors to hold the strategies against",
    )
    made.add_argument(
        "--mesh",
        metavar="M",
        help="such as dp:1,fsdp:2,tp:4 or dcn.dp:2,dp:4,tp:4; absent: each strategy's own",
    )
    made.add_argument(
        "--devices", type=read_count, metavar="N", help="number of devices, where a mesh has a -1"
    )
    made.add_argument("--strict", action="store_true", help="let warnings fail too")
    add_output(made)
    return made


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A strategy and what was found."""

    strategy: str
    findings: tuple[Finding, ...]

    def fails(self, *, strict: bool) -> bool:
        """Whether it must not pass."""
        failing = (Severity.ERROR, Severity.WARNING) if strict else (Severity.ERROR,)
        return any(finding.severity in failing for finding in self.findings)


def run(arguments: argparse.Namespace) -> int:
    """Check, print and return the exit code.

    Raises:
      ShardingError: the question cannot be asked.
    """
    strategies = [
        *arguments.strategies,
        *([" | ".join(arguments.strategy)] if arguments.strategy else []),
    ]
    if not strategies:
        parser().error("the following arguments are required: STRATEGY")
    tensors = None if arguments.tensors is None else read_tensors(arguments.tensors)
    results = [_check(text, tensors, arguments.mesh, arguments.devices) for text in strategies]
    failed = any(result.fails(strict=arguments.strict) for result in results)
    if arguments.json:
        print_json(
            {
                "strategies": [_json(result, strict=arguments.strict) for result in results],
                "ok": not failed,
            }
        )
    else:
        print_lines(report(results, width=width_of(arguments.width)), marks=SEVERITIES)
    return 1 if failed else 0


def _check(text: str, tensors: Any, mesh: str | None, devices: int | None) -> Checked:
    label = " | ".join(map(os.path.basename, strategy_names(text)))
    try:
        strategy, label = read_strategy(text)
    except ShardingError as error:
        # What is wrong inside a file is the answer here; that there is no such file is not.
        if not _inside(error, text):
            raise
        return Checked(
            strategy=label, findings=tuple(from_problem(problem) for problem in error.problems)
        )
    return Checked(
        strategy=label,
        findings=lint(strategy, tensors, mesh=read_mesh_text(strategy, mesh, devices)),
    )


def _inside(error: ShardingError, text: str) -> bool:
    """Tell whether an error is about what stands in a file: its problems then name the file."""
    names = [os.path.basename(name) for name in strategy_names(text) if name]
    return all(problem.path.startswith(tuple(names)) for problem in error.problems)


def _json(result: Checked, *, strict: bool) -> dict[str, Any]:
    findings = [finding.to_json() for finding in result.findings]
    return {
        "strategy": result.strategy,
        "findings": findings,
        "ok": not result.fails(strict=strict),
    }


def report(results: Sequence[Checked], *, width: int) -> list[str]:
    """Return what people read: a block per finding, and a line that counts them."""
    lines: list[str] = []
    for result in results:
        lines += [result.strategy] if len(results) > 1 or not result.findings else []
        for finding in result.findings:
            lines += _block(finding, width=width)
        lines += [
            f"  {_counted(result.findings)}" if not result.findings else _counted(result.findings),
            "",
        ]
    return lines[:-1]


def _block(finding: Finding, *, width: int) -> list[str]:
    place = finding.where or "(no place)"
    lines = [f"{place}: {finding.severity} {finding.code}"]
    lines += textwrap.wrap(
        finding.message, max(width - 2, 20), break_long_words=False, break_on_hyphens=False
    )
    if finding.fix:
        lines += textwrap.wrap(
            f"fix  {finding.fix}",
            max(width - 2, 20),
            subsequent_indent="     ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return [lines[0], *(f"  {line}" for line in lines[1:])]


def _counted(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    words = [
        f"{counts[one]} {one}{'' if counts[one] == 1 else 's'}" for one in Severity if counts[one]
    ]
    return ", ".join(words) or "no findings"
