"""The quantized dense: matmuls of one input with one or several kernels, as one custom VJP."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright import _jax
from shardwright.errors import LayerError
from shardwright.layers.dense import add_bias, check_kernel, entries_of_matmul
from shardwright.layers.fp8 import matmuls
from shardwright.layers.fp8.matmuls import Fp8Call, Fp8Kernel, Kept
from shardwright.layers.fp8.quantize import explicit_entries, pipeline_axes
from shardwright.layers.fp8.recipe import DelayedScaling, Recipe, read_recipe
from shardwright.layers.fp8.state import USES_FIX, Channel, DenseSeen, DenseUse
from shardwright.layers.fp8.weights import Stored
from shardwright.layers.placement import is_shard
from shardwright.manager import context
from shardwright.vocabulary.axes import Role


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenseResult:
    """The results of `dense`.

    Attributes:
      ys: The result of each kernel.
      seen: Amaxes of the input and of the kernels, for the update of delayed scaling; None for
        other recipes.
    """

    ys: dict[str, Any]
    seen: DenseSeen | None


def dense(
    x: Any,
    kernels: Mapping[str, Any],
    *,
    recipe: Any,
    use: DenseUse | None = None,
    biases: Mapping[str, Any] | None = None,
    out: Mapping[str, Any] | None = None,
    axes: Any = None,
    contract: int = 1,
    mode: str | None = None,
    dtype: Any = None,
) -> DenseResult:
    """Return `x @ kernel + bias` of each kernel, computed in fp8.

    Each shard of a kernel is quantized before the kernel is gathered, so FSDP moves one byte per
    element. The fp8 operands are kept for the backward pass. Of a kernel, only the stored shards
    are kept.

    Args:
      x: `[..., *inputs]`.
      kernels: `[*inputs, *outputs]` by name: an array, or `stored(value, spec)`, which `dense`
        gathers.
      recipe: A recipe or its name.
      use: With delayed scaling, the result of `uses` for these kernels; else None.
      biases: `[*outputs]` by name. Defaults to none.
      out: Annotation of each result. Without it, the compiler decides how the result is sharded.
      axes: Annotation of `x`. With blocks, it tells how the contracted dims of `x` are sharded.
      contract: Number of dims that are contracted: the last ones of `x` and the first ones of the
        kernel.
      mode: Runtime mode. Defaults to the manager's.
      dtype: Dtype of the operands before they are quantized, and of the results. Defaults to that
        of `x`.

    Raises:
      LayerError: The recipe has a state and `use` is not given, or the recipe has no state and
        `use` is given. Or the recipe has blocks, and the size of a contracted dim on a device is
        not a multiple of 32.
      RankMismatchError: The shapes do not fit each other.
      ShardingError: `out` does not fit a result, the rules or the mesh.
    """
    recipe = read_recipe(recipe)
    if recipe is None:
        raise LayerError("recipe is None", path="recipe", fix="call layers.dense.dense")
    _check_use(recipe, use, tuple(kernels))
    values = [kernel.value if isinstance(kernel, Stored) else kernel for kernel in kernels.values()]
    for (name, kernel), value in zip(kernels.items(), values, strict=True):
        # Check only whole kernels here: from a shard, the shape of the whole kernel is known only
        # after the gather.
        weight = kernel.weight if isinstance(kernel, Stored) else None
        if weight is None or not is_shard(
            weight.shape, weight.axes, role=Role.PARAM, path=weight.path
        ):
            # The backward pass contracts the dims of tokens, so x must have at least one.
            check_kernel(np.shape(x), np.shape(value), contract, path=name, tokens=True)
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    call = static_call(
        x,
        kernels,
        recipe=recipe,
        out=out,
        axes=axes,
        contract=contract,
        mode=mode,
        dtype=dtype,
    )
    scales, channels = _scales(use, tuple(kernels))
    results, (amax_x, amaxes) = _dense(x, tuple(values), scales, channels, call)
    ys = dict(zip(kernels, results, strict=True))
    for name, bias in (biases or {}).items():
        if bias is not None:
            ys[name] = add_bias(ys[name], bias)
    if use is None:
        return DenseResult(ys=ys, seen=None)
    # `_backward` reads only the cotangents of `ys`, so a loss cannot get a gradient through the
    # amaxes.
    seen = DenseSeen(x=amax_x, kernels=dict(zip(kernels, amaxes, strict=True)))
    return DenseResult(ys=ys, seen=jax.lax.stop_gradient(seen))


def static_call(
    x: Any,
    kernels: Mapping[str, Any],
    *,
    recipe: Recipe,
    contract: int,
    dtype: Any,
    out: Mapping[str, Any] | None = None,
    axes: Any = None,
    mode: str | None = None,
) -> Fp8Call:
    """Return the static part of the matmuls of one input, given arguments of `dense`."""
    statics = []
    for name, kernel in kernels.items():
        is_stored = isinstance(kernel, Stored)
        value = kernel.value if is_stored else kernel
        own_out = None if out is None else out.get(name)
        gathered = entries = None
        kernel_entries = explicit_entries(value)
        if not is_stored and own_out is None and kernel_entries is not None:
            x_entries = explicit_entries(x) or (None,) * x.ndim
            gathered, entries = map(tuple, entries_of_matmul(x_entries, kernel_entries, contract))
        static = Fp8Kernel(
            name=name,
            out=own_out,
            weight=kernel.weight if is_stored else None,
            dtype=jnp.dtype(value.dtype),
            # The backward pass has only the quantized kernel, so record here what it needs to know
            # about the type of the kernel.
            varying=_jax.varying_axes(value),
            gathered=gathered,
            out_entries=entries,
        )
        statics.append(static)
    return Fp8Call(
        recipe=recipe,
        kernels=tuple(statics),
        contract=contract,
        dtype=jnp.dtype(dtype),
        mode=mode,
        manager=context.current(),
        pipeline=pipeline_axes(),
        x_axes=axes,
        x_entries=explicit_entries(x),
        x_dtype=jnp.dtype(x.dtype),
        varying=_jax.varying_axes(x),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _dense(x: Any, kernels: Any, scales: Any, channels: Any, call: Fp8Call) -> Any:
    result = matmuls.forward(call, x, kernels, scales[:2], keep=False)
    return result.ys, (result.amax_x, result.amax_kernels)


def _forward(x: Any, kernels: Any, scales: Any, channels: Any, call: Fp8Call) -> Any:
    result = matmuls.forward(call, x, kernels, scales[:2], keep=True)
    return (result.ys, (result.amax_x, result.amax_kernels)), (result.kept, scales)


def _backward(call: Fp8Call, kept: tuple[Kept, Any], cotangents: Any) -> Any:
    operands, scales = kept
    grads = matmuls.backward(call, operands, cotangents[0], scales[2])
    channels = tuple(
        None if scale is None else Channel(amax=amax, count=_one_per(amax))
        for amax, scale in zip(grads.amax, scales[2], strict=True)
    )
    return grads.x, grads.kernels, None, channels


_dense.defvjp(_forward, _backward)


def _one_per(amax: Any) -> Any:
    """Return 1, as a value that depends on `amax`.

    Each use adds 1 to the counter of its channel leaf, so that the update can refuse a leaf that
    several uses share. Under `vmap`, only values that depend on the example are summed over the
    examples. A constant counter would stay 1 although the amaxes are summed.
    """
    return jnp.where(amax >= 0, jnp.float32(1), jnp.float32(1))


def _scales(use: DenseUse | None, names: tuple[str, ...]) -> tuple[Any, Any]:
    """Return (scales of x, kernels and gradients) and the channels, in the order of `names`."""
    none = (None,) * len(names)
    if use is None:
        return (None, none, none), none
    kernels = tuple(use.kernels[name] for name in names)
    grads = tuple(use.grads[name] for name in names)
    return (use.x, kernels, grads), tuple(use.channel[name] for name in names)


def _check_use(recipe: Any, use: Any, names: tuple[str, ...]) -> None:
    what = ""
    if isinstance(recipe, DelayedScaling):
        if not isinstance(use, DenseUse):
            what = f"delayed scaling needs its state, a DenseUse, got {type(use).__name__}"
            fix = USES_FIX
        elif tuple(use.kernels) != names and set(use.kernels) != set(names):
            what = f"the state is that of {', '.join(use.kernels)}, not of {', '.join(names)}"
            fix = "pass the state that init_scaling(config) describes"
    elif use is not None:
        what, fix = f"{type(recipe).__name__} has no state", "leave the state out"
    if what:
        raise LayerError(what, path="state", fix=fix)
