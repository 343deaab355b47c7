"""Read the sizes of a decoder from a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from shardwright.errors import LayerError, StrategyError, same_spelling
from shardwright.interop.hf.defaults import complete
from shardwright.interop.hf.model.latent import LatentConfig
from shardwright.layers.attention_block import AttentionConfig
from shardwright.layers.dtypes import Dtypes
from shardwright.layers.mixture_block import MixtureConfig
from shardwright.layers.mlp_block import MlpConfig
from shardwright.layers.moe import Factor, MoEConfig
from shardwright.layers.norm import RMS
from shardwright.strategy.foreign_files import read_json


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Layers that are alike.

    Attributes:
      layers: Number of layers.
      attention: Attention of each.
      mlp: MLP or mixture of each.
      norms_after: Whether a norm follows the attention and the MLP, as in Gemma 2 and 3.
    """

    layers: int
    attention: AttentionConfig | LatentConfig
    mlp: MlpConfig | MixtureConfig
    norms_after: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a decoder.

    Attributes:
      family: `model_type` of the configuration.
      vocab: Number of tokens of the embedding table.
      embed: Size of the residual.
      stacks: The layers, in order.
      tied: Whether the output projection is the embedding table.
      longest: Largest number of positions that the model was made for.
      dtypes: Dtypes of the parameters and products.
      notes: Where the reference decoder differs from the model.
    """

    family: str
    vocab: int
    embed: int
    stacks: tuple[Stack, ...]
    tied: bool
    longest: int
    dtypes: Dtypes
    notes: tuple[str, ...] = ()


class _Config:
    """The values of a `config.json`, with errors that name the file and the key."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def number(self, key: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self.values.get(key)
        if value is None:
            value = default
        if type(value) is not int or value < 1:
            what = "is missing" if value is None else f"{value!r:.40} is not a positive integer"
            fix = f'write "{key}", as the config.json that the model was published with has it'
            raise StrategyError(f"{self.source}: {key} {what}", fix=fix)
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return whether a key is true."""
        value = self.values.get(key)
        return default if value is None else bool(value)

    def ratio(self, key: str, over: int, what: str) -> int:
        """Return how many times `over` a number is; 0 if it is absent."""
        if not self.values.get(key):
            return 0
        number = self.number(key)
        if number % over:
            raise StrategyError(
                f"{self.source}: {key} {number} is not a multiple of {over}, the size of {what}",
                fix="write the model as file.py:function",
            )
        return number // over


def read_config(path: str, *, param: str | None = None, capacity: float = 1.0) -> Sizes:
    """Return the sizes of a configuration.

    Args:
      path: The file, `config.json`.
      param: Dtype of stored parameters, with products in bfloat16. Defaults to the configuration's
        dtype for both.
      capacity: Slots of an expert, divided by its tokens at an even load.

    Raises:
      StrategyError: The file cannot be read, its family is not known, or a size is not valid.
    """
    source = Path(path).name
    values = read_json(Path(path))
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise StrategyError(
            f"{source} has no model_type", fix="pass the config.json of a Hugging Face model"
        )
    values, notes = complete(values)
    family = values["model_type"]
    if family not in FAMILIES:
        hint = same_spelling(family, FAMILIES)
        raise StrategyError(
            f"{source}: the family {family!r:.60} is unknown",
            fix=f"{hint} families are {', '.join(FAMILIES)}; or pass file.py:function".strip(),
        )
    config = _Config(values, source)
    sizes = FAMILIES[family](config, _dtypes(values, param, source), capacity)
    return dataclasses.replace(sizes, notes=(*notes, *sizes.notes, *_quantized(values)))


def _dtypes(values: Mapping[str, Any], param: str | None, source: str) -> Dtypes:
    own = values.get("torch_dtype") or values.get("dtype") or "bfloat16"
    compute = own if param is None else "bfloat16"
    try:
        return Dtypes(param=param or own, compute=compute)
    except LayerError as error:
        raise StrategyError(
            f"{source}: {param or own!r:.40} is not a dtype of parameters", fix="param=bfloat16"
        ) from error


def _quantized(values: Mapping[str, Any]) -> tuple[str, ...]:
    method = (values.get("quantization_config") or {}).get("quant_method")
    return (f"weights are planned unquantized; the model's are {method}",) if method else ()


def _attention(config: _Config, dtypes: Dtypes, **options: Any) -> AttentionConfig:
    heads, embed = config.number("num_attention_heads"), config.number("hidden_size")
    return AttentionConfig(
        embed=embed,
        heads=heads,
        kv_heads=config.number("num_key_value_heads", heads),
        head_dim=config.values.get("head_dim") or embed // heads,
        dtypes=dtypes,
        **options,
    )


def _mlp(config: _Config, dtypes: Dtypes, **options: Any) -> MlpConfig:
    return MlpConfig(
        embed=config.number("hidden_size"),
        hidden=config.number("intermediate_size"),
        dtypes=dtypes,
        **options,
    )


def _mixture(
    config: _Config, dtypes: Dtypes, capacity: float, experts: str, hidden: str, **options: Any
) -> MixtureConfig:
    moe = MoEConfig(
        embed=config.number("hidden_size"),
        hidden=config.number(hidden),
        experts=config.number(experts),
        per_token=config.number("num_experts_per_tok"),
        capacity=Factor(capacity),
        dtypes=dtypes,
        **options,
    )
    return MixtureConfig(moe=moe)


def _sizes(
    config: _Config,
    dtypes: Dtypes,
    stacks: tuple[Stack, ...],
    notes: tuple[str, ...] = (),
    *,
    tied: bool = False,
) -> Sizes:
    mixtures = [each.mlp.moe for each in stacks if isinstance(each.mlp, MixtureConfig)]
    capacity = next((moe.capacity for moe in mixtures), None)
    if isinstance(capacity, Factor):
        notes += (f"each expert drops tokens above {capacity.factor:g} times an even load",)
    windowed = tuple(part for stack in stacks for part in _with_windows(config, stack))
    if len(windowed) > len(stacks):
        notes += ("the layers with a sliding window come before those without",)
    return Sizes(
        family=config.values["model_type"],
        vocab=config.number("vocab_size"),
        embed=config.number("hidden_size"),
        stacks=windowed,
        tied=config.flag("tie_word_embeddings", default=tied),
        longest=config.number("max_position_embeddings", 4096),
        dtypes=dtypes,
        notes=notes,
    )


# Family -> how often a layer without a window comes, where the configuration does not say.
_EVERY: Final = MappingProxyType({"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2})
_WINDOWED: Final = ("sliding_attention", "chunked_attention")


def _with_windows(config: _Config, stack: Stack) -> tuple[Stack, ...]:
    """Split layers into those with a sliding window and those that attend to all positions."""
    attention = stack.attention
    if not config.values.get("sliding_window") or isinstance(attention, LatentConfig):
        return (stack,)
    if not config.flag("use_sliding_window", default=True):
        return (stack,)
    # A window of n positions has the query's own position and n - 1 before it.
    window = (config.number("sliding_window") - 1, 0)
    local = _windowed_layers(config, stack.layers)
    parts = (
        dataclasses.replace(
            stack, layers=local, attention=dataclasses.replace(attention, window=window)
        ),
        dataclasses.replace(stack, layers=stack.layers - local),
    )
    return tuple(part for part in parts if part.layers)


def _windowed_layers(config: _Config, layers: int) -> int:
    """Return how many layers have a sliding window.

    Raises:
      StrategyError: `layer_types` is not a list with one type for each layer.
    """
    types = config.values.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise StrategyError(
                f"{config.source}: layer_types is not a list of {layers} types, one per layer",
                fix='write "sliding_attention" or "full_attention" for each layer, or leave it out',
            )
        return sum(each in _WINDOWED for each in types)
    family = config.values["model_type"]
    if family.startswith("qwen"):
        return max(0, layers - config.number("max_window_layers", layers))
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        if config.values.get(key) is not None:
            return layers - layers // config.number(key)
    return layers - layers // _EVERY[family] if family in _EVERY else layers


def _llama(config: _Config, dtypes: Dtypes, capacity: float) -> Sizes:
    del capacity
    attention = _attention(config, dtypes, bias=config.flag("attention_bias"))
    mlp = _mlp(config, dtypes, bias=config.flag("mlp_bias"))
    layers = config.number("num_hidden_layers")
    return _sizes(config, dtypes, (Stack(layers=layers, attention=attention, mlp=mlp),))


_OUT_BIAS: Final = "the output projection of attention has a bias, as those of q, k and v have"


def _qwen(config: _Config, dtypes: Dtypes, capacity: float) -> Sizes:
    """Qwen 2 and 3, dense or with experts."""
    family = config.values["model_type"]
    second = family.startswith("qwen2")
    bias = second or config.flag("attention_bias")
    attention = _attention(config, dtypes, bias=bias, qk_norm=None if second else RMS)
    notes: tuple[str, ...] = (_OUT_BIAS,) if second else ()
    mlp: MlpConfig | MixtureConfig
    if family.endswith("moe"):
        if config.number("decoder_sparse_step", 1) > 1 or config.values.get("mlp_only_layers"):
            raise StrategyError(
                f"{config.source}: some layers have an MLP in place of experts",
                fix="write the model as file.py:function",
            )
        hidden = config.number("moe_intermediate_size")
        shared = config.ratio("shared_expert_intermediate_size", hidden, "an expert")
        if shared:
            notes += ("the shared experts have no gate",)
        mlp = _mixture(
            config, dtypes, capacity, "num_experts", "moe_intermediate_size", shared=shared
        )
    else:
        mlp = _mlp(config, dtypes)
    layers = config.number("num_hidden_layers")
    if not config.flag("use_sliding_window"):  # absent means no window in these families
        config = _Config({**config.values, "sliding_window": None}, config.source)
    return _sizes(config, dtypes, (Stack(layers=layers, attention=attention, mlp=mlp),), notes)


def _gemma(config: _Config, dtypes: Dtypes, capacity: float) -> Sizes:
    del capacity
    third = config.values["model_type"].startswith("gemma3")
    attention = _attention(
        config,
        dtypes,
        bias=config.flag("attention_bias"),
        qk_norm=RMS if third else None,
        softcap=config.values.get("attn_logit_softcapping"),
    )
    stack = Stack(
        layers=config.number("num_hidden_layers"),
        attention=attention,
        mlp=_mlp(config, dtypes, activations=("gelu", "linear")),
        norms_after=config.values["model_type"] != "gemma",
    )
    return _sizes(config, dtypes, (stack,), tied=True)


def _mixtral(config: _Config, dtypes: Dtypes, capacity: float) -> Sizes:
    mlp = _mixture(config, dtypes, capacity, "num_local_experts", "intermediate_size")
    layers = config.number("num_hidden_layers")
    attention = _attention(config, dtypes)
    return _sizes(config, dtypes, (Stack(layers=layers, attention=attention, mlp=mlp),))


def _gpt_oss(config: _Config, dtypes: Dtypes, capacity: float) -> Sizes:
    mlp = _mixture(config, dtypes, capacity, "num_local_experts", "intermediate_size")
    stack = Stack(
        layers=config.number("num_hidden_layers"),
        attention=_attention(config, dtypes, bias=config.flag("attention_bias", default=True)),
        mlp=mlp,
    )
    notes = ("the router and the experts have no biases, and attention has no sinks",)
    return _sizes(config, dtypes, (stack,), notes)


def _deepseek(config: _Config, dtypes: Dtypes, capacity: float) -> Sizes:
    """DeepSeek V2 and V3: latent attention, and experts after some dense layers."""
    attention = LatentConfig(
        embed=config.number("hidden_size"),
        heads=config.number("num_attention_heads"),
        query_rank=config.number("q_lora_rank") if config.values.get("q_lora_rank") else None,
        rank=config.number("kv_lora_rank"),
        plain_dim=config.number("qk_nope_head_dim"),
        rope_dim=config.number("qk_rope_head_dim"),
        value_dim=config.number("v_head_dim"),
        dtypes=dtypes,
    )
    dense = config.values.get("first_k_dense_replace") or 0
    layers = config.number("num_hidden_layers")
    if type(dense) is not int or not 0 <= dense < layers or config.number("moe_layer_freq", 1) > 1:
        raise StrategyError(
            f"{config.source}: experts are not in every layer after the first dense ones",
            fix="write the model as file.py:function",
        )
    mixture = _mixture(
        config,
        dtypes,
        capacity,
        "n_routed_experts",
        "moe_intermediate_size",
        shared=config.values.get("n_shared_experts") or 0,
        score="sigmoid" if config.values.get("scoring_func") == "sigmoid" else "softmax",
        groups=config.number("n_group", 1),
        top_groups=config.number("topk_group", 1),
    )
    stacks: tuple[Stack, ...] = (Stack(layers=layers - dense, attention=attention, mlp=mixture),)
    if dense:
        first = Stack(layers=dense, attention=attention, mlp=_mlp(config, dtypes))
        stacks = (first, *stacks)
    notes: tuple[str, ...] = ()
    if config.values.get("scoring_func") == "sigmoid":
        notes += ("the router has no biases that balance the experts",)
    if config.flag("attention_bias"):
        notes += ("the projections of attention have no biases",)
    if config.values.get("num_nextn_predict_layers"):
        notes += ("layers that predict further tokens are left out",)
    return _sizes(config, dtypes, stacks, notes)


FAMILIES: Final[Mapping[str, Callable[[_Config, Dtypes, float], Sizes]]] = MappingProxyType(
    {
        "llama": _llama,
        "mistral": _llama,
        "qwen2": _qwen,
        "qwen3": _qwen,
        "qwen2_moe": _qwen,
        "qwen3_moe": _qwen,
        "gemma": _gemma,
        "gemma2": _gemma,
        "gemma3": _gemma,
        "gemma3_text": _gemma,
        "mixtral": _mixtral,
        "deepseek_v2": _deepseek,
        "deepseek_v3": _deepseek,
        "gpt_oss": _gpt_oss,
    }
)
