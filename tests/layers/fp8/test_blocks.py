"""Blocks with a recipe: equal on every mesh, scanned or not, with one state per layer."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.errors import LayerError
from shardwright.layers import attention_block, fp8, mlp_block, transformer_block
from shardwright.layers.placement import RESIDUAL
from tests.layers import blocks
from tests.raising import facts, raises

ATTENTION = attention_block.AttentionConfig(embed=64, heads=4, head_dim=32)
MLP = mlp_block.MlpConfig(embed=64, hidden=128)
X = np.random.default_rng(0).normal(size=(8, 32, 64)).astype(np.float32)


def config_of(recipe: str | None, **options: Any) -> Any:
    return transformer_block.TransformerConfig(
        layers=2,
        attention=dataclasses.replace(ATTENTION, recipe=recipe),
        mlp=dataclasses.replace(MLP, recipe=recipe),
        **options,
    )


PARAMS = blocks.random_params(transformer_block.specs(config_of(None)))


def run(config: Any, scaling: Any, params: Any, x: Any, channel: Any) -> Any:
    state = transformer_block.StackState(scaling=fp8.uses(scaling, channel))
    y, after = transformer_block.apply(config, params, x, state=state)
    return jnp.mean(jnp.sin(y)), (y, after.scaling)


def differentiated(config: Any, scaling: Any) -> Any:
    return jax.value_and_grad(functools.partial(run, config, scaling), (0, 1, 2), has_aux=True)


@functools.cache
def warm(recipe: str) -> Any:
    """Return the state after two updates, so that no scale is 1; None without a state."""
    config = config_of(recipe)
    scaling = transformer_block.init_scaling(config)
    for _ in range(2 if scaling else 0):
        step = jax.jit(differentiated(config, scaling))
        (_, (_, seen)), (_, _, sent) = step(PARAMS, X, fp8.new_channel(scaling))
        assert isinstance(config.mlp.recipe, fp8.DelayedScaling)
        scaling = fp8.update(config.mlp.recipe, scaling, seen, sent)
    return scaling


@functools.cache
def unsharded(recipe: str | None) -> Any:
    scaling = warm(recipe) if recipe else None
    step = jax.jit(differentiated(config_of(recipe), scaling))
    return step(PARAMS, X, fp8.new_channel(scaling))


def distances(got: Any, wanted: Any) -> list[float]:
    """Return the relative distance of each array; a flip in the last bit of one value is small."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    arrays = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in arrays if np.size(b) > 8]


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
def test_close_to_the_stack_in_float32(recipe: str) -> None:
    (_, (y, _)), (grads, dx, _) = unsharded(recipe)
    (_, (wanted, _)), (wanted_grads, wanted_dx, _) = unsharded(None)
    errors = distances((y, grads, dx), (wanted, wanted_grads, wanted_dx))
    assert 1e-3 < max(errors) < 0.25, errors
    assert errors[0] < 0.05


@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "preset", "kind"),
    [
        ("delayed", "fsdp_tp", "auto"),
        ("delayed", "fsdp_tp_sp", "explicit"),
        ("delayed", "fsdp_tp", "mixed"),
        ("delayed", "fsdp", "auto"),
        ("current", "fsdp_tp", "explicit"),
        ("current", "tensor", "auto"),
        ("mxfp8", "fsdp_tp", "auto"),
        ("mxfp8", "fsdp_tp", "explicit"),
        ("mxfp8", "tensor", "mixed"),
    ],
)
def test_sharded_equals_unsharded(recipe: str, preset: str, kind: str) -> None:
    config, scaling = config_of(recipe), warm(recipe)
    channel = fp8.new_channel(scaling)
    with blocks.make_manager(preset, kind) as pm:
        params = pm.shard(PARAMS, transformer_block.specs(config), role="param")
        x = pm.shard(X, RESIDUAL)
        compiled = jax.jit(differentiated(config, scaling)).lower(params, x, channel).compile()
        got = compiled(params, x, channel)
    assert max(distances(got, unsharded(recipe))) < 0.02
    if scaling:
        seen, sent = got[0][1][1], got[1][2]
        wanted_seen, wanted_sent = unsharded(recipe)[0][1][1], unsharded(recipe)[1][2]
        blocks.assert_close((seen, sent), (wanted_seen, wanted_sent), rtol=0.02)
    if pm.mesh.shape.get("fsdp", 1) > 1:
        # The six kernels of a layer, in the forward and in the backward pass.
        gathers = re.findall(r"= u8\[[\d,]+\]\S* all-gather\(", compiled.as_text())
        blocked = 2 if recipe == "mxfp8" else 1  # and the exponents
        assert len(gathers) == blocked * 2 * 6


@pytest.mark.full
@pytest.mark.parametrize("remat", ["full", "blocks"])
def test_remat_changes_nothing(remat: str) -> None:
    config, scaling = config_of("delayed", remat=remat), warm("delayed")
    got = jax.jit(differentiated(config, scaling))(PARAMS, X, fp8.new_channel(scaling))
    assert max(distances(got, unsharded("delayed"))) < 1e-3
    assert all(leaf.min() == 1 for leaf in counts(got[1][2]))


def counts(sent: Any) -> list[Any]:
    nodes = jax.tree.leaves(sent, is_leaf=lambda node: isinstance(node, fp8.Channel))
    return [node.count for node in nodes]


