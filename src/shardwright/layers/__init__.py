"""Layers: functions on arrays and axes, callable from any framework.

A function belongs here if a model calls it on its activations or weights. Names that other libraries
use for such functions live in `interop`.
"""

from typing import TYPE_CHECKING, Any

from shardwright import _moved
from shardwright.layers.quantized_dot import quantise as quantise
from shardwright.layers.quantized_dot import quantised_dot_general as quantised_dot_general
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

if not TYPE_CHECKING:  # a type checker must still see what does not exist

    def __getattr__(name: str) -> Any:
        return _moved.borrowed(__name__, name, _BORROWED)


def __dir__() -> list[str]:
    return sorted([*globals(), *_BORROWED])
