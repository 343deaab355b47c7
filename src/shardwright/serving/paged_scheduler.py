"""Decide which request gets which slot and pages, if requests take pages as their texts grow.

A request needs a slot, and pages for its prompt. If no page is left, the youngest request gives up
its slot and pages, and returns to the queue. Later, it reads its prompt and the text that it has
written, and continues. The oldest request never gives up its pages, and the pool is large enough
for it alone, so every request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwright.serving.pages import Pages, Table
from shardwright.serving.scheduler import Chunk, Job, Limits, Move, Phase, Scheduler


class PagedScheduler(Scheduler):
    """A scheduler whose jobs take pages one by one.

    Prompts are read in turn: each step reads the next chunk of the next `limits.prefill_rows`
    prompts. So a prompt waits for at most one chunk of each other prompt that has a slot.

    Attributes:
      pages: Which job uses which pages.
      preempted: How often a job gave up its slot and pages to an older one.
      settle: Reads the results of the calls in flight. It is called before a job is preempted,
        because the results may end jobs, and a job whose tokens are not known cannot continue.
    """

    def __init__(self, limits: Limits, *, window: int | None = None) -> None:
        super().__init__(limits)
        assert limits.pages is not None
        self.pages = Pages(count=limits.pages, size=limits.page_size)
        self.preempted = 0
        self.settle: Callable[[], None] = lambda: None
        self._tables: dict[int, Table] = {}
        self._window = window
        self._last_read = -1

    @property
    def free_pages(self) -> int:
        """Pages that no job uses."""
        return self.pages.available

    def table(self, job: Job) -> Table:
        """Return the pages of a job that has a slot."""
        return self._tables[job.number]

    def admit(self) -> list[Job]:
        """Give waiting jobs a slot, in order. Stop at the first without a slot or enough pages."""
        self._receive()
        admitted: list[Job] = []
        # Jobs that still read their prompts will take pages, which are not available either.
        needed = sum(
            self.pages.missing(self.table(job), len(job.reading))
            for job in self.slots.values()
            if job.phase is Phase.PREFILLING
        )
        while self.queue:
            job, slot, table = self.queue[0], self._free_slot(), self.pages.open()
            needed += self.pages.missing(table, len(job.reading))
            if slot is None or needed > self.pages.available:
                break
            self.queue.popleft()
            job.phase, job.slot, job.read = Phase.PREFILLING, slot, 0
            self.slots[slot], self._tables[job.number] = job, table
            admitted.append(job)
        return admitted

    def chunks(self) -> list[Chunk]:
        """Return the next chunk of the next prompts, with pages for them."""
        jobs = sorted(
            (job for job in self.slots.values() if job.phase is Phase.PREFILLING),
            key=lambda job: (job.number <= self._last_read, job.number),
        )
        jobs = jobs[: self.limits.prefill_rows]
        for job in jobs:
            if job.slot is not None:
                job.read = self.pages.adopt(self.table(job), job.reading, job.read)
                self._grow(job, min(job.read + self.limits.chunk, len(job.reading)))
        # An older job may have preempted a younger one.
        jobs = [job for job in jobs if job.slot is not None]
        if jobs:
            self._last_read = jobs[-1].number
        chunk = self.limits.chunk
        return [
            Chunk(job=job, row=row, tokens=job.reading[job.read : job.read + chunk])
            for row, job in enumerate(jobs)
        ]

    def advance(self, chunks: Sequence[Chunk]) -> None:
        """Record that chunks were read, and that their full pages may be shared.

        A job that has read everything is decoding.
        """
        super().advance(chunks)
        for chunk in chunks:
            self._written(chunk.job)
            if chunk.job.read == len(chunk.job.reading):
                chunk.job.phase = Phase.DECODING

    def ready(self) -> list[Move]:
        """Return an empty list, because prompts are read directly into their pages."""
        return []

    def grow(self, most: int) -> dict[int, tuple[Job, int]]:
        """Give decoding jobs pages for their next tokens, the oldest job first.

        Args:
          most: Largest number of tokens that a job gets.

        Returns:
          Jobs by slot, each with the number of tokens that it gets.
        """
        for job in sorted(self.decoding().values(), key=lambda job: job.number):
            if job.slot is not None:
                self._grow(job, self.held(job) + self.left(job, most))
        return {slot: (job, self.left(job, most)) for slot, job in self.decoding().items()}

    def wrote(self, job: Job) -> None:
        """Record that the tokens of a job that is decoding were written to its pages."""
        if job.slot is not None:
            self._written(job)

    def held(self, job: Job) -> int:
        """Return how many tokens of a job are in its pages after the calls in flight."""
        if job.phase is not Phase.DECODING:
            return job.read
        # The last token of a text is not in the pages. A prompt that was just read has no text yet.
        drawn = len(job.written) + job.in_flight
        return len(job.request.prompt) + max(drawn - 1, 0)

    def holding(self, part: str) -> list[Job]:
        """Return the jobs that have pages."""
        return list(self.slots.values())

    def _written(self, job: Job) -> None:
        table, held = self.table(job), self.held(job)
        if held // self.limits.page_size > table.shared:
            self.pages.offer(table, job.reading[:held])
        if self._window is not None:
            # The next query is at position `held`. It sees `window` positions, its own included.
            self.pages.leave_before(table, held - self._window + 1)

    def _grow(self, job: Job, tokens: int) -> None:
        """Give a job pages for this many tokens, or preempt it."""
        while job.slot is not None and not self.pages.grow(self.table(job), tokens):
            if any(each.in_flight for each in self.slots.values()):
                self.settle()
            else:
                self._preempt(max(self.slots.values(), key=lambda each: each.number))

    def _preempt(self, job: Job) -> None:
        self._leave_slot(job)
        job.phase, job.read = Phase.QUEUED, 0
        at = sum(each.number < job.number for each in self.queue)
        self.queue.insert(at, job)
        self.preempted += 1

    def _leave_slot(self, job: Job) -> None:
        if job.slot is not None:
            self.pages.close(self._tables.pop(job.number))
            del self.slots[job.slot]
            job.slot = None
