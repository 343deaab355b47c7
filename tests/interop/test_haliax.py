"""A model in haliax's idiom follows a strategy; its source knows nothing of this package."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright as sw
from shardwright.interop import haliax as bridge
from tests.raising import facts, raises

hax = pytest.importorskip("haliax")
eqx = pytest.importorskip("equinox")

MESHES = ("fsdp:8", "fsdp:4,tp:2", "dp:2,tp:4")
Batch, Position, KeyPosition = hax.make_axes(batch=8, position=16, key_position=16)
Embed, Heads, HeadSize, Mlp, Vocab = hax.make_axes(embed=32, heads=4, head_size=8, mlp=64, vocab=64)
Layers = hax.Axis("layers", 2)
TOKENS = np.asarray(np.random.default_rng(0).integers(0, 64, (8, 16)))
OPTIMIZER = optax.adamw(1e-3)
traces = []
multiplies = pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="matmuls of haliax 1.4.dev453 need JAX 0.10"
)


class Block(eqx.Module):
    """Attention and MLP by named axes, as models of haliax write them."""

    q: Any
    k: Any
    v: Any
    out: Any
    mlp: Any
    norm: Any

    @staticmethod
    def init(*, key: Any) -> Any:
        keys = jax.random.split(key, 5)
        linear = functools.partial(hax.nn.Linear.init, use_bias=False)
        q, k, v = (linear(Embed, (Heads, HeadSize), key=key) for key in keys[:3])
        out = linear((Heads, HeadSize), Embed, key=keys[3])
        mlp = hax.nn.MLP.init(Embed, Embed, Mlp, 1, activation=hax.nn.gelu, key=keys[4])
        return Block(q, k, v, out, mlp, hax.nn.RmsNorm.init(Embed, use_bias=False))

    def __call__(self, x: Any) -> Any:
        hidden = self.norm(x)
        k, v = (each(hidden).rename({"position": "key_position"}) for each in (self.k, self.v))
        mixed = hax.nn.attention.dot_product_attention(KeyPosition, HeadSize, self.q(hidden), k, v)
        x = hax.auto_sharded(x + self.out(mixed))
        return x + self.mlp(self.norm(x))


class Model(eqx.Module):
    embedding: Any
    blocks: Any

    @staticmethod
    def init(*, key: Any) -> Any:
        first, second = jax.random.split(key)
        blocks = hax.nn.Stacked.init(Layers, Block, gradient_checkpointing=False)
        table = hax.nn.Embedding.init(Vocab, Embed, key=first)
        return Model(table, blocks(key=jax.random.split(second, 2)))

    def __call__(self, tokens: Any) -> Any:
        traces.append(1)
        x = self.blocks.fold(hax.auto_sharded(self.embedding(tokens)))
        return self.embedding.unembed(x)


@functools.cache
def model() -> Any:
    return eqx.filter_jit(Model.init)(key=jax.random.key(0))


@eqx.filter_jit
def step(model: Any, state: Any, tokens: Any) -> Any:
    def loss(model: Any) -> Any:
        logits = model(hax.named(tokens, (Batch, Position))).array[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, gradient = eqx.filter_value_and_grad(loss)(model)
    updates, state = OPTIMIZER.update(gradient, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, value


def losses(model: Any) -> list[float]:
    state, found = OPTIMIZER.init(eqx.filter(model, eqx.is_array)), []
    for _ in range(20):
        model, state, value = step(model, state, TOKENS)
        found.append(float(value))
    return found


@functools.cache
def unsharded() -> list[float]:
    return losses(model())


def manager(mesh: str) -> Any:
    return sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh(mesh))


@multiplies
@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
def test_training_equals_unsharded(mesh: str) -> None:
    expected = unsharded()
    assert expected[-1] < expected[0] - 0.1
    pm = manager(mesh)
    placed = bridge.place(model(), pm)
    leaves = jax.tree.leaves(eqx.filter(placed, eqx.is_array))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert held < 0.6 * sum(leaf.nbytes for leaf in leaves)
    with bridge.rules(pm, sizes={"kv_head": 4}):
        found = losses(placed)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.full
def test_annotations_of_named_arrays() -> None:
    values, axes = bridge.arrays(model()), bridge.annotate(model())
    block = axes.blocks.stacked
    assert block.q.weight.array == (sw.LAYERS, sw.HEAD, sw.HEAD_DIM, sw.EMBED)
    assert block.mlp.layers[0].weight.array == (sw.LAYERS, sw.MLP_INTERMEDIATE, sw.EMBED)
    assert axes.embedding.weight.array == (sw.VOCAB, sw.EMBED)
    shapes = eqx.filter_eval_shape(lambda: Model.init(key=jax.random.key(0)))
    assert jax.tree.leaves(bridge.annotate(shapes)) == jax.tree.leaves(axes)
    assert jax.tree.structure(values) == jax.tree.structure(eqx.filter(model(), eqx.is_array))


def test_shardings_equal_those_of_haliax() -> None:
    values, axes = bridge.arrays(model()), bridge.annotate(model())
    sizes = bridge.sizes_of(model()) | {"kv_head": 4}
    for mesh in MESHES:
        pm = manager(mesh)
        own = jax.tree.leaves(pm.shardings(values, axes))
        mapping = bridge.mappings(pm, sizes=sizes).parameter
        specs = hax.partitioning.pspec_for(values, mapping, preserve_existing_shardings=False)
        theirs = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, jax.P))
        for one, other, value in zip(own, theirs, jax.tree.leaves(values), strict=True):
            sharding = jax.NamedSharding(pm.mesh, other)
            assert one.is_equivalent_to(sharding, value.ndim), (mesh, one.spec, other)


@multiplies
def test_constraints_follow_the_strategy() -> None:
    def up(linear: Any, x: Any) -> Any:
        traces.append(1)
        return hax.auto_sharded(linear(x))

    run = eqx.filter_jit(up)
    linear = hax.nn.Linear.init(Embed, Mlp, key=jax.random.key(0))
    x = hax.ones((Batch, Embed))
    before = len(traces)
    for mesh, count, spec in (
        ("fsdp:4,tp:2", 1, jax.P("fsdp", "tp")),
        ("fsdp:4,tp:2", 1, jax.P("fsdp", "tp")),
        ("dp:2,tp:4", 2, jax.P("dp", "tp")),
    ):
        with bridge.rules(manager(mesh), sizes={"kv_head": 4}):
            y = run(linear, x)
        assert len(traces) - before == count
        assert y.array.sharding.spec == spec


@multiplies
def test_other_names_retrace() -> None:
    run = eqx.filter_jit(lambda x: hax.auto_sharded(x * 2))
    x = hax.ones((Batch, Embed))
    for axis, spec in ((sw.BATCH, jax.P("fsdp")), (sw.EMPTY, jax.P())):
        with bridge.rules(manager("fsdp:4,tp:2"), {"batch": axis, "embed": sw.EMPTY}):
            assert run(x).array.sharding.spec == spec


def test_arguments_that_do_not_fit() -> None:
    mesh = sw.create_mesh("fsdp:4,tp:2", axis_types="explicit")
    explicit = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh)
    with (
        raises(sw.StrategyError, "mesh", fix="axis_types"),
        bridge.rules(explicit, sizes={"kv_head": 8}),
    ):
        pass
    wrong: Any = [("embed", "data")]
    with raises(sw.StrategyError, "list", fix="embed"):
        bridge.to_strategy(wrong, mesh={"data": 8})
    names: Any = {"embed": (sw.EMBED, "param")}
    with raises(sw.StrategyError, "embed", "role", fix="embed"):
        bridge.to_strategy({"embed": "data"}, mesh={"data": 8}, names=names)
    with raises(sw.StrategyError, "model", fix="model"):
        bridge.annotate({"weight": jnp.ones((4, 4))})
    with raises(sw.StrategyError, "str", "PartitionManager", fix="sw.PartitionManager"):
        bridge.place(model(), "fsdp_tp")  # type: ignore[arg-type]
    imported = bridge.to_strategy({"a b": "data"}, mesh={"data": 8})
    assert [*imported.strategy.axes] == ["logical_a_b"]


def test_names_that_are_missing() -> None:
    names = {name: axis for name, axis in bridge.NAMES.items() if name not in ("mlp", "layers")}
    with pytest.raises(sw.UnknownAxisError) as caught:
        bridge.annotate(model(), names)
    text = str(caught.value)
    assert "blocks/stacked/q/weight: the name 'layers' is not in names; 9 arrays have it" in text
    assert "the name 'mlp' is not in names" in text


def test_other_values_stay() -> None:
    placed = bridge.place(model(), manager("fsdp:8"))
    assert jax.tree.structure(placed) == jax.tree.structure(model())
    mlp = placed.blocks.stacked.mlp
    assert mlp.activation is model().blocks.stacked.mlp.activation


def test_masked_arrays_have_no_annotation() -> None:
    """optax puts an empty node into the `NamedArray` of a frozen parameter."""
    arrays = eqx.filter(model(), eqx.is_array)
    frozen = optax.masked(optax.adamw(1e-3), lambda p: jax.tree.map(lambda x: x.ndim > 2, p))
    state = frozen.init(arrays)
    pm = manager("fsdp:8")
    placed = bridge.place(state, pm)
    assert jax.tree.structure(placed) == jax.tree.structure(state)
    moments, params = placed.inner_state[0].mu, bridge.place(model(), pm)
    assert isinstance(moments.embedding.weight.array, optax.MaskedNode)
    sharding = moments.blocks.stacked.q.weight.array.sharding
    assert sharding == params.blocks.stacked.q.weight.array.sharding
    assert not sharding.is_fully_replicated


def test_arrays_with_names_in_their_field() -> None:
    class Scale(eqx.Module):
        scale: Any = hax.field(axis_names=("embed",))
        count: Any = None

    axes = bridge.annotate(Scale(jnp.ones(32), jnp.ones((2, 2))))
    assert axes.scale == (sw.EMBED,)
    assert axes.count == (sw.EMPTY, sw.EMPTY)
    with raises(sw.RankMismatchError, "axis_names", 1, 2, path="scale"):
        bridge.annotate(Scale(jnp.ones((2, 32))))


def test_a_rule_with_a_fallback_needs_a_size() -> None:
    pm = manager("dp:2,tp:4")
    with raises(sw.ShapeRequiredError, "kv_head", fix="kv_head"):
        bridge.mappings(pm)
    for size, expected in ((4, "tp"), (3, None)):
        found = bridge.mappings(pm, sizes={"kv_head": size})
        assert found.compute.get("kv_head") == found.parameter.get("kv_head") == expected
    both = (hax.ones(Embed), hax.ones(hax.Axis("embed", 8)))
    with raises(sw.StrategyError, "embed", 32, 8, path="1"):
        bridge.sizes_of(both)


def test_names_of_one_role() -> None:
    names = {"batch": (sw.BATCH, "activation"), "embed": sw.EMBED}
    found = bridge.mappings(manager("fsdp:8"), names)
    assert found.compute == {"batch": "fsdp"}
    assert found.parameter == {"embed": "fsdp"}


MAPPINGS = (
    ({"batch": "data"}, {"embed": "data"}),
    ({"batch": ("replica", "data"), "heads": "model"}, {"embed": "data", "heads": "model"}),
    ({"batch": ("replica", "data"), "mlp": "model", "vocab": "model"}, None),
)


@pytest.mark.parametrize("names", [None, {"batch": sw.BATCH, "embed": sw.EMBED}])
def test_strategies_of_mappings_equal_haliax(names: Any) -> None:
    sizes = {"replica": 1, "data": 4, "model": 2}
    every = ("batch", "embed", "heads", "mlp", "vocab")
    axes = {axis.name: axis for axis in (Batch, Embed, Heads, Mlp, Vocab)}
    compared = 0
    for compute, parameter in MAPPINGS:
        imported = bridge.to_strategy(compute, parameter, mesh=sizes, names=names, replicated=every)
        # The note is written only if names of our vocabulary are beside the new axes.
        assert any("axes of their own" in note for note in imported.notes) == bool(names)
        pm = sw.PartitionManager(imported.strategy, mesh=sw.create_mesh(sizes))
        for role, mapping in (("activation", compute), ("param", parameter or compute)):
            for dims in itertools.permutations(every, 3):
                spec = hax.partitioning.pspec_for_axis([axes[name] for name in dims], mapping)
                shape = tuple(axes[name].size for name in dims)
                flat = [axis for entry in spec for axis in np.atleast_1d(entry) if entry]
                annotation = imported.annotation(dims)
                if len({*flat}) < len(flat):
                    with pytest.raises(sw.ShardingError):
                        pm.sharding(*annotation, role=role, shape=shape)
                else:
                    own = pm.sharding(*annotation, role=role, shape=shape)
                    assert own.is_equivalent_to(jax.NamedSharding(pm.mesh, spec), 3), dims
                compared += 1
    assert compared == 360


def test_mappings_that_cannot_be_read() -> None:
    with raises(
        sw.MissingMeshAxisError, "embed as param", "fsdp", path="parameter['embed']", fix="data"
    ):
        bridge.to_strategy({"batch": "data"}, {"embed": "fsdp"}, mesh={"data": 8})
    imported = bridge.to_strategy({"batch": "data"}, mesh={"data": 8})
    with raises(sw.UnknownAxisError, "embed", "rule"):
        imported.annotation(("batch", "embed"))
    names = {"embed": sw.EMBED, "embed2": sw.EMBED}
    with raises(
        sw.StrategyError,
        facts("embed2", "-", "data", "embed", path="compute['embed2']"),
        facts("embed2", "-", "data", "embed", path="parameter['embed2']"),
    ):
        bridge.to_strategy({"embed": "data"}, mesh={"data": 8}, names=names, replicated=["embed2"])


def test_arrays_are_checked() -> None:
    """haliax alone replicates a misspelled name, and pads a size that does not divide."""

    def constrained(**sizes: int) -> Any:
        x = hax.ones(hax.make_axes(**sizes))
        return eqx.filter_jit(lambda x: hax.shard(x * 2))(x)

    pm = manager("fsdp:4,tp:2")
    with bridge.rules(pm, sizes={"kv_head": 2}):
        assert constrained(batch=8, embed=4).array.sharding.spec == jax.P("fsdp")
        with raises(
            sw.UnknownAxisError, "embedd", path="array with the axes batch, embedd", fix="embed"
        ):
            constrained(batch=8, embedd=4)
        with raises(
            sw.IndivisibleError,
            "batch",
            "fsdp=4",
            path="array with the axes batch, embed",
            size=6,
            fix="batch",
        ):
            constrained(batch=6, embed=4)
        with hax.axis_mapping({"rows": "tp"}):
            assert constrained(rows=8, embedd=4).array.sharding.spec == jax.P("tp")
    with bridge.rules(pm, {**bridge.NAMES, "embedd": sw.EMPTY}, sizes={"kv_head": 2}):
        assert constrained(batch=8, embedd=4).array.sharding.spec == jax.P("fsdp")
    with hax.axis_mapping({"batch": "fsdp"}), jax.set_mesh(pm.mesh):
        constrained(batch=8, embedd=4)
