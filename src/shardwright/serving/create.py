"""Create the scheduler, the arrays and the loop of an engine, for its kind of cache."""

from __future__ import annotations

from typing import Final

from shardwright.caches.paged.cache import PagedCache
from shardwright.caches.spec import CacheSpec, Overflow
from shardwright.errors import ServingError
from shardwright.serving.arrays import Arrays, Setup
from shardwright.serving.calls import Calls
from shardwright.serving.loop import Loop
from shardwright.serving.memory import with_pages
from shardwright.serving.metrics import Meter
from shardwright.serving.paged_arrays import PagedArrays
from shardwright.serving.paged_loop import PagedLoop
from shardwright.serving.paged_scheduler import PagedScheduler
from shardwright.serving.scheduler import Limits, Scheduler

# Chunks that a prompt reads while others wait for its row. Each change of turns copies two caches,
# and moves them if prefill has its own mesh.
_TURN: Final = 4


def make_loop(setup: Setup, meter: Meter, *, queue: int, ahead: bool) -> Loop:
    """Create the caches, and the loop that serves requests with them.

    Raises:
      ServingError: An option of the caches that an engine does not support.
    """
    setup = with_pages(setup)
    if setup.reads_into_pages:
        pools = PagedArrays(setup)
        limits = _limits(setup, pools.spec, queue, pages=pools.pages, page_size=pools.page_size)
        paged = PagedScheduler(limits, window=pools.spec.window)
        return PagedLoop(paged, pools, meter, _calls(setup, limits, ahead), ahead=ahead)
    arrays = Arrays(setup)
    first = arrays.slots.caches[0]
    if isinstance(first, PagedCache):
        pages, page_size = first.k_pages.shape[:2]
        limits = _limits(setup, first.spec, queue, pages=pages, page_size=page_size)
    else:
        limits = _limits(setup, first.spec, queue)
    return Loop(Scheduler(limits), arrays, meter, _calls(setup, limits, ahead), ahead=ahead)


def _calls(setup: Setup, limits: Limits, ahead: bool) -> Calls:
    return Calls(setup.manager, f"{limits}, ahead={ahead}")


def _limits(
    setup: Setup, spec: CacheSpec, queue: int, *, pages: int | None = None, page_size: int = 1
) -> Limits:
    """Return the limits of the engine."""
    if spec.overflow is Overflow.ERROR:
        raise ServingError(
            'overflow="error" is not supported: a compiled step cannot raise',
            path="cache_options",
            fix="leave overflow out",
        )
    return Limits(
        slots=setup.slots,
        capacity=None if spec.is_ring else spec.capacity,
        prefill_rows=setup.prefill_rows,
        chunk=setup.chunk,
        queue=queue,
        turn=_TURN,
        pages=pages,
        page_size=page_size,
    )
