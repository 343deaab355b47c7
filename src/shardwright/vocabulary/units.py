"""Bytes and seconds as text, with the unit that people read."""

from __future__ import annotations

from typing import Final

BYTES: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


def bytes_text(count: int) -> str:
    """Return a number of bytes in binary units.

    >>> bytes_text(512), bytes_text(3 * 2**29)
    ('512 B', '1.5 GiB')
    """
    unit = next((unit for unit in reversed(BYTES) if count >= BYTES[unit]), "B")
    return f"{count} B" if unit == "B" else f"{count / BYTES[unit]:.1f} {unit}"


def seconds_text(seconds: float) -> str:
    """Return a time in s, ms or µs.

    >>> seconds_text(0.00123), seconds_text(2.5)
    ('1.23 ms', '2.50 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds / 1e-6:.2f} µs"
