"""What the modules share: parameters in flax's boxes, dropout under flax's paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from shardwright.errors import LayerError, RankMismatchError
from shardwright.layers import dropout

# Any, so that type checkers give the same result with and without flax.
Module: Any = nn.Module
compact: Any = nn.compact
zeros: Any = nn.initializers.zeros
Axes = tuple[str | None, ...]


def parameter(
    module: Any, name: str, init: Any, shape: Sequence[int], axes: Axes, *, dtype: Any
) -> Any:
    """Create or read a parameter whose box has the logical names `axes`."""
    if axes and len(axes) != len(shape):
        raise RankMismatchError(
            f"the parameter has shape {tuple(shape)}, and its dims have the names {axes}",
            path="/".join((*module.path, name)),
            fix=f"give {len(shape)} names, or none",
        )
    return module.param(name, nn.with_logical_partitioning(init, axes), tuple(shape), dtype)


def fan_in_init(dtype: Any, distribution: Any = "truncated_normal") -> Any:
    """Return the default initializer of a kernel: variance 1 / fan_in."""
    return nn.initializers.variance_scaling(1.0, "fan_in", distribution, dtype=dtype)


def split_init(init: Any, count: int, *, sequential: bool = False) -> Any:
    """Return an initializer of `count` kernels `[in, out]`, stacked to `[in, count, out]`.

    Args:
      init: One initializer for all, or a list of them.
      count: Number of kernels.
      sequential: Whether keys are split off one after another. By default, one split gives all
        keys.
    """
    inits = init if isinstance(init, list) else [init] * count

    def stacked(key: Any, shape: Sequence[int], dtype: Any) -> Any:
        if sequential:
            keys = []
            for _ in range(count):
                key, own = jax.random.split(key)
                keys.append(own)
        else:
            keys = list(jax.random.split(key, count))
        each = (*shape[:-2], shape[-1])
        kernels = [one(own, each, dtype) for one, own in zip(inits, keys, strict=True)]
        return jnp.stack(kernels, axis=-2, dtype=dtype)

    return stacked


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a number or a sequence of numbers as a tuple."""
    return tuple(value) if isinstance(value, Sequence) else (value,)


def check_last_axis(axis: Any) -> None:
    """Check the field `axis` of a module that works on the last dim alone.

    Raises:
      LayerError: It is not -1.
    """
    if axis != -1:
        raise LayerError(f"axis={axis!r} is not -1", path="axis", fix="move the dim to the end")


def check_inputs(path: str, x: Any, *, rank: int | None = None) -> None:
    """Check the number of dims of an input, at least 1 or exactly `rank`.

    Raises:
      RankMismatchError: The number differs.
    """
    if x.ndim == rank or (rank is None and x.ndim):
        return
    wanted = "[..., embed]" if rank is None else "[batch, length, embed]"
    raise RankMismatchError(f"{path} have shape {x.shape}", path=path, fix=f"pass {wanted}")


class Dropout(Module):  # type: ignore[misc]
    """`layers.dropout` with a key of the module's own path, so that masks equal TE's.

    Attributes:
      rate: Probability of dropping an element.
      shared: Dims along which the mask is the same.
      rng_name: Name of the random stream.
    """

    rate: float
    shared: Sequence[int] = ()
    rng_name: str = "dropout"

    @compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Any, deterministic: bool) -> Any:
        """Drop elements of `x`, unless `deterministic`."""
        dropout.check_rate("rate", self.rate)
        if deterministic or self.rate == 0:
            return x
        return dropout.dropout(x, self.make_rng(self.rng_name), self.rate, shared=self.shared)
