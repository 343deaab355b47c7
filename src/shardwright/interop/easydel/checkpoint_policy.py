"""Rematerialization policies by the names that configuration files use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax

from shardwright.errors import LayerError, did_you_mean

_POLICIES: Final = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
)
# These take names or policies, and return a policy.
_FACTORIES: Final = (
    "save_anything_except_these_names",
    "save_any_names_but_these",
    "save_only_these_names",
    "save_from_both_policies",
)


def get_gradient_checkpoint_policy(name: str) -> Callable[..., Any]:
    """Return the policy of `jax.checkpoint_policies` with this name.

    Pass it to `jax.checkpoint(f, policy=...)`. The four names that begin with `save_` are
    factories: call the result with names, or with two policies, to get the policy.

    Raises:
      LayerError: The name is unknown. (It is a ValueError.)

    >>> get_gradient_checkpoint_policy(
    ...     "nothing_saveable"
    ... ) is jax.checkpoint_policies.nothing_saveable
    True
    """
    known = (*_POLICIES, *_FACTORIES)
    if name not in known:
        hint = did_you_mean(str(name), known) or f"name one of {', '.join(known)}"
        raise LayerError(f"unknown checkpoint policy {name!r}", fix=hint)
    policy: Callable[..., Any] = getattr(jax.checkpoint_policies, name)
    return policy
