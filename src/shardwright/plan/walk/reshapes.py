"""Shardings through a reshape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.dims.reshapes import equal_products
from shardwright.plan.walk.values import Dims, shards


def through_reshape(
    dims: Dims, old: Sequence[int], new: Sequence[int], sizes: Mapping[str, int]
) -> Dims | None:
    """Return the dims of a reshaped value, or None if no sharding of the result fits.

    Both shapes are cut into the smallest groups of dims with equal products. In each group, the
    mesh axes of the first dim also shard the first dim of the result, if they divide its size.

    Args:
      dims: Mesh axes of each dim before.
      old: Shape before.
      new: Shape after.
      sizes: Size of each mesh axis.

    >>> through_reshape((("dp",), ("tp",)), (4, 6), (4, 2, 3), {"dp": 2, "tp": 2})
    (('dp',), ('tp',), ())
    """
    result: list[tuple[str, ...]] = [()] * len(new)
    for before, after in equal_products(old, new):
        sharded = [at for at in before if dims[at]]
        if not sharded:
            continue
        at = sharded[0]
        wide_before = [dim for dim in before if old[dim] > 1] or before
        wide_after = [dim for dim in after if new[dim] > 1] or after
        if len(wide_before) == len(wide_after) == 1:
            if at in wide_before:
                result[wide_after[0]] = dims[at]
            continue
        parts = shards(dims[at], sizes)
        if len(sharded) > 1:
            return None
        if wide_after and at == wide_before[0] and new[wide_after[0]] % parts == 0:
            result[wide_after[0]] = dims[at]
        else:
            return None
    return tuple(result)


def fitting_dims(
    dims: Dims, old: Sequence[int], new: Sequence[int], sizes: Mapping[str, int]
) -> Dims:
    """Return the dims without those mesh axes that no sharding of the reshaped value fits.

    >>> fitting_dims((("dp",), ("tp",)), (4, 6), (24,), {"dp": 2, "tp": 2})
    (('dp',), ())
    """
    kept = list(dims)
    for before, _ in equal_products(old, new):
        sharded = [at for at in before if kept[at]]
        for at in reversed(sharded):
            own = tuple(axes if at in before else () for at, axes in enumerate(kept))
            if through_reshape(own, old, new, sizes) is not None:
                break
            kept[at] = ()
    return tuple(kept)
