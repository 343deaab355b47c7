"""`PartitionAxis`: rules as attributes. It compiles to `AxisRules`, as a strategy file does."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

from shardwright.errors import Problem, StrategyError, raise_problems
from shardwright.resolution.decisions import RuleRef
from shardwright.resolution.rules import AxisRules, Policy, Rule, build_rules, parse_rule
from shardwright.vocabulary.axes import (
    BATCH,
    BIAS_HEAD_SEQ,
    BIAS_KV_SEQ,
    DATA_PARALLEL,
    EMBED,
    EMPTY_VAL,
    EXPERT,
    EXPERT_GATE,
    EXPERT_PARALLEL,
    FULLY_SHARDED_DATA_PARALLEL,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    KV_LENGTH,
    LENGTH,
    MLP_INTERMEDIATE,
    NOT_GIVEN,
    PARALLELISM_AXES,
    QUERY_LENGTH,
    REPLICATED,
    SEQUENCE_PARALLEL,
    TENSOR_PARALLEL,
    VOCAB,
)

_DECODE = "decode_"


@dataclasses.dataclass(frozen=True, slots=True)
class Attributes:
    """The attributes of a `PartitionAxis` and their defaults, in eformer's order."""

    data_parallel_axis: Any = "dp"
    fully_sharded_data_parallel_axis: Any = "fsdp"
    tensor_parallel_axis: Any = "tp"
    sequence_parallel_axis: Any = "sp"
    expert_parallel_axis: Any = "ep"
    batch_axis: Any = NOT_GIVEN
    sequence_axis: Any = NOT_GIVEN
    query_sequence_axis: Any = NOT_GIVEN
    head_axis: Any = NOT_GIVEN
    kv_head_axis: Any = NOT_GIVEN
    key_sequence_axis: Any = NOT_GIVEN
    hidden_state_axis: Any = NOT_GIVEN
    mlp_intermediate_axis: Any = NOT_GIVEN
    vocab_axis: Any = NOT_GIVEN
    expert_axis: Any = NOT_GIVEN
    expert_gate_axis: Any = None
    attention_dim_axis: Any = None
    attention_kv_dim_axis: Any = None
    bias_head_sequence_axis: Any = None
    bias_key_sequence_axis: Any = None
    decode_batch_axis: Any = NOT_GIVEN
    decode_query_sequence_axis: Any = None
    decode_head_axis: Any = NOT_GIVEN
    decode_kv_head_axis: Any = NOT_GIVEN
    decode_key_sequence_axis: Any = NOT_GIVEN
    decode_attention_dim_axis: Any = None
    decode_attention_kv_dim_axis: Any = None


ATTRIBUTES: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Attributes))
# The attribute of each parallelism axis, and of each semantic axis outside of decode.
MESH_ATTRIBUTES: dict[str, str] = {
    DATA_PARALLEL: "data_parallel_axis",
    FULLY_SHARDED_DATA_PARALLEL: "fully_sharded_data_parallel_axis",
    TENSOR_PARALLEL: "tensor_parallel_axis",
    SEQUENCE_PARALLEL: "sequence_parallel_axis",
    EXPERT_PARALLEL: "expert_parallel_axis",
}
SEMANTIC_ATTRIBUTES: dict[str, str] = {
    BATCH: "batch_axis",
    LENGTH: "sequence_axis",
    QUERY_LENGTH: "query_sequence_axis",
    HEAD: "head_axis",
    KV_HEAD: "kv_head_axis",
    KV_LENGTH: "key_sequence_axis",
    EMBED: "hidden_state_axis",
    MLP_INTERMEDIATE: "mlp_intermediate_axis",
    VOCAB: "vocab_axis",
    EXPERT: "expert_axis",
    EXPERT_GATE: "expert_gate_axis",
    HEAD_DIM: "attention_dim_axis",
    KV_HEAD_DIM: "attention_kv_dim_axis",
    BIAS_HEAD_SEQ: "bias_head_sequence_axis",
    BIAS_KV_SEQ: "bias_key_sequence_axis",
}
# The attributes that have a `decode_*` counterpart.
DECODE_ATTRIBUTES: tuple[str, ...] = tuple(
    name.removeprefix(_DECODE) for name in ATTRIBUTES if name.startswith(_DECODE)
)
_AXES = {name: axis for axis, name in (MESH_ATTRIBUTES | SEMANTIC_ATTRIBUTES).items()}
# Attributes whose defaults are the values of other attributes.
_FOLLOWS = {
    "batch_axis": ("fully_sharded_data_parallel_axis", "data_parallel_axis"),
    "sequence_axis": ("sequence_parallel_axis",),
    "query_sequence_axis": ("sequence_parallel_axis",),
    "head_axis": ("tensor_parallel_axis",),
    "kv_head_axis": ("tensor_parallel_axis",),
    "key_sequence_axis": ("sequence_parallel_axis",),
    "hidden_state_axis": ("tensor_parallel_axis",),
    "mlp_intermediate_axis": ("tensor_parallel_axis",),
    "vocab_axis": ("tensor_parallel_axis",),
    "expert_axis": ("expert_parallel_axis",),
}


