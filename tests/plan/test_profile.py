"""Profiles beside plans: of programs that ran on CPUs, and of events with known answers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwright as sw
from shardwright import _jax
from shardwright.cli.main import main
from shardwright.errors import MeshMismatchError, ProgramError
from shardwright.plan.collectives.collective import Collective, Kind
from shardwright.plan.collectives.read import read_collectives
from shardwright.plan.hardware import read_hardware
from shardwright.plan.planner import PlanReport
from shardwright.plan.profile import recording
from shardwright.plan.profile.fit import fitted_chip
from shardwright.plan.profile.intervals import merged, outside, total
from shardwright.plan.profile.measure import planned_for
from shardwright.plan.profile.operations import read_ops
from shardwright.plan.profile.result import Profile
from shardwright.plan.walk.events import Event, Work
from shardwright.show.profile import profile_html
from tests.plan.test_walk import EMBED, HIDDEN, INNER, manager
from tests.raising import raises

LAYERS, RUNS = 3, 2
STACKED = {
    "up": sw.ArraySpec(
        (LAYERS, EMBED, INNER), jnp.float32, (sw.LAYERS, sw.EMBED, sw.MLP_INTERMEDIATE)
    ),
    "down": sw.ArraySpec(
        (LAYERS, INNER, EMBED), jnp.float32, (sw.LAYERS, sw.MLP_INTERMEDIATE, sw.EMBED)
    ),
}
X = jax.ShapeDtypeStruct((8, 16, EMBED), jnp.float32)
# The command plans this file, so it has what the program below has.
MODEL = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.plan.test_profile import HIDDEN, STACKED, X, gradient, shapes
from shardwright.plan import Program


def programs():
    return Program(gradient, (shapes(), X), (STACKED, HIDDEN), STACKED)
"""


def shapes() -> dict[str, Any]:
    return {key: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for key, spec in STACKED.items()}


def gradient(params: Any, x: Any) -> Any:
    def layer(h: Any, w: Any) -> tuple[Any, None]:
        w = sw.gather(w, {key: spec.axes[1:] for key, spec in STACKED.items()})
        inner = sw.shard(jnp.tanh(h @ w["up"]), sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)
        return sw.shard(inner @ w["down"], HIDDEN), None

    def loss(params: Any) -> Any:
        return (jax.lax.scan(layer, sw.shard(x, HIDDEN), params)[0] ** 2).mean()

    return jax.grad(loss)(params)


@dataclasses.dataclass(frozen=True)
class Ran:
    """A program that ran under the profiler, and its plan."""

    pm: sw.PartitionManager
    folder: Path
    collectives: tuple[Collective, ...]
    report: PlanReport


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:2,tp:4"))
    folder = tmp_path_factory.mktemp("profile")
    with pm:
        params = pm.shard(jax.tree.map(lambda s: jnp.ones(s.shape), shapes()), STACKED)
        x = pm.shard(jnp.ones(X.shape), HIDDEN)
        outputs = pm.shardings(shapes(), STACKED)
        compiled = jax.jit(gradient, out_shardings=outputs).lower(params, x).compile()
        jax.block_until_ready(compiled(params, x))
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(RUNS):
                jax.block_until_ready(compiled(params, x))
    report = pm.plan(gradient, shapes(), X, specs=(STACKED, HIDDEN), outputs=STACKED)
    return Ran(pm, folder, read_collectives(compiled, pm.mesh), report)


def test_every_event_joins_the_program(ran: Ran) -> None:
    found = recording.read_recording(ran.folder)
    (name,) = found.timelines
    assert found.platforms == {"jit_gradient": "cpu"}
    module = found.programs[name]
    devices = recording.count_partitions(module)
    assert devices == 8
    ops = read_ops(_jax.hlo_text(module), ran.pm.mesh, partitions=devices)
    known = ops.sends.keys() | ops.ends.keys() | ops.sources.keys() | ops.waits
    timeline = found.timelines[name]
    assert len(timeline) == 8
    counted = Counter(each.op for timed in timeline.values() for each in timed)
    assert counted.keys() <= known
    expected = {each.name: 8 * RUNS * (each.count or 0) for each in ran.collectives}
    assert {op: counted[op] for op in ops.sends} == expected


