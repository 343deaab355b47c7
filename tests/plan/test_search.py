"""Search: equal to brute force through `plan`, with planted best candidates."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.cli.main import main
from shardwright.plan.planner import Program
from shardwright.plan.search import SearchReport

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
    expected, failed = {}, 0
    for name in ("fsdp", "fsdp_tp"):
        strategy = sw.Strategy.preset(name)
        axes = list(strategy.mesh)
        for mesh in _meshes(8, axes):
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
    assert sum(found.dropped.values()) == failed > 0
    assert found.judged == len(expected) + failed
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
        ({"axes": ("fsdp", "model")}, "no strategy has the mesh axis 'model'"),
        ({"mode": "sleep"}, "sleep"),
    ],
)
def test_bad_questions_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(sw.ShardingError, match=says):
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
    assert code == 2
    assert "does not divide" in message
    code, _, message = run("two --strategy fsdp_tp")
    assert code == 2
    assert "--mode with train or decode" in message
    assert run("two --strategy fsdp_tp --mode decode")[0] == 0
    absent = tmp_path / "not" / "there"
    assert run(f"one --strategy fsdp_tp --out {absent}")[0] == 0
    assert len(list(absent.glob("*.toml"))) == len(files)


def test_search_survives_the_failure_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "searched_model.py"
    model.write_text(MODEL, encoding="utf-8")
    options = f"--strategy fsdp_tp --topology v5e:2x4 --axes fsdp,tp --modes all --out {tmp_path}"
    assert main(shlex.split(f"search {model}:half {options}")) == 2
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
