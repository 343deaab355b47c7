"""The names of `eformer.escale` that are provided; a call of another names a replacement."""

from __future__ import annotations

from jax.sharding import NamedSharding as NamedSharding
from jax.sharding import PartitionSpec as PartitionSpec

from shardwright.interop.eformer.absent import __getattr__ as __getattr__
from shardwright.interop.eformer.axis import PartitionAxis as PartitionAxis
from shardwright.interop.eformer.constraints import (
    get_corrected_named_sharding as get_corrected_named_sharding,
)
from shardwright.interop.eformer.constraints import lax_reshard as lax_reshard
from shardwright.interop.eformer.constraints import (
    with_sharding_constraint as with_sharding_constraint,
)
from shardwright.interop.eformer.errors import NoMeshError as NoMeshError
from shardwright.interop.eformer.errors import NotRegisteredError as NotRegisteredError
from shardwright.interop.eformer.errors import WrongTypeError as WrongTypeError
from shardwright.interop.eformer.manager import PartitionManager as PartitionManager
from shardwright.interop.eformer.manager import apply_logical_sharding as apply_logical_sharding
from shardwright.interop.eformer.manager import (
    get_current_partition_manager as get_current_partition_manager,
)
from shardwright.interop.eformer.manager import get_partition_manager as get_partition_manager
from shardwright.interop.eformer.meshes import cpu_context as cpu_context
from shardwright.interop.eformer.meshes import create_cpu_mesh as create_cpu_mesh
from shardwright.interop.eformer.meshes import create_mesh as create_mesh
from shardwright.interop.eformer.meshes import force_cpu as force_cpu
from shardwright.interop.eformer.meshes import get_axes_size_in_mesh as get_axes_size_in_mesh
from shardwright.interop.eformer.meshes import get_incontext_mesh as get_incontext_mesh
from shardwright.interop.eformer.meshes import get_mesh_axis_names as get_mesh_axis_names
from shardwright.interop.eformer.meshes import get_mesh_axis_size as get_mesh_axis_size
from shardwright.interop.eformer.meshes import get_submesh_device_index as get_submesh_device_index
from shardwright.interop.eformer.meshes import names_in_current_mesh as names_in_current_mesh
from shardwright.interop.eformer.meshes import parse_mesh_from_string as parse_mesh_from_string
from shardwright.interop.eformer.trees import (
    extract_sharding_structure as extract_sharding_structure,
)
from shardwright.interop.eformer.trees import extract_shardings as extract_shardings
from shardwright.interop.eformer.trees import (
    get_names_from_partition_spec as get_names_from_partition_spec,
)
from shardwright.interop.eformer.trees import get_partition_spec as get_partition_spec
from shardwright.interop.eformer.trees import (
    get_shardings_with_structure as get_shardings_with_structure,
)
from shardwright.interop.eformer.trees import make_shard_and_gather_fns as make_shard_and_gather_fns
from shardwright.interop.eformer.trees import match_partition_rules as match_partition_rules
