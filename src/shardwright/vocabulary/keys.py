"""Read a PRNG key that callers pass: a typed key, or a key of the old kind (uint32)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def as_key(value: Any) -> jax.Array | None:
    """Return one typed key, or None if the value is not one key.

    A key of the old kind, the uint32 array of `jax.random.PRNGKey`, is wrapped. A batch of keys is
    not one key.

    >>> as_key(jax.random.PRNGKey(0)) == jax.random.key(0), as_key(0)
    (Array(True, dtype=bool), None)
    """
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        return None
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return value if shape == () else None
    # A key of the old kind is one dim of uint32 words. A batch of keys has more dims.
    if dtype != jnp.uint32 or len(shape) != 1:
        return None
    try:
        key: jax.Array = jax.random.wrap_key_data(jnp.asarray(value))
    except (TypeError, ValueError):  # data of another length than that of a key
        return None
    return key
