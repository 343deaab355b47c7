"""The vocabulary: semantic names of array dimensions, as plain strings.

The constants are exact `str`, not enum members. JAX interns `PartitionSpec`s: it keeps the first
one of equal specs, so an enum member would also appear in the specs of other code.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Final, final

import jax
import numpy as np

BATCH: Final = "__BATCH__"
LENGTH: Final = "__LENGTH__"
QUERY_LENGTH: Final = "__QUERY_LENGTH__"
KV_LENGTH: Final = "__KV_LENGTH__"
EMBED: Final = "__EMBED__"
HEAD: Final = "__HEAD__"
KV_HEAD: Final = "__KV_HEAD__"
HEAD_DIM: Final = "__HEAD_DIM__"
KV_HEAD_DIM: Final = "__KV_HEAD_DIM__"
MLP_INTERMEDIATE: Final = "__MLP_INTERMEDIATE__"
VOCAB: Final = "__VOCAB__"
EXPERT: Final = "__EXPERT__"
EXPERT_GATE: Final = "__EXPERT_GATE__"
BIAS_HEAD_SEQ: Final = "__BIAS_HEAD_SEQ__"
BIAS_KV_SEQ: Final = "__BIAS_KV_SEQ__"
LAYERS: Final = "__LAYERS__"
PAGE: Final = "__PAGE__"
NORM: Final = "__NORM__"
CAPACITY: Final = "__CAPACITY__"
HEIGHT: Final = "__HEIGHT__"
WIDTH: Final = "__WIDTH__"
CHANNEL: Final = "__CHANNEL__"
CHANNEL_IN: Final = "__CHANNEL_IN__"
CHANNEL_OUT: Final = "__CHANNEL_OUT__"

DATA_PARALLEL: Final = "__DATA_PARALLEL__"
FULLY_SHARDED_DATA_PARALLEL: Final = "__FULLY_SHARDED_DATA_PARALLEL__"
TENSOR_PARALLEL: Final = "__TENSOR_PARALLEL__"
EXPERT_PARALLEL: Final = "__EXPERT_PARALLEL__"
SEQUENCE_PARALLEL: Final = "__SEQUENCE_PARALLEL__"
PIPELINE_PARALLEL: Final = "__PIPELINE_PARALLEL__"
DP: Final = DATA_PARALLEL
FSDP: Final = FULLY_SHARDED_DATA_PARALLEL
TP: Final = TENSOR_PARALLEL
EP: Final = EXPERT_PARALLEL
SP: Final = SEQUENCE_PARALLEL
PP: Final = PIPELINE_PARALLEL

EMPTY: Final = "_"
REPLICATED: Final = "-"
UNCONSTRAINED: Final = "?"

SEMANTIC_AXES: tuple[str, ...] = (
    BATCH,
    LENGTH,
    QUERY_LENGTH,
    KV_LENGTH,
    EMBED,
    HEAD,
    KV_HEAD,
    HEAD_DIM,
    KV_HEAD_DIM,
    MLP_INTERMEDIATE,
    VOCAB,
    EXPERT,
    EXPERT_GATE,
    BIAS_HEAD_SEQ,
    BIAS_KV_SEQ,
    LAYERS,
    PAGE,
    NORM,
    CAPACITY,
    HEIGHT,
    WIDTH,
    CHANNEL,
    CHANNEL_IN,
    CHANNEL_OUT,
)
PARALLELISM_AXES: dict[str, str] = {DP: "dp", FSDP: "fsdp", TP: "tp", EP: "ep", SP: "sp", PP: "pp"}
STANDARD_MESH_AXES: tuple[str, ...] = tuple(PARALLELISM_AXES.values())
KNOWN_AXES: frozenset[str] = frozenset({*SEMANTIC_AXES, *PARALLELISM_AXES})

# The mask value of JAX's Pallas attention kernels. It is finite: in a row that is fully masked,
# -inf minus the maximum of the row, -inf, would be NaN.
DEFAULT_MASK_VALUE: float = -0.7 * float(np.finfo(np.float32).max)

Array = jax.Array
PRNGKey = jax.Array
DType = Any
Mesh = jax.sharding.Mesh
Shape = Sequence[int]
AxisNames = tuple[str, ...]
AxisIdxes = tuple[int, ...]
AxisType = tuple[str, ...] | str | Any | None


class Role(enum.StrEnum):
    """What an array is. The role selects the rule.

    `PARAM` is a weight as it is stored, and `USE` is the same weight as the computation uses it.
    `STATE` is optimizer state. It is sharded like the stored weight, and over more mesh axes if the
    policy sets `zero1`.
    """

    ACTIVATION = "activation"
    PARAM = "param"
    USE = "use"
    STATE = "state"

    # A role equals its text, so both must have the same hash for lookups.
    __hash__ = str.__hash__


class Memory(enum.StrEnum):
    """Where an array lives."""

    DEVICE = "device"
    HOST = "host"


@final
class EMPTY_VAL:  # noqa: N801  the name is a contract
    """Class of `NOT_GIVEN`, which means that the default applies. (None means replicated.)"""

    _instance: EMPTY_VAL | None = None

    def __new__(cls) -> EMPTY_VAL:
        """Return the only instance."""
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __repr__(self) -> str:
        return "NOT_GIVEN"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> tuple[Any, ...]:
        return EMPTY_VAL, ()

    def __copy__(self) -> EMPTY_VAL:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> EMPTY_VAL:
        return self


NOT_GIVEN: Final = EMPTY_VAL()


def canonical_axis(name: str) -> str:
    """Return the canonical name of an axis: `__BATCH__` for `batch`, `BATCH` and `__BATCH__`.

    >>> canonical_axis("kv_head")
    '__KV_HEAD__'
    """
    # "____" has no name between its underscores, and neither has "___".
    if name == EMPTY or (name.startswith("__") and name.endswith("__") and len(name) > 4):
        return name
    return f"__{name.upper()}__" if name.upper() not in _SHORT else _SHORT[name.upper()]


def axis_label(axis: str) -> str:
    """Return the name that messages show: `KV_HEAD` for `"__KV_HEAD__"`, `TP` for
    `"__TENSOR_PARALLEL__"`.
    """
    if axis in PARALLELISM_AXES:
        return PARALLELISM_AXES[axis].upper()
    return axis[2:-2] if axis.startswith("__") and axis.endswith("__") and len(axis) > 4 else axis


def file_name(axis: str) -> str:
    """Return the name that strategy files use: `kv_head`, `tensor_parallel`."""
    return (
        axis[2:-2] if axis.startswith("__") and axis.endswith("__") and len(axis) > 4 else axis
    ).lower()


_SHORT: dict[str, str] = {"DP": DP, "FSDP": FSDP, "TP": TP, "EP": EP, "SP": SP, "PP": PP}
