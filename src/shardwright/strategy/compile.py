"""Compile a strategy's data to AxisRules."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from shardwright.errors import raise_problems
from shardwright.resolution.decisions import RuleRef
from shardwright.resolution.pipeline import GatherWeights, Pipeline, Schedule
from shardwright.resolution.rules import (
    POLICY_PRESETS,
    AxisRules,
    Conflict,
    Indivisible,
    MemoryRule,
    Missing,
    Order,
    Policy,
    Rank,
    Rule,
    SavedActivations,
    TensorRules,
    build_rules,
)
from shardwright.strategy.check import name_problems, pipeline_problems
from shardwright.strategy.limits import first_problems
from shardwright.strategy.origin import KeyPath, KeySources, source_of
from shardwright.strategy.tables import ParsedTables, parse_rules
from shardwright.vocabulary.axes import Memory, Role, canonical_axis
from shardwright.vocabulary.modes import (
    MODE_DECODE,
    MODE_INSERT,
    MODE_PREFILL,
    MODE_TRAIN,
    MODES,
)


def compile_rules(data: Mapping[str, Any], origin: KeySources, policy: Any) -> AxisRules:
    """Compile a strategy's data.

    Raises:
      ShardingError: Every problem at once. The class of the first problem is the class of the
        error.
    """
    parsed = parse_rules(data, origin)
    raise_problems(
        first_problems(
            itertools.chain(
                parsed.problems,
                name_problems(data, parsed, origin=origin),
                pipeline_problems(data, parsed, origin),
            )
        )
    )
    compiled = _compile_policy(policy, parsed)
    # Without `order = "rules"`, the order of the rules in an entry has no meaning, so sort them.
    arranged = sorted if compiled.order is Order.DIMS else list
    tensors = [
        TensorRules(
            match=entry["match"], rules=tuple(arranged(parsed.tables["tensors", str(at)].items()))
        )
        for at, entry in enumerate(data.get("tensors", ()))
    ]
    layered = {
        ".".join(path): table for path, table in parsed.tables.items() if path[0] != "tensors"
    }
    pipeline = data.get("pipeline", {})
    user_axes = sorted(canonical_axis(name) for name in data.get("axes", {}))
    return build_rules(
        layered,
        tensors=tensors,
        user_axes=user_axes,
        policy=compiled,
        orders={".".join(path): order for path, order in parsed.orders.items()},
        memory=_memory_rules(data, origin),
        saved=_saved_activations(data.get("memory", {}), origin),
        attention={
            key: RuleRef(
                key=key, text=name, table="attention", source=source_of(("attention", key), origin)
            )
            for key, name in data.get("attention", {}).items()
        },
        pipeline=None
        if pipeline.get("schedule") is None
        else Pipeline(
            schedule=Schedule(pipeline["schedule"]),
            microbatches=pipeline.get("microbatches") or 1,
            repeats=pipeline.get("repeats", 1),
            gather=GatherWeights(pipeline.get("gather", "tick")),
        ),
    )


def _memory_rules(data: Mapping[str, Any], origin: KeySources) -> list[MemoryRule]:
    """Compile `[memory]` and `[modes.M.memory]` to rules in the order in which they are tried."""
    memory = data.get("memory", {})
    tables: list[tuple[KeyPath, Mapping[str, Any], tuple[str, ...]]] = [
        (("memory", "tensors", str(at)), entry, MODES)
        for at, entry in enumerate(memory.get("tensors", ()))
    ]
    # In the mode insert, the table of insert is tried first, then the table of decode.
    for mode, applies in (
        ("train", (MODE_TRAIN,)),
        ("prefill", (MODE_PREFILL,)),
        ("insert", (MODE_INSERT,)),
        ("decode", (MODE_DECODE, MODE_INSERT)),
    ):
        table = data.get("modes", {}).get(mode, {}).get("memory", {})
        tables.append((("modes", mode, "memory"), table, applies))
    tables.append((("memory",), memory, MODES))
    return [
        MemoryRule(
            role=role,
            memory=Memory(table[key]),
            modes=modes,
            match=table.get("match"),
            ref=RuleRef(
                key=key,
                text=table[key],
                table=".".join(path),
                source=source_of((*path, key), origin),
            ),
        )
        for path, table, modes in tables
        for key, role in (("params", Role.PARAM), ("state", Role.STATE))
        if table.get(key) is not None
    ]


def _saved_activations(memory: Mapping[str, Any], origin: KeySources) -> SavedActivations:
    names = dict(memory.get("saved", {}))
    lines: dict[KeyPath, str] = {
        ("memory", "saved", name): text for name, text in sorted(names.items())
    }
    lines["memory", "activations"] = memory.get("activations", Memory.DEVICE)
    refs = [
        RuleRef(key=path[-1], text=text, table=".".join(path[:-1]), source=source_of(path, origin))
        for path, text in lines.items()
        if text == Memory.HOST
    ]
    return SavedActivations(
        memory=Memory(memory.get("activations", Memory.DEVICE)),
        names=tuple((name, Memory(text)) for name, text in sorted(names.items())),
        ref=next(iter(refs), None),
    )


def _compile_policy(table: Any, parsed: ParsedTables) -> Policy:
    """Compile `[policy]`. A key that is not set has the value of the preset `policy.preset`."""
    base = POLICY_PRESETS[table.preset]
    return Policy(
        indivisible=Indivisible(table.indivisible or base.indivisible),
        conflict=Conflict(table.conflict or base.conflict),
        order=Order(table.order or base.order),
        gather=parsed.gather.mesh_axes if parsed.gather is not None else (),
        idle=parsed.idle.mesh_axes if parsed.idle is not None else (),
        largest_dim=_added(parsed.largest_dim),
        largest_dim_min_size=table.largest_dim_min_size,
        zero1=_added(parsed.zero1),
        missing=Missing(table.missing or base.missing),
        rank=Rank(table.rank or base.rank),
    )


def _added(rule: Rule | None) -> Rule | None:
    """Return the rule if it adds mesh axes, else None. An absent key counts as "-"."""
    return rule if rule is not None and rule.candidates else None
