"""Trees: annotations beside arrays, path rules, stacks of layers."""

from __future__ import annotations

import dataclasses
import hashlib
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from shardwright.errors import (
    Problem,
    RankMismatchError,
    StrategyError,
    did_you_mean,
    raise_problems,
)
from shardwright.vocabulary.annotations import (
    ArraySpec,
    as_annotation,
    is_annotation,
    is_axes_list,
    is_tuple_of_annotations,
    stacked,
)
from shardwright.vocabulary.layouts import Replicated
from shardwright.vocabulary.lowering import spelled


def path_text(path: Sequence[Any]) -> str:
    """Return a key path as `blocks/0/attn/q`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


_SHAPE = operator.attrgetter("shape")
_AXES_AND_SHAPE = operator.attrgetter("axes", "shape")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """The arrays of a tree, each with what annotates it (not yet checked to be an annotation).

    Attributes:
      structure: structure of the tree.
      leaves: its arrays.
      annotations: one per array; the same object as `leaves` where they are `ArraySpec`s.
    """

    structure: Any
    leaves: list[Any]
    annotations: list[Any]

    def keys(self) -> Iterator[tuple[Any, Any]]:
        """Yield (annotation, shape) of each array.

        Raises:
          AttributeError: a leaf without a shape, or without axes where it must bring its own.
        """
        if self.annotations is self.leaves:
            return map(_AXES_AND_SHAPE, self.leaves)
        return zip(self.annotations, map(_SHAPE, self.leaves), strict=True)


def pair(tree: Any, annotations: Any = None) -> Paired | None:
    """Pair each array with what stands at its place among the annotations; None where the structures differ.

    The tree's own structure comes first: a tuple node pairs with a tuple of annotations. `annotated_leaves` is for
    everything else: annotations that cover a subtree, and errors by path. No predicate runs per leaf here, because it
    would cost more than all the rest.
    """
    leaves, structure = jax.tree.flatten(tree)
    if annotations is None:
        return Paired(structure=structure, leaves=leaves, annotations=leaves)
    try:
        found = structure.flatten_up_to(annotations)  # type: ignore[attr-defined]
    except ValueError:
        return None
    return Paired(structure=structure, leaves=leaves, annotations=found)


def shapes_like(tree: Any, shapes: Any) -> list[Any]:
    """Return one shape per leaf of a tree, from a tree of shapes or of whatever has a shape; None for each where none are given.

    Raises:
      StrategyError: the two differ in structure.
    """
    structure: Any = jax.tree.structure(tree)
    if shapes is None:
        return [None] * structure.num_leaves
    try:
        leaves = structure.flatten_up_to(shapes)
    except ValueError as error:
        fix = "give one shape per array, in the same structure, for instance jax.eval_shape(init, key)"
        raise StrategyError("shape= has another structure than the tree", fix=fix) from error
    return [getattr(leaf, "shape", leaf) for leaf in leaves]


def _is_spec(value: Any) -> bool:
    return isinstance(value, ArraySpec)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One array of a tree, its path and its annotation."""

    path: str
    value: Any
    annotation: Any


def annotated_leaves(tree: Any, annotations: Any = None) -> list[Leaf]:
    """Return every array of a tree with its path and the annotation that covers it, in flattening order.

    An annotation stands for one array, or for every array below its place. Where a tuple of annotations meets a tuple of
    values they pair one to one.

    Raises:
      StrategyError: the structures differ, leaves have no annotation, or a tuple of annotations meets another container of
        as many arrays of their ranks; all of them at once.
    """
    if isinstance(annotations, PathMatch):
        raise StrategyError(
            "a PathMatch is not a tree of annotations, it holds one",
            fix="pass match_paths(...).annotations",
        )
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_spec)
    if annotations is None:
        found = [value for _, value in pairs]
    else:
        found = _one_each(structure, annotations) or _covering(tree, annotations)
    leaves = [
        Leaf(path=path_text(path), value=value, annotation=one)
        for (path, value), one in zip(pairs, found, strict=True)
    ]
    raise_problems([_unannotated(leaf) for leaf in leaves if not is_annotation(leaf.annotation)])
    return leaves


def _one_each(structure: Any, annotations: Any) -> list[Any] | None:
    """Return the annotations of a tree of just this structure, or None."""
    try:
        found: list[Any] = structure.flatten_up_to(annotations)
    except ValueError:
        return None
    return found if all(is_annotation(one) for one in found) else None


