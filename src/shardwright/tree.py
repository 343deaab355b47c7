"""Trees: annotations beside arrays, path rules, stacks of layers, optimizer state."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardwright.annotations import ArraySpec, as_annotation, describe, is_annotation, stacked
from shardwright.errors import Problem, RankMismatchError, StrategyError, raise_problems


def path_text(path: Sequence[Any]) -> str:
    """Return a key path as `blocks/0/attn/q`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Annotations and what lies below each of them: an array, or a subtree that the annotation covers as a prefix.

    Attributes:
      structure: structure of the tree of annotations.
      annotations: its leaves.
      below: for each of them, the part of the other tree at its place.
    """

    structure: Any
    annotations: list[Any]
    below: list[Any]


def pair(tree: Any, annotations: Any = None) -> Paired:
    """Pair each annotation with the part of a tree that it covers; without annotations the leaves bring their own.

    Raises:
      StrategyError: the structures differ, or a leaf is no annotation.
    """
    if annotations is None:
        leaves, structure = jax.tree.flatten(tree, is_leaf=_is_spec)
        own = [leaf.axes if isinstance(leaf, ArraySpec) else leaf for leaf in leaves]
        return Paired(structure=structure, annotations=own, below=leaves)
    if isinstance(annotations, list) and not isinstance(tree, (list, tuple, dict)):
        annotations = as_annotation(annotations)
    found, structure = jax.tree.flatten(annotations, is_leaf=is_annotation)
    try:
        below = structure.flatten_up_to(tree)  # type: ignore[attr-defined]
    except ValueError as error:
        raise StrategyError(
            f"the tree of annotations does not fit the tree: {str(error).splitlines()[0]}",
            fix="annotate every leaf, or a whole subtree with one annotation; inside a tree annotations are tuples, not lists",
        ) from error
    return Paired(structure=structure, annotations=found, below=below)


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

    Raises:
      StrategyError: the structures differ, or leaves have no annotation; all of them at once.
    """
    if annotations is None:
        pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_spec)
        leaves = [Leaf(path=path_text(path), value=value, annotation=value) for path, value in pairs]
    else:
        paired = pair(tree, annotations)
        paths, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(paired.structure, range(len(paired.below))))
        leaves = []
        for (path, _), annotation, part in zip(paths, paired.annotations, paired.below, strict=True):
            for below, value in jax.tree_util.tree_flatten_with_path(part, is_leaf=_is_spec)[0]:
                leaves.append(Leaf(path=path_text((*path, *below)), value=value, annotation=annotation))
    raise_problems([_unannotated(leaf) for leaf in leaves if not is_annotation(leaf.annotation)])
    return leaves


def _unannotated(leaf: Leaf) -> Problem:
    return Problem(
        error=StrategyError,
        what=f"{type(leaf.annotation).__name__} is not an annotation",
        path=leaf.path,
        fix="pass annotations=, or make the leaf an ArraySpec; inside a tree annotations are tuples of axes or layouts",
    )


def abstract(specs: Any) -> Any:
    """Return a tree of `ArraySpec`s as `jax.ShapeDtypeStruct`s, for `jax.eval_shape`."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs, is_leaf=_is_spec)


def initialiser(specs: Any) -> Callable[[Any], Any]:
    """Return the function from a key to the arrays of a tree of `ArraySpec`s.

    A leaf's key depends on its path alone, so adding a parameter changes no other.

    Raises:
      StrategyError: leaves without `init`; all of them at once.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(specs, is_leaf=_is_spec)
    missing = [
        Problem(
            error=StrategyError, what="the ArraySpec has no init", path=path_text(path), fix="ArraySpec(..., init=jax.nn.initializers.…)"
        )
        for path, spec in pairs
        if not isinstance(spec, ArraySpec) or spec.init is None
    ]
    raise_problems(missing)

    def init(key: Any) -> Any:
        leaves = [spec.init(jax.random.fold_in(key, zlib.crc32(path_text(path).encode())), spec.shape, spec.dtype) for path, spec in pairs]
        return jax.tree.unflatten(structure, leaves)

    return init


def stack_specs(specs: Any, layers: int) -> Any:
    """Put `LAYERS` in front of every `ArraySpec` of a tree: the parameters of `layers` equal layers, for `jax.lax.scan`."""
    return jax.tree.map(lambda spec: stacked(spec, layers), specs, is_leaf=_is_spec)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PathMatch:
    """What path rules made of a tree.

    Attributes:
      annotations: the tree of annotations or specs; None where no rule matched.
      unmatched: paths that no rule matched.
      unused: patterns that match no path.
      shadowed: patterns that match paths, all of which earlier patterns took.
    """

    annotations: Any
    unmatched: tuple[str, ...]
    unused: tuple[str, ...]
    shadowed: tuple[str, ...]


