"""Matmuls of fp8 operands: the forward and backward pass for one input and several kernels.

The input is quantized once for all kernels. The stored shards of a kernel are quantized, and then
gathered.

    forward    y = Q(x) Q(w)
    backward   g = Q(dy)    dx = g Q(w)'    dw = Q(x)' g

With one scale per tensor, the backward pass uses the fp8 operands of the forward pass. Blocks
lie along the contracted dim, and each of the three matmuls contracts another dim. So with blocks
the forward pass quantizes each operand twice.

For the backward pass, the forward pass keeps the fp8 input, and the stored shards of the fp8
kernels. The backward pass gathers the kernels again. A matmul is computed in the dtype of its
result, and its result is then multiplied by the inverse scales. For float16, the matmul is computed
in float32, to avoid overflow. Sums over devices have the dtype of the result too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardwright import _jax
from shardwright.layers.fp8.quantize import (
    Scaled,
    dequantize,
    explicit_entries,
    largest_absolute,
    quantize_blocks,
    quantize_tensor,
    scale_of,
)
from shardwright.layers.fp8.recipe import BlockScaling, Recipe
from shardwright.layers.fp8.weights import (
    Shards,
    StoredKernel,
    check_blocks,
    gather,
    scatter,
    store,
)
from shardwright.manager.einsum import dot_general
from shardwright.vocabulary.axes import Role


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Kernel:
    """The static part of one matmul.

    Attributes:
      name: Name of the kernel.
      out: Annotation of the result, or None.
      weight: Annotation, shape and path of the stored kernel. None if the kernel is already
        gathered.
      dtype: Dtype of the kernel.
      varying: Manual mesh axes that the kernel varies over.
      gathered: Entries of the spec that the kernel is gathered to, over Explicit axes. None if
        `weight` or `out` already determines this spec.
      out_entries: Entries of the spec of the result, over Explicit axes.
      shards: Mesh axes of the kernel, if it has no annotation; only for the check of blocks.
    """

    name: str
    out: Any
    weight: StoredKernel | None
    dtype: Any
    varying: frozenset[str]
    gathered: tuple[Any, ...] | None = None
    out_entries: tuple[Any, ...] | None = None
    shards: Shards | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Call:
    """The static part of the matmuls of one input.

    Attributes:
      recipe: The recipe.
      kernels: The matmuls.
      contract: Number of dims that are contracted.
      dtype: Dtype of the operands before they are quantized, and of the results.
      mode: Runtime mode.
      manager: The ambient manager of the forward pass, or None. The backward pass does not read the
        ambient manager.
      pipeline: Mesh axes of the pipeline.
      x_axes: Annotation of the input, or None.
      x_entries: Entries of the spec of the input over Explicit axes, or None.
      x_dtype: Dtype of the input.
      varying: Manual mesh axes that the input varies over.
      x_shards: Mesh axes of the input, if it has no annotation; only for the check of blocks.
    """

    recipe: Recipe
    kernels: tuple[Fp8Kernel, ...]
    contract: int
    dtype: Any
    mode: str | None
    manager: Any
    pipeline: tuple[str, ...]
    x_axes: Any
    x_entries: tuple[Any, ...] | None
    x_dtype: Any
    varying: frozenset[str]
    x_shards: Shards | None = None

    @property
    def blocks(self) -> bool:
        """Whether each block has a scale of its own."""
        return isinstance(self.recipe, BlockScaling)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The operands that the backward pass of the matmuls needs.

    Attributes:
      x: The quantized input. Blocks, if any, lie along its last dim that is not contracted.
      kernels: The quantized kernels, as stored. Blocks, if any, lie along their last dim.
    """

    x: Scaled
    kernels: tuple[Scaled, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """The result of the forward pass.

    Attributes:
      ys: The results.
      amax_x: Largest absolute value of the input; None if the recipe has blocks.
      amax_kernels: Largest absolute value of each kernel; Nones if the recipe has blocks.
      kept: Values that the backward pass needs, or None.
    """

    ys: tuple[Any, ...]
    amax_x: Any
    amax_kernels: tuple[Any, ...]
    kept: Kept | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelGradients:
    """The result of the backward pass.

    Attributes:
      x: Gradient of the input.
      kernels: Gradient of each stored kernel.
      amax: Largest absolute value of the gradient of each result; Nones if the recipe has blocks.
    """

    x: Any
    kernels: tuple[Any, ...]
    amax: tuple[Any, ...]


def forward(call: Fp8Call, x: Any, kernels: tuple[Any, ...], scales: Any, *, keep: bool) -> Forward:
    """Return the results, and the fp8 operands of the backward pass.

    Args:
      call: The static part.
      x: `[..., *inputs]`.
      kernels: `[*inputs, *outputs]` each, as stored.
      scales: (scale of `x`, scale of each kernel). Nones unless the recipe is delayed scaling.
      keep: Whether to return the values that the backward pass needs.
    """
    form, contract = call.recipe.forward, call.contract
    rows = x.ndim - contract
    _check_dims(call, x, kernels, keep=keep)
    x_scale, kernel_scales = scales
    amax_x, x_scale = _scale(call, x, x_scale, form)
    # `_quantized` reads `dim` only for blocks, which lie along the last contracted dim.
    left = _quantized(call, x, x_scale, x.ndim - 1, form)
    ys, amaxes, kept = [], [], []
    for kernel, static, given in zip(kernels, call.kernels, kernel_scales, strict=True):
        amax, scale = _scale(call, kernel, given, form)
        own = _stored(call, static, _quantized(call, kernel, scale, contract - 1, form))
        dims = (tuple(range(rows, x.ndim)), tuple(range(contract)))
        right = _gathered(call, static, own)
        y = _multiply(call, left, right, dims, out=static.out, entries=static.out_entries)
        ys.append(y)
        amaxes.append(amax)
        if keep and call.blocks:
            # dx contracts the outputs of the kernel, so it needs blocks along the last output dim.
            own = _stored(call, static, _quantized(call, kernel, scale, kernel.ndim - 1, form))
        kept.append(own)
    if keep and call.blocks:
        # dw contracts the dims of tokens, so it needs blocks of x along the last of these dims.
        left = _quantized(call, x, x_scale, rows - 1, form)
    return Forward(
        ys=tuple(ys),
        amax_x=amax_x,
        amax_kernels=tuple(amaxes),
        kept=Kept(x=left, kernels=tuple(kept)) if keep else None,
    )


def backward(
    call: Fp8Call, kept: Kept, grads: tuple[Any, ...], scales: tuple[Any, ...]
) -> KernelGradients:
    """Return the gradients of the input and of the stored kernels.

    Args:
      call: The static part.
      kept: Values that the forward pass has kept.
      grads: Gradient of each result.
      scales: Scale of each gradient, or Nones unless the recipe is delayed scaling.
    """
    form, rows = call.recipe.backward, kept.x.value.ndim - call.contract
    dx, kernels, amaxes = None, [], []
    for grad, own, static, given in zip(grads, kept.kernels, call.kernels, scales, strict=True):
        amax, scale = _scale(call, grad, given, form)
        left = _quantized(call, grad, scale, grad.ndim - 1, form)
        # The barrier makes this second gather depend on the gradient. Otherwise XLA would merge the
        # two gathers, and keep the gathered kernel from the forward to the backward pass.
        later, left = jax.lax.optimization_barrier((own, left))
        right = _gathered(call, static, later)
        outputs = tuple(range(call.contract, own.value.ndim))
        # dx = g Q(w)': all outputs are contracted.
        dims = (tuple(range(rows, grad.ndim)), outputs)
        part = _multiply(call, left, right, dims, entries=call.x_entries)
        dx = part if dx is None else dx + part
        if call.blocks:
            left = _quantized(call, grad, scale, rows - 1, form)
        # dw = Q(x)' g: all dims of tokens are contracted.
        dims = (tuple(range(rows)), tuple(range(rows)))
        dw = _multiply(call, kept.x, left, dims, entries=explicit_entries(right.value))
        if static.weight is not None:
            dw = scatter(call.manager, dw, own.value, static.weight)
        elif static.gathered is not None:
            dw = _placed(dw, explicit_entries(own.value))
        kernels.append(_summed(dw.astype(static.dtype), static.varying))
        amaxes.append(amax)
    assert dx is not None
    return KernelGradients(
        x=_summed(dx.astype(call.x_dtype), call.varying),
        kernels=tuple(kernels),
        amax=tuple(amaxes),
    )


def _scale(call: Fp8Call, x: Any, given: Any, form: str) -> tuple[Any, Any]:
    """Return the amax and the scale of an array; Nones if the recipe has blocks."""
    if call.blocks:
        return None, None
    # The amax is taken before the array saturates, even if an older scale is used. So the scales of
    # later steps can follow values that are clipped in this step.
    amax = largest_absolute(x, pipeline=call.pipeline)
    return amax, scale_of(amax, form) if given is None else given


def _quantized(call: Fp8Call, x: Any, scale: Any, dim: int, form: str) -> Scaled:
    return quantize_blocks(x, dim, form) if call.blocks else quantize_tensor(x, scale, form)


def _stored(call: Fp8Call, static: Fp8Kernel, x: Scaled) -> Scaled:
    return x if static.weight is None else store(call.manager, x, static.weight)


def _gathered(call: Fp8Call, static: Fp8Kernel, x: Scaled) -> Scaled:
    if static.weight is not None:
        return gather(call.manager, x, static.weight)
    if static.gathered is None:
        return x
    scale = x.scale if x.dim is None else _placed(x.scale, static.gathered)
    return Scaled(value=_placed(x.value, static.gathered), scale=scale, dim=x.dim)


def _placed(x: Any, entries: Any) -> Any:
    """Reshard an array to a spec over Explicit axes."""
    sharding = NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*entries))
    return jax.sharding.reshard(x, sharding)


