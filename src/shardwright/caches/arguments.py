"""Check what callers pass to a cache, before anything is traced."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.caches.spec import CacheSpec
from shardwright.errors import CacheError
from shardwright.vocabulary.read import array, integer, read_all, read_value, refuse

_LARGEST_INT32 = 2**31 - 1
_GROUP: Final = integer(
    fix="pass a Python int, the number of beams per sequence; the value is static"
)
_KEYS: Final = (
    "keys are [batch, q_length, kv_heads, head_dim], with the sizes of the cache and a q_length of "
    "at least 1"
)
_VALUES: Final = (
    "values are [batch, q_length, kv_heads, v_dim], with the sizes of the cache and the q_length "
    "of k"
)
_TOKENS: Final = "pass one bool per token: [batch, q_length]"
_CAST: Final = "if the cast is intended, pass {name}.astype({dtype!r})"
_CREATE: Final = '; or create the cache (in an engine: CacheShape(...)) with dtype="{own}"'


def check_append(spec: CacheSpec, k: Any, v: Any, valid: Any) -> None:
    """Check the arguments of `append`.

    Raises:
      CacheError: Shapes or dtypes do not fit the cache; all problems are reported.
    """
    rows = (spec.batch, _dim(k, 1) or _dim(v, 1) or 1, spec.kv_heads)
    keys = array((*rows, spec.head_dim), dtype=spec.dtype, layout=_KEYS, cast=_CAST + _CREATE)
    values = array((*rows, spec.v_dim), dtype=spec.dtype, layout=_VALUES, cast=_CAST + _CREATE)
    given = [("k", k, keys), ("v", v, values)]
    if valid is not None:
        given.append(("valid", valid, array(rows[:2], dtype="bool", layout=_TOKENS, cast=_CAST)))
    read_all(given, error=CacheError)


def check_source(spec: CacheSpec, source: CacheSpec) -> None:
    """Check that sequences of one cache fit into another cache.

    Raises:
      CacheError: Sizes or dtypes differ; all problems are reported.
    """
    names = ("kv_heads", "head_dim", "v_dim", "dtype")
    pairs = [(name, getattr(source, name), getattr(spec, name)) for name in names]
    refuse(
        CacheError,
        *(
            (
                actual != expected,
                "source",
                f"{name} is {actual}, and that of the cache is {expected}",
                f"create both caches with the same {name}",
            )
            for name, actual, expected in pairs
        ),
    )


def read_group(spec: CacheSpec, group: int | None) -> int:
    """Return the argument `group` of `reorder`. None means all slots.

    Raises:
      CacheError: `group` is not a positive integer, or does not divide the number of slots.
    """
    if group is None:
        return spec.batch
    size: int = read_value("group", group, _GROUP, error=CacheError)
    if spec.batch % size:
        raise CacheError(
            f"{spec.batch} slots do not divide into groups of {size}",
            path="group",
            fix="pass the number of beams per sequence, which divides the number of slots",
        )
    return size


def integers(name: str, values: Any, *, size: int | None = None, per: str = "slot") -> Any:
    """Return `[n]` int32. A value that does not fit int32 is clipped, and stays out of range.

    Args:
      name: Name of the argument, for messages.
      values: Integers, as an array or a list.
      size: Required n. None allows any n except 0.
      per: What each integer belongs to, for messages.

    Raises:
      CacheError: The values are not integers, or have another shape.
    """
    array = values if isinstance(values, (jax.Array, np.ndarray)) else _array_of(name, values)
    shape = f"({'n' if size is None else size},)"
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise CacheError(
            f"{name} is {array.dtype}, not integers", path=name, fix=f"pass int32 of shape {shape}"
        )
    if array.ndim != 1 or not array.size or (size is not None and array.size != size):
        raise CacheError(
            f"{name} has shape {array.shape}, not {shape}",
            path=name,
            fix=f"pass one integer per {per}",
        )
    # These dtypes fit int32. uint32 does not: its large values would turn negative.
    if array.dtype.itemsize < 4 or array.dtype == np.int32:
        return array.astype(np.int32)
    # Clip before the cast: a plain cast would turn 2**32 into 0, which is the number of a slot.
    smallest = 0 if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else -_LARGEST_INT32
    numpy = np if isinstance(array, np.ndarray) else jnp
    return numpy.clip(array, smallest, _LARGEST_INT32).astype(np.int32)


def _array_of(name: str, values: Any) -> Any:
    try:
        # A list may contain traced values, which NumPy cannot read.
        has_jax = isinstance(values, (list, tuple)) and any(
            isinstance(value, jax.Array) for value in values
        )
        return jnp.asarray(values) if has_jax else np.asarray(values)
    except (TypeError, ValueError, OverflowError) as err:
        raise CacheError(
            f"{name}={values!r} is not a list of integers",
            path=name,
            fix="pass an int32 array, or a list of ints",
        ) from err


def _dim(array: Any, dim: int) -> int:
    shape = getattr(array, "shape", ())
    return int(shape[dim]) if len(shape) > dim else 0
