"""`shardwright completion`: the completion script of a shell, made from the parsers of the commands, so that it cannot drift."""

from __future__ import annotations

import argparse
import importlib

from shardwright.cli import main
from shardwright.cli.arguments import EXIT_CODES, make_parser
from shardwright.cli.scripts import bash, fish, zsh
from shardwright.cli.scripts.described import Argument, Command, Kind
from shardwright.cli.show import print_lines
from shardwright.strategy import files
from shardwright.vocabulary.axes import PARALLELISM_AXES, SEMANTIC_AXES, axis_label
from shardwright.vocabulary.layouts import LAYOUTS

_SHELLS = {"bash": bash.script, "zsh": zsh.script, "fish": fish.script}
_EPILOG = f"""\
examples:
  shardwright completion bash > ~/.local/share/bash-completion/completions/shardwright
  shardwright completion zsh > "${{fpath[1]}}/_shardwright"
  shardwright completion fish > ~/.config/fish/completions/shardwright.fish

exit codes: 0 done; {EXIT_CODES}."""
# What an argument of this metavar takes; of any other, text that nobody can complete.
_KINDS = {"FILE": Kind.FILE, "STRATEGY": Kind.STRATEGY, "PRESET": Kind.WORDS, "AXIS": Kind.WORDS}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    made = make_parser("completion", "Write the completion script of a shell.", epilog=_EPILOG)
    made.add_argument("shell", choices=tuple(_SHELLS), help="which shell")
    return made


def run(arguments: argparse.Namespace) -> int:
    """Print the script and return the exit code."""
    print_lines([_SHELLS[arguments.shell](describe())])
    return 0


def describe() -> tuple[Command, ...]:
    """Return every command with its options and positional arguments."""
    return tuple(_command(name, what) for name, what in main.COMMANDS.items())


def _command(name: str, what: str) -> Command:
    made: argparse.ArgumentParser = importlib.import_module(f"shardwright.cli.{name}").parser()
    arguments = tuple(_argument(action) for action in made._actions)
    return Command(name=name, what=what, arguments=arguments)


def _argument(action: argparse.Action) -> Argument:
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    kind = (
        Kind.NONE
        if action.nargs == 0
        else Kind.WORDS
        if action.choices
        else _KINDS.get(metavar, Kind.TEXT)
    )
    return Argument(
        flags=tuple(action.option_strings),
        kind=kind,
        words=tuple(map(str, action.choices)) if action.choices else _words(metavar),
        repeated=action.nargs in ("*", "+") or isinstance(action, argparse._AppendAction),
        name=metavar or action.dest,
        what=(action.help or "").partition(";")[0],
    )


def _words(metavar: str) -> tuple[str, ...]:
    if metavar in ("STRATEGY", "PRESET"):
        return files.preset_names()
    if metavar == "AXIS":
        return (*map(axis_label, (*SEMANTIC_AXES, *PARALLELISM_AXES)), *LAYOUTS)
    return ()
