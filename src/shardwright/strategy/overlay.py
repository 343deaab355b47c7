"""Overlay the data of one strategy on the data of another, with the origin of each key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.errors import Problem
from shardwright.strategy import chains
from shardwright.strategy.origin import KeyPath, KeySources, problem_at, source_of


def overlay_problems(
    base: Mapping[str, Any], other: Mapping[str, Any], *, below: KeySources, above: KeySources
) -> list[Problem]:
    """Return a problem if one strategy has `axis_types` as a word and the other as a table.

    A word covers all mesh axes, and a table covers only some. An overlay of both would leave the
    types of the mesh axes outside of the table undefined.
    """
    low, high = base.get("axis_types"), other.get("axis_types")
    if low is None or high is None or isinstance(low, Mapping) == isinstance(high, Mapping):
        return []
    word = high if isinstance(low, Mapping) else low
    example = ", ".join(f'{name} = "{word}"' for name in merge(base, other).get("mesh") or ("dp",))
    source = source_of(("axis_types",), below)
    texts = [
        f'"{value}"' if isinstance(value, str) else "a table by mesh axis" for value in (high, low)
    ]
    what = f"{texts[0]} overlays {texts[1]}{f' ({source})' if source else ''}: "
    what += "mesh axes that the table does not name would have no axis type"
    fix = f"write both as tables, axis_types = {{{example}}}, or both as one word for all mesh axes"
    return [problem_at(("axis_types",), above, what, fix)]


def overlay(
    base: Mapping[str, Any], other: Mapping[str, Any], *, below: KeySources, above: KeySources
) -> tuple[dict[str, Any], KeySources]:
    """Overlay `other` on `base`; return the data and the origin of each key."""
    data, origin = merge(base, other), merge_origin(below, above, other)
    for name in chains.ARRAYS:
        tables = base.get(name), other.get(name)
        # `merge` has overlaid two plain tables correctly. If one is an array, overlay both again,
        # because the order of the entries matters.
        if None in tables or not any(isinstance(table, list) for table in tables):
            continue
        data[name], sources = chains.overlaid(name, *tables, below=below, above=above)
        origin = {path: place for path, place in origin.items() if path[:1] != (name,)}
        for at, (table, source) in enumerate(zip(data[name], sources, strict=True)):
            origin.update({(name, str(at), axis): source for axis in table})
    return data, origin


def merge(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Overlay plain data key by key.

    The values of `other` take precedence, and its list entries come first.
    """
    merged = dict(base)
    for key, value in other.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(below, value)
        elif isinstance(below, list) and isinstance(value, list):
            # In `[[tensors]]`, the first entry that matches applies, so the entries of `other` come
            # first.
            merged[key] = [*value, *below]
        else:
            merged[key] = value
    return merged


def merge_origin(base: KeySources, other: KeySources, data: Mapping[str, Any]) -> KeySources:
    """Overlay origins as `merge` overlays data.

    The `[[tensors]]` and `[[memory.tensors]]` of `base` move behind those of `other`. A key that
    `other` sets without an origin gets an empty origin, because the line in `base` has a value that
    no longer applies.

    Args:
      base: Origin of the strategy `base`.
      other: Origin of the strategy `other`, which is laid over `base`.
      data: Plain data of the strategy `other`.
    """
    # Key paths have the numbers of entries, `("tensors", "0")`, so the entries of `base` get larger
    # numbers.
    memory = data.get("memory", {})
    moved = base
    for table, entries in ((("tensors",), data), (("memory", "tensors"), memory)):
        at, shift = len(table), len(entries.get("tensors", ()))
        moved = {
            (*table, str(int(path[at]) + shift), *path[at + 1 :])
            if path[:at] == table and len(path) > at
            else path: source
            for path, source in moved.items()
        }
    return {**moved, **dict.fromkeys(_key_paths(data, ()), ""), **other}


def _key_paths(data: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Yield the key path of every value that is not a table or a list."""
    if not isinstance(data, (Mapping, list)):
        yield path
        return
    for key, value in data.items() if isinstance(data, Mapping) else enumerate(data):
        yield from _key_paths(value, (*path, str(key)))
