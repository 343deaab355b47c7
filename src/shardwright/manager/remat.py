"""Remat policies: which values are saved for the backward pass, and in which memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax

from shardwright.errors import StrategyError
from shardwright.manager.core import Manager
from shardwright.manager.memory import DEVICE, host_kind
from shardwright.vocabulary.axes import Memory

RematPolicy = Callable[..., Any]


def remat_policy(manager: Manager, names: Iterable[str] = (), *, dots: bool = False) -> RematPolicy:
    """Return a policy of `jax.checkpoint` that saves values by their names.

    Args:
      manager: The manager. Its rules of `[memory]` say where the values live, and may name further
        values.
      names: Names of `checkpoint_name`.
      dots: Whether matmuls without batch dims are saved too.

    Raises:
      StrategyError: A name is not text, or the backend lacks the memory that a rule names.
    """
    for name in (names := tuple(names)):
        if not isinstance(name, str):
            what = f"the name {name!r} is not text"
            raise StrategyError(what, fix='write pm.remat_policy("a", "b"), one argument per name')
    saved = manager.rules.saved
    every = tuple(dict.fromkeys([*names, *(name for name, _ in saved.names)]))
    # Return the same policy each time, because JAX traces again for another function.
    policy: RematPolicy = manager.remember(
        ("remat_policy", every, dots), lambda: _policy(manager, every, dots=dots)
    )
    return policy


def _policy(manager: Manager, names: tuple[str, ...], *, dots: bool) -> RematPolicy:
    saved = manager.rules.saved
    policies = jax.checkpoint_policies
    on_host = [name for name in names if saved.of(name) is Memory.HOST]
    on_device = [name for name in names if saved.of(name) is Memory.DEVICE]
    offloads_dots = dots and saved.memory is Memory.HOST
    kind = host_kind(manager.mesh, saved.ref) if on_host or offloads_dots else ""
    by_name: RematPolicy = policies.save_only_these_names(*on_device)
    if on_host:
        by_name = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=on_device,
            names_which_can_be_offloaded=on_host,
            offload_src=DEVICE,
            offload_dst=kind,
        )
    if not dots:
        return by_name
    of_dots: RematPolicy = policies.dots_with_no_batch_dims_saveable
    if offloads_dots:
        of_dots = policies.offload_dot_with_no_batch_dims(DEVICE, kind)

    def policy(primitive: Any, *avals: Any, **parameters: Any) -> Any:
        # JAX's `save_from_both_policies` does not combine policies that offload.
        chosen = by_name if primitive.name == "name" else of_dots
        return chosen(primitive, *avals, **parameters)

    return policy
