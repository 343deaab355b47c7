"""The oracle of attention: the definition in NumPy and float64, forward and backward.

Only the bias is added in float32, as in every implementation: the sum of -1e9 and a score is then
-1e9. A bias of at most -2e38 hides its key from its query, like False in a mask.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from shardwright.attention.call import Arithmetic, Operands
from shardwright.attention.parts.dropout import keep_factors

# A bias of at most this number hides its key from its query. `masks` has the same bound; it is
# repeated here, so that the oracle is independent.
_HIDING = np.float32(-2e38)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Softmax:
    """Values of the forward pass that the backward pass uses too.

    Attributes:
      logits: Logits after the softcap, `[batch, heads, q_length, kv_length]`.
      p: Weights before dropout, of the same shape.
      lse: `[batch, heads, q_length]`, -inf for a row without keys.
      keep: Factors of the weights under dropout, or 1.
    """

    logits: Any
    p: Any
    lse: Any
    keep: Any


def forward(operands: Operands, recipe: Arithmetic) -> dict[str, Any]:
    """Return the output `o` and the logsumexp `lse`, by name.

    Args:
      operands: Arrays of a call, BTHD, that NumPy can read.
      recipe: The static part of the call.

    Returns:
      `o` is `[batch, q_length, heads, v_dim]`, and `lse` is `[batch, heads, q_length]`.
    """
    softmax = _softmax(operands, recipe)
    _, v = _keys_and_values(operands)
    return {"o": np.einsum("bhts,bshd->bthd", softmax.p * softmax.keep, v), "lse": softmax.lse}


def backward(operands: Operands, recipe: Arithmetic, *, do: Any, dlse: Any) -> dict[str, Any]:
    """Return the cotangents of q, k, v, and of the bias and the sinks if there are any.

    Args:
      operands: As in `forward`.
      recipe: The static part of the call.
      do: Cotangent of the output.
      dlse: Cotangent of the logsumexp, 0 in rows with a logsumexp of -inf.
    """
    softmax = _softmax(operands, recipe)
    q, (k, v) = np.asarray(operands.q, np.float64), _keys_and_values(operands)
    dp = np.einsum("bthd,bshd->bhts", do, v) * softmax.keep
    # Softmax: dlogits = p * (dp - sum(p * dp)). The logsumexp adds p * dlse, since its derivative
    # by a logit is p.
    delta = np.sum(softmax.p * dp, axis=-1) - dlse
    dlogits = softmax.p * (dp - delta[..., None])
    if recipe.softcap is not None:
        # The derivative of tanh is 1 - tanh**2, and tanh is `logits / softcap`.
        dlogits = dlogits * (1.0 - np.square(softmax.logits / recipe.softcap))
    # Only the scores are multiplied by the scale: the bias and the softcap come after it.
    dscores = dlogits * recipe.scale
    grads = {
        "q": np.einsum("bhts,bshd->bthd", dscores, k),
        "k": _by_kv_head(np.einsum("bhts,bthd->bshd", dscores, q), operands),
        "v": _by_kv_head(np.einsum("bhts,bthd->bshd", softmax.p * softmax.keep, do), operands),
    }
    if operands.bias is not None:
        # The bias was broadcast along its dims of size 1, so its gradient is a sum over these dims.
        shared = tuple(dim for dim, size in enumerate(operands.bias.shape) if size == 1)
        grads["bias"] = np.sum(dlogits, axis=shared, keepdims=True)
    if operands.sinks is not None:
        # A sink is a logit without a value: its dp is 0, and its weight is exp(sink - lse).
        share = np.exp(np.asarray(operands.sinks, np.float64)[None, :, None] - softmax.lse)
        grads["sinks"] = -np.sum(share * delta, axis=(0, 2))
    return grads


def _softmax(operands: Operands, recipe: Arithmetic) -> _Softmax:
    k, _ = _keys_and_values(operands)
    seen = _seen(operands, recipe)
    logits = np.einsum("bthd,bshd->bhts", np.asarray(operands.q, np.float64), k) * recipe.scale
    seen = np.broadcast_to(seen, logits.shape)
    if operands.bias is not None:
        bias = np.broadcast_to(np.asarray(operands.bias, np.float32), logits.shape)
        seen = seen & ~(bias <= _HIDING)
        logits = (logits + np.where(seen, bias, 0.0)).astype(np.float32).astype(np.float64)
    if recipe.softcap is not None:
        logits = recipe.softcap * np.tanh(logits / recipe.softcap)
    top = np.max(np.where(seen, logits, -np.inf), axis=-1)
    if operands.sinks is not None:
        top = np.maximum(top, np.asarray(operands.sinks, np.float64)[None, :, None])
    # In a row without keys, -inf - (-inf) would be NaN.
    top = np.where(np.isneginf(top), 0.0, top)
    p = np.exp(np.where(seen, logits, -np.inf) - top[..., None])
    total = np.sum(p, axis=-1)
    if operands.sinks is not None:
        total = total + np.exp(np.asarray(operands.sinks, np.float64)[None, :, None] - top)
    has_keys = total > 0.0
    total = np.where(has_keys, total, 1.0)
    # Use the same random bits as the implementations, so that dropout is compared element by
    # element.
    keep = np.asarray(keep_factors(operands, recipe.dropout), np.float64) if recipe.dropout else 1.0
    return _Softmax(
        logits=logits,
        p=p / total[..., None],
        lse=np.where(has_keys, top + np.log(total), -np.inf),
        keep=keep,
    )


def _seen(operands: Operands, recipe: Arithmetic) -> Any:
    """Return which query sees which key, by the definitions in the docstring of `masks`."""
    q = np.asarray(operands.q_positions)[:, None, :, None]
    kv = np.asarray(operands.kv_positions)[:, None, None, :]
    rules, seen = recipe.mask, kv >= 0
    if rules.causal:
        seen = seen & (kv <= q)
    if rules.window is not None:
        left, right = rules.window
        seen = seen if left is None else seen & (kv >= q - left)
        seen = seen if right is None else seen & (kv <= q + right)
    if rules.chunk is not None:
        seen = seen & (kv // rules.chunk == q // rules.chunk)
    if operands.q_segment_ids is not None:
        seen = seen & (
            np.asarray(operands.q_segment_ids)[:, None, :, None]
            == np.asarray(operands.kv_segment_ids)[:, None, None, :]
        )
    if operands.lengths is not None:
        seen = seen & (kv < np.asarray(operands.lengths)[:, None, None, None])
    return seen if operands.mask is None else seen & np.asarray(operands.mask)


def _keys_and_values(operands: Operands) -> tuple[Any, Any]:
    """Return k and v for every query head, with zeros in rows that hold no key.

    Those rows may hold NaN from an earlier sequence.
    """
    held = np.asarray(operands.kv_positions) >= 0
    if operands.lengths is not None:
        held = held & (np.asarray(operands.kv_positions) < np.asarray(operands.lengths)[:, None])
    repeated = []
    for name in ("k", "v"):
        x = np.asarray(getattr(operands, name), np.float64)
        scale = getattr(operands, f"{name}_scale")
        # Stored rows are dequantized in float64, so only the rounding of the rows themselves
        # remains.
        x = x if scale is None else x * np.asarray(scale, np.float64)[..., None]
        x = np.where(held[:, :, None, None], x, 0.0)
        # Query head h reads kv head h // group, so the copies of a kv head are next to each other.
        repeated.append(np.repeat(x, operands.q.shape[2] // x.shape[2], axis=2))
    return repeated[0], repeated[1]


def _by_kv_head(grad: Any, operands: Operands) -> Any:
    batch, length, heads, dim = grad.shape
    kv_heads = operands.k.shape[2]
    # The transpose of the repeat in `_keys_and_values` is a sum over each group.
    return np.sum(grad.reshape(batch, length, kv_heads, heads // kv_heads, dim), axis=3)
