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
from tests.raising import Facts, facts, raises

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


@pytest.mark.full(but=["fsdp_tp-fsdp:2,tp:4"])
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
    with raises(
        sw.IndivisibleError, "(7, 8)", "fsdp", 2, "tp", path="input 0 y", fix="jit_step"
    ) as caught:
        jitted(make_state(pm), make_batch(7, 8))
    assert caught.value.fix


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ((), facts(0, "jit_step", 1, path="step", fix="jit_step")),
        ((make_batch(), 1.0), facts(2, "jit_step", 1, path="step", fix="jit_step")),
        (({"x": np.ones((8, 8))},), facts("jit_step", path="input 0 y", fix="jit_step")),
        (
            ({**make_batch(), "z": np.ones((8, 8))},),
            facts("jit_step", path="input 0 z", fix="jit_step"),
        ),
    ],
)
def test_other_inputs_are_refused(inputs: tuple[Any, ...], says: Facts) -> None:
    pm = make_manager()
    jitted = pm.jit_step(step, make_state(pm), {"x": AXES, "y": AXES})
    with raises(sw.StrategyError, says) as caught:
        jitted(make_state(pm), *inputs)
    assert caught.value.fix


def test_other_calls_are_refused() -> None:
    pm = make_manager()
    state = make_state(pm)
    jitted = pm.jit_step(step, state, AXES)
    with raises(sw.StrategyError, "batch", path="step", fix="jit_step"):
        jitted(state, batch=make_batch())
    with raises(sw.StrategyError, "state", path="step", fix="jit_step"):
        jitted()
    with raises(sw.StrategyError, "jit_step", path="state q", fix="jit_step"):
        jitted({**state, "q": state["p"] + 1}, make_batch())
    with raises(sw.StrategyError, "list", "tuple", path="state", fix="jit_step"):
        pm.jit_step(step, [state["p"]], AXES)((state["p"],), make_batch())


def test_repeated_arrays_are_not_donated() -> None:
    pm = make_manager()
    p = make_state(pm)["p"]

    def both(state: Any) -> Any:
        return jax.tree.map(lambda x: x + 1, state), None

    state = {"p": p, "q": p}
    with raises(sw.StrategyError, "donated", "once", path="state q", fix="x.copy"):
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
    with raises(sw.StrategyError, "step", "float32", path="state w", fix="pm.shard") as caught:
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


def test_scalars_and_keys_are_replicated() -> None:
    """The counter and the key of a training loop need no sharding, and compile nothing again."""
    for axis_types in ("auto", "explicit"):
        mesh = cpu_mesh("fsdp:2,tp:4", axis_types=axis_types)
        pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh, mode="train")
        state = {
            "p": pm.shard(jnp.ones((8, 8)), sw.EMBED, sw.EMPTY),
            "step": 0,
            "count": jnp.int32(0),
            "rate": np.float32(0.5),
            "key": jax.random.key(0),
            "keys": jax.random.split(jax.random.key(1), 3),
        }
        traces = []

        def step(state: Any, *, traces: list[int] = traces) -> Any:
            traces.append(1)
            key, draw = jax.random.split(state["key"])
            new = {**state, "step": state["step"] + 1, "count": state["count"] + 1, "key": key}
            return new, jax.random.uniform(draw)

        for described in (state, jax.eval_shape(lambda tree: tree, state)):
            if described is not state:
                described["p"] = state["p"]
            jitted = pm.jit_step(step, described, donate=False)
            after, drawn, expected = state, [], state["key"]
            traces.clear()
            for _ in range(3):
                after, value = jitted(after)
                drawn.append(float(value))
                expected, draw = jax.random.split(expected)
                assert drawn[-1] == float(jax.random.uniform(draw))
            assert (int(after["step"]), int(after["count"])) == (3, 3)
            assert all(after[name].sharding.spec == jax.P() for name in ("step", "rate", "key"))
            assert len(traces) == 1


@pytest.mark.full(but=["explicit"])
@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_donated_state_of_any_kind_compiles_once(axis_types: Any) -> None:
    mesh = cpu_mesh("fsdp:2,tp:4", axis_types=axis_types)
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh)
    host = jax.NamedSharding(mesh, jax.P("fsdp"), memory_kind="pinned_host")
    state = {
        "host": jax.device_put(np.ones((8, 8), np.float32), host),
        "key": jax.random.key(0),
        "number": 1.5,
        "p": pm.shard(np.ones((8, 8), np.float32), sw.EMBED, sw.EMPTY),
        "scalar": np.float32(2),
        "weak": jnp.asarray(1.5),
    }

    def step(state: Any) -> Any:
        kept = jax.device_put(state["host"], jax.memory.Space.Device) + 1
        key = jax.random.split(state["key"])[0]
        rest = {name: state[name] + 1 for name in state if name not in ("host", "key")}
        return {**rest, "host": kept, "key": key}, None

    jitted = pm.jit_step(step, state)
    again = [lambda out: (out[0],)] * 2
    sw.testing.assert_no_retrace(jitted, (state,), *again)


