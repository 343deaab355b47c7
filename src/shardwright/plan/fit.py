"""Whether a program fits into the memory of a chip, from a range of its peak."""

from __future__ import annotations

import enum
from typing import Final

from shardwright.plan.walk.liveness import Peak

# A TPU compiler refused a program above 0.947 of the memory that it names as usable.
_SAFE: Final = 0.95


class Verdict(enum.StrEnum):
    """Whether a program fits."""

    FITS = "fits"
    DOES_NOT_FIT = "does not fit"
    CLOSE = "close"

    __hash__ = str.__hash__


def judge(peak: Peak, usable: int, *, complete: bool = True) -> Verdict:
    """Return whether a program fits.

    Args:
      peak: The range of its peak, in bytes on one device.
      usable: Bytes that a program may use on one device.
      complete: Whether the walk knew every primitive. If not, the upper end may be too low.
    """
    if peak.low > usable:
        return Verdict.DOES_NOT_FIT
    if complete and peak.high <= _SAFE * usable:
        return Verdict.FITS
    return Verdict.CLOSE
