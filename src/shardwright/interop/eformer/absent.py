"""The names of eformer that are not provided, each with its replacement."""

from __future__ import annotations

from typing import NoReturn

INSTEAD = {
    **dict.fromkeys(
        (
            "AutoShardingRule",
            "CompositeShardingRule",
            "MemoryConstrainedShardingRule",
            "ShapeBasedShardingRule",
            "ShardingRule",
        ),
        (
            "write a Strategy, whose rules use axes instead of shapes, or match paths with "
            "match_partition_rules"
        ),
    ),
    **dict.fromkeys(
        (
            "auto_partition_spec",
            "vrn_auto_partition_spec",
            "auto_namedsharding",
            "auto_shard_array",
            "MeshPartitionHelper",
        ),
        "annotate the array, and call PartitionManager.shardings of shardwright",
    ),
    **dict.fromkeys(
        (
            "convert_sharding_strategy",
            "optimize_sharding_for_memory",
            "create_pattern_based_partition_spec",
        ),
        "load another strategy file; the annotations do not change",
    ),
    **dict.fromkeys(
        ("ShardingAnalyzer", "analyze_sharding_strategy", "validate_sharding_config"),
        (
            "explain shows which dims do not fit, and PartitionManager.shardings raises the errors "
            "of a whole tree at once"
        ),
    ),
    "calculate_host_mesh_shape": (
        "create_mesh uses the devices of all processes, and sw.abstract_mesh needs no devices"
    ),
    "create_monitored_function": (
        "assert_no_retrace and assert_collectives of shardwright.testing check a compiled function"
    ),
    **dict.fromkeys(
        ("get_safe_hash_int", "hash_fn"),
        "managers and axes have a hash of their own; hash other text with hashlib",
    ),
    "barrier_sync": "call jax.experimental.multihost_utils.sync_global_devices",
}


def refuse(module: str, name: str) -> NoReturn:
    """Raise the error for a name that `module` does not have.

    Raises:
      ImportError: eformer has the name. (`from ... import name` hides the text of an
        AttributeError.)
      AttributeError: eformer does not have the name either.
    """
    if name in INSTEAD:
        raise ImportError(f"{name} of eformer is not provided here: {INSTEAD[name]}", name=name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
