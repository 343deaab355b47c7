"""The names of eformer that are not provided, each with its replacement.

Modules of this package import `__getattr__` from here.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from shardwright.interop.eformer.errors import NotProvidedError

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


# Cache the classes, so that a name is the same class each time.
@functools.cache
def __getattr__(name: str) -> Any:
    """Return a class in place of a function or class of eformer, so that its import succeeds.

    A call of the class, or a subclass of it, raises `NotProvidedError`.

    Raises:
      AttributeError: eformer does not have the name either.
    """
    if name not in INSTEAD:
        raise AttributeError(f"eformer has no attribute {name!r}")

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotProvidedError(f"{name} of eformer is not provided here", fix=INSTEAD[name])

    return type(
        name, (), {"__new__": refuse, "__init_subclass__": refuse, "__doc__": INSTEAD[name]}
    )
