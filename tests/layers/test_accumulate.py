"""Accumulated gradients equal those of the whole batch, and are summed over devices once."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.layers import (
    Weighted,
    accumulate,
    attention_block,
    dense,
    dropout,
    embedding,
    fp8,
    loss,
    mlp_block,
    moe_block,
    norm,
    transformer_block,
)
from shardwright.layers.closures import closed_over_keys
from shardwright.layers.moe import MoEConfig
from shardwright.plan.collectives import read_collectives
from shardwright.testing import cpu_mesh
from tests.layers import blocks
from tests.raising import facts, raises

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
    return loss.cross_entropy(x, params["table"], tokens, tied=True).weighted, None


def manager(preset: str, mesh: str = "") -> sw.PartitionManager:
    return sw.PartitionManager(
        sw.Strategy.preset(preset), mesh=cpu_mesh(mesh or MESHES[preset]), mode="train"
    )


@functools.cache
def whole_batch() -> Any:
    def mean(params: Any) -> Any:
        sums, _ = decoder_loss(params, TOKENS, None)
        return sums.total / sums.weight

    return jax.jit(jax.value_and_grad(mean))(PARAMS)


@pytest.mark.parametrize(
    ("preset", "n"),
    [
        ("fsdp", 4),
        pytest.param("fsdp", 2, marks=pytest.mark.full),
        pytest.param("ddp", 4, marks=pytest.mark.full),
        pytest.param("ddp", 1, marks=pytest.mark.full),
    ],
)
def test_gradients_are_summed_once(preset: str, n: int) -> None:
    with manager(preset) as pm:
        params = pm.shard(PARAMS, SPECS, role="param")
        tokens = pm.shard(TOKENS, sw.BATCH, sw.QUERY_LENGTH)
        compiled = (
            jax.jit(accumulate(decoder_loss, n, specs=SPECS, gather="once"))
            .lower(params, tokens)
            .compile()
        )
        counts = collections.Counter({"all_reduce": 0})
        for event in read_collectives(compiled, pm.mesh):
            counts[str(event.kind)] += event.count or 0
        result = compiled(params, tokens)
    assert counts["all_reduce"] == 1, counts
    # Six kernels of each stack of layers, and the table; gathered once.
    moves = 7 if preset == "fsdp" else 0
    assert (counts["all_gather"], counts["reduce_scatter"]) == (moves, moves)
    assert set(counts) <= {"all_reduce", "all_gather", "reduce_scatter"}
    blocks.assert_close((result.value, result.grads), whole_batch(), rtol=1e-4)
    for gradient, value in zip(jax.tree.leaves(result.grads), jax.tree.leaves(params), strict=True):
        assert gradient.sharding.is_equivalent_to(value.sharding, value.ndim)


@pytest.mark.full
def test_without_a_manager() -> None:
    result = jax.jit(accumulate(decoder_loss, 8, specs=SPECS))(PARAMS, TOKENS)
    blocks.assert_close((result.value, result.grads), whole_batch(), rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("preset", MESHES)
def test_state_of_fp8_is_overwritten(preset: str) -> None:
    """Largest values are those of all microbatches and devices; nothing is added."""
    specs = mlp_block.specs(MLP)
    params, scaling = blocks.random_params(specs), mlp_block.init_scaling(MLP)

    def total(params: Any, x: Any, channel: Any) -> Any:
        y, seen = mlp_block.apply(MLP, params, x, state=fp8.uses(scaling, channel))
        # A factor, so that no gradient is too small for fp8 with the first scale, 1.
        return 2.0**4 * jnp.sum(jnp.sin(y)), seen

    def weighted(*args: Any) -> Any:
        value, seen = total(*args)
        return Weighted(value, args[1].size), seen

    channel = fp8.new_channel(scaling, uses=4)
    plain = jax.jit(accumulate(weighted, 4, specs=specs))(params, ROWS, channel)
    with manager(preset) as pm:
        stored = pm.shard(params, specs, role="param")
        rows = pm.shard(ROWS, sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
        result = jax.jit(accumulate(weighted, 4, specs=specs))(stored, rows, channel)
    # Each microbatch has other examples here, so only what all of them have together is equal.
    blocks.assert_close(result.grads, plain.grads, rtol=0.02)
    assert isinstance(MLP.recipe, fp8.DelayedScaling)
    scaled = fp8.update(MLP.recipe, scaling, result.seen, result.sent)
    fp8.check(scaled)
    zeros = fp8.new_channel(scaling)
    (_, seen), whole = jax.jit(jax.value_and_grad(total, 2, has_aux=True))(params, ROWS, zeros)
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

    step = jax.jit(accumulate(mean, 256, specs=specs, mean_over="examples", gather="once"))
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


LABELS = np.random.default_rng(2).integers(0, 32, (32, 8))
LABELS[np.arange(8) >= np.random.default_rng(3).integers(0, 9, 32)[:, None]] = -100


def labels_loss(params: Any, batch: Any, channel: Any) -> Any:
    del channel
    x = embedding.apply(params["table"], batch["tokens"])
    return loss.cross_entropy(x, params["table"], batch["labels"], tied=True).weighted, None


REMAT = dataclasses.replace(CONFIG, remat="full")
MATRIX = {
    "ddp": ["dp:4,fsdp:2", "dp:8", "dp:2,fsdp:4"],
    "fsdp": ["fsdp:8", "dp:2,fsdp:4"],
    "tensor": ["dp:2,tp:4"],
    "fsdp_tp": ["dp:2,fsdp:2,tp:2", "fsdp:2,tp:4", "dp:4,tp:2"],
    "sequence": ["dp:2,fsdp:2,sp:2"],
    "fsdp_tp_sp": ["fsdp:2,sp:2,tp:2"],
    "moe_ep": ["fsdp:2,ep:2,tp:2", "fsdp:2,ep:4", "dp:2,ep:4"],
}
CELLS = [
    (preset, mesh, kind, how)
    for preset, meshes in MATRIX.items()
    for mesh in meshes
    for kind in ("auto", "explicit", "mixed")
    for how in ("each", "once")
    if kind != "mixed"
    or (mesh.endswith((",tp:2", ",tp:4")) and preset != "fsdp_tp_sp")
    or (preset, mesh) == ("ddp", "dp:4,fsdp:2")
]
MOE = moe_block.MoEBlockConfig(moe=MoEConfig(embed=16, hidden=32, experts=8, per_token=2))
MOE_SPECS = {"table": SPECS["table"], "layers": [moe_block.specs(MOE)] * 2}


def moe_loss(params: Any, batch: Any, channel: Any) -> Any:
    del channel
    x, load = embedding.apply(params["table"], batch["tokens"]), []
    for layer in params["layers"]:
        y, state = moe_block.apply(MOE, layer, x)
        assert state.stats is not None
        x, load = x + y, [*load, state.stats.load]
    return loss.cross_entropy(x, params["table"], batch["labels"], tied=True).weighted, load


def padded_loss(params: Any, batch: Any, channel: Any) -> Any:
    del channel
    x = embedding.apply(params["table"], batch["tokens"])
    x, _ = transformer_block.apply(REMAT, params["layers"], x)
    return loss.cross_entropy(x, params["table"], batch["labels"], tied=True).weighted, None


@functools.cache
def padded_whole_batch(preset: str) -> Any:
    f, specs = (moe_loss, MOE_SPECS) if preset == "moe_ep" else (padded_loss, SPECS)
    params, batch = blocks.random_params(specs), {"tokens": TOKENS, "labels": LABELS}

    def mean(params: Any) -> Any:
        sums, _ = f(params, batch, None)
        return sums.total / sums.weight

    return f, specs, params, batch, jax.jit(jax.value_and_grad(mean))(params)


@pytest.mark.parametrize(("preset", "mesh", "kind", "how"), CELLS)
@pytest.mark.full
@pytest.mark.pairwise
def test_presets_and_meshes(preset: str, mesh: str, kind: str, how: Any) -> None:
    """Equal to one batch; in the loop, no gradient of a replicated weight is reduced."""
    f, specs, params, batch, wanted = padded_whole_batch(preset)
    # In one dim, Explicit mesh axes come before Auto ones. Batch is "dp+fsdp".
    one = "dp" if preset == "ddp" else mesh.split(",")[-1].split(":")[0]
    types: Any = {one: "explicit"} if kind == "mixed" else kind
    strategy = sw.Strategy.preset(preset)
    pm = sw.PartitionManager(strategy, mesh=cpu_mesh(mesh, axis_types=types), mode="train")
    with pm:
        stored = pm.shard(params, specs, role="param")
        run = jax.jit(accumulate(f, 4, specs=specs, gather=how))
        compiled = run.lower(stored, batch).compile()
        result = compiled(stored, batch)
    blocks.assert_close((result.value, result.grads), wanted, rtol=1e-5)
    for gradient, value in zip(jax.tree.leaves(result.grads), jax.tree.leaves(stored), strict=True):
        assert gradient.sharding.is_equivalent_to(value.sharding, value.ndim)
    over_batch, over_tp = collections.Counter[str](), collections.Counter[str]()
    for each in read_collectives(compiled, pm.mesh):
        # The statistics of a router are integers, so they do not count.
        if (each.count or 0) >= 4 and each.dtype == "f32" and each.logical_bytes > 8:
            over = over_batch if set(each.mesh_axes) & {"dp", "fsdp"} else over_tp
            over[str(each.kind)] += 1
    assert not over_batch["all_reduce"], over_batch
    if how == "once" or preset in ("ddp", "tensor"):
        assert not over_batch, over_batch
    if preset in ("tensor", "fsdp_tp"):  # as without accumulation: nothing is gathered over tp
        assert set(over_tp) == {"all_reduce"}, over_tp


def reductions_in_the_loop(compiled: Any, pm: sw.PartitionManager) -> list[str]:
    """Return the sums over dp, or of a whole weight over sp, that a loop of 4 microbatches runs."""
    return [
        f"{each.kind} over {each.mesh_axes}, {each.logical_bytes} bytes"
        for each in read_collectives(compiled, pm.mesh)
        if (each.count or 0) >= 4
        # The statistics of a router are integers, and the sums of the loss are scalars.
        and each.dtype == "f32"
        and each.logical_bytes > 8
        # Attention gathers keys over sp, and scatters their gradients.
        and ("dp" in each.mesh_axes or ("sp" in each.mesh_axes and str(each.kind) == "all_reduce"))
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    ("preset", "mesh"),
    [
        ("sequence", "dp:4,sp:2"),
        ("fsdp_tp", "dp:2,sp:2,tp:2"),
        ("fsdp_tp_sp", "dp:2,sp:2,tp:2"),
        ("moe_ep", "dp:2,sp:2,ep:2"),
    ],
)
def test_types_defer_the_sum_over_sp(preset: str, mesh: str) -> None:
    """On Explicit mesh axes, the gradients of a decoder are summed over sp once, too."""
    f, specs, params, batch, wanted = padded_whole_batch(preset)
    pm = sw.PartitionManager(
        sw.Strategy.preset(preset), mesh=cpu_mesh(mesh, axis_types="explicit"), mode="train"
    )
    with pm:
        stored = pm.shard(params, specs, role="param")
        run = jax.jit(accumulate(f, 4, specs=specs, gather="once"))
        compiled = run.lower(stored, batch).compile()
        result = compiled(stored, batch)
    assert not reductions_in_the_loop(compiled, pm)
    blocks.assert_close((result.value, result.grads), wanted, rtol=1e-5)
    for gradient, value in zip(jax.tree.leaves(result.grads), jax.tree.leaves(stored), strict=True):
        assert gradient.sharding.is_equivalent_to(value.sharding, value.ndim)


TEXT = np.random.default_rng(4).normal(size=(16, 4, 16)).astype(np.float32)
SMALL = {
    "norm": sw.ArraySpec((16,), np.float32, (sw.NORM,)),
    "up": dense.specs([(sw.EMBED, 16)], [(sw.HEAD, 4), (sw.HEAD_DIM, 8)], bias=True),
}


def small_loss(params: Any, batch: Any, channel: Any) -> Any:
    w = sw.gather(params, SMALL)
    h = norm.layer_norm(batch["x"], w["norm"], w["norm"], zero_centered=True)
    y = dense.dense(h, w["up"]["kernel"], w["up"]["bias"], out=HEADED)
    return Weighted(jnp.sum(jnp.sin(y) * batch["valid"][..., None, None]), batch["valid"].sum()), y


HEADED = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)
RESIDUAL = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
INPUTS = {"x": RESIDUAL, "valid": (sw.BATCH, sw.QUERY_LENGTH)}
REPLICATED = {"length": "sp", "query_length": "sp", "kv_length": "sp"}


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        (sw.Strategy.preset("ddp") | sw.Strategy(rules=REPLICATED), "each"),
        pytest.param(sw.Strategy.preset("fsdp_tp"), "once", marks=pytest.mark.full),
    ],
    ids=["replicated", "gathered"],
)
def test_scales_and_biases_defer_the_sum(strategy: sw.Strategy, how: Any) -> None:
    """Also under jit_step, which sets no mesh in its trace. The mean counts all tokens once."""
    pm = sw.PartitionManager(
        strategy, mesh=cpu_mesh("dp:2,sp:2,tp:2", axis_types="explicit"), mode="train"
    )
    params = blocks.random_params(SMALL)
    batch = {"x": TEXT, "valid": np.arange(64).reshape(16, 4) % 5 < 3}

    def step(state: Any, batch: Any) -> Any:
        result = accumulate(small_loss, 4, specs=SMALL, gather=how)(state, batch)
        return result.grads, (result.value, result.weight)

    stored = pm.shard(params, SMALL, role="param")
    run = pm.jit_step(step, stored, INPUTS, donate=False)
    placed = pm.shard(batch, INPUTS)
    compiled = run.lower(stored, placed).compile()
    assert not reductions_in_the_loop(compiled, pm)
    grads, (value, weight) = compiled(stored, placed)

    def mean(params: Any) -> Any:
        h = norm.layer_norm(TEXT, params["norm"], params["norm"], zero_centered=True)
        y = jnp.einsum("bse,ehd->bshd", h, params["up"]["kernel"]) + params["up"]["bias"]
        return jnp.sum(jnp.sin(y) * batch["valid"][..., None, None]) / batch["valid"].sum()

    assert weight == batch["valid"].sum()
    blocks.assert_close((value, grads), jax.jit(jax.value_and_grad(mean))(params), rtol=1e-5)


@pytest.mark.full
def test_rows_without_length() -> None:
    """They are not sharded over sp, so no sum over sp is deferred."""
    specs = {"w": sw.ArraySpec((16, 8), np.float32, (sw.EMBED, sw.MLP_INTERMEDIATE))}
    params, rows = blocks.random_params(specs), np.asarray(TEXT[:, 0])

    def squares(params: Any, rows: Any, channel: Any) -> Any:
        w = sw.gather(params, specs)["w"]
        y = sw.einsum("be,em->bm", rows, w, out=(sw.BATCH, sw.MLP_INTERMEDIATE))
        return Weighted(jnp.sum(y**2), rows.size), channel

    mesh = cpu_mesh("dp:2,sp:2,tp:2", axis_types="explicit")
    with sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh, mode="train") as pm:
        stored = pm.shard(params, specs, role="param")
        result = jax.jit(accumulate(squares, 4, specs=specs, gather="once"))(stored, rows)
    wanted = 2 * rows.T @ (rows @ params["w"]) / rows.size
    blocks.assert_close(result.grads["w"], wanted, rtol=1e-5)


def test_refused_weight_is_named() -> None:
    """JAX refuses a product of a weight that is reduced over sp, and of tokens sharded over sp."""

    def scaled(params: Any, batch: Any, channel: Any) -> Any:
        h = batch["x"] * sw.gather(params, SMALL)["norm"]
        y = dense.dense(h, params["up"]["kernel"], out=HEADED)
        return Weighted(jnp.sum(jnp.sin(y)), y.size), channel

    strategy = sw.Strategy.preset("ddp") | sw.Strategy(rules=REPLICATED)
    mesh = cpu_mesh("dp:4,sp:2", axis_types="explicit")
    with sw.PartitionManager(strategy, mesh=mesh, mode="train") as pm:
        given = pm.shard(blocks.random_params(SMALL), SMALL, role="param"), {"x": TEXT}
        with raises(sw.LayerError, "dp+sp", path="norm", fix="sw.einsum"):
            jax.eval_shape(
                accumulate(scaled, 4, specs=SMALL), given[0], pm.shard(given[1], {"x": INPUTS["x"]})
            )


@pytest.mark.full
def test_fp8_is_refused_where_types_defer() -> None:
    """Scales multiply its weights. If the loss gathers them, each microbatch sums over sp."""
    config = dataclasses.replace(MLP, recipe="current")
    specs = mlp_block.specs(config)

    def total(params: Any, x: Any, channel: Any) -> Any:
        y, _ = mlp_block.apply(config, params, x)
        return Weighted(jnp.sum(jnp.sin(y)), x.size), channel

    mesh = cpu_mesh("fsdp:2,sp:2,tp:2", axis_types="explicit")
    with sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh, mode="train") as pm:
        given = pm.shard(blocks.random_params(specs), specs, role="param"), pm.shard(ROWS, RESIDUAL)
        with raises(sw.LayerError, "fsdp+sp", path="down/kernel", fix='gather="each"'):
            jax.eval_shape(accumulate(total, 4, specs=specs, gather="once"), *given)
        jax.eval_shape(accumulate(total, 4, specs=specs, gather="each"), *given)


@pytest.mark.parametrize(
    "matmul", [jnp.matmul, functools.partial(jnp.einsum, "be,em->bm")], ids=["matmul", "einsum"]
)
def test_loss_that_forgets_gather(matmul: Any) -> None:
    """Its error about shapes says that the weights are shards. Gathered once, they are whole."""
    specs = {"w": sw.ArraySpec((16, 8), np.float32, (sw.EMBED, sw.MLP_INTERMEDIATE))}

    def squares(params: Any, rows: Any, channel: Any) -> Any:
        return Weighted(jnp.sum(matmul(rows, params["w"]) ** 2), rows.shape[0]), channel

    with manager("fsdp") as pm:
        stored = pm.shard(blocks.random_params(specs), specs, role="param")
        rows = pm.shard(TEXT[:, 0], sw.BATCH, sw.EMBED)
        jax.eval_shape(accumulate(squares, 2, specs=specs, gather="once"), stored, rows)
        with pytest.raises((TypeError, ValueError)) as caught:
            jax.eval_shape(accumulate(squares, 2, specs=specs), stored, rows)
    assert any("sw.gather(params, specs)" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("how", ["each", "once"])
def test_frozen_weights(how: Any) -> None:
    """They have no gradient and no collective of one, and may be integers."""
    specs = {
        "lora": sw.ArraySpec((16, 8), jnp.bfloat16, (sw.EMBED, sw.MLP_INTERMEDIATE)),
        "int8": sw.ArraySpec((16, 8), jnp.int8, (sw.EMBED, sw.MLP_INTERMEDIATE)),
    }
    rng = np.random.default_rng(0)
    params = {name: rng.integers(-4, 4, (16, 8)).astype(spec.dtype) for name, spec in specs.items()}
    rows = rng.normal(size=(32, 16)).astype(np.float32)

    def squares(params: Any, rows: Any, channel: Any) -> Any:
        del channel
        w = sw.gather(params, specs)
        y = rows @ (w["lora"].astype(jnp.float32) + w["int8"].astype(jnp.float32))
        return Weighted(jnp.sum(y**2), y.size), None

    with manager("fsdp") as pm:
        stored = pm.shard(params, specs, role="param")
        run = accumulate(squares, 4, specs=specs, gather=how, trainable=lambda path: path == "lora")
        compiled = jax.jit(run).lower(stored, rows).compile()
        result = compiled(stored, rows)
        kinds = [str(each.kind) for each in read_collectives(compiled, pm.mesh)]
    assert result.grads["int8"] is None
    assert result.grads["lora"].dtype == jnp.bfloat16
    assert kinds.count("reduce_scatter") == 1, kinds
    whole = {name: value.astype(np.float64) for name, value in params.items()}
    exact = 2 * rows.T.astype(np.float64) @ (rows @ (whole["lora"] + whole["int8"])) / (32 * 8)
    blocks.assert_close(result.grads["lora"], exact, rtol=2e-2)


def mean_over_tokens(params: Any, labels: Any) -> Any:
    """Plain JAX: the mean over all tokens that count."""
    logits = params["table"][TOKENS] @ params["table"].T
    logs = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], -1)
    return -jnp.sum(jnp.where(labels >= 0, logs[..., 0], 0)) / jnp.maximum(jnp.sum(labels >= 0), 1)


@pytest.mark.full(but=["-4-some", "fsdp:8-4-some", "fsdp:2-2-none"])
@pytest.mark.parametrize("labels", [LABELS, np.full_like(LABELS, -100)], ids=["some", "none"])
@pytest.mark.parametrize(
    ("mesh", "n"), [("", 1), ("", 4), ("fsdp:8", 4), ("fsdp:8", 1), ("fsdp:2", 2)]
)
def test_tokens_count_the_same_everywhere(mesh: str, n: int, labels: Any) -> None:
    """Microbatches and devices have different numbers of tokens, and some have none."""
    params, batch = {"table": PARAMS["table"]}, {"tokens": TOKENS, "labels": labels}
    specs = {"table": SPECS["table"]}
    wanted = jax.jit(jax.value_and_grad(mean_over_tokens))(params, labels)
    step = jax.jit(accumulate(labels_loss, n, specs=specs))
    with manager("fsdp", mesh) if mesh else contextlib.nullcontext():
        stored = sw.shard(params, specs, role="param") if mesh else params
        result = step(stored, batch)
    assert result.weight == np.sum(labels >= 0)
    blocks.assert_close((result.value, result.grads), wanted)


def test_weight_is_not_differentiated() -> None:
    def squares(params: Any, rows: Any, channel: Any) -> Any:
        del channel
        return Weighted(jnp.sum(params["w"] * rows), jnp.sum(params["w"] ** 2)), rows[0]

    specs = {"w": sw.ArraySpec((), np.float32, ())}
    result = accumulate(squares, 2, specs=specs)({"w": np.float32(3)}, np.arange(8, dtype="f"))
    assert (result.value, result.weight, result.grads["w"]) == (3 * 28 / 18, 18, 28 / 18)
    np.testing.assert_array_equal(result.seen, [0, 4])


def dropped(params: Any, rows: Any, channel: Any, *, key: Any) -> Any:
    del channel
    kept = dropout.dropout(rows * params["w"], key, 0.5)
    return Weighted(jnp.sum(kept), len(rows)), None


def test_each_microbatch_drops_others() -> None:
    """The masks of 16 parts: of 8 devices with 2 microbatches each, or of one device."""
    specs, params = {"w": sw.ArraySpec((64,), np.float32, (sw.EMBED,))}, {"w": np.ones(64, "f")}
    rows, key = np.ones((64, 64), np.float32), jax.random.key(1)

    runs = {n: jax.jit(accumulate(dropped, n, specs=specs)) for n in (2, 16)}

    def kept(n: int, key: Any = key) -> np.ndarray:
        return np.asarray(runs[n](params, rows, key=key).grads["w"]) * 32

    parts = kept(16)
    # Of 64 coins, between 16 and 48 are heads: six standard deviations.
    assert parts.min() > 16
    assert parts.max() < 48
    assert len(set(parts)) > 4
    with manager("ddp"):
        np.testing.assert_array_equal(kept(2), parts)
        np.testing.assert_array_equal(kept(2, jax.random.PRNGKey(1)), parts)
        assert not np.array_equal(kept(2, jax.random.key(2)), parts)
    with raises(sw.LayerError, path="key") as caught:
        kept(2, 0)
    assert "pass key=jax.random.key(0)" in str(caught.value)


@pytest.mark.full
def test_dropout_of_blocks() -> None:
    """Attention, MLP and residual drop by the key of the microbatch."""
    config = dataclasses.replace(
        CONFIG,
        attention=dataclasses.replace(CONFIG.attention, dropout=0.3),
        mlp=dataclasses.replace(CONFIG.mlp, dropout=0.3),
        dropout=0.2,
    )
    rows = np.random.default_rng(0).normal(size=(32, 8, 16)).astype(np.float32)

    def total(params: Any, rows: Any, channel: Any, *, key: Any) -> Any:
        y, _ = transformer_block.apply(config, params, rows, keys={"dropout": key})
        return Weighted(jnp.sum(jnp.sin(y)), rows.size), channel

    specs, params = SPECS["layers"], PARAMS["layers"]
    plain = jax.jit(accumulate(total, 16, specs=specs))(params, rows, key=jax.random.key(0))
    with manager("fsdp") as pm:
        stored = pm.shard(params, specs, role="param")
        result = jax.jit(accumulate(total, 2, specs=specs))(stored, rows, key=jax.random.key(0))
    blocks.assert_close((result.value, result.grads), (plain.value, plain.grads))


@pytest.mark.full
def test_dropout_where_types_defer() -> None:
    """Equal to the same whole microbatches, run one after the other with the same keys."""
    config = dataclasses.replace(
        CONFIG, attention=dataclasses.replace(CONFIG.attention, dropout=0.3), dropout=0.2
    )
    specs, params, n, key = SPECS["layers"], PARAMS["layers"], 4, jax.random.key(0)
    rows = np.random.default_rng(0).normal(size=(32, 8, 16)).astype(np.float32)

    def total(params: Any, rows: Any, channel: Any, *, key: Any) -> Any:
        y, _ = transformer_block.apply(config, params, rows, keys={"dropout": key})
        return Weighted(jnp.sum(jnp.sin(y)), rows.size), channel

    mesh = cpu_mesh("dp:2,sp:2,tp:2", axis_types="explicit")
    with sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh, mode="train") as pm:
        stored, placed = pm.shard(params, specs, role="param"), pm.shard(rows, RESIDUAL)
        run = jax.jit(accumulate(total, n, specs=specs, gather="once"))
        compiled = run.lower(stored, placed, key=key).compile()
        result = compiled(stored, placed, key=key)
    assert not reductions_in_the_loop(compiled, pm)
    # Microbatch i has the i-th part of the examples of both devices of dp.
    parts = rows.reshape(2, n, -1, 8, 16).swapaxes(0, 1).reshape(n, -1, 8, 16)

    def mean(params: Any) -> Any:
        keys = [jax.random.fold_in(key, at) for at in range(n)]
        totals = [total(params, parts[at], None, key=keys[at])[0].total for at in range(n)]
        return sum(totals) / rows.size

    wanted = jax.jit(jax.value_and_grad(mean))(params)
    blocks.assert_close((result.value, result.grads), wanted, rtol=1e-5)


KEY = jax.random.key(0)


def global_key(params: Any, rows: Any, channel: Any) -> Any:
    return dropped(params, rows, channel, key=KEY)


def test_closed_over_key_is_refused() -> None:
    key = jax.random.PRNGKey(0)
    masked = functools.partial(dropped, key=key)
    losses = {
        "KEY": [global_key, lambda *args: (global_key(*args)[0], None), jax.jit(global_key)],
        "key": [masked, lambda *args: (masked(*args)[0], None), lambda *a: dropped(*a, key=key)],
    }
    specs, params = {"w": sw.ArraySpec((), np.float32, ())}, {"w": np.float32(1)}
    for name, each in losses.items():
        for own in each:
            with raises(sw.LayerError, name, path="loss") as e:
                accumulate(own, 2, specs=specs)(params, np.ones((4, 2), "f"))
            assert "take key= in the loss" in str(e.value)
    size = np.array([480, 640], np.uint32)  # data, although keys of the old style look like it
    assert closed_over_keys(lambda: size) == []
    # Here it cannot be seen in the loss. On shards, dropout itself sees it.
    state = {"key": key}
    with manager("ddp"), raises(sw.LayerError, "dp", path="key", fix="jax.random.fold_in"):
        accumulate(lambda *args: dropped(*args, **state), 2, specs=specs)(
            params, np.ones((16, 2), "f")
        )


def test_bad_batch_and_loss() -> None:
    def mean(params: Any, batch: Any, channel: Any) -> Any:
        del channel
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(batch)) * params["w"], None

    specs = {"w": sw.ArraySpec((), np.float32, ())}
    params, rows = {"w": np.float32(1)}, np.ones((8, 2), np.float32)
    run = accumulate(mean, 4, specs=specs, mean_over="examples")
    delayed = fp8.new_channel(mlp_block.init_scaling(MLP), uses=2)
    cases: list[tuple[Any, str]] = [
        (
            lambda: run(params, {"a": rows, "weights": np.ones(4), "x": rows}),
            facts(0, "BATCH", "(8, 2)", "(4,)", path="batch"),
        ),
        (
            lambda: run(params, {"a": np.float32(1), "x": rows}),
            facts(0, "BATCH", "(8, 2)", path="batch"),
        ),
        (lambda: run(params, {"x": rows, "z": 1.0}), facts(0, "BATCH", "(8, 2)", path="batch")),
        (lambda: run(params, {}), facts("examples", path="batch")),
        (lambda: run(params, rows[:0]), facts("examples", path="batch")),
        (
            lambda: run(params, rows, delayed),
            facts("(2,)", 4, path="channel", fix="fp8.new_channel"),
        ),
        (
            lambda: accumulate(lambda w, x: mean(w, x, None), 4, specs=specs)(params, rows),
            facts("channel", path="loss", fix="def loss(params, batch, channel)"),
        ),
        (
            lambda: accumulate(mean, 4, specs=specs)(params, rows, key=jax.random.key(0)),
            facts("key", path="loss", fix="def loss(params, batch, channel, *, key)"),
        ),
        (
            lambda: accumulate(lambda *given: mean(*given)[0], 4, specs=specs)(params, rows),
            facts("returned", "seen", path="loss", fix="loss.cross_entropy"),
        ),
        (
            lambda: accumulate(mean, 4, specs=specs)(params, rows),
            facts("NoneType", path="loss", fix="loss.cross_entropy"),
        ),
        (
            lambda: accumulate(
                lambda p, x, c: (Weighted(jnp.sum(x), 1), c), 4, specs=specs, mean_over="examples"
            )(params, rows),
            facts("NoneType", path="loss", fix="mean_over"),
        ),
        (
            lambda: accumulate(lambda p, x, c: (x, None), 4, specs=specs, mean_over="examples")(
                params, rows
            ),
            facts("(2, 2)", "NoneType", path="loss", fix="mean_over"),
        ),
        (
            lambda: accumulate(lambda p, x, c: (Weighted(jnp.sum(x), x), None), 4, specs=specs)(
                params, rows
            ),
            facts("(2, 2)", path="loss"),
        ),
        (
            lambda: accumulate(mean, 4, specs=specs, mean_over="tokens"),  # type: ignore[arg-type]
            facts("tokens", path="mean_over", fix="examples"),
        ),
    ]
    for call, message in cases:
        with raises(sw.LayerError, message) as caught:
            call()
        assert "fix  " in str(caught.value)


def test_bad_input() -> None:
    with raises(sw.LayerError, 0, fix="n"):
        accumulate(decoder_loss, 0, specs=SPECS)
    run = accumulate(decoder_loss, 3, specs=SPECS)
    with raises(sw.IndivisibleError, 3, 32, path="n"):
        run(PARAMS, TOKENS)
    with manager("fsdp"), raises(sw.IndivisibleError, 3, 4, path="n"):
        run(PARAMS, TOKENS)
    with raises(sw.LayerError, "twice", path="gather", fix="each"):
        accumulate(decoder_loss, 2, specs=SPECS, gather="twice")  # type: ignore[arg-type]
