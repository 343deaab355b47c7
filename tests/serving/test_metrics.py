"""Percentiles and counts."""

from __future__ import annotations

import pytest

from shardwright.serving import Finish, Percentiles
from shardwright.serving.metrics import KEPT, Meter, percentiles


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([3.0], (3, 3, 3)),
        ([4.0, 1.0, 3.0, 2.0], (2, 4, 4)),
        ([float(at) for at in range(200, 0, -1)], (100, 180, 198)),
    ],
)
def test_percentiles_are_samples(samples: list[float], expected: tuple[float, ...]) -> None:
    assert percentiles(samples) == Percentiles(
        **dict(zip(("p50", "p90", "p99"), expected, strict=True))
    )


def test_percentiles_without_samples() -> None:
    report = Meter(lambda: 0.0).report(4, shared_pages=0, preempted=0)
    assert (
        report.first_token,
        report.per_token,
        report.tokens_per_second,
        report.slots_in_use,
    ) == (None, None, 0.0, 0.0)
    assert "first token   none" in str(report)


def test_meter_keeps_latest_samples_only() -> None:
    now = [0.0]
    meter = Meter(lambda: now[0])
    meter.submitted(0)
    for step in range(KEPT + 5):
        now[0] += 1.0 if step < 5 else 2.0
        meter.wrote(0, meter.now())
    meter.ended(0, Finish.LENGTH)
    report = meter.report(1, shared_pages=0, preempted=0)
    assert report.first_token == Percentiles(p50=1.0, p90=1.0, p99=1.0)
    assert report.per_token == Percentiles(p50=2.0, p90=2.0, p99=2.0)
    assert report.new_tokens == KEPT + 5
    assert not meter._since
    assert not meter._begun