def _covering(tree: Any, annotations: Any) -> list[Any]:
    """Return the annotation of each leaf, where an annotation may cover a whole subtree."""
    ones, structure = jax.tree_util.tree_flatten_with_path(annotations, is_leaf=is_annotation)
    try:
        parts = structure.flatten_up_to(tree)  # type: ignore[attr-defined]
    except ValueError as error:
        raise_problems(list(_misfits(tree, annotations, ())))
        # The places agree: the containers' own data differ, which only JAX's words tell.
        said = str(error).splitlines()[0].partition(", got")[0]
        raise StrategyError(
            f"the tree of annotations does not fit the tree: {said}", fix=_EACH_LEAF
        ) from error
    problems: list[Problem] = []
    found: list[Any] = []
    for (path, one), part in zip(ones, parts, strict=True):
        if is_tuple_of_annotations(one):
            found += _paired(one, part, path, problems)
        else:
            found += [one] * len(jax.tree.leaves(part, is_leaf=_is_spec))
    raise_problems(problems)
    return found


def _paired(
    several: tuple[Any, ...], part: Any, path: tuple[Any, ...], problems: list[Problem]
) -> list[Any]:
    """Return the annotation of each leaf below a tuple of tuples of axes: one by one over a tuple of as many values.

    Elsewhere it is one annotation of composites, unless the container has as many arrays whose ranks fit one by one.
    """
    counts = (
        [len(jax.tree.leaves(child, is_leaf=_is_spec)) for child in part]
        if type(part) is tuple
        else []
    )
    if len(counts) == len(several):
        return [one for one, count in zip(several, counts, strict=True) for _ in range(count)]
    below = _below(part) or {}
    children = list(below.values())
    if len(children) == len(several) and all(map(_has_rank, children, several)):
        problems.append(_two_readings(several, part, list(below), path))
    return [several] * len(jax.tree.leaves(part, is_leaf=_is_spec))


def _has_rank(part: Any, annotation: tuple[Any, ...]) -> bool:
    leaves = jax.tree.leaves(part, is_leaf=_is_spec)
    return bool(leaves) and all(np.ndim(leaf) == len(annotation) for leaf in leaves)


def _two_readings(
    several: tuple[Any, ...], part: Any, keys: list[Any], path: tuple[Any, ...]
) -> Problem:
    each, whole = [spelled(one) for one in several], [spelled(several)] * len(several)
    return Problem(
        error=StrategyError,
        what=f"a tuple of {len(several)} annotations over {_container(part)} of {len(keys)} reads in two ways",
        path=path_text(path),
        fix=f"one annotation each: {_like(part, keys, each)}\none annotation of composites for every array: {_like(part, keys, whole)}",
    )


def _like(part: Any, keys: list[Any], texts: list[str]) -> str:
    """Return texts in the container's own notation; of a long one the first three."""
    names = [path_text([key]) for key in keys]
    if isinstance(part, list):
        shown = texts
    elif isinstance(part, dict):
        shown = [f"{name!r}: {text}" for name, text in zip(names, texts, strict=True)]
    else:
        shown = [f"{name}={text}" for name, text in zip(names, texts, strict=True)]
    inner = ", ".join([*shown[:3], *(["..."] if len(shown) > 3 else [])])
    if isinstance(part, list):
        return f"[{inner}]"
    return f"{{{inner}}}" if isinstance(part, dict) else f"{type(part).__name__}({inner})"


def _misfits(tree: Any, annotations: Any, path: tuple[Any, ...]) -> Iterator[Problem]:
    """Yield the places below `path` where the annotations have another structure than the tree."""
    mine, theirs = _below(tree), _below(annotations)
    if is_annotation(annotations) or theirs is None:
        return  # It covers all below, or is no annotation: `_unannotated` then tells.
    if mine is None or type(tree) is not type(annotations):
        here = f"a leaf ({_kind(tree)})" if mine is None else _container(tree)
        is_list = mine is None and is_axes_list(annotations)
        fix = (
            "write the axes as a tuple: inside a tree a list is a level of it"
            if is_list
            else _EACH_LEAF
        )
        yield _misfit(
            f"the tree has {here} here, the tree of annotations {_container(annotations)}",
            path,
            fix,
        )
        return
    for key in [key for key in mine if key not in theirs]:
        yield _misfit(
            "the tree has this place, the tree of annotations does not", (*path, key), _EACH_LEAF
        )
    for key in [key for key in theirs if key not in mine]:
        hint = did_you_mean(
            path_text([key]), [path_text([one]) for one in mine if one not in theirs]
        )
        yield _misfit(
            "the tree of annotations has this place, the tree does not",
            (*path, key),
            f"{hint} drop it".strip(),
        )
    for key in [key for key in mine if key in theirs]:
        yield from _misfits(mine[key], theirs[key], (*path, key))


