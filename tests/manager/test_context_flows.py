"""The manager that applies in tasks, notebook cells, pool threads and copied contexts.

The table below says what each of them gets. `test_context_jit.py` tests what may be traced there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.manager import context
from shardwright.testing.ambient import isolated
from tests.manager.flows import (
    NONE,
    OTHER,
    OWN,
    REFUSED,
    beside,
    holds,
    jitted,
    other,
    own,
    seen,
    spec_of,
    turn,
)
from tests.manager.programs import make_manager, numbers
from tests.raising import raises


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    with isolated():
        yield
    assert context.current() is None


async def task_beside_another() -> Any:
    async def what() -> Any:
        return seen()

    return await beside(other(), what)


async def task_made_beside_another() -> Any:
    async def what() -> Any:
        return await asyncio.create_task(asyncio.to_thread(seen))

    return await beside(other(), what)


async def task_that_entered_its_own_first() -> Any:
    entered, release = asyncio.Event(), asyncio.Event()
    with own():
        holding = asyncio.create_task(holds(other(), entered, release))
        await entered.wait()
        actual = seen()
    assert seen() == REFUSED
    release.set()
    assert await holding == OTHER
    return actual


async def task_that_entered_its_own_last() -> Any:
    async def what() -> Any:
        with own():
            await turn()
            return seen()

    return await beside(other(), what)


async def task_made_inside_while_it_holds() -> Any:
    async def child() -> Any:
        await turn()
        return seen()

    with own():
        return await asyncio.create_task(child())


async def task_made_inside_after_it_ended() -> Any:
    async def child() -> Any:
        await turn()
        return seen()

    with own():
        running = asyncio.create_task(child())
    assert seen() == NONE
    return await running


async def task_that_enters_after_it_ended() -> Any:
    async def child() -> Any:
        await turn()
        with other():
            assert seen() == OTHER
        return seen()

    with own():
        running = asyncio.create_task(child())
    return await running


async def task_made_inside_beside_another() -> Any:
    async def child() -> Any:
        await turn()
        return await beside(other(), lambda: asyncio.sleep(0, seen()))

    with own():
        return await asyncio.create_task(child())


async def task_of_a_task_made_inside() -> Any:
    async def child() -> Any:
        return await asyncio.create_task(asyncio.sleep(0, None)) or await asyncio.create_task(
            grandchild()
        )

    async def grandchild() -> Any:
        await turn()
        return seen()

    with own():
        running = asyncio.create_task(child())
    return await running


async def task_made_before() -> Any:
    release = asyncio.Event()

    async def early() -> Any:
        await release.wait()
        return seen()

    running = asyncio.create_task(early())
    await turn()
    with own():
        release.set()
        return await running


async def beside_a_task_that_ended_without_leaving() -> Any:
    async def forgetful() -> None:
        manager.__enter__()

    manager = other()
    await asyncio.create_task(forgetful())
    try:
        return seen()
    finally:
        context.leave(manager)


async def to_thread() -> Any:
    with own():
        return await asyncio.to_thread(seen)


async def to_thread_after_it_ended() -> Any:
    with own():
        waiting = asyncio.to_thread(seen)
        running = asyncio.create_task(waiting)
    return await running


async def run_in_executor() -> Any:
    with own():
        return await asyncio.get_running_loop().run_in_executor(None, seen)


async def asynchronous_generator() -> Any:
    async def steps() -> Any:
        with own():
            await turn()
            yield seen()

    actual = []
    async for spec in steps():
        await turn()
        actual.append(spec)
    assert seen() == NONE
    return actual[0]


TASKS: dict[str, tuple[Callable[[], Coroutine[Any, Any, Any]], Any]] = {
    "entered none, beside another": (task_beside_another, REFUSED),
    "made with none, beside another": (task_made_beside_another, NONE),  # in a thread of its own
    "entered its own first": (task_that_entered_its_own_first, OWN),
    "entered its own last": (task_that_entered_its_own_last, OWN),
    "made inside, it holds": (task_made_inside_while_it_holds, OWN),
    "made inside, it ended": (task_made_inside_after_it_ended, REFUSED),
    "made inside, it ended, entered another": (task_that_enters_after_it_ended, REFUSED),
    "made inside, beside another": (task_made_inside_beside_another, OWN),
    "made by one made inside": (task_of_a_task_made_inside, REFUSED),
    "made before": (task_made_before, REFUSED),
    "beside one that never left": (beside_a_task_that_ended_without_leaving, OTHER),
    "to_thread": (to_thread, OWN),
    "to_thread, it ended": (to_thread_after_it_ended, REFUSED),
    "run_in_executor": (run_in_executor, NONE),
    "asynchronous generator": (asynchronous_generator, OWN),
}


def test_every_task_has_an_outer_manager() -> None:
    """Entered around the event loop, also while another task holds its own manager."""
    release = asyncio.Event()

    async def main() -> Any:
        running = asyncio.create_task(waits())
        await turn()
        with other():
            release.set()
            actual = await running
        return [actual, seen(), await asyncio.create_task(asyncio.sleep(0, seen()))]

    async def waits() -> Any:
        await release.wait()
        return seen()

    with own():
        assert asyncio.run(main()) == [OWN, OWN, OWN]


@pytest.mark.parametrize("name", TASKS)
def test_the_manager_of_a_task(name: str) -> None:
    run, wanted = TASKS[name]
    assert asyncio.run(run()) == wanted


def test_overlapping_tasks_leave_in_any_order() -> None:
    """Either task may leave first. Both keep their own manager until they leave."""

    async def held(pm: sw.PartitionManager, before: int, after: int) -> Any:
        await turn(before)
        with pm:
            await turn(after)
            actual = seen()
        left.append(seen())
        return actual

    async def both(*turns: tuple[int, int]) -> Any:
        return await asyncio.gather(
            *[held(pm, *item) for pm, item in zip((own(), other()), turns, strict=True)]
        )

    for turns in (
        ((0, 4), (2, 4)),
        ((0, 6), (2, 2)),
        ((2, 4), (0, 4)),
        ((2, 2), (0, 6)),
        ((0, 0), (0, 0)),
    ):
        left: list[Any] = []
        assert asyncio.run(both(*turns)) == [OWN, OTHER], turns
        assert left == [REFUSED if turns[0] != (0, 0) else NONE, NONE], turns
        assert context.depth() == 0
        assert jax.sharding.get_mesh().empty


def test_overlapping_tasks_restore_the_mesh() -> None:
    meshes = {}

    async def held(pm: sw.PartitionManager, before: int, after: int) -> None:
        await turn(before)
        with pm:
            await turn(after)
        meshes[pm] = jax.sharding.get_mesh()

    async def both() -> None:
        await asyncio.gather(held(first, 0, 4), held(second, 2, 6))

    first, second = make_manager(), make_manager(sizes="dp:4,tp:2")
    with jax.set_mesh(make_manager(sizes="dp:8,tp:1").mesh) as _:
        outer = jax.sharding.get_mesh()
        asyncio.run(both())
        assert jax.sharding.get_mesh() == outer
    assert meshes == {first: second.mesh, second: outer}


# Notebook cells.


class Notebook:
    """Run cells as IPython does: each in a task, in a lasting context or in a copy."""

    def __init__(self, *, lasting: bool, background: bool) -> None:
        self.loop = asyncio.new_event_loop()
        self.context = contextvars.copy_context()
        self.lasting = lasting
        self.background = [
            self.loop.create_task(asyncio.sleep(1e6)) for _ in range(2 if background else 0)
        ]

    def cell(self, code: Callable[[], Any]) -> Any:
        async def run() -> Any:
            await turn(1)
            return code()

        context = self.context if self.lasting else self.context.copy()
        return self.loop.run_until_complete(self.loop.create_task(run(), context=context))

    def close(self) -> None:
        for task in self.background:
            task.cancel()
        if self.background:
            self.loop.run_until_complete(asyncio.wait(self.background))
        self.loop.close()


@pytest.mark.parametrize("lasting", [True, False], ids=["one context", "a context per cell"])
@pytest.mark.parametrize("background", [True, False], ids=["with background tasks", "alone"])
@pytest.mark.full(but=["with background tasks-one context", "alone-one context"])
def test_entered_in_a_cell_and_used_in_later_ones(lasting: bool, background: bool) -> None:
    notebook, f = Notebook(lasting=lasting, background=background), jitted()
    pm, decode = own(), other()
    notebook.cell(pm.__enter__)
    assert notebook.cell(seen) == OWN
    assert notebook.cell(lambda: spec_of(f)) == OWN
    notebook.cell(decode.__enter__)
    assert notebook.cell(seen) == OTHER
    assert notebook.cell(lambda: spec_of(f)) == OTHER
    notebook.cell(lambda: decode.__exit__(None, None, None))
    assert notebook.cell(seen) == OWN
    assert notebook.cell(lambda: spec_of(f)) == OWN
    notebook.cell(lambda: pm.__exit__(None, None, None))
    assert notebook.cell(seen) == NONE
    notebook.close()


@pytest.mark.parametrize("lasting", [True, False], ids=["one context", "a context per cell"])
def test_cells_beside_a_background_task(lasting: bool) -> None:
    notebook, f = Notebook(lasting=lasting, background=False), jitted()
    stop: list[bool] = []

    async def background() -> Any:
        with other():
            spec_of(f)
            while not stop:
                await asyncio.sleep(0)
            return seen()

    running: list[Any] = []
    notebook.cell(lambda: running.append(asyncio.get_running_loop().create_task(background())))
    assert notebook.cell(seen) == REFUSED
    with raises(sw.NoManagerError, "PartitionManager", "rules", "dp:2,tp:4", "decode"):
        notebook.cell(lambda: spec_of(f))
    with own():
        assert spec_of(f) == OWN
    stop.append(True)
    assert notebook.loop.run_until_complete(running[0]) == OTHER
    assert notebook.cell(seen) == NONE
    notebook.close()


# Copied contexts.


def test_a_copied_context_has_the_manager() -> None:
    with own(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        held = contextvars.copy_context()
        assert held.run(seen) == OWN
        assert pool.submit(held.run, seen).result() == OWN
        assert pool.submit(seen).result() == NONE
    assert held.run(seen) == REFUSED
    assert seen() == NONE


def test_leaving_in_another_context() -> None:
    """Entered in a lasting context and left in a copy: the lasting one is told."""
    pm, lasting = own(), contextvars.copy_context()

    async def leaves() -> None:
        pm.__exit__(None, None, None)

    lasting.run(pm.__enter__)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(loop.create_task(leaves(), context=lasting.copy()))
    loop.close()
    assert lasting.run(seen) == REFUSED
    assert seen() == NONE


# Threads of a pool.


def test_jobs_of_a_pool_enter_their_own() -> None:
    """Both jobs run in the same thread and in the same context."""
    f, x = jitted(), jnp.asarray(numbers(8, 8))

    def job(pm: sw.PartitionManager) -> Any:
        with pm:
            return f(x).sharding.spec

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for pm, wanted in ((own(), OWN), (other(), OTHER)):
            assert pool.submit(job, pm).result() == wanted
            assert pool.submit(seen).result() == NONE
            assert pool.submit(context.depth).result() == 0
            with raises(sw.NoManagerError, "PartitionManager", "rules", "dp:2,tp:4"):
                pool.submit(pm.__exit__, None, None, None).result()


def test_own_thread_may_stay_entered() -> None:
    """Without a pool there is no next job: one function enters, the next one uses."""
    actual = []

    def script() -> None:
        own().__enter__()
        actual.append(seen())

    thread = threading.Thread(target=script)
    thread.start()
    thread.join()
    assert actual == [OWN]
