"""Options and parameters of an MoE layer."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Final, Literal

import jax
import jax.numpy as jnp

from shardwright.errors import LayerError
from shardwright.layers.activation import ACTIVATION
from shardwright.layers.dtypes import FLOAT32, Dtypes
from shardwright.layers.inputs import SIZE
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.axes import EMBED, EXPERT_GATE
from shardwright.vocabulary.layouts import (
    ColumnWise,
    ExpertColumnWiseAlt,
    ExpertRowWiseAlt,
    RowWise,
)
from shardwright.vocabulary.read import instance, integer, number, passes, read_fields, refuse

LOSS: Final = number("not negative", fix="write {name}=0.01, or 0 for none")
NO_RECIPE: Final = passes(
    lambda recipe: recipe is None,
    "is given, and experts are not computed in fp8",
    fix="leave {name} out here; attention and MLPs of the same stack can have a recipe",
)
# None of these activations is 0 at 0. So a token of zeros has other gradients than an empty slot.
NOT_ZERO_AT_ZERO: Final = ("sigmoid", "clamped_linear")


@dataclasses.dataclass(frozen=True, slots=True)
class Dropless:
    """Every token reaches every expert that it picked.

    Each expert has a slot for every token of a device, so the buffers are `experts` times as large
    as the tokens.
    """

    def slots(self, tokens: int, per_token: int, experts: int) -> int:
        """Return the number of slots that each expert has for the tokens of one device."""
        del per_token, experts
        return tokens


@dataclasses.dataclass(frozen=True, slots=True)
class CapacityFactor:
    """A capacity factor: each expert has `factor` times the slots that an even load needs.

    Tokens without a slot are dropped, and counted in `MoEStats.dropped`. The slots of an expert are
    divided among the devices that send tokens, so which tokens are dropped depends on the mesh.

    Attributes:
      factor: Capacity of an expert ÷ its tokens under an even load, such as 1.25.
    """

    factor: Annotated[float, number("positive", fix="write CapacityFactor(1.25)")]

    def __post_init__(self) -> None:
        read_fields(self, error=LayerError)

    def slots(self, tokens: int, per_token: int, experts: int) -> int:
        """Return the number of slots that each expert has for the tokens of one device."""
        # Rounded up, so an expert has a slot even if a device has fewer tokens than there are
        # experts.
        return math.ceil(tokens * per_token / experts * self.factor)


CAPACITY: Final = instance(
    Dropless, CapacityFactor, fix="write capacity=CapacityFactor(1.25), or Dropless()"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """An MoE layer.

    Attributes:
      embed: Size of a token.
      hidden: Hidden size of each expert.
      experts: Number of experts.
      per_token: How many experts each token goes to; at most `experts`.
      capacity: `Dropless()` or `CapacityFactor(1.25)`.
      score: How the router scores experts: "softmax" over all of them, or "sigmoid" of each.
      normalize: Whether the weights of a token's experts are divided by their sum.
      scale: Factor of the weights of the routed experts.
      groups: Number of groups of experts. A token picks only from its best groups.
      top_groups: How many groups a token picks from; at most `groups`.
      shared: Number of shared experts. Every token goes to all of these.
      activation: Name of the gate's activation; see `shardwright.layers.activation`.
      balance_loss: Factor of the load-balancing loss (Fedus et al., arXiv:2101.03961, eq. 4).
      z_loss: Factor of the router z-loss, which keeps router logits small (Zoph et al.,
        arXiv:2202.08906, eq. 5).
      exchange: How tokens are sent: "slots" sends all slots of the experts, "ragged" only the rows
        that tokens fill. "auto" chooses; `moe.explain` says which one and why.
      matmul: How the experts multiply their slots: "padded" multiplies all of them, "ragged" only
        the filled ones. "auto" chooses; `moe.explain` says which one and why.
      dtypes: Dtypes of the experts, their matmuls and the result. The router is float32.
      recipe: Must be None: experts cannot be computed in fp8.

    Raises:
      LayerError: An option is not valid.
    """

    embed: Annotated[int, SIZE]
    hidden: Annotated[int, SIZE]
    experts: Annotated[int, SIZE]
    per_token: Annotated[int, SIZE]
    capacity: Annotated[Dropless | CapacityFactor, CAPACITY] = Dropless()
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: Annotated[float, number("positive", fix="write scale=1.0")] = 1.0
    groups: Annotated[int, SIZE] = 1
    top_groups: Annotated[int, SIZE] = 1
    shared: Annotated[int, integer(0, fix="give an integer of at least 0")] = 0
    activation: Annotated[str, ACTIVATION] = "silu"
    balance_loss: Annotated[float, LOSS] = 0.0
    z_loss: Annotated[float, LOSS] = 0.0
    exchange: Literal["auto", "slots", "ragged"] = "auto"
    matmul: Literal["auto", "padded", "ragged"] = "auto"
    dtypes: Dtypes = FLOAT32
    recipe: Annotated[None, NO_RECIPE] = None

    def __post_init__(self) -> None:
        read_fields(self, error=LayerError)
        where = "" if self.groups == 1 else f" in the {self.top_groups} best groups"
        ragged = self.exchange == "ragged"
        refuse(
            LayerError,
            (
                self.matmul == "ragged" and self.activation in NOT_ZERO_AT_ZERO,
                "",
                (
                    f'matmul="ragged" with the activation {self.activation}, which is not 0 at 0: '
                    "an empty slot would differ from a token of zeros"
                ),
                'write matmul="padded"',
            ),
            (
                ragged and not isinstance(self.capacity, Dropless),
                "",
                'exchange="ragged" has no slots, and a capacity limits slots',
                'write capacity=Dropless(), or exchange="slots"',
            ),
            (
                ragged and self.matmul == "padded",
                "",
                'exchange="ragged" has no slots, and matmul="padded" multiplies slots',
                'leave matmul out, or write exchange="slots"',
            ),
            (
                self.experts % self.groups,
                "",
                f"{self.experts} experts do not divide into {self.groups} groups",
                "give a number of groups that divides the number of experts",
            ),
            (
                self.top_groups > self.groups,
                "",
                f"top_groups={self.top_groups} is more than the {self.groups} groups",
                f"give at most {self.groups}",
            ),
            (
                self.per_token > self.pickable,
                "",
                f"per_token={self.per_token} is more than the {self.pickable} experts{where}",
                f"give at most {self.pickable}",
            ),
        )

    @property
    def pickable(self) -> int:
        """Number of experts that a token may pick from."""
        return self.experts // self.groups * self.top_groups

    @property
    def has_loss(self) -> bool:
        """Whether the router has a loss of its own."""
        return bool(self.balance_loss or self.z_loss)


def specs(config: MoEConfig) -> dict[str, ArraySpec]:
    """Return the parameters of the router, of the experts and of the shared experts.

    Shapes: router [embed, experts]; gate and up [experts, embed, hidden]; down
    [experts, hidden, embed]; shared_gate and shared_up [embed, shared * hidden]; shared_down
    [shared * hidden, embed].
    """
    init = jax.nn.initializers.lecun_normal
    embed, hidden, experts = config.embed, config.hidden, config.experts
    # Without `batch_axis`, the initializer would count the experts as inputs too, and return
    # weights that are too small.
    into = init(in_axis=-2, out_axis=-1, batch_axis=0)

    def expert(shape: tuple[int, ...], axes: Any) -> ArraySpec:
        return ArraySpec(shape, config.dtypes.param, axes, into)

    params = {
        "router": ArraySpec((embed, experts), jnp.float32, (EMBED, EXPERT_GATE), init()),
        "gate": expert((experts, embed, hidden), ExpertColumnWiseAlt),
        "up": expert((experts, embed, hidden), ExpertColumnWiseAlt),
        "down": expert((experts, hidden, embed), ExpertRowWiseAlt),
    }
    if config.shared:
        wide = config.shared * hidden
        dtype = config.dtypes.param
        params |= {
            "shared_gate": ArraySpec((embed, wide), dtype, ColumnWise, init()),
            "shared_up": ArraySpec((embed, wide), dtype, ColumnWise, init()),
            "shared_down": ArraySpec((wide, embed), dtype, RowWise, init()),
        }
    return params
