"""Compute how many pages fit into the memory of the devices, for `pages="90%"`."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.caches.paged.pool import PAGE_AXES
from shardwright.caches.sharding import ambient_sharding, axes_by_dim
from shardwright.errors import ServingError, ShardingError
from shardwright.reshard.pieces import parse_bytes
from shardwright.serving.setup import Setup
from shardwright.vocabulary.integers import read_integer
from shardwright.vocabulary.modes import MODE_DECODE

_FIX = 'pass a number of pages, or a share of the memory such as pages="90%"'


def with_pages(setup: Setup) -> Setup:
    """Return a setup whose option `pages` is a number.

    `pages="90%"` takes so many pages that 90 % of the memory of each device is in use. The option
    `memory`, such as "16GiB", states the memory of a device that does not report it. Then only the
    weights count as in use.

    Raises:
      ServingError: The share or the memory is not valid, the device does not report its memory, or
        no page fits.
    """
    options = dict(setup.options)
    pages, memory = options.get("pages"), options.pop("memory", None)
    if setup.kind != "paged" or not isinstance(pages, str):
        if memory is not None:
            raise ServingError(
                f"memory={memory!r} has no effect without a share of it",
                path="cache_options",
                fix='pass pages="90%" too, or leave memory out',
            )
        return setup
    share = re.fullmatch(r"(\d{1,2}|100)%", pages)
    if share is None or share[1].strip("0") == "":
        raise ServingError(f"pages={pages!r}", path="cache_options", fix=_FIX)
    free = _free_bytes(setup, int(share[1]), memory)
    shards, page_bytes = _page_shards(setup)
    # Per shard: a page is on one shard of the pool, with the kv heads of that device.
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
        return min(limit * percent // 100 - _weight_bytes(setup, device) for device in devices)
    free = []
    for device in devices:
        # None on CPUs, which report nothing.
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


def _weight_bytes(setup: Setup, device: Any) -> int:
    leaves = [leaf for leaf in jax.tree.leaves(setup.params) if isinstance(leaf, jax.Array)]
    shards = (shard for leaf in leaves for shard in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def _page_shards(setup: Setup) -> tuple[int, int]:
    """Return the number of shards of the pool, and the bytes of a page on one shard."""
    shape = setup.shape
    size = read_integer("page_size", setup.options.get("page_size", 16), error=ServingError)
    v_dim = shape.head_dim if shape.v_dim is None else shape.v_dim
    with setup.under(MODE_DECODE):
        sharding = ambient_sharding(None if setup.manager is None else MODE_DECODE)
        sizes = {} if setup.manager is None else dict(setup.manager.mesh.shape)
        # This number of pages divides over every mesh axis, so only the rule decides.
        most = math.prod(sizes.values())
        dims = (most, size, shape.kv_heads, shape.head_dim)
        by_dim = axes_by_dim(sharding.spec(PAGE_AXES, dims, name="k_pages"), 4)
    counts = [math.prod(sizes[name] for name in axes) for axes in by_dim]
    elements = size * shape.kv_heads * (shape.head_dim + v_dim) // math.prod(counts[1:])
    return counts[0], shape.layers * elements * jnp.dtype(shape.dtype).itemsize
