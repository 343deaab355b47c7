"""Compare the axes of an annotated model with those that its program uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax

from shardwright.errors import StrategyError
from shardwright.inference.inferred import Inferred, InferredDim
from shardwright.lints.finding import Code, Finding, Severity, dim_key
from shardwright.trees.paths import path_text
from shardwright.vocabulary.annotations import is_annotation
from shardwright.vocabulary.axes import (
    CHANNEL,
    CHANNEL_IN,
    CHANNEL_OUT,
    EMBED,
    EMPTY,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    KV_LENGTH,
    LENGTH,
    MLP_INTERMEDIATE,
    NORM,
    QUERY_LENGTH,
    SEMANTIC_AXES,
    axis_label,
)
from shardwright.vocabulary.lowering import Dim, lower
from shardwright.vocabulary.merged_dims import MergedDim, axis_text

_CHANNELS: Final = frozenset({CHANNEL, CHANNEL_IN, CHANNEL_OUT})
# Names that one dim may have, depending on the kind of array.
_SYNONYMS: Final[tuple[frozenset[str], ...]] = (
    # Inference calls channels between blocks EMBED, and channels in a block MLP_INTERMEDIATE.
    *(_CHANNELS | {name} for name in (EMBED, MLP_INTERMEDIATE, NORM)),
    frozenset({EMBED, NORM}),
    frozenset({HEAD_DIM, KV_HEAD_DIM, NORM}),
    frozenset({LENGTH, QUERY_LENGTH, KV_LENGTH}),
)
# Without grouped heads, keys have as many heads as queries.
_EQUAL_HEADS: Final = frozenset({HEAD, KV_HEAD})

DimNames = tuple[str, ...]


def lint_names(annotations: Any, inferred: Inferred) -> tuple[Finding, ...]:
    """Return where the annotations of a model contradict its program.

    Names are treated as equal if only the kind of array decides between them: EMBED and NORM, or
    HEAD_DIM and KV_HEAD_DIM. Axes of your own are only compared with each other. Guesses of
    inference are not used.

    Args:
      annotations: Tree like the parameters, with an annotation or an `ArraySpec` per array.
      inferred: The result of `infer_axes` for the same parameters.

    Raises:
      StrategyError: An array of the program has no annotation.
      RankMismatchError: An annotation does not fit its array.
    """
    rows = _annotated(annotations, inferred)
    findings = [
        Finding(
            code=Code.OTHER_NAME,
            severity=Severity.WARNING,
            message=conflict.text,
            fix="check the model: one dim is used in two ways",
        )
        for conflict in inferred.conflicts
    ]
    # In a program with KV heads, inference distinguishes HEAD from KV_HEAD. In other programs, HEAD
    # and KV_HEAD are one axis.
    named = {name for dim in inferred.evidence for name in _inferred_names(dim)}
    synonyms = _SYNONYMS if KV_HEAD in named else (*_SYNONYMS, _EQUAL_HEADS)
    for dim in inferred.evidence:
        finding = _compare(dim, rows[dim.path][dim.dim], synonyms)
        if finding is not None:
            findings.append(finding)
    findings += _differing(inferred, rows, synonyms)
    return tuple(findings)


def _annotated(annotations: Any, inferred: Inferred) -> dict[str, tuple[Dim, ...]]:
    """Return the annotation of each array as `Dim`s, one per dim (see `vocabulary.lowering`)."""
    shapes: dict[str, list[int]] = {}
    for dim in inferred.evidence:
        shapes.setdefault(dim.path, []).append(dim.size)
    leaves, _ = jax.tree_util.tree_flatten_with_path(annotations, is_leaf=is_annotation)
    annotated = {path_text(path): leaf for path, leaf in leaves}
    missing = [path for path in shapes if path not in annotated]
    if missing:
        raise StrategyError(
            "the array has no annotation",
            path=missing[0],
            fix="pass a tree of annotations with the structure of the parameters",
        )
    return {path: lower(annotated[path], tuple(shape)).dims for path, shape in shapes.items()}


def _inferred_names(dim: InferredDim) -> DimNames:
    if isinstance(dim.axis, MergedDim):
        return tuple(name for name, _ in dim.axis.members)
    return () if dim.axis == EMPTY else (dim.axis,)


def _annotated_names(dim: Dim) -> DimNames | None:
    """Return the axes of an annotated dim, or None for composites and literal specs."""
    if dim.merged:
        return tuple(name for name, _ in dim.merged)
    if dim.semantic_axis:
        return (dim.semantic_axis,)
    if dim.literal is not None or len(dim.axes) > 1:
        return None
    return dim.axes


def _is_composite(dim: Dim) -> bool:
    return not dim.merged and not dim.semantic_axis and dim.literal is None and len(dim.axes) > 1


def _same_names(
    annotated: Dim, names: DimNames, dim: InferredDim, synonyms: tuple[frozenset[str], ...]
) -> bool:
    """Tell whether an annotation has the axes of the program, in the same order and sizes."""
    actual = _inferred_names(dim)
    if _is_composite(annotated):
        return len(actual) == 1 and any(_are_synonyms(name, actual[0], synonyms) for name in names)
    if annotated.merged and isinstance(dim.axis, MergedDim):
        sizes = [[size for _, size in members] for members in (annotated.merged, dim.axis.members)]
        if sizes[0] != sizes[1]:
            return False
    return len(names) == len(actual) and all(
        _are_synonyms(*pair, synonyms) for pair in zip(names, actual, strict=True)
    )


def _compare(
    dim: InferredDim, annotated: Dim, synonyms: tuple[frozenset[str], ...]
) -> Finding | None:
    names, actual = _annotated_names(annotated), _inferred_names(dim)
    if _is_composite(annotated):
        names = annotated.axes
    # A dim of size 1 broadcasts against any dim, so its use does not show its axis.
    if dim.guess or dim.is_open or names is None or dim.size == 1:
        return None
    if any(name not in SEMANTIC_AXES for name in (*names, *actual)):
        return None
    is_same = _same_names(annotated, names, dim, synonyms)
    # HEAD_DIM and NORM are synonyms, because the scale of a norm of heads may be named NORM. But
    # inference says NORM only for a vector along EMBED, so HEAD_DIM contradicts it.
    if is_same and not (actual == (NORM,) and names[0] in (HEAD_DIM, KV_HEAD_DIM)):
        return None
    text = axis_text(dim.axis)
    replicated = not names
    members = [f"{axis_label(name)}:{size}" for name, size in annotated.merged]
    label = "*".join(members) or annotated.label
    what = "is not named" if replicated else f"is named {label}"
    return Finding(
        code=Code.OTHER_NAME,
        severity=Severity.NOTE if replicated else Severity.WARNING,
        message=f"the dim {what}, and the program uses it as {text}: {dim.evidence.reason}",
        fix=f"write {text}" + (", or leave it replicated" if replicated else ""),
        source=dim.evidence.source,
        key=dim_key(dim.path, dim.dim, ""),
    )


def _are_synonyms(first: str, second: str, synonyms: tuple[frozenset[str], ...]) -> bool:
    return first == second or any({first, second} <= group for group in synonyms)


def _differing(
    inferred: Inferred,
    rows: Mapping[str, tuple[Dim, ...]],
    synonyms: tuple[frozenset[str], ...],
) -> Iterator[Finding]:
    """Yield dims that the program uses as one dim, but that have different names."""
    first: dict[int, tuple[InferredDim, Dim, str]] = {}
    for dim in inferred.evidence:
        annotated = rows[dim.path][dim.dim]
        names = _annotated_names(annotated)
        if len(dim.classes) != 1 or names is None or len(names) > 1:
            continue
        name = names[0] if names else EMPTY
        other, other_dim, other_name = first.setdefault(dim.classes[0], (dim, annotated, name))
        is_certain = not (dim.guess or dim.is_open)
        if is_certain and (name == EMPTY or name in SEMANTIC_AXES):
            continue  # `_compare` checks this dim
        if _are_synonyms(name, other_name, synonyms):
            continue
        # A vector along channels may be named NORM, whatever the name of the channels.
        if NORM in (name, other_name) and not {name, other_name} <= {*SEMANTIC_AXES, EMPTY}:
            continue
        place = dim_key(other.path, other.dim, other_dim.label)
        yield Finding(
            code=Code.OTHER_NAME,
            severity=Severity.NOTE if EMPTY in (name, other_name) else Severity.WARNING,
            message=f"the program uses this dim and {place} as one dim, and their names differ",
            fix=f"give both dims the same name: {annotated.label} or {other_dim.label}",
            source=dim.evidence.source,
            key=dim_key(dim.path, dim.dim, annotated.label),
        )
