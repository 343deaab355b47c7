"""The sizes that `config.json` gives to the dims of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shardwright.errors import CheckpointError
from shardwright.strategy.foreign_files import read_json
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

_FIX: Final = "use the config.json of this checkpoint"
# This many weights share one scale in MXFP4, the format of gpt-oss.
_MXFP4_BLOCK: Final = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SizedDim:
    """One dim of a tensor: its entry in an annotation, and its size; None for any size."""

    entry: Any
    size: int | None


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of `config.json`.

    Raises:
      CheckpointError: The file is absent, cannot be read, or is not a JSON object.
    """
    fix = "pass the folder that has config.json beside the weights"
    config = read_json(path, error=CheckpointError, fix=fix)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object", fix=fix)
    return config


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
            raise CheckpointError(what, fix=_FIX)
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
        raise CheckpointError(what, fix=_FIX)
    return whole


def required_size(config: Mapping[str, Any], key: str) -> int:
    """Return a size of a configuration.

    Raises:
      CheckpointError: The configuration lacks it, or it is not a positive integer.
    """
    size = size_of(config, key)
    if size is None:
        raise CheckpointError(f"config.json lacks {key}", fix=_FIX)
    return size


def dims_of(config: Mapping[str, Any]) -> dict[str, SizedDim]:
    """Return the dims of this model, by the words that the tables of families use."""
    embed = required_size(config, "hidden_size")
    experts = size_of(config, "num_local_experts", "num_experts", "n_routed_experts")
    mlp = size_of(config, "intermediate_size")
    expert_mlp = size_of(config, "moe_intermediate_size", "intermediate_size")
    dims = {
        "layers": (LAYERS, size_of(config, "num_hidden_layers")),
        "vocab": (VOCAB, size_of(config, "vocab_size")),
        "embed": (EMBED, embed),
        "norm": (NORM, embed),
        "mlp": (MLP_INTERMEDIATE, mlp),
        "experts": (EXPERT, experts),
        "router": (EXPERT_GATE, experts),
        "expert_mlp": (MLP_INTERMEDIATE, expert_mlp),
        "shared_mlp": (MLP_INTERMEDIATE, _shared_mlp(config)),
        "two_embed": (EMPTY, 2 * embed),
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


def _shared_mlp(config: Mapping[str, Any]) -> int | None:
    """Return the hidden size of the experts that see every token."""
    shared = size_of(config, "n_shared_experts")
    if shared is not None:
        return shared * required_size(config, "moe_intermediate_size")
    return size_of(config, "shared_expert_intermediate_size")


def _heads(config: Mapping[str, Any], embed: int) -> dict[str, tuple[Any, int]]:
    """Return the dims of attention. A projection merges heads and head_dim into one dim."""
    heads = required_size(config, "num_attention_heads")
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
