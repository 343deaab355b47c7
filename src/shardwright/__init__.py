"""Name every array dimension once; let a strategy file decide, per runtime mode, where it lives on the mesh."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwright.ambient import current_manager as current_manager
from shardwright.ambient import gather as gather
from shardwright.ambient import hint as hint
from shardwright.ambient import shard as shard
from shardwright.annotations import ArraySpec as ArraySpec
from shardwright.annotations import PartOf as PartOf
from shardwright.annotations import is_annotation as is_annotation
from shardwright.annotations import merged as merged
from shardwright.annotations import stacked as stacked
from shardwright.axes import BATCH as BATCH
from shardwright.axes import BIAS_HEAD_SEQ as BIAS_HEAD_SEQ
from shardwright.axes import BIAS_KV_SEQ as BIAS_KV_SEQ
from shardwright.axes import CAPACITY as CAPACITY
from shardwright.axes import DATA_PARALLEL as DATA_PARALLEL
from shardwright.axes import DEFAULT_MASK_VALUE as DEFAULT_MASK_VALUE
from shardwright.axes import DP as DP
from shardwright.axes import EMBED as EMBED
from shardwright.axes import EMPTY as EMPTY
from shardwright.axes import EMPTY_VAL as EMPTY_VAL
from shardwright.axes import EP as EP
from shardwright.axes import EXPERT as EXPERT
from shardwright.axes import EXPERT_GATE as EXPERT_GATE
from shardwright.axes import EXPERT_PARALLEL as EXPERT_PARALLEL
from shardwright.axes import FSDP as FSDP
from shardwright.axes import FULLY_SHARDED_DATA_PARALLEL as FULLY_SHARDED_DATA_PARALLEL
from shardwright.axes import HEAD as HEAD
from shardwright.axes import HEAD_DIM as HEAD_DIM
from shardwright.axes import KV_HEAD as KV_HEAD
from shardwright.axes import KV_HEAD_DIM as KV_HEAD_DIM
from shardwright.axes import KV_LENGTH as KV_LENGTH
from shardwright.axes import LAYERS as LAYERS
from shardwright.axes import LENGTH as LENGTH
from shardwright.axes import MLP_INTERMEDIATE as MLP_INTERMEDIATE
from shardwright.axes import NORM as NORM
from shardwright.axes import NOT_GIVEN as NOT_GIVEN
from shardwright.axes import PAGE as PAGE
from shardwright.axes import PIPELINE_PARALLEL as PIPELINE_PARALLEL
from shardwright.axes import PP as PP
from shardwright.axes import QUERY_LENGTH as QUERY_LENGTH
from shardwright.axes import REPLICATED as REPLICATED
from shardwright.axes import SEQUENCE_PARALLEL as SEQUENCE_PARALLEL
from shardwright.axes import SP as SP
from shardwright.axes import TENSOR_PARALLEL as TENSOR_PARALLEL
from shardwright.axes import TP as TP
from shardwright.axes import UNCONSTRAINED as UNCONSTRAINED
from shardwright.axes import VOCAB as VOCAB
from shardwright.axes import AxisType as AxisType
from shardwright.axes import Role as Role
from shardwright.errors import AttentionError as AttentionError
from shardwright.errors import AxisConflictError as AxisConflictError
from shardwright.errors import IndivisibleError as IndivisibleError
from shardwright.errors import LayerError as LayerError
from shardwright.errors import ManualAxisError as ManualAxisError
from shardwright.errors import MeshMismatchError as MeshMismatchError
from shardwright.errors import MeshSpecError as MeshSpecError
from shardwright.errors import MissingMeshAxisError as MissingMeshAxisError
from shardwright.errors import NoManagerError as NoManagerError
from shardwright.errors import RankMismatchError as RankMismatchError
from shardwright.errors import ShapeRequiredError as ShapeRequiredError
from shardwright.errors import ShardingError as ShardingError
from shardwright.errors import StrategyError as StrategyError
from shardwright.errors import UnknownAxisError as UnknownAxisError
from shardwright.layouts import AttnKVSharding as AttnKVSharding
from shardwright.layouts import AttnQSharding as AttnQSharding
from shardwright.layouts import ColumnWise as ColumnWise
from shardwright.layouts import DynamicShardingAxes as DynamicShardingAxes
from shardwright.layouts import ExpertActivations as ExpertActivations
from shardwright.layouts import ExpertActivationsAlt as ExpertActivationsAlt
from shardwright.layouts import ExpertColumnWise as ExpertColumnWise
from shardwright.layouts import ExpertColumnWiseAlt as ExpertColumnWiseAlt
from shardwright.layouts import ExpertRowWise as ExpertRowWise
from shardwright.layouts import ExpertRowWiseAlt as ExpertRowWiseAlt
from shardwright.layouts import ExpertTensorParallel as ExpertTensorParallel
from shardwright.layouts import HiddenStateSharding as HiddenStateSharding
from shardwright.layouts import Replicated as Replicated
from shardwright.layouts import RowWise as RowWise
from shardwright.layouts import SColumnWise as SColumnWise
from shardwright.layouts import SRowWise as SRowWise
from shardwright.layouts import UnifiedExpertColumnWise as UnifiedExpertColumnWise
from shardwright.layouts import UnifiedExpertRowWise as UnifiedExpertRowWise
from shardwright.manager import PartitionManager as PartitionManager
from shardwright.mesh import abstract_mesh as abstract_mesh
from shardwright.mesh import create_mesh as create_mesh
from shardwright.mesh import get_jax_mesh as get_jax_mesh
from shardwright.mesh import get_ranks_and_size as get_ranks_and_size
from shardwright.modes import GENERATION_MODES as GENERATION_MODES
from shardwright.modes import MODE_DECODE as MODE_DECODE
from shardwright.modes import MODE_INSERT as MODE_INSERT
from shardwright.modes import MODE_PREFILL as MODE_PREFILL
from shardwright.modes import MODE_TRAIN as MODE_TRAIN
from shardwright.modes import RUNTIME_MODE_TYPES as RUNTIME_MODE_TYPES
from shardwright.partition_axis import PartitionAxis as PartitionAxis
from shardwright.provenance import Resolution as Resolution
from shardwright.resolver import explain as explain
from shardwright.resolver import resolve as resolve
from shardwright.rules import AxisRules as AxisRules
from shardwright.rules import Policy as Policy
from shardwright.tree import match_paths as match_paths
from shardwright.tree import stack_specs as stack_specs

if TYPE_CHECKING:
    from shardwright.lints.catalogue import lint as lint
    from shardwright.spec_trees import (
        get_names_from_partition_spec as get_names_from_partition_spec,
    )
    from shardwright.spec_trees import make_shard_and_gather_fns as make_shard_and_gather_fns
    from shardwright.spec_trees import match_partition_rules as match_partition_rules
    from shardwright.spec_trees import names_in_current_mesh as names_in_current_mesh
    from shardwright.spec_trees import names_in_mesh as names_in_mesh
    from shardwright.spec_trees import with_sharding_constraint as with_sharding_constraint
    from shardwright.state import annotate_state as annotate_state
    from shardwright.strategy.model import Strategy as Strategy
    from shardwright.train_loop import get_metrics as get_metrics
    from shardwright.train_loop import wrap_function_with_rng as wrap_function_with_rng
    from shardwright.tree_names import flatten_tree as flatten_tree
    from shardwright.tree_names import get_weight_decay_mask as get_weight_decay_mask
    from shardwright.tree_names import named_tree_map as named_tree_map
    from shardwright.tree_names import tree_apply as tree_apply
    from shardwright.tree_names import tree_path_to_string as tree_path_to_string

__version__ = "0.1.0"


# What most programs never call costs nothing at the import: pydantic above all, which only a Strategy needs.
_ON_DEMAND = {
    "lint": "shardwright.lints.catalogue",
    "get_names_from_partition_spec": "shardwright.spec_trees",
    "make_shard_and_gather_fns": "shardwright.spec_trees",
    "match_partition_rules": "shardwright.spec_trees",
    "names_in_current_mesh": "shardwright.spec_trees",
    "names_in_mesh": "shardwright.spec_trees",
    "with_sharding_constraint": "shardwright.spec_trees",
    "annotate_state": "shardwright.state",
    "Strategy": "shardwright.strategy.model",
    "get_metrics": "shardwright.train_loop",
    "wrap_function_with_rng": "shardwright.train_loop",
    "flatten_tree": "shardwright.tree_names",
    "get_weight_decay_mask": "shardwright.tree_names",
    "named_tree_map": "shardwright.tree_names",
    "tree_apply": "shardwright.tree_names",
    "tree_path_to_string": "shardwright.tree_names",
}

if not TYPE_CHECKING:  # a type checker must still see that sw.BACTH does not exist

    def __getattr__(name: str) -> Any:
        if name not in _ON_DEMAND:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_ON_DEMAND[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_ON_DEMAND])
