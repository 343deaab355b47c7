"""Run one step of a paged engine: read prompts into pages, decode, hand out tokens."""

from __future__ import annotations

import collections.abc
import functools

from shardwright.serving.arrays import Held
from shardwright.serving.calls import Calls
from shardwright.serving.loop import Loop
from shardwright.serving.metrics import Meter, Report
from shardwright.serving.paged_arrays import ON_DEVICE, PagedArrays, Sequence
from shardwright.serving.paged_scheduler import PagedScheduler
from shardwright.serving.sampling import Read
from shardwright.serving.scheduler import Job


class PagedLoop(Loop):
    """The parts of a step.

    Attributes:
      scheduler: Records which request owns which slot and pages.
      arrays: The pools and the compiled functions.
    """

    scheduler: PagedScheduler
    arrays: PagedArrays

    def __init__(
        self,
        scheduler: PagedScheduler,
        arrays: PagedArrays,
        meter: Meter,
        calls: Calls,
        *,
        ahead: bool,
    ) -> None:
        super().__init__(scheduler, arrays, meter, calls, ahead=ahead)
        # A job that is preempted reads again what it has written, so that must be known.
        scheduler.settle = self._settle

    def compile(self) -> None:
        """Run every compiled function once, on no requests."""
        with self._changing("pools"):
            self.arrays.compile()

    def forget(self) -> None:
        """Share no page that the old weights wrote."""
        self.scheduler.pages.forget()

    def report(self) -> Report:
        """Return counts and times since the engine was created."""
        scheduler = self.scheduler
        return self.meter.report(
            scheduler.limits.slots,
            shared_pages=scheduler.pages.hits,
            preempted=scheduler.preempted,
        )

    def held(self) -> Held:
        """Return the number of tokens and pages in use, as the host records them."""
        self._settle()
        slots = self.scheduler.slots
        lengths = (
            self.scheduler.held(slots[slot]) if slot in slots else 0
            for slot in range(self.scheduler.limits.slots)
        )
        pages = self.scheduler.pages.used
        return Held(
            row_lengths=(0,) * self.scheduler.limits.prefill_rows,
            slot_lengths=tuple(lengths),
            pages=pages,
        )

    def clean(self) -> None:
        """Count the jobs that have ended. Pages need not be emptied."""
        self._count_ended()

    def _read(self) -> None:
        """Read the next chunk of the next prompts."""
        chunks = self.scheduler.chunks()
        if not chunks:
            return
        # A job that was preempted has written the token after its text already.
        first = {
            chunk.row: chunk.job.slot
            for chunk in chunks
            if chunk.job.slot is not None
            and not chunk.job.written
            and chunk.job.read + len(chunk.tokens) == len(chunk.job.reading)
        }
        with self._changing("pools"):
            drawn = self.arrays.prefill(
                {chunk.row: chunk.tokens for chunk in chunks},
                {chunk.row: self._sequence(chunk.job) for chunk in chunks},
                first,
            )
            self.scheduler.advance(chunks)
            self._begin_read("pools", chunks, first, drawn)

    def _decode(self) -> None:
        """Give every slot its next tokens."""
        jobs = self.scheduler.grow(self.arrays.decode_steps)
        if jobs:
            sequences = {slot: self._sequence(job) for slot, (job, _) in jobs.items()}
            self._begin_decode("pools", jobs, functools.partial(self.arrays.decode, sequences))

    def _take_decoded(
        self, jobs: dict[int, tuple[Job, int]], version: int | str, drawn: Read
    ) -> None:
        super()._take_decoded(jobs, version, drawn)
        for job, _ in jobs.values():
            self.scheduler.wrote(job)

    def _sequence(self, job: Job) -> Sequence:
        return Sequence(
            pages=self.scheduler.table(job).pages,
            length=self.scheduler.held(job),
            last=job.written[-1] if job.written and not job.in_flight else ON_DEVICE,
            index=len(job.written) + job.in_flight,
            limit=job.request.max_new_tokens,
            sampling=job.request.sampling,
        )

    def _give_up(
        self, part: str, cause: BaseException, jobs: collections.abc.Sequence[Job] = ()
    ) -> None:
        self._fail_lost(part, cause, jobs)
        self.arrays.renew(part)
        self.scheduler.pages.forget()
