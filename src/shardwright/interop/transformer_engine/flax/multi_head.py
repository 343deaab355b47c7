"""`MultiHeadAttention`: a norm, projections of q, k and v, attention, and an output projection."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardwright.errors import AttentionError, LayerError
from shardwright.interop.transformer_engine.flax.attention import (
    DotProductAttention,
    check_supported,
    read_transposed,
    with_cache,
)
from shardwright.interop.transformer_engine.flax.module import (
    DenseGeneral,
    LayerNormDenseGeneral,
    Module,
    check_inputs,
    compact,
    fan_in_init,
    split_init,
    zeros,
)
from shardwright.interop.transformer_engine.scores import read_name, rotate
from shardwright.interop.transformer_engine.sharding import (
    BATCH_AXES,
    HEAD_AXES,
    HIDDEN_AXES,
    HIDDEN_TP_AXES,
    SEQLEN_AXES,
    SEQLEN_TP_AXES,
    W_FSDP_AXES,
    W_JOINED_AXES,
    W_NO_SHARD_AXES,
    W_TP_AXES,
    constrain,
)

_PARTS = ("qkv_proj", "output_proj", "mlp")
_SCOPES = ("none", "all", *_PARTS, *(f"exclude_{part}" for part in _PARTS))


def adapts(scope: str | None, part: str) -> bool:
    """Tell whether a low-rank adaptation of this scope adapts a part of a layer.

    Raises:
      LayerError: The scope is unknown.
    """
    name = read_name("low_rank_adaptation_scope", (scope or "none").lower(), _SCOPES)
    return name in ("all", part) or (name.startswith("exclude_") and name != f"exclude_{part}")


def leading(module: Any, *, is_sharded: bool = False) -> tuple[str, str]:
    """Return the logical names of batch and length, in the order of the module's inputs."""
    names = (BATCH_AXES, SEQLEN_TP_AXES if is_sharded else SEQLEN_AXES)
    return names[::-1] if module.transpose_batch_sequence else names


def query_init_of(module: Any) -> Any:
    """Return the initializer of the kernel of the queries."""

    def init(key: Any, shape: Any, dtype: Any) -> Any:
        # As in T5, logits are not scaled, and the initial queries are small instead.
        scale = jnp.sqrt(module.head_dim).astype(module.dtype) if module.scaled_query_init else 1.0
        return module.kernel_init(key, shape, dtype) / scale

    return init


def adaptation_of(module: Any, part: str) -> dict[str, Any]:
    """Return the fields of the low-rank adaptation of a part."""
    return {
        "enable_low_rank_adaptation": adapts(module.low_rank_adaptation_scope, part),
        "low_rank_adaptation_dim": module.low_rank_adaptation_dim,
        "low_rank_adaptation_alpha": module.low_rank_adaptation_alpha,
    }


def norm_fields_of(module: Any) -> dict[str, Any]:
    """Return the fields of the projection that has the norm."""
    is_sharded = module.enable_sequence_parallel
    return {
        "enable_layernorm": module.input_layernorm,
        "layernorm_type": module.layernorm_type,
        "zero_centered_gamma": module.zero_centered_gamma,
        "epsilon": module.layernorm_epsilon,
        "return_layernorm_output": True,
        "scale_axes": (W_NO_SHARD_AXES,),
        "ln_bias_axes": (W_NO_SHARD_AXES,),
        "layernorm_input_axes": (*leading(module, is_sharded=is_sharded), HIDDEN_AXES),
        "dot_input_axes": (*leading(module), HIDDEN_AXES),
    }


def split_heads(module: Any, arrays: Any, *, starts: tuple[Any, Any]) -> list[Any]:
    """Split the heads of query, key and value, and apply the rotary positions of the module.

    Args:
      module: A `MultiHeadAttention`.
      arrays: Query, key and value, with their heads in one dim.
      starts: Positions of the first query and of the first key.
    """
    # Infer the number of heads (-1): keys and values may have fewer than queries.
    query, key, value = (array.reshape(*array.shape[:2], -1, module.head_dim) for array in arrays)
    if not module.enable_rotary_pos_emb:
        return [query, key, value]

    def rotated(x: Any, start: Any) -> Any:
        x = x.swapaxes(0, 1) if module.transpose_batch_sequence else x
        windows, method = module.rotary_pos_emb_windows, module.rotary_pos_emb_group_method
        x = rotate(x, windows=windows, method=method, start=start)
        return x.swapaxes(0, 1) if module.transpose_batch_sequence else x

    return [rotated(query, starts[0]), rotated(key, starts[1]), value]


