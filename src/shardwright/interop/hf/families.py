"""The families of models, by the `model_type` of their `config.json`.

A row of `FAMILIES` says which tensors a checkpoint has, which of them are the parameters of the
decoder, and how the configuration becomes the configs of the decoder's blocks. `config.DEFAULTS`
has the values that a configuration may leave out.

In the tables of tensors, `#` is a number. The words are the dims of the stored tensor, in order, as
`config.dims_of` names them; `-` is a dim of any size that is not sharded. A tensor that a model may
lack ends in `?`. Linear layers are [out, in], as in PyTorch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from shardwright.errors import CheckpointError, LayerError, StrategyError, same_spelling
from shardwright.interop.hf.config import Config, complete
from shardwright.interop.hf.model import sizes as readers_of
from shardwright.interop.hf.model.sizes import Sizes
from shardwright.layers.dtypes import Dtypes
from shardwright.strategy.foreign_files import read_json

NameRows = Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """The tensors of a family.

    Attributes:
      name: Name of the family.
      prefix: Prefix of the names of all tensors except the head, in a model with a head. In a model
        without a head, no name has this prefix.
      layers: Start of the names of the tensors of a layer, after the prefix.
      whole: Tensors outside the layers.
      layer: Tensors that every kind of layer has.
      choices: All kinds of attention, and all kinds of feed-forward blocks. A layer has one kind of
        each.
      parameters: Path of a parameter -> the names of its tensors. If a layer has the parameter, it
        is the path inside the layer. Several tensors of one parameter are stacked. `a | b` means a,
        or b if a is absent.
    """

    name: str
    prefix: str
    layers: str
    whole: NameRows
    layer: NameRows
    choices: tuple[tuple[NameRows, ...], ...]
    parameters: Mapping[str, tuple[str, ...]]

    def rows(self) -> dict[str, str]:
        """Return the rows of all tensors, and the rows of the stacks of experts and layers."""
        rows = dict(self.whole)
        for part in (self.layer, *itertools.chain(*self.choices)):
            rows |= {f"{self.layers}{name}": dims for name, dims in part.items()}
        # The stack of the experts of a layer has no expert number.
        stacked = {
            name.replace("experts.#.", "experts."): f"experts {dims}"
            for name, dims in rows.items()
            if "experts.#." in name
        }
        rows |= stacked
        # The stack of a tensor over all layers has no layer number in its name.
        layers = {
            name.replace("#.", "", 1): f"layers {dims}"
            for name, dims in rows.items()
            if name.startswith(self.layers)
        }
        return rows | layers


def _linear(name: str, dims: str) -> dict[str, str]:
    """Return the rows of a linear layer: its weight and its bias, which has the output dim."""
    # [out, in]: the first dim is the output.
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
    # The head is absent if it is tied to the embedding.
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


def _parameters(kernels: Mapping[str, str], weights: Mapping[str, str]) -> dict[str, Any]:
    """Return the names of the tensors of each parameter. A kernel also has a bias."""
    names: dict[str, tuple[str, ...]] = {}
    for path, listed in kernels.items():
        names[f"{path}/kernel"] = tuple(f"{name}.weight" for name in listed.split())
        names[f"{path}/bias"] = tuple(f"{name}.bias" for name in listed.split())
    return names | {path: (name,) for path, name in weights.items()}


# The parameters of `shardwright.layers`, in a layer and outside of the layers.
_PARAMETERS = _parameters(
    {
        **{f"attention/{name}": f"self_attn.{name[0]}_proj" for name in ("query", "key", "value")},
        "attention/out": "self_attn.o_proj",
        "mlp/up": "mlp.gate_proj mlp.up_proj",
        "mlp/down": "mlp.down_proj",
    },
    {
        "embedding": "embed_tokens.weight",
        "norm/scale": "norm.weight",
        "head": "lm_head.weight",
        "attention/norm/scale": "input_layernorm.weight",
        "attention/query_norm/scale": "self_attn.q_norm.weight",
        "attention/key_norm/scale": "self_attn.k_norm.weight",
        "attention/sinks/logits": "self_attn.sinks",
        "mlp/norm/scale": "post_attention_layernorm.weight",
        "mlp/moe/router": "mlp.gate.weight",
        "router_bias": "mlp.gate.e_score_correction_bias",
        **{f"mlp/moe/{part}": f"mlp.experts.{part}_proj.weight" for part in ("gate", "up", "down")},
        **{
            f"mlp/moe/shared_{part}": f"mlp.shared_experts.{part}_proj.weight"
            for part in ("gate", "up", "down")
        },
    },
)
# Gemma 2 and 3 have norms after both blocks, so the norm before the MLP has another name.
_NORMS_AFTER = {
    "after_attention/scale": ("post_attention_layernorm.weight",),
    "mlp/norm/scale": ("pre_feedforward_layernorm.weight",),
    "after_mlp/scale": ("post_feedforward_layernorm.weight",),
}
_MIXTRAL_EXPERTS = {
    "mlp/moe/router": ("block_sparse_moe.gate.weight",),
    "mlp/moe/gate": ("block_sparse_moe.experts.w1.weight",),
    "mlp/moe/down": ("block_sparse_moe.experts.w2.weight",),
    "mlp/moe/up": ("block_sparse_moe.experts.w3.weight",),
}
# Keys and values of all heads are one projection of the latent.
_LATENT = {
    "attention/down": ("self_attn.kv_a_proj_with_mqa.weight",),
    "attention/down_norm/scale": ("self_attn.kv_a_layernorm.weight",),
    "attention/key": ("self_attn.kv_b_proj.weight",),
    "attention/value": ("self_attn.kv_b_proj.weight",),
    "attention/out": ("self_attn.o_proj.weight",),
    "attention/query_down": ("self_attn.q_a_proj.weight",),
    "attention/query_norm/scale": ("self_attn.q_a_layernorm.weight",),
    # Large models have a latent of the queries too.
    "attention/query": ("self_attn.q_b_proj.weight | self_attn.q_proj.weight",),
}


def _decoder(
    name: str,
    layer: NameRows = _DECODER,
    *choices: tuple[NameRows, ...],
    parameters: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> Tensors:
    return Tensors(
        name=name,
        prefix="model.",
        layers="layers.#.",
        whole=_WHOLE,
        layer=layer,
        choices=choices or ((_DENSE,),),
        parameters={**_PARAMETERS, **parameters},
    )


LLAMA_TENSORS = _decoder("llama")
QWEN_TENSORS = _decoder("qwen", {**_DECODER, **_HEAD_NORMS})
# A layer is dense, or has experts, or has experts and a gated shared expert.
QWEN_MOE_TENSORS = _decoder(
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
GEMMA_TENSORS = _decoder(
    "gemma",
    {
        **_DECODER,
        **_HEAD_NORMS,
        **_optional(_norm("pre_feedforward_layernorm")),
        **_optional(_norm("post_feedforward_layernorm")),
    },
)
GEMMA_2_TENSORS = dataclasses.replace(GEMMA_TENSORS, parameters={**_PARAMETERS, **_NORMS_AFTER})
# w1, w2 and w3 are gate, down and up.
MIXTRAL_TENSORS = _decoder(
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
    parameters=_MIXTRAL_EXPERTS,
)
# DeepSeek has latent attention. The queries of its small model have no latent.
DEEPSEEK_TENSORS = _decoder(
    "deepseek",
    {
        **_NORMS,
        **_BUFFERS,
        **_linear("self_attn.kv_a_proj_with_mqa", "kv_latent_rope embed"),
        **_norm("self_attn.kv_a_layernorm", "kv_latent"),
        **_linear("self_attn.kv_b_proj", "key_value_heads kv_latent"),
        **_linear("self_attn.o_proj", "embed value_heads"),
        # Only the layers after `num_hidden_layers`, which predict further tokens, have the tensors
        # below.
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
    parameters=_LATENT,
)
_ROUTER = {"mlp.router.weight": "router embed", "mlp.router.bias": "router"}
_EXPERT_BIASES: NameRows = {
    "mlp.experts.gate_up_proj_bias": "experts gate_up",
    "mlp.experts.down_proj_bias": "experts embed",
}
GPT_OSS_TENSORS = _decoder(
    "gpt-oss",
    {**_DECODER, "self_attn.sinks": "head"},
    (
        # In MXFP4, 32 weights take 16 bytes and a scale.
        {
            **_ROUTER,
            **_EXPERT_BIASES,
            "mlp.experts.gate_up_proj_blocks": "experts gate_up embed_blocks -",
            "mlp.experts.gate_up_proj_scales": "experts gate_up embed_blocks",
            "mlp.experts.down_proj_blocks": "experts embed mlp_blocks -",
            "mlp.experts.down_proj_scales": "experts embed mlp_blocks",
        },
        # Stored as floats, the experts are [experts, in, out].
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


# Both dims of [out, in] have the same size. Only the input dim is EMBED: presets shard EMBED, and
# only one dim of a weight can be sharded over a mesh axis.
_SQUARE = "- embed"
BERT_TENSORS = Tensors(
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
    parameters={},
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models.

    Attributes:
      tensors: The tensors of its checkpoints. None: checkpoints of this family cannot be read.
      read: Function that returns the sizes of its decoder. None if there is no decoder for this
        family.
    """

    tensors: Tensors | None = None
    read: Callable[[Config], Sizes] | None = None


