"""Attention as TransformerEngine computes it without a fused kernel, as functions on arrays.

In a mask, 1 hides a pair of a query and a key. Everywhere else in shardwright, True means attend.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from shardwright.errors import LayerError, RankMismatchError, did_you_mean
from shardwright.interop.transformer_engine.sharding import BATCH_AXES, HEAD_AXES, constrain
from shardwright.layers.dropout import dropout


class SoftmaxFusionType(enum.Enum):
    """Which mask `Softmax` applies."""

    SCALED = "scaled"
    SCALED_MASKED = "scaled_masked"
    SCALED_UPPER_TRIANG_MASKED = "scaled_upper_triang_masked"


class AttnSoftmaxType(enum.Enum):
    """Which term is added to the denominator of the softmax.

    The three types add nothing, one logit of 0, or one learned logit per head.
    """

    VANILLA_SOFTMAX = "vanilla"
    OFF_BY_ONE_SOFTMAX = "off_by_one"
    LEARNABLE_SOFTMAX = "learnable"


def softmax(logits: Any, hidden: Any = None, *, offset: Any = None) -> Any:
    """Return the softmax over the last dim, in the dtype of the logits.

    A row whose pairs are all hidden gives zeros.

    Args:
      logits: `[batch, heads, q_length, kv_length]`.
      hidden: Bools that broadcast to the logits. True hides a pair: its result is 0.
      offset: A logit that is added to the denominator only: a number, or an array that broadcasts
        to the logits.
    """
    visible = None if hidden is None else ~hidden
    if offset is None:
        return jax.nn.softmax(logits, where=visible)
    offset = jnp.asarray(offset, logits.dtype)
    top = jnp.max(logits, axis=-1, keepdims=True, where=visible, initial=-jnp.inf)
    # The maximum cancels, so its gradient is 0 except for rounding. Do not use `stop_gradient`,
    # because TransformerEngine has this rounding too.
    top = jnp.maximum(top, offset)
    shifted = logits - top
    if visible is not None:
        shifted = jnp.where(visible, shifted, -jnp.inf)
    weights = jnp.exp(shifted)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(offset - top))


# Name -> (uses a given mask, is causal, places the last query at the last key).
MASK_TYPES = {
    "no_mask": (False, False, False),
    "padding": (True, False, False),
    "causal": (False, True, False),
    "padding_causal": (True, True, False),
    "causal_bottom_right": (False, True, True),
    "padding_causal_bottom_right": (True, True, True),
}
_ALIASES = {
    "causal_padding": "padding_causal",
    "bottom_right_causal": "causal_bottom_right",
    "causal_padding_bottom_right": "padding_causal_bottom_right",
    "bottom_right_causal_padding": "padding_causal_bottom_right",
    "bottom_right_padding_causal": "padding_causal_bottom_right",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoreConfig:
    """Options of `attend`.

    Attributes:
      mask_type: A key of `MASK_TYPES`, or one of its other spellings.
      bias_type: "no_bias", "pre_scale_bias" for `(q k + bias) * scale`, or "post_scale_bias".
      scale: Factor of the scores.
      window: (left, right): a query attends to this many positions before and after its own
        position. A negative number means no bound.
      softmax_type: Which softmax.
      float32_logits: Whether matmuls and softmax are float32.
      dropout: Probability of dropping a weight.

    Raises:
      LayerError: A name is unknown.
    """

    mask_type: str = "causal"
    bias_type: str = "no_bias"
    scale: float = 1.0
    window: tuple[int, int] | None = None
    softmax_type: AttnSoftmaxType = AttnSoftmaxType.VANILLA_SOFTMAX
    float32_logits: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        name = _ALIASES.get(self.mask_type, self.mask_type)
        object.__setattr__(self, "mask_type", name)
        read_name("attn_mask_type", name, tuple(MASK_TYPES))
        read_name(
            "attn_bias_type", self.bias_type, ("no_bias", "pre_scale_bias", "post_scale_bias")
        )


def read_name(field: str, name: Any, known: tuple[str, ...]) -> str:
    """Return a name, after checking that it is known.

    Raises:
      LayerError: The name is unknown.
    """
    if name not in known:
        hint = did_you_mean(str(name), known)
        raise LayerError(
            f"{field}={name!r} is unknown",
            path=field,
            fix=f"{hint} write one of {', '.join(known)}".strip(),
        )
    return str(name)


def attend(
    config: ScoreConfig,
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    offset: Any = None,
    dropout_key: Any = None,
    start: Any = None,
) -> jax.Array:
    """Return the context, `[batch, q_length, heads, head_dim]`, in the dtype of the query.

    Query head i reads kv head `i * kv_heads // heads`.

    Args:
      config: Options.
      query: `[batch, q_length, heads, head_dim]`.
      key: `[batch, kv_length, kv_heads, head_dim]`.
      value: `[batch, kv_length, kv_heads, v_dim]`.
      mask: `[batch, 1 or heads, q_length, kv_length]`; where it is 1, the pair is hidden. The mask
        types "no_mask" and "causal" ignore it, unless there is a window.
      bias: Broadcasts to `[batch, heads, q_length, kv_length]`.
      offset: `[1, heads, 1, 1]`, for the learned softmax.
      dropout_key: A JAX key. None drops nothing.
      start: Position of the first query, if the keys come from a cache. By default, the mask type
        decides it: 0, unless the type has "bottom_right".

    Raises:
      LayerError: The mask type needs a mask, or bias and bias type do not agree.
      RankMismatchError: The shapes do not fit each other.
    """
    _check(config, query, key, value, mask, bias)
    batch, q_length, heads, head_dim = query.shape
    kv_length, kv_heads = key.shape[1:3]
    dtype, groups = query.dtype, heads // kv_heads
    if config.float32_logits:
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    # Query heads of one group are neighbors, so a reshape pairs them with their kv head, and keys
    # need not be repeated.
    grouped = query.reshape(batch, q_length, kv_heads, groups, head_dim)
    # Use TransformerEngine's name, for remat policies that save by names.
    logits = checkpoint_name(jnp.einsum("bqhgd,bkhd->bhgqk", grouped, key), "logits")
    logits = logits.reshape(batch, heads, q_length, kv_length)
    logits = constrain(logits, (BATCH_AXES, HEAD_AXES, None, None))
    if config.bias_type == "pre_scale_bias":
        logits = logits + bias.astype(dtype)
    logits = logits * config.scale
    if config.bias_type == "post_scale_bias":
        logits = logits + bias.astype(dtype)
    if config.softmax_type is AttnSoftmaxType.OFF_BY_ONE_SOFTMAX:
        offset = 0.0
    hidden = hidden_pairs(config, q_length, kv_length, mask=mask, start=start)
    weights = softmax(logits, hidden, offset=offset).astype(dtype)
    # The shape of the weights decides which random bits dropout takes, so use TransformerEngine's
    # shape.
    if groups > 1:
        weights = weights.reshape(batch, kv_heads, groups, q_length, kv_length)
    if dropout_key is not None and config.dropout > 0:
        # As in TransformerEngine, weights are multiplied by 1 / (1 - dropout), not divided.
        weights = weights * dropout(jnp.ones_like(weights), dropout_key, config.dropout)
    weights = weights.reshape(batch, kv_heads, groups, q_length, kv_length)
    context = jnp.einsum("bhgqk,bkhd->bqhgd", weights, value)
    return context.reshape(batch, q_length, heads, value.shape[-1])


def hidden_pairs(
    config: ScoreConfig,
    q_length: int,
    kv_length: int,
    *,
    mask: Any = None,
    start: Any = None,
    is_cached: bool = False,
) -> Any:
    """Return which pairs are hidden, bool `[1 or batch, 1 or heads, q, kv]`; None if no pair is.

    `config` decides causality and the window, with and without a mask.

    Args:
      config: The options.
      q_length: Number of queries.
      kv_length: Number of keys, at the positions from 0 on.
      mask: Where it is 1, the pair is hidden too.
      start: Position of the first query. By default, the mask type decides it: 0, unless the type
        has "bottom_right".
      is_cached: Whether the keys come from a cache, which is causal under every mask type.
    """
    takes_mask, is_causal, is_at_end = MASK_TYPES[config.mask_type]
    # Under "bottom_right", the last query sees all keys.
    first: Any = kv_length - q_length if is_at_end else 0
    if start is not None:
        first = start
    # The distance is positive for keys after the query.
    distance = jnp.arange(kv_length)[None] - (jnp.arange(q_length) + first)[:, None]
    left, right = (-1, -1) if config.window is None else config.window
    rules = []
    if is_causal or is_cached:
        rules.append(distance > 0)
    if right >= 0:
        rules.append(distance > right)
    if left >= 0:
        rules.append(distance < -left)
    hidden: Any = None
    for rule in rules:
        hidden = rule if hidden is None else hidden | rule
    hidden = None if hidden is None else hidden[None, None]
    # TransformerEngine ignores the mask under "causal", unless there is a window.
    if mask is not None and (takes_mask or (is_causal and config.window is not None)):
        own = jnp.asarray(mask) == 1
        hidden = own if hidden is None else hidden | own
    return hidden


def _check(config: ScoreConfig, query: Any, key: Any, value: Any, mask: Any, bias: Any) -> None:
    fits = (
        query.ndim == key.ndim == value.ndim == 4
        and query.shape[0] == key.shape[0]
        and key.shape[:3] == value.shape[:3]
        and query.shape[3] == key.shape[3]
    )
    if not fits:
        shapes = {"query": query.shape, "key": key.shape, "value": value.shape}
        raise RankMismatchError(
            ", ".join(f"{name} has {shape}" for name, shape in shapes.items()),
            fix="pass [batch, length, heads, head_dim] with equal batches, and keys and values of "
            "equal lengths",
        )
    if query.shape[2] % key.shape[2]:
        raise RankMismatchError(
            f"{key.shape[2]} kv heads do not divide {query.shape[2]} heads",
            fix="pass num_gqa_groups that divides num_attention_heads",
        )
    if mask is None and MASK_TYPES[config.mask_type][0]:
        raise LayerError(
            f"attn_mask_type={config.mask_type!r} needs a mask",
            path="mask",
            fix='pass a mask, in which 1 hides a pair, or write "no_mask" or "causal"',
        )
    if (bias is None) is not (config.bias_type == "no_bias"):
        given = "no bias is given" if bias is None else "a bias is given"
        raise LayerError(
            f"attn_bias_type={config.bias_type!r}, and {given}",
            path="bias",
            fix="leave out both bias and attn_bias_type, or give both",
        )
    pairs = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    check_mask(mask, pairs)
    _check_shape("bias", bias, pairs)


def check_mask(mask: Any, pairs: tuple[int, ...]) -> None:
    """Check a mask in which 1 hides a pair. The values of a traced mask cannot be checked.

    Raises:
      RankMismatchError: The mask does not broadcast to the logits,
        `[batch, heads, q_length, kv_length]`.
      LayerError: The mask has values other than 0 and 1, such as those of an additive mask.
    """
    _check_shape("mask", mask, pairs)
    if mask is None:
        return
    dtype = np.dtype(mask.dtype)
    is_flags = np.issubdtype(dtype, np.bool_) or np.issubdtype(dtype, np.integer)
    # An integer mask of 0 and -10000, to be added to logits, would hide nothing here.
    if is_flags and (isinstance(mask, jax.core.Tracer) or np.isin(np.asarray(mask), (0, 1)).all()):
        return
    raise LayerError(
        "the mask has values other than 0 and 1" if is_flags else f"the mask is {dtype}",
        path="mask",
        fix="pass integers or bools, in which 1 hides a pair; values to add to logits go to bias=",
    )


def _check_shape(name: str, array: Any, pairs: tuple[int, ...]) -> None:
    shape = np.shape(array)
    fits = len(shape) == 4 and all(a in (1, b) for a, b in zip(shape, pairs, strict=True))
    if array is not None and not fits:
        raise RankMismatchError(
            f"the {name} has shape {shape}, and the logits have {pairs}",
            path=name,
            fix="pass [batch, heads, q_length, kv_length]; each dim has its full size or size 1",
        )


_METHODS = ("consecutive", "alternate")


def rotate(
    x: Any, *, windows: tuple[int, int] = (1, 10_000), method: str = "consecutive", start: Any = 0
) -> jax.Array:
    """Rotate queries or keys by `position / (min * (max / min) ** (2i / head_dim))`, in float32.

    Args:
      x: `[batch, length, heads, head_dim]`.
      windows: (min, max), the shortest and the longest time scale.
      method: Which two elements form a point: "consecutive" for 2i and 2i + 1, "alternate" for i
        and i + head_dim / 2.
      start: Position of the first token.

    Raises:
      LayerError: The method is unknown, or the windows are not positive.
      RankMismatchError: `head_dim` is odd.
    """
    name = method.lower().strip().replace("-", "").replace("_", "")
    if name not in _METHODS or not 0 < windows[0] <= windows[1]:
        raise LayerError(
            f"rotary_pos_emb_group_method={method!r}, rotary_pos_emb_windows={windows}",
            path="rotary_pos_emb",
            fix='write "consecutive" or "alternate", and two positive numbers, such as (1, 10000)',
        )
    size = x.shape[-1]
    if size % 2:
        raise RankMismatchError(
            f"head_dim={size} is odd", path="head_dim", fix="choose an even head_dim"
        )
    # The time scales of `rotary_pos_emb`: a geometric series from the shortest to the longest.
    fraction = jnp.arange(0, size, 2) / size
    scales = windows[0] * (windows[1] / windows[0]) ** fraction
    positions = (jnp.arange(x.shape[1]) + start)[None, :, None, None]
    sin, cos = jnp.sin(positions / scales), jnp.cos(positions / scales)
    if name == "consecutive":
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x[..., : size // 2], x[..., size // 2 :]
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    if name == "consecutive":
        return jnp.stack(rotated, axis=-1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
