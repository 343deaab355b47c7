"""Record where the tokens of requests are: in slots of a fixed size, or in pages. Needs no devices.

A `SlotSpace` reserves rows, or pages, for the longest possible text of a request, so that they
cannot run out later. Prompts are read in a prefill batch and copied to their slots. A `PageSpace`
gives a request pages as its text grows, and pages may run out. Prompts are read into these pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, final

from shardwright.serving.jobs import Job, Limits, Phase
from shardwright.serving.pages import Pages, PageTable


@final
class SlotSpace:
    """Slots of a fixed size.

    Attributes:
      in_place: Whether a prompt is read into the rows that its request also uses in decode.
      shared_pages: Number of pages that requests share with earlier requests instead of computing
        them again.
    """

    in_place: ClassVar[bool] = False
    shared_pages: ClassVar[int] = 0

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._reserved: dict[int, int] = {}

    @property
    def free_pages(self) -> int:
        """Number of pages that are not reserved."""
        return (self._limits.pages or 0) - sum(self._reserved.values())

    def fits(self, job: Job, jobs: Iterable[Job]) -> bool:
        """Tell whether enough pages are free for the longest possible text of a waiting job.

        Args:
          job: The job.
          jobs: Jobs that have slots.
        """
        del jobs
        return self._limits.pages_of(job.request) <= self.free_pages

    def open(self, job: Job, slot: int) -> None:
        """Reserve pages for a job in a slot."""
        self._reserved[slot] = self._limits.pages_of(job.request)

    def close(self, job: Job) -> None:
        """Do nothing: the pages of the slot stay reserved until `clean`."""

    def clean(self, slot: int) -> None:
        """Record that the device has emptied a slot."""
        self._reserved.pop(slot, None)

    def adopt(self, job: Job) -> int:
        """Return how many tokens a job has read. Slots share nothing."""
        return job.read

    def grow(self, job: Job, tokens: int) -> bool:
        """Return True, because a slot has room for every text."""
        del job, tokens
        return True

    def wrote(self, job: Job, tokens: int) -> None:
        """Do nothing: the devices know how many tokens of a job were written."""

    def pages(self, job: Job) -> Sequence[int]:
        """Return an empty list, because the devices know the pages of a slot."""
        del job
        return ()

    def forget(self) -> None:
        """Do nothing: slots share no pages that the old weights computed."""


@final
class PageSpace:
    """Pages of a pool, which requests take one by one.

    Attributes:
      in_place: Whether a prompt is read into the rows that its request also uses in decode.
      pool: Which request uses which pages.
    """

    in_place: ClassVar[bool] = True

    def __init__(self, limits: Limits, *, window: int | None = None) -> None:
        assert limits.pages is not None
        self.pool = Pages(count=limits.pages, size=limits.page_size)
        self._window = window
        self._tables: dict[int, PageTable] = {}

    @property
    def shared_pages(self) -> int:
        """Number of pages that requests share with earlier requests instead of computing them."""
        return self.pool.hits

    @property
    def free_pages(self) -> int:
        """Number of pages that no job uses."""
        return self.pool.available

    def fits(self, job: Job, jobs: Iterable[Job]) -> bool:
        """Tell whether enough pages are free for the prompt of a waiting job.

        See `SlotSpace.fits`.
        """
        # Jobs that still read their prompts will take more pages, so subtract the pages that these
        # jobs need.
        needed = sum(
            self.pool.missing(self._tables[each.number], len(each.reading))
            for each in jobs
            if each.phase is Phase.PREFILLING
        )
        needed += self.pool.missing(self.pool.open(), len(job.reading))
        return needed <= self.pool.available

    def open(self, job: Job, slot: int) -> None:
        """Give a job an empty page table."""
        del slot
        self._tables[job.number] = self.pool.open()

    def close(self, job: Job) -> None:
        """Give back the pages of a job."""
        self.pool.close(self._tables.pop(job.number))

    def clean(self, slot: int) -> None:
        """Do nothing, because pages need not be emptied."""

    def adopt(self, job: Job) -> int:
        """Reuse pages that hold the next tokens of a prompt. Return how many tokens are then read.

        See `Pages.adopt`.
        """
        return self.pool.adopt(self._tables[job.number], job.reading, job.read)

    def grow(self, job: Job, tokens: int) -> bool:
        """Give a job pages for this many tokens. Return False if too few are left."""
        return self.pool.grow(self._tables[job.number], tokens)

    def wrote(self, job: Job, tokens: int) -> None:
        """Let other requests share the full pages of a job, and give back pages before the window.

        `tokens` is the number of tokens of the job that were written.
        """
        table = self._tables[job.number]
        if tokens // self.pool.size > table.shared:
            self.pool.offer(table, job.reading[:tokens])
        if self._window is not None:
            # The next query is at position `tokens`. It sees `window` positions, its own included.
            self.pool.leave_before(table, tokens - self._window + 1)

    def pages(self, job: Job) -> Sequence[int]:
        """Return the pages of a job, in order. NO_PAGE stands for a page that was given back."""
        return self._tables[job.number].pages

    def forget(self) -> None:
        """Stop sharing all pages, because the weights or the pools were replaced."""
        self.pool.forget()
