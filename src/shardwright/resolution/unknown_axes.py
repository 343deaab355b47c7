"""Explain a name that is not an axis, and suggest the axis that the user probably meant."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable

from shardwright.errors import (
    Problem,
    UnknownAxisError,
    closest,
    did_you_mean,
    hint_text,
    raise_problems,
)
from shardwright.vocabulary.axes import (
    EMPTY,
    KNOWN_AXES,
    PARALLELISM_AXES,
    axis_label,
    canonical_axis,
)
from shardwright.vocabulary.layouts import LAYOUTS

# Our axes -> the names of these axes in other libraries (flax, T5X, MaxText, transformers). If a
# name has two meanings, both are suggested: "kv" is the size of a head in T5X.
OTHER_NAMES = {
    "BATCH": "batch_size bsz",
    "BATCH DP": "data",
    "EMBED": "hidden hidden_size d_model emb embedding embed_dim model_dim",
    "EMBED TP": "model",
    "EXPERT": "experts exp num_experts",
    "HEAD": "heads q_heads num_heads n_heads",
    "HEAD_DIM": "head_size d_head d_kv",
    "KV_HEAD": "kv_heads num_kv_heads n_kv_heads",
    "KV_HEAD HEAD_DIM": "kv",
    "KV_LENGTH": "kv_seq cache_sequence kv_len",
    "LAYERS": "layer num_layers scan",
    "LENGTH QUERY_LENGTH": "seq sequence seq_len sequence_length time",
    "MLP_INTERMEDIATE": "mlp mlp_dim ffn d_ff intermediate intermediate_size",
    "QUERY_LENGTH": "q_length q_len",
    "VOCAB": "vocab_size vocabulary",
}
_AXES = {name: axes.split() for axes, names in OTHER_NAMES.items() for name in names.split()}


def check_axes(places: Iterable[tuple[str, str]], own: Iterable[str], *, declare: str) -> None:
    """Check the names of axes that are given outside of a strategy.

    Args:
      places: Where each axis is given, and its canonical name.
      own: Axes that are known in addition to the vocabulary.
      declare: How to declare an axis of one's own, as the last words of a message.

    Raises:
      UnknownAxisError: Some axes are neither in the vocabulary nor in `own`. The error names all of
        them.
    """
    known = {EMPTY, *KNOWN_AXES, *map(canonical_axis, own)}
    raise_problems(
        [
            dataclasses.replace(unknown_axis(axis, known, declare=declare), path=place)
            for place, axis in places
            if axis not in known
        ]
    )


def unknown_axis(axis: str, known: Collection[str], *, declare: str = "") -> Problem:
    """Return the problem of an axis that is neither in the vocabulary nor declared.

    Args:
      axis: The axis.
      known: Canonical names of the axes that may be used.
      declare: Text that says how to declare the user's own axis. Defaults to a text on `[axes]` of
        a strategy.
    """
    name = axis_label(axis)
    canonical = canonical_axis(name)
    if canonical in known:  # only the underscores or the case are wrong
        fix = f"write {axis_label(canonical)}, whose value is {canonical!r}"
        return Problem(error=UnknownAxisError, what=f"unknown axis {axis!r}", axis=name, fix=fix)
    layout = next((layout for layout in LAYOUTS if layout.upper() == name), "")
    labels = sorted(axis_label(axis) for axis in known if axis != EMPTY)
    hint = f"did you mean the layout {layout}?" if layout else hint_text(axes_meant(name, labels))
    declare = declare or (
        f'an axis of your own is declared in the strategy: [axes] {name.lower()} = "what it is"'
    )
    fix = _several_fix(name) or f"{hint} {declare}".strip()
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


def axes_meant(name: str, labels: Iterable[str]) -> list[str]:
    """Return the axes that may be meant by a name that is not an axis.

    An axis that an import declared for this name, such as `logical_mlp`, comes first. Names of
    other libraries come next, then names with similar letters.

    Args:
      name: The unknown name, in upper or lower case.
      labels: Known axes. The result spells them in the same way, in upper or lower case.

    >>> axes_meant("mlp", ["batch", "mlp_intermediate"])
    ['mlp_intermediate']
    """
    by_name = {label.lower(): label for label in labels}
    if imported := by_name.get(f"logical_{name.lower()}"):
        return [imported]
    bare = name.lower().removeprefix("activation_")  # MaxText's prefix of activations
    axes = [by_name[axis.lower()] for axis in _AXES.get(bare, [bare]) if axis.lower() in by_name]
    close = closest(name, by_name.values())
    return axes or ([close] if close else [])


def missing_entry_fix(name: str, sizes: Iterable[str]) -> str:
    """Return how to fix an entry of a literal `PartitionSpec` that is not a mesh axis.

    The entry is misspelled, or is a logical name of flax.
    """
    names = list(sizes)
    hint = did_you_mean(PARALLELISM_AXES.get(name, name), names)
    logical = (
        "write the axes themselves, such as (EMBED, MLP_INTERMEDIATE), or translate flax's names "
        "with flax.linen.logical_to_mesh"
    )
    return hint or f"name a mesh axis: the mesh has {', '.join(names)}. For logical names {logical}"
