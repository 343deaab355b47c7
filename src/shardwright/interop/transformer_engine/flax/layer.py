"""`TransformerLayer`: self-attention, cross-attention (in a decoder layer only), and an MLP."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from shardwright.errors import LayerError
from shardwright.interop.transformer_engine.flax.attention import RelativePositionBiases
from shardwright.interop.transformer_engine.flax.mlp import LayerNormMLP
from shardwright.interop.transformer_engine.flax.module import (
    Dropout,
    LayerNorm,
    Module,
    check_inputs,
    compact,
    fan_in_init,
    zeros,
)
from shardwright.interop.transformer_engine.flax.multi_head import (
    CrossAttention,
    MultiHeadAttention,
    adaptation_of,
    leading,
)
from shardwright.interop.transformer_engine.scores import ScoreConfig, hidden_pairs
from shardwright.interop.transformer_engine.sharding import (
    HIDDEN_AXES,
    HIDDEN_TP_AXES,
    W_FSDP_AXES,
    W_JOINED_AXES,
    W_NO_SHARD_AXES,
    W_TP_AXES,
    constrain,
)


class TransformerLayerType(enum.Enum):
    """Whether a layer belongs to an encoder or to a decoder.

    A decoder layer also attends to the output of the encoder.
    """

    ENCODER = "encoder"
    DECODER = "decoder"


# Fields of a layer that its self-attention and its cross-attention have under the same name.
_SAME = (
    *("num_attention_heads", "num_gqa_groups", "attention_dropout", "dropout_rng_name", "dtype"),
    *("layernorm_type", "layernorm_epsilon", "zero_centered_gamma", "use_bias", "bias_init"),
    *("enable_rotary_pos_emb", "rotary_pos_emb_windows", "rotary_pos_emb_group_method"),
    *("low_rank_adaptation_scope", "low_rank_adaptation_dim", "low_rank_adaptation_alpha"),
    *("fuse_qkv_params", "transpose_batch_sequence", "enable_sequence_parallel"),
    *("scale_attn_logits", "scaled_query_init", "window_size", "softmax_type"),
)


def attention_of(
    layer: Any, name: str, kind: Any = MultiHeadAttention, **fields: Any
) -> MultiHeadAttention:
    """Create an attention module of a layer."""
    attention: MultiHeadAttention = kind(
        head_dim=layer.hidden_size // layer.num_attention_heads,
        float32_logits=layer.float32_attention_logits,
        kernel_init=layer.mha_kernel_init,
        return_layernorm_output=layer.apply_residual_connection_post_layernorm,
        name=name,
        **{**{field: getattr(layer, field) for field in _SAME}, **fields},
    )
    return attention


def cross_attention_of(
    layer: Any, inputs: tuple[Any, Any], mask: Any, *, start: Any
) -> tuple[MultiHeadAttention, Any]:
    """Create the cross-attention of a decoder layer; return the module and its mask.

    Args:
      layer: The layer.
      inputs: Input of the layer, and output of the encoder.
      mask: Mask of pairs: where it is 1, the pair is hidden.
      start: Position of the first query, None if the layer does not decode.
    """
    fields: dict[str, Any] = {"attn_mask_type": "padding", "attn_bias_type": "no_bias"}
    if start is not None:
        fields["start"] = start
    if start is not None and layer.window_size is not None and mask is not None:
        # The attention module would count the window from row 0 of the new queries, not from their
        # positions. So put the window into the mask here.
        lengths = [each.shape[0 if layer.transpose_batch_sequence else 1] for each in inputs]
        config = ScoreConfig(mask_type="padding", window=layer.window_size)
        mask = hidden_pairs(config, *lengths, mask=mask, start=start)
        fields["window_size"] = None
    return attention_of(layer, "encoder_decoder_attention", CrossAttention, **fields), mask


def self_attention_of(layer: Any, name: str) -> MultiHeadAttention:
    """Create the self-attention of a layer."""
    return attention_of(
        layer,
        name,
        # A layer has a norm before its attention or at its end, not both.
        input_layernorm=not layer.output_layernorm,
        attn_mask_type=layer.self_attn_mask_type,
        attn_bias_type=layer.self_attn_bias_type,
        score_mod=layer.score_mod,
        score_mod_bprop=layer.score_mod_bprop,
    )


def mlp_of(layer: Any) -> LayerNormMLP:
    """Create the MLP of a layer."""
    inner = leading(layer)
    return LayerNormMLP(
        intermediate_dim=layer.mlp_hidden_size,
        layernorm_type=layer.layernorm_type,
        epsilon=layer.layernorm_epsilon,
        zero_centered_gamma=layer.zero_centered_gamma,
        scale_axes=(W_NO_SHARD_AXES,),
        ln_bias_axes=(W_NO_SHARD_AXES,),
        kernel_init=layer.mlp_kernel_init,
        kernel_axes_1=(W_FSDP_AXES, W_JOINED_AXES, W_TP_AXES),
        kernel_axes_2=(W_TP_AXES, W_FSDP_AXES),
        use_bias=layer.use_bias,
        bias_init=layer.bias_init,
        bias_axes_1=(W_JOINED_AXES, W_TP_AXES),
        bias_axes_2=(W_NO_SHARD_AXES,),
        return_layernorm_output=layer.apply_residual_connection_post_layernorm,
        activations=layer.mlp_activations,
        activation_params=layer.mlp_activation_params,
        intermediate_dropout_rng_name=layer.dropout_rng_name,
        intermediate_dropout_rate=layer.intermediate_dropout,
        intermediate_hidden_dropout_dims=layer.intermediate_dropout_dims,
        dtype=layer.dtype,
        layernorm_input_axes=residual_names(layer),
        dot_1_input_axes=(*inner, HIDDEN_AXES),
        dot_2_input_axes=(*inner, HIDDEN_TP_AXES),
        transpose_batch_sequence=layer.transpose_batch_sequence,
        name="mlp",
        **adaptation_of(layer, "mlp"),
    )


def output_norm_of(layer: Any) -> LayerNorm:
    """Create the norm after a layer."""
    return LayerNorm(
        epsilon=layer.layernorm_epsilon,
        layernorm_type=layer.layernorm_type,
        zero_centered_gamma=layer.zero_centered_gamma,
        scale_axes=(W_NO_SHARD_AXES,),
        bias_axes=(W_NO_SHARD_AXES,),
        dtype=layer.dtype,
        name="output_layernorm",
    )


def add(
    layer: Any, branch: Any, residual: Any, *, deterministic: bool, drop_path: float = 0.0
) -> Any:
    """Apply dropout and stochastic depth to a branch, then add the branch to the residual."""
    names, stream = residual_names(layer), layer.dropout_rng_name
    branch, residual = constrain(branch, names), constrain(residual, names)
    drop = Dropout(layer.hidden_dropout, layer.hidden_dropout_dims, stream)
    branch = drop(branch, deterministic)
    if drop_path > 0:
        # Stochastic depth (arXiv:1603.09382) draws one random number per sequence, so the mask is
        # the same along all dims but the batch.
        inner = (0, 2) if layer.transpose_batch_sequence else (1, 2)
        branch = Dropout(drop_path, inner, stream)(branch, deterministic)
    return branch + residual


def residual_names(layer: Any) -> tuple[str, str, str]:
    """Return the logical names of the residual."""
    return (*leading(layer, is_sharded=layer.enable_sequence_parallel), HIDDEN_AXES)


def bias_of_positions(layer: Any, length: int, *, is_encoder: bool) -> Any:
    """Return the relative position bias of the self-attention, or None."""
    if not layer.enable_relative_embedding:
        return None
    embedding = layer.relative_embedding
    if embedding is None:
        embedding = RelativePositionBiases(
            # The defaults of T5.
            num_buckets=32,
            max_distance=128,
            num_attention_heads=layer.num_attention_heads,
            dtype=layer.dtype,
            embedding_init=nn.initializers.variance_scaling(
                1.0, "fan_avg", "uniform", dtype=layer.dtype
            ),
            name="relpos_bias",
        )
    return embedding(length, length, is_encoder)


def check(layer: Any, x: Any, encoded: Any, decode: bool) -> None:
    """Check the fields of a layer against its inputs.

    Raises:
      LayerError: Fields and inputs contradict each other.
      RankMismatchError: The inputs do not have three dims.
    """
    kind, heads, size = layer.layer_type, layer.num_attention_heads, layer.hidden_size
    is_encoder = kind is TransformerLayerType.ENCODER
    what, path, fix = "", "", "write TransformerLayerType.ENCODER or TransformerLayerType.DECODER"
    if not isinstance(kind, TransformerLayerType):
        what, path = f"layer_type={kind!r}", "layer_type"
    elif size % heads:
        what, path = f"num_attention_heads={heads} do not divide hidden_size={size}", "hidden_size"
        fix = "choose a number of heads that divides hidden_size"
    elif is_encoder and decode:
        what, path, fix = "an encoder cannot decode", "decode", "write TransformerLayerType.DECODER"
    elif not is_encoder and encoded is None:
        what, path = "a decoder needs the output of the encoder", "encoded"
        fix = "pass encoded, or write TransformerLayerType.ENCODER"
    if what:
        raise LayerError(what, path=path, fix=fix)
    check_inputs("inputs", x, rank=3)


class TransformerLayer(Module):  # type: ignore[misc]
    """One layer of a transformer.

    Attributes:
      hidden_size: Size of the residual. The size of a head follows from it. As in
        TransformerEngine, this field is not compared with the inputs.
      mlp_hidden_size: Size of the hidden dim of the MLP.
      num_attention_heads: Heads of queries.
      num_gqa_groups: Heads of keys and values. Defaults to `num_attention_heads`.
      layernorm_type: As in `LayerNorm`.
      layernorm_epsilon: `epsilon` of `LayerNorm`.
      zero_centered_gamma: As in `LayerNorm`.
      hidden_dropout: Probability of dropping an element of a branch, before the branch is added to
        the residual.
      hidden_dropout_dims: Dims along which all elements share one value of this dropout's mask.
      attention_dropout: As in `DotProductAttention`.
      intermediate_dropout: Probability of dropping a hidden element of the MLP.
      intermediate_dropout_dims: Dims along which all elements share one value of this dropout's
        mask.
      dropout_rng_name: Name of the random stream of every dropout.
      mha_kernel_init: Initializer of the kernels of attention. Defaults to that of
        `MultiHeadAttention`.
      mlp_kernel_init: Initializer of the kernels of the MLP. Defaults to that of `LayerNormMLP`.
      mlp_activations: As `activations` in `LayerNormMLP`.
      mlp_activation_params: As in `LayerNormMLP`.
      use_bias: Whether matmuls have biases.
      bias_init: Initializer of the biases.
      apply_residual_connection_post_layernorm: Whether a branch is added to the output of its norm,
        not to the input of the norm.
      output_layernorm: Whether the norm is at the end of the layer instead of before its attention.
      float32_attention_logits: As `float32_logits` in `DotProductAttention`.
      layer_type: Encoder or decoder.
      self_attn_mask_type: As `attn_mask_type` in `DotProductAttention`.
      self_attn_bias_type: As `attn_bias_type` in `DotProductAttention`.
      enable_relative_embedding: Whether logits get a relative position bias.
      relative_embedding: The module of the relative position bias. Defaults to that of T5, with 32
        buckets.
      enable_rotary_pos_emb: As in `MultiHeadAttention`.
      rotary_pos_emb_windows: As in `MultiHeadAttention`.
      rotary_pos_emb_group_method: As in `MultiHeadAttention`.
      low_rank_adaptation_scope: As in `MultiHeadAttention`.
      low_rank_adaptation_dim: As in `DenseGeneral`.
      low_rank_adaptation_alpha: As in `DenseGeneral`.
      dtype: Dtype of the parameters.
      drop_path: Probability of dropping a branch for a whole sequence.
      fuse_qkv_params: As in `MultiHeadAttention`.
      transpose_batch_sequence: Whether inputs are `[length, batch, hidden_size]`.
      enable_sequence_parallel: Whether the sequence dim of the residual is sharded.
      scale_attn_logits: As in `MultiHeadAttention`.
      scaled_query_init: As in `MultiHeadAttention`.
      window_size: As in `DotProductAttention`.
      softmax_type: As in `DotProductAttention`.
      score_mod: Not supported.
      score_mod_bprop: Not supported.
    """

    hidden_size: int = 512
    mlp_hidden_size: int = 2048
    num_attention_heads: int = 8
    num_gqa_groups: int | None = None
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    hidden_dropout: float = 0.1
    hidden_dropout_dims: Sequence[int] = ()
    attention_dropout: float = 0.1
    intermediate_dropout: float = 0.0
    intermediate_dropout_dims: Sequence[int] = ()
    dropout_rng_name: str = "dropout"
    mha_kernel_init: Any = None
    mlp_kernel_init: Any = None
    mlp_activations: Sequence[str | Callable[[Any], Any]] = ("gelu",)
    mlp_activation_params: Mapping[str, float] | None = None
    use_bias: bool = False
    bias_init: Any = zeros
    apply_residual_connection_post_layernorm: bool = False
    output_layernorm: bool = False
    float32_attention_logits: bool = False
    layer_type: TransformerLayerType = TransformerLayerType.ENCODER
    self_attn_mask_type: str = "causal"
    self_attn_bias_type: str | None = None
    enable_relative_embedding: bool = True
    relative_embedding: Any = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: Any = jnp.float32
    drop_path: float = 0.0
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool = False
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    score_mod: Callable[..., Any] | None = None
    score_mod_bprop: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.mha_kernel_init is None:
            self.mha_kernel_init = fan_in_init(self.dtype, "normal")
        if self.mlp_kernel_init is None:
            self.mlp_kernel_init = fan_in_init(self.dtype)
        if self.num_gqa_groups is None:
            self.num_gqa_groups = self.num_attention_heads
        super().__post_init__()

    @compact  # type: ignore[untyped-decorator]
    def __call__(
        self,
        inputs: Any,
        encoded: Any = None,
        attention_mask: Any = None,
        encoder_decoder_mask: Any = None,
        deterministic: bool = False,
        decode: bool = False,
        max_decode_length: int | None = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
    ) -> Any:
        """Return the output of the layer, shaped like `inputs`."""
        check(self, inputs, encoded, decode)
        is_encoder = self.layer_type is TransformerLayerType.ENCODER
        length = inputs.shape[0 if self.transpose_batch_sequence else 1]
        # The position bias needs all positions of the cache, not only that of the new token.
        length = max_decode_length if decode and max_decode_length else length
        bias = bias_of_positions(self, length, is_encoder=is_encoder)
        names, keep_normed = residual_names(self), self.apply_residual_connection_post_layernorm
        branch: dict[str, Any] = {"deterministic": deterministic, "drop_path": self.drop_path}
        x = constrain(inputs, names)
        # Read the position before the attention creates or changes it.
        cache = self.variables.get("cache", {}).get("self_attention", {})
        start = cache.get("cache_index", 0) if decode else None
        y, normed = self_attention_of(self, "attention" if is_encoder else "self_attention")(
            x,
            x,
            attention_mask,
            bias,
            decode=decode,
            deterministic=deterministic,
            score_mod_tensors=score_mod_tensors,
            score_mod_bprop_tensors=score_mod_bprop_tensors,
        )
        x = add(self, y, normed if keep_normed else x, **branch)
        if not is_encoder:
            x = constrain(x, names)
            attention, mask = cross_attention_of(
                self, (x, encoded), encoder_decoder_mask, start=start
            )
            y, normed = attention(x, encoded, mask, deterministic=deterministic)
            # TransformerEngine does not apply `drop_path` to cross-attention.
            x = add(self, y, normed if keep_normed else x, deterministic=deterministic)
        x = constrain(x, names)
        y, normed = mlp_of(self)(x, deterministic=deterministic)
        x = add(self, y, normed if keep_normed else x, **branch)
        return output_norm_of(self)(constrain(x, names)) if self.output_layernorm else x
