"""Read and write strategy files: TOML and JSON, with the line of every key. Writes are atomic."""

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
from shardwright.strategy.key_lines import json_lines, toml_lines
from shardwright.strategy.limits import LONGEST_FILE, check_limits
from shardwright.strategy.origin import KeySources
from shardwright.vocabulary.axes import canonical_axis, file_name

Parsed = tuple[dict[str, Any], KeySources]


def read(path: Path) -> Parsed:
    """Read a file: its data and the origin of each key."""
    format = _format(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # skips the byte order mark of some editors
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


def strategy_names(text: str | Path, root: Path = Path()) -> list[str]:
    """Return the names in `a | b`. A file whose name has a bar is one name."""
    if isinstance(text, Path) or os.path.exists(root / text):
        return [str(text)]
    return [name.strip() for name in text.split("|")]


def is_file_name(name: str) -> bool:
    """Return whether the name of a strategy is that of a file, and not that of a preset."""
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


def read_preset(name: str) -> Parsed:
    """Read a preset: its data and the origin of each key."""
    if not isinstance(name, str):
        hint = "; Strategy.load reads a file" if isinstance(name, os.PathLike) else ""
        raise StrategyError(
            f"the name of a preset must be text, got {name!r}",
            fix=f"presets are {', '.join(preset_names())}{hint}",
        )
    if name not in preset_names():
        hint = did_you_mean(name.removesuffix(".toml"), preset_names())
        raise StrategyError(
            f"no preset {name!r}",
            fix=f"{hint + ' ' if hint else ''}presets are {', '.join(preset_names())}",
        )
    return parse(preset_text(name), format="toml", source=f"{name}.toml")


def preset_text(name: str) -> str:
    """Return the text of a preset's file, comments included."""
    return (
        importlib.resources.files("shardwright.strategy") / "presets" / f"{name}.toml"
    ).read_text(encoding="utf-8")


def parse_strategy(text: str, *, format: str, source: str) -> Parsed:
    """Parse the text of a strategy. Refuse more than LONGEST_FILE characters."""
    if isinstance(text, str) and len(text) > LONGEST_FILE:
        what = f"the file has {len(text)} characters, at most {LONGEST_FILE} are read"
        raise StrategyError(what, path=source, fix="keep what the strategy needs")
    data, origin = parse(text, format=format, source=source)
    if "model_type" in data:
        what = "this is the configuration of a model, not a strategy"
        fix = f"plan it: shardwright plan {source} --strategy fsdp_tp --topology v5e:2x4"
        raise StrategyError(what, path=source, fix=fix)
    return data, origin


def parse(text: str, *, format: str, source: str) -> Parsed:
    """Parse TOML or JSON text into data and the origin of each key."""
    if not isinstance(text, str):
        raise StrategyError(
            f"expected text, got {text!r}",
            path=source,
            fix="pass the text of a file; Strategy.load(path) reads one",
        )
    if format not in ("toml", "json"):
        raise StrategyError(f"unknown format {format!r}", path=source, fix='write "toml" or "json"')
    try:
        data = (
            tomllib.loads(text)
            if format == "toml"
            else json.loads(text, object_pairs_hook=_no_duplicates)
        )
    # All of these errors except RecursionError are ValueErrors, so the plain one comes last.
    except tomllib.TOMLDecodeError as error:
        line, column = _toml_position(str(error), text)
        raise _syntax(text, source, str(error), line, column, fix=_toml_fix(text, line)) from error
    except json.JSONDecodeError as error:
        fix = (
            "remove the comma before the bracket"
            if _is_trailing_comma(text, error.pos)
            else _FIX_SYNTAX
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
            f"the key {str(error)!r} is written twice in one table",
            path=source,
            fix="remove one of them",
        ) from error
    except ValueError as error:  # Python refuses integers of more than 4300 digits
        raise StrategyError(
            str(error).partition(";")[0], path=source, fix="write a smaller number"
        ) from error
    if not isinstance(data, dict):
        raise StrategyError(
            f"a strategy must be a table, got {type(data).__name__}",
            path=source,
            fix='start from {"version": 1}',
        )
    lines = toml_lines(text) if format == "toml" else json_lines(text)
    origin: KeySources = {(): source}
    for path, line in lines:
        # Store the line under the key as written, and under the canonical spelling of an axis.
        origin[path] = origin[(*path[:-1], file_name(canonical_axis(path[-1])))] = (
            f"{source}:{line}"
        )
    check_limits(data, origin)
    return data, origin


class _DuplicateKeyError(ValueError):
    pass


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # `json` keeps the last of equal keys, without a word. `tomllib` refuses them itself.
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise _DuplicateKeyError(key)
        table[key] = value
    return table


_FIX_SYNTAX = "correct the syntax at the caret"
_BARE = re.compile(r"^\s*([\w.-]+)\s*=\s*([A-Za-z?|-][\w+|? -]*?)\s*(?:#.*)?$")


def _toml_fix(text: str, line: int) -> str:
    if text.lstrip().startswith("{"):
        return 'this is JSON: pass format="json" to loads, or name the file .json'
    if text.endswith((".toml", ".json")) and len(text.split()) == 1:
        return f"Strategy.load({text!r}) reads a file"
    return _quoted(text.split("\n")[line - 1]) or _FIX_SYNTAX


def _quoted(line: str) -> str:
    """Return a fix for a TOML line whose value lacks quotes, or "" for any other line."""
    # The parts of this pattern overlap in spaces, which takes quadratic time on a long line.
    match = _BARE.match(line) if len(line) <= LONGEST_LINE else None
    return f'quote the value: {match[1]} = "{match[2]}"' if match else ""


def _is_trailing_comma(text: str, at: int) -> bool:
    """Tell whether the position of a JSON error is at a comma before a closing bracket.

    Some versions of Python report the position of the comma, others that of the bracket.
    """
    before, after = text[:at].rstrip(), text[at:].lstrip()
    next_token = after.removeprefix(",").lstrip()
    return (before.endswith(",") or after.startswith(",")) and next_token.startswith(("}", "]"))


def _syntax(
    text: str, source: str, message: str, line: int, column: int, *, fix: str
) -> StrategyError:
    lines = text.split("\n")
    shown = lines[line - 1] if 0 < line <= len(lines) else ""
    what = re.sub(r" \(at .*\)$", "", message)
    if what == "Cannot overwrite a value":
        what = "the key is written twice in one table"
    return StrategyError(
        what, path=f"{source}:{line}", snippet=f"{shown}\n{' ' * (column - 1)}^", fix=fix
    )


def _toml_position(message: str, text: str) -> tuple[int, int]:
    match = re.search(r"at line (\d+), column (\d+)", message)
    if match:
        return int(match[1]), int(match[2])
    # `tomllib` gives no numbers for an error "at end of document".
    lines = text.rstrip("\n").split("\n")
    return len(lines), len(lines[-1]) + 1


def render(data: Mapping[str, Any], *, format: str) -> str:
    """Return data as TOML or JSON text."""
    if format == "json":
        return json.dumps(data, indent=2) + "\n"
    return "\n".join(_toml(data, ())).strip() + "\n"


def _toml(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    plain = {
        key: value
        for key, value in table.items()
        # An array of tables needs a header per entry, so an empty one can only be a value.
        if not isinstance(value, (Mapping, list)) or value == []
    }
    if path and (plain or not table):
        yield f"\n[{'.'.join(map(_toml_key, path))}]"
    # Before any table: in TOML, a key after a header belongs to the table of that header.
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
    # TOML escapes text as JSON does, except that DEL must be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def write(path: Path, data: Mapping[str, Any]) -> Path:
    """Write data to a file atomically."""
    return write_text(path, rendered(path, data))


def rendered(path: Path, data: Mapping[str, Any]) -> str:
    """Return data as text, in the format that the file name's ending says."""
    return render(data, format=_format(path))


def write_text(path: Path, text: str, *, overwrite: bool = True) -> Path:
    """Write text to a file atomically, through a temporary file beside it.

    The umask decides the permissions of a new file. An overwritten file keeps its permissions.

    Raises:
      StrategyError: The folder does not exist, or the path is a folder, a device or a pipe.
      FileExistsError: The file exists, and `overwrite` is false.
    """
    # If the path is a symbolic link, overwrite its target and keep the link.
    target = Path(os.path.realpath(path)) if overwrite else path
    _check_target(path, target)
    # In the folder of the target, because `os.replace` is atomic only within one file system. Forty
    # characters of the name keep the temporary name below the usual limit of 255 bytes.
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
        # os.replace would replace the device or pipe itself.
        raise StrategyError(
            f"{str(path)!r} is not a regular file, and would be replaced by one",
            fix="choose another name, or print and redirect (>)",
        )
