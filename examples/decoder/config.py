"""The sizes of the model, as the config of a stack of layers, and its parameters as data."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from shardwright.layers import attention_block, embedding, loss, mlp_block, norm, transformer_block
from shardwright.layers.dtypes import Dtypes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes of the model. The vocabulary is the 256 bytes."""

    layers: int = 2
    embed: int = 128
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 16
    mlp: int = 384
    vocab: int = 256
    dtype: Any = "float32"

    @property
    def dtypes(self) -> Dtypes:
        """One dtype for parameters, matmuls and caches."""
        return Dtypes(param=self.dtype)

    @property
    def stack(self) -> transformer_block.TransformerConfig:
        """The layers, without a scan: each has its own cache, which is updated in place."""
        return transformer_block.TransformerConfig(
            layers=self.layers,
            attention=attention_block.AttentionConfig(
                embed=self.embed,
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                dtypes=self.dtypes,
            ),
            mlp=mlp_block.MlpConfig(embed=self.embed, hidden=self.mlp, dtypes=self.dtypes),
            scan=False,
        )


@functools.cache
def decoder_specs(config: DecoderConfig) -> dict[str, Any]:
    """Return the parameters as a tree of `ArraySpec`s; nothing is allocated."""
    return {
        "embedding": embedding.specs(config.vocab, config.embed, dtypes=config.dtypes),
        "layers": transformer_block.specs(config.stack),
        "norm": norm.specs(norm.RMS, config.embed, config.dtypes),
        "lm_head": loss.specs(config.vocab, config.embed, dtypes=config.dtypes),
    }
