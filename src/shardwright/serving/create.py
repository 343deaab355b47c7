"""Create the scheduler, the arrays and the loop of an engine, for its kind of cache.

With `pages="90%"`, this module computes how many pages fit into the memory of the devices.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Final

import jax
import jax.numpy as jnp

from shardwright.caches.paged.cache import PagedCache
from shardwright.caches.paged.pool import PAGE_AXES
from shardwright.caches.sharding import ambient_sharding, axes_by_dim
from shardwright.caches.spec import CacheSpec, Overflow
from shardwright.errors import ServingError, ShardingError
from shardwright.reshard.pieces import parse_bytes
from shardwright.serving.arrays import PageArrays, SlotArrays
from shardwright.serving.calls import Calls
from shardwright.serving.jobs import Limits
from shardwright.serving.loop import Loop
from shardwright.serving.metrics import Meter
from shardwright.serving.scheduler import Scheduler
from shardwright.serving.setup import Setup
from shardwright.serving.space import PageSpace, SlotSpace
from shardwright.vocabulary.integers import read_integer
from shardwright.vocabulary.modes import MODE_DECODE

# Number of chunks of a prompt that are read before the prompt leaves its row to a waiting prompt.
# If a row changes its prompt, the caches of both prompts are copied, and are also moved if prefill
# has its own mesh. Prompts that are read into their pages change rows at no cost.
_QUANTUM: Final = 4


def make_loop(setup: Setup, meter: Meter, *, queue: int, ahead: bool) -> Loop:
    """Create the caches, and the loop that serves requests with them.

    Raises:
      ServingError: An engine does not support an option of the caches.
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
    # Engines with different limits would run different programs, so processes compare the limits
    # too.
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


_FIX = 'pass a number of pages, or a share of the memory such as pages="90%"'


def with_pages(setup: Setup) -> Setup:
    """Return a setup whose option `pages` is a number.

    `pages="90%"` means as many pages as fit while at most 90 % of the memory of each device is in
    use. The option `memory`, such as "16GiB", states the memory of a device that does not report
    it. On such a device, only the weights count as in use.

    Raises:
      ServingError: The share or the memory is not valid, the device does not report its memory, or
        no page fits.
    """
    options = dict(setup.options)
    pages, memory = options.get("pages"), options.pop("memory", None)
    if setup.kind != "paged" or not isinstance(pages, str):
        if memory is not None:
            raise ServingError(
                f"memory={memory!r} has no effect, because pages is no share of the memory",
                path="cache_options",
                fix='pass pages="90%" too, or leave memory out',
            )
        return setup
    share = re.fullmatch(r"(\d{1,2}|100)%", pages)
    if share is None or share[1].strip("0") == "":
        raise ServingError(f"pages={pages!r}", path="cache_options", fix=_FIX)
    free = _free_bytes(setup, int(share[1]), memory)
    shards, page_bytes = _page_shards(setup)
    # Count the pages per shard of the pool. `page_bytes` are the bytes of a page on one device,
    # which has only its own kv heads.
    count = free // page_bytes
    if count < 1:
        raise ServingError(
            f"pages={pages!r} leaves {max(free, 0):,} bytes per device, and a page takes "
            f"{page_bytes:,}",
            path="cache_options",
            fix="raise the share, shard the weights over more devices, or use smaller pages",
        )
    return dataclasses.replace(setup, options={**options, "pages": count * shards})


def _free_bytes(setup: Setup, percent: int, memory: Any) -> int:
    """Return how many bytes pages may take on each device: the smallest number of all devices."""
    devices = _devices(setup)
    if memory is not None:
        try:
            limit = parse_bytes(memory)
        except ShardingError as error:
            fix = 'pass the bytes of a device, such as memory="16GiB"'
            what = f"memory={memory!r}"
            raise ServingError(what, path="cache_options", fix=fix) from error
        weights = [leaf for leaf in jax.tree.leaves(setup.params) if isinstance(leaf, jax.Array)]
        held = dict.fromkeys(devices, 0)
        for shard in (shard for leaf in weights for shard in leaf.addressable_shards):
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
        return min(limit * percent // 100 - held[device] for device in devices)
    free = []
    for device in devices:
        # `memory_stats` returns None on CPUs.
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            raise ServingError(
                f"{device} does not report its memory, so {percent}% of it is not known",
                path="cache_options",
                fix='pass a number of pages, or declare the memory of a device: {"pages": '
                f'"{percent}%", "memory": "16GiB"}}',
            )
        free.append(stats["bytes_limit"] * percent // 100 - stats.get("bytes_in_use", 0))
    return int(min(free))


def _devices(setup: Setup) -> list[Any]:
    if setup.manager is None:
        return [jax.local_devices()[0]]
    mesh: Any = setup.manager.mesh
    return list(mesh.local_devices)


def _page_shards(setup: Setup) -> tuple[int, int]:
    """Return the number of shards of the pool, and the bytes of a page on one shard."""
    shape = setup.shape
    size = read_integer("page_size", setup.options.get("page_size", 16), error=ServingError)
    v_dim = shape.head_dim if shape.v_dim is None else shape.v_dim
    with setup.under(MODE_DECODE):
        sharding = ambient_sharding(None if setup.manager is None else MODE_DECODE)
        sizes = {} if setup.manager is None else dict(setup.manager.mesh.shape)
        # This number of pages divides over every mesh axis, so the rule alone decides how the pages
        # are sharded.
        most = math.prod(sizes.values())
        dims = (most, size, shape.kv_heads, shape.head_dim)
        by_dim = axes_by_dim(sharding.spec(PAGE_AXES, dims, name="k_pages"), 4)
    counts = [math.prod(sizes[name] for name in axes) for axes in by_dim]
    elements = size * shape.kv_heads * (shape.head_dim + v_dim) // math.prod(counts[1:])
    return counts[0], shape.layers * elements * jnp.dtype(shape.dtype).itemsize
