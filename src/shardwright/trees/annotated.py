"""Pair the arrays of a tree with their annotations, and report what does not fit."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from shardwright.errors import Problem, StrategyError, did_you_mean, raise_problems
from shardwright.trees.paths import PathMatch, is_array_spec, path_text
from shardwright.vocabulary.annotations import is_annotation, is_axes_list, is_tuple_of_annotations
from shardwright.vocabulary.axes import axis_label
from shardwright.vocabulary.lowering import spelled

_SHAPE = operator.attrgetter("shape")
_AXES_AND_SHAPE = operator.attrgetter("axes", "shape")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """The arrays of a tree and their annotations. The annotations are not checked yet.

    Attributes:
      structure: Structure of the tree.
      leaves: The arrays of the tree.
      annotations: One annotation per array. If no annotations were given, the list `leaves` itself.
    """

    structure: Any
    leaves: list[Any]
    annotations: list[Any]

    def keys(self) -> Iterator[tuple[Any, Any]]:
        """Yield (annotation, shape) of each array.

        Raises:
          AttributeError: A leaf has no shape; or no annotations were given, and a leaf has no axes.
        """
        if self.annotations is self.leaves:
            return map(_AXES_AND_SHAPE, self.leaves)
        return zip(self.annotations, map(_SHAPE, self.leaves), strict=True)


def pair(tree: Any, annotations: Any = None) -> Paired | None:
    """Pair each array with the annotation at its path. Return None if the structures differ.

    This is the fast path: it calls no function per leaf, because such calls would take most of the
    time. `annotated_leaves` handles annotations that cover a subtree, and reports errors by path.
    """
    leaves, structure = jax.tree.flatten(tree)
    if annotations is None:
        return Paired(structure=structure, leaves=leaves, annotations=leaves)
    try:
        # `flatten_up_to` stops where the tree has an array, so the annotation there stays whole,
        # although it is a tuple.
        values = structure.flatten_up_to(annotations)  # type: ignore[attr-defined]
    except ValueError:
        return None
    return Paired(structure=structure, leaves=leaves, annotations=values)


def shapes_like(tree: Any, shapes: Any) -> list[Any]:
    """Return one shape per leaf of a tree.

    Args:
      tree: The tree.
      shapes: Tree of shapes, or of values with a shape. None gives None for each leaf.

    Raises:
      StrategyError: The two trees differ in structure.
    """
    structure: Any = jax.tree.structure(tree)
    if shapes is None:
        return [None] * structure.num_leaves
    try:
        leaves = structure.flatten_up_to(shapes)
    except ValueError as error:
        fix = "give one shape per array in the same structure, such as jax.eval_shape(init, key)"
        raise StrategyError("shape= has another structure than the tree", fix=fix) from error
    return [getattr(leaf, "shape", leaf) for leaf in leaves]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One array of a tree, with its path and its annotation."""

    path: str
    value: Any
    annotation: Any


def annotated_leaves(tree: Any, annotations: Any = None) -> list[Leaf]:
    """Return every array of a tree with its path and its annotation, in flattening order.

    An annotation covers one array, or every array below its path. A tuple of annotations pairs one
    to one with a tuple of values.

    Raises:
      StrategyError: The structures differ, leaves have no annotation, or a tuple of annotations can
        be read in two ways. The error has all problems.
    """
    if isinstance(annotations, PathMatch):
        what = "a PathMatch is not a tree of annotations"
        raise StrategyError(what, fix="pass match_paths(...).annotations")
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_array_spec)
    by_leaf: list[Any] = []
    whole: Any = structure
    if annotations is None:
        by_leaf = [value for _, value in pairs]
    else:
        with contextlib.suppress(ValueError):  # the trees differ in structure
            by_leaf = whole.flatten_up_to(annotations)
        if not by_leaf or not all(map(is_annotation, by_leaf)):
            by_leaf = _covering(_with_dicts(tree), _with_dicts(annotations))
    leaves = [
        Leaf(path=path_text(path), value=value, annotation=annotation)
        for (path, value), annotation in zip(pairs, by_leaf, strict=True)
    ]
    raise_problems([_unannotated(leaf) for leaf in leaves if not is_annotation(leaf.annotation)])
    return leaves


def _with_dicts(tree: Any) -> Any:
    """Replace each FrozenDict of flax in a tree by a dict with the same keys and order."""

    # For JAX, dict and FrozenDict are different nodes, so a tree with one does not fit annotations
    # with the other.
    def is_frozen(node: Any) -> bool:
        # Compare the type by name, so that flax is not imported.
        cls = type(node)
        return cls.__name__ == "FrozenDict" and cls.__module__.partition(".")[0] == "flax"

    def stops(node: Any) -> bool:
        return is_frozen(node) or is_array_spec(node) or is_annotation(node)

    return jax.tree.map(
        lambda node: node.unfreeze() if is_frozen(node) else node, tree, is_leaf=stops
    )


