"""Decide which request gets which slot, and when. This needs no arrays and no devices.

A request waits in the queue until a slot is free and the caches have room for its tokens. Then its
prompt is read in chunks, in a row of the prefill batch. Then the request decodes in its slot, a
token per step. Requests are admitted strictly in the order in which they came.

Prompts share the rows round-robin. If other prompts wait for a row, a prompt leaves its row after a
few chunks. The part that was read stays in the slot of the prompt until the prompt gets a row
again.

If pages run out, the youngest request is preempted: it gives up its slot and pages, and returns to
the queue. Later, it reads its prompt and the text that it has written, and continues. The oldest
request is never preempted, and the pool is large enough for it alone, so every request ends.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

from shardwright.errors import QueueFullError
from shardwright.serving.jobs import Chunk, Job, Limits, Phase, RowMove
from shardwright.serving.request import Finish
from shardwright.serving.space import PageSpace, SlotSpace


class Scheduler:
    """The queue, the prefill rows and the slots.

    A slot or row that a job has left is "dirty" until the device has emptied it. A slot may be used
    again only after it was emptied. The prefill of a new prompt empties its row.

    Attributes:
      limits: The limits that jobs share.
      space: Which slots or pages hold the tokens of jobs.
      inbox: Submitted jobs, which join the queue at the next call. Any thread may add jobs.
      queue: Waiting jobs, in order of arrival.
      rowless: Jobs with a slot that wait for a row, in the order in which they get rows.
      rows: Jobs by row of the prefill batch.
      slots: Jobs by slot, from admission on.
      dirty_rows: Rows whose tokens belong to no job.
      dirty_slots: Slots to empty. There are none if prompts are read directly into pages.
      preempted: Number of preemptions, over all jobs.
      settle: Function that fetches the results of the calls in flight. It is called before a job is
        preempted, because the results may end jobs, and because a preempted job cannot continue
        unless its tokens are known.
    """

    def __init__(self, limits: Limits, space: SlotSpace | PageSpace | None = None) -> None:
        self.limits, self.space = limits, SlotSpace(limits) if space is None else space
        self.inbox: collections.deque[Job] = collections.deque()
        self.queue: collections.deque[Job] = collections.deque()
        self.rowless: collections.deque[Job] = collections.deque()
        self.rows: dict[int, Job] = {}
        self.slots: dict[int, Job] = {}
        self.dirty_rows: set[int] = set()
        self.dirty_slots: set[int] = set()
        self.preempted = 0
        self.settle: Callable[[], None] = lambda: None
        self._ended: list[Job] = []

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.waiting or self.slots or self.dirty_slots)

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for a slot."""
        return len(self.inbox) + len(self.queue)

    def check_queue(self) -> None:
        """Raise QueueFullError if the queue is full."""
        if self.waiting >= self.limits.queue:
            raise QueueFullError(
                f"the queue is full: {self.waiting} of at most {self.limits.queue} requests wait",
                path="queue",
                fix="call step() and submit the request again, or create the engine with a "
                "longer queue",
            )

    def submit(self, job: Job) -> None:
        """Put a job into the queue. Its request must fit, and the queue must have room."""
        self.inbox.append(job)

    def admit(self) -> list[Job]:
        """Give waiting jobs a slot, in order.

        Stop at the first job for which there is no slot or no room.
        """
        self._receive()
        admitted = []
        while self.queue:
            slot, job = self._free_slot(), self.queue[0]
            # Stop here, even if a smaller request behind this one would fit. Otherwise this request
            # might wait forever.
            if slot is None or not self.space.fits(job, self.slots.values()):
                break
            self.queue.popleft()
            job.phase, job.slot, job.read = Phase.PREFILLING, slot, 0
            self.slots[slot] = job
            self.space.open(job, slot)
            self.rowless.append(job)
            admitted.append(job)
        return admitted

    def expired(self) -> list[RowMove]:
        """Return the jobs that must give up their rows, because other jobs find no free row."""
        wanted = len(self.rowless) - len(self._free_rows())
        if self.limits.quantum is None or wanted <= 0:
            return []
        long = [
            (row, job)
            # A prompt that is completely read leaves its row in this step anyway.
            for row, job in self.rows.items()
            if job.read < len(job.reading) and job.chunks_in_row >= self.limits.quantum
        ]
        # The jobs that have had their rows for the longest time leave first.
        long.sort(key=lambda pair: -pair[1].chunks_in_row)
        return [RowMove.of(job, row) for row, job in long[:wanted]]

    def park(self, jobs: Sequence[Job]) -> None:
        """Record that jobs have left their rows.

        The slot of a job holds the part of its prompt that was already read.
        """
        for job in jobs:
            self._leave_row(job)
            self.rowless.append(job)

    def next_rows(self) -> list[RowMove]:
        """Return the waiting jobs that get the free rows."""
        return [
            RowMove.of(job, row) for job, row in zip(self.rowless, self._free_rows(), strict=False)
        ]

    def take(self, moves: Sequence[RowMove]) -> None:
        """Record that jobs got rows.

        The row of a job holds the part of its prompt that was already read.
        """
        for move in moves:
            self.rowless.remove(move.job)
            move.job.row, move.job.chunks_in_row = move.row, 0
            self.rows[move.row] = move.job
            self.dirty_rows.discard(move.row)

    def chunks(self) -> list[Chunk]:
        """Make room for the next chunk of every prompt that is not completely read.

        Return the chunks.
        """
        for job in self._prefilling():
            if job.row is not None:
                job.read = self.space.adopt(job)
                self._grow(job, min(job.read + self.limits.chunk, len(job.reading)))
        # Ask `_prefilling` again, because an older job may have preempted a younger one.
        return [
            Chunk(job=job, row=job.row, tokens=job.reading[job.read : job.read + self.limits.chunk])
            for job in self._prefilling()
            if job.row is not None
        ]

    def advance(self, chunks: Sequence[Chunk]) -> None:
        """Record that chunks were read."""
        for chunk in chunks:
            chunk.job.read += len(chunk.tokens)
            chunk.job.chunks_in_row += 1
            self.space.wrote(chunk.job, chunk.job.read)

    def ready(self) -> list[RowMove]:
        """Return the jobs in rows whose prompts are completely read."""
        return [
            RowMove.of(job, row)
            for row, job in sorted(self.rows.items())
            if job.read == len(job.reading)
        ]

    def move(self, jobs: Sequence[Job]) -> None:
        """Record that jobs decode in their slots."""
        for job in jobs:
            job.phase = Phase.DECODING
            self._leave_row(job)
            self.expect(job, 0)

    def decoding(self) -> dict[int, Job]:
        """Return the jobs that are decoding, by slot."""
        return {
            slot: job for slot, job in sorted(self.slots.items()) if job.phase is Phase.DECODING
        }

    def grow(self, most: int) -> dict[int, tuple[Job, int]]:
        """Give decoding jobs room for their next tokens, the oldest job first.

        Args:
          most: Largest number of tokens that a job gets.

        Returns:
          Jobs by slot, each with the number of tokens that it gets.
        """
        if self.space.in_place:
            for job in sorted(self.decoding().values(), key=lambda job: job.number):
                if job.slot is not None:
                    self._grow(job, self.cached(job) + self.left(job, most))
        return {slot: (job, self.left(job, most)) for slot, job in self.decoding().items()}

    def cached(self, job: Job) -> int:
        """Return how many tokens of a job are in its cache after the calls in flight."""
        if job.phase is not Phase.DECODING:
            return job.read
        # The last sampled token is not cached: the next step reads it. If no token is sampled yet,
        # the cache holds the whole prompt.
        sampled = len(job.written) + job.in_flight
        return len(job.request.prompt) + max(sampled - 1, 0)

    def wrote(self, job: Job) -> None:
        """Record that the tokens of a decoding job were written to its cache."""
        if self.space.in_place and job.slot is not None:
            self.space.wrote(job, self.cached(job))

    def left(self, job: Job, most: int) -> int:
        """Return how many tokens a job gets in a call that gives each job at most `most`."""
        left = job.request.max_new_tokens - len(job.written) - job.in_flight
        return min(most, left)

    def expect(self, job: Job, count: int) -> None:
        """Record how many tokens a call in flight will give to a job.

        If these are the last tokens of a job that is decoding, the job leaves its slot, because no
        later call needs its caches.
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
        # The tokens of a stop sequence are dropped. Tokens that may begin a stop sequence are
        # withheld.
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
        self._leave(job)
        job.phase = Phase.DONE
        job.complete(finish, error)
        # Do not count the ended job here, because `cancel` may be called in the middle of a step.
        # The loop counts it later (`take_ended`).
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
        """Return the jobs that have tokens in a part of the arrays.

        Args:
          part: "rows" (of the prefill batch), "slots", or "pools", which hold the tokens of all
            jobs.
        """
        if part == "rows":
            return list(self.rows.values())
        if part == "pools":
            return list(self.slots.values())
        # The part of a prompt that was read waits in the slot, while the prompt waits for a row.
        return [*self.decoding().values(), *(job for job in self.rowless if job.read)]

    def take_ended(self) -> list[tuple[Job, Finish]]:
        """Return the jobs that have ended since the last call, and why."""
        ended = [(job, job.completion.finish) for job in self._ended if job.completion is not None]
        self._ended.clear()
        return ended

    def clean(self, *, rows: Sequence[int] = (), slots: Sequence[int] = ()) -> None:
        """Record that the device has emptied rows and slots."""
        self.dirty_rows.difference_update(rows)
        for slot in self.dirty_slots.intersection(slots):
            self.dirty_slots.discard(slot)
            self.space.clean(slot)

    def _receive(self) -> None:
        while self.inbox:
            self.queue.append(self.inbox.popleft())

    def _prefilling(self) -> list[Job]:
        return [job for _, job in sorted(self.rows.items()) if job.read < len(job.reading)]

    def _grow(self, job: Job, tokens: int) -> None:
        """Give a job room for this many tokens, or preempt it."""
        while job.slot is not None and not self.space.grow(job, tokens):
            if any(each.in_flight for each in self.slots.values()):
                self.settle()
            else:
                # Preempt the youngest job. If it is `job` itself, `job` has no slot any more, and
                # the loop ends.
                self._preempt(max(self.slots.values(), key=lambda each: each.number))

    def _preempt(self, job: Job) -> None:
        self._leave(job)
        job.phase, job.read = Phase.QUEUED, 0
        # Insert the job in order of arrival, so that later requests do not overtake it.
        at = sum(each.number < job.number for each in self.queue)
        self.queue.insert(at, job)
        self.preempted += 1

    def _leave(self, job: Job) -> None:
        """Remove a job from its row and its slot."""
        if job in self.rowless:
            self.rowless.remove(job)
        self._leave_row(job)
        self._leave_slot(job)

    def _leave_slot(self, job: Job) -> None:
        if job.slot is not None:
            self.space.close(job)
            if not self.space.in_place:
                self.dirty_slots.add(job.slot)
            del self.slots[job.slot]
            job.slot = None

    def _leave_row(self, job: Job) -> None:
        if job.row is not None:
            del self.rows[job.row]
            self.dirty_rows.add(job.row)
            job.row = None

    def _free_rows(self) -> list[int]:
        return [row for row in range(self.limits.prefill_rows) if row not in self.rows]

    def _free_slot(self) -> int | None:
        taken = self.slots.keys() | self.dirty_slots
        return next((slot for slot in range(self.limits.slots) if slot not in taken), None)


def stopped_by(tokens: Sequence[int], stop: Sequence[Sequence[int]]) -> int:
    """Return the length of the longest stop sequence at the end of the tokens, or 0."""
    lengths = [
        len(sequence)
        for sequence in stop
        if len(sequence) <= len(tokens) and tuple(tokens[-len(sequence) :]) == tuple(sequence)
    ]
    return max(lengths, default=0)


def may_begin(tokens: Sequence[int], stop: Sequence[Sequence[int]]) -> int:
    """Return how many of the last tokens are the beginning of a stop sequence."""
    # `stopped_by` finds whole stop sequences, so here a stop sequence must be longer than `count`.
    longest = max((len(sequence) for sequence in stop), default=0)
    for count in range(min(longest, len(tokens)), 0, -1):
        end = tuple(tokens[-count:])
        if any(tuple(sequence[:count]) == end for sequence in stop if len(sequence) > count):
            return count
    return 0
