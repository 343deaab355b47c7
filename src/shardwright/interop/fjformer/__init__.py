"""The names of fjformer's `partition_utils`, for code that uses them.

They are trees of specs written by hand, trees by path, metrics, and per-call PRNG keys.
"""

from shardwright.interop.fjformer.spec_trees import (
    get_names_from_partition_spec as get_names_from_partition_spec,
)
from shardwright.interop.fjformer.spec_trees import (
    make_shard_and_gather_fns as make_shard_and_gather_fns,
)
from shardwright.interop.fjformer.spec_trees import match_partition_rules as match_partition_rules
from shardwright.interop.fjformer.spec_trees import names_in_current_mesh as names_in_current_mesh
from shardwright.interop.fjformer.spec_trees import names_in_mesh as names_in_mesh
from shardwright.interop.fjformer.spec_trees import (
    with_sharding_constraint as with_sharding_constraint,
)
from shardwright.interop.fjformer.train_loop import get_metrics as get_metrics
from shardwright.interop.fjformer.train_loop import wrap_function_with_rng as wrap_function_with_rng
from shardwright.interop.fjformer.tree_names import flatten_tree as flatten_tree
from shardwright.interop.fjformer.tree_names import get_weight_decay_mask as get_weight_decay_mask
from shardwright.interop.fjformer.tree_names import named_tree_map as named_tree_map
from shardwright.interop.fjformer.tree_names import tree_apply as tree_apply
from shardwright.interop.fjformer.tree_names import tree_path_to_string as tree_path_to_string
