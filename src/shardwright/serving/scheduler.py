"""Decide which request gets which slot, and when. This needs no arrays and no devices.

A request waits in the queue until a slot and its pages are free. Then its prompt is read in chunks,
in a row of the prefill batch. Then it moves to its slot, where it gets a token per step. Its slot
and pages are reserved for its longest possible text, so nothing can run out later. Requests are
admitted strictly in the order in which they came.

Prompts take turns in the rows. If others wait for a row, a prompt leaves its row after a few
chunks. The part that was read stays in its slot until its next turn.
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
    """The phase of a request."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    DONE = "done"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits that all requests of an engine share.

    Attributes:
      slots: Number of sequences that are decoded together.
      capacity: Rows of a slot. None for a ring, which holds the end of a text of any length.
      prefill_rows: Number of prompts that are read together.
      chunk: Number of tokens of a prompt that are read in one step.
      turn: Number of chunks that a prompt reads before it leaves its row to one that waits. None
        means all chunks.
      queue: Number of requests that may wait. More requests are refused.
      pages: Pages of the pool. None unless the cache is paged.
      page_size: Rows of a page.
    """

    slots: int
    capacity: int | None
    prefill_rows: int
    chunk: int
    queue: int
    turn: int | None = None
    pages: int | None = None
    page_size: int = 1

    def pages_of(self, request: Request) -> int:
        """Return how many pages a request may need."""
        return 0 if self.pages is None else -(-request.rows // self.page_size)

    def check(self, request: Request) -> None:
        """Raise ServingError if a request would not fit even if it were alone."""
        need = (
            f"{len(request.prompt)} prompt tokens and {request.max_new_tokens} new tokens need "
            f"{request.rows} rows"
        )
        if self.capacity is not None and request.rows > self.capacity:
            raise ServingError(
                f"{need}, but a slot has {self.capacity}",
                path="request",
                size=request.rows,
                fix="shorten one of them, create the engine with more capacity, or use "
                'cache="sliding", which keeps a window',
            )
        if self.pages is not None and self.pages_of(request) > self.pages:
            raise ServingError(
                f"{need}, {self.pages_of(request)} pages of {self.page_size}, but the pool has "
                f"{self.pages} pages",
                path="request",
                size=request.rows,
                fix="shorten one of them, or create the engine with more pages",
            )


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """The state of a request.

    Attributes:
      number: Number of the request, in order of arrival.
      request: The request.
      phase: Its phase.
      slot: Its slot, which is reserved from admission on.
      row: Its row of the prefill batch, while its prompt is read there.
      read: Number of tokens of the prompt that were read.
      turn: Number of chunks that it has read since it got its row.
      in_flight: Number of tokens that calls in flight will give it. These calls have begun, but the
        host has not read their results.
      written: All tokens that were drawn and read, including those of stop sequences.
      logprobs: The logarithms of the probabilities of the tokens in `written`.
      text: The tokens that may be handed out.
      versions: Versions of the weights that it was computed with, in order.
      completion: Its result, or None before its end.
    """

    number: int
    request: Request
    phase: Phase = Phase.QUEUED
    slot: int | None = None
    row: int | None = None
    read: int = 0
    turn: int = 0
    in_flight: int = 0
    written: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    text: list[int] = dataclasses.field(default_factory=list)
    versions: list[int | str] = dataclasses.field(default_factory=list)
    completion: Completion | None = None

    @property
    def reading(self) -> Sequence[int]:
        """The tokens that the cache must hold before the next one is drawn.

        These are all tokens except the last one that was written. For a request that has written
        nothing, they are its prompt.
        """
        if len(self.written) < 2:
            return self.request.prompt
        return (*self.request.prompt, *self.written[:-1])

    def used(self, version: int | str) -> None:
        """Record the version of the weights of a step."""
        if not self.versions or self.versions[-1] != version:
            self.versions.append(version)

    def complete(self, finish: Finish, error: Exception | None) -> None:
        """Set the result of the request."""
        self.completion = Completion(
            tokens=tuple(self.text),
            finish=finish,
            error=error,
            versions=tuple(self.versions),
            logprobs=tuple(self.logprobs[: len(self.text)]),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The next part of a prompt, with its job and its row of the prefill batch."""

    job: Job
    row: int
    tokens: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A job that moves from its row of the prefill batch to its slot, or back."""

    job: Job
    row: int
    slot: int


class Scheduler:
    """The queue, the prefill rows, the slots and the pages.

    A slot or row that a job has left is "dirty" until the device has emptied it and `clean` is
    called. Only then may another job get it.

    Attributes:
      limits: The limits that jobs share.
      inbox: Submitted jobs, which join the queue at the next call. Any thread may add to it.
      queue: Waiting jobs, in order of arrival.
      rowless: Jobs with a slot that wait for a row, in the order of their turns.
      rows: Jobs by row of the prefill batch.
      slots: Jobs by slot, from admission on.
      dirty_rows: Rows to empty.
      dirty_slots: Slots to empty, with the number of pages reserved for each.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.inbox: collections.deque[Job] = collections.deque()
        self.queue: collections.deque[Job] = collections.deque()
        self.rowless: collections.deque[Job] = collections.deque()
        self.rows: dict[int, Job] = {}
        self.slots: dict[int, Job] = {}
        self.dirty_rows: set[int] = set()
        self.dirty_slots: dict[int, int] = {}
        self._ended: list[Job] = []

    @property
    def free_pages(self) -> int:
        """Pages that are not reserved."""
        reserved = sum(self.limits.pages_of(job.request) for job in self.slots.values())
        return (self.limits.pages or 0) - reserved - sum(self.dirty_slots.values())

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.waiting or self.slots or self.dirty_rows or self.dirty_slots)

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for a slot."""
        return len(self.inbox) + len(self.queue)

    def check_queue(self) -> None:
        """Raise QueueFullError if the queue is full."""
        if self.waiting >= self.limits.queue:
            raise QueueFullError(
                f"the queue is full: {self.waiting} requests wait, of at most {self.limits.queue}",
                path="queue",
                fix="call step() and submit it again, or create the engine with a longer queue",
            )

    def submit(self, job: Job) -> None:
        """Put a job into the queue. Its request must fit, and the queue must have room."""
        self.inbox.append(job)

    def admit(self) -> list[Job]:
        """Give waiting jobs a slot and pages, in order. Stop at the first job that gets none."""
        self._receive()
        admitted = []
        while self.queue:
            slot = self._free_slot()
            if slot is None or self.limits.pages_of(self.queue[0].request) > self.free_pages:
                break
            job = self.queue.popleft()
            job.phase, job.slot = Phase.PREFILLING, slot
            self.slots[slot] = job
            self.rowless.append(job)
            admitted.append(job)
        return admitted

    def over(self) -> list[Move]:
        """Return the jobs whose turn is over. There are at most as many as jobs wait for a row."""
        if self.limits.turn is None:
            return []
        unread = [
            (row, job) for row, job in self.rows.items() if job.read < len(job.request.prompt)
        ]
        long = [(row, job) for row, job in unread if job.turn >= self.limits.turn]
        long.sort(key=lambda pair: -pair[1].turn)
        wanted = max(len(self.rowless) - len(self._free_rows()), 0)
        return [_move(job, row) for row, job in long[:wanted]]

    def park(self, jobs: Sequence[Job]) -> None:
        """Record that jobs have left their rows, and that their slots hold what was read."""
        for job in jobs:
            self._leave_row(job)
            self.rowless.append(job)

    def turns(self) -> list[Move]:
        """Return the waiting jobs that get the free rows."""
        return [_move(job, row) for job, row in zip(self.rowless, self._free_rows(), strict=False)]

    def take(self, moves: Sequence[Move]) -> None:
        """Record that jobs have rows, which hold what was read of their prompts."""
        for move in moves:
            self.rowless.remove(move.job)
            move.job.row, move.job.turn = move.row, 0
            self.rows[move.row] = move.job

    def chunks(self) -> list[Chunk]:
        """Return the next chunk of every prompt that is not completely read."""
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
        """Record that chunks were read."""
        for chunk in chunks:
            chunk.job.read += len(chunk.tokens)
            chunk.job.turn += 1

    def ready(self) -> list[Move]:
        """Return the jobs whose prompts are completely read and that are not in their slots yet."""
        return [
            _move(job, row)
            for row, job in sorted(self.rows.items())
            if job.read == len(job.request.prompt)
        ]

    def move(self, jobs: Sequence[Job]) -> None:
        """Record that jobs are in their slots. Their rows become dirty."""
        for job in jobs:
            job.phase = Phase.DECODING
            self._leave_row(job)
            self.expect(job, 0)

    def decoding(self) -> dict[int, Job]:
        """Return the jobs that are decoding, by slot."""
        return {
            slot: job for slot, job in sorted(self.slots.items()) if job.phase is Phase.DECODING
        }

    def left(self, job: Job, most: int) -> int:
        """Return how many tokens a job gets in a call that gives at most `most` tokens."""
        left = job.request.max_new_tokens - len(job.written) - job.in_flight
        return min(most, left)

    def expect(self, job: Job, count: int) -> None:
        """Record that a call in flight will give a job tokens.

        If they are its last ones, a job that is decoding leaves its slot: no later call needs its
        caches.
        """
        job.in_flight += count
        is_last = len(job.written) + job.in_flight == job.request.max_new_tokens
        if is_last and job.phase is Phase.DECODING:
            self._leave_slot(job)

    def write(self, job: Job, token: int) -> list[int]:
        """Add a token to a job, which may end the job. Return the tokens to hand out."""
        job.written.append(token)
        if not job.request.stop:
            job.text.append(token)
            if len(job.written) == job.request.max_new_tokens:
                self.end(job, Finish.LENGTH)
            return [token]
        stop = job.request.stop_sequences
        length = stopped_by(job.written, stop)
        done = length > 0 or len(job.written) == job.request.max_new_tokens
        # The tokens of a stop sequence are dropped. Tokens that may begin one are withheld.
        withheld = length or (0 if done else may_begin(job.written, stop))
        new = job.written[len(job.text) : len(job.written) - withheld]
        job.text += new
        if done:
            self.end(job, Finish.STOP if length else Finish.LENGTH)
        return new

    def end(self, job: Job, finish: Finish, error: Exception | None = None) -> None:
        """End a job in any phase. Its row and its slot become dirty.

        Do nothing if the job has already ended.
        """
        if job.phase is Phase.DONE:
            return
        self._receive()
        if job.phase is Phase.QUEUED and job in self.queue:
            self.queue.remove(job)
        if job in self.rowless:
            self.rowless.remove(job)
        if job.row is not None:
            self._leave_row(job)
        self._leave_slot(job)
        job.phase = Phase.DONE
        job.complete(finish, error)
        # The loop counts it later, because `cancel` may be called in the middle of a step.
        self._ended.append(job)

    def fail(self, job: Job, error: Exception) -> None:
        """End a job with an error, even if it has just ended without one."""
        self.end(job, Finish.FAILED, error)
        job.complete(Finish.FAILED, error)

    def jobs(self) -> list[Job]:
        """Return the jobs that wait or have a slot: first those in the queue."""
        self._receive()
        return [*self.queue, *self.slots.values()]

    def holding(self, part: str) -> list[Job]:
        """Return the jobs that have tokens in "rows" (of the prefill batch), or in "slots"."""
        if part == "rows":
            return list(self.rows.values())
        return [*self.decoding().values(), *(job for job in self.rowless if job.read)]

    def take_ended(self) -> list[tuple[Job, Finish]]:
        """Return the jobs that have ended since the last call, and why."""
        ended = [(job, job.completion.finish) for job in self._ended if job.completion is not None]
        self._ended.clear()
        return ended

    def clean(self, *, rows: Sequence[int] = (), slots: Sequence[int] = ()) -> None:
        """Record that the device has emptied rows and slots."""
        self.dirty_rows.difference_update(rows)
        for slot in slots:
            self.dirty_slots.pop(slot, None)

    def _receive(self) -> None:
        while self.inbox:
            self.queue.append(self.inbox.popleft())

    def _leave_slot(self, job: Job) -> None:
        if job.slot is not None:
            self.dirty_slots[job.slot] = self.limits.pages_of(job.request)
            del self.slots[job.slot]
            job.slot = None

    def _leave_row(self, job: Job) -> None:
        if job.row is not None:
            del self.rows[job.row]
            self.dirty_rows.add(job.row)
            job.row = None

    def _free_rows(self) -> list[int]:
        taken = self.rows.keys() | self.dirty_rows
        return [row for row in range(self.limits.prefill_rows) if row not in taken]

    def _free_slot(self) -> int | None:
        taken = self.slots.keys() | self.dirty_slots.keys()
        return next((slot for slot in range(self.limits.slots) if slot not in taken), None)


def _move(job: Job, row: int) -> Move:
    assert job.slot is not None
    return Move(job=job, row=row, slot=job.slot)
