"""Rotary position embeddings of tables that the caller made, under the names that other code uses."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardwright.errors import RankMismatchError


def rotate_half(x: jax.Array) -> jax.Array:
    """Return `(-second half, first half)` along the last dim.

    Raises:
      RankMismatchError: the last dim is odd.
    """
    if x.shape[-1] % 2:
        raise RankMismatchError(f"the last dim of {x.shape} is odd: it has no halves", fix="rotate an even head_dim")
    half = x.shape[-1] // 2
    return jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)


def apply_rotary_pos_emb(tensor: jax.Array, sin_: jax.Array, cos_: jax.Array) -> jax.Array:
    """Rotate `tensor` `[batch, heads, length, head_dim]` by tables whose length is cut to the tensor's (Su et al. 2021).

    Row i of a table is that of row i of the tensor: for a permuted sequence, or one that goes on after a cache, gather the
    tables by position first.

    Args:
      tensor: queries or keys.
      sin_: `[batch or 1, heads or 1, length or more, head_dim]`.
      cos_: like `sin_`.

    Raises:
      RankMismatchError: the tables are of another rank than 4, shorter than the tensor, or of another head_dim.
    """
    length, dim = tensor.shape[-2:]
    for name, table in (("sin_", sin_), ("cos_", cos_)):
        if tensor.ndim != 4 or table.ndim != 4 or table.shape[2] < length or table.shape[3] != dim:
            raise RankMismatchError(
                f"{name} has shape {table.shape}, the tensor {tensor.shape}",
                path=name,
                fix="both are [batch, heads, length, head_dim]; a table has at least the tensor's length and exactly its head_dim",
            )
    return tensor * cos_[:, :, :length] + rotate_half(tensor) * sin_[:, :, :length]


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
        raise RankMismatchError(f"the array has shape {x.shape}, not 4 dims", fix="pass keys or values with batch and heads")
    if n_rep < 1:
        raise RankMismatchError(f"n_rep={n_rep} copies", fix="pass query heads // kv heads")
    return x if n_rep == 1 else jnp.repeat(x, n_rep, axis=dim)
