"""`abstract_state`, `init_state` and `jit_step`: state that keeps its shardings and memory."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright as sw
from shardwright.testing import assert_sharding, cpu_mesh
from tests.manager.programs import counting
from tests.raising import Facts, facts, raises

HIDDEN = (sw.BATCH, sw.EMBED)
SPECS = {
    "up": sw.ArraySpec(
        (16, 32), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE), jax.nn.initializers.normal(0.1)
    ),
    "down": sw.ArraySpec(
        (32, 16), jnp.float32, (sw.MLP_INTERMEDIATE, sw.EMBED), jax.nn.initializers.normal(0.1)
    ),
}
RANDOM = np.random.default_rng(1)
VALUES = {
    name: RANDOM.normal(size=spec.shape, scale=0.1).astype(np.float32)
    for name, spec in SPECS.items()
}
OPTIMIZER = optax.adam(1e-2)
# Over Explicit tp, plain `@` cannot contract a sharded dim, so that mesh has fsdp alone.
KINDS = [("fsdp:2,tp:4", "auto"), ("fsdp:4,tp:2", "auto"), ("fsdp:8", "explicit")]


def make_manager(sizes: str = "fsdp:2,tp:4", axis_types: Any = "auto") -> sw.PartitionManager:
    mesh = cpu_mesh(sizes, axis_types=axis_types)
    return sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh, mode="train")


def make_state(pm: sw.PartitionManager, optimizer: Any = OPTIMIZER) -> dict[str, Any]:
    # Copied, not drawn by `pm.init`, which would compile a program in each test.
    params = jax.device_put(VALUES, pm.shardings(SPECS))
    return {
        "params": params,
        "moments": pm.init_state(optimizer, params, SPECS),
        "step": pm.shard(jnp.zeros((), jnp.int32)),
    }


def make_batch() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=(8, 16)).astype(np.float32) for name in ("x", "y")}


def loss_fn(params: Any, batch: Any, place: Any, gather: Any) -> jax.Array:
    w = gather(params, SPECS)
    hidden = jax.nn.silu(place(batch["x"], *HIDDEN) @ w["up"])
    return jnp.mean((place(hidden @ w["down"], *HIDDEN) - batch["y"]) ** 2)


def train_step(state: Any, batch: Any, *, place: Any = None, gather: Any = None) -> Any:
    place, gather = place or sw.shard, gather or sw.gather
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch, place, gather)
    updates, moments = OPTIMIZER.update(grads, state["moments"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "moments": moments, "step": state["step"] + 1}, {"loss": loss}


def plain_steps(count: int) -> tuple[Any, list[float]]:
    """Run the step without any sharding."""
    state = jax.tree.map(np.asarray, make_state(make_manager()))
    step = jax.jit(
        lambda state, batch: train_step(
            state, batch, place=lambda x, *axes: x, gather=lambda w, axes: w
        )
    )
    losses = []
    for _ in range(count):
        state, metrics = step(state, make_batch())
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize(("sizes", "axis_types"), KINDS)
@pytest.mark.full(but=["fsdp:2,tp:4-auto"])
def test_step_equals_the_plain_step(sizes: str, axis_types: str) -> None:
    pm = make_manager(sizes, axis_types)
    state = make_state(pm)
    before = jax.tree.map(lambda x: x.sharding, state)
    counted, traces = counting(train_step)
    step = pm.jit_step(counted, state, (sw.BATCH, sw.EMPTY))
    losses = []
    for _ in range(3):
        state, metrics = step(state, make_batch())
        losses.append(float(metrics["loss"]))
    expected, expected_losses = plain_steps(3)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for leaf, value in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, value, rtol=1e-4, atol=1e-6)
    assert_sharding(state["params"], before["params"])
    assert_sharding(state["moments"], before["moments"])
    up = state["params"]["up"]
    assert up.addressable_shards[0].data.nbytes == up.nbytes // 8
    assert len(traces) == 1, "the new state has the type of the old one"


@pytest.mark.parametrize(("sizes", "axis_types"), KINDS)
@pytest.mark.full(but=["fsdp:2,tp:4-auto"])
def test_step_writes_over_the_old_state(sizes: str, axis_types: str) -> None:
    """XLA aliases every array of the state; without donation it aliases none."""
    pm = make_manager(sizes, axis_types)
    state = make_state(pm)
    shards = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    for donate in (True, False):
        step = pm.jit_step(train_step, state, (sw.BATCH, sw.EMPTY), donate=donate)
        compiled = step.lower(state, make_batch()).compile()
        memory: Any = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == (shards if donate else 0)
    old = state["params"]["up"]
    pm.jit_step(train_step, state, (sw.BATCH, sw.EMPTY))(state, make_batch())
    assert old.is_deleted()


def test_abstract_state_is_the_created_state() -> None:
    pm = make_manager()
    for optimizer in (
        OPTIMIZER,
        optax.adafactor(1e-2),
        optax.MultiSteps(optax.sgd(1e-2, momentum=0.9), 2),
    ):
        params = pm.init(SPECS, jax.random.key(0))
        created = pm.init_state(optimizer, params, SPECS)
        for abstract in (
            pm.abstract_state(optimizer, SPECS),
            pm.abstract_state(optimizer, params, SPECS),
        ):
            assert jax.tree.structure(abstract) == jax.tree.structure(created)
            for shape, value in zip(
                jax.tree.leaves(abstract), jax.tree.leaves(created), strict=True
            ):
                assert (shape.shape, shape.dtype) == (value.shape, value.dtype)
                assert shape.sharding.is_equivalent_to(value.sharding, value.ndim)


def test_zero1_shards_the_moments() -> None:
    strategy = sw.Strategy.preset("ddp") | sw.Strategy(policy={"zero1": "dp | -"})
    pm = sw.PartitionManager(strategy, mesh=cpu_mesh("dp:8"), mode="train")
    abstract = pm.abstract_state(OPTIMIZER, SPECS)
    assert abstract[0].mu["up"].sharding.spec == jax.P("dp")
    state = make_state(pm)
    step = pm.jit_step(train_step, state, (sw.BATCH, sw.EMPTY))
    state, _ = step(state, make_batch())
    assert state["params"]["up"].sharding.spec == jax.P()
    assert state["moments"][0].mu["up"].sharding.spec == jax.P("dp")


@dataclasses.dataclass(frozen=True)
class Momentum:
    """An optimizer that is not optax's."""

    decay: float = 0.9

    def init(self, params: Any) -> Any:
        return {"velocity": jax.tree.map(jnp.zeros_like, params)}


