"""The modules of TransformerEngine's `flax/module.py`, except `LayerNormMLP`.

Parameters are in flax's boxes, which hold logical names. The keys of dropout depend on the paths of
the modules, as in flax. A matmul runs in fp8 if `autocast` has entered a recipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from shardwright.errors import LayerError, RankMismatchError
from shardwright.interop.transformer_engine.fp8 import NVTE_FP8_COLLECTION_NAME, quantized_dense
from shardwright.interop.transformer_engine.recipe import current_recipe
from shardwright.interop.transformer_engine.scores import (
    AttnSoftmaxType,
    SoftmaxFusionType,
    softmax,
)
from shardwright.interop.transformer_engine.sharding import constrain, shards_of
from shardwright.layers import dense, dropout, norm
from shardwright.layers.fp8 import BlockScaling, DelayedScaling, TensorScaling
from shardwright.layers.lora import LoraConfig
from shardwright.layers.norm import NormConfig
from shardwright.vocabulary.read import RATE, read_value

# Any, so that type checkers give the same result with and without flax.
Module: Any = nn.Module
compact: Any = nn.compact
zeros: Any = nn.initializers.zeros
Axes = tuple[str | None, ...]


def parameter(module: Any, name: str, init: Any, shape: Sequence[int], axes: Axes) -> Any:
    """Create or read a parameter of the module's dtype, whose box has the logical names `axes`."""
    if axes and len(axes) != len(shape):
        raise RankMismatchError(
            f"the parameter has shape {tuple(shape)}, and its dims have the names {axes}",
            path="/".join((*module.path, name)),
            fix=f"give {len(shape)} names, or none",
        )
    return module.param(name, nn.with_logical_partitioning(init, axes), tuple(shape), module.dtype)


def fan_in_init(dtype: Any, distribution: Any = "truncated_normal") -> Any:
    """Return the default initializer of a kernel: variance 1 / fan_in."""
    return nn.initializers.variance_scaling(1.0, "fan_in", distribution, dtype=dtype)


