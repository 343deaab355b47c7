"""Reading and writing strategy files: TOML and JSON, with the line of every key, written whole or not at all."""

from __future__ import annotations

import importlib.resources
import json
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwright.errors import LONGEST_LINE, StrategyError, did_you_mean
from shardwright.strategy.limits import DEEPEST, LONGEST_FILE, check_keys, check_limits
from shardwright.strategy.origin import Origin
from shardwright.vocabulary.axes import canonical_axis, file_name

Parsed = tuple[dict[str, Any], Origin]


def read(path: Path) -> Parsed:
    """Return a file's data and where each key stands."""
    format = _format(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors put a byte order mark in front
    except FileNotFoundError as error:
        hint = did_you_mean(path.stem, preset_names())
        raise StrategyError(
            f"no file {str(path)!r}",
            fix=f"Strategy.preset({path.stem!r})"
            if path.stem in preset_names()
            else hint or "check the path",
        ) from error
    except OSError as error:
        raise StrategyError(
            f"cannot read {str(path)!r}: {(error.strerror or str(error)).lower()}",
            fix="check the path and its permissions",
        ) from error
    except UnicodeDecodeError as error:
        raise StrategyError(
            f"{path.name} is not UTF-8: {error.reason} at byte {error.start}",
            fix="save it as UTF-8",
        ) from error
    return parse_strategy(text, format=format, source=path.name)


def _format(path: Path) -> str:
    format = path.suffix.lstrip(".")
    if not format and path.name in preset_names():
        raise StrategyError(
            f"{path.name!r} is a preset, not a file", fix=f"Strategy.preset({path.name!r})"
        )
    if format not in ("toml", "json"):
        raise StrategyError(
            f"{path.name!r} is neither a .toml nor a .json file",
            fix="give the file one of these endings",
        )
    return format


def preset_names() -> tuple[str, ...]:
    """Return the names of the packaged strategies."""
    folder = importlib.resources.files("shardwright.strategy") / "presets"
    return tuple(
        sorted(
            entry.name.removesuffix(".toml")
            for entry in folder.iterdir()
            if entry.name.endswith(".toml")
        )
    )


def read_preset(name: str) -> Parsed:
    """Return a preset's data and where each key stands."""
    if not isinstance(name, str):
        path = "; Strategy.load reads a file" if isinstance(name, os.PathLike) else ""
        raise StrategyError(
            f"the name of a preset is text, not {name!r}",
            fix=f"presets are {', '.join(preset_names())}{path}",
        )
    if name not in preset_names():
        hint = did_you_mean(name.removesuffix(".toml"), preset_names())
        raise StrategyError(
            f"no preset {name!r}",
            fix=f"{hint + ' ' if hint else ''}presets are {', '.join(preset_names())}",
        )
    return parse(preset_text(name), format="toml", source=f"{name}.toml")


def preset_text(name: str) -> str:
    """Return a preset's file as it is written, comments included."""
    return (
        importlib.resources.files("shardwright.strategy") / "presets" / f"{name}.toml"
    ).read_text(encoding="utf-8")


def parse_strategy(text: str, *, format: str, source: str) -> Parsed:
    """Parse the text of a strategy; one of bounded length, since each table takes a fraction of a millisecond."""
    if isinstance(text, str) and len(text) > LONGEST_FILE:
        what = f"the file has {len(text)} characters, at most {LONGEST_FILE} are read"
        raise StrategyError(what, path=source, fix="keep what the strategy needs")
    return parse(text, format=format, source=source)


def parse(text: str, *, format: str, source: str) -> Parsed:
    """Parse TOML or JSON text; the origin maps each key path to `source:line`."""
    if not isinstance(text, str):
        raise StrategyError(
            f"{text!r} is no text",
            path=source,
            fix="pass the text of a file; Strategy.load(path) reads one",
        )
    if format not in ("toml", "json"):
        raise StrategyError(f"format is {format!r}", path=source, fix='write "toml" or "json"')
    if format == "toml":
        check_keys(text, source)
    try:
        data = (
            tomllib.loads(text)
            if format == "toml"
            else json.loads(text, object_pairs_hook=_no_duplicates)
        )
    except tomllib.TOMLDecodeError as error:
        line, column = _toml_position(str(error), text)
        raise _syntax(text, source, str(error), line, column, fix=_toml_fix(text, line)) from error
    except json.JSONDecodeError as error:
        fix = (
            "drop the comma before the bracket" if _is_trailing_comma(text, error.pos) else _CORRECT
        )
        if error.pos == 0:
            fix = 'if this is TOML, pass format="toml" to loads, or name the file .toml'
        raise _syntax(text, source, error.msg, error.lineno, error.colno, fix=fix) from error
    except RecursionError as error:
        raise StrategyError(
            "the file is nested too deeply", path=source, fix="flatten it"
        ) from error
    except _DuplicateKeyError as error:
        raise StrategyError(
            f"the key {str(error)!r} stands twice in one table", path=source, fix="drop one of them"
        ) from error
    except ValueError as error:  # a number of thousands of digits
        raise StrategyError(
            str(error).partition(";")[0], path=source, fix="write a smaller number"
        ) from error
    if not isinstance(data, dict):
        raise StrategyError(
            f"a strategy is a table, not {type(data).__name__}",
            path=source,
            fix='start from {"version": 1}',
        )
    lines = _toml_lines(text) if format == "toml" else _json_lines(text)
    origin: Origin = {(): source}
    for path, line in lines:
        # Under the key as it is written, and as every spelling of an axis is read.
        origin[path] = origin[(*path[:-1], file_name(canonical_axis(path[-1])))] = (
            f"{source}:{line}"
        )
    check_limits(data, origin)
    return data, origin


class _DuplicateKeyError(ValueError):
    pass


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise _DuplicateKeyError(key)
        made[key] = value
    return made


_CORRECT = "correct the syntax there"
_BARE = re.compile(r"^\s*([\w.-]+)\s*=\s*([A-Za-z?|-][\w+|? -]*?)\s*(?:#.*)?$")


def _toml_fix(text: str, line: int) -> str:
    if text.lstrip().startswith("{"):
        return 'this is JSON: pass format="json" to loads, or name the file .json'
    if text.endswith((".toml", ".json")) and len(text.split()) == 1:
        return f"Strategy.load({text!r}) reads a file"
    return _quoted(text.split("\n")[line - 1]) or _CORRECT


def _quoted(line: str) -> str:
    """Return how to write a TOML line whose value is bare words: text stands in quotes. Empty for any other line."""
    found = _BARE.match(line) if len(line) <= LONGEST_LINE else None
    return f'quote the value: {found[1]} = "{found[2]}"' if found else ""


def _is_trailing_comma(text: str, at: int) -> bool:
    """Tell whether JSON ends at a comma before a closing bracket; Python versions point at either."""
    before, after = text[:at].rstrip(), text[at:].lstrip()
    rest = after.removeprefix(",").lstrip()
    return (before.endswith(",") or after.startswith(",")) and rest.startswith(("}", "]"))


def _syntax(
    text: str, source: str, message: str, line: int, column: int, *, fix: str
) -> StrategyError:
    lines = text.split("\n")
    shown = lines[line - 1] if 0 < line <= len(lines) else ""
    what = re.sub(r" \(at .*\)$", "", message)
    if what == "Cannot overwrite a value":
        what = "the key stands twice in one table"
    return StrategyError(
        what, path=f"{source}:{line}", snippet=f"{shown}\n{' ' * (column - 1)}^", fix=fix
    )


def _toml_position(message: str, text: str) -> tuple[int, int]:
    found = re.search(r"at line (\d+), column (\d+)", message)
    if found:
        return int(found[1]), int(found[2])
    lines = text.rstrip("\n").split("\n")
    return len(lines), len(lines[-1]) + 1


# Each of these reads a line in linear time, whatever the line: no two neighbors can match the same characters.
_HEADER = re.compile(r"^\s*(\[\[?)([^\[\]]+)\]\]?\s*(?:#.*)?$")
_KEY = re.compile(
    r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*="""
)
_PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")


def _toml_lines(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield each key path and its line. Inline tables and multi-line values count as one key."""
    table: tuple[str, ...] = ()
    counts: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        header, key = _HEADER.match(line), _KEY.match(line)
        if header:
            table = _parts(header[2])
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = (*table, str(counts[table]))
            yield table, number
        elif key:
            yield (*table, *_parts(key[1])), number


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))


