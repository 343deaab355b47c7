"""What a configuration leaves out: class defaults, and keys of a model around the decoder.

Hugging Face leaves out of a nested configuration, such as `text_config`, what equals the default of
its class. `transformers` 5.24 has these defaults, in `CONFIG_MAPPING[family]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from shardwright.vocabulary.integers import as_integer

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
    known = dict(DEFAULTS.get(values["model_type"], {}))
    heads, kv_heads = values.get("num_attention_heads"), known.get("num_key_value_heads")
    if type(heads) is int and kv_heads and heads % kv_heads:
        # The default is that of a model with other heads.
        known["num_key_value_heads"], why = heads, f"{why}, but as many kv_heads as heads"
    taken = {key: value for key, value in known.items() if key not in values and key not in skip}
    sizes = [f"{key} {value}" for key, value in taken.items() if as_integer(value) is not None]
    return {**values, **taken}, ((f"{', '.join(sizes)}: {why}",) if sizes else ())
