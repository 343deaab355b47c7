"""Old module paths, importable for one release with a warning that names the new path."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

_PREFIX: Final = "shardwright."
MOVED: Final[dict[str, str]] = {
    "axes": "vocabulary.axes",
    "modes": "vocabulary.modes",
    "layouts": "vocabulary.layouts",
    "annotations": "vocabulary.annotations",
    "mesh_text": "mesh.text",
    "rules": "resolution.rules",
    "partition_axis": "resolution.partition_axis",
    "deciding": "resolution.decide",
    "resolver": "resolution.resolver",
    "provenance": "resolution.decisions",
    "parts": "resolution.parts",
    "specs": "resolution.partition_specs",
    "composites": "resolution.composites",
    "path_patterns": "resolution.path_patterns",
    "recent": "resolution.recent",
    "tables": "resolution.tables",
    "tree": "trees.annotated",
    "state": "trees.optimizer_state",
    "pairs": "trees.factored_weights",
    "tensors": "trees.tensors",
    "manager_arguments": "manager.arguments",
    "ambient": "manager.ambient",
    "context": "manager.context",
    "placement": "manager.constraint",
    "mapping": "manager.shard_map",
    "manual_gather": "manager.manual_gather",
    "lints.placing": "lints.mesh_use",
    "lints.tables": "lints.dead_rules",
    "compare": "plan.compare",
    "report": "plan.report",
    "report.text": "plan.report.text",
    "report.memory": "plan.report.memory",
    "report.collectives": "plan.report.collectives",
    "plan.hlo": "plan.collectives.hlo",
    "plan.replica_groups": "plan.collectives.replica_groups",
    "plan.trip_counts": "plan.collectives.trip_counts",
    "plan.element_types": "plan.collectives.element_types",
    "plan.semantic_axes": "plan.collectives.by_axis",
    "caches.making": "caches.create",
    "caches.writing": "caches.scatter",
    "caches.storage": "caches.checkpoint",
    "caches.shards": "caches.sharding",
    "caches.page_books": "caches.paged.tables",
    "caches.pages": "caches.paged.pool",
    "caches.moves": "reshard.plan",
    "attention.allgather_kv": "attention.kernels.allgather_kv",
    "attention.blockwise": "attention.kernels.blockwise",
    "attention.flash_decode": "attention.kernels.flash_decode",
    "attention.ring": "attention.kernels.ring",
    "attention.sdpa": "attention.kernels.sdpa",
    "attention.splash": "attention.kernels.splash",
    "attention.ulysses": "attention.kernels.ulysses",
    "attention.vanilla": "attention.kernels.vanilla",
    "attention.joint": "attention.sharding",
    "attention.metadata": "interop.easydel.attention_metadata",
    "attention.registry": "interop.easydel.attention_registry",
    "attention.arguments": "attention.inputs",
    "serving.board": "serving.arrays",
    "serving.device": "serving.steps",
    "spec_trees": "interop.fjformer.spec_trees",
    "train_loop": "interop.fjformer.train_loop",
    "tree_names": "interop.fjformer.tree_names",
    "layers.attention_module": "interop.easydel.attention_module",
    "layers.checkpoint_policy": "interop.easydel.checkpoint_policy",
    "layers.docstrings": "interop.easydel.docstrings",
    "layers.dtypes": "interop.easydel.dtypes",
    "layers.dot_general_by_bits": "interop.easydel.dot_general_by_bits",
    "layers.quantised_dot": "layers.quantized_dot",
    "layers.quantised_module": "layers.quantized_module",
}


class MovedModules(MetaPathFinder):
    """Find the modules of `MOVED` at their new paths. Leave every other name to the next finder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that loads the module from its new place, and warn."""
        old = fullname.removeprefix(_PREFIX)
        if old == fullname or old not in MOVED:
            return None
        new = _PREFIX + MOVED[old]
        what = f"{fullname} is now {new}; the old path goes away in the next release"
        warnings.warn(what, DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        return ModuleSpec(fullname, _Alias(module), is_package=hasattr(module, "__path__"))


class _Alias(Loader):
    """Return a module that is already imported, with its `__spec__` unchanged."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def install() -> None:
    """Add the finder after all others, so that it sees only modules that they do not find."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())


def borrowed(module: str, name: str, table: Mapping[str, str]) -> Any:
    """Return a name that now lives in another package, and warn.

    Args:
      module: The module in which the name is looked up.
      name: The name.
      table: The package that has each name now.

    Raises:
      AttributeError: The table does not have the name.
    """
    _warn(module, name, table, new=f"{table.get(name)}.{name}")
    return getattr(importlib.import_module(table[name]), name)


def renamed(module: str, name: str, table: Mapping[str, str]) -> Any:
    """Return a renamed value of a module, and warn.

    Args:
      module: The module.
      name: The old name.
      table: The new name by old name.

    Raises:
      AttributeError: The table does not have the name.
    """
    _warn(module, name, table, new=f"{module}.{table.get(name)}")
    return getattr(sys.modules[module], table[name])


def _warn(module: str, name: str, table: Mapping[str, str], *, new: str) -> None:
    if name not in table:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    what = f"{module}.{name} is now {new}; the old name goes away in the next release"
    # Level 4 is the line that uses the name: it calls `__getattr__`, `borrowed` and this function.
    warnings.warn(what, DeprecationWarning, stacklevel=4)