@pytest.mark.full
def test_unrolled_layers_have_the_same_state() -> None:
    config, layers = transformer_block.unstack(config_of("delayed"), PARAMS)
    own = [jax.tree.map(lambda leaf, at=at: leaf[at], warm("delayed")[0]) for at in range(2)]
    channel = fp8.new_channel(own)
    (_, (y, seen)), (_, _, sent) = jax.jit(differentiated(config, own))(layers, X, channel)
    (_, (wanted, wanted_seen)), (_, _, wanted_sent) = unsharded("delayed")
    assert max(distances(y, wanted)) < 1e-3
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *seen)
    blocks.assert_close(stacked, wanted_seen[0], rtol=0.02)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sent)
    blocks.assert_close(stacked, wanted_sent[0], rtol=0.02)


@pytest.mark.full
def test_decode_equals_one_call() -> None:
    config, layers = transformer_block.unstack(config_of("delayed"), PARAMS)
    trained = transformer_block.StackState(scaling=fp8.uses(warm("delayed")))
    own = transformer_block.unstack_state(config_of("delayed"), trained)

    @jax.jit
    def step(params: Any, x: Any, state: Any) -> Any:
        return transformer_block.apply(config, params, x, state=state)

    caches = transformer_block.init_caches(config, batch=8, capacity=32)
    first, state = step(layers, X[:, :8], dataclasses.replace(own, caches=caches))
    last, _ = step(layers, X[:, 8:9], state)
    whole = unsharded("delayed")[0][1][0][:, :9]
    assert max(distances(jnp.concatenate([first, last], axis=1), whole)) < 0.02


def test_a_config_takes_the_name_of_a_recipe() -> None:
    assert mlp_block.MlpConfig(embed=8, hidden=8, recipe="mxfp8").recipe == fp8.BlockScaling()
    assert mlp_block.init_scaling(config_of("current").mlp) is None
    assert transformer_block.init_scaling(config_of("mxfp8")) is None
    with raises(LayerError, "nvfp4", path="recipe", fix="mxfp8"):
        attention_block.AttentionConfig(embed=8, heads=2, recipe="nvfp4")
    with raises(LayerError, "scaling", "NoneType", path="state", fix="fp8.uses"):
        mlp_block.apply(config_of("delayed").mlp, jax.tree.map(lambda w: w[0], PARAMS[0]["mlp"]), X)


@pytest.mark.full
@pytest.mark.ci
def test_paths_of_quantized_kernels() -> None:
    strategy = sw.Strategy.preset("fsdp")
    strategy = strategy | sw.Strategy.model_validate(
        {"version": 1, "name": "own", "tensors": [{"match": "mlp/up/.*", "embed": "-"}]}
    )
    mesh = blocks.make_manager("fsdp", "auto").mesh
    params = jax.tree.map(lambda w: w[0], PARAMS[0]["mlp"])
    config = config_of("current").mlp
    with sw.PartitionManager(strategy, mesh=mesh, mode="train"):
        f = lambda path: mlp_block.apply(config, params, X, path=path)[0]  # noqa: E731
        text = jax.jit(lambda: f("mlp")).lower().compile().as_text()
        with raises(sw.StrategyError, "mlp/up/.*", fix="layers/mlp/up"):
            f(None)
    # Only `down` is stored in shards.
    assert len(re.findall(r"= u8\[[\d,]+\]\S* all-gather\(", text)) == 1


# Preset -> the size of the hidden dim, and what the error says.
PARTS = {
    "fsdp": (128, facts("(64, 2, 128)", 32, "fsdp=8", dim=0, axis="EMBED", fix="current")),
    "tensor": (64, facts("(64, 2, 64)", 32, "tp=4", dim=2, axis="MLP_INTERMEDIATE", fix="current")),
    # The backward pass contracts the tokens of the result, which sequence parallelism shards.
    "fsdp_tp_sp": (128, facts("(8, 32, 64)", 32, "tp=4", dim=1, axis="LENGTH", fix="current")),
}


@pytest.mark.parametrize("kind", ["auto", pytest.param("explicit", marks=pytest.mark.full)])
@pytest.mark.parametrize("preset", PARTS)
def test_parts_without_whole_blocks(preset: str, kind: str) -> None:
    hidden, message = PARTS[preset]
    config = dataclasses.replace(MLP, hidden=hidden, recipe="mxfp8")
    specs = mlp_block.specs(config)

    def train(params: Any, x: Any) -> Any:
        return jax.grad(lambda params: jnp.sum(mlp_block.apply(config, params, x)[0]))(params)

    with blocks.make_manager(preset, kind) as pm:
        residual = sw.ArraySpec(X.shape, "float32", RESIDUAL)
        params, x = pm.abstract(specs), pm.abstract(residual, role="activation")
        with raises(LayerError, message) as caught:
            jax.eval_shape(train, params, x)
    assert "fix   choose sizes whose parts are multiples of 32" in str(caught.value)


def test_state_of_other_layers_is_refused() -> None:
    stacked = config_of("delayed")
    config, layers = transformer_block.unstack(stacked, PARAMS)
    scaling = transformer_block.init_scaling(stacked)
    of_stack = transformer_block.StackState(scaling=fp8.uses(scaling * 2))
    with raises(
        LayerError, "scaling[0]", "(2,)", path="state", fix="transformer_block.unstack_state"
    ):
        transformer_block.apply(config, layers, X, state=of_stack)
    scaling = transformer_block.init_scaling(config)
    of_layer = transformer_block.StackState(scaling=fp8.uses(scaling[:1]))
    with raises(LayerError, "scaling[0]", path="state", fix="2"):
        transformer_block.apply(stacked, PARAMS, X, state=of_layer)
