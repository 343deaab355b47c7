"""A plan beside its compiled program: the worker, its answers on disk, and reasons."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright.cli.main import main
from shardwright.cli.plan_advice import too_large_text
from shardwright.plan import Program
from shardwright.plan.collectives.collective import Collective, Kind
from shardwright.plan.fit import Verdict
from shardwright.plan.hardware import parse_topology, read_hardware
from shardwright.plan.planner import trace_program
from shardwright.plan.verify import compiler
from shardwright.plan.verify.compiler import Compiled, Target
from shardwright.plan.verify.differences import compare_traffic
from shardwright.plan.verify.export import export_program
from shardwright.plan.verify.run import Verification, verify_plan
from shardwright.plan.walk.entries import Peak
from shardwright.plan.walk.events import Event
from shardwright.show.verification import memory_rows, verification_text
from tests.cli.test_plan import MODEL
from tests.plan.test_walk import HIDDEN, SPECS, X, gradient, manager, shapes
from tests.raising import raises
from tests.tpu_compile import MARKS

PM = manager("fsdp_tp", "fsdp:2,tp:4")
PROGRAM = Program(gradient, (shapes(SPECS), X), (SPECS, HIDDEN), SPECS)


@pytest.mark.full
def test_cpu_compile_is_compared_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = verify_plan(PM, PROGRAM, cache=tmp_path)
    assert not found.compiled.cached
    memory = found.compiled.memory
    assert memory["argument_size"] == found.report.state.of().per_device
    assert found.compiled.peak is None
    (fsdp,) = [row for row in found.traffic if row.mesh_axes == ("fsdp",)]
    gathered = sum(
        event.total_wire_bytes for event in found.report.events if event.kind is Kind.ALL_GATHER
    )
    assert fsdp.planned[Kind.ALL_GATHER] == fsdp.compiled[Kind.ALL_GATHER] == gathered
    assert [reason.adds for reason in fsdp.reasons] == [fsdp.planned[Kind.REDUCE_SCATTER]]
    assert fsdp.unexplained == 0
    assert "reduce-scatters are all-reduces on CPUs" in verification_text(found)
    # The answer is on disk, so no process is started.
    monkeypatch.setattr(sys, "executable", "absent")
    again = verify_plan(PM, PROGRAM, cache=tmp_path)
    assert again.compiled.cached
    assert again.to_json() == json.loads(json.dumps(found.to_json()))


@pytest.mark.full
def test_lines_are_those_of_this_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's cache of compiled programs has an equal program, which stands in another line."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    equal = [
        lambda params, x: (x @ params["up"]).sum(),
        lambda params, x: (x @ params["up"]).sum(),
    ]
    first, second = (
        verify_plan(PM, Program(each, (shapes(SPECS), X), (SPECS, HIDDEN)), cache=None)
        for each in equal
    )
    lines = [
        {each.source for each in found.compiled.collectives if __file__ in each.source}
        for found in (first, second)
    ]
    assert all(lines)
    assert not lines[0] & lines[1]


def test_unused_arguments_keep_their_shardings() -> None:
    def unused(params: Any, x: Any) -> Any:
        return x * 2

    given = Program(unused, (shapes(SPECS), X), (SPECS, HIDDEN))
    exported = export_program(PM, given, trace_program(PM, given), platform="cpu")
    assert exported.specs == ((("tp",), ("fsdp",)), (("fsdp",), ("tp",)), (("fsdp",),))


def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Replace the worker process by a script; `$3` is its folder."""
    path = tmp_path / "worker"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


BAD = {
    "kill -9 $$": ("was killed by SIGKILL", "out of memory"),
    "echo some >&2; echo last words >&2; exit 3": (
        "ended with status 3: last words",
        "environment",
    ),
    "exec sleep 600": ("did not finish within 1 seconds", "--verify-timeout"),
    """echo '{"error": "no such thing"}' > $3/result.json""": ("no such thing", "--compiler cpu"),
}


