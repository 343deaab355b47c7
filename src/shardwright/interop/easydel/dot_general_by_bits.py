"""The dot product of a layer, chosen by its number of bits."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from shardwright.errors import LayerError, did_you_mean
from shardwright.interop.easydel.quantized_dot import (
    DimensionNumbers,
    check_bits,
    quantized_dot_general,
)

_MODES: Final = ("train", "serve", "eval", "convert")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainDotGeneral:
    """`jax.lax.dot_general` on integers, which quantizes both operands in every call.

    Attributes:
      bits: 4 to 8.
    """

    bits: int

    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> Any:
        """Compute the product; see `quantized_dot_general`. `precision` is ignored for integers."""
        return quantized_dot_general(
            lhs,
            rhs,
            dimension_numbers,
            bits=self.bits,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DotGeneralClass:
    """A factory of `dot_general` for a layer. Layers with equal factories are equal for jit.

    Attributes:
      bits: 4 to 8.
      mode: train, serve or convert.
    """

    bits: int
    mode: str

    def __call__(self) -> Any:
        """Return the dot product."""
        if self.mode == "train":
            return TrainDotGeneral(bits=self.bits)
        try:
            from shardwright.interop.easydel.quantized_module import QuantizedDotGeneral
        except ModuleNotFoundError as error:
            fix = (
                "pip install flax; or, without flax, call quantize(w, shared=...) once, and "
                "quantized_dot_general(x, quantized, ...) for each product"
            )
            raise LayerError(
                f"mode {self.mode!r} keeps weights in a flax module, and flax is not installed",
                fix=fix,
            ) from error
        return QuantizedDotGeneral(bits=self.bits, convert=self.mode == "convert")


def get_dot_general_by_bits(bits: int | None = None, mode: str = "train") -> dict[str, Any]:
    """Return the arguments that make a flax layer compute its dot product on integers.

    Use it as `nn.Dense(8, **get_dot_general_by_bits(8))`. The modes are:

    - train: quantizes both operands in every call, and the dot products of the gradients too
      (straight-through). It does not need flax: `get_dot_general_by_bits(8)["dot_general_cls"]()`
      is a `dot_general` for any library.
    - convert: also stores the quantized kernel of each layer in a collection of flax variables.
    - serve: uses the stored kernels. The program then does not read the float kernels.

    Convert and serve have a gradient with respect to the left operand only.

    Args:
      bits: 4 to 8, forward and backward. With None, nothing is quantized.
      mode: "train", "serve" (also called "eval") or "convert".

    Returns:
      `{}` if bits is None, else `{"dot_general_cls": ...}`.

    Raises:
      LayerError: `bits` is not from 4 to 8, or the mode is unknown. (It is a ValueError.)

    >>> get_dot_general_by_bits()
    {}
    """
    if mode not in _MODES:
        hint = (
            did_you_mean(str(mode), _MODES)
            or "modes of a quantized dot are train, serve (or eval) and convert"
        )
        raise LayerError(f"unknown mode {mode!r}", fix=hint)
    if bits is None:
        return {}
    return {
        "dot_general_cls": DotGeneralClass(
            bits=check_bits(bits), mode="serve" if mode == "eval" else mode
        )
    }
