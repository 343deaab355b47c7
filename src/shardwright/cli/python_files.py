"""Read functions from a Python file that the command line names."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwright import _jax
from shardwright.errors import ShardingError, StrategyError, located


def read_function(text: str, *, example: str, fix: str) -> Callable[..., Any]:
    """Return the function that `file.py:function` names.

    Args:
      text: The file and the function.
      example: A correct text, which the error shows if `text` has another form.
      fix: What to do if the file has no such function.

    Raises:
      StrategyError: The text has another form, the file cannot be read or raises an error, or it
        has no such function.
    """
    # Split at the last colon, because a path on Windows has a colon after its drive.
    name, colon, function = text.rpartition(":")
    if not colon or not name.endswith(".py"):
        raise StrategyError(f"MODEL {text!r} is not file.py:function", fix=example)
    value = getattr(read_module(Path(name)), function, None)
    if not callable(value):
        raise StrategyError(f"{name} has no function {function!r}", fix=fix)
    result: Callable[..., Any] = value
    return result


def read_module(path: Path) -> ModuleType:
    """Import a file. The file can import files beside it.

    Raises:
      StrategyError: The file does not exist, or its code raises an error.
    """
    if not path.is_file():
        raise StrategyError(f"no file {str(path)!r}", fix="check the path")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Put the folder of the file first in `sys.path`, as Python does when it runs a file.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module  # where dataclasses look up the module of their class
    try:
        with user_code(str(path), locate=True):
            spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


@contextlib.contextmanager
def user_code(what: str, *, locate: bool = False) -> Iterator[None]:
    """Run code of a user. An exception becomes an error that names the line of the user's file.

    Args:
      what: Name of the code in messages.
      locate: Whether to add the line to an error of this library too.
    """
    try:
        yield
    except ShardingError as error:
        if not locate:
            raise
        raise located(error, _jax.raising_line(error)) from error
    except SyntaxError as error:
        place = f"{error.filename}:{error.lineno}"
        raise StrategyError(
            f"{place} is not Python: {error.msg}", fix="correct the file"
        ) from error
    # A script may call `sys.exit` when it is imported.
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        # The innermost line outside of installed packages is where the user can act.
        inside = [frame for frame in frames if "site-packages" not in frame.filename]
        place = f" at {Path(inside[-1].filename).name}:{inside[-1].lineno}" if inside else ""
        what = f"{what} raised {type(error).__name__}: {error}{place}"
        fix = "correct the file: it must import, and its functions must run under jax.eval_shape"
        raise StrategyError(what, fix=fix) from error


def check_call(
    name: str, function: Callable[..., Any], *arguments: Any, fix: str = "", **options: Any
) -> None:
    """Check that a function takes these arguments.

    If a call were tried instead, a TypeError could also come from inside the function.

    Raises:
      StrategyError: The function does not take the arguments.
    """
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError as error:
        taken = ", ".join(inspect.signature(function).parameters) or "no arguments"
        raise StrategyError(f"{name} takes {taken}: {error}", fix=fix or f"pass {taken}") from error
