"""The recipes: how the scales of fp8 operands are chosen, as frozen values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import jax.numpy as jnp

from shardwright.errors import LayerError, did_you_mean
from shardwright.vocabulary.integers import read_integer

E4M3: Final = "float8_e4m3fn"  # largest value 448
E5M2: Final = "float8_e5m2"  # largest value 57,344
BLOCK: Final = 32

_FORMATS: Final = (E4M3, E5M2)
_ALGORITHMS: Final = ("max", "most_recent")


def _check_formats(recipe: Any) -> None:
    for name in ("forward", "backward"):
        if getattr(recipe, name) not in _FORMATS:
            raise LayerError(
                f"{name}={getattr(recipe, name)!r} is not an fp8 format",
                fix=f"write one of {', '.join(_FORMATS)}",
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DelayedScaling:
    """One scale per tensor, from the largest values of earlier updates.

    Attributes:
      margin: The scale is divided by 2^margin.
      history: Number of updates that are remembered.
      algorithm: "max": the scale follows the largest value of the history. "most_recent": it
        follows that of the last update.
      forward: Format of activations and kernels.
      backward: Format of gradients.

    Raises:
      LayerError: A value is not valid.
    """

    margin: int = 0
    history: int = 1024
    algorithm: str = "max"
    forward: str = E4M3
    backward: str = E5M2

    def __post_init__(self) -> None:
        read_integer("history", self.history, error=LayerError, fix="pass history=1024")
        read_integer("margin", self.margin, error=LayerError, least=0, fix="pass margin=0")
        _check_formats(self)
        if self.algorithm not in _ALGORITHMS:
            raise LayerError(
                f"algorithm={self.algorithm!r} is unknown",
                fix=f"write one of {', '.join(_ALGORITHMS)}",
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CurrentScaling:
    """One scale per tensor, from the largest value of the tensor itself. There is no state.

    Attributes:
      forward: Format of activations and kernels.
      backward: Format of gradients.

    Raises:
      LayerError: A format is unknown.
    """

    forward: str = E4M3
    backward: str = E5M2

    def __post_init__(self) -> None:
        _check_formats(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockScaling:
    """MXFP8: a power of two as the scale of each block of 32 along a contracted dim. No state.

    Attributes:
      forward: Format of activations and kernels.
      backward: Format of gradients.

    Raises:
      LayerError: A format is unknown.
    """

    forward: str = E4M3
    backward: str = E4M3

    def __post_init__(self) -> None:
        _check_formats(self)


Recipe = DelayedScaling | CurrentScaling | BlockScaling

RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType(
    {"delayed": DelayedScaling(), "current": CurrentScaling(), "mxfp8": BlockScaling()}
)


def read_recipe(value: Any) -> Recipe | None:
    """Return a recipe, given a recipe, its name, or None.

    >>> read_recipe("current")
    CurrentScaling(forward='float8_e4m3fn', backward='float8_e5m2')

    Raises:
      LayerError: The name is unknown. Or it is NVFP4, which has four bits.
    """
    if value is None or isinstance(value, Recipe):
        return value
    known = ", ".join(RECIPES)
    if not isinstance(value, str):
        raise LayerError(
            f"recipe is a {type(value).__name__}", path="recipe", fix=f"pass one of {known}"
        )
    if value.lower() in RECIPES:
        return RECIPES[value.lower()]
    if "fp4" in value.lower():
        raise refuse_four_bits(value)
    hint = did_you_mean(value, RECIPES)
    raise LayerError(
        f"recipe={value!r} is unknown", path="recipe", fix=f"{hint} write one of {known}".strip()
    )


def refuse_four_bits(name: str) -> LayerError:
    """Return the error for a recipe of four bits."""
    return LayerError(
        f"the recipe {name} has four bits, and layers compute in eight or more",
        path="recipe",
        fix='use "mxfp8", which also has one scale per block',
    )


def largest(dtype: Any) -> float:
    """Return the largest finite value of a format."""
    return float(jnp.finfo(dtype).max)
