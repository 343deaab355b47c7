"""An MoE layer: each token goes through the few expert MLPs that a router picks for it.

`config` holds the options and the parameters. `routing` picks experts, `dispatch` moves the tokens
of a device to rows, `exchange` sends the rows, and `experts` runs the experts on them. `block` is
the layer. Code that works on the tokens and experts of one layer belongs here. A dense MLP does
not.

    config = moe.MoEConfig(embed=64, hidden=128, experts=8, per_token=2)
    params = pm.init(moe.specs(config), key)
    y, state = moe.apply(config, params, x)
"""

from shardwright.layers.moe.block import Dispatch as Dispatch
from shardwright.layers.moe.block import MoEState as MoEState
from shardwright.layers.moe.block import MoEStats as MoEStats
from shardwright.layers.moe.block import apply as apply
from shardwright.layers.moe.block import explain as explain
from shardwright.layers.moe.block import init_state as init_state
from shardwright.layers.moe.config import CapacityFactor as CapacityFactor
from shardwright.layers.moe.config import Dropless as Dropless
from shardwright.layers.moe.config import MoEConfig as MoEConfig
from shardwright.layers.moe.config import specs as specs
from shardwright.layers.moe.routing import update_bias as update_bias
