"""Read the programs of a model from a Python file or a `config.json`, and plan them."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from shardwright.cli.exit_codes import finding_problems
from shardwright.cli.inputs import read_count
from shardwright.cli.python_files import check_call, read_function, user_code
from shardwright.cli.reference import is_config, read_reference
from shardwright.errors import StrategyError
from shardwright.manager.manager import PartitionManager
from shardwright.plan.hardware import Topology
from shardwright.plan.planner import PlanReport, Program, plan
from shardwright.vocabulary.modes import MODES, mode_name, parse_mode


def plan_program(
    program: Program,
    manager: PartitionManager,
    label: str,
    *,
    topology: Topology | None = None,
    file: str = "",
) -> PlanReport:
    """Return the plan of one program.

    Args:
      program: What to plan.
      manager: Strategy, mesh and mode.
      label: Name of the program in messages.
      topology: The slice that the mesh is on, or None.
      file: The file in which the user changes rules, for the fixes of problems.

    Raises:
      StrategyError: The function raises an error.
      FoundError: An array has no spec, or the plan has another problem.
    """
    with finding_problems(file), user_code(label):
        return plan(
            manager,
            program.function,
            *program.shapes,
            specs=program.specs,
            outputs=program.outputs,
            holds=program.holds,
            donated=program.donated,
            topology=topology,
        )


def read_programs(
    model: str,
    mode: str | None = None,
    *,
    devices: int,
    options: Mapping[str, Any] | None = None,
    notes: list[str] | None = None,
) -> dict[str, Program]:
    """Return the programs of `file.py:function`, or of a `config.json`, by mode.

    Args:
      model: The file and the function, or the `config.json`.
      mode: Return only this mode. None means all modes that the function returns.
      devices: Number of devices. It is also the batch of a `config.json`, unless `options` has a
        batch.
      options: Keyword arguments of the function. Defaults to none.
      notes: List to which the assumptions about a `config.json` are appended. Defaults to none.

    Raises:
      StrategyError: The file cannot be read, its code raises an error, the function does not take
        the options, or it does not return programs.
    """
    options = options or {}
    programs: Mapping[str, Any]
    if is_config(model):
        programs, lines = read_reference(model, options, devices=devices)
        if notes is not None:
            notes += lines
    else:
        # `read_function` refuses any other text, such as a file of tensors.
        function = read_function(
            model,
            example="model.py:programs",
            fix="define the function; it returns a shardwright.plan.Program, or a dict of them "
            "by mode",
        )
        check_call(model, function, fix=_how_to_return(model, function, options), **options)
        with user_code(model, locate=True):
            returned = function(**options)
        programs = returned if isinstance(returned, Mapping) else {MODES[0]: returned}
    by_mode = {parse_mode(key): program for key, program in programs.items()}
    # A dict may have both keys `decode` and `__autoregressive__`, but they are one mode.
    if len(by_mode) < max(1, len(programs)):
        what = "names one mode twice" if programs else "returned no program"
        raise StrategyError(f"{model} {what}", fix="return one Program for each mode")
    for key, program in by_mode.items():
        if not isinstance(program, Program):
            what = f"{model} returned {program!r:.80} for {mode_name(key)}"
            raise StrategyError(
                what, fix="return shardwright.plan.Program(function, shapes, specs)"
            )
    if mode is None:
        return by_mode
    key = parse_mode(mode)
    if key not in by_mode:
        fix = f"its modes are {', '.join(map(mode_name, by_mode))}"
        raise StrategyError(f"{model} has no mode {mode_name(key)}", fix=fix)
    return {key: by_mode[key]}


def _how_to_return(model: str, function: Callable[..., Any], options: Mapping[str, Any]) -> str:
    """Return a hint for a function with required arguments, or "" if it has none.

    The hint says how to plan the function itself, and how to pass the arguments.
    """
    required = [
        argument.name
        for argument in inspect.signature(function).parameters.values()
        if argument.default is argument.empty
        and argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
        and argument.name not in options
    ]
    if not required:
        return ""
    name = model.rpartition(":")[2]
    shapes = ", ".join(f"shapes of {argument}" for argument in required)
    shapes += "," if len(required) == 1 else ""  # Python's tuple of one element
    return (
        f"to plan {name} itself, write programs() beside it, which returns "
        f"shardwright.plan.Program({name}, ({shapes}), specs=...)\n"
        f"or, if {name} returns programs, pass --set {required[0]}=..."
    )


def read_options(arguments: argparse.Namespace) -> dict[str, list[Any]]:
    """Return the values that `--batch` and `--set` give to each option of a model.

    Raises:
      StrategyError: `--set` is not NAME=A,B, or an option is given twice.
    """
    options: dict[str, list[Any]] = {}
    given: dict[str, str] = {}
    if arguments.batch is not None:
        options["batch"], given["batch"] = [arguments.batch], f"--batch {arguments.batch}"
    for text in arguments.set:
        name, equals, values = text.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier() or not all(values.split(",")):
            raise StrategyError(f"--set {text!r:.80} is not NAME=A,B", fix="--set remat=none,full")
        if name in options:
            what = f"{name} is given twice: {given[name]} and --set {text:.80}"
            raise StrategyError(what, fix=f"give {name} only once")
        words = [value.strip() for value in values.split(",")]
        # A word that is no integer stays text: only the function knows what it means.
        options[name] = [int(word) if word.isdecimal() else word for word in words]
        given[name] = f"--set {text:.80}"
    return options


def add_model_options(command: argparse.ArgumentParser, *, several: bool) -> None:
    """Add `--batch` and `--set` to a command. With `several`, `--set` takes alternatives."""
    command.add_argument(
        "--batch", type=read_count, metavar="B", help="call the function with batch=B"
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=A,B" if several else "NAME=A",
        help="call the function with NAME=A and with NAME=B, and compare both; repeat the option "
        "for more"
        if several
        else "call the function with NAME=A; repeat the option for more",
    )
