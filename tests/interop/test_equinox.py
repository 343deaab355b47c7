"""A decoder in equinox's idiom follows a strategy; its source knows nothing of this package."""

from __future__ import annotations

import functools
import tomllib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright as sw
from shardwright.interop import equinox as bridge
from tests.raising import facts, raises

eqx = pytest.importorskip("equinox")

MESHES = ("fsdp:8", "fsdp:4,tp:2", "dp:2,tp:4")
TOKENS = np.asarray(np.random.default_rng(0).integers(0, 64, (8, 16)))
OPTIMIZER = optax.adamw(1e-3)


class Block(eqx.Module):
    """Attention and MLP of one example: [length, embed] to [length, embed]."""

    norms: list[Any]
    attention: Any
    mlp: Any

    def __init__(self, *, key: Any) -> None:
        first, second = jax.random.split(key)
        self.norms = [eqx.nn.RMSNorm(32, use_bias=False) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(4, 32, key=first)
        self.mlp = eqx.nn.MLP(32, 32, 80, 1, jax.nn.gelu, key=second)

    def __call__(self, x: Any) -> Any:
        hidden = jax.vmap(self.norms[0])(x)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attention(hidden, hidden, hidden, mask=mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Decoder(eqx.Module):
    embedding: Any
    blocks: list[Any]
    head: Any

    def __init__(self, *, key: Any) -> None:
        keys = jax.random.split(key, 4)
        self.embedding = eqx.nn.Embedding(64, 32, key=keys[0])
        self.blocks = [Block(key=key) for key in keys[1:3]]
        self.head = eqx.nn.Linear(32, 64, use_bias=False, key=keys[3])

    def __call__(self, tokens: Any) -> Any:
        x = jax.vmap(self.embedding)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def apply(model: Any, tokens: Any) -> Any:
    return jax.vmap(model)(tokens)


@functools.cache
def decoder() -> Any:
    return Decoder(key=jax.random.key(0))


@functools.cache
def inferred() -> Any:
    return bridge.infer(decoder(), TOKENS, seeds=[(sw.BATCH, sw.LENGTH)], call=apply)


@eqx.filter_jit
def step(model: Any, state: Any, tokens: Any) -> Any:
    def loss(model: Any) -> Any:
        logits = apply(model, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, gradient = eqx.filter_value_and_grad(loss)(model)
    updates, state = OPTIMIZER.update(gradient, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, value


def losses(model: Any) -> list[float]:
    state, found = OPTIMIZER.init(bridge.arrays(model)), []
    for _ in range(20):
        model, state, value = step(model, state, TOKENS)
        found.append(float(value))
    return found


@functools.cache
def unsharded() -> list[float]:
    return losses(decoder())


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
def test_training_equals_unsharded(mesh: str) -> None:
    expected = unsharded()
    assert expected[-1] < expected[0] - 0.1
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh(mesh))
    model = bridge.place(decoder(), pm, inferred().annotations)
    leaves = jax.tree.leaves(bridge.arrays(model))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert held < 0.6 * sum(leaf.nbytes for leaf in leaves)
    np.testing.assert_allclose(losses(model), expected, rtol=1e-6)


@pytest.mark.full
def test_inferred_axes() -> None:
    assert not inferred().guesses
    assert not inferred().conflicts
    axes = inferred().annotations
    assert axes.embedding.weight == (sw.VOCAB, sw.EMBED)
    assert axes.head.weight == (sw.VOCAB, sw.EMBED)
    assert axes.blocks[1].mlp.layers[0].weight == (sw.MLP_INTERMEDIATE, sw.EMBED)
    assert axes.blocks[1].mlp.layers[1].weight == (sw.EMBED, sw.MLP_INTERMEDIATE)
    query = sw.merged((sw.HEAD, 4), (sw.HEAD_DIM, 8))
    assert axes.blocks[0].attention.query_proj.weight == (query, sw.EMBED)
    assert axes.blocks[0].attention.output_proj.weight == (sw.EMBED, query)


def test_the_reviewed_file_gives_the_same_axes() -> None:
    text = inferred().toml()
    values, axes = bridge.arrays(decoder()), bridge.annotate(decoder(), tomllib.loads(text))
    assert jax.tree.structure(values) == jax.tree.structure(bridge.arrays(decoder()))
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:4,tp:2"))
    assert pm.shardings(values, axes) == pm.shardings(values, inferred().annotations)


def test_shapes_have_the_same_axes() -> None:
    shapes = eqx.filter_eval_shape(lambda: Decoder(key=jax.random.key(0)))
    found = bridge.infer(shapes, TOKENS, seeds=[(sw.BATCH, sw.LENGTH)], call=apply)
    assert found.toml() == inferred().toml()


def test_other_values_stay() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:8"))
    model = bridge.place(decoder(), pm, inferred().annotations)
    assert jax.tree.structure(model) == jax.tree.structure(decoder())
    assert model.blocks[0].mlp.activation is decoder().blocks[0].mlp.activation


def test_a_constrained_model_is_called_with_its_functions() -> None:
    """The model is passed as it is: its activation functions are leaves that nobody traces."""
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp_sp"), mesh=sw.create_mesh("fsdp:4,tp:2"))
    constrained = sw.constrained(apply, inferred())
    with pm:
        traced = jax.make_jaxpr(lambda tokens: constrained(decoder(), tokens))(TOKENS)
    count = str(traced).count("sharding_constraint[")
    assert count == len(constrained.inferred.constraints) > 0


@pytest.mark.full
def test_a_constrained_model_has_the_same_values() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp_sp"), mesh=sw.create_mesh("fsdp:4,tp:2"))
    placed = bridge.place(decoder(), pm, inferred().annotations)
    with pm:
        logits = eqx.filter_jit(sw.constrained(apply, inferred()))(placed, TOKENS)
    np.testing.assert_allclose(logits, apply(decoder(), TOKENS), rtol=1e-5, atol=1e-5)
    assert logits.sharding.spec == jax.P("fsdp", None, "tp")


def test_numbers_in_a_model_stay() -> None:
    """A probability is a leaf too. It decides what is traced, so it must not become an array."""

    class Part(eqx.Module):
        table: Any
        dropout: Any

        def __call__(self, tokens: Any) -> Any:
            return self.dropout(self.table.weight[tokens]) @ self.table.weight.T

    table = eqx.nn.Embedding(64, 32, key=jax.random.key(0))
    part = Part(table, eqx.nn.Dropout(0.1, inference=True))
    found = bridge.infer(part, TOKENS, seeds=[(sw.BATCH, sw.LENGTH)])
    with sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=sw.create_mesh("fsdp:8")):
        constrained = sw.constrained(Part.__call__, found)
        logits = jax.eval_shape(lambda tokens: constrained(part, tokens), TOKENS)
    assert logits.shape == (8, 16, 64)


def test_the_default_call_is_the_model() -> None:
    model = eqx.nn.Linear(32, 64, key=jax.random.key(0))
    found = bridge.infer(model, jnp.ones(32), seeds=[(sw.EMBED,)])
    assert found.annotations.weight == (sw.VOCAB, sw.EMBED)
    with raises(
        sw.StrategyError,
        facts("VOCAB", "dot_general", path="weight", fix="VOCAB"),
        facts("VOCAB", "dot_general", path="bias", fix="VOCAB"),
    ):
        bridge.infer(model, jnp.ones(32), seeds=[(sw.EMBED,)], strict=True)


def test_rules_must_match() -> None:
    rules = {"embedding": (sw.VOCAB, sw.EMBED), "head": (sw.VOCAB, sw.EMBED)}
    with raises(sw.StrategyError, "rule", "matches", path="blocks/0/attention/query_proj/weight"):
        bridge.annotate(decoder(), rules)
    linear = eqx.nn.Linear(32, 64, use_bias=False, key=jax.random.key(0))
    with raises(sw.StrategyError, "model", "weigth"):
        bridge.annotate(linear, {"weight": (sw.VOCAB, sw.EMBED), "weigth": (sw.VOCAB,)})


def test_arguments_of_other_types() -> None:
    linear = eqx.nn.Linear(32, 64, use_bias=False, key=jax.random.key(0))
    with raises(sw.StrategyError, "rule", "None", fix="pattern"):
        bridge.annotate(linear, None)
    with raises(sw.StrategyError, "str", "PartitionManager", fix="sw.PartitionManager"):
        bridge.place(linear, "fsdp_tp", None)
