"""TransformerEngine's linen modules: its fields, variables and paths over `shardwright.layers`.

This package imports flax. A module belongs here if `transformer_engine.jax.flax` has it; functions
on arrays belong in `shardwright.layers`.
"""

from shardwright.interop.transformer_engine.flax.dense import DenseGeneral as DenseGeneral
from shardwright.interop.transformer_engine.flax.dense import (
    LayerNormDenseGeneral as LayerNormDenseGeneral,
)
from shardwright.interop.transformer_engine.flax.norm import LayerNorm as LayerNorm
from shardwright.interop.transformer_engine.sharding import (
    extend_logical_axis_rules as extend_logical_axis_rules,
)
