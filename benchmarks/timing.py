"""Time several cases in interleaved repetitions, and compare them by ratios.

A ratio is the median of the ratios of the repetitions. The two times of a repetition are measured
shortly after each other, so a machine that is slow for a while is slow for both.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Run = Callable[[], Any]
Prepare = Callable[[], Run]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An upper or a lower bound of a number."""

    at_most: float | None = None
    at_least: float | None = None

    def met(self, value: float) -> bool:
        """Tell whether a value meets the target."""
        return (self.at_most is None or value <= self.at_most) and (
            self.at_least is None or value >= self.at_least
        )

    def __str__(self) -> str:
        return f"<= {self.at_most:g}" if self.at_most is not None else f">= {self.at_least:g}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured number.

    Attributes:
      subject: The benchmark.
      case: The input.
      what: What was measured; the numerator of a ratio.
      against: The denominator of a ratio; empty for a time.
      value: A ratio (unit "x") or a time.
      unit: "x" or "us".
      seconds: Median time of `what`.
      against_seconds: Median time of `against`, or None.
      spread: Interquartile range of `what` divided by its median: the noise of the run.
      repeats: Number of repetitions.
      target: The target of `value`, or None.
    """

    subject: str
    case: str
    what: str
    against: str = ""
    value: float
    unit: str = "x"
    seconds: float
    against_seconds: float | None = None
    spread: float
    repeats: int
    target: Target | None = None

    @property
    def verdict(self) -> str:
        """`ok`, `MISSED`, or empty without a target."""
        if self.target is None:
            return ""
        return "ok" if self.target.met(self.value) else "MISSED"

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain data."""
        target = None if self.target is None else dataclasses.asdict(self.target)
        return {**dataclasses.asdict(self), "target": target, "verdict": self.verdict}


def interleave(
    cases: Mapping[str, Prepare], *, repeats: int, clock: Callable[[], float] = time.thread_time
) -> dict[str, list[float]]:
    """Time every case once per repetition.

    The order of the cases rotates, so that a busy moment of the machine affects all of them.

    Args:
      cases: For each name, a function that prepares a repetition (untimed) and returns the function
        to time.
      repeats: Number of repetitions; one more, untimed, comes first.
      clock: Returns the time in seconds.

    Returns:
      Seconds by name. By default they are processor time of this thread, without the time in which
      other processes run. The garbage collector is off during a measurement, as in `timeit`.
    """
    names = list(cases)
    times: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(-1, repeats):
        turn = (repeat + 1) % len(names)
        gc.collect()
        for name in names[turn:] + names[:turn]:
            seconds = _once(cases[name](), clock)
            if repeat >= 0:
                times[name].append(seconds)
    return times


def _once(run: Run, clock: Callable[[], float]) -> float:
    gc.disable()
    try:
        start = clock()
        result = run()
        seconds = clock() - start
    finally:
        gc.enable()
    del result
    return seconds


def warmed(run: Run) -> Run:
    """Run a function once, so that its input is in the caches of the processor, and return it."""
    run()
    return run


def always(run: Run) -> Prepare:
    """Return a preparation that always returns the same function."""
    return lambda: run


def ratio(
    times: Mapping[str, list[float]],
    what: str,
    *,
    against: str,
    subject: str,
    case: str,
    target: Target | None = None,
) -> Row:
    """Return the median ratio of two cases as a row."""
    top, bottom = statistics.median(times[what]), statistics.median(times[against])
    ratios = [ours / theirs for ours, theirs in zip(times[what], times[against], strict=True)]
    return Row(
        subject=subject,
        case=case,
        what=what,
        against=against,
        value=statistics.median(ratios),
        seconds=top,
        against_seconds=bottom,
        spread=spread(times[what]),
        repeats=len(times[what]),
        target=target,
    )


def spread(times: list[float]) -> float:
    """Return the interquartile range divided by the median."""
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (0.0, 0.0, 0.0)
    return (high - low) / statistics.median(times)


def clear_module_caches() -> None:
    """Clear every `functools` cache of the package, so that the next call is a first call."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "shardwright":
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear") and getattr(value, "__module__", "") == name:
                    value.cache_clear()
