"""The names of `eformer.common_types`."""

from __future__ import annotations

from shardwright.vocabulary.axes import BATCH as BATCH
from shardwright.vocabulary.axes import BIAS_HEAD_SEQ as BIAS_HEAD_SEQ
from shardwright.vocabulary.axes import BIAS_KV_SEQ as BIAS_KV_SEQ
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
from shardwright.vocabulary.axes import KV_HEAD as KV_HEAD
from shardwright.vocabulary.axes import KV_HEAD_DIM as KV_HEAD_DIM
from shardwright.vocabulary.axes import KV_LENGTH as KV_LENGTH
from shardwright.vocabulary.axes import LENGTH as LENGTH
from shardwright.vocabulary.axes import MLP_INTERMEDIATE as MLP_INTERMEDIATE
from shardwright.vocabulary.axes import NOT_GIVEN as NOT_GIVEN
from shardwright.vocabulary.axes import QUERY_LENGTH as QUERY_LENGTH
from shardwright.vocabulary.axes import SEQUENCE_PARALLEL as SEQUENCE_PARALLEL
from shardwright.vocabulary.axes import SP as SP
from shardwright.vocabulary.axes import TENSOR_PARALLEL as TENSOR_PARALLEL
from shardwright.vocabulary.axes import TP as TP
from shardwright.vocabulary.axes import VOCAB as VOCAB
from shardwright.vocabulary.axes import Array as Array
from shardwright.vocabulary.axes import AxisIdxes as AxisIdxes
from shardwright.vocabulary.axes import AxisNames as AxisNames
from shardwright.vocabulary.axes import AxisType as AxisType
from shardwright.vocabulary.axes import DType as DType
from shardwright.vocabulary.axes import Mesh as Mesh
from shardwright.vocabulary.axes import PRNGKey as PRNGKey
from shardwright.vocabulary.axes import Shape as Shape
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
from shardwright.vocabulary.modes import GENERATION_MODES as GENERATION_MODES
from shardwright.vocabulary.modes import MODE_DECODE as MODE_DECODE
from shardwright.vocabulary.modes import MODE_INSERT as MODE_INSERT
from shardwright.vocabulary.modes import MODE_PREFILL as MODE_PREFILL
from shardwright.vocabulary.modes import MODE_TRAIN as MODE_TRAIN
from shardwright.vocabulary.modes import RUNTIME_MODE_TYPES as RUNTIME_MODE_TYPES

_Empty = EMPTY_VAL
