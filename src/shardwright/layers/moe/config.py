"""Options and parameters of an MoE layer."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp

from shardwright.errors import LayerError
from shardwright.layers.activation import check_names
from shardwright.layers.dtypes import FLOAT32, Dtypes
from shardwright.layers.inputs import check_fields, check_number
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.axes import EMBED, EXPERT_GATE
from shardwright.vocabulary.integers import read_integer
from shardwright.vocabulary.layouts import (
    ColumnWise,
    ExpertColumnWiseAlt,
    ExpertRowWiseAlt,
    RowWise,
)

# For these activations f(0) is not 0. A token of zeros then has other gradients than a free slot.
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
    divided among the devices that send tokens, so the mesh decides which are dropped.

    Attributes:
      factor: Capacity of an expert ÷ its tokens under an even load, such as 1.25.
    """

    factor: float

    def __post_init__(self) -> None:
        check_number("factor", self.factor, sign="positive", fix="write CapacityFactor(1.25)")

    def slots(self, tokens: int, per_token: int, experts: int) -> int:
        """Return the number of slots that each expert has for the tokens of one device."""
        return math.ceil(tokens * per_token / experts * self.factor)


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
      shared: Number of shared experts, which every token goes to.
      activation: Name of the gate's activation; see `shardwright.layers.activation`.
      balance_loss: Factor of the loss for an even load (Fedus et al., arXiv:2101.03961, eq. 4).
      z_loss: Factor of the loss for small router logits (Zoph et al., arXiv:2202.08906, eq. 5).
      exchange: How tokens are sent: "slots" sends all slots of the experts, "ragged" only the rows
        that tokens fill. "auto" chooses; `moe.explain` says which one and why.
      matmul: How the experts multiply their slots: "padded" multiplies all of them, "ragged" only
        the filled ones. "auto" chooses; `moe.explain` says which one and why.
      dtypes: Dtypes of the experts, their matmuls and the result. The router is float32.
      recipe: None: experts are not computed in fp8. Other values are refused.

    Raises:
      LayerError: An option is not valid.
    """

    embed: int
    hidden: int
    experts: int
    per_token: int
    capacity: Dropless | CapacityFactor = Dropless()
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    shared: int = 0
    activation: str = "silu"
    balance_loss: float = 0.0
    z_loss: float = 0.0
    exchange: Literal["auto", "slots", "ragged"] = "auto"
    matmul: Literal["auto", "padded", "ragged"] = "auto"
    dtypes: Dtypes = FLOAT32
    recipe: None = None

    def __post_init__(self) -> None:
        if self.recipe is not None:
            raise LayerError(
                f"recipe={self.recipe!r}: experts of an MoE layer are not computed in fp8",
                fix="leave it out here; attention and MLPs of the same stack can have it",
            )
        for name in ("embed", "hidden", "experts", "per_token", "groups", "top_groups"):
            _check_size(name, getattr(self, name), least=1)
        _check_size("shared", self.shared, least=0)
        _check_choice("score", self.score, ("softmax", "sigmoid"))
        _check_choice("exchange", self.exchange, ("auto", "slots", "ragged"))
        _check_choice("matmul", self.matmul, ("auto", "padded", "ragged"))
        check_names((self.activation,))
        check_fields(self, normalize=bool, dtypes=Dtypes)
        check_number("scale", self.scale, sign="positive", fix="write scale=1.0")
        for name in ("balance_loss", "z_loss"):
            fix = f"write {name}=0.01, or 0 for none"
            check_number(name, getattr(self, name), sign="not negative", fix=fix)
        if self.matmul == "ragged" and self.activation in NOT_ZERO_AT_ZERO:
            raise LayerError(
                f'matmul="ragged" with the activation {self.activation}, which is not 0 at 0: a '
                "free slot would differ from a token of zeros",
                fix='write matmul="padded"',
            )
        if not isinstance(self.capacity, Dropless | CapacityFactor):
            raise LayerError(
                f"capacity={self.capacity!r} is neither Dropless() nor a Factor",
                fix="write capacity=CapacityFactor(1.25), or Dropless()",
            )
        if self.exchange == "ragged" and not isinstance(self.capacity, Dropless):
            raise LayerError(
                'exchange="ragged" has no slots, and a capacity limits slots',
                fix='write capacity=Dropless(), or exchange="slots"',
            )
        if self.exchange == "ragged" and self.matmul == "padded":
            raise LayerError(
                'exchange="ragged" has no slots, and matmul="padded" multiplies slots',
                fix='leave matmul out, or write exchange="slots"',
            )
        if self.experts % self.groups:
            raise LayerError(
                f"{self.experts} experts do not divide into {self.groups} groups",
                fix="give a number of groups that divides the number of experts",
            )
        if self.top_groups > self.groups:
            raise LayerError(
                f"top_groups={self.top_groups} is more than the {self.groups} groups",
                fix=f"give at most {self.groups}",
            )
        if self.per_token > self.pickable:
            where = "" if self.groups == 1 else f" in the {self.top_groups} best groups"
            raise LayerError(
                f"per_token={self.per_token} is more than the {self.pickable} experts{where}",
                fix=f"give at most {self.pickable}",
            )

    @property
    def pickable(self) -> int:
        """Number of experts that a token may pick from."""
        return self.experts // self.groups * self.top_groups

    @property
    def has_loss(self) -> bool:
        """Whether the router has a loss of its own."""
        return bool(self.balance_loss or self.z_loss)


def _check_size(name: str, value: object, *, least: int) -> None:
    fix = f"give an integer of at least {least}"
    read_integer(name, value, error=LayerError, least=least, fix=fix)


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise LayerError(f"{name}={value!r} is unknown", fix=f"give one of {', '.join(known)}")


def specs(config: MoEConfig) -> dict[str, ArraySpec]:
    """Return the parameters of the router, of the experts and of the shared experts.

    Shapes: router [embed, experts]; gate and up [experts, embed, hidden]; down
    [experts, hidden, embed]; shared_gate and shared_up [embed, shared * hidden]; shared_down
    [shared * hidden, embed].
    """
    init = jax.nn.initializers.lecun_normal
    embed, hidden, experts = config.embed, config.hidden, config.experts
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
