"""`shardwright plan`: what the functions of a model send under a strategy, without a device."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from shardwright.cli.arguments import EXIT_CODES, STRATEGY_HELP, add_output, make_parser
from shardwright.cli.inputs import read_count, read_setting
from shardwright.cli.show import print_json, print_lines, width_of
from shardwright.errors import ShardingError, StrategyError, did_you_mean
from shardwright.plan.collectives.collective import Kind
from shardwright.plan.planner import PlanReport, Program, plan
from shardwright.plan.report.text import bytes_text
from shardwright.plan.walk.events import Event
from shardwright.vocabulary.modes import MODES, mode_name, parse_mode

_EPILOG = f"""\
MODEL is file.py:function. The function takes nothing and returns a shardwright.plan.Program, or a
dict of them by mode. A Program is a function, the shapes of its arguments and their annotations.

examples:
  shardwright plan model.py:programs --strategy fsdp_tp --mesh fsdp:16,tp:4
  shardwright plan model.py:programs --strategy mine.toml --mesh fsdp:64 --mode train --rows 10
  shardwright plan model.py:programs --strategy serve_tp --mesh tp:8 \\
      --forbid "all_gather@decode>1MiB"

exit codes: 0 planned; 1 a collective is forbidden, or the plan is incomplete;
{EXIT_CODES}."""

_FORBID = re.compile(r"([a-z_*]+)(?:@([a-z]+))?(?:>([0-9]+(?:\.[0-9]+)?)\s*(B|KiB|MiB|GiB|TiB))?")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forbidden:
    """A collective that must not occur.

    Attributes:
      text: As written.
      kind: Kind of collective, or None for all.
      mode: Mode, or None for all.
      more_than: Bytes that one device may send in all runs of one event.
    """

    text: str
    kind: Kind | None
    mode: str | None
    more_than: int

    def matches(self, event: Event, mode: str) -> bool:
        """Tell whether an event is forbidden."""
        return (
            self.kind in (None, event.kind)
            and self.mode in (None, mode)
            and event.total_wire_bytes > self.more_than
        )


def read_forbidden(text: str) -> Forbidden:
    """Return the collective that text such as `all_gather@decode>1MiB` forbids. An argparse type.

    Raises:
      argparse.ArgumentTypeError: The text is not a kind, a mode and a number of bytes.
    """
    match = _FORBID.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is not KIND, KIND@MODE or KIND@MODE>BYTES; "
            'write "all_gather@decode>1MiB"'
        )
    kind, mode, number, unit = match.groups()
    if kind != "*" and kind not in set(Kind):
        hint = did_you_mean(kind, [str(known) for known in Kind])
        raise argparse.ArgumentTypeError(f"no collective {kind!r}; {hint}".rstrip("; "))
    try:
        parsed = None if mode is None else parse_mode(mode)
    except ShardingError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Forbidden(
        text=text,
        kind=None if kind == "*" else Kind(kind),
        mode=parsed,
        more_than=0 if number is None else int(float(number) * _UNITS[unit]),
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    command = make_parser(
        "plan",
        "Show what a model's functions send between devices. Needs no devices.",
        epilog=_EPILOG,
    )
    command.add_argument("model", metavar="MODEL", help="file.py:function")
    command.add_argument(
        "--strategy", action="append", required=True, metavar="STRATEGY", help=STRATEGY_HELP
    )
    command.add_argument(
        "--mesh", metavar="M", help="such as fsdp:16,tp:4 (default: the strategy's own)"
    )
    command.add_argument(
        "--devices", type=read_count, metavar="N", help="number of devices, if a mesh has a -1"
    )
    command.add_argument("--mode", metavar="MODE", help="plan only this mode")
    command.add_argument(
        "--forbid",
        action="append",
        default=[],
        type=read_forbidden,
        metavar="KIND@MODE>BYTES",
        help="fail if such a collective occurs; repeat it for more",
    )
    command.add_argument(
        "--rows", type=read_count, metavar="N", help="show only the N rows that send most"
    )
    add_output(command)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Plan, print and return the exit code.

    Raises:
      ShardingError: The question is invalid.
    """
    setting = read_setting(arguments.strategy, mesh=arguments.mesh, devices=arguments.devices)
    programs = read_programs(arguments.model, arguments.mode)
    for rule in arguments.forbid:
        if rule.mode is not None and rule.mode not in programs:
            raise StrategyError(
                f"--forbid {rule.text!r} names a mode that is not planned",
                fix=f"the modes are {', '.join(map(mode_name, programs))}",
            )
    reports: dict[str, PlanReport] = {}
    for mode, program in programs.items():
        manager = setting.manager.for_mode(mode)
        try:
            reports[mode] = plan(
                manager,
                program.function,
                *program.shapes,
                specs=program.specs,
                outputs=program.outputs,
            )
        except ShardingError:
            raise
        except Exception as error:
            raise _raised(f"{arguments.model} for {mode_name(mode)}", error) from error
    breaches = list(_breaches(reports, arguments.forbid))
    incomplete = any(not report.walked.complete for report in reports.values())
    if arguments.json:
        print_json(
            {
                "modes": {mode_name(mode): report.to_json() for mode, report in reports.items()},
                "forbidden": [{"rule": rule, "event": event.to_json()} for rule, event in breaches],
                "ok": not breaches and not incomplete,
            }
        )
    else:
        print_lines(_lines(reports, breaches, rows=arguments.rows, width=arguments.width))
    return 1 if breaches or incomplete else 0


