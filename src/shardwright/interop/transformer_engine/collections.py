"""Collections of variables that TransformerEngine keeps beside the parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from shardwright.errors import LayerError
from shardwright.interop.transformer_engine.recipe import current_recipe
from shardwright.layers.fp8 import DelayedScaling, scale_of
from shardwright.layers.fp8.recipe import largest

# The collection of the states of fp8 recipes.
NVTE_FP8_COLLECTION_NAME: Final = "fp8_metas"


def update_collections(new: Mapping[str, Any], original: Mapping[str, Any]) -> Any:
    """Return `original` with the entries of `new`; neither is changed.

    Args:
      new: Its entries replace those of `original`.
      original: Its type is kept, a dict or flax's `FrozenDict`.

    Raises:
      LayerError: An argument is not a mapping.
    """
    for name, value in (("new", new), ("original", original)):
        if not isinstance(value, Mapping):
            raise LayerError(
                f"{name} is a {type(value).__name__}", path=name, fix="pass a dict of variables"
            )
    merged: dict[str, Any] = {**original, **new}
    kind: Any = type(original)
    return merged if kind is dict else kind(merged)


_AMAX: Final = re.compile(r"(.*)amax(.*)")


def update_fp8_metas(state: Any) -> Any:
    """Compute the scales of a state in the layout of TransformerEngine before 2.0.

    That layout has `amax`, `[rows, history]`, `scale` and `scale_inv`, `[rows, 1]`, perhaps with a
    prefix and a postfix such as `fp8_meta_amax_0`. Rows are (input, kernel, gradient) of each
    matmul. The new scale is `largest / amax / 2^margin`, where `largest` is the largest number of
    the format. Where amax is 0 or not finite, the old scale is kept. The recipe is the one that
    `autocast` has entered, else `DelayedScaling()`.

    A state in the new layout needs no update, because its gradient is the new state.

    Args:
      state: Nested mappings with such leaves; other leaves stay as they are. It is not changed.

    Raises:
      LayerError: The state has the new layout, `..._amax_history`, or neither layout. Or a shape
        does not fit. Or the recipe has no state.
    """
    recipe = current_recipe() or DelayedScaling()
    if not isinstance(recipe, DelayedScaling):
        raise LayerError(
            f"{type(recipe).__name__} has no state", path="state", fix="call it for DelayedScaling"
        )
    new, updated = _updated(recipe, state, "")
    if not updated:
        raise LayerError(
            "the state has no amax beside a scale and a scale_inv",
            path="state",
            fix="pass the collection of the states of fp8 recipes",
        )
    return new


def _updated(recipe: DelayedScaling, node: Any, path: str) -> tuple[Any, int]:
    """Return the new state below a path, and how many matmuls were updated."""
    if not isinstance(node, Mapping):
        return node, 0
    new, updated = {}, 0
    for name, value in node.items():
        new[name], count = _updated(recipe, value, f"{path}/{name}".strip("/"))
        updated += count
    for name, amax in node.items():
        match = _AMAX.fullmatch(name)
        if match is None or isinstance(amax, Mapping):
            continue
        if name.endswith("_amax_history"):
            raise LayerError(
                "the state has the layout of TransformerEngine 2, in which its gradient is already "
                "the new state",
                path=f"{path}/{name}".strip("/"),
                fix='variables["fp8_metas"] = grads["fp8_metas"], without update_fp8_metas',
            )
        scale, inverse = (f"{match[1]}{part}{match[2]}" for part in ("scale", "scale_inv"))
        if scale in node and inverse in node:
            new[scale] = _row_scales(recipe, amax, node[scale], f"{path}/{name}".strip("/"))
            new[inverse] = 1 / new[scale]
            updated += 1
    kind: Any = type(node)
    return (new if kind is dict else kind(new)), updated


def _row_scales(recipe: DelayedScaling, amax: Any, scale: Any, path: str) -> Any:
    rows = np.shape(amax)[0] if np.ndim(amax) == 2 else 0
    if not rows or rows % 3 or np.shape(scale) != (rows, 1):
        raise LayerError(
            f"amax has shape {np.shape(amax)}, and scale {np.shape(scale)}",
            path=path,
            fix="give (input, kernel, gradient) of each matmul a row: [3 n, history] and [3 n, 1]",
        )
    amax = jnp.asarray(amax)
    if recipe.algorithm == "most_recent":
        remembered = amax[:, :1]
    else:
        remembered = jnp.max(amax, axis=-1, keepdims=True)
    forms = (recipe.forward, recipe.forward, recipe.backward)
    limits = jnp.tile(jnp.array([[largest(form)] for form in forms], jnp.float32), (rows // 3, 1))
    return scale_of(remembered, limits, margin=recipe.margin, old=jnp.asarray(scale))