@pytest.mark.parametrize("value", [jnp.zeros((), jnp.float32), jax.random.split(jax.random.key(0))])
def test_placed_scalars_are_not_moved(value: Any) -> None:
    """A scalar on another mesh or device was placed by somebody, so the call would be refused."""
    pm = make_manager()
    for sharding in (jax.NamedSharding(cpu_mesh("dp:4"), jax.P()), jax.devices()[3]):
        with raises(sw.StrategyError, "manager", path="state x", fix="pm.init"):
            pm.jit_step(step, {"x": jax.device_put(value, sharding)})


def test_states_of_another_type_are_refused() -> None:
    pm = make_manager()
    state = {"p": pm.shard(jnp.ones((8, 4)), sw.EMBED, sw.EMPTY)}
    jitted = pm.jit_step(step, state, AXES, donate=False)
    jitted(state, make_batch())
    for other, says in (
        (
            np.ones((16, 4), np.float32),
            facts("jit_step", "float32", "[8,4]", "[16,4]", path="state p", fix="jit_step"),
        ),
        (
            np.ones((8, 4), jnp.bfloat16),
            facts("jit_step", "float32", "[8,4]", "bfloat16", path="state p", fix="jit_step"),
        ),
    ):
        for call in (jitted, jitted.lower, jitted.trace, jitted.eval_shape):
            with raises(sw.StrategyError, says):
                call({"p": other}, make_batch())
    with raises(sw.StrategyError, "jit_step", path="state q", fix="jit_step"):
        pm.jit_step(step, {**state, "q": None}, AXES)({**state, "q": 1}, make_batch())
    jitted({"p": np.ones((8, 4), np.float32)}, make_batch())  # NumPy is placed


@pytest.mark.parametrize("placed", [None, jax.P()])
@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_state_sizes_that_do_not_divide(placed: Any, axis_types: Any) -> None:
    """JAX would compare shardings first, and a new placement does not help."""
    mesh = cpu_mesh("fsdp:4", axis_types=axis_types)
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=mesh, mode="train")
    state = {"p": pm.shard(jnp.ones((8, 4)), sw.EMBED, sw.EMPTY, role="param")}
    assert state["p"].sharding.spec[0] == "fsdp"
    other = jnp.ones((6, 4))
    if placed is not None:
        other = jax.device_put(other, jax.NamedSharding(pm.mesh, placed))
    jitted = pm.jit_step(step, state, donate=False)
    jitted(state)
    for call in (jitted, jitted.lower, jitted.trace, jitted.eval_shape):
        for value in (other, jax.ShapeDtypeStruct((6, 4), jnp.float32)):
            with raises(
                sw.StrategyError,
                "jit_step",
                "float32",
                "[8,4]",
                "[6,4]",
                path="state p",
                fix="jit_step",
            ) as caught:
                call({"p": value})
            assert "call jit_step with this one" in caught.value.fix
    with raises(
        sw.StrategyError, "jit_step", "float32", "[8,4]", "str", path="state p", fix="jit_step"
    ):
        jitted({"p": "text"})


def test_types_of_state_and_sizes_of_inputs() -> None:
    pm = make_manager()
    jitted = pm.jit_step(step, make_state(pm), AXES)
    with pytest.raises(sw.ShardingError) as caught:
        jitted({"p": np.ones((8, 8), np.int32)}, make_batch(7, 8))
    assert [problem.path for problem in caught.value.problems] == ["state p", "input 0 y"]
    assert "the state that jit_step was given" in caught.value.problems[0].fix


def test_arrays_of_another_placement_are_refused() -> None:
    """The fix of each message works."""
    pm = make_manager()
    state = {"p": pm.shard(jnp.ones((8, 8)), sw.EMBED, sw.EMPTY, role="param")}
    jitted = pm.jit_step(step, state, AXES, donate=False)
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    for sharding, says in (
        (
            jax.devices()[3],
            facts("SingleDeviceSharding", 3, "jit_step", "fsdp", path=..., fix="jit_step"),
        ),
        (jax.NamedSharding(pm.mesh, jax.P()), facts("fsdp", 2, "tp", 4, path=..., fix="jit_step")),
        (
            jax.NamedSharding(pm.mesh, jax.P("tp")),
            facts("tp", "fsdp", 2, 4, path=..., fix="jit_step"),
        ),
        (
            jax.NamedSharding(cpu_mesh("dp:4"), jax.P("dp")),
            facts("dp", 4, "jit_step", "fsdp", path=..., fix="jit_step"),
        ),
    ):
        placed = jax.device_put(x, sharding)
        for call in (jitted, jitted.lower):
            with raises(sw.StrategyError, says) as caught:
                call(state, {"x": x, "y": placed})
        assert "pm.shard(x, *axes)" in caught.value.fix
        _, (sums,) = jitted(state, {"x": x, "y": pm.shard(placed, *AXES)})
        assert float(sums["y"]) == x.sum()
        placed = jax.device_put(x, sharding)
        with raises(sw.StrategyError, says) as caught:
            jitted({"p": placed}, make_batch())
        assert "jax.device_put(x, sharding)" in caught.value.fix
        jitted({"p": jax.device_put(placed, state["p"].sharding)}, make_batch())
    same = jax.NamedSharding(cpu_mesh("dp:2,x:4"), jax.P("dp"))
    jitted(state, {"x": x, "y": jax.device_put(x, same)})


