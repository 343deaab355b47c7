"""Rotary embeddings of tables made before, and repeated key and value heads."""

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
