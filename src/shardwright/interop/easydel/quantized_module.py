"""A quantized dot as a flax module that stores its right operand in a collection. Imports flax."""

from __future__ import annotations

from typing import Any, Final

import flax.linen

from shardwright.errors import LayerError
from shardwright.interop.easydel.quantized_dot import (
    DimensionNumbers,
    quantize,
    quantized_dot_general,
)
from shardwright.trees.factored_weights import Quantized

COLLECTION: Final = "quantized"

# Any, so that type checkers give the same result with and without flax.
_Module: Any = flax.linen.Module
_compact: Any = flax.linen.compact


class QuantizedDotGeneral(_Module):  # type: ignore[misc]
    """`jax.lax.dot_general` on integers, with a right operand that is stored quantized.

    Attributes:
      bits: 4 to 8.
      convert: Whether to quantize and store the right operand. Otherwise the stored operand is
        used.
    """

    bits: int
    convert: bool = False

    @_compact  # type: ignore[untyped-decorator]
    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> Any:
        """Compute the dot. `precision` has no meaning for integers.

        Raises:
          LayerError: No weights are stored, their shape does not fit, or the collection is not
            mutable.
        """
        rhs = self._stored(rhs, dimension_numbers[0][1])
        return quantized_dot_general(
            lhs,
            rhs,
            dimension_numbers,
            bits=self.bits,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )

    def _stored(self, rhs: Any, contract: Any) -> Quantized:
        place = "/".join(self.path)
        # `init` creates the variables even without `convert`, so that their shapes are known.
        write = self.convert or self.is_initializing()
        if write and not self.is_mutable_collection(COLLECTION):
            raise LayerError(
                f"mode convert stores weights, so the collection {COLLECTION!r} must be mutable",
                path=place,
                fix=f'model.apply(variables, x, mutable=["{COLLECTION}"])',
            )
        if not write and not self.has_variable(COLLECTION, "value"):
            fix = (
                'store them with mode="convert": _, stored = model.apply(variables, x, '
                f'mutable=["{COLLECTION}"])'
            )
            raise LayerError(
                f"no quantized weights in the collection {COLLECTION!r}", path=place, fix=fix
            )
        fresh = (
            quantize(rhs, shared=contract, bits=self.bits)
            if write
            else Quantized(value=None, scale=None)
        )
        # flax ignores the initial value of a variable that exists, so the values are also written
        # below.
        value = self.variable(COLLECTION, "value", lambda: fresh.value)
        scale = self.variable(COLLECTION, "scale", lambda: fresh.scale)
        if write:
            value.value, scale.value = fresh.value, fresh.scale
        if value.value.shape != rhs.shape:
            what = f"the stored weights have shape {value.value.shape}, the operand {rhs.shape}"
            raise LayerError(what, path=place, fix="run mode convert with the same model as serve")
        return Quantized(value=value.value, scale=scale.value)
