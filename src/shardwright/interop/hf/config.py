"""The sizes that `config.json` gives to the dims of tensors, and what it leaves out.

Hugging Face leaves out of a nested configuration, such as `text_config`, what equals the default of
its class. `transformers` 5.24 has these defaults, in `CONFIG_MAPPING[family]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from shardwright.errors import CheckpointError, Problem
from shardwright.vocabulary.axes import (
    EMBED,
    EMPTY,
    EXPERT,
    EXPERT_GATE,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    LAYERS,
    MLP_INTERMEDIATE,
    NORM,
    VOCAB,
)
from shardwright.vocabulary.integers import as_integer
from shardwright.vocabulary.lowering import short
from shardwright.vocabulary.merged_dims import merged

# Further problems of a checkpoint are counted: an unknown model may have 90,000 tensors.
MOST_PROBLEMS: Final = 20
OWN_CONFIG: Final = "use the config.json of this checkpoint"
# This many weights share one scale in MXFP4, the format of gpt-oss.
_MXFP4_BLOCK: Final = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SizedDim:
    """One dim of a tensor: its entry in an annotation, and its size; None for any size."""

    entry: Any
    size: int | None


def fault(what: str, name: str, fix: str = OWN_CONFIG) -> Problem:
    """Return a problem of the tensor or the parameter of this name."""
    return Problem(error=CheckpointError, what=what, path=name, fix=fix)


def size_of(config: Mapping[str, Any], *keys: str) -> int | None:
    """Return the first of several sizes that a configuration has, or None. Zero counts as absent.

    Raises:
      CheckpointError: It is not a positive integer.
    """
    for key in keys:
        value = config.get(key)
        size = None if value is None else as_integer(value)
        if value is not None and (size is None or size < 0):
            what = f"config.json: {key} must be a positive integer, got {short(value)}"
            raise CheckpointError(what, fix=OWN_CONFIG)
        if size:
            return size
    return None


def block_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the sizes of the blocks of weights that share a scale; none if there are no blocks.

    Raises:
      CheckpointError: They are not positive integers.
    """
    quantized = config.get("quantization_config") or {}
    block = quantized.get("weight_block_size") if isinstance(quantized, Mapping) else quantized
    if block is None:
        return ()
    sizes = [as_integer(size) for size in block] if isinstance(block, (list, tuple)) else [None]
    whole = tuple(size for size in sizes if size is not None and size > 0)
    if len(whole) != len(sizes):
        what = f"config.json: weight_block_size must be positive integers, got {short(block)}"
        raise CheckpointError(what, fix=OWN_CONFIG)
    return whole


def required_size(config: Mapping[str, Any], key: str) -> int:
    """Return a size of a configuration.

    Raises:
      CheckpointError: The configuration lacks it, or it is not a positive integer.
    """
    size = size_of(config, key)
    if size is None:
        raise CheckpointError(f"config.json lacks {key}", fix=OWN_CONFIG)
    return size


