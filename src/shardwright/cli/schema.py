"""`shardwright schema`: the JSON Schema of strategy files, for editors and other tools."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from shardwright.cli.arguments import EXIT_CODES, make_parser
from shardwright.cli.inputs import unreadable
from shardwright.cli.show import print_lines
from shardwright.strategy import files

_EPILOG = f"""\
examples:
  shardwright schema
  shardwright schema strategy.schema.json

exit codes: 0 done;
{EXIT_CODES}, or the file cannot be written."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    made = make_parser(
        "schema",
        "Write the JSON Schema of strategy files, for editors and other tools.",
        epilog=_EPILOG,
    )
    made.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="where to write it, whole or not at all (default: print it)",
    )
    return made


def run(arguments: argparse.Namespace) -> int:
    """Print or write the schema, and return the exit code.

    Raises:
      StrategyError: the file cannot be written.
    """
    from shardwright.strategy.model import Strategy

    text = json.dumps(Strategy.json_schema(), indent=2)
    if arguments.file is None:
        print_lines([text])
        return 0
    try:
        files.write_text(Path(arguments.file), text + "\n")
    except OSError as error:
        raise unreadable(os.fspath(arguments.file), error, verb="write") from error
    print_lines([f"schema written to {arguments.file}"])
    return 0
