"""The names of `eformer.escale.partition.constraints`."""

from __future__ import annotations

from typing import Any

from shardwright.interop.eformer import absent
from shardwright.interop.eformer.constraints import (
    get_corrected_named_sharding,
    with_sharding_constraint,
)
from shardwright.interop.eformer.environment import (
    log_sharding_move,
    min_sharding_size,
)
from shardwright.interop.eformer.meshes import (
    get_axes_size_in_mesh,
    get_incontext_mesh,
    get_mesh_axis_names,
    get_mesh_axis_size,
    get_submesh_device_index,
    names_in_current_mesh,
)
from shardwright.interop.eformer.trees import (
    extract_sharding_structure,
    extract_shardings,
    get_names_from_partition_spec,
    get_partition_spec,
    get_shardings_with_structure,
    make_shard_and_gather_fns,
    match_partition_rules,
)
from shardwright.vocabulary.axes import AxisType

__all__ = [
    "AxisType",
    "extract_sharding_structure",
    "extract_shardings",
    "get_axes_size_in_mesh",
    "get_corrected_named_sharding",
    "get_incontext_mesh",
    "get_mesh_axis_names",
    "get_mesh_axis_size",
    "get_names_from_partition_spec",
    "get_partition_spec",
    "get_shardings_with_structure",
    "get_submesh_device_index",
    "make_shard_and_gather_fns",
    "match_partition_rules",
    "names_in_current_mesh",
    "with_sharding_constraint",
]


def __getattr__(name: str) -> Any:
    if name == "LOG_SHARDING_MOVE":
        return log_sharding_move()
    if name == "MIN_SHARDING_SIZE":
        return min_sharding_size()
    return getattr(absent, name)
