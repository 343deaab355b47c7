"""The manager: rules, a mesh, a mode and an effect as one frozen value, and functions on it.

`core` defines this value; functions in `place`, `weights`, `trees` and `step` take it. `manager`
has the class that users build. `constraint` places one array. `context` keeps the ambient manager.
Apart from registries that users fill, no other module keeps state. Deciding a spec does not belong
here: the manager asks `resolution`.
"""

from shardwright.manager.ambient import current_manager as current_manager
from shardwright.manager.ambient import gather as gather
from shardwright.manager.ambient import hint as hint
from shardwright.manager.ambient import shard as shard
from shardwright.manager.manager import PartitionManager as PartitionManager
