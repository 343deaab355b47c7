"""Write the tensors of a small model of each family, as transformers saves them.

    python tools/hf_trees.py

Run it where transformers and PyTorch are installed. Tests name the axes of these tensors.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {**GROUPED, "num_experts": 4, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **SIZES,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
}
# Case: class of the model, and settings of its configuration.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", GROUPED),
    "llama_bias": ("LlamaForCausalLM", {**GROUPED, "attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("LlamaForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "llama_no_head": ("LlamaModel", GROUPED),
    "mistral": ("MistralForCausalLM", GROUPED),
    "smollm3": ("SmolLM3ForCausalLM", GROUPED),
    "granite": ("GraniteForCausalLM", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", {**SIZES, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", GROUPED),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**EXPERTS, "shared_expert_intermediate_size": 64, "mlp_only_layers": [0]},
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", EXPERTS),
    "gemma": ("GemmaForCausalLM", GROUPED),
    "gemma2": ("Gemma2ForCausalLM", GROUPED),
    "gemma3_text": ("Gemma3ForCausalLM", GROUPED),
    "mixtral": ("MixtralForCausalLM", LOCAL_EXPERTS),
    "deepseek_v2": ("DeepseekV2ForCausalLM", LATENT),
    "deepseek_v2_lite": ("DeepseekV2ForCausalLM", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT),
    "gpt_oss": ("GptOssForCausalLM", LOCAL_EXPERTS),
    "bert": ("BertModel", SIZES),
    "bert_pretraining": ("BertForPreTraining", SIZES),
    "bert_classification": ("BertForSequenceClassification", {**SIZES, "num_labels": 3}),
}


def saved(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Save a model; return the scalars of its configuration, and shapes by name."""
    import safetensors
    import transformers

    kind = getattr(transformers, name)
    model = kind(kind.config_class(**settings))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        file = safetensors.safe_open(f"{folder}/model.safetensors", framework="numpy")
        shapes = {key: file.get_slice(key).get_shape() for key in sorted(file.keys())}
    plain = {key: value for key, value in config.items() if isinstance(value, int | str)}
    return {"config": plain, "tensors": shapes}


def main() -> None:
    import transformers

    cases = {case: saved(name, settings) for case, (name, settings) in CASES.items()}
    path = ROOT / "tests" / "interop" / "golden" / "hf_trees.json"
    rows = ",\n".join(
        f'"{case}": {json.dumps(tree, separators=(",", ":"))}' for case, tree in cases.items()
    )
    version = transformers.__version__
    path.write_text(f'{{"transformers": "{version}", "trees": {{\n{rows}\n}}}}\n')
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
