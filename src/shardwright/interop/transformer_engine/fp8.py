"""The quantized matmul as in TransformerEngine: the "gradient" of a state is the new state.

The state of a matmul is in the collection `fp8_metas`. It has a scale and an amax history for each
of these: the input (`x`), the kernel, and the gradient of the result (`grad`). The gradient of the
collection is the new state. Do not average this gradient, and do not pass it to an optimizer:

    grads = jax.grad(loss)(variables)
    variables["fp8_metas"] = grads["fp8_metas"]

If a module is called twice, or in a scan without a state per step, JAX adds the gradients of its
state. Their sum has no meaning as a state. `shardwright.layers.fp8` detects this.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.errors import LayerError
from shardwright.interop.transformer_engine.recipe import current_recipe
from shardwright.interop.transformer_engine.sharding import current_settings
from shardwright.layers import fp8
from shardwright.layers.dense import check_kernel
from shardwright.layers.fp8 import DelayedScaling, TensorScaling, matmuls, scale_of
from shardwright.layers.fp8.dense import static_call
from shardwright.layers.fp8.matmuls import Fp8Call
from shardwright.layers.fp8.recipe import largest
from shardwright.layers.fp8.weights import Shards
from shardwright.manager import context

# The states of x, of the kernel and of the gradient. Each has a `scale` of shape `[1]`, and a
# `history` of shape `[history]`.
Metas = tuple[TensorScaling, TensorScaling, TensorScaling]


def quantized_dense(
    x: Any,
    kernel: Any,
    metas: Metas | None,
    *,
    recipe: fp8.Recipe,
    contract: int = 1,
    name: str = "kernel",
    shards: tuple[Shards | None, Shards | None] = (None, None),
) -> Any:
    """Return `x @ kernel` in fp8, in the dtype of `x`.

    Args:
      x: `[..., *inputs]`.
      kernel: `[*inputs, *outputs]`, in the dtype of the parameters.
      metas: The state of delayed scaling; its gradient is the state after this call. None for other
        recipes.
      recipe: The recipe.
      contract: Number of dims that are contracted.
      name: Name of the kernel, for messages.
      shards: Mesh axes of `x` and of the kernel, as their logical names say. They are used only to
        check the sizes of blocks.

    Raises:
      LayerError: The recipe has blocks, and the size of a contracted dim on a device is not a
        multiple of 32.
    """
    if metas is None:
        check_kernel(np.shape(x), np.shape(kernel), contract, path=name, tokens=True)
    call = static_call(x, {name: kernel}, recipe=recipe, contract=contract, dtype=x.dtype)
    static = dataclasses.replace(call.kernels[0], shards=shards[1])
    pipeline, resource = call.pipeline, current_settings().resource
    if context.current() is None and resource is not None:
        # As in TransformerEngine, an amax is the maximum over all mesh axes except that of the
        # pipeline.
        pipeline = () if resource.pp_resource is None else (resource.pp_resource,)
    # The logical names of TransformerEngine decide the sharding, so the matmul gets no manager.
    call = dataclasses.replace(
        call, manager=None, pipeline=pipeline, x_shards=shards[0], kernels=(static,)
    )
    return _dense(x, kernel, metas, call)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dense(x: Any, kernel: Any, metas: Metas | None, call: Fp8Call) -> Any:
    return matmuls.forward(call, x, (kernel,), _scales(metas), keep=False).ys[0]


def _forward(x: Any, kernel: Any, metas: Metas | None, call: Fp8Call) -> Any:
    result = matmuls.forward(call, x, (kernel,), _scales(metas), keep=True)
    if metas is None:
        return result.ys[0], (result.kept, None)
    form = call.recipe.forward
    # The backward pass updates the state of the gradient, because the gradient is known only there.
    after = (
        _stepped(call, metas[0], result.amax_x, form),
        _stepped(call, metas[1], result.amax_kernels[0], form),
        metas[2],
    )
    return result.ys[0], (result.kept, after)


def _backward(call: Fp8Call, kept: Any, grad: Any) -> Any:
    operands, metas = kept
    if metas is None:
        grads = matmuls.backward(call, operands, (grad,), (None,))
        return grads.x, grads.kernels[0], None
    grads = matmuls.backward(call, operands, (grad,), (metas[2].scale[0],))
    # The "gradient" of the state is the new state, and not a derivative.
    last = _stepped(call, metas[2], grads.amax[0], call.recipe.backward)
    return grads.x, grads.kernels[0], (*metas[:2], last)


_dense.defvjp(_forward, _backward)


def _scales(metas: Metas | None) -> Any:
    if metas is None:
        return None, (None,)
    return metas[0].scale[0], (metas[1].scale[0],)


def _stepped(call: Fp8Call, state: TensorScaling, amax: Any, form: str) -> TensorScaling:
    assert isinstance(call.recipe, fp8.DelayedScaling)
    own = TensorScaling(scale=state.scale[0], history=state.history)
    new = fp8.step(call.recipe, own, amax, form)
    return TensorScaling(scale=jnp.reshape(new.scale, (1,)), history=new.history)


# The collection of the states of fp8 recipes.
NVTE_FP8_COLLECTION_NAME: Final = "fp8_metas"


def update_collections(new: Mapping[str, Any], original: Mapping[str, Any]) -> Any:
    """Return `original` with the entries of `new`. Neither argument is changed.

    Args:
      new: The entries that replace those of `original`.
      original: A dict or flax's `FrozenDict`. The result has this type too.
    """
    merged: dict[str, Any] = {**original, **new}
    kind: Any = type(original)
    return merged if kind is dict else kind(merged)


_AMAX: Final = re.compile(r"(.*)amax(.*)")


def update_fp8_metas(state: Any) -> Any:
    """Compute the scales of a state in the layout of TransformerEngine before 2.0.

    In that layout, `amax` is `[rows, history]`, and `scale` and `scale_inv` are `[rows, 1]`. The
    names may have a prefix and a postfix, as in `fp8_meta_amax_0`. Each matmul has three rows:
    input, kernel, gradient. The new scale is `largest / amax / 2^margin`, where `largest` is the
    largest number of the fp8 format. If amax is 0 or not finite, the old scale is kept. The recipe
    is that of the entered `autocast`, else `DelayedScaling()`.

    A state in the layout of TransformerEngine 2 needs no update: its gradient is the new state.

    Args:
      state: Nested mappings with leaves of these names. Other leaves are returned unchanged.
        `state` itself is not changed.

    Raises:
      LayerError: The state has the layout of TransformerEngine 2, `..._amax_history`, or an unknown
        layout. Or a shape does not fit. Or the recipe has no state.
    """
    recipe = current_recipe() or DelayedScaling()
    if not isinstance(recipe, DelayedScaling):
        raise LayerError(
            f"{type(recipe).__name__} has no state",
            path="state",
            fix="call update_fp8_metas only under DelayedScaling",
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
        match, own = _AMAX.fullmatch(name), f"{path}/{name}".strip("/")
        if match is None or isinstance(amax, Mapping):
            continue
        if name.endswith("_amax_history"):
            raise LayerError(
                "the state has the layout of TransformerEngine 2, in which the gradient of the "
                "state is already the new state",
                path=own,
                fix='variables["fp8_metas"] = grads["fp8_metas"], without update_fp8_metas',
            )
        scale, inverse = (f"{match[1]}{part}{match[2]}" for part in ("scale", "scale_inv"))
        if scale in node and inverse in node:
            new[scale] = _row_scales(recipe, amax, node[scale], own)
            # The old layout stores the scale and its inverse, and readers expect them to agree.
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
            fix="for n matmuls, give amax the shape [3 n, history], and scale [3 n, 1]",
        )
    amax = jnp.asarray(amax)
    # The newest amax is entry 0 of the history.
    if recipe.algorithm == "most_recent":
        remembered = amax[:, :1]
    else:
        remembered = jnp.max(amax, axis=-1, keepdims=True)
    # Rows come in threes: input, kernel and gradient of one matmul.
    forms = (recipe.forward, recipe.forward, recipe.backward)
    limits = jnp.tile(jnp.array([[largest(form)] for form in forms], jnp.float32), (rows // 3, 1))
    return scale_of(remembered, limits, margin=recipe.margin, old=jnp.asarray(scale))
