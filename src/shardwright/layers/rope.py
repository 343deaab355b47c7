"""Rotary position embeddings by the positions of tokens."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.errors import LayerError, Problem, RankMismatchError, raise_problems


def rope(x: jax.Array, positions: Any, *, theta: float = 10_000.0) -> jax.Array:
    """Rotate queries or keys by the positions of their tokens (Su et al. 2021).

    Element i of the first half of a head and element i of its second half form a point, rotated by
    the angle `position * theta ** (-2i / head_dim)`, in float32. Every token has its own position,
    so sequences may be permuted, packed, or continue a cache. Nothing is sent, if `x` is sharded
    over batch, length or heads.

    >>> rope(jnp.ones((1, 2, 1, 2)), jnp.array([[0, 3]]))[0, :, 0].round(2)
    Array([[ 1.  ,  1.  ],
           [-1.13, -0.85]], dtype=float32)

    Args:
      x: `[batch, length, heads, head_dim]`, as attention takes them.
      positions: `[batch, length]` integers, or `[1, length]` if all sequences have the same. A
        negative position marks padding: the row is rotated as at position 0, and attention ignores
        it.
      theta: Base of the frequencies.

    Returns:
      An array like `x`.

    Raises:
      RankMismatchError: Shapes do not fit each other, or `head_dim` is odd. The error lists all
        problems.
      LayerError: Positions are not integers, or `theta` is not positive.
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
    shape, given = np.shape(x), np.shape(positions)
    problems = []
    if len(shape) != 4 or shape[-1] % 2:
        fix = "pass queries or keys as [batch, length, heads, head_dim], with an even head_dim"
        problems.append(
            Problem(error=RankMismatchError, what=f"it has shape {shape}", path="x", fix=fix)
        )
    elif len(given) != 2 or given[1] != shape[1] or given[0] not in (1, shape[0]):
        fix = (
            f"pass shape {shape[:2]}, one per token, or {(1, shape[1])}; attention.next_positions "
            "returns those that follow a cache"
        )
        problems.append(
            Problem(
                error=RankMismatchError,
                what=f"it has shape {given}, and x has {shape}",
                path="positions",
                fix=fix,
            )
        )
    dtype = getattr(positions, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        given_type = type(positions).__name__ if dtype is None else dtype
        what = f"it is {given_type}, not an array of integers"
        problems.append(Problem(error=LayerError, what=what, path="positions", fix="pass int32"))
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta < math.inf:
        problems.append(
            Problem(
                error=LayerError,
                what=f"theta={theta!r} is not a positive number",
                path="theta",
                fix="pass a positive number, such as 10_000.0",
            )
        )
    return problems
