"""How time is taken here, and what a measurement says: medians of interleaved repetitions, as a ratio beside something else.

A ratio is the median of the repetitions' own ratios: the two times of one repetition are taken
within moments of each other, so a machine that is slower for a while is slower for both.
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
    """What a number has to be; one of the two is given."""

    at_most: float | None = None
    at_least: float | None = None

    def met(self, value: float) -> bool:
        """Tell whether a measured value will do."""
        return (self.at_most is None or value <= self.at_most) and (
            self.at_least is None or value >= self.at_least
        )

    def __str__(self) -> str:
        return f"<= {self.at_most:g}" if self.at_most is not None else f">= {self.at_least:g}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured number.

    Attributes:
      subject: the benchmark it belongs to.
      case: the input it was measured on.
      what: what was measured; for a ratio the numerator.
      against: what it was measured beside: the denominator; empty for a plain time.
      value: the number: a ratio (unit "x") or a time.
      unit: "x" or "us".
      seconds: median time of `what`.
      against_seconds: median time of `against`, or None.
      spread: interquartile range of `what` in parts of its median, the noise of the run.
      repeats: repetitions that the medians are of.
      target: what `value` has to be, or None where the number is for information.
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
        return "" if self.target is None else "ok" if self.target.met(self.value) else "MISSED"

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain data."""
        target = None if self.target is None else dataclasses.asdict(self.target)
        return {**dataclasses.asdict(self), "target": target, "verdict": self.verdict}


def interleave(
    cases: Mapping[str, Prepare], *, repeats: int, clock: Callable[[], float] = time.thread_time
) -> dict[str, list[float]]:
    """Time every case once per repetition, in an order that rotates, so that a busy moment of the machine hits all alike.

    Args:
      cases: for each name, what prepares a repetition (untimed) and returns what is timed.
      repeats: repetitions; one more, untimed, comes first.
      clock: what tells the time, in seconds.

    Returns:
      Seconds by name, by default of this thread's processor time: on an idle machine the time that
      passes, on a busy one without the waiting. The garbage collector stands still while the clock
      runs, as in `timeit`.
    """
    names = list(cases)
    times: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(-1, repeats):
        turn = (repeat + 1) % len(names)
        gc.collect()
        for name in names[turn:] + names[:turn]:
            taken = _once(cases[name](), clock)
            if repeat >= 0:
                times[name].append(taken)
    return times


def _once(run: Run, clock: Callable[[], float]) -> float:
    gc.disable()
    try:
        start = clock()
        result = run()
        taken = clock() - start
    finally:
        gc.enable()
    del result
    return taken


def warmed(run: Run) -> Run:
    """Return what has run once, so that its input is in the processor's caches."""
    run()
    return run


def always(run: Run) -> Prepare:
    """Return what prepares a case that needs no preparation."""
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
    ratios = [one / other for one, other in zip(times[what], times[against], strict=True)]
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
    """Return the interquartile range in parts of the median."""
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (0.0, 0.0, 0.0)
    return (high - low) / statistics.median(times)


def clear_module_caches() -> None:
    """Empty every `functools` cache of the package, so that a first call is one."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "shardwright":
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear") and getattr(value, "__module__", "") == name:
                    value.cache_clear()
