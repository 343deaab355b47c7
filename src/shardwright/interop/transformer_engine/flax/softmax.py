"""`Softmax` of attention logits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from shardwright.errors import LayerError, RankMismatchError
from shardwright.interop.transformer_engine.flax.variables import Module, compact
from shardwright.interop.transformer_engine.scores import (
    AttnSoftmaxType,
    SoftmaxFusionType,
    softmax,
)


class Softmax(Module):  # type: ignore[misc]
    """Softmax over the keys, with a scale, a bias and a mask.

    Attributes:
      scale_factor: Factor of the logits after the bias is added.
      softmax_fusion_type: Which mask is applied: none, the given one, or a causal one.
      softmax_type: What the denominator has besides the logits.
    """

    scale_factor: float = 1.0
    softmax_fusion_type: SoftmaxFusionType = SoftmaxFusionType.SCALED
    softmax_type: AttnSoftmaxType = AttnSoftmaxType.VANILLA_SOFTMAX

    @compact  # type: ignore[untyped-decorator]
    def __call__(
        self, inputs: Any, mask: Any = None, bias: Any = None, softmax_offset: Any = None
    ) -> Any:
        """Return the weights of `inputs`, `[batch, heads, q_length, kv_length]`.

        A pair with a mask of 1 gets the weight 0.
        """
        if inputs.ndim != 4:
            raise RankMismatchError(
                f"inputs have shape {inputs.shape}",
                path="inputs",
                fix="pass [batch, heads, q_length, kv_length]",
            )
        kind, fusion = self.softmax_type, self.softmax_fusion_type
        if softmax_offset is not None and kind is not AttnSoftmaxType.LEARNABLE_SOFTMAX:
            raise LayerError(
                f"softmax_offset is given, and softmax_type is {kind.value!r}",
                path="softmax_offset",
                fix="leave it out, or write AttnSoftmaxType.LEARNABLE_SOFTMAX",
            )
        offset = 0.0 if kind is AttnSoftmaxType.OFF_BY_ONE_SOFTMAX else softmax_offset
        logits = inputs if bias is None else inputs + bias.astype(inputs.dtype)
        hidden = None
        if fusion is SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED:
            q_length, kv_length = inputs.shape[-2:]
            hidden = ~jnp.tri(q_length, kv_length, dtype=bool)
        elif fusion is SoftmaxFusionType.SCALED_MASKED:
            if mask is None:
                raise LayerError(
                    "softmax_fusion_type is SCALED_MASKED, and there is no mask",
                    path="mask",
                    fix="pass a mask, in which 1 hides a pair, or write SCALED",
                )
            hidden = mask == 1
        return softmax(logits * self.scale_factor, hidden, offset=offset)
