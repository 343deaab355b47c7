"""Configurations in MaxText's form, read without MaxText."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.interop import maxtext
from tests.raising import raises

BASE = """\
model_name: default
custom_mesh_and_rule: ""
mesh_axes: [data, stage, fsdp, tensor, replica]
logical_axis_rules: [
  ['activation_batch', ['data', 'fsdp']],
  ['activation_length', []],
  ['activation_norm_length', ['tensor']],
  # The first rule whose mesh axes are free applies.
  ['activation_embed', ['tensor']],
  ['mlp', 'tensor'],
  ['embed', ['fsdp', 'tensor']],
  ['embed', ['fsdp']],
  ['prefill_activation_length', ['tensor']],
  ['decode_batch', ['data']],
]
input_data_sharding_logical_axes: [activation_batch, activation_length]
num_slices: -1
dcn_data_parallelism: -1
dcn_pipeline_parallelism: 1
dcn_fsdp_parallelism: 1
ici_data_parallelism: 1
ici_pipeline_parallelism: 1
ici_fsdp_parallelism: -1
ici_tensor_parallelism: 2
per_device_batch_size: 4
"""


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write("base.yml", BASE)


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def spmd() -> Any:
    return pytest.importorskip("flax.linen.spmd")


def manager(imported: maxtext.Imported, **sizes: int) -> sw.PartitionManager:
    mesh = {**imported.strategy.mesh, "fsdp": 2, **sizes}
    return sw.PartitionManager(imported.strategy, mesh=sw.abstract_mesh(mesh))


def test_explain_names_file_and_line() -> None:
    pm = manager(imported := maxtext.to_strategy("base.yml"))
    axes = imported.annotation(("embed", "mlp"))
    resolution = pm.explain(*axes, role="param", shape=(8, 8))
    assert resolution.spec == P("fsdp", "tensor")
    assert [str(decision.rule) for decision in resolution.decisions] == [
        'logical_embed = "fsdp+tensor | fsdp"   (base.yml:11, base.yml:12, [rules])',
        'logical_mlp = "tensor"   (base.yml:10, [rules])',
    ]


def test_mesh_and_notes() -> None:
    imported = maxtext.to_strategy("base.yml")
    assert dict(imported.strategy.mesh) == {
        "data": 1,
        "stage": 1,
        "fsdp": -1,
        "tensor": 2,
        "replica": 1,
    }
    assert imported.notes == (
        "mesh axes without a size have size 1: replica (no ici_replica_parallelism)",
        "the names of the inputs' dims are activation_batch, activation_length",
        "rules of mode prefill: prefill_activation_length as activation_length",
        "rules of mode decode: decode_batch as activation_batch",
        "mesh axes that no rule names are idle: stage, replica",
    )
    assert sw.Strategy.loads(imported.strategy.dumps()) == imported.strategy


def test_slices() -> None:
    sizes = {"num_slices": 4, "dcn_fsdp_parallelism": 2, "shard_mode": "explicit"}
    strategy = maxtext.to_strategy("base.yml", overrides=sizes).strategy
    assert strategy.dcn == {"data": 2, "fsdp": 2}
    assert strategy.mesh["data"] == 2
    assert strategy.mesh["fsdp"] == -1
    assert strategy.axis_types == "explicit"


@pytest.mark.parametrize("mode", ["train", "prefill", "decode"])
def test_specs_of_modes_equal_flax(mode: str) -> None:
    """Each mode gives the specs of the names that MaxText uses in it, beside weights too."""
    spmd = pytest.importorskip("flax.linen.spmd")
    own = {
        "prefill": {"activation_length": "prefill_activation_length"},
        "decode": {"activation_batch": "decode_batch"},
    }.get(mode, {})
    imported = maxtext.to_strategy("base.yml")
    pm = manager(imported, data=2).for_mode(mode)
    rules = [
        (name, tuple([value] if isinstance(value, str) else value))
        for name, value in yaml_rules("base.yml")
    ]
    for names in (
        ("activation_batch", "activation_length", "activation_embed"),
        ("activation_batch", "activation_norm_length", "activation_embed"),
        ("activation_batch", "activation_norm_length", "activation_length"),
        ("activation_length", "mlp"),
        ("embed", "activation_length"),
    ):
        expected = spmd.logical_to_mesh_axes(tuple(own.get(name, name) for name in names), rules)
        resolution = pm.resolve(*imported.annotation(names))
        assert entries(resolution) == entries(expected), (mode, names)


def yaml_rules(name: str) -> Any:
    import yaml

    return yaml.safe_load(Path(name).read_text(encoding="utf-8"))["logical_axis_rules"]


def entries(spec: Any) -> list[tuple[str, ...]]:
    listed = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    while listed and not listed[-1]:
        listed.pop()
    return listed


def test_names_of_the_vocabulary() -> None:
    imported = maxtext.to_strategy("base.yml", names=maxtext.NAMES)
    pm = manager(imported)
    assert pm.resolve(sw.EMBED, sw.MLP_INTERMEDIATE, role="param") == P("fsdp", "tensor")
    hidden = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
    assert pm.resolve(*hidden) == P("fsdp", None, "tensor")
    assert pm.resolve(*hidden, mode="prefill") == P("fsdp", None, "tensor")
    assert imported.names["decode_batch"] == (sw.BATCH, "activation")


def test_rules_of_model_and_overrides() -> None:
    write("models/tiny.yml", "logical_axis_rules: [['mlp', []], ['vocab', 'tensor']]\n")
    overrides = {"model_name": "tiny-Instruct", "logical_axis_rules": [["embed", ["tensor"]]]}
    imported = maxtext.to_strategy("base.yml", overrides=overrides)
    rules = imported.strategy.rules
    assert (rules["logical_mlp"], rules["logical_embed"]) == ("-", "tensor")
    assert [*rules][-3:] == ["logical_mlp", "logical_vocab", "logical_embed"]
    pm = manager(imported)
    axes = imported.annotation(("embed", "vocab", "mlp"))
    resolution = pm.explain(*axes, shape=(8, 8, 8))
    assert resolution.spec == P(None, "tensor")
    assert "overrides[0]" in str(resolution.decisions[0].rule)
    assert "tiny.yml:1" in str(resolution.decisions[1].rule)
    only = maxtext.to_strategy(
        "base.yml", overrides=overrides | {"override_logical_axis_rules": True}
    )
    assert [*only.names] == ["embed"]
    unknown = maxtext.to_strategy("base.yml", overrides={"model_name": "huge"})
    assert unknown.notes[0].startswith("models/huge.yml is missing")


def test_base_config_and_custom_mesh() -> None:
    write("tpu/run.yml", "base_config: base.yml\nici_tensor_parallelism: 4\n")
    write("tpu/few.yml", "base_config: run.yml\nlogical_axis_rules: [['embed', 'fsdp']]\n")
    write(
        "custom_mesh_and_rule/pure.yml",
        "mesh_axes: [fsdp]\nlogical_axis_rules: [['embed', [fsdp]]]\nsteps: 3\n",
    )
    assert maxtext.to_strategy("tpu/run.yml").strategy.mesh["tensor"] == 4
    assert [*maxtext.to_strategy(Path("tpu/few.yml")).names] == ["embed"]
    imported = maxtext.to_strategy("base.yml", overrides={"custom_mesh_and_rule": "pure"})
    assert dict(imported.strategy.mesh) == {"fsdp": -1}
    assert imported.notes[0] == (
        "custom_mesh_and_rule/pure.yml replaces mesh_axes, logical_axis_rules"
    )


def test_a_mapping_needs_no_yaml() -> None:
    config = {
        "mesh_axes": ["fsdp"],
        "logical_axis_rules": [["embed", "fsdp"]],
        "ici_fsdp_parallelism": 4,
        "shard_optimizer_over_data": True,
    }
    imported = maxtext.to_strategy(config)
    assert dict(imported.strategy.mesh) == {"fsdp": 4}
    assert imported.notes == ("shard_optimizer_over_data is not imported: see [policy] zero1",)
    assert imported.strategy.source("rules", "logical_embed") == "config[0]"


def test_interleaved_rules_keep_mode_names() -> None:
    """A table of a mode cannot hold chains that interleave, so nothing is folded."""
    extra = [["mlp", "fsdp"], ["embed", "tensor"]]
    rules = [*yaml_rules("base.yml"), *extra]
    overrides = {"logical_axis_rules": rules, "override_logical_axis_rules": True}
    imported = maxtext.to_strategy("base.yml", overrides=overrides)
    assert not imported.strategy.modes
    assert imported.notes[2] == (
        "other names have rules in between, so these apply in all modes: prefill_activation_length"
    )


def test_bad_configurations() -> None:
    write("loop.yml", "base_config: other.yml\n")
    write("other.yml", "base_config: loop.yml\n")
    write("syntax.yml", "mesh_axes: [fsdp\nrules: ]\n")
    write("list.yml", "- fsdp\n")
    write("lost.yml", "base_config: none.yml\n")
    write("empty.yml", "")
    write("text.yml", "logical_axis_rules: some_text\n")
    write("table.yml", "logical_axis_rules: {embed: fsdp}\n")
    write("twice.yml", "mesh_axes: [data, fsdp, tensor, fsdp]\n")
    write("binary.yml", "")
    Path("binary.yml").write_bytes(b"\xff\xfe\xfa")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("none.yml", {}, "cannot read 'none.yml': no such file"),
        ("binary.yml", {}, "binary.yml is not UTF-8"),
        ("syntax.yml", {}, r"syntax\.yml:2: the file is not YAML"),
        ("list.yml", {}, r"list\.yml: a configuration is a mapping, got list"),
        ("lost.yml", {}, r"lost\.yml: the base_config 'none\.yml' is missing"),
        ("loop.yml", {}, r"base_config forms a cycle: loop\.yml -> other\.yml -> loop\.yml"),
        ("empty.yml", {}, "the configuration has no mesh_axes"),
        ("base.yml", {"custom_mesh_and_rule": "none"}, "custom_mesh_and_rule/none.yml is missing"),
        ("base.yml", {"ici_tensor_paralelism": 2, "x": 1}, "2 problems"),
        ("base.yml", {"ici_tensor_paralelism": 2}, "did you mean 'ici_tensor_parallelism'"),
        ("base.yml", {"ici_tensor_parallelism": 0}, "must be a positive integer or -1, got 0"),
        ("base.yml", {"ici_data_parallelism": -1}, "the sizes of data, fsdp are -1"),
        ("base.yml", {"num_slices": 3, "dcn_fsdp_parallelism": 2}, "do not fit 3 slices"),
        ("base.yml", {"num_slices": "4"}, "num_slices must be an integer, got '4'"),
        ("base.yml", {"logical_axis_rules": "x"}, "overrides: logical_axis_rules is str, not a"),
        ("text.yml", {}, r"text\.yml: logical_axis_rules is str, not a list"),
        ("table.yml", {}, r"table\.yml: logical_axis_rules is dict, not a list"),
        ("twice.yml", {}, "mesh_axes has fsdp twice"),
    ]
    problems = []
    for name, overrides, message in cases:
        try:
            maxtext.to_strategy(name, overrides=overrides)
            problems.append(f"{name} {overrides}: no error")
        except sw.StrategyError as error:
            if not re.search(message, str(error)):
                problems.append(f"{name} {overrides}: {error}")
    assert not problems, "\n".join(problems)


def test_other_arguments() -> None:
    with pytest.raises(TypeError, match="not a mapping"):
        maxtext.to_strategy("base.yml", overrides=["num_slices=4"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="NoneType"):
        maxtext.to_strategy(None)  # type: ignore[arg-type]


def test_sizes_across_slices_need_their_number() -> None:
    sizes = {"dcn_data_parallelism": 4}
    imported = maxtext.to_strategy("base.yml", overrides=sizes)
    note = "not imported, because num_slices is not more than 1: dcn_data_parallelism=4"
    assert note in imported.notes
    sized = maxtext.to_strategy("base.yml", overrides={**sizes, "num_slices": 4})
    assert dict(sized.strategy.dcn) == {"data": 4}
    assert note not in sized.notes


def test_absent_mesh_axes_have_size_one() -> None:
    """As in MaxText, whose files for one mesh are used on another."""
    rules = """logical_axis_rules: [
  ['mlp', ['tensor_transpose', 'fsdp']],
  ['embed', ['tensor_transpose']],
  ['embed', ['fsdp']],
]"""
    write("few.yml", f"base_config: base.yml\nmesh_axes: [data, fsdp]\n{rules}\n")
    imported = maxtext.to_strategy("few.yml")
    assert dict(imported.strategy.mesh) == {"data": 1, "fsdp": -1, "tensor_transpose": 1}
    assert "mesh axes that only the rules name have size 1: tensor_transpose" in imported.notes
    assert any(note.endswith("no such axis: ici_tensor_parallelism=2") for note in imported.notes)
    pm = manager(imported)
    # The name that comes first takes the axis of size 1, so the first rule of the other is lost.
    spec = spmd().logical_to_mesh_axes(
        ("embed", "mlp"),
        (
            ("mlp", ("tensor_transpose", "fsdp")),
            ("embed", ("tensor_transpose",)),
            ("embed", ("fsdp",)),
        ),
    )
    assert spec == P(None, ("tensor_transpose", "fsdp"))
    assert pm.resolve(*imported.annotation(("embed", "mlp")), role="param") == P(None, "fsdp")


def test_foreign_mesh_axes_are_reported_at_once() -> None:
    text = BASE.replace("'mlp', 'tensor'", "'mlp', 'tensr'").replace("['fsdp']]", "['fdsp']]")
    write("typo.yml", text)
    with pytest.raises(sw.MissingMeshAxisError) as caught:
        maxtext.to_strategy("typo.yml")
    assert [problem.path for problem in caught.value.problems] == ["typo.yml:10", "typo.yml:12"]


DIFFUSION = """\
mesh_axes: ['data', 'fsdp', 'tensor']
logical_axis_rules: [
  ['activation_batch', ['data', 'fsdp']],
  ['conv_batch', ['data', 'fsdp']],
  ['embed', 'fsdp'],
  ['heads', 'tensor'],
  ['out_channels', 'tensor'],
  ['conv_out', 'fsdp'],
]
ici_data_parallelism: 1
ici_fsdp_parallelism: -1
ici_tensor_parallelism: 2
"""


def test_names_of_maxdiffusion() -> None:
    """The axes of kernels and images; what no rule mentions is replicated if the file says so."""
    write("diffusion.yml", DIFFUSION)
    imported = maxtext.to_strategy("diffusion.yml", names=maxtext.DIFFUSION_NAMES)
    pm = manager(imported)
    kernel = imported.annotation(("keep_1", "keep_2", "conv_in", "conv_out"))
    assert kernel == (sw.EMPTY, sw.EMPTY, sw.CHANNEL_IN, sw.CHANNEL_OUT)
    assert pm.resolve(*kernel, role="param") == P(None, None, None, "fsdp")
    images = imported.annotation(("conv_batch", "height", "keep_2", "out_channels"))
    assert images[1:] == (sw.HEIGHT, sw.EMPTY, sw.CHANNEL)
    assert pm.resolve(*images) == P("fsdp", None, None, "tensor")
    # Without `names`, each name is an axis of its own, and an unmentioned one is an error.
    names = ("keep_1", "keep_2", "conv_in", "conv_out")
    plain = maxtext.to_strategy("diffusion.yml")
    with raises(sw.UnknownAxisError, "keep_1", fix="names="):
        plain.annotation(names)
    write("listed.yml", DIFFUSION + "replicated: [keep_1, keep_2, conv_in]\n")
    for listed in (
        maxtext.to_strategy("listed.yml"),
        maxtext.to_strategy("diffusion.yml", overrides={"replicated": names[:3]}),
    ):
        again = manager(listed)
        assert again.resolve(*listed.annotation(names), role="param") == P(None, None, None, "fsdp")
        decision = again.explain(*listed.annotation(names), role="param").decisions[0]
        assert decision.rule is not None
        assert "replicated" in decision.rule.source


def test_replicated_names_have_no_rule() -> None:
    with raises(sw.StrategyError, "heads", "replicated", path="configuration", fix="remove"):
        write("twice.yml", DIFFUSION + "replicated: [heads]\n")
        maxtext.to_strategy("twice.yml")
    with raises(sw.StrategyError, "replicated", path="configuration", fix="[height, width]"):
        write("text.yml", DIFFUSION + "replicated: heads\n")
        maxtext.to_strategy("text.yml")
