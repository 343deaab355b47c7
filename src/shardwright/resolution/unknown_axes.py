"""Explain a name that is not an axis: what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable

from shardwright.errors import Problem, UnknownAxisError, did_you_mean
from shardwright.resolution.rules import AxisRules
from shardwright.vocabulary.axes import PARALLELISM_AXES, axis_label, canonical_axis
from shardwright.vocabulary.layouts import LAYOUTS


def unknown_axis(axis: str, rules: AxisRules) -> Problem:
    """Return the problem of an axis that is neither in the vocabulary nor declared by the
    strategy.
    """
    name = axis_label(axis)
    meant = canonical_axis(name)
    if meant in rules.known_axes:  # only the underscores or the case are wrong
        fix = f"write {axis_label(meant)}, whose value is {meant!r}"
        return Problem(error=UnknownAxisError, what=f"unknown axis {axis!r}", axis=name, fix=fix)
    fix = _several_fix(name) or _close_fix(name, rules)
    return Problem(error=UnknownAxisError, what=f"unknown axis {name!r}", axis=name, fix=fix)


def _several_fix(name: str) -> str:
    """Return how to write several axes that were given as one string, or an empty string."""
    dims = re.split(r"[\s,]+", name.strip(" ,"))
    if len(dims) > 1:
        return "each dim is a string of its own: " + ", ".join(f'"{dim}"' for dim in dims)
    members = name.split("+")
    if len(members) > 1:
        axes = ", ".join(f'"{member}"' for member in members)
        return f"a dim over several axes is a tuple of them: ({axes})"
    return ""


def _close_fix(name: str, rules: AxisRules) -> str:
    layout = next((layout for layout in LAYOUTS if layout.upper() == name), "")
    hint = did_you_mean(name, sorted(map(axis_label, rules.known_axes)))
    if layout:
        hint = f"did you mean the layout {layout}?"
    declare = (
        f'an axis of your own is declared in the strategy: [axes] {name.lower()} = "what it is"'
    )
    return f"{hint} {declare}".strip()


def lost_entry_fix(name: str, sizes: Iterable[str]) -> str:
    """Return how to fix an entry of a literal spec that is not a mesh axis: a typing slip, or the
    name of an axis.
    """
    names = list(sizes)
    hint = did_you_mean(PARALLELISM_AXES.get(name, name), names)
    logical = (
        "write the axes themselves, such as (EMBED, MLP_INTERMEDIATE), or translate flax's with "
        "flax.linen.logical_to_mesh"
    )
    return hint or f"name a mesh axis: the mesh has {', '.join(names)}. For logical names {logical}"
