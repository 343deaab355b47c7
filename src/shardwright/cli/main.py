"""The command `shardwright`: find the command, run it, turn errors into messages and exit codes.

Exit codes are the same for every command:
- 0: the command succeeded;
- 1: everything was read, and a problem was found (an array without a spec, an error among the
  findings, or with --exit-code a difference);
- 2: the arguments are wrong, or a file, a mesh or a program cannot be read;
- 70: a defect of shardwright;
- 130: interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import textwrap
import traceback
from collections.abc import Sequence
from typing import Any

from shardwright.cli.exit_codes import DEFECT, FOUND, OK, USAGE, FoundError
from shardwright.errors import ShardingError, did_you_mean

# One line per command. The module of a command has `parser()` and `run(arguments)`.
COMMANDS: dict[str, str] = {
    "explain": "show how each dim of an array is sharded, and why",
    "check": "find mistakes in a strategy, or in the axes of a model",
    "diff": "compare how tensors are sharded under two strategies, meshes or modes",
    "plan": "show what a model holds on each device, and what it sends",
    "profile": "show how long a program took on its devices, beside its plan",
    "prove": "say whether two programs are compiled to the same partitioned program",
    "search": "find meshes and strategies for a model on TPUs or GPUs",
    "open": "write plans of many candidates as one HTML page to explore",
    "infer": "infer the axes of a model that nobody annotated",
    "import": "write a strategy from rules of MaxText, levanter or another library",
    "presets": "list, show or copy the strategies of the package",
    "schema": "write the JSON Schema of strategy files",
}

# The module of a command has the name of the command, unless Python reserves this name.
_MODULES = {"import": "import_rules"}

# How `shtab` completes an argument that is a file, by shell.
_FILES = {
    "bash": "_shtab_compgen_files",
    "zsh": "_files",
    "fish": "(__fish_complete_path (commandline -ct))",
    "tcsh": "f",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:  # the shell closed stdout (`>&-`); the exit code is still useful
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  open until exit
    # A test that passes `argv` has a stdout of its own, which stays as it is.
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper):
        # File names may not be UTF-8, and terminals may be ASCII only. Print escapes instead of
        # failing.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _run(words)
        # Flush here and not at exit, so that the errors of a full disk or a closed pipe are caught
        # below.
        sys.stdout.flush()
        return code
    except SystemExit as error:  # argparse has printed its message
        return error.code if isinstance(error.code, int) else USAGE
    except (ShardingError, FoundError) as error:
        print(f"shardwright: {error}", file=sys.stderr)
        return FOUND if isinstance(error, FoundError) else USAGE
    except BrokenPipeError:
        _drop_output()  # the reader, such as `head`, has closed the pipe
        return OK
    except OSError as error:
        if error.filename is not None:  # a command should have caught this error
            return _defect()
        _drop_output()
        print(
            f"shardwright: cannot write the output: {(error.strerror or str(error)).lower()}",
            file=sys.stderr,
        )
        return USAGE
    except KeyboardInterrupt:
        return 130
    except Exception:
        return _defect()


def parser() -> argparse.ArgumentParser:
    """Return one parser with all commands, for tools that read parsers, such as `shtab`."""
    parent = argparse.ArgumentParser(prog="shardwright")
    commands = parent.add_subparsers()
    for name, what in COMMANDS.items():
        command = _module(name).parser()
        for action in command._actions:
            if action.metavar in ("FILE", "STRATEGY"):
                action.complete = _FILES
        # argparse refuses an option twice, and the parser of the command already has `-h`.
        commands.add_parser(name, help=what, parents=[command], add_help=False)
    return parent


def _module(command: str) -> Any:
    # Only the module of one command is imported, so a command does not load what others need.
    return importlib.import_module(f"shardwright.cli.{_MODULES.get(command, command)}")


def _defect() -> int:
    traceback.print_exc()
    print(
        "shardwright: this is a defect of shardwright, not of your input; "
        "please report the lines above",
        file=sys.stderr,
    )
    return DEFECT


def _drop_output() -> None:
    """Discard buffered output. Otherwise Python reports the error again when it closes stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return OK if words else USAGE
    if words[0] == "--version":
        from shardwright import __version__

        print(f"shardwright {__version__}")
        return OK
    if words[0] not in COMMANDS:
        hint = did_you_mean(words[0], COMMANDS)
        print(
            f"shardwright: no command {words[0]!r}"
            + (f", {hint}" if hint else "")
            + f"\n\n{_overview()}",
            file=sys.stderr,
        )
        return USAGE
    command = _module(words[0])
    # `parse_args` would refuse a positional word after an option, as in `explain BATCH --mesh tp:4
    # EMBED`.
    arguments = command.parser().parse_intermixed_args(words[1:])
    return int(command.run(arguments))


def _overview() -> str:
    from shardwright.cli.arguments import help_width, wrapped

    lines = ["usage: shardwright <command> ...", "", "commands:"]
    for name, what in COMMANDS.items():
        # 13 columns: two blanks, ten for a name, and a gap.
        lines += textwrap.wrap(f"  {name:<10} {what}", help_width(), subsequent_indent=" " * 13)
    lines += [
        "",
        "shardwright <command> --help shows its options; shardwright --version shows the version.",
    ]
    return wrapped("\n".join(lines), help_width())
