"""The completion script of zsh."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.cli.scripts.described import Argument, Command, Kind

_HEAD = """\
#compdef shardwright
# zsh completion of shardwright, made by: shardwright completion zsh
_shardwright_strategies() {
    _alternative 'presets:preset:(%s)' 'files:file:_files -g "*.(toml|json)"'
}
_shardwright() {
    local -a commands
    commands=(
%s
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
%s
    esac
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _shardwright "$@"
else
    compdef _shardwright shardwright
fi"""


def script(commands: Sequence[Command]) -> str:
    """Return the script."""
    presets = next(
        argument.words
        for command in commands
        for argument in command.arguments
        if argument.kind is Kind.STRATEGY
    )
    names = "\n".join(
        f"        {_quoted(f'{command.name}:{_escaped(command.what)}')}" for command in commands
    )
    cases = "\n".join(_case(command) for command in commands)
    return _HEAD % (" ".join(presets), names, cases)


def _case(command: Command) -> str:
    lines = [f"        {command.name})", "            _arguments -S \\"]
    specs = [_option(option, flag) for option in command.options for flag in option.flags]
    specs += [_positional(argument, at) for at, argument in enumerate(command.positionals, 1)]
    return "\n".join(
        [
            *lines,
            *(f"                {_quoted(spec)} \\" for spec in specs),
            "                && return 0",
            "            ;;",
        ]
    )


def _option(option: Argument, flag: str) -> str:
    others = f"({' '.join(option.flags)})" if not option.repeated else "*"
    value = "" if option.kind is Kind.NONE else f":{_escaped(option.name)}:{_action(option)}"
    return f"{others}{flag}[{_escaped(option.what)}]{value}"


def _positional(argument: Argument, at: int) -> str:
    return f"{'*' if argument.repeated else at}:{_escaped(argument.name)}:{_action(argument)}"


def _action(argument: Argument) -> str:
    if argument.kind is Kind.FILE:
        return "_files"
    if argument.kind is Kind.STRATEGY:
        return "_shardwright_strategies"
    return f"({' '.join(argument.words)})" if argument.words else " "


def _escaped(text: str) -> str:
    for character in "\\[]:":
        text = text.replace(character, f"\\{character}")
    return text


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
