"""The tensors of each family of models, and the dims of each, in the order of the file.

`#` is a number. The words are dims of `config.dims_of`; `-` is a dim of any size that is not
sharded. A tensor that a model may lack ends in `?`. Linear layers are [out, in], as in PyTorch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from shardwright.errors import CheckpointError, same_spelling

NameRows = Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The tensors of a family.

    Attributes:
      name: Name of the family.
      prefix: Start of the names in a model with a head, except those of the head. In a model
        without a head, names lack it.
      layers: What the names of a layer start with, after the prefix.
      whole: Tensors outside the layers.
      layer: Tensors of a layer that are not part of a choice.
      choices: Kinds of attention, and kinds of feed-forward blocks; a layer has one of each.
    """

    name: str
    prefix: str
    layers: str
    whole: NameRows
    layer: NameRows
    choices: tuple[tuple[NameRows, ...], ...]

    def rows(self) -> dict[str, str]:
        """Return the rows of all tensors, with and without stacked experts and layers."""
        rows = dict(self.whole)
        for part in (self.layer, *itertools.chain(*self.choices)):
            rows |= {f"{self.layers}{name}": dims for name, dims in part.items()}
        stacked = {
            name.replace("experts.#.", "experts."): f"experts {dims}"
            for name, dims in rows.items()
            if "experts.#." in name
        }
        rows |= stacked
        layers = {
            name.replace("#.", "", 1): f"layers {dims}"
            for name, dims in rows.items()
            if name.startswith(self.layers)
        }
        return rows | layers


def _linear(name: str, dims: str) -> dict[str, str]:
    """Return the rows of a linear layer. Its bias follows its output."""
    output = dims.partition(" ")[0]
    return {f"{name}.weight": dims, f"{name}.bias": f"{output} ?"}


def _optional(rows: NameRows) -> dict[str, str]:
    return {name: dims if dims.endswith("?") else f"{dims} ?" for name, dims in rows.items()}


def _norm(name: str, dim: str = "norm") -> dict[str, str]:
    return {f"{name}.weight": dim}


def _gated(name: str, dim: str) -> dict[str, str]:
    """Return the rows of a gated feed-forward block."""
    return {
        **_linear(f"{name}.gate_proj", f"{dim} embed"),
        **_linear(f"{name}.up_proj", f"{dim} embed"),
        **_linear(f"{name}.down_proj", f"embed {dim}"),
    }


_WHOLE: NameRows = {
    "embed_tokens.weight": "vocab embed",
    "norm.weight": "norm",
    # Absent if it is tied to the embedding.
    "lm_head.weight": "vocab embed ?",
}
_NORMS = {**_norm("input_layernorm"), **_norm("post_attention_layernorm")}
# Buffers that old checkpoints have.
_BUFFERS: NameRows = {"self_attn.rotary_emb.inv_freq": "- ?"}
_ATTENTION = {
    **_linear("self_attn.q_proj", "heads embed"),
    **_linear("self_attn.k_proj", "kv_heads embed"),
    **_linear("self_attn.v_proj", "kv_heads embed"),
    **_linear("self_attn.o_proj", "embed heads"),
}
_HEAD_NORMS = _optional(
    {**_norm("self_attn.q_norm", "head_dim"), **_norm("self_attn.k_norm", "kv_head_dim")}
)
_DENSE = _gated("mlp", "mlp")
_DECODER = {**_NORMS, **_ATTENTION, **_BUFFERS}
_ROUTED = {"mlp.gate.weight": "router embed", **_gated("mlp.experts.#", "expert_mlp")}

_BIASED = {**_ROUTED, "mlp.gate.e_score_correction_bias": "router ?"}


def _decoder(name: str, layer: NameRows = _DECODER, *choices: tuple[NameRows, ...]) -> Family:
    return Family(
        name=name,
        prefix="model.",
        layers="layers.#.",
        whole=_WHOLE,
        layer=layer,
        choices=choices or ((_DENSE,),),
    )


