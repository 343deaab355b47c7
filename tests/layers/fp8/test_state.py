"""The state of delayed scaling: one step per update, and no report that JAX has added up."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.errors import LayerError
from shardwright.layers import fp8, transformer_block
from shardwright.layers.attention_block import AttentionConfig
from shardwright.layers.fp8 import DelayedScaling
from shardwright.layers.mlp_block import MlpConfig
from shardwright.layers.transformer_block import StackState
from shardwright.testing import cpu_mesh
from tests.layers import blocks
from tests.raising import facts, raises

RECIPE = DelayedScaling(history=4)
X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)


def scaling() -> Any:
    return {"up": fp8.init(RECIPE, ["kernel"])}


def matmul(w: Any, channel: Any, state: Any, x: Any) -> tuple[Any, Any]:
    use = fp8.uses(state, channel)["up"]
    result = fp8.dense(x, {"kernel": w}, recipe=RECIPE, use=use)
    return result.ys["kernel"], {"up": result.seen}


def loss(w: Any, channel: Any, state: Any, x: Any, factor: Any) -> tuple[Any, Any]:
    """Return a loss whose gradient by the result is `factor` everywhere, so that is its amax."""
    y, seen = matmul(w, channel, state, x)
    return jnp.sum(y) * factor, seen


report = jax.jit(jax.grad(loss, 1, has_aux=True))  # (sent, seen)


def histories(state: Any) -> list[float]:
    """Return the largest values of the last update: of x, the kernel and the gradient."""
    node = state["up"]
    return [float(t.history[-1]) for t in (node.x, node.kernels["kernel"], node.grads["kernel"])]


def updated(sent: Any, seen: Any) -> Any:
    return fp8.update(RECIPE, scaling(), seen, sent)


def test_one_use() -> None:
    sent, seen = report(W, fp8.new_channel(scaling()), scaling(), X, 8.0)
    state = updated(sent, seen)
    assert histories(state) == [np.abs(X).max(), np.abs(W).max(), 8.0]
    assert state["up"].grads["kernel"].scale == 57344 / 8
    np.testing.assert_allclose(state["up"].x.scale, 448 / np.abs(X).max(), rtol=1e-6)


def test_scale_follows_history_for_its_length() -> None:
    # A spike of 100 sets the scale for exactly as many updates as the history has entries.
    step = functools.partial(fp8.step, RECIPE, dtype="float8_e4m3fn")
    state = fp8.TensorScaling(scale=jnp.float32(1), history=jnp.zeros(4))
    scales = []
    for amax in (1.0, 100.0, 1.0, 1.0, 1.0, 1.0):
        state = step(state, jnp.float32(amax))
        scales.append(float(state.scale))
    np.testing.assert_allclose(scales, [448, 4.48, 4.48, 4.48, 4.48, 448], rtol=1e-6)
    recent = DelayedScaling(history=4, algorithm="most_recent", margin=2)
    state = fp8.step(recent, state, jnp.float32(2.0), "float8_e5m2")
    assert state.scale == 57344 / 2 / 4


# Where one leaf of the channel takes part in several uses, JAX adds the reports: 12 for 8 and 10
# for 4. The counter says so, and the error names the leaf.


def twice(w: Any, channel: Any) -> Any:
    first, seen = loss(w, channel, scaling(), X, 4.0)
    second, _ = loss(w, channel, scaling(), X, 8.0)
    return first + second, seen


def scanned(w: Any, channel: Any) -> Any:
    def body(total: Any, factor: Any) -> Any:
        value, seen = loss(w, channel, scaling(), X, factor)
        return total + value, seen

    return jax.lax.scan(body, 0.0, jnp.arange(1.0, 5.0))


def mapped(w: Any, channel: Any) -> Any:
    values, seen = jax.vmap(lambda x, factor: loss(w, channel, scaling(), x, factor))(
        np.stack([X] * 4), jnp.arange(1.0, 5.0)
    )
    return jnp.sum(values), seen


@pytest.mark.parametrize(
    ("f", "wrong", "count"), [(twice, 12, 2), (scanned, 10, 4), (mapped, 10, 4)]
)
def test_shared_leaf_is_refused(f: Any, wrong: float, count: float) -> None:
    channel = fp8.new_channel(scaling())
    sent, seen = jax.jit(jax.grad(f, 1, has_aux=True))(W, channel)
    assert sent["up"]["kernel"].amax == wrong
    with raises(LayerError, count, "counter", "JAX", path="up/kernel", fix="fp8.new_channel"):
        updated(sent, seen)


def test_shared_leaf_is_refused_under_jit() -> None:
    sent, seen = jax.jit(jax.grad(twice, 1, has_aux=True))(W, fp8.new_channel(scaling()))
    state = jax.jit(updated)(sent, seen)
    assert np.isnan(state["up"].x.scale)
    assert np.isnan(jax.jit(matmul)(W, None, state, X)[0]).all()
    for use in (fp8.check, fp8.uses):
        with raises(LayerError, 2, "JAX", path="up/kernel", fix="fp8.new_channel"):
            use(state)


def test_unused_channel_is_refused() -> None:
    def unused(channel: Any) -> Any:
        value, seen = loss(W, channel, scaling(), X, 1.0)
        return jax.lax.stop_gradient(value), seen

    sent, seen = jax.grad(unused, has_aux=True)(fp8.new_channel(scaling()))
    message = facts("counter", 0, path="up/kernel")
    with raises(LayerError, message) as caught:
        updated(sent, seen)
    assert "uses(scaling, channel)" in caught.value.fix
    assert np.isnan(jax.jit(updated)(sent, seen)["up"].x.scale)


def started() -> Any:
    """Return a state after one update, in which no scale is 1."""
    return updated(*report(W, fp8.new_channel(scaling()), scaling(), 4 * X, 8.0))


@pytest.mark.parametrize("ran", [True, False])
def test_layer_without_backward_pass(ran: bool) -> None:
    """A frozen layer keeps what it knows of its gradient, a skipped one everything."""
    states = {"frozen": started()["up"], "trained": started()["up"]}

    def two(channel: Any) -> Any:
        _, seen = loss(W, {"up": channel["frozen"]}, {"up": states["frozen"]}, X, 1.0)
        skipped = jax.tree.map(jnp.zeros_like, seen)
        value, last = loss(W, {"up": channel["trained"]}, {"up": states["trained"]}, X, 2.0)
        return value, {"frozen": (seen if ran else skipped)["up"], "trained": last["up"]}

    sent, seen = jax.jit(jax.grad(two, has_aux=True))(fp8.new_channel(states))
    new = fp8.update(RECIPE, states, seen, sent)
    for state in (new, jax.jit(lambda *args: fp8.update(RECIPE, *args))(states, seen, sent)):
        fp8.check(state)
        fp8.uses(state["frozen"])
    frozen, old = new["frozen"], states["frozen"]
    forward = (4 * np.abs(X).max(), np.abs(X).max()) if ran else (0.0, 4 * np.abs(X).max())
    np.testing.assert_array_equal(frozen.x.history[-2:], np.float32(forward))
    assert frozen.x.scale == old.x.scale  # the larger of two inputs decides
    np.testing.assert_array_equal(frozen.grads["kernel"].history, [0, 0, 0, 8])
    assert frozen.grads["kernel"].scale == old.grads["kernel"].scale == 57344 / 8
    np.testing.assert_array_equal(new["trained"].grads["kernel"].history, [0, 0, 8, 2])


def test_layer_skipped_in_one_microbatch() -> None:
    counts, amaxes = np.array([0.0, 1.0, 0.0]), np.array([0.0, 4.0, 0.0])
    sent = {"up": {"kernel": fp8.Channel(amax=amaxes, count=counts)}}
    seen = fp8.DenseSeen(x=np.array([0.0, 3.0, 0.0]), kernels={"kernel": amaxes})
    assert histories(updated(sent, {"up": seen})) == [3.0, 4.0, 4.0]
    sent["up"]["kernel"] = fp8.Channel(amax=amaxes, count=np.array([0.0, 1.0, 2.0]))
    with raises(LayerError, 2, "JAX", path="up/kernel", fix="fp8.new_channel"):
        updated(sent, {"up": seen})


@pytest.mark.full
@pytest.mark.parametrize("scan", [True, False])
def test_partly_frozen_stack(scan: bool) -> None:
    """The lower half of a stack has no backward pass, in a scan and layer by layer."""
    config = transformer_block.TransformerConfig(
        layers=2,
        attention=AttentionConfig(embed=16, heads=2, recipe=RECIPE),
        mlp=MlpConfig(embed=16, hidden=32, recipe=RECIPE),
        scan=scan,
    )
    pm = sw.PartitionManager(sw.Strategy.preset("single"), mesh=cpu_mesh("fsdp:1"))
    params = [pm.init(transformer_block.specs(config), jax.random.key(at)) for at in (0, 1)]
    states = [transformer_block.init_scaling(config)] * 2
    x = np.random.default_rng(0).normal(size=(2, 8, 16)).astype(np.float32)

    def stack(channel: Any) -> Any:
        y, seen = x, []
        for own, state in zip(params, fp8.uses(states, channel), strict=True):
            y = jax.lax.stop_gradient(y)
            y, after = transformer_block.apply(config, own, y, state=StackState(scaling=state))
            seen.append(after.scaling)
        return jnp.sum(jnp.sin(y)), seen

    sent, seen = jax.jit(jax.grad(stack, has_aux=True))(fp8.new_channel(states))
    new = fp8.update(RECIPE, states, seen, sent)
    fp8.check(new)
    lower, upper = (
        jax.tree.leaves(node, is_leaf=lambda leaf: isinstance(leaf, fp8.DenseScaling))
        for node in new
    )
    for frozen, trained in zip(lower, upper, strict=True):
        for name, tensor in frozen.grads.items():
            assert np.all(np.asarray(tensor.scale) == 1)
            assert not np.asarray(tensor.history).any()
            assert np.all(np.asarray(trained.grads[name].history)[..., -1] > 0)
        assert np.all(np.asarray(frozen.x.history)[..., -1] > 0)


# With a leaf per use, every transformation gives the maximum.

FACTORS = np.array([1.0, 4.0, 2.0, 3.0], np.float32)
ROWS = np.stack([X, X / 2, X * 3, X])


def in_scan(channel: Any) -> Any:
    def body(total: Any, trip: Any) -> Any:
        own, x, factor = trip
        value, seen = loss(W, own, scaling(), x, factor)
        return total + value, seen

    return jax.lax.scan(body, 0.0, (channel, ROWS, FACTORS))


def in_remat_scan(channel: Any) -> Any:
    @jax.checkpoint
    def body(total: Any, trip: Any) -> Any:
        own, x, factor = trip
        value, seen = loss(W, own, scaling(), x, factor)
        return total + value, seen

    return jax.lax.scan(body, 0.0, (channel, ROWS, FACTORS))


def in_vmap(channel: Any) -> Any:
    values, seen = jax.vmap(lambda own, x, factor: loss(W, own, scaling(), x, factor))(
        channel, ROWS, FACTORS
    )
    return jnp.sum(values), seen


def in_calls(channel: Any) -> Any:
    results = [
        loss(W, jax.tree.map(lambda leaf, at=at: leaf[at], channel), scaling(), *case)
        for at, case in enumerate(zip(ROWS, FACTORS, strict=True))
    ]
    return sum(value for value, _ in results), fp8.stack(*(seen for _, seen in results))


WANTED = [np.abs(ROWS).max(), np.abs(W).max(), 4.0]


@pytest.mark.parametrize("f", [in_scan, in_remat_scan, in_vmap, in_calls])
def test_uses_combine_by_maximum(f: Any) -> None:
    channel = fp8.new_channel(scaling(), uses=4)
    sent, seen = jax.jit(jax.grad(f, has_aux=True))(channel)
    np.testing.assert_array_equal(sent["up"]["kernel"].amax, FACTORS)
    assert histories(updated(sent, seen)) == WANTED


def test_accumulated_gradients() -> None:
    # The gradient is taken per microbatch; the reports are stacked, not added.
    def body(total: Any, trip: Any) -> Any:
        (grads, sent), seen = jax.grad(loss, (0, 1), has_aux=True)(
            W, fp8.new_channel(scaling()), scaling(), *trip
        )
        return total + grads, (sent, seen)

    grads, (sent, seen) = jax.lax.scan(body, jnp.zeros_like(W), (ROWS, FACTORS))
    assert histories(updated(sent, seen)) == WANTED
    assert np.isfinite(grads).all()


def test_gradient_inside_of_vmap() -> None:
    sent, seen = jax.vmap(report, in_axes=(None, None, None, 0, 0))(
        W, fp8.new_channel(scaling()), scaling(), ROWS, FACTORS
    )
    assert histories(updated(sent, seen)) == WANTED


def test_stacked_layers_have_a_state_each() -> None:
    layers = {"up": fp8.init(RECIPE, ["kernel"], layers=4)}

    def stack_loss(channel: Any) -> Any:
        def body(total: Any, trip: Any) -> Any:
            own, state, x, factor = trip
            value, seen = loss(W, own, state, x, factor)
            return total + value, seen

        return jax.lax.scan(body, 0.0, (channel, layers, ROWS, FACTORS))

    sent, seen = jax.jit(jax.grad(stack_loss, has_aux=True))(fp8.new_channel(layers))
    state = fp8.update(RECIPE, layers, seen, sent)["up"]
    np.testing.assert_array_equal(state.grads["kernel"].history[:, -1], FACTORS)
    np.testing.assert_array_equal(state.x.history[:, -1], np.abs(ROWS).max((1, 2)))


def test_specs_place_a_state() -> None:
    """The state of a step is one tree, so the scaling has shardings too, and can be restored."""
    recipe = fp8.DelayedScaling(history=4)
    abstract = jax.eval_shape(lambda: {"up": fp8.init(recipe, ["up"], layers=2)})
    with blocks.make_manager("fsdp_tp", "auto") as pm:
        target = pm.abstract(fp8.specs(abstract))
        scaling = {"up": fp8.init(recipe, ["up"], layers=2)}
        placed = pm.shard(scaling, fp8.specs(scaling), role="param")
        step = pm.jit_step(lambda state: (state, None), target)
        again, _ = step(placed)
    assert jax.tree.structure(again) == jax.tree.structure(abstract)
    for leaf, wanted in zip(jax.tree.leaves(again), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == wanted.sharding
        assert leaf.sharding.is_fully_replicated
        assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)


def test_recipes_without_state() -> None:
    assert fp8.init(fp8.read_recipe("current"), ["kernel"]) is None
    with raises(LayerError, "scaling", "NoneType", path="state", fix="fp8.uses"):
        fp8.dense(X, {"kernel": W}, recipe=RECIPE)
    use = fp8.uses(scaling())["up"]
    with raises(LayerError, "BlockScaling", path="state"):
        fp8.dense(X, {"kernel": W}, recipe="mxfp8", use=use)
    with raises(LayerError, "kernel", "gate", path="state", fix="init_scaling"):
        fp8.dense(X, {"gate": W}, recipe=RECIPE, use=use)
