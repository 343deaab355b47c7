"""Search: equal to brute force through `plan`, with planted best candidates."""

from __future__ import annotations

import dataclasses
import json
import shlex
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.cli.main import main
from shardwright.cli.show import ProgressLine
from shardwright.plan.fit import Verdict
from shardwright.plan.hardware import parse_topology, read_hardware
from shardwright.plan.planner import Program, trace_program
from shardwright.plan.search import SearchReport, run
from shardwright.plan.search.result import utilization
from shardwright.plan.search.run import SearchProgress
from shardwright.show.search import search_text
from tests.raising import Facts, facts, raises

HIDDEN = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
HEADS = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)
SPECS = {
    "query": sw.ArraySpec((64, 4, 16), jnp.bfloat16, (sw.EMBED, sw.HEAD, sw.HEAD_DIM)),
    "up": sw.ArraySpec((64, 256), jnp.bfloat16, (sw.EMBED, sw.MLP_INTERMEDIATE)),
}


def forward(params: Any, x: Any) -> Any:
    w = sw.gather(params, SPECS)
    x = sw.shard(x, HIDDEN)
    heads = sw.shard(jnp.einsum("bse,ehd->bshd", x, w["query"]), HEADS)
    up = sw.shard(x @ w["up"], sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)
    return heads.sum() + up.sum()


def program(batch: int) -> Program:
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), SPECS)
    x = jax.ShapeDtypeStruct((batch, 16, 64), jnp.bfloat16)
    return Program(forward, (params, x), (SPECS, HIDDEN))


def search(batch: int = 32, **options: Any) -> SearchReport:
    names = options.pop("presets", ("fsdp", "fsdp_tp"))
    strategies = {name: sw.Strategy.preset(name) for name in names}
    return sw.search(program(batch), strategies, topology="v5e:2x4", **options)


def test_search_equals_brute_force() -> None:
    found = search()
    expected, failed, unused = {}, 0, 0
    for name in ("fsdp", "fsdp_tp"):
        strategy = sw.Strategy.preset(name)
        for mesh in _meshes(8, list(strategy.mesh)):
            if mesh.get("ep", 1) > 1:  # the program has no experts
                unused += 1
                continue
            pm = sw.PartitionManager(strategy, mesh=sw.abstract_mesh(mesh))
            try:
                given = program(32)
                report = pm.plan(
                    given.function, *given.shapes, specs=given.specs, topology="v5e:2x4"
                )
            except sw.ShardingError:
                failed += 1
                continue
            expected[name, tuple(mesh.items())] = (report.time.high, report.memory.high)
    actual = {
        (one.name, tuple(one.sizes.items())): (one.seconds, one.report.memory.high)
        for one in found.candidates
    }
    assert actual == expected
    assert found.dropped["a mesh axis that no tensor is sharded over"] == unused > 0
    assert sum(found.dropped.values()) - unused == failed > 0
    assert found.judged == len(expected) + failed + unused
    assert [one.seconds for one in found.candidates] == sorted(each for each, _ in actual.values())
    for one in found.front:
        time, memory = one.seconds, one.report.memory.high
        assert not any(t <= time and m < memory for t, m in actual.values())


def _meshes(devices: int, axes: list[str]) -> list[dict[str, int]]:
    """Every mesh, by filtering all assignments of divisors."""
    meshes: list[dict[str, int]] = [{}]
    for axis in axes:
        meshes = [{**mesh, axis: size} for mesh in meshes for size in (1, 2, 4, 8)]
    return [mesh for mesh in meshes if _product(mesh) == devices]


def _product(mesh: dict[str, int]) -> int:
    size = 1
    for each in mesh.values():
        size *= each
    return size


def test_indivisible_candidates_are_counted() -> None:
    """A batch of 2 and 4 heads leave one mesh of fsdp and tp."""
    found = search(batch=2, presets=("fsdp_tp",), axes=("fsdp", "tp"))
    assert [one.mesh for one in found.candidates] == ["fsdp:2,tp:4"]
    assert found.dropped == {"IndivisibleError BATCH": 2, "IndivisibleError HEAD": 1}