def read_deprecated(module: Any) -> None:
    """Copy deprecated fields to the fields that replace them, with TransformerEngine's warnings.

    Raises:
      LayerError: `output_layernorm` is given.
    """
    renamed = {
        "num_heads": "num_attention_heads",
        "dropout_rate": "attention_dropout",
        "apply_residual_connection_post_layernorm": "return_layernorm_output",
        "fuse_qkv": "fuse_qkv_params",
    }
    for old, new in renamed.items():
        value = getattr(module, old)
        if value is None:
            continue
        warnings.warn(
            f"{old} of MultiHeadAttention is deprecated; write {new}",
            DeprecationWarning,
            stacklevel=5,
        )
        setattr(module, new, value)
    if module.output_layernorm is not None:
        raise LayerError(
            "output_layernorm no longer exists",
            path="output_layernorm",
            fix="write input_layernorm, which says whether there is a norm before the queries",
        )


def projected(module: Any, x: Any, x_kv: Any) -> tuple[Any, Any, Any, Any]:
    """Return query, key and value, `[..., heads * head_dim]`, and the output of the norm.

    Args:
      module: A `MultiHeadAttention`.
      x: Input of the queries.
      x_kv: Input of keys and values. None means self-attention: keys and values are then computed
        from the normalized `x`.
    """
    counts = module.num_attention_heads, module.num_gqa_groups
    sizes = [count * module.head_dim for count in counts]
    kernel, query_init = module.kernel_init, query_init_of(module)
    is_self, is_fused = x_kv is None, module.fuse_qkv_params
    shared = {
        "use_bias": module.use_bias,
        "bias_init": module.bias_init,
        "dtype": module.dtype,
        "transpose_batch_sequence": module.transpose_batch_sequence,
        **adaptation_of(module, "qkv_proj"),
    }
    flat = {"kernel_axes": (W_FSDP_AXES, W_TP_AXES), "bias_axes": (W_TP_AXES,), **shared}
    joined = {
        "kernel_axes": (W_FSDP_AXES, W_JOINED_AXES, W_TP_AXES),
        "bias_axes": (W_JOINED_AXES, W_TP_AXES),
        **shared,
    }
    norm = norm_fields_of(module)
    # Only projections of equal sizes can share a kernel. If there are fewer kv heads than query
    # heads, only keys and values have projections of equal sizes.
    if is_fused and is_self and sizes[0] == sizes[1]:
        init = split_init([query_init, kernel, kernel], 3)
        norm["return_layernorm_output"] = module.return_layernorm_output
        qkv, normed = LayerNormDenseGeneral(
            (3, sizes[0]), kernel_init=init, name="qkv", **joined, **norm
        )(x)
        # Use TransformerEngine's names, for remat policies that save by names.
        qkv = checkpoint_name(qkv, "combined_qkv_proj")
        return qkv[..., 0, :], qkv[..., 1, :], qkv[..., 2, :], normed
    if is_fused:
        # Keys and values of self-attention are projections of the norm's output too, so return it.
        norm["return_layernorm_output"] = module.return_layernorm_output or is_self
    query, normed = LayerNormDenseGeneral(
        sizes[0], kernel_init=query_init, name="query", **flat, **norm
    )(x)
    x_kv = normed if is_self else x_kv
    if is_fused:
        kv = DenseGeneral((2, sizes[1]), kernel_init=split_init(kernel, 2), name="kv", **joined)
        pair = checkpoint_name(kv(x_kv), "combined_kv_proj")
        return query, pair[..., 0, :], pair[..., 1, :], normed
    key, value = (
        checkpoint_name(
            DenseGeneral(sizes[1], kernel_init=kernel, name=name, **flat)(x_kv), f"{name}_proj"
        )
        for name in ("key", "value")
    )
    return checkpoint_name(query, "query_proj"), key, value, normed


