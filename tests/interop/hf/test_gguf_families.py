"""Every family that the bridge knows is read from GGUF as from safetensors.

The names and the changes of values are those of llama.cpp's conversion, written here once more.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import shardwright as sw
from shardwright.errors import CheckpointError
from shardwright.interop import hf
from shardwright.interop.hf.gguf_latent import KeysAndValues
from shardwright.vocabulary.lowering import describe
from tests.interop.hf import files

gguf = pytest.importorskip("gguf", reason="the extra hf installs it")

Arrays = dict[str, np.ndarray[Any, Any]]
# Case of the golden trees -> architecture of GGUF.
CASES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "smollm3": "smollm3",
    "granite": "granite",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "deepseek_v2": "deepseek2",
    "deepseek_v2_lite": "deepseek2",
    "deepseek_v3": "deepseek2",
    "bert": "bert",
}
WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
# Gemma 2 and 3 have four norms per layer.
FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def expected_of(case: str) -> Arrays:
    """Return the tensors of a case, with the experts of each layer stacked."""
    values: Arrays = {}
    stacks: dict[str, list[np.ndarray[Any, Any]]] = {}
    # Published weights are bfloat16. Adding 1 to a float32 changes its last bits.
    dtype = ml_dtypes.bfloat16 if CASES[case].startswith("gemma") else np.float32
    for name, stored in files.values_of(case, dtype).items():
        if "pooler" in name:
            continue  # llama.cpp leaves it out
        value = stored.astype(np.float32)
        match = re.fullmatch(r"(.*\.experts\.)(\d+)\.(.*)", name)
        if match:
            stacks.setdefault(match[1] + match[3], []).append(value)
        else:
            values[name] = value
    return values | {name: np.stack(parts) for name, parts in stacks.items()}


def converted(case: str, name: str, value: np.ndarray[Any, Any], *, splits: bool) -> Arrays:
    """Return the tensors of GGUF for one of Hugging Face."""
    arch, config = CASES[case], files.TREES[case]["config"]
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        value = value + 1
    if arch in ("llama", "smollm3", "granite") and re.search(r"self_attn\.[qk]_proj", name):
        heads = config["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
        rows = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        value = rows.swapaxes(1, 2).reshape(value.shape)
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    stem, _, end = name.rpartition(".")
    match = re.fullmatch(r"(?:model\.layers|encoder\.layer)\.(\d+)\.(.*)", stem)
    if match is None:
        return {f"{WHOLE[stem]}.{end}": value}
    block = f"blk.{match[1]}"
    if splits and match[2] == "self_attn.kv_b_proj":
        key = config["qk_nope_head_dim"]
        heads = value.reshape(config["num_attention_heads"], -1, value.shape[1])
        keys, values = heads[:, :key], heads[:, key:]
        return {
            f"{block}.attn_k_b.weight": np.ascontiguousarray(keys.swapaxes(1, 2)),
            f"{block}.attn_v_b.weight": np.ascontiguousarray(values),
        }
    names = {**LAYER, **FOUR_NORMS} if arch in ("gemma2", "gemma3") else LAYER
    theirs = "exp_probs_b" if "e_score" in match[2] else names[match[2]]
    return {f"{block}.{theirs}.{end}": value}


def write(path: Path, case: str, *, splits: bool = True, **changes: Any) -> None:
    """Write a case as llama.cpp converts it."""
    config = {**files.TREES[case]["config"], **changes}
    writer = gguf.GGUFWriter(path, CASES[case])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_context_length(config["max_position_embeddings"])
    experts = config.get("n_routed_experts") or config.get("num_local_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    if CASES[case] == "deepseek2":
        _write_latents(writer, config, splits=splits)
    elif CASES[case] == "bert":
        writer.add_token_type_count(config["type_vocab_size"])
        writer.add_tokenizer_model(config.get("tokenizer", "bert"))
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        if config.get("head_dim"):
            writer.add_key_length(config["head_dim"])
    for name, value in expected_of(case).items():
        for theirs, tensor in converted(case, name, value, splits=splits).items():
            writer.add_tensor(theirs, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_latents(writer: Any, config: dict[str, Any], *, splits: bool) -> None:
    key = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    latent, value = config["kv_lora_rank"], config["v_head_dim"]
    writer.add_head_count_kv(1 if splits else config["num_attention_heads"])
    writer.add_kv_lora_rank(latent)
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_key_length(latent + config["qk_rope_head_dim"] if splits else key)
    writer.add_value_length(latent if splits else value)
    if splits:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def manager() -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:4,tp:2"))


def check_loaded(path: Path, case: str) -> None:
    checkpoint = hf.read(path)
    expected = expected_of(case)
    model = files.TREES[case]["config"]["model_type"]
    assert checkpoint.config["model_type"] == ("llama" if case == "mistral" else model)
    params = checkpoint.load(manager())
    assert params.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(np.asarray(params[name]), value, err_msg=name)
    shapes = {name: value.shape for name, value in expected.items()}
    from_config = hf.annotations(
        {name: np.empty(shape) for name, shape in shapes.items()}, files.TREES[case]["config"]
    )
    for name, annotation in from_config.items():
        assert describe(checkpoint.specs[name].axes) == describe(annotation), name


@pytest.mark.parametrize("case", CASES)
def test_values_and_axes_equal_those_of_safetensors(case: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", case)
    check_loaded(tmp_path, case)


@pytest.mark.parametrize("case", ["deepseek_v2", "deepseek_v2_lite"])
def test_latents_of_older_files(case: str, tmp_path: Path) -> None:
    """Keys and values are one tensor, and the lengths are those of a head."""
    write(tmp_path / "model.gguf", case, splits=False)
    check_loaded(tmp_path, case)


def test_norms_of_stacked_layers(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", "gemma2")
    params, _ = hf.load(tmp_path, manager(), stack_layers=True)
    norms = np.asarray(params["model.layers.input_layernorm.weight"])
    values = expected_of("gemma2")
    expected = [values[f"model.layers.{layer}.input_layernorm.weight"] for layer in range(2)]
    np.testing.assert_array_equal(norms, np.stack(expected))


@dataclasses.dataclass(frozen=True)
class Array:
    """A tensor in memory."""

    value: np.ndarray[Any, Any]
    name: str = "tensor"
    file: str = "file"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.value.dtype

    def read(self, bounds: Any) -> np.ndarray[Any, Any]:
        return self.value[tuple(slice(*each) for each in bounds)]


def test_pieces_of_keys_and_values() -> None:
    """Pieces may start and end within a head."""
    rng = np.random.default_rng(0)
    heads, key, value, latent = 3, 4, 5, 6
    keys = rng.normal(size=(heads, latent, key)).astype(np.float32)
    values = rng.normal(size=(heads, value, latent)).astype(np.float16)
    whole = np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, latent)
    joined = KeysAndValues(name="kv", keys=Array(keys), values=Array(values))
    assert joined.shape == whole.shape
    assert joined.dtype == np.float32
    rows = heads * (key + value)
    for top in range(rows):
        for bottom in range(top + 1, rows + 1):
            piece = joined.read(((top, bottom), (1, 5)))
            np.testing.assert_array_equal(piece, whole[top:bottom, 1:5])


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("bert", {"tokenizer": "gpt2"}, "a bert with the tokenizer 'gpt2', as of RoBERTa"),
        ("deepseek_v3", {"kv_lora_rank": 0}, r"kv_lora_rank must be a positive integer, got 0"),
        ("deepseek_v3", {"v_head_dim": 16}, r"the header says \(6, 16, 20\)"),
        ("deepseek_v3", {"qk_nope_head_dim": 0}, "a key has 4 dims, of which 4 are rotated"),
        ("deepseek_v3", {"num_attention_heads": 3}, r"\(6, 20, 8\), and the header says \(3, 20"),
        ("gemma2", {"head_dim": 8}, r"and the header of model.gguf says \(48, 48\)"),
    ],
)
def test_files_that_do_not_fit(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "model.gguf", case, **changes)
    with pytest.raises(CheckpointError, match=message):
        hf.read(tmp_path)