def test_axes_vary_where_a_strategy_has_them() -> None:
    found = search(axes=("fsdp", "tp"))
    assert {one.mesh for one in found.candidates if one.name == "fsdp"} == {"fsdp:8"}


def test_a_missing_rule_makes_the_order_unsure() -> None:
    def factors(x: Any) -> Any:
        return jnp.linalg.cholesky(x.astype(jnp.float32) @ x.T.astype(jnp.float32))

    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    unknown = Program(factors, (x,), ((sw.BATCH, sw.EMBED),))
    strategies = {"fsdp": sw.Strategy.preset("fsdp")}
    found = sw.search(unknown, strategies, topology="v5e:2x4", axes=("fsdp",))
    assert "incomplete: no rule for cholesky (1)" in search_text(found)
    assert "the order may be wrong" in search_text(found)
    assert "incomplete" not in search_text(search(axes=("fsdp",)))


def test_candidates_are_files_that_load(tmp_path: Path) -> None:
    for candidate in search(axes=("fsdp",)).candidates:
        path = candidate.strategy.dump(tmp_path / "found.toml")
        loaded = sw.Strategy.load(path)
        assert loaded == candidate.strategy
        assert dict(loaded.mesh) == dict(candidate.sizes)
        path.unlink()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"axes": ("fsdp", "model")}, facts("strategy", "model", fix="dp")),
        ({"mode": "sleep"}, facts("sleep")),
    ],
)
def test_bad_questions_are_refused(options: dict[str, Any], says: Facts) -> None:
    with raises(sw.ShardingError, says):
        search(**options)


MODEL = """
from tests.plan.test_search import program


def one():
    return program(32)


def two():
    return {"train": program(32), "decode": program(32)}


def none():
    return program(3)


def half():
    return {"train": program(32), "decode": program(3)}
"""


def test_command_prints_and_writes_the_front(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "searched_model.py"
    model.write_text(MODEL, encoding="utf-8")

    def run(words: str) -> tuple[int, str, str]:
        code = main(shlex.split(f"search {model}:{words} --topology v5e:2x4 --axes fsdp,tp"))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    code, out, _ = run(f"one --strategy fsdp_tp --out {tmp_path}")
    assert code == 0
    assert "judged all 4 candidates on v5e:2x4: 3 may fit" in out
    assert "dropped 1: IndivisibleError HEAD" in out
    files = sorted(tmp_path.glob("*.toml"))
    assert files
    assert all(main(["check", str(file)]) == 0 for file in files)
    capsys.readouterr()
    first, second = (run("one --strategy fsdp_tp --json")[1] for _ in range(2))
    assert first == second
    assert json.loads(first)["judged"] == 4
    code, _, message = run("none --strategy fsdp_tp")
    assert code == 1
    assert "does not divide" in message
    code, out, _ = run("two --strategy fsdp_tp")
    assert code == 0
    assert "\nmode train\n" in f"\n{out}"
    assert "\nmode decode\n" in out
    assert run("two --strategy fsdp_tp --mode decode")[0] == 0
    absent = tmp_path / "not" / "there"
    assert run(f"one --strategy fsdp_tp --out {absent}")[0] == 0
    assert len(list(absent.glob("*.toml"))) == len(files)


def test_search_survives_the_failure_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "searched_model.py"
    model.write_text(MODEL, encoding="utf-8")
    options = f"--strategy fsdp_tp --topology v5e:2x4 --axes fsdp,tp --mode all --out {tmp_path}"
    assert main(shlex.split(f"search {model}:half {options}")) == 1
    captured = capsys.readouterr()
    assert "judged all 4 candidates" in captured.out
    assert "mode decode was not searched: " in captured.err
    assert "does not divide" in captured.err
    assert list(tmp_path.glob("*-train-*.toml"))


def test_folder_is_checked_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def search_variants(*_: Any, **__: Any) -> SearchReport:
        raise AssertionError("the search ran")

    monkeypatch.setattr("shardwright.cli.search.search_variants", search_variants)
    model = tmp_path / "searched_model.py"
    model.write_text(MODEL, encoding="utf-8")
    command = f"search {model}:one --topology v5e:2x4 --out {model}"
    assert main(shlex.split(command)) == 2
    assert "cannot create" in capsys.readouterr().err


ROWS, WIDTH, LENGTH = 16, 256, 64


def stack(remat: bool, layers: int = 3) -> Program:
    """A training step of square layers. Its 3 products per layer and token are all that it does."""
    specs = sw.ArraySpec((layers, WIDTH, WIDTH), jnp.float32, (sw.LAYERS, sw.EMBED, sw.EMPTY))
    hidden = (sw.BATCH, sw.LENGTH, sw.EMPTY)

    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return sw.shard(jnp.tanh(x @ sw.gather(weight, sw.EMBED, sw.EMPTY)), hidden), None

    def loss(params: jax.Array, x: jax.Array) -> jax.Array:
        body = jax.checkpoint(layer) if remat else layer
        return jax.lax.scan(body, x, params)[0].sum()

    shapes = (
        jax.ShapeDtypeStruct(specs.shape, specs.dtype),
        jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), jnp.float32),
    )
    return Program(jax.grad(loss, (0, 1)), shapes, (specs, hidden))


