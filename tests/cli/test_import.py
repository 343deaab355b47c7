"""`shardwright import`: outputs, files and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardwright as sw
from tests.cli.cases import run

CONFIG = """\
mesh_axes: [data, fsdp, tensor]
logical_axis_rules:
  - [activation_batch, [data, fsdp]]
  - [activation_length, tensor]
  - [embed, [fsdp]]
  - [prefill_activation_length, []]
ici_fsdp_parallelism: -1
ici_tensor_parallelism: 1
"""
LEVANTER = """\
data: !include data/pile.yaml
trainer:
  tensor_parallel_axes: [mlp, heads]
  axis_resources:
    vocab: model
  parameter_axis_resources: {position: [replica, data]}
"""
DIFFUSION = """\
mesh_axes: [data, fsdp]
logical_axis_rules: [[activation_batch, [data, fsdp]], [conv_out, fsdp]]
"""
RULES = """\
[["batch", "data"],
 ["embed", "model"], ["mlp", "model"],
 ["embed", ["data"]]]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.yml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "gpt2.yaml").write_text(LEVANTER, encoding="utf-8")
    (tmp_path / "base_xl.yml").write_text(DIFFUSION, encoding="utf-8")
    (tmp_path / "rules.json").write_text(RULES, encoding="utf-8")
    (tmp_path / "rules.yml").write_text(RULES, encoding="utf-8")
    return tmp_path


def test_maxtext_to_a_file(folder: Path) -> None:
    line = "import maxtext base.yml ici_tensor_parallelism=2 -o out.toml"
    code, out, _ = run(line, folder)
    assert code == 0
    assert out.splitlines()[0] == "4 names imported"
    assert out.splitlines()[-5:] == [
        "written to out.toml",
        'next  pm = sw.PartitionManager(sw.Strategy.load("out.toml"))',
        "next  imported = maxtext.to_strategy(...); --json prints its names",
        "next  axes = flax.annotate(variables, imported.names)",
        "next  or annotate by hand: embed is LOGICAL_EMBED",
    ]
    assert (
        (folder / "out.toml").read_text(encoding="utf-8")
        == """\
# Imported from base.yml.
# note: mesh axes without a size have size 1: data (no ici_data_parallelism)
# note: rules of mode prefill: prefill_activation_length as activation_length

version = 1

[mesh]
data = 1
fsdp = -1
tensor = 2

[axes]
logical_activation_batch = "activation_batch in the imported rules"
logical_activation_length = "activation_length in the imported rules"
logical_embed = "embed in the imported rules"

[rules]
logical_activation_batch = "data+fsdp"  # base.yml:3
logical_activation_length = "tensor"  # base.yml:4
logical_embed = "fsdp"  # base.yml:5

[modes.prefill]
logical_activation_batch = "data+fsdp"  # base.yml:3
logical_embed = "fsdp"  # base.yml:5
logical_activation_length = "-"  # base.yml:6

[policy]
conflict = "next"
order = "rules"
"""
    )
    code, _, err = run(line, folder)
    assert code == 2
    assert "'out.toml' exists" in err
    assert run(f"{line} --force --vocabulary", folder)[0] == 0
    strategy = sw.Strategy.load(folder / "out.toml")
    # The file has no rule for `activation_embed`, so MaxText replicates activations along EMBED.
    assert strategy.rules == {"batch": "data+fsdp", "query_length": "tensor", "embed": "-"}
    assert strategy.params["embed"] == "fsdp"


def test_explain_suggests_imported_axes(folder: Path) -> None:
    line = "import rules rules.json --mesh data:2,model:4 -o out.toml"
    assert run(line, folder)[0] == 0
    _, out, _ = run("explain embed mlp --strategy out.toml --mode train", folder)
    assert "unknown axis 'MLP'\n    fix   did you mean 'LOGICAL_MLP'?" in out
    assert "note: EMBED has no rule, but the strategy declares LOGICAL_EMBED" in out
    code, out, _ = run("explain logical_embed logical_mlp --strategy out.toml", folder)
    assert code == 0
    assert "note" not in out


def test_levanter_with_an_override(folder: Path) -> None:
    code, out, _ = run("import levanter gpt2.yaml trainer.model_axis_size=4", folder)
    assert code == 0
    strategy = sw.Strategy.loads(out)
    assert strategy.mesh == {"replica": 1, "data": -1, "model": 4}
    assert 'logical_heads = "model"  # gpt2.yaml:3' in out
    assert 'logical_position = "replica+data"  # gpt2.yaml:6' in out
    assert 'logical_embed = "data"  # gpt2.yaml (default fsdp_axis)' in out
    code, out, _ = run("import levanter gpt2.yaml --vocabulary", folder)
    assert code == 0
    assert sw.Strategy.loads(out).params["length"] == "replica+data"
    code, _, err = run("import levanter gpt2.yaml --vocabulary --name heads=KV_HEAD", folder)
    assert code == 2
    what = 'kv_head = "-" and heads = "model" (gpt2.yaml:3) cannot be the same axis in one role'
    assert what in " ".join(err.split())
    code, _, err = run("import levanter gpt2.yaml --name mlp=MLP_INTERMEDIATE:param", folder)
    assert code == 2
    assert "--name mlp=... takes no role" in err
    code, _, err = run("import levanter gpt2.yaml trainer.model_axis=2", folder)
    assert code == 2
    assert "did you mean 'trainer.model_axis_size'?" in err


