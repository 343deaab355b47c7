"""`DotProductAttention` without fused kernels, its cache, and `RelativePositionBiases` of T5."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from shardwright.errors import AttentionError, CacheError
from shardwright.interop.transformer_engine.flax.module import (
    Axes,
    Module,
    compact,
    parameter,
    zeros,
)
from shardwright.interop.transformer_engine.scores import (
    AttnSoftmaxType,
    ScoreConfig,
    attend,
    check_mask,
    hidden_pairs,
    read_name,
)
from shardwright.interop.transformer_engine.sharding import HEAD_AXES
from shardwright.layers import relative_bias
from shardwright.layers.relative_bias import RelativeBiasConfig

_LAYOUTS = ("bshd_bshd_bshd", "bshd_bs2hd", "bs3hd")
_SOFTMAX_TYPES = tuple(kind.value for kind in AttnSoftmaxType)
_STRATEGIES = ("DEFAULT", "ALL_GATHER", "ALLGATHER", "RING")


def check_supported(module: Any, *given: Any) -> None:
    """Refuse features that only fused kernels have.

    Raises:
      AttentionError: A field or an argument asks for context parallelism or a function of scores.
    """
    refused = {
        "score_mod": any(each is not None for each in (module.score_mod, *given)),
        "score_mod_bprop": module.score_mod_bprop is not None,
        "context_parallel_axis": bool(getattr(module, "context_parallel_axis", "")),
        "context_parallel_causal_load_balanced": bool(
            getattr(module, "context_parallel_causal_load_balanced", False)
        ),
    }
    for name, is_given in refused.items():
        if is_given:
            raise AttentionError(
                f"{name} is not supported: these modules have no fused kernel",
                path=name,
                fix=f"leave {name} out; shardwright.attention takes any mask, and a strategy can "
                "shard the sequence",
            )


def read_transposed(value: bool | None, name: str) -> bool:
    """Return the field `transpose_batch_sequence`, with TransformerEngine's warning for None."""
    if value is None:
        warnings.warn(
            f"transpose_batch_sequence of {name} defaults to False; it was True before "
            "TransformerEngine 2.10",
            UserWarning,
            stacklevel=5,
        )
    return bool(value)


