"""Counts and times of an engine."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from shardwright.serving.request import Finish
from shardwright.vocabulary.shown import data_of, text_of

# How many samples of each kind of time are kept: only the latest ones, because an engine may run
# for months.
KEPT = 10_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Seconds that 50 %, 90 % and 99 % of the samples do not exceed."""

    p50: float
    p90: float
    p99: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Counts and times of an engine since it was created.

    Attributes:
      requests: Requests accepted.
      refused: Number of requests that were refused, because they could never fit or the queue was
        full.
      finished: Number of requests that have ended, by the reason (`Finish`).
      prompt_tokens: Prompt tokens read.
      new_tokens: Tokens written.
      prefill_steps: Number of steps that read a chunk of the prefill batch.
      decode_steps: Number of decode steps. One step decodes all slots.
      shared_pages: Number of pages that requests shared with earlier requests instead of computing
        them again.
      preempted: How often a request gave up its slot and pages to an older request.
      slots: Number of slots.
      slots_in_use: Mean number of slots in use, over the decode steps.
      busy: Seconds in which `step` was running.
      tokens_per_second: New tokens divided by `busy`.
      first_token: Seconds from `submit` to the first token, including the wait. None without
        samples.
      per_token: Seconds from one token of a request to the next. None without samples.
    """

    requests: int
    refused: int
    finished: dict[str, int]
    prompt_tokens: int
    new_tokens: int
    prefill_steps: int
    decode_steps: int
    shared_pages: int
    preempted: int
    slots: int
    slots_in_use: float
    busy: float
    tokens_per_second: float
    first_token: Percentiles | None
    per_token: Percentiles | None

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return data_of(self)

    def __str__(self) -> str:
        return text_of(self)


class Meter:
    """The counters and clocks of a running engine."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[int, float] = {}
        self._begun: set[int] = set()
        self._first: collections.deque[float] = collections.deque(maxlen=KEPT)
        self._gaps: collections.deque[float] = collections.deque(maxlen=KEPT)
        self.requests = self.refused = 0
        self.prompt_tokens = self.new_tokens = 0
        self.prefill_steps = self.decode_steps = self.slot_steps = 0
        self.finished = dict.fromkeys(Finish, 0)
        self.busy = 0.0

    def now(self) -> float:
        """Return the time in seconds, from an arbitrary origin."""
        return self._clock()

    def submitted(self, number: int) -> None:
        """Count an accepted request."""
        self.requests += 1
        self._since[number] = self._clock()

    def wrote(self, number: int, now: float) -> None:
        """Count a token of a request. The host received the token at the time `now`."""
        seconds = now - self._since[number]
        if number in self._begun:
            self._gaps.append(seconds)
        else:
            self._begun.add(number)
            self._first.append(seconds)
        self._since[number] = now
        self.new_tokens += 1

    def ended(self, number: int, finish: Finish) -> None:
        """Count the end of a request."""
        self._since.pop(number, None)
        self._begun.discard(number)
        self.finished[finish] += 1

    def report(self, slots: int, *, shared_pages: int, preempted: int) -> Report:
        """Return the counts and times.

        Args:
          slots: Slots of the engine.
          shared_pages: As in `Report`.
          preempted: As in `Report`.
        """
        return Report(
            requests=self.requests,
            refused=self.refused,
            finished={str(finish): count for finish, count in self.finished.items()},
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            prefill_steps=self.prefill_steps,
            decode_steps=self.decode_steps,
            shared_pages=shared_pages,
            preempted=preempted,
            slots=slots,
            slots_in_use=self.slot_steps / self.decode_steps if self.decode_steps else 0.0,
            busy=self.busy,
            tokens_per_second=self.new_tokens / self.busy if self.busy else 0.0,
            first_token=percentiles(self._first),
            per_token=percentiles(self._gaps),
        )


def percentiles(samples: Sequence[float]) -> Percentiles | None:
    """Return percentiles, each of which is one of the samples. Return None without samples."""
    if not samples:
        return None
    ordered = sorted(samples)
    # Nearest rank: the smallest sample that at least this share of the samples does not exceed.
    p50, p90, p99 = (ordered[-(-len(ordered) * percent // 100) - 1] for percent in (50, 90, 99))
    return Percentiles(p50=p50, p90=p90, p99=p99)
