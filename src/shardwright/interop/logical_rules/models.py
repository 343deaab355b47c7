"""The common code of bridges that read the names of a model's arrays, and place them."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardwright.errors import Problem, StrategyError, UnknownAxisError, raise_problems
from shardwright.interop.logical_rules.names import Names, check_names
from shardwright.interop.logical_rules.to_rules import check_manager
from shardwright.trees.factored_weights import annotate_parts
from shardwright.trees.paths import path_text

if TYPE_CHECKING:
    from shardwright.manager.manager import PartitionManager


# As in pyproject.toml. `pip install haliax` would give the last release, which is too old.
_REQUIREMENTS = {
    "equinox": "equinox>=0.11",
    "flax": "flax>=0.12",
    "haliax": "haliax>=1.4.dev453",
    "safetensors": "safetensors>=0.8",
}


def library(module: str) -> Any:
    """Import and return a module of the library that a bridge needs.

    Raises:
      ImportError: The library is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        text = f"this bridge needs {name}: python -m pip install '{_REQUIREMENTS[name]}'"
        raise ImportError(text) from error


def place(values: Any, pm: PartitionManager, annotations: Any) -> Any:
    """Place a tree of arrays as parameters.

    Raises:
      StrategyError: `pm` is not a manager.
    """
    check_manager(pm)
    return jax.device_put(values, pm.shardings(values, annotations))


def annotate_boxes(
    tree: Any,
    names: Names,
    *,
    is_box: Callable[[Any], bool],
    value_of: Callable[[Any], Any],
    axes_of: Callable[[Any, str, list[Problem], tuple[int, ...]], Any],
    is_named: Callable[[Any], bool],
    moments: Mapping[str, Any],
    fix: str,
) -> Any:
    """Return the annotation of each array of a tree whose arrays may be in boxes.

    A box is an object of the library that holds an array and the names of its dims.

    Args:
      tree: The tree.
      names: Name in the model -> (axis, role), or an axis for both roles.
      is_box: Whether a node is a box.
      value_of: Function that returns the content of a box, or any other leaf unchanged. In the
        state of an optimizer, the content of a box may be several arrays, such as the two factors
        of a moment.
      axes_of: Function of a leaf, its path, a list of problems and a shape. The function returns
        the annotation of an array of this shape in the leaf, or appends a problem.
      is_named: Whether a leaf has names.
      moments: Path -> annotation, for arrays whose boxes have the names of their parameter's dims.
      fix: How to fix a model in which no leaf has names.

    Raises:
      ShardingError: `names` is not valid, or there are problems; all are reported at once.
    """
    check_names(names)
    problems: list[Problem] = []
    annotations = []
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_box)
    for path, leaf in leaves:
        text = path_text(path)
        pairs, inner = jax.tree_util.tree_flatten_with_path(value_of(leaf))
        # A factored moment has the box of its parameter, but not all dims of the parameter. So
        # first look up the path of the moment.
        own = [moments.get(path_text((*path, *below))) for below, _ in pairs]
        if None in own:
            of_shape = functools.partial(axes_of, leaf, text, problems)
            own = annotate_parts(value_of(leaf), of_shape, text, problems)
        annotations.append(jax.tree.unflatten(inner, own))
    raise_problems(by_name(problems))
    check_used(
        names,
        is_named=any(is_named(leaf) for _, leaf in leaves),
        arrays=[value_of(leaf) for _, leaf in leaves],
        fix=fix,
    )
    return jax.tree.unflatten(structure, annotations)


def by_name(problems: Sequence[Problem]) -> list[Problem]:
    """Return one problem for each unknown name, with the number of arrays that have it."""
    places: dict[str, set[str]] = {}
    for problem in problems:
        places.setdefault(problem.what, set()).add(problem.path)
    grouped: dict[str, Problem] = {}
    for at, problem in enumerate(problems):
        is_name, count = problem.error is UnknownAxisError, len(places[problem.what])
        # A name that `names` lacks is a problem in every array that has it, so one line for it is
        # enough.
        what = f"{problem.what}; {count} arrays have it" if is_name and count > 1 else problem.what
        key = problem.what if is_name else str(at)
        grouped.setdefault(key, dataclasses.replace(problem, what=what))
    return [*grouped.values()]


def check_used(names: Names, *, is_named: bool, arrays: Any, fix: str) -> None:
    """Check that a model has names at all, so that it is not replicated by mistake.

    Args:
      names: The names that the caller gives.
      is_named: Whether an array of the model has names.
      arrays: The arrays of the model, as a tree.
      fix: What to do.

    Raises:
      StrategyError: The caller gives names, and no array of the model has any.
    """
    # Scalars have no dims to name.
    if names and not is_named and any(np.ndim(leaf) for leaf in jax.tree.leaves(arrays)):
        what = "no array of the model has names, so all of them would be replicated"
        raise StrategyError(what, fix=f"{fix}\nor pass names={{}} to replicate them")