def _multiply(
    call: Fp8Call, left: Scaled, right: Scaled, dims: Any, *, out: Any = None, entries: Any = None
) -> Any:
    """Multiply two operands.

    Args:
      call: Dtype and mode.
      left: Operand.
      right: Operand.
      dims: Contracted dims of both operands.
      out: Annotation of the result.
      entries: Spec of the result over Explicit axes, if the result has no annotation.
    """
    # fp8 reaches 448 (E4M3) or 57,344 (E5M2), so sums of products exceed the range of float16.
    dtype = jnp.dtype(jnp.float32) if call.dtype == jnp.float16 else call.dtype
    numbers = (dims, ((), ()))
    # Each block of the contracted dim has a scale of its own, so the scales cannot be taken out of
    # the sum.
    a, b = (dequantize(x, dtype) if call.blocks else x.value for x in (left, right))
    if out is not None:
        # While a scan is differentiated, the manager of its body, such as that of a pipeline stage,
        # is not ambient. So enter the manager of the forward pass.
        with call.manager or contextlib.nullcontext():
            y = dot_general(a, b, numbers, out=out, mode=call.mode, preferred_element_type=dtype)
    else:
        spec = None if entries is None else PartitionSpec(*entries)
        y = jax.lax.dot_general(a, b, numbers, preferred_element_type=dtype, out_sharding=spec)
    if not call.blocks:
        # The product of both scales may overflow although the result does not. So multiply by the
        # smaller scale first: then only the result can overflow. A value that underflows is too
        # small to matter.
        small, large = (pick(left.scale, right.scale) for pick in (jnp.minimum, jnp.maximum))
        y = y * small * large
    return y.astype(call.dtype)


