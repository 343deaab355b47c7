"""Two managers, the spec that a flow gets, and a task that holds one of them while others run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import jax
import jax.numpy as jnp

import shardwright as sw
from shardwright.manager import context
from tests.manager.programs import make_manager, numbers
from tests.raising import raises

OWN, OTHER = jax.P("dp", "tp"), jax.P("dp")  # specs of (BATCH, EMBED) under the two managers below
NONE = "none"  # no manager: `hint` returns the array unchanged, `shard` raises
REFUSED = "refused"  # another task's manager, or one that was left: `hint` raises too


def own() -> sw.PartitionManager:
    return make_manager()


def other() -> sw.PartitionManager:
    return make_manager().for_mode("decode")


def seen() -> Any:
    """Return the spec that the manager gives an array here, NONE or REFUSED."""
    x = numbers(8, 8)
    try:
        manager = context.current()
    except sw.NoManagerError:
        for call in (sw.shard, sw.hint):
            with raises(sw.NoManagerError, "PartitionManager", "rules", "dp:2,tp:4"):
                call(x, sw.BATCH, sw.EMBED)
        return REFUSED
    if manager is None:
        with raises(sw.NoManagerError, "PartitionManager", fix="pm.shard"):
            sw.shard(x, sw.BATCH, sw.EMBED)
        assert sw.hint(x, sw.BATCH, sw.EMBED) is x
        return NONE
    assert sw.current_manager() is manager
    spec = sw.shard(x, sw.BATCH, sw.EMBED).sharding.spec
    assert (
        spec == manager.resolve(sw.BATCH, sw.EMBED) == sw.hint(x, sw.BATCH, sw.EMBED).sharding.spec
    )
    return spec


def jitted() -> Any:
    """Return a new jitted function, and with it the specs that its traces gave."""
    return jax.jit(lambda x: sw.shard(x * 2, sw.BATCH, sw.EMBED))


def spec_of(f: Any) -> Any:
    return f(jnp.asarray(numbers(8, 8))).sharding.spec


async def turn(times: int = 3) -> None:
    """Let other tasks run."""
    for _ in range(times):
        await asyncio.sleep(0)


async def holds(pm: sw.PartitionManager, entered: asyncio.Event, release: asyncio.Event) -> Any:
    """Enter a manager, await, and return the spec that the flow gets then."""
    with pm:
        entered.set()
        await release.wait()
        return seen()


async def beside(pm: sw.PartitionManager, what: Callable[[], Awaitable[Any]]) -> Any:
    """Run a function while another task awaits inside `with pm:`, and check that task's manager."""
    entered, release = asyncio.Event(), asyncio.Event()
    holding = asyncio.create_task(holds(pm, entered, release))
    await entered.wait()
    try:
        return await what()
    finally:
        release.set()
        assert await holding == pm.resolve(sw.BATCH, sw.EMBED)
