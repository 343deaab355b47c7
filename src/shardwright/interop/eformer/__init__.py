"""eformer's names for sharding. Code that uses them runs if its imports are changed.

`from eformer.escale import …` becomes `from shardwright.interop.eformer.escale import …`, and
`from eformer.common_types import …` becomes
`from shardwright.interop.eformer.common_types import …`. All names can be imported from here too.
docs/eformer.md says what behaves differently, and why.
"""

from __future__ import annotations

from typing import Any

from shardwright.interop.eformer import common_types as common_types
from shardwright.interop.eformer import escale as escale
from shardwright.interop.eformer.common_types import BATCH as BATCH
from shardwright.interop.eformer.common_types import BIAS_HEAD_SEQ as BIAS_HEAD_SEQ
from shardwright.interop.eformer.common_types import BIAS_KV_SEQ as BIAS_KV_SEQ
from shardwright.interop.eformer.common_types import DATA_PARALLEL as DATA_PARALLEL
from shardwright.interop.eformer.common_types import DEFAULT_MASK_VALUE as DEFAULT_MASK_VALUE
from shardwright.interop.eformer.common_types import DP as DP
from shardwright.interop.eformer.common_types import EMBED as EMBED
from shardwright.interop.eformer.common_types import EMPTY as EMPTY
from shardwright.interop.eformer.common_types import EMPTY_VAL as EMPTY_VAL
from shardwright.interop.eformer.common_types import EP as EP
from shardwright.interop.eformer.common_types import EXPERT as EXPERT
from shardwright.interop.eformer.common_types import EXPERT_GATE as EXPERT_GATE
from shardwright.interop.eformer.common_types import EXPERT_PARALLEL as EXPERT_PARALLEL
from shardwright.interop.eformer.common_types import FSDP as FSDP
from shardwright.interop.eformer.common_types import (
    FULLY_SHARDED_DATA_PARALLEL as FULLY_SHARDED_DATA_PARALLEL,
)
from shardwright.interop.eformer.common_types import GENERATION_MODES as GENERATION_MODES
from shardwright.interop.eformer.common_types import HEAD as HEAD
from shardwright.interop.eformer.common_types import HEAD_DIM as HEAD_DIM
from shardwright.interop.eformer.common_types import KV_HEAD as KV_HEAD
from shardwright.interop.eformer.common_types import KV_HEAD_DIM as KV_HEAD_DIM
from shardwright.interop.eformer.common_types import KV_LENGTH as KV_LENGTH
from shardwright.interop.eformer.common_types import LENGTH as LENGTH
from shardwright.interop.eformer.common_types import MLP_INTERMEDIATE as MLP_INTERMEDIATE
from shardwright.interop.eformer.common_types import MODE_DECODE as MODE_DECODE
from shardwright.interop.eformer.common_types import MODE_INSERT as MODE_INSERT
from shardwright.interop.eformer.common_types import MODE_PREFILL as MODE_PREFILL
from shardwright.interop.eformer.common_types import MODE_TRAIN as MODE_TRAIN
from shardwright.interop.eformer.common_types import NOT_GIVEN as NOT_GIVEN
from shardwright.interop.eformer.common_types import QUERY_LENGTH as QUERY_LENGTH
from shardwright.interop.eformer.common_types import RUNTIME_MODE_TYPES as RUNTIME_MODE_TYPES
from shardwright.interop.eformer.common_types import SEQUENCE_PARALLEL as SEQUENCE_PARALLEL
from shardwright.interop.eformer.common_types import SP as SP
from shardwright.interop.eformer.common_types import TENSOR_PARALLEL as TENSOR_PARALLEL
from shardwright.interop.eformer.common_types import TP as TP
from shardwright.interop.eformer.common_types import VOCAB as VOCAB
from shardwright.interop.eformer.common_types import Array as Array
from shardwright.interop.eformer.common_types import AttnKVSharding as AttnKVSharding
from shardwright.interop.eformer.common_types import AttnQSharding as AttnQSharding
from shardwright.interop.eformer.common_types import AxisIdxes as AxisIdxes
from shardwright.interop.eformer.common_types import AxisNames as AxisNames
from shardwright.interop.eformer.common_types import AxisType as AxisType
from shardwright.interop.eformer.common_types import ColumnWise as ColumnWise
from shardwright.interop.eformer.common_types import DType as DType
from shardwright.interop.eformer.common_types import DynamicShardingAxes as DynamicShardingAxes
from shardwright.interop.eformer.common_types import ExpertActivations as ExpertActivations
from shardwright.interop.eformer.common_types import ExpertActivationsAlt as ExpertActivationsAlt
from shardwright.interop.eformer.common_types import ExpertColumnWise as ExpertColumnWise
from shardwright.interop.eformer.common_types import ExpertColumnWiseAlt as ExpertColumnWiseAlt
from shardwright.interop.eformer.common_types import ExpertRowWise as ExpertRowWise
from shardwright.interop.eformer.common_types import ExpertRowWiseAlt as ExpertRowWiseAlt
from shardwright.interop.eformer.common_types import ExpertTensorParallel as ExpertTensorParallel
from shardwright.interop.eformer.common_types import HiddenStateSharding as HiddenStateSharding
from shardwright.interop.eformer.common_types import Mesh as Mesh
from shardwright.interop.eformer.common_types import PRNGKey as PRNGKey
from shardwright.interop.eformer.common_types import Replicated as Replicated
from shardwright.interop.eformer.common_types import RowWise as RowWise
from shardwright.interop.eformer.common_types import SColumnWise as SColumnWise
from shardwright.interop.eformer.common_types import Shape as Shape
from shardwright.interop.eformer.common_types import SRowWise as SRowWise
from shardwright.interop.eformer.common_types import (
    UnifiedExpertColumnWise as UnifiedExpertColumnWise,
)
from shardwright.interop.eformer.common_types import UnifiedExpertRowWise as UnifiedExpertRowWise
from shardwright.interop.eformer.escale import NamedSharding as NamedSharding
from shardwright.interop.eformer.escale import NoMeshError as NoMeshError
from shardwright.interop.eformer.escale import NotRegisteredError as NotRegisteredError
from shardwright.interop.eformer.escale import PartitionAxis as PartitionAxis
from shardwright.interop.eformer.escale import PartitionManager as PartitionManager
from shardwright.interop.eformer.escale import PartitionSpec as PartitionSpec
from shardwright.interop.eformer.escale import WrongTypeError as WrongTypeError
from shardwright.interop.eformer.escale import apply_logical_sharding as apply_logical_sharding
from shardwright.interop.eformer.escale import cpu_context as cpu_context
from shardwright.interop.eformer.escale import create_cpu_mesh as create_cpu_mesh
from shardwright.interop.eformer.escale import create_mesh as create_mesh
from shardwright.interop.eformer.escale import (
    extract_sharding_structure as extract_sharding_structure,
)
from shardwright.interop.eformer.escale import extract_shardings as extract_shardings
from shardwright.interop.eformer.escale import force_cpu as force_cpu
from shardwright.interop.eformer.escale import get_axes_size_in_mesh as get_axes_size_in_mesh
from shardwright.interop.eformer.escale import (
    get_corrected_named_sharding as get_corrected_named_sharding,
)
from shardwright.interop.eformer.escale import (
    get_current_partition_manager as get_current_partition_manager,
)
from shardwright.interop.eformer.escale import get_incontext_mesh as get_incontext_mesh
from shardwright.interop.eformer.escale import get_mesh_axis_names as get_mesh_axis_names
from shardwright.interop.eformer.escale import get_mesh_axis_size as get_mesh_axis_size
from shardwright.interop.eformer.escale import (
    get_names_from_partition_spec as get_names_from_partition_spec,
)
from shardwright.interop.eformer.escale import get_partition_manager as get_partition_manager
from shardwright.interop.eformer.escale import get_partition_spec as get_partition_spec
from shardwright.interop.eformer.escale import (
    get_shardings_with_structure as get_shardings_with_structure,
)
from shardwright.interop.eformer.escale import get_submesh_device_index as get_submesh_device_index
from shardwright.interop.eformer.escale import lax_reshard as lax_reshard
from shardwright.interop.eformer.escale import (
    make_shard_and_gather_fns as make_shard_and_gather_fns,
)
from shardwright.interop.eformer.escale import match_partition_rules as match_partition_rules
from shardwright.interop.eformer.escale import names_in_current_mesh as names_in_current_mesh
from shardwright.interop.eformer.escale import parse_mesh_from_string as parse_mesh_from_string
from shardwright.interop.eformer.escale import with_sharding_constraint as with_sharding_constraint
from shardwright.interop.eformer.escale.partition import constraints as _constraints


def __getattr__(name: str) -> Any:
    # The environment is read on each access; escale raises the error for names that are not
    # provided.
    return getattr(
        _constraints if name in ("LOG_SHARDING_MOVE", "MIN_SHARDING_SIZE") else escale, name
    )