def check_inputs_of(module: Any, x: Any, x_kv: Any, *given: Any) -> None:
    """Check the fields and the inputs of a `MultiHeadAttention`.

    Raises:
      AttentionError: The fields or inputs contradict each other, or need a fused kernel.
      RankMismatchError: An input is not `[batch, length, embed]`.
    """
    check_supported(module, *given)
    check_inputs("inputs_q", x, rank=3)
    check_inputs("inputs_kv", x_kv, rank=3)
    if module.num_gqa_groups < 1 or module.num_attention_heads % module.num_gqa_groups:
        raise AttentionError(
            f"num_gqa_groups={module.num_gqa_groups} do not divide "
            f"num_attention_heads={module.num_attention_heads}",
            path="num_gqa_groups",
            fix="pass a divisor: each kv head serves the same number of query heads",
        )
    if x.dtype != x_kv.dtype:
        raise AttentionError(
            f"inputs_q are {x.dtype}, and inputs_kv {x_kv.dtype}", fix="cast inputs_q or inputs_kv"
        )


def attention_of(module: Any, *, decode: bool) -> DotProductAttention:
    """Create the attention over the heads of a `MultiHeadAttention`."""
    return DotProductAttention(
        head_dim=module.head_dim,
        num_attention_heads=module.num_attention_heads,
        num_gqa_groups=module.num_gqa_groups,
        attention_dropout=module.attention_dropout,
        # With a cache, the mask already has the causality and the window, relative to the position
        # of the query.
        attn_mask_type="padding" if decode else module.attn_mask_type,
        attn_bias_type=module.attn_bias_type,
        dropout_rng_name=module.dropout_rng_name,
        float32_logits=module.float32_logits,
        # Without the factor, the initial query kernel is smaller instead; see `query_init_of`.
        scale_factor=1 / math.sqrt(module.head_dim) if module.scale_attn_logits else 1.0,
        transpose_batch_sequence=module.transpose_batch_sequence,
        window_size=None if decode else module.window_size,
        softmax_type=module.softmax_type,
    )


