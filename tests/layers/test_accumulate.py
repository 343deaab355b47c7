"""Accumulated gradients equal those of the whole batch, and are summed over devices once."""

from __future__ import annotations

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.layers import (
    accumulate,
    attention_block,
    eight_bits,
    embedding,
    loss,
    mlp_block,
    transformer_block,
)
from shardwright.plan.collectives import read_collectives
from shardwright.testing import cpu_mesh
from tests.layers import blocks

CONFIG = transformer_block.TransformerConfig(
    layers=2,
    attention=attention_block.AttentionConfig(embed=16, heads=4),
    mlp=mlp_block.MlpConfig(embed=16, hidden=32),
)
SPECS = {"table": embedding.specs(32, 16), "layers": transformer_block.specs(CONFIG)}
PARAMS = blocks.random_params(SPECS)
TOKENS = np.random.default_rng(0).integers(0, 32, (32, 8))
MESHES = {"ddp": "dp:8", "fsdp": "fsdp:8"}
MLP = mlp_block.MlpConfig(embed=64, hidden=64, recipe="delayed")
ROWS = np.random.default_rng(1).normal(size=(32, 4, 64)).astype(np.float32)


def decoder_loss(params: Any, tokens: Any, channel: Any) -> Any:
    del channel
    x = embedding.apply(params["table"], tokens)
    x, _ = transformer_block.apply(CONFIG, params["layers"], x)
    return loss.cross_entropy(x, params["table"], tokens, tied=True).mean, None


def manager(preset: str) -> sw.PartitionManager:
    return sw.PartitionManager(
        sw.Strategy.preset(preset), mesh=cpu_mesh(MESHES[preset]), mode="train"
    )


@functools.cache
def whole_batch() -> Any:
    step = jax.value_and_grad(lambda params: decoder_loss(params, TOKENS, None)[0])
    return jax.jit(step)(PARAMS)


@pytest.mark.parametrize(
    ("preset", "n"),
    [
        ("fsdp", 4),
        pytest.param("fsdp", 2, marks=pytest.mark.wide),
        pytest.param("ddp", 4, marks=pytest.mark.wide),
        pytest.param("ddp", 1, marks=pytest.mark.wide),
    ],
)
def test_gradients_are_summed_once(preset: str, n: int) -> None:
    with manager(preset) as pm:
        params = pm.shard(PARAMS, SPECS, role="param")
        tokens = pm.shard(TOKENS, sw.BATCH, sw.QUERY_LENGTH)
        compiled = jax.jit(accumulate(decoder_loss, n, specs=SPECS)).lower(params, tokens).compile()
        counts = collections.Counter({"all_reduce": 0})
        for event in read_collectives(compiled, pm.mesh):
            counts[str(event.kind)] += event.count or 0
        result = compiled(params, tokens)
    assert counts["all_reduce"] == 1, counts
    # Six kernels of each stack of layers, and the table; gathered once.
    assert counts.get("all_gather", 0) == (7 if preset == "fsdp" else 0)
    assert set(counts) <= {"all_reduce", "all_gather"}
    blocks.assert_close((result.value, result.grads), whole_batch(), rtol=1e-4)
    for gradient, value in zip(jax.tree.leaves(result.grads), jax.tree.leaves(params), strict=True):
        assert gradient.sharding.is_equivalent_to(value.sharding, value.ndim)


