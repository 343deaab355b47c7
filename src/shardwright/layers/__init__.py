"""Layers and what they are made of."""

from typing import TYPE_CHECKING, Any

from shardwright.errors import LayerError as _LayerError
from shardwright.layers.checkpoint_policy import (
    get_gradient_checkpoint_policy as get_gradient_checkpoint_policy,
)
from shardwright.layers.docstrings import add_start_docstrings as add_start_docstrings
from shardwright.layers.dot_general_by_bits import (
    get_dot_general_by_bits as get_dot_general_by_bits,
)
from shardwright.layers.dtypes import canonicalize_dtype as canonicalize_dtype
from shardwright.layers.quantised_dot import quantise as quantise
from shardwright.layers.quantised_dot import quantised_dot_general as quantised_dot_general
from shardwright.layers.rotary import apply_rotary_pos_emb as apply_rotary_pos_emb
from shardwright.layers.rotary import repeat_kv_bnsh as repeat_kv_bnsh
from shardwright.layers.rotary import repeat_kv_bsnh as repeat_kv_bsnh
from shardwright.layers.rotary import rope as rope
from shardwright.layers.rotary import rotate_half as rotate_half

if not TYPE_CHECKING:  # a type checker must still see what does not exist

    def __getattr__(name: str) -> Any:
        # Imported when it is asked for: its base is a class of flax.
        if name != "BaseJAXAttentionModule":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from shardwright.layers.attention_module import BaseJAXAttentionModule
        except ModuleNotFoundError as error:
            raise _LayerError(
                f"{name} is a flax module, and flax is not installed", fix="pip install flax"
            ) from error
        return BaseJAXAttentionModule
