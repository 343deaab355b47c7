"""Arguments that several commands have, spelled and explained the same way."""

from __future__ import annotations

import argparse

from shardwright.cli.inputs import read_count, read_name
from shardwright.report.text import WIDTH

STRATEGY_HELP = 'a preset, or a .toml or .json file; "base | overlay" puts one over another'
EXIT_CODES = "2 the question cannot be asked (command line, file, mesh)"


def make_parser(name: str, what: str, *, epilog: str) -> argparse.ArgumentParser:
    """Return the parser of a command; the epilog keeps its lines."""
    return argparse.ArgumentParser(
        prog=f"shardwright {name}",
        description=what,
        epilog=epilog,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=WIDTH, max_help_position=24),
        allow_abbrev=False,
    )


def add_strategies(parser: argparse.ArgumentParser, nargs: str, what: str) -> None:
    """Add the strategies that a command is about."""
    parser.add_argument("strategies", nargs=nargs, type=read_name, metavar="STRATEGY", help=what)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add how the answer is printed."""
    parser.add_argument("--width", type=read_count, metavar="N", help=f"characters per line (default: the terminal's, else {WIDTH})")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
