"""The values of a manager as facts, which the processes of its mesh compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardwright.processes.compare import Fact, ProcessOptions, digest_of
from shardwright.resolution.rules import AxisRules, Rule
from shardwright.vocabulary.axes import axis_label
from shardwright.vocabulary.modes import MODES, mode_name


def manager_facts(
    rules: AxisRules, mesh: Mesh | AbstractMesh, mode: str | None, options: ProcessOptions
) -> dict[str, Fact]:
    """Return all values of a manager that the processes of its mesh must share."""
    seconds = options.watchdog
    facts = {
        "versions": Fact(f"JAX {jax.__version__}"),
        "mode": Fact(mode_name(mode) if mode else "none"),
        "watchdog": Fact("none" if seconds is None else f"{float(seconds)} s"),
    }
    facts.update(_mesh_facts(mesh))
    for field in dataclasses.fields(rules.policy):
        value = getattr(rules.policy, field.name)
        ref = str(value.ref) if isinstance(value, Rule) else ""
        facts[f"policy {field.name}"] = Fact(_value_text(value), ref)
    facts["axes of the strategy"] = Fact(", ".join(rules.user_axes) or "none")
    for mode, line in rules.attention:
        facts[f"attention in mode {mode_name(mode)}"] = Fact(line.text, str(line))
    if rules.pipeline is not None:
        facts["pipeline"] = Fact(str(rules.pipeline))
    for table, tables in (("rules", rules.activations), ("params", rules.params)):
        for mode, entries in zip(MODES, tables, strict=True):
            for axis, rule in entries:
                name = f"[{table}] {axis_label(axis)} in mode {mode_name(mode)}"
                facts[name] = _rule_fact(axis, rule)
    for at, entry in enumerate(rules.tensors):
        facts[f"[[tensors]] {at}"] = Fact(f"match = {entry.match!r}")
        for axis, rule in entry.rules:
            facts[f"[[tensors]] {at} {axis_label(axis)}"] = _rule_fact(axis, rule)
    for at, place in enumerate(rules.memory):
        modes = ", ".join(map(mode_name, place.modes))
        text = f"{place.role} on the {place.memory}, match = {place.match!r}, in {modes}"
        facts[f"[memory] {at}"] = Fact(text, str(place.ref))
    saved = rules.saved
    names = "".join(f", {name} on the {memory}" for name, memory in saved.names)
    facts["[memory] activations"] = Fact(f"on the {saved.memory}{names}", str(saved.ref or ""))
    if rules.order:
        facts["order of the rules"] = Fact(digest_of(repr(rules.order)))
    return facts


def _rule_fact(axis: str, rule: Rule) -> Fact:
    """Return a rule as a fact, with the place where it is written."""
    return Fact(f"{axis_label(axis)} = {_value_text(rule)}", str(rule.ref))


def _value_text(value: Any) -> str:
    if isinstance(value, Rule):
        words = ["+".join(candidate) for candidate in value.candidates]
        text = f'"{" | ".join([*words, *filter(None, [value.fallback])])}"'
        one = "" if value.of_one is None else f" (of size 1: {_value_text(value.of_one)})"
        return text + one
    if isinstance(value, tuple):
        return "+".join(value) or "none"
    return "none" if value is None else str(value)


def _mesh_facts(mesh: Any) -> Iterator[tuple[str, Fact]]:
    sizes = ",".join(f"{axis}:{size}" for axis, size in mesh.shape.items())
    types = ", ".join(str(kind).rpartition(".")[2] for kind in mesh.axis_types)
    yield "mesh axes", Fact(sizes)
    yield "axis types of the mesh", Fact(types)
    # One fact per device, so that the message names the first device that differs.
    for index, device in np.ndenumerate(mesh.devices):
        place = ",".join(f"{axis}={at}" for axis, at in zip(mesh.shape, index, strict=True))
        yield f"device at {place}", Fact(f"device {device.id}", kind="device")
