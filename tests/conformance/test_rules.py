"""Mistakes of other sharding libraries: silent drops, typos, aliases, modes, conflicts."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.resolution.decisions import Outcome, Reason
from shardwright.resolution.rules import POLICY_PRESETS
from shardwright.vocabulary.modes import MODES
from tests.raising import raises

TP4 = {"dp": 2, "tp": 4}


def rules(text: str, policy: str = "") -> sw.AxisRules:
    return sw.Strategy.loads(
        f"version = 1\n[rules]\n{text}\n[policy]\n{policy}", source="s.toml"
    ).compile()


def specs(axes: tuple[str, ...], of: sw.AxisRules, mesh: dict[str, int]) -> list[P]:
    return [sw.resolve(axes, of, mesh, mode=mode).spec for mode in MODES]


def test_replicated_in_decode_only() -> None:
    of = sw.PartitionAxis(decode_kv_head_axis=None).compile()
    assert specs((sw.KV_HEAD,), of, TP4) == [P("tp"), P("tp"), P(), P()]


def test_axis_alias_in_every_mode() -> None:
    of = rules(
        'query_length = "dp"\n[modes.decode]\nquery_length = "-"\n[modes.insert]\n'
        'query_length = "tp"'
    )
    for name in ("query_length", "QUERY_LENGTH", "__QUERY_LENGTH__"):
        assert specs((name,), of, TP4) == [P("dp"), P("dp"), P(), P("tp")]
    of = sw.PartitionAxis(head_axis=sw.TP, tensor_parallel_axis="model").compile()
    assert (
        specs((sw.HEAD,), of, {"model": 2}) == specs((sw.TP,), of, {"model": 2}) == [P("model")] * 4
    )


@pytest.mark.parametrize("mode", ["train", "prefill", "decode", "insert"])
def test_each_mode_can_be_overridden(mode: str) -> None:
    of = rules(f'head = "tp"\n[modes.{mode}]\nhead = "dp"')
    actual = dict(
        zip(("train", "prefill", "decode", "insert"), specs((sw.HEAD,), of, TP4), strict=True)
    )
    changed = {"decode", "insert"} if mode == "decode" else {mode}
    assert actual == {name: P("dp") if name in changed else P("tp") for name in actual}


def test_an_unknown_mode_is_an_error() -> None:
    with raises(sw.StrategyError, "mode", "decoding", fix="decode"):
        sw.resolve((sw.HEAD,), rules('head = "tp"'), TP4, mode="decoding")


def test_missing_mesh_axis_is_explained() -> None:
    resolution = sw.resolve((sw.BATCH,), sw.PartitionAxis().compile(), TP4, shape=(8,))
    assert resolution.spec == P("dp")
    assert [(skip.reason, skip.mesh_axis) for skip in resolution.decisions[0].skipped] == [
        (Reason.MISSING, "fsdp")
    ]
    assert "fsdp is not in the mesh" in str(resolution)
    permissive = sw.resolve(
        (sw.BATCH,), sw.PartitionAxis().compile(policy=POLICY_PRESETS["eformer"]), TP4, shape=(8,)
    )
    assert permissive.spec == P()
    assert permissive.decisions[0].outcome is Outcome.POLICY_MISSING
    assert "fsdp is not in the mesh" in str(permissive)


@pytest.mark.parametrize(("rows", "wanted"), [(16, P(("fsdp", "dp"))), (12, P("fsdp")), (2, P())])
def test_longest_dividing_prefix(rows: int, wanted: P) -> None:
    mesh = {"fsdp": 4, "dp": 2}
    resolution = sw.resolve(
        (sw.BATCH,), rules('batch = "fsdp+dp"', 'indivisible = "prefix"'), mesh, shape=(rows,)
    )
    assert resolution.spec == wanted
    strict = rules('batch = "fsdp+dp"')
    if rows % 8 == 0:
        assert sw.resolve((sw.BATCH,), strict, mesh, shape=(rows,)).spec == wanted
        return
    assert resolution.decisions[0].outcome is Outcome.POLICY_PREFIX
    assert f"{rows} % 8 != 0" in resolution.decisions[0].why
    with raises(sw.IndivisibleError, rows, "fsdp=4", "dp=2", dim=0, axis="BATCH"):
        sw.resolve((sw.BATCH,), strict, mesh, shape=(rows,))


@pytest.mark.parametrize("preset", list(POLICY_PRESETS))
def test_typo_in_a_composite_is_an_error(preset: str) -> None:
    of = sw.PartitionAxis().compile(policy=POLICY_PRESETS[preset])
    with raises(sw.UnknownAxisError, "axis", "KV_HAED", fix="KV_HEAD"):
        sw.resolve((("__KV_HAED__", sw.TP),), of, TP4, shape=(8,))
    with raises(sw.StrategyError, "EMPTY", fix="EMPTY"):
        sw.resolve(((sw.EMPTY, sw.TP),), of, TP4, shape=(8,))


def test_two_dims_claim_one_mesh_axis() -> None:
    axes = (sw.BATCH, sw.HEAD, sw.QUERY_LENGTH, sw.KV_LENGTH)
    of = sw.PartitionAxis().compile()
    assert sw.resolve(axes, of, {"dp": 2, "tp": 2, "sp": 1}, shape=(2, 2, 2, 2)).spec == P(
        "dp", "tp"
    )
    with raises(
        sw.AxisConflictError, "sp", 2, "QUERY_LENGTH", dim=3, axis="KV_LENGTH", fix="EMPTY"
    ):
        sw.resolve(axes, of, {"dp": 2, "tp": 2, "sp": 2}, shape=(2, 2, 2, 2))
