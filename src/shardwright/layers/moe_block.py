"""An MoE block, used in place of the MLP of a transformer layer: a norm, then `moe`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from shardwright.errors import LayerError
from shardwright.layers import moe, norm
from shardwright.layers.inputs import check_params, read_keys
from shardwright.layers.moe import MoEConfig, MoEState
from shardwright.layers.norm import RMS, NormConfig
from shardwright.layers.placement import OPERAND, RESIDUAL, check_residual, path_of, place, use
from shardwright.vocabulary.read import read_fields


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoEBlockConfig:
    """A norm and an MoE layer.

    Attributes:
      moe: The MoE layer.
      norm: The norm before the MoE layer. None: no norm.

    Raises:
      LayerError: A field has another type.
    """

    moe: MoEConfig
    norm: NormConfig | None = RMS

    def __post_init__(self) -> None:
        read_fields(self, error=LayerError)

    @property
    def embed(self) -> int:
        """Size of the residual."""
        return self.moe.embed


def specs(config: MoEBlockConfig) -> dict[str, Any]:
    """Return the parameters of the block as `ArraySpec`s: `moe`, and `norm` if there is one."""
    tree: dict[str, Any] = {"moe": moe.specs(config.moe)}
    if config.norm is not None:
        tree["norm"] = norm.specs(config.norm, config.embed, config.moe.dtypes)
    return tree


def apply(
    config: MoEBlockConfig,
    params: dict[str, Any],
    x: Any,
    *,
    keys: Any = None,
    state: MoEState | None = None,
    path: str | None = None,
    valid: Any = None,
) -> tuple[jax.Array, MoEState]:
    """Return what the block adds to the residual `x`, and the state of the router.

    The residual is sharded as (BATCH, LENGTH, EMBED), and the tokens that enter the MoE layer as
    (BATCH, QUERY_LENGTH, EMBED).

    Args:
      config: The norm and the MoE layer.
      params: The tree that `specs` describes, as stored.
      x: `[batch, length, embed]`.
      keys: Not used, because the block has no randomness. All blocks have this argument, so that
        they are called alike.
      state: State with the router's bias. None: no bias.
      path: Path of `params` in the model, required if the strategy has `[[tensors]]` entries.
      valid: `[batch, length]` bool, False for padding. A False row goes to no expert and does not
        count in statistics. The y of the row is 0. None: all rows are tokens.

    Returns:
      (y, state). The state has the same bias and this call's statistics; see `moe.apply`.

    Raises:
      LayerError: As for `moe.apply`; a parameter is missing; or the config does not describe one of
        the parameters.
      RankMismatchError: `x` is not `[batch, length, embed]`.
      ShardingError: As `moe.apply` raises it.
    """
    check_residual(x, config.embed)
    read_keys(keys)
    described = specs(config)
    check_params(described, params, path=path, create="moe_block.specs(config)")
    x = place(x, RESIDUAL)
    if config.norm is not None:
        scale = use(params["norm"], described["norm"], path=path_of(path, "norm"))
        x = norm.apply(config.norm, scale, x, dtype=config.moe.dtypes.compute)
    x = place(x.astype(config.moe.dtypes.compute), OPERAND)
    y, state = moe.apply(
        config.moe, params["moe"], x, keys=keys, state=state, path=path_of(path, "moe"), valid=valid
    )
    # Give the result the same name as in an MLP, so that the remat policy "blocks" keeps it too.
    return checkpoint_name(place(y, RESIDUAL), "mlp_down"), state
