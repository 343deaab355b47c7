"""Semantic axes that a collective over a mesh axis may carry."""

from __future__ import annotations

import pytest

import shardwright as sw
from shardwright.plan import by_axis, carried_axes, read_collectives
from tests.plan.programs import FIXTURES

MESH = sw.abstract_mesh("dp:2,tp:4")
SHADE = "__SHADE__"
RULES = """
version = 1
name = "carried"
[axes]
shade = "of a picture"
[rules]
batch = "dp"
length = "-"
embed = "-"
head = "tp"
kv_head = "tp | -"
shade = "sp+tp"
[params]
embed = "dp"
kv_head = "-"
[modes.decode]
kv_head = "-"
[[tensors]]
match = "lm_head"
vocab = "dp+tp"
"""


def manager(mesh: object = MESH) -> sw.PartitionManager:
    strategy = sw.Strategy.loads(RULES, source="rules.toml")
    return sw.PartitionManager(strategy, mesh=mesh)  # type: ignore[arg-type]


def test_axis_counts_if_any_rule_names_it() -> None:
    pm = manager()
    assert carried_axes(pm) == {
        "dp": (sw.BATCH, sw.EMBED, sw.VOCAB),
        "tp": (sw.HEAD, sw.KV_HEAD, sw.VOCAB, SHADE),
    }
    assert carried_axes(pm, mode="decode")["tp"] == (sw.HEAD, sw.VOCAB, SHADE)
    assert carried_axes(pm.for_mode("decode")) == carried_axes(pm, mode="decode")


def test_mesh_axis_of_size_one_carries_nothing() -> None:
    assert list(carried_axes(manager(sw.abstract_mesh("dp:8,tp:1")))) == ["dp"]


def test_unnamed_mesh_axis_is_empty() -> None:
    assert carried_axes(manager(sw.abstract_mesh("dp:2,ep:2,tp:2")))["ep"] == ()


@pytest.mark.parametrize("preset", list(sw.Strategy.presets()))
def test_axes_carried_by_presets(preset: str) -> None:
    """What a rule resolves to is among what its mesh axes carry."""
    mesh = sw.abstract_mesh("dp:2,fsdp:2,sp:2,ep:2,tp:2")
    pm = sw.PartitionManager(sw.Strategy.preset(preset), mesh=mesh)
    carried = carried_axes(pm)
    for axis in (sw.BATCH, sw.EMBED, sw.HEAD, sw.VOCAB, sw.EXPERT):
        for role in ("activation", "param"):
            for name in pm.explain((axis,), role=role, shape=(64,)).decisions[0].mesh_axes:
                assert axis in carried[name]


def test_collectives_by_possible_axes() -> None:
    text = (FIXTURES / "cpu_nested_loops.hlo").read_text(encoding="utf-8")
    gathered, reduced = read_collectives(text, MESH)
    actual = by_axis((gathered, reduced), manager())
    assert actual == {
        **dict.fromkeys((sw.BATCH, sw.EMBED), (gathered,)),
        sw.VOCAB: (gathered, reduced),
        **dict.fromkeys((sw.HEAD, sw.KV_HEAD, SHADE), (reduced,)),
    }


def test_collectives_of_no_axis_are_kept() -> None:
    text = (FIXTURES / "tpu_loop_by_three.hlo").read_text(encoding="utf-8")
    collectives = read_collectives(text, MESH)
    pm = sw.PartitionManager(sw.Strategy.preset("ddp"), mesh=MESH)
    assert by_axis(collectives, pm) == {"": collectives}