def _summed(grad: Any, varying: frozenset[str]) -> Any:
    """Sum a gradient over the Manual mesh axes that its primal does not vary over."""
    mesh = _jax.ambient_mesh()
    if mesh is None or not _jax.tracks_varying():
        return grad
    # Autodiff would insert this sum. A custom VJP must insert it: JAX checks that a gradient varies
    # over the same mesh axes as its primal.
    extra = _jax.varying_axes(grad) - varying
    axes = tuple(axis for axis in mesh.axis_names if axis in extra)
    return jax.lax.psum(grad, axes) if axes else grad


def _check_dims(call: Fp8Call, x: Any, kernels: tuple[Any, ...], *, keep: bool) -> None:
    """Check the blocks of every dim that the matmuls contract."""
    if not call.blocks:
        return
    rows = x.ndim - call.contract
    matmuls = ", ".join(static.name for static in call.kernels)

    def check(
        annotation: Any, shape: tuple[int, ...], dim: int, name: str, **without_annotation: Any
    ) -> None:
        check_blocks(
            call.manager,
            annotation,
            shape,
            dim,
            name=name,
            role=Role.ACTIVATION,
            mode=call.mode,
            path=matmuls if annotation is None else None,
            **without_annotation,
        )

    # Blocks of x lie along the last input dim in the forward pass, and along the last token dim in
    # the backward pass.
    for dim in [x.ndim - 1, *([rows - 1] if keep else [])]:
        check(call.x_axes, x.shape, dim, "x", array=x, shards=call.x_shards)
    for kernel, static in zip(kernels, call.kernels, strict=True):
        weight = static.weight
        for dim in [call.contract - 1, *([kernel.ndim - 1] if keep else [])]:
            check_blocks(
                call.manager,
                None if weight is None else weight.axes,
                kernel.shape,
                dim,
                name=f"the kernel {static.name}",
                role=Role.PARAM,
                path=None if weight is None else weight.path,
                array=kernel,
                shards=static.shards,
            )
        # The gradient of the result is quantized too. The matmul for dx contracts the output dims
        # of this gradient, and the matmul for dw contracts its token dims.
        if keep and static.out is not None:
            shape = (*x.shape[:rows], *kernel.shape[call.contract :])
            for dim in (rows - 1, len(shape) - 1):
                check(static.out, shape, dim, "the result")
