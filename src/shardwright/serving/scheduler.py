"""Who gets which slot, and when: plain Python over values, the same with any device or none.

A request waits in the queue until a slot, a row of the prefill batch and its pages are free; then it reads its prompt in
chunks, in its row, and moves to its slot, where it writes a token per step. Slots and pages are reserved for the longest text
that it may become, so that nothing ever runs out on the way. Requests are admitted in the order in which they came: one that
has to wait is not overtaken.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Sequence

from shardwright.errors import QueueFullError, ServingError
from shardwright.serving.request import Completion, Finish, Request
from shardwright.serving.stopping import may_begin, stopped_by


class Phase(enum.StrEnum):
    """Where a request is."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    DONE = "done"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What there is to share.

    Attributes:
      slots: sequences that are decoded together.
      capacity: rows of a slot; None for a ring, which keeps the latest of a text of any length.
      prefill_rows: prompts that are read together.
      chunk: tokens of a prompt that are read in one step.
      queue: requests that may wait; one more is turned away.
      pages: of the pool, or None for a cache without pages.
      page_size: rows of a page.
    """

    slots: int
    capacity: int | None
    prefill_rows: int
    chunk: int
    queue: int
    pages: int | None = None
    page_size: int = 1

    def pages_of(self, request: Request) -> int:
        """Return how many pages a request may need."""
        return 0 if self.pages is None else -(-request.rows // self.page_size)

    def check(self, request: Request) -> None:
        """Raise ServingError if a request does not fit even where it has everything for itself."""
        said = f"{len(request.prompt)} tokens of prompt and {request.max_new_tokens} new ones need {request.rows} rows"
        if self.capacity is not None and request.rows > self.capacity:
            fix = 'shorten one of them, make the engine with more capacity, or take cache="sliding", which keeps a window'
            raise ServingError(
                f"{said}, and a slot has {self.capacity}",
                path="request",
                size=request.rows,
                fix=fix,
            )
        if self.pages is not None and self.pages_of(request) > self.pages:
            what = f"{said}, {self.pages_of(request)} pages of {self.page_size}, and there are {self.pages} in all"
            raise ServingError(
                what,
                path="request",
                size=request.rows,
                fix="shorten one of them, or make the engine with more pages",
            )


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request on its way.

    Attributes:
      number: of the request, in the order in which they came.
      request: what was asked for.
      phase: where it is.
      slot: reserved when it is admitted.
      row: of the prefill batch, while it is prefilling.
      read: tokens of the prompt that have been read.
      written: every token drawn, those of stop sequences too.
      text: those that may be handed out.
      completion: once it has ended.
    """

    number: int
    request: Request
    phase: Phase = Phase.QUEUED
    slot: int | None = None
    row: int | None = None
    read: int = 0
    written: list[int] = dataclasses.field(default_factory=list)
    text: list[int] = dataclasses.field(default_factory=list)
    completion: Completion | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The next part of a prompt, the job whose it is, and its row."""

    job: Job
    row: int
    tokens: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A job that has read its prompt, the row that it leaves and the slot that it takes."""

    job: Job
    row: int
    slot: int


