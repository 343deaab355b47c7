"""Training steps that accumulate: with ZeRO-1, with auxiliary outputs, in bfloat16, and planned."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright as sw
from shardwright.layers import Weighted, accumulate, dropout, embedding, loss, moe_block
from shardwright.plan.collectives import read_collectives
from shardwright.testing import cpu_mesh
from tests.layers import blocks
from tests.layers.accumulate_on_16 import Inside
from tests.layers.test_accumulate import MOE, MOE_SPECS, padded_whole_batch
from tests.plan.against_xla import compiled_bytes, planned_bytes
from tests.tpu_compile import measure

MESHES = {
    "ddp": "dp:4,fsdp:2",
    "fsdp": "dp:2,fsdp:4",
    "tensor": "dp:2,tp:4",
    "fsdp_tp": "dp:2,fsdp:2,tp:2",
    "sequence": "dp:2,fsdp:2,sp:2",
    "fsdp_tp_sp": "dp:2,sp:2,tp:2",
    "moe_ep": "dp:2,fsdp:2,ep:2",
}
MOMENTUM = optax.sgd(0.1, momentum=0.9)
ROWS = (sw.BATCH, sw.QUERY_LENGTH)


def manager(preset: str, kind: Any, *, zero1: bool = False) -> sw.PartitionManager:
    policy = sw.Strategy(policy={"zero1": "dp | -"} if zero1 else {})
    return sw.PartitionManager(
        sw.Strategy.preset(preset) | policy,
        mesh=cpu_mesh(MESHES[preset], axis_types=kind),
        mode="train",
    )


@pytest.mark.full(but=["fsdp_tp-auto"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("preset", MESHES)
@pytest.mark.alternate
def test_step_with_zero1(preset: str, kind: str) -> None:
    """Moments are sharded over dp too. Gradients are reduced over dp once, after the loop."""
    f, specs, params, batch, (value, grads) = padded_whole_batch(preset)
    pm = manager(preset, kind, zero1=True)

    def step(state: Any, batch: Any) -> Any:
        result = accumulate(f, 4, specs=specs)(state["params"], batch)
        # JAX adds no two arrays that differ in Explicit mesh axes.
        grads = sw.shard(result.grads, specs, role="state")
        updates, moments = MOMENTUM.update(grads, state["moments"], state["params"])
        new = optax.apply_updates(state["params"], sw.shard(updates, specs, role="param"))
        return {"params": new, "moments": moments}, result.value

    stored = pm.shard(params, specs, role="param")
    state = {"params": stored, "moments": pm.init_state(MOMENTUM, stored, specs)}
    run = pm.jit_step(step, state, {"tokens": ROWS, "labels": ROWS}, donate=False)
    placed = pm.shard(batch, {"tokens": ROWS, "labels": ROWS})
    compiled = run.lower(state, placed).compile()
    after, seen = compiled(state, placed)
    trace = after["moments"][0].trace
    blocks.assert_close((seen, trace), (value, grads), rtol=1e-5)
    wanted = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    blocks.assert_close(after["params"], wanted, rtol=1e-5)
    assert any("dp" in str(leaf.sharding.spec) for leaf in jax.tree.leaves(trace))
    inside = collections.Counter[str]()
    for each in read_collectives(compiled, pm.mesh):
        if (each.count or 0) >= 4 and each.dtype == "f32" and "dp" in each.mesh_axes:
            # Totals of the loss are scalars.
            inside[str(each.kind)] += each.logical_bytes > 8
    assert not +inside, inside


@pytest.mark.full
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("preset", ["ddp", "fsdp_tp", "moe_ep"])
@pytest.mark.alternate
def test_bfloat16_equals_whole_batch(preset: str, kind: str) -> None:
    f, specs, params, batch, _ = padded_whole_batch(preset)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)

    def mean(params: Any) -> Any:
        sums, _ = f(params, batch, None)
        return sums.total / sums.weight

    value, grads = jax.jit(jax.value_and_grad(mean))(narrow)
    with manager(preset, kind) as pm:
        stored = pm.shard(narrow, specs, role="param")
        result = jax.jit(accumulate(f, 4, specs=specs))(stored, batch)
    assert float(result.value) == pytest.approx(float(value), rel=2e-2)
    for ours, exact in zip(jax.tree.leaves(result.grads), jax.tree.leaves(grads), strict=True):
        assert ours.dtype == jnp.bfloat16
        wanted = np.asarray(exact, np.float32)
        difference = np.linalg.norm(np.asarray(ours, np.float32) - wanted)
        assert difference <= 2e-2 * np.linalg.norm(wanted)


def noisy_loss(params: Any, batch: Any, channel: Any, *, key: Any) -> Any:
    """A loss with dropout that also returns its largest error and its number of tokens."""
    return noisy_sums(sw.gather(params, MLP_SPECS), batch, key)


def noisy_sums(w: Any, batch: Any, key: Any) -> Any:
    inner = sw.einsum("be,em->bm", batch["x"], w["up"], out=(sw.BATCH, sw.MLP_INTERMEDIATE))
    hidden = dropout.dropout(jnp.sin(inner), key, 0.3)
    y = sw.einsum("bm,me->be", hidden, w["down"], out=(sw.BATCH, sw.EMBED))
    errors = jnp.sum((y - batch["x"]) ** 2, axis=-1)
    total, count = jnp.sum(errors * batch["valid"]), jnp.sum(batch["valid"])
    return Weighted(total, count), {"largest": jnp.max(errors), "count": count}


@jax.jit
def noisy_microbatch(params: Any, part: Any, key: Any) -> Any:
    def total(params: Any) -> Any:
        loss, seen = noisy_sums(params, part, key)
        return loss.total, (loss.weight, seen)

    return jax.value_and_grad(total, has_aux=True)(params)


MLP_SPECS = {
    "up": sw.ArraySpec((16, 32), np.float32, (sw.EMBED, sw.MLP_INTERMEDIATE)),
    "down": sw.ArraySpec((32, 16), np.float32, (sw.MLP_INTERMEDIATE, sw.EMBED)),
}
BATCH = {
    "x": np.random.default_rng(5).normal(size=(32, 16)).astype(np.float32),
    "valid": np.arange(32) % 5 < 3,
}


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("preset", [pytest.param("ddp", marks=pytest.mark.full), "fsdp_tp"])
def test_dropout_and_auxiliary_outputs(preset: str, kind: str) -> None:
    """Equal to the same microbatches, run by hand one after the other with the same keys."""
    params, n, key = blocks.random_params(MLP_SPECS), 4, jax.random.key(7)
    with manager(preset, kind) as pm:
        devices = pm.axis_size(sw.BATCH, 32)
        stored = pm.shard(params, MLP_SPECS, role="param")
        placed = pm.shard(BATCH, {"x": (sw.BATCH, sw.EMPTY), "valid": (sw.BATCH,)})
        result = jax.jit(accumulate(noisy_loss, n, specs=MLP_SPECS))(stored, placed, key=key)
    grads, totals, counts, largest = [], [], [], np.zeros((devices, n))
    rows = {name: value.reshape(devices, n, -1, *value.shape[1:]) for name, value in BATCH.items()}
    for device in range(devices):
        for at in range(n):
            part = {name: value[device, at] for name, value in rows.items()}
            own = jax.random.fold_in(key, device * n + at)
            (value, (count, seen)), gradient = noisy_microbatch(params, part, own)
            grads.append(gradient)
            totals.append(value)
            counts.append(count)
            largest[device, at] = seen["largest"]
    assert result.weight == sum(counts) == BATCH["valid"].sum()
    mean = jax.tree.map(lambda *each: sum(each) / sum(counts), *grads)
    blocks.assert_close((result.value, result.grads), (sum(totals) / sum(counts), mean), rtol=1e-5)
    np.testing.assert_allclose(result.seen["largest"], largest.max(0), rtol=1e-6)


def plain_loss(params: Any, rows: Any, channel: Any) -> Any:
    w = sw.gather(params, MLP_SPECS)
    inner = sw.einsum("be,em->bm", rows, w["up"], out=(sw.BATCH, sw.MLP_INTERMEDIATE))
    y = sw.einsum("bm,me->be", jnp.sin(inner), w["down"], out=(sw.BATCH, sw.EMBED))
    return Weighted(jnp.sum((y - rows) ** 2), rows.size), None


def experts_loss(params: Any, tokens: Any, channel: Any) -> Any:
    x = embedding.apply(params["table"], tokens)
    for layer in params["layers"]:
        x += moe_block.apply(MOE, layer, x)[0]
    return Weighted(jnp.sum(jnp.sin(x)), x.size), channel


@pytest.mark.full(but=["fsdp_tp-auto-each"])
@pytest.mark.parametrize("how", ["each", "once"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("preset", ["ddp", "fsdp", "fsdp_tp", "moe_ep"])
@pytest.mark.pairwise
def test_plan_of_a_step(preset: str, kind: str, how: Any) -> None:
    """The planned bytes of each kind and mesh axis are those of the compiled program."""
    f, specs, axes = plain_loss, MLP_SPECS, (sw.BATCH, sw.EMBED)
    rows = jax.ShapeDtypeStruct((32, 16), np.float32)
    if preset == "moe_ep":
        f, specs, axes = experts_loss, MOE_SPECS, ROWS
        rows = jax.ShapeDtypeStruct((32, 8), np.int32)
    pm, shapes = manager(preset, kind), jax.eval_shape(lambda: blocks.random_params(specs))

    def step(params: Any, rows: Any) -> Any:
        return accumulate(f, 4, specs=specs, gather=how)(params, rows).grads

    report = pm.plan(step, shapes, rows, specs=(specs, axes))
    given = pm.abstract(shapes, specs), pm.abstract(rows, axes, role="activation")
    assert report.walked.complete, report.walked.unknown
    assert planned_bytes(report) == compiled_bytes(pm, step, given)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("preset", ["fsdp", "fsdp_tp"])
def test_plan_of_a_tied_table(preset: str, kind: str) -> None:
    """Its gathers by the embedding and by the loss are one, and TPUs add both gradients first."""
    specs, pm = {"table": embedding.specs(32, 16)}, manager(preset, kind)
    shapes = jax.eval_shape(lambda: blocks.random_params(specs))
    tokens = jax.ShapeDtypeStruct((32, 8), np.int32)

    def tied(params: Any, tokens: Any, channel: Any) -> Any:
        x = embedding.apply(params["table"], tokens)
        return loss.cross_entropy(x, params["table"], tokens, tied=True).weighted, channel

    def step(params: Any, tokens: Any) -> Any:
        return accumulate(tied, 4, specs=specs)(params, tokens).grads

    report = pm.plan(step, shapes, tokens, specs=(specs, ROWS))
    given = pm.abstract(shapes, specs), pm.abstract(tokens, ROWS, role="activation")
    assert planned_bytes(report) == compiled_bytes(pm, step, given)
    assert [(each.mesh_axis, "gather it once" in each.fix) for each in report.walked.choices] == [
        ("fsdp", True)
    ]


@pytest.mark.full
def test_plan_of_a_lookup_in_reduced_rows() -> None:
    """Where types defer the sum over sp, the casts in its `shard_map` send nothing."""
    specs = {"table": embedding.specs(32, 16)}
    mesh = cpu_mesh("dp:2,sp:2,tp:2", axis_types="explicit")
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh, mode="train")
    shapes = jax.eval_shape(lambda: blocks.random_params(specs))
    tokens = jax.ShapeDtypeStruct((32, 8), np.int32)

    def rows(params: Any, tokens: Any, channel: Any) -> Any:
        x = embedding.apply(params["table"], tokens)
        return Weighted(jnp.sum(jnp.sin(x)), x.size), channel

    def step(params: Any, tokens: Any) -> Any:
        return accumulate(rows, 4, specs=specs, gather="once")(params, tokens).grads

    report = pm.plan(step, shapes, tokens, specs=(specs, ROWS))
    given = pm.abstract(shapes, specs), pm.abstract(tokens, ROWS, role="activation")
    assert report.walked.complete, report.walked.unknown
    assert planned_bytes(report) == compiled_bytes(pm, step, given)


@pytest.mark.full
def test_on_16_devices() -> None:
    """All mesh axes of the presets have two devices. Explicit ones defer the sum over sp, too."""
    found = measure("tests.layers.accumulate_on_16", Inside)
    assert len(found) == 6
    assert all(each.over_dp == 0 for each in found), found
    assert all((each.over_sp == 0) is (each.kind == "explicit") for each in found), found
