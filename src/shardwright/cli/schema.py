"""`shardwright schema`: write the JSON Schema of strategy files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from shardwright.cli.arguments import EXIT_CODES, make_parser
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
    command = make_parser(
        "schema",
        "Write the JSON Schema of strategy files, for editors and other tools.",
        epilog=_EPILOG,
    )
    command.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="file to write (default: print it)",
    )
    return command


def run(arguments: argparse.Namespace) -> int:
    """Print or write the schema, and return the exit code.

    Raises:
      StrategyError: The file cannot be written.
    """
    from shardwright.strategy.model import Strategy

    text = json.dumps(Strategy.json_schema(), indent=2)
    if arguments.file is None:
        print_lines(text.split("\n"))
        return 0
    files.write_text(Path(arguments.file), text + "\n")
    print_lines([f"schema written to {arguments.file}"])
    return 0
