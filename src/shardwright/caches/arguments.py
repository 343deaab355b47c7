"""What callers give to a cache: shapes and dtypes checked before anything is traced, numbers of slots made safe to cast."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.caches.base import CacheSpec, KVCache
from shardwright.errors import CacheError, Problem, raise_problems
from shardwright.vocabulary.integers import read_integer

_MOST = 2**31 - 1


def check_append(spec: CacheSpec, k: Any, v: Any, valid: Any) -> None:
    """Check the arguments of `append`.

    Raises:
      CacheError: shapes or dtypes that do not go with the cache, all of them at once.
    """
    q_length = _dim(k, 1) or _dim(v, 1) or 1
    problems = [
        *_problems("k", k, (spec.batch, q_length, spec.kv_heads, spec.head_dim), spec.dtype),
        *_problems("v", v, (spec.batch, q_length, spec.kv_heads, spec.v_dim), spec.dtype),
    ]
    if valid is not None:
        problems += _problems("valid", valid, (spec.batch, q_length), "bool")
    raise_problems(problems)


def check_source(spec: CacheSpec, source: Any) -> None:
    """Check the source of `insert`.

    Raises:
      CacheError: it is no cache, or its sizes or dtype are others.
    """
    if not isinstance(source, KVCache):
        raise CacheError(
            f"source is {type(source).__name__}, not a cache",
            path="source",
            fix="prefill a cache of n slots and pass that",
        )
    problems = []
    for name in ("kv_heads", "head_dim", "v_dim", "dtype"):
        theirs, ours = getattr(source.spec, name), getattr(spec, name)
        if theirs != ours:
            fix = f"make both with one {name}"
            problems.append(
                Problem(
                    error=CacheError,
                    what=f"{name} is {theirs}, and {ours} here",
                    path="source",
                    fix=fix,
                )
            )
    raise_problems(problems)


def read_group(spec: CacheSpec, group: int | None) -> int:
    """Return the `group` of `reorder`, which defaults to all slots.

    Raises:
      CacheError: `group` is not a positive integer, or the slots do not divide into groups of that size.
    """
    if group is None:
        return spec.batch
    fix = "pass a Python int, the number of beams per sequence; it is static"
    group = read_integer("group", group, error=CacheError, fix=fix)
    if spec.batch % group:
        fix = "pass the number of beams per sequence, which divides the number of slots"
        raise CacheError(
            f"{spec.batch} slots do not divide into groups of {group}", path="group", fix=fix
        )
    return group


def integers(name: str, values: Any, *, size: int | None = None, per: str = "slot") -> Any:
    """Return `[n]` int32 that are what the caller said, or, beyond 32 bits, as far out of range as can be said.

    Args:
      name: of the argument.
      values: integers, as an array or a list of them.
      size: n; absent: any but 0.
      per: what each of them belongs to.

    Raises:
      CacheError: no integers, or another shape.
    """
    array = values if isinstance(values, (jax.Array, np.ndarray)) else _listed(name, values)
    want = f"({'n' if size is None else size},)"
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise CacheError(
            f"{name} is {array.dtype}, not integers", path=name, fix=f"pass int32 of shape {want}"
        )
    if array.ndim != 1 or not array.size or (size is not None and array.size != size):
        raise CacheError(
            f"{name} has shape {array.shape}, not {want}",
            path=name,
            fix=f"give one integer per {per}",
        )
    if array.dtype.itemsize < 4 or array.dtype == np.int32:
        return array.astype(np.int32)
    # A plain cast would make 0 of 2**32.
    least = 0 if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else -_MOST
    return (np if isinstance(array, np.ndarray) else jnp).clip(array, least, _MOST).astype(np.int32)


def destinations(spec: CacheSpec, source: KVCache, slots: Any) -> Any:
    """Return the slots that `insert` names, `[n]` int32; see `integers`.

    Raises:
      CacheError: no integers, or not one for each sequence.
    """
    per = f"sequence of the source; {spec.batch}, which is no slot, leaves a sequence out"
    return integers("slots", slots, size=source.batch, per=per)


def _listed(name: str, values: Any) -> Any:
    try:
        # One by one they may be known only to the running program, and then are nothing to NumPy.
        inside = isinstance(values, (list, tuple)) and any(
            isinstance(value, jax.Array) for value in values
        )
        return jnp.asarray(values) if inside else np.asarray(values)
    except (TypeError, ValueError, OverflowError) as err:
        raise CacheError(
            f"{name}={values!r} is no list of integers",
            path=name,
            fix="pass an array of int32, or a list of ints",
        ) from err


def _dim(array: Any, dim: int) -> int:
    shape = getattr(array, "shape", ())
    return int(shape[dim]) if len(shape) > dim else 0


def _problems(name: str, array: Any, shape: tuple[int, ...], dtype: str) -> list[Problem]:
    given = getattr(array, "shape", None)
    if given is None:
        what = f"it is {type(array).__name__}, not an array"
        return [
            Problem(error=CacheError, what=what, path=name, fix=f"pass {dtype} of shape {shape}")
        ]
    found = []
    if tuple(given) != shape:
        found.append(
            Problem(
                error=CacheError,
                what=f"shape {tuple(given)}, not {shape}",
                path=name,
                fix=_ORDER[name],
            )
        )
    if jnp.dtype(array.dtype) != jnp.dtype(dtype):
        fix = f"cast it where that is meant: {name}.astype({dtype!r})"
        if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            fix += f'; or make the cache, of an engine CacheShape(...), with dtype="{array.dtype}"'
        found.append(
            Problem(error=CacheError, what=f"dtype {array.dtype}, not {dtype}", path=name, fix=fix)
        )
    return found


_ORDER = {
    "k": "keys are [batch, q_length, kv_heads, head_dim], q_length at least 1, with the sizes of the cache",
    "v": "values are [batch, q_length, kv_heads, v_dim], with the q_length of k and the sizes of the cache",
    "valid": "one bool per token: [batch, q_length]",
}
