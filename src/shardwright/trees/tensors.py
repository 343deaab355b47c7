"""Named tensors: the path, axes, shape and dtype of each array of a tree. Arrays need not exist."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.errors import StrategyError
from shardwright.trees.paths import path_text
from shardwright.vocabulary.annotations import ArraySpec, is_annotation, is_tuple_of_annotations
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.lowering import spelled


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A named tensor of a tree or of a file.

    Attributes:
      path: Path in the tree, joined by "/".
      axes: Annotation of the tensor.
      shape: Global sizes, or None.
      role: Role of the tensor. None means param for weight layouts, else activation.
      dtype: Name of the dtype, or empty.
    """

    path: str
    axes: Any
    shape: tuple[int, ...] | None = None
    role: Role | None = None
    dtype: str = ""

    def bytes_over(self, shards: int) -> int | None:
        """Return the bytes of each shard, or None if shape or dtype is unknown.

        Raises:
          StrategyError: The dtype is unknown.
        """
        if self.shape is None or not self.dtype:
            return None
        if not is_dtype(self.dtype):
            what = f"the size of dtype {self.dtype!r} is unknown"
            fix = 'pass a dtype such as "float32", or none'
            raise StrategyError(what, path=self.path, fix=fix)
        return whole_bytes(math.prod(self.shape) // shards, jnp.dtype(self.dtype))


def whole_bytes(elements: int, dtype: Any) -> int:
    """Return how many bytes stored elements take.

    An int4 takes 4 bits. A PRNG key counts with all of its words.
    """
    # Compiled programs store two int4 in a byte, so round up only the sum.
    return -(-elements * _bits(dtype) // 8)


@functools.cache
def _bits(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return 8 * int(dtype.itemsize)
    if dtype == jax.dtypes.float0:  # a tangent of integers, which takes no memory in any program
        return 0
    return int(jax.dtypes.itemsize_bits(dtype))


def as_tensors(values: Any) -> tuple[Tensor, ...]:
    """Return the leaves of a tree as named tensors.

    An `ArraySpec` becomes a stored parameter, and an annotation becomes a tensor without a shape. A
    `Tensor` is returned unchanged.

    >>> [
    ...     tensor.path
    ...     for tensor in as_tensors({"mlp": {"up": ("__EMBED__", "__MLP_INTERMEDIATE__")}})
    ... ]
    ['mlp/up']

    Raises:
      StrategyError: A leaf is none of these; or it is a tuple of tuples of axes, which can be read
        as one annotation of composites or as several annotations.
    """
    # `()` is also the annotation of a scalar, and would become one tensor.
    if isinstance(values, (tuple, list)) and not values:
        return ()
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        values, is_leaf=lambda value: isinstance(value, Tensor) or is_annotation(value)
    )
    return tuple(_tensor(path_text(path), leaf) for path, leaf in leaves)


def _tensor(path: str, leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf
    if not is_annotation(leaf):
        what = f"{type(leaf).__name__} is neither an ArraySpec nor an annotation"
        fix = "give ArraySpecs, annotations (tuples of axes, layouts), "
        fix += "or Tensor(path=..., axes=..., shape=...)"
        raise StrategyError(what, path=path, fix=fix)
    if is_tuple_of_annotations(leaf) and len(leaf) > 1:
        what = f"a tuple of {len(leaf)} annotations can be read in two ways"
        fix = f"one annotation each: [{', '.join(map(spelled, leaf))}]\n"
        fix += f"one of composites: Tensor(path={path or 'x'!r}, axes={spelled(leaf)})"
        raise StrategyError(what, path=path, fix=fix)
    if not isinstance(leaf, ArraySpec):
        return Tensor(path=path, axes=leaf)
    # NumPy has no dtype for PRNG keys, so the bytes of such a tensor stay unknown.
    name = np.dtype(leaf.dtype).name if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else ""
    return Tensor(path=path, axes=leaf.axes, shape=leaf.shape, role=Role.PARAM, dtype=name)


def is_dtype(name: object) -> bool:
    """Tell whether a value names a dtype that JAX arrays can have, in native byte order."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        return False
    try:
        dtype = jnp.dtype(name)
    except (TypeError, ValueError):
        return False
    # `jnp.dtype` accepts these dtypes of NumPy, but no JAX array has them.
    if dtype in (np.dtype(np.longdouble), np.dtype(np.clongdouble)) or dtype.kind == "m":
        return False
    return bool(jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_))