def dims_of(config: Mapping[str, Any]) -> dict[str, SizedDim]:
    """Return the dims of this model, by the words that the tables of families use."""
    embed = required_size(config, "hidden_size")
    experts = size_of(config, "num_local_experts", "num_experts", "n_routed_experts")
    mlp = size_of(config, "intermediate_size")
    # Mixtral and gpt-oss have experts alone, and name their size as that of an MLP.
    expert_mlp = size_of(config, "moe_intermediate_size", "intermediate_size")
    shared_mlp = size_of(config, "shared_expert_intermediate_size")
    if (shared := size_of(config, "n_shared_experts")) is not None:
        shared_mlp = shared * required_size(config, "moe_intermediate_size")
    dims = {
        "layers": (LAYERS, size_of(config, "num_hidden_layers")),
        "vocab": (VOCAB, size_of(config, "vocab_size")),
        "embed": (EMBED, embed),
        "norm": (NORM, embed),
        "mlp": (MLP_INTERMEDIATE, mlp),
        "experts": (EXPERT, experts),
        "router": (EXPERT_GATE, experts),
        "expert_mlp": (MLP_INTERMEDIATE, expert_mlp),
        # The experts that see every token.
        "shared_mlp": (MLP_INTERMEDIATE, shared_mlp),
        # The layers of DeepSeek-V3 that predict further tokens join two residuals.
        "two_embed": (EMPTY, 2 * embed),
        # Only BERT has tables of positions and of token types.
        "positions": (EMPTY, size_of(config, "max_position_embeddings")),
        "token_types": (EMPTY, size_of(config, "type_vocab_size")),
    }
    if expert_mlp is not None:
        # gpt-oss interleaves gate and up, and packs the weights of a block.
        dims["gate_up"] = (MLP_INTERMEDIATE, 2 * expert_mlp)
        dims["mlp_blocks"] = (MLP_INTERMEDIATE, -(-expert_mlp // _MXFP4_BLOCK))
        dims["embed_blocks"] = (EMBED, -(-embed // _MXFP4_BLOCK))
    dims |= _latent_heads(config) if config.get("kv_lora_rank") else _heads(config, embed)
    sized = {
        name: SizedDim(entry=entry, size=size)
        for name, (entry, size) in dims.items()
        if size is not None
    }
    return {**sized, "-": SizedDim(entry=EMPTY, size=None)}


def _heads(config: Mapping[str, Any], embed: int) -> dict[str, tuple[Any, int]]:
    """Return the dims of attention. A projection merges heads and head_dim into one dim."""
    heads = required_size(config, "num_attention_heads")
    # Without this key every head has its own keys and values.
    kv_heads = size_of(config, "num_key_value_heads") or heads
    head_dim = size_of(config, "head_dim")
    if head_dim is None:
        if embed % heads:
            what = f"config.json: hidden_size {embed} is not a multiple of the {heads} heads"
            raise CheckpointError(what, fix="write head_dim in config.json")
        head_dim = embed // heads
    return {
        "head": (HEAD, heads),
        "head_dim": (HEAD_DIM, head_dim),
        "kv_head_dim": (KV_HEAD_DIM, head_dim),
        "heads": (merged((HEAD, heads), (HEAD_DIM, head_dim)), heads * head_dim),
        "kv_heads": (merged((KV_HEAD, kv_heads), (KV_HEAD_DIM, head_dim)), kv_heads * head_dim),
    }


def _latent_heads(config: Mapping[str, Any]) -> dict[str, tuple[Any, int | None]]:
    """Return the dims of attention through latents (MLA). The latents are not sharded."""
    heads = required_size(config, "num_attention_heads")
    content, rope, value = (
        required_size(config, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    latent = required_size(config, "kv_lora_rank")

    # A projection merges the heads with a part of a head that only this projection has.
    def of_heads(size: int) -> tuple[Any, int]:
        return merged((HEAD, heads), (HEAD_DIM, size)), heads * size

    return {
        "q_latent": (EMPTY, size_of(config, "q_lora_rank")),
        "kv_latent": (EMPTY, latent),
        "kv_latent_rope": (EMPTY, latent + rope),
        "heads": of_heads(content + rope),
        "key_value_heads": of_heads(content + value),
        "value_heads": of_heads(value),
    }


# The keys that every configuration of a decoder alone has. Nobody may leave them out there.
_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_EXPERTS: Final = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
_SHAPE: Final = (*_SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings")


def _class(*shape: int | None, **others: Any) -> Mapping[str, Any]:
    values = dict(zip(_SHAPE, shape, strict=True))
    return MappingProxyType(values | others)


_LATENT: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
)
_GEMMA_3: Final = _class(
    262208, 2304, 9216, 26, 8, 4, 256, 131072, sliding_window=4096, tie_word_embeddings=True
)
# vocab, embed, mlp, layers, heads, kv heads (None: as many as heads), head dim (None: embed ÷
# heads), positions
DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama": _class(32000, 4096, 11008, 32, 32, None, None, 2048),
        "mistral": _class(32000, 4096, 14336, 32, 32, 8, None, 131072, sliding_window=4096),
        "qwen2": _class(
            151936, 4096, 22016, 32, 32, 32, None, 32768, sliding_window=4096, max_window_layers=28
        ),
        "qwen3": _class(
            151936, 4096, 22016, 32, 32, 32, 128, 32768, sliding_window=4096, max_window_layers=28
        ),
        "qwen2_moe": _class(
            *(151936, 2048, 5632, 24, 16, 16, None, 32768),
            sliding_window=4096,
            max_window_layers=28,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
        ),
        "qwen3_moe": _class(
            *(151936, 2048, 6144, 24, 32, 4, None, 32768),
            sliding_window=4096,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
        ),
        "gemma": _class(256000, 3072, 24576, 28, 16, 16, 256, 8192, tie_word_embeddings=True),
        "gemma2": _class(
            *(256000, 2304, 9216, 26, 8, 4, 256, 8192),
            sliding_window=4096,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
            tie_word_embeddings=True,
        ),
        "gemma3": _GEMMA_3,
        "gemma3_text": _GEMMA_3,
        "mixtral": _class(
            *(32000, 4096, 14336, 32, 32, 8, None, 131072),
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        "deepseek_v2": _class(
            *(102400, 4096, 11008, 32, 32, None, None, 2048),
            **_LATENT,
            n_routed_experts=64,
            n_shared_experts=2,
            moe_intermediate_size=1407,
        ),
        "deepseek_v3": _class(
            *(129280, 7168, 18432, 61, 128, 128, None, 4096),
            **_LATENT,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            moe_intermediate_size=2048,
            first_k_dense_replace=3,
            n_group=8,
            topk_group=4,
            scoring_func="sigmoid",
        ),
        "gpt_oss": _class(
            *(201088, 2880, 2880, 36, 64, 8, 64, 131072),
            sliding_window=128,
            num_local_experts=128,
            num_experts_per_tok=4,
            attention_bias=True,
        ),
    }
)


def complete(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values of the decoder's configuration, and notes on those that it does not have.

    A nested `text_config` lacks what equals a class default, and what the configuration around it
    says: dtype, quantization and tied embeddings. What `text_config` says counts first, then the
    outer configuration, then the class default. Where nothing is nested, sizes are required.
    """
    nested = values.get("text_config")
    if not isinstance(nested, Mapping):
        own = dict(values)
        return _filled(own, "the default of its class", skip=(*_SIZES, *_EXPERTS))
    own = {"model_type": values["model_type"], **nested}
    # `dtype` is the newer name of `torch_dtype`.
    skip = ("torch_dtype", "dtype") if own.get("torch_dtype") or own.get("dtype") else ()
    outer = {key: value for key, value in values.items() if key not in skip}
    taken = {key: value for key, value in outer.items() if own.get(key) is None}
    own, notes = _filled({**own, **taken}, "text_config has none: the default of its class")
    sizes = [f"{key} {value}" for key, value in taken.items() if key in (*_SHAPE, *_EXPERTS)]
    if sizes:
        notes = (f"{', '.join(sizes)}: text_config has none: outside of it", *notes)
    return own, ("only the decoder of text is planned, not the model's other parts", *notes)


def _filled(
    values: dict[str, Any], why: str, *, skip: tuple[str, ...] = ()
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Add class defaults, with a note on those that are sizes."""
    # A family without a row has no defaults here: its configuration must be whole.
    known = dict(DEFAULTS.get(values["model_type"], {}))
    heads, kv_heads = values.get("num_attention_heads"), known.get("num_key_value_heads")
    if type(heads) is int and kv_heads and heads % kv_heads:
        # The default is that of a model with other heads.
        known["num_key_value_heads"], why = heads, f"{why}, but as many kv_heads as heads"
    taken = {key: value for key, value in known.items() if key not in values and key not in skip}
    sizes = [f"{key} {value}" for key, value in taken.items() if as_integer(value) is not None]
    return {**values, **taken}, ((f"{', '.join(sizes)}: {why}",) if sizes else ())
