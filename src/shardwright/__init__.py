"""Name every array dimension once. A strategy file decides, per runtime mode, over which mesh axes
each dimension is sharded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwright.errors import AgreementError as AgreementError
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
from shardwright.manager.ambient import current_manager as current_manager
from shardwright.manager.ambient import gather as gather
from shardwright.manager.ambient import hint as hint
from shardwright.manager.ambient import shard as shard
from shardwright.manager.einsum import dot_general as dot_general
from shardwright.manager.einsum import einsum as einsum
from shardwright.manager.manager import PartitionManager as PartitionManager
from shardwright.mesh.build import abstract_mesh as abstract_mesh
from shardwright.mesh.build import create_mesh as create_mesh
from shardwright.mesh.build import get_jax_mesh as get_jax_mesh
from shardwright.mesh.build import get_ranks_and_size as get_ranks_and_size
from shardwright.resolution.decisions import Resolution as Resolution
from shardwright.resolution.partition_axis import PartitionAxis as PartitionAxis
from shardwright.resolution.resolver import explain as explain
from shardwright.resolution.resolver import resolve as resolve
from shardwright.resolution.rules import AxisRules as AxisRules
from shardwright.resolution.rules import Policy as Policy
from shardwright.trees.initialize import stack_specs as stack_specs
from shardwright.trees.paths import match_paths as match_paths
from shardwright.vocabulary.annotations import ArraySpec as ArraySpec
from shardwright.vocabulary.annotations import PartOf as PartOf
from shardwright.vocabulary.annotations import Unreduced as Unreduced
from shardwright.vocabulary.annotations import is_annotation as is_annotation
from shardwright.vocabulary.annotations import stacked as stacked
from shardwright.vocabulary.axes import BATCH as BATCH
from shardwright.vocabulary.axes import BIAS_HEAD_SEQ as BIAS_HEAD_SEQ
from shardwright.vocabulary.axes import BIAS_KV_SEQ as BIAS_KV_SEQ
from shardwright.vocabulary.axes import CAPACITY as CAPACITY
from shardwright.vocabulary.axes import CHANNEL as CHANNEL
from shardwright.vocabulary.axes import CHANNEL_IN as CHANNEL_IN
from shardwright.vocabulary.axes import CHANNEL_OUT as CHANNEL_OUT
from shardwright.vocabulary.axes import DATA_PARALLEL as DATA_PARALLEL
from shardwright.vocabulary.axes import DEFAULT_MASK_VALUE as DEFAULT_MASK_VALUE
from shardwright.vocabulary.axes import DP as DP
from shardwright.vocabulary.axes import EMBED as EMBED
from shardwright.vocabulary.axes import EMPTY as EMPTY
from shardwright.vocabulary.axes import EMPTY_VAL as EMPTY_VAL
from shardwright.vocabulary.axes import EP as EP
from shardwright.vocabulary.axes import EXPERT as EXPERT
from shardwright.vocabulary.axes import EXPERT_GATE as EXPERT_GATE
from shardwright.vocabulary.axes import EXPERT_PARALLEL as EXPERT_PARALLEL
from shardwright.vocabulary.axes import FSDP as FSDP
from shardwright.vocabulary.axes import FULLY_SHARDED_DATA_PARALLEL as FULLY_SHARDED_DATA_PARALLEL
from shardwright.vocabulary.axes import HEAD as HEAD
from shardwright.vocabulary.axes import HEAD_DIM as HEAD_DIM
from shardwright.vocabulary.axes import HEIGHT as HEIGHT
from shardwright.vocabulary.axes import KV_HEAD as KV_HEAD
from shardwright.vocabulary.axes import KV_HEAD_DIM as KV_HEAD_DIM
from shardwright.vocabulary.axes import KV_LENGTH as KV_LENGTH
from shardwright.vocabulary.axes import LAYERS as LAYERS
from shardwright.vocabulary.axes import LENGTH as LENGTH
from shardwright.vocabulary.axes import MLP_INTERMEDIATE as MLP_INTERMEDIATE
from shardwright.vocabulary.axes import NORM as NORM
from shardwright.vocabulary.axes import NOT_GIVEN as NOT_GIVEN
from shardwright.vocabulary.axes import PAGE as PAGE
from shardwright.vocabulary.axes import PIPELINE_PARALLEL as PIPELINE_PARALLEL
from shardwright.vocabulary.axes import PP as PP
from shardwright.vocabulary.axes import QUERY_LENGTH as QUERY_LENGTH
from shardwright.vocabulary.axes import REPLICATED as REPLICATED
from shardwright.vocabulary.axes import SEQUENCE_PARALLEL as SEQUENCE_PARALLEL
from shardwright.vocabulary.axes import SP as SP
from shardwright.vocabulary.axes import TENSOR_PARALLEL as TENSOR_PARALLEL
from shardwright.vocabulary.axes import TP as TP
from shardwright.vocabulary.axes import UNCONSTRAINED as UNCONSTRAINED
from shardwright.vocabulary.axes import VOCAB as VOCAB
from shardwright.vocabulary.axes import WIDTH as WIDTH
from shardwright.vocabulary.axes import AxisType as AxisType
from shardwright.vocabulary.axes import Role as Role
from shardwright.vocabulary.layouts import AttnKVSharding as AttnKVSharding
from shardwright.vocabulary.layouts import AttnQSharding as AttnQSharding
from shardwright.vocabulary.layouts import ColumnWise as ColumnWise
from shardwright.vocabulary.layouts import DynamicShardingAxes as DynamicShardingAxes
from shardwright.vocabulary.layouts import ExpertActivations as ExpertActivations
from shardwright.vocabulary.layouts import ExpertActivationsAlt as ExpertActivationsAlt
from shardwright.vocabulary.layouts import ExpertColumnWise as ExpertColumnWise
from shardwright.vocabulary.layouts import ExpertColumnWiseAlt as ExpertColumnWiseAlt
from shardwright.vocabulary.layouts import ExpertRowWise as ExpertRowWise
from shardwright.vocabulary.layouts import ExpertRowWiseAlt as ExpertRowWiseAlt
from shardwright.vocabulary.layouts import ExpertTensorParallel as ExpertTensorParallel
from shardwright.vocabulary.layouts import HiddenStateSharding as HiddenStateSharding
from shardwright.vocabulary.layouts import Replicated as Replicated
from shardwright.vocabulary.layouts import RowWise as RowWise
from shardwright.vocabulary.layouts import SColumnWise as SColumnWise
from shardwright.vocabulary.layouts import SRowWise as SRowWise
from shardwright.vocabulary.layouts import UnifiedExpertColumnWise as UnifiedExpertColumnWise
from shardwright.vocabulary.layouts import UnifiedExpertRowWise as UnifiedExpertRowWise
from shardwright.vocabulary.merged_dims import merged as merged
from shardwright.vocabulary.modes import GENERATION_MODES as GENERATION_MODES
from shardwright.vocabulary.modes import MODE_DECODE as MODE_DECODE
from shardwright.vocabulary.modes import MODE_INSERT as MODE_INSERT
from shardwright.vocabulary.modes import MODE_PREFILL as MODE_PREFILL
from shardwright.vocabulary.modes import MODE_TRAIN as MODE_TRAIN
from shardwright.vocabulary.modes import RUNTIME_MODE_TYPES as RUNTIME_MODE_TYPES
from shardwright.vocabulary.shown import shown_by as _shown_by

if TYPE_CHECKING:
    from shardwright.inference.constrained import constrained as constrained
    from shardwright.inference.infer import infer_axes as infer_axes
    from shardwright.layers.pipeline import pipeline as pipeline
    from shardwright.layers.pipeline_loss import pipeline_loss as pipeline_loss
    from shardwright.layers.recurrence import linear_scan as linear_scan
    from shardwright.lints.catalogue import lint as lint
    from shardwright.manager.offload import offloaded as offloaded
    from shardwright.plan.search import search as search
    from shardwright.show.visualize import visualize as visualize
    from shardwright.strategy.model import Strategy as Strategy
    from shardwright.trees.optimizer_state import annotate_state as annotate_state

__version__ = "0.1.0"


# Imported on first use, because most programs do not need these names and their imports are slow.
# The slowest is pydantic, which only `Strategy` needs.
_ON_DEMAND = {
    "constrained": "shardwright.inference.constrained",
    "infer_axes": "shardwright.inference.infer",
    "linear_scan": "shardwright.layers.recurrence",
    "lint": "shardwright.lints.catalogue",
    "pipeline": "shardwright.layers.pipeline",
    "pipeline_loss": "shardwright.layers.pipeline_loss",
    "search": "shardwright.plan.search",
    "visualize": "shardwright.show.visualize",
    "offloaded": "shardwright.manager.offload",
    "annotate_state": "shardwright.trees.optimizer_state",
    "Strategy": "shardwright.strategy.model",
}

# The file of `show` for each class. It is imported when the first value of the class is shown.
_shown_by(
    {
        "Candidate": "shardwright.show.search",
        "Checkpoint": "shardwright.show.hf",
        "Compiled": "shardwright.show.verification",
        "Constrained": "shardwright.show.inference",
        "DimDecision": "shardwright.show.resolution",
        "Finding": "shardwright.show.lints",
        "Inferred": "shardwright.show.inference",
        "Layout": "shardwright.show.plan",
        "LeafBytes": "shardwright.show.memory",
        "PartitionManager": "shardwright.show.manager",
        "PlanComparison": "shardwright.show.changes",
        "PlanReport": "shardwright.show.plan",
        "Profile": "shardwright.show.profile",
        "Relayout": "shardwright.show.reshard",
        "Report": "shardwright.show.serving",
        "ReshardPlan": "shardwright.show.reshard",
        "Resolution": "shardwright.show.resolution",
        "RuleRef": "shardwright.show.resolution",
        "SearchReport": "shardwright.show.search",
        "Sent": "shardwright.show.verification",
        "StateBytes": "shardwright.show.plan",
        "TimeRange": "shardwright.show.plan",
        "TreeBytes": "shardwright.show.memory",
        "Update": "shardwright.show.serving",
        "Verification": "shardwright.show.verification",
        "VerifiedCandidate": "shardwright.show.search",
    }
)

# Type checkers do not see this function, so they still report a misspelled name such as sw.BACTH.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _ON_DEMAND:
            return getattr(importlib.import_module(_ON_DEMAND[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ON_DEMAND])
