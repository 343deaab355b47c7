"""Tell which platform a walk is for.

A plan without a topology is for TPUs: their compiler adds copies, pads tiles and sums small arrays
whole. None of this is so on GPUs.
"""

from __future__ import annotations

from typing import Final

from shardwright.manager import context

# Names of the branches by platform that run on GPUs, of which a vendor has one.
_GPU: Final = ("cuda", "rocm", "gpu")


def for_gpus() -> bool:
    """Tell whether the walk is for GPUs, as `Trace.platform` says."""
    return bool(context.TARGET.value == "gpu")


def branch_names() -> tuple[str, ...]:
    """Return the platforms whose branch runs, as `jax.lax.platform_dependent` names them."""
    return _GPU if for_gpus() else ("tpu",)
