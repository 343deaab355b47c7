"""Rotary embeddings from precomputed tables, and repeated key and value heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardwright.errors import RankMismatchError


def rotate_half(x: jax.Array) -> jax.Array:
    """Return `(-second half, first half)` along the last dim.

    Raises:
      RankMismatchError: The last dim is odd.
    """
    if x.shape[-1] % 2:
        raise RankMismatchError(
            f"the last dim of {x.shape} is odd, so it has no halves", fix="rotate an even head_dim"
        )
    half = x.shape[-1] // 2
    return jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)


def apply_rotary_pos_emb(tensor: jax.Array, sin_: jax.Array, cos_: jax.Array) -> jax.Array:
    """Rotate `[batch, heads, length, head_dim]` by tables (Su et al. 2021).

    The tables are cut to the length of the tensor. Row i of a table rotates row i of the tensor.
    For a permuted sequence, or one that continues a cache, gather the tables by position first. For
    tensors `[batch, length, heads, head_dim]`, as the attention of this package takes them, use
    `layers.rope`.

    Args:
      tensor: Queries or keys, `[batch, heads, length, head_dim]`. The dim order of `layers.rope` is
        an error, but it cannot be detected if the tensor has as many rows as the tables.
      sin_: `[batch or 1, heads or 1, length or more, head_dim]`.
      cos_: Like `sin_`.

    Raises:
      RankMismatchError: The tables do not have rank 4, are shorter than the tensor, differ from
        each other in shape, or have another batch, number of heads or head_dim than the tensor. Or
        the tensor has the dim order of `layers.rope`.
    """
    for name, table in (("sin_", sin_), ("cos_", cos_)):
        _check_table(name, table.shape, tensor.shape)
    if sin_.shape != cos_.shape:
        what = f"sin_ has shape {sin_.shape}, and cos_ has shape {cos_.shape}"
        raise RankMismatchError(
            what, path="cos_", fix="pass the sines and the cosines of the same angles"
        )
    length = tensor.shape[-2]
    return tensor * cos_[:, :, :length] + rotate_half(tensor) * sin_[:, :, :length]


def _check_table(name: str, table: tuple[int, ...], tensor: tuple[int, ...]) -> None:
    fix = (
        "pass both as [batch, heads, length, head_dim]; a table has at least the tensor's "
        "length and exactly its head_dim"
    )
    fits = len(tensor) == len(table) == 4 and table[2] >= tensor[2] and table[3] == tensor[3]
    fits = fits and all(rows in (1, size) for rows, size in zip(table[:2], tensor[:2], strict=True))
    if fits and table[2] == tensor[1] > tensor[2]:
        fits = False
        fix = (
            "dim 1 is as long as the table: use layers.rope for [batch, length, heads, head_dim]; "
            "if dim 1 is heads, cut the table to the length"
        )
    if not fits:
        raise RankMismatchError(
            f"{name} has shape {table}, and the tensor has shape {tensor}", path=name, fix=fix
        )


def repeat_kv_bnsh(x: jax.Array, n_rep: int) -> jax.Array:
    """Repeat each head of `[batch, heads, length, head_dim]` `n_rep` times; copies are adjacent.

    The attention of this package does not need the copies.
    """
    return _repeat(x, n_rep, 1)


def repeat_kv_bsnh(x: jax.Array, n_rep: int) -> jax.Array:
    """Repeat each head of `[batch, length, heads, head_dim]` `n_rep` times; copies are adjacent."""
    return _repeat(x, n_rep, 2)


def _repeat(x: jax.Array, n_rep: int, dim: int) -> jax.Array:
    if x.ndim != 4:
        raise RankMismatchError(
            f"the array has shape {x.shape}, and needs 4 dims",
            fix="pass keys or values with batch and heads",
        )
    if n_rep < 1:
        raise RankMismatchError(
            f"n_rep={n_rep} is not a positive integer", fix="pass query heads // kv heads"
        )
    return x if n_rep == 1 else jnp.repeat(x, n_rep, axis=dim)
