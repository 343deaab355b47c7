"""Windows of a convolution or a pooling.

A window has the elements of an operand from which one element of the result is computed.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow:
    """The window along one dim.

    Attributes:
      size: Number of elements of the window.
      stride: Distance between the starts of neighboring windows. Zeros between elements (see
        `spread`) count too.
      before: Padding before the first element; negative if elements are left out.
      after: Padding after the last element.
      dilation: Distance between neighboring elements of a window, counted like `stride`.
      spread: Distance between neighboring elements of the operand: 1, or more if zeros are put
        between them.
    """

    size: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1
    spread: int = 1

    @property
    def is_apart(self) -> bool:
        """Whether each element of the operand is in at most one window, without padding."""
        return self == SlidingWindow(size=self.size, stride=self.size)

    def swapped(self, result: int) -> SlidingWindow:
        """Return this window with its results and its elements exchanged.

        Element `k` of result `r` reads the operand at `r * stride + k * dilation - before`, so
        stride and dilation are exchanged too. Use the exchanged window if the window itself is
        sharded, as in the gradient of a kernel: the shards then are parts of its results.
        """
        return dataclasses.replace(self, size=result, stride=self.dilation, dilation=self.stride)

    def reach(self, operand: int, result: int, parts: int) -> tuple[int, int, int] | None:
        """Return how many elements each part of a dim needs of its two neighbors.

        Args:
          operand: Size of the dim of the operand.
          result: Size of the dim of the result.
          parts: Number of parts into which both dims are divided. If a size is not a multiple of
            this number, the last part is padded.

        Returns:
          Three numbers: the elements needed from the part before, those needed from the part after,
          and the elements that the windows of a part span, padding included. None if a part needs
          more elements than its neighbor has.
        """
        own, made = -(-operand // parts), -(-result // parts)
        # The first part has no neighbor before it, and the last part has none after it.
        starts = [part * made * self.stride - self.before for part in range(parts)]
        length = (made - 1) * self.stride + (self.size - 1) * self.dilation + 1
        firsts = [-(-start // self.spread) for start in starts]
        stops = [-(-(start + length) // self.spread) for start in starts]
        before = max((part * own - firsts[part] for part in range(1, parts)), default=0)
        after = max((stops[part] - (part + 1) * own for part in range(parts - 1)), default=0)
        if max(before, after) > own:
            return None
        span = max(stop - first for first, stop in zip(firsts, stops, strict=True))
        return max(before, 0), max(after, 0), span


def windows_of(equation: Any) -> tuple[SlidingWindow, ...]:
    """Return the window along each dim of a pooling, or along each spatial dim of a convolution."""
    parameters = equation.params
    sizes = parameters.get("window_dimensions")
    if sizes is None:
        spatial = parameters["dimension_numbers"].rhs_spec[2:]
        sizes = [equation.invars[1].aval.shape[dim] for dim in spatial]
    ones = (1,) * len(sizes)
    spreads = parameters.get("base_dilation", parameters.get("lhs_dilation", ones))
    dilations = parameters.get("window_dilation", parameters.get("rhs_dilation", ones))
    return tuple(
        SlidingWindow(size=size, stride=stride, before=low, after=high, dilation=gap, spread=spread)
        for size, stride, (low, high), gap, spread in zip(
            sizes,
            parameters["window_strides"],
            parameters["padding"],
            dilations,
            spreads,
            strict=True,
        )
    )
