"""Convert a Llama in GGUF to a checkpoint of Hugging Face, as transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_KEYS = {
    "hidden_size": "llama.embedding_length",
    "num_hidden_layers": "llama.block_count",
    "intermediate_size": "llama.feed_forward_length",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "rope_theta": "llama.rope.freq_base",
    "max_position_embeddings": "llama.context_length",
}


def convert(file: Path, folder: Path) -> Path:
    """Write `config.json` and float32 safetensors of a GGUF file, and return their folder."""
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(file)
    config: dict[str, Any] = {"model_type": "llama"}
    config |= {key: reader.get_field(of).contents() for key, of in _KEYS.items()}
    values = {}
    for tensor in reader.tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in ("attn_q", "attn_k"):
            # llama.cpp stores both elements of a rotated pair in adjacent rows.
            size = config["hidden_size"] // config["num_attention_heads"]
            pairs = value.reshape(-1, size // 2, 2, value.shape[-1])
            value = pairs.swapaxes(1, 2).reshape(value.shape)
        values[_name(tensor.name)] = np.ascontiguousarray(value, np.float32)
    config["vocab_size"] = len(values["model.embed_tokens.weight"])
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(values, folder / "model.safetensors")
    return folder


def _name(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    _, layer, module, suffix = name.split(".")
    return f"model.layers.{layer}.{_MODULES[module]}.{suffix}"