def default_of(attributes: Attributes, name: str) -> Any:
    """Return the default of an attribute.

    If the attribute follows other attributes, its default is their value. Otherwise its default is
    `NOT_GIVEN`.
    """
    if name not in _FOLLOWS:
        return NOT_GIVEN
    follows = _FOLLOWS[name]
    if len(follows) == 1:
        return getattr(attributes, follows[0])
    return joined_names(follows, functools.partial(getattr, attributes))


def flat_names(names: Iterable[Any]) -> tuple[Any, ...] | None:
    """Return nested names as one tuple, without Nones. Return None if no name remains."""
    flat = [
        name
        for entry in names
        if entry is not None
        for name in (entry if isinstance(entry, (tuple, list)) else (entry,))
    ]
    return tuple(flat) or None


def joined_names(
    names: Iterable[Any], mesh_axes_of: Callable[[Any], Any]
) -> tuple[Any, ...] | None:
    """Return the mesh axes of several names as one tuple, or None if there is none.

    Several parallelism axes may be the same mesh axis, which then appears only once. A mesh axis
    that the user wrote twice appears twice, and raises an error later.
    """
    joined: list[Any] = []
    for name in names:
        own = mesh_axes_of(name)
        # If a name stands for itself, the user wrote a mesh axis and not a parallelism axis.
        known = [] if own == name else [*joined]
        joined += [axis for axis in flat_names((own,)) or () if axis not in known]
    return tuple(joined) or None


@dataclasses.dataclass(frozen=True, slots=True)
class PartitionAxis(Attributes):
    """Rules as attributes, named as in eformer's escale.

    A value is one of these:

    - a mesh axis, or a tuple of them: one dim over several mesh axes;
    - a rule such as `"tp | -"`;
    - a parallelism axis such as `TP`;
    - None: replicated;
    - `NOT_GIVEN`: the default. By default, `decode_head_axis` has the value of `head_axis`, and so
      on.

    The `decode_*` attributes also apply in the mode insert. `sequence_axis` has no `decode_*`
    attribute. In decode and insert a `LENGTH` of size 1, which is the one new token, has the rule
    of `QUERY_LENGTH`. In a parameter, `EMBED` is sharded over (fsdp, sp).

    The defaults differ from the preset files: hidden states are sharded over tp, and the batch is
    sharded over fsdp before dp.

    >>> PartitionAxis(kv_head_axis="tp | -").compile() == PartitionAxis(
    ...     kv_head_axis="tp | -"
    ... ).compile()
    True
    """

    def compile(self, *, policy: Policy | None = None) -> AxisRules:
        """Return the frozen, hashable rules.

        Args:
          policy: What to do if a rule cannot be applied. Defaults to raising errors.

        Raises:
          StrategyError: A value is not a rule. The error lists all such values.
        """
        problems: list[Problem] = []
        values = {name: self._value(name) for name in _AXES}
        decode = {name: getattr(self, _DECODE + name) for name in DECODE_ATTRIBUTES}
        # The hidden dim of a stored weight is sharded over (fsdp, sp), as in the layout
        # `ColumnWise`, [[FSDP, SP], TP].
        stored = joined_names(
            ("fully_sharded_data_parallel_axis", "sequence_parallel_axis"),
            functools.partial(getattr, self),
        )
        tables = {
            "rules": self._table(values, problems),
            "modes.decode": self._table(decode, problems, prefix=_DECODE),
            "params": self._table({"hidden_state_axis": stored}, problems),
        }
        raise_problems(problems)
        length, query = (
            tables["modes.decode"].get(axis) or tables["rules"][axis]
            for axis in (LENGTH, QUERY_LENGTH)
        )
        tables["modes.decode"][LENGTH] = dataclasses.replace(length, of_one=query)
        return build_rules(tables, policy=policy)

    def _value(self, name: str) -> Any:
        value = getattr(self, name)
        return default_of(self, name) if isinstance(value, EMPTY_VAL) else value

    def _table(
        self, values: dict[str, Any], problems: list[Problem], *, prefix: str = ""
    ) -> dict[str, Rule]:
        """Return the rule of each axis whose attribute is given."""
        table = {}
        for name, value in values.items():
            if isinstance(value, EMPTY_VAL):
                continue
            try:
                table[_AXES[name]] = self._rule(prefix + name, value)
            except StrategyError as error:
                problems += error.problems
        return table

    def _rule(self, name: str, value: Any) -> Rule:
        text = REPLICATED if value is None else self._text(name, value)
        return parse_rule(text, ref=RuleRef(key=name, text=text, source="PartitionAxis"))

    def _text(self, name: str, value: Any) -> str:
        if isinstance(value, str) and value not in PARALLELISM_AXES:
            return value
        axes = (value,) if isinstance(value, str) else value
        is_list = isinstance(axes, (tuple, list)) and bool(axes)
        if not is_list or not all(isinstance(axis, str) for axis in axes):
            raise StrategyError(
                f"{value!r} is not a rule",
                axis=name,
                fix=(
                    'write a mesh axis, a tuple of them, a rule such as "tp | -", or None for '
                    "replicated"
                ),
            )
        names = joined_names(axes, self._mesh_axis)
        return "+".join(names) if names else REPLICATED

    def _mesh_axis(self, name: str) -> Any:
        """Return the mesh axis of a parallelism axis. Return any other name unchanged."""
        if name in MESH_ATTRIBUTES:
            return getattr(self, MESH_ATTRIBUTES[name])
        return PARALLELISM_AXES.get(name, name)
