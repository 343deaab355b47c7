"""Low-rank adaptation: `x A B * (alpha / rank)` is added to the result of a matmul of `x`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.errors import LayerError, RankMismatchError
from shardwright.layers import dense
from shardwright.layers.dense import NamedSizes
from shardwright.layers.dtypes import FLOAT32, Dtypes
from shardwright.layers.inputs import check_names
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.axes import EMPTY
from shardwright.vocabulary.read import integer, number, read_fields


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """The rank and the scale of an adaptation (Hu et al., arXiv:2106.09685).

    Attributes:
      rank: Size of the dim between A and B.
      alpha: `x A B` is multiplied by `alpha / rank`. If None, it is not multiplied.

    Raises:
      LayerError: The rank is not a positive integer, or alpha is not positive.
    """

    rank: Annotated[int, integer(fix="pass a positive integer, rank=32")] = 32
    alpha: Annotated[float, number("positive", fix="leave {name} out for a factor of 1")] | None = (
        None
    )

    def __post_init__(self) -> None:
        read_fields(self, error=LayerError)

    @property
    def scale(self) -> float:
        """The factor of `x A B`."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


def specs(
    config: LoraConfig,
    inputs: NamedSizes,
    outputs: NamedSizes,
    *,
    init: Any = None,
    dtypes: Dtypes = FLOAT32,
) -> dict[str, ArraySpec]:
    """Return `a`, `[*inputs, rank]`, and `b`, `[rank, *outputs]`, which starts at 0.

    Args:
      config: The rank.
      inputs: Axis and size of the dims that the adapted matmul contracts.
      outputs: Axis and size of the dims of the adapted matmul's result.
      init: Initializer of `a`. Defaults to that of `dense.specs`.
      dtypes: `param` is the dtype of the parameters.
    """
    rank = [(EMPTY, config.rank)]
    zeros = jax.nn.initializers.zeros
    return {
        "a": dense.specs(inputs, rank, init=init, dtypes=dtypes)["kernel"],
        "b": dense.specs(rank, outputs, init=zeros, dtypes=dtypes)["kernel"],
    }


def apply(
    config: LoraConfig,
    params: dict[str, Any],
    x: Any,
    *,
    out: Any,
    inner: Any,
    contract: int = 1,
    dtype: Any = None,
) -> jax.Array:
    """Return what the adaptation adds to the matmul of `x` with a kernel.

    Args:
      config: The scale.
      params: `a` and `b`, already gathered.
      x: `[..., *inputs]`: the input of the adapted matmul.
      out: Annotation of the result, `[..., *outputs]`.
      inner: Annotation of `x A`, `[..., rank]`; the rank is `EMPTY`.
      contract: Number of dims of `x` that are contracted.
      dtype: Dtype of the operands and the result. Defaults to that of `x`.

    Raises:
      LayerError: `a` or `b` is missing, or there is another parameter.
      RankMismatchError: The shapes do not fit each other.
      ShardingError: An annotation does not fit its array, the rules or the mesh.
    """
    check_names(("a", "b"), params, create="lora.specs(config, inputs, outputs)")
    a, b = np.shape(params["a"]), np.shape(params["b"])
    if a[-1:] != (config.rank,) or b[:1] != (config.rank,):
        raise RankMismatchError(
            f"a has shape {a}, b has shape {b}, and the rank is {config.rank}",
            fix=f"pass a of shape (..., {config.rank}) and b of shape ({config.rank}, ...)",
        )
    low = dense.dense(x, params["a"], out=inner, contract=contract, dtype=dtype)
    # Run two small matmuls, because A B would be as large as the kernel.
    y: jax.Array = dense.dense(low, params["b"], out=out)
    return y * jnp.asarray(config.scale, y.dtype)
