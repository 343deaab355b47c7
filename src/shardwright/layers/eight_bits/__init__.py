"""Products in eight bits: recipes, casts, the quantized dense, and the state of delayed scaling.

A block computes in eight bits if its config has a recipe. `recipe` has the recipes, `quantize` the
casts, `dense` the products as one custom VJP, `products` their forward and backward pass, `weights`
the gather of quantized kernels, and `state` the histories and scales.
"""

from shardwright.layers.eight_bits.dense import DenseResult as DenseResult
from shardwright.layers.eight_bits.dense import dense as dense
from shardwright.layers.eight_bits.quantize import Scaled as Scaled
from shardwright.layers.eight_bits.quantize import dequantize as dequantize
from shardwright.layers.eight_bits.quantize import quantize_blocks as quantize_blocks
from shardwright.layers.eight_bits.quantize import quantize_tensor as quantize_tensor
from shardwright.layers.eight_bits.quantize import scale_of as scale_of
from shardwright.layers.eight_bits.recipe import BlockScaling as BlockScaling
from shardwright.layers.eight_bits.recipe import CurrentScaling as CurrentScaling
from shardwright.layers.eight_bits.recipe import DelayedScaling as DelayedScaling
from shardwright.layers.eight_bits.recipe import Recipe as Recipe
from shardwright.layers.eight_bits.recipe import read_recipe as read_recipe
from shardwright.layers.eight_bits.state import Channel as Channel
from shardwright.layers.eight_bits.state import DenseScaling as DenseScaling
from shardwright.layers.eight_bits.state import DenseSeen as DenseSeen
from shardwright.layers.eight_bits.state import DenseUse as DenseUse
from shardwright.layers.eight_bits.state import TensorScaling as TensorScaling
from shardwright.layers.eight_bits.state import check as check
from shardwright.layers.eight_bits.state import init as init
from shardwright.layers.eight_bits.state import new_channel as new_channel
from shardwright.layers.eight_bits.state import specs as specs
from shardwright.layers.eight_bits.state import stack as stack
from shardwright.layers.eight_bits.state import step as step
from shardwright.layers.eight_bits.state import update as update
from shardwright.layers.eight_bits.state import uses as uses
from shardwright.layers.eight_bits.weights import Stored as Stored
from shardwright.layers.eight_bits.weights import stored as stored
