"""`LayerNorm`, and the parameters of the norms inside other modules."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from shardwright.errors import LayerError
from shardwright.interop.transformer_engine.flax.variables import (
    Axes,
    Module,
    check_inputs,
    compact,
    parameter,
    zeros,
)
from shardwright.layers import norm
from shardwright.layers.norm import NormConfig

_KINDS = {"layernorm": "layer", "rmsnorm": "rms"}


def norm_config(layernorm_type: str, epsilon: float, zero_centered_gamma: bool) -> NormConfig:
    """Return the config of a norm by TransformerEngine's fields.

    Raises:
      LayerError: The type is unknown, or an RMS norm is zero-centered.
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
    """Return the initializer of the scale: by default ones, or zeros if it is zero-centered."""
    if scale_init is not None:
        return scale_init
    return zeros if zero_centered_gamma else nn.initializers.ones


def normalized(
    module: Any, x: Any, *, epsilon: float, bias_init: Any, bias_axes: Axes, dtype: Any
) -> Any:
    """Create the parameters `scale` and `ln_bias` in a module, and normalize the last dim of x.

    The other fields are read from the module. The parameters are cast to the dtype of x, and all
    else is computed in float32.
    """
    check_inputs("inputs", x)
    config = norm_config(module.layernorm_type, epsilon, module.zero_centered_gamma)
    shape = x.shape[-1:]
    names = [("scale", module.scale_init, module.scale_axes)]
    if config.kind == "layer":
        names.append(("ln_bias", bias_init, bias_axes))
    params = {
        "bias" if name == "ln_bias" else name: parameter(
            module, name, init, shape, axes, dtype=dtype
        ).astype(x.dtype)
        for name, init, axes in names
    }
    # With the factor of 1, JAX sums the terms of the gradient of x before it adds that of the
    # residual. This is TransformerEngine's order.
    return norm.apply(config, params, x * 1)


class LayerNorm(Module):  # type: ignore[misc]
    """Normalize the last dim, as a layer norm or an RMS norm.

    Attributes:
      epsilon: Added to the variance, or to the mean square, inside the root.
      layernorm_type: "layernorm" or "rmsnorm".
      zero_centered_gamma: Multiply by `1 + scale`; for "layernorm" only.
      scale_init: Initializer of `scale`. Defaults to ones, or to zeros if it is zero-centered.
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
        """Return the norm of `x`, `[..., embed]`, in the dtype of `x`."""
        return normalized(
            self,
            x,
            epsilon=self.epsilon,
            bias_init=self.bias_init,
            bias_axes=self.bias_axes,
            dtype=self.dtype,
        )
