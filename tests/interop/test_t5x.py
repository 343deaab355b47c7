"""Partitioners, gin files and axis names of T5X, read without T5X."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.interop import t5x

NAMES = {
    "embed": (sw.EMBED, "param"),
    "mlp": (sw.MLP_INTERMEDIATE, "param"),
    "layers": (sw.LAYERS, "param"),
}
ARRAYS = (
    ("batch", "length", "embed"),
    ("batch", "length", "heads", "kv"),
    ("vocab", "embed"),
    ("embed", "joined_kv"),
    ("embed", "mlp"),
    ("mlp", "embed"),
    ("embed", "embed_2"),
    ("relpos_buckets", "heads"),
)


def spec(imported: Any, names: tuple[str, ...], mesh: dict[str, int]) -> list[Any]:
    axes = imported.annotation([name if name in imported.names else None for name in names])
    return trimmed(sw.resolve(axes, imported.strategy.compile(), mesh).spec)


def trimmed(spec: Any) -> list[Any]:
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return entries


@pytest.mark.parametrize("dims", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_standard_rules_equal_flax(dims: tuple[int, int]) -> None:
    spmd = pytest.importorskip("flax.linen.spmd")
    rules = t5x.standard_rules(*dims)
    assert len(rules) == 13 + (dims == (2, 2))
    imported = t5x.from_partitioner(rules, num_partitions=4)
    mesh = {"data": 2, "model": 4}
    for names in ARRAYS:
        assert spec(imported, names, mesh) == trimmed(spmd.logical_to_mesh_axes(names, rules))


def test_meshes_of_partitioners() -> None:
    sizes: Any
    for sizes, mesh, dcn in (
        ({}, {"data": -1, "model": 1}, {}),
        ({"num_partitions": 2}, {"data": -1, "model": 2}, {}),
        (
            {"model_parallel_submesh": (1, 2, 2, 1), "num_partitions": 2},
            {"data": -1, "model": 4},
            {},
        ),
        (
            {"ici_mesh_shape": (1, 4, 2), "dcn_mesh_shape": [2, 1, 1]},
            {"replica": 2, "data": 4, "model": 2},
            {"replica": 2},
        ),
    ):
        imported = t5x.from_partitioner(**sizes)
        strategy = imported.strategy
        assert len(imported.notes) == ("model_parallel_submesh" in sizes)
        assert (dict(strategy.mesh), dict(strategy.dcn)) == (mesh, dcn)
    assert strategy.rules["logical_batch"] == "replica+data"
    assert strategy.source("rules", "logical_batch") == "standard_logical_axis_rules[0]"


def test_bad_partitioners() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_partitions": 0}, r"num_partitions must be positive integers, got \(0,\)"),
        ({"model_parallel_submesh": (1, 2.5)}, "submesh must be positive integers"),
        ({"ici_mesh_shape": (1, 2, 4)}, "dcn_mesh_shape must be 3 positive integers, got None"),
        (
            {"ici_mesh_shape": (1, 2), "dcn_mesh_shape": 3},
            "(?s)2 problems.*ici_mesh_shape must.*dcn_mesh_shape must",
        ),
    ]
    for arguments, message in cases:
        with pytest.raises(sw.StrategyError, match=message):
            t5x.from_partitioner(**arguments)
    with pytest.raises(sw.StrategyError, match="are 1 or 2, got 3 and 1"):
        t5x.standard_rules(3)
    with pytest.raises(sw.MissingMeshAxisError, match=r"rules\[0\].*names expert"):
        t5x.from_partitioner([("batch", ("expert", "data"))])
    shapes: Any = {"ici_mesh_shape": (1, 4, 2), "dcn_mesh_shape": (1, 1, 1)}
    with pytest.raises(sw.StrategyError, match="is not a pair"):
        t5x.from_partitioner([("batch",)], **shapes)  # type: ignore[list-item]


def model() -> Any:
    """Return the variables of a model in T5X's idiom, with a scanned layer."""
    nn = pytest.importorskip("flax.linen")
    partitioning = pytest.importorskip("flax.linen.partitioning")

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: None) -> Any:
            init = nn.initializers.lecun_normal()
            wi = partitioning.param_with_axes("wi", init, (8, 16), axes=("embed", "mlp"))
            wo = partitioning.param_with_axes("wo", init, (16, 8), axes=("mlp", "embed"))
            bias = self.param("bias", nn.initializers.zeros, (8,))
            return x + nn.relu(x @ wi) @ wo + bias, None

    layers = partitioning.scan_with_axes(
        Mlp,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=2,
        axis_name="layers",
        axes_collections=("params",),
    )
    return jax.eval_shape(layers().init, jax.random.key(0), jnp.ones((4, 8)), None)