@pytest.mark.full(but=["kill -9 $$"])
@pytest.mark.parametrize("script", BAD)
@pytest.mark.ci
def test_dead_worker_is_bad_news(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "planned_model.py"
    model.write_text(MODEL, encoding="utf-8")
    worker(tmp_path, monkeypatch, script)
    command = f"plan {model}:programs --strategy fsdp_tp --mesh fsdp:2,tp:4 --mode decode --verify"
    seconds = "1" if "sleep" in script else "600"
    assert main([*shlex.split(command), "--verify-timeout", seconds]) == 1
    out = capsys.readouterr().out
    assert "mode decode is not verified" in out
    assert "all_gather" in out  # the plan is shown nevertheless
    assert all(text in out for text in BAD[script])


@pytest.mark.parametrize(
    ("message", "gib"),
    [
        ("Used 17.50G of 15.75G hbm. Exceeded by 1.75G.", 17.5),
        ("memory required for HLO temporaries (18.25G) exceeds available HBM (15.75G).", 18.25),
    ],
)
def test_refusal_says_how_much_is_needed(message: str, gib: float) -> None:
    target = Target(platform="tpu", topology="v5e:2x4")
    compiled = Compiled(target=target, refused=f"RESOURCE_EXHAUSTED: {message}")
    assert compiled.peak == int(gib * 2**30)


def test_refused_program_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = "RESOURCE_EXHAUSTED: Used 17.50G of 15.75G hbm. Exceeded by 1.75G."
    worker(tmp_path, monkeypatch, f"echo '{json.dumps({'refused': used})}' > $3/result.json")
    monkeypatch.setattr(compiler, "make_target", lambda *_, **__: None)
    monkeypatch.setattr(
        "shardwright.plan.verify.run.make_target",
        lambda *_, **__: compiler.Target(platform="tpu", topology="v5e:2x4"),
    )
    monkeypatch.setattr(compiler.importlib.metadata, "version", lambda _: "1")
    found = verify_plan(PM, PROGRAM, topology="v5e:2x4")
    assert found.report.verdict is Verdict.FITS
    assert found.verdict is Verdict.DOES_NOT_FIT
    assert found.most_bytes == int(17.5 * 2**30)
    assert "does not fit: RESOURCE_EXHAUSTED: Used 17.50G" in verification_text(found)
    text = too_large_text(PROGRAM, PM, found.report, found)
    assert "the compiled program needs 17.5 GiB of 15.8 GiB per device, though the plan" in text
    assert "smallest slice" not in text
    assert "fix   try " in text


@pytest.mark.parametrize(
    ("low", "peak", "says"),
    [
        (1000000, 1000100, "equal"),
        (1000000, 999900, "equal"),
        (1000000, 1010000, "1.0% above the range"),
        (1000000, 990000, "1.0% below the range"),
        (900000, 950000, "inside the range"),
    ],
)
def test_memory_beside_its_range(low: int, peak: int, says: str) -> None:
    report = PM.plan(PROGRAM.function, *PROGRAM.shapes, specs=PROGRAM.specs, topology="v5e:2x4")
    walked = dataclasses.replace(report.walked, memory=Peak(low=low, high=1000000))
    compiled = Compiled(
        target=Target(platform="tpu", topology="v5e:2x4"),
        memory={"peak_memory": peak, "argument_size": 0},
    )
    found = Verification(
        report=dataclasses.replace(report, walked=walked), compiled=compiled, traffic=()
    )
    assert {row[0]: row[-1] for row in memory_rows(found)}["memory"] == says


def test_missing_compilers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = read_hardware()
    slice_ = parse_topology("v5e:2x4", hardware)
    missing = {"flatbuffers"}
    monkeypatch.setattr(
        compiler.importlib.util, "find_spec", lambda name: None if name in missing else name
    )
    with raises(sw.StrategyError, "flatbuffers", fix="pip install flatbuffers"):
        compiler.make_target(slice_, platform="cpu")
    missing = {"libtpu"}
    with raises(sw.StrategyError, "v5e"):
        compiler.make_target(slice_)
    own = dataclasses.replace(slice_, chip=dataclasses.replace(slice_.chip, name="mine"))
    with raises(sw.StrategyError, "chip", fix="v4"):
        compiler.make_target(own)
    with raises(sw.StrategyError, "topology", fix="v5p"):
        compiler.make_target(None, platform="tpu")
    assert compiler.make_target(own, platform="cpu").platform == "cpu"


EVENT = Event(
    kind=Kind.ALL_GATHER,
    mesh_axes=("fsdp",),
    dtype="float32",
    logical_bytes=4000,
    wire_bytes=3000,
    runs=2,
    source="model.py:7",
)


def collective(**fields: Any) -> Collective:
    usual = {
        "kind": Kind.ALL_GATHER,
        "mesh_axes": ("fsdp",),
        "devices": 4,
        "partial": False,
        "count": 2,
        "maybe": False,
        "gathers": False,
        "between_slices": False,
        "dtype": "f32",
        "wire_dtype": "f32",
        "logical_bytes": 4000,
        "wire_bytes": 3000,
        "name": "x",
        "op_name": "jit(f)/sharding_constraint",
        "source": "/somewhere/model.py:7",
    }
    return Collective(**{**usual, **fields})


REASONS = {
    "equal": ([collective()], []),
    "gathers as all-reduces": (
        [collective(kind=Kind.ALL_REDUCE, gathers=True, wire_bytes=6000)],
        [("sum slices into zeros", 6000)],
    ),
    "other element type": (
        [collective(wire_dtype="bf16", wire_bytes=1500)],
        [("float32 values are sent as bf16", -3000)],
    ),
    "collective matmul": (
        [collective(kind=Kind.PERMUTE, wire_bytes=1000, count=8, op_name="jit(f)/dot_general")],
        [("collective matmul) in place of all_gather", 2000)],
    ),
    "gathered again": (
        [collective(), collective(count=1, op_name="jit(f)/rematted_computation/x")],
        [("gathered again for rematerialization", 3000)],
    ),
    "lookup": (
        [collective(), collective(kind=Kind.ALL_TO_ALL, op_name="jit(f)/scatter-add")],
        [("all_to_all of rows and indices", 6000)],
    ),
    "unknown runs": ([collective(), collective(count=None)], []),
}


@pytest.mark.parametrize("name", REASONS)
def test_patterns_explain_differences(name: str) -> None:
    found, expected = REASONS[name]
    (row,) = compare_traffic([EVENT, EVENT], [*found, *found], cpu=False)
    assert [(reason.adds) for reason in row.reasons] == [2 * adds for _, adds in expected]
    assert all(what in reason.what for reason, (what, _) in zip(row.reasons, expected, strict=True))
    assert row.unexplained == 0
    assert all(reason.sources == ("model.py:7",) for reason in row.reasons)


def test_other_differences_are_not_explained() -> None:
    (row,) = compare_traffic([EVENT], [collective(), collective(source="")], cpu=False)
    assert (row.reasons, row.unexplained) == ((), 6000)


def test_a_primitive_without_a_rule_is_the_reason() -> None:
    """All-reduces that the plan lacks are not said to be several in place of a planned one."""
    sums = [collective(kind=Kind.ALL_REDUCE, source="/somewhere/model.py:9")] * 3
    planned = dataclasses.replace(EVENT, kind=Kind.ALL_REDUCE)
    here = collective(kind=Kind.ALL_REDUCE)
    for unknown, says in (((), []), (("fft",), ["not planned: no rule for fft"])):
        (row,) = compare_traffic([planned], [here, *sums], cpu=True, unknown=unknown)
        assert [reason.what for reason in row.reasons] == says
        assert row.unexplained == (0 if unknown else row.difference)
    # A compiler may also combine the all-reduces.
    for compiled in ([here, here], [collective(kind=Kind.ALL_REDUCE, wire_bytes=6000)]):
        (row,) = compare_traffic([planned], compiled, cpu=True)
        assert ["merges" in reason.what for reason in row.reasons] == [True]


def test_reduce_scatters_may_be_all_reduces() -> None:
    """All of them on CPUs, and those of small arrays on TPUs."""
    planned = dataclasses.replace(EVENT, kind=Kind.REDUCE_SCATTER)
    whole = collective(kind=Kind.ALL_REDUCE, wire_bytes=6000)
    for cpu, scattered in ((True, []), (False, [collective(kind=Kind.REDUCE_SCATTER)])):
        events = [planned] * (1 + len(scattered))
        (row,) = compare_traffic(events, [whole, *scattered], cpu=cpu)
        assert [(reason.adds, row.unexplained) for reason in row.reasons] == [(6000, 0)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--effort full", "--effort is used with --verify"),
        ("--verify --compiler tpu", "needs a topology"),
    ],
)
def test_bad_options_are_refused(
    options: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(f"plan absent.py:f --strategy fsdp --mesh fsdp:8 {options}")
    assert main(words) == 2
    assert says in capsys.readouterr().err


class TestOnTpu:
    """Compiled for TPUs that are not there."""

    pytestmark = MARKS

    def test_forward_is_exact_and_memory_in_range(self) -> None:
        from tests.plan.tpu_programs import forward_program

        found = verify_plan(PM, forward_program(), topology="v5e:2x4")
        assert found.verdict is Verdict.FITS
        assert all(row.difference == 0 for row in found.traffic), found.traffic
        assert found.compiled.peak is not None
        assert found.compiled.peak <= found.report.memory.high

    def test_too_large_program_is_refused(self) -> None:
        from tests.plan.tpu_programs import large_program

        found = verify_plan(PM, large_program(), topology="v5e:2x4")
        assert found.compiled.refused
        assert found.verdict is Verdict.DOES_NOT_FIT
        assert found.most_bytes > 15.75 * 2**30
