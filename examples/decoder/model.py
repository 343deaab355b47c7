"""The decoder, written once for every mesh and every mode, with the library's layers.

The layers gather their weights and constrain their activations. Without a manager they run on one
device.
"""

from __future__ import annotations

from typing import Any

import jax

import shardwright as sw
from decoder.config import DecoderConfig, decoder_specs
from shardwright.layers import embedding, loss, norm, transformer_block

Tree = dict[str, Any]


def forward(
    params: Tree,
    tokens: jax.Array,
    config: DecoderConfig,
    *,
    caches: list[Any] | None = None,
    valid: jax.Array | None = None,
    positions: jax.Array | None = None,
) -> tuple[jax.Array, list[Any] | None]:
    """Return logits `[batch, length, vocab]`, and the caches with the keys of the tokens.

    Args:
      params: The tree that `decoder_specs` describes.
      tokens: `[batch, length]`.
      config: Sizes.
      caches: One cache per layer, which holds the earlier tokens. By default, tokens attend only to
        each other.
      valid: `[batch, length]` bool, which tokens are not padding. Only with caches.
      positions: `[batch, length]`, if the tokens are in another order than 0, 1, 2. Only without
        caches.
    """
    x, caches = residual(params, tokens, config, caches=caches, valid=valid, positions=positions)
    return loss.logits(x, params["lm_head"], dtypes=config.dtypes, path="lm_head"), caches


def residual(
    params: Tree, tokens: jax.Array, config: DecoderConfig, *, caches: Any = None, **inputs: Any
) -> tuple[jax.Array, Any]:
    """Return `[batch, length, embed]` after the last norm, and the caches; see `forward`."""
    x = embedding.apply(params["embedding"], tokens, dtypes=config.dtypes, path="embedding")
    state = transformer_block.StackState(caches=caches)
    x, state = transformer_block.apply(
        config.stack, params["layers"], x, state=state, path="layers", **inputs
    )
    last = sw.gather(params["norm"], decoder_specs(config)["norm"], path="norm")
    return norm.apply(norm.RMS, last, x), state.caches


def next_byte_loss(params: Tree, batch: dict[str, jax.Array], config: DecoderConfig) -> jax.Array:
    """Return the mean cross-entropy of the next byte, in nats. The batch may have `positions`."""
    x, _ = residual(params, batch["inputs"], config, positions=batch.get("positions"))
    return loss.cross_entropy(
        x, params["lm_head"], batch["targets"], dtypes=config.dtypes, path="lm_head"
    ).mean
