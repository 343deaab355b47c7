"""Blocks of rows for TPU kernels: multiples of the 128 lanes of a vector.

This module does not import Pallas, whose import is slow.
"""

from __future__ import annotations

LANES = 128


def whole_lanes(rows: int) -> int:
    """Return a number of rows rounded up to a multiple of 128."""
    return -(-rows // LANES) * LANES


def block_rows(limit: int, rows: int) -> int:
    """Return the largest multiple of 128, up to `limit`, that divides `rows`; at least 128."""
    return max(block for block in range(LANES, max(limit, LANES) + 1, LANES) if rows % block == 0)
