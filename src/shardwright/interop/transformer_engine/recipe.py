"""Recipes of low precision, and the contexts that enter them.

No recipe is built yet. Entering one is an error that names it, so that a program never runs in
another precision than it asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

from shardwright.errors import LayerError
from shardwright.interop.transformer_engine.sharding import MeshResource, global_shard_guard

_WORKS: Final = (
    "leave enabled out: the modules then compute in the dtype of their inputs, such as bfloat16"
)


class Format(enum.Enum):
    """A format of eight or four bits, forward and backward."""

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


@dataclasses.dataclass(frozen=True)
class MXFP8BlockScaling:
    """A power of two as the scale of each block of 32."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False


@dataclasses.dataclass(frozen=True)
class NVFP4BlockScaling:
    """Four bits in blocks of 16."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False


@contextlib.contextmanager
def autocast(
    enabled: bool = False, recipe: Any = None, mesh_resource: MeshResource | None = None
) -> Iterator[None]:
    """Set the recipe and the `MeshResource` of this thread, and restore both on exit.

    Both are part of jit's cache key: a jitted function is traced again under other ones.

    Args:
      enabled: Whether to compute in eight bits. That is not built yet.
      recipe: Which one. Ignored if not enabled.
      mesh_resource: The mesh axes of each kind of parallelism. Defaults to none.

    Raises:
      LayerError: `enabled` is true.
    """
    if enabled:
        name = "DelayedScaling" if recipe is None else type(recipe).__name__
        raise LayerError(f"the recipe {name} is not built yet", path="recipe", fix=_WORKS)
    with global_shard_guard(MeshResource() if mesh_resource is None else mesh_resource):
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
