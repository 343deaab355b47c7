"""The computation dtype of a layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardwright.errors import LayerError, did_you_mean


def canonicalize_dtype(*args: Any, dtype: Any = None, inexact: bool = True) -> Any:
    """Return the dtype to which arguments should be cast before a computation.

    Args:
      *args: Arrays and numbers; None is ignored. Their common dtype (`jax.numpy.result_type`) is
        returned, promoted with float32 if it is not inexact.
      dtype: Returned unchanged, if given.
      inexact: Whether the result must be a float or complex dtype, as for a mean or a norm.

    Raises:
      LayerError: The given dtype is unknown or not inexact, the arguments have no common dtype, or
        neither arguments nor a dtype are given. (It is a ValueError.)

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
    operands = [arg for arg in args if arg is not None]
    if not operands:
        raise LayerError(
            "neither an argument nor a dtype is given",
            fix="pass an array, or dtype=",
        )
    try:
        common = jnp.result_type(*operands)
    except ValueError as error:
        dtypes = ", ".join(dict.fromkeys(str(jnp.result_type(arg)) for arg in operands))
        raise LayerError(
            f"{dtypes} have no common dtype, because JAX does not promote them",
            fix="cast the arguments, or pass dtype=",
        ) from error
    if inexact and not jnp.issubdtype(common, jnp.inexact):
        # JAX does not promote integers smaller than int8.
        return (
            jnp.promote_types(jnp.float32, common)
            if jax.dtypes.itemsize_bits(common) >= 8
            else jnp.dtype(jnp.float32)
        )
    return common


def _known(dtype: Any) -> Any:
    try:
        return jnp.dtype(dtype)
    except TypeError as error:
        hint = did_you_mean(str(dtype), ("bfloat16", "float16", "float32", "float64", "complex64"))
        raise LayerError(
            f"{dtype!r} is not a dtype", fix=hint or "give a dtype, such as jnp.bfloat16"
        ) from error
