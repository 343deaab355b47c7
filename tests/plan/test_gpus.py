"""GPUs in plans: clusters, times worked out by hand, memory, and branches by platform."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from benchmarks import gpus
from shardwright import caches
from shardwright.errors import MeshSpecError, StrategyError
from shardwright.plan.hardware import parse_topology, read_hardware, smallest_slice
from shardwright.plan.layout import lay_out
from shardwright.plan.planner import PlanReport
from shardwright.plan.time import estimate_time
from shardwright.plan.walk.entries import Peak
from shardwright.plan.walk.events import Walked, Work
from tests.docs.snippets import ROOT
from tests.raising import Facts, facts, raises

HARDWARE = read_hardware()
PAGE = ROOT / "docs" / "development" / "gpus.md"
GIB = 2**30
# Of each collective of the page: seconds at least, seconds of its bytes at most, share of the
# bandwidth and microseconds of the latency. An H100 has 18 links of 20.6 to 25 GB/s.
BY_HAND = (
    # A ring of 8 sends 7/8. Simple: 8.4 + 7 hops of 3.4.
    (7 / 8 * GIB / 450e9, 7 / 8 * GIB / 370.8e9, 1.0, 8.4 + 7 * 3.4),
    # The switch sums at best, so each byte is sent once. A ring sends it twice, in 14 hops.
    (7 / 8 * GIB / 450e9, 14 / 8 * GIB / 370.8e9, 1.0, 8.4 + 14 * 3.4),
    # Few bytes: LL has a quarter of the bandwidth and 0.6 µs per hop.
    (7 / 8 * 65536 / 450e9, 14 / 8 * 65536 / 370.8e9, 0.25, 6.6 + 14 * 0.6),
    # dp has one GPU in each domain. Each of two sends half of the sum, there and back.
    (GIB / 50e9, GIB / 50e9, 1.0, 8.4 + 2 * 14.0),
    (GIB / 50e9, GIB / 50e9, 1.0, 8.4 + 14.0),
    # Eight NICs share the bytes between domains. The ring of 128 crosses 15 times.
    (
        GIB / 8 * 15 / 16 / 50e9,
        127 / 128 * GIB / 370.8e9 + GIB / 8 * 15 / 16 / 50e9,
        1.0,
        8.4 + 7 * 16 * 3.4 + 15 * 14.0,
    ),
    (2 * 15 / 16 * GIB / 12.5e9, 2 * 15 / 16 * GIB / 12.5e9, 1.0, 8.4 + 2 * 15 * 14.0),
    # PAT: 8 levels of 4 µs, and 2.8 µs for each of 256 devices.
    (255 / 256 * 2**22 / 50e9, 255 / 256 * 2**22 / 50e9, 0.75, 8.0 + 8 * 4.0 + 256 * 2.8),
    # 18 links of 40.1 to 50 GB/s.
    (71 / 72 * GIB / 900e9, 71 / 72 * GIB / 721.8e9, 1.0, 8.4 + 71 * 3.4),
    # A hop over PCIe takes 5.7 µs.
    (7 / 8 * GIB / 64e9, 7 / 8 * GIB / 48e9, 1.0, 8.4 + 7 * 5.7),
    # Without a switch, two of eight GPUs have one of seven links.
    (GIB / 64e9, GIB / 48e9, 1.0, 8.4 + 2 * 3.4),
    # Each GPU sends half of its rows to the other domain.
    (
        GIB / 2 / 25e9,
        15 / 16 * GIB / 240e9 + GIB / 2 / 25e9,
        1.0,
        8.4 + 7 * 2 * 3.4 + 14.0,
    ),
)


@pytest.mark.parametrize(
    ("cell", "by_hand"), list(zip(gpus.CELLS, BY_HAND, strict=True)), ids=range(len(BY_HAND))
)
def test_collectives_by_hand(cell: gpus.Cell, by_hand: tuple[float, ...]) -> None:
    low, sent, share, latency = by_hand
    assert cell.seconds.low == pytest.approx(low, rel=1e-6)
    assert cell.seconds.high == pytest.approx(sent / share + latency * 1e-6, rel=1e-6)


def test_page_shows_the_collectives() -> None:
    table = gpus.markdown(gpus.CELLS_HEAD, (cell.cells() for cell in gpus.CELLS))
    page = PAGE.read_text(encoding="utf-8")
    assert table in page, f"write this table to docs/development/gpus.md:\n{table}"


@pytest.mark.full
@pytest.mark.parametrize("name", gpus.read_facts())
def test_page_shows_published_runs(name: str) -> None:
    run = gpus.plan_run(name, gpus.read_facts()[name])
    row = f"| {' | '.join(run.cells())} |"
    assert row in PAGE.read_text(encoding="utf-8"), f"docs/development/gpus.md lacks {row}"


def test_clusters_of_gpus() -> None:
    cluster = parse_topology("16xh100:8", HARDWARE)
    assert (cluster.devices, cluster.platform, str(cluster)) == (128, "gpu", "16xh100:8")
    assert (cluster.chip.flops, cluster.chip.fp8_flops) == (989.2e12, 1978.3e12)
    assert str(lay_out(cluster, {"dp": 2, "fsdp": 16, "tp": 4})) == (
        "16xh100:8: dp on 2 of gpus, fsdp on 16 domains, tp on 4 of gpus   "
        "(sides of the domain: gpus = 8)"
    )
    # Neither axis alone is a multiple of 16, so both cross.
    both = lay_out(cluster, {"dp": 4, "fsdp": 4, "tp": 8})
    assert both.crossing == {"dp": 4, "fsdp": 4}
    assert parse_topology("h100:1", HARDWARE).devices == 1
    assert parse_topology("8xgb200:72", HARDWARE).devices == 576


def test_network_of_a_cluster() -> None:
    slow = parse_topology("16xh100:8@tcpx", HARDWARE)
    assert (slow.chip.dcn_rate, str(slow)) == (12.5e9, "16xh100:8@tcpx")
    assert parse_topology("16xh100:8", HARDWARE).chip.dcn_rate == 50e9
    assert parse_topology("4xgb300:72", HARDWARE).chip.dcn_rate == 100e9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h100:16", facts(8, 16, fix="2xh100:8")),
        ("h100:0", facts(1, 8, 0, fix="h100:8")),
        ("0xh100:8", facts("domain", fix="2xh100:8")),
        ("h100:2x4", facts(8, "2x4", fix="2xh100:8")),
        ("2xh100:8@ipoib", facts("ipoib", fix="infiniband")),
        ("v5e:2x4@efa", facts("efa", "v5e", fix="none")),
        ("h100", facts("h100", fix="16xh100:8")),
        ("h100-16", facts("h100-16", fix="16 GPUs")),
    ],
)
def test_bad_clusters_are_refused(text: str, says: Facts) -> None:
    with raises(MeshSpecError, says):
        parse_topology(text, HARDWARE)


def test_file_adds_a_gpu(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    cell = 'source = "measured", date = "2026-11-27"'
    mine.write_text(f"[h100]\npool_share = {{ value = 0.9, {cell} }}\n", encoding="utf-8")
    chip = read_hardware(str(mine))["h100"]
    assert chip.hbm_bytes == int(79.11 * 0.9 * GIB)
    assert HARDWARE["h100"].hbm_bytes == int(79.11 * 0.75 * GIB)
    mine.write_text('[h100]\nswitched = "yes"\n', encoding="utf-8")
    with raises(StrategyError, "yes", path="mine.toml h100.switched", fix="true"):
        read_hardware(str(mine))


def test_smallest_cluster_holds_the_bytes() -> None:
    chip = HARDWARE["h100"]
    for gib, cluster in ((50, "h100:1"), (60, "h100:2"), (400, "h100:8"), (800, "2xh100:8")):
        assert str(smallest_slice(chip, gib * GIB)) == cluster


def test_matmuls_take_the_rate_of_their_type() -> None:
    layout = lay_out(parse_topology("h100:8", HARDWARE), {"tp": 8})
    work = Work(flops=10**15, min_flops=10**15, fp8_flops=4 * 10**14, f32_flops=10**14)
    walked = Walked(events=(), choices=(), idle=(), unknown={}, work=work, memory=Peak())
    seconds = 5e14 / 989.2e12 + 4e14 / 1978.3e12 + 1e14 / 494.6e12
    time = estimate_time(walked, layout, state_bytes=0)
    assert time.matmuls.low == pytest.approx(seconds)
    assert time.matmuls.high == pytest.approx(2 * seconds)


def matmul(dtype: Any, topology: str) -> PlanReport:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=sw.abstract_mesh("fsdp:8"))
    x = jax.ShapeDtypeStruct((256, 256), dtype)
    report: PlanReport = pm.plan(
        lambda x: jax.lax.dot_general(
            x, x, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        ),
        x,
        topology=topology,
    )
    return report


@pytest.mark.parametrize(
    ("dtype", "fp8", "f32"),
    [(jnp.float8_e4m3fn, 1, 0), (jnp.float32, 0, 1), (jnp.bfloat16, 0, 0)],
)
def test_walk_counts_the_types_of_matmuls(dtype: Any, fp8: int, f32: int) -> None:
    work = matmul(dtype, "h100:8").walked.work
    assert (work.fp8_flops, work.f32_flops) == (fp8 * work.flops, f32 * work.flops)


def test_memory_of_gpus_is_a_share_with_a_workspace() -> None:
    report = matmul(jnp.bfloat16, "h100:8")
    assert report.memory.kinds["workspace of cuBLAS"] == 32 * 2**20
    assert report.memory.high == report.walked.memory.high + 32 * 2**20
    assert report.memory.low == report.walked.memory.low
    assert "59.3 GiB usable on h100 (75% of its memory): fits" in report.text()
    assert "workspace" not in str(matmul(jnp.bfloat16, "v5e:2x4").memory.kinds)


def decode(topology: str) -> PlanReport:
    """Plan one decode step with heads of 64 elements."""
    from shardwright import attention

    query = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)
    key = (sw.BATCH, sw.QUERY_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM)
    cache = jax.eval_shape(
        lambda: caches.init("dense", batch=16, capacity=1024, kv_heads=8, head_dim=64)
    )
    q = jax.ShapeDtypeStruct((16, 1, 8, 64), jnp.bfloat16)

    def step(q: Any, k: Any, v: Any, cache: Any) -> Any:
        result = attention.append_and_attend(q, k, v, cache)
        return result.o, result.cache

    pm = sw.PartitionManager(sw.Strategy.preset("serve_tp"), mesh=sw.abstract_mesh("dp:2,tp:4"))
    report: PlanReport = pm.for_mode("decode").plan(
        step,
        q,
        q,
        q,
        cache,
        specs=(query, key, key, cache.axes()),
        holds=("inputs", "inputs", "inputs", "cache"),
        donated=(3,),
        topology=topology,
    )
    return report


def test_gpus_have_no_padded_copies() -> None:
    """A TPU pads heads of 64 elements to 128, in a copy of the cache."""
    gpu, tpu = decode("h100:8").walked, decode("v5e:2x4").walked
    assert gpu.complete
    cache = 2 * 8 * 1024 * 2 * 64 * 2
    assert gpu.memory.high - cache < tpu.memory.high - 2 * cache


def test_plan_for_gpus_counts_jax_attention_everywhere() -> None:
    """A machine without GPUs cannot trace cuDNN's kernel."""
    (call,) = decode("h100:8").attention
    assert call.implementation in ("sdpa", "blockwise")


def test_branch_of_the_platform_is_planned() -> None:
    def by_platform(x: Any) -> Any:
        return jax.lax.platform_dependent(x, tpu=lambda x: x, cuda=lambda x: x @ x, rocm=jnp.sin)

    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=sw.abstract_mesh("fsdp:8"))
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    assert pm.plan(by_platform, x, topology="h100:8").walked.flops == 2 * 64**3
    assert pm.plan(by_platform, x, topology="v5e:2x4").walked.flops == 0


def test_axis_that_crosses_is_never_inside() -> None:
    cluster = dataclasses.replace(parse_topology("2xh100:8", HARDWARE), crossing={"tp": 2})
    layout = lay_out(cluster, {"dp": 8, "tp": 2})
    assert layout.rates(("tp",)) == (0.0, 0.0)
    assert (layout.devices_inside(("tp",)), layout.slices_of(("tp",))) == (1, 2)
    assert layout.devices_inside(("dp", "tp")) == 8
