"""Sums that stay unreduced over Explicit mesh axes, and weights that stay reduced."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.layers import embedding
from shardwright.plan.collectives import read_collectives
from shardwright.testing import cpu_mesh
from tests.manager.programs import numbers
from tests.plan.against_xla import compiled_bytes, planned_bytes
from tests.raising import raises

HIDDEN = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
INNER = (sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)
OPEN = sw.Unreduced(HIDDEN, over=sw.MLP_INTERMEDIATE)
SPECS = {
    "up": sw.ArraySpec((16, 32), np.float32, (sw.EMBED, sw.MLP_INTERMEDIATE)),
    "down": sw.ArraySpec((32, 16), np.float32, (sw.MLP_INTERMEDIATE, sw.EMBED)),
}


def manager(
    preset: str = "fsdp_tp", mesh: str = "fsdp:2,tp:4", types: Any = "explicit"
) -> sw.PartitionManager:
    return sw.PartitionManager(
        sw.Strategy.preset(preset), mesh=cpu_mesh(mesh, axis_types=types), mode="train"
    )


def in_chunks(weights: Any, x: Any, *, out: Any) -> Any:
    """An MLP whose hidden dim is computed in four chunks, one after the other."""
    w = sw.gather(weights, SPECS)

    def add(total: Any, at: Any) -> Any:
        inner = jnp.sin(at + sw.einsum("bse,em->bsm", x, w["up"], out=INNER))
        return total + sw.einsum("bsm,me->bse", inner, w["down"], out=out), None

    total, _ = jax.lax.scan(add, sw.shard(jnp.zeros(x.shape), out), jnp.arange(4.0))
    return sw.shard(total, HIDDEN)


def stored(pm: Any) -> tuple[Any, Any]:
    weights = {name: numbers(*spec.shape) / 8 for name, spec in SPECS.items()}
    return pm.shard(weights, SPECS, role="param"), pm.shard(numbers(8, 8, 16) / 8, HIDDEN)


def test_sums_of_a_loop_are_reduced_once() -> None:
    results, reductions = {}, {}
    for name, out in (("closed", HIDDEN), ("open", OPEN)):

        def loss(weights: Any, x: Any, out: Any = out) -> Any:
            y = in_chunks(weights, x, out=out)
            return jnp.sum(jnp.sin(y)), y

        with manager() as pm:
            given = stored(pm)
            run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
            compiled = jax.jit(in_chunks, static_argnames="out").lower(*given, out=out).compile()
            results[name] = run(*given)
        reductions[name] = sum(
            each.count or 0
            for each in read_collectives(compiled, pm.mesh)
            if each.mesh_axes == ("tp",)
        )
    assert reductions == {"closed": 4, "open": 1}
    for a, b in zip(*map(jax.tree.leaves, results.values()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_plan_of_open_sums_equals_compiled_program() -> None:
    pm = manager()
    shapes = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in SPECS.items()}
    x = jax.ShapeDtypeStruct((4, 8, 16), np.float32)

    def run(weights: Any, x: Any) -> Any:
        return in_chunks(weights, x, out=OPEN)

    report = pm.plan(run, shapes, x, specs=(SPECS, HIDDEN))
    given = pm.abstract(shapes, SPECS), pm.abstract(x, HIDDEN, role="activation")
    assert report.walked.complete
    assert planned_bytes(report) == compiled_bytes(pm, run, given)


def by_hand(weights: Any, rows: Any, *, annotated: bool) -> Any:
    """Accumulate gradients of microbatches over batch axes, in a loop of the program's own."""
    held = {
        name: jax.reshard(w, P(*jax.typeof(w).sharding.spec.partitions, reduced={"dp"}))
        for name, w in weights.items()
    }

    def loss(held: Any, x: Any) -> Any:
        w = sw.gather(held, SPECS)
        if annotated:
            w = sw.shard(w, SPECS, role="use")
        return jnp.sum(
            sw.einsum(
                "bsm,me->bse",
                sw.einsum("bse,em->bsm", x, w["up"], out=INNER),
                w["down"],
                out=HIDDEN,
            )
            ** 2
        )

    def add(sums: Any, x: Any) -> Any:
        return jax.tree.map(jnp.add, sums, jax.grad(loss)(held, x)), None

    zeros = {
        name: jax.reshard(
            jnp.zeros(w.shape), P(*jax.typeof(w).sharding.spec.partitions, unreduced={"dp"})
        )
        for name, w in weights.items()
    }
    sums, _ = jax.lax.scan(add, zeros, rows)
    return sw.shard(sums, SPECS, role="param")


@pytest.mark.parametrize(
    ("preset", "mesh", "annotated"),
    [("tensor", "dp:2,tp:4", False), ("tensor", "dp:2,tp:4", True), ("fsdp", "dp:2,fsdp:4", True)],
)
def test_gather_and_shard_keep_weights_reduced(preset: str, mesh: str, annotated: bool) -> None:
    """Gradients are reduced over dp after the loop: one all-reduce for each weight."""
    with manager(preset, mesh) as pm:
        weights, x = stored(pm)
        rows = pm.shard(np.stack([np.asarray(x)] * 3), sw.EMPTY, *HIDDEN)
        compiled = (
            jax.jit(by_hand, static_argnames="annotated")
            .lower(weights, rows, annotated=annotated)
            .compile()
        )
        sums = compiled(weights, rows)
    counts = collections.Counter[int]()
    for each in read_collectives(compiled, pm.mesh):
        if "dp" in each.mesh_axes:
            counts[each.count or 0] += 1
    assert counts.keys() == {1}, counts
    exact = jax.grad(lambda w: 3 * jnp.sum((np.asarray(x) @ w["up"] @ w["down"]) ** 2))(
        jax.tree.map(np.asarray, weights)
    )
    for name, gradient in sums.items():
        np.testing.assert_allclose(gradient, exact[name], rtol=1e-4, atol=1e-5)
        assert gradient.sharding.is_equivalent_to(weights[name].sharding, 2)