def split_init(init: Any, count: int, *, sequential: bool = False) -> Any:
    """Return an initializer of `count` kernels `[in, out]`, stacked to `[in, count, out]`.

    Args:
      init: One initializer for all kernels, or a list with one per kernel.
      count: Number of kernels.
      sequential: Whether keys are split off one after another. By default, one split gives all
        keys.
    """
    inits = init if isinstance(init, list) else [init] * count

    def stacked(key: Any, shape: Sequence[int], dtype: Any) -> Any:
        # `LayerNormMLP` splits off one key after another. The projection of q, k and v splits all
        # keys at once.
        if sequential:
            keys = []
            for _ in range(count):
                key, own = jax.random.split(key)
                keys.append(own)
        else:
            keys = list(jax.random.split(key, count))
        # The second-last dim of the stack has the size `count`. A single kernel does not have this
        # dim.
        each = (*shape[:-2], shape[-1])
        kernels = [one(own, each, dtype) for one, own in zip(inits, keys, strict=True)]
        return jnp.stack(kernels, axis=-2, dtype=dtype)

    return stacked


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a number or a sequence of numbers as a tuple."""
    return tuple(value) if isinstance(value, Sequence) else (value,)


def check_last_axis(axis: Any) -> None:
    """Check the field `axis` of a module that works on the last dim alone.

    Raises:
      LayerError: The field is not -1.
    """
    if axis != -1:
        raise LayerError(f"axis={axis!r} is not -1", path="axis", fix="move the dim to the end")


def check_inputs(path: str, x: Any, *, rank: int | None = None) -> None:
    """Check that an input has at least one dim, or exactly `rank` dims.

    Raises:
      RankMismatchError: The input has another number of dims.
    """
    if x.ndim == rank or (rank is None and x.ndim):
        return
    wanted = "[..., embed]" if rank is None else "[batch, length, embed]"
    raise RankMismatchError(f"{path} have shape {x.shape}", path=path, fix=f"pass {wanted}")


class Dropout(Module):  # type: ignore[misc]
    """`layers.dropout` with a key from the path of the module, as in TransformerEngine.

    Attributes:
      rate: Probability of dropping an element.
      shared: Dims along which all elements share one mask value.
      rng_name: Name of the random stream.
    """

    rate: float
    shared: Sequence[int] = ()
    rng_name: str = "dropout"

    @compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Any, deterministic: bool) -> Any:
        """Drop elements of `x`, unless `deterministic`."""
        read_value("rate", self.rate, RATE, error=LayerError)
        if deterministic or self.rate == 0:
            return x
        return dropout.dropout(x, self.make_rng(self.rng_name), self.rate, shared=self.shared)


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
    """Return the matmul of `x` with a kernel of a module, in the dtype of `x`.

    Under delayed scaling, the module has variables in the collection `fp8_metas`:
    `{x,kernel,grad}{postfix}_scale` of shape `[1]`, and `{x,kernel,grad}{postfix}_amax_history` of
    shape `[history]`.

    Args:
      module: The module, which creates or reads the variables.
      x: `[..., *inputs]`.
      kernel: `[*inputs, *outputs]`.
      contract: Number of dims that are contracted.
      axes: Logical names of `x` and of the kernel, or Nones.
      name: Name of the kernel, for messages.
      postfix: Suffix that distinguishes the matmuls of one module.
      grad_postfix: Suffix for the gradient of the result. Defaults to `postfix`.
    """
    # Read the recipe in each call: a module is not bound to the recipe under which it was created.
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
    # Blocks of 32 must not cross devices, so the shards of contracted dims are checked.
    if isinstance(recipe, BlockScaling):
        options["shards"] = (
            shards_of(axes[0], x.shape, role="activation"),
            shards_of(axes[1], kernel.shape, role="param"),
        )
    return quantized_dense(x, kernel, metas, recipe=recipe, **options)


def _scaling(module: Any, name: str, recipe: DelayedScaling) -> TensorScaling:
    """Create or read the scale and the history of one tensor."""
    collection = NVTE_FP8_COLLECTION_NAME
    # Keep the scaling state in a separate collection, because an optimizer must not update it like
    # a parameter.
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


_KINDS = {"layernorm": "layer", "rmsnorm": "rms"}


def norm_config(layernorm_type: str, epsilon: float, zero_centered_gamma: bool) -> NormConfig:
    """Return the config of a norm from TransformerEngine's fields.

    Raises:
      LayerError: The type is unknown, or `zero_centered_gamma` is True for an RMS norm.
    """
    name = layernorm_type.lower().strip().replace("-", "").replace("_", "")
    if name not in _KINDS:
        raise LayerError(
            f"layernorm_type={layernorm_type!r} is unknown",
            path="layernorm_type",
            fix='write "layernorm" or "rmsnorm"',
        )
    if name == "rmsnorm" and zero_centered_gamma:
        raise LayerError(
            "zero_centered_gamma=True is not possible with layernorm_type='rmsnorm'",
            path="zero_centered_gamma",
            fix='leave zero_centered_gamma out, or write layernorm_type="layernorm"',
        )
    return NormConfig(kind=_KINDS[name], epsilon=epsilon, zero_centered=zero_centered_gamma)


def scale_init_of(scale_init: Any, zero_centered_gamma: bool) -> Any:
    """Return the initializer of the scale: by default ones, or zeros for a zero-centered scale."""
    if scale_init is not None:
        return scale_init
    return zeros if zero_centered_gamma else nn.initializers.ones


def normalized(module: Any, x: Any, bias_init: Any, bias_axes: Axes) -> Any:
    """Create the parameters `scale` and `ln_bias` in a module, and normalize the last dim of x.

    All other options, such as `epsilon`, are fields of the module. The parameters are cast to the
    dtype of x. The norm itself is computed in float32.
    """
    check_inputs("inputs", x)
    config = norm_config(module.layernorm_type, module.epsilon, module.zero_centered_gamma)
    shape = x.shape[-1:]
    names = [("scale", module.scale_init, module.scale_axes)]
    if config.kind == "layer":
        names.append(("ln_bias", bias_init, bias_axes))
    params = {
        name.removeprefix("ln_"): parameter(module, name, init, shape, axes).astype(x.dtype)
        for name, init, axes in names
    }
    # The factor 1 makes JAX first sum the terms of the gradient of x, and then add the gradient of
    # the residual, in TransformerEngine's order.
    return norm.apply(config, params, x * 1)


class LayerNorm(Module):  # type: ignore[misc]
    """Normalize the last dim, as a layer norm or an RMS norm.

    Attributes:
      epsilon: Added to the variance, or to the mean square, inside the root.
      layernorm_type: "layernorm" or "rmsnorm".
      zero_centered_gamma: Multiply by `1 + scale`; for "layernorm" only.
      scale_init: Initializer of `scale`. Defaults to ones, or to zeros under `zero_centered_gamma`.
      scale_axes: Logical names of `scale`.
      bias_init: Initializer of `ln_bias`, which only "layernorm" has.
      bias_axes: Logical names of `ln_bias`.
      dtype: Dtype of the parameters.
    """

    epsilon: float = 1e-6
    layernorm_type: str = "layernorm"
    zero_centered_gamma: bool = False
    scale_init: Any = None
    scale_axes: Axes = ("embed",)
    bias_init: Any = zeros
    bias_axes: Axes = ("embed",)
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        self.scale_init = scale_init_of(self.scale_init, self.zero_centered_gamma)
        super().__post_init__()

    @compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Any) -> Any:
        """Return `x`, `[..., embed]`, after the norm, in the dtype of `x`."""
        return normalized(self, x, self.bias_init, self.bias_axes)


class Softmax(Module):  # type: ignore[misc]
    """Softmax over the keys, with a scale, a bias and a mask.

    Attributes:
      scale_factor: The logits are multiplied by it after the bias is added.
      softmax_fusion_type: Which mask is applied: none, the given one, or a causal one.
      softmax_type: Which term is added to the denominator of the softmax.
    """

    scale_factor: float = 1.0
    softmax_fusion_type: SoftmaxFusionType = SoftmaxFusionType.SCALED
    softmax_type: AttnSoftmaxType = AttnSoftmaxType.VANILLA_SOFTMAX

    @compact  # type: ignore[untyped-decorator]
    def __call__(
        self, inputs: Any, mask: Any = None, bias: Any = None, softmax_offset: Any = None
    ) -> Any:
        """Return the softmax of the logits `inputs`, `[batch, heads, q_length, kv_length]`.

        A pair whose mask is 1 gets the weight 0.
        """
        if inputs.ndim != 4:
            raise RankMismatchError(
                f"inputs have shape {inputs.shape}",
                path="inputs",
                fix="pass [batch, heads, q_length, kv_length]",
            )
        kind, fusion = self.softmax_type, self.softmax_fusion_type
        if softmax_offset is not None and kind is not AttnSoftmaxType.LEARNABLE_SOFTMAX:
            raise LayerError(
                f"softmax_offset is given, and softmax_type is {kind.value!r}",
                path="softmax_offset",
                fix="leave softmax_offset out, or write AttnSoftmaxType.LEARNABLE_SOFTMAX",
            )
        offset = 0.0 if kind is AttnSoftmaxType.OFF_BY_ONE_SOFTMAX else softmax_offset
        logits = inputs if bias is None else inputs + bias.astype(inputs.dtype)
        hidden = None
        if fusion is SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED:
            q_length, kv_length = inputs.shape[-2:]
            hidden = ~jnp.tri(q_length, kv_length, dtype=bool)
        elif fusion is SoftmaxFusionType.SCALED_MASKED:
            if mask is None:
                raise LayerError(
                    "softmax_fusion_type is SCALED_MASKED, and there is no mask",
                    path="mask",
                    fix="pass a mask, in which 1 hides a pair, or write SCALED",
                )
            hidden = mask == 1
        return softmax(logits * self.scale_factor, hidden, offset=offset)


def low_rank(x: Any, a: Any, b: Any, *, contract: int, alpha: float | None) -> jax.Array:
    """Return what LoRA adds: `x A B * (alpha / rank)`.

    There is one A and one B for each index of the `inner` dims.

    Args:
      x: `[..., *inputs]`.
      a: `[*inputs, *inner, rank]`.
      b: `[*inner, rank, out]`.
      contract: Number of dims of `x` that are contracted.
      alpha: The result is multiplied by alpha / rank; if None, it is not multiplied.
    """
    config = LoraConfig(rank=a.shape[-1], alpha=alpha)
    inputs, inner = "ijklm"[:contract], "nopq"[: b.ndim - 2]
    if AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types:
        low = dense.dense(x, a, contract=contract)
        return jnp.einsum(f"...{inner}r,{inner}rt->...{inner}t", low, b) * config.scale
    # One einsum of all three operands picks the cheapest order, as TransformerEngine does.
    dims = f"...{inputs},{inputs}{inner}r,{inner}rt->...{inner}t"
    return jnp.einsum(dims, x, a, b) * config.scale


def adapted(
    module: Any,
    x: Any,
    y: Any,
    *,
    prefix: str = "",
    inputs: tuple[int, ...],
    features: tuple[int, ...],
    init: Any,
) -> Any:
    """Add the low-rank adaptation of the matmul to `y`, if the module enables it.

    The parameters are `lora_a_kernel` of shape `[*inputs, *features[:-1], rank]`, and
    `lora_b_kernel` of shape `[*features[:-1], rank, features[-1]]`. `lora_b_kernel` starts at 0.
    """
    if not module.enable_low_rank_adaptation:
        return y
    *inner, out = features
    rank = module.low_rank_adaptation_dim
    a, b = (
        parameter(
            module, f"{prefix}lora_{name}_kernel", own_init, shape, (None,) * len(shape)
        ).astype(x.dtype)
        for name, own_init, shape in (
            ("a", init, (*inputs, *inner, rank)),
            # B starts at 0, so that training starts from the model without the adaptation.
            ("b", zeros, (*inner, rank, out)),
        )
    )
    return y + low_rank(x, a, b, contract=len(inputs), alpha=module.low_rank_adaptation_alpha)


def bias_of(module: Any, features: tuple[int, ...], dtype: Any) -> Any:
    """Create and cast the parameter `bias`. Return 0 if the module has no bias."""
    if not module.use_bias:
        # A scalar broadcasts, so callers add it without a branch.
        return jnp.zeros((), dtype)
    bias = parameter(module, "bias", module.bias_init, features, module.bias_axes)
    return bias.astype(dtype)


def contracted(axis: Any, x: Any) -> tuple[int, ...]:
    """Return the dims of `x` that a matmul contracts, as indices that are not negative.

    Raises:
      LayerError: A dim does not exist, or is named twice.
    """
    # Leave out dims that do not exist. The check below then finds that the counts differ.
    dims = tuple(at % x.ndim for at in as_tuple(axis) if -x.ndim <= at < x.ndim)
    if len(set(dims)) != len(as_tuple(axis)):
        raise LayerError(
            f"axis={axis!r} does not name different dims of inputs of shape {x.shape}",
            path="axis",
            fix=f"write dims from 0 to {x.ndim - 1}, or from -{x.ndim} to -1",
        )
    return dims


class DenseGeneral(Module):  # type: ignore[misc]
    """A matmul that contracts dims of the input with a kernel.

    Attributes:
      features: Size of each output dim of the kernel.
      kernel_init: Initializer of `kernel`. Defaults to a truncated normal distribution with
        variance 1 / fan_in, where all dims except the last count as inputs.
      kernel_axes: Logical names of `kernel`.
      use_bias: Whether to add the parameter `bias`.
      bias_init: Initializer of `bias`.
      bias_axes: Logical names of `bias`.
      enable_low_rank_adaptation: Whether to add a low-rank adaptation.
      low_rank_adaptation_dim: Rank of the adaptation.
      low_rank_adaptation_alpha: The result of the adaptation is multiplied by alpha / rank; if
        None, it is not multiplied.
      axis: The dims of the input that are contracted.
      dtype: Dtype of the parameters.
      input_axes: Logical names of the input.
      transpose_batch_sequence: Whether the input is `[length, batch, ...]`. This does not change
        the matmul.
      quantization_checkpoint_name: Not used.
    """

    features: Iterable[int] | int
    kernel_init: Any = None
    kernel_axes: Axes = ()
    use_bias: bool = True
    bias_init: Any = zeros
    bias_axes: Axes = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: Iterable[int] | int = -1
    dtype: Any = jnp.float32
    input_axes: Axes = ()
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: str | None = None

    def __post_init__(self) -> None:
        if self.kernel_init is None:
            self.kernel_init = fan_in_init(self.dtype)
        super().__post_init__()

    @compact  # type: ignore[untyped-decorator]
    def __call__(self, inputs: Any) -> Any:
        """Return the result of the matmul, `[*other dims, *features]`, in the dtype of `inputs`."""
        features = as_tuple(self.features)
        check_inputs("inputs", inputs)
        axis = contracted(self.axis, inputs)
        sizes = tuple(inputs.shape[at] for at in axis)
        shape = (*sizes, *features)
        kernel = parameter(self, "kernel", self.kernel_init, shape, self.kernel_axes)
        x = constrain(inputs, self.input_axes)
        # Move the contracted dims to the end, as `layers.dense` takes them.
        order = [*(at for at in range(x.ndim) if at not in axis), *axis]
        # The names move with the dims.
        names = tuple(self.input_axes[at] for at in order) if self.input_axes else None
        x = jnp.transpose(x, order)
        # Parameters are created in TransformerEngine's order, because their PRNG keys depend on it.
        bias = bias_of(self, features, x.dtype)
        y = matmul(self, x, kernel, contract=len(axis), axes=(names, self.kernel_axes))
        y = adapted(self, x, y, inputs=sizes, features=features, init=self.kernel_init)
        return y + bias


class LayerNormDenseGeneral(Module):  # type: ignore[misc]
    """Normalize the last dim, then contract it with a kernel.

    Attributes:
      features: As in `DenseGeneral`.
      enable_layernorm: Whether there is a norm.
      layernorm_type: As in `LayerNorm`.
      epsilon: As in `LayerNorm`.
      zero_centered_gamma: As in `LayerNorm`.
      scale_init: As in `LayerNorm`.
      scale_axes: As in `LayerNorm`.
      ln_bias_init: Initializer of `ln_bias`.
      ln_bias_axes: Logical names of `ln_bias`.
      kernel_init: As in `DenseGeneral`.
      kernel_axes: As in `DenseGeneral`.
      use_bias: As in `DenseGeneral`.
      bias_init: As in `DenseGeneral`.
      bias_axes: As in `DenseGeneral`.
      return_layernorm_output: Whether the second result is the output of the norm.
      enable_low_rank_adaptation: As in `DenseGeneral`.
      low_rank_adaptation_dim: As in `DenseGeneral`.
      low_rank_adaptation_alpha: As in `DenseGeneral`.
      axis: Must be -1.
      dtype: Dtype of the parameters.
      layernorm_input_axes: Logical names of the input of the norm.
      dot_input_axes: Logical names of the input of the matmul.
      depth_scaling: The result is divided by this number.
      transpose_batch_sequence: As in `DenseGeneral`.
      quantization_checkpoint_name: As in `DenseGeneral`.
    """

    features: Iterable[int] | int
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Any = None
    scale_axes: Axes = ("embed",)
    ln_bias_init: Any = zeros
    ln_bias_axes: Axes = ("embed",)
    kernel_init: Any = None
    kernel_axes: Axes = ()
    use_bias: bool = False
    bias_init: Any = zeros
    bias_axes: Axes = ()
    return_layernorm_output: bool = False
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: Iterable[int] | int = -1
    dtype: Any = jnp.float32
    layernorm_input_axes: Axes | None = None
    dot_input_axes: Axes | None = None
    depth_scaling: float | None = None
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: str | None = None

    def __post_init__(self) -> None:
        if self.kernel_init is None:
            self.kernel_init = fan_in_init(self.dtype)
        self.scale_init = scale_init_of(self.scale_init, self.zero_centered_gamma)
        super().__post_init__()

    @compact  # type: ignore[untyped-decorator]
    def __call__(self, inputs: Any) -> tuple[Any, Any]:
        """Return the result of the matmul, and the output of the norm or None."""
        check_last_axis(self.axis)
        check_inputs("inputs", inputs)
        x = inputs
        if self.enable_layernorm:
            x = constrain(x, self.layernorm_input_axes)
            x = normalized(self, x, self.ln_bias_init, self.ln_bias_axes)
        returned = x if self.return_layernorm_output else None
        features, sizes = as_tuple(self.features), x.shape[-1:]
        shape = (*sizes, *features)
        kernel = parameter(self, "kernel", self.kernel_init, shape, self.kernel_axes)
        x = constrain(x, self.dot_input_axes)
        y = matmul(self, x, kernel, axes=(self.dot_input_axes, self.kernel_axes))
        y = adapted(self, x, y, inputs=sizes, features=features, init=self.kernel_init)
        y = y + bias_of(self, features, y.dtype)
        # Divide after the bias is added, as in TransformerEngine.
        if self.depth_scaling is not None:
            y = y / self.depth_scaling
        return y, returned
