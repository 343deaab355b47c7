"""`PartitionAxis`: rules as attributes. Compiles to the same `AxisRules` as a strategy file."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardwright.errors import StrategyError, raise_problems
from shardwright.resolution.decisions import RuleRef
from shardwright.resolution.rules import AxisRules, Policy, Rule, build_rules, parse_rule
from shardwright.vocabulary.axes import (
    BATCH,
    BIAS_HEAD_SEQ,
    BIAS_KV_SEQ,
    EMBED,
    EMPTY_VAL,
    EXPERT,
    EXPERT_GATE,
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
    VOCAB,
    canonical_axis,
)

_PARALLELISM = {
    "data_parallel_axis": "data_parallel",
    "fully_sharded_data_parallel_axis": "fully_sharded_data_parallel",
    "tensor_parallel_axis": "tensor_parallel",
    "sequence_parallel_axis": "sequence_parallel",
    "expert_parallel_axis": "expert_parallel",
}
_ATTRIBUTES = {
    "batch_axis": BATCH,
    "sequence_axis": LENGTH,
    "query_sequence_axis": QUERY_LENGTH,
    "key_sequence_axis": KV_LENGTH,
    "hidden_state_axis": EMBED,
    "head_axis": HEAD,
    "kv_head_axis": KV_HEAD,
    "attention_dim_axis": HEAD_DIM,
    "attention_kv_dim_axis": KV_HEAD_DIM,
    "mlp_intermediate_axis": MLP_INTERMEDIATE,
    "vocab_axis": VOCAB,
    "expert_axis": EXPERT,
    "expert_gate_axis": EXPERT_GATE,
    "bias_head_sequence_axis": BIAS_HEAD_SEQ,
    "bias_key_sequence_axis": BIAS_KV_SEQ,
}
_DECODE = (
    "batch_axis",
    "head_axis",
    "kv_head_axis",
    "key_sequence_axis",
    "query_sequence_axis",
    "attention_dim_axis",
    "attention_kv_dim_axis",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartitionAxis:
    """Rules as attributes, named as in eformer's escale.

    A value is a mesh axis, a tuple of them (one dim over several), a rule such as `"tp | -"`, a parallelism axis such as
    `TP`, or None: replicated. `NOT_GIVEN` inherits: a `decode_*` attribute from its base, anything else from its default.
    The `decode_*` attributes serve insert too. As a parameter, `EMBED` lies over (fsdp, sp).

    The defaults differ from the preset files: hidden states lie over tp, and the batch over fsdp first.

    >>> PartitionAxis(kv_head_axis="tp | -").compile() == PartitionAxis(
    ...     kv_head_axis="tp | -"
    ... ).compile()
    True
    """

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
    decode_head_axis: Any = NOT_GIVEN
    decode_kv_head_axis: Any = NOT_GIVEN
    decode_key_sequence_axis: Any = NOT_GIVEN
    decode_query_sequence_axis: Any = None
    decode_attention_dim_axis: Any = None
    decode_attention_kv_dim_axis: Any = None

    def compile(self, *, policy: Policy | None = None) -> AxisRules:
        """Return the frozen, hashable rules.

        Raises:
          StrategyError: a value that is no rule; all of them at once.
        """
        problems: list[Any] = []
        rules = self._table(
            {name: getattr(self, name) for name in (*_PARALLELISM, *_ATTRIBUTES)}, problems
        )
        decode = self._table(
            {name: getattr(self, f"decode_{name}") for name in _DECODE}, problems, prefix="decode_"
        )
        stored = (self.fully_sharded_data_parallel_axis, self.sequence_parallel_axis)
        params = self._table({"hidden_state_axis": _flat(stored)}, problems)
        raise_problems(problems)
        return build_rules(
            {"rules": rules, "modes.decode": decode, "params": params}, policy=policy
        )

    def _table(
        self, values: dict[str, Any], problems: list[Any], *, prefix: str = ""
    ) -> dict[str, Rule]:
        table = {}
        for name, value in values.items():
            given = self._default(name) if isinstance(value, EMPTY_VAL) and not prefix else value
            if isinstance(given, EMPTY_VAL):
                continue
            axis = canonical_axis(_PARALLELISM[name]) if name in _PARALLELISM else _ATTRIBUTES[name]
            try:
                table[axis] = self._rule(prefix + name, given)
            except StrategyError as error:
                problems += error.problems
        return table

    def _rule(self, name: str, value: Any) -> Rule:
        text = REPLICATED if value is None else self._text(name, value)
        return parse_rule(text, ref=RuleRef(key=name, text=text, source="PartitionAxis"))

    def _text(self, name: str, value: Any) -> str:
        if isinstance(value, str) and value not in PARALLELISM_AXES:
            return value
        if isinstance(value, str) or (
            isinstance(value, (tuple, list))
            and value
            and all(isinstance(axis, str) for axis in value)
        ):
            flat = _flat(
                tuple(
                    self._mesh_name(axis)
                    for axis in ((value,) if isinstance(value, str) else value)
                )
            )
            return "+".join(flat) if flat else REPLICATED
        raise StrategyError(
            f"{value!r} is not a rule",
            axis=name,
            fix='write a mesh axis, a tuple of them, a rule such as "tp | -", or None for replicated',
        )

    def _mesh_name(self, value: str) -> Any:
        """Return the mesh axis that a parallelism axis means here; other text as it is."""
        if value not in PARALLELISM_AXES:
            return value
        named = {canonical_axis(stem): getattr(self, name) for name, stem in _PARALLELISM.items()}
        return named.get(value, PARALLELISM_AXES[value])

    def _default(self, name: str) -> Any:
        fsdp, tp = self.fully_sharded_data_parallel_axis, self.tensor_parallel_axis
        if name == "batch_axis":
            return _flat((fsdp, self.data_parallel_axis))
        if name in ("sequence_axis", "query_sequence_axis", "key_sequence_axis"):
            return self.sequence_parallel_axis
        if name == "expert_axis":
            return self.expert_parallel_axis
        return (
            tp
            if name
            in (
                "head_axis",
                "kv_head_axis",
                "hidden_state_axis",
                "mlp_intermediate_axis",
                "vocab_axis",
            )
            else NOT_GIVEN
        )


def _flat(names: tuple[Any, ...]) -> tuple[str, ...] | None:
    """Return nested names as one tuple, without those that are replicated (None)."""
    flat = [
        one
        for name in names
        if name is not None
        for one in (name if isinstance(name, (tuple, list)) else (name,))
    ]
    return tuple(flat) or None
