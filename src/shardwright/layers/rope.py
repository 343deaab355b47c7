"""Rotary position embeddings by the positions of tokens."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.errors import LayerError, Problem, RankMismatchError, raise_problems


def rope(x: jax.Array, positions: Any, *, theta: float = 10_000.0) -> jax.Array:
    """Rotate queries or keys by the positions of their tokens (Su et al. 2021), in float32; return them in their own dtype.

    Element i of the first half of a head and element i of its second half are one point, turned by
    `position * theta ** (-2i / head_dim)`. Every token goes by its own position, so it serves permuted sequences, packed ones and
    those that go on after a cache alike; nothing is sent, however `x` is sharded over batch, length and heads.

    >>> rope(jnp.ones((1, 2, 1, 2)), jnp.array([[0, 3]]))[0, :, 0].round(2)
    Array([[ 1.  ,  1.  ],
           [-1.13, -0.85]], dtype=float32)

    Args:
      x: `[batch, length, heads, head_dim]`, as attention takes them.
      positions: `[batch, length]` integers, or `[1, length]` for all sequences alike. A negative one is no token: its row is
        rotated as at position 0, and attention does not look at it.
      theta: the base of the frequencies.

    Raises:
      RankMismatchError: shapes that do not go together, or an odd `head_dim`; all of it at once.
      LayerError: positions that are no integers, or `theta` not above 0.
    """
    raise_problems(_problems(x, positions, theta))
    half = x.shape[-1] // 2
    frequencies = np.float32(theta ** (-np.arange(half) / half)).reshape(1, 1, 1, half)
    angles = (
        jnp.maximum(jnp.asarray(positions), 0).astype(jnp.float32)[:, :, None, None] * frequencies
    )
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)


def _problems(x: Any, positions: Any, theta: Any) -> list[Problem]:
    shape, where = np.shape(x), np.shape(positions)
    found = []
    if len(shape) != 4 or shape[-1] % 2:
        fix = "pass queries or keys as [batch, length, heads, head_dim], of an even head_dim"
        found.append(
            Problem(error=RankMismatchError, what=f"it has shape {shape}", path="x", fix=fix)
        )
    elif len(where) != 2 or where[1] != shape[1] or where[0] not in (1, shape[0]):
        fix = f"pass {shape[:2]}, one per token, or {(1, shape[1])}; attention.next_positions gives those after a cache"
        found.append(
            Problem(
                error=RankMismatchError,
                what=f"shape {where}, and x has {shape}",
                path="positions",
                fix=fix,
            )
        )
    dtype = getattr(positions, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        what = f"it is {type(positions).__name__ if dtype is None else dtype}, not an array of integers"
        found.append(Problem(error=LayerError, what=what, path="positions", fix="pass int32"))
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta < math.inf:
        found.append(
            Problem(
                error=LayerError,
                what=f"theta={theta!r}",
                path="theta",
                fix="pass a number above 0, such as 10_000.0",
            )
        )
    return found