def test_any_object_with_init_is_an_optimizer() -> None:
    pm = make_manager()
    abstract = pm.abstract_state(Momentum(), SPECS)
    assert abstract["velocity"]["up"].sharding.spec == jax.P("fsdp", "tp")
    with raises(sw.StrategyError, "dict"):
        pm.abstract_state({}, SPECS)
    with raises(sw.StrategyError, "ArraySpec", path="down", fix="pm.init"):
        pm.init_state(OPTIMIZER, SPECS)


def test_step_compiles_ahead_of_time() -> None:
    """The state may be abstract, and the inputs arrays with shardings or abstract ones."""
    pm = make_manager()
    state = {
        "params": pm.abstract(SPECS),
        "moments": pm.abstract_state(OPTIMIZER, SPECS),
        "step": pm.abstract(jax.ShapeDtypeStruct((), jnp.int32), ()),
    }
    batch = pm.abstract(make_batch(), (sw.BATCH, sw.EMPTY), role="activation")
    compiled = pm.jit_step(train_step, state, batch).lower(state, batch).compile()
    placed = pm.shard(make_batch(), (sw.BATCH, sw.EMPTY))
    _, metrics = compiled(make_state(pm), placed)
    assert float(metrics["loss"]) == pytest.approx(plain_steps(1)[1][0], rel=1e-5)


def test_inputs_are_placed_by_their_annotations() -> None:
    pm = make_manager()
    state = make_state(pm)

    def step(state: Any, batch: Any, rate: Any) -> Any:
        return state, {"x": batch["x"], "rate": rate}

    axes = {"x": (sw.BATCH, sw.EMPTY), "y": (sw.BATCH, sw.EMPTY)}
    lowered = pm.jit_step(step, state, axes, ()).lower(state, make_batch(), 0.5)
    (_, batch, rate), _ = lowered.compile().input_shardings
    assert batch["x"].spec == jax.P("fsdp")
    assert rate.spec == jax.P()


def test_the_step_has_its_manager_ambient() -> None:
    """The step's manager counts, also under another one on the same mesh."""
    pm = make_manager()
    other = sw.PartitionManager(sw.Strategy.preset("ddp"), mesh=pm.mesh)
    state = make_state(pm)
    seen = []

    def step(state: Any, batch: Any) -> Any:
        seen.append(sw.current_manager())
        return state, batch

    jitted = pm.jit_step(step, state, (sw.BATCH, sw.EMPTY))
    state, _ = jitted(state, make_batch())
    with other:
        jitted(state, make_batch())
        assert sw.current_manager() is other
    assert all(manager is pm for manager in seen)


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_the_step_has_the_mesh_of_its_manager(axis_types: Any) -> None:
    """A bare spec is one of its mesh, though only the step enters the manager."""
    mesh = cpu_mesh("fsdp:4,tp:2", axis_types=axis_types)
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh)
    place = jax.reshard if axis_types == "explicit" else jax.lax.with_sharding_constraint

    def step(state: Any, x: Any) -> Any:
        assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
        return state, place(x, jax.P("tp", "fsdp"))

    _, x = pm.jit_step(step, {}, (sw.BATCH, sw.EMPTY))({}, make_batch()["x"])
    assert x.sharding.spec == jax.P("tp", "fsdp")


