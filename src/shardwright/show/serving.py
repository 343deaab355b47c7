"""Show the report of an engine, and how its weights moved."""

from __future__ import annotations

from shardwright.serving.metrics import Percentiles, Report
from shardwright.serving.weights import Update
from shardwright.show.plain import fields_of
from shardwright.show.reshard import sent_text
from shardwright.show.tables import table
from shardwright.vocabulary.shown import data_of, text_of
from shardwright.vocabulary.units import bytes_text


@text_of.register(Report)
def report_text(report: Report) -> str:
    """Return counts and times, a row each."""
    ended = (
        ", ".join(f"{count} {reason}" for reason, count in report.finished.items() if count)
        or "none"
    )
    steps = (
        f"{report.prefill_steps} chunks, {report.new_tokens} written in {report.decode_steps} steps"
    )
    rows = [
        ("requests", f"{report.requests} accepted, {report.refused} refused"),
        ("ended", ended),
        ("tokens", f"{report.prompt_tokens} read in {steps}"),
        ("slots in use", f"{report.slots_in_use:.1f} of {report.slots}"),
        ("speed", f"{report.tokens_per_second:.0f} tokens/s over {report.busy:.2f} s"),
        ("first token", _percentiles_text(report.first_token)),
        ("per token", _percentiles_text(report.per_token)),
    ]
    # Only a paged engine shares pages or preempts requests.
    if report.shared_pages or report.preempted:
        pages = f"{report.shared_pages} shared, requests preempted {report.preempted} times"
        rows.insert(3, ("pages", pages))
    return "\n".join(table(rows))


def _percentiles_text(times: Percentiles | None) -> str:
    if times is None:
        return "none"
    return ", ".join(
        f"{name} {getattr(times, name) * 1e3:.1f} ms" for name in ("p50", "p90", "p99")
    )


@text_of.register(Update)
def update_text(update: Update) -> str:
    """Return how the weights of an engine moved."""
    heads = [sent_text(plan) for plan in update.plans]
    heads += [f"{bytes_text(update.placed_bytes)} without a plan"] * (update.placed_bytes > 0)
    return "\n".join([f"version {update.version}", *(f"  {head}" for head in heads)])


data_of.register(Report)(fields_of)