def match_paths(tree: Any, rules: Iterable[tuple[str, Any]], *, strict: bool = True) -> PathMatch:
    """Annotate a tree by its paths: the first `(pattern, annotation or spec)` whose pattern is found in the path wins.

    Scalars need no rule. A pattern is searched (`re.search`) in the "/"-joined path.

    Args:
      tree: arrays or anything else with a shape.
      rules: pairs in order of precedence.
      strict: raise for unmatched paths; else leave None there.

    Raises:
      StrategyError: unmatched paths (all at once), a bad pattern, a bad annotation.
    """
    compiled = [_compiled(at, pattern, annotation) for at, (pattern, annotation) in enumerate(rules)]
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
            found.append(None)
    if strict:
        raise_problems([_unmatched(text, [pattern.pattern for pattern, _ in compiled]) for text in unmatched])
    names = [pattern.pattern for pattern, _ in compiled]
    return PathMatch(
        annotations=jax.tree.unflatten(structure, found),
        unmatched=tuple(unmatched),
        unused=tuple(name for name, hit in zip(names, hits, strict=True) if not hit),
        shadowed=tuple(name for name, hit, win in zip(names, hits, wins, strict=True) if hit and not win),
    )


def _compiled(at: int, pattern: str, annotation: Any) -> tuple[re.Pattern[str], Any]:
    try:
        return re.compile(pattern), as_annotation(annotation)
    except re.error as error:
        raise StrategyError(
            f"rule {at}: not a regular expression: {error.msg}", snippet=f"{pattern}\n{' ' * (error.pos or 0)}^", fix="see Python's re"
        ) from error


def _unmatched(path: str, patterns: list[str]) -> Problem:
    return Problem(
        error=StrategyError,
        what="no path rule matches",
        path=path,
        rule="patterns in order: " + ", ".join(patterns),
        fix='add a rule for it, or (".*", Replicated) at the end to replicate the rest on purpose',
    )


def annotate_state(state: Any, params: Any, annotations: Any = None, *, overrides: Mapping[str, Any] | None = None) -> Any:
    """Annotate an optimizer's state like the parameters that it follows.

    A leaf follows the parameter whose path ends its own (the longest such), if their shapes agree. Scalars need nothing.

    Args:
      state: the state, or `jax.eval_shape(tx.init, params)`.
      params: arrays, `ShapeDtypeStruct`s or `ArraySpec`s.
      annotations: of the parameters; absent where they are `ArraySpec`s.
      overrides: pattern -> annotation for state leaves that follow no parameter (`re.search` in the state's path).

    Raises:
      StrategyError, RankMismatchError: leaves that follow nothing, each with its path; all at once.
    """
    known = _by_path(params, annotations)
    pairs, structure = jax.tree_util.tree_flatten_with_path(state)
    patterns = [_compiled(at, pattern, one) for at, (pattern, one) in enumerate((overrides or {}).items())]
    found: list[Any] = []
    problems: list[Problem] = []
    for path, leaf in pairs:
        text = path_text(path)
        override = next((one for pattern, one in patterns if pattern.search(text)), None)
        if override is not None or np.shape(leaf) == ():
            found.append(() if override is None else override)
            continue
        owner = next((known[path[at:]] for at in range(len(path) + 1) if path[at:] in known), None)
        if owner is None or np.shape(owner.value) != np.shape(leaf):
            problems.append(_follows_nothing(text, leaf, owner))
            continue
        found.append(owner.annotation.axes if isinstance(owner.annotation, ArraySpec) else owner.annotation)
    raise_problems(problems)
    return jax.tree.unflatten(structure, found)


def _by_path(params: Any, annotations: Any) -> dict[tuple[Any, ...], Leaf]:
    leaves = annotated_leaves(params, annotations)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_spec)[0]]
    return {tuple(path): leaf for path, leaf in zip(paths, leaves, strict=True)}


def _follows_nothing(path: str, leaf: Any, owner: Leaf | None) -> Problem:
    if owner is None:
        what = f"state of shape {np.shape(leaf)} follows no parameter"
    else:
        follows = f"{owner.path} {describe(owner.annotation)} of shape {np.shape(owner.value)}"
        what = f"state of shape {np.shape(leaf)} differs from its parameter {follows}"
    return Problem(
        error=StrategyError if owner is None else RankMismatchError,
        what=what,
        path=path,
        fix=f"overrides={{{re.escape(path)!r}: (...)}} gives it an annotation of its own",
    )
