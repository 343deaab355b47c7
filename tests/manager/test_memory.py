"""Arrays in host memory by rule: what the manager creates, and a step that moves its state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright as sw
from shardwright.manager import memory
from shardwright.testing import cpu_mesh
from tests.manager.programs import counting
from tests.raising import raises

LAYERS, EMBED, HIDDEN, VOCAB = 4, 16, 32, 16
RESIDUAL = (sw.BATCH, sw.EMBED)


def weight(*shape: int, axes: Any) -> sw.ArraySpec:
    return sw.ArraySpec(shape, jnp.float32, axes, jax.nn.initializers.normal(0.3))


LAYER = {
    "norm": sw.ArraySpec((EMBED,), jnp.float32, (sw.NORM,), jax.nn.initializers.ones),
    "up": weight(EMBED, HIDDEN, axes=(sw.EMBED, sw.MLP_INTERMEDIATE)),
    "down": weight(HIDDEN, EMBED, axes=(sw.MLP_INTERMEDIATE, sw.EMBED)),
}
SPECS = {
    "embedding": weight(VOCAB, EMBED, axes=(sw.VOCAB, sw.EMBED)),
    "layers": sw.stack_specs(LAYER, LAYERS),
}
OPTIMIZER = optax.adamw(1e-2)


def make_manager(
    sizes: str = "fsdp:2,tp:4", axis_types: Any = "auto", **memory: Any
) -> sw.PartitionManager:
    strategy = sw.Strategy.preset("fsdp_tp")
    if memory:
        strategy = strategy | sw.Strategy(memory=memory)
    return sw.PartitionManager(strategy, mesh=cpu_mesh(sizes, axis_types=axis_types), mode="train")


def init(pm: sw.PartitionManager) -> dict[str, Any]:
    params = pm.init(SPECS, jax.random.key(0))
    return {"params": params, "moments": pm.init_state(OPTIMIZER, params, SPECS)}


def make_state(pm: sw.PartitionManager, optimizer: Any = OPTIMIZER) -> dict[str, Any]:
    """Return a state where the rules say. Its parameters are copied, which compiles nothing."""
    random = np.random.default_rng(1)
    params = jax.tree.map(
        lambda spec: random.normal(size=spec.shape, scale=0.3).astype(spec.dtype), SPECS
    )
    params["layers"]["norm"][:] = 1
    params = jax.device_put(params, pm.shardings(SPECS))
    return {"params": params, "moments": pm.init_state(optimizer, params, SPECS)}


def make_batch() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "x": random.integers(VOCAB, size=(8,)).astype(np.int32),
        "y": random.normal(size=(8, EMBED)).astype(np.float32),
    }


AXES = {"x": (sw.BATCH,), "y": (sw.BATCH, sw.EMPTY)}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    table = sw.gather(params["embedding"], SPECS["embedding"], path="embedding")
    x = sw.shard(jax.nn.one_hot(batch["x"], VOCAB) @ table, RESIDUAL)

    def layer(x: Any, stored: Any) -> Any:
        w = sw.gather(stored, LAYER, path="layers")
        hidden = jax.nn.silu((x * w["norm"]) @ w["up"])
        return sw.shard(x + hidden @ w["down"], RESIDUAL), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean((x - batch["y"]) ** 2)


def train_step(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, moments = OPTIMIZER.update(grads, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss


def train(pm: sw.PartitionManager, step: Any, state: Any, count: int) -> tuple[Any, list[float]]:
    counted, traces = counting(step)
    jitted = pm.jit_step(counted, state, AXES)
    losses = []
    for _ in range(count):
        state, loss = jitted(state, make_batch())
        losses.append(float(loss))
    assert len(traces) == 1
    assert jitted._cache_size() == 1
    return state, losses


def kinds(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding.memory_kind, tree)


def host_operands(jaxpr: Any) -> list[str]:
    """Return the equations that compute on values in host memory, instead of moving them."""
    moves = {"device_put", "dynamic_slice", "dynamic_update_slice", "squeeze", "reshape"}
    moves |= {"broadcast_in_dim", "jit", "pjit", "scan", "custom_jvp_call", "slice"}
    moves |= {"checkpoint", "remat", "remat2"}  # run a jaxpr too
    found = []
    for equation in jaxpr.eqns:
        on_host = [v for v in equation.invars if v.aval.memory_space == jax.memory.Space.Host]
        if on_host and equation.primitive.name not in moves:
            found.append(str(equation))
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                body = getattr(inner, "jaxpr", inner)
                found += host_operands(body) if hasattr(body, "eqns") else []
    return found


NORM = {"match": "norm", "state": "device", "params": "device"}


def test_arrays_are_created_where_the_rules_say() -> None:
    pm = make_manager(state="host", params="host", tensors=[NORM])
    wanted = {
        "embedding": "pinned_host",
        "layers": {"norm": "device", "up": "pinned_host", "down": "pinned_host"},
    }
    state = init(pm)
    assert kinds(state["params"]) == wanted
    adam = state["moments"][0]
    assert (kinds(adam.mu), kinds(adam.nu), kinds(adam.count)) == (wanted, wanted, "device")
    described = {
        "params": pm.abstract(SPECS),
        "moments": pm.abstract_state(OPTIMIZER, SPECS),
    }
    assert kinds(described) == kinds(state)
    shapes = jax.eval_shape(OPTIMIZER.init, state["params"])
    given = pm.state_shardings(shapes, SPECS)
    assert [each.memory_kind for each in jax.tree.leaves(given)] == jax.tree.leaves(
        kinds(state["moments"])
    )
    # The values are those that device arrays would have.
    plain = init(make_manager())
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(x, y)
    axes = (sw.EMBED, sw.MLP_INTERMEDIATE)
    assert pm.sharding(*axes, role="state").memory_kind == "pinned_host"
    assert pm.sharding(*axes, role="state", memory_kind="device").memory_kind == "device"
    assert pm.sharding(*axes).memory_kind == "device", "an activation"
    moved = pm.shard(np.ones((16, 32), np.float32), axes, role="state")
    assert moved.sharding.memory_kind == "device", "shard never moves between memories"


def test_an_abstract_mesh_has_pinned_host_memory() -> None:
    strategy = sw.Strategy.preset("ddp") | sw.Strategy(
        memory={"state": "host"}, policy={"zero1": "dp | -"}
    )
    pm = sw.PartitionManager(strategy, mesh=sw.abstract_mesh("dp:8"))
    moment = pm.abstract_state(OPTIMIZER, SPECS)[0].mu["layers"]["up"]
    assert moment.sharding.memory_kind == "pinned_host"
    assert "dp" in str(moment.sharding.spec), "zero1 holds in host memory too"


@pytest.mark.parametrize(
    ("own", "kind"), [(["device", "unpinned_host"], "unpinned_host"), (["device"], ""), ([], "")]
)
def test_backend_decides_the_kind_of_host_memory(
    own: list[str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pm = make_manager(state="host")
    rule = pm.explain(sw.EMBED, role="state").memory
    device = SimpleNamespace(
        platform="toy", addressable_memories=lambda: [SimpleNamespace(kind=each) for each in own]
    )
    mesh: Any = SimpleNamespace(local_devices=[device])
    if kind:
        assert memory.host_kind(mesh, rule) == kind
        return
    with raises(sw.StrategyError, "toy", *own, path="a", rule='state = "host"', fix="memory_kind"):
        memory.host_kind(mesh, rule, "a")


@pytest.mark.parametrize(
    ("sizes", "axis_types"),
    [("fsdp:2,tp:4", "auto"), ("fsdp:8", "explicit"), ("dp:2,fsdp:4", "auto")],
)
@pytest.mark.full
def test_state_on_the_host_trains_alike(sizes: str, axis_types: str) -> None:
    expected_state, expected = train(
        pm := make_manager(sizes, axis_types), train_step, make_state(pm), 20
    )
    pm = make_manager(sizes, axis_types, state="host")
    first = make_state(pm)
    before = kinds(first)
    once, _ = train(pm, train_step, first, 1)
    assert kinds(once) == before
    assert first["moments"][0].mu["layers"]["up"].is_deleted(), "it was donated"
    state, losses = train(pm, train_step, make_state(pm), 20)
    assert kinds(state) == before
    assert before["moments"][0].mu["layers"]["up"] == "pinned_host"
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_no_operation_computes_on_host_values() -> None:
    pm = make_manager(state="host")
    state = make_state(pm)
    jitted = pm.jit_step(train_step, state, AXES)
    traced = jitted.trace(state, make_batch())
    moments = jax.tree.leaves(state["moments"])
    spaces = [v.aval.memory_space for v in traced.jaxpr.jaxpr.invars]
    assert spaces.count(jax.memory.Space.Host) == sum(x.ndim > 0 for x in moments)
    assert host_operands(traced.jaxpr.jaxpr) == []
    compiled: Any = jitted.lower(state, make_batch()).compile()
    assert compiled.memory_analysis().alias_size_in_bytes > 0
    with pm:
        wrong = jax.jit(lambda x: x + x).trace(state["moments"][0].mu["layers"]["up"])
    assert len(host_operands(wrong.jaxpr.jaxpr)) == 1, "the check finds what JAX accepts"


def test_state_moves_if_a_mode_has_its_parameters_on_the_device() -> None:
    strategy = sw.Strategy.preset("fsdp_tp") | sw.Strategy(
        memory={"state": "host", "params": "host"},
        modes={"train": {"memory": {"params": "device"}}},
    )
    pm = sw.PartitionManager(strategy, mesh=cpu_mesh("fsdp:2,tp:4"), mode="train")
    state = make_state(pm)
    assert set(jax.tree.leaves(kinds(state["params"]))) == {"device"}
    traced = pm.jit_step(train_step, state, AXES).trace(state, make_batch())
    assert host_operands(traced.jaxpr.jaxpr) == []


def test_error_of_a_step_on_an_abstract_mesh_stays_its_own() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=sw.abstract_mesh("fsdp:8"))

    def step(state: Any, x: Any) -> Any:
        raise ValueError("of the step")

    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    with pytest.raises(ValueError, match="of the step"):
        pm.jit_step(step, {}, (sw.BATCH, sw.EMPTY)).trace({}, x)


def test_gradient_of_a_sum_on_the_host_gets_advice() -> None:
    pm = make_manager(params="host")
    params = pm.init(SPECS, jax.random.key(0))
    with pytest.raises(ValueError, match="<host>") as caught, pm:
        jax.jit(jax.grad(lambda params: jnp.sum(params["embedding"])))(params)
    assert any("sw.gather" in note for note in caught.value.__notes__)


def test_an_array_in_the_other_memory_is_refused() -> None:
    pm = make_manager(state="host")
    state = make_state(pm)
    step = pm.jit_step(train_step, state, AXES)
    up = state["moments"][0].mu["layers"]["up"]
    state["moments"][0].mu["layers"]["up"] = jax.device_put(up, jax.memory.Space.Device)
    with raises(
        sw.StrategyError, "pinned_host", path="state moments/0/mu/layers/up", fix="jax.device_put"
    ):
        step(state, make_batch())


def test_a_jit_of_ones_own_gets_advice() -> None:
    pm = make_manager(state="host")
    state = make_state(pm)
    with pytest.raises(ValueError, match="memory_space") as caught, pm:
        jax.jit(train_step)(state, make_batch())
    assert any("pm.jit_step" in note for note in caught.value.__notes__)
