"""Configurations of levanter give the specs of the mappings that its trainer makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.interop.haliax import levanter
from tests.raising import facts, raises

CONFIG = """\
data: !include data/pile.yaml
trainer:
  tracker: !unknown {a: 1}
  batch_axis: rows
  axis_resources:
    vocab: model
    mlp: data
  tensor_parallel_axes: [mlp, heads]
  parameter_axis_resources:
    position: [replica, data]
    vocab: data
  fsdp_axis: [embed, head_size]
  replica_ici_axis_size: 2
  model_axis_size: 2
  replica_dcn_axis_size: 2
"""
# What `compute_axis_mapping` and `parameter_axis_mapping` of its trainer return.
BOTH = {"rows": ("replica", "data"), "vocab": "model", "mlp": "model", "heads": "model"}
PARAMETER = {
    **BOTH,
    "vocab": "data",
    "position": ("replica", "data"),
    "embed": "data",
    "head_size": "data",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    pytest.importorskip("yaml")
    path = tmp_path / "gpt2.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


def spec(imported: Any, name: str, role: Any) -> Any:
    pm = sw.PartitionManager(imported.strategy, mesh=sw.abstract_mesh("replica:4,data:2,model:2"))
    return pm.resolve(*imported.annotation((name,)), role=role, shape=(64,))


def test_specs_equal_those_of_its_mappings(config: Path) -> None:
    imported = levanter.to_strategy(config, replicated=["layers"])
    assert imported.strategy.mesh == {"replica": 4, "data": -1, "model": 2}
    assert imported.strategy.dcn == {"replica": 2}
    for role, mapping in (("activation", BOTH), ("param", PARAMETER)):
        for name in (*PARAMETER, "layers"):
            expected = P(mapping[name]) if name in mapping else P()
            assert spec(imported, name, role) == expected, (role, name)
    assert not imported.notes


def test_places(config: Path) -> None:
    strategy = levanter.to_strategy(config, overrides={"trainer.fsdp_axis": "embed"}).strategy
    places = {name: strategy.source("params", f"logical_{name}") for name in PARAMETER}
    assert places == {
        "rows": "gpt2.yaml:4",
        "vocab": "gpt2.yaml:11",
        "mlp": "gpt2.yaml:8",
        "heads": "gpt2.yaml:8",
        "position": "gpt2.yaml:10",
        "embed": "overrides",
        "head_size": "",
    }
    assert strategy.source("rules", "logical_embed") == "gpt2.yaml (not mapped)"


def test_defaults() -> None:
    imported = levanter.to_strategy({})
    assert "the configuration has no trainer: levanter's defaults are used" in imported.notes
    assert imported.strategy.mesh == {"replica": 1, "data": -1, "model": 1}
    assert spec(imported, "batch", "activation") == P(("replica", "data"))
    assert spec(imported, "embed", "param") == P("data")
    assert "list such names in replicated=" in str(imported)


def test_values_that_are_wrong_are_reported_at_once(config: Path) -> None:
    trainer = {
        "model_axis_size": 0,
        "replica_ici_axis_size": "two",
        "tensor_parallel_axes": "mlp",
        "axis_resources": ["mlp"],
        "fsdp_axis": 3,
        "batch_axis": ["batch"],
    }
    with raises(
        sw.StrategyError,
        "trainer.replica_ici_axis_size",
        "two",
        path="configuration",
        fix="TrainerConfig",
        count=6,
    ) as caught:
        levanter.to_strategy({"trainer": trainer})
    empties: tuple[Any, ...] = ([], 0, "")
    for empty in empties:
        for key in ("axis_resources", "parameter_axis_resources"):
            with raises(sw.StrategyError, f"trainer.{key}", f"{empty!r}", path="configuration"):
                levanter.to_strategy({"trainer": {key: empty}})
    text = str(caught.value)
    assert "trainer.model_axis_size must be a positive integer, got 0" in text
    assert "trainer.tensor_parallel_axes must be a list of names, got 'mlp'" in text
    config.write_text("trainer:\n  fsdp_axis: embed\n  model_axis_size: x\n", encoding="utf-8")
    with raises(
        sw.StrategyError, "trainer.model_axis_size", "x", path="gpt2.yaml:3", fix="TrainerConfig"
    ):
        levanter.to_strategy(config)
    with pytest.raises(sw.MissingMeshAxisError) as absent:
        levanter.to_strategy({"trainer": {"axis_resources": {"mlp": "tp", "vocab": "ep"}}})
    assert "tp" in str(absent.value)
    assert "ep" in str(absent.value)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("- a", "trainer"),
        ("trainer: [1]", "trainer"),
        ("trainer: !include x.yaml", "trainer"),
        ("a: [", "YAML"),
        ("3", "trainer"),
    ],
)
def test_files_without_a_trainer(text: str, fact: str, config: Path) -> None:
    config.write_text(text, encoding="utf-8")
    with raises(sw.StrategyError, fact, path=...):
        levanter.to_strategy(config)


MESH = """\
trainer:
  mesh:
    axes: {context: 2, model: 2}
    dcn_axes: {replica_dcn: 2}
    shared_mapping:
      position: context
      heads: [model, context]
    compute_mapping:
      batch: [replica_dcn, data]
      vocab: model
    param_mapping:
      embed: [data, replica]
