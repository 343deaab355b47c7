"""The recipes: how the scales of fp8 operands are chosen, as frozen values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final

import jax.numpy as jnp

from shardwright.errors import LayerError
from shardwright.vocabulary.read import Faults, FieldKind, integer, one_of, read_fields, read_value

E4M3: Final = "float8_e4m3fn"  # largest value 448
E5M2: Final = "float8_e5m2"  # largest value 57,344
# Number of elements that share a scale in MXFP8, by OCP Microscaling Formats 1.0.
BLOCK: Final = 32

FORMAT: Final = one_of((E4M3, E5M2))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DelayedScaling:
    """One scale per tensor, from the largest values that the tensor had at earlier updates.

    Attributes:
      margin: The scale is divided by 2^margin.
      history: Number of updates that are remembered.
      algorithm: "max": the scale follows the largest value of the history. "most_recent": it
        follows the value of the last update.
      forward: Format of activations and kernels.
      backward: Format of gradients.

    Raises:
      LayerError: A value is not valid.
    """

    # The defaults are those of TransformerEngine. Gradients have E5M2, which has one more bit of
    # exponent, because gradients spread over more powers of two than activations.
    margin: Annotated[int, integer(0, fix="pass margin=0")] = 0
    history: Annotated[int, integer(fix="pass history=1024")] = 1024
    algorithm: Annotated[str, one_of(("max", "most_recent"))] = "max"
    forward: Annotated[str, FORMAT] = E4M3
    backward: Annotated[str, FORMAT] = E5M2

    def __post_init__(self) -> None:
        read_fields(self, error=LayerError)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CurrentScaling:
    """One scale per tensor, from the largest value of the tensor itself. There is no state.

    Attributes:
      forward: Format of activations and kernels.
      backward: Format of gradients.

    Raises:
      LayerError: A format is unknown.
    """

    forward: Annotated[str, FORMAT] = E4M3
    backward: Annotated[str, FORMAT] = E5M2

    def __post_init__(self) -> None:
        read_fields(self, error=LayerError)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockScaling:
    """MXFP8: each block of 32 along a contracted dim is scaled by a power of two. No state.

    Attributes:
      forward: Format of activations and kernels.
      backward: Format of gradients.

    Raises:
      LayerError: A format is unknown.
    """

    # Gradients are E4M3 too: with a scale per 32 elements, one more bit of mantissa helps more than
    # one more bit of exponent.
    forward: Annotated[str, FORMAT] = E4M3
    backward: Annotated[str, FORMAT] = E4M3

    def __post_init__(self) -> None:
        read_fields(self, error=LayerError)


Recipe = DelayedScaling | CurrentScaling | BlockScaling

RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType(
    {"delayed": DelayedScaling(), "current": CurrentScaling(), "mxfp8": BlockScaling()}
)


def _read(name: str, value: Any) -> tuple[Any, Faults]:
    if value is None or isinstance(value, Recipe):
        return value, []
    if not isinstance(value, str):
        what = f"{name} is a {type(value).__name__}"
        return value, [(what, f"pass one of {', '.join(RECIPES)}")]
    if value.lower() not in RECIPES and "fp4" in value.lower():
        raise refuse_four_bits(value)
    _, faults = one_of(RECIPES).read(name, value.lower())
    return RECIPES.get(value.lower()), faults


# RECIPE reads a recipe, its name, or None.
RECIPE: Final = FieldKind(_read)


def read_recipe(value: Any) -> Recipe | None:
    """Return a recipe, given a recipe, its name, or None.

    >>> read_recipe("current")
    CurrentScaling(forward='float8_e4m3fn', backward='float8_e5m2')

    Raises:
      LayerError: The name is unknown. Or it is NVFP4, which has four bits.
    """
    recipe: Recipe | None = read_value("recipe", value, RECIPE, error=LayerError)
    return recipe


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
