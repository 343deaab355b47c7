"""Matmuls in fp8: recipes, casts, the quantized dense, and the state of delayed scaling.

A block computes in fp8 if its config has a recipe. `recipe` has the recipes, `quantize` the casts,
and `state` the histories and scales. `dense` wraps the matmuls in one custom VJP. `matmuls` has the
forward and backward pass of this VJP. `weights` gathers quantized kernels.
"""

from shardwright.layers.fp8.dense import DenseResult as DenseResult
from shardwright.layers.fp8.dense import dense as dense
from shardwright.layers.fp8.quantize import Scaled as Scaled
from shardwright.layers.fp8.quantize import dequantize as dequantize
from shardwright.layers.fp8.quantize import quantize_blocks as quantize_blocks
from shardwright.layers.fp8.quantize import quantize_tensor as quantize_tensor
from shardwright.layers.fp8.quantize import scale_of as scale_of
from shardwright.layers.fp8.recipe import BlockScaling as BlockScaling
from shardwright.layers.fp8.recipe import CurrentScaling as CurrentScaling
from shardwright.layers.fp8.recipe import DelayedScaling as DelayedScaling
from shardwright.layers.fp8.recipe import Recipe as Recipe
from shardwright.layers.fp8.recipe import read_recipe as read_recipe
from shardwright.layers.fp8.state import Channel as Channel
from shardwright.layers.fp8.state import DenseScaling as DenseScaling
from shardwright.layers.fp8.state import DenseSeen as DenseSeen
from shardwright.layers.fp8.state import DenseUse as DenseUse
from shardwright.layers.fp8.state import TensorScaling as TensorScaling
from shardwright.layers.fp8.state import check as check
from shardwright.layers.fp8.state import init as init
from shardwright.layers.fp8.state import new_channel as new_channel
from shardwright.layers.fp8.state import specs as specs
from shardwright.layers.fp8.state import stack as stack
from shardwright.layers.fp8.state import step as step
from shardwright.layers.fp8.state import update as update
from shardwright.layers.fp8.state import uses as uses
from shardwright.layers.fp8.weights import Stored as Stored
from shardwright.layers.fp8.weights import stored as stored