def _breaches(
    reports: Mapping[str, PlanReport], forbidden: Sequence[Forbidden]
) -> Iterator[tuple[str, Event]]:
    for mode, report in reports.items():
        for event in report.events:
            yield from ((rule.text, event) for rule in forbidden if rule.matches(event, mode))


def _lines(
    reports: Mapping[str, PlanReport],
    breaches: Sequence[tuple[str, Event]],
    *,
    rows: int | None,
    width: int | None,
) -> Iterator[str]:
    for number, (mode, report) in enumerate(reports.items()):
        if number:
            yield ""
        yield f"mode {mode_name(mode)}"
        yield from report.text(rows=rows, width=width_of(width)).split("\n")
    for rule, event in breaches:
        over, sent = "+".join(event.mesh_axes), bytes_text(event.total_wire_bytes)
        yield f"forbidden by {rule}: {event.kind} over {over} sends {sent} at {event.source}"


def read_programs(model: str, mode: str | None) -> dict[str, Program]:
    """Return the programs of `file.py:function` by mode.

    Args:
      model: The file and the function.
      mode: Return only this mode. None means all modes that the function returns.

    Raises:
      StrategyError: The file cannot be read or raises, or the function returns something else.
    """
    name, colon, function = model.rpartition(":")
    if not colon or not name.endswith(".py"):
        raise StrategyError(f"MODEL {model!r} is not file.py:function", fix="model.py:programs")
    make = getattr(_module(Path(name)), function, None)
    if not callable(make):
        raise StrategyError(
            f"{name} has no function {function!r}",
            fix="define it; it returns a shardwright.plan.Program, or a dict of them by mode",
        )
    try:
        made = make()
    except (Exception, SystemExit) as error:
        raise _raised(model, error) from error
    programs = made if isinstance(made, Mapping) else {MODES[0]: made}
    by_mode = {parse_mode(key): program for key, program in programs.items()}
    if len(by_mode) < max(1, len(programs)):
        what = "names one mode twice" if programs else "returned no program"
        raise StrategyError(f"{model} {what}", fix="return one Program for each mode")
    for key, program in by_mode.items():
        if not isinstance(program, Program):
            raise StrategyError(
                f"{model} returned {program!r:.80} for {mode_name(key)}",
                fix="return shardwright.plan.Program(function, shapes, specs)",
            )
    if mode is None:
        return by_mode
    wanted = parse_mode(mode)
    if wanted not in by_mode:
        raise StrategyError(
            f"{model} has no mode {mode_name(wanted)}",
            fix=f"its modes are {', '.join(map(mode_name, by_mode))}",
        )
    return {wanted: by_mode[wanted]}


def _module(path: Path) -> ModuleType:
    """Import a file. Files beside it can be imported from it."""
    if not path.is_file():
        raise StrategyError(f"no file {str(path)!r}", fix="check the path")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module  # where dataclasses look up the module of their class
    try:
        spec.loader.exec_module(module)
    except ShardingError:
        raise
    except SyntaxError as error:
        what = f"{path}:{error.lineno} is not Python: {error.msg}"
        raise StrategyError(what, fix="repair the file") from error
    except (Exception, SystemExit) as error:
        raise _raised(str(path), error) from error
    finally:
        sys.path.pop(0)
    return module


def _raised(what: str, error: BaseException) -> StrategyError:
    """Return the error of user code that raised, with the line that did."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "site-packages" not in frame.filename]
    place = f" at {Path(inside[-1].filename).name}:{inside[-1].lineno}" if inside else ""
    return StrategyError(
        f"{what} raised {type(error).__name__}: {error}{place}",
        fix="make it importable, and make the function run under jax.eval_shape",
    )
