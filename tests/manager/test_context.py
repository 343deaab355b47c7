"""The ambient manager: entering and leaving, per thread, inside and outside of traces."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.manager import context
from tests.manager.programs import RULES, make_manager, make_mesh, numbers, sharded_over
from tests.raising import raises


def state() -> tuple[Any, Any, int]:
    """Return what entering changes: the manager, the mesh, the stack of this thread."""
    return context.current(), jax.sharding.get_abstract_mesh(), len(context._ENTERED.stack)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    before = state()
    yield
    assert state() == before


def in_thread(f: Callable[[], Any]) -> Any:
    """Run in a new thread, and return its result or raise its error."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(f).result()


def test_enter_sets_and_leave_restores() -> None:
    pm = make_manager()
    before = state()
    with pm as entered:
        assert entered is pm
        assert context.current() is pm
        assert sw.current_manager() is pm
        assert jax.sharding.get_mesh() == pm.mesh
    assert state() == before


def test_a_surrounding_mesh_comes_back() -> None:
    pm = make_manager()
    other = make_mesh(sizes="dp:8,tp:1")
    with jax.set_mesh(other):
        with pm:
            assert jax.sharding.get_mesh() == pm.mesh
            assert sharded_over(sw.shard(numbers(8, 8), sw.BATCH, sw.EMBED), pm.mesh, "dp", "tp")
        assert jax.sharding.get_mesh() == other


def test_nested_and_entered_again() -> None:
    pm, decode = make_manager(), make_manager().for_mode("decode")
    other = make_manager(sizes="dp:4,tp:2")
    with pm, decode, pm, pm, other:
        assert context.current() is other
        assert jax.sharding.get_mesh() == other.mesh
        with pm:
            assert sw.shard(numbers(8, 8), sw.BATCH, sw.EMBED).sharding.spec == jax.P("dp", "tp")
            assert jax.sharding.get_mesh() == pm.mesh
        assert context.current() is other
    with pm:
        with decode:
            assert sw.shard(numbers(8, 8), sw.BATCH, sw.EMBED).sharding.spec == jax.P("dp")
        assert sw.shard(numbers(8, 8), sw.BATCH, sw.EMBED).sharding.spec == jax.P("dp", "tp")


def test_exceptions_inside_restore() -> None:
    pm, other = make_manager(), make_manager(sizes="dp:4,tp:2")
    with pm:
        with pytest.raises(ZeroDivisionError, match="division"), other, pm:
            _ = 1 / 0
        assert context.current() is pm
        assert jax.sharding.get_mesh() == pm.mesh


def test_exceptions_inside_a_trace_restore() -> None:
    pm = make_manager()

    def broken(x: Any) -> Any:
        with pm:
            return sw.shard(x, sw.BATCH, "nonsense")

    with raises(sw.UnknownAxisError, "axis", axis="NONSENSE", fix="what it is"):
        jax.jit(broken)(numbers(8, 8))


def test_leaving_in_the_wrong_order() -> None:
    pm, other = make_manager(), make_manager(text=RULES.replace('embed = "tp"', 'embed = "-"'))
    with make_manager() as outer:
        before = state()
        pm.__enter__()
        other.__enter__()
        with raises(sw.NoManagerError, "PartitionManager", "rules", "dp:2,tp:4", fix="with pm:"):
            pm.__exit__(None, None, None)
        assert state() == before
        assert context.current() is outer
        for left in (other, pm):
            with raises(sw.NoManagerError, "PartitionManager", "rules", "dp:2,tp:4"):
                left.__exit__(None, None, None)
        assert state() == before


def test_generator_that_leaves_out_of_order() -> None:
    pm = make_manager()

    def held() -> Iterator[None]:
        with pm.for_mode("decode"):
            yield

    before, holding = state(), held()
    with (
        raises(
            sw.NoManagerError, "PartitionManager", "rules", "dp:2,tp:4", "decode", fix="with pm:"
        ),
        pm,
    ):
        next(holding)
    assert state() == before
    with raises(sw.NoManagerError, "PartitionManager", "rules", "dp:2,tp:4", "decode"):
        holding.close()
    assert state() == before


