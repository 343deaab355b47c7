"""The completion script of bash. Written for bash 3.2 and later, without the bash-completion package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.cli.scripts.described import Argument, Command, Kind

_HEAD = """\
# bash completion of shardwright, made by: shardwright completion bash
_shardwright() {
    local IFS=$' \\t\\n' cur="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" previous="" valued="" word at=2 position=0
    COMPREPLY=()
    if [ "$COMP_CWORD" -le 1 ]; then
        COMPREPLY=($(compgen -W "%s" -- "$cur"))
        return
    fi
    case "$command" in
%s
    esac
    # Which positional argument this is: options and their values do not count.
    while [ "$at" -lt "$COMP_CWORD" ]; do
        word="${COMP_WORDS[at]}"
        previous=""
        case " $valued " in
            *" $word "*) previous="$word"; at=$((at + 1)) ;;
            *) case "$word" in -*) ;; *) position=$((position + 1)) ;; esac ;;
        esac
        at=$((at + 1))
    done
    [ "$at" -gt "$COMP_CWORD" ] || previous=""
    if [ -n "$previous" ]; then
        case "$command $previous" in
%s
        esac
        return
    fi
    case "$cur" in
        -*)
            case "$command" in
%s
            esac
            return ;;
    esac
    case "$command $position" in
%s
    esac
}
_shardwright_files() {
    local name
    case "$cur" in "~/"*) cur="$HOME/${cur#"~/"}" ;; esac
    # Line by line: names may have spaces and stars.
    while IFS= read -r name; do COMPREPLY+=("$name"); done < <(compgen -f -- "$cur")
}
complete -o filenames -F _shardwright shardwright"""


def script(commands: Sequence[Command]) -> str:
    """Return the script."""
    first = " ".join([*(command.name for command in commands), "--help", "--version"])
    valued = [
        _line(12, command.name, f'valued="{_flags(_valued(command))}"') for command in commands
    ]
    values = [line for command in commands for line in _values(command)]
    options = [
        _line(20, command.name, _words(_flags(command.options).split())) for command in commands
    ]
    positions = [line for command in commands for line in _positions(command)]
    return _HEAD % (first, *("\n".join(lines) for lines in (valued, values, options, positions)))


def _line(indent: int, pattern: str, action: str) -> str:
    return f"{' ' * (indent - 4)}{pattern}) {action} ;;"


def _valued(command: Command) -> list[Argument]:
    return [option for option in command.options if option.kind is not Kind.NONE]


def _flags(options: Sequence[Argument]) -> str:
    return " ".join(flag for option in options for flag in option.flags)


def _values(command: Command) -> Iterator[str]:
    for option in _valued(command):
        pattern = " | ".join(f'"{command.name} {flag}"' for flag in option.flags)
        if option.kind is not Kind.TEXT:
            yield _line(16, pattern, _action(option))


def _positions(command: Command) -> Iterator[str]:
    for at, argument in enumerate(command.positionals):
        pattern = f'"{command.name} "*' if argument.repeated else f'"{command.name} {at}"'
        if argument.kind is not Kind.TEXT:
            yield _line(12, pattern, _action(argument))


def _action(argument: Argument) -> str:
    if argument.kind is Kind.FILE:
        return "_shardwright_files"
    if argument.kind is Kind.STRATEGY:
        return f"{_words(argument.words)}; _shardwright_files"
    return _words(argument.words)


def _words(words: Sequence[str]) -> str:
    return f'COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$cur"))'