def test_layers_with_a_shard_map_take_reduced_weights() -> None:
    table, tokens = numbers(32, 16), np.arange(32).reshape(4, 8) % 7

    def loss(table: Any, tokens: Any) -> Any:
        return jnp.sum(jnp.sin(embedding.apply(table, tokens)))

    with manager("tensor", "dp:2,tp:4") as pm:
        stored = pm.shard(table, sw.VOCAB, sw.EMBED, role="param")
        held = jax.reshard(stored, P("tp", reduced={"dp"}))
        given = held, pm.shard(tokens, sw.BATCH, sw.QUERY_LENGTH)
        gradient = jax.jit(jax.grad(loss))(*given)
        assert jax.typeof(gradient).sharding.spec.unreduced == {"dp"}
        result = jax.reshard(gradient, P("tp"))
    np.testing.assert_allclose(result, jax.grad(loss)(table, tokens), rtol=1e-5)


def test_explain_says_why() -> None:
    pm = manager()
    found = pm.explain(OPEN, shape=(4, 8, 16))
    assert found.spec == P("fsdp", unreduced={"tp"})
    assert found.unreduced is not None
    assert found.unreduced.mesh_axes == ("tp",)
    text = str(found)
    assert "unreduced over tp, as MLP_INTERMEDIATE: mlp_intermediate" in text
    assert "fsdp_tp.toml" in text
    assert found.to_json()["unreduced"]["mesh_axes"] == ["tp"]
    assert "unreduced over tp" in found._repr_html_()
    # Under ddp, weights are not sharded, so no sum is open.
    found = manager("ddp", "dp:8").explain(OPEN, shape=(8, 8, 16))
    assert found.spec == P("dp")
    assert "nothing is unreduced over MLP_INTERMEDIATE" in str(found)


def test_rule_with_a_fallback_needs_the_size() -> None:
    pm, axes = manager(), (sw.BATCH, sw.EMBED)
    with raises(sw.ShapeRequiredError, axis="unreduced over KV_HEAD", fix="merged"):
        pm.resolve(sw.Unreduced(axes, over=sw.KV_HEAD), shape=(4, 16))
    for heads, unreduced in ((8, {"tp"}), (2, set())):
        sized = sw.Unreduced(axes, over=sw.merged((sw.KV_HEAD, heads)))
        assert pm.resolve(sized, shape=(4, 16)) == P("fsdp", unreduced=unreduced)


def test_sharded_axis_cannot_be_unreduced() -> None:
    both = sw.Unreduced((sw.BATCH, sw.MLP_INTERMEDIATE), over=sw.HEAD)
    with raises(
        sw.AxisConflictError, "tp", 1, axis="unreduced over HEAD", fix="Unreduced", rule="head"
    ):
        manager().resolve(both, shape=(4, 16))
    # Its weights are stored over fsdp, which shards the batch: their sums are reduce-scattered.
    weight = sw.Unreduced((sw.EMBED, sw.MLP_INTERMEDIATE), over=sw.BATCH)
    with raises(sw.AxisConflictError, "fsdp", 0, fix="Unreduced"):
        manager().resolve(weight, role="param", shape=(16, 32))
    assert manager().resolve(weight, role="use", shape=(16, 32)) == P(
        None, "tp", unreduced={"fsdp"}
    )


@pytest.mark.parametrize("types", ["auto", {"fsdp": "explicit"}])
def test_auto_axes_hold_no_sum(types: Any) -> None:
    fix = 'axis_types = { tp = "explicit" }'
    with manager(types=types), raises(sw.MeshMismatchError, "tp", "XLA", fix=fix):
        jax.jit(lambda x: sw.shard(x, OPEN))(jnp.ones((4, 8, 16)))
    # Of a mesh axis with one device, nothing is open.
    assert manager(mesh="fsdp:8,tp:1", types="auto").resolve(OPEN, shape=(8, 8, 16)) == P("fsdp")


def test_bad_annotations() -> None:
    with raises(sw.StrategyError, path="axes", fix="axes"):
        sw.Unreduced(SPECS["up"], over=sw.BATCH)
    with raises(sw.StrategyError, 3, path="over", fix="MLP_INTERMEDIATE"):
        sw.Unreduced(HIDDEN, over=3)


def test_literal_spec_may_be_unreduced() -> None:
    pm = manager()
    spec = P("fsdp", unreduced={"tp"})
    assert pm.resolve(spec, shape=(4, 16)) == spec
    assert sw.stacked(spec) == P(None, "fsdp", unreduced={"tp"})
    with raises(sw.MissingMeshAxisError, "ep"):
        pm.resolve(P("fsdp", unreduced={"ep"}), shape=(4, 16))
