"""`PartitionManager`: rules, a mesh and a mode as one value, and the functions that apply it.

`manager` has the identity of a manager and the methods that answer questions. `arrays`, `weights`,
`trees` and `training` have its other methods. `constraint` places one array. `context` keeps the
ambient manager; no other module keeps state, except for what users register. Deciding a spec does
not belong here: the manager asks `resolution`.
"""

from shardwright.manager.ambient import current_manager as current_manager
from shardwright.manager.ambient import gather as gather
from shardwright.manager.ambient import hint as hint
from shardwright.manager.ambient import shard as shard
from shardwright.manager.manager import PartitionManager as PartitionManager
