"""The names of `eformer.escale.partition.manager`."""

from __future__ import annotations

from shardwright.interop.eformer.absent import __getattr__  # noqa: F401
from shardwright.interop.eformer.axis import PartitionAxis
from shardwright.interop.eformer.manager import (
    PartitionManager,
    apply_logical_sharding,
    get_current_partition_manager,
    get_partition_manager,
)

__all__ = [
    "PartitionAxis",
    "PartitionManager",
    "apply_logical_sharding",
    "get_current_partition_manager",
    "get_partition_manager",
]
