"""The names of EasyDeL's attention operator and modeling utilities, for code that uses them.

Each function and class keeps the signature that it has in EasyDeL. Inside, it uses the caches,
attention and layers of shardwright.
"""

from typing import TYPE_CHECKING, Any

from shardwright.errors import LayerError as _LayerError
from shardwright.interop.easydel.attention_metadata import (
    AttentionMetadata as AttentionMetadata,
)
from shardwright.interop.easydel.attention_metadata import AttentionOutput as AttentionOutput
from shardwright.interop.easydel.attention_metadata import AttentionSpecs as AttentionSpecs
from shardwright.interop.easydel.attention_registry import AttentionImpl as AttentionImpl
from shardwright.interop.easydel.attention_registry import AttentionRegistry as AttentionRegistry
from shardwright.interop.easydel.modeling_utils import add_start_docstrings as add_start_docstrings
from shardwright.interop.easydel.modeling_utils import apply_rotary_pos_emb as apply_rotary_pos_emb
from shardwright.interop.easydel.modeling_utils import canonicalize_dtype as canonicalize_dtype
from shardwright.interop.easydel.modeling_utils import (
    get_dot_general_by_bits as get_dot_general_by_bits,
)
from shardwright.interop.easydel.modeling_utils import (
    get_gradient_checkpoint_policy as get_gradient_checkpoint_policy,
)
from shardwright.interop.easydel.modeling_utils import names_in_mesh as names_in_mesh
from shardwright.interop.easydel.modeling_utils import repeat_kv_bnsh as repeat_kv_bnsh
from shardwright.interop.easydel.modeling_utils import repeat_kv_bsnh as repeat_kv_bsnh
from shardwright.interop.easydel.modeling_utils import rotate_half as rotate_half
from shardwright.interop.easydel.quantized_dot import quantize as quantize
from shardwright.interop.easydel.quantized_dot import quantized_dot_general as quantized_dot_general

if not TYPE_CHECKING:  # so that type checkers still report unknown names

    def __getattr__(name: str) -> Any:
        # Import the class on its first use, because it is derived from a class of flax.
        if name != "BaseJAXAttentionModule":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from shardwright.interop.easydel.attention_module import BaseJAXAttentionModule
        except ModuleNotFoundError as error:
            what = f"{name} is a flax module, and flax is not installed"
            raise _LayerError(what, fix="pip install flax") from error
        return BaseJAXAttentionModule
