"""Show the estimate of a program's time, part by part."""

from __future__ import annotations

from shardwright.plan.layout import Layout
from shardwright.plan.time import Span, TimeRange, seconds_text
from shardwright.resolution.tables import WIDTH, remarked_table

_HEAD = ("time", "at least", "at most", "assumed")


def time_lines(time: TimeRange, layout: Layout, *, width: int = WIDTH) -> list[str]:
    """Return lines on time: one row per part, each with its assumption.

    Args:
      time: The estimate.
      layout: Assignment of the mesh axes to a slice.
      width: Characters per line.
    """
    chip = layout.topology.chip
    rows = [
        _HEAD,
        _row("products", time.products, f"{chip.flops / 1e12:g} TFLOP/s, at 100% to 50%"),
        _row(
            "memory",
            time.memory,
            f"{chip.hbm_rate / 1e9:g} GB/s; from all arguments to all operands",
        ),
    ]
    for axes, span in time.links.items():
        slow, fast = layout.rates(axes)
        rates = f"{slow / 1e9:g}" if slow == fast else f"{slow / 1e9:g} to {fast / 1e9:g}"
        rows.append(_row("+".join(axes), span, f"{rates} GB/s one way, 1 µs per hop at most"))
    whole = Span(low=time.low, high=time.high)
    rows.append(_row("all", whole, "from full overlap to none; not calibrated"))
    return remarked_table(rows, width=width)


def _row(name: str, span: Span, assumed: str) -> tuple[str, ...]:
    return (name, seconds_text(span.low), seconds_text(span.high), assumed)
