"""Rules written as tables of text, for tests of what they resolve to."""

from __future__ import annotations

from typing import Any

from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.resolution.decisions import RuleRef
from shardwright.resolution.resolver import resolve
from shardwright.resolution.rules import (
    AxisRules,
    Conflict,
    Indivisible,
    Policy,
    TensorRules,
    build_rules,
    parse_rule,
)

B, L, E, H, K, D, V, M = (
    sw.BATCH,
    sw.LENGTH,
    sw.EMBED,
    sw.HEAD,
    sw.KV_HEAD,
    sw.HEAD_DIM,
    sw.VOCAB,
    sw.MLP_INTERMEDIATE,
)
FIRST_DIM = Policy(conflict=Conflict.FIRST_DIM)
PREFIX = Policy(indivisible=Indivisible.PREFIX)
REPLICATE = Policy(indivisible=Indivisible.REPLICATE)


def table(name: str, rules: dict[str, str]) -> dict[str, Any]:
    return {
        axis: parse_rule(
            text, ref=RuleRef(key=axis.strip("_").lower(), text=text, table=name, source="t.toml")
        )
        for axis, text in rules.items()
    }


def make_rules(
    policy: Policy | None = None,
    /,
    *,
    tensors: Any = (),
    user_axes: Any = (),
    **tables: dict[str, str],
) -> AxisRules:
    """Rules from tables; `decode_params={...}` stands for `[modes.decode.params]`."""
    names = {"rules": "rules", "params": "params"}
    named = {}
    for key, rules in tables.items():
        mode, _, params = key.partition("_")
        name = names.get(key) or f"modes.{mode}" + (".params" if params else "")
        named[name] = table(name, rules)
    entries = [
        TensorRules(match=match, rules=tuple(table("tensors", rules).items()))
        for match, rules in tensors
    ]
    return build_rules(named, tensors=entries, user_axes=user_axes, policy=policy)


def spec(axes: Any, rules: AxisRules, mesh: dict[str, int], **options: Any) -> P:
    return resolve(axes, rules, mesh, **options).spec