"""
# What `resolved_compute_mapping` and `resolved_param_mapping` of its MeshConfig return.
SHARED = {"mlp": "model", "heads": ("model", "context"), "position": "context"}
MESH_COMPUTE = {**SHARED, "batch": ("replica_dcn", "data"), "vocab": "model"}
MESH_PARAMETER = {**SHARED, "embed": ("data", "replica")}


def test_mesh_of_newer_versions(config: Path) -> None:
    config.write_text(MESH, encoding="utf-8")
    imported = levanter.to_strategy(config, replicated=["layers"])
    sizes = {"data": -1, "replica": 1, "model": 2, "context": 2, "replica_dcn": 2}
    assert imported.strategy.mesh == sizes
    assert imported.strategy.dcn == {"replica_dcn": 2}
    text = "data:2,replica:2,model:2,context:2,replica_dcn:2"
    pm = sw.PartitionManager(imported.strategy, mesh=sw.abstract_mesh(text))
    for role, mapping in (("activation", MESH_COMPUTE), ("param", MESH_PARAMETER)):
        for name in {**MESH_COMPUTE, **MESH_PARAMETER, "layers": None}:
            found = pm.resolve(*imported.annotation((name,)), role=role, shape=(64,))
            assert found == (P(mapping[name]) if name in mapping else P()), (role, name)
    assert imported.strategy.source("rules", "logical_vocab") == "gpt2.yaml:10"
    assert imported.strategy.source("rules", "logical_mlp") == "gpt2.yaml (default of levanter)"
    assert "param_mapping alone" in "\n".join(imported.notes)


def test_defaults_and_overrides_of_the_mesh() -> None:
    strategy = levanter.to_strategy({"trainer": {"mesh": {}}}).strategy
    assert strategy.mesh == {"data": -1, "replica": 1, "model": 1, "replica_dcn": 1}
    overrides = {"trainer.mesh.axes.model": 4, "trainer.mesh.axes.stage": -1}
    imported = levanter.to_strategy({}, overrides=overrides)
    # levanter sets its own -1 to 1 if the configuration has another one.
    sizes = {"data": 1, "replica": 1, "model": 4, "stage": -1, "replica_dcn": 1}
    assert imported.strategy.mesh == sizes
    assert any(note.startswith("replica_dcn is 1, for one slice") for note in imported.notes)
    named = {"mesh": {"batch_axis_name": "rows", "compute_mapping": {"batch": "data"}}}
    rows = levanter.to_strategy({"trainer": named})
    pm = sw.PartitionManager(
        rows.strategy, mesh=sw.abstract_mesh("data:2,replica:2,model:1,replica_dcn:1")
    )
    assert pm.resolve(*rows.annotation(("rows",)), shape=(8,)) == P("data")


def test_keys_of_the_mesh_that_are_wrong(config: Path) -> None:
    config.write_text(
        "trainer:\n  mesh:\n    axes: {model: 0, data: x}\n    tensor_parallel_axes: [mlp]\n"
        "    dcn_axes: [1]\n    param_maping: {}\n    shared_mapping: {mlp: []}\n"
        "    batch_axis_name: 3\n",
        encoding="utf-8",
    )
    with raises(
        sw.StrategyError,
        "trainer.mesh.axes.model",
        -1,
        0,
        path="gpt2.yaml:3",
        fix="MeshConfig",
        count=7,
    ) as caught:
        levanter.to_strategy(config)
    text = str(caught.value)
    assert "gpt2.yaml:3: trainer.mesh.axes.model must be an integer: positive, or -1, got 0" in text
    assert "gpt2.yaml:4: trainer.mesh.tensor_parallel_axes is unknown" in text
    assert "trainer.mesh.dcn_axes must be a mapping of names, got [1]" in text
    assert "param_mapping" in text
    assert "trainer.mesh.shared_mapping.mlp must be a mesh axis, or a list of them, got []" in text
    assert "trainer.mesh.batch_axis_name must be a name, got 3" in text
    for mesh, says in (
        ({"axes": {"a": -1, "b": -1}}, facts("trainer.mesh.axes", -1)),
        ({"dcn_axes": {"data": 2}}, facts("trainer.mesh", "data", "dcn_axes")),
        ([1], facts("trainer.mesh", "[1]", path="configuration", fix="MeshConfig")),
    ):
        with raises(sw.StrategyError, says):
            levanter.to_strategy({"trainer": {"mesh": mesh}})
    with raises(sw.StrategyError, "model_axis_size", path="configuration", fix="trainer.mesh"):
        levanter.to_strategy({"trainer": {"mesh": {}, "model_axis_size": 2}})