_JSON_TOKEN = re.compile(r'(?P<key>"(?:[^"\\]|\\.)*")\s*:|"(?:[^"\\]|\\.)*"|[{}\[\],]')


def _json_lines(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield each key path of JSON text that parses, and its line."""
    owners: list[str] = []
    counts: list[int] = []
    key, line, counted = "", 1, 0
    for match in _JSON_TOKEN.finditer(text):
        token = match[0]
        if token in ("{", "["):
            owners.append(key)
            counts.append(0 if token == "[" else -1)
            key = "0" if token == "[" else ""
        elif token in ("}", "]"):
            key, _ = owners.pop(), counts.pop()
        elif token == "," and counts and counts[-1] >= 0:
            counts[-1] += 1
            key = str(counts[-1])
        elif match["key"]:
            key = json.loads(match["key"])
            line += text.count("\n", counted, match.start())
            counted = match.start()
            if len(owners) <= DEEPEST:
                yield (*filter(None, owners), key), line


def render(data: Mapping[str, Any], *, format: str) -> str:
    """Return data as TOML or JSON text."""
    if format == "json":
        return json.dumps(data, indent=2) + "\n"
    return "\n".join(_toml(data, ())).strip() + "\n"


def _toml(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    plain = {
        key: value
        for key, value in table.items()
        if not isinstance(value, (Mapping, list)) or value == []
    }
    if path and (plain or not table):
        yield f"\n[{'.'.join(map(_toml_key, path))}]"
    for key, value in plain.items():
        yield f"{_toml_key(key)} = {_toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _toml(value, (*path, key))
        elif isinstance(value, list):
            for entry in value:
                yield f"\n[[{'.'.join(map(_toml_key, (*path, key)))}]]"
                yield from (
                    f"{_toml_key(name)} = {_toml_value(item)}" for name, item in entry.items()
                )


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    # TOML's escapes are JSON's but for two: it knows no surrogate pairs, and DEL must be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def write(path: Path, data: Mapping[str, Any]) -> Path:
    """Write a file through a temporary neighbour, so that it is there whole or not at all."""
    return write_text(path, rendered(path, data))


def rendered(path: Path, data: Mapping[str, Any]) -> str:
    """Return data as the text of a file of this name: its ending says which format."""
    return render(data, format=_format(path))


def write_text(path: Path, text: str, *, overwrite: bool = True) -> Path:
    """Write text through a temporary neighbour, so that it is there whole or not at all.

    A new file gets the permissions that the umask leaves; one that is overwritten keeps its own.

    Raises:
      StrategyError: there is no such folder, or what has the name is no file: a folder, a device, a pipe.
      FileExistsError: there is such a file, and `overwrite` is false.
    """
    target = (
        Path(os.path.realpath(path)) if overwrite else path
    )  # behind a link, the file changes and the link stays
    _check_target(path, target)
    temporary = target.with_name(f".{target.name:.40}.{secrets.token_hex(8)}")
    try:
        # "x" creates it, and the kernel applies the umask: to ask for the umask is to change it, for every thread.
        with open(temporary, "x", encoding="utf-8") as file:
            if overwrite and target.exists():
                os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
            file.write(text)
        if overwrite:
            os.replace(temporary, target)
        else:
            # A link, unlike a rename, never takes the place of a file that somebody made a moment ago.
            os.link(temporary, path)
            os.unlink(temporary)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def _check_target(path: Path, target: Path) -> None:
    for folder in (path.parent, target.parent):
        if not folder.is_dir():
            raise StrategyError(
                f"no folder {str(folder)!r} to write {path.name!r} in", fix="create it first"
            )
    if path.is_dir():
        raise StrategyError(
            f"cannot write {str(path)!r}: is a directory",
            fix="name a file in it, or choose another name",
        )
    if path.exists() and not path.is_file():
        # The rename would put a file in place of the device itself.
        raise StrategyError(
            f"{str(path)!r} is no file, and would be replaced by one",
            fix="choose another name, or print and redirect (>)",
        )
