"""A model in the idiom of jax-llm-examples follows a strategy; its source stays as it is."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.interop import jax_llm_examples as bridge
from tests.raising import raises

TENSOR = ("y", "z")
TOKENS = np.asarray(np.random.default_rng(0).integers(0, 64, (8, 16)))
OPTIMIZER = optax.adamw(1e-3)


@dataclasses.dataclass
class ShardingRules:
    batch: Any = "x"
    sequence: Any = None
    act_embed: Any = None
    embed_up: Any = None
    ffw_up: Any = TENSOR
    ffw_down: Any = TENSOR
    embed_down: Any = None
    vocab_in: Any = None
    vocab_out: Any = TENSOR


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    shape: tuple[int, ...]
    dtype: Any
    logical_axes: tuple[Any, ...]
    initializer: Callable[..., Any] | None = None


def abstract() -> Any:
    """Return the parameters, as the models describe them."""

    def info(shape: Any, axes: Any) -> Any:
        return ArrayInfo(shape, jnp.float32, axes, jax.nn.initializers.he_normal())

    layer = {
        "up": info((32, 96), ("embed_up", "ffw_up")),
        "down": info((96, 32), ("ffw_down", "embed_down")),
    }
    return {
        "embedding": info((64, 32), (None, "vocab_in")),
        "layers": [layer, layer],
        "gamma": ArrayInfo((32,), jnp.float32, ("act_embed",), jax.nn.initializers.ones),
        "head": info((32, 64), ("vocab_in", "vocab_out")),
    }


def forward(params: Any, tokens: Any, rules: ShardingRules) -> Any:
    spec = P(rules.batch, rules.sequence, rules.act_embed)
    x = params["embedding"].at[tokens, :].get(out_sharding=spec)
    for layer in params["layers"]:
        hidden = jax.nn.silu(jnp.einsum("btd,df->btf", x, layer["up"]))
        x = x + jnp.einsum("btf,fd->btd", hidden, layer["down"], out_sharding=spec)
    return jnp.einsum("btd,dv->btv", x * params["gamma"], params["head"])


def manager(x: int, y: int, *, is_stored_sharded: bool, devices: Any = None) -> Any:
    """Return a manager with the mesh axes of the models."""
    rules = {"batch": "x", "length": "-", "embed": "-", "head": "y+z", "head_dim": "-"}
    rules |= {"kv_head": "y | -", "mlp_intermediate": "y+z", "vocab": "y+z", "expert": "-"}
    sizes = {"x": x, "y": y, "z": 1}
    params = {"embed": "x"} if is_stored_sharded else {}
    strategy = sw.Strategy(mesh=sizes, rules=rules, params=params, policy={"gather": "x"})
    mesh = sw.create_mesh(sizes, axis_types="explicit", devices=devices)
    return sw.PartitionManager(strategy, mesh=mesh)


def losses(pm: Any) -> list[float]:
    specs = bridge.annotate(abstract())
    rules = bridge.rules(pm, ShardingRules)

    @jax.jit
    def step(params: Any, state: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = forward(sw.gather(params, specs), tokens, rules)
            logits = sw.shard(logits, sw.BATCH, sw.LENGTH, sw.EMPTY)
            targets = jax.nn.one_hot(jnp.roll(tokens, -1, 1), 64)
            return -(jax.nn.log_softmax(logits) * targets).sum(-1).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = OPTIMIZER.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    with pm:
        params = pm.init(specs, jax.random.key(0))
        tokens = sw.shard(TOKENS, sw.BATCH, sw.LENGTH)
        state, found = OPTIMIZER.init(params), []
        for _ in range(20):
            params, state, value = step(params, state, tokens)
            found.append(float(value))
    return found


@functools.cache
def unsharded() -> list[float]:
    return losses(manager(1, 1, is_stored_sharded=False, devices=jax.devices()[:1]))


@pytest.mark.full
@pytest.mark.parametrize(("x", "y", "stored"), [(8, 1, True), (4, 2, True), (2, 4, False)])
def test_training_equals_unsharded(x: int, y: int, stored: bool) -> None:
    expected = unsharded()
    assert expected[-1] < expected[0] - 0.1
    pm = manager(x, y, is_stored_sharded=stored)
    np.testing.assert_allclose(losses(pm), expected, rtol=1e-6)


def test_annotations_of_array_infos() -> None:
    specs = bridge.annotate(abstract())
    up = specs["layers"][1]["up"]
    assert (up.shape, up.dtype, up.axes) == (
        (32, 96),
        jnp.float32,
        (sw.EMBED, sw.MLP_INTERMEDIATE),
    )
    assert specs["embedding"].axes == (sw.EMPTY, sw.EMBED)
    assert bridge.annotate(ArrayInfo((8, 4), jnp.int32, ())).axes == (sw.EMPTY, sw.EMPTY)
    pm = manager(4, 2, is_stored_sharded=True)
    some = {"down": specs["layers"][0]["down"], "gamma": specs["gamma"]}
    params = pm.init(some, jax.random.key(0))
    assert params["down"].sharding.spec == P("y", "x")
    np.testing.assert_array_equal(params["gamma"], np.ones(32))


def test_names_as_nemotron_writes_them() -> None:
    """Two names for three dims, and a name twice, whose rule must be None in JAX."""
    short = bridge.annotate(ArrayInfo((8, 1, 4), jnp.int32, ("vocab_out", None)))
    assert short.axes == (sw.VOCAB, sw.EMPTY, sw.EMPTY)
    table = {
        "embedding": ArrayInfo((64, 32), jnp.float32, ("vocab_in", "vocab_in")),
        "lm_head": ArrayInfo((32, 64), jnp.float32, ("vocab_in", "vocab_out")),
    }
    rules = ShardingRules(vocab_in=None, vocab_out="y")
    imported = bridge.to_strategy(rules, mesh={"x": 2, "y": 4, "z": 1})
    pm = sw.PartitionManager(imported.strategy, mesh=sw.abstract_mesh({"x": 2, "y": 4, "z": 1}))
    own = pm.shardings(bridge.annotate(table, imported.names))
    assert (own["embedding"].spec, own["lm_head"].spec) == (P(), P(None, "y"))


def test_rules_of_a_manager() -> None:
    rules = bridge.rules(manager(4, 2, is_stored_sharded=True), ShardingRules)
    expected = ShardingRules(
        embed_up="x", embed_down="x", vocab_in="x", ffw_up="y", ffw_down="y", vocab_out="y"
    )
    assert rules == expected


RULES = (
    ShardingRules,
    ShardingRules(embed_up="x", embed_down="x", vocab_in="x"),
    ShardingRules(batch=None, sequence=("x", "z"), vocab_out="y", act_embed=TENSOR),
)


@pytest.mark.parametrize("rules", RULES)
def test_strategies_of_rules(rules: Any) -> None:
    sizes = {"x": 2, "y": 2, "z": 2}
    imported = bridge.to_strategy(rules, mesh=sizes)
    pm = sw.PartitionManager(imported.strategy, mesh=sw.create_mesh(sizes))
    fields = [field.name for field in dataclasses.fields(ShardingRules)]
    refused = 0
    for names in itertools.permutations(fields, 2):
        entries = [getattr(rules, name) for name in names]
        flat = jax.tree.leaves(entries)
        for role in ("activation", "param"):
            axes = imported.annotation(names)
            if len({*flat}) < len(flat):
                refused += 1
                with pytest.raises(sw.ShardingError):
                    pm.sharding(*axes, role=role, shape=(8, 8))
            else:
                theirs = jax.NamedSharding(pm.mesh, P(*entries))
                own = pm.sharding(*axes, role=role, shape=(8, 8))
                assert own.is_equivalent_to(theirs, 2), names
    assert refused


def test_rules_with_axes_of_the_vocabulary() -> None:
    imported = bridge.to_strategy(ShardingRules, mesh={"x": 2, "y": 2, "z": 2}, names=bridge.NAMES)
    pm = sw.PartitionManager(imported.strategy, mesh=sw.create_mesh({"x": 2, "y": 2, "z": 2}))
    found = pm.sharding(sw.EMBED, sw.MLP_INTERMEDIATE, role="param", shape=(8, 8)).spec
    assert found == P(None, ("y", "z"))
    with raises(
        sw.StrategyError,
        "x",
        "embed_up",
        "-",
        "ShardingRules.embed_up",
        path="ShardingRules.vocab_in",
    ):
        bridge.to_strategy(
            ShardingRules(vocab_in="x"), mesh={"x": 2, "y": 2, "z": 2}, names=bridge.NAMES
        )


def test_what_cannot_be_read() -> None:
    with raises(sw.MissingMeshAxisError, "rule", path="ShardingRules.ffw_up"):
        bridge.to_strategy(ShardingRules, mesh={"x": 8})
    with raises(sw.StrategyError, "dict", "rules", fix="ShardingRules"):
        bridge.to_strategy({"batch": "x"}, mesh={"x": 8})
    with raises(sw.StrategyError, "ArrayInfo", path="layers/0/up", fix="abstract(cfg)"):
        bridge.annotate({"layers": [{"up": np.ones(3)}]})
    tree = {"a": ArrayInfo((4,), jnp.int32, ("mamba",)), "b": ArrayInfo((4,), jnp.int32, ("lora",))}
    with pytest.raises(sw.UnknownAxisError) as caught:
        bridge.annotate(tree)
    assert len(caught.value.problems) == 2

    @dataclasses.dataclass
    class Other:
        batch: Any
        lora: Any = None

    with raises(sw.UnknownAxisError, "lora", path="Other", fix="lora"):
        bridge.rules(manager(8, 1, is_stored_sharded=True), Other)
    with raises(sw.UnknownAxisError, "batch"):
        bridge.to_strategy(Other, mesh={"x": 8})
    with raises(sw.RankMismatchError, 2, "batch", 1, path="a"):
        bridge.annotate({"a": ArrayInfo((4,), jnp.int32, ("batch", None))})
