"""The dot product of a layer, by the number of bits it may use."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from shardwright.errors import LayerError, did_you_mean
from shardwright.layers.quantized_dot import DimensionNumbers, check_bits, quantised_dot_general

_MODES: Final = ("train", "serve", "eval", "convert")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainDotGeneral:
    """`jax.lax.dot_general` on integers, both operands quantised in every call.

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
        """Compute it, see `quantised_dot_general`. `precision` has no meaning for integers."""
        return quantised_dot_general(
            lhs,
            rhs,
            dimension_numbers,
            bits=self.bits,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DotGeneralClass:
    """What makes a layer's `dot_general` when it is called; equal ones make equal layers, so jit traces them once.

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
            from shardwright.layers.quantized_module import QuantisedDotGeneral
        except ModuleNotFoundError as error:
            fix = "pip install flax; without it, quantise(w, shared=...) once and quantised_dot_general(x, quantised, ...)"
            raise LayerError(
                f"mode {self.mode!r} keeps weights in a flax module, and flax is not installed",
                fix=fix,
            ) from error
        return QuantisedDotGeneral(bits=self.bits, convert=self.mode == "convert")


def get_dot_general_by_bits(bits: int | None = None, mode: str = "train") -> dict[str, Any]:
    """Return the arguments that make a flax layer compute its dot product on integers: `nn.Dense(8, **get_dot_general_by_bits(8))`.

    In train both operands are quantised in every call, and so are the gradients' dots (straight-through); no flax is needed for
    that, and `get_dot_general_by_bits(8)["dot_general_cls"]()` is a `dot_general` for any library. Convert stores each layer's
    quantised right operand, its kernel, in the collection "quantised"; serve uses what is stored, and then the program does
    not read the float kernels. Both take a gradient by their left operand only.

    Args:
      bits: 4 to 8, forward and backward; None: nothing is quantised.
      mode: train, serve (or eval, the same) or convert.

    Returns:
      `{}` if bits is None, else `{"dot_general_cls": ...}`.

    Raises:
      LayerError: (a ValueError) other bits, another mode.

    >>> get_dot_general_by_bits()
    {}
    """
    if mode not in _MODES:
        hint = (
            did_you_mean(str(mode), _MODES)
            or "modes of a quantised dot are train, serve (or eval) and convert"
        )
        raise LayerError(f"unknown mode {mode!r}", fix=hint)
    if bits is None:
        return {}
    return {
        "dot_general_cls": DotGeneralClass(
            bits=check_bits(bits), mode="serve" if mode == "eval" else mode
        )
    }