def _below(node: Any) -> dict[Any, Any] | None:
    """Return what stands right below a node by key; None for a leaf."""
    if _is_spec(node) or is_annotation(node):
        return None
    found, structure = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda one: one is not node
    )
    leaf: Any = jax.tree.structure(0)
    return None if leaf == structure else {path[0]: one for path, one in found}


def _container(node: Any) -> str:
    return "None" if node is None else f"a {type(node).__name__}"


def _misfit(what: str, path: tuple[Any, ...], fix: str) -> Problem:
    return Problem(error=StrategyError, what=what, path=path_text(path), fix=fix)


_EACH_LEAF = "annotate every leaf, or a whole subtree with one annotation; inside a tree annotations are tuples, not lists"


def _unannotated(leaf: Leaf) -> Problem:
    return Problem(
        error=StrategyError,
        what=f"{_kind(leaf.annotation)} is not an annotation",
        path=leaf.path,
        fix="pass annotations=, or make the leaf an ArraySpec; inside a tree annotations are tuples of axes or layouts",
    )


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return f"the single axis {value!r}"
    return type(value).__name__ + (
        f" of shape {np.shape(value)}" if isinstance(value, (jax.Array, np.ndarray)) else ""
    )


def abstract(specs: Any) -> Any:
    """Return a tree of `ArraySpec`s as `jax.ShapeDtypeStruct`s, for `jax.eval_shape`."""
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs, is_leaf=_is_spec
    )