def changed_dtype(state: Any, batch: Any) -> Any:
    params = {**state["params"], "up": state["params"]["up"].astype(jnp.bfloat16)}
    return {**state, "params": params}, None


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (lambda state, batch: state, facts("step", "dict", fix="return state, loss")),
        (
            lambda state, batch: (state["params"], None),
            facts("step", path="state moments", fix="containers"),
        ),
        (lambda state, batch: ({**state, "q": 1}, None), facts(path="state q", fix="containers")),
        (
            changed_dtype,
            facts("float32", "[16,32]", "bfloat16", path="state params/up", fix="new.astype"),
        ),
    ],
)
def test_a_step_that_changes_its_state_is_refused(step: Any, says: Facts) -> None:
    pm = make_manager()
    state = make_state(pm)
    with raises(sw.StrategyError, says):
        pm.jit_step(step, state, (sw.BATCH, sw.EMPTY))(state, make_batch())


@functools.partial(jax.tree_util.register_dataclass, data_fields=("value",), meta_fields=("decay",))
@dataclasses.dataclass
class Average:
    value: Any
    decay: float


def test_static_fields_of_the_state_stay() -> None:
    pm = make_manager()
    state = {"averages": [Average(pm.shard(jnp.float32(0)), 0.9)]}
    after = {"averages": [Average(0.0, 0.5)]}
    with raises(sw.StrategyError, "Average", "static", path="state averages/0", fix="state"):
        pm.jit_step(lambda state: (after, None), state)(state)
    with raises(sw.StrategyError, "Average", "static", path="state averages/0", fix="jit_step"):
        pm.jit_step(lambda state: (state, None), state)(after)


def test_arguments_without_shardings_are_refused() -> None:
    pm = make_manager()
    state = {"params": {"up": np.ones((16, 32)), "down": jnp.ones((32, 16))}, "text": "a"}
    with pytest.raises(sw.StrategyError) as caught:
        pm.jit_step(train_step, state)
    assert [problem.path for problem in caught.value.problems] == [
        "state params/down",
        "state params/up",
        "state text",
    ]
    assert "has no sharding on the manager's mesh" in str(caught.value)
    elsewhere = make_state(make_manager("fsdp:4,tp:2"))["params"]
    with raises(
        sw.StrategyError,
        facts("ArrayImpl", "(32, 16)", path="state down", fix="pm.init"),
        facts("ArrayImpl", "(16, 32)", path="state up", fix="pm.init"),
    ):
        pm.jit_step(train_step, elsewhere)
    two = ((sw.BATCH, sw.EMPTY), (sw.BATCH, sw.EMPTY))
    with raises(sw.StrategyError, "BATCH", path="input 0"):
        pm.jit_step(train_step, make_state(pm), two)


def test_size_dependent_batch_sharding() -> None:
    """The batch rule of a serving preset has several candidates, so its sharding needs sizes."""
    pm = sw.PartitionManager(sw.Strategy.preset("serve_tp"), mesh=cpu_mesh("dp:2,tp:4"))
    pm = pm.for_mode("decode")
    state = (pm.shard(jnp.zeros(()), ()), ())

    def step(state: Any, batch: Any) -> Any:
        return state, batch

    with raises(
        sw.ShapeRequiredError,
        "candidate",
        "applies",
        path="input 0",
        dim=0,
        axis="BATCH",
        fix="pm.abstract",
    ):
        pm.jit_step(step, state, (sw.BATCH, sw.EMPTY))
    batch = pm.abstract(make_batch(), (sw.BATCH, sw.EMPTY), role="activation")
    _, placed = pm.jit_step(step, state, batch)(state, make_batch())
    assert placed["x"].sharding.spec == jax.P("dp")


def test_state_needs_devices() -> None:
    strategy = sw.Strategy.preset("fsdp_tp")
    pm = sw.PartitionManager(strategy, mesh=sw.abstract_mesh("fsdp:4,tp:8"))
    assert pm.abstract_state(OPTIMIZER, SPECS)[0].count.sharding.spec == jax.P()
    with raises(sw.MeshSpecError, "manager", "mesh", fix="create_mesh"):
        pm.init_state(OPTIMIZER, SPECS)
