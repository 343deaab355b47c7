"""The names of `eformer.escale.partition`."""

from __future__ import annotations

from shardwright.interop.eformer.absent import __getattr__ as __getattr__
from shardwright.interop.eformer.escale.partition.constraints import (
    extract_sharding_structure as extract_sharding_structure,
)
from shardwright.interop.eformer.escale.partition.constraints import (
    extract_shardings as extract_shardings,
)
from shardwright.interop.eformer.escale.partition.constraints import (
    get_axes_size_in_mesh as get_axes_size_in_mesh,
)
from shardwright.interop.eformer.escale.partition.constraints import (
    get_corrected_named_sharding as get_corrected_named_sharding,
)
from shardwright.interop.eformer.escale.partition.constraints import (
    get_incontext_mesh as get_incontext_mesh,
)
from shardwright.interop.eformer.escale.partition.constraints import (
    get_mesh_axis_names as get_mesh_axis_names,
)
from shardwright.interop.eformer.escale.partition.constraints import (
    get_mesh_axis_size as get_mesh_axis_size,
)
from shardwright.interop.eformer.escale.partition.constraints import (
    get_names_from_partition_spec as get_names_from_partition_spec,
)
from shardwright.interop.eformer.escale.partition.constraints import (
    get_partition_spec as get_partition_spec,
)
from shardwright.interop.eformer.escale.partition.constraints import (
    get_shardings_with_structure as get_shardings_with_structure,
)
from shardwright.interop.eformer.escale.partition.constraints import (
    get_submesh_device_index as get_submesh_device_index,
)
from shardwright.interop.eformer.escale.partition.constraints import (
    make_shard_and_gather_fns as make_shard_and_gather_fns,
)
from shardwright.interop.eformer.escale.partition.constraints import (
    match_partition_rules as match_partition_rules,
)
from shardwright.interop.eformer.escale.partition.constraints import (
    names_in_current_mesh as names_in_current_mesh,
)
from shardwright.interop.eformer.escale.partition.constraints import (
    with_sharding_constraint as with_sharding_constraint,
)
from shardwright.interop.eformer.escale.partition.manager import PartitionAxis as PartitionAxis
from shardwright.interop.eformer.escale.partition.manager import (
    PartitionManager as PartitionManager,
)
from shardwright.interop.eformer.escale.partition.manager import (
    apply_logical_sharding as apply_logical_sharding,
)
from shardwright.interop.eformer.escale.partition.manager import (
    get_current_partition_manager as get_current_partition_manager,
)
from shardwright.interop.eformer.escale.partition.manager import (
    get_partition_manager as get_partition_manager,
)
