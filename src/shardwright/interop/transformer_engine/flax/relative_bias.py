"""`RelativePositionBiases` of T5."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from shardwright.interop.transformer_engine.flax.variables import Axes, Module, compact, parameter
from shardwright.layers import relative_bias
from shardwright.layers.relative_bias import RelativeBiasConfig


class RelativePositionBiases(Module):  # type: ignore[misc]
    """A learned bias of attention logits, per head and bucket of distances.

    Attributes:
      num_buckets: Number of buckets.
      max_distance: From this distance on, all keys are in the last bucket.
      num_attention_heads: Number of heads.
      embedding_init: Initializer of `rel_embedding`, `[heads, buckets]`.
      embedding_axes: Logical names of `rel_embedding`.
      dtype: Dtype of the parameter and the result.
    """

    num_buckets: int
    max_distance: int
    num_attention_heads: int
    embedding_init: Any = nn.linear.default_embed_init
    embedding_axes: Axes = ("heads", "relpos_buckets")
    dtype: Any = jnp.float32

    @compact  # type: ignore[untyped-decorator]
    def __call__(self, q_seqlen: int, k_seqlen: int, bidirectional: bool = True) -> Any:
        """Return the bias, `[1, heads, q_seqlen, k_seqlen]`."""
        config = RelativeBiasConfig(
            heads=self.num_attention_heads,
            buckets=self.num_buckets,
            max_distance=self.max_distance,
            bidirectional=bidirectional,
        )
        table = parameter(
            self,
            "rel_embedding",
            self.embedding_init,
            (self.num_attention_heads, self.num_buckets),
            self.embedding_axes,
            dtype=self.dtype,
        )
        return relative_bias.apply(
            config, table, q_length=q_seqlen, kv_length=k_seqlen, dtype=self.dtype
        )
