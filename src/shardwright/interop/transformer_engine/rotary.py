"""Rotary positions with the windows and the two groupings of TransformerEngine."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardwright.errors import LayerError, RankMismatchError

_METHODS = ("consecutive", "alternate")


def rotate(
    x: Any, *, windows: tuple[int, int] = (1, 10_000), method: str = "consecutive", start: Any = 0
) -> jax.Array:
    """Rotate queries or keys by `position / (min * (max / min) ** (2i / head_dim))`, in float32.

    Args:
      x: `[batch, length, heads, head_dim]`.
      windows: (min, max), the shortest and the longest time scale.
      method: Which two elements form a point: "consecutive" for 2i and 2i + 1, "alternate" for i
        and i + head_dim / 2.
      start: Position of the first token.

    Raises:
      LayerError: The method is unknown, or the windows are not positive.
      RankMismatchError: `head_dim` is odd.
    """
    name = method.lower().strip().replace("-", "").replace("_", "")
    if name not in _METHODS or not 0 < windows[0] <= windows[1]:
        raise LayerError(
            f"rotary_pos_emb_group_method={method!r}, rotary_pos_emb_windows={windows}",
            path="rotary_pos_emb",
            fix='write "consecutive" or "alternate", and two positive numbers, such as (1, 10000)',
        )
    size = x.shape[-1]
    if size % 2:
        raise RankMismatchError(
            f"head_dim={size} is odd", path="head_dim", fix="choose an even head_dim"
        )
    fraction = jnp.arange(0, size, 2) / size
    scales = windows[0] * (windows[1] / windows[0]) ** fraction
    positions = (jnp.arange(x.shape[1]) + start)[None, :, None, None]
    sin, cos = jnp.sin(positions / scales), jnp.cos(positions / scales)
    if name == "consecutive":
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x[..., : size // 2], x[..., size // 2 :]
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    if name == "consecutive":
        return jnp.stack(rotated, axis=-1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
