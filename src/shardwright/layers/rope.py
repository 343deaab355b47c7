"""Rotary position embeddings by the positions of tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.errors import LayerError, Problem, RankMismatchError, raise_problems


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeFrequencies:
    """Frequencies that are not the powers of one theta; see `layers.rope_frequencies`.

    Attributes:
      values: Radians per position, one for each point of two elements.
      scale: Factor of the rotated elements, `attention_factor` in YaRN and LongRoPE.

    Raises:
      LayerError: A frequency or the scale is not a finite number, or the scale is not positive.
    """

    values: tuple[float, ...]
    scale: float = 1.0

    def __post_init__(self) -> None:
        raise_problems(_frequency_problems(self.values, self.scale, None))
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
      theta: Base of the frequencies. Defaults to 10,000.
      frequencies: `[points]`, in place of those of `theta`: point i is rotated by
        `position * frequencies[i]`. With n points the first 2n elements of a head are rotated, and
        the others stay.
      scale: Factor of the rotated elements.

    Returns:
      An array like `x`.

    Raises:
      RankMismatchError: Shapes do not fit each other, or `head_dim` is odd. The error lists all
        problems.
      LayerError: Positions are not integers, `theta` or `scale` is not positive, or both `theta`
        and `frequencies` are given.
    """
    raise_problems(_problems(x, positions, theta, frequencies, scale))
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
    # Points of two halves, as in GPT-NeoX and in the checkpoints of Hugging Face. Su et al. pair
    # neighbors, which is the same up to a permutation of head_dim.
    first, second = (x[..., at : at + half].astype(jnp.float32) for at in (0, half))
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rotated = rotated.astype(x.dtype)
    if 2 * half < x.shape[-1]:
        rotated = jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)
    return rotated


def _problems(x: Any, positions: Any, theta: Any, frequencies: Any, scale: Any) -> list[Problem]:
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
    if theta is not None and not _is_positive(theta):
        problems.append(
            Problem(
                error=LayerError,
                what=f"theta={theta!r} is not a positive number",
                path="theta",
                fix="pass a positive number, such as 10_000.0",
            )
        )
    if theta is not None and frequencies is not None:
        what = "theta and frequencies are given, and each decides the angles"
        problems.append(Problem(error=LayerError, what=what, path="theta", fix="pass one of them"))
    if frequencies is not None or scale != 1:
        half = shape[-1] // 2 if shape else None
        problems += _frequency_problems(() if frequencies is None else frequencies, scale, half)
    return problems


def _frequency_problems(values: Any, scale: Any, most: int | None) -> list[Problem]:
    problems = []
    if not _is_positive(scale):
        what, fix = f"scale={scale!r} is not a positive number", "pass scale=1.0"
        problems.append(Problem(error=LayerError, what=what, path="scale", fix=fix))
    shape = np.shape(values)
    if len(shape) != 1 or (most is not None and shape[0] > most):
        many = "" if most is None else f" of at most {most}, half of head_dim"
        what, fix = f"it has shape {shape}", f"pass one dim{many}: a frequency for each point"
        problems.append(Problem(error=RankMismatchError, what=what, path="frequencies", fix=fix))
    elif not isinstance(values, jax.core.Tracer):
        wrong = [value for value in values if not math.isfinite(value)]
        if wrong:
            what, fix = f"{wrong[0]} is not a finite number", "pass radians per position"
            problems.append(Problem(error=LayerError, what=what, path="frequencies", fix=fix))
    return problems


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
