"""`shardwright infer`: the axes of the parameters of a model that nobody annotated."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from shardwright.cli.arguments import EXIT_CODES, add_output, add_strategy, make_parser
from shardwright.cli.inputs import read_strategy
from shardwright.cli.models import add_model, infer_model, read_model
from shardwright.cli.show import print_json, print_lines, width_of
from shardwright.errors import StrategyError
from shardwright.strategy import files
from shardwright.vocabulary.axes import canonical_axis

_SIZE = re.compile(r"([1-9][0-9]*|.+ dim [0-9]+)=([A-Za-z_][A-Za-z0-9_]*)")

_EPILOG = f"""\
MODEL is file.py:function, a function of parameters and arrays. It is traced once; nothing is
computed. --params names a function of the same file that returns the parameters; it takes no
argument, or a PRNG key. Each --input gives the dtype, the shape and the axes of an array, in the
order of MODEL's arguments: _ for a dim that is not sharded, ? for a dim of unknown axis. An open
dim is a dim of the parameters that no operation names.

examples:
  shardwright infer model.py:forward --params init --input "int32[8,32] BATCH LENGTH"
  shardwright infer model.py:forward --params init --input "int32[8,32] BATCH LENGTH" \\
      --size 256=MLP_INTERMEDIATE --strict -o axes.toml
  shardwright infer model.py:forward --params init --input "int32[8,32] BATCH LENGTH" \\
      --size 7=CLASSES --strategy mine.toml

exit codes: 0 inferred; 1 two operations name one dim differently, with --strict also open dims and
guesses;
{EXIT_CODES}."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    command = make_parser(
        "infer", "Infer the axes of a model's parameters. Needs no devices.", epilog=_EPILOG
    )
    command.add_argument("model", metavar="MODEL", help="file.py:function")
    add_model(command, required=True)
    command.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="N=AXIS",
        help="the axis of each open or guessed dim of size N, or of the dims at a place such as "
        "'layers/*/gate dim 0'; repeat the option for more",
    )
    add_strategy(command, required=False, what="a strategy that declares axes of your own")
    command.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        help="write path rules to review, as a .toml file; print only guesses and open dims",
    )
    command.add_argument("--strict", action="store_true", help="fail on open dims and guesses too")
    add_output(command)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Infer, print and return the exit code.

    Raises:
      ShardingError: The arguments are invalid, or an input cannot be read.
    """
    model = read_model(arguments.model, arguments.params, arguments.input)
    own_axes = read_strategy(arguments.strategy)[0].axes if arguments.strategy else ()
    sizes = dict(map(read_size, arguments.size))
    inferred = infer_model(model, sizes=sizes, own_axes=own_axes)
    # If a dim has two names, each name is wrong for one of the operations, so write no file.
    if arguments.out is not None and not inferred.conflicts:
        if Path(arguments.out).suffix != ".toml":
            what = f"{arguments.out!r} is not a .toml file"
            raise StrategyError(what, fix="write -o axes.toml")
        files.write_text(Path(arguments.out), inferred.toml())
    failed = bool(inferred.problems()) if arguments.strict else bool(inferred.conflicts)
    if arguments.json:
        print_json({**inferred.to_json(), "ok": not failed})
    else:
        text = inferred.text if arguments.out is None else inferred.summary
        lines = text(width=width_of(arguments.width)).split("\n")
        if arguments.out is not None:
            outcome = "not written" if inferred.conflicts else "written"
            lines.append(f"rules {outcome} to {arguments.out}")
        print_lines(lines)
    return 1 if failed else 0


def read_size(text: str) -> tuple[int | str, str]:
    """Return both sides of `7=CLASSES`. The left side is a size, or the place of a dim.

    Raises:
      StrategyError: The text has another form.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise StrategyError(f"--size {text!r} is not N=AXIS", fix="write --size 7=CLASSES")
    size = int(match[1]) if match[1].isdecimal() else match[1]
    return size, canonical_axis(match[2])
