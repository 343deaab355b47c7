"""`shardwright infer`: the axes of the parameters of a model that nobody annotated."""

from __future__ import annotations

import argparse
import inspect
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from shardwright.cli.arguments import EXIT_CODES, add_output, make_parser
from shardwright.cli.inputs import unreadable
from shardwright.cli.python_files import raised_error, read_function
from shardwright.cli.show import print_json, print_lines, width_of
from shardwright.errors import ShardingError, StrategyError
from shardwright.inference.infer import infer_axes
from shardwright.inference.inferred import Inferred
from shardwright.strategy import files
from shardwright.trees.tensors import is_dtype
from shardwright.vocabulary.axes import canonical_axis

_INPUT = re.compile(r"\s*([a-z0-9_]+)\[([0-9, ]*)\](.*)")
_SIZE = re.compile(r"([1-9][0-9]*)=([A-Za-z_][A-Za-z0-9_]*)")
_AXIS = re.compile(r"\?|[A-Za-z_][A-Za-z0-9_]*")
_INPUT_EXAMPLE = '--input "int32[8,32] BATCH LENGTH"'

_EPILOG = f"""\
MODEL is file.py:function, a function of parameters and arrays. It is traced once; nothing is
computed. --params names a function of the same file, without arguments or of a PRNG key, that
returns the parameters. Each --input gives the dtype, the shape and the axes of an array, in the
order of the function's arguments: _ for a dim that is not sharded, ? for one of unknown axis.

examples:
  shardwright infer model.py:forward --params init --input "int32[8,32] BATCH LENGTH"
  shardwright infer model.py:forward --params init --input "int32[8,32] BATCH LENGTH" \\
      --size 7=CLASSES --strict -o axes.toml

exit codes: 0 inferred; 1 two operations name one dim differently, with --strict also open dims and
guesses;
{EXIT_CODES}."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    command = make_parser(
        "infer", "Infer the axes of a model's parameters. Needs no devices.", epilog=_EPILOG
    )
    command.add_argument("model", metavar="MODEL", help="file.py:function")
    command.add_argument(
        "--params", required=True, metavar="NAME", help="the function that returns the parameters"
    )
    command.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="ARRAY",
        help='an input, such as "int32[8,32] BATCH LENGTH"; repeat it for more',
    )
    command.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="N=AXIS",
        help="the axis of open and guessed dims of a size; repeat it for more",
    )
    command.add_argument(
        "-o", "--out", metavar="FILE", help="write path rules to review, as a .toml file"
    )
    command.add_argument("--strict", action="store_true", help="fail on open dims and guesses too")
    add_output(command)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Infer, print and return the exit code.

    Raises:
      ShardingError: The question is invalid.
    """
    inferred = _infer(arguments)
    if arguments.out is not None and not inferred.conflicts:
        _write(arguments.out, inferred.toml())
    failed = bool(inferred.problems()) if arguments.strict else bool(inferred.conflicts)
    if arguments.json:
        print_json({**inferred.to_json(), "ok": not failed})
    else:
        lines = inferred.text(width=width_of(arguments.width)).split("\n")
        if arguments.out is not None:
            wrote = "not written" if inferred.conflicts else "written"
            lines.append(f"rules {wrote} to {arguments.out}")
        print_lines(lines)
    return 1 if failed else 0


def _infer(arguments: argparse.Namespace) -> Inferred:
    forward = read_function(
        arguments.model, example="model.py:forward", fix="define it, or check the name"
    )
    name, _, _ = arguments.model.rpartition(":")
    init = read_function(
        f"{name}:{arguments.params}", example="init", fix="name a function in --params"
    )
    inputs, seeds = (
        zip(*map(read_input, arguments.input), strict=True) if arguments.input else ((), ())
    )
    sizes = dict(map(read_size, arguments.size))
    try:
        params = jax.eval_shape(init, *_keys(init))
        return infer_axes(forward, params, *inputs, seeds=seeds, sizes=sizes)
    except ShardingError:
        raise
    except Exception as error:
        raise raised_error(arguments.model, error) from error


def _keys(init: Any) -> Sequence[Any]:
    """Return a PRNG key for each required argument of a function: none or one."""
    required = [
        argument
        for argument in inspect.signature(init).parameters.values()
        if argument.default is argument.empty
        and argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD)
    ]
    return [jax.random.key(0)] * min(len(required), 1)


def read_input(text: str) -> tuple[jax.ShapeDtypeStruct, tuple[str | None, ...]]:
    """Return the shape and the axes of an input, such as `int32[8,32] BATCH LENGTH`.

    Raises:
      StrategyError: The text has another form, or not one axis per dim.
    """
    match = _INPUT.fullmatch(text)
    if match is None or not is_dtype(match[1]):
        raise StrategyError(
            f"--input {text!r} is not dtype[shape] and axes", fix=f"write {_INPUT_EXAMPLE}"
        )
    shape = tuple(int(size) for size in match[2].replace(",", " ").split())
    words = match[3].replace(",", " ").split()
    if len(words) not in (0, len(shape)) or not all(map(_AXIS.fullmatch, words)):
        raise StrategyError(
            f"--input {text!r} does not have one axis for each of {len(shape)} dims",
            fix=f"write {_INPUT_EXAMPLE}, with ? for a dim of unknown axis",
        )
    axes = [None if word == "?" else canonical_axis(word) for word in words or ["?"] * len(shape)]
    return jax.ShapeDtypeStruct(shape, match[1]), tuple(axes)


def read_size(text: str) -> tuple[int, str]:
    """Return the size and the axis of `7=CLASSES`.

    Raises:
      StrategyError: The text has another form.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise StrategyError(f"--size {text!r} is not N=AXIS", fix="write --size 7=CLASSES")
    return int(match[1]), canonical_axis(match[2])


def _write(name: str, text: str) -> None:
    if Path(name).suffix != ".toml":
        raise StrategyError(f"{name!r} is not a .toml file", fix="write -o axes.toml")
    try:
        files.write_text(Path(name), text)
    except OSError as error:
        raise unreadable(os.fspath(name), error, verb="write") from error