def _covering(tree: Any, annotations: Any) -> list[Any]:
    """Return the annotation of each leaf. An annotation may cover a whole subtree."""
    covers, structure = jax.tree_util.tree_flatten_with_path(annotations, is_leaf=is_annotation)
    try:
        parts = structure.flatten_up_to(tree)  # type: ignore[attr-defined]
    except ValueError as error:
        raise_problems(list(_misfits(tree, annotations, ())))
        # All paths agree, so the static data of two nodes must differ. Only JAX's message shows
        # how.
        message = str(error).splitlines()[0].partition(", got")[0]
        what = f"the tree of annotations does not fit the tree: {message}"
        raise StrategyError(what, fix=_EACH_LEAF) from error
    problems: list[Problem] = []
    each: list[Any] = []
    for (path, annotation), part in zip(covers, parts, strict=True):
        if is_tuple_of_annotations(annotation):
            each += _spread(annotation, part, path, problems)
        else:
            each += [annotation] * _count(part)
    raise_problems(problems)
    return each


def _count(part: Any) -> int:
    return len(jax.tree.leaves(part, is_leaf=is_array_spec))


def _spread(
    several: tuple[Any, ...], part: Any, path: tuple[Any, ...], problems: list[Problem]
) -> list[Any]:
    """Return the annotation of each leaf below a tuple of tuples of axes.

    If `part` is a tuple of the same length, its values pair with the annotations one to one.
    Otherwise the tuple is one annotation of composites. If `part` is another container with as many
    children as annotations, and the ranks fit one to one, both readings are possible, and a problem
    is added.
    """
    # A named tuple counts as another container, although it is a tuple too.
    counts = [_count(child) for child in part] if type(part) is tuple else []
    if len(counts) == len(several):
        return [
            annotation
            for annotation, count in zip(several, counts, strict=True)
            for _ in range(count)
        ]
    children = list((_children(part) or {}).values())
    if len(children) == len(several) and all(map(_has_rank, children, several)):
        what = f"a tuple of {len(several)} annotations over {_container(part)} of {len(children)} "
        fix = f"one annotation each: {_container(part)} of {', '.join(map(spelled, several))}\n"
        fix += "one annotation of composites for every array: "
        fix += f"{_container(part)} of {', '.join([spelled(several)] * len(several))}"
        what += "can be read in two ways"
        problems.append(_misfit(what, path, fix))
    return [several] * _count(part)


def _has_rank(part: Any, annotation: tuple[Any, ...]) -> bool:
    leaves = jax.tree.leaves(part, is_leaf=is_array_spec)
    return bool(leaves) and all(np.ndim(leaf) == len(annotation) for leaf in leaves)


def _misfits(tree: Any, annotations: Any, path: tuple[Any, ...]) -> Iterator[Problem]:
    """Yield a problem for each path below `path` at which the two trees differ in structure."""
    children, annotated = _children(tree), _children(annotations)
    # An annotation covers all arrays below it. `_unannotated` reports a leaf of `annotations` that
    # is not an annotation.
    if is_annotation(annotations) or annotated is None:
        return
    if children is None or type(tree) is not type(annotations):
        node = f"a leaf ({_kind(tree)})" if children is None else _container(tree)
        fix = "convert one of the trees, so that both have the same containers"
        if children is None:
            is_list = is_axes_list(annotations)
            tuples = "write the axes as a tuple: in a tree, a list is a container"
            fix = tuples if is_list else _EACH_LEAF
        what = f"the tree has {node} here, the tree of annotations has {_container(annotations)}"
        yield _misfit(what, path, fix)
        return
    for key in [key for key in children if key not in annotated]:
        what = "the tree has this path, the tree of annotations does not"
        yield _misfit(what, (*path, key), _EACH_LEAF)
    others = [path_text([key]) for key in children if key not in annotated]
    for key in [key for key in annotated if key not in children]:
        what = "the tree of annotations has this path, the tree does not"
        hint = did_you_mean(path_text([key]), others)
        yield _misfit(what, (*path, key), f"{hint} drop it".strip())
    for key in [key for key in children if key in annotated]:
        yield from _misfits(children[key], annotated[key], (*path, key))


def _children(node: Any) -> dict[Any, Any] | None:
    """Return the children of a node by key, or None for a leaf."""
    if is_array_spec(node) or is_annotation(node):
        return None
    children, structure = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda child: child is not node
    )
    # For JAX, None and () are nodes without children. Only a leaf has the structure of 0.
    leaf: Any = jax.tree.structure(0)
    return None if leaf == structure else {path[0]: child for path, child in children}


def _container(node: Any) -> str:
    return "None" if node is None else f"a {type(node).__name__}"


def _misfit(what: str, path: tuple[Any, ...], fix: str) -> Problem:
    return Problem(error=StrategyError, what=what, path=path_text(path), fix=fix)


_EACH_LEAF = (
    "annotate every leaf, or a whole subtree with one annotation; "
    "in a tree, annotations are tuples, not lists"
)


def _unannotated(leaf: Leaf) -> Problem:
    fix = "pass annotations=, or make the leaf an ArraySpec; "
    fix += "in a tree, annotations are tuples of axes or layouts"
    if isinstance(leaf.annotation, str):
        label = axis_label(leaf.annotation)
        fix = f"write a tuple with one axis per dim: ({label},), or ({label}, EMPTY) for two dims"
    what = f"{_kind(leaf.annotation)} is not an annotation"
    return Problem(error=StrategyError, what=what, path=leaf.path, fix=fix)


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return f"the single axis {value!r}"
    return type(value).__name__ + (
        f" of shape {np.shape(value)}" if isinstance(value, (jax.Array, np.ndarray)) else ""
    )
