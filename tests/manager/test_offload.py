"""`sw.offloaded`: updates of one layer at a time, and parameters in host memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright as sw
from shardwright.manager.memory import OffloadedState
from tests.manager.test_memory import (
    AXES,
    LAYERS,
    OPTIMIZER,
    SPECS,
    host_operands,
    kinds,
    loss_fn,
    make_batch,
    make_manager,
    make_state,
    train,
    train_step,
)
from tests.raising import Facts, facts, raises

ONE_BY_ONE = sw.offloaded(OPTIMIZER, SPECS)


def by_layer(state: Any, batch: Any) -> Any:
    """Update the parameters where they are, one layer at a time."""
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    params, moments = ONE_BY_ONE.apply_gradients(grads, state["moments"], state["params"])
    return {"params": params, "moments": moments}, loss


def by_optax(state: Any, batch: Any, optimizer: Any = ONE_BY_ONE) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, moments = optimizer.update(grads, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss


def assert_equal_training(
    state: Any, losses: list[float], expected: Any, expected_losses: list[float]
) -> None:
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True)
    for x, y in pairs:
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


CASES = {
    "state": ({"state": "host"}, by_layer),
    "state by optax": ({"state": "host"}, by_optax),
    "params": ({"params": "host"}, by_layer),
    "both": ({"params": "host", "state": "host"}, by_layer),
    "one stack": (
        {"tensors": [{"match": "layers/up", "params": "host", "state": "host"}]},
        by_layer,
    ),
    "nothing": ({}, by_layer),
}


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.full(but=["both-auto"])
@pytest.mark.alternate
def test_training_equals_that_on_the_device(name: str, axis_types: str) -> None:
    memory, step = CASES[name]
    sizes = "fsdp:2,tp:4" if axis_types == "auto" else "fsdp:8"
    pm = make_manager(sizes, axis_types)
    expected, expected_losses = train(pm, train_step, make_state(pm), 20)
    pm = make_manager(sizes, axis_types, **memory)
    state = make_state(pm, ONE_BY_ONE)
    assert isinstance(state["moments"], OffloadedState)
    before = kinds(state)
    state, losses = train(pm, step, state, 20)
    assert kinds(state) == before
    inner = {"params": state["params"], "moments": state["moments"].inner}
    assert_equal_training(inner, losses, expected, expected_losses)


def test_no_operation_computes_on_host_values() -> None:
    pm = make_manager(params="host", state="host")
    state = make_state(pm, ONE_BY_ONE)
    jitted = pm.jit_step(by_layer, state, AXES)
    assert host_operands(jitted.trace(state, make_batch()).jaxpr.jaxpr) == []
    with pm:
        grads = jax.eval_shape(jax.grad(loss_fn), state["params"], make_batch())
    assert grads["layers"]["up"].shape == (LAYERS, 16, 32)


@pytest.mark.full
def test_other_parts_of_an_optimizer_run_outside() -> None:
    clipped = optax.chain(optax.clip_by_global_norm(0.1), OPTIMIZER)
    outside = optax.chain(optax.clip_by_global_norm(0.1), ONE_BY_ONE)
    pm = make_manager()
    expected, expected_losses = train(
        pm, lambda s, b: by_optax(s, b, clipped), make_state(pm, clipped), 3
    )
    pm = make_manager(state="host")
    state, losses = train(pm, lambda s, b: by_optax(s, b, outside), make_state(pm, outside), 3)
    state = {**state, "moments": (state["moments"][0], state["moments"][1].inner)}
    assert_equal_training(state, losses, expected, expected_losses)


def test_updates_of_another_dtype() -> None:
    """bfloat16 gradients with float32 moments: the updates do not fit into the gradients."""
    specs = {"w": sw.ArraySpec((LAYERS, 8, 8), jnp.bfloat16, (sw.LAYERS, sw.EMBED, sw.EMPTY))}
    tx = optax.adam(0.1, mu_dtype=jnp.float32)
    pm = make_manager(state="host")
    params = {"w": jnp.ones((LAYERS, 8, 8), jnp.bfloat16)}
    grads = {"w": jax.random.normal(jax.random.key(0), (LAYERS, 8, 8), jnp.float32)}
    with pm:
        found, _ = jax.jit(sw.offloaded(tx, specs).update)(grads, OffloadedState(tx.init(params)))
    expected, _ = jax.jit(tx.update)(grads, tx.init(params))
    assert found["w"].dtype == expected["w"].dtype
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-6)


def test_moments_of_a_scalar_parameter() -> None:
    """They belong to the scalar, and the count of steps belongs to every group."""
    specs = {
        "scale": sw.ArraySpec((), jnp.float32, ()),
        "stack": sw.ArraySpec((LAYERS, 8, 8), jnp.float32, (sw.LAYERS, sw.EMBED, sw.EMPTY)),
    }
    params = {"scale": jnp.float32(2.0), "stack": jnp.ones((LAYERS, 8, 8))}
    grads = {"scale": jnp.float32(0.5), "stack": jnp.cos(jnp.arange(LAYERS * 64.0))}
    grads["stack"] = grads["stack"].reshape(LAYERS, 8, 8)
    tx = optax.adam(0.1)
    expected, expected_state = tx.update(grads, tx.init(params))
    pm = make_manager(state="host")
    optimizer = sw.offloaded(tx, specs)
    with pm:
        state = pm.init_state(optimizer, pm.shard(params, specs, role="param"), specs)
        found, state = jax.jit(optimizer.update)(grads, state)
    assert_equal_training((found, state.inner), [], (expected, expected_state), [])


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (
            optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
            facts("layers/down", path="embedding", fix="optax.clip_by_global_norm", count=1),
        ),
        (
            optax.adafactor(1e-2, min_dim_size_to_factor=4),
            facts("state", "(4, 16)", path=..., fix="optax.adam"),
        ),
        (
            optax.chain(optax.add_noise(0.1, 0.1, 0), optax.adam(1e-2)),
            facts("parameter", path="0/rng_key", fix="optax.chain"),
        ),
    ],
)
def test_optimizers_that_need_more_than_a_layer(optimizer: Any, says: Facts) -> None:
    pm = make_manager()
    state = make_state(pm, sw.offloaded(optimizer, SPECS))
    step = pm.jit_step(lambda s, b: by_optax(s, b, sw.offloaded(optimizer, SPECS)), state, AXES)
    with raises(sw.StrategyError, says):
        step(state, make_batch())


def test_updates_cannot_be_added_on_the_host() -> None:
    pm = make_manager(params="host")
    state = make_state(pm, ONE_BY_ONE)
    with raises(sw.StrategyError, "host", path="embedding", fix="optimizer.apply_gradients"):
        pm.jit_step(by_optax, state, AXES)(state, make_batch())
    with raises(sw.StrategyError, "dict", "init", fix="optax"):
        sw.offloaded({}, SPECS)


def test_plain_optimizers_get_advice_if_parameters_are_on_the_host() -> None:
    pm = make_manager(params="host")
    state = make_state(pm)
    with pytest.raises(ValueError, match="memory_space") as caught:
        pm.jit_step(train_step, state, AXES)(state, make_batch())
    assert any("sw.offloaded" in note for note in caught.value.__notes__)