class Scheduler:
    """The queue, the prefill rows, the slots and the pages.

    A slot or row that a job leaves is not given to another before `clean` says that the device has emptied it.

    Attributes:
      limits: what there is.
      queue: jobs that wait, first come first.
      rows: jobs by row of the prefill batch.
      slots: jobs by slot, from admission on.
      dirty_rows: rows that were left and are not emptied yet.
      dirty_slots: likewise slots; with the pages that were reserved for each.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.queue: collections.deque[Job] = collections.deque()
        self.rows: dict[int, Job] = {}
        self.slots: dict[int, Job] = {}
        self.dirty_rows: set[int] = set()
        self.dirty_slots: dict[int, int] = {}
        self._ended: list[Job] = []

    @property
    def free_pages(self) -> int:
        """Pages that are reserved for no one."""
        reserved = sum(self.limits.pages_of(job.request) for job in self.slots.values()) + sum(
            self.dirty_slots.values()
        )
        return (self.limits.pages or 0) - reserved

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.queue or self.slots or self.dirty_rows or self.dirty_slots)

    def submit(self, job: Job) -> None:
        """Let a job wait for its turn.

        Raises:
          ServingError: it would wait for ever.
          QueueFullError: too many wait already.
        """
        self.limits.check(job.request)
        if len(self.queue) >= self.limits.queue:
            fix = "call step() and submit it again, or make the engine with a longer queue"
            raise QueueFullError(
                f"{len(self.queue)} requests wait, and the queue holds {self.limits.queue}",
                path="queue",
                fix=fix,
            )
        self.queue.append(job)

    def admit(self) -> list[Job]:
        """Give a row, a slot and pages to those that wait, as long as the first one can have all three; return them."""
        admitted = []
        while self.queue:
            row, slot = self._free_row(), self._free_slot()
            if (
                row is None
                or slot is None
                or self.limits.pages_of(self.queue[0].request) > self.free_pages
            ):
                break
            job = self.queue.popleft()
            job.phase, job.row, job.slot = Phase.PREFILLING, row, slot
            self.rows[row] = self.slots[slot] = job
            admitted.append(job)
        return admitted

    def chunks(self) -> list[Chunk]:
        """Return the next part of every prompt that is not read to its end."""
        waiting = (
            (row, job)
            for row, job in sorted(self.rows.items())
            if job.read < len(job.request.prompt)
        )
        return [
            Chunk(
                job=job, row=row, tokens=job.request.prompt[job.read : job.read + self.limits.chunk]
            )
            for row, job in waiting
        ]

    def advance(self, chunks: Sequence[Chunk]) -> None:
        """Note that parts of prompts have been read."""
        for chunk in chunks:
            chunk.job.read += len(chunk.tokens)

    def ready(self) -> list[Move]:
        """Return the jobs that have read their prompts, and have yet to move to their slots."""
        slots = {id(job): slot for slot, job in self.slots.items()}
        done = (
            (row, job)
            for row, job in sorted(self.rows.items())
            if job.read == len(job.request.prompt)
        )
        return [Move(job=job, row=row, slot=slots[id(job)]) for row, job in done]

    def move(self, jobs: Sequence[Job]) -> None:
        """Note that jobs are in their slots now; their rows wait to be emptied."""
        for job in jobs:
            job.phase = Phase.DECODING
            self._leave_row(job)

    def decoding(self) -> dict[int, Job]:
        """Return the jobs that write, by slot."""
        return {
            slot: job for slot, job in sorted(self.slots.items()) if job.phase is Phase.DECODING
        }

    def write(self, job: Job, token: int) -> list[int]:
        """Add a token to a job's text, end the job if that is its last, and return the tokens that may be handed out now."""
        job.written.append(token)
        stop = [one for one in job.request.stop if isinstance(one, Sequence)]
        length = stopped_by(job.written, stop)
        done = length > 0 or len(job.written) == job.request.max_new_tokens
        held = length or (0 if done else may_begin(job.written, stop))
        fresh = job.written[len(job.text) : len(job.written) - held]
        job.text += fresh
        if done:
            self.end(job, Finish.STOP if length else Finish.LENGTH)
        return fresh

    def end(self, job: Job, finish: Finish, error: Exception | None = None) -> None:
        """End a job, wherever it is. What it has is free once the device has emptied it; ending it twice changes nothing."""
        if job.phase is Phase.DONE:
            return
        if job.phase is Phase.QUEUED and job in self.queue:
            self.queue.remove(job)
        if job.row is not None:
            self._leave_row(job)
        if job.slot is not None:
            self.dirty_slots[job.slot] = self.limits.pages_of(job.request)
            del self.slots[job.slot]
        job.phase = Phase.DONE
        job.completion = Completion(tokens=tuple(job.text), finish=finish, error=error)
        self._ended.append(job)

    def fail(self, job: Job, error: Exception) -> None:
        """End a job with an error, also one that has just ended well."""
        self.end(job, Finish.FAILED, error)
        job.completion = Completion(tokens=tuple(job.text), finish=Finish.FAILED, error=error)

    def jobs(self) -> list[Job]:
        """Return every job that has not ended: those that wait, then those that have a slot."""
        return [*self.queue, *self.slots.values()]

    def holding(self, part: str) -> list[Job]:
        """Return the jobs that have something in the "rows" of the prefill batch, or in "slots"."""
        return list((self.rows if part == "rows" else self.decoding()).values())

    def take_ended(self) -> list[tuple[Job, Finish]]:
        """Return the jobs that have ended since it was asked last, and why."""
        ended = [(job, job.completion.finish) for job in self._ended if job.completion is not None]
        self._ended.clear()
        return ended

    def clean(self, *, rows: Sequence[int] = (), slots: Sequence[int] = ()) -> None:
        """Note that the device has emptied rows and slots."""
        self.dirty_rows.difference_update(rows)
        for slot in slots:
            self.dirty_slots.pop(slot, None)

    def _leave_row(self, job: Job) -> None:
        if job.row is not None:
            del self.rows[job.row]
            self.dirty_rows.add(job.row)
            job.row = None

    def _free_row(self) -> int | None:
        taken = self.rows.keys() | self.dirty_rows
        return next((row for row in range(self.limits.prefill_rows) if row not in taken), None)

    def _free_slot(self) -> int | None:
        taken = self.slots.keys() | self.dirty_slots.keys()
        return next((slot for slot in range(self.limits.slots) if slot not in taken), None)