def test_errors_of_the_step_are_its_own() -> None:
    def fails(state: Any, batch: Any) -> Any:
        raise ValueError("an error of the step")

    pm = make_manager()
    with pytest.raises(ValueError, match="an error of the step"):
        pm.jit_step(fails, make_state(pm), AXES)(make_state(pm), make_batch())


def test_deleted_arrays_are_refused() -> None:
    """JAX 0.10 ends the process if it is called with one."""
    pm = make_manager()
    state = make_state(pm)
    jitted = pm.jit_step(step, state, AXES)
    jitted(state, make_batch())
    assert state["p"].is_deleted()
    with raises(sw.StrategyError, "deleted", path="state p", fix="donate") as caught:
        jitted(state, make_batch())
    assert "state, loss = step(state, batch)" in caught.value.fix
    batch = make_batch() | {"y": jnp.ones((8, 8))}
    batch["y"].delete()
    with raises(sw.StrategyError, "deleted", path="input 0 y"):
        jitted(make_state(pm), batch)
    jitted.lower(state, make_batch())  # it needs no values


def test_steps_inside_of_a_trace() -> None:
    pm = make_manager()
    jitted = pm.jit_step(step, make_state(pm), AXES, donate=False)
    state, sums = jax.jit(jitted)(make_state(pm), make_batch())
    assert float(state["p"][0, 0]) == 2
    assert float(sums[0]["x"]) == 64


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        (
            lambda s: {**s, "opt": [*s["opt"]]},
            "state opt",
            facts("step", "tuple", "list", path="state opt"),
        ),
        (lambda s: {**s, "opt": s["opt"][:1]}, "state opt/1", facts("step", path="state opt/1")),
        (lambda s: {**s, "more": 1.0}, "state more", facts("step", path="state more")),
        (lambda s: {**s, "p": {"x": s["p"]}}, "state p", facts("step", "dict", path="state p")),
        (lambda s: {**s, "none": 1.0}, "state none", facts("step", "None", path="state none")),
    ],
)
def test_changes_of_structure_are_paths(change: Any, path: str, says: Facts) -> None:
    pm = make_manager()
    state = {**make_state(pm), "opt": (pm.shard(1.0), {"m": pm.shard(1.0)}), "none": None}
    with raises(sw.StrategyError, says) as caught:
        pm.jit_step(lambda s: (change(s), None), state)(state)
    assert caught.value.path == path
    assert "PyTreeDef" not in str(caught.value)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["lbfgs", "zoom"])
def test_line_searches_of_optax(optimizer: str) -> None:
    """They start with weakly typed scalars, and their updates are strongly typed."""
    optax = pytest.importorskip("optax")
    build = {
        "lbfgs": lambda: optax.lbfgs(memory_size=3),
        "zoom": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(4)),
    }
    tx, pm = build[optimizer](), make_manager()
    init = jax.nn.initializers.normal(0.1)
    specs = {"w": sw.ArraySpec((8, 8), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE), init)}

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    def train(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = tx.update(
            gradients,
            state["opt"],
            state["params"],
            value=value,
            grad=gradients,
            value_fn=lambda params: loss(params, batch),
        )
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    params = pm.init(specs, jax.random.key(0))
    state = {"params": params, "opt": pm.init_state(tx, params, specs)}
    assert not any(jax.typeof(leaf).weak_type for leaf in jax.tree.leaves(state))
    jitted = pm.jit_step(train, state, (sw.BATCH, sw.EMPTY))
    plain = {"params": pm.init(specs, jax.random.key(0))}
    plain["opt"] = tx.init(plain["params"])
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    batch = {"x": x, "y": x[::-1].copy()}
    for _ in range(3):
        state, value = jitted(state, batch)
        plain, expected = jax.jit(train)(plain, batch)
        np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-7)
    assert jitted._cache_size() == 1
