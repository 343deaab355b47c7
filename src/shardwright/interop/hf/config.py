"""The sizes of tensors' dims, from `config.json` and the defaults of its configuration class.

In a nested configuration, such as `text_config`, Hugging Face leaves out values that equal the
default of the class. `DEFAULTS` has these defaults, from `CONFIG_MAPPING[family]` of `transformers`
5.24.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from shardwright.errors import CheckpointError, Problem, ShardingError
from shardwright.layers.dtypes import FLOAT32, Dtypes
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
from shardwright.vocabulary.integers import as_integer, quoted
from shardwright.vocabulary.merged_dims import merged

# List at most this many problems of a checkpoint, because an unknown model may have 90,000 tensors.
# The others are only counted.
MOST_PROBLEMS: Final = 20
OWN_CONFIG: Final = "use the config.json of this checkpoint"
# Number of weights that share one scale in MXFP4, the format of gpt-oss.
_MXFP4_BLOCK: Final = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SizedDim:
    """One dim of a tensor: its entry in an annotation, and its size (None if any size fits)."""

    entry: Any
    size: int | None


def fault(what: str, name: str, fix: str = OWN_CONFIG) -> Problem:
    """Return a problem of the tensor or the parameter of this name."""
    return Problem(error=CheckpointError, what=what, path=name, fix=fix)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The values of a `config.json`, which are read key by key.

    Attributes:
      values: The content of the file.
      source: Name of the file.
      error: Class of the error that a wrong value raises.
      dtypes: Dtypes of the decoder that is built from the configuration.
      capacity: Capacity factor of the experts of the decoder. None: no token is dropped.
    """

    values: Mapping[str, Any]
    source: str = "config.json"
    error: type[ShardingError] = CheckpointError
    dtypes: Dtypes = FLOAT32
    capacity: float | None = None

    @property
    def family(self) -> str:
        """The `model_type`."""
        return self.text("model_type") or ""

    def wrong(self, key: str, value: Any, wanted: str) -> ShardingError:
        """Return the error for a value that is absent or is not what is `wanted`."""
        what = f"{self.source}: {key} must be {wanted}, got {quoted(value)}"
        return self.error(
            f"{self.source} lacks {key}" if value is None else what,
            fix=f'copy "{key}" from the config.json that the model was published with',
        )

    def size(self, *keys: str) -> int | None:
        """Return the first size that is present, or None. Zero counts as absent."""
        for key in keys:
            value = self.values.get(key)
            size = 0 if value is None else as_integer(value)
            if size is None or size < 0:
                raise self.wrong(key, value, "a positive integer, or 0 for none")
            if size:
                return size
        return None

    def number(self, key: str, default: int | None = None) -> int:
        """Return the positive integer at a key, or `default` if the key is absent."""
        value = self.values.get(key)
        value = default if value is None else as_integer(value)
        if value is None or value < 1:
            raise self.wrong(key, self.values.get(key), "a positive integer")
        return value

    def real(self, key: str, given: Any = None) -> float | None:
        """Return a positive number: `given`, else the value of the key. None if both are absent."""
        value = self.values.get(key) if given is None else given
        if value is None:
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def mapping(self, *keys: str) -> Mapping[str, Any]:
        """Return the mapping at a path of keys; an empty one if it is absent."""
        found = self.values
        for at, key in enumerate(keys):
            value = found.get(key)
            if value is not None and not isinstance(value, Mapping):
                raise self.wrong(".".join(keys[: at + 1]), value, "a JSON object")
            found = value or {}
        return found

    def text(self, *keys: str) -> str | None:
        """Return the text at a path of keys, or None."""
        value = self.mapping(*keys[:-1]).get(keys[-1])
        if value is not None and not isinstance(value, str):
            raise self.wrong(".".join(keys), value, "a text")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return whether a key is true."""
        value = self.values.get(key)
        return default if value is None else bool(value)


def block_of(config: Config) -> tuple[int, ...]:
    """Return the sizes of a block of weights that share one scale; empty if there are no blocks.

    Raises:
      CheckpointError: The sizes are not positive integers.
    """
    block = config.mapping("quantization_config").get("weight_block_size")
    sizes = [as_integer(size) for size in block] if isinstance(block, (list, tuple)) else [None]
    whole = tuple(size for size in sizes if size is not None and size > 0)
    if block is not None and len(whole) != len(sizes):
        raise config.wrong("weight_block_size", block, "positive integers")
    return whole


def dims_of(config: Config) -> dict[str, SizedDim]:
    """Return the dims of a model, each by its word in the tables of `families`."""
    embed = config.number("hidden_size")
    experts = config.size("num_local_experts", "num_experts", "n_routed_experts")
    mlp = config.size("intermediate_size")
    # Mixtral and gpt-oss have only experts. Their configurations have the hidden size of an expert
    # under the key for an MLP.
    expert_mlp = config.size("moe_intermediate_size", "intermediate_size")
    shared_mlp = config.size("shared_expert_intermediate_size")
    if (shared := config.size("n_shared_experts")) is not None:
        shared_mlp = shared * config.number("moe_intermediate_size")
    dims = {
        "layers": (LAYERS, config.size("num_hidden_layers")),
        "vocab": (VOCAB, config.size("vocab_size")),
        "embed": (EMBED, embed),
        "norm": (NORM, embed),
        "mlp": (MLP_INTERMEDIATE, mlp),
        "experts": (EXPERT, experts),
        "router": (EXPERT_GATE, experts),
        "expert_mlp": (MLP_INTERMEDIATE, expert_mlp),
        # The shared experts, which see every token.
        "shared_mlp": (MLP_INTERMEDIATE, shared_mlp),
        # In DeepSeek-V3, layers that predict further tokens concatenate two residuals.
        "two_embed": (EMPTY, 2 * embed),
        # Only BERT has tables of positions and of token types.
        "positions": (EMPTY, config.size("max_position_embeddings")),
        "token_types": (EMPTY, config.size("type_vocab_size")),
    }
    if expert_mlp is not None:
        # gpt-oss interleaves gate and up, and packs the weights that share one scale.
        dims["gate_up"] = (MLP_INTERMEDIATE, 2 * expert_mlp)
        dims["mlp_blocks"] = (MLP_INTERMEDIATE, -(-expert_mlp // _MXFP4_BLOCK))
        dims["embed_blocks"] = (EMBED, -(-embed // _MXFP4_BLOCK))
    dims |= _latent_heads(config) if config.values.get("kv_lora_rank") else _heads(config, embed)
    sized = {
        name: SizedDim(entry=entry, size=size)
        for name, (entry, size) in dims.items()
        if size is not None
    }
    return {**sized, "-": SizedDim(entry=EMPTY, size=None)}


def _heads(config: Config, embed: int) -> dict[str, tuple[Any, int]]:
    """Return the dims of attention. A projection merges heads and head_dim into one dim."""
    heads = config.number("num_attention_heads")
    # Without this key, every head has its own keys and values.
    kv_heads = config.size("num_key_value_heads") or heads
    head_dim = config.size("head_dim")
    if head_dim is None:
        if embed % heads:
            what = f"{config.source}: hidden_size {embed} is not a multiple of the {heads} heads"
            raise config.error(what, fix="write head_dim in config.json")
        head_dim = embed // heads
    return {
        "head": (HEAD, heads),
        "head_dim": (HEAD_DIM, head_dim),
        "kv_head_dim": (KV_HEAD_DIM, head_dim),
        "heads": (merged((HEAD, heads), (HEAD_DIM, head_dim)), heads * head_dim),
        "kv_heads": (merged((KV_HEAD, kv_heads), (KV_HEAD_DIM, head_dim)), kv_heads * head_dim),
    }


def _latent_heads(config: Config) -> dict[str, tuple[Any, int | None]]:
    """Return the dims of attention through latents (MLA). The latents are not sharded."""
    heads = config.number("num_attention_heads")
    content, rope, value = (
        config.number(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    latent = config.number("kv_lora_rank")

    # Each projection merges the heads with a head size of its own.
    def of_heads(size: int) -> tuple[Any, int]:
        return merged((HEAD, heads), (HEAD_DIM, size)), heads * size

    return {
        "q_latent": (EMPTY, config.size("q_lora_rank")),
        "kv_latent": (EMPTY, latent),
        "kv_latent_rope": (EMPTY, latent + rope),
        "heads": of_heads(content + rope),
        "key_value_heads": of_heads(content + value),
        "value_heads": of_heads(value),
    }


# The keys that a configuration without a `text_config` must have.
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
# The columns are vocab, embed, mlp, layers, heads, kv heads (None: as many as heads), head dim
# (None: embed ÷ heads) and positions.
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


def complete(config: Config) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values of the decoder's configuration, and notes on values that were filled in.

    A nested `text_config` may leave out values that equal class defaults. Dtype, quantization and
    tied embeddings may also be missing, because they are values of the outer configuration. A value
    is taken from `text_config`, else from the outer configuration, else from the class default.
    Without a `text_config`, sizes are required.

    Raises:
      ShardingError: `text_config` is not a JSON object, or a `model_type` is not text.
    """
    values, nested = config.values, config.mapping("text_config")
    if values.get("text_config") is None:
        own = dict(values)
        return _filled(own, "class defaults", skip=(*_SIZES, *_EXPERTS))
    own = {**nested, "model_type": config.text("text_config", "model_type") or config.family}
    # `dtype` is the newer name of `torch_dtype`.
    skip = ("torch_dtype", "dtype") if own.get("torch_dtype") or own.get("dtype") else ()
    outer = {key: value for key, value in values.items() if key not in skip}
    taken = {key: value for key, value in outer.items() if own.get(key) is None}
    own, notes = _filled({**own, **taken}, "not in text_config, so class defaults")
    sizes = [f"{key} {value}" for key, value in taken.items() if key in (*_SHAPE, *_EXPERTS)]
    if sizes:
        notes = (f"{', '.join(sizes)}: not in text_config, but outside of it", *notes)
    return own, ("only the text decoder is planned, not the model's other parts", *notes)


def _filled(
    values: dict[str, Any], why: str, *, skip: tuple[str, ...] = ()
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Add class defaults. Return the values, and a note that lists the sizes that were added."""
    # A family that is not in `DEFAULTS` has no defaults: its configuration must have all values.
    known = dict(DEFAULTS.get(values["model_type"], {}))
    heads, kv_heads = values.get("num_attention_heads"), known.get("num_key_value_heads")
    if type(heads) is int and kv_heads and heads % kv_heads:
        # Do not use the default number of kv heads: it belongs to a model with another number of
        # heads.
        known["num_key_value_heads"], why = heads, f"{why} (kv_heads = heads)"
    taken = {key: value for key, value in known.items() if key not in values and key not in skip}
    sizes = [f"{key} {value}" for key, value in taken.items() if as_integer(value) is not None]
    return {**values, **taken}, ((f"{', '.join(sizes)}: {why}",) if sizes else ())
