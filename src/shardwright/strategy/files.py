"""Read and write strategy files: TOML and JSON, with the line of every key. Writes are atomic."""

from __future__ import annotations

import functools
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

from shardwright.errors import LONGEST_LINE, ShardingError, StrategyError, did_you_mean
from shardwright.strategy.foreign_files import cannot, read_text
from shardwright.strategy.limits import DEEPEST, LONGEST_FILE, check_limits
from shardwright.strategy.origin import KeySources
from shardwright.vocabulary.axes import canonical_axis, file_name

Parsed = tuple[dict[str, Any], KeySources]


def read(path: Path, *, preset: str = "Strategy.preset({!r})") -> Parsed:
    """Return the data of a file, and the origin of each key.

    Args:
      path: The file.
      preset: Format of a text that names a preset, such as `write {}`. If a preset has the name of
        a missing file, the fix has this text.
    """
    format = path.suffix.lstrip(".")
    if not format and path.name in preset_names():
        fix = f"Strategy.preset({path.name!r})"
        raise StrategyError(f"{path.name!r} is a preset, not a file", fix=fix)
    _check_format(format, path.name)
    if not os.path.exists(path):
        fix = did_you_mean(path.stem, preset_names()) or "check the path"
        if path.stem in preset_names():
            fix = f"for the preset, {preset.format(path.stem)}"
        raise StrategyError(f"no file {str(path)!r}", fix=fix)
    text = read_text(path, most=LONGEST_FILE)
    return parse_strategy(text, format=format, source=path.name)


def _check_format(format: str, source: str, fix: str = "name the file .toml or .json") -> None:
    if format not in ("toml", "json"):
        raise StrategyError(f"{source}: unknown format {format!r}", fix=fix)


def strategy_names(text: str | Path, root: Path = Path()) -> list[str]:
    """Return the names in `a | b`. If the whole text names a file, return it as one name."""
    if isinstance(text, Path) or os.path.exists(root / text):
        return [str(text)]
    return [name.strip() for name in text.split("|")]


def is_file_name(name: str) -> bool:
    """Return whether the name of a strategy means a file, and not a preset."""
    return name.endswith((".toml", ".json")) or os.sep in name


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


def file_to_edit(name: str, source: str) -> str:
    """Return how messages name the file in which the user of a strategy changes rules.

    Args:
      name: Name of the strategy.
      source: The file of the strategy, or the last file of an overlay. Empty if the strategy was
        not read from a file.
    """
    # Users do not edit the file of a preset: it is part of the package.
    if name in preset_names() and source == f"{name}.toml":
        return f'a file with base = "{name}"'
    return source or "the strategy"


def preset_text(name: str) -> str:
    """Return the text of a preset's file, comments included."""
    if not isinstance(name, str) or name not in preset_names():
        hint = did_you_mean(str(name).removesuffix(".toml"), preset_names())
        fix = f"{hint} presets are {', '.join(preset_names())}; a file ends in .toml or .json"
        raise StrategyError(f"no preset {name!r}", fix=fix.strip())
    presets = importlib.resources.files("shardwright.strategy") / "presets"
    return (presets / f"{name}.toml").read_text(encoding="utf-8")


def parse_strategy(text: str, *, format: str, source: str) -> Parsed:
    """Parse the text of a strategy. Refuse more than LONGEST_FILE characters."""
    if isinstance(text, str) and len(text) > LONGEST_FILE:
        what = f"the file has {len(text)} characters, at most {LONGEST_FILE} are read"
        raise StrategyError(what, path=source, fix="keep only what the strategy needs")
    data, origin = parse(text, format=format, source=source)
    if "model_type" in data:
        what = "this is the configuration of a model, not a strategy"
        fix = f"plan it: shardwright plan {source} --strategy fsdp_tp --topology v5e:2x4"
        raise StrategyError(what, path=source, fix=fix)
    return data, origin


