"""Arguments and help texts that several commands share."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from typing import Any, NoReturn

from shardwright.cli.inputs import read_count
from shardwright.cli.show import LEAST_WIDTH
from shardwright.vocabulary.shown import WIDTH

STRATEGY_HELP = 'a preset, or a .toml or .json file; "base | overlay" combines two'
# How to fix a missing size in a command that reads a file of tensors.
SHAPE_FIX = "give its shape in the file of tensors"
EXIT_CODES = "2 the arguments are wrong, or a file, a mesh or a program cannot be read"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors look like all other errors: a message and a fix, without the usage."""

    def error(self, message: str) -> NoReturn:
        fix = f"{self.prog} --help shows the options"
        if message.endswith("required: --strategy"):
            fix = (
                "add --strategy fsdp_tp, another preset or a file; `shardwright presets` lists the "
                "presets,\n        and `shardwright search` finds the best strategy for a model"
            )
        self.exit(2, f"shardwright: {message}\n  fix   {fix}\n")


def make_parser(name: str, what: str, *, epilog: str) -> argparse.ArgumentParser:
    """Return the parser of a command.

    Its help is as wide as the terminal. Indented lines are not wrapped.
    """
    width = help_width()
    return _Parser(
        prog=f"shardwright {name}",
        # RawDescriptionHelpFormatter keeps the line breaks of examples. It wraps nothing, so wrap
        # the texts here.
        description=wrapped(what, width),
        epilog=wrapped(epilog, width),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, width=width, max_help_position=24
        ),
        # An abbreviation in a script would become ambiguous when an option with the same beginning
        # is added.
        allow_abbrev=False,
    )


def help_width() -> int:
    """Return the width of help in characters: COLUMNS, else the terminal's, else the default."""
    return max(LEAST_WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def wrapped(text: str, width: int) -> str:
    """Wrap the paragraphs of a text at a width, in characters.

    Indented lines, such as examples, are not wrapped.
    """
    lines: list[str] = []
    paragraph: list[str] = []
    # The added empty line ends the last paragraph, and is dropped again.
    for line in [*text.split("\n"), ""]:
        if line and not line.startswith(" "):
            paragraph.append(line)
            continue
        lines += textwrap.wrap(
            " ".join(paragraph), width, break_long_words=False, break_on_hyphens=False
        )
        lines.append(line)
        paragraph = []
    return "\n".join(lines[:-1])


class _Once(argparse.Action):
    """Store an option. Refuse an option that is given twice.

    A user who gives an option twice may want an overlay (`a | b`), or only one of the two values.
    The command cannot know which.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        if getattr(namespace, self.dest) is not None:
            both = f"{getattr(namespace, self.dest)} | {values}"
            parser.error(f'{option} is given twice: write {option} "{both}" for an overlay')
        setattr(namespace, self.dest, values)


def add_strategy(parser: argparse.ArgumentParser, *, required: bool, what: str = "") -> None:
    """Add the option `--strategy` to a command that takes one strategy."""
    parser.add_argument(
        "--strategy",
        action=_Once,
        required=required,
        metavar="STRATEGY",
        help=what or STRATEGY_HELP,
    )


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Add `--mesh` and `--devices` to a command that takes one mesh."""
    parser.add_argument(
        "--mesh",
        metavar="M",
        help="such as dp:1,fsdp:2,tp:4 or dcn.dp:2,dp:4,tp:4 (default: the strategy's own)",
    )
    parser.add_argument(
        "--devices", type=read_count, metavar="N", help="number of devices, if the mesh has a -1"
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the options of printed output."""
    parser.add_argument(
        "--width",
        type=read_count,
        metavar="N",
        help=f"characters per line (default: the terminal's, else {WIDTH})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
