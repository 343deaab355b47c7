"""Refuse leaves and dtypes that a move cannot keep as they are."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.errors import Problem, ShardingError
from shardwright.reshard.route import local_dtype
from shardwright.vocabulary.integers import quoted
from shardwright.vocabulary.read import floating

# Dtypes that floating-point leaves may have after a move.
FLOATS: Final = floating(fix="pass a floating-point dtype, such as jnp.bfloat16")


def check_value(path: str, value: Any) -> list[Problem]:
    """Return a problem if a leaf on the host is not a number, or does not fit its dtype in JAX."""
    if hasattr(value, "dtype") and not isinstance(value, (np.ndarray, np.generic)):
        return []
    # JAX has accepted the dtypes of JAX arrays and abstract leaves. The dtypes of leaves on the
    # host are not checked yet.
    host = np.asarray(value)
    if not _is_number(host.dtype):
        what = f"{quoted(value)} is not an array or a number that JAX can hold"
        return [_problem(path, what, "leave it out of the tree")]
    if host.dtype.kind not in "iu" or not host.size:
        return []
    range_ = np.iinfo(local_dtype(host.dtype))
    if range_.min <= int(host.min()) and int(host.max()) <= range_.max:
        return []
    what = f"{host.dtype} has values that do not fit {range_.dtype}, its dtype in JAX"
    return [_problem(path, what, "set jax_enable_x64, or leave it out of the tree")]


def check_alive(path: str, value: Any) -> list[Problem]:
    """Return a problem if an array was deleted."""
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    if not is_array or not value.is_deleted():
        return []
    fix = "pass the arrays that the last step or the last move returned"
    return [_problem(path, "the array is deleted: it was donated", fix)]


def is_wide_enough(dtype: np.dtype) -> bool:
    """Tell whether XLA can move arrays of a dtype, which must have at least 4 bits.

    On elements of 2 bits, XLA's collectives write past the memory of the result, which ends the
    process. This happens on CPUs under JAX 0.10.2 and 0.12.0.
    """
    return int(jax.dtypes.itemsize_bits(dtype)) >= 4


def _problem(path: str, what: str, fix: str) -> Problem:
    return Problem(error=ShardingError, what=what, path=path, fix=fix)


def _is_number(dtype: np.dtype) -> bool:
    """Tell whether JAX has arrays of a dtype, or of this dtype cut to 32 bits."""
    if not (dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number)):
        return False
    # NumPy's longdouble and clongdouble are wider, and JAX has no such dtypes.
    return dtype.itemsize <= (16 if dtype.kind == "c" else 8)
