"""Trees by path: flatten to paths, map with paths, choose leaves by path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardwright.errors import StrategyError
from shardwright.resolution.patterns import compile_pattern


def tree_path_to_string(path: Sequence[Any], sep: str | None = None) -> Any:
    """Return a key path as a tuple of strings, or as one string joined by `sep`.

    >>> tree_path_to_string((jax.tree_util.DictKey("w"), jax.tree_util.SequenceKey(0)), sep="/")
    'w/0'
    """
    names = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
    return names if sep is None else sep.join(names)


def flatten_tree(
    xs: Any, is_leaf: Callable[[Any], bool] | None = None, sep: str | None = None
) -> dict[Any, Any]:
    """Return a tree as a flat dict from path to leaf, in flattening order.

    Paths are tuples of strings, or strings joined by `sep`.

    Raises:
      StrategyError: Two leaves have the same name, as in `{"a/b": 1, "a": {"b": 2}}` joined by "/".

    >>> flatten_tree({"attn": {"q": 1, "k": 2}}, sep="/")
    {'attn/k': 2, 'attn/q': 1}
    """
    flat: dict[Any, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(xs, is_leaf=is_leaf)[0]:
        name = tree_path_to_string(path, sep=sep)
        if name in flat:
            raise StrategyError(
                f"two leaves have the name {name!r}", fix="pass a sep that no key contains"
            )
        flat[name] = leaf
    return flat


def named_tree_map(
    f: Callable[..., Any],
    tree: Any,
    *rest: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    sep: str | None = None,
) -> Any:
    """Map `f(name, leaf, *others)` over a tree. Names are those of `tree_path_to_string`.

    >>> named_tree_map(lambda name, x: f"{name}={x}", {"a": 1, "b": [2]}, sep="/")
    {'a': 'a=1', 'b': ['b/0=2']}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: f(tree_path_to_string(path, sep=sep), *leaves),
        tree,
        *rest,
        is_leaf=is_leaf,
    )


def tree_apply(fns: Any, tree: Any) -> Any:
    """Call each function of one tree with the leaf at the same place of another.

    Raises:
      StrategyError: The structures differ. A function never gets a whole subtree.

    >>> tree_apply({"a": abs, "b": str}, {"a": -1, "b": -1})
    {'a': 1, 'b': '-1'}
    """
    structure: Any = jax.tree.structure(fns)
    if structure != jax.tree.structure(tree):
        raise StrategyError(
            f"the tree of functions does not fit the tree{_difference(fns, tree)}",
            fix="give one function per leaf",
        )
    return jax.tree.map(lambda fn, leaf: fn(leaf), fns, tree)


def _difference(fns: Any, tree: Any) -> str:
    """Describe the places that only one of two trees has."""
    functions, leaves = (flatten_tree(one_tree, sep="/") for one_tree in (fns, tree))
    parts = []
    for only, what in (
        ([name for name in functions if name not in leaves], "no leaf"),
        ([name for name in leaves if name not in functions], "no function"),
    ):
        if only:
            more = f" and {len(only) - 3} more" if len(only) > 3 else ""
            parts.append(f"{what} for {', '.join(repr(name) for name in only[:3])}{more}")
    return f": {'; '.join(parts)}" if parts else ": the paths are the same, the containers differ"


def get_weight_decay_mask(exclusions: Sequence[str]) -> Callable[[Any], Any]:
    """Return a function for `optax.add_decayed_weights(mask=...)`.

    It maps parameters to a tree of bools: False (no decay) where `re.search` finds one of the
    patterns in the "/"-joined path, else True.

    Raises:
      StrategyError: A pattern is invalid, or `exclusions` is one string.

    >>> get_weight_decay_mask(["bias$", "norm"])({"up": {"kernel": 1, "bias": 1}, "norm": 1})
    {'norm': False, 'up': {'bias': False, 'kernel': True}}
    """
    if isinstance(exclusions, str):
        raise StrategyError(
            f"exclusions is the text {exclusions!r}, not patterns", fix=f"write [{exclusions!r}]"
        )
    patterns = [compile_pattern(exclusion) for exclusion in exclusions]

    def weight_decay_mask(params: Any) -> Any:
        return named_tree_map(
            lambda name, _: not any(pattern.search(name) for pattern in patterns), params, sep="/"
        )

    return weight_decay_mask
