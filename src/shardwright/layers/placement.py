"""Shard activations and gather weights under the ambient manager; without one, do nothing.

`sw.shard` and `sw.gather` refuse to run without a manager. Layers do not: the same code runs on
one device.
"""

from __future__ import annotations

from typing import Any

from shardwright.manager import context


def place(x: Any, axes: Any) -> Any:
    """Shard an activation as `sw.shard` does, if a manager is ambient."""
    manager = context.current()
    return x if manager is None else manager.shard(x, axes)


def use(params: Any, specs: Any, *, path: str | None = None) -> Any:
    """Gather stored weights as `sw.gather` does, if a manager is ambient.

    Args:
      params: A weight, or a tree of them.
      specs: Its `ArraySpec`s.
      path: Path of the tree in the model, required if the strategy has `[[tensors]]` entries.
    """
    manager = context.current()
    return params if manager is None else manager.gather(params, specs, path=path)