def test_rules_as_json(folder: Path) -> None:
    names = "--name embed=EMBED:param --name mlp=hidden --own-axis hidden"
    code, out, _ = run(f"import rules rules.json --mesh data:-1,model:2 {names} --json", folder)
    assert code == 0
    data = json.loads(out)
    assert data["names"] == {
        "embed": {"axis": "embed", "role": "param"},
        "mlp": {"axis": "hidden", "role": None},
        "batch": {"axis": "logical_batch", "role": None},
    }
    assert data["notes"] == ["names that became axes of their own: batch"]
    assert data["strategy"]["mesh"] == {"data": -1, "model": 2}
    assert data["strategy"]["rules"] == [
        {"logical_batch": "data", "embed": "model", "hidden": "model"},
        {"embed": "data"},
    ]
    sw.Strategy.model_validate(data["strategy"])


def test_places_of_interleaved_rules(folder: Path) -> None:
    code, out, _ = run("import rules rules.yml --mesh data:2,model:2", folder)
    assert code == 0
    assert (
        out.partition("[[rules]]")[2]
        == """
logical_batch = "data"  # rules.yml:1
logical_embed = "model"  # rules.yml:2
logical_mlp = "model"  # rules.yml:2

[[rules]]
logical_embed = "data"  # rules.yml:3

[policy]
conflict = "next"
order = "rules"
"""
    )
    code, out, _ = run("import rules rules.yml --mesh data:2,model:2 --semantics nnx", folder)
    assert 'logical_embed = "data"' in out
    assert 'logical_data = "data"  # mesh axis' in out


BAD = {
    "import": "the following arguments are required",
    "import flax x.yml": "invalid choice: 'flax'",
    "import rules rules.json": "a list of rules does not state its mesh",
    "import rules rules.json a=b --mesh data:2": "import rules takes no override",
    "import maxtext base.yml --mesh data:2 --semantics nnx": "takes no --mesh or --semantics",
    "import rules rules.json --vocabulary": "import rules takes no --vocabulary",
    "import maxtext base.yml --force": "import without -o takes no --force",
    "import maxtext base.yml -o out.json": "'out.json' is not a .toml file",
    "import maxtext base.yml -o no/out.toml": "cannot write 'no/out.toml': no such file",
    "import maxtext none.yml": "cannot read 'none.yml': no such file",
    "import maxtext base.yml ici_tensor_paralelism=2": "did you mean 'ici_tensor_parallelism'",
    "import maxtext base.yml tensor": "'tensor' is not key=value",
    "import maxtext base.yml num_slices=[": "the value of 'num_slices=[' is not YAML",
    "import maxtext base.yml --name embed": "--name 'embed' is not NAME=AXIS",
    "import maxtext base.yml --name embed=EMBD:param": "did you mean 'EMBED'? declare an axis of",
    "import rules rules.json --mesh data:2 --name embed=EMBD": "did you mean 'EMBED'?",
    "import maxtext base.yml --name embed=EMBED:use": "is not NAME=AXIS",
    "import rules base.txt --mesh data:2": "'base.txt' is neither a .json nor a .yml file",
    "import rules bad.json --mesh data:2": "bad.json is not JSON",
    "import rules few.json --mesh data:2": "few.json: the file is not a list of rules",
    "import rules rules.json --mesh data:2": "2 problems",
    "import rules none.json --mesh data:2": "none.json has no rules",
    "import maxtext base.yml --name embed=EMBED --name embed=VOCAB": "maps 'embed' twice",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_has_a_message(line: str, folder: Path) -> None:
    (folder / "bad.json").write_text("[", encoding="utf-8")
    (folder / "none.json").write_text("[]", encoding="utf-8")
    (folder / "few.json").write_text("{}", encoding="utf-8")
    code, out, err = run(line, folder)
    assert (code, out) == (2, "")
    assert BAD[line] in err


def test_maxdiffusion_and_names_without_a_rule(folder: Path) -> None:
    line = "import maxdiffusion base_xl.yml replicated=[temb_in] --vocabulary -o out.toml"
    code, out, _ = run(line, folder)
    assert code == 0, out
    rules = sw.Strategy.load(folder / "out.toml").rules
    assert rules["channel_out"] == "fsdp"
    assert rules["logical_temb_in"] == "-"
    text = '{"logical_axis_rules": [["embed", "model"]], "replicated": ["width"]}'
    (folder / "listed.json").write_text(text, encoding="utf-8")
    code, out, _ = run("import rules listed.json --mesh model:2", folder)
    assert code == 0, out
    assert 'logical_width = "-"  # listed.json replicated' in out
