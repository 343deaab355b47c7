"""The axes of the tensors that transformers saves, for each family."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.errors import CheckpointError
from shardwright.interop import hf
from shardwright.interop.hf.families import FAMILIES
from shardwright.interop.hf.names import missing
from shardwright.vocabulary.annotations import MergedDim, PartOf
from shardwright.vocabulary.lowering import describe
from tests.interop.hf.files import TREES
from tests.raising import Facts, facts, raises

pytest.importorskip("safetensors", reason="the extra hf installs it")


def tree_of(case: str) -> dict[str, Any]:
    return {
        name: jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
        for name, shape in TREES[case]["tensors"].items()
    }


def axes_of(case: str) -> dict[str, Any]:
    return hf.annotate(tree_of(case), TREES[case]["config"])


def test_every_family_has_a_tree() -> None:
    kinds = {tree["config"]["model_type"] for tree in TREES.values()}
    assert kinds == {name for name, family in FAMILIES.items() if family.tensors}


@pytest.mark.parametrize("case", TREES)
def test_every_tensor_has_axes_of_its_shape(case: str) -> None:
    tree = tree_of(case)
    for name, axes in axes_of(case).items():
        assert len(axes) == len(tree[name].shape), name
        for entry, size in zip(axes, tree[name].shape, strict=True):
            assert not isinstance(entry, MergedDim) or entry.size == size, name


# The axes that a reader of transformers' code would write.
EXPECTED = {
    ("llama", "model.embed_tokens.weight"): "(VOCAB, EMBED)",
    ("llama", "lm_head.weight"): "(VOCAB, EMBED)",
    ("llama", "model.layers.1.self_attn.q_proj.weight"): "(HEAD*HEAD_DIM, EMBED)",
    ("llama", "model.layers.1.self_attn.k_proj.weight"): "(KV_HEAD*KV_HEAD_DIM, EMBED)",
    ("llama", "model.layers.1.self_attn.v_proj.weight"): "(KV_HEAD*KV_HEAD_DIM, EMBED)",
    ("llama", "model.layers.1.self_attn.o_proj.weight"): "(EMBED, HEAD*HEAD_DIM)",
    ("llama", "model.layers.1.mlp.gate_proj.weight"): "(MLP_INTERMEDIATE, EMBED)",
    ("llama", "model.layers.1.mlp.down_proj.weight"): "(EMBED, MLP_INTERMEDIATE)",
    ("llama", "model.norm.weight"): "(NORM)",
    ("llama_bias", "model.layers.0.self_attn.k_proj.bias"): "(KV_HEAD*KV_HEAD_DIM)",
    ("llama_bias", "model.layers.0.mlp.down_proj.bias"): "(EMBED)",
    ("llama_no_head", "layers.0.mlp.up_proj.weight"): "(MLP_INTERMEDIATE, EMBED)",
    ("qwen2", "model.layers.0.self_attn.q_proj.bias"): "(HEAD*HEAD_DIM)",
    ("qwen3", "model.layers.0.self_attn.q_norm.weight"): "(HEAD_DIM)",
    ("qwen3", "model.layers.0.self_attn.k_norm.weight"): "(KV_HEAD_DIM)",
    ("qwen3_moe", "model.layers.0.mlp.gate.weight"): "(EXPERT_GATE, EMBED)",
    ("qwen3_moe", "model.layers.0.mlp.experts.3.up_proj.weight"): "(MLP_INTERMEDIATE, EMBED)",
    ("qwen2_moe", "model.layers.1.mlp.shared_expert_gate.weight"): "(_, EMBED)",
    ("gemma2", "model.layers.0.pre_feedforward_layernorm.weight"): "(NORM)",
    ("mixtral", "model.layers.0.block_sparse_moe.experts.2.w2.weight"): (
        "(EMBED, MLP_INTERMEDIATE)"
    ),
    ("mixtral", "model.layers.0.block_sparse_moe.gate.weight"): "(EXPERT_GATE, EMBED)",
    ("deepseek_v3", "model.layers.0.self_attn.q_a_proj.weight"): "(_, EMBED)",
    ("deepseek_v3", "model.layers.0.self_attn.q_b_proj.weight"): "(HEAD*HEAD_DIM, _)",
    ("deepseek_v3", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"): "(_, EMBED)",
    ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj.weight"): "(HEAD*HEAD_DIM, _)",
    ("deepseek_v3", "model.layers.0.self_attn.o_proj.weight"): "(EMBED, HEAD*HEAD_DIM)",
    ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"): "(EXPERT_GATE)",
    ("deepseek_v2_lite", "model.layers.0.self_attn.q_proj.weight"): "(HEAD*HEAD_DIM, EMBED)",
    ("gpt_oss", "model.layers.0.self_attn.sinks"): "(HEAD)",
    ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj"): "(EXPERT, EMBED, MLP_INTERMEDIATE)",
    ("gpt_oss", "model.layers.0.mlp.experts.down_proj"): "(EXPERT, MLP_INTERMEDIATE, EMBED)",
    ("bert", "encoder.layer.0.attention.self.key.weight"): "(KV_HEAD*KV_HEAD_DIM, EMBED)",
    ("bert", "encoder.layer.0.attention.output.dense.weight"): "(EMBED, HEAD*HEAD_DIM)",
    ("bert", "encoder.layer.0.output.dense.weight"): "(EMBED, MLP_INTERMEDIATE)",
    ("bert_pretraining", "bert.embeddings.word_embeddings.weight"): "(VOCAB, EMBED)",
    ("bert_pretraining", "cls.predictions.bias"): "(VOCAB)",
    ("bert_classification", "classifier.weight"): "(_, EMBED)",
}


@pytest.mark.parametrize(("case", "name"), EXPECTED)
def test_axes(case: str, name: str) -> None:
    assert describe(axes_of(case)[name]) == EXPECTED[case, name]


@pytest.mark.parametrize("mesh", ["tp:2", "fsdp:2,tp:3", "fsdp:4,tp:2", "tp:6", "ep:2,tp:2"])
def test_no_head_is_split(mesh: str) -> None:
    """Two KV heads of 16 over three or six devices: they are replicated, not cut."""
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh(mesh))
    for case in ("llama_bias", "qwen2", "gpt_oss", "deepseek_v3"):
        axes = {name: each for name, each in axes_of(case).items() if "self_attn" in name}
        tree = {name: value for name, value in tree_of(case).items() if name in axes}
        for name, sharding in pm.shardings(tree, axes).items():
            part = sharding.shard_shape(tree[name].shape)
            for entry, size in zip(axes[name], part, strict=True):
                if isinstance(entry, MergedDim):
                    assert size % math.prod(count for _, count in entry.members[1:]) == 0


def test_nested_trees_are_joined() -> None:
    config = TREES["llama"]["config"]
    shape = jax.ShapeDtypeStruct((96, 48), jnp.float32)
    tree = {"model": {"layers": {"0": {"mlp": {"up_proj": {"weight": shape}}}}}}
    axes = hf.annotate(tree, config)
    assert axes["model"]["layers"]["0"]["mlp"]["up_proj"]["weight"] == (
        sw.MLP_INTERMEDIATE,
        sw.EMBED,
    )


def test_stacked_experts_have_a_leading_axis() -> None:
    tree = {
        "model.layers.0.mlp.experts.up_proj.weight": jax.ShapeDtypeStruct((4, 32, 48), jnp.float32)
    }
    axes = hf.annotate(tree, TREES["qwen3_moe"]["config"])
    assert [*axes.values()] == [(sw.EXPERT, sw.MLP_INTERMEDIATE, sw.EMBED)]


def test_block_scales_follow_their_weight() -> None:
    weight = "model.layers.0.self_attn.q_proj.weight"
    config = {
        **TREES["llama"]["config"],
        "hidden_size": 256,
        "num_attention_heads": 4,
        "head_dim": 128,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    tree = {
        weight: jax.ShapeDtypeStruct((512, 256), jnp.float8_e4m3fn),
        f"{weight}_scale_inv": jax.ShapeDtypeStruct((4, 2), jnp.float32),
    }
    axes = hf.annotate(tree, config)
    scale = axes[f"{weight}_scale_inv"]
    assert isinstance(scale, PartOf)
    assert (scale.shape, scale.dims, scale.path) == ((512, 256), (0, 1), weight)
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("fsdp:2,tp:4"))
    assert pm.shardings(tree, axes)[f"{weight}_scale_inv"].spec == P("tp", "fsdp")
    wrong = {**tree, f"{weight}_scale_inv": jax.ShapeDtypeStruct((3, 2), jnp.float32)}
    with raises(
        CheckpointError,
        "(3, 2)",
        "(512, 256)",
        path="model.layers.0.self_attn.q_proj.weight_scale_inv",
        fix="weight_block_size",
    ):
        hf.annotate(wrong, config)


@pytest.mark.parametrize("block", [7, "x", [0, 128], [128, "y"]])
def test_invalid_blocks(block: Any) -> None:
    weight = "model.layers.0.self_attn.q_proj.weight"
    tree = {
        weight: jax.ShapeDtypeStruct((96, 48), jnp.float8_e4m3fn),
        f"{weight}_scale_inv": jax.ShapeDtypeStruct((6, 3), jnp.float32),
    }
    config = {**TREES["llama"]["config"], "quantization_config": {"weight_block_size": block}}
    with raises(CheckpointError, "config.json", "weight_block_size", fix="config.json"):
        hf.annotate(tree, config)


@pytest.mark.parametrize(
    ("shape", "spec"), [((), P()), ((1,), P()), ((96, 1), P("tp")), ((96,), P("tp"))]
)
def test_scales_of_rows_and_of_tensors(shape: tuple[int, ...], spec: P) -> None:
    weight = "model.layers.0.self_attn.q_proj.weight"
    tree = {
        weight: jax.ShapeDtypeStruct((96, 48), jnp.float8_e4m3fn),
        f"{weight}_scale": jax.ShapeDtypeStruct(shape, jnp.float32),
    }
    axes = hf.annotate(tree, TREES["llama"]["config"])
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("fsdp:2,tp:2"))
    assert pm.shardings(tree, axes)[f"{weight}_scale"].spec == spec


def test_mxfp4_blocks_of_gpt_oss() -> None:
    config = {**TREES["gpt_oss"]["config"], "hidden_size": 64}
    start = "model.layers.0.mlp.experts."
    shapes = {
        f"{start}gate_up_proj_blocks": (4, 192, 2, 16),
        f"{start}gate_up_proj_scales": (4, 192, 2),
        f"{start}down_proj_blocks": (4, 64, 3, 16),
        f"{start}down_proj_scales": (4, 64, 3),
    }
    tree = {name: jax.ShapeDtypeStruct(shape, jnp.uint8) for name, shape in shapes.items()}
    axes = hf.annotate(tree, config)
    assert [describe(axes[name]) for name in sorted(axes)] == [
        "(EXPERT, EMBED, MLP_INTERMEDIATE, _)",
        "(EXPERT, EMBED, MLP_INTERMEDIATE)",
        "(EXPERT, MLP_INTERMEDIATE, EMBED, _)",
        "(EXPERT, MLP_INTERMEDIATE, EMBED)",
    ]


def test_unknown_tensors_are_all_named() -> None:
    tree = {
        **tree_of("llama"),
        "model.layers.0.self_attn.q_proj.qweight": jax.ShapeDtypeStruct((6, 96), jnp.int32),
        "vision_tower.patch.weight": jax.ShapeDtypeStruct((8, 3, 4, 4), jnp.float32),
        "lm_head.bias": jax.ShapeDtypeStruct(tree_of("llama")["lm_head.weight"].shape[:1], "f4"),
    }
    with raises(CheckpointError, "tensor", path="lm_head.bias", fix="sw.VOCAB", count=3) as caught:
        hf.annotate(tree, TREES["llama"]["config"])
    text = str(caught.value)
    assert "q_proj.qweight: no tensor of llama has this name" in text
    assert r"""axes={r"model\.layers\.\d+\.self_attn\.q_proj\.qweight": (sw.EMBED, ...)}""" in text
    assert r"""axes={r"lm_head\.bias": (sw.VOCAB,)}""" in text
    axes = {
        r"lm_head\.bias": (sw.VOCAB,),
        r"\.qweight$": (sw.EMPTY, sw.EMPTY),
        "^vision_tower": sw.Replicated,
    }
    given = hf.annotate(tree, TREES["llama"]["config"], axes=axes)
    assert given["vision_tower.patch.weight"] is sw.Replicated


def test_arguments_that_are_no_mappings() -> None:
    config = TREES["llama"]["config"]
    tree = tree_of("llama")
    with raises(sw.StrategyError, "config", "mapping", fix="config.json"):
        hf.annotate(tree, type("Config", (), config)())
    with raises(sw.StrategyError, "axes", "list", fix="pattern"):
        hf.annotate(tree, config, axes=[("norm", (sw.EMBED,))])  # type: ignore[arg-type]


def test_two_leaves_of_one_name() -> None:
    tree = {**tree_of("llama"), "model": {"norm": {"weight": np.ones(48)}}}
    with raises(CheckpointError, "tree", path="model.norm.weight"):
        hf.annotate(tree, TREES["llama"]["config"])


def test_many_unknown_tensors_are_counted() -> None:
    tree = {f"x.{at}.y": jax.ShapeDtypeStruct((2,), jnp.float32) for at in range(1000)}
    with raises(CheckpointError, 980, fix="sw.EMBED"):
        hf.annotate(tree, TREES["llama"]["config"])


def test_shapes_that_differ_from_the_configuration() -> None:
    tree = tree_of("llama")
    tree["model.layers.1.mlp.up_proj.weight"] = jax.ShapeDtypeStruct((48, 96), jnp.float32)
    tree["model.layers.2.mlp.up_proj.weight"] = jax.ShapeDtypeStruct((96, 48), jnp.float32)
    with pytest.raises(CheckpointError) as caught:
        hf.annotate(tree, TREES["llama"]["config"])
    assert str(caught.value) == (
        "2 problems\n"
        " 1. model.layers.1.mlp.up_proj.weight: the shape is (48, 96), and config.json says "
        "(96, 48)\n"
        "      fix   use the config.json of this checkpoint; the dims are mlp, embed\n"
        " 2. model.layers.2.mlp.up_proj.weight: config.json has 2 layers, and this is number 2\n"
        "      fix   use the config.json of this checkpoint"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "lama"},
            facts("config.json", "model_type", "lama", "llama", fix="smollm3"),
        ),
        ({"model_type": None}, facts("config.json", "model_type", fix="smollm3")),
        ({"hidden_size": None}, facts("config.json", "hidden_size", fix="config.json")),
        ({"hidden_size": "wide"}, facts("config.json", "hidden_size", "wide", fix="config.json")),
        (
            {"num_attention_heads": 0},
            facts("config.json", "num_attention_heads", fix="config.json"),
        ),
        (
            {"num_attention_heads": -2},
            facts("config.json", "num_attention_heads", -2, fix="config.json"),
        ),
        (
            {"head_dim": None, "num_attention_heads": 7},
            facts("config.json", "hidden_size", 48, 7, fix="head_dim"),
        ),
        ({"num_hidden_layers": None}, facts("config.json", "num_hidden_layers", fix="config.json")),
        (
            {"intermediate_size": None},
            facts("config.json", path="model.layers.0.mlp.down_proj.weight", fix="config.json"),
        ),
    ],
)
def test_invalid_configurations(changes: dict[str, Any], message: Facts) -> None:
    config = {**TREES["llama"]["config"], **changes}
    with raises(CheckpointError, message):
        hf.annotate(tree_of("llama"), config)


# What a model may lack as a whole. A checkpoint without it is one of another model.
WHOLE_PARTS = ("pooler", "cls", "classifier", "qa_outputs")


@pytest.mark.full(but=["llama", "llama_tied", "smollm3", "qwen3_moe", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("case", TREES)
def test_each_tensor_that_is_lost_is_noticed(case: str) -> None:
    config, names = TREES[case]["config"], list(TREES[case]["tensors"])
    assert missing(names, config) == []
    for lost in names:
        if ".experts." in lost and case != "gpt_oss":
            continue  # noticed where experts are stacked
        problems = missing([name for name in names if name != lost], config)
        # The one layer of experts that these models have may lack its bias.
        is_whole = lost.removeprefix("bert.").startswith(WHOLE_PARTS)
        if is_whole or lost.endswith("e_score_correction_bias"):
            assert not problems
        else:
            assert [problem.path for problem in problems] == [lost]


def test_goldens_are_small() -> None:
    path = Path(__file__).parents[1] / "golden" / "hf_trees.json"
    assert path.stat().st_size < 200_000
    assert json.loads(path.read_text(encoding="utf-8"))["transformers"]
