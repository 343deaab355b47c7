"""Remat policies by name: what a layer keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import jax

from shardwright.errors import LayerError
from shardwright.manager import context
from shardwright.manager.remat import remat_policy as manager_policy
from shardwright.resolution.rules import SavedActivations
from shardwright.vocabulary.axes import Memory

# The values of each layer that the forward pass keeps. The rest is computed again in the backward
# pass.
REMAT: Final[Mapping[str, Callable[..., Any] | None]] = MappingProxyType(
    {
        "none": None,
        "full": jax.checkpoint_policies.nothing_saveable,
        # "dots" keeps the results of matmuls without batch dims, such as a matmul with a weight.
        # The matmul of queries and keys, which has batch dims, is computed again.
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        # The names that the blocks give to their results by `checkpoint_name`.
        "blocks": jax.checkpoint_policies.save_only_these_names("attention_out", "mlp_down"),
    }
)

# Names of values of each layer that may be offloaded to the host, besides the results of matmuls.
_NAMES: Final = {
    "full": ("residual",),
    "dots": ("residual",),
    "blocks": ("residual", "attention_out", "mlp_down"),
}


def remat_policy(remat: str) -> Callable[..., Any] | None:
    """Return the JAX policy for a name of `REMAT`, given the memory rules of the ambient manager.

    Raises:
      LayerError: `remat` is "none", and a rule puts saved values into host memory.
    """
    manager = context.current()
    saved = SavedActivations() if manager is None else manager.rules.saved
    if saved == SavedActivations():
        return REMAT[remat]
    if remat == "none":
        if saved.ref is None:
            return None
        what = 'remat="none" keeps all values on the device, and a rule puts them on the host'
        raise LayerError(what, rule=str(saved.ref), fix='pass remat="full", "dots" or "blocks"')
    # If the residual stays on the device, leave it out: it is saved already as an argument of the
    # layer.
    names = [each for each in _NAMES[remat] if each != "residual" or saved.of(each) is Memory.HOST]
    policy: Callable[..., Any] = manager_policy(manager, names, dots=remat == "dots")
    return policy
