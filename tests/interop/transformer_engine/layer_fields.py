"""The fields of every `TransformerLayer` that is compared with TransformerEngine.

Each choice occurs alone, then choices are mixed.
"""

from __future__ import annotations

import zlib
from typing import Any

BASE = {"hidden_size": 8, "mlp_hidden_size": 12, "num_attention_heads": 2}

# Group -> choices, each a set of fields. A mixed layer has one choice of each group.
CHOICES: dict[str, list[dict[str, Any]]] = {
    "sizes": [
        {"hidden_size": 16, "num_attention_heads": 4, "num_gqa_groups": 2},
        {"hidden_size": 8, "num_attention_heads": 4, "num_gqa_groups": 1},
        {"hidden_size": 8, "mlp_hidden_size": 20, "num_gqa_groups": 1},
        {"hidden_size": 16, "mlp_hidden_size": 8, "num_attention_heads": 2},
    ],
    "norm": [
        {"layernorm_type": "rmsnorm"},
        {"layernorm_epsilon": 1e-2},
        {"zero_centered_gamma": True},
        {"layernorm_type": "rmsnorm", "layernorm_epsilon": 0.1},
        {"zero_centered_gamma": True, "layernorm_epsilon": 1e-3},
    ],
    "residual": [
        {"apply_residual_connection_post_layernorm": True},
        {"output_layernorm": True},
        {"apply_residual_connection_post_layernorm": True, "output_layernorm": True},
        {"drop_path": 0.2},
        {"drop_path": 0.5, "output_layernorm": True},
    ],
    "dropout": [
        {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        {"hidden_dropout": 0.4, "hidden_dropout_dims": [1]},
        {"hidden_dropout": 0.3, "hidden_dropout_dims": [0, 2], "intermediate_dropout": 0.2},
        {"attention_dropout": 0.5, "hidden_dropout": 0.0},
        {"intermediate_dropout": 0.5, "intermediate_dropout_dims": [1]},
        {"intermediate_dropout": 0.3, "intermediate_dropout_dims": [0], "attention_dropout": 0.0},
        {"dropout_rng_name": "noise", "intermediate_dropout": 0.3},
    ],
    "mlp": [
        {"mlp_activations": ["relu"]},
        {"mlp_activations": ["silu"]},
        {"mlp_activations": ["quick_gelu"]},
        {"mlp_activations": ["squared_relu"]},
        {"mlp_activations": ["linear"]},
        {"mlp_activations": ["gelu", "linear"]},
        {"mlp_activations": ["silu", "linear"]},
        {"mlp_activations": ["relu", "linear"]},
        {"mlp_activations": ["quick_gelu", "linear"]},
        {"mlp_activations": ["squared_relu", "linear"]},
        {"mlp_activations": ["linear", "silu"]},
        {"mlp_activations": ["relu", "relu"]},
        {"mlp_activations": ["sigmoid", "linear"]},
        {"mlp_activations": ["clamped_silu", "clamped_linear"]},
        {"mlp_activations": ["clamped_linear", "clamped_silu"]},
    ],
    "projections": [
        {"fuse_qkv_params": False},
        {"use_bias": True},
        {"use_bias": True, "bias_init": "ones"},
        {"use_bias": True, "fuse_qkv_params": False},
        {"scaled_query_init": False},
        {"mha_kernel_init": "ones", "mlp_kernel_init": "ones"},
        {"mha_kernel_init": "glorot_uniform()", "fuse_qkv_params": False},
    ],
    "positions": [
        {"enable_relative_embedding": False},
        {"enable_rotary_pos_emb": True},
        {"enable_rotary_pos_emb": True, "enable_relative_embedding": False},
        {"enable_rotary_pos_emb": True, "rotary_pos_emb_windows": [2, 500]},
        {"enable_rotary_pos_emb": True, "rotary_pos_emb_group_method": "alternate"},
        {"self_attn_bias_type": "pre_scale_bias", "scale_attn_logits": True},
        {"self_attn_bias_type": "post_scale_bias", "scale_attn_logits": True},
        {"enable_relative_embedding": False, "self_attn_bias_type": "no_bias"},
    ],
    "scores": [
        {"self_attn_mask_type": "no_mask"},
        {"self_attn_mask_type": "padding"},
        {"self_attn_mask_type": "padding_causal"},
        {"self_attn_mask_type": "causal_padding", "scale_attn_logits": True},
        {"window_size": [2, 0]},
        {"self_attn_mask_type": "padding", "window_size": [1, 2]},
        {"self_attn_mask_type": "padding_causal", "window_size": [3, 1]},
        {"window_size": [-1, -1]},
        {"float32_attention_logits": True},
        {"softmax_type": "off_by_one"},
        {"softmax_type": "learnable"},
        {"softmax_type": "learnable", "self_attn_mask_type": "padding"},
    ],
    # TransformerEngine cannot adapt the MLP of a layer.
    "adaptation": [
        {"low_rank_adaptation_scope": "qkv_proj", "low_rank_adaptation_dim": 3},
        {"low_rank_adaptation_scope": "output_proj", "low_rank_adaptation_dim": 3},
        {"low_rank_adaptation_scope": "exclude_mlp", "low_rank_adaptation_alpha": 6.0},
    ],
    "layout": [
        {"transpose_batch_sequence": True},
        {"enable_sequence_parallel": True},
        {"transpose_batch_sequence": True, "enable_sequence_parallel": True},
    ],
}
ALONE = 1 + sum(map(len, CHOICES.values()))
MIXED = 45


def layers() -> list[dict[str, Any]]:
    """Return the fields of each layer, without its type."""
    alone = [{}, *(fields for choices in CHOICES.values() for fields in choices)]
    return [{**BASE, **fields} for fields in (*alone, *map(_mixed, range(MIXED)))]


def _mixed(at: int) -> dict[str, Any]:
    """Return the fields of one mixed layer; about a third of the groups is left out."""
    fields: dict[str, Any] = {}
    for group, choices in CHOICES.items():
        number = zlib.crc32(f"{at}/{group}".encode())
        if number % 3:
            fields |= choices[number // 3 % len(choices)]
    return fields
