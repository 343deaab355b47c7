"""Check which axes the current mesh has."""

from __future__ import annotations

from shardwright.manager.ambient import current_mesh_has


def names_in_mesh(*names: str) -> bool:
    """Tell whether the current mesh has all of these axes. Without a mesh the answer is False.

    Raises:
      MeshSpecError: A name is not a string.
    """
    return current_mesh_has(*names)
