"""Rotary position embeddings by the positions of tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.errors import LayerError, RankMismatchError
from shardwright.vocabulary.read import array, number, read_value, refuse

THETA: Final = number("positive", fix="pass a positive number, such as 10_000.0")
SCALE: Final = number("positive", fix="pass scale=1.0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeFrequencies:
    """Frequencies other than the powers of one theta; see `layers.rope_frequencies`.

    Attributes:
      values: One frequency for each point, in radians per position. A point is two elements of a
        head that are rotated together.
      scale: Factor of the rotated elements, `attention_factor` in YaRN and LongRoPE.

    Raises:
      LayerError: A frequency or the scale is not a finite number, or the scale is not positive.
    """

    values: tuple[float, ...]
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_frequencies(self.values, self.scale)
        object.__setattr__(self, "values", tuple(map(float, self.values)))


def rope(
    x: jax.Array,
    positions: Any,
    *,
    theta: float | None = None,
    frequencies: Any = None,
    scale: float = 1.0,
) -> jax.Array:
    """Rotate queries or keys by the positions of their tokens (Su et al. 2021).

    Element i of the first half of a head and element i of its second half form a point, rotated by
    the angle `position * theta ** (-2i / head_dim)`, in float32. Every token has its own position,
    so sequences may be permuted or packed, or may continue a cache. Nothing is sent, if `x` is
    sharded over batch, length or heads.

    >>> rope(jnp.ones((1, 2, 1, 2)), jnp.array([[0, 3]]))[0, :, 0].round(2)
    Array([[ 1.  ,  1.  ],
           [-1.13, -0.85]], dtype=float32)

    Args:
      x: Queries or keys, `[batch, length, heads, head_dim]`, as attention takes them.
      positions: `[batch, length]` integers, or `[1, length]` if all sequences have equal positions.
        A negative position marks padding: its row is rotated as at position 0, and attention
        ignores the row.
      theta: Base of the frequencies. Defaults to 10,000.
      frequencies: `[points]`, in place of the frequencies of `theta`: point i is rotated by
        `position * frequencies[i]`. With n points, only the first 2n elements of a head are
        rotated.
      scale: Factor of the rotated elements.

    Returns:
      An array like `x`.

    Raises:
      RankMismatchError: Shapes do not fit each other, or `head_dim` is odd.
      LayerError: Positions are not integers, `theta` or `scale` is not positive, or both `theta`
        and `frequencies` are given.
    """
    _check(x, positions, theta, frequencies, scale)
    if frequencies is None:
        half = x.shape[-1] // 2
        # NumPy computes the powers in float64. They are rounded to float32 once.
        frequencies = (10_000.0 if theta is None else theta) ** (-np.arange(half) / half)
    if not isinstance(frequencies, jax.Array):
        frequencies = np.asarray(frequencies)
    frequencies = frequencies.astype(np.float32).reshape(1, 1, 1, -1)
    half = frequencies.size
    # bfloat16 holds integers only up to 256, so positions are multiplied in float32.
    angles = (
        jnp.maximum(jnp.asarray(positions), 0).astype(jnp.float32)[:, :, None, None] * frequencies
    )
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    if scale != 1:
        sin, cos = sin * scale, cos * scale
    # Rotate element i of the first half with element i of the second half, as GPT-NeoX and Hugging
    # Face do. Su et al. rotate neighbors, which is the same up to a permutation of head_dim.
    first, second = (x[..., at : at + half].astype(jnp.float32) for at in (0, half))
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rotated = rotated.astype(x.dtype)
    if 2 * half < x.shape[-1]:
        rotated = jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)
    return rotated


def _check(x: Any, positions: Any, theta: Any, frequencies: Any, scale: Any) -> None:
    shape, given = np.shape(x), np.shape(positions)
    is_head = len(shape) == 4 and not shape[-1] % 2
    fits = is_head and len(given) == 2 and given[1] == shape[1] and given[0] in (1, shape[0])
    refuse(
        RankMismatchError,
        (
            not is_head,
            "x",
            f"it has shape {shape}",
            "pass queries or keys as [batch, length, heads, head_dim], with an even head_dim",
        ),
        (
            is_head and not fits,
            "positions",
            f"it has shape {given}, and x has {shape}",
            f"pass shape {shape[:2]}, or {(1, *shape[1:2])}; see attention.next_positions",
        ),
    )
    read_value("positions", positions, array(given, dtype=jnp.integer), error=LayerError)
    if theta is not None:
        read_value("theta", theta, THETA, error=LayerError)
    if theta is not None and frequencies is not None:
        what = "theta and frequencies are given, and each decides the angles"
        raise LayerError(what, path="theta", fix="pass only one of the two")
    _check_frequencies(() if frequencies is None else frequencies, scale, shape[-1] // 2)


def _check_frequencies(values: Any, scale: Any, most: int | None = None) -> None:
    read_value("scale", scale, SCALE, error=LayerError)
    shape = np.shape(values)
    if len(shape) != 1 or (most is not None and shape[0] > most):
        many = "" if most is None else f" of at most {most}, half of head_dim"
        fix = f"pass one dim{many}: one frequency for each pair of elements"
        raise RankMismatchError(f"it has shape {shape}", path="frequencies", fix=fix)
    if isinstance(values, jax.core.Tracer):
        return
    if wrong := [value for value in values if not math.isfinite(value)]:
        what = f"{wrong[0]} is not a finite number"
        raise LayerError(what, path="frequencies", fix="pass radians per position")
