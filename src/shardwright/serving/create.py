"""Create the scheduler, the arrays and the loop of an engine, for its kind of cache."""

from __future__ import annotations

from typing import Final

from shardwright.caches.paged.cache import PagedCache
from shardwright.caches.spec import CacheSpec, Overflow
from shardwright.errors import ServingError
from shardwright.serving.arrays import PageArrays, SlotArrays
from shardwright.serving.calls import Calls
from shardwright.serving.jobs import Limits
from shardwright.serving.loop import Loop
from shardwright.serving.memory import with_pages
from shardwright.serving.metrics import Meter
from shardwright.serving.scheduler import Scheduler
from shardwright.serving.setup import Setup
from shardwright.serving.space import PageSpace, SlotSpace

# Chunks that a prompt reads while others wait for its row. Each change copies two caches, and moves
# them if prefill has its own mesh. Prompts that are read where they stay change at no cost.
_QUANTUM: Final = 4


def make_loop(setup: Setup, meter: Meter, *, queue: int, ahead: bool) -> Loop:
    """Create the caches, and the loop that serves requests with them.

    Raises:
      ServingError: An option of the caches that an engine does not support.
    """
    setup = with_pages(setup)
    arrays: SlotArrays | PageArrays
    space: SlotSpace | PageSpace
    if setup.reads_into_pages:
        arrays = PageArrays(setup)
        sizes = {"pages": arrays.pages, "page_size": arrays.page_size}
        limits = _limits(setup, arrays.spec, queue, quantum=1, **sizes)
        space = PageSpace(limits, window=arrays.spec.window)
    else:
        arrays = SlotArrays(setup)
        cache = arrays.slots.caches[0]
        sizes = {}
        if isinstance(cache, PagedCache):
            sizes = dict(zip(("pages", "page_size"), cache.k_pages.shape[:2], strict=True))
        limits = _limits(setup, cache.spec, queue, quantum=_QUANTUM, **sizes)
        space = SlotSpace(limits)
    # Engines of other limits would run other programs, so processes compare the limits too.
    calls = Calls(setup.manager, f"{limits}, ahead={ahead}")
    return Loop(Scheduler(limits, space), arrays, meter, calls, ahead=ahead)


def _limits(setup: Setup, spec: CacheSpec, queue: int, *, quantum: int, **sizes: int) -> Limits:
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
        quantum=quantum,
        **sizes,
    )
