"""The quantized matmul with TransformerEngine's contract: a state's gradient is the new state.

The state of a matmul is the collection `fp8_metas`: a scale and a history of largest values for
its input (`x`), its kernel and the gradient of its result (`grad`). Its gradient is the new state.
Do not average this gradient, and do not pass it to an optimizer:

    grads = jax.grad(loss)(variables)
    variables["fp8_metas"] = grads["fp8_metas"]

If a module is called twice, or in a scan without a state per step, JAX adds the gradients of its
state. The sum has no meaning as a state. `shardwright.layers.fp8` detects this.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.layers import fp8
from shardwright.layers.dense import check_kernel
from shardwright.layers.fp8 import TensorScaling, matmuls
from shardwright.layers.fp8.dense import static_call
from shardwright.layers.fp8.matmuls import Fp8Call
from shardwright.layers.fp8.weights import Shards

# (of x, of the kernel, of the gradient): `scale [1]`, `history [history]`.
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
      shards: Mesh axes of `x` and of the kernel, as their logical names say. They are only checked.

    Raises:
      LayerError: The recipe has blocks, and a device's part of a contracted dim is not a multiple
        of 32.
    """
    if metas is None:
        check_kernel(np.shape(x), np.shape(kernel), contract, path=name, tokens=True)
    call = static_call(x, {name: kernel}, recipe=recipe, contract=contract, dtype=x.dtype)
    static = dataclasses.replace(call.kernels[0], shards=shards[1])
    # Logical names decide the sharding of these modules, so the matmul gets no manager.
    call = dataclasses.replace(call, manager=None, x_shards=shards[0], kernels=(static,))
    return _dense(x, kernel, metas, call)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dense(x: Any, kernel: Any, metas: Metas | None, call: Fp8Call) -> Any:
    return matmuls.forward(call, x, (kernel,), _scales(metas), keep=False).ys[0]


def _forward(x: Any, kernel: Any, metas: Metas | None, call: Fp8Call) -> Any:
    result = matmuls.forward(call, x, (kernel,), _scales(metas), keep=True)
    if metas is None:
        return result.ys[0], (result.kept, None)
    form = call.recipe.forward
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
