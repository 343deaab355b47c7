"""`shardwright <command>`: find the command, run it, turn what goes wrong into a message and an exit code.

0 answered; 1 answered, and the answer is bad news (a sharding problem; a finding; with --exit-code, a difference); 2 the question
cannot be asked (command line, file, mesh); 70 a defect of ours. The same for every command.
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

from shardwright.errors import ShardingError, did_you_mean

OK, USAGE, DEFECT = 0, 2, 70

# One line per command: each is the module of that name beside this file, with `parser()` and `run(arguments)`.
COMMANDS: dict[str, str] = {
    "explain": "say where each dim of an array lies on the mesh, and why",
    "check": "say what looks wrong about a strategy",
    "diff": "say which tensors lie differently under another strategy, mesh or mode",
    "presets": "list the strategies that come with the package, show or copy one",
    "schema": "write the JSON Schema of strategy files",
}

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
    if sys.stdout is None:  # closed by the shell (`>&-`): the exit code is still an answer
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  for as long as the process runs
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper):
        # Names of files may be no UTF-8, and terminals may know ASCII only: escapes are better than no answer.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except SystemExit as leaving:  # argparse has said what it had to say
        return leaving.code if isinstance(leaving.code, int) else USAGE
    except ShardingError as error:
        print(f"shardwright: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        _drop_output()  # the reader (`| head`) has seen enough
        return OK
    except OSError as error:
        if error.filename is not None:  # a file that some command should have spoken of
            return _defect()
        _drop_output()
        print(
            f"shardwright: cannot write the answer: {(error.strerror or str(error)).lower()}",
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
        command = importlib.import_module(f"shardwright.cli.{name}").parser()
        for action in command._actions:
            if action.metavar in ("FILE", "STRATEGY"):
                action.complete = _FILES
        commands.add_parser(name, help=what, parents=[command], add_help=False)
    return parent


def _defect() -> int:
    traceback.print_exc()
    print(
        "shardwright: this is a defect of shardwright, not of your input: please report the lines above",
        file=sys.stderr,
    )
    return DEFECT


def _drop_output() -> None:
    """Let what is still buffered go nowhere: Python would complain again when it closes stdout."""
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
    command = importlib.import_module(f"shardwright.cli.{words[0]}")
    arguments = command.parser().parse_intermixed_args(words[1:])
    return int(command.run(arguments))


def _overview() -> str:
    from shardwright.cli.arguments import help_width, wrapped

    lines = ["usage: shardwright <command> ...", "", "commands:"]
    for name, what in COMMANDS.items():
        lines += textwrap.wrap(f"  {name:<10} {what}", help_width(), subsequent_indent=" " * 13)
    lines += [
        "",
        "shardwright <command> --help says more; shardwright --version names the version.",
    ]
    return wrapped("\n".join(lines), help_width())