@pytest.mark.wide
def test_without_a_manager() -> None:
    result = jax.jit(accumulate(decoder_loss, 8, specs=SPECS))(PARAMS, TOKENS)
    blocks.assert_close((result.value, result.grads), whole_batch(), rtol=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize("preset", MESHES)
def test_state_of_eight_bits_is_overwritten(preset: str) -> None:
    """Largest values are those of all microbatches and devices; nothing is added."""
    specs = mlp_block.specs(MLP)
    params, scaling = blocks.random_params(specs), mlp_block.init_scaling(MLP)

    def mean(params: Any, x: Any, channel: Any) -> Any:
        y, seen = mlp_block.apply(MLP, params, x, state=eight_bits.uses(scaling, channel))
        # A factor, so that no gradient is too small for eight bits with the first scale, 1.
        return 2.0**17 * jnp.mean(jnp.sin(y)), seen

    channel = eight_bits.new_channel(scaling, uses=4)
    plain = jax.jit(accumulate(mean, 4, specs=specs))(params, ROWS, channel)
    with manager(preset) as pm:
        stored = pm.shard(params, specs, role="param")
        rows = pm.shard(ROWS, sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
        result = jax.jit(accumulate(mean, 4, specs=specs))(stored, rows, channel)
    # Each microbatch has other examples here, so only what all of them have together is equal.
    blocks.assert_close(result.grads, plain.grads, rtol=0.02)
    assert isinstance(MLP.recipe, eight_bits.DelayedScaling)
    scaled = eight_bits.update(MLP.recipe, scaling, result.seen, result.sent)
    eight_bits.check(scaled)
    zeros = eight_bits.new_channel(scaling)
    (_, seen), whole = jax.jit(jax.value_and_grad(mean, 2, has_aux=True))(params, ROWS, zeros)
    for name in ("up", "down"):
        assert scaled[name].x.history[-1] == pytest.approx(float(seen[name].x), rel=1e-3)
        kernel = np.abs(params[name]["kernel"]).max()
        assert scaled[name].kernels[name].history[-1] == kernel
        counts = result.sent[name][name].count
        np.testing.assert_array_equal(counts, np.ones(4))
        # Neither n nor the number of devices changes the scales of gradients.
        largest = result.sent[name][name].amax.max()
        assert largest == pytest.approx(float(whole[name][name].amax), rel=0.02)


@pytest.mark.parametrize("preset", [None, "fsdp"])
def test_sums_of_bfloat16_are_wide(preset: str | None) -> None:
    """The mean gradient is rounded once. A sum in bfloat16 loses 3 % after 256 microbatches."""
    specs = {"w": sw.ArraySpec((16, 8), jnp.bfloat16, (sw.EMBED, sw.MLP_INTERMEDIATE))}
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), blocks.random_params(specs))
    rows = np.random.default_rng(0).normal(size=(2048, 16)).astype(np.float32) + 1

    def mean(params: Any, rows: Any, channel: Any) -> Any:
        del channel
        return jnp.mean(jnp.sum(rows @ params["w"].astype(jnp.float32), axis=-1)), None

    step = jax.jit(accumulate(mean, 256, specs=specs))
    if preset is None:
        result = step(params, rows)
    else:
        with manager(preset) as pm:
            stored = pm.shard(params, specs, role="param")
            compiled = step.lower(stored, pm.shard(rows, sw.BATCH, sw.EMBED)).compile()
            result = compiled(stored, rows)
            kinds = [str(event.kind) for event in read_collectives(compiled, pm.mesh)]
        assert kinds.count("all_reduce") == 1, kinds
    exact = rows.astype(np.float64).mean(0)[:, None]
    assert result.grads["w"].dtype == jnp.bfloat16
    error = np.abs(np.asarray(result.grads["w"], np.float64) / exact - 1).max()
    assert error <= 2.0**-8, error


def test_bad_batch_and_loss() -> None:
    def mean(params: Any, batch: Any, channel: Any) -> Any:
        del channel
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(batch)) * params["w"], None

    specs = {"w": sw.ArraySpec((), np.float32, ())}
    params, rows = {"w": np.float32(1)}, np.ones((8, 2), np.float32)
    run = accumulate(mean, 4, specs=specs)
    delayed = eight_bits.new_channel(mlp_block.init_scaling(MLP), uses=2)
    cases: list[tuple[Any, str]] = [
        (
            lambda: run(params, {"a": rows, "weights": np.ones(4), "x": rows}),
            r"batch: the arrays differ in dim 0, which is BATCH: a has shape \(8, 2\), weights has",
        ),
        (lambda: run(params, {"a": np.float32(1), "x": rows}), r"a has shape \(\), x has shape"),
        (lambda: run(params, {"x": rows, "z": 1.0}), r"z has shape \(\)"),
        (lambda: run(params, {}), "batch: the batch has no examples"),
        (lambda: run(params, rows[:0]), "batch: the batch has no examples"),
        (lambda: run(params, rows, delayed), r"shape \(2,\), and there are 4 microbatches"),
        (
            lambda: accumulate(lambda *given: mean(*given)[0], 4, specs=specs)(params, rows),
            r"loss: it returned an array of shape \(\), not \(mean loss, seen\)",
        ),
        (
            lambda: accumulate(lambda p, x, c: (x, None), 4, specs=specs)(params, rows),
            r"loss: the mean loss is an array of shape \(2, 2\), not a scalar",
        ),
    ]
    for call, message in cases:
        with pytest.raises(sw.LayerError, match=message) as caught:
            call()
        assert "fix  " in str(caught.value)


def test_bad_input() -> None:
    with pytest.raises(sw.LayerError, match="n must be a positive integer"):
        accumulate(decoder_loss, 0, specs=SPECS)
    run = accumulate(decoder_loss, 3, specs=SPECS)
    with pytest.raises(sw.IndivisibleError, match="n=3 does not divide the 32 examples"):
        run(PARAMS, TOKENS)
    with manager("fsdp"), pytest.raises(sw.IndivisibleError, match="the 4 examples of a device"):
        run(PARAMS, TOKENS)
    with (
        blocks.make_manager("fsdp_tp", "auto"),
        pytest.raises(sw.LayerError, match="tp=4 does not shard it"),
    ):
        run(PARAMS, TOKENS)
    with (
        blocks.make_manager("fsdp", "explicit"),
        pytest.raises(sw.LayerError, match="needs Auto mesh axes"),
    ):
        run(PARAMS, TOKENS)
