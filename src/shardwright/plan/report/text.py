"""Sizes as text, in binary units."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(count: int) -> str:
    """Return a number of bytes in binary units.

    >>> bytes_text(512), bytes_text(3 * 2**29)
    ('512 B', '1.5 GiB')
    """
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"
