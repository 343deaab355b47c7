"""Collections of variables that TransformerEngine keeps beside the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shardwright.errors import LayerError

# The collection of the states of eight-bit recipes.
NVTE_FP8_COLLECTION_NAME: Final = "fp8_metas"


def update_collections(new: Mapping[str, Any], original: Mapping[str, Any]) -> Any:
    """Return `original` with the entries of `new`; neither is changed.

    Args:
      new: Its entries win.
      original: Its type is kept, a dict or flax's `FrozenDict`.

    Raises:
      LayerError: An argument is not a mapping.
    """
    for name, value in (("new", new), ("original", original)):
        if not isinstance(value, Mapping):
            raise LayerError(
                f"{name} is a {type(value).__name__}", path=name, fix="pass a dict of variables"
            )
    merged: dict[str, Any] = {**original, **new}
    kind: Any = type(original)
    return merged if kind is dict else kind(merged)
