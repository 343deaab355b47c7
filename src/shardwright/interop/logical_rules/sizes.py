"""The check of sizes against mesh axes that stand for names in another library.

A table of another library has no fallbacks, so a size that does not divide is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardwright.errors import IndivisibleError


def indivisible(
    name: str,
    size: int,
    entry: str | Sequence[str] | None,
    mesh: Mapping[str, int],
    *,
    path: str,
    dim: int,
    call: str,
) -> IndivisibleError | None:
    """Return the error to raise if a size is no multiple of the number of shards, or None.

    Args:
      name: Name of the dim in the other library.
      size: Size of the dim.
      entry: Mesh axes that the table has for the name.
      mesh: Size of each mesh axis.
      path: The array, for the message.
      dim: Number of the dim.
      call: Function of the bridge that takes `sizes=`, for the message.
    """
    axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
    shards = math.prod(mesh[axis] for axis in axes)
    if size % shards == 0:
        return None
    return IndivisibleError(
        f"size {size} of {name!r} does not divide over {'+'.join(axes)}={shards}",
        path=path,
        dim=dim,
        size=size,
        mesh_axes=axes,
        shards=shards,
        fix=f"pass sizes={{{name!r}: {size}}} to {call}, so that a fallback applies\n"
        "or choose a size and a mesh that divide",
    )
