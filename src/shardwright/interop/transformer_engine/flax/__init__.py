"""TransformerEngine's linen modules, with the same fields, variables and paths.

The modules compute with `shardwright.layers`.

This package imports flax. A module belongs here if `transformer_engine.jax.flax` has it; functions
on arrays belong in `shardwright.layers`.
"""

from shardwright.interop.transformer_engine.flax.attention import (
    DotProductAttention as DotProductAttention,
)
from shardwright.interop.transformer_engine.flax.attention import (
    RelativePositionBiases as RelativePositionBiases,
)
from shardwright.interop.transformer_engine.flax.layer import TransformerLayer as TransformerLayer
from shardwright.interop.transformer_engine.flax.layer import (
    TransformerLayerType as TransformerLayerType,
)
from shardwright.interop.transformer_engine.flax.mlp import LayerNormMLP as LayerNormMLP
from shardwright.interop.transformer_engine.flax.module import DenseGeneral as DenseGeneral
from shardwright.interop.transformer_engine.flax.module import LayerNorm as LayerNorm
from shardwright.interop.transformer_engine.flax.module import (
    LayerNormDenseGeneral as LayerNormDenseGeneral,
)
from shardwright.interop.transformer_engine.flax.module import Softmax as Softmax
from shardwright.interop.transformer_engine.flax.multi_head import (
    MultiHeadAttention as MultiHeadAttention,
)
from shardwright.interop.transformer_engine.scores import AttnSoftmaxType as AttnSoftmaxType
from shardwright.interop.transformer_engine.scores import SoftmaxFusionType as SoftmaxFusionType
from shardwright.interop.transformer_engine.sharding import (
    extend_logical_axis_rules as extend_logical_axis_rules,
)
