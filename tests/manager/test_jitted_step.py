"""A call of a jitted step: arguments that do not fit raise an error before JAX sees them."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.testing import cpu_mesh

AXES = (sw.BATCH, sw.LENGTH)
MESHES = [("fsdp_tp", "fsdp:2,tp:4"), ("fsdp", "fsdp:8"), ("sequence", "fsdp:2,sp:4")]


def make_manager(preset: str = "fsdp_tp", sizes: str = "fsdp:2,tp:4") -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset(preset), mesh=cpu_mesh(sizes), mode="train")


def make_state(pm: sw.PartitionManager) -> dict[str, Any]:
    return {"p": pm.shard(jnp.ones((8, 8)), sw.EMBED, sw.EMPTY)}


def step(state: Any, *inputs: Any) -> Any:
    return {"p": state["p"] + 1}, jax.tree.map(jnp.sum, inputs)


def make_batch(*shape: int) -> dict[str, np.ndarray]:
    return {"x": np.ones((8, 8), np.float32), "y": np.ones(shape or (8, 8), np.float32)}


@pytest.mark.parametrize(("preset", "sizes"), MESHES)
def test_inputs_fit_their_annotation(preset: str, sizes: str) -> None:
    pm = make_manager(preset, sizes)
    for axes in (AXES, {"x": AXES, "y": AXES}):
        jitted = pm.jit_step(step, make_state(pm), axes)
        for call in (jitted, jitted.lower, jitted.trace, jitted.eval_shape):
            for shape in ((8,), (8, 8, 8)):
                with pytest.raises(sw.RankMismatchError) as rank:
                    call(make_state(pm), make_batch(*shape))
                assert rank.value.path == "input 0 y"
            with pytest.raises(sw.IndivisibleError) as size:
                call(make_state(pm), make_batch(7, 8))
            assert (size.value.path, size.value.dim, size.value.size) == ("input 0 y", 0, 7)
            assert size.value.axis == "BATCH"
            assert "batch" in size.value.rule
            assert size.value.fix
        jitted(make_state(pm), make_batch())


def test_a_shape_is_checked_again_after_another() -> None:
    pm = make_manager()
    jitted = pm.jit_step(step, make_state(pm), AXES)
    state, _ = jitted(make_state(pm), make_batch())
    with pytest.raises(sw.IndivisibleError):
        jitted(state, make_batch(3, 8))
    state, _ = jitted(state, make_batch())
    jitted(state, make_batch(4, 8))
    assert jitted._cache_size() == 2


def test_input_fits_the_given_sharding() -> None:
    pm = make_manager()
    batch = pm.abstract(make_batch(), AXES, role="activation")
    jitted = pm.jit_step(step, make_state(pm), batch)
    with pytest.raises(sw.IndivisibleError, match="input 0 y: the shape") as caught:
        jitted(make_state(pm), make_batch(7, 8))
    assert caught.value.fix


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ((), "the call passes 0 inputs, jit_step was given annotations of 1"),
        ((make_batch(), 1.0), "the call passes 2 inputs, jit_step was given annotations of 1"),
        (({"x": np.ones((8, 8))},), "input 0 y: jit_step was given this"),
        (({**make_batch(), "z": np.ones((8, 8))},), "input 0 z: the call passes this"),
    ],
)
def test_other_inputs_are_refused(inputs: tuple[Any, ...], says: str) -> None:
    pm = make_manager()
    jitted = pm.jit_step(step, make_state(pm), {"x": AXES, "y": AXES})
    with pytest.raises(sw.StrategyError, match=says) as caught:
        jitted(make_state(pm), *inputs)
    assert caught.value.fix


def test_other_calls_are_refused() -> None:
    pm = make_manager()
    state = make_state(pm)
    jitted = pm.jit_step(step, state, AXES)
    with pytest.raises(sw.StrategyError, match="the call passes batch by keyword"):
        jitted(state, batch=make_batch())
    with pytest.raises(sw.StrategyError, match="the call passes no state"):
        jitted()
    with pytest.raises(sw.StrategyError, match="state q: the call passes this"):
        jitted({**state, "q": state["p"] + 1}, make_batch())
    with pytest.raises(sw.StrategyError, match="state: the call passes another structure"):
        pm.jit_step(step, [state["p"]], AXES)((state["p"],), make_batch())


def test_repeated_arrays_are_not_donated() -> None:
    pm = make_manager()
    p = make_state(pm)["p"]

    def both(state: Any) -> Any:
        return jax.tree.map(lambda x: x + 1, state), None

    state = {"p": p, "q": p}
    with pytest.raises(sw.StrategyError, match="state q: this is the same array as p"):
        pm.jit_step(both, state)(state)
    state, _ = pm.jit_step(both, state, donate=False)(state)
    np.testing.assert_array_equal(state["q"], 2.0)


def test_step_keeps_the_attributes_of_jit() -> None:
    pm = make_manager()
    jitted = pm.jit_step(step, make_state(pm), AXES)
    assert isinstance(jitted, jax.stages.Wrapped)
    assert jitted.__name__ == "step"
    assert copy.copy(jitted)._cache_size() == 0
    jitted(make_state(pm), make_batch())
    assert jitted._cache_size() == 1
    jitted.clear_cache()
    assert jitted._cache_size() == 0


def test_an_open_input_takes_any_array() -> None:
    pm = make_manager()
    jitted = pm.jit_step(step, make_state(pm), {"x": AXES, "y": None})
    for y in (np.ones(7), None):
        jitted(make_state(pm), {"x": np.ones((8, 8)), "y": y})


def test_weak_types_compile_once() -> None:
    pm = make_manager()

    def to_strong(state: Any) -> Any:
        return {"w": state["w"] + jnp.ones((), jnp.float32)}, None

    def to_weak(state: Any) -> Any:
        return {"w": jnp.where(state["w"] > 0, 1.0, 0.0)}, None

    weak, strong = {"w": pm.shard(1.0)}, {"w": pm.shard(jnp.float32(1))}
    with pytest.raises(sw.StrategyError, match=r"state w: the step takes a weakly typed") as caught:
        pm.jit_step(to_strong, weak)(weak)
    assert "pm.shard(jnp.asarray(x, jnp.float32))" in caught.value.fix
    assert not weak["w"].is_deleted()
    for take, first in ((to_strong, strong), (to_weak, {"w": strong["w"] + 1}), (to_weak, weak)):
        jitted = pm.jit_step(take, first)
        state, before = first, first["w"].aval
        for _ in range(3):
            state, _ = jitted(state)
        assert state["w"].aval == before
        assert jitted._cache_size() == 1


def test_state_keeps_leaves_of_every_kind() -> None:
    """Keys have no weak type, and a step may return Python numbers."""
    pm = make_manager()
    state = {"key": pm.shard(jax.random.key(0)), "n": pm.shard(jnp.zeros((), jnp.int32))}
    jitted = pm.jit_step(lambda state: ({"key": state["key"], "n": 3}, None), state)
    for _ in range(2):
        state, _ = jitted(state)
    assert state["n"].dtype == jnp.int32
    assert jitted._cache_size() == 1