async def places_later(pm: sw.PartitionManager, before: int, after: int) -> Any:
    """Let the other tasks have so many turns before and after the call."""
    with pm:
        for _ in range(before):
            await asyncio.sleep(0)
        actual = sw.shard(numbers(8, 8), sw.BATCH, sw.EMBED).sharding.spec
        for _ in range(after):
            await asyncio.sleep(0)
    return actual


@pytest.mark.parametrize("times", [((4, 4), (2, 4)), ((2, 0), (6, 2)), ((0, 4), (2, 0))])
def test_tasks_use_their_own_managers(times: Any) -> None:
    managers = [make_manager(), make_manager().for_mode("decode")]
    wanted = [jax.P("dp", "tp"), jax.P("dp")]

    async def both() -> list[Any]:
        tasks = [places_later(pm, *waits) for pm, waits in zip(managers, times, strict=True)]
        return await asyncio.gather(*tasks)

    before = state()
    assert asyncio.run(both()) == wanted
    assert state() == before


def test_tasks_share_an_outer_manager() -> None:
    pm = make_manager()

    async def place() -> Any:
        await asyncio.sleep(0)
        return sw.shard(numbers(8, 8), sw.BATCH, sw.EMBED).sharding.spec

    async def both() -> list[Any]:
        with pm:
            return await asyncio.gather(place(), place())

    with pm:
        assert asyncio.run(place()) == jax.P("dp", "tp")
    assert asyncio.run(both()) == [jax.P("dp", "tp")] * 2


def test_notebook_cells_share_a_manager() -> None:
    """Each cell may run in its own context, whose variables are lost with it."""
    pm, other = make_manager(), make_manager(sizes="dp:4,tp:2")
    cell = contextvars.copy_context
    cell().run(pm.__enter__)
    assert cell().run(sw.shard, numbers(8, 8), sw.BATCH, sw.EMBED).sharding.spec == jax.P(
        "dp", "tp"
    )
    cell().run(other.__enter__)
    assert cell().run(context.current) is other
    cell().run(other.__exit__, None, None, None)
    assert cell().run(context.current) is pm
    cell().run(pm.__exit__, None, None, None)
    assert cell().run(context.current) is None


def test_no_manager() -> None:
    x = numbers(8, 8)
    for name, call in {
        "shard": lambda: sw.shard(x, sw.BATCH, sw.EMBED),
        "gather": lambda: sw.gather(x, sw.EMBED, sw.EMPTY),
    }.items():
        with raises(sw.NoManagerError, name, "PartitionManager"):
            call()
        with raises(sw.NoManagerError, name, "PartitionManager"):
            jax.jit(lambda x, call=call: call())(x)
    with raises(sw.NoManagerError, "current_manager", "PartitionManager"):
        sw.current_manager()
    assert sw.hint(x, sw.BATCH, sw.EMBED) is x


def test_constructing_does_not_enter() -> None:
    make_manager()
    with raises(sw.NoManagerError, "PartitionManager", fix="pm.shard"):
        sw.shard(numbers(8, 8), sw.BATCH, sw.EMBED)


def test_threads_enter_their_own_managers() -> None:
    pm, other = make_manager(), make_manager(sizes="dp:4,tp:2")
    x = numbers(8, 8)

    def enters() -> Any:
        with other:
            return sw.shard(x, sw.BATCH, sw.EMBED)

    with pm:
        with raises(sw.NoManagerError, "PartitionManager", fix="pm.shard"):
            in_thread(lambda: sw.shard(x, sw.BATCH, sw.EMBED))
        assert in_thread(lambda: sw.hint(x, sw.BATCH)) is x
        assert sharded_over(in_thread(enters), other.mesh, "dp", "tp")
        assert sharded_over(
            in_thread(lambda: pm.shard(x, sw.BATCH, sw.EMBED)), pm.mesh, "dp", "tp"
        ), "a method needs nobody entered"
        assert context.current() is pm
        with raises(sw.NoManagerError, "PartitionManager", "rules", "dp:2,tp:4"):
            in_thread(lambda: pm.__exit__(None, None, None))


