"""The MLP of a transformer layer: norm, gated up projection, down projection."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
from jax.ad_checkpoint import checkpoint_name

from shardwright.errors import LayerError
from shardwright.layers import norm, projection
from shardwright.layers.activation import CLAMP, NAMES, Clamp, gated
from shardwright.layers.dropout import dropout
from shardwright.layers.dtypes import FLOAT32, Dtypes
from shardwright.layers.fp8 import Recipe, read_recipe
from shardwright.layers.fp8.recipe import RECIPE
from shardwright.layers.inputs import SIZE, check_params, read_keys
from shardwright.layers.lora import LoraConfig
from shardwright.layers.norm import RMS, NormConfig
from shardwright.layers.placement import OPERAND, RESIDUAL, check_residual, place
from shardwright.layers.projection import gather_weights, parts_of, project
from shardwright.vocabulary.axes import (
    BATCH,
    EMBED,
    EMPTY,
    MLP_INTERMEDIATE,
    QUERY_LENGTH,
)
from shardwright.vocabulary.read import RATE, read_fields

HIDDEN = (BATCH, QUERY_LENGTH, MLP_INTERMEDIATE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig:
    """Sizes and options of an MLP.

    Attributes:
      embed: Size of the residual.
      hidden: Size of the hidden layer, between the two matmuls.
      activations: One name per up projection. The results of several activations are multiplied.
        See `activation`.
      clamp: Constants of the clamped activations.
      norm: The norm before the block, or None.
      bias: Whether the matmuls have biases.
      dropout: Probability of dropping a hidden element, if `keys` has a dropout key.
      dropout_shared: Dims of `[batch, length, hidden]` along which all elements share one value of
        the dropout mask.
      init: Initializer of the kernels. Defaults to that of `dense.specs`.
      dtypes: Dtypes of the parameters, matmuls and result.
      recipe: How the matmuls are computed in fp8: an `fp8.Recipe` or its name. None: not in fp8.
      lora: Low-rank adaptation of both matmuls, or None.

    Raises:
      LayerError: A size, name, rate or option is not valid.
    """

    embed: Annotated[int, SIZE]
    hidden: Annotated[int, SIZE]
    activations: Annotated[tuple[str, ...], NAMES] = ("silu", "linear")
    clamp: Clamp = CLAMP
    norm: NormConfig | None = RMS
    bias: bool = False
    dropout: Annotated[float, RATE] = 0.0
    dropout_shared: tuple[int, ...] = ()
    init: Callable[..., Any] | None = None
    dtypes: Dtypes = FLOAT32
    recipe: Annotated[Recipe | str | None, RECIPE] = None
    lora: LoraConfig | None = None

    def __post_init__(self) -> None:
        read_fields(self, error=LayerError)


def specs(config: MlpConfig) -> dict[str, Any]:
    """Return the parameters of the block as `ArraySpec`s.

    The up projections are one kernel, `[embed, activations, hidden]`.
    """
    options: dict[str, Any] = {
        "init": config.init,
        "dtypes": config.dtypes,
        "bias": config.bias,
        "adaptation": config.lora,
    }
    embed, hidden = (EMBED, config.embed), (MLP_INTERMEDIATE, config.hidden)
    count = len(config.activations)
    tree = {
        # Put the dim of activations before the hidden dim. Then a shard of the hidden dim has its
        # part of every activation, such as gate and up, and multiplying the two sends nothing.
        "up": projection.specs([embed], [(EMPTY, count), hidden], **options),
        "down": projection.specs([hidden], [embed], **options),
    }
    if config.norm is not None:
        tree["norm"] = norm.specs(config.norm, config.embed, config.dtypes)
    return tree


def init_scaling(config: MlpConfig, *, layers: int | None = None) -> dict[str, Any] | None:
    """Return the first state of delayed scaling; None for other recipes.

    Args:
      config: Sizes and options.
      layers: Size of a leading dim, for stacked parameters. Defaults to none.
    """
    return projection.init_scaling(config.recipe, {"up": ("up",), "down": ("down",)}, layers)


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
      state: With delayed scaling, `fp8.uses(scaling, channel)`; the returned state then has the
        amaxes of inputs and kernels. Otherwise the state is returned unchanged.
      path: Path of `params` in the model, required if the strategy has `[[tensors]]` entries.

    Raises:
      LayerError: The parameters do not match the config, or a name in `keys` is unknown.
      RankMismatchError: `x` is not `[batch, length, embed]`.
      ShardingError: The rules of the ambient manager do not fit the arrays.
    """
    check_residual(x, config.embed)
    key, recipe, described = read_keys(keys), read_recipe(config.recipe), specs(config)
    check_params(described, params, path=path, create="mlp_block.specs(config)")
    weights = gather_weights(recipe, params, described, path=path)
    states = parts_of(recipe, state, ("up", "down"))
    compute = config.dtypes.compute
    x = place(x, RESIDUAL)
    if config.norm is not None:
        x = norm.apply(config.norm, weights["norm"], x, dtype=compute)
    # With sequence parallelism the residual is gathered here, after the norm.
    x = place(x.astype(compute), OPERAND)
    ups = project(
        x,
        weights,
        out={"up": (BATCH, QUERY_LENGTH, EMPTY, MLP_INTERMEDIATE)},
        axes=OPERAND,
        recipe=recipe,
        state=states["up"],
        adaptation=config.lora,
    )
    hidden = checkpoint_name(ups.ys["up"], "mlp_up")
    hidden = gated(config.activations, hidden, clamp=config.clamp)
    hidden = dropout(hidden, key, config.dropout, shared=config.dropout_shared)
    # With sequence parallelism this matmul ends in a reduce-scatter.
    downs = project(
        place(hidden, HIDDEN),
        weights,
        out={"down": RESIDUAL},
        axes=HIDDEN,
        recipe=recipe,
        state=states["down"],
        adaptation=config.lora,
        dtype=compute,
    )
    if ups.seen is not None:
        state = {"up": ups.seen, "down": downs.seen}
    y = downs.ys["down"].astype(config.dtypes.output)
    return checkpoint_name(y, "mlp_down"), state
