"""Models in GGUF: their keys in the words of `config.json`, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shardwright.errors import CheckpointError, Problem, raise_problems
from shardwright.interop.hf.families import FAMILIES
from shardwright.interop.hf.gguf_header import Header
from shardwright.interop.hf.gguf_latent import latent_sizes
from shardwright.vocabulary.integers import as_integer
from shardwright.vocabulary.lowering import short

# Their `general.architecture` -> `model_type`. A llama with experts is a Mixtral, and a deepseek2
# with sigmoid gates is a DeepSeek-V3.
_MODELS: Final[Mapping[str, str]] = {
    "llama": "llama",
    "smollm3": "smollm3",
    "granite": "granite",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "deepseek2": "deepseek_v2",
    "gpt-oss": "gpt_oss",
    "bert": "bert",
}
# In these architectures, llama.cpp reorders the rows of a rotated head.
PAIRED: Final = ("llama", "smollm3", "granite")
# In these, llama.cpp stores the weights of norms plus 1.
SHIFTED: Final = ("gemma", "gemma2", "gemma3")
_TOKEN_TYPES: Final = "tokenizer.ggml.token_type_count"
# Keys of config.json that are sizes -> key of GGUF, below the name of the architecture.
_SIZES: Final[Mapping[str, str]] = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "type_vocab_size": _TOKEN_TYPES,
}
_DEEPSEEK_SIZES: Final[Mapping[str, str]] = {
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
}
_NUMBERS: Final[Mapping[str, str]] = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
_REQUIRED: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads")
# The key of the number of experts, where it is not `num_experts`.
_EXPERTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("mixtral", "gpt_oss"), "num_local_experts"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "n_routed_experts"),
}
# Tensors of [1, embed] that GGUF stores as [embed].
ROWS: Final = (".shared_expert_gate.weight", "token_type_embeddings.weight")
# The tokenizer of RoBERTa, whose architecture is "bert" too. Its first rows of positions are cut
# off.
_BERT_TOKENIZER: Final = "bert"
_SIGMOID: Final = 2
_AGAIN: Final = "download the file again"


def config_of(header: Header, path: Path) -> dict[str, Any]:
    """Return the keys of a file in the words of `config.json`.

    Raises:
      CheckpointError: The model is not supported, or a key is absent or is not a size; all such
        keys are reported at once.
    """
    kind = str(header.keys.get("general.architecture"))
    if kind not in _MODELS:
        what = f"{path.name}: the architecture {kind!r} is not supported in GGUF"
        fix = f"use the safetensors of the model; GGUF is read for {', '.join(_MODELS)}"
        raise CheckpointError(what, fix=fix)
    tokenizer = header.keys.get("tokenizer.ggml.model")
    if kind == "bert" and tokenizer != _BERT_TOKENIZER:
        what = (
            f"{path.name}: a bert with the tokenizer {tokenizer!r}, as of RoBERTa, is not supported"
        )
        raise CheckpointError(what, fix="use the safetensors of the model")
    sizes = {**_SIZES, **_DEEPSEEK_SIZES} if kind == "deepseek2" else _SIZES
    named = {
        key: of if of == _TOKEN_TYPES else f"{kind}.{of}"
        for key, of in {**sizes, **_NUMBERS}.items()
    }
    config = {key: header.keys[of] for key, of in named.items() if of in header.keys}
    problems = [
        Problem(error=CheckpointError, what=f"{path.name} lacks {named[key]}", fix=_AGAIN)
        for key in _REQUIRED
        if key not in config
    ]
    for key in config.keys() & sizes.keys():
        size = as_integer(config[key])
        if size is None or size < 0 or (size == 0 and key in _REQUIRED):
            what = f"{path.name}: {named[key]} must be a positive integer, got {short(config[key])}"
            problems.append(Problem(error=CheckpointError, what=what, fix=_AGAIN))
    raise_problems(sorted(problems, key=lambda problem: problem.what))
    model = _MODELS[kind]
    if kind == "llama" and config.get("num_experts"):
        model = "mixtral"
    elif kind == "deepseek2":
        is_sigmoid = header.keys.get(f"{kind}.expert_gating_func") == _SIGMOID
        model = "deepseek_v3" if is_sigmoid else model
        config = {**config, **latent_sizes(header, path)}
        config.pop("head_dim", None)
        config.pop("num_key_value_heads", None)
    experts = _EXPERTS.get(model)
    if experts and "num_experts" in config:
        config[experts] = config.pop("num_experts")
    return {"model_type": model, **config}


def names_of(header: Header, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of Hugging Face for each name of GGUF, by the table of the package gguf.

    GGUF has the experts of a layer in one tensor, whose name has no expert number.
    """
    library = gguf_library()
    kind = header.keys["general.architecture"]
    architectures = {name: key for key, name in library.MODEL_ARCH_NAMES.items()}
    layers = config["num_hidden_layers"]
    table = library.get_tensor_name_map(architectures[kind], layers)
    family = FAMILIES[config["model_type"]]
    names: dict[str, str] = {}
    for row in family.rows():
        # A BERT has no head, so its names have no prefix.
        prefix = "" if row.startswith("lm_head") or kind == "bert" else family.prefix
        for layer in range(layers) if "#" in row else (0,):
            name = prefix + row.replace("#", str(layer))
            theirs = name.replace(".e_score_correction_bias", ".e_score_correction.bias")
            other = table.get_name(theirs, try_suffixes=(".weight", ".bias"))
            if other is not None:
                names.setdefault(other, name)
                if row.endswith("sinks"):
                    # Every tensor of GGUF ends in .weight or .bias.
                    names.setdefault(f"{other}.weight", name)
    return names


def gguf_library() -> Any:
    """Return the package gguf.

    Raises:
      ImportError: It is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise ImportError("GGUF files need gguf: python -m pip install gguf") from error
    return gguf