def test_threads_interleave() -> None:
    """Four threads call one jitted function at the same time, each under its own manager."""
    managers = [
        make_manager(sizes=sizes) for sizes in ("dp:2,tp:4", "dp:4,tp:2", "dp:8,tp:1", "dp:1,tp:8")
    ]
    barrier = threading.Barrier(len(managers), timeout=600)
    f = jax.jit(lambda x: sw.shard(x, sw.BATCH, sw.EMBED) * 2)

    def run(pm: sw.PartitionManager) -> None:
        for _ in range(3):
            barrier.wait()
            with pm:
                barrier.wait()
                actual = f(jnp.asarray(numbers(8, 8)))
                assert actual.sharding.is_equivalent_to(pm.sharding(sw.BATCH, sw.EMBED), 2)
                np.testing.assert_array_equal(actual, numbers(8, 8) * 2)

    with concurrent.futures.ThreadPoolExecutor(len(managers)) as pool:
        for running in [pool.submit(run, pm) for pm in managers]:
            running.result(timeout=600)


@pytest.mark.parametrize("outer", ["nothing", "the same", "the mesh alone"])
def test_entered_inside_a_trace(outer: str) -> None:
    pm = make_manager()
    seen: list[Any] = []

    def f(x: Any) -> Any:
        with pm:
            seen.append(jax.sharding.get_abstract_mesh())
            return sw.shard(x, sw.BATCH, sw.EMBED) * 2

    if outer == "nothing":
        actual = jax.jit(f)(numbers(8, 8))
        assert seen[0].empty, "a trace's mesh is not touched"
    else:
        with pm if outer == "the same" else jax.set_mesh(pm.mesh):
            actual = jax.jit(f)(numbers(8, 8))
    assert sharded_over(actual, pm.mesh, "dp", "tp")


def test_other_mesh_in_a_trace_is_refused() -> None:
    pm = make_manager()

    def f(x: Any) -> Any:
        with pm:
            return sw.shard(x, sw.BATCH, sw.EMBED)

    with (
        jax.set_mesh(make_mesh(sizes="dp:4,tp:2")),
        raises(sw.MeshMismatchError, "dp", 4, "tp", 2) as caught,
    ):
        jax.jit(f)(numbers(8, 8))
    assert (
        "enter the manager (with pm:) instead of another mesh, or build the manager on that mesh"
        in str(caught.value)
    )


def test_ambient_mesh_of_another_order_is_refused() -> None:
    pm = make_manager()
    for sizes in ("tp:4,dp:2", "dp:2,tp:2", "dp:2,tp:4,sp:1", "data:2,tp:4"):
        with (
            jax.set_mesh(make_mesh(sizes=sizes)),
            raises(sw.MeshMismatchError, "tp", 4, "dp", 2),
        ):
            pm.shard(numbers(8, 8), sw.BATCH, sw.EMBED)


def test_entering_adds_one_jit_cache_entry() -> None:
    pm = make_manager()
    traces: list[int] = []

    @jax.jit
    def f(x: Any) -> Any:
        traces.append(1)
        return x * 2

    for _ in range(3):
        f(jnp.ones(4))
        with pm:
            f(jnp.ones(4))
    assert len(traces) == 2


def test_generators_do_not_leak_when_closed() -> None:
    pm = make_manager()

    def numbers_inside() -> Iterator[int]:
        with pm:
            yield 1
            yield 2

    running = numbers_inside()
    next(running)
    running.close()
    assert context.current() is None
