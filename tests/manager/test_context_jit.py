"""What a flow may trace, and which cached programs it gets: never those of another manager."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.manager import context
from shardwright.testing.ambient import isolated
from tests.manager.flows import OTHER, OWN, beside, jitted, other, own, seen, spec_of, turn
from tests.manager.programs import numbers
from tests.raising import raises


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    with isolated():
        yield
    assert context.current() is None


def test_jit_beside_another_task() -> None:
    """A program cached under another task's manager is not used, and a new trace is refused."""
    f = jitted()

    async def what() -> None:
        with raises(sw.NoManagerError, "PartitionManager", "rules", "dp:2,tp:4", "decode"):
            f(numbers(8, 8))

    async def main() -> None:
        with other():
            assert spec_of(f) == OTHER
        await beside(other(), what)
        with other():
            assert spec_of(f) == OTHER

    asyncio.run(main())


def test_jit_compiled_by_another_task() -> None:
    """JAX's cache has the program under the manager that is ambient in this thread."""
    f = jitted()
    entered, release = asyncio.Event(), asyncio.Event()

    async def compiles() -> None:
        with other():
            assert spec_of(f) == OTHER
            entered.set()
            await release.wait()
            assert spec_of(f) == OTHER

    async def main() -> None:
        running = asyncio.create_task(compiles())
        await entered.wait()
        with raises(sw.NoManagerError, "PartitionManager", "rules", "dp:2,tp:4", "decode"):
            f(jnp.asarray(numbers(8, 8)))
        with own():
            assert spec_of(f) == OWN
        release.set()
        await running

    asyncio.run(main())


def test_jit_in_a_task_that_awaited() -> None:
    """Another task has entered its manager since, and JAX knows of that manager."""
    f = jitted()

    async def main() -> None:
        async def what() -> None:
            with raises(
                sw.NoManagerError,
                "PartitionManager",
                "rules",
                "dp:2,tp:4",
                "decode",
                fix="sw.current_manager",
            ):
                f(jnp.asarray(numbers(8, 8)))
            assert seen() == OWN
            with sw.current_manager():
                assert spec_of(f) == OWN

        with own():
            assert spec_of(f) == OWN
            await beside(other(), what)
            assert spec_of(f) == OWN

    asyncio.run(main())


def test_jit_in_the_task_that_entered() -> None:
    f, traces = jitted(), []
    g = jax.jit(lambda x: (traces.append(1), sw.shard(x, sw.BATCH, sw.EMBED))[1])

    async def main() -> None:
        for _ in range(3):
            with own():
                assert spec_of(f) == OWN
                g(numbers(8, 8))
                await turn()
                g(numbers(8, 8))
                assert spec_of(f) == OWN
            with other():
                assert spec_of(f) == OTHER

    asyncio.run(main())
    with own():
        g(numbers(8, 8))
        assert spec_of(f) == OWN
    assert len(traces) == 1, "an equal manager never traces again"


def test_no_retrace_beside_a_task() -> None:
    """A program that asks for no manager is compiled once, whichever manager is entered."""
    traces = []
    g = jax.jit(lambda x: (traces.append(1), x * 2)[1])
    x = jnp.ones(4)

    async def main() -> None:
        for _ in range(4):
            await beside(other(), lambda: asyncio.sleep(0, g(x)))

    asyncio.run(main())
    assert len(traces) == 1


@pytest.mark.parametrize("where", ["task made inside", "to_thread", "copied context"])
def test_jit_with_manager_in_context_only(where: str) -> None:
    """JAX would cache the program under no manager; `with sw.current_manager():` names one."""
    f = jitted()

    def refused_then_entered() -> Any:
        with raises(
            sw.NoManagerError,
            "JAX",
            "PartitionManager",
            "rules",
            "dp:2,tp:4",
            fix="sw.current_manager",
        ) as caught:
            f(jnp.asarray(numbers(8, 8)))
        assert "enter it again around the call of the jitted function" in str(caught.value)
        with sw.current_manager():
            return spec_of(f)

    async def child() -> Any:
        await turn()
        return refused_then_entered()

    async def task() -> Any:
        with own():
            running = asyncio.create_task(child())
            with other():
                return await running

    async def thread() -> Any:
        with own():
            return await asyncio.to_thread(refused_then_entered)

    def copied() -> Any:
        with own():
            held = contextvars.copy_context()
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                return pool.submit(held.run, refused_then_entered).result()

    runs = {
        "task made inside": lambda: asyncio.run(task()),
        "to_thread": lambda: asyncio.run(thread()),
        "copied context": copied,
    }
    assert runs[where]() == OWN


def test_hint_retraces_under_a_manager() -> None:
    f = jax.jit(lambda x: sw.hint(x * 2, sw.BATCH, sw.EMBED))
    x = jnp.asarray(numbers(8, 8))
    assert f(x).sharding.is_fully_replicated

    async def main() -> None:
        with own():
            with raises(
                sw.NoManagerError,
                "JAX",
                "PartitionManager",
                "rules",
                "dp:2,tp:4",
                fix="sw.current_manager",
            ):
                await asyncio.to_thread(f, x)
            assert f(x).sharding.spec == OWN

    asyncio.run(main())
    assert f(x).sharding.is_fully_replicated


def test_scan_and_checkpoint_in_a_task() -> None:
    """The caches of inner traces see a manager that is swapped inside one trace, in a task too."""

    def body(c: Any, _: None) -> Any:
        return sw.shard(c * 2, sw.BATCH, sw.EMBED), None

    def specs(x: Any) -> str:
        def both(x: Any) -> Any:
            with own():
                a, _ = jax.lax.scan(body, x, None, length=2)
            with other():
                b, _ = jax.lax.scan(body, x, None, length=2)
            return a, b

        return str(jax.make_jaxpr(both)(x))

    async def main() -> str:
        with own():
            return specs(numbers(8, 8))

    result = asyncio.run(main())
    assert result.count("spec=P('dp', 'tp')") == 1
    assert result.count("spec=P('dp',)") == 1


@pytest.mark.full
def test_jit_cache_does_not_keep_a_manager() -> None:
    """JAX keeps a small key and not the manager, after a script and after a task."""
    f, x = jitted(), jnp.asarray(numbers(8, 8))

    def used() -> weakref.ref[Any]:
        pm = own()
        with pm:
            f(x)
        return weakref.ref(pm)

    async def task() -> weakref.ref[Any]:
        return used()

    kept = [used(), asyncio.run(task())]
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


def test_equal_managers_share_a_cache_entry() -> None:
    traces = []
    f = jax.jit(lambda x: (traces.append(1), sw.shard(x, sw.BATCH, sw.EMBED))[1])
    for last in (False, False, True):
        if last:
            gc.collect()  # the managers before are gone, and JAX still has the program
        with own():
            f(numbers(8, 8))
    assert len(traces) == 1
    with other():
        f(numbers(8, 8))
    assert len(traces) == 2
