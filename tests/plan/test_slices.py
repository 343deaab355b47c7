"""Plans over several slices: topologies, layouts, bytes and times between slices, searches."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.cli.main import main
from shardwright.errors import MeshSpecError
from shardwright.plan.collectives.collective import Collective, Kind
from shardwright.plan.hardware import parse_topology, read_hardware
from shardwright.plan.layout import lay_out
from shardwright.plan.planner import PlanReport
from shardwright.plan.search.verify import compiled_seconds
from shardwright.plan.verify.compiler import Compiled, Target
from shardwright.plan.verify.differences import compare_traffic
from shardwright.plan.verify.run import Verification
from shardwright.show.search import search_text
from tests.plan.test_search import program
from tests.raising import raises

HARDWARE = read_hardware()
TWO = parse_topology("2xv5e:2x4", HARDWARE)
ROWS, EMBED, INNER = 32, 64, 128
HIDDEN = (sw.BATCH, sw.EMBED)
SPEC = sw.ArraySpec((EMBED, INNER), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE))


def plan(preset: str, mesh: str, **crossing: int) -> PlanReport:
    """Plan the gradient of one matmul."""

    def loss(w: Any, x: Any) -> Any:
        inner = sw.shard(x, HIDDEN) @ sw.gather(w, SPEC)
        return (sw.shard(inner, sw.BATCH, sw.MLP_INTERMEDIATE) ** 2).sum()

    pm = sw.PartitionManager(sw.Strategy.preset(preset), mesh=sw.abstract_mesh(mesh), mode="train")
    report: PlanReport = pm.plan(
        jax.grad(loss),
        jax.ShapeDtypeStruct(SPEC.shape, SPEC.dtype),
        jax.ShapeDtypeStruct((ROWS, EMBED), jnp.float32),
        specs=(SPEC, HIDDEN),
        outputs=SPEC,
        topology=dataclasses.replace(TWO, crossing=crossing),
    )
    return report


def test_topology_of_several_slices() -> None:
    assert (TWO.slices, TWO.devices, str(TWO)) == (2, 16, "2xv5e:2x4")
    assert parse_topology("1xv5e:2x4", HARDWARE) == parse_topology("v5e:2x4", HARDWARE)
    with raises(MeshSpecError, "slice"):
        parse_topology("0xv5e:2x4", HARDWARE)
    with raises(MeshSpecError, "slices", "v4", fix="v4"):
        parse_topology("2xv4:2x2x1", HARDWARE)


def test_rate_between_slices_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    cell = 'dcn_gbps = { value = 8, source = "measured", date = "2026-01-31" }'
    file.write_text(f"[v4]\n{cell}\n", encoding="utf-8")
    chip = parse_topology("2xv4:2x2x1", read_hardware(str(file))).chip
    assert chip.dcn_rate == 8e9
    assert chip.sources["dcn_gbps"] == "measured, 2026-01-31"


def test_slices_split_a_data_axis_by_default() -> None:
    layout = lay_out(TWO, {"dp": 2, "fsdp": 4, "tp": 2})
    assert layout.crossing == {"dp": 2}
    assert str(layout) == "2xv5e:2x4: dp on 2 slices, fsdp on y, tp on x"
    assert lay_out(TWO, {"fsdp": 16}).crossing == {"fsdp": 2}
    with raises(MeshSpecError, "dp", 1, "pp", "fsdp", fix="dp"):
        lay_out(TWO, {"dp": 1, "tp": 16})


def test_parts_that_cross_must_fit_the_slices() -> None:
    given = dataclasses.replace(TWO, crossing={"tp": 2})
    assert lay_out(given, {"tp": 16}).crossing == {"tp": 2}
    with raises(MeshSpecError, "dcn.tp", 2, "dp", 16):
        lay_out(given, {"dp": 16, "tp": 1})
    for slices, crossing in ((1, {"dp": 2}), (2, {"dp": 4})):
        wrong = dataclasses.replace(TWO, slices=slices, crossing=crossing)
        with raises(MeshSpecError, "dp", 2, "dcn.dp"):
            lay_out(wrong, {"dp": 8 * slices})


def test_bytes_between_slices_by_hand() -> None:
    size = EMBED * INNER * 4
    # Each device of a slice sends its eighth of the gradient there and back.
    assert plan("ddp", "dp:16").slice_bytes == size // 8
    # Weights over fsdp cross slices in the gather and in the sum of the gradient.
    assert plan("fsdp", "fsdp:16").slice_bytes == 2 * (size // 8 // 2)
    # dp is between the slices: it sums the shards of the gradient.
    assert plan("fsdp", "dp:2,fsdp:8").slice_bytes == size // 8
    # Here dp is inside the slices.
    assert plan("fsdp", "dp:2,fsdp:8", fsdp=2).slice_bytes == 2 * (size // 4 // 2)


def test_time_between_slices_is_in_the_range() -> None:
    report = plan("ddp", "dp:16")
    assert report.time is not None
    between = report.slice_bytes / TWO.chip.dcn_rate
    assert report.time.links["dp",].low == pytest.approx(between)
    assert report.time.links["dp",].high > between
    only = plan("fsdp", "dp:2,fsdp:8")
    assert only.time is not None
    # dp has no links inside a slice.
    assert only.time.links["dp",].high == pytest.approx(only.slice_bytes / TWO.chip.dcn_rate)


def test_report_shows_what_crosses() -> None:
    report = plan("ddp", "dp:16")
    assert "of these to other slices: 4.0 KiB" in report.text()
    assert "3.125 GB/s between slices" in " ".join(report.text().split())
    data = report.to_json()
    assert data["slice_bytes"] == 4096
    assert data["layout"]["crossing"] == {"dp": 2}


def test_search_over_slices() -> None:
    found = sw.search(program(32), topology="2xv5e:2x4", axes=("dp", "fsdp", "tp"))
    assert found.candidates
    for each in found.candidates:
        assert each.strategy.dcn
        assert each.slice_bytes == each.report.slice_bytes > 0
    assert any(reason.startswith("MeshSpecError") for reason in found.dropped)
    assert "between slices" in search_text(found)
    least = min(found.candidates, key=lambda each: each.slice_bytes)
    assert any(each.slice_bytes == least.slice_bytes for each in found.front)
    alone = sw.search(program(32), topology="v5e:2x4", axes=("dp", "fsdp", "tp"))
    assert "between slices" not in search_text(alone)


def test_search_with_an_axis_that_only_crosses_slices() -> None:
    """Such an axis has no links inside a slice. The closed form divided by their rate."""
    found = sw.search(program(32), topology="2xv5e:2x2", axes=("fsdp", "tp"))
    layouts = {each.mesh: each.report.layout for each in found.candidates}
    layout = layouts["fsdp:2,tp:4"]
    assert layout is not None
    assert (layout.parts["fsdp"], layout.slices_of(["fsdp"])) == ((), 2)
    seconds = layout.seconds_between_slices(Kind.ALL_GATHER, ("fsdp",), 2**20)
    assert seconds == pytest.approx(2**19 / TWO.chip.dcn_rate)


def test_compiled_time_over_slices() -> None:
    """The sum of the gradient is over dp, which only crosses slices."""
    report = plan("fsdp", "dp:2,fsdp:8")
    fields = {"devices": 2, "partial": False, "count": 1, "maybe": False, "gathers": False}
    texts = dict.fromkeys(("name", "op_name", "source"), "")
    collectives = tuple(
        Collective(
            kind=event.kind,
            mesh_axes=event.mesh_axes,
            between_slices="dp" in event.mesh_axes,
            dtype="f32",
            wire_dtype="f32",
            logical_bytes=event.logical_bytes,
            wire_bytes=event.wire_bytes,
            **fields,
            **texts,
        )
        for event in report.events
    )
    compiled = Compiled(target=Target(platform="tpu", topology="v5e:2x4"), collectives=collectives)
    traffic = compare_traffic(report.events, collectives, cpu=False)
    found = Verification(report=report, compiled=compiled, traffic=traffic)
    assert report.time is not None
    between = report.slice_bytes / TWO.chip.dcn_rate
    assert between < compiled_seconds(found) == pytest.approx(report.time.high)


def test_files_of_a_search_over_slices_have_dcn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = sw.search(program(32), topology="2xv5e:2x4", axes=("dp", "tp"))
    file = tmp_path / "found.toml"
    found.front[0].strategy.dump(file)
    loaded = sw.Strategy.load(file)
    assert dict(loaded.dcn) == {"dp": 2}
    assert main(["check", str(file)]) == 0
    capsys.readouterr()


def test_command_refuses_a_mesh_that_crosses_one_slice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dcn.toml").write_text("[mesh]\ndp = 2\nfsdp = 4\n[dcn]\ndp = 2\n")
    model = tmp_path / "tensors.toml"
    model.write_text(
        '[w]\naxes = "EMBED VOCAB"\nshape = [64, 64]\ndtype = "float32"\nrole = "param"\n'
    )
    command = ["plan", str(model), "--strategy", f"fsdp | {tmp_path / 'dcn.toml'}"]
    assert main([*command, "--topology", "v5e:2x4"]) == 2
    error = capsys.readouterr().err
    assert "crosses 2 slices (dcn.dp:2), but v5e:2x4 has 1" in error
    assert "2xv5e:2x4" in error
    assert main([*command, "--topology", "2xv5e:2x2"]) == 0
    assert "dp on 2 slices" in capsys.readouterr().out
