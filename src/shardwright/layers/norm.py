"""Layer norm and RMS norm, in float32."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwright import _jax
from shardwright.errors import LayerError, RankMismatchError
from shardwright.layers import reduced
from shardwright.layers.dtypes import FLOAT32, Dtypes
from shardwright.layers.inputs import check_names
from shardwright.layers.placement import split_over
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.axes import EMBED, NORM
from shardwright.vocabulary.read import number, one_of, read_fields


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """Which norm, and its constants.

    Attributes:
      kind: "layer" (subtracts the mean, has a bias) or "rms".
      epsilon: Added under the root: to the variance in "layer", to the mean square in "rms".
      zero_centered: Whether the stored scale is centered on 0. If so, 1 is added to it in float32.

    Raises:
      LayerError: The kind is unknown, or epsilon is not a positive number.
    """

    kind: Annotated[str, one_of(("layer", "rms"))] = "rms"
    epsilon: Annotated[float, number("positive", fix="write 1e-6")] = 1e-6
    zero_centered: bool = False

    def __post_init__(self) -> None:
        read_fields(self, error=LayerError)


RMS: Final = NormConfig()


def specs(config: NormConfig, size: int, dtypes: Dtypes = FLOAT32) -> dict[str, ArraySpec]:
    """Return the parameters of a norm over a dim of this size: `scale`, and `bias` for "layer"."""
    dtype = dtypes.param
    zeros, ones = jax.nn.initializers.zeros, jax.nn.initializers.ones
    scale = ArraySpec((size,), dtype, (NORM,), zeros if config.zero_centered else ones)
    if config.kind == "rms":
        return {"scale": scale}
    return {"scale": scale, "bias": ArraySpec((size,), dtype, (NORM,), zeros)}


def apply(config: NormConfig, params: dict[str, Any], x: Any, *, dtype: Any = None) -> Any:
    """Normalize the last dim of `x` by the parameters that `specs` describes.

    Args:
      config: Which norm.
      params: `scale`, and `bias` for "layer".
      x: `[..., size]`.
      dtype: Dtype of the result. Defaults to that of `x`.

    Raises:
      LayerError: A parameter is missing, or there is one that the config does not describe.
      RankMismatchError: A parameter does not fit the last dim.
    """
    names = ("scale",) if config.kind == "rms" else ("scale", "bias")
    check_names(names, params, create="norm.specs(config, size)")
    options: dict[str, Any] = {
        "epsilon": config.epsilon,
        "zero_centered": config.zero_centered,
        "dtype": dtype,
    }
    if config.kind == "rms":
        return rms_norm(x, params["scale"], **options)
    return layer_norm(x, params["scale"], params["bias"], **options)


def layer_norm(
    x: Any,
    scale: Any,
    bias: Any = None,
    *,
    epsilon: float = 1e-6,
    zero_centered: bool = False,
    dtype: Any = None,
) -> Any:
    """Return `(x - mean) / sqrt(variance + epsilon) * scale + bias` (Ba et al., arXiv:1607.06450).

    The mean and the variance of the last dim are computed in float32, the variance as the mean
    square of `x - mean`. The result is cast once, at the end.

    Args:
      x: `[..., size]`.
      scale: `[size]`.
      bias: `[size]`. Defaults to none.
      epsilon: Added to the variance, inside the root.
      zero_centered: Whether to multiply by `1 + scale`.
      dtype: Dtype of the result. Defaults to that of `x`.

    Raises:
      RankMismatchError: `scale` or `bias` does not fit the last dim.
    """
    _check(x, scale=scale, bias=bias)
    wide = jnp.asarray(x).astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    # Use two passes: E[x^2] - mean^2 loses all digits if the mean is far above the deviation.
    variance = jnp.mean(jnp.square(wide - mean), axis=-1, keepdims=True)
    scale = jnp.asarray(scale).astype(jnp.float32) + (1 if zero_centered else 0)
    y = reduced.multiply((wide - mean) * jax.lax.rsqrt(variance + epsilon), scale)
    y = y if bias is None else reduced.add(y, jnp.asarray(bias).astype(jnp.float32))
    return y.astype(x.dtype if dtype is None else dtype)


def rms_norm(
    x: Any, scale: Any, *, epsilon: float = 1e-6, zero_centered: bool = False, dtype: Any = None
) -> Any:
    """Return `x / sqrt(mean(x^2) + epsilon) * scale` (Zhang and Sennrich, arXiv:1910.07467).

    The mean over the last dim is computed in float32. The result is cast once, at the end.

    Args:
      x: `[..., size]`.
      scale: `[size]`.
      epsilon: Added to the mean square, inside the root.
      zero_centered: Whether to multiply by `1 + scale`, as Gemma does.
      dtype: Dtype of the result. Defaults to that of `x`.

    Raises:
      RankMismatchError: `scale` does not fit the last dim.
    """
    _check(x, scale=scale)
    wide = jnp.asarray(x).astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    scale = jnp.asarray(scale).astype(jnp.float32)
    # In bfloat16, 1 + scale would round a small scale away.
    scale = scale + 1 if zero_centered else scale
    y = reduced.multiply(wide * jax.lax.rsqrt(mean + epsilon), scale)
    return y.astype(x.dtype if dtype is None else dtype)


def _check(x: Any, **params: Any) -> None:
    size, scale = np.shape(x)[-1:], params["scale"]
    for name, value in params.items():
        if value is not None and np.shape(value) != size:
            raise RankMismatchError(
                f"{name} has shape {np.shape(value)}, and x has shape {np.shape(x)}",
                path=name,
                fix=f"pass {name} of shape {size}, one value per element of the last dim",
            )
    # The mean over a shard of EMBED is not the mean over the whole dim. The scale and the last dim
    # of `x` have equal sizes, so if the scale does not vary over the mesh axes of EMBED, both are
    # whole.
    split = split_over(size, (EMBED,))[0]
    if not split or not _jax.tracks_varying():
        return
    varying = _jax.varying_axes(x) & _jax.varying_axes(scale)
    if names := [axis for axis in split if axis in varying]:
        raise LayerError(
            f"x and scale vary over {'+'.join(names)}, which shards EMBED: the mean would be the "
            "mean of one shard",
            path="x",
            fix=f"gather x and scale over {'+'.join(names)} first, or call the norm outside of "
            "the shard_map",
        )
