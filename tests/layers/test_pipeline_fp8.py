"""Delayed scaling in a pipeline equals that of the scan that runs once for each microbatch.

Scales are constant during a step, and the amaxes of a step are maxima over microbatches.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright as sw
from shardwright.layers import fp8, transformer_block
from shardwright.layers.transformer_block import StackState
from tests.layers import blocks
from tests.layers.test_pipeline import ATTENTION, COUNT, MLP, RANDOM, X, in_repeats, order
from tests.layers.test_pipeline_loss import manager

RECIPE = fp8.DelayedScaling(history=4)
CONFIG = transformer_block.TransformerConfig(
    layers=4,
    attention=dataclasses.replace(ATTENTION, recipe=RECIPE),
    mlp=dataclasses.replace(MLP, recipe=RECIPE),
)
PARAMS = blocks.random_params(transformer_block.specs(CONFIG))
WEIGHTS = RANDOM.normal(size=X.shape).astype(np.float32)
OWN = sw.stack_specs(sw.ArraySpec((16, 16), jnp.float32, (sw.EMBED, sw.EMPTY)), 4)


def head(_: Any, y: Any, weights: Any) -> Any:
    return jnp.sum(jnp.sin(y) * weights)


def of_blocks(params: Any, x: Any, uses: Any) -> Any:
    y, state = transformer_block.apply(CONFIG, params, x, state=StackState(scaling=uses))
    return y, state.scaling


def of_own_layers(params: Any, x: Any, uses: Any) -> Any:
    def layer(w: Any, x: Any, inputs: Any) -> Any:
        result = fp8.dense(x, {"w": w}, recipe=RECIPE, use=inputs.per_layer)
        return x + jnp.tanh(result.ys["w"]), result.seen

    return sw.pipeline(layer, params, x, specs=OWN, per_layer=uses)


@functools.cache
def of_each_microbatch(layers: Any, shards: int) -> Any:
    """Return a step of the scan, once per microbatch: (loss, gradients, next scaling)."""
    parts = order(shards)

    def step(params: Any, x: Any, scaling: Any) -> Any:
        def total(params: Any, x: Any, channel: Any) -> Any:
            def of(each: Any) -> Any:
                x, weights, own = each
                y, seen = layers(params, x, fp8.uses(scaling, own))
                return head(None, y, weights), seen

            losses, seen = jax.lax.map(of, (x[parts], jnp.asarray(WEIGHTS)[parts], channel))
            return losses.sum(), seen

        channel = fp8.new_channel(scaling, uses=COUNT)
        return updated(total, params, x, scaling, channel)

    return jax.jit(step)


def updated(total: Any, params: Any, x: Any, scaling: Any, channel: Any) -> Any:
    differentiated = jax.value_and_grad(total, (0, 1, 2), has_aux=True)
    (value, seen), (*gradients, sent) = differentiated(params, x, channel)
    return value, gradients, fp8.update(RECIPE, scaling, seen, sent)


def in_stages(through: Any, factor: float = 1.0) -> Any:
    """Return the same step under the ambient strategy, with one channel for all microbatches.

    Args:
      through: Layers, or "loss" for blocks and head in `transformer_block.loss`.
      factor: What the loss is multiplied by.
    """

    def step(params: Any, x: Any, weights: Any, scaling: Any) -> Any:
        def total(params: Any, x: Any, channel: Any) -> Any:
            uses = fp8.uses(scaling, channel)
            if through != "loss":
                y, seen = through(params, x, uses)
                return head(None, y, weights), seen
            given: Any = {"head": head, "head_params": (), "head_inputs": weights}
            state = StackState(scaling=uses)
            value, state = transformer_block.loss(CONFIG, params, x, state=state, **given)
            return factor * value, state.scaling

        return updated(total, params, x, scaling, fp8.new_channel(scaling))

    return step


def rows(pm: sw.PartitionManager) -> list[Any]:
    return [pm.shard(each, sw.BATCH, sw.LENGTH, sw.EMBED) for each in (X, WEIGHTS)]


def stored(pm: sw.PartitionManager) -> Any:
    """Return the parameters of the blocks, as the strategy stores them."""
    assert pm.rules.pipeline is not None
    params = in_repeats(PARAMS, pm.rules.pipeline.repeats)
    return pm.shard(params, transformer_block.specs(CONFIG), role="param")


def shards_of(pm: sw.PartitionManager) -> int:
    return math.prod(pm.sizes.get(axis, 1) for axis in ("dp", "fsdp"))


def test_own_layers_have_one_channel() -> None:
    """A bubble counts as no use, and reports no amax."""
    w = blocks.random_params(OWN)
    scaling = fp8.init(RECIPE, ["w"], layers=4)
    wanted = of_each_microbatch(of_own_layers, 1)(w, X, scaling)
    with manager("gpipe", "pp:2") as pm:
        params = pm.shard(w, OWN, role="param")
        got = jax.jit(in_stages(of_own_layers))(params, *rows(pm), scaling)
    blocks.assert_close(got, (wanted[0], list(wanted[1]), wanted[2]), rtol=5e-6)
    fp8.check(got[2])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(
    ("through", "schedule", "mesh"),
    [
        ("apply", "gpipe", "pp:2,tp:2"),
        ("apply", "circular", "pp:2,fsdp:2"),
        ("loss", "circular", "pp:2,dp:2"),
        ("loss", "1f1b", "pp:2,dp:2"),
        ("loss", "1f1b", "pp:2,tp:2"),
        ("apply", "circular", "pp:1,fsdp:2"),
        ("loss", "1f1b", "pp:1,tp:2"),
    ],
)
def test_equals_the_scan_of_each_microbatch(
    through: str, schedule: str, mesh: str, kind: Any
) -> None:
    """In the second step, whose scales are those of the first.

    1f1b quantizes gradients before they are multiplied by the cotangent, and reports these.
    """
    with manager(schedule, mesh, kind=kind) as pm:
        shards, repeats = shards_of(pm), pm.rules.pipeline.repeats
    factor = 3.0 if schedule == "1f1b" and pm.sizes["pp"] > 1 else 1.0
    plain = of_each_microbatch(of_blocks, shards)
    first = plain(PARAMS, X, transformer_block.init_scaling(CONFIG))[2]
    with pm:
        arrays = (stored(pm), *rows(pm), first)
        step = in_stages("loss" if through == "loss" else of_blocks, factor)
        value, gradients, scaling = jax.jit(step)(*arrays)
        assert pm.plan(step, *arrays).walked.complete
    wanted, (of_params, of_x), next_scaling = plain(PARAMS, X, first)
    blocks.assert_close(value / factor, wanted, rtol=5e-6)
    own = jax.tree.map(lambda leaf: leaf / factor, gradients)
    blocks.assert_close(own, [in_repeats(of_params, repeats), of_x])
    fp8.check(scaling)
    blocks.assert_close(scaling, next_scaling)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_training_has_the_losses_of_the_scan(schedule: str) -> None:
    optimizer = optax.adam(1e-2)

    def train(step: Any, params: Any, *arrays: Any) -> list[float]:
        scaling, state = transformer_block.init_scaling(CONFIG), optimizer.init(params)
        losses = []
        for _ in range(3):
            value, (gradients, _), scaling = step(params, *arrays, scaling)
            updates, state = optimizer.update(gradients, state)
            params = optax.apply_updates(params, updates)
            losses.append(float(value))
        return losses

    with manager(schedule, "pp:2,fsdp:2") as pm:
        losses = train(jax.jit(in_stages("loss")), stored(pm), *rows(pm))
    wanted = train(of_each_microbatch(of_blocks, 2), PARAMS, X)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert len({*losses}) == 3
