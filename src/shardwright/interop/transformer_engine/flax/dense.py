"""`DenseGeneral`, and `LayerNormDenseGeneral`, which has a norm before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from shardwright.errors import LayerError
from shardwright.interop.transformer_engine.flax.norm import normalized, scale_init_of
from shardwright.interop.transformer_engine.flax.quantized import matmul
from shardwright.interop.transformer_engine.flax.variables import (
    Axes,
    Module,
    as_tuple,
    check_inputs,
    check_last_axis,
    compact,
    fan_in_init,
    parameter,
    zeros,
)
from shardwright.interop.transformer_engine.low_rank import low_rank
from shardwright.interop.transformer_engine.sharding import constrain


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
    """Add to `y` what the low-rank adaptation of its matmul gives, if the module enables it.

    The parameters are `lora_a_kernel`, `[*inputs, *features[:-1], rank]`, and `lora_b_kernel`,
    `[*features[:-1], rank, features[-1]]`, which starts at 0.
    """
    if not module.enable_low_rank_adaptation:
        return y
    rank, dtype = module.low_rank_adaptation_dim, module.dtype
    shapes = {
        "a": (*inputs, *features[:-1], rank),
        "b": (*features[:-1], rank, features[-1]),
    }
    a, b = (
        parameter(
            module,
            f"{prefix}lora_{name}_kernel",
            init if name == "a" else zeros,
            shape,
            (None,) * len(shape),
            dtype=dtype,
        ).astype(x.dtype)
        for name, shape in shapes.items()
    )
    return y + low_rank(x, a, b, contract=len(inputs), alpha=module.low_rank_adaptation_alpha)


def bias_of(module: Any, features: tuple[int, ...], dtype: Any) -> Any:
    """Create the parameter `bias`, and cast it; 0 if the module uses none."""
    if not module.use_bias:
        return jnp.zeros((), dtype)
    bias = parameter(
        module, "bias", module.bias_init, features, module.bias_axes, dtype=module.dtype
    )
    return bias.astype(dtype)


def contracted(axis: Any, x: Any) -> tuple[int, ...]:
    """Return the dims of `x` that a matmul contracts, as indices that are not negative.

    Raises:
      LayerError: A dim does not exist, or is named twice.
    """
    dims = tuple(at % x.ndim for at in as_tuple(axis) if -x.ndim <= at < x.ndim)
    if len(set(dims)) != len(as_tuple(axis)):
        raise LayerError(
            f"axis={axis!r} does not name different dims of inputs of shape {x.shape}",
            path="axis",
            fix=f"write dims from 0 to {x.ndim - 1}, or from -{x.ndim} to -1",
        )
    return dims


class DenseGeneral(Module):  # type: ignore[misc]
    """Multiply dims of the input with a kernel.

    Attributes:
      features: Size of each dim of the result that the kernel gives.
      kernel_init: Initializer of `kernel`. Defaults to a truncated normal distribution with
        variance 1 / fan_in, where every dim but the last counts as an input.
      kernel_axes: Logical names of `kernel`.
      use_bias: Whether to add the parameter `bias`.
      bias_init: Initializer of `bias`.
      bias_axes: Logical names of `bias`.
      enable_low_rank_adaptation: Whether to add a low-rank adaptation.
      low_rank_adaptation_dim: Its rank.
      low_rank_adaptation_alpha: Its result is scaled by alpha / rank; None for a factor of 1.
      axis: The dims of the input that are contracted.
      dtype: Dtype of the parameters.
      input_axes: Logical names of the input.
      transpose_batch_sequence: Whether the input is `[length, batch, ...]`. The matmul is the
        same.
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
        kernel = parameter(
            self,
            "kernel",
            self.kernel_init,
            (*sizes, *features),
            self.kernel_axes,
            dtype=self.dtype,
        )
        x = constrain(inputs, self.input_axes)
        order = [*(at for at in range(x.ndim) if at not in axis), *axis]
        names = tuple(self.input_axes[at] for at in order) if self.input_axes else None
        x = jnp.transpose(x, order)
        # Parameters are created in TransformerEngine's order, because keys depend on it.
        bias = bias_of(self, features, x.dtype)
        y = matmul(self, x, kernel, contract=len(axis), axes=(names, self.kernel_axes))
        y = adapted(self, x, y, inputs=sizes, features=features, init=self.kernel_init)
        return y + bias


class LayerNormDenseGeneral(Module):  # type: ignore[misc]
    """Normalize the last dim, then multiply it with a kernel.

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
      depth_scaling: The result is divided by it.
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
            x = normalized(
                self,
                constrain(x, self.layernorm_input_axes),
                epsilon=self.epsilon,
                bias_init=self.ln_bias_init,
                bias_axes=self.ln_bias_axes,
                dtype=self.dtype,
            )
        returned = x if self.return_layernorm_output else None
        features, sizes = as_tuple(self.features), x.shape[-1:]
        kernel = parameter(
            self,
            "kernel",
            self.kernel_init,
            (*sizes, *features),
            self.kernel_axes,
            dtype=self.dtype,
        )
        x = constrain(x, self.dot_input_axes)
        y = matmul(self, x, kernel, axes=(self.dot_input_axes, self.kernel_axes))
        y = adapted(self, x, y, inputs=sizes, features=features, init=self.kernel_init)
        y = y + bias_of(self, features, y.dtype)
        if self.depth_scaling is not None:
            y = y / self.depth_scaling
        return y, returned
