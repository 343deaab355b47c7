"""The MLP of a transformer layer: norm, gated up projection, down projection."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from shardwright.errors import LayerError
from shardwright.layers import dense, norm
from shardwright.layers.activation import CLAMP, Clamp, check_names, gated
from shardwright.layers.dropout import check_rate, dropout
from shardwright.layers.dtypes import FLOAT32, Dtypes
from shardwright.layers.norm import RMS, NormConfig
from shardwright.layers.placement import OPERAND, RESIDUAL, check_residual, place, use
from shardwright.vocabulary.axes import (
    BATCH,
    EMBED,
    EMPTY,
    MLP_INTERMEDIATE,
    QUERY_LENGTH,
)
from shardwright.vocabulary.integers import read_integer

HIDDEN = (BATCH, QUERY_LENGTH, MLP_INTERMEDIATE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig:
    """Sizes and options of an MLP.

    Attributes:
      embed: Size of the residual.
      hidden: Size of the hidden layer, between the two products.
      activations: One name per up projection; their results are multiplied. See `activation`.
      clamp: Constants of the clamped activations.
      norm: The norm before the block. None for none.
      bias: Whether the products have biases.
      dropout: Probability of dropping a hidden element, if `keys` has a dropout key.
      dropout_shared: Dims of `[batch, length, hidden]` along which the dropout mask is the same.
      init: Initializer of the kernels. Defaults to that of `dense.specs`.
      dtypes: Dtypes of the parameters, products and result.

    Raises:
      LayerError: A size, name or rate is not valid.
    """

    embed: int
    hidden: int
    activations: tuple[str, ...] = ("silu", "linear")
    clamp: Clamp = CLAMP
    norm: NormConfig | None = RMS
    bias: bool = False
    dropout: float = 0.0
    dropout_shared: tuple[int, ...] = ()
    init: Any = None
    dtypes: Dtypes = FLOAT32

    def __post_init__(self) -> None:
        for name in ("embed", "hidden"):
            fix = f"pass a positive integer, {name}=512"
            read_integer(name, getattr(self, name), error=LayerError, fix=fix)
        object.__setattr__(self, "activations", check_names(self.activations))
        check_rate("dropout", self.dropout)


def specs(config: MlpConfig) -> dict[str, Any]:
    """Return the parameters of the block as `ArraySpec`s.

    The up projections are one kernel, `[embed, activations, hidden]`.
    """
    options: dict[str, Any] = {"init": config.init, "dtypes": config.dtypes, "bias": config.bias}
    embed, hidden = (EMBED, config.embed), (MLP_INTERMEDIATE, config.hidden)
    count = len(config.activations)
    tree = {
        "up": dense.specs([embed], [(EMPTY, count), hidden], **options),
        "down": dense.specs([hidden], [embed], **options),
    }
    if config.norm is not None:
        tree["norm"] = norm.specs(config.norm, config.embed, config.dtypes)
    return tree


def apply(
    config: MlpConfig,
    params: dict[str, Any],
    x: Any,
    *,
    keys: Mapping[str, jax.Array] | None = None,
    state: Any = None,
    path: str | None = None,
) -> tuple[jax.Array, Any]:
    """Return what the block adds to the residual `x`, and the state.

    The residual is sharded as (BATCH, LENGTH, EMBED). The input of the up projections is sharded as
    (BATCH, QUERY_LENGTH, EMBED), and the hidden values as (BATCH, QUERY_LENGTH, MLP_INTERMEDIATE).

    Args:
      config: Sizes and options.
      params: The tree that `specs` describes, as stored.
      x: `[batch, length, embed]`.
      keys: `{"dropout": key}`. By default nothing is dropped.
      state: Returned as it is.
      path: Path of `params` in the model, required if the strategy has `[[tensors]]` entries.

    Raises:
      RankMismatchError: `x` is not `[batch, length, embed]`.
      ShardingError: The rules of the ambient manager do not fit the arrays.
    """
    check_residual(x, config.embed)
    tree = specs(config)
    weights = use(params, tree, path=path)
    compute = config.dtypes.compute
    x = place(x, RESIDUAL)
    if config.norm is not None:
        x = norm.apply(config.norm, weights["norm"], x, dtype=compute)
    # With sequence parallelism the residual is gathered here, after the norm.
    x = place(x.astype(compute), OPERAND)
    hidden = dense.dense(
        x,
        weights["up"]["kernel"],
        weights["up"].get("bias"),
        out=(BATCH, QUERY_LENGTH, EMPTY, MLP_INTERMEDIATE),
    )
    hidden = gated(config.activations, checkpoint_name(hidden, "mlp_up"), clamp=config.clamp)
    key = (keys or {}).get("dropout")
    hidden = dropout(hidden, key, config.dropout, shared=config.dropout_shared)
    # With sequence parallelism this product ends in a reduce-scatter.
    y = dense.dense(
        place(hidden, HIDDEN),
        weights["down"]["kernel"],
        weights["down"].get("bias"),
        out=RESIDUAL,
        dtype=compute,
    )
    return checkpoint_name(y.astype(config.dtypes.output), "mlp_down"), state
