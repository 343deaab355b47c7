"""Read the programs of a model from a Python file, and plan them."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

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
        raise _raised(label, error) from error


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
        returned = make()
    except (Exception, SystemExit) as error:
        raise _raised(model, error) from error
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
