"""Read the sizes of a decoder from a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
import itertools
from types import MappingProxyType
from typing import Any, Final

from shardwright.attention.masks import Window
from shardwright.errors import LayerError, StrategyError
from shardwright.interop.hf.config import Config
from shardwright.interop.hf.model.latent import LatentConfig
from shardwright.layers.attention_block import AttentionConfig
from shardwright.layers.dtypes import Dtypes
from shardwright.layers.mlp_block import MlpConfig
from shardwright.layers.moe import CapacityFactor, Dropless, MoEConfig
from shardwright.layers.moe_block import MoEBlockConfig
from shardwright.layers.norm import RMS, NormConfig
from shardwright.layers.rope import RopeFrequencies
from shardwright.layers.rope_scaling import rope_frequencies


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Layers whose parameters have the same names and shapes.

    Attributes:
      layers: Number of layers.
      attention: Attention of each layer, except what `pattern` changes.
      mlp: MLP or MoE layer of each layer.
      norm_after: The norm that follows the attention and the MLP, as in Gemma 2 and 3.
      router_bias: Whether the router picks experts by scores plus biases, as in DeepSeek-V3.
      pattern: Attention of each layer in a pattern that repeats, if layers differ in window or
        `rope_theta`. Else empty.
    """

    layers: int
    attention: AttentionConfig | LatentConfig
    mlp: MlpConfig | MoEBlockConfig
    norm_after: NormConfig | None = None
    router_bias: bool = False
    pattern: tuple[AttentionConfig, ...] = ()

    @property
    def period(self) -> int:
        """Number of layers after which the pattern repeats."""
        return len(self.pattern) or 1

    def attention_of(self, number: int) -> AttentionConfig | LatentConfig:
        """Return the attention of a layer, given its number in this stack."""
        # The parameters of all layers are alike; windows and angles are not parameters.
        return self.pattern[number % self.period] if self.pattern else self.attention


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a decoder.

    Attributes:
      family: `model_type` of the configuration.
      vocab: Number of rows of the embedding table.
      embed: Size of the residual.
      stacks: The layers, in order.
      tied: Whether the output projection is the embedding table.
      longest: Largest number of positions that the model was made for.
      dtypes: Dtypes of the parameters and matmuls.
      norm: The norm after the last layer.
      embed_scale: Factor of the embedding, as in Gemma.
      softcap: c in `c * tanh(logits / c)`, or None.
      notes: What was assumed, and where the decoder differs from the model.
      differs: Notes that say why the logits of the decoder differ from those of the model.
    """

    family: str
    vocab: int
    embed: int
    stacks: tuple[Stack, ...]
    tied: bool
    longest: int
    dtypes: Dtypes
    norm: NormConfig = RMS
    embed_scale: float | None = None
    softcap: float | None = None
    notes: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()


def _norm(config: Config) -> NormConfig:
    """Return the config of the model's norms. Gemma stores their scales minus 1."""
    # The defaults of `MixtralConfig` and `GptOssConfig`, and those of the other configurations.
    default = 1e-5 if config.family in ("mixtral", "gpt_oss") else 1e-6
    epsilon = config.real("rms_norm_eps") or default
    return NormConfig(epsilon=epsilon, zero_centered=config.family.startswith("gemma"))