def unpacked(layout: str, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Return query, key and value. A packed layout stacks them at dim -3."""
    if layout == "bs3hd":
        return tuple(query[..., at, :, :] for at in range(3))
    if layout == "bshd_bs2hd":
        return query, key[..., 0, :, :], key[..., 1, :, :]
    return query, key, value


class SoftmaxOffset(Module):  # type: ignore[misc]
    """The parameter of the learned softmax, at the path that it has in TransformerEngine.

    Attributes:
      heads: Number of heads.
      dtype: Dtype of the parameter.
    """

    heads: int
    dtype: Any = jnp.float32

    @compact  # type: ignore[untyped-decorator]
    def __call__(self) -> Any:
        """Return `softmax_offset`, `[1, heads, 1, 1]`."""
        shape, axes = (1, self.heads, 1, 1), (None, HEAD_AXES, None, None)
        return parameter(self, "softmax_offset", zeros, shape, axes)


class DotProductAttention(Module):  # type: ignore[misc]
    """Attend, with TransformerEngine's names for masks, biases and layouts.

    In a mask, 1 hides a pair of a query and a key. With and without a mask, `attn_mask_type`
    decides causality, and `window_size` decides the window. The type "causal" ignores a mask unless
    there is a window.

    Attributes:
      head_dim: Size of a head. As in TransformerEngine, sizes come from the arrays: this field and
        the next two are not checked against the arrays.
      num_attention_heads: Heads of queries.
      num_gqa_groups: Heads of keys and values. Defaults to `num_attention_heads`.
      attention_dropout: Probability of dropping a weight.
      attn_mask_type: "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right" or
        "padding_causal_bottom_right". With "bottom_right", the last query is at the position of the
        last key.
      attn_bias_type: "no_bias", "pre_scale_bias" or "post_scale_bias". Defaults to
        "post_scale_bias" if there is a bias.
      dtype: Deprecated. Attention runs in the dtype of the inputs.
      dropout_rng_name: Name of the random stream of dropout.
      float32_logits: Whether matmuls and softmax are float32.
      qkv_layout: "bshd_bshd_bshd", "bshd_bs2hd" (key and value packed in `key`) or "bs3hd" (all in
        `query`).
      scale_factor: Factor of the scores. Defaults to `1 / sqrt(head_dim)`.
      transpose_batch_sequence: Whether arrays are `[length, batch, ...]`. None means False, and
        gives a warning.
      window_size: (left, right): a query attends to this many positions before and after its own. A
        negative number means no bound.
      max_segments_per_seq: An option of fused kernels; not used.
      context_parallel_causal_load_balanced: Not supported.
      context_parallel_axis: Not supported.
      context_parallel_strategy: An option of context parallelism; not used.
      context_checkpoint_name: An option of fused kernels; not used.
      softmax_type: "vanilla", "off_by_one" or "learnable".
      score_mod: Not supported.
      score_mod_bprop: Not supported.
    """

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    dtype: Any = None
    dropout_rng_name: str = "dropout"
    float32_logits: bool = False
    qkv_layout: str = "bshd_bshd_bshd"
    scale_factor: float | None = None
    transpose_batch_sequence: bool | None = None
    window_size: tuple[int, int] | None = None
    max_segments_per_seq: int | None = 1
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"
    context_checkpoint_name: str = "context"
    softmax_type: str = "vanilla"
    score_mod: Callable[..., Any] | None = None
    score_mod_bprop: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        self.transpose_batch_sequence = read_transposed(
            self.transpose_batch_sequence, "DotProductAttention"
        )
        super().__post_init__()

    @compact  # type: ignore[untyped-decorator]
    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        sequence_descriptor: Any = None,
        bias: Any = None,
        *,
        deterministic: bool = False,
        mask: Any = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
    ) -> Any:
        """Return the context. It has the shape of the query, without a packed dim."""
        check_supported(self, score_mod_tensors, score_mod_bprop_tensors)
        read_name("context_parallel_strategy", self.context_parallel_strategy.upper(), _STRATEGIES)
        layout = read_name("qkv_layout", self.qkv_layout.lower(), _LAYOUTS)
        arrays = unpacked(layout, query, key, value)
        _check_dtypes(self.dtype, arrays)
        if self.transpose_batch_sequence:
            # Scores are computed with the batch first, whatever the layout.
            arrays = tuple(each.swapaxes(0, 1) for each in arrays)
        # As in TransformerEngine, the number of heads comes from the arrays, not from
        # `num_attention_heads`.
        heads = arrays[0].shape[2]
        default_bias = "no_bias" if bias is None else "post_scale_bias"
        config = ScoreConfig(
            mask_type=self.attn_mask_type,
            bias_type=(self.attn_bias_type or default_bias).lower(),
            scale=arrays[0].shape[-1] ** -0.5 if self.scale_factor is None else self.scale_factor,
            window=self.window_size,
            softmax_type=AttnSoftmaxType(
                read_name("softmax_type", self.softmax_type, _SOFTMAX_TYPES)
            ),
            float32_logits=self.float32_logits,
            dropout=self.attention_dropout,
        )
        is_dropping = not deterministic and self.attention_dropout > 0
        rng = self.make_rng(self.dropout_rng_name) if is_dropping else None
        offset = None
        if config.softmax_type is AttnSoftmaxType.LEARNABLE_SOFTMAX:
            offset = SoftmaxOffset(heads, name=self._backend_name())()
        mask = _only_mask(sequence_descriptor, mask)
        out = attend(config, *arrays, mask=mask, bias=bias, offset=offset, dropout_key=rng)
        return out.swapaxes(0, 1) if self.transpose_batch_sequence else out

    def _backend_name(self) -> str:
        """Return the name under which a checkpoint has the parameter of the softmax."""
        # Checkpoints that TransformerEngine wrote on a GPU have the name of its fused backend.
        fused = "_FusedDotProductAttention_0"
        is_fused = fused in self.variables.get("params", {})
        return fused if is_fused else "_UnfusedDotProductAttention_0"


def _only_mask(descriptor: Any, mask: Any) -> Any:
    """Return the mask, given as `sequence_descriptor` or under its old name `mask`.

    Raises:
      AttentionError: Both are given, or the descriptor is not an array.
    """
    if mask is not None:
        if descriptor is not None:
            raise AttentionError(
                "sequence_descriptor and mask are both given",
                path="mask",
                fix="pass the mask as sequence_descriptor",
            )
        warnings.warn(
            "mask is deprecated; pass it as sequence_descriptor", UserWarning, stacklevel=4
        )
        descriptor = mask
    if descriptor is None or isinstance(descriptor, (jnp.ndarray, np.ndarray)):
        return descriptor
    raise AttentionError(
        f"sequence_descriptor is a {type(descriptor).__name__}",
        path="sequence_descriptor",
        fix="pass an array, [batch, 1 or heads, q_length, kv_length], in which 1 hides a pair",
    )


def _check_dtypes(dtype: Any, arrays: Any) -> None:
    """Check that query, key and value have one dtype, which is the field `dtype` if it is given."""
    own = {each.dtype for each in arrays}
    if len(own) > 1 or (dtype is not None and jnp.dtype(dtype) not in own):
        raise AttentionError(
            f"query, key and value are {', '.join(str(each.dtype) for each in arrays)}, "
            f"and dtype={dtype!r}",
            path="dtype",
            fix="give all three one dtype, and leave the field dtype out",
        )
    if dtype is not None:
        warnings.warn(
            "the field dtype is deprecated; attention runs in the dtype of the inputs",
            UserWarning,
            stacklevel=4,
        )


def with_cache(module: Any, arrays: Any, mask: Any, bias: Any) -> tuple[list[Any], Any, Any]:
    """Append keys and values to the cache; return all cached keys and values, and their mask.

    The first call creates the cache and writes nothing. The length of its keys is the length of the
    cache. `cache_index` is the number of tokens that later calls have written.

    Args:
      module: A `MultiHeadAttention`.
      arrays: Query, key and value of this call.
      mask: `[batch, 1 or heads, q_length, cache length]`; where it is 1, the pair is hidden. The
        mask type "causal" ignores it.
      bias: `[1, heads, q_length, cache length]`, or `[1, heads, cache length, cache length]`.

    Returns:
      (query, all keys, all values), a mask with causality and the window, and the rows of the bias
      for the queries of this call.

    Raises:
      CacheError: The tokens do not fit the cache. Inside a trace, the result is NaN instead.
      ShardingError: The mask is not valid; see `scores.check_mask`.
    """
    query, key, value = arrays
    dim = 0 if module.transpose_batch_sequence else 1
    exists = module.has_variable("cache", "cached_key")
    keys = module.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype)
    values = module.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype)
    index = module.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32))
    start, count = index.value, query.shape[dim]
    if exists:
        length = keys.value.shape[dim]
        is_full = start + count > length
        if not isinstance(is_full, jax.core.Tracer) and bool(np.asarray(is_full)):
            raise CacheError(
                f"the cache has {length} rows, {int(start)} are filled, and {count} more tokens "
                "are appended",
                path="cache_index",
                fix="initialize the module with inputs as long as the longest sequence",
            )
        key = _written(keys.value, key, start, dim)
        value = _written(values.value, value, start, dim)
        keys.value, values.value, index.value = key, value, start + count
        # A traced program cannot raise an error, and `dynamic_update_slice` has overwritten earlier
        # rows. So make the values NaN.
        value = jnp.where(is_full, jnp.nan, value)
    batch = query.shape[1 - dim]
    check_mask(mask, (batch, query.shape[2], count, key.shape[dim]))
    mask = jnp.asarray(
        hidden_pairs(
            ScoreConfig(mask_type=module.attn_mask_type, window=module.window_size),
            count,
            key.shape[dim],
            mask=mask,
            start=start,
            is_cached=True,
        )
    )
    # If the bias covers all positions, take the rows of the tokens of this call.
    if bias is not None and exists and bias.shape[2] == key.shape[dim]:
        bias = jax.lax.dynamic_slice_in_dim(bias, start, count, axis=2)
    return [query, key, value], mask, bias


def _written(stored: Any, rows: Any, start: Any, dim: int) -> Any:
    """Return the stored rows, with new rows from `start` on. They are sharded like the new rows."""
    sharding = jax.typeof(rows).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        # Over Explicit axes, an update must have the sharding of the updated array.
        stored = jax.sharding.reshard(stored, sharding)
    return jax.lax.dynamic_update_slice_in_dim(stored, rows.astype(stored.dtype), start, dim)


class RelativePositionBiases(Module):  # type: ignore[misc]
    """A learned bias of attention logits, per head and bucket of distances.

    Attributes:
      num_buckets: Number of buckets.
      max_distance: From this distance on, all keys are in the last bucket.
      num_attention_heads: Number of heads.
      embedding_init: Initializer of `rel_embedding`, `[heads, buckets]`.
      embedding_axes: Logical names of `rel_embedding`.
      dtype: Dtype of the parameter and the result.
    """

    num_buckets: int
    max_distance: int
    num_attention_heads: int
    embedding_init: Any = nn.linear.default_embed_init
    embedding_axes: Axes = ("heads", "relpos_buckets")
    dtype: Any = jnp.float32

    @compact  # type: ignore[untyped-decorator]
    def __call__(self, q_seqlen: int, k_seqlen: int, bidirectional: bool = True) -> Any:
        """Return the bias, `[1, heads, q_seqlen, k_seqlen]`."""
        config = RelativeBiasConfig(
            heads=self.num_attention_heads,
            buckets=self.num_buckets,
            max_distance=self.max_distance,
            bidirectional=bidirectional,
        )
        shape = (self.num_attention_heads, self.num_buckets)
        table = parameter(self, "rel_embedding", self.embedding_init, shape, self.embedding_axes)
        return relative_bias.apply(
            config, table, q_length=q_seqlen, kv_length=k_seqlen, dtype=self.dtype
        )
