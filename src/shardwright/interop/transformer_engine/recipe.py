"""Recipes of low precision under TransformerEngine's names, and the contexts that enter them."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

from shardwright.errors import LayerError
from shardwright.interop.transformer_engine.sharding import (
    AutocastSettings,
    MeshResource,
    current_settings,
    settings_entered,
)
from shardwright.layers import fp8
from shardwright.layers.fp8.recipe import E4M3, E5M2, refuse_four_bits


class Format(enum.Enum):
    """The formats of the matmuls. HYBRID means e4m3 forward and e5m2 for gradients."""

    E2M1 = "e2m1"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


@dataclasses.dataclass(frozen=True)
class DelayedScaling:
    """Scales from the largest values of earlier steps."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclasses.dataclass(frozen=True)
class Float8CurrentScaling:
    """Scales from the largest value of the tensor itself."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclasses.dataclass(frozen=True)
class MXFP8BlockScaling:
    """Scales that are powers of two, one for each block of 32 values."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False


@dataclasses.dataclass(frozen=True)
class NVFP4BlockScaling:
    """Four bits in blocks of 16. `autocast` raises an error for this recipe."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False


# Fields that have only one supported value.
_FIXED: Final[dict[str, Any]] = {
    "scaling_factor_compute_algo": None,
    "reduce_amax": True,
    "fp8_dpa": False,
    "fp8_mha": False,
    "backward_override": None,
    "use_power_2_scales": False,
    "enable_2d_quantization": False,
}


def read_recipe(recipe: Any) -> fp8.Recipe:
    """Return the recipe of `shardwright.layers.fp8` that corresponds to a recipe of this module.

    Args:
      recipe: A recipe of this module. None means `DelayedScaling()`.

    Raises:
      LayerError: The value is not a recipe, the recipe has four bits, or a field has an unsupported
        value.
    """
    given = DelayedScaling() if recipe is None else recipe
    if isinstance(given, NVFP4BlockScaling):
        raise refuse_four_bits("NVFP4BlockScaling")
    if not isinstance(given, DelayedScaling | Float8CurrentScaling | MXFP8BlockScaling):
        raise LayerError(
            f"recipe is a {type(given).__name__}",
            path="recipe",
            fix="pass recipe.DelayedScaling(), Float8CurrentScaling() or MXFP8BlockScaling()",
        )
    for name, value in _FIXED.items():
        if getattr(given, name, value) != value:
            raise _unsupported(given, name, f"leave it out; only {value!r} is supported")
    # Gradients have a wider range than activations, and HYBRID gives them more exponent bits.
    formats = {Format.E4M3: (E4M3, E4M3), Format.HYBRID: (E4M3, E5M2)}.get(given.fp8_format)
    if formats is None:
        raise _unsupported(given, "fp8_format", "pass Format.HYBRID or Format.E4M3")
    forward, backward = formats
    if isinstance(given, Float8CurrentScaling):
        return fp8.CurrentScaling(forward=forward, backward=backward)
    if isinstance(given, MXFP8BlockScaling):
        # TransformerEngine does not read the margin of this recipe either.
        if given.margin != 0:
            warnings.warn(
                f"MXFP8BlockScaling(margin={given.margin!r}): the margin has no effect, as in "
                "TransformerEngine; only DelayedScaling uses a margin",
                UserWarning,
                stacklevel=4,
            )
        return fp8.BlockScaling(forward=forward, backward=backward)
    if given.amax_compute_algo not in ("max", "most_recent"):
        raise _unsupported(given, "amax_compute_algo", 'pass "max" or "most_recent"')
    return fp8.DelayedScaling(
        margin=given.margin,
        history=given.amax_history_len,
        algorithm=str(given.amax_compute_algo),
        forward=forward,
        backward=backward,
    )


def _unsupported(recipe: Any, name: str, fix: str) -> LayerError:
    return LayerError(
        f"{type(recipe).__name__}({name}={getattr(recipe, name)!r}) is not supported",
        path="recipe",
        fix=fix,
    )


def current_recipe() -> fp8.Recipe | None:
    """Return the recipe that `autocast` has entered, or None."""
    recipe: fp8.Recipe | None = current_settings().recipe
    return recipe


@contextlib.contextmanager
def autocast(
    enabled: bool = False, recipe: Any = None, mesh_resource: MeshResource | None = None
) -> Iterator[None]:
    """Set the recipe and the `MeshResource` of this thread, and restore both on exit.

    Both are part of jit's cache key, so a jitted function is traced again under another recipe or
    `MeshResource`. If enabled, the matmuls of the modules run in fp8 on every platform. A platform
    without fp8 units computes them in wider floats.

    Args:
      enabled: Whether to compute in fp8.
      recipe: The recipe, which is ignored if `enabled` is False. Defaults to `DelayedScaling()`.
      mesh_resource: The mesh axes of each kind of parallelism. Defaults to none.

    Raises:
      LayerError: The recipe is not supported.
    """
    # A recipe that is not used is not checked, as in TransformerEngine.
    own = read_recipe(recipe) if enabled else None
    resource = MeshResource() if mesh_resource is None else mesh_resource
    with settings_entered(AutocastSettings(resource=resource, recipe=own)):
        yield


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = False, fp8_recipe: Any = None, mesh_resource: MeshResource | None = None
) -> Iterator[None]:
    """Enter `autocast` under its old name, with a `DeprecationWarning`."""
    # contextlib adds two frames between this one and the `with` of the caller.
    warnings.warn(
        "fp8_autocast is deprecated; write autocast(enabled, recipe=...)",
        DeprecationWarning,
        stacklevel=3,
    )
    with autocast(enabled, fp8_recipe, mesh_resource):
        yield
