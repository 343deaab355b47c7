"""Routing: which experts each token goes to, and with which weights, computed in float32."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.layers.moe.config import MoEConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The experts of each token.

    Attributes:
      experts: [tokens, per_token] int32, best first. For padding it is `config.experts`, an
        index after the last expert.
      weights: [tokens, per_token] float32.
      probabilities: [tokens, experts] float32, for the balance loss. Those of a token sum to 1,
        those of padding are 0.
      squares: [tokens] float32, log(sum(exp(logits))) ** 2, for the z-loss; 0 for padding.
    """

    experts: Any
    weights: Any
    probabilities: Any
    squares: Any


def route(config: MoEConfig, router: Any, bias: Any, x: Any, is_token: Any = None) -> Routes:
    """Pick the experts of each token. Of equal scores, the lower expert index wins.

    Args:
      config: The MoE layer.
      router: [embed, experts].
      bias: [experts] float32, added to the scores for picking only, or None.
      x: [tokens, embed].
      is_token: [tokens] bool, False where a row of `x` is padding. None: all rows are tokens.
    """
    # By default a TPU multiplies float32 as bfloat16, and rounded logits would pick other experts.
    logits = jnp.einsum(
        "te,ex->tx",
        x.astype(jnp.float32),
        router.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    if config.score == "softmax":
        scores = probabilities = jax.nn.softmax(logits)
        logs = logits  # logarithms of the scores, up to a common summand
    else:
        scores, logs = jax.nn.sigmoid(logits), jax.nn.log_sigmoid(logits)
        probabilities = shares(scores, logs)
    preferred = scores if bias is None else scores + jax.lax.stop_gradient(bias)
    _, experts = jax.lax.top_k(_in_best_groups(config, preferred), config.per_token)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.normalize and config.score == "softmax" and bias is None:
        # these are the best scores of a softmax, so their sum is never tiny
        weights = weights / weights.sum(-1, keepdims=True)
    elif config.normalize:
        weights = shares(weights, jnp.take_along_axis(logs, experts, axis=-1))
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    if is_token is not None:
        experts = jnp.where(is_token[:, None], experts, config.experts)
        probabilities = jnp.where(is_token[:, None], probabilities, 0)
        squares = jnp.where(is_token, squares, 0)
    return Routes(
        experts=experts,
        weights=weights * config.scale,
        probabilities=probabilities,
        squares=squares,
    )


def shares(scores: Any, logs: Any) -> Any:
    """Return scores divided by their sum over the last dim, also where all scores underflow.

    The sigmoid of -104 is 0 in float32, and 0 / 0 is NaN. The gradient divides by the square of the
    sum, which underflows already for logits below about -44. So where the sum is below 2^-40, the
    ratio is computed from the logarithms of the scores. (DeepSeek-V3 adds 1e-20 to the sum, which
    gives weights near 0 in this case.)

    Args:
      scores: [tokens, n] float32, not negative.
      logs: The logarithms of the scores, up to a constant per token.
    """
    total = scores.sum(-1, keepdims=True)
    is_tiny = total < 2.0**-40
    from_logs = jax.nn.softmax(jnp.where(is_tiny, logs, 0.0))
    # A branch that is not chosen must have a finite gradient: NaN times 0 is NaN.
    return jnp.where(is_tiny, from_logs, scores / jnp.where(is_tiny, 1.0, total))


def _in_best_groups(config: MoEConfig, preferred: Any) -> Any:
    """Return the scores with -inf outside each token's best groups of experts.

    The score of a group is the sum of the scores of its two best experts (DeepSeek-V3,
    arXiv:2412.19437, §2.1.2).
    """
    if config.top_groups == config.groups:
        return preferred
    members = config.experts // config.groups
    grouped = preferred.reshape(-1, config.groups, members)
    best, _ = jax.lax.top_k(grouped, min(2, members))
    _, groups = jax.lax.top_k(best.sum(-1), config.top_groups)
    # [tokens, top_groups, groups] becomes [tokens, groups].
    is_best = (jnp.arange(config.groups) == groups[..., None]).any(-2)
    # Hide with -inf and not 0, because a bias can make the scores of the best groups negative.
    return jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(preferred.shape)


def update_bias(bias: Any, load: Any, rate: float = 0.001) -> Any:
    """Return the router's bias after a step: lower for busy experts, higher for idle ones.

    The result is bias + rate * sign(mean(load) - load). This balances the load without a loss (Wang
    et al., arXiv:2408.15664, algorithm 1).

    Args:
      bias: [experts] float32, or [layers, experts] of a stack.
      load: `MoEStats.load` of the step, with the shape of `bias`.
      rate: Size of the change.
    """
    load = load.astype(jnp.float32)
    return bias + rate * jnp.sign(load.mean(-1, keepdims=True) - load)
