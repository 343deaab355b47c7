"""Layers: functions on arrays and axes, callable from any framework.

A function belongs here if a model calls it on its activations or weights. Functions under the names
of other libraries are in `interop`; attention is in `attention`.

Each module is a namespace: `from shardwright.layers import mlp_block, norm`. A block is a module
with a frozen config, `specs(config)` and `apply(config, params, x, *, keys, state, path)`.
"""

from typing import TYPE_CHECKING, Any

from shardwright import _moved
from shardwright.layers import activation as activation
from shardwright.layers import attention_block as attention_block
from shardwright.layers import dense as dense
from shardwright.layers import dropout as dropout
from shardwright.layers import dtypes as dtypes
from shardwright.layers import eight_bits as eight_bits
from shardwright.layers import embedding as embedding
from shardwright.layers import lora as lora
from shardwright.layers import loss as loss
from shardwright.layers import mixture_block as mixture_block
from shardwright.layers import mlp_block as mlp_block
from shardwright.layers import moe as moe
from shardwright.layers import norm as norm
from shardwright.layers import relative_bias as relative_bias
from shardwright.layers import transformer_block as transformer_block
from shardwright.layers.accumulate import Accumulated as Accumulated
from shardwright.layers.accumulate import Weighted as Weighted
from shardwright.layers.accumulate import accumulate as accumulate
from shardwright.layers.quantized_dot import quantize as quantize
from shardwright.layers.quantized_dot import quantized_dot_general as quantized_dot_general
from shardwright.layers.rope import rope as rope

_BORROWED = dict.fromkeys(
    (
        "BaseJAXAttentionModule",
        "add_start_docstrings",
        "apply_rotary_pos_emb",
        "canonicalize_dtype",
        "get_dot_general_by_bits",
        "get_gradient_checkpoint_policy",
        "repeat_kv_bnsh",
        "repeat_kv_bsnh",
        "rotate_half",
    ),
    "shardwright.interop.easydel",
)

_RENAMED = {"quantise": "quantize", "quantised_dot_general": "quantized_dot_general"}

if not TYPE_CHECKING:  # otherwise a type checker would accept every name

    def __getattr__(name: str) -> Any:
        if name in _RENAMED:
            return _moved.renamed(__name__, name, _RENAMED)
        return _moved.borrowed(__name__, name, _BORROWED)


def __dir__() -> list[str]:
    return sorted([*globals(), *_BORROWED, *_RENAMED])