def test_profile_of_cpus_beside_its_plan(ran: Ran) -> None:
    found = ran.pm.profile(ran.folder, ran.report)
    assert (found.program, found.devices, found.runs) == ("jit_gradient", 8, RUNS)
    compiled = {each.name: each for each in ran.collectives}
    for each in found.collectives:
        real = compiled[each.op]
        assert each.count == real.count
        assert each.collective.wire_bytes == real.wire_bytes
        assert 0 < each.fastest <= each.seconds * (1 + 1e-9)
    assert {each.collective.name for each in found.collectives} == compiled.keys()
    assert not found.unplanned
    assert not found.missing
    axes = {(axis.mesh_axes, axis.axes): axis for axis in found.axes}
    assert {key for key in axes if key[0] == ("tp",)} == {
        (("tp",), (("MLP_INTERMEDIATE",),)),
    }
    planned = sum(axis.planned for axis in found.axes)
    assert planned == ran.report.sent_bytes
    assert found.seconds == pytest.approx(found.compute + found.exposed + found.idle)
    assert "reduce-scatters are all-reduces on CPUs" in found.text()
    # The lines of the model are lines of this file.
    assert any(line.source.startswith("test_profile.py:") for line in found.lines)
    json.dumps(found.to_json())


def test_command_plans_and_reads(
    ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, page = tmp_path / "profiled_model.py", tmp_path / "page.html"
    model.write_text(MODEL, encoding="utf-8")
    command = [
        *("profile", str(ran.folder), "--plan", f"{model}:programs", "--strategy", "fsdp_tp"),
        *("--mesh", "fsdp:2,tp:4"),
    ]
    assert main([*command, "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert f"jit_gradient: {RUNS} runs on 8 devices, CPU" in out
    assert "not planned" not in out
    assert "MLP_INTERMEDIATE" in page.read_text(encoding="utf-8")
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == RUNS
    assert main([*command, "--program", "jit_gradiant"]) == 2
    assert "did you mean 'jit_gradient'" in capsys.readouterr().err
    assert main([*command, "--fit", str(tmp_path / "fit.toml")]) == 2
    assert "topology" in capsys.readouterr().err


# Events with known answers. In each run a gather is in flight from 0 to 100 us, of which the device
# computes 50; a matmul takes 100, and a sum 100 on the first device and 50 on the second, which
# arrives later. Runs are 100 us apart.


def meta(name: str, line: int) -> str:
    return f'metadata={{op_name="jit(step)/{name}" source_file="/x/model.py" source_line={line}}}'


GROUPS = "replica_groups=[1,4]<=[4], use_global_device_ids=true"
MODULE = f"""HloModule jit_step, is_scheduled=true

%fused (q: f32[1024,256]) -> f32[1024,256] {{
  %q = f32[1024,256]{{1,0}} parameter(0)
  ROOT %tanh.1 = f32[1024,256]{{1,0}} tanh(%q)
}}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (p: f32[1024,256]) -> f32[1024,4096] {{
  %p = f32[1024,256]{{1,0}} parameter(0)
  %all-gather-start.1 = (f32[1024,256]{{1,0}}, f32[4096,256]{{1,0}}) all-gather-start(%p), \
channel_id=1, {GROUPS}, dimensions={{0}}, {meta("sharding_constraint", 7)}
  %fusion.1 = f32[1024,256]{{1,0}} fusion(%p), kind=kLoop, calls=%fused, {meta("tanh", 8)}
  %all-gather-done.1 = f32[4096,256]{{1,0}} all-gather-done(%all-gather-start.1)
  %dot.1 = f32[1024,4096]{{1,0}} dot(%fusion.1, %all-gather-done.1), \
lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}, {meta("dot_general", 9)}
  ROOT %all-reduce.1 = f32[1024,4096]{{1,0}} all-reduce(%dot.1), channel_id=2, {GROUPS}, \
to_apply=%add, {meta("add", 10)}
}}
"""
MIB = 2**20
GATHER = Event(
    kind=Kind.ALL_GATHER,
    mesh_axes=("fsdp",),
    axes=(sw.EMBED,),
    dtype="float32",
    logical_bytes=4 * MIB,
    wire_bytes=3 * MIB,
    runs=1,
    source="model.py:7",
)
FLOPS = 10**9
# Operation, start and duration in us.
OPS = [
    ("all-gather-start.1", 0, 10),
    ("fusion.1", 10, 50),
    ("all-gather-done.1", 60, 40),
    ("dot.1", 100, 100),
    ("all-reduce.1", 200, 100),
]
LATE = [*OPS[:-2], ("dot.1", 150, 100), ("all-reduce.1", 250, 50)]
STEP = 400


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def quoted(data: bytes) -> str:
    return '"' + "".join(f"\\{byte:03o}" for byte in data) + '"'


def event(name: int, start: int, took: int, *stats: int) -> str:
    refs = " ".join(
        f"stats {{ metadata_id: {key} ref_value: {10 * key + value} }}"
        for key, value in zip((2, 3), stats, strict=False)
    )
    offset, duration = start * 10**6, took * 10**6
    return f"events {{ metadata_id: {name} offset_ps: {offset} duration_ps: {duration} {refs} }}"


def names(kind: str, entries: dict[int, str]) -> str:
    return " ".join(
        f'{kind} {{ key: {key} value {{ id: {key} name: "{name}" }} }}'
        for key, name in entries.items()
    )


def space(planes: list[str], module: str = MODULE) -> bytes:
    """A profile with the program, and planes in protobuf text."""
    # Of the program, the text in place of its name, and four devices; see `report`.
    proto = field(1, field(1, module.encode()) + field(15, 4 * field(3, b"\x0a\x01\x00")))
    metadata = (
        'planes { id: 9 name: "/host:metadata" event_metadata { key: 12 value { id: 12 '
        f'name: "jit_step(12)" stats {{ metadata_id: 1 bytes_value: {quoted(proto)} }} }} }} '
        f"{names('stat_metadata', {1: 'hlo_proto'})} }}"
    )
    text = " ".join([metadata, *planes])
    data: bytes = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
    return data


def tpu(ordinal: int, ops: list[tuple[str, int, int]]) -> str:
    """A plane of a TPU: one line of programs, one of instructions, of two runs."""
    known = {at: f"%{op} = f32[8]{{0}} some(...)" for at, (op, _, _) in enumerate(ops, 1)}
    first = min(start for _, start, _ in ops)
    last = max(start + took for _, start, took in ops)
    runs = " ".join(event(9, run * STEP + first, last - first) for run in range(RUNS))
    timed = " ".join(
        event(at, run * STEP + start, took)
        for run in range(RUNS)
        for at, (_, start, took) in enumerate(ops, 1)
    )
    return (
        f'planes {{ id: {ordinal} name: "/device:TPU:{ordinal}" '
        f'lines {{ id: 1 name: "XLA Modules" {runs} }} lines {{ id: 2 name: "XLA Ops" {timed} }} '
        f"{names('event_metadata', {**known, 9: 'jit_step(12)'})} }}"
    )


def gpu(ordinal: int) -> str:
    """A plane of a GPU: the gather is one kernel on a stream of its own."""
    ops = {1: "all-gather-start.1", 2: "fusion.1", 3: "dot.1", 4: "all-reduce.1"}
    stats = names(
        "stat_metadata",
        {2: "hlo_op", 3: "hlo_module", 33: "jit_step", **{20 + at: op for at, op in ops.items()}},
    )
    streams: dict[int, list[str]] = {1: [], 2: []}
    for run in range(RUNS):
        for stream, op, start, took in (
            *((2, 1, 0, 100), (1, 2, 10, 50)),
            *((1, 3, 100, 100), (2, 4, 200, 100)),
        ):
            streams[stream].append(event(1, run * STEP + start, took, op, 3))
    lines = " ".join(
        f'lines {{ id: {at} name: "Stream #{at}(Compute)" {" ".join(events)} }}'
        for at, events in streams.items()
    )
    derived = f'lines {{ id: 7 name: "XLA Ops" {" ".join(streams[1])} }}'
    return (
        f'planes {{ id: {ordinal} name: "/device:GPU:{ordinal}" {lines} {derived} '
        f"{names('event_metadata', {1: 'kernel'})} {stats} }}"
    )


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> PlanReport:
    """A plan that has the gather, and not the sum."""

    def text(module: bytes) -> str:
        return bytes(next(recording._values(memoryview(module), 1))).decode()

    monkeypatch.setattr(_jax, "hlo_text", text)
    planned = manager("fsdp", "fsdp:4").plan(jnp.tanh, X, topology="v5e:2x2")
    walked = dataclasses.replace(planned.walked, events=(GATHER,), work=Work(flops=FLOPS))
    return dataclasses.replace(planned, walked=walked)


def measured(
    tmp_path: Path, report: PlanReport, planes: list[str], module: str = MODULE
) -> Profile:
    (tmp_path / "host.xplane.pb").write_bytes(space(planes, module))
    return manager("fsdp", "fsdp:4").profile(tmp_path, report)


def us(seconds: float) -> float:
    return seconds * 1e6


def test_tpu_times_are_known(tmp_path: Path, report: PlanReport) -> None:
    found = measured(tmp_path, report, [tpu(0, OPS), tpu(1, LATE)])
    assert (found.platform, found.devices, found.runs) == ("tpu", 2, RUNS)
    # 2 runs and the gap of 100 between them; the second device waits from 100 to 150.
    assert us(found.seconds) == pytest.approx(350)
    assert us(found.compute) == pytest.approx(150)
    assert us(found.exposed) == pytest.approx((150 + 100) / 2)
    assert us(found.idle) == pytest.approx((50 + 100) / 2)
    assert us(found.matmuls) == pytest.approx(100)
    assert found.flops_rate == pytest.approx(FLOPS / 100e-6)
    gather, sums = found.collectives
    assert (gather.op, gather.planned) == ("all-gather-start.1", (GATHER,))
    assert [us(t) for t in (gather.seconds, gather.exposed, gather.fastest)] == pytest.approx(
        [100, 50, 100]
    )
    assert (sums.op, sums.count) == ("all-reduce.1", 1)
    assert [us(t) for t in (sums.seconds, sums.exposed, sums.fastest)] == pytest.approx(
        [75, 75, 50]
    )
    assert found.unplanned == (sums,)
    assert not found.missing
    embed, other = sorted(found.axes, key=lambda axis: -len(axis.axes))
    assert (embed.axes, embed.planned, embed.sent) == (((sw.EMBED,),), 3 * MIB, 3 * MIB)
    assert embed.rate == pytest.approx(3 * MIB / 100e-6)
    assert (other.axes, other.planned, other.sent) == ((), 0, 24 * MIB)
    assert {line.source: round(us(line.seconds)) for line in found.lines} == {
        "model.py:9": 100,
        "model.py:8": 50,
    }


def test_gpu_kernels_have_their_own_streams(tmp_path: Path, report: PlanReport) -> None:
    found = measured(tmp_path, report, [gpu(0)])
    assert (found.platform, found.devices, found.runs) == ("gpu", 1, RUNS)
    named = {each.op: each for each in found.collectives}
    gather = named["all-gather-start.1"]
    assert [us(t) for t in (gather.seconds, gather.exposed)] == pytest.approx([100, 50])
    # Each kernel once, although another line repeats it.
    assert us(found.matmuls) == pytest.approx(100)
    assert us(found.compute) == pytest.approx(150)
    assert us(found.exposed) == pytest.approx(150)


# One CUDA graph. Its nodes 1, 2 and 5 are graphs of libraries, whose kernels have the numbers after
# those of all nodes. The second sum runs the kernel of the first one.
GRAPH = f"""HloModule jit_step, is_scheduled=true

%fused (q: f32[8,8]) -> f32[8,8] {{
  %q = f32[8,8]{{1,0}} parameter(0)
  ROOT %sum = f32[8,8]{{1,0}} add(%q, %q)
}}

ENTRY %main (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8]{{1,0}} parameter(0)
  %loop_add_fusion.1 = f32[8,8]{{1,0}} fusion(%p), kind=kLoop, calls=%fused, {meta("add", 1)}
  %gemm.1 = f32[8,8]{{1,0}} custom-call(%loop_add_fusion.1), \
custom_call_target="__cublas$lt$matmul", {meta("dot", 2)}
  %attention.1 = f32[8,8]{{1,0}} custom-call(%gemm.1), \
custom_call_target="__cudnn$fmhaSoftmax", {meta("attend", 3)}
  %copy.1 = f32[8,8]{{1,0}} copy(%attention.1)
  %loop_add_fusion.2 = f32[8,8]{{1,0}} fusion(%copy.1), kind=kLoop, calls=%fused, {meta("add", 5)}
  ROOT %gemm.2 = f32[8,8]{{1,0}} custom-call(%loop_add_fusion.2), \
custom_call_target="__cublas$lt$matmul", {meta("dot", 6)}
}}
"""
# Node and microseconds of each kernel, in their order.
KERNELS = [
    ("loop_add_fusion_1", 0, 10),
    ("Memset 0", 6, 1),
    ("nvjet_sm90", 7, 100),
    ("Memset 0", 9, 1),
    ("cudnn_flash", 10, 50),
    ("convert_dq", 11, 20),
    ("memcpy128", 3, 5),
    ("loop_add_fusion_1", 4, 30),
    ("nvjet_sm90", 12, 200),
]


def graph_plane() -> str:
    known = dict(enumerate(dict.fromkeys(name for name, _, _ in KERNELS), 1))
    events = []
    for launch in range(RUNS):
        start = 1000 * launch
        for name, node, took in KERNELS:
            stats = {4: 77 << 32 | node, 5: launch + 1}
            numbers = " ".join(
                f"stats {{ metadata_id: {key} uint64_value: {value} }}"
                for key, value in stats.items()
            )
            at = next(key for key, kernel in known.items() if kernel == name)
            events.append(event(at, start, took, 1, 3).removesuffix("}") + numbers + " }")
            start += took
    stats = names(
        "stat_metadata",
        {
            2: "hlo_op",
            3: "hlo_module",
            4: "cuda_graph_node_id",
            5: "correlation_id",
            21: "command_buffer_1",
            33: "jit_step",
        },
    )
    return (
        f'planes {{ id: 1 name: "/device:GPU:0" lines {{ id: 1 name: "Stream #1(Compute)" '
        f"{' '.join(events)} }} {names('event_metadata', known)} {stats} }}"
    )


def test_kernels_of_cuda_graphs_join_the_program(tmp_path: Path, report: PlanReport) -> None:
    found = measured(tmp_path, report, [graph_plane()], module=GRAPH)
    assert (found.platform, found.devices, found.runs) == ("gpu", 1, RUNS)
    assert {line.source: round(us(line.seconds)) for line in found.lines} == {
        "model.py:1": 10,
        "model.py:2": 101,
        "model.py:3": 71,
        "": 5,
        "model.py:5": 30,
        "model.py:6": 200,
    }
    assert us(found.matmuls) == pytest.approx(101 + 71 + 200)
    assert us(found.compute) == pytest.approx(417)


def test_graphs_of_another_program_say_what_to_do(tmp_path: Path, report: PlanReport) -> None:
    with raises(ProgramError, "no operation", fix="xla_gpu_enable_command_buffer"):
        measured(tmp_path, report, [graph_plane()])


def test_end_of_an_operation_is_no_operation(tmp_path: Path, report: PlanReport) -> None:
    stats = names("stat_metadata", {2: "hlo_op", 3: "hlo_module", 33: "jit_step", 21: "dot.1"})
    lines = " ".join([event(1, 0, 100, 1, 3), event(2, 100, 7, 1, 3)])
    plane = (
        f'planes {{ id: 1 name: "/host:CPU" lines {{ id: 1 name: "thread" {lines} }} '
        f"{names('event_metadata', {1: 'dot.1', 2: 'end: dot.1'})} {stats} }}"
    )
    found = measured(tmp_path, report, [plane])
    assert (found.platform, found.runs) == ("cpu", 1)
    assert us(found.compute) == us(found.matmuls) == pytest.approx(100)


def test_another_platform_has_no_rates_of_the_chip(tmp_path: Path, report: PlanReport) -> None:
    found = measured(tmp_path, report, [gpu(0)])
    text = found.text()
    assert f"jit_step: {RUNS} runs on 1 device, GPU, planned for v5e:2x2" in text
    assert " of 197 TFLOP/s" not in text
    assert {axis.peak for axis in found.axes} == {None}
    with raises(sw.StrategyError, "GPUs", "v5e:2x2", fix="topology that ran"):
        fitted_chip(found)


def test_measured_rates_replace_those_of_the_chip(tmp_path: Path, report: PlanReport) -> None:
    found = measured(tmp_path, report, [tpu(0, OPS), tpu(1, LATE)])
    text = fitted_chip(found)
    cells = tomllib.loads(text)["v5e"]
    assert cells["bf16_tflops"]["value"] == pytest.approx(FLOPS / 100e-6 / 1e12, rel=1e-3)
    # Four chips on a square of 2x2: two links each. 27 MiB in 100 + 50 us.
    rate = 27 * MIB / 150e-6 / 2 / 1e9
    assert cells["link_gbps"]["low"] == pytest.approx(rate, rel=1e-3)
    file = tmp_path / "fit.toml"
    file.write_text(text, encoding="utf-8")
    chip = read_hardware(str(file))["v5e"]
    assert chip.link_rates == pytest.approx((rate * 1e9, rate * 1e9), rel=1e-3)
    assert chip.hbm_rate == read_hardware()["v5e"].hbm_rate
    named = fitted_chip(dataclasses.replace(found, program='a" }\n[v5p]\n\x7f\\'))
    assert list(tomllib.loads(named)) == ["v5e"]
    nothing = dataclasses.replace(found, collectives=(), matmuls=0.0)
    with raises(sw.StrategyError, "1 MiB", fix="larger"):
        fitted_chip(nothing)


def test_page_shows_the_table_of_known_events(tmp_path: Path, report: PlanReport) -> None:
    text = measured(tmp_path, report, [tpu(0, OPS), tpu(1, LATE)]).text()
    page = Path(__file__).parents[2] / "docs/profile.md"
    assert f"```text\n{text}\n```" in page.read_text(encoding="utf-8"), text


def test_profile_begins_inside_a_run(tmp_path: Path, report: PlanReport) -> None:
    """The end of a gather without its start belongs to no start."""
    cut = measured(tmp_path, report, [tpu(0, [("all-gather-done.1", -20, 5), *OPS])])
    named = {each.op: each for each in cut.collectives}
    assert us(named["all-gather-start.1"].seconds) == pytest.approx(100)


def test_html_escapes_and_has_all_tables(tmp_path: Path, report: PlanReport) -> None:
    page = profile_html(measured(tmp_path, report, [tpu(0, OPS)]), title="a < b")
    assert "a &lt; b" in page
    assert all(text in page for text in ("EMBED", "model.py:9", "not planned: 1 all_reduce"))


def test_bad_profiles_say_what_to_do(tmp_path: Path, report: PlanReport) -> None:
    pm = manager("fsdp", "fsdp:4")
    with raises(ProgramError, "no profile", fix="jax.profiler.trace"):
        pm.profile(tmp_path, report)
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(space([]))
    with raises(ProgramError, "no operations", fix="jax.profiler.trace"):
        pm.profile(file, report)
    file.write_bytes(b"\x07some text")
    with raises(ProgramError, "host.xplane.pb", fix="jax.profiler.trace"):
        pm.profile(file, report)
    file.write_bytes(space([tpu(0, OPS)]))
    with raises(ProgramError, "jit_stop", fix="jit_step"):
        pm.profile(file, report, program="jit_stop")
    with raises(MeshMismatchError, "4 devices"):
        manager("fsdp", "fsdp:8").profile(file, report)


def one(**fields: Any) -> Collective:
    usual: dict[str, Any] = {
        "kind": Kind.ALL_GATHER,
        "mesh_axes": ("fsdp",),
        "devices": 4,
        "partial": False,
        "count": 1,
        "maybe": False,
        "gathers": False,
        "between_slices": False,
        "dtype": "f32",
        "wire_dtype": "f32",
        "logical_bytes": 4 * MIB,
        "wire_bytes": 3 * MIB,
        "name": "x",
        "op_name": "jit(f)/mul",
        "source": "/x/model.py:7",
    }
    return Collective(**{**usual, **fields})


OTHER = dataclasses.replace(GATHER, axes=(sw.VOCAB,), source="model.py:20", path="head/kernel")
SCATTER = dataclasses.replace(GATHER, kind=Kind.REDUCE_SCATTER, axes=(sw.BATCH,))
EVENTS = (GATHER, OTHER, SCATTER)
MATCHES: dict[str, tuple[Collective, tuple[int, ...], tuple[Event, ...]]] = {
    "line": (one(), (MIB,), (GATHER,)),
    "bytes of another line": (one(source="/x/model.py:99"), (4 * MIB,), (GATHER, OTHER)),
    "path of an argument": (
        one(source="", op_name="params['head']['kernel']"),
        (MIB,),
        (OTHER,),
    ),
    "combined": (one(source="/x/model.py:99", logical_bytes=9), (4 * MIB, 5), (GATHER, OTHER)),
    "neither line nor bytes": (one(source="/x/model.py:99"), (MIB,), ()),
    "neither line nor name": (one(source="", op_name=""), (MIB,), (GATHER, OTHER)),
    "other mesh axes": (one(mesh_axes=("tp",)), (4 * MIB,), ()),
    "all-reduce for a reduce-scatter": (one(kind=Kind.ALL_REDUCE), (4 * MIB,), (SCATTER,)),
    "all-reduce that gathers": (one(kind=Kind.ALL_REDUCE, gathers=True), (4 * MIB,), (GATHER,)),
    "permute of a collective matmul": (one(kind=Kind.PERMUTE), (MIB,), (GATHER,)),
    "kind that nothing stands for": (one(kind=Kind.ALL_TO_ALL), (4 * MIB,), ()),
}


@pytest.mark.parametrize("name", MATCHES)
def test_collectives_match_events(name: str) -> None:
    collective, parts, expected = MATCHES[name]
    assert planned_for(collective, parts, EVENTS) == expected


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda s: (s[0], sum(s))))


@given(spans, spans)
def test_intervals_agree_with_sets(left: Any, right: Any) -> None:
    def moments(intervals: Any) -> set[int]:
        return {at for start, end in intervals for at in range(int(start), int(end))}

    union, free = merged(left), outside(left, merged(right))
    assert moments(union) == moments(left)
    assert moments(free) == moments(left) - moments(right)
    assert total(free) == len(moments(free))
    assert all(before[1] < after[0] for before, after in itertools.pairwise(union))


def test_only_programs_that_ran_share_a_name(tmp_path: Path) -> None:
    """A profile has all programs that the process has run, also before the trace."""

    def made(by: float) -> Any:
        def scaled(x: Any) -> Any:
            return x * by

        return jax.jit(scaled)

    x, (first, second) = jnp.ones((64, 64)), (made(2.0), made(3.0))
    jax.block_until_ready((first(x), second(x)))
    with jax.profiler.trace(str(tmp_path)):
        second(x).block_until_ready()
    assert list(recording.read_recording(tmp_path).timelines) == ["jit_scaled"]