_LLAMA = Family(tensors=LLAMA_TENSORS, read=readers_of.llama)
_QWEN = Family(tensors=QWEN_TENSORS, read=readers_of.qwen)
_QWEN_MOE = Family(tensors=QWEN_MOE_TENSORS, read=readers_of.qwen)
# Gemma 3 has the names of Gemma 2, and also norms of queries and keys.
_GEMMA_2 = Family(tensors=GEMMA_2_TENSORS, read=readers_of.gemma)
_DEEPSEEK = Family(tensors=DEEPSEEK_TENSORS, read=readers_of.deepseek)
FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": _LLAMA,
        # These models scale the residual, or have no rotary positions in some layers. The decoder
        # cannot compute this, so they have no reader.
        **dict.fromkeys(("smollm3", "granite"), Family(tensors=LLAMA_TENSORS)),
        "qwen2": _QWEN,
        "qwen3": _QWEN,
        "qwen2_moe": _QWEN_MOE,
        "qwen3_moe": _QWEN_MOE,
        "gemma": Family(tensors=GEMMA_TENSORS, read=readers_of.gemma),
        "gemma2": _GEMMA_2,
        # A model of text and images. Only its text decoder is planned.
        "gemma3": Family(read=readers_of.gemma),
        "gemma3_text": _GEMMA_2,
        "mixtral": Family(tensors=MIXTRAL_TENSORS, read=readers_of.mixtral),
        "deepseek_v2": _DEEPSEEK,
        "deepseek_v3": _DEEPSEEK,
        "gpt_oss": Family(tensors=GPT_OSS_TENSORS, read=readers_of.gpt_oss),
        "bert": Family(tensors=BERT_TENSORS),
    }
)


