"""A linen model in flax's idiom follows a strategy; its source knows nothing of this package."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.interop import flax as bridge
from shardwright.interop.logical_rules import to_logical_axis_rules
from tests.raising import raises

flax = pytest.importorskip("flax")
nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
meta = pytest.importorskip("flax.core.meta")
TrainState = pytest.importorskip("flax.training.train_state").TrainState

NAMES = {
    "batch": (sw.BATCH, "activation"),
    "length": (sw.LENGTH, "activation"),
    "activation_embed": (sw.EMBED, "activation"),
    "activation_mlp": (sw.MLP_INTERMEDIATE, "activation"),
    "vocab": (sw.VOCAB, "param"),
    "embed": (sw.EMBED, "param"),
    "mlp": (sw.MLP_INTERMEDIATE, "param"),
    "heads": (sw.HEAD, "param"),
    "kv": (sw.HEAD_DIM, "param"),
    "layers": (sw.LAYERS, "param"),
}
MESHES = ("fsdp:8", "fsdp:4,tp:2", "dp:2,tp:4")
traces = []


def kernel(*names: str) -> Any:
    return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)


class Projection(nn.Module):
    """A matmul over the first dims of a kernel."""

    equation: str
    shape: tuple[int, ...]
    names: tuple[str, ...]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return jnp.einsum(self.equation, x, self.param("kernel", kernel(*self.names), self.shape))


class Block(nn.Module):
    """Attention and MLP, as models of flax write them."""

    @nn.compact
    def __call__(self, x: Any, _: None) -> Any:
        hidden = nn.LayerNorm(use_bias=False)(x)
        q, k, v = (
            Projection("ble,ehd->blhd", (32, 4, 8), ("embed", "heads", "kv"))(hidden)
            for _ in range(3)
        )
        mixed = nn.dot_product_attention(q, k, v)
        x = x + Projection("blhd,hde->ble", (4, 8, 32), ("heads", "kv", "embed"))(mixed)
        x = nn.with_logical_constraint(x, ("batch", "length", "activation_embed"))
        hidden = nn.gelu(nn.Dense(64, use_bias=False, kernel_init=kernel("embed", "mlp"))(x))
        hidden = nn.with_logical_constraint(hidden, ("batch", "length", "activation_mlp"))
        return x + nn.Dense(32, use_bias=False, kernel_init=kernel("mlp", "embed"))(hidden), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        traces.append(1)
        table = nn.Embed(64, 32, embedding_init=kernel("vocab", "embed"))
        x = table(tokens)
        layers = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = layers()(x, None)
        return table.attend(x)


MODEL = Model()
TOKENS = np.asarray(np.random.default_rng(0).integers(0, 64, (8, 16)))
OPTIMIZER = optax.adamw(1e-3)


def step(params: Any, state: Any, tokens: Any) -> Any:
    def loss(params: Any) -> Any:
        logits = MODEL.apply(params, tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, gradient = jax.value_and_grad(loss)(params)
    updates, state = OPTIMIZER.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value


def losses(params: Any) -> list[float]:
    run, state, found = jax.jit(step), jax.jit(OPTIMIZER.init)(params), []
    for _ in range(20):
        params, state, value = run(params, state, TOKENS)
        found.append(float(value))
    return found


@functools.cache
def unsharded() -> tuple[Any, Any, list[float]]:
    variables = MODEL.init(jax.random.key(0), TOKENS[:, :-1])
    values = bridge.arrays(variables)
    return values, bridge.annotate(variables, NAMES), losses(values)


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
def test_training_equals_unsharded(mesh: str) -> None:
    values, axes, expected = unsharded()
    assert expected[-1] < expected[0] - 0.1
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh(mesh))
    placed = jax.device_put(values, pm.shardings(values, axes))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(placed))
    assert held < 0.6 * sum(leaf.nbytes for leaf in jax.tree.leaves(values))
    with bridge.rules(pm, NAMES):
        found = losses(placed)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_annotations_of_boxes() -> None:
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0), TOKENS)
    layers = bridge.annotate(shapes, NAMES)["params"]["ScanBlock_0"]
    assert layers["Dense_0"]["kernel"] == (sw.LAYERS, sw.EMBED, sw.MLP_INTERMEDIATE)
    assert layers["LayerNorm_0"]["scale"] == (sw.EMPTY, sw.EMPTY)


def test_shardings_equal_those_of_flax() -> None:
    variables = jax.eval_shape(MODEL.init, jax.random.key(0), TOKENS)
    values, axes = bridge.arrays(variables), bridge.annotate(variables, NAMES)
    specs = nn.get_partition_spec(variables)
    for mesh in MESHES:
        pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh(mesh))
        exported = to_logical_axis_rules(pm, NAMES)
        theirs = nn.logical_to_mesh_sharding(specs, pm.mesh, exported)
        own = pm.shardings(values, axes)
        triples = zip(*map(jax.tree.leaves, (own, theirs, values)), strict=True)
        for one, other, value in triples:
            assert one.shard_shape(value.shape) == other.shard_shape(value.shape), mesh


def test_another_strategy_retraces() -> None:
    values = jax.jit(MODEL.init)(jax.random.key(0), TOKENS)
    values = bridge.arrays(values)
    run = jax.jit(MODEL.apply)
    before = len(traces)
    for mesh, count in (("fsdp:8", 1), ("fsdp:8", 1), ("dp:2,tp:4", 2)):
        pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh(mesh))
        with bridge.rules(pm, NAMES):
            run.lower(values, TOKENS)
        assert len(traces) - before == count


def test_names_that_are_missing() -> None:
    variables = jax.eval_shape(MODEL.init, jax.random.key(0), TOKENS)
    names = {name: target for name, target in NAMES.items() if name not in ("mlp", "kv")}
    with pytest.raises(sw.UnknownAxisError) as caught:
        bridge.annotate(variables, names)
    assert len(caught.value.problems) == 2
    text = str(caught.value)
    assert "the name 'mlp' is not in names; 2 arrays have it" in text
    assert "such as 'mlp': (sw.MLP_INTERMEDIATE, 'param')" in text
    assert "the name 'kv' is not in names; 4 arrays have it" in text
    assert "as 'kv': (axis, role); axes are sw.BATCH, sw.LENGTH" in text
    assert str(caught.value.problems[0]).startswith(
        "params/ScanBlock_0/Dense_0/kernel: the name 'mlp' is not in names"
    )


def test_boxes_of_physical_names() -> None:
    init = nn.with_partitioning(nn.initializers.ones, ("embed",))
    shapes = jax.eval_shape(nn.Dense(8, kernel_init=init).init, jax.random.key(0), jnp.ones((1, 4)))
    assert bridge.annotate(shapes, NAMES) == {
        "params": {"kernel": (sw.EMBED, sw.EMPTY), "bias": (sw.EMPTY,)}
    }


def test_explicit_mesh_is_refused() -> None:
    mesh = sw.create_mesh("fsdp:8", axis_types="explicit")
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=mesh)
    with raises(sw.StrategyError, "mesh", fix="axis_types"), bridge.rules(pm, NAMES):
        pass


def test_names_that_lose_a_mesh_axis_are_named() -> None:
    """flax's list replicates a dim where the resolver has a conflict."""
    spmd = pytest.importorskip("flax.linen.spmd")
    hidden = ("batch", "length", "activation_mlp")
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp_sp"), mesh=sw.create_mesh("fsdp:4,tp:2"))
    with (
        pytest.warns(UserWarning, match="'length' and 'activation_mlp' use tp"),
        bridge.rules(pm, NAMES),
    ):
        assert spmd.logical_to_mesh_axes(hidden) == jax.P("fsdp", "tp", None)
    names = {**NAMES, "hidden_length": (sw.QUERY_LENGTH, "activation")}
    del names["length"]
    with warnings.catch_warnings(), bridge.rules(pm, names):
        warnings.simplefilter("error")
        found = spmd.logical_to_mesh_axes(("batch", "hidden_length", "activation_mlp"))
    assert found == jax.P("fsdp", None, "tp")