def _activations(config: Config) -> tuple[str, str]:
    """Return the activations of the two up projections; that of the gate comes first.

    Raises:
      StrategyError: The activation of the gate is not one that the decoder has.
    """
    is_gemma = config.family.startswith("gemma")
    name = config.text("hidden_act")
    if is_gemma:
        # "gelu" in the files of the first Gemma means the approximation by tanh.
        name = config.text("hidden_activation") or "gelu_pytorch_tanh"
    names = {"silu": "silu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}
    if (name or "silu") not in names:
        raise StrategyError(
            f"{config.source}: the activation {name!r:.40} is unknown",
            fix=f"the known ones are {', '.join(names)}; or write the model in Python, and pass "
            "it as file.py:function",
        )
    return names[name or "silu"], "linear"


def _attention(config: Config, **options: Any) -> AttentionConfig:
    heads, embed = config.number("num_attention_heads"), config.number("hidden_size")
    own = _norm(config)
    if options.pop("qk_norm", False):
        options["qk_norm"] = own
    return AttentionConfig(
        embed=embed,
        heads=heads,
        kv_heads=config.number("num_key_value_heads", heads),
        # Newer configurations have the key `head_dim`, because the value may differ from embed ÷
        # heads: Gemma has 256.
        head_dim=config.size("head_dim") or embed // heads,
        norm=own,
        dtypes=config.dtypes,
        **options,
    )


def _mlp(config: Config, **options: Any) -> MlpConfig:
    return MlpConfig(
        embed=config.number("hidden_size"),
        hidden=config.number("intermediate_size"),
        activations=_activations(config),
        norm=_norm(config),
        dtypes=config.dtypes,
        **options,
    )


def _moe_block(
    config: Config,
    experts: str,
    hidden: str,
    **options: Any,
) -> MoEBlockConfig:
    moe = MoEConfig(
        embed=config.number("hidden_size"),
        hidden=config.number(hidden),
        experts=config.number(experts),
        per_token=config.number("num_experts_per_tok"),
        capacity=Dropless() if config.capacity is None else CapacityFactor(config.capacity),
        activation=_activations(config)[0],
        dtypes=config.dtypes,
        **options,
    )
    return MoEBlockConfig(moe=moe, norm=_norm(config))


def _sizes(
    config: Config,
    stacks: tuple[Stack, ...],
    notes: tuple[str, ...] = (),
    differs: tuple[str, ...] = (),
    *,
    tied: bool = False,
    **options: Any,
) -> Sizes:
    has_experts = any(isinstance(stack.mlp, MoEBlockConfig) for stack in stacks)
    if has_experts and config.capacity is not None:
        notes += (f"each expert drops tokens above {config.capacity:g} times an even load",)
    reasons = [*differs]
    patterns = tuple(part for stack in stacks for part in _with_patterns(config, stack, reasons))
    if config.flag("use_bidirectional_attention"):
        reasons.append("attention is causal here, but sees later positions in the model")
    return Sizes(
        family=config.family,
        vocab=config.number("vocab_size"),
        embed=config.number("hidden_size"),
        stacks=patterns,
        tied=config.flag("tie_word_embeddings", default=tied),
        longest=config.number("max_position_embeddings", 4096),
        dtypes=config.dtypes,
        norm=_norm(config),
        notes=notes,
        differs=tuple(dict.fromkeys(reasons)),
        **options,
    )


# Family -> n, where one of n layers has no window. Used if the configuration does not say.
_EVERY: Final = MappingProxyType({"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2})
# Family -> base of the rotary frequencies. Used if the configuration does not say.
_THETAS: Final = MappingProxyType(
    {"gemma3": 1e6, "gemma3_text": 1e6, "mixtral": 1e6, "gpt_oss": 150_000.0}
)
_LOCAL, _GLOBAL, _CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
# Families that read `sliding_window`. Other families ignore it.
_WINDOWED: Final = frozenset(
    {"mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", *_EVERY}
)
_LONGEST_PERIOD: Final = 8


def _with_patterns(config: Config, stack: Stack, differs: list[str]) -> tuple[Stack, ...]:
    """Give layers their windows and rotary frequencies; append to `differs` why logits differ.

    If the kinds of layers repeat after at most 8 layers, the stack gets this pattern. Otherwise,
    each run of layers of one kind becomes a stack.
    """
    attention = stack.attention
    if isinstance(attention, LatentConfig):
        return (stack,)
    kinds = _layer_types(config, stack.layers)
    if _CHUNKED in kinds:
        differs.append("chunked attention is computed with sliding windows instead of chunks")
        kinds = [_LOCAL if kind == _CHUNKED else kind for kind in kinds]
    # Read the size of the window only if a layer has one: other configurations may lack this size.
    windows: dict[str, Window | None] = {_GLOBAL: None}
    if _LOCAL in kinds:
        # A window of n positions has the query's own position and n - 1 before it.
        windows[_LOCAL] = (config.number("sliding_window") - 1, 0)
    of_kind = {}
    for kind, window in windows.items():
        theta = _rope(config, kind, attention.size, differs)
        of_kind[kind] = dataclasses.replace(attention, window=window, rope_theta=theta)

    def repeats(period: int) -> bool:
        return all(kind == kinds[at % period] for at, kind in enumerate(kinds))

    # Find the smallest period: a scan runs one whole pattern in each step.
    period = next(filter(repeats, range(1, stack.layers + 1)))
    if 1 < period <= _LONGEST_PERIOD:
        pattern = tuple(of_kind[kind] for kind in kinds[:period])
        return (dataclasses.replace(stack, pattern=pattern),)
    return tuple(
        dataclasses.replace(stack, layers=len(list(run)), attention=of_kind[kind])
        for kind, run in itertools.groupby(kinds)
    )


def _layer_types(config: Config, layers: int) -> list[str]:
    """Return the kind of each layer: sliding window, chunks, or full attention.

    Raises:
      StrategyError: `layer_types` is not a list with one type for each layer.
    """
    has_window = config.family in _WINDOWED and bool(config.values.get("sliding_window"))
    has_window &= config.flag("use_sliding_window", default=not config.family.startswith("qwen"))
    types = config.values.get("layer_types")
    if types is not None and has_window:
        is_list = isinstance(types, list) and len(types) == layers
        if not is_list or any(each not in (_LOCAL, _GLOBAL, _CHUNKED) for each in types):
            raise StrategyError(
                f"{config.source}: layer_types is not a list of {layers} types, one per layer",
                fix=f'write "{_LOCAL}" or "{_GLOBAL}" for each layer, or remove layer_types',
            )
        return list(types)
    if not has_window:
        return [_GLOBAL] * layers
    if config.family == "qwen2_moe":
        last = config.number("max_window_layers", layers)
        return [_LOCAL if at % 2 == 0 and at < last else _GLOBAL for at in range(layers)]
    # `Qwen2Config`: the layers from `max_window_layers` on have a window.
    if config.family in ("qwen2", "qwen3"):
        first = config.number("max_window_layers", layers)
        return [_LOCAL if at >= first else _GLOBAL for at in range(layers)]
    keys = ("sliding_window_pattern", "_sliding_window_pattern")
    given = [config.number(key) for key in keys if config.values.get(key) is not None]
    # As in `Gemma3TextConfig`: the last layer of a pattern has no window.
    every = next(iter(given), _EVERY.get(config.family, 0))
    return [_LOCAL if not every or (at + 1) % every else _GLOBAL for at in range(layers)]


def _rope(config: Config, kind: str, head_dim: int, differs: list[str]) -> float | RopeFrequencies:
    """Return the rotary frequencies of a kind of layer.

    `rope_parameters` is the newer name of `rope_scaling` and `rope_theta`. `rope_parameters` may
    have one mapping for each kind of layer. If the type of scaling is unknown, or a value is
    missing, only the base is returned, with a note in `differs`. A plan does not depend on the
    angles.
    """
    values = config.values
    scaling = {**config.mapping("rope_scaling"), **config.mapping("rope_parameters")}
    base, default = "rope_theta", _THETAS.get(config.family, 10_000.0)
    # transformers 5 has a mapping of parameters for each type of layer.
    is_nested = not scaling.keys().isdisjoint((_LOCAL, _GLOBAL))
    if is_nested:
        name = "rope_parameters" if config.mapping("rope_parameters") else "rope_scaling"
        scaling = dict(config.mapping(name, kind))
    if kind == _LOCAL and config.family.startswith("gemma3"):
        base, default = "rope_local_base_freq", 10_000.0
        scaling = scaling if is_nested else {}
    theta = config.real(base, scaling.pop("rope_theta", None)) or default
    if scaling.get("rope_type", scaling.get("type", "default")) == "default":
        return theta
    longest = values.get("max_position_embeddings")
    try:
        return rope_frequencies(head_dim, scaling=scaling, theta=theta, longest=longest)
    except LayerError as error:
        what = error.problems[0].what
        differs.append(f"the rotary positions are not those of the model: {what}")
        return theta


def llama(config: Config) -> Sizes:
    """Read Llama and Mistral."""
    attention = _attention(config, bias=config.flag("attention_bias"))
    mlp = _mlp(config, bias=config.flag("mlp_bias"))
    layers = config.number("num_hidden_layers")
    return _sizes(config, (Stack(layers=layers, attention=attention, mlp=mlp),))


_OUT_BIAS: Final = "the output projection of attention has a bias, as those of q, k and v have"


def qwen(config: Config) -> Sizes:
    """Read Qwen 2 and 3, dense or with experts."""
    # `Qwen2Attention` has biases of q, k and v. `Qwen3Attention` normalizes the heads of q and k.
    second = config.family.startswith("qwen2")
    bias = second or config.flag("attention_bias")
    attention = _attention(config, bias=bias, qk_norm=not second)
    notes: tuple[str, ...] = (_OUT_BIAS,) if second else ()
    differs: tuple[str, ...] = ()
    mlp: MlpConfig | MoEBlockConfig
    if config.family.endswith("moe"):
        if config.number("decoder_sparse_step", 1) > 1 or config.values.get("mlp_only_layers"):
            raise StrategyError(
                f"{config.source}: some layers have an MLP in place of experts",
                fix="write the model in Python, and pass it as file.py:function",
            )
        hidden = config.number("moe_intermediate_size")
        size = config.size("shared_expert_intermediate_size") or 0
        shared, rest = divmod(size, hidden)
        if rest:
            raise StrategyError(
                f"{config.source}: shared_expert_intermediate_size {size} is not a multiple of "
                f"{hidden}, the size of an expert",
                fix="write the model in Python, and pass it as file.py:function",
            )
        if shared:
            differs += ("the shared experts have no gate in this decoder",)
        mlp = _moe_block(
            config,
            "num_experts",
            "moe_intermediate_size",
            shared=shared,
            normalize=config.flag("norm_topk_prob"),
        )
    else:
        mlp = _mlp(config)
    stack = Stack(layers=config.number("num_hidden_layers"), attention=attention, mlp=mlp)
    return _sizes(config, (stack,), notes, differs)


def gemma(config: Config) -> Sizes:
    """Read Gemma 1, 2 and 3."""
    first, embed = config.family == "gemma", config.number("hidden_size")
    attention = _attention(
        config,
        bias=config.flag("attention_bias"),
        qk_norm=config.family.startswith("gemma3"),
        softcap=config.real("attn_logit_softcapping"),
        # Gemma 1 scales by head_dim, and later versions by a separate size.
        scale=None if first else (config.real("query_pre_attn_scalar") or 256.0) ** -0.5,
    )
    stack = Stack(
        layers=config.number("num_hidden_layers"),
        attention=attention,
        mlp=_mlp(config),
        norm_after=None if first else _norm(config),
    )
    return _sizes(
        config,
        (stack,),
        tied=True,
        # `GemmaModel` multiplies the embeddings by the root of the hidden size.
        embed_scale=embed**0.5,
        softcap=config.real("final_logit_softcapping"),
    )


def mixtral(config: Config) -> Sizes:
    """Read Mixtral."""
    mlp = _moe_block(config, "num_local_experts", "intermediate_size")
    layers = config.number("num_hidden_layers")
    attention = _attention(config)
    return _sizes(config, (Stack(layers=layers, attention=attention, mlp=mlp),))


def gpt_oss(config: Config) -> Sizes:
    """Read gpt-oss."""
    mlp = _moe_block(config, "num_local_experts", "intermediate_size")
    bias = config.flag("attention_bias", default=True)
    stack = Stack(
        layers=config.number("num_hidden_layers"),
        attention=_attention(config, bias=bias, sinks=True),
        mlp=mlp,
    )
    differs = ("in this decoder, the router and experts have no biases and no clamped activation",)
    return _sizes(config, (stack,), (), differs)


def deepseek(config: Config) -> Sizes:
    """Read DeepSeek V2 and V3: latent attention, and experts after some dense layers."""
    attention = LatentConfig(
        embed=config.number("hidden_size"),
        heads=config.number("num_attention_heads"),
        query_rank=config.size("q_lora_rank"),
        rank=config.number("kv_lora_rank"),
        plain_dim=config.number("qk_nope_head_dim"),
        rope_dim=config.number("qk_rope_head_dim"),
        value_dim=config.number("v_head_dim"),
        dtypes=config.dtypes,
    )
    # The first layers of DeepSeek have an MLP in place of experts.
    dense = config.size("first_k_dense_replace") or 0
    layers = config.number("num_hidden_layers")
    if dense >= layers or config.number("moe_layer_freq", 1) > 1:
        raise StrategyError(
            f"{config.source}: experts are not in every layer after the first dense ones",
            fix="write the model in Python, and pass it as file.py:function",
        )
    # V3 picks experts by scores plus `e_score_correction_bias`; V2 has no such bias.
    has_bias = config.text("scoring_func") == "sigmoid"
    moe_block = _moe_block(
        config,
        "n_routed_experts",
        "moe_intermediate_size",
        shared=config.size("n_shared_experts") or 0,
        score="sigmoid" if has_bias else "softmax",
        groups=config.number("n_group", 1),
        top_groups=config.number("topk_group", 1),
    )
    stacks: tuple[Stack, ...] = (
        Stack(layers=layers - dense, attention=attention, mlp=moe_block, router_bias=has_bias),
    )
    if dense:
        first = Stack(layers=dense, attention=attention, mlp=_mlp(config))
        stacks = (first, *stacks)
    differs: tuple[str, ...] = ()
    if config.flag("attention_bias"):
        differs += ("the projections of attention have no biases in this decoder",)
    if config.values.get("num_nextn_predict_layers"):
        differs += ("layers that predict further tokens are left out",)
    return _sizes(config, stacks, (), differs)