def read_config(path: str, *, param: str | None = None, capacity: float | None = 1.0) -> Sizes:
    """Return the sizes of the decoder that a configuration describes.

    Args:
      path: The file, `config.json`.
      param: Dtype of the stored parameters. If it is given, matmuls are in bfloat16. By default,
        both have the dtype of the configuration.
      capacity: Capacity factor: capacity of an expert ÷ its tokens under an even load. None: no
        token is dropped.

    Raises:
      StrategyError: The file cannot be read, its family is not known, or a size is not valid.
    """
    return sizes_of(read_json(Path(path)), Path(path).name, param=param, capacity=capacity)


def sizes_of(values: Any, source: str, *, param: str | None, capacity: float | None) -> Sizes:
    """Return the sizes of a decoder from the content of a `config.json`; see `read_config`."""
    if not isinstance(values, dict) or values.get("model_type") is None:
        raise StrategyError(
            f"{source} has no model_type", fix="pass the config.json of a Hugging Face model"
        )
    config = Config(values=values, source=source, error=StrategyError, capacity=capacity)
    values, notes = complete(config)
    config = dataclasses.replace(config, values=values)
    kind = config.family
    readers = {name: family.read for name, family in FAMILIES.items() if family.read}
    if kind not in readers:
        hint = same_spelling(kind, readers)
        raise StrategyError(
            f"{source}: the family {kind!r:.60} is unknown",
            fix=f"{hint} families are {', '.join(readers)}; or write the model in Python, and pass "
            "it as file.py:function".strip(),
        )
    # `dtype` is the newer name of `torch_dtype` in transformers.
    own = values.get("torch_dtype") or values.get("dtype") or "bfloat16"
    try:
        dtypes = Dtypes(param=param or own, compute=own if param is None else "bfloat16")
    except LayerError as error:
        raise StrategyError(
            f"{source}: {param or own!r:.40} is not a dtype of parameters", fix="param=bfloat16"
        ) from error
    config = dataclasses.replace(config, dtypes=dtypes)
    sizes = readers[kind](config)
    method = config.mapping("quantization_config").get("quant_method")
    # The logits of unquantized weights differ, because quantization rounds the weights.
    quantized = (f"weights are planned unquantized; the model's are {method}",) if method else ()
    return dataclasses.replace(
        sizes,
        notes=(*notes, *sizes.notes, *sizes.differs, *quantized),
        differs=(*sizes.differs, *quantized),
    )


_TEXT_FIX: Final = (
    "save only the text decoder, with transformers:\n"
    "whole = AutoModelForImageTextToText.from_pretrained(folder)\n"
    "text = AutoModelForCausalLM.from_config(whole.config.text_config)\n"
    "text.model.load_state_dict(whole.model.language_model.state_dict())\n"
    "text.lm_head.load_state_dict(whole.lm_head.state_dict())\n"
    'text.save_pretrained("text")'
)


def tensors_of(config: Mapping[str, Any]) -> Tensors:
    """Return the tensors of the model that a `config.json` describes.

    Raises:
      CheckpointError: The `model_type` is absent or unknown.
    """
    kind = config.get("model_type")
    tables = {name: family.tensors for name, family in FAMILIES.items() if family.tensors}
    if isinstance(kind, str) and kind in tables:
        return tables[kind]
    known = ", ".join(tables)
    parts = [key for key in ("text_config", "vision_config", "audio_config") if config.get(key)]
    if parts:
        raise CheckpointError(
            f"config.json: the model {kind!r} is more than a text decoder: it has "
            f"{', '.join(parts)}. The tensors of such models cannot be read",
            fix=_TEXT_FIX,
        )
    # Names of two models may differ by one digit, so suggest only a name that has the same letters
    # and digits.
    meant = same_spelling(kind, tables) if isinstance(kind, str) else ""
    hint = f" ({meant})" if meant else ""
    raise CheckpointError(
        f"config.json: the model_type {kind!r} is unknown{hint}",
        fix=f"the known ones are {known}\n"
        "if the tensors have the names of one of these models, set model_type to that model",
    )
