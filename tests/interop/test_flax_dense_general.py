"""`nn.DenseGeneral`, whose kernels have more names than the flattened array that it initializes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.interop import flax as bridge
from tests.raising import raises

nn = pytest.importorskip("flax.linen")

NAMES = {
    "embed": (sw.EMBED, "param"),
    "heads": (sw.HEAD, "param"),
    "kv": (sw.HEAD_DIM, "param"),
    "layers": (sw.LAYERS, "param"),
}
X = np.random.default_rng(1).normal(size=(8, 16, 32)).astype(np.float32)


def named(init: Any, *names: str) -> Any:
    return nn.with_logical_partitioning(init, names)


class Heads(nn.Module):
    """Projections to heads and back, with a bias of rank 2."""

    @nn.compact
    def __call__(self, x: Any, _: None = None) -> tuple[Any, None]:
        normal = nn.initializers.lecun_normal()
        heads = nn.DenseGeneral(
            (4, 8),
            kernel_init=named(normal, "embed", "heads", "kv"),
            bias_init=named(nn.initializers.normal(), "heads", "kv"),
        )(x)
        out = named(normal, "heads", "kv", "embed")
        x = x + nn.DenseGeneral(32, axis=(-2, -1), use_bias=False, kernel_init=out)(heads)
        return x, None


class Stack(nn.Module):
    """Scanned layers with remat."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        layers = nn.scan(
            nn.remat(Heads),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return layers()(x, None)[0]


class Attention(nn.Module):
    """flax's own attention, which builds its projections of `nn.DenseGeneral`."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        init = named(nn.initializers.xavier_uniform(), "embed", "heads", "kv")
        out = named(nn.initializers.xavier_uniform(), "heads", "kv", "embed")
        attention = nn.MultiHeadDotProductAttention(
            4, qkv_features=32, use_bias=False, kernel_init=init, out_kernel_init=out
        )
        return attention(x, x)


@pytest.mark.full
@pytest.mark.parametrize("model", [Stack(), Attention()], ids=["scanned", "attention"])
def test_init_and_apply_under_rules(model: Any) -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:4,tp:2"))
    variables = model.init(jax.random.key(0), X)
    expected, axes = bridge.arrays(variables), bridge.annotate(variables, NAMES)
    shardings = pm.shardings(expected, axes)
    with bridge.rules(pm, NAMES):
        init = jax.jit(lambda key: nn.unbox(model.init(key, X)), out_shardings=shardings)
        found = init(jax.random.key(0))
        output = jax.jit(model.apply)(found, X)
    assert any("tp" in leaf.sharding.spec for leaf in jax.tree.leaves(found))
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(output, model.apply(expected, X), rtol=1e-4, atol=1e-5)


def test_the_full_arrays_are_constrained() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:4,tp:2"))
    with bridge.rules(pm, NAMES):
        traced = jax.make_jaxpr(Heads().init)(jax.random.key(0), X)
    found = {
        equation.outvars[0].aval.shape: tuple(equation.params["sharding"].spec)
        for equation in traced.eqns
        if equation.primitive.name == "sharding_constraint"
    }
    assert found == {
        (32, 4, 8): ("fsdp", "tp", None),
        (4, 8): ("tp", None),
        (4, 8, 32): ("tp", None, "fsdp"),
    }


@pytest.mark.full
def test_too_many_names_elsewhere_are_an_error() -> None:
    """Only what `nn.DenseGeneral` flattens loses a constraint."""
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:4,tp:2"))
    wrong = named(nn.initializers.lecun_normal(), "embed", "heads", "kv")
    models = (nn.Dense(8, kernel_init=wrong), nn.DenseGeneral(8, kernel_init=wrong))
    for model in models:
        fails = raises(
            ValueError,
            3,
            "embed",
            "heads",
            "kv",
            2,
            path="array of shape (32, 8)",
            fix="interop.flax",
        )
        with fails, bridge.rules(pm, NAMES):
            model.init(jax.random.key(0), jnp.ones((8, 32)))


def test_the_module_keeps_its_initializers() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:4,tp:2"))
    init = named(nn.initializers.lecun_normal(), "embed", "heads", "kv")
    model = nn.DenseGeneral((4, 8), kernel_init=init)
    with bridge.rules(pm, NAMES):
        bound = model.bind(jax.jit(model.init)(jax.random.key(0), X))
        bound(X)
    assert bound.kernel_init is init