def initialiser(specs: Any) -> Callable[[Any], Any]:
    """Return the function from a key to the arrays of a tree of `ArraySpec`s.

    A leaf's key depends on its path alone, so adding a parameter changes no other.

    Raises:
      StrategyError: leaves without `init`; all of them at once.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(specs, is_leaf=_is_spec)
    missing = [
        Problem(
            error=StrategyError,
            what="the ArraySpec has no init",
            path=path_text(path),
            fix="ArraySpec(..., init=jax.nn.initializers.…)",
        )
        for path, spec in pairs
        if not isinstance(spec, ArraySpec) or spec.init is None
    ]
    raise_problems(missing)

    def init(key: Any) -> Any:
        return jax.tree.unflatten(
            structure, [_initialised(key, path, spec) for path, spec in pairs]
        )

    return init


def _initialised(key: Any, path: Sequence[Any], spec: ArraySpec) -> Any:
    assert spec.init is not None
    # 64 bits of a digest of the path with its kinds of keys ("a/b" is not a, b): among a million leaves no two agree.
    digest = hashlib.sha256(jax.tree_util.keystr(tuple(path)).encode()).digest()
    for at in (0, 4):
        key = jax.random.fold_in(key, int.from_bytes(digest[at : at + 4], "big"))
    made = spec.init(key, spec.shape, spec.dtype)
    narrowed = jax.dtypes.canonicalize_dtype(spec.dtype)
    if made.dtype == narrowed != jax.numpy.dtype(spec.dtype):
        raise StrategyError(
            f"the ArraySpec says {jax.numpy.dtype(spec.dtype)}, which JAX makes {narrowed} while jax_enable_x64 is off",
            path=path_text(path),
            fix=f'write {narrowed}, or call jax.config.update("jax_enable_x64", True) before the first array is made',
        )
    if np.shape(made) != spec.shape or made.dtype != jax.numpy.dtype(spec.dtype):
        raise RankMismatchError(
            f"init made {made.dtype} of shape {np.shape(made)}, the ArraySpec says {jax.numpy.dtype(spec.dtype)} of shape {spec.shape}",
            path=path_text(path),
            fix="return an array of the shape and dtype that init is given",
        )
    return made


def stack_specs(specs: Any, layers: int) -> Any:
    """Put `LAYERS` in front of every `ArraySpec` of a tree: the parameters of `layers` equal layers, for `jax.lax.scan`.

    Raises:
      StrategyError: a leaf that is no `ArraySpec`, or a number of layers that is not positive and whole.
    """
    return jax.tree.map(lambda spec: stacked(spec, layers), specs, is_leaf=_is_spec)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PathMatch:
    """What path rules made of a tree.

    Attributes:
      annotations: the tree of annotations or specs, as `shardings` takes it; `Replicated` where no rule matched.
      unmatched: paths that no rule matched.
      unused: patterns that match no path.
      shadowed: patterns that match paths, all of which earlier patterns took.
    """

    annotations: Any
    unmatched: tuple[str, ...]
    unused: tuple[str, ...]
    shadowed: tuple[str, ...]


def _pair_of(at: int, rule: Any) -> tuple[Any, Any]:
    if not isinstance(rule, tuple | list) or len(rule) != 2:
        raise StrategyError(
            f"rule {at}: {rule!r} is not a pair",
            fix='write [("pattern", annotation), …]; of a dict, its items()',
        )
    return rule[0], rule[1]


def match_paths(tree: Any, rules: Iterable[tuple[str, Any]], *, strict: bool = True) -> PathMatch:
    """Annotate a tree by its paths: the first `(pattern, annotation or spec)` whose pattern is found in the path wins.

    Scalars need no rule. A pattern is searched (`re.search`) in the "/"-joined path. It comes from the program, so it may use
    all of Python's `re`, and takes as long as that does; patterns in strategy files are limited, see `path_patterns`.

    Args:
      tree: arrays or anything else with a shape.
      rules: pairs in order of precedence.
      strict: raise for unmatched paths; else replicate those arrays, and list them in `unmatched`.

    Raises:
      StrategyError: unmatched paths (all at once), a bad pattern, a bad annotation.
    """
    compiled = [compile_rule(at, *_pair_of(at, rule)) for at, rule in enumerate(rules)]
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_spec)
    hits, wins = [0] * len(compiled), [0] * len(compiled)
    found: list[Any] = []
    unmatched: list[str] = []
    for path, leaf in pairs:
        text = path_text(path)
        matching = [at for at, (pattern, _) in enumerate(compiled) if pattern.search(text)]
        for at in matching:
            hits[at] += 1
        if matching:
            wins[matching[0]] += 1
            found.append(compiled[matching[0]][1])
        elif np.shape(leaf) == ():
            found.append(())
        else:
            unmatched.append(text)
            found.append(Replicated)
    if strict:
        raise_problems(
            [_unmatched(text, [pattern.pattern for pattern, _ in compiled]) for text in unmatched]
        )
    names = [pattern.pattern for pattern, _ in compiled]
    return PathMatch(
        annotations=jax.tree.unflatten(structure, found),
        unmatched=tuple(unmatched),
        unused=tuple(name for name, hit in zip(names, hits, strict=True) if not hit),
        shadowed=tuple(
            name for name, hit, win in zip(names, hits, wins, strict=True) if hit and not win
        ),
    )


def compile_rule(at: int, pattern: str, annotation: Any) -> tuple[re.Pattern[str], Any]:
    """Return the `at`-th of several rules `pattern -> annotation`, checked.

    Raises:
      StrategyError: a bad pattern or annotation.
    """
    return compile_pattern(pattern, where=f"rule {at}: "), as_annotation(annotation)


def compile_pattern(text: str, *, where: str = "") -> re.Pattern[str]:
    """Return a compiled pattern.

    Raises:
      StrategyError: it is no regular expression.
    """
    if not isinstance(text, str):
        raise StrategyError(
            f"{where}{text!r} is not a pattern", fix="write a regular expression as text"
        )
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        said, at = (error.msg, error.pos or 0) if isinstance(error, re.error) else (str(error), 0)
        raise StrategyError(
            f"{where}not a regular expression: {said}",
            snippet=f"{text}\n{' ' * at}^",
            fix="see Python's re",
        ) from error


def _unmatched(path: str, patterns: list[str]) -> Problem:
    return Problem(
        error=StrategyError,
        what="no path rule matches",
        path=path,
        rule="patterns in order: " + ", ".join(patterns),
        fix='add a rule for it, or (".*", Replicated) at the end to replicate the rest on purpose',
    )
