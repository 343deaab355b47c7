"""Draw the next tokens on the device, with one PRNG key per request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
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
      temperature: float32; 0 means the most likely token.
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
class Sampled:
    """Sampled tokens and their log-probabilities, in one array that one transfer fetches.

    Attributes:
      packed: `[..., 2]` int32. The first number is a token or, if it is negative, the code of an
        error. The second number has the bits of a float32: the logarithm of the probability that
        the model gave the token, before temperature, top_k and top_p.
    """

    packed: jax.Array

    @classmethod
    def of(cls, tokens: jax.Array, logprobs: jax.Array) -> Sampled:
        """Pack int32 tokens and float32 log-probabilities of the same shape into one value."""
        # Pack the bits as integers, because a float32 cannot hold every int32.
        bits = jax.lax.bitcast_convert_type(logprobs, jnp.int32)
        return cls(packed=jnp.stack([tokens, bits], axis=-1))

    @property
    def tokens(self) -> jax.Array:
        """Tokens, with the codes of errors in the places of tokens."""
        return self.packed[..., 0]

    def readable(self) -> Sampled:
        """Return the same values on devices of this process.

        Call this method before the engine starts its next compiled call: if the values are sharded
        over processes, a later gather would wait for that call.
        """
        return Sampled(packed=readable(self.packed))

    def fetch(self) -> Tokens:
        """Wait for the values, and return them. One transfer fetches all of them."""
        values = np.asarray(self.packed)
        logprobs = values.view(np.float32)[..., 1]
        return Tokens(tokens=values[..., 0].tolist(), logprobs=logprobs.tolist())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The values of a `Sampled` on the host, as nested lists of Python numbers.

    Attributes:
      tokens: Tokens or codes.
      logprobs: Log-probabilities.
    """

    tokens: list[Any]
    logprobs: list[Any]


def logprobs_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return `[batch]` float32: the logarithm of the probability of each token.

    Args:
      logits: `[batch, vocab]`.
      tokens: `[batch]` int32, from 0.
    """
    logits = logits.astype(jnp.float32)
    top = jnp.max(logits, axis=-1)
    # Select by a sum over the vocabulary, because Explicit axes have no gather along rows.
    is_token = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == tokens[:, None]
    chosen = jnp.sum(jnp.where(is_token, logits, 0), axis=-1)
    # These operations round as those of `jax.nn.log_softmax` do. That function would compute the
    # log-probability of every token of the vocabulary, and not only of the chosen one.
    return (chosen - top) - jnp.log(jnp.sum(jnp.exp(logits - top[:, None]), axis=-1))


def rules_of(
    batch: int, sampling: Mapping[int, Sampling], limits: Mapping[int, int] = MappingProxyType({})
) -> np.ndarray:
    """Return in one array how many tokens each sequence of a batch writes, and how it draws them.

    To pass one NumPy array to a compiled call takes less time than to pass five.

    Args:
      batch: Number of sequences.
      sampling: Sequence -> its `Sampling`. Other sequences take the most likely token.
      limits: Sequence -> largest number of tokens that it may write. Other sequences write none.

    Returns:
      `[5, batch]` uint32: limit, temperature, top_k, top_p and seed. The temperature and top_p are
      stored as the bits of float32 numbers. `limits_of` and `draw_of` read the array.
    """
    rules = np.zeros((5, batch), np.uint32)
    # `floats` shares the memory of `rules`: a float written to `floats` is read as bits from
    # `rules`.
    floats = rules.view(np.float32)
    for at, each in sampling.items():
        rules[0, at] = limits.get(at, 0)
        rules[2, at] = MOST_TOKEN if each.top_k is None else each.top_k
        rules[4, at] = each.seed
        floats[1, at], floats[3, at] = each.temperature, each.top_p
    return rules


def limits_of(rules: jax.Array) -> jax.Array:
    """Return `[batch]` int32: the largest number of tokens that each sequence may write."""
    return rules[0].astype(jnp.int32)


def draw_of(rules: jax.Array, index: jax.Array) -> Draw:
    """Return how sequences draw the next token.

    Args:
      rules: As `rules_of` returns them.
      index: As in `Draw`.
    """
    # Only rows 1 and 3 of `floats` are read: the other rows hold integers.
    floats = jax.lax.bitcast_convert_type(rules, jnp.float32)
    return Draw(
        temperature=floats[1],
        top_k=rules[2].astype(jnp.int32),
        top_p=floats[3],
        seed=rules[4],
        index=index,
    )


def sample(logits: jax.Array, draw: Draw, *, is_greedy: jax.Array | None = None) -> jax.Array:
    """Draw the next tokens. Each token depends only on the logits of its own sequence.

    A token is the argmax of logits plus Gumbel noise (https://arxiv.org/abs/1611.01144, eq. 1). The
    noise comes from `fold_in(key(seed), index)`, so it does not depend on the rest of the batch.

    Args:
      logits: `[batch, vocab]`.
      draw: How each sequence draws.
      is_greedy: Whether all temperatures are 0. If the batch is sharded, pass this argument: to
        compute it from `draw` would take a collective.

    Returns:
      `[batch]` int32 tokens. A sequence gets -1 if one of its logits is NaN or +inf, or if all are
      -inf.
    """
    logits = logits.astype(jnp.float32)
    most_likely = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # To sort the logits takes longer than all other work of a small model. So a batch that only
    # needs the most likely tokens does not sort.
    if is_greedy is None:
        is_greedy = jnp.all(draw.temperature == 0)

    def sampled() -> jax.Array:
        return jnp.where(draw.temperature > 0, jax.vmap(_draw)(logits, draw), most_likely)

    # A mixed batch draws for all sequences, and then `sampled` takes the most likely token for the
    # greedy ones.
    tokens = jax.lax.cond(is_greedy, lambda: most_likely, sampled)
    # The maximum is NaN if a logit is NaN, inf if one is inf, and -inf if all are.
    return jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), tokens, -1)


def _draw(logits: jax.Array, draw: Draw) -> jax.Array:
    # Subtract the largest logit, so that dividing by a small temperature cannot overflow.
    scaled = (logits - jnp.max(logits)) / jnp.where(draw.temperature > 0, draw.temperature, 1.0)
    # Use a stable sort: of equal logits, the lower token comes first, as in `argmax`.
    order = jnp.argsort(-scaled, stable=True)
    kept = keep(jax.nn.softmax(scaled[order]), top_k=draw.top_k, top_p=draw.top_p)
    # `kept` is in descending order of probability; the scatter by `order` brings it into the order
    # of the tokens.
    masked = jnp.where(jnp.zeros(order.size, bool).at[order].set(kept), scaled, -jnp.inf)
    key = jax.random.fold_in(jax.random.key(draw.seed), draw.index)
    return jnp.argmax(masked + jax.random.gumbel(key, masked.shape), axis=-1).astype(jnp.int32)


def keep(chances: jax.Array, *, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Return `[vocab]` bool: which tokens may be sampled. The most likely token always may.

    Args:
      chances: `[vocab]` probabilities, in descending order.
      top_k: As in `Sampling`.
      top_p: As in `Sampling`.
    """
    rank = jnp.arange(chances.size)
    # float32 may round a small top_p to 0, so the first token is always kept. For top_p = 1, all
    # tokens are kept, even if the sum rounds up to 1 before the last token. As in nucleus sampling
    # (https://arxiv.org/abs/1904.09751), keep a token if the probabilities before it sum to less
    # than top_p: the token at which the sum reaches top_p is then kept.
    return (rank < top_k) & ((rank == 0) | (top_p >= 1) | (jnp.cumsum(chances) - chances < top_p))
