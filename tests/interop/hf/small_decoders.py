"""Small decoders in the layout of published ones: configurations, and values of their tensors.

`python -m tools.hf_decoders` writes the logits that transformers gives for them. This module
imports no JAX, so that the tool runs without it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}
# The keys are those of the published files of one model of each family.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA_3,
        "tie_word_embeddings": True,
    },
    "mistral": {
        "model_type": "mistral",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": 5,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "model_type": "qwen2",
        "head_dim": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 28,
        "tie_word_embeddings": False,
    },
    "qwen3": {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": _YARN,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "num_experts": 4,
        **_EXPERTS,
        "tie_word_embeddings": False,
    },
    "qwen3_moe_unnormalized": {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "moe_intermediate_size": 24,
        "norm_topk_prob": False,
        "num_experts": 4,
        **_EXPERTS,
        "tie_word_embeddings": False,
    },
    "gemma": {
        "model_type": "gemma",
        "num_key_value_heads": 1,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    },
    "gemma2": {
        "model_type": "gemma2",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 20,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 5,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 8,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": 20,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_theta": 1000000,
        "sliding_window": 5,
        "sliding_window_pattern": 6,
    },
    "mixtral": {
        "model_type": "mixtral",
        "head_dim": None,
        "hidden_act": "silu",
        "num_local_experts": 4,
        **_EXPERTS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
}


def config_of(name: str) -> dict[str, Any]:
    """Return a configuration. A published one does not have the keys that are None here."""
    values = {**_SIZES, **CONFIGS[name]}
    return {key: value for key, value in values.items() if key != "head_dim" or value is not None}


def tokens(name: str) -> np.ndarray[Any, Any]:
    """Return tokens: [2, 16]."""
    return np.random.default_rng(zlib.crc32(name.encode())).integers(0, 64, (2, 16), np.int32)


def values_of(
    shapes: Mapping[str, tuple[int, ...]], family: str
) -> dict[str, np.ndarray[Any, Any]]:
    """Return values of tensors, which depend on their names alone."""
    values = {}
    for name, shape in shapes.items():
        draw = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
        if name.endswith("norm.weight"):
            draw = 0.2 * draw + (not family.startswith("gemma"))
        elif len(shape) > 1:
            draw = draw / np.sqrt(shape[-1])
        values[name] = draw.astype(np.float32)
    return values
