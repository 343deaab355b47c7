"""Run an operation on a cache: jitted where nothing traces, and what it refuses raised where the cache's policy says so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from shardwright import _jax
from shardwright.caches.base import Change, KVCache, Overflow, Refusal

C = TypeVar("C", bound=KVCache)


def operate(operation: Callable[..., Change[C]], cache: C, *arrays: Any, **static: Any) -> Change[C]:
    """Return `operation(cache, *arrays, **static)`.

    Args:
      operation: a function at the top of a module, so that its compiled form is found again.
      cache: what it changes.
      *arrays: trees of arrays.
      **static: hashable values.

    Raises:
      CacheError: something is refused, the policy is `error`, and nothing traces. While something does, `checkify` is told.
    """
    traced = _jax.in_trace()
    if traced:
        change = operation(cache, *arrays, **static)
    else:
        # shard_map by itself traces and compiles anew at every eager call.
        change = _jitted(operation, tuple(sorted(static.items())), cache, *arrays)
    if cache.spec.overflow is not Overflow.ERROR:
        return change
    if traced:
        meanings = ", ".join(f"{code} {code.meaning}" for code in Refusal if code)
        checkify.check(jnp.all(change.ok), f"a cache refused entries, by these codes: {{codes}} ({meanings})", codes=change.refused)
    else:
        change.check(fix='with overflow="report" refusals are values, in the change that is returned')
    return change


@functools.partial(jax.jit, static_argnums=(0, 1))
def _jitted(operation: Callable[..., Change[C]], static: tuple[tuple[str, Any], ...], cache: C, *arrays: Any) -> Change[C]:
    return operation(cache, *arrays, **dict(static))
