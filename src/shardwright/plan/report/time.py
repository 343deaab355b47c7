"""Show the estimate of a program's time, part by part."""

from __future__ import annotations

from shardwright.plan.layout import Layout
from shardwright.plan.time import SecondsRange, TimeRange, seconds_text
from shardwright.resolution.tables import WIDTH, remarked_table

_HEAD = ("time", "at least", "at most", "assumed")


def time_lines(time: TimeRange, layout: Layout, *, width: int = WIDTH) -> list[str]:
    """Return lines on time: one row per part, each with its assumption.

    Args:
      time: The estimate.
      layout: Assignment of the mesh axes to a slice.
      width: Characters per line.
    """
    rows = [(name, *map(seconds_text, ends), how) for name, *ends, how in time_rows(time, layout)]
    return remarked_table([_HEAD, *rows], width=width)


def time_rows(time: TimeRange, layout: Layout) -> list[tuple[str, float, float, str]]:
    """Return each part of an estimate: name, seconds at least and at most, and the assumption."""
    chip = layout.topology.chip
    parts = [
        ("matmuls", time.matmuls, f"{chip.flops / 1e12:g} TFLOP/s, at 100% to 50%"),
        (
            "memory",
            time.memory,
            f"{chip.hbm_rate / 1e9:g} GB/s; each argument once, at most all operands",
        ),
    ]
    for axes, span in time.links.items():
        parts.append(("+".join(axes), span, _rates_text(axes, layout)))
    whole = SecondsRange(low=time.low, high=time.high)
    parts.append(("all", whole, "from full overlap to none; not calibrated"))
    return [(name, span.low, span.high, assumed) for name, span, assumed in parts]


def _rates_text(axes: tuple[str, ...], layout: Layout) -> str:
    slow, fast = layout.rates(axes)
    texts = []
    if fast:
        rates = f"{slow / 1e9:g}" if slow == fast else f"{slow / 1e9:g} to {fast / 1e9:g}"
        texts.append(f"{rates} GB/s one way, 1 µs per hop at most")
    if layout.slices_of(axes) > 1:
        texts.append(f"{layout.topology.chip.dcn_rate / 1e9:g} GB/s between slices")
    return "; ".join(texts)
