"""Read the programs of a model from a Python file, and plan them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from shardwright.cli.python_files import raised_error, read_function
from shardwright.errors import ShardingError, StrategyError
from shardwright.manager.manager import PartitionManager
from shardwright.plan.hardware import Topology
from shardwright.plan.planner import PlanReport, Program, plan
from shardwright.vocabulary.modes import MODES, mode_name, parse_mode


def plan_program(
    program: Program, manager: PartitionManager, label: str, *, topology: Topology | None = None
) -> PlanReport:
    """Return the plan of one program.

    Args:
      program: What to plan.
      manager: Strategy, mesh and mode.
      label: Name of the program in messages.
      topology: The slice that the mesh is on, or None.

    Raises:
      StrategyError: The function raises.
    """
    try:
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
    except ShardingError:
        raise
    except Exception as error:
        raise raised_error(label, error) from error


def read_programs(
    model: str, mode: str | None, *, options: Mapping[str, Any] | None = None
) -> dict[str, Program]:
    """Return the programs of `file.py:function` by mode.

    Args:
      model: The file and the function.
      mode: Return only this mode. None means all modes that the function returns.
      options: Keyword arguments of the function. Defaults to none.

    Raises:
      StrategyError: The file cannot be read or raises, the function does not take the options, or
        it does not return programs.
    """
    function = read_function(
        model,
        example="model.py:programs",
        fix="define it; it returns a shardwright.plan.Program, or a dict of them by mode",
    )
    _check_options(model, function, options or {})
    try:
        returned = function(**(options or {}))
    except (Exception, SystemExit) as error:
        raise raised_error(model, error) from error
    programs = returned if isinstance(returned, Mapping) else {MODES[0]: returned}
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
    key = parse_mode(mode)
    if key not in by_mode:
        raise StrategyError(
            f"{model} has no mode {mode_name(key)}",
            fix=f"its modes are {', '.join(map(mode_name, by_mode))}",
        )
    return {key: by_mode[key]}


def _check_options(model: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise an error if the function of a model does not take exactly these keyword arguments."""
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        names = ", ".join(inspect.signature(function).parameters) or "no arguments"
        raise StrategyError(
            f"{model} cannot be called with ({', '.join(options)}): {error}",
            fix=f"it takes {names}",
        ) from error
