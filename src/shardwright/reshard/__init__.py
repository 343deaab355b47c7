"""Move arrays between shardings. A plan shows the bytes sent and the peak memory before the move.

`tree` plans how a whole tree moves, and `move` moves it. The functions of both files are methods of
the manager. `plan` finds the collectives between two specs, and `run` runs them inside `shard_map`.
Caches also call `plan` and `run`, inside `jit`. Reading and writing files does not belong here.
"""

from shardwright.reshard.move import Progress as Progress
from shardwright.reshard.move import reshard as reshard
from shardwright.reshard.plan import AxesByDim as AxesByDim
from shardwright.reshard.plan import Move as Move
from shardwright.reshard.plan import MoveKind as MoveKind
from shardwright.reshard.plan import plan_moves as plan_moves
from shardwright.reshard.run import run_moves as run_moves
from shardwright.reshard.tree import LeafMove as LeafMove
from shardwright.reshard.tree import ReshardPlan as ReshardPlan
from shardwright.reshard.tree import plan_reshard as plan_reshard
