"""Draw the next tokens on the device, with one PRNG key per request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.caches.change import readable
from shardwright.serving.request import MOST_TOKEN, Sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draw:
    """How each sequence of a batch draws its next token. All arrays are `[batch]`.

    Attributes:
      temperature: float32; 0 takes the most likely token.
      top_k: int32.
      top_p: float32.
      seed: uint32.
      index: int32, number of tokens that the sequence has written.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array
    index: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """Tokens that were drawn. Both arrays have the same shape.

    Attributes:
      tokens: int32. A negative number is the code of an error.
      logprobs: float32, logarithm of the probability that the model gave the token, before
        temperature, top_k and top_p.
    """

    tokens: jax.Array
    logprobs: jax.Array

    def fetch(self) -> Drawn:
        """Return NumPy arrays, in one transfer."""
        drawn: Drawn = jax.device_get(jax.tree.map(readable, self))
        return drawn


def logprobs_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return `[batch]` float32: the logarithm of the probability of each token.

    Args:
      logits: `[batch, vocab]`.
      tokens: `[batch]` int32, from 0.
    """
    chances = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    # A sum over the vocabulary, because Explicit axes have no gather along rows.
    is_token = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == tokens[:, None]
    return jnp.sum(jnp.where(is_token, chances, 0), axis=-1)


def first_draws(batch: int, sampling: Mapping[int, Sampling]) -> Draw:
    """Return how the sequences of a batch draw their first tokens, as NumPy arrays.

    Args:
      batch: Number of sequences.
      sampling: Sampling by sequence. The others take the most likely token.
    """
    rows = [sampling.get(at, Sampling()) for at in range(batch)]

    def column(values: list[Any], dtype: Any) -> Any:
        return np.asarray(values, dtype)

    return Draw(
        temperature=column([row.temperature for row in rows], np.float32),
        top_k=column([MOST_TOKEN if row.top_k is None else row.top_k for row in rows], np.int32),
        top_p=column([row.top_p for row in rows], np.float32),
        seed=column([row.seed for row in rows], np.uint32),
        index=column([0] * batch, np.int32),
    )


def sample(logits: jax.Array, draw: Draw) -> jax.Array:
    """Draw the next tokens. Each depends on the logits of its own sequence only.

    A token is the argmax of logits plus Gumbel noise (https://arxiv.org/abs/1611.01144, eq. 1). The
    noise comes from `fold_in(key(seed), index)`, so it does not depend on the rest of the batch.

    Args:
      logits: `[batch, vocab]`.
      draw: How each sequence draws.

    Returns:
      `[batch]` int32 tokens; -1 if a logit is NaN or +inf, or all are -inf.
    """
    logits = logits.astype(jnp.float32)
    most_likely = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Sorting a vocabulary takes longer than the rest of a small model. So a batch that only needs
    # the most likely tokens does not sort.
    tokens = jax.lax.cond(
        jnp.any(draw.temperature > 0), lambda: jax.vmap(_draw)(logits, draw), lambda: most_likely
    )
    most = jnp.max(logits, axis=-1)
    return jnp.where(jnp.isfinite(most), jnp.where(draw.temperature > 0, tokens, most_likely), -1)


def _draw(logits: jax.Array, draw: Draw) -> jax.Array:
    # Subtract the largest logit, so that dividing by a small temperature cannot overflow.
    scaled = (logits - jnp.max(logits)) / jnp.where(draw.temperature > 0, draw.temperature, 1.0)
    order = jnp.argsort(-scaled, stable=True)
    kept = keep(jax.nn.softmax(scaled[order]), top_k=draw.top_k, top_p=draw.top_p)
    masked = jnp.where(jnp.zeros(order.size, bool).at[order].set(kept), scaled, -jnp.inf)
    key = jax.random.fold_in(jax.random.key(draw.seed), draw.index)
    return jnp.argmax(masked + jax.random.gumbel(key, masked.shape), axis=-1).astype(jnp.int32)


def keep(chances: jax.Array, *, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Return `[vocab]` bool: which tokens may be drawn. The first token is always among them.

    Args:
      chances: `[vocab]` probabilities, in descending order.
      top_k: As in `Sampling`.
      top_p: As in `Sampling`.
    """
    rank = jnp.arange(chances.size)
    # float32 may round a small top_p to 0, so the first token is always kept. For top_p = 1, all
    # are kept, even if the sum rounds up to 1 before the last token.
    return (rank < top_k) & ((rank == 0) | (top_p >= 1) | (jnp.cumsum(chances) - chances < top_p))
