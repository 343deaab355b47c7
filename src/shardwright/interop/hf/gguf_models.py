"""Models in GGUF: their keys in the words of `config.json`, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shardwright.errors import CheckpointError, Problem, raise_problems
from shardwright.interop.hf.families import FAMILIES
from shardwright.interop.hf.gguf_header import Header
from shardwright.vocabulary.integers import as_integer
from shardwright.vocabulary.lowering import short

# Their `general.architecture` -> `model_type`. A llama with experts is a Mixtral.
_MODELS: Final[Mapping[str, str]] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
}
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
}
_NUMBERS: Final[Mapping[str, str]] = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
_REQUIRED: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads")
# In these models, the key of the number of experts is `num_local_experts`.
_LOCAL_EXPERTS: Final = ("mixtral", "gpt_oss")
# Tensors of [1, embed] that GGUF stores as [embed].
ROWS: Final = (".shared_expert_gate.weight",)
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
    named = {key: f"{kind}.{of}" for key, of in {**_SIZES, **_NUMBERS}.items()}
    config = {key: header.keys[of] for key, of in named.items() if of in header.keys}
    problems = [
        Problem(error=CheckpointError, what=f"{path.name} lacks {named[key]}", fix=_AGAIN)
        for key in _REQUIRED
        if key not in config
    ]
    for key in config.keys() & _SIZES.keys():
        size = as_integer(config[key])
        if size is None or size < 0 or (size == 0 and key in _REQUIRED):
            what = f"{path.name}: {named[key]} must be a positive integer, got {short(config[key])}"
            problems.append(Problem(error=CheckpointError, what=what, fix=_AGAIN))
    raise_problems(sorted(problems, key=lambda problem: problem.what))
    model = "mixtral" if kind == "llama" and config.get("num_experts") else _MODELS[kind]
    if model in _LOCAL_EXPERTS and "num_experts" in config:
        config["num_local_experts"] = config.pop("num_experts")
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
        prefix = "" if row.startswith("lm_head") else family.prefix
        for layer in range(layers) if "#" in row else (0,):
            name = prefix + row.replace("#", str(layer))
            other = table.get_name(name, try_suffixes=(".weight", ".bias"))
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
