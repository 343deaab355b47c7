"""Every tensor of a Llama-style layer and of an MoE layer, of Llama-3-8B's sizes,
annotated as a model would.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import shardwright as sw

BATCH, PROMPT, CACHE = 16, 4096, 4096
VOCAB, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP = 128256, 4096, 32, 8, 128, 14336
FEW_KV_HEADS = 2
EXPERTS, EXPERTS_PER_TOKEN = 8, 2
LAYERS = 32

# Sizes that the mode decides. A capacity is the average load of an expert; in decode, rounded up to
# a multiple of the shards.
LENGTH, CAPACITY = "length", "capacity"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A named tensor, its annotation and its shape; `LENGTH` and `CAPACITY` stand for sizes that
    depend on the mode.
    """

    name: str
    axes: Any
    sizes: tuple[int | str, ...]

    def shape(self, mode: str) -> tuple[int, ...]:
        """Return the shape in a mode: one token in decode, a whole prompt in the others."""
        length = 1 if mode == "decode" else PROMPT
        capacity = 16 if mode == "decode" else BATCH * PROMPT * EXPERTS_PER_TOKEN // EXPERTS
        by_name = {LENGTH: length, CAPACITY: capacity}
        return tuple(by_name.get(size, size) for size in self.sizes)


def _rows(*rows: tuple[str, Any, tuple[int | str, ...]]) -> tuple[Tensor, ...]:
    return tuple(Tensor(name=name, axes=axes, sizes=sizes) for name, axes, sizes in rows)


_Q = sw.merged((sw.HEAD, HEADS), (sw.HEAD_DIM, HEAD_DIM))
_KV = sw.merged((sw.KV_HEAD, KV_HEADS), (sw.KV_HEAD_DIM, HEAD_DIM))
_FEW = sw.merged((sw.KV_HEAD, FEW_KV_HEADS), (sw.KV_HEAD_DIM, HEAD_DIM))

WEIGHTS: tuple[Tensor, ...] = _rows(
    ("embedding", (sw.VOCAB, sw.EMBED), (VOCAB, EMBED)),
    ("norm", (sw.NORM,), (EMBED,)),
    ("q", (sw.EMBED, sw.HEAD, sw.HEAD_DIM), (EMBED, HEADS, HEAD_DIM)),
    ("k, v", (sw.EMBED, sw.KV_HEAD, sw.KV_HEAD_DIM), (EMBED, KV_HEADS, HEAD_DIM)),
    ("k, v, 2 heads", (sw.EMBED, sw.KV_HEAD, sw.KV_HEAD_DIM), (EMBED, FEW_KV_HEADS, HEAD_DIM)),
    ("o", (sw.HEAD, sw.HEAD_DIM, sw.EMBED), (HEADS, HEAD_DIM, EMBED)),
    ("q flat", (sw.EMBED, _Q), (EMBED, HEADS * HEAD_DIM)),
    ("k, v flat", (sw.EMBED, _KV), (EMBED, KV_HEADS * HEAD_DIM)),
    ("k, v flat, 2 heads", (sw.EMBED, _FEW), (EMBED, FEW_KV_HEADS * HEAD_DIM)),
    ("o flat", (_Q, sw.EMBED), (HEADS * HEAD_DIM, EMBED)),
    ("q bias", (sw.HEAD, sw.HEAD_DIM), (HEADS, HEAD_DIM)),
    ("gate, up", (sw.EMBED, sw.MLP_INTERMEDIATE), (EMBED, MLP)),
    ("gate, up by layout", sw.ColumnWise, (EMBED, MLP)),
    ("gate, up stacked", sw.stacked(sw.ColumnWise), (LAYERS, EMBED, MLP)),
    ("down", (sw.MLP_INTERMEDIATE, sw.EMBED), (MLP, EMBED)),
    ("down by layout", sw.RowWise, (MLP, EMBED)),
    ("gate bias", sw.ColumnWise.bias, (MLP,)),
    ("down bias", sw.RowWise.bias, (EMBED,)),
    ("lm_head", (sw.EMBED, sw.VOCAB), (EMBED, VOCAB)),
    ("router", (sw.EMBED, sw.EXPERT_GATE), (EMBED, EXPERTS)),
    ("experts gate, up", (sw.EXPERT, sw.EMBED, sw.MLP_INTERMEDIATE), (EXPERTS, EMBED, MLP)),
    ("experts gate by layout", sw.ExpertColumnWiseAlt, (EXPERTS, EMBED, MLP)),
    ("experts down", (sw.EXPERT, sw.MLP_INTERMEDIATE, sw.EMBED), (EXPERTS, MLP, EMBED)),
    ("experts down by layout", sw.ExpertRowWiseAlt, (EXPERTS, MLP, EMBED)),
    ("experts gate bias", sw.ExpertColumnWise.bias, (EXPERTS, MLP)),
    ("experts gate unified", sw.UnifiedExpertColumnWise, (EXPERTS, EMBED, MLP)),
)

ACTIVATIONS: tuple[Tensor, ...] = _rows(
    ("tokens", (sw.BATCH, sw.LENGTH), (BATCH, LENGTH)),
    ("hidden", (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED), (BATCH, LENGTH, EMBED)),
    ("hidden, one prompt", (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED), (1, LENGTH, EMBED)),
    ("q", (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM), (BATCH, LENGTH, HEADS, HEAD_DIM)),
    (
        "k, v rows",
        (sw.BATCH, sw.QUERY_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM),
        (BATCH, LENGTH, KV_HEADS, HEAD_DIM),
    ),
    (
        "k, v rows, 2 heads",
        (sw.BATCH, sw.QUERY_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM),
        (BATCH, LENGTH, FEW_KV_HEADS, HEAD_DIM),
    ),
    (
        "cached k, v",
        (sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM),
        (BATCH, CACHE, KV_HEADS, HEAD_DIM),
    ),
    (
        "cached k, v, 2 heads",
        (sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM),
        (BATCH, CACHE, FEW_KV_HEADS, HEAD_DIM),
    ),
    (
        "cached k, v, one prompt",
        (sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM),
        (1, CACHE, KV_HEADS, HEAD_DIM),
    ),
    ("scores", (sw.BATCH, sw.HEAD, sw.QUERY_LENGTH, sw.BIAS_KV_SEQ), (BATCH, HEADS, LENGTH, CACHE)),
    (
        "bias",
        (sw.BATCH, sw.BIAS_HEAD_SEQ, sw.QUERY_LENGTH, sw.BIAS_KV_SEQ),
        (BATCH, HEADS, LENGTH, CACHE),
    ),
    ("mask", (sw.BATCH, sw.EMPTY, sw.QUERY_LENGTH, sw.BIAS_KV_SEQ), (BATCH, 1, LENGTH, CACHE)),
    ("feed-forward", (sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE), (BATCH, LENGTH, MLP)),
    ("logits", (sw.BATCH, sw.QUERY_LENGTH, sw.VOCAB), (BATCH, LENGTH, VOCAB)),
    ("router logits", (sw.BATCH, sw.QUERY_LENGTH, sw.EXPERT_GATE), (BATCH, LENGTH, EXPERTS)),
    ("dispatched tokens", (sw.EXPERT, sw.CAPACITY, sw.EMBED), (EXPERTS, CAPACITY, EMBED)),
    ("expert hidden", (sw.EXPERT, sw.CAPACITY, sw.MLP_INTERMEDIATE), (EXPERTS, CAPACITY, MLP)),
)
