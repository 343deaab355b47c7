"""Rotary position embeddings: of the positions of tokens, and, under the names that other code uses, of tables made before."""

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


def rotate_half(x: jax.Array) -> jax.Array:
    """Return `(-second half, first half)` along the last dim.

    Raises:
      RankMismatchError: the last dim is odd.
    """
    if x.shape[-1] % 2:
        raise RankMismatchError(
            f"the last dim of {x.shape} is odd: it has no halves", fix="rotate an even head_dim"
        )
    half = x.shape[-1] // 2
    return jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)


def apply_rotary_pos_emb(tensor: jax.Array, sin_: jax.Array, cos_: jax.Array) -> jax.Array:
    """Rotate `tensor`, which is BHTD, `[batch, heads, length, head_dim]`, by tables cut to its length (Su et al. 2021).

    Attention here takes BTHD, for which `rope` is. Row i of a table is that of row i of the tensor: for a permuted sequence, or one
    that goes on after a cache, gather the tables by position first.

    Args:
      tensor: queries or keys. `[batch, length, heads, head_dim]` has the same rank, and would be rotated by number of head: what
        the shapes give away is refused, a tensor of as many rows as the tables have is not looked into.
      sin_: `[batch or 1, heads or 1, length or more, head_dim]`.
      cos_: like `sin_`.

    Raises:
      RankMismatchError: the tables are of another rank than 4, shorter than the tensor, of another batch, number of heads or
        head_dim, or of two shapes; or dim 2 of the tensor can only be its heads.
    """
    for name, table in (("sin_", sin_), ("cos_", cos_)):
        _check_table(name, table.shape, tensor.shape)
    if sin_.shape != cos_.shape:
        what = f"sin_ has shape {sin_.shape}, and cos_ {cos_.shape}"
        raise RankMismatchError(
            what, path="cos_", fix="pass the sines and the cosines of the same angles"
        )
    length = tensor.shape[-2]
    return tensor * cos_[:, :, :length] + rotate_half(tensor) * sin_[:, :, :length]


def _check_table(name: str, table: tuple[int, ...], tensor: tuple[int, ...]) -> None:
    fix = "both are [batch, heads, length, head_dim]; a table has at least the tensor's length and exactly its head_dim"
    fits = len(tensor) == len(table) == 4 and table[2] >= tensor[2] and table[3] == tensor[3]
    fits = fits and all(
        mine in (1, theirs) for mine, theirs in zip(table[:2], tensor[:2], strict=True)
    )
    if fits and table[2] == tensor[1] > tensor[2]:
        fits = False
        fix = "dim 1 is as long as the table: for [batch, length, heads, head_dim] use layers.rope; for heads first cut the table yourself"
    if not fits:
        raise RankMismatchError(
            f"{name} has shape {table}, the tensor {tensor}", path=name, fix=fix
        )


def repeat_kv_bnsh(x: jax.Array, n_rep: int) -> jax.Array:
    """Return `[batch, heads * n_rep, length, head_dim]` of `[batch, heads, length, head_dim]`, copies adjacent.

    The attention of this package reads kv heads by number and never needs the copies.
    """
    return _repeat(x, n_rep, 1)


def repeat_kv_bsnh(x: jax.Array, n_rep: int) -> jax.Array:
    """Return `[batch, length, heads * n_rep, head_dim]` of `[batch, length, heads, head_dim]`, copies adjacent."""
    return _repeat(x, n_rep, 2)


def _repeat(x: jax.Array, n_rep: int, dim: int) -> jax.Array:
    if x.ndim != 4:
        raise RankMismatchError(
            f"the array has shape {x.shape}, not 4 dims",
            fix="pass keys or values with batch and heads",
        )
    if n_rep < 1:
        raise RankMismatchError(f"n_rep={n_rep} copies", fix="pass query heads // kv heads")
    return x if n_rep == 1 else jnp.repeat(x, n_rep, axis=dim)
