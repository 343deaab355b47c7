"""`assert_no_retrace` passes if a function compiles once, and else reports why it recompiled."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright._jax import watch_compilations
from shardwright.testing import assert_no_retrace, cpu_mesh
from shardwright.testing.golden import Golden

P = jax.P


def manager() -> sw.PartitionManager:
    return sw.PartitionManager(
        sw.Strategy.preset("fsdp"), mesh=cpu_mesh("dp:1,fsdp:8,sp:1,ep:1,tp:1")
    )


def failing(call: Callable[[], Any]) -> str:
    with pytest.raises(AssertionError) as caught:
        call()
    return str(caught.value)


def placed(pm: sw.PartitionManager, rows: int = 8) -> Any:
    return pm.shard(np.ones((rows, 4), np.float32), sw.BATCH, sw.EMPTY)


def double(x: Any) -> Any:
    return x * 2


def test_a_step_that_is_compiled_once() -> None:
    pm = manager()
    step = jax.jit(lambda state, batch: {"w": state["w"] + batch.sum(), "at": state["at"] + 1})
    state = {"w": placed(pm), "at": jnp.int32(0)}
    state = jax.device_put(state, {"w": state["w"].sharding, "at": jax.NamedSharding(pm.mesh, P())})
    assert_no_retrace(
        step, (state, placed(pm)), lambda out: (out, placed(pm)), lambda out: (out, placed(pm))
    )


def test_equal_managers_do_not_retrace() -> None:
    """Two equal managers, entered by turns, are one entry of the cache."""
    x = placed(manager())

    @jax.jit
    def f(x: Any) -> Any:
        return sw.shard(x, sw.BATCH, sw.EMPTY) * 2

    def call(x: Any) -> Any:
        with manager():
            return f(x)

    assert_no_retrace(call, (x,), (x,), (x,))


def test_result_sharded_unlike_its_argument(golden: Golden) -> None:
    """A common case: a step whose new state is replicated compiles twice."""
    pm = manager()
    step = jax.jit(double, out_shardings=jax.NamedSharding(pm.mesh, P()))
    golden(failing(lambda: assert_no_retrace(step, ({"w": placed(pm)}["w"],), lambda out: (out,))))


@pytest.mark.full(but=["explicit"])
@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_changed_leaf_of_any_kind_is_named(axis_types: Any) -> None:
    pm = sw.PartitionManager(
        sw.Strategy.preset("fsdp"), mesh=cpu_mesh("fsdp:8", axis_types=axis_types)
    )
    host = jax.NamedSharding(pm.mesh, P("fsdp"), memory_kind="pinned_host")
    kinds = {
        "counter": jnp.int32(0),
        "host": jax.device_put(jnp.ones((8, 4)), host),
        "key": jax.random.key(0),
        "number": 1.5,
        "numpy": np.ones((8, 4)),
        "one_device": jnp.ones((8, 4)),
        "scalar": np.float32(2),
        "weak": jnp.asarray(1.5),
    }

    def step(state: Any) -> Any:
        kept = jax.device_put(state["opt"]["host"], jax.memory.Space.Device)
        key = jax.random.split(state["opt"]["key"])[0]
        rest = {name: state["opt"][name] + 1 for name in kinds if name not in ("host", "key")}
        return {"w": state["w"] + 1, "opt": {**rest, "host": kept, "key": key}}

    # Equal specs of two spellings are no change: Explicit axes give the result P("fsdp", None).
    state = {"w": placed(pm), "opt": kinds}
    with pm:
        message = failing(
            lambda: assert_no_retrace(jax.jit(step), (state,), lambda state: (state,))
        )
    rows = [line.split()[0] for line in message.splitlines() if line.startswith("0/")]
    assert rows == [f"0/opt/{name}" for name in kinds]


def test_changed_arguments() -> None:
    pm = manager()
    step = jax.jit(lambda x, y=None: x * 2)
    message = failing(lambda: assert_no_retrace(step, (placed(pm),), (placed(pm, 16),)))
    assert (
        message.splitlines()[0] == "call 2 of <lambda> traced <lambda> and compiled jit(<lambda>)"
    )
    assert "0         float32 8x4 P('fsdp')  16 B        float32 16x4 P('fsdp')  32 B" in message
    assert "TRACING CACHE MISS" in message
    assert "now f32[16,4]" in message
    message = failing(
        lambda: assert_no_retrace(jax.jit(double), (jnp.ones(3),), (np.ones(3, np.float16),))
    )
    assert "float32 3 SingleDeviceSharding  12 B        float16 3 numpy" in message
    fresh = jax.jit(lambda x, y=None: x * 3)
    message = failing(lambda: assert_no_retrace(fresh, (placed(pm), placed(pm)), (placed(pm),)))
    assert "1         float32 8x4 P('fsdp')  16 B        absent" in message


def test_function_jitted_in_each_call() -> None:
    x = jnp.ones(3)

    def anew(x: Any) -> Any:
        return jax.jit(lambda y: y + 1)(x)

    message = failing(lambda: assert_no_retrace(anew, (x,), (x,)))
    assert "no argument changed its shape, dtype or sharding\n" in message
    assert message.endswith(
        "fix   jit once, outside the call; check static arguments, closures and the ambient context"
    )
    assert "seen another function defined on the same line" in message


def test_the_call_that_differs_is_named() -> None:
    step = jax.jit(double)
    calls = [(jnp.ones(3),), (jnp.ones(3),), (jnp.ones(4),)]
    assert failing(lambda: assert_no_retrace(step, *calls)).startswith(
        "call 3 of double traced double"
    )


def test_donated_arguments_can_be_described() -> None:
    pm = manager()
    step = jax.jit(double, donate_argnums=0)
    whole = pm.shard(np.ones((8, 4), np.float32), sw.EMPTY, sw.EMPTY)
    assert "float32 8x4 P('fsdp')  16 B        float32 8x4 P()" in failing(
        lambda: assert_no_retrace(step, (placed(pm),), (whole,))
    )


@pytest.mark.parametrize("calls", [(), ((1,),)])
def test_one_call_is_refused(calls: Any) -> None:
    with pytest.raises(TypeError, match=f"got {len(calls)} calls: the first call always traces"):
        assert_no_retrace(jax.jit(double), *calls)


def test_earlier_compilations_do_not_count() -> None:
    step = jax.jit(double)
    step(jnp.ones(3))
    step(jnp.ones(4))
    assert failing(lambda: assert_no_retrace(step, (jnp.ones(3),), (jnp.ones(4),))).startswith(
        "call 2 of double"
    )


def test_earlier_compilations_of_callees() -> None:
    step = jax.jit(double)

    def call(x: Any) -> Any:
        return step(x) + 1

    for x in (jnp.ones(3), jnp.ones(4)):
        call(x)
    assert_no_retrace(call, (jnp.ones(3),), (jnp.ones(3),))
    assert failing(lambda: assert_no_retrace(call, (jnp.ones(3),), (jnp.ones(4),))).startswith(
        "call 2 of call traced double"
    )
    with watch_compilations() as compilations:
        call(jnp.ones(4))
    assert (compilations.traced, compilations.compiled) == ([], []), (
        "what was compiled before still is"
    )


def plain(x: Any) -> Any:
    return jnp.where(x > 0, x, 0)


@pytest.mark.parametrize(
    ("f", "says"),
    [
        (
            plain,
            (
                r"plain is not jitted and calls no jitted function: it ran .*, _where one by one\n"
                r"  fix   pass jax.jit\(f\), created once"
            ),
        ),
        (lambda x: x, r"<lambda> is not jitted and calls no jitted function\n  fix   pass jax.jit"),
        (lambda x: np.sin(x) + 1, r"<lambda> is not jitted and calls no jitted function\n"),
    ],
    ids=["operations", "nothing", "numpy"],
)
def test_nothing_jitted_is_refused(f: Any, says: str) -> None:
    for _ in range(2):  # whether or not its operations were compiled before
        with pytest.raises(TypeError, match=f"^assert_no_retrace has nothing to count: {says}"):
            assert_no_retrace(f, (jnp.ones(3),), (jnp.ones(3),))


def test_a_compiled_program_never_traces() -> None:
    compiled = jax.jit(double).lower(jnp.ones(3)).compile()
    with pytest.raises(
        TypeError,
        match=(
            r"Compiled is already compiled and never traces again\n"
            r"  fix   pass the jitted function"
        ),
    ):
        assert_no_retrace(compiled, (jnp.ones(3),), (jnp.ones(3),))


def test_what_counts_as_jitted() -> None:
    step = jax.jit(double)
    for f in (
        step,
        jax.jit(jnp.sin),
        functools.partial(step),
        jax.vmap(step),
        jax.value_and_grad(lambda x: step(x).sum()),
    ):
        assert_no_retrace(f, (jnp.ones(3),), (jnp.ones(3),))


def test_compilations_count_without_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    step = jax.jit(double)
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    assert_no_retrace(lambda x: step(x) + 1, (jnp.ones(3),), (jnp.ones(3),))
    with pytest.raises(TypeError, match="nothing to count: <lambda> is not jitted"):
        assert_no_retrace(lambda x: x, (jnp.ones(3),), (jnp.ones(3),))


class State(NamedTuple):
    w: Any
    at: Any


def test_arguments_that_are_not_in_a_tuple() -> None:
    """An array would be unpacked into its rows, a state into its fields."""
    x = jnp.ones((2, 3))
    for calls, actual in [
        ((x, x), "call 1 is one ArrayImpl"),
        (((x,), lambda out: out), "the function of call 2 returned one ArrayImpl"),
        ((State(x, x), State(x, x)), "call 1 is one State"),
    ]:
        with pytest.raises(
            TypeError,
            match=(
                rf"{actual}, not the arguments of a call\n"
                rf"  fix   .*assert_no_retrace\(f, \(x,\), \(x,\)\)"
            ),
        ):
            assert_no_retrace(jax.jit(lambda *args: args[0]), *calls)


def test_only_this_thread_is_watched() -> None:
    def elsewhere() -> None:
        jax.jit(lambda x: x - 3)(np.ones(5))

    with watch_compilations() as compilations:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert (compilations.traced, compilations.compiled) == ([], [])
    with watch_compilations() as first:
        jax.jit(lambda x: x - 4)(np.ones(5))
    assert first.compiled
    before = list(first.compiled)
    jax.jit(lambda x: x - 5)(np.ones(5))
    assert first.compiled == before