def test_annotations_of_a_model() -> None:
    partitioning = pytest.importorskip("flax.linen.partitioning")
    variables = model()
    values, axes = t5x.annotations(variables, NAMES)
    assert [*values] == ["params"]
    assert axes["params"] == {
        "wi": (sw.LAYERS, sw.EMBED, sw.MLP_INTERMEDIATE),
        "wo": (sw.LAYERS, sw.MLP_INTERMEDIATE, sw.EMBED),
        "bias": (sw.EMPTY, sw.EMPTY),
    }
    specs = partitioning.get_axis_names(variables["params_axes"])
    assert t5x.annotations({**variables, "params_axes": specs}, NAMES)[1] == axes
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("fsdp:4,tp:2"))
    assert pm.shardings(values, axes)["params"]["wi"].spec == P(None, "fsdp", "tp")


def test_wrong_names_are_reported_at_once() -> None:
    variables = {
        "params": {"wi": jnp.ones((2, 3)), "wo": jnp.ones((3, 2))},
        "params_axes": {"wi": P("embd", "mlp"), "wo": P("mlp")},
    }
    with pytest.raises(sw.UnknownAxisError) as caught:
        t5x.annotations(variables, NAMES)
    assert [problem.path for problem in caught.value.problems] == ["params/wi", "params/wo"]
    assert "did you mean 'embed'" in str(caught.value)
    assert "1 names ('mlp',) for 2 dims" in str(caught.value)


GIN = """\
include 'base.gin'
include 't5x/runs/lost.gin'
import t5x

SIZE = 4
partitioning.PjitPartitioner:
  num_partitions = %SIZE  # of the model
  logical_axis_rules = @partitioning.standard_logical_axis_rules()

train/utils.DatasetConfig:
  seed = @make_seed()  # a "quoted # sign" is text
partitioning.standard_logical_axis_rules.additional_rules = [
    ('experts', 'data'),  # one for each
    ('stack', None),
]
"""


@pytest.fixture
def gin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("base.gin").write_text(
        "partitioning.PjitPartitioner.num_partitions = 1\n"
        "partitioning.standard_logical_axis_rules.parameter_partitioning_dims = 2\n",
        encoding="utf-8",
    )
    path = Path("runs") / "train.gin"
    path.parent.mkdir()
    path.write_text(GIN, encoding="utf-8")
    return path


def test_gin_files(gin: Path) -> None:
    imported = t5x.from_gin(gin)
    assert dict(imported.strategy.mesh) == {"data": -1, "model": 4}
    assert imported.strategy.rules["logical_embed"] == "data"
    assert imported.strategy.rules["logical_experts"] == "data"
    assert imported.notes == (
        "not found, and not imported: t5x/runs/lost.gin",
        (
            'never applies, since an earlier rule replicates: stack = "-"   '
            "(standard_logical_axis_rules (base.gin:2, train.gin:12))"
        ),
    )


def test_bindings_in_scopes(gin: Path) -> None:
    """A binding in a scope replaced the one of the trainer."""
    size = "partitioning.PjitPartitioner.num_partitions"
    gin.write_text(f"{size} = 2\ninfer/{size} = 8\n", encoding="utf-8")
    imported = t5x.from_gin(gin)
    assert imported.strategy.mesh["model"] == 2
    assert imported.notes[0].startswith(
        "not imported, because it applies in its scope only: infer/PjitPartitioner.num_partitions"
    )
    gin.write_text(f"train/{size} = 4\n", encoding="utf-8")
    assert t5x.from_gin(gin).strategy.mesh["model"] == 4
    gin.write_text(f"train/{size} = 4\ninfer/{size} = 8\n", encoding="utf-8")
    with pytest.raises(sw.StrategyError, match=r"the scopes differ: train/.* \(train\.gin:1\)"):
        t5x.from_gin(gin)
    assert t5x.from_gin(gin, bindings=[f"{size} = 1"]).strategy.mesh["model"] == 1