@pytest.mark.full(but=["axes1-False", "axes0-True"])
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("axes", [("fsdp",), ("tp",)])
def test_repeated_operations_do_not_count(remat: bool, axes: tuple[str, ...]) -> None:
    """`tp` shards nothing here, so all devices along it repeat the same products."""
    strategies = {"fsdp_tp": sw.Strategy.preset("fsdp_tp")}
    found = sw.search(stack(remat), strategies, topology="v5e:2x4", axes=axes)
    assert found.best is not None
    report = found.best.report
    useful = 3 * 2 * 3 * ROWS * LENGTH * WIDTH**2 // 8  # 3 products per layer, on 8 devices
    assert report.walked.useful_flops == useful
    assert report.walked.flops == useful * (4 if remat else 3) // 3 * (8 if axes == ("tp",) else 1)
    assert found.best.tokens == {"__train__": ROWS * LENGTH}
    low, high = utilization(report)
    assert low * report.time.high == pytest.approx(useful / 197e12)
    assert high * report.time.low == pytest.approx(useful / 197e12)
    # The shortest time is that of the smallest branches, so only their operations count.
    work = dataclasses.replace(report.walked.work, min_flops=report.walked.flops // 4 * 3)
    walked = dataclasses.replace(report.walked, work=work)
    _, smallest = utilization(dataclasses.replace(report, walked=walked))
    assert smallest == pytest.approx(high if axes == ("tp",) else high * 3 / 4)


def test_advice_names_the_best_that_fits() -> None:
    topology = parse_topology("v5e:2x4", read_hardware())
    found = search(axes=("dp", "fsdp"))
    memories = sorted(one.report.memory.high for one in found.candidates)
    small = dataclasses.replace(topology.chip, hbm_bytes=memories[-1])  # now it is close
    topology = dataclasses.replace(topology, chip=small)
    strategies = {name: sw.Strategy.preset(name) for name in ("fsdp", "fsdp_tp")}
    found = sw.search(program(32), strategies, topology=topology, axes=("dp", "fsdp"))
    fits = [one.verdict for one in found.candidates]
    assert set(fits) == {Verdict.FITS, Verdict.CLOSE}
    assert fits == sorted(fits, key=(Verdict.FITS, Verdict.CLOSE).index)
    assert found.front[0] == found.best == found.candidates[0]
    first = search_text(found).split("\n")[0]
    assert first.startswith(f"use {found.best.name} on {found.best.mesh}: ")
    assert first.endswith("it fits")
    assert "tokens/s, MFU" in first
    close = dataclasses.replace(found, candidates=found.candidates[-1:])
    assert "it may not fit: --verify 1 compiles it" in " ".join(search_text(close).split())
    assert "no candidate fits" in search_text(dataclasses.replace(found, candidates=()))


def test_candidates_that_do_not_fit_may_be_kept() -> None:
    topology = parse_topology("v5e:2x4", read_hardware())
    memories = sorted(one.report.memory.low for one in search(axes=("fsdp", "tp")).candidates)
    small = dataclasses.replace(topology.chip, hbm_bytes=memories[0] // 2)
    topology = dataclasses.replace(topology, chip=small)
    strategies = {name: sw.Strategy.preset(name) for name in ("fsdp", "fsdp_tp")}
    options: dict[str, Any] = {"topology": topology, "axes": ("fsdp", "tp")}
    assert sw.search(program(32), strategies, **options).candidates == ()
    kept = sw.search(program(32), strategies, keep_large=True, **options)
    assert len(kept.candidates) == len(memories)
    assert {one.verdict for one in kept.candidates} == {Verdict.DOES_NOT_FIT}
    assert "does not fit" not in kept.dropped


def for_any_mesh(function: Any) -> Program:
    return dataclasses.replace(program(32), function=function, any_mesh=True)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The meshes on which a search traces a program."""
    meshes: list[str] = []

    def trace(manager: Any, *arguments: Any) -> Any:
        sizes = manager.mesh.shape.items()
        meshes.append(",".join(f"{axis}:{size}" for axis, size in sizes if size > 1))
        return trace_program(manager, *arguments)

    monkeypatch.setattr(run, "trace_program", trace)
    return meshes


def asking(params: Any, x: Any) -> Any:
    """A program whose trace depends on the mesh, because it asks for a spec."""
    manager = sw.current_manager()
    assert manager is not None
    manager.explain(HIDDEN, shape=x.shape)
    return forward(params, x)


def test_only_what_is_walked_is_traced(traced: list[str]) -> None:
    options: dict[str, Any] = {"axes": ("fsdp", "tp"), "topology": "v5e:2x4"}
    found = sw.search(for_any_mesh(asking), **options, walks=2)
    assert traced[0] == ""  # one device, by which all candidates are judged
    assert sorted(traced[1:]) == sorted({one.mesh for one in found.candidates})
    assert found.walked == 2
    every = sw.search(dataclasses.replace(for_any_mesh(asking), any_mesh=False), **options)
    assert found.judged == every.judged
    planned = {(one.name, one.mesh): one.costs for one in every.candidates}
    assert {(one.name, one.mesh) for one in found.candidates} < planned.keys()
    assert all(one.costs == planned[one.name, one.mesh] for one in found.candidates)


def test_next_candidate_takes_the_place_of_one_that_fails(traced: list[str]) -> None:
    def refusing(params: Any, x: Any) -> Any:
        manager = sw.current_manager()
        assert manager is not None
        if manager.mesh.shape["tp"] == 2 or manager.mesh.shape["fsdp"] > 8:
            raise sw.StrategyError("this mesh does not suit me", fix="choose another one")
        return asking(params, x)

    strategies = {"fsdp_tp": sw.Strategy.preset("fsdp_tp")}
    options: dict[str, Any] = {"axes": ("fsdp", "tp"), "topology": "v5e:2x4"}
    every = sw.search(for_any_mesh(refusing), strategies, **options)
    assert {one.mesh for one in every.candidates} == {"fsdp:8", "fsdp:2,tp:4"}
    assert every.dropped["StrategyError"] == 1
    assert every.examples["StrategyError"].startswith("fsdp_tp on fsdp:4,tp:2: this mesh does not")
    two = sw.search(for_any_mesh(refusing), strategies, **options, walks=2)
    assert {one.mesh for one in two.candidates} == {"fsdp:8", "fsdp:2,tp:4"}
    assert "fsdp:4,tp:2" in traced
    with raises(sw.StrategyError, "does not suit me"):
        sw.search(for_any_mesh(refusing), strategies, **options, pins=("mesh.tp = 2",))


@pytest.mark.parametrize("together", [True, False])
def test_mesh_axes_that_shard_together_are_traced_as_one(together: bool, traced: list[str]) -> None:
    def refusing(params: Any, x: Any) -> Any:
        manager = sw.current_manager()
        assert manager is not None
        if manager.mesh.shape["fsdp"] == 8:  # its trace would fit all other meshes
            raise sw.StrategyError("this mesh does not suit me", fix="choose another one")
        if not together:  # this weight is sharded over fsdp alone
            manager.explain(sw.EMBED, sw.HEAD, shape=(64, 4), role="param")
        return asking(params, x)

    options: dict[str, Any] = {"axes": ("dp", "fsdp"), "topology": "v5e:2x4"}
    options["strategies"] = {"fsdp_tp": sw.Strategy.preset("fsdp_tp")}
    given = for_any_mesh(refusing)
    found = sw.search(given, **options)
    alone = ["dp:8"] if together else ["dp:2,fsdp:4", "dp:4,fsdp:2", "dp:8"]
    assert traced == ["", "fsdp:8", *alone]
    assert found == sw.search(dataclasses.replace(given, any_mesh=False), **options)


def test_annotations_that_one_device_lacks_make_programs_differ() -> None:
    def forward(params: Any, x: Any) -> Any:
        manager = sw.current_manager()
        assert manager is not None
        x = sw.shard(x, HIDDEN)
        if manager.mesh.size > 1:
            x = sw.shard(x, sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)
        return x @ params["up"]

    params = {"up": jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)}
    up = {"up": sw.ArraySpec((64, 256), jnp.bfloat16, (sw.EMBED, sw.EMPTY))}
    x = jax.ShapeDtypeStruct((32, 16, 64), jnp.bfloat16)
    found = sw.search(
        Program(forward, (params, x), (up, HIDDEN), any_mesh=True),
        {"fsdp_tp": sw.Strategy.preset("fsdp_tp")},
        topology="v5e:2x4",
        pins=("mesh.tp = 4", "mesh.fsdp = 2"),
        vary={"mlp_intermediate": ("tp", "-"), "head": (None, "-")},
    )
    sent = {one.settings["mlp_intermediate"]: one.sent_bytes for one in found.candidates}
    assert sent["tp"] != sent["-"]
    assert found.dropped["same program as another"] == 2  # heads are not in this program


def test_unused_mesh_axes_may_be_named() -> None:
    found = search(presets=("fsdp_tp",), axes=("fsdp", "ep"))
    assert any(one.sizes["ep"] > 1 for one in found.candidates)
    pinned = search(presets=("fsdp_tp",), pins=("mesh.ep = 2",))
    assert {one.sizes["ep"] for one in pinned.candidates} == {2}


@pytest.mark.parametrize("last", [("judged", 3), ("planned", 2)])
def test_search_stops_with_what_it_has(last: tuple[str, int]) -> None:
    def progress(state: SearchProgress) -> bool:
        return (state.doing, state.done) != last

    found = search(axes=("fsdp", "tp"), progress=progress)
    assert not found.exhaustive
    assert len(found.candidates) == (2 if last[0] == "planned" else 0)
    assert found.dropped["not planned: the search was stopped"] > 0
    assert found.judged < search(axes=("fsdp", "tp")).judged
    text = search_text(found)
    assert "no candidate fits" not in text
    if not found.candidates:
        assert text.startswith("the search was stopped before it planned a candidate that fits")


def test_interrupt_keeps_what_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object, state: SearchProgress) -> None:
        if (state.doing, state.done) == ("planned", 2):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("shardwright.cli.show.ProgressLine.__call__", interrupt)
    model = tmp_path / "searched_model.py"
    model.write_text(MODEL, encoding="utf-8")
    before = signal.getsignal(signal.SIGINT)
    options = f"--strategy fsdp_tp --topology v5e:2x4 --axes fsdp,tp --out {tmp_path}"
    assert main(shlex.split(f"search {model}:one {options}")) == 0
    assert signal.getsignal(signal.SIGINT) is before
    out = capsys.readouterr().out
    assert out.startswith("mode train\nuse fsdp_tp on ")
    assert "not planned: the search was stopped" in out
    for file in tmp_path.glob("*.toml"):
        assert sw.Strategy.load(file).name == file.stem


def test_progress_shows_done_and_elapsed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter((0.0, 1.0, 30.0))
    monkeypatch.setattr("shardwright.cli.show.time.monotonic", lambda: next(now))
    line = ProgressLine()
    for done in (1, 4):
        line(SearchProgress(doing="planned", done=done, all=10))
    assert capsys.readouterr().err == "planned 4 of 10 candidates, 30 s\n"
