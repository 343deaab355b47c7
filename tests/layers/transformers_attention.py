"""Write `golden/transformers_attention.json`: attention of models in `transformers`, on a CPU.

    python -m tests.layers.transformers_attention

It needs torch and transformers (5.24 wrote the file), and is not run by the tests. `weights` is
shared with them.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np

GOLDEN = pathlib.Path(__file__).parent / "golden" / "transformers_attention.json"
EMBED, HEADS, KV_HEADS, HEAD_DIM, LENGTH = 64, 4, 2, 16, 24
FACTORS = {
    "short_factor": [1.0 + 0.05 * at for at in range(8)],
    "long_factor": [1.0 + 1.5 * at for at in range(8)],
}
# Name -> (model_type, rope_parameters, longest context, layer, options of the configuration).
CASES: dict[str, tuple[str, dict[str, Any], int, int, dict[str, Any]]] = {
    "llama3": (
        "llama",
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        512,
        0,
        {},
    ),
    "yarn": (
        "qwen3",
        {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        256,
        0,
        {},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
        2048,
        0,
        {"sliding_window": 8, "attention_bias": True},
    ),
    "longrope short": (
        "phi3",
        {"rope_type": "longrope", "rope_theta": 10_000.0, **FACTORS}
        | {"original_max_position_embeddings": 32},
        128,
        0,
        {},
    ),
    "longrope long": (
        "phi3",
        {"rope_type": "longrope", "rope_theta": 10_000.0, **FACTORS}
        | {"original_max_position_embeddings": 16},
        128,
        0,
        {},
    ),
    "gemma3 local": ("gemma3_text", {"rope_type": "default"}, 512, 0, {"sliding_window": 8}),
    "gemma3 global": (
        "gemma3_text",
        {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        512,
        5,
        {"sliding_window": 8},
    ),
}


def weights(name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the input, and parameters by their names in `transformers`; linear ones [out, in]."""
    rng = np.random.default_rng(sorted(CASES).index(name))
    x = rng.normal(size=(1, LENGTH, EMBED)).astype(np.float32)
    rows, width = KV_HEADS * HEAD_DIM, HEADS * HEAD_DIM
    made = {
        "q_proj.weight": rng.normal(size=(width, EMBED)) / 4,
        "k_proj.weight": rng.normal(size=(rows, EMBED)) / 4,
        "v_proj.weight": rng.normal(size=(rows, EMBED)) / 4,
        "o_proj.weight": rng.normal(size=(EMBED, width)) / 4,
    }
    kind = CASES[name][0]
    if kind in ("qwen3", "gemma3_text"):
        made |= {f"{each}_norm.weight": rng.normal(size=HEAD_DIM) for each in "qk"}
    if kind == "gpt_oss":
        made |= {
            f"{each}_proj.bias": rng.normal(size=made[f"{each}_proj.weight"].shape[0])
            for each in "qkvo"
        }
        made["sinks"] = 2 * rng.normal(size=HEADS)
    return x, {key: value.astype(np.float32) for key, value in made.items()}


def run(name: str) -> dict[str, Any]:
    """Return the frequencies, their scale, and every third row of one attention module."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind, rope, longest, layer, options = CASES[name]
    parameters: Any = dict(rope)
    if kind == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": 10_000.0}
        parameters = {"sliding_attention": local, "full_attention": rope if layer else local}
    if kind == "gpt_oss":
        options = options | {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = CONFIG_MAPPING[kind](
        hidden_size=EMBED,
        intermediate_size=16,
        num_hidden_layers=6,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=8,
        pad_token_id=0,
        max_position_embeddings=longest,
        rope_parameters=parameters,
        attn_implementation="eager",
        **options,
    )
    if kind == "gemma3_text":
        config.query_pre_attn_scalar = HEAD_DIM
    if kind == "phi3":
        config.original_max_position_embeddings = rope["original_max_position_embeddings"]
    model = AutoModelForCausalLM.from_config(config).eval()
    attention, rotary = model.model.layers[layer].self_attn, model.model.rotary_emb
    x, own = weights(name)
    if kind == "phi3":
        fused = [own.pop(f"{each}_proj.weight") for each in "qkv"]
        own["qkv_proj.weight"] = np.concatenate(fused)
    attention.load_state_dict({key: torch.tensor(value) for key, value in own.items()})
    positions = torch.arange(LENGTH)[None]
    types = ("full_attention" if layer else "sliding_attention",) if kind == "gemma3_text" else ()
    cos_sin = rotary(torch.tensor(x), positions, *types)
    distance = positions[0][:, None] - positions[0][None]
    visible = distance >= 0
    if "sliding_window" in options and not layer:
        visible &= distance < options["sliding_window"]
    mask = torch.where(visible, 0.0, float("-inf"))[None, None]
    with torch.no_grad():
        y = attention(
            hidden_states=torch.tensor(x), position_embeddings=cos_sin, attention_mask=mask
        )[0]
    prefix = f"{types[0]}_" if types else ""
    return {
        "frequencies": getattr(rotary, f"{prefix}inv_freq").tolist(),
        "scale": float(getattr(rotary, f"{prefix}attention_scaling", 1.0)),
        "y": [[float(f"{value:.6g}") for value in row] for row in y[0][::3].tolist()],
    }


if __name__ == "__main__":
    import transformers

    written = {
        "transformers": transformers.__version__,
        "cases": {name: run(name) for name in CASES},
    }
    text = json.dumps(written, separators=(",", ":"))
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(text + "\n", encoding="utf-8")
