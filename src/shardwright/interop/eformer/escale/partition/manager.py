"""The names of `eformer.escale.partition.manager`."""

from __future__ import annotations

from typing import NoReturn

from shardwright.interop.eformer.absent import refuse
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


def __getattr__(name: str) -> NoReturn:
    refuse(__name__, name)
