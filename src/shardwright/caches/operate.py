"""Run operations on caches: compiled outside `jit`; policy `error` turns refusals into errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.sharding import Mesh, NamedSharding

from shardwright import _jax
from shardwright.caches.change import Change
from shardwright.caches.refusals import Refusal
from shardwright.caches.spec import Overflow
from shardwright.errors import CacheError
from shardwright.manager import context

C = TypeVar("C")


def operate(
    operation: Callable[..., Change[C]],
    cache: Any,
    *arrays: Any,
    overflow: Overflow,
    **static: Any,
) -> Change[C]:
    """Return `operation(cache, *arrays, **static)`.

    Args:
      operation: A method of a cache class, as a function. `jit` reuses its program in later calls.
      cache: The cache before the operation.
      *arrays: Trees of arrays.
      overflow: Policy of the cache.
      **static: Hashable values.

    Raises:
      CacheError: Something is refused, and the policy is `error`. Inside a trace, the refusal goes
        to `checkify` instead.
    """
    traced = _jax.in_trace()
    if traced:
        change = operation(cache, *arrays, **static)
    else:
        # Compile outside jit too: an eager call would trace and compile every shard_map again.
        # The static values are part of the key of `jit`, so their order must not depend on the
        # caller.
        change = _jitted(operation, tuple(sorted(static.items())), cache, *arrays)
    if overflow is not Overflow.ERROR:
        return change
    if traced:
        meanings = ", ".join(f"{code} {code.meaning}" for code in Refusal if code)
        # JAX refuses a program with this check unless `checkify.checkify` transforms it.
        checkify.check(
            jnp.all(change.ok),
            f"a cache refused entries, by these codes: {{codes}} ({meanings})",
            codes=change.refused,
        )
    else:
        change.check(fix='use overflow="report" to get refusals as values in the returned change')
    return change


@functools.partial(jax.jit, static_argnums=(0, 1))
def _jitted(
    operation: Callable[..., Change[C]],
    static: tuple[tuple[str, Any], ...],
    cache: Any,
    *arrays: Any,
) -> Change[C]:
    return operation(cache, *arrays, **dict(static))


def check_arrays(name: str, cache: Any) -> None:
    """Check that the arrays of a cache exist and are on the devices of the ambient manager.

    An error of JAX itself would name only one of the arrays. Inside a trace nothing is checked.

    Args:
      name: Name of the argument, for errors.
      cache: A tree of arrays.

    Raises:
      CacheError: Arrays were donated, or are on other devices.
    """
    if _jax.in_trace():
        return
    arrays = [array for array in jax.tree.leaves(cache) if isinstance(array, jax.Array)]
    if any(array.is_deleted() for array in arrays):
        raise CacheError(
            "its arrays are deleted: they were donated to a compiled function",
            path=name,
            fix="continue with the cache that the operation returned",
        )
    manager = context.current()
    if manager is None or not isinstance(manager.mesh, Mesh):
        return
    devices = set(manager.mesh.devices.flat)
    for sharding in (array.sharding for array in arrays):
        if isinstance(sharding, NamedSharding) and sharding.device_set != devices:
            raise CacheError(
                f"it is on the mesh {dict(sharding.mesh.shape)}, and the manager has the mesh "
                f"{dict(manager.mesh.shape)} of other devices",
                path=name,
                fix="move the cache with caches.reshard under this manager, or enter the manager "
                "that created the cache",
            )
