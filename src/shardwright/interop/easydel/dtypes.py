"""The dtype that a layer computes in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardwright.errors import LayerError, did_you_mean


def canonicalize_dtype(*args: Any, dtype: Any = None, inexact: bool = True) -> Any:
    """Return the dtype that arguments should be cast to before they are computed with.

    Args:
      *args: arrays and numbers; None is left out. Their common dtype (`jax.numpy.result_type`) is the answer, promoted with
        float32 if it is not inexact.
      dtype: returned as it is, instead of what the arguments have.
      inexact: whether the answer must be a float or complex dtype, as a mean or a norm needs.

    Raises:
      LayerError: (a ValueError) a given dtype that is not inexact or that nobody knows, arguments that have no common dtype, or
        neither arguments nor a dtype.

    >>> canonicalize_dtype(jnp.ones(2, jnp.int32), None)
    dtype('float32')
    >>> canonicalize_dtype(jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.int8)).name
    'bfloat16'
    """
    if dtype is not None:
        known = _known(dtype)
        if inexact and not jnp.issubdtype(known, jnp.inexact):
            raise LayerError(
                f"dtype {known} is not inexact",
                fix="give a float or complex dtype, or inexact=False",
            )
        return dtype
    given = [arg for arg in args if arg is not None]
    if not given:
        raise LayerError(
            "there is neither an argument nor a dtype to take the dtype of",
            fix="pass an array, or dtype=",
        )
    try:
        found = jnp.result_type(*given)
    except ValueError as error:
        dtypes = ", ".join(dict.fromkeys(str(jnp.result_type(one)) for one in given))
        raise LayerError(
            f"{dtypes} have no common dtype: JAX promotes none of them",
            fix="cast the arguments, or pass dtype=",
        ) from error
    if inexact and not jnp.issubdtype(found, jnp.inexact):
        # Of integers smaller than int8 JAX knows no promotion.
        return (
            jnp.promote_types(jnp.float32, found)
            if jax.dtypes.itemsize_bits(found) >= 8
            else jnp.dtype(jnp.float32)
        )
    return found


def _known(dtype: Any) -> Any:
    try:
        return jnp.dtype(dtype)
    except TypeError as error:
        hint = did_you_mean(str(dtype), ("bfloat16", "float16", "float32", "float64", "complex64"))
        raise LayerError(
            f"{dtype!r} is no dtype", fix=hint or "give a dtype, such as jnp.bfloat16"
        ) from error
