"""Paths in a tree, and rules that annotate the arrays of a tree by their paths."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from shardwright.errors import Problem, StrategyError, raise_problems
from shardwright.resolution.patterns import compile_pattern
from shardwright.vocabulary.annotations import ArraySpec, as_annotation
from shardwright.vocabulary.integers import with_article
from shardwright.vocabulary.layouts import Replicated


def path_text(path: Sequence[Any]) -> str:
    """Return a key path as text, such as `blocks/0/attn/q`."""
    # JAX does not escape a "/" in a key, so two paths may have the same text.
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def is_array_spec(value: Any) -> bool:
    """Tell whether a value is an `ArraySpec`, which is a leaf of every tree."""
    return isinstance(value, ArraySpec)


def spread(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """For each leaf of a tree, return the leaf of a prefix tree that covers it.

    Raises:
      ValueError: `prefix` is not a prefix of the tree. JAX's message says where.
    """
    covers, structure = jax.tree.flatten(prefix, is_leaf=is_leaf)
    parts = structure.flatten_up_to(tree)  # type: ignore[attr-defined]
    return [
        cover
        for cover, part in zip(covers, parts, strict=True)
        for _ in range(len(jax.tree.leaves(part)))
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PathMatch:
    """The annotations that path rules give to a tree.

    Attributes:
      annotations: Tree of annotations or specs, as `shardings` takes it. Unmatched arrays have
        `Replicated`.
      unmatched: Paths that match no rule.
      unused: Patterns that match no path.
      shadowed: Patterns whose paths all match an earlier pattern.
    """

    annotations: Any
    unmatched: tuple[str, ...]
    unused: tuple[str, ...]
    shadowed: tuple[str, ...]


def match_paths(tree: Any, rules: Iterable[tuple[str, Any]], *, strict: bool = True) -> PathMatch:
    """Annotate each array by the first rule whose pattern matches its path.

    Patterns are searched (`re.search`) in the "/"-joined path. Scalars need no rule.

    Args:
      tree: Arrays, or other values with a shape.
      rules: Pairs of pattern and annotation (or `PartitionSpec`), highest precedence first.
      strict: Whether unmatched paths are an error. If false, the arrays of these paths are
        replicated and listed in `unmatched`.

    Raises:
      StrategyError: Paths match no rule, or a pattern or an annotation is invalid. The error names
        all unmatched paths.

    >>> import jax
    >>> from shardwright.vocabulary.axes import EMBED, VOCAB
    >>> tree = {"embed": jax.ShapeDtypeStruct((512, 64), "float32")}
    >>> match_paths(tree, [("embed", (VOCAB, EMBED))]).annotations
    {'embed': ('__VOCAB__', '__EMBED__')}
    """
    given: list[Any] = list(rules) if isinstance(rules, Iterable) else [rules]
    for place, rule in enumerate(given):
        if not isinstance(rule, tuple | list) or len(rule) != 2:
            fix = 'write [("pattern", annotation), …], or pass the items() of a dict'
            raise StrategyError(f"rule {place}: {rule!r} is not a pair", fix=fix)
    compiled = [compile_rule(place, *rule) for place, rule in enumerate(given)]
    names = [pattern.pattern for pattern, _ in compiled]
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_array_spec)
    matches, wins = [0] * len(compiled), [0] * len(compiled)
    annotations: list[Any] = []
    unmatched: list[str] = []
    for path, leaf in pairs:
        text = path_text(path)
        matching = [at for at, (pattern, _) in enumerate(compiled) if pattern.search(text)]
        for at in matching:
            matches[at] += 1
        if matching:
            wins[matching[0]] += 1
            annotations.append(compiled[matching[0]][1])
        elif np.shape(leaf) == ():
            annotations.append(())
        else:
            unmatched.append(text)
            annotations.append(Replicated)
    if strict:
        what, order = "no path rule matches", "patterns in order: " + ", ".join(names)
        fix = 'add a rule for it, or (".*", Replicated) at the end to replicate all other arrays'
        raise_problems(
            [
                Problem(error=StrategyError, what=what, path=text, rule=order, fix=fix)
                for text in unmatched
            ]
        )
    return PathMatch(
        annotations=jax.tree.unflatten(structure, annotations),
        unmatched=tuple(unmatched),
        unused=tuple(name for name, count in zip(names, matches, strict=True) if not count),
        shadowed=tuple(
            name for name, count, won in zip(names, matches, wins, strict=True) if count and not won
        ),
    )


def compile_rule(at: int, pattern: str, annotation: Any) -> tuple[re.Pattern[str], Any]:
    """Check the path rule at position `at`. Return its compiled pattern and its annotation.

    Raises:
      StrategyError: The pattern or the annotation is invalid.
    """
    return compile_pattern(pattern, where=f"rule {at}: "), as_annotation(annotation)


def structure_differences(structure: Any, value: Any) -> list[tuple[Any, str, str]]:
    """Return the places where a value does not have the nodes of a structure.

    A leaf of the structure stands for any subtree.

    Returns:
      Each entry has the key path, the node of the structure and the node of the value.
    """
    try:
        structure.flatten_up_to(value)
    except ValueError:
        # None cannot stand for a leaf, because for JAX None is an empty node.
        tree = jax.tree.unflatten(structure, [object()] * structure.num_leaves)
        return list(_differences(tree, value, ()))
    return []


def _differences(tree: Any, value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, str, str]]:
    old, old_node = _children(tree)
    new, new_node = _children(value)
    if old is None:
        return
    if new is None or type(tree) is not type(value):
        found = "an array" if new is None else with_article(type(value))
        yield path, with_article(type(tree)), found
        return
    if old.keys() == new.keys() and old_node != new_node:
        yield path, with_article(type(tree)), "one with other static fields"
    for key in dict.fromkeys((*old, *new)):
        if key not in new:
            yield (*path, key), "a value here", "no value"
        elif key not in old:
            yield (*path, key), "no value here", "one"
        else:
            yield from _differences(old[key], new[key], (*path, key))


def _children(node: Any) -> tuple[dict[Any, Any] | None, Any]:
    """Return the children of a node by key, and the structure of the node.

    A leaf has None in place of children.
    """
    # `is_leaf` stops below the node itself, so this flattens a single level.
    children, structure = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda x: x is not node
    )
    if any(not path for path, _ in children):
        return None, structure
    return {path[0]: child for path, child in children}, structure
