"""The completion script of fish."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.cli.scripts.described import Argument, Command, Kind

_HEAD = """\
# fish completion of shardwright, made by: shardwright completion fish
complete -c shardwright -f
complete -c shardwright -n __fish_use_subcommand -l help -d 'show the commands'
complete -c shardwright -n __fish_use_subcommand -l version -d 'show the version'"""


def script(commands: Sequence[Command]) -> str:
    """Return the script."""
    lines = [
        f"complete -c shardwright -n __fish_use_subcommand -a {one.name} -d {_quoted(one.what)}"
        for one in commands
    ]
    return "\n".join([_HEAD, *lines, *(line for command in commands for line in _lines(command))])


def _lines(command: Command) -> Iterator[str]:
    start = f"complete -c shardwright -n '__fish_seen_subcommand_from {command.name}'"
    for argument in command.arguments:
        flags = " ".join(_flag(flag) for flag in argument.flags)
        yield " ".join(
            part
            for part in (start, flags, _value(argument), f"-d {_quoted(argument.what)}")
            if part
        )


def _flag(flag: str) -> str:
    return f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"


def _value(argument: Argument) -> str:
    words = f"-a {_quoted(' '.join(argument.words))}" if argument.words else ""
    takes = (
        ""
        if argument.kind is Kind.NONE or not argument.flags
        else "-r"
        if _takes_files(argument)
        else "-x"
    )
    return " ".join(part for part in (takes, "-F" if _takes_files(argument) else "", words) if part)


def _takes_files(argument: Argument) -> bool:
    return argument.kind in (Kind.FILE, Kind.STRATEGY)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