_LLAMA = _decoder("llama")
_QWEN = _decoder("qwen", {**_DECODER, **_HEAD_NORMS})
_QWEN_MOE = _decoder(
    "qwen",
    {**_DECODER, **_HEAD_NORMS},
    (
        _DENSE,
        _ROUTED,
        {
            **_ROUTED,
            **_gated("mlp.shared_expert", "shared_mlp"),
            "mlp.shared_expert_gate.weight": "- embed",
        },
    ),
)
_GEMMA = _decoder(
    "gemma",
    {
        **_DECODER,
        **_HEAD_NORMS,
        **_optional(_norm("pre_feedforward_layernorm")),
        **_optional(_norm("post_feedforward_layernorm")),
    },
)
_MIXTRAL = _decoder(
    "mixtral",
    _DECODER,
    (
        {
            "block_sparse_moe.gate.weight": "router embed",
            "block_sparse_moe.experts.#.w1.weight": "expert_mlp embed",
            "block_sparse_moe.experts.#.w2.weight": "embed expert_mlp",
            "block_sparse_moe.experts.#.w3.weight": "expert_mlp embed",
        },
    ),
)
_DEEPSEEK = _decoder(
    "deepseek",
    {
        **_NORMS,
        **_BUFFERS,
        **_linear("self_attn.kv_a_proj_with_mqa", "kv_latent_rope embed"),
        **_norm("self_attn.kv_a_layernorm", "kv_latent"),
        **_linear("self_attn.kv_b_proj", "key_value_heads kv_latent"),
        **_linear("self_attn.o_proj", "embed value_heads"),
        # Only the layers after `num_hidden_layers`, which predict further tokens, have these.
        "embed_tokens.weight": "vocab embed ?",
        "enorm.weight": "norm ?",
        "hnorm.weight": "norm ?",
        "eh_proj.weight": "embed two_embed ?",
        "shared_head.norm.weight": "norm ?",
        "shared_head.head.weight": "vocab embed ?",
    },
    (
        _linear("self_attn.q_proj", "heads embed"),
        {
            **_linear("self_attn.q_a_proj", "q_latent embed"),
            **_norm("self_attn.q_a_layernorm", "q_latent"),
            **_linear("self_attn.q_b_proj", "heads q_latent"),
        },
    ),
    (
        _DENSE,
        _BIASED,
        {**_BIASED, **_gated("mlp.shared_experts", "shared_mlp")},
    ),
)
_ROUTER = {"mlp.router.weight": "router embed", "mlp.router.bias": "router"}
_EXPERT_BIASES: NameRows = {
    "mlp.experts.gate_up_proj_bias": "experts gate_up",
    "mlp.experts.down_proj_bias": "experts embed",
}
_GPT_OSS = _decoder(
    "gpt-oss",
    {**_DECODER, "self_attn.sinks": "head"},
    (
        # In MXFP4: 32 weights are 16 bytes and a scale.
        {
            **_ROUTER,
            **_EXPERT_BIASES,
            "mlp.experts.gate_up_proj_blocks": "experts gate_up embed_blocks -",
            "mlp.experts.gate_up_proj_scales": "experts gate_up embed_blocks",
            "mlp.experts.down_proj_blocks": "experts embed mlp_blocks -",
            "mlp.experts.down_proj_scales": "experts embed mlp_blocks",
        },
        # As floats these are [experts, in, out].
        {
            **_ROUTER,
            **_EXPERT_BIASES,
            "mlp.experts.gate_up_proj": "experts embed gate_up",
            "mlp.experts.down_proj": "experts expert_mlp embed",
        },
    ),
)


def _normed(name: str) -> dict[str, str]:
    return {f"{name}.LayerNorm.weight": "norm", f"{name}.LayerNorm.bias": "norm"}


# [out, in] of one size: only the input is named EMBED, because an axis occurs once in a tensor.
_SQUARE = "- embed"
_BERT = Family(
    name="bert",
    prefix="bert.",
    layers="encoder.layer.#.",
    whole={
        "embeddings.word_embeddings.weight": "vocab embed",
        "embeddings.position_embeddings.weight": "positions embed",
        "embeddings.token_type_embeddings.weight": "token_types embed",
        "embeddings.position_ids": "- - ?",
        **_normed("embeddings"),
        **_optional(_linear("pooler.dense", _SQUARE)),
        **_optional(_linear("cls.predictions.transform.dense", _SQUARE)),
        **_optional(_normed("cls.predictions.transform")),
        "cls.predictions.bias": "vocab ?",
        **_optional(_linear("cls.predictions.decoder", "vocab embed")),
        **_optional(_linear("cls.seq_relationship", "- embed")),
        **_optional(_linear("classifier", "- embed")),
        **_optional(_linear("qa_outputs", "- embed")),
    },
    layer={
        **_linear("attention.self.query", "heads embed"),
        **_linear("attention.self.key", "kv_heads embed"),
        **_linear("attention.self.value", "kv_heads embed"),
        **_linear("attention.output.dense", "embed heads"),
        **_normed("attention.output"),
        **_linear("intermediate.dense", "mlp embed"),
        **_linear("output.dense", "embed mlp"),
        **_normed("output"),
    },
    choices=(),
)

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "smollm3", "granite"), _LLAMA),
        **dict.fromkeys(("qwen2", "qwen3"), _QWEN),
        **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _QWEN_MOE),
        **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _GEMMA),
        "mixtral": _MIXTRAL,
        **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _DEEPSEEK),
        "gpt_oss": _GPT_OSS,
        "bert": _BERT,
    }
)


_TEXT_FIX: Final = (
    "save the decoder of text alone, with transformers:\n"
    "whole = AutoModelForImageTextToText.from_pretrained(folder)\n"
    "text = AutoModelForCausalLM.from_config(whole.config.text_config)\n"
    "text.model.load_state_dict(whole.model.language_model.state_dict())\n"
    "text.lm_head.load_state_dict(whole.lm_head.state_dict())\n"
    'text.save_pretrained("text")'
)


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of the model that a `config.json` describes.

    Raises:
      CheckpointError: Its `model_type` is absent or unknown.
    """
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    known = ", ".join(FAMILIES)
    parts = [key for key in ("text_config", "vision_config", "audio_config") if config.get(key)]
    if parts:
        raise CheckpointError(
            f"config.json: the model {kind!r} is more than a decoder of text: it has "
            f"{', '.join(parts)}. The tensors of such models cannot be read",
            fix=_TEXT_FIX,
        )
    meant = same_spelling(kind, FAMILIES) if isinstance(kind, str) else ""
    hint = f" ({meant})" if meant else ""
    raise CheckpointError(
        f"config.json: the model_type {kind!r} is unknown{hint}",
        fix=f"the known ones are {known}\n"
        "if the tensors have the names of one of these, write it as model_type",
    )
