"""Read files of named tensors.

Such a file is a tree in TOML or JSON with the axes, shape, role and dtype of each tensor.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.cli.inputs import read_axes
from shardwright.errors import Problem, ShardingError, StrategyError, did_you_mean, raise_problems
from shardwright.strategy import files
from shardwright.strategy.foreign_files import LONGEST_JSON, read_text
from shardwright.strategy.limits import first_problems, has_too_many_elements
from shardwright.strategy.origin import KeyPath, KeySources, source_of, where
from shardwright.trees.tensors import Tensor, is_dtype
from shardwright.vocabulary.axes import Role

_KEYS = ("axes", "shape", "role", "dtype")
_SHARED = ("role", "dtype")
_EXAMPLE = (
    'axes = "EMBED MLP_INTERMEDIATE", shape = [4096, 14336], role = "param", dtype = "bfloat16"'
)
_JSON_EXAMPLE = '{"mlp": {"wi": {"axes": "EMBED MLP_INTERMEDIATE"}}}'


def read_tensors(name: str) -> tuple[Tensor, ...]:
    """Read a file of named tensors, in the order of the file.

    A table with `axes` is a tensor; any other table is a level of the tree. `role` and `dtype`
    apply to everything below them.

    Raises:
      StrategyError: Every problem of the file, each with file, line and key path.
    """
    path = Path(name)
    if path.suffix not in (".toml", ".json"):
        raise StrategyError(
            f"{path.name!r} is neither a .toml nor a .json file",
            fix="give the file one of these endings",
        )
    text = read_text(path, most=LONGEST_JSON)
    if path.suffix == ".json" and text.lstrip()[:1] != "{":
        raise StrategyError(
            "a file of tensors must be an object", path=path.name, fix=_JSON_EXAMPLE
        )
    data, origin = files.parse(text, format=path.suffix[1:], source=path.name)
    if any(_is_table_of_rules(data.get(name)) for name in ("mesh", "rules")):
        raise StrategyError(
            "this is a strategy file, not a file of tensors",
            path=path.name,
            fix="pass it as the strategy; a file of tensors has one table per tensor, "
            f"such as [mlp.wi]: {_EXAMPLE}",
        )
    # All problems of the file are collected, so that one run shows them.
    problems: list[Problem] = []
    tensors = tuple(_walk(data, (), {}, origin, problems))
    if not tensors and not problems:
        problems.append(
            Problem(
                error=StrategyError,
                what="the file has no tensors",
                path=path.name,
                fix=f"[mlp.wi]: {_EXAMPLE}",
            )
        )
    raise_problems(first_problems(problems))
    return tensors


def _is_table_of_rules(table: Any) -> bool:
    """Tell whether a table is `[mesh]` or `[rules]` of a strategy.

    It is not, if it has tables (a level of a tree) or axes (a tensor).
    """
    return (
        isinstance(table, Mapping)
        and bool(table)
        and "axes" not in table
        and not any(isinstance(value, Mapping) for value in table.values())
    )


def _walk(
    table: Mapping[str, Any],
    path: KeyPath,
    shared: Mapping[str, Any],
    origin: KeySources,
    problems: list[Problem],
) -> Iterator[Tensor]:
    shared = {
        **shared,
        **{
            key: table[key]
            for key in _SHARED
            # A table with one of these names is a level of the tree.
            if key in table and not isinstance(table[key], Mapping)
        },
    }
    # As above: a table named `axes` is a level of the tree.
    if "axes" in table and not isinstance(table["axes"], Mapping):
        tensor = _tensor({**shared, **table}, path, origin, problems)
        if tensor is not None:
            yield tensor
        return
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _walk(value, (*path, key), shared, origin, problems)
        elif (
            isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value)
        ):
            problems.append(_listed((*path, key), value, origin))
        elif key not in _SHARED:
            what = "the tensor has no axes" if key in _KEYS else f"{key!r} is not a table"
            hint = "" if key in _KEYS else did_you_mean(key, _KEYS)
            problems.append(
                _problem(
                    (*path, key), origin, what, f"{hint} a tensor is a table: {_EXAMPLE}".strip()
                )
            )


def _listed(path: KeyPath, entries: Sequence[Mapping[str, Any]], origin: KeySources) -> Problem:
    """Return the problem of a list of tables, such as `[[tensors]]`: a tensor is a named table."""
    first = entries[0]
    name = next(
        (first[key] for key in ("path", "name") if isinstance(first.get(key), str) and first[key]),
        "",
    )
    what, headers = (
        "tensors cannot be a list: each tensor is a table that is named by its path",
        _header([*path, "0"]),
    )
    if "match" in first:
        what = "entries with match= belong in a strategy file; this file names the tensors"
        headers = _header(["lm_head", "kernel"])
    elif name:
        headers = _header(name.split("/"))
    elif len(entries) > 1:
        headers += f", {_header([*path, '1'])}"
    place = next((key for key in ((*path, "0"), path) if key in origin), path)
    in_json = origin.get((), "").endswith(".json")
    fix = (
        f'{_JSON_EXAMPLE}, a level for each "/"'
        if in_json
        else f"write {headers}, and below it {_EXAMPLE}"
    )
    return dataclasses.replace(
        _problem(place, origin, what, fix),
        path=f"{source_of(place, origin)} {'.'.join(path)}".strip(),
    )


def _header(parts: Sequence[str]) -> str:
    """Return the header of a TOML table."""
    bare = re.compile(r"[A-Za-z0-9_-]+")
    # JSON escapes are valid in a basic string of TOML.
    names = [part if bare.fullmatch(part) else json.dumps(part) for part in parts]
    return f"[{'.'.join(names)}]"


def _tensor(
    table: Mapping[str, Any], path: KeyPath, origin: KeySources, problems: list[Problem]
) -> Tensor | None:
    """Return the tensor of a table. If it has problems, append them and return None."""
    before = len(problems)
    axes = _axes(table["axes"], (*path, "axes"), origin, problems)
    problems += [
        _problem((*path, key), origin, what, fix) for key, what, fix in _problems_of(table)
    ]
    if len(problems) > before:
        return None
    shape, role = table.get("shape"), table.get("role")
    return Tensor(
        path="/".join(path),
        axes=axes,
        shape=None if shape is None else tuple(shape),
        role=None if role is None else Role(role),
        dtype=table.get("dtype") or "",
    )


def _problems_of(table: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (key, what, fix) for each problem in a table of a tensor, except those of its axes."""
    for key in (key for key in table if key not in _KEYS):
        hint = did_you_mean(key, _KEYS)
        yield key, f"unknown key {key!r}", hint or f"a tensor has {', '.join(_KEYS)}"
    shape, role, dtype = table.get("shape"), table.get("role"), table.get("dtype")
    if shape is not None and not _is_shape(shape):
        fix = "write a list of sizes, such as [4096, 14336]"
        yield "shape", f"{shape!r} is not a shape", fix
    elif shape is not None and has_too_many_elements(shape):
        fix = "write smaller sizes: their product is < 2^63"
        yield "shape", "the array has too many elements", fix
    if role is not None and role not in list(Role):
        yield "role", f"unknown role {role!r}", f"roles are {', '.join(Role)}"
    if dtype is not None and not is_dtype(dtype):
        yield "dtype", f"unknown dtype {dtype!r}", "write a name such as bfloat16 or float32"


def _is_shape(value: Any) -> bool:
    # `bool` is a subclass of `int`, so `isinstance` would take `true` for a size.
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _axes(value: Any, path: KeyPath, origin: KeySources, problems: list[Problem]) -> Any:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        problems.append(
            _problem(
                path,
                origin,
                f"{value!r} is not a list of axes",
                'write "EMBED HEAD HEAD_DIM" or ["EMBED", "HEAD", "HEAD_DIM"]',
            )
        )
        return None
    try:
        return read_axes(words)
    except ShardingError as error:
        problems += [
            dataclasses.replace(problem, path=where(path, origin)) for problem in error.problems
        ]
        return None


def _problem(path: KeyPath, origin: KeySources, what: str, fix: str) -> Problem:
    return Problem(error=StrategyError, what=what, path=where(path, origin), fix=fix)