def parse(text: str, *, format: str, source: str, example: str = '{"version": 1}') -> Parsed:
    """Parse TOML or JSON text into data and the origin of each key. A fix shows `example`."""
    _check_format(format, source, fix='pass format="toml" or format="json"')
    if not isinstance(text, str):
        fix = "pass the text of a file; Strategy.load(path) reads one"
        raise StrategyError(f"expected text, got {text!r}", path=source, fix=fix)
    try:
        if format == "toml":
            data = tomllib.loads(text)
        else:
            data = json.loads(text, object_pairs_hook=functools.partial(_table_of, source))
    except ShardingError:
        raise
    except tomllib.TOMLDecodeError as error:
        # `tomllib` gives no line and column for an error "at end of document", so point at the end.
        rows = text.rstrip("\n").split("\n")
        match = re.search(r"at line (\d+), column (\d+)", str(error))
        row, column = map(int, match.groups()) if match else (len(rows), len(rows[-1]) + 1)
        what = re.sub(r" \(at .*\)$", "", str(error))
        if what == "Cannot overwrite a value":
            what = "the key is written twice in one table"
        raise _syntax(text, source, what, row, column, fix=_toml_fix(text, row)) from error
    except json.JSONDecodeError as error:
        fix = "correct the syntax at the caret; no comma may stand before a bracket"
        if error.pos == 0:
            fix = 'if this is TOML, pass format="toml" to loads, or name the file .toml'
        raise _syntax(text, source, error.msg, error.lineno, error.colno, fix=fix) from error
    # Python limits the depth of calls, and the number of digits of an integer.
    except (RecursionError, ValueError) as error:
        deep = isinstance(error, RecursionError)
        fix = "flatten the file" if deep else "write a smaller number"
        raise StrategyError(str(error).partition(";")[0], path=source, fix=fix) from error
    if not isinstance(data, dict):
        what = f"expected a table, got {type(data).__name__}"
        raise StrategyError(what, path=source, fix=f"write a table, such as {example}")
    lines = toml_lines(text) if format == "toml" else json_lines(text)
    origin: KeySources = {(): source}
    for path, line in lines:
        # Store the line under the key as written, and under the name that files use for the axis.
        origin[path] = origin[(*path[:-1], file_name(canonical_axis(path[-1])))] = (
            f"{source}:{line}"
        )
    check_limits(data, origin)
    return data, origin


