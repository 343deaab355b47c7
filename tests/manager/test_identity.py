"""The same question gives the identical object, and a manager is part of jit's cache key."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.manager.effect import Effect
from shardwright.processes import agreement
from shardwright.resolution import recent
from tests.manager.programs import (
    AXIS_TYPES,
    RULES,
    counting,
    make_manager,
    make_mesh,
    numbers,
    sharded_over,
)
from tests.raising import Facts, facts, raises

OTHER = RULES.replace('embed = "tp"', 'embed = "dp"').replace('batch = "dp"', 'batch = "tp"')


@pytest.mark.parametrize("kind", list(AXIS_TYPES))
def test_same_question_same_resolution(kind: str) -> None:
    pm = make_manager(kind, text=RULES.replace('vocab = "tp"', 'vocab = "dp+tp"'))
    for axes in ((sw.BATCH, sw.EMBED), (sw.VOCAB,)):
        assert pm.explain(*axes) is pm.explain(*axes)
    assert pm.explain(sw.VOCAB).ok == (kind != "tp explicit")


def test_same_question_same_object() -> None:
    pm = make_manager()
    assert (
        pm.sharding(sw.BATCH, sw.EMBED)
        is pm.sharding((sw.BATCH, sw.EMBED))
        is pm.sharding("batch", "embed")
    )
    assert pm.sharding(sw.BATCH, sw.EMBED) is pm.sharding(sw.BATCH, sw.MLP_INTERMEDIATE), (
        "one spec, one object"
    )
    assert pm.sharding(sw.BATCH) is pm.sharding(sw.BATCH, sw.LENGTH), "canonical: no trailing None"
    assert pm.for_mode("decode") is pm.for_mode(sw.MODE_DECODE)
    assert pm.for_mode("decode").for_mode("train") is pm.for_mode("train")
    tree = {"a": numbers(8, 4), "b": numbers(8, 4)}
    shardings = pm.shardings(tree, (sw.EMBED, sw.MLP_INTERMEDIATE))
    assert (
        shardings["a"] is shardings["b"] is pm.shardings(tree, (sw.EMBED, sw.MLP_INTERMEDIATE))["a"]
    )


def test_pinned_host_memory_is_another_object() -> None:
    pm = make_manager()
    host = pm.sharding(sw.BATCH, memory_kind="pinned_host")
    assert host.memory_kind == "pinned_host"
    assert host is pm.sharding(sw.BATCH, memory_kind="pinned_host") is not pm.sharding(sw.BATCH)


def test_equality_covers_rules_mode_and_mesh() -> None:
    pm = make_manager()
    assert pm == make_manager()
    assert hash(pm) == hash(make_manager())
    assert pm != make_manager(text=OTHER)
    assert pm != make_manager("explicit")
    assert pm != make_manager(sizes="dp:4,tp:2")
    assert pm != pm.for_mode("train")
    assert pm != make_manager(text=RULES.replace("[policy]", '[policy]\nindivisible = "replicate"'))
    assert pm == make_manager(text="# another file, the same rules\n" + RULES)
    assert pm != "pm"


def test_frozen() -> None:
    pm = make_manager()
    for name in ("mode", "mesh", "rules", "anything"):
        with pytest.raises(
            AttributeError,
            match=f"a PartitionManager is frozen: build another one instead of setting {name!r}",
        ):
            setattr(pm, name, None)


def test_copies_of_a_manager() -> None:
    pm = make_manager()
    for copied in (copy.copy(pm), copy.deepcopy({"manager": pm})["manager"]):
        assert copied == pm
        assert sharded_over(copied.shard(numbers(8, 4), sw.BATCH, sw.EMBED), pm.mesh, "dp", "tp")


@pytest.mark.parametrize("way", ["entered", "method"])
def test_the_same_manager_never_retraces(way: str) -> None:
    pm = make_manager()
    body, traces = counting(
        lambda x: (sw if way == "entered" else pm).shard(x, sw.BATCH, sw.EMBED) * 2
    )
    f = jax.jit(body)
    x = jnp.asarray(numbers(8, 8))
    for _ in range(3):
        if way == "entered":
            with pm:
                f(x)
        else:
            f(x)
    assert len(traces) == 1


def test_equal_managers_never_retrace(tmp_path: Path) -> None:
    path = sw.Strategy.loads(RULES).dump(tmp_path / "rules.toml")
    body, traces = counting(lambda x: sw.shard(x, sw.BATCH, sw.EMBED) * 2)
    f = jax.jit(body)
    for _ in range(3):
        with sw.PartitionManager(sw.Strategy.load(path), mesh=make_mesh()):
            f(jnp.asarray(numbers(8, 8)))
    assert len(traces) == 1


def test_one_function_under_two_managers() -> None:
    here, there = make_manager(), make_manager(text=OTHER)
    body, traces = counting(lambda x: sw.shard(x, sw.BATCH, sw.EMBED) * 2)
    f = jax.jit(body)
    x = jnp.asarray(numbers(8, 8))
    for manager, spec in [
        (here, ("dp", "tp")),
        (there, ("tp", "dp")),
        (here, ("dp", "tp")),
        (there, ("tp", "dp")),
    ]:
        with manager:
            assert sharded_over(f(x), manager.mesh, *spec)
    assert len(traces) == 2


def test_for_mode_changes_specs_and_retraces() -> None:
    pm = make_manager()
    body, traces = counting(lambda x: sw.shard(x, sw.BATCH, sw.EMBED) * 2)
    f = jax.jit(body)
    x = jnp.asarray(numbers(8, 8))
    for _ in range(2):
        with pm.for_mode("decode"):
            assert sharded_over(f(x), pm.mesh, "dp")
        with pm.for_mode("train"):
            assert sharded_over(f(x), pm.mesh, "dp", "tp")
    assert len(traces) == 2


@pytest.mark.parametrize("wrapper", ["scan", "checkpoint", "jit"])
def test_two_managers_inside_one_trace(wrapper: str) -> None:
    """A body that JAX caches by function identity must not remember the first manager's specs."""
    here, there = make_manager(), make_manager(text=OTHER)

    def step(x: Any, _: Any = None) -> Any:
        return sw.shard(x * 2, sw.BATCH, sw.EMBED), None

    wrapped = {
        "scan": lambda x: jax.lax.scan(step, x, None, length=2)[0],
        "checkpoint": jax.checkpoint(lambda x: step(x)[0]),
        "jit": jax.jit(lambda x: step(x)[0]),
    }[wrapper]

    def both(x: Any) -> Any:
        with here:
            first = wrapped(x)
        with there:
            return first, wrapped(x)

    for outer in (None, here):
        if outer is None:
            first, second = jax.jit(both)(jnp.asarray(numbers(8, 8)))
        else:
            with outer:
                first, second = jax.jit(both)(jnp.asarray(numbers(8, 8)))
        assert sharded_over(first, here.mesh, "dp", "tp")
        assert sharded_over(second, here.mesh, "tp", "dp")
        np.testing.assert_array_equal(first, second)


