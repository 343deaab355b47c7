"""`LayerNormMLP`: a norm, a matmul, an activation, and a second matmul."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardwright.errors import LayerError
from shardwright.interop.transformer_engine.flax.module import (
    Axes,
    Dropout,
    Module,
    adapted,
    check_inputs,
    check_last_axis,
    compact,
    fan_in_init,
    matmul,
    normalized,
    parameter,
    scale_init_of,
    split_init,
    zeros,
)
from shardwright.interop.transformer_engine.sharding import constrain
from shardwright.layers.activation import ACTIVATIONS, Clamp, check_names, gated

# TransformerEngine fuses these pairs of activations. It also fuses the first activation of a pair
# if that is the only activation, except "clamped_silu".
_FUSED_PAIRS = (
    ("clamped_silu", "clamped_linear"),
    ("gelu", "linear"),
    ("silu", "linear"),
    ("relu", "linear"),
    ("quick_gelu", "linear"),
    ("squared_relu", "linear"),
)
_CLAMP_FIELDS = {"limit": "limit", "alpha": "alpha", "glu_linear_offset": "offset"}


def activations_of(activations: Any) -> tuple[str | Callable[[Any], Any], ...]:
    """Return the activations, with names in lower case. A linear activation comes last.

    Raises:
      LayerError: There are no names, or a name is neither known nor a function of flax.
    """
    if isinstance(activations, str) or not activations:
        check_names(activations)
    listed = tuple(each.lower() if isinstance(each, str) else each for each in activations)
    for each in listed:
        if isinstance(each, str) and each not in ACTIVATIONS and not hasattr(nn, each):
            check_names((each,))
    # Put "linear" last, as TransformerEngine does, so that a checkpoint fits both orders.
    return listed[::-1] if listed[0] in ("linear", "clamped_linear") else listed


def exchanges_gradients(module: Any, activations: tuple[Any, ...]) -> bool:
    """Tell whether the fp8 states of the two matmuls' gradients have swapped names.

    TransformerEngine swaps the names if it fuses norm, matmuls and activation: `grad_0` is then the
    state of the second matmul's gradient. This module does the same, so that the states of
    checkpoints have the same meaning.
    """
    return (
        module.enable_layernorm
        and not module.return_layernorm_output
        # Under these conditions, TransformerEngine calls `layernorm_mlp`, its fused function.
        and module.intermediate_dropout_rate < 1e-3
        and (
            activations in _FUSED_PAIRS or activations in {(name,) for name, _ in _FUSED_PAIRS[1:]}
        )
    )


def activate(
    activations: tuple[str | Callable[[Any], Any], ...], x: Any, params: Mapping[str, float] | None
) -> Any:
    """Apply one activation to each slice of `x`, `[..., activations, mlp]`; multiply the results.

    Raises:
      LayerError: A constant of the clamped activations is unknown.
    """
    unknown = sorted(set(params or ()) - set(_CLAMP_FIELDS))
    if unknown:
        raise LayerError(
            f"activation_params has {', '.join(unknown)}",
            path="activation_params",
            fix=f"write {', '.join(_CLAMP_FIELDS)}",
        )
    clamp = Clamp(**{_CLAMP_FIELDS[name]: value for name, value in (params or {}).items()})
    # Functions of `flax.linen` that `layers` does not have are called one by one below.
    names = [each for each in activations if isinstance(each, str) and each in ACTIVATIONS]
    if len(names) == len(activations):
        return gated(names, x, axis=-2, clamp=clamp)
    parts = []
    for at, each in enumerate(activations):
        if each in names:
            parts.append(gated((str(each),), x[..., at : at + 1, :], clamp=clamp))
        else:
            function = getattr(nn, each) if isinstance(each, str) else each
            parts.append(function(x[..., at, :]))
    return math.prod(parts[1:], start=parts[0])


class LayerNormMLP(Module):  # type: ignore[misc]
    """Normalize the last dim, then apply an MLP. It is gated if there are several activations.

    Attributes:
      intermediate_dim: Size of the hidden dim.
      enable_layernorm: Whether there is a norm.
      layernorm_type: As in `LayerNorm`.
      epsilon: As in `LayerNorm`.
      zero_centered_gamma: As in `LayerNorm`.
      scale_init: As in `LayerNorm`.
      scale_axes: As in `LayerNorm`.
      ln_bias_init: Initializer of `ln_bias`.
      ln_bias_axes: Logical names of `ln_bias`.
      kernel_init: Initializer of `wi_kernel` (`[embed, activations, mlp]`) and of `wo_kernel`
        (`[mlp, embed]`). For `wi_kernel`, it is called once for each activation. Defaults to that
        of `DenseGeneral`.
      kernel_axes_1: Logical names of `wi_kernel`.
      kernel_axes_2: Logical names of `wo_kernel`.
      use_bias: Whether to add `wi_bias` and `wo_bias`.
      bias_init: Initializer of both biases.
      bias_axes_1: Logical names of `wi_bias`.
      bias_axes_2: Logical names of `wo_bias`.
      return_layernorm_output: Whether the second result is the output of the norm.
      activations: Names, or functions. The results of the activations are multiplied.
      activation_params: Constants of the clamped activations: limit, alpha, glu_linear_offset.
      intermediate_dropout_rng_name: Name of the random stream of dropout.
      intermediate_dropout_rate: Probability of dropping a hidden element.
      intermediate_hidden_dropout_dims: Dims along which all elements share one mask value.
      enable_low_rank_adaptation: Whether to adapt both matmuls.
      low_rank_adaptation_dim: As in `DenseGeneral`.
      low_rank_adaptation_alpha: As in `DenseGeneral`.
      axis: Must be -1.
      dtype: Dtype of the parameters.
      layernorm_input_axes: Logical names of the input of the norm.
      dot_1_input_axes: Logical names of the input of the first matmul.
      dot_2_input_axes: Logical names of the input of the second matmul.
      ffn1_ckpt_name: `checkpoint_name` of the first matmul.
      ffn2_ckpt_name: `checkpoint_name` of the second matmul.
      transpose_batch_sequence: As in `DenseGeneral`.
      quantization_checkpoint_name: As in `DenseGeneral`.
    """

    intermediate_dim: int = 2048
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Any = None
    scale_axes: Axes = ("embed",)
    ln_bias_init: Any = zeros
    ln_bias_axes: Axes = ("embed",)
    kernel_init: Any = None
    kernel_axes_1: Axes = ("embed", "act", "mlp")
    kernel_axes_2: Axes = ("mlp", "embed")
    use_bias: bool = False
    bias_init: Any = zeros
    bias_axes_1: Axes = ("act", "mlp")
    bias_axes_2: Axes = ("embed",)
    return_layernorm_output: bool = False
    activations: Sequence[str | Callable[[Any], Any]] = ("gelu",)
    activation_params: Mapping[str, float] | None = None
    intermediate_dropout_rng_name: str = "dropout"
    intermediate_dropout_rate: float = 0.0
    intermediate_hidden_dropout_dims: Sequence[int] = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: Iterable[int] | int = -1
    dtype: Any = jnp.float32
    layernorm_input_axes: Axes | None = None
    dot_1_input_axes: Axes | None = None
    dot_2_input_axes: Axes | None = None
    ffn1_ckpt_name: str = "ffn1"
    ffn2_ckpt_name: str = "ffn2"
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: str | None = None

    def __post_init__(self) -> None:
        if self.kernel_init is None:
            self.kernel_init = fan_in_init(self.dtype)
        self.scale_init = scale_init_of(self.scale_init, self.zero_centered_gamma)
        super().__post_init__()

    @compact  # type: ignore[untyped-decorator]
    def __call__(self, inputs: Any, deterministic: bool = False) -> tuple[Any, Any]:
        """Return the output of the MLP, and the output of the norm or None."""
        check_last_axis(self.axis)
        check_inputs("inputs", inputs)
        activations, x = activations_of(self.activations), inputs
        if self.enable_layernorm:
            x = constrain(x, self.layernorm_input_axes)
            x = normalized(self, x, self.ln_bias_init, self.ln_bias_axes)
        returned = x if self.return_layernorm_output else None
        embed, inner = x.shape[-1], (len(activations), self.intermediate_dim)
        wi_init = split_init(self.kernel_init, inner[0], sequential=True)
        wi = parameter(self, "wi_kernel", wi_init, (embed, *inner), self.kernel_axes_1)
        wo = parameter(self, "wo_kernel", self.kernel_init, (inner[1], embed), self.kernel_axes_2)
        bias_1 = bias_2 = jnp.zeros((), x.dtype)
        if self.use_bias:
            bias_1 = parameter(self, "wi_bias", self.bias_init, inner, self.bias_axes_1)
            bias_2 = parameter(self, "wo_bias", self.bias_init, (embed,), self.bias_axes_2)
        grads = ("_1", "_0") if exchanges_gradients(self, activations) else ("_0", "_1")
        # Constrain after the norm: over `tpsp_resource`, the sequence is gathered here.
        x = constrain(x, self.dot_1_input_axes)
        axes = self.dot_1_input_axes, self.kernel_axes_1
        y = matmul(self, x, wi, axes=axes, name="wi_kernel", postfix="_0", grad_postfix=grads[0])
        y = adapted(self, x, y, prefix="wi_", inputs=(embed,), features=inner, init=wi_init)
        y = checkpoint_name(y + bias_1.astype(y.dtype), self.ffn1_ckpt_name)
        y = activate(activations, y, self.activation_params).astype(inputs.dtype)
        y = Dropout(
            self.intermediate_dropout_rate,
            self.intermediate_hidden_dropout_dims,
            self.intermediate_dropout_rng_name,
        )(y, deterministic)
        y = constrain(y, self.dot_2_input_axes)
        axes = self.dot_2_input_axes, self.kernel_axes_2
        out = matmul(self, y, wo, axes=axes, name="wo_kernel", postfix="_1", grad_postfix=grads[1])
        own: dict[str, Any] = {"inputs": inner[1:], "features": (embed,), "init": self.kernel_init}
        out = adapted(self, y, out, prefix="wo_", **own)
        out = checkpoint_name(out + bias_2.astype(out.dtype), self.ffn2_ckpt_name)
        return out, returned
