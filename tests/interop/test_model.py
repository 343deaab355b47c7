"""Code written for eformer trains here: sharded as by eformer, equal to unsharded training."""

from __future__ import annotations

import contextlib
import types
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.interop import eformer
from tests.interop.model import VOCAB, Model, init, rules, train

# Programs of several seconds; the parts are tested by themselves.
pytestmark = pytest.mark.full

TOKENS = np.random.default_rng(1).integers(0, VOCAB, size=(8, 9))
SIZES = (1, 2, 1, 2, 2)


def without_mesh() -> Model:
    """Train the model with constraints that do nothing."""
    nothing: Any = types.SimpleNamespace(
        apply_logical_sharding=lambda x, **_: x,
        with_sharding_constraint=lambda x, _: x,
    )
    manager = types.SimpleNamespace(shard=lambda x, **_: x, resolve=lambda **_: P())
    return Model(nothing, eformer.common_types, manager)


@pytest.fixture(scope="module")
def unsharded() -> tuple[list[float], Any]:
    return train(without_mesh().loss, init(), TOKENS)


def run(es: ModuleType, ct: ModuleType, ambient: Any, **options: Any) -> tuple[list[float], Any]:
    """Train the model on eight devices with the names of `es` and `ct`."""
    mesh = es.create_mesh(SIZES)
    pm = es.PartitionManager(es.PartitionAxis(), **options)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ambient(mesh))
        stack.enter_context(pm)
        params = jax.tree.map(jax.numpy.asarray, init())
        specs = es.match_partition_rules(rules(ct, pm), params)
        shard_fns, gather_fns = es.make_shard_and_gather_fns(specs, mesh)
        losses, trained = train(
            Model(es, ct, pm).loss, jax.tree.map(lambda f, p: f(p), shard_fns, params), TOKENS
        )
        specs = es.get_partition_spec(trained)
        return losses, (jax.tree.map(lambda f, p: f(p), gather_fns, trained), specs)


WANTED = {
    "attn": {
        "q": P(("fsdp", "sp"), "tp"),
        "k": P(("fsdp", "sp"), "tp"),
        "v": P(("fsdp", "sp"), "tp"),
        "o": P("tp", ("fsdp", "sp")),
    },
    "mlp_0": {"up": P(("fsdp", "sp"), "tp"), "down": P("tp", ("fsdp", "sp"))},
    "mlp_1": {"up": P(("fsdp", "sp"), "tp"), "down": P("tp", ("fsdp", "sp"))},
    "embed": P("tp", ("fsdp", "sp")),
}


@pytest.mark.filterwarnings("ignore:.*with mesh:DeprecationWarning")
@pytest.mark.parametrize(
    "ambient", [jax.set_mesh, lambda mesh: mesh], ids=["set_mesh", "with mesh"]
)
@pytest.mark.parametrize("policy", ["strict", "eformer"])
def test_sharded_training_equals_unsharded(
    ambient: Any, policy: str, unsharded: tuple[list[float], Any]
) -> None:
    losses, (params, specs) = run(eformer.escale, eformer.common_types, ambient, policy=policy)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.05
    np.testing.assert_allclose(losses, unsharded[0], rtol=2e-5)
    jax.tree.map(
        lambda actual, wanted: np.testing.assert_allclose(actual, wanted, rtol=2e-3, atol=2e-5),
        params,
        unsharded[1],
    )
    assert specs == WANTED


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_eformer_trains_the_same(unsharded: tuple[list[float], Any]) -> None:
    es = pytest.importorskip("eformer.escale")
    from eformer import common_types as ct

    losses, (params, specs) = run(es, ct, lambda mesh: mesh)
    np.testing.assert_allclose(losses, unsharded[0], rtol=2e-5)
    jax.tree.map(
        lambda actual, wanted: np.testing.assert_allclose(actual, wanted, rtol=2e-3, atol=2e-5),
        params,
        unsharded[1],
    )
    assert specs == WANTED


def test_constraints_are_in_the_program() -> None:
    mesh = eformer.create_mesh(SIZES)
    pm = eformer.PartitionManager(eformer.PartitionAxis())
    with jax.set_mesh(mesh):
        text = (
            jax.jit(Model(eformer.escale, eformer.common_types, pm))
            .lower(init(), TOKENS[:, :8])
            .as_text()
        )
    assert text.count("sharding_constraint") == 10
    assert text.count('[{"fsdp"}, {"sp"}, {"tp"}]') >= 6


def test_model_under_a_strategy_file() -> None:
    """The manager comes from a strategy file, and the model does not change."""
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("dp:1,fsdp:4,tp:2"))
    with pm:
        x = eformer.apply_logical_sharding(
            np.ones((8, 4, 16), np.float32), dynamic_axes=eformer.HiddenStateSharding
        )
        y = eformer.apply_logical_sharding(
            x, axes=[eformer.BATCH, None, eformer.MLP_INTERMEDIATE], mode=eformer.MODE_TRAIN
        )
        z = eformer.apply_logical_sharding(x, pm, [eformer.BATCH, eformer.QUERY_LENGTH, None], 1)
    assert (x.sharding.spec, y.sharding.spec, z.sharding.spec) == (
        P("fsdp"),
        P("fsdp", None, "tp"),
        P("fsdp"),
    )