def test_variables_without_boxes_are_refused() -> None:
    plain = nn.unbox(jax.eval_shape(MODEL.init, jax.random.key(0), TOKENS))
    with raises(sw.StrategyError, "model", fix="model.init") as caught:
        bridge.annotate(plain, NAMES)
    assert "without nn.unbox" in caught.value.fix
    assert {*jax.tree.leaves(bridge.annotate(plain, {}))} == {sw.EMPTY}


def test_boxes_of_nnx_modules() -> None:
    """They were read as variables without names."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
            return nnx.bridge.to_linen(nnx.Linear, 64, 256, kernel_init=init, name="up")(x)

    with nnx.use_eager_sharding(False):
        boxed = jax.eval_shape(Model().init, jax.random.key(0), jnp.ones((8, 64)))
    values, axes = bridge.arrays(boxed), bridge.annotate(boxed, NAMES)
    assert axes["params"]["up"]["kernel"] == (sw.EMBED, sw.MLP_INTERMEDIATE)
    assert values["params"]["up"]["kernel"].shape == (64, 256)


def test_boxes_that_cannot_be_read() -> None:
    class Box(flax.struct.PyTreeNode, meta.AxisMetadata):  # type: ignore[misc, type-arg]
        value: Any

        def unbox(self) -> Any:
            return self.value

        def kept(self, *_: Any) -> Any:
            return self

        replace_boxed = add_axis = remove_axis = kept

    kernel = jnp.ones((8, 4))
    with raises(sw.StrategyError, "cannot", "read", path="kernel"):
        bridge.annotate({"kernel": Box(value=kernel)}, NAMES)  # type: ignore[call-arg]
    with raises(sw.RankMismatchError, 3, "embed", "mlp", 2, path="kernel", fix="TrainState"):
        bridge.annotate({"kernel": nn.Partitioned(kernel, ("embed", "mlp", None))}, NAMES)


def test_entries_of_several_names() -> None:
    kernel = jnp.ones((8, 4))
    for entry in (("embed", "mlp"), ["embed", "mlp"]):
        boxed = {"kernel": nn.Partitioned(kernel, (entry, None))}  # type: ignore[arg-type]
        axes = bridge.annotate(boxed, NAMES)
        assert axes["kernel"] == ((sw.EMBED, sw.MLP_INTERMEDIATE), sw.EMPTY)


@pytest.mark.parametrize("names", [None, {"mlp": None}, [("mlp", sw.EMBED)], {3: sw.EMBED}])
def test_names_that_are_no_mapping(names: Any) -> None:
    with raises(sw.StrategyError, path=..., fix="embed"):
        bridge.annotate({"kernel": jnp.ones((8, 4))}, names)


def test_a_preset_is_no_manager() -> None:
    with (
        raises(sw.StrategyError, "str", "PartitionManager", fix="sw.PartitionManager"),
        bridge.rules("fsdp_tp", NAMES),  # type: ignore[arg-type]
    ):
        pass


def test_other_names_retrace() -> None:
    """flax keeps its rules where JAX does not see them."""
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:4,tp:2"))
    run = jax.jit(lambda x: nn.with_logical_constraint(x * 2, ("a", "b")))
    x = jnp.ones((8, 8))
    batch = (sw.BATCH, "activation")
    with pm:
        assert run(x).sharding.spec == P()
    for names, spec in (
        ({"a": batch, "b": sw.EMPTY}, P("fsdp")),
        ({"a": sw.EMPTY, "b": batch}, P(None, "fsdp")),
    ):
        with bridge.rules(pm, names):
            assert run(x).sharding.spec == spec


def test_constraints_are_checked() -> None:
    """flax replicates both arrays."""
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:4,tp:2"))

    def constrain(*names: str | None) -> Any:
        return jax.jit(lambda x: nn.with_logical_constraint(x * 2, names))

    with bridge.rules(pm, NAMES):
        with raises(
            sw.UnknownAxisError,
            "activation_embd",
            path="array of shape (8, 4)",
            fix="activation_embed",
        ):
            constrain("batch", "activation_embd")(jnp.ones((8, 4)))
        with raises(
            sw.IndivisibleError,
            "batch",
            "fsdp=4",
            path="array of shape (3, 4)",
            size=3,
            fix="batch",
        ):
            constrain("batch", None)(jnp.ones((3, 4)))
    with nn.logical_axis_rules((("batch", "fsdp"),)), jax.set_mesh(pm.mesh):
        constrain("batch", "activation_embd")(jnp.ones((8, 4)))


def test_dims_left_to_the_compiler() -> None:
    """UNCONSTRAINED may be a name of a dim, and a rule: flax allows both."""
    left_open = P.UNCONSTRAINED
    preset = sw.Strategy.preset("fsdp_tp") | sw.Strategy(rules={"mlp_intermediate": "?"})
    pm = sw.PartitionManager(preset, mesh=sw.create_mesh("fsdp:4,tp:2"))
    names = {**NAMES, "mlp": (sw.HEAD, "param")}
    split = jax.NamedSharding(pm.mesh, P(None, "tp", None))
    x = jax.device_put(jnp.ones((8, 4, 4)), split)
    with bridge.rules(pm, names):
        for dims in (("batch", left_open, None), ("batch", "activation_mlp", None)):
            constrain = jax.jit(lambda x, dims=dims: nn.with_logical_constraint(x, dims))
            assert constrain(x).sharding.spec == P("fsdp", "tp")
    box = nn.LogicallyPartitioned(jnp.ones((32, 64)), ("embed", left_open))
    assert bridge.annotate({"w": box}, NAMES) == {"w": (sw.EMBED, sw.EMPTY)}


def test_place_shards_what_is_in_boxes() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:4,tp:2"))
    kernel = jax.random.normal(jax.random.key(0), (64, 256))
    placed = bridge.place({"kernel": nn.Partitioned(kernel, ("embed", "mlp"))}, pm, NAMES)
    assert placed["kernel"].sharding.spec == P("fsdp", "tp")
    np.testing.assert_array_equal(placed["kernel"], kernel)


def test_frozen_dicts_equal_dicts() -> None:
    """Older programs of flax freeze their variables."""
    freeze = flax.core.freeze
    params, axes = {"a": {"w": jnp.ones((32, 64))}}, {"a": {"w": (sw.EMBED, sw.MLP_INTERMEDIATE)}}
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:4,tp:2"))
    state = OPTIMIZER.init(params)
    for values, given in ((freeze(params), axes), (params, freeze(axes))):
        found = pm.shardings([values], [given])[0]
        assert type(found) is type(values)
        assert found["a"]["w"].spec == P("fsdp", "tp")
        moments = pm.state_shardings(state, values, given)[0].mu
        assert moments["a"]["w"] == found["a"]["w"]
    with raises(sw.StrategyError, "tree", path="a/w"):
        pm.shardings(freeze(params), {"a": {"b": axes["a"]["w"]}})


def _is_kernel(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 2, params)


def _labels(params: Any) -> Any:
    return jax.tree.map(lambda leaf: "train" if leaf.ndim > 2 else "freeze", params)


FACTORED = optax.adafactor(1e-3, min_dim_size_to_factor=8)
PARTS = {"train": optax.adamw(1e-3), "freeze": optax.set_to_zero()}
OPTIMIZERS = {
    "masked": optax.masked(optax.adamw(1e-3), _is_kernel),
    "masked factored": optax.masked(FACTORED, _is_kernel),
    "multi_transform": optax.multi_transform(PARTS, _labels),
    "sm3": optax.sm3(1e-3),
    "lbfgs": optax.scale_by_lbfgs(3),
}


def train(state: Any) -> list[float]:
    @jax.jit
    def step(state: Any) -> Any:
        def loss(params: Any) -> Any:
            return state.apply_fn({"params": params}, TOKENS[:, :-1]).var()

        value, gradient = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradient), value

    found = []
    for _ in range(3):
        state, value = step(state)
        found.append(float(value))
    return found


def test_states_of_every_kind_are_sharded_as_by_hand() -> None:
    """Masked leaves are boxes around nothing; other states have boxes around other dims."""
    params = jax.eval_shape(MODEL.init, jax.random.key(0), TOKENS[:, :-1])["params"]
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:4,tp:2"))
    for name, tx in OPTIMIZERS.items():
        state = TrainState(
            step=0,
            apply_fn=MODEL.apply,
            params=params,
            tx=tx,
            opt_state=jax.eval_shape(tx.init, params),
        )
        state, axes = bridge.arrays(state), bridge.annotate(state, NAMES)
        shardings = pm.shardings(state, axes)
        by_hand = pm.state_shardings(state.opt_state, state.params, axes.params)
        assert shardings.opt_state == by_hand, name


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_train_states_of_every_kind(name: str) -> None:
    """Masked leaves are boxes around nothing; other states have boxes around other dims."""

    def create(key: Any) -> Any:
        params = MODEL.init(key, TOKENS[:, :-1])["params"]
        return TrainState.create(apply_fn=MODEL.apply, params=params, tx=OPTIMIZERS[name])

    key = jax.random.key(0)
    shapes = jax.eval_shape(create, key)
    state, axes = bridge.arrays(shapes), bridge.annotate(shapes, NAMES)
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:4,tp:2"))
    shardings = pm.shardings(state, axes)
    assert shardings.opt_state == pm.state_shardings(state.opt_state, state.params, axes.params)
    with bridge.rules(pm, NAMES):
        created = jax.jit(lambda key: bridge.arrays(create(key)), out_shardings=shardings)(key)
        found = train(created)
    np.testing.assert_allclose(found, train(nn.meta.unbox(create(key))), rtol=1e-6)


def test_nn_unbox_of_moments_is_refused() -> None:
    """It places the constraint of a parameter on moments with other dims."""
    box = nn.LogicallyPartitioned(jnp.ones(32), ("embed", "mlp"))
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:4,tp:2"))
    with bridge.rules(pm, NAMES):
        with raises(
            sw.RankMismatchError,
            2,
            "embed",
            "mlp",
            1,
            path="array of shape (32,)",
            fix="interop.flax",
        ) as caught:
            jax.jit(nn.unbox)(box)
        assert "call interop.flax.arrays" in caught.value.fix
        assert bridge.arrays(box).shape == (32,)
        history = box.replace_boxed(jnp.ones((10, 32, 64)))
        with raises(
            sw.IndivisibleError,
            "embed",
            "fsdp=4",
            path="array of shape (10, 32, 64)",
            size=10,
            fix="interop.flax",
        ):
            jax.jit(nn.unbox)(history)


def test_rules_hold_for_the_given_size_alone() -> None:
    """A fallback for a size of 1 would replicate every array of the name."""
    preset = sw.Strategy.preset("fsdp_tp") | sw.Strategy(params={"embed": "fsdp | -"})
    pm = sw.PartitionManager(preset, mesh=sw.create_mesh("fsdp:4,tp:2"))
    constrain = jax.jit(lambda x: nn.with_logical_constraint(x * 2, ("embed", None)))
    with bridge.rules(pm, NAMES, sizes={"embed": 1}):
        assert constrain(jnp.ones((1, 4))).sharding.spec == P()
        assert constrain(jnp.ones((3, 4))).sharding.spec == P()
        with raises(
            sw.StrategyError, "embed", 1, path="array of shape (64, 4)", size=64, fix="embed"
        ):
            constrain(jnp.ones((64, 4)))
    with bridge.rules(pm, NAMES, sizes={"embed": 32}):
        assert constrain(jnp.ones((64, 4))).sharding.spec == P("fsdp")


def test_quantized_weights_in_a_box() -> None:
    """The values have the names of the box; a scale has those of the blocks that it belongs to."""
    names = ("embed", "mlp")
    parts = {"scale": jnp.ones((1, 64)), "value": jnp.ones((32, 64), jnp.int8)}
    box = nn.LogicallyPartitioned(parts, names)
    boxed = {"params": {"kernel": box}}
    values, axes = bridge.arrays(boxed), bridge.annotate(boxed, NAMES)
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:4,tp:2"))
    kernel = pm.shardings(values, axes)["params"]["kernel"]
    assert (kernel["value"].spec, kernel["scale"].spec) == (P("fsdp", "tp"), P(None, "tp"))
    packed = box.replace_boxed({**parts, "scale": jnp.ones((2, 3))})
    with raises(sw.RankMismatchError, "(2, 3)", "(32, 64)", path="params/kernel"):
        bridge.annotate({"params": {"kernel": packed}}, NAMES)
    for nothing in (None, optax.MaskedNode(), {}):
        boxed = {"a": box.replace_boxed(nothing), "b": box}
        axes = bridge.annotate(boxed, NAMES)
        assert axes["a"] == nothing
        shardings = pm.shardings(bridge.arrays(boxed), axes)
        assert "a" not in shardings or not jax.tree.leaves(shardings["a"])


@pytest.mark.full
def test_factored_moments_of_a_train_state() -> None:
    """flax copies the boxes of parameters to moments with fewer dims."""

    def create() -> Any:
        params = MODEL.init(jax.random.key(0), TOKENS[:, :-1])["params"]
        return TrainState.create(apply_fn=MODEL.apply, params=params, tx=FACTORED)

    expected = train(nn.meta.unbox(create()))
    values, axes = bridge.arrays(create()), bridge.annotate(create(), NAMES)
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:4,tp:2"))
    state = jax.device_put(values, pm.shardings(values, axes))
    moments, name = state.opt_state[0], "Dense_0"
    up = [getattr(moments, field)["ScanBlock_0"][name]["kernel"] for field in ("v_row", "v_col")]
    assert [each.shape for each in up] == [(2, 32), (2, 64)]
    assert [each.sharding.spec for each in up] == [P(None, "fsdp"), P(None, "tp")]
    placeholder = moments.v_row["ScanBlock_0"]["LayerNorm_0"]["scale"]
    assert placeholder.sharding.spec == P()
    with bridge.rules(pm, NAMES):
        np.testing.assert_allclose(train(state), expected, rtol=1e-6)
    with raises(
        sw.RankMismatchError,
        2,
        "vocab",
        "embed",
        1,
        path="0/v_row/Embed_0/embedding",
        fix="TrainState",
    ):
        bridge.annotate(create().opt_state, NAMES)
