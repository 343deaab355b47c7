"""The matmul of a module: in fp8 if `autocast` has entered a recipe."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from shardwright.errors import LayerError
from shardwright.interop.transformer_engine.collections import NVTE_FP8_COLLECTION_NAME
from shardwright.interop.transformer_engine.fp8 import quantized_dense
from shardwright.interop.transformer_engine.recipe import current_recipe
from shardwright.interop.transformer_engine.sharding import shards_of
from shardwright.layers import dense
from shardwright.layers.fp8 import BlockScaling, DelayedScaling, TensorScaling


def matmul(
    module: Any,
    x: Any,
    kernel: Any,
    *,
    contract: int = 1,
    axes: tuple[Any, Any] = (None, None),
    name: str = "kernel",
    postfix: str = "",
    grad_postfix: str | None = None,
) -> Any:
    """Return the matmul of a module with its kernel, in the dtype of `x`.

    Under delayed scaling the module has the variables `{x,kernel,grad}{postfix}_scale`, `[1]`, and
    `..._amax_history`, `[history]`, in the collection `fp8_metas`.

    Args:
      module: The module, which creates or reads the variables.
      x: `[..., *inputs]`.
      kernel: `[*inputs, *outputs]`.
      contract: Number of dims that are contracted.
      axes: Logical names of `x` and of the kernel; Nones if they have none.
      name: Name of the kernel, for messages.
      postfix: Tells the matmuls of one module apart.
      grad_postfix: The same for the gradient of the result. Defaults to `postfix`.
    """
    recipe = current_recipe()
    if recipe is None:
        return dense.dense(x, kernel, contract=contract)
    metas = None
    if isinstance(recipe, DelayedScaling):
        last = postfix if grad_postfix is None else grad_postfix
        metas = (
            _scaling(module, f"x{postfix}", recipe),
            _scaling(module, f"kernel{postfix}", recipe),
            _scaling(module, f"grad{last}", recipe),
        )
    options: dict[str, Any] = {"contract": contract, "name": "/".join((*module.path, name))}
    if isinstance(recipe, BlockScaling):
        options["shards"] = (
            shards_of(axes[0], x.shape, role="activation"),
            shards_of(axes[1], kernel.shape, role="param"),
        )
    return quantized_dense(x, kernel, metas, recipe=recipe, **options)


def _scaling(module: Any, name: str, recipe: DelayedScaling) -> TensorScaling:
    """Create or read the scale and the history of one tensor."""
    collection = NVTE_FP8_COLLECTION_NAME
    scale = module.variable(collection, f"{name}_scale", jnp.ones, (1,), jnp.float32)
    history = module.variable(
        collection, f"{name}_amax_history", jnp.zeros, (recipe.history,), jnp.float32
    )
    if history.value.shape != (recipe.history,):
        raise LayerError(
            f"the history has shape {history.value.shape}, and the recipe has "
            f"amax_history_len={recipe.history}",
            path="/".join((*module.path, f"{name}_amax_history")),
            fix="enter the recipe that the variables were created with",
        )
    return TensorScaling(scale=scale.value, history=history.value)