@pytest.mark.parametrize("call", ["my_lib.moe_standard", "moe_partitioning.standard"])
def test_rules_of_other_functions_are_refused(call: str, gin: Path) -> None:
    gin.write_text(GIN.replace("@partitioning.standard", f"@{call}"), encoding="utf-8")
    with pytest.raises(sw.StrategyError, match="is not a literal: @"):
        t5x.from_gin(gin)


def test_lines_that_continue(gin: Path) -> None:
    size = "partitioning.PjitPartitioner.num_partitions"
    gin.write_text(
        f"PjitPartitioner.logical_axis_rules = [('ba[tch', 'data')]\n{size} = \\\n    4\n",
        encoding="utf-8",
    )
    imported = t5x.from_gin(gin)
    assert (imported.strategy.mesh["model"], [*imported.names]) == (4, ["ba[tch"])


def test_bindings_may_include(gin: Path) -> None:
    Path("runs/more.gin").write_text("PjitPartitioner.num_partitions = 8\n", encoding="utf-8")
    assert t5x.from_gin(gin, bindings=["include 'more.gin'"]).strategy.mesh["model"] == 8


def test_a_file_without_a_partitioner(gin: Path) -> None:
    gin.write_text("{}", encoding="utf-8")
    note = "train.gin does not bind PjitPartitioner: T5X's defaults are used"
    assert note in t5x.from_gin(gin).notes


def test_rules_in_a_gin_file(gin: Path) -> None:
    text = "partitioning.PjitPartitioner:\n  logical_axis_rules = [('embed', 'model')]\n"
    gin.write_text(text, encoding="utf-8")
    imported = t5x.from_gin(gin)
    assert dict(imported.strategy.rules) == {"logical_embed": "model"}
    assert imported.strategy.source("rules", "logical_embed") == "train.gin:2[0]"


def test_bad_gin_files(gin: Path) -> None:
    with pytest.raises(sw.StrategyError, match=r"cannot read 'none\.gin': no such file"):
        t5x.from_gin("none.gin")
    for text, message in (
        ("PjitPartitioner.num_partitions = @size()", r"train\.gin:1: the value of PjitPartitioner"),
        ("PjitPartitioner.num_partitions = %SIZE", "is not a literal: %SIZE"),
        ("standard_logical_axis_rules.parameter_partitioning_dims = [1]", r"are 1 or 2, got"),
        ("standard_logical_axis_rules.additional_rules = 5", "additional_rules must be a list"),
        ("PjitPartitioner.model_parallel_submesh = 4", "model_parallel_submesh must be positive"),
        ("include 'train.gin'", r"include each other: train\.gin -> train\.gin"),
        ("PjitPartitioner.logical_axis_rules = [('embed',", "is not a literal"),
        (
            "t.partitioner = @moe.MoePjitPartitioner()",
            r"train\.gin:1: MoePjitPartitioner has a mesh",
        ),
    ):
        gin.write_text(text, encoding="utf-8")
        with pytest.raises(sw.StrategyError, match=message):
            t5x.from_gin(gin)


def test_axes_that_cannot_be_used() -> None:
    names: Any = {"embed": (sw.EMBED, "param"), "mlp": (sw.MLP_INTERMEDIATE, "param")}
    params = {"wi": jnp.ones((4, 8))}
    with pytest.raises(sw.StrategyError, match="no array of the model has names"):
        t5x.annotations({"params": params}, names)
    cases: list[tuple[Any, str]] = [
        ({"wi_axes": "embed"}, "params_axes/wi_axes: 'embed' is neither AxisMetadata nor a tuple"),
        ({"w1_axes": ("embed", "mlp")}, "params_axes/w1_axes: these axes belong to no variable"),
    ]
    for axes, message in cases:
        with pytest.raises(sw.StrategyError, match=message):
            t5x.annotations({"params": params, "params_axes": axes}, names)
    listed = {"params": params, "params_axes": {"wi_axes": ["embed", "mlp"]}}
    assert t5x.annotations(listed, names)[1]["params"]["wi"] == (sw.EMBED, sw.MLP_INTERMEDIATE)
