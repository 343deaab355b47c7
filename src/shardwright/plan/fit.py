"""Judge whether a program fits into the memory of a chip, from the range of its peak."""

from __future__ import annotations

import enum
import math
from typing import Final

from shardwright.plan.walk.entries import Peak

# A program fits if the upper end of its memory is at most this share of the usable memory. The
# program may need more than the upper end: in `benchmarks.fits`, the upper end is at least 0.95 of
# what the program needs.
_SAFE: Final = 0.95
# A program may fit if the lower end of its memory is at most this many times the usable memory. The
# program may need less than the lower end: of 82 compiled programs (`tests.plan.test_tpu_memory`),
# one needs 0.92 of its lower end, and each decoder of `benchmarks.fits` needs at least 0.95 of it.
# Only `Peak.sure` proves that a program does not fit.
_LOWER: Final = 1.1


class Verdict(enum.StrEnum):
    """Whether a program fits."""

    FITS = "fits"
    DOES_NOT_FIT = "does not fit"
    CLOSE = "close"

    __hash__ = str.__hash__


def judge(peak: Peak, usable: int, *, complete: bool = True, host: int = 0) -> Verdict:
    """Judge whether a program fits.

    Args:
      peak: The range of its peak, in bytes on one device.
      usable: Bytes that a program may use on one device.
      complete: Whether every primitive of the program has a rule. If not, the upper end may be too
        low, and the program never counts as fitting.
      host: Bytes of the host's memory for each device; 0 if that is not known.
    """
    known = host or math.inf
    if peak.sure > usable or peak.low > _LOWER * usable or peak.host > known:
        return Verdict.DOES_NOT_FIT
    if complete and peak.high <= _SAFE * usable and peak.host <= _SAFE * known:
        return Verdict.FITS
    return Verdict.CLOSE
