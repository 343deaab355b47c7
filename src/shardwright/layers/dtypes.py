"""The dtype that a layer computes in."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from shardwright.errors import LayerError


def canonicalize_dtype(*args: Any, dtype: Any = None, inexact: bool = True) -> Any:
    """Return the dtype that arguments should be cast to before they are computed with.

    Args:
      *args: arrays and numbers; None is left out. Their common dtype (`jax.numpy.result_type`) is the answer, promoted with
        float32 if it is not inexact.
      dtype: returned as it is, instead of what the arguments have.
      inexact: whether the answer must be a float or complex dtype, as a mean or a norm needs.

    Raises:
      LayerError: (a ValueError) a given dtype that is not inexact, or neither arguments nor a dtype.

    >>> canonicalize_dtype(jnp.ones(2, jnp.int32), None)
    dtype('float32')
    >>> canonicalize_dtype(jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.int8)).name
    'bfloat16'
    """
    if dtype is not None:
        if inexact and not jnp.issubdtype(dtype, jnp.inexact):
            raise LayerError(f"dtype {jnp.dtype(dtype)} is not inexact", fix="give a float or complex dtype, or inexact=False")
        return dtype
    given = [arg for arg in args if arg is not None]
    if not given:
        raise LayerError("there is neither an argument nor a dtype to take the dtype of", fix="pass an array, or dtype=")
    found = jnp.result_type(*given)
    if inexact and not jnp.issubdtype(found, jnp.inexact):
        return jnp.promote_types(jnp.float32, found)
    return found
