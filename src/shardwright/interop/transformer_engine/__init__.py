"""TransformerEngine's JAX names, to import in place of `transformer_engine.jax`.

Code belongs here if TransformerEngine has it under the same name, and programs import it. `flax`
has the linen modules and is imported on first use. The computation is in `shardwright.layers`.
"""

from typing import TYPE_CHECKING, Any

from shardwright.errors import LayerError as _LayerError
from shardwright.interop.transformer_engine import recipe as recipe
from shardwright.interop.transformer_engine.fp8 import (
    NVTE_FP8_COLLECTION_NAME as NVTE_FP8_COLLECTION_NAME,
)
from shardwright.interop.transformer_engine.fp8 import (
    update_collections as update_collections,
)
from shardwright.interop.transformer_engine.fp8 import update_fp8_metas as update_fp8_metas
from shardwright.interop.transformer_engine.recipe import autocast as autocast
from shardwright.interop.transformer_engine.recipe import fp8_autocast as fp8_autocast
from shardwright.interop.transformer_engine.sharding import NAMES as NAMES
from shardwright.interop.transformer_engine.sharding import MeshResource as MeshResource
from shardwright.interop.transformer_engine.sharding import (
    extend_logical_axis_rules as extend_logical_axis_rules,
)
from shardwright.interop.transformer_engine.sharding import (
    global_mesh_resource as global_mesh_resource,
)
from shardwright.interop.transformer_engine.sharding import (
    global_shard_guard as global_shard_guard,
)

if not TYPE_CHECKING:  # so that type checkers still report unknown names

    def __getattr__(name: str) -> Any:
        # Import `flax` on its first use, because its classes are derived from classes of flax.
        if name != "flax":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            import importlib

            return importlib.import_module(f"{__name__}.flax")
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("flax"):
                raise
            what = "the modules are linen modules, and flax is not installed"
            raise _LayerError(what, fix="pip install flax") from error
