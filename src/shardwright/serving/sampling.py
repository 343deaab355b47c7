"""Draw the next tokens on the device, each request with a key of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.serving.request import MOST_TOKEN, Sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draw:
    """How each sequence of a batch draws its next token. All are `[batch]`.

    Attributes:
      temperature: float32; 0: the likeliest.
      top_k: int32.
      top_p: float32.
      seed: uint32.
      index: int32, tokens that the sequence has written.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array
    index: jax.Array


def draws(batch: int, sampling: Mapping[int, Sampling]) -> Draw:
    """Return, as NumPy arrays, how the sequences of a batch draw their first tokens; those that are not given: the likeliest."""
    found = [sampling.get(at, Sampling()) for at in range(batch)]

    def column(values: list[Any], dtype: Any) -> Any:
        return np.asarray(values, dtype)

    return Draw(
        temperature=column([one.temperature for one in found], np.float32),
        top_k=column([MOST_TOKEN if one.top_k is None else one.top_k for one in found], np.int32),
        top_p=column([one.top_p for one in found], np.float32),
        seed=column([one.seed for one in found], np.uint32),
        index=column([0] * batch, np.int32),
    )


def sample(logits: jax.Array, draw: Draw) -> jax.Array:
    """Return the next tokens `[batch]` int32, each from its own logits alone; -1 where these are not numbers, or all are -inf.

    A token is drawn by adding Gumbel noise to the logits (https://arxiv.org/abs/1611.01144, eq. 1). The noise comes from
    `fold_in(key(seed), index)`, so it does not depend on what else is in the batch.

    Args:
      logits: `[batch, vocab]`.
      draw: how.
    """
    logits = logits.astype(jnp.float32)
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Sorting a vocabulary takes longer than the rest of a small model: not for a batch that only asks for the likeliest.
    tokens = jax.lax.cond(
        jnp.any(draw.temperature > 0), lambda: jax.vmap(_draw)(logits, draw), lambda: likeliest
    )
    most = jnp.max(logits, axis=-1)
    return jnp.where(jnp.isfinite(most), jnp.where(draw.temperature > 0, tokens, likeliest), -1)


def _draw(logits: jax.Array, draw: Draw) -> jax.Array:
    # From the likeliest on, which then stays 0: however small the temperature, its own quotient cannot overflow.
    scaled = (logits - jnp.max(logits)) / jnp.where(draw.temperature > 0, draw.temperature, 1.0)
    order = jnp.argsort(-scaled, stable=True)
    kept = keep(jax.nn.softmax(scaled[order]), top_k=draw.top_k, top_p=draw.top_p)
    masked = jnp.where(jnp.zeros(order.size, bool).at[order].set(kept), scaled, -jnp.inf)
    key = jax.random.fold_in(jax.random.key(draw.seed), draw.index)
    return jnp.argmax(masked + jax.random.gumbel(key, masked.shape), axis=-1).astype(jnp.int32)


def keep(chances: jax.Array, *, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Return `[vocab]` bool, which tokens may be drawn, given their chances from the likeliest down; the first always."""
    rank = jnp.arange(chances.size)
    # The first also below a top_p that float32 makes 0; and where top_p is 1, sums that round up to it cut nothing.
    return (rank < top_k) & ((rank == 0) | (top_p >= 1) | (jnp.cumsum(chances) - chances < top_p))
