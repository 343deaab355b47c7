"""Shard activations and gather weights under the ambient manager; without one, do nothing.

`sw.shard` and `sw.gather` raise an error without a manager. These functions do not, so that a layer
also runs on one device.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from shardwright import _jax
from shardwright.errors import LayerError, RankMismatchError
from shardwright.manager import context
from shardwright.vocabulary.axes import BATCH, EMBED, LENGTH, QUERY_LENGTH

RESIDUAL = (BATCH, LENGTH, EMBED)
OPERAND = (BATCH, QUERY_LENGTH, EMBED)


def is_inside_shard_map() -> bool:
    """Tell whether a surrounding `shard_map` has made mesh axes Manual: shapes are then local."""
    mesh = _jax.ambient_mesh()
    return mesh is not None and bool(mesh.manual_axes)


def place(x: Any, axes: Any) -> Any:
    """Shard an activation as `sw.shard` does, if a manager is ambient."""
    manager = context.current()
    return x if manager is None else manager.shard(x, axes)


def use(params: Any, specs: Any, *, path: str | None = None) -> Any:
    """Gather stored weights as `sw.gather` does, if a manager is ambient.

    Args:
      params: A weight, or a tree of them.
      specs: The `ArraySpec`s of `params`.
      path: Path of the tree in the model, required if the strategy has `[[tensors]]` entries.
    """
    manager = context.current()
    return params if manager is None else manager.gather(params, specs, path=path)


def check_residual(x: Any, embed: int) -> None:
    """Check the shape and the dtype of a residual.

    Raises:
      RankMismatchError: It is not `[batch, length, embed]`.
      LayerError: It does not have floats, so what a block adds would be cut to integers.
    """
    shape = getattr(x, "shape", None)
    if shape is None or len(shape) != 3 or shape[-1] != embed:
        raise RankMismatchError(
            f"x has shape {shape}",
            path="x",
            fix=f"pass the residual, [batch, length, {embed}]",
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise LayerError(
            f"x is {x.dtype}", path="x", fix="pass floats: tokens go through layers.embedding first"
        )
