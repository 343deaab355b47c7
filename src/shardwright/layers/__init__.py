"""Layers: functions on arrays and axes, callable from any framework.

A function belongs here if a model calls it on its activations or weights. Functions that imitate
the API of another library are in `interop`; attention is in `attention`.

Each module is a namespace: `from shardwright.layers import mlp_block, norm`. A block is a module
with a frozen config, `specs(config)` and `apply(config, params, x, *, keys, state, path)`.
"""

from shardwright.layers import activation as activation
from shardwright.layers import attention_block as attention_block
from shardwright.layers import dense as dense
from shardwright.layers import dropout as dropout
from shardwright.layers import dtypes as dtypes
from shardwright.layers import embedding as embedding
from shardwright.layers import fp8 as fp8
from shardwright.layers import lora as lora
from shardwright.layers import loss as loss
from shardwright.layers import mlp_block as mlp_block
from shardwright.layers import moe as moe
from shardwright.layers import moe_block as moe_block
from shardwright.layers import norm as norm
from shardwright.layers import relative_bias as relative_bias
from shardwright.layers import transformer_block as transformer_block
from shardwright.layers.accumulate import Accumulated as Accumulated
from shardwright.layers.accumulate import Weighted as Weighted
from shardwright.layers.accumulate import accumulate as accumulate
from shardwright.layers.pipeline import pipeline as pipeline
from shardwright.layers.pipeline_loss import pipeline_loss as pipeline_loss
from shardwright.layers.recurrence import linear_scan as linear_scan
from shardwright.layers.rope import RopeFrequencies as RopeFrequencies
from shardwright.layers.rope import rope as rope
from shardwright.layers.rope_scaling import rope_frequencies as rope_frequencies
from shardwright.layers.stages import LayerInputs as LayerInputs