class MultiHeadAttention(Module):  # type: ignore[misc]
    """Multi-head attention with a norm before it.

    If `inputs_q is inputs_kv`, the module computes self-attention: keys and values are then also
    computed from the output of the norm.

    Attributes:
      head_dim: Size of a head.
      num_attention_heads: Heads of queries.
      num_gqa_groups: Heads of keys and values. Defaults to `num_attention_heads`.
      attention_dropout: As in `DotProductAttention`.
      dropout_rng_name: As in `DotProductAttention`.
      input_layernorm: Whether there is a norm before the queries.
      layernorm_type: As in `LayerNorm`.
      layernorm_epsilon: `epsilon` of `LayerNorm`.
      return_layernorm_output: Whether the second result is the output of the norm.
      zero_centered_gamma: As in `LayerNorm`.
      kernel_init: Initializer of all kernels. Defaults to a normal distribution with variance 1 /
        fan_in.
      use_bias: Whether projections have biases.
      bias_init: Initializer of the biases.
      attn_mask_type: As in `DotProductAttention`.
      attn_bias_type: As in `DotProductAttention`.
      enable_rotary_pos_emb: Whether queries and keys are rotated by their positions.
      rotary_pos_emb_windows: As `windows` in `scores.rotate`.
      rotary_pos_emb_group_method: "consecutive" or "alternate".
      low_rank_adaptation_scope: Which matmuls are adapted: "none", "all", "qkv_proj", "output_proj"
        or "mlp". Or all but one of the last three: "exclude_mlp", for example.
      low_rank_adaptation_dim: As in `DenseGeneral`.
      low_rank_adaptation_alpha: As in `DenseGeneral`.
      dtype: Dtype of the parameters.
      fuse_qkv_params: Whether the kernels of query, key and value are one parameter. In
        cross-attention, or if `num_gqa_groups` is smaller than `num_attention_heads`, only the
        kernels of key and value are one parameter.
      transpose_batch_sequence: As in `DotProductAttention`.
      enable_sequence_parallel: Whether the sequence dim of the input is sharded.
      scale_attn_logits: Whether logits are divided by `sqrt(head_dim)`.
      scaled_query_init: Whether the initial query kernel is divided by `sqrt(head_dim)`.
      float32_logits: As in `DotProductAttention`.
      window_size: As in `DotProductAttention`.
      softmax_type: As in `DotProductAttention`.
      score_mod: Not supported.
      score_mod_bprop: Not supported.
      num_heads: Deprecated; use `num_attention_heads`.
      dropout_rate: Deprecated; use `attention_dropout`.
      output_layernorm: Removed; use `input_layernorm`.
      apply_residual_connection_post_layernorm: Deprecated; use `return_layernorm_output`.
      fuse_qkv: Deprecated; use `fuse_qkv_params`.
    """

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    dropout_rng_name: str = "dropout"
    input_layernorm: bool = True
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    return_layernorm_output: bool = False
    zero_centered_gamma: bool = False
    kernel_init: Any = None
    use_bias: bool = False
    bias_init: Any = zeros
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: Any = jnp.float32
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool | None = None
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    float32_logits: bool = False
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    score_mod: Callable[..., Any] | None = None
    score_mod_bprop: Callable[..., Any] | None = None
    num_heads: int | None = None
    dropout_rate: float | None = None
    output_layernorm: bool | None = None
    apply_residual_connection_post_layernorm: bool | None = None
    fuse_qkv: bool | None = None

    def __post_init__(self) -> None:
        self.transpose_batch_sequence = read_transposed(
            self.transpose_batch_sequence, "MultiHeadAttention"
        )
        read_deprecated(self)
        if self.kernel_init is None:
            self.kernel_init = fan_in_init(self.dtype, "normal")
        if self.num_gqa_groups is None:
            self.num_gqa_groups = self.num_attention_heads
        super().__post_init__()

    @compact  # type: ignore[untyped-decorator]
    def __call__(
        self,
        inputs_q: Any,
        inputs_kv: Any,
        mask: Any = None,
        bias: Any = None,
        *,
        decode: bool = False,
        deterministic: bool = False,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
    ) -> tuple[Any, Any]:
        """Return the output, and the output of the norm or None."""
        check_inputs_of(self, inputs_q, inputs_kv, score_mod_tensors, score_mod_bprop_tensors)
        # As in TransformerEngine, only the same object makes self-attention, not an equal array.
        is_self = inputs_q is inputs_kv
        names = (*leading(self, is_sharded=self.enable_sequence_parallel), HIDDEN_AXES)
        x = constrain(inputs_q, names)
        *arrays, normed = projected(self, x, None if is_self else inputs_kv)
        # Rotary positions continue where the cache ends, or at 0 if there is no cache yet.
        starts = (self.start if isinstance(self, CrossAttention) else 0, 0)
        if decode:
            starts = (self.get_variable("cache", "cache_index", 0),) * 2
        arrays = split_heads(self, arrays, starts=starts)
        if decode:
            arrays, mask, bias = with_cache(self, arrays, mask, bias)
        heads = (*leading(self), HEAD_AXES, HIDDEN_AXES)
        attention = attention_of(self, decode=decode)
        arrays = [constrain(array, heads) for array in arrays]
        context = attention(*arrays, mask, bias, deterministic=deterministic)
        context = context.reshape(*context.shape[:2], -1)
        out = DenseGeneral(
            inputs_q.shape[-1],
            kernel_init=self.kernel_init,
            kernel_axes=(W_TP_AXES, W_FSDP_AXES),
            use_bias=self.use_bias,
            bias_init=self.bias_init,
            bias_axes=(W_NO_SHARD_AXES,),
            dtype=self.dtype,
            input_axes=(*leading(self), HIDDEN_TP_AXES),
            name="out",
            **adaptation_of(self, "output_proj"),
        )(context)
        return checkpoint_name(out, "out_proj"), normed


class CrossAttention(MultiHeadAttention):
    """The attention of a decoder layer to the output of the encoder.

    Attributes:
      start: Position of the first query. While a layer decodes, it is the position of the token.
    """

    start: Any = 0
