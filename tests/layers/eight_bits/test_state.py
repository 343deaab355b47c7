"""The state of delayed scaling: one step per update, and no report that JAX has added up."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.errors import LayerError
from shardwright.layers import eight_bits
from shardwright.layers.eight_bits import DelayedScaling
from tests.layers import blocks

RECIPE = DelayedScaling(history=4)
X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)


def scaling() -> Any:
    return {"up": eight_bits.init(RECIPE, ["kernel"])}


def product(w: Any, channel: Any, state: Any, x: Any) -> tuple[Any, Any]:
    use = eight_bits.uses(state, channel)["up"]
    result = eight_bits.dense(x, {"kernel": w}, recipe=RECIPE, use=use)
    return result.ys["kernel"], {"up": result.seen}


def loss(w: Any, channel: Any, state: Any, x: Any, factor: Any) -> tuple[Any, Any]:
    """Return a loss whose gradient by the result is `factor` everywhere, so that is its amax."""
    y, seen = product(w, channel, state, x)
    return jnp.sum(y) * factor, seen


report = jax.grad(loss, 1, has_aux=True)  # (sent, seen)


def histories(state: Any) -> list[float]:
    """Return the largest values of the last update: of x, the kernel and the gradient."""
    node = state["up"]
    return [float(t.history[-1]) for t in (node.x, node.kernels["kernel"], node.grads["kernel"])]


def updated(sent: Any, seen: Any) -> Any:
    return eight_bits.update(RECIPE, scaling(), seen, sent)


def test_one_use() -> None:
    sent, seen = report(W, eight_bits.new_channel(scaling()), scaling(), X, 8.0)
    state = updated(sent, seen)
    assert histories(state) == [np.abs(X).max(), np.abs(W).max(), 8.0]
    assert state["up"].grads["kernel"].scale == 57344 / 8
    np.testing.assert_allclose(state["up"].x.scale, 448 / np.abs(X).max(), rtol=1e-6)


def test_scale_follows_history_for_its_length() -> None:
    # A spike of 100 sets the scale for exactly as many updates as the history has entries.
    step = functools.partial(eight_bits.step, RECIPE, dtype="float8_e4m3fn")
    state = eight_bits.TensorScaling(scale=jnp.float32(1), history=jnp.zeros(4))
    scales = []
    for amax in (1.0, 100.0, 1.0, 1.0, 1.0, 1.0):
        state = step(state, jnp.float32(amax))
        scales.append(float(state.scale))
    np.testing.assert_allclose(scales, [448, 4.48, 4.48, 4.48, 4.48, 448], rtol=1e-6)
    recent = DelayedScaling(history=4, algorithm="most_recent", margin=2)
    state = eight_bits.step(recent, state, jnp.float32(2.0), "float8_e5m2")
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
    channel = eight_bits.new_channel(scaling())
    sent, seen = jax.jit(jax.grad(f, 1, has_aux=True))(W, channel)
    assert sent["up"]["kernel"].amax == wrong
    with pytest.raises(LayerError, match=f"up/kernel: the counter is {count}: the product took"):
        updated(sent, seen)


def test_shared_leaf_is_refused_under_jit() -> None:
    sent, seen = jax.grad(twice, 1, has_aux=True)(W, eight_bits.new_channel(scaling()))
    state = jax.jit(updated)(sent, seen)
    assert np.isnan(state["up"].x.scale)
    assert np.isnan(jax.jit(product)(W, None, state, X)[0]).all()
    for use in (eight_bits.check, eight_bits.uses):
        with pytest.raises(LayerError, match="up/kernel: the counter is 2"):
            use(state)


def test_unused_channel_is_refused() -> None:
    def unused(channel: Any) -> Any:
        value, seen = loss(W, channel, scaling(), X, 1.0)
        return jax.lax.stop_gradient(value), seen

    sent, seen = jax.grad(unused, has_aux=True)(eight_bits.new_channel(scaling()))
    with pytest.raises(
        LayerError, match="up/kernel: the counter is 0: the product took part in no"
    ):
        updated(sent, seen)


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
    return sum(value for value, _ in results), eight_bits.stack(*(seen for _, seen in results))


WANTED = [np.abs(ROWS).max(), np.abs(W).max(), 4.0]


@pytest.mark.parametrize("f", [in_scan, in_remat_scan, in_vmap, in_calls])
def test_uses_combine_by_maximum(f: Any) -> None:
    channel = eight_bits.new_channel(scaling(), uses=4)
    sent, seen = jax.jit(jax.grad(f, has_aux=True))(channel)
    np.testing.assert_array_equal(sent["up"]["kernel"].amax, FACTORS)
    assert histories(updated(sent, seen)) == WANTED


def test_accumulated_gradients() -> None:
    # The gradient is taken per microbatch; the reports are stacked, not added.
    def body(total: Any, trip: Any) -> Any:
        (grads, sent), seen = jax.grad(loss, (0, 1), has_aux=True)(
            W, eight_bits.new_channel(scaling()), scaling(), *trip
        )
        return total + grads, (sent, seen)

    grads, (sent, seen) = jax.lax.scan(body, jnp.zeros_like(W), (ROWS, FACTORS))
    assert histories(updated(sent, seen)) == WANTED
    assert np.isfinite(grads).all()


def test_gradient_inside_of_vmap() -> None:
    sent, seen = jax.vmap(report, in_axes=(None, None, None, 0, 0))(
        W, eight_bits.new_channel(scaling()), scaling(), ROWS, FACTORS
    )
    assert histories(updated(sent, seen)) == WANTED


def test_stacked_layers_have_a_state_each() -> None:
    layers = {"up": eight_bits.init(RECIPE, ["kernel"], layers=4)}

    def stack_loss(channel: Any) -> Any:
        def body(total: Any, trip: Any) -> Any:
            own, state, x, factor = trip
            value, seen = loss(W, own, state, x, factor)
            return total + value, seen

        return jax.lax.scan(body, 0.0, (channel, layers, ROWS, FACTORS))

    sent, seen = jax.grad(stack_loss, has_aux=True)(eight_bits.new_channel(layers))
    state = eight_bits.update(RECIPE, layers, seen, sent)["up"]
    np.testing.assert_array_equal(state.grads["kernel"].history[:, -1], FACTORS)
    np.testing.assert_array_equal(state.x.history[:, -1], np.abs(ROWS).max((1, 2)))


def test_specs_place_a_state() -> None:
    """The state of a step is one tree, so the scaling has shardings too, and can be restored."""
    recipe = eight_bits.DelayedScaling(history=4)
    abstract = jax.eval_shape(lambda: {"up": eight_bits.init(recipe, ["up"], layers=2)})
    with blocks.make_manager("fsdp_tp", "auto") as pm:
        target = pm.abstract(eight_bits.specs(abstract))
        scaling = {"up": eight_bits.init(recipe, ["up"], layers=2)}
        placed = pm.shard(scaling, eight_bits.specs(scaling), role="param")
        step = pm.jit_step(lambda state: (state, None), target)
        again, _ = step(placed)
    assert jax.tree.structure(again) == jax.tree.structure(abstract)
    for leaf, wanted in zip(jax.tree.leaves(again), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == wanted.sharding
        assert leaf.sharding.is_fully_replicated
        assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)


def test_recipes_without_state() -> None:
    assert eight_bits.init(eight_bits.read_recipe("current"), ["kernel"]) is None
    with pytest.raises(LayerError, match="delayed scaling has a state, and got NoneType"):
        eight_bits.dense(X, {"kernel": W}, recipe=RECIPE)
    use = eight_bits.uses(scaling())["up"]
    with pytest.raises(LayerError, match="BlockScaling has no state"):
        eight_bits.dense(X, {"kernel": W}, recipe="mxfp8", use=use)
    with pytest.raises(LayerError, match="the state is that of kernel, not of gate"):
        eight_bits.dense(X, {"gate": W}, recipe=RECIPE, use=use)
