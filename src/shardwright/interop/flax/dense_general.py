"""`nn.DenseGeneral`: initialize a kernel without a constraint on its flattened form.

`nn.DenseGeneral` calls its initializer with a flattened shape of rank 2, and reshapes the result.
flax applies the constraint of the names to the flattened array too. If there are more names than
dims of the flattened array, JAX raises an error. Here, only the reshaped array has the constraint.
This file imports flax, so it is imported only when `rules` is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import flax.linen as nn
from flax.core import meta


def kernels_unflattened() -> contextlib.AbstractContextManager[None]:
    """Enter a context in which `nn.DenseGeneral` constrains only the reshaped parameters."""
    context: contextlib.AbstractContextManager[None] = nn.intercept_methods(_intercept)
    return context


def _intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Call a method. Wrap the initializers of the module if it is an `nn.DenseGeneral`."""
    module = context.module
    # Only `__call__` creates parameters.
    if not isinstance(module, nn.DenseGeneral) or context.method_name != "__call__":
        return call(*args, **kwargs)
    own = {name: getattr(module, name) for name in ("kernel_init", "bias_init")}
    try:
        for name, init in own.items():
            # A bound module is frozen: flax's `__setattr__` would raise an error.
            object.__setattr__(module, name, _Initializer(init))
        return call(*args, **kwargs)
    finally:
        for name, init in own.items():
            # Restore the initializers, because the module may be called again outside of this
            # context.
            object.__setattr__(module, name, init)


@dataclasses.dataclass(frozen=True, slots=True)
class _Initializer:
    """An initializer that returns flattened arrays, in `_Flattened` boxes.

    Two such initializers are equal if they wrap the same initializer.
    """

    init: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        box = self.init(*args, **kwargs)
        return _Flattened(box) if isinstance(box, meta.Partitioned) else box


@dataclasses.dataclass(frozen=True, slots=True)
class _Flattened(meta.AxisMetadata[Any]):
    """A box around a flattened array.

    When the array is reshaped, the result is the original box around the reshaped array.
    """

    box: Any

    def unbox(self) -> Any:
        """Return the array without a constraint."""
        return self.box.unbox(apply_constraint=False)

    def replace_boxed(self, val: Any) -> Any:
        """Return the original box with another array."""
        return self.box.replace_boxed(val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """Add an axis to the original box."""
        return _Flattened(self.box.add_axis(index, params))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """Remove an axis from the original box."""
        return _Flattened(self.box.remove_axis(index, params))
