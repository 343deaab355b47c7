"""Reshard an array with the collectives that send the fewest bytes.

`plan` finds the steps, `run` runs them inside `shard_map`. The rooms
above decide which arrays move, from which sharding to which.
"""

from shardwright.reshard.plan import Dims as Dims
from shardwright.reshard.plan import Move as Move
from shardwright.reshard.plan import MoveKind as MoveKind
from shardwright.reshard.plan import plan_moves as plan_moves
from shardwright.reshard.run import run_moves as run_moves
