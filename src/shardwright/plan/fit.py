"""Whether a program fits into the memory of a chip, from a range of its peak."""

from __future__ import annotations

import enum
from typing import Final

from shardwright.plan.walk.liveness import Peak

# Measured: a TPU compiler accepts programs up to 0.947 of the usable memory, and rejects larger
# ones.
_SAFE: Final = 0.95
# Measured: compiled peaks were at least 0.93 of the lower end.
_SURE: Final = 1.08


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
      complete: Whether every primitive of the program has a rule. If not, the upper end of the
        range may be too low.
    """
    if peak.sure > usable or peak.low > _SURE * usable:
        return Verdict.DOES_NOT_FIT
    if complete and peak.high <= _SAFE * usable:
        return Verdict.FITS
    return Verdict.CLOSE