def test_an_effect_is_part_of_identity_and_of_the_jit_key() -> None:
    pm = make_manager()
    silent = Effect(lambda x, decided: x, lambda w, use, stored: w, token="silent")
    other = pm.having(effect=silent)
    assert other != pm
    assert other == pm.having(effect=silent)
    assert other.for_mode("decode").effect is silent
    f = jax.jit(lambda x: sw.shard(x * 2, sw.BATCH, sw.EMBED))
    for manager, replicated in ((pm, False), (other, True), (pm, False)):
        with manager:
            assert f(numbers(8, 8)).sharding.is_fully_replicated == replicated


def test_an_entry_compares_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second comparison would wait for processes that do not make it again."""
    met = []
    monkeypatch.setattr(agreement, "meet", lambda mesh, *rest: met.append(mesh))
    monkeypatch.setattr(recent, "KEPT", 2)
    pm = make_manager()
    for size in range(1, 9):
        with pm:
            pm.shard(numbers(8, 8 * size), sw.BATCH, sw.EMBED)
    assert met == [pm.mesh]


def test_constraints_cost_nothing_in_the_cache() -> None:
    """1,000 constraints of a few kinds leave a few entries, not 1,000."""
    pm = make_manager()
    before = len(pm.cache)

    def f(x: Any) -> Any:
        for _ in range(100):
            x = pm.shard(pm.shard(x, sw.BATCH, sw.EMBED), sw.BATCH, sw.EMPTY)
        return x

    jax.jit(f).trace(jax.ShapeDtypeStruct((8, 8), np.float32))
    assert len(pm.cache) - before == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"agree": 1}, facts("agree", 1, "bool")),
        ({"watchdog": 0}, facts("watchdog", 0, 1, fix="watchdog")),
        ({"watchdog": True}, facts("watchdog", "True", 1, fix="watchdog")),
        ({"watchdog": "8"}, facts(8, 1, fix="watchdog")),
        ({"watchdog": float("nan")}, facts("watchdog", "nan", 1, fix="watchdog")),
    ],
)
def test_invalid_options_for_processes(options: dict[str, Any], says: Facts) -> None:
    with raises(sw.StrategyError, says):
        sw.PartitionManager(sw.Strategy.preset("ddp"), mesh=sw.abstract_mesh("dp:8"), **options)


def test_options_for_processes_are_not_identity() -> None:
    strategy, mesh = sw.Strategy.preset("ddp"), sw.create_mesh("dp:8")
    plain = sw.PartitionManager(strategy, mesh=mesh)
    other = sw.PartitionManager(strategy, mesh=mesh, agree=False, watchdog=8)
    assert plain == other
    assert hash(plain) == hash(other)
    assert jax.tree.structure(plain) == jax.tree.structure(other)
    with other, other.for_mode("decode"):  # one process: there is nobody to watch
        other.agree({"w": jnp.ones(8)}, {"w": (sw.EMBED,)})
    assert all(thread.name != "shardwright-watchdog" for thread in threading.enumerate())