def _table_of(source: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # `json` silently keeps the last of equal keys. `tomllib` refuses equal keys itself.
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            what = f"the key {key!r} is written twice in one table"
            raise StrategyError(what, path=source, fix="remove one of the two")
        table[key] = value
    return table


# Several parts of this pattern match spaces, so its time is quadratic: match short lines only.
_BARE = re.compile(r"^\s*([\w.-]+)\s*=\s*([A-Za-z?|-][\w+|? -]*?)\s*(?:#.*)?$")


def _toml_fix(text: str, number: int) -> str:
    line = text.split("\n")[number - 1]
    if text.lstrip().startswith("{"):
        return 'this is JSON: pass format="json" to loads, or name the file .json'
    if text.endswith((".toml", ".json")) and len(text.split()) == 1:
        return f"Strategy.load({text!r}) reads a file"
    if len(line) <= LONGEST_LINE and (match := _BARE.match(line)):
        return f'quote the value: {match[1]} = "{match[2]}"'
    return "correct the syntax at the caret"


def _syntax(
    text: str, source: str, what: str, line: int, column: int, *, fix: str
) -> StrategyError:
    shown = "".join(text.split("\n")[line - 1 : line])
    snippet = f"{shown}\n{' ' * (column - 1)}^"
    return StrategyError(what, path=f"{source}:{line}", snippet=snippet, fix=fix)


def render(data: Mapping[str, Any], *, format: str) -> str:
    """Return data as TOML or JSON text."""
    if format == "json":
        return json.dumps(data, indent=2) + "\n"
    return "\n".join(_toml(data, ())).strip() + "\n"


def _toml(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    plain = {
        key: value
        for key, value in table.items()
        # An array of tables has a header per entry, so write an empty array as a value.
        if not isinstance(value, (Mapping, list)) or value == []
    }
    if path and (plain or not table):
        yield f"\n[{'.'.join(map(_toml_key, path))}]"
    # Write keys before any table: in TOML, a key after a header belongs to the table of that
    # header.
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
    # TOML escapes text as JSON does, but DEL must be escaped too.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def write(path: Path, data: Mapping[str, Any], *, overwrite: bool = True) -> Path:
    """Write data to a file atomically. The ending of the file's name decides the format."""
    format = path.suffix.lstrip(".")
    _check_format(format, path.name)
    return write_text(path, render(data, format=format), overwrite=overwrite)


def write_text(path: Path, text: str, *, overwrite: bool = True) -> Path:
    """Write text to a file atomically, through a temporary file beside it.

    The umask decides the permissions of a new file. An overwritten file keeps its permissions.

    Raises:
      StrategyError: The file cannot be written; or it exists, and `overwrite` is false.
    """
    try:
        return _write_text(path, text, overwrite=overwrite)
    except FileExistsError as error:
        fix = "choose another name, or replace it with --force"
        raise StrategyError(f"{str(path)!r} exists", fix=fix) from error
    except OSError as error:
        fix = "create its folder first" if isinstance(error, FileNotFoundError) else ""
        raise cannot("write", path, error, fix=fix) from error


def _write_text(path: Path, text: str, *, overwrite: bool) -> Path:
    # If the path is a symbolic link, overwrite its target and keep the link.
    target = Path(os.path.realpath(path)) if overwrite else path
    if path.exists() and not path.is_file() and not path.is_dir():
        # os.replace would replace the device or pipe itself.
        what = f"{str(path)!r} is not a regular file, and would be replaced by one"
        raise StrategyError(what, fix="choose another name, or print the text and redirect it (>)")
    # Write in the folder of the target, because `os.replace` is atomic only within one file system.
    # Forty characters of the name keep the temporary name below the usual limit of 255 bytes.
    temporary = target.with_name(f".{target.name:.40}.{secrets.token_hex(8)}")
    try:
        # open() applies the umask. Reading the umask here would change it for every thread.
        with open(temporary, "x", encoding="utf-8") as file:
            if overwrite and target.exists():
                os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
            file.write(text)
        if overwrite:
            os.replace(temporary, target)
        else:
            # Unlike os.replace, os.link fails if another process has just created the file.
            os.link(temporary, path)
            os.unlink(temporary)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


# Each pattern takes linear time on any line, because no two adjacent parts of it can match the same
# characters.
_HEADER = re.compile(r"^\s*(\[\[?)([^\[\]]+)\]\]?\s*(?:#.*)?$")


_KEY = re.compile(
    r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
    r"""(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*="""
)


_PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")


def toml_lines(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield each key path of TOML text and its line.

    An inline table or a multi-line value counts as one key.
    """
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


def json_lines(text: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield each key path of valid JSON text and its line."""
    owners: list[str] = []
    counts: list[int] = []
    key, line, counted = "", 1, 0
    for match in _JSON_TOKEN.finditer(text):
        token = match[0]
        if token in ("{", "["):
            owners.append(key)
            # -1 marks an object: its commas separate keys, not entries of a list.
            counts.append(0 if token == "[" else -1)
            key = "0" if token == "[" else ""
        elif token in ("}", "]"):
            key, _ = owners.pop(), counts.pop()
        elif token == "," and counts and counts[-1] >= 0:
            counts[-1] += 1
            key = str(counts[-1])
        elif match["key"]:
            key = json.loads(match["key"])
            # Count lines from the last key on, so that the whole text is counted only once.
            line += text.count("\n", counted, match.start())
            counted = match.start()
            # Skip deeper data, which is refused later: its paths alone would take quadratic memory.
            if len(owners) <= DEEPEST:
                yield (*filter(None, owners), key), line
