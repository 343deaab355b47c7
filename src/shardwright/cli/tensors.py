"""Read files of named tensors.

Such a file is a tree in TOML or JSON with the axes, shape, role and dtype of each tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwright.cli.inputs import read_axes
from shardwright.errors import Problem, ShardingError, StrategyError, did_you_mean, raise_problems
from shardwright.strategy import files
from shardwright.strategy.foreign_files import LONGEST_JSON, read_text
from shardwright.strategy.limits import first_problems, has_too_many_elements
from shardwright.strategy.origin import KeyPath, KeySources, problem_at
from shardwright.strategy.tables import at_path
from shardwright.trees.tensors import Tensor, is_dtype
from shardwright.vocabulary.axes import Role

_KEYS = ("axes", "shape", "role", "dtype")
_SHARED = ("role", "dtype")
_EXAMPLE = (
    'axes = "EMBED MLP_INTERMEDIATE", shape = [4096, 14336], role = "param", dtype = "bfloat16"'
)


def read_tensors(name: str) -> tuple[Tensor, ...]:
    """Read a file of named tensors, in the order of the file.

    A table with `axes` is a tensor; any other table is a level of the tree. `role` and `dtype` of a
    level apply to all tensors below it.

    Raises:
      StrategyError: Every problem of the file, each with file, line and key path.
    """
    path = Path(name)
    text = read_text(path, most=LONGEST_JSON)
    example = '{"mlp": {"wi": {"axes": "EMBED MLP_INTERMEDIATE"}}}'
    data, origin = files.parse(text, format=path.suffix[1:], source=path.name, example=example)
    if any(_is_table_of_rules(data.get(name)) for name in ("mesh", "rules")):
        what = "this is a strategy file, not a file of tensors"
        fix = "pass it as the strategy; a file of tensors has one table per tensor, such as "
        raise StrategyError(what, path=path.name, fix=f"{fix}[mlp.wi]: {_EXAMPLE}")
    # All problems of the file are collected, so that one run shows them.
    problems: list[Problem] = []
    tensors = tuple(_walk(data, (), {}, origin, problems))
    if not tensors and not problems:
        fix = f"[mlp.wi]: {_EXAMPLE}"
        problems.append(problem_at((), origin, "the file has no tensors", fix))
    raise_problems(first_problems(problems))
    return tensors


def _is_table_of_rules(table: Any) -> bool:
    """Tell whether a table named `mesh` or `rules` is that of a strategy.

    In a file of tensors, a table has tables inside (a level of the tree), or `axes` (a tensor).
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
    # A table named `axes` is a level of the tree too.
    if "axes" in table and not isinstance(table["axes"], Mapping):
        tensor = _tensor({**shared, **table}, path, origin, problems)
        if tensor is not None:
            yield tensor
        return
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _walk(value, (*path, key), shared, origin, problems)
        elif key not in _SHARED:
            at, what, hint = (*path, key), f"{key!r} is not a table", did_you_mean(key, _KEYS)
            if key in _KEYS:
                what, hint = "the tensor has no axes", ""
            elif isinstance(value, list):
                # `origin` has no line for an array of tables itself, but for each of its tables.
                # So name the first table.
                at = (*at, "0")
                what = "tensors cannot be a list: each tensor is a table that is named by its path"
            fix = f"{hint} a tensor is a table [mlp.wi]: {_EXAMPLE}".strip()
            problems.append(problem_at(at, origin, what, fix))


def _tensor(
    table: Mapping[str, Any], path: KeyPath, origin: KeySources, problems: list[Problem]
) -> Tensor | None:
    """Return the tensor of a table. If it has problems, append them and return None."""
    before = len(problems)
    axes = _axes(table["axes"], (*path, "axes"), origin, problems)
    problems += [
        problem_at((*path, key), origin, what, fix) for key, what, fix in _problems_of(table)
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
    # `bool` is a subclass of `int`, so `isinstance` would take `true` for a size.
    is_shape = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if shape is not None and not is_shape:
        fix = "write a list of sizes, such as [4096, 14336]"
        yield "shape", f"{shape!r} is not a shape", fix
    elif shape is not None and has_too_many_elements(shape):
        fix = "write smaller sizes: their product is < 2^63"
        yield "shape", "the array has too many elements", fix
    if role is not None and role not in list(Role):
        yield "role", f"unknown role {role!r}", f"roles are {', '.join(Role)}"
    if dtype is not None and not is_dtype(dtype):
        yield "dtype", f"unknown dtype {dtype!r}", "write a name such as bfloat16 or float32"


def _axes(value: Any, path: KeyPath, origin: KeySources, problems: list[Problem]) -> Any:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        fix = 'write "EMBED HEAD HEAD_DIM" or ["EMBED", "HEAD", "HEAD_DIM"]'
        problems.append(problem_at(path, origin, f"{value!r} is not a list of axes", fix))
        return None
    try:
        return read_axes(words)
    except ShardingError as error:
        problems += [at_path(problem, path, origin) for problem in error.problems]
        return None
