"""An nnx model in flax's idiom follows a strategy; its source knows nothing of this package."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.interop import nnx as bridge
from tests.raising import raises

nnx = pytest.importorskip("flax.nnx")

NAMES = {
    "vocab": (sw.VOCAB, "param"),
    "embed": (sw.EMBED, "param"),
    "mlp": (sw.MLP_INTERMEDIATE, "param"),
    "heads": (sw.HEAD, "param"),
    "kv": (sw.HEAD_DIM, "param"),
    "layers": (sw.LAYERS, "param"),
}
MESHES = ("fsdp:8", "fsdp:4,tp:2", "dp:2,tp:4")
TOKENS = np.asarray(np.random.default_rng(0).integers(0, 64, (8, 16)))


def kernel(*names: str) -> Any:
    return nnx.with_partitioning(nnx.initializers.lecun_uniform(), names)


class Adapter(nnx.Variable):
    """Variables that a model trains beside frozen parameters."""


class Block(nnx.Module):
    """Attention and MLP, as models of nnx write them."""

    def __init__(self, rngs: Any) -> None:
        attention, general = kernel("embed", "heads", "kv"), nnx.LinearGeneral
        self.q, self.k, self.v = (
            general(32, (4, 8), kernel_init=attention, use_bias=False, rngs=rngs) for _ in range(3)
        )
        out = kernel("heads", "kv", "embed")
        self.out = general((4, 8), 32, axis=(-2, -1), kernel_init=out, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(32, 64, kernel_init=kernel("embed", "mlp"), use_bias=False, rngs=rngs)
        self.down = nnx.Linear(
            64, 32, kernel_init=kernel("mlp", "embed"), use_bias=False, rngs=rngs
        )
        self.norm = nnx.LayerNorm(32, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        hidden = self.norm(x)
        mixed = nnx.dot_product_attention(self.q(hidden), self.k(hidden), self.v(hidden))
        x = x + self.out(mixed)
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.table = nnx.Embed(64, 32, embedding_init=kernel("vocab", "embed"), rngs=rngs)

        @nnx.split_rngs(splits=2)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def blocks(rngs: Any) -> Any:
            return Block(rngs)

        self.blocks = blocks(rngs)

    def __call__(self, tokens: Any) -> Any:
        @nnx.scan(
            in_axes=(0, nnx.Carry),
            out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )
        def apply(block: Any, x: Any) -> Any:
            return block(x)

        return self.table.attend(apply(self.blocks, self.table(tokens)))


def elsewhere() -> Any:
    """Return a model that is created without a manager."""
    with nnx.use_eager_sharding(False):
        return nnx.jit(lambda: Model(nnx.Rngs(0)))()


def losses(model: Any) -> list[float]:
    with nnx.use_eager_sharding(False):
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, tokens: Any) -> Any:
        def loss(model: Any) -> Any:
            logits = model(tokens[:, :-1]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value

    return [float(step(model, optimizer, TOKENS)) for _ in range(20)]


def manager(mesh: str, **options: Any) -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh(mesh, **options))


@pytest.mark.full
def test_training_equals_unsharded() -> None:
    expected = losses(elsewhere())
    assert expected[-1] < expected[0] - 0.1
    for mesh in MESHES:
        pm, model = manager(mesh), elsewhere()
        bridge.place(model, pm, NAMES)
        with bridge.bound(pm, NAMES):
            found = losses(model)
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=mesh)


def linear() -> Any:
    return nnx.Linear(32, 64, kernel_init=kernel("embed", "mlp"), rngs=nnx.Rngs(0))


@pytest.mark.full(but=["fsdp:4,tp:2"])
@pytest.mark.parametrize("mesh", MESHES)
def test_variables_are_created_sharded(mesh: str) -> None:
    pm = manager(mesh)
    with bridge.bound(pm, NAMES):
        models = [linear(), nnx.jit(linear)()]
    values, axes = bridge.arrays(models[0]), bridge.annotate(models[0], NAMES)
    expected = pm.shardings(values, axes)
    for model in models:
        found = jax.tree.map(lambda leaf: leaf.sharding, nnx.state(model))
        triples = zip(*map(jax.tree.leaves, (found, expected, values)), strict=True)
        for one, other, value in triples:
            assert one.shard_shape(value.shape) == other.shard_shape(value.shape)


def test_explicit_mesh() -> None:
    pm = manager("fsdp:4,tp:2", axis_types="explicit")
    with bridge.bound(pm, NAMES):
        model = linear()
    assert jax.typeof(model.kernel.get_value()).sharding.spec == P("fsdp", "tp")
    mixed = sw.create_mesh("fsdp:4,tp:2", axis_types={"fsdp": "explicit", "tp": "auto"})
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mixed)
    refused = raises(sw.StrategyError, "mesh", "axes", fix="axis_types")
    with refused, bridge.bound(pm, NAMES):
        pass


def test_annotations_of_a_model() -> None:
    model = elsewhere()
    values, axes = bridge.arrays(model), bridge.annotate(model, NAMES)
    assert axes["table"]["embedding"] == (sw.VOCAB, sw.EMBED)
    assert axes["blocks"]["q"]["kernel"] == (sw.LAYERS, sw.EMBED, sw.HEAD, sw.HEAD_DIM)
    assert axes["blocks"]["norm"]["scale"] == (sw.EMPTY, sw.EMPTY)
    with nnx.use_eager_sharding(False):
        abstract = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    shapes, same = bridge.arrays(nnx.state(abstract)), bridge.annotate(nnx.state(abstract), NAMES)
    assert jax.tree.leaves(same) == jax.tree.leaves(axes)
    assert shapes["table"]["embedding"].shape == values["table"]["embedding"].shape
    nnx.update(model, values)
    assert bridge.annotate(model, NAMES) == axes


def test_an_optimizer_is_placed_like_its_model() -> None:
    with nnx.use_eager_sharding(False):
        model = linear()
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    assert bridge.place(optimizer, manager("fsdp:4,tp:2"), NAMES) is optimizer
    moments = optimizer.opt_state[0].mu
    assert moments["kernel"].get_value().sharding.spec == P("fsdp", "tp")
    assert moments["bias"].get_value().sharding.spec == P()


def test_metadata_of_every_version() -> None:
    mesh = jax.sharding.AbstractMesh((1, 1), ("embed", "mlp"))
    values: dict[str, Any] = {
        "out_sharding": P("embed", "mlp"),
        "sharding_names": ("embed", "mlp"),
        "sharding": ("embed", "mlp"),
        "named": jax.sharding.NamedSharding(mesh, P("embed", "mlp")),
        "composite": (("embed", "mlp"), None),
        "none": None,
    }
    found = {}
    for key, value in values.items():
        with nnx.use_eager_sharding(False):
            variable = nnx.Param(jnp.ones((2, 2)))
        # Keys of older versions, which flax would rename if they were set.
        name = key if key.startswith(("out", "sharding")) else "out_sharding"
        variable._var_metadata[name] = value
        given = {} if value is None else NAMES
        found[key] = bridge.annotate(nnx.State({"w": variable}), given)["w"]
    plain = (sw.EMBED, sw.MLP_INTERMEDIATE)
    assert found.pop("composite") == (plain, sw.EMPTY)
    assert found.pop("none") == (sw.EMPTY, sw.EMPTY)
    assert {*found.values()} == {plain}


def test_names_that_are_missing() -> None:
    names = {name: target for name, target in NAMES.items() if name not in ("mlp", "kv")}
    with pytest.raises(sw.UnknownAxisError) as caught:
        bridge.annotate(elsewhere(), names)
    assert len(caught.value.problems) == 2
    text = str(caught.value)
    assert "the name 'mlp' is not in names; 2 arrays have it" in text
    assert "such as 'mlp': (sw.MLP_INTERMEDIATE, 'param')" in text
    assert "the name 'kv' is not in names; 4 arrays have it" in text
    assert "as 'kv': (axis, role); axes are sw.BATCH, sw.LENGTH" in text
    assert str(caught.value.problems[0]).startswith("blocks/down/kernel: the name 'mlp' is not in")


@pytest.mark.full
def test_two_dims_with_one_mesh_axis() -> None:
    """JAX raises the error. It has a note that names the rules."""
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:4,tp:2"))
    names = {"mlp": (sw.MLP_INTERMEDIATE, "param"), "classes": (sw.VOCAB, "param")}
    init = nnx.with_partitioning(nnx.initializers.ones, ("mlp", "classes"))
    fails = pytest.raises(Exception, match="duplicate entries for `tp`")
    with fails as caught, bridge.bound(pm, names):
        nnx.Linear(8, 4, kernel_init=init, rngs=nnx.Rngs(0))
    (note,) = caught.value.__notes__
    assert "mlp = tp, classes = tp. Map one of the names" in note
    with bridge.bound(pm, {**names, "classes": sw.EMPTY}):
        model = nnx.Linear(8, 4, kernel_init=init, rngs=nnx.Rngs(0))
    assert tuple(model.kernel.get_value().sharding.spec) == ("tp", None)


def test_a_rule_with_a_fallback_needs_a_size() -> None:
    strategy = sw.Strategy(mesh={"tp": 8}, rules={"head": "tp | -"})
    pm = sw.PartitionManager(strategy, mesh=sw.create_mesh("tp:8"))
    names = {"heads": (sw.HEAD, "param")}
    needs_size = raises(sw.ShapeRequiredError, "heads", fix="heads")
    with needs_size, bridge.bound(pm, names):
        pass
    for size, spec in ((8, P("tp")), (4, P())):
        with bridge.bound(pm, names, sizes={"heads": size}):
            init = nnx.with_partitioning(nnx.initializers.ones, ("heads",))
            variable = nnx.Param(init(jax.random.key(0), (size,)))
        assert variable.get_value().sharding.is_equivalent_to(jax.NamedSharding(pm.mesh, spec), 1)


@pytest.mark.full(but=["jit"])
@pytest.mark.parametrize("how", ["eager", "jit", "vmap"])
def test_bound_refuses_a_size_that_does_not_divide(how: str) -> None:
    """In jit and vmap, nnx alone replicates the dim without a message."""
    pm = manager("fsdp:1,tp:8")
    init = kernel("embed", "heads")

    def create(rngs: Any) -> Any:
        return nnx.Linear(16, 4, kernel_init=init, use_bias=False, rngs=rngs)

    @nnx.split_rngs(splits=2)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
    def stacked(rngs: Any) -> Any:
        return create(rngs)

    run = {"eager": create, "jit": nnx.jit(create), "vmap": stacked}[how]
    refused = raises(sw.IndivisibleError, "tp=8", size=4, fix="tp | -")
    with refused as caught, bridge.bound(pm, NAMES):
        run(nnx.Rngs(0))
    assert 'rule  head = "tp"' in str(caught.value)
    assert caught.value.dim == 1


def test_bound_refuses_a_size_other_than_the_given_one() -> None:
    strategy = sw.Strategy(mesh={"tp": 8}, rules={"head": "tp | -"})
    pm = sw.PartitionManager(strategy, mesh=sw.create_mesh("tp:8"))
    init = nnx.with_partitioning(nnx.initializers.ones, ("heads",))
    names = {"heads": (sw.HEAD, "param")}
    refused = raises(
        sw.IndivisibleError, "heads", "tp=8", path="variable (4,)", size=4, fix="heads"
    )
    with refused, bridge.bound(pm, names, sizes={"heads": 8}):
        nnx.Param(init(jax.random.key(0), (4,)))


def test_bound_refuses_names_that_are_missing() -> None:
    refused = raises(sw.UnknownAxisError, "mlp", path="variable (32, 64)", fix="mlp")
    with refused, bridge.bound(manager("fsdp:4,tp:2"), {"embed": (sw.EMBED, "param")}):
        linear()


@pytest.mark.full
def test_flax_is_unchanged_outside_bound() -> None:
    from flax.core import spmd

    with bridge.bound(manager("fsdp:4,tp:2"), NAMES):
        wrapped = spmd.shard_value
        with bridge.bound(manager("fsdp:8"), NAMES):
            assert spmd.shard_value is wrapped
    rules, mesh = (("embed", "fsdp"), ("mlp", "tp")), sw.create_mesh("fsdp:4,tp:2")
    with jax.set_mesh(mesh), spmd.logical_axis_rules(rules):
        assert linear().kernel.get_value().sharding.spec == P("fsdp", "tp")
        # Sizes that do not divide are not checked here.
        init = kernel("embed", "mlp")
        nnx.jit(lambda: nnx.Linear(3, 5, kernel_init=init, rngs=nnx.Rngs(0)))()


def test_a_model_without_names_is_refused() -> None:
    pm, model = manager("fsdp:8"), nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    for call in (bridge.annotate, lambda model, names: bridge.place(model, pm, names)):
        with raises(sw.StrategyError, "model", fix="model") as caught:
            call(model, NAMES)
        assert "nnx.with_partitioning" in caught.value.fix
    assert {*jax.tree.leaves(bridge.annotate(model, {}))} == {sw.EMPTY}


def projection(rngs: Any) -> Any:
    return nnx.Linear(64, 256, kernel_init=kernel("embed", "mlp"), use_bias=False, rngs=rngs)


@pytest.mark.full
def test_bound_shards_also_without_eager_sharding() -> None:
    with nnx.use_eager_sharding(False), bridge.bound(manager("fsdp:4,tp:2"), NAMES):
        created = projection(nnx.Rngs(0))
    assert created.kernel.get_value().sharding.spec == P("fsdp", "tp")


def test_other_names_retrace() -> None:
    create = nnx.jit(lambda: projection(nnx.Rngs(0)))
    swapped = {**NAMES, "embed": NAMES["mlp"], "mlp": NAMES["embed"]}
    for names, spec in ((NAMES, P("fsdp", "tp")), (swapped, P("tp", "fsdp"))):
        with bridge.bound(manager("fsdp:4,tp:2"), names):
            assert create().kernel.get_value().sharding.spec == spec


def test_names_for_fewer_dims_are_refused() -> None:
    """Without a name for the new dim, the names were those of the wrong dims."""

    @nnx.split_rngs(splits=4)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stack(rngs: Any) -> Any:
        return projection(rngs)

    with nnx.use_eager_sharding(False):
        stacked = stack(nnx.Rngs(0))
    for read in (
        bridge.annotate,
        lambda model, names: bridge.place(model, manager("fsdp:4,tp:2"), names),
    ):
        with raises(
            sw.RankMismatchError, "embed", "mlp", 3, path="kernel", fix=("None", "nnx.vmap")
        ):
            read(stacked, NAMES)


FACTORED = optax.adafactor(1e-3, min_dim_size_to_factor=8)


def factored() -> tuple[Any, Any]:
    """Return a model and its optimizer, both unsharded."""
    with nnx.use_eager_sharding(False):
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, FACTORED, wrt=nnx.Param)


def factored_losses(model: Any, optimizer: Any) -> list[float]:
    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        loss, gradient = nnx.value_and_grad(lambda model: model(TOKENS).var())(model)
        optimizer.update(model, gradient)
        return loss

    return [float(step(model, optimizer)) for _ in range(3)]


@pytest.mark.full
def test_factored_moments() -> None:
    """The moments of a kernel have one of its dims; those of a vector are placeholders."""
    expected = factored_losses(*factored())
    model, optimizer = factored()
    pm = manager("fsdp:4,tp:2")
    bridge.place(model, pm, NAMES)
    assert bridge.place(optimizer, pm, NAMES, params=model) is optimizer
    moments = optimizer.opt_state[0]
    up = [getattr(moments, field)["blocks"]["up"]["kernel"] for field in ("v_row", "v_col", "v")]
    assert [each.get_value().shape for each in up] == [(2, 32), (2, 64), (1,)]
    specs = [each.get_value().sharding.spec for each in up]
    assert specs == [P(None, "fsdp"), P(None, "tp"), P()]
    with pm:
        found = factored_losses(model, optimizer)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_factored_moments_of_other_variables() -> None:
    """An optimizer of `wrt` has no moments of the other variables of its model."""

    class Adapted(nnx.Module):
        def __init__(self) -> None:
            self.kernel = nnx.Param(jnp.ones((32, 64)), out_sharding=("embed", "mlp"))
            self.adapter = Adapter(jnp.ones((32, 64)), out_sharding=("embed", "mlp"))

    with nnx.use_eager_sharding(False):
        model = Adapted()
        optimizer = nnx.Optimizer(model, FACTORED, wrt=Adapter)
    bridge.place(optimizer, manager("fsdp:4,tp:2"), NAMES, params=model)
    moments = optimizer.opt_state[0]
    found = [getattr(moments, field)["adapter"] for field in ("v_row", "v_col")]
    specs = [each.get_value().sharding.spec for each in found]
    assert specs == [P("fsdp"), P("tp")]


def test_scalar_with_names() -> None:
    """Names of a scalar are refused. The axes of `layers` are those of its parameter."""
    axes = (sw.EMBED, sw.MLP_INTERMEDIATE)
    with nnx.use_eager_sharding(False):
        named = nnx.Param(jnp.zeros(()), out_sharding=("embed", "mlp"))
        own = nnx.Param(jnp.zeros(()), axes=axes)
    assert bridge.annotate(nnx.State({"count": own}), NAMES)["count"] == ()
    with raises(sw.RankMismatchError, "embed", "mlp", 0, path="count", fix="params") as caught:
        bridge.annotate(nnx.State({"count": named}), NAMES)
    assert caught.value.path == "count"


def test_masked_parameters() -> None:
    """A variable of a frozen parameter holds nothing; a scale follows its values."""
    frozen = optax.masked(optax.adamw(1e-3), lambda p: jax.tree.map(lambda x: x.ndim > 2, p))
    with nnx.use_eager_sharding(False):
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, frozen, wrt=nnx.Param)
    pm = manager("fsdp:4,tp:2")
    bridge.place(model, pm, NAMES)
    bridge.place(optimizer, pm, NAMES)
    moments = optimizer.opt_state.inner_state[0].mu
    assert (
        moments["blocks"]["up"]["kernel"].get_value().sharding
        == model.blocks.up.kernel.get_value().sharding
    )
    assert isinstance(moments["table"]["embedding"].get_value(), optax.MaskedNode)
    parts = {"scale": jnp.ones((1, 64)), "value": jnp.ones((32, 64))}
    with nnx.use_eager_sharding(False):
        own = nnx.Param(parts, out_sharding=("embed", "mlp"))
    state = nnx.State({"a": nnx.Param(None), "b": own})
    values, axes = bridge.arrays(state), bridge.annotate(state, NAMES)
    placed = pm.shardings(values, axes)["b"]
    assert (placed["value"].spec, placed["scale"].spec) == (P("fsdp", "tp"), P(None, "tp"))


@pytest.mark.full
def test_bound_holds_for_the_given_size_alone() -> None:
    preset = sw.Strategy.preset("fsdp_tp") | sw.Strategy(params={"embed": "fsdp | -"})
    pm = sw.PartitionManager(preset, mesh=sw.create_mesh("fsdp:4,tp:2"))
    with (
        bridge.bound(pm, NAMES, sizes={"embed": 1}),
        raises(sw.StrategyError, "embed", 1, path="variable (64, 256)", size=64, fix="embed"),
    ):
        projection(nnx.Rngs(0))


def test_factored_moments_need_the_model() -> None:
    model, optimizer = factored()
    pm = manager("fsdp:4,tp:2")
    with raises(sw.StrategyError, "optimizer", fix="model"):
        bridge.place(optimizer, pm, NAMES)
    with raises(
        sw.RankMismatchError,
        "layers",
        "mlp",
        "embed",
        1,
        path="opt_state/0/v/blocks/down/kernel",
        fix=("None", "params"),
    ):
        bridge.annotate(nnx.state(optimizer), NAMES)
    with bridge.bound(pm, NAMES):
        model = projection(nnx.Rngs(0))
        with raises(
            sw.RankMismatchError,
            "embed",
            "mlp",
            1,
            path="variable (64,)",
            fix=("model", "nnx.use_eager_sharding"),
        ):
            nnx.Optimizer(model, FACTORED, wrt=nnx.Param)


def test_rules_of_a_variable() -> None:
    init = nnx.with_partitioning(
        nnx.initializers.lecun_normal(),
        ("in", "out"),
        sharding_rules=(("in", "fsdp"), ("out", None)),
    )
    with bridge.bound(manager("fsdp:4,tp:2"), NAMES):
        created = nnx.Linear(64, 256, kernel_init=init, use_bias=False, rngs=nnx.Rngs(0))
    assert created.kernel.get_value().sharding.spec == P("fsdp", None)
