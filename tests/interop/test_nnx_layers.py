"""The modules of nnx compute what the blocks of `shardwright.layers` compute, sharded or not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.raising import raises

pytest.importorskip("flax.nnx")

from flax import nnx
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.interop import nnx as bridge
from shardwright.interop.nnx import layers
from shardwright.layers import (
    attention_block,
    embedding,
    fp8,
    loss,
    mlp_block,
    moe,
    moe_block,
    norm,
    transformer_block,
)
from shardwright.layers import dense as dense_layer
from shardwright.layers.placement import RESIDUAL
from shardwright.testing import cpu_mesh
from shardwright.trees.paths import is_array_spec, path_text
from tests.layers import blocks

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 8, 16)).astype(np.float32)
TOKENS = RNG.integers(0, 64, (8, 9))
MLP = mlp_block.MlpConfig(embed=16, hidden=32, bias=True)
ATTENTION = attention_block.AttentionConfig(embed=16, heads=4, qk_norm=norm.RMS)
EXPERTS = moe.MoEConfig(embed=16, hidden=8, experts=8, per_token=2, balance_loss=0.01)
MOE = moe_block.MoEBlockConfig(moe=EXPERTS)
STACK = transformer_block.TransformerConfig(layers=4, attention=ATTENTION, mlp=(MLP, MOE))
DIMS = ([(sw.EMBED, 16)], [(sw.HEAD, 4), (sw.HEAD_DIM, 4)])
LAYER_NORM = norm.NormConfig(kind="layer")

# Name -> (module, specs of its block, the block on parameters and x)
MODULES: dict[str, Any] = {
    "norm": (
        lambda rngs: layers.Norm(LAYER_NORM, 16, rngs=rngs),
        lambda: norm.specs(LAYER_NORM, 16),
        lambda params, x: norm.apply(LAYER_NORM, params, x),
    ),
    "dense": (
        lambda rngs: layers.Dense(*DIMS, bias=True, rngs=rngs),
        lambda: dense_layer.specs(*DIMS, bias=True),
        lambda params, x: dense_layer.dense(x, params["kernel"], params["bias"]),
    ),
    "mlp": (
        lambda rngs: layers.Mlp(MLP, rngs=rngs),
        lambda: mlp_block.specs(MLP),
        lambda params, x: mlp_block.apply(MLP, params, x)[0],
    ),
    "attention": (
        lambda rngs: layers.Attention(ATTENTION, rngs=rngs),
        lambda: attention_block.specs(ATTENTION),
        lambda params, x: attention_block.apply(ATTENTION, params, x)[0],
    ),
    "moe": (
        lambda rngs: layers.MoE(EXPERTS, rngs=rngs),
        lambda: moe.specs(EXPERTS),
        lambda params, x: moe.apply(EXPERTS, params, x)[0],
    ),
    "moe_block": (
        lambda rngs: layers.MoEBlock(MOE, rngs=rngs),
        lambda: moe_block.specs(MOE),
        lambda params, x: moe_block.apply(MOE, params, x)[0],
    ),
    "transformer": (
        lambda rngs: layers.Transformer(STACK, rngs=rngs),
        lambda: transformer_block.specs(STACK),
        lambda params, x: transformer_block.apply(STACK, params, x)[0],
    ),
}


def output(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def gradients(module: Any, x: Any) -> Any:
    """Return the output, and the gradients by the parameters and by `x`."""

    @nnx.jit
    def run(module: Any, x: Any) -> Any:
        def total(module: Any, x: Any) -> Any:
            y = output(module(x))
            return jnp.sum(jnp.sin(y)), y

        grads, y = nnx.grad(total, argnums=(0, 1), has_aux=True)(module, x)
        return y, jax.tree.leaves(grads)

    return run(module, x)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "mlp" else pytest.mark.full) for name in MODULES],
)
def test_module_equals_its_block(name: str) -> None:
    """The names, the initial values and the results are those of the block."""
    make, specs, block = MODULES[name]
    module = make(nnx.Rngs(3))
    state = nnx.state(module, nnx.Param)
    found = {"/".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}
    pairs = jax.tree_util.tree_leaves_with_path(specs(), is_leaf=is_array_spec)
    assert found == {path_text(path): spec.shape for path, spec in pairs}
    params = layers._read(module, specs())
    np.testing.assert_array_equal(
        jax.tree.leaves(params)[0], jax.tree.leaves(layers._read(make(nnx.Rngs(3)), specs()))[0]
    )
    y = nnx.jit(lambda module, x: output(module(x)))(module, X)
    np.testing.assert_allclose(y, jax.jit(block)(params, X), rtol=1e-6, atol=1e-6)


@pytest.mark.full(but=["norm-fsdp-auto"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("preset", ["fsdp", "fsdp_tp", "fsdp_tp_sp"])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.pairwise
def test_sharded_equals_unsharded(name: str, preset: str, kind: str) -> None:
    make, specs, _ = MODULES[name]
    wanted = gradients(make(nnx.Rngs(0)), X)
    with blocks.make_manager(preset, kind) as pm:
        module = make(nnx.Rngs(0))
        stored = pm.shardings(layers._read(module, specs()), specs())
        for array, sharding in zip(
            jax.tree.leaves(layers._read(module, specs())), jax.tree.leaves(stored), strict=True
        ):
            assert array.sharding.is_equivalent_to(sharding, array.ndim)
        got = gradients(module, pm.shard(X, RESIDUAL))
    blocks.assert_close(got, wanted, rtol=5e-5)


@pytest.mark.full
def test_moe_over_expert_parallelism() -> None:
    wanted = gradients(layers.MoE(EXPERTS, rngs=nnx.Rngs(0)), X)
    mesh = cpu_mesh("fsdp:2,ep:4")
    with sw.PartitionManager(sw.Strategy.preset("moe_ep"), mesh=mesh, mode="train") as pm:
        module = layers.MoE(EXPERTS, rngs=nnx.Rngs(0))
        assert module.up.get_value().sharding.spec == P("ep", "fsdp")
        x = pm.shard(X, (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED))
        got = gradients(module, x)
    blocks.assert_close(got, wanted, rtol=5e-5)


class Decoder(nnx.Module):  # type: ignore[misc]
    """A decoder whose output projection is the embedding table."""

    def __init__(self, rngs: Any) -> None:
        self.embedding = layers.Embedding(64, 16, rngs=rngs)
        self.layers = layers.Transformer(STACK, rngs=rngs)
        self.norm = layers.Norm(norm.RMS, 16, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x, state = self.layers(self.embedding(tokens))
        return self.norm(x), state.aux

    def loss(self, tokens: Any) -> Any:
        x, aux = self(tokens[:, :-1])
        table = self.embedding.table.get_value()
        return loss.cross_entropy(x, table, tokens[:, 1:], tied=True).mean + aux


def losses(model: Any) -> list[float]:
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, tokens: Any) -> Any:
        value, gradient = nnx.value_and_grad(lambda model: model.loss(tokens))(model)
        optimizer.update(model, gradient)
        return value

    return [float(step(model, optimizer, TOKENS)) for _ in range(5)]


@pytest.mark.full
def test_training_equals_unsharded() -> None:
    expected = losses(Decoder(nnx.Rngs(0)))
    assert expected[-1] < expected[0] - 0.1
    for kind in ("auto", "explicit"):
        with blocks.make_manager("fsdp_tp_sp", kind):
            found = losses(Decoder(nnx.Rngs(0)))
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=kind)


@pytest.mark.full
def test_model_that_was_created_elsewhere() -> None:
    """`place` and `annotate` read the axes of the modules; no names are needed."""
    model = Decoder(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    pm = blocks.make_manager("fsdp_tp", "auto")
    for target in (model, optimizer):
        bridge.place(target, pm, {})
    table = embedding.specs(64, 16)
    assert bridge.annotate(nnx.state(model, nnx.Param), {})["embedding"]["table"] == (
        sw.VOCAB,
        sw.EMBED,
    )
    moment = optimizer.opt_state[0].mu["embedding"]["table"].get_value()
    for array in (model.embedding.table.get_value(), moment):
        assert array.sharding.is_equivalent_to(pm.sharding(table.axes, role="param"), 2)


def test_dropout_follows_train_and_eval() -> None:
    config = mlp_block.MlpConfig(embed=16, hidden=32, dropout=0.5)
    module = layers.Mlp(config, rngs=nnx.Rngs(0))
    plain = layers.Mlp(mlp_block.MlpConfig(embed=16, hidden=32), rngs=nnx.Rngs(0))
    first, second = module(X), module(X)
    assert not np.array_equal(first, second)
    module.eval()
    np.testing.assert_array_equal(module(X), plain(X))
    module.train()
    assert not np.array_equal(module(X), plain(X))
    drop = layers.Dropout(0.5, rngs=nnx.Rngs(0))
    dropped = np.asarray(drop(np.ones((64, 8), np.float32)))
    assert {*np.unique(dropped)} == {0.0, 2.0}
    drop.eval()
    np.testing.assert_array_equal(drop(X), X)


@pytest.mark.full
def test_dropout_is_the_same_on_a_mesh() -> None:
    config = mlp_block.MlpConfig(embed=16, hidden=32, dropout=0.5)
    wanted = gradients(layers.Mlp(config, rngs=nnx.Rngs(0)), X)
    with blocks.make_manager("fsdp_tp", "auto") as pm:
        got = gradients(layers.Mlp(config, rngs=nnx.Rngs(0)), pm.shard(X, RESIDUAL))
    blocks.assert_close(got, wanted)


@pytest.mark.full
def test_decode_equals_forward() -> None:
    module = layers.Attention(ATTENTION, rngs=nnx.Rngs(0))
    expected, _ = module(X)
    cache, rows = module.init_cache(batch=8, capacity=8), []
    for new in (X[:, :5], X[:, 5:6], X[:, 6:]):
        y, cache = module(new, state=cache)
        rows.append(y)
    np.testing.assert_allclose(np.concatenate(rows, axis=1), expected, atol=1e-5)


@pytest.mark.full
def test_stack_decodes_on_a_mesh() -> None:
    expected, _ = layers.Transformer(STACK, rngs=nnx.Rngs(0))(X)
    strategy = sw.Strategy.preset("serve_tp")
    with sw.PartitionManager(strategy, mesh=cpu_mesh("dp:2,tp:4"), mode="decode"):
        module = layers.Transformer(STACK, rngs=nnx.Rngs(0))
        step = nnx.jit(lambda module, x, state: module(x, state=state))
        state, rows = module.init_caches(batch=8, capacity=8), []
        for new in (X[:, :6], X[:, 6:7], X[:, 7:]):
            y, state = step(module, new, state)
            rows.append(np.asarray(y))
    np.testing.assert_allclose(np.concatenate(rows, axis=1), expected, atol=2e-5)


@pytest.mark.full
def test_decode_with_the_biases_of_training() -> None:
    module = layers.Transformer(STACK, rngs=nnx.Rngs(0))
    bias = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)
    trained = transformer_block.StackState(moe=[None, moe.MoEState(bias=bias)])
    expected, _ = module(X, state=trained)
    assert np.abs(expected - module(X)[0]).max() > 1e-3
    state, rows = module.init_caches(batch=8, capacity=8, state=trained), []
    for new in (X[:, :7], X[:, 7:]):
        y, state = module(new, state=state)
        rows.append(np.asarray(y))
    np.testing.assert_allclose(np.concatenate(rows, axis=1), expected, atol=2e-5)


@pytest.mark.full
def test_path_reaches_the_rules_of_tensors() -> None:
    strategy = sw.Strategy.preset("fsdp_tp") | sw.Strategy.loads(
        'version = 1\nname = "own"\n[[tensors]]\nmatch = "mlp/up/kernel"\nembed = "-"\n'
    )
    with sw.PartitionManager(strategy, mesh=cpu_mesh("fsdp:2,tp:4"), mode="train"):
        run = nnx.jit(lambda module, x: module(x))
        module = layers.Mlp(MLP, rngs=nnx.Rngs(0), path="mlp")
        assert module.up.kernel.get_value().sharding.spec == P(None, None, "tp")
        assert module.down.kernel.get_value().sharding.spec == P("tp", "fsdp")
        sharded = run(module, X)
    plain = layers.Mlp(MLP, rngs=nnx.Rngs(0), path="mlp")
    np.testing.assert_allclose(run(plain, X), sharded, atol=1e-5)


def test_bad_input() -> None:
    with raises(sw.LayerError, "int", path="rngs", fix="nnx.Rngs"):
        layers.Mlp(MLP, rngs=0)
    with raises(sw.RankMismatchError, "(8, 16)", path="x"):
        layers.Mlp(MLP, rngs=nnx.Rngs(0))(X[0])
    with raises(sw.LayerError, "1.0", "[0, 1)", path="rate"):
        layers.Dropout(1.0, rngs=nnx.Rngs(0))
    dropping = mlp_block.MlpConfig(embed=16, hidden=32, dropout=0.5)
    for make, rngs, stream in (
        (layers.Mlp, nnx.Rngs(params=0), "dropout"),
        (layers.Mlp, nnx.Rngs(dropout=0), "params"),
        (lambda config, rngs: layers.Dropout(0.5, rngs=rngs), nnx.Rngs(params=0), "dropout"),
    ):
        with raises(sw.LayerError, stream, "stream", path="rngs", fix="nnx.Rngs"):
            make(dropping, rngs=rngs)
    delayed = mlp_block.MlpConfig(embed=32, hidden=32, recipe="delayed")
    with raises(sw.LayerError, "state", path="config.recipe", fix="current"):
        layers.Mlp(delayed, rngs=nnx.Rngs(0))


@pytest.mark.full
def test_attention_with_scaling_drops() -> None:
    """A state of delayed scaling is not a cache."""
    config = attention_block.AttentionConfig(embed=32, heads=2, dropout=0.5, recipe="delayed")
    module = layers.Attention(config, rngs=nnx.Rngs(0))
    uses = fp8.uses(attention_block.init_scaling(config))
    state = attention_block.AttentionState(scaling=uses)
    rows = np.random.default_rng(0).normal(size=(2, 8, 32)).astype(np.float32)
    first, second = (module(rows, state=state)[0] for _ in range(2))
    assert not np.allclose(first, second)
    module.eval()
    first, second = (module(rows, state=state)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.full
def test_attention_passes_its_scales_on_with_a_cache() -> None:
    config = attention_block.AttentionConfig(embed=32, heads=2, recipe="delayed")
    module = layers.Attention(config, rngs=nnx.Rngs(0))
    uses = fp8.uses(attention_block.init_scaling(config))
    rows = np.random.default_rng(0).normal(size=(2, 8, 32)).astype(np.float32)
    expected, seen = module(rows, state=attention_block.AttentionState(scaling=uses))
    assert isinstance(seen.scaling["out"], fp8.DenseSeen)
    cache = module.init_cache(batch=2, capacity=8)
    state, parts = attention_block.AttentionState(cache=cache, scaling=uses), []
    for new in (rows[:, :6], rows[:, 6:]):
        y, state = module(new, state=state)
        parts.append(np.asarray(y))
    assert state.scaling is uses
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, atol=0.02)
