"""Run one step of a paged engine: read prompts into pages, decode, hand out tokens."""

from __future__ import annotations

from shardwright.serving.arrays import Held
from shardwright.serving.calls import Calls
from shardwright.serving.loop import Loop
from shardwright.serving.metrics import Meter, Report
from shardwright.serving.paged_arrays import PagedArrays, Sequence
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
        self, scheduler: PagedScheduler, arrays: PagedArrays, meter: Meter, calls: Calls
    ) -> None:
        super().__init__(scheduler, arrays, meter, calls)

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
        with self._changing("pools"):
            drawn = self.arrays.prefill(
                {chunk.row: chunk.tokens for chunk in chunks},
                {chunk.row: self._sequence(chunk.job) for chunk in chunks},
            ).fetch()
            self.scheduler.advance(chunks)
            self._count_chunks(chunks)
            for chunk in chunks:
                self._take_first(chunk.job, drawn, chunk.row)

    def _take_first(self, job: Job, drawn: Read, row: int) -> None:
        """Take the token after a chunk. Start to decode the job if it has read everything."""
        job.used(self.arrays.version)
        is_read, is_new = self.scheduler.is_read(job), not job.written
        if is_read:
            self.scheduler.start(job)
        # A job that was preempted has written this token already.
        token, logprob = drawn.tokens[row], drawn.logprobs[row]
        self._take(job, token, logprob, complete=is_read and is_new)

    def _decode(self) -> None:
        """Give every slot its next tokens."""
        jobs = self.scheduler.grow(self.arrays.decode_steps)
        if not jobs:
            return
        with self._changing("pools"):
            drawn = self.arrays.decode(
                {slot: self._sequence(job) for slot, (job, _) in jobs.items()}
            ).fetch()
            for slot, (job, count) in jobs.items():
                self._take_all(job, drawn, slot, count)
                self.scheduler.wrote(job)
            self._count_decoded([count for _, count in jobs.values()])

    def _sequence(self, job: Job) -> Sequence:
        return Sequence(
            pages=self.scheduler.table(job).pages,
            length=self.scheduler.held(job),
            last=job.written[-1] if job.written else 0,
            index=len(job.written),
            limit=job.request.max_new_tokens,
            sampling=job.request.sampling,
        )

    def _give_up(self, part: str, cause: BaseException) -> None:
        self._fail_holding(part, cause)
        self.arrays.renew(part)
        self.scheduler.pages.forget()
