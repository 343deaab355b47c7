"""Events of a walk, equal to counts worked out from sizes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import shardwright as sw
from shardwright import attention
from shardwright.plan.collectives import Kind
from shardwright.plan.planner import PlanReport
from shardwright.plan.trace import trace, walk
from tests.raising import raises

BATCH, LENGTH, EMBED, INNER, HEADS, DIM = 8, 16, 64, 128, 8, 16
F32 = 4
HIDDEN = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
SPECS = {
    "up": sw.ArraySpec((EMBED, INNER), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE)),
    "down": sw.ArraySpec((INNER, EMBED), jnp.float32, (sw.MLP_INTERMEDIATE, sw.EMBED)),
}
X = jax.ShapeDtypeStruct((BATCH, LENGTH, EMBED), jnp.float32)

Row = tuple[str, tuple[str, ...], tuple[str, ...], int, int]


def shapes(specs: Any) -> Any:
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, sw.ArraySpec),
    )


def manager(preset: str, mesh: str, **policy: Any) -> sw.PartitionManager:
    strategy = sw.Strategy.preset(preset)
    if policy:
        strategy = strategy | sw.Strategy.model_validate({"policy": policy})
    return sw.PartitionManager(strategy, mesh=sw.abstract_mesh(mesh))


def rows(report: PlanReport) -> list[Row]:
    """Kind, mesh axes, semantic axes, bytes and runs of each event, sorted."""
    return sorted(
        (str(event.kind), event.mesh_axes, event.axes, event.logical_bytes, event.runs)
        for event in report.events
    )


def mlp(params: Any, x: Any) -> Any:
    weights = sw.gather(params, SPECS)
    x = sw.shard(x, HIDDEN)
    inner = sw.shard(jnp.tanh(x @ weights["up"]), sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)
    return sw.shard(inner @ weights["down"], HIDDEN)


def gradient(params: Any, x: Any) -> Any:
    return jax.grad(lambda params: mlp(params, x).sum())(params)


def plan(pm: sw.PartitionManager, function: Callable[..., Any], outputs: Any = None) -> PlanReport:
    report: PlanReport = pm.plan(function, shapes(SPECS), X, specs=(SPECS, HIDDEN), outputs=outputs)
    return report


WEIGHT = EMBED * INNER * F32
GATHERS = [("all_gather", ("fsdp",), ("EMBED",), WEIGHT, 1)] * 2
SCATTERS = [("reduce_scatter", ("fsdp",), ("BATCH",), WEIGHT, 1)] * 2


def test_fsdp_forward_gathers_each_weight() -> None:
    assert rows(plan(manager("fsdp", "fsdp:8"), mlp)) == GATHERS


def test_fsdp_gradient_scatters_each_weight() -> None:
    actual = rows(plan(manager("fsdp", "fsdp:8"), gradient, outputs=SPECS))
    assert actual == GATHERS + SCATTERS


@pytest.mark.parametrize(("fsdp", "tp"), [(2, 4), (4, 2)])
def test_fsdp_tp_forward_adds_one_sum(fsdp: int, tp: int) -> None:
    actual = rows(plan(manager("fsdp_tp", f"fsdp:{fsdp},tp:{tp}"), mlp))
    hidden = BATCH // fsdp * LENGTH * EMBED * F32
    assert actual == [
        *[("all_gather", ("fsdp",), ("EMBED",), WEIGHT // tp, 1)] * 2,
        ("all_reduce", ("tp",), ("MLP_INTERMEDIATE",), hidden, 1),
    ]


def test_data_parallel_gradient_sums_each_weight() -> None:
    actual = rows(plan(manager("ddp", "dp:8"), gradient, outputs=SPECS))
    assert actual == [("all_reduce", ("dp",), ("BATCH",), WEIGHT, 1)] * 2


def test_scanned_layers_run_once_per_layer() -> None:
    layers = 3
    stacked = sw.stack_specs(SPECS, layers)

    def forward(params: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, weights: (mlp(weights, x), None), x, params)[0]

    pm = manager("fsdp_tp", "fsdp:2,tp:4")
    actual = rows(pm.plan(forward, shapes(stacked), X, specs=(stacked, HIDDEN)))
    hidden = BATCH // 2 * LENGTH * EMBED * F32
    assert actual == [
        *[("all_gather", ("fsdp",), ("EMBED",), WEIGHT // 4, layers)] * 2,
        ("all_reduce", ("tp",), ("MLP_INTERMEDIATE",), hidden, layers),
    ]


def test_unused_results_of_a_loop_send_nothing() -> None:
    stacked = sw.stack_specs(SPECS, 3)

    def forward(params: Any, x: Any) -> Any:
        def step(x: Any, weights: Any) -> Any:
            x = sw.shard(x, HIDDEN)
            return x * 2, sw.gather(weights, SPECS)["up"].sum()

        return jax.lax.scan(jax.checkpoint(step), x, params)[0]

    pm = manager("fsdp_tp", "fsdp:2,tp:4")
    report: PlanReport = pm.plan(forward, shapes(stacked), X, specs=(stacked, HIDDEN))
    assert rows(report) == []
    assert report.state.of("parameters").leaves  # they are held nevertheless


def test_zero1_update_gathers_parameters() -> None:
    state = {"moment": SPECS["up"]}
    pm = manager("ddp", "dp:8", zero1="dp")

    def update(params: Any, moment: Any) -> Any:
        return sw.shard(params - moment, SPECS["up"].axes, role="param")

    moment = jax.ShapeDtypeStruct(
        SPECS["up"].shape,
        jnp.float32,
        sharding=pm.sharding(SPECS["up"].axes, role="state", shape=SPECS["up"].shape),
    )
    actual = rows(pm.plan(update, shapes(state)["moment"], moment, specs=(SPECS["up"], None)))
    # The difference is computed in shards, and the new parameters are gathered.
    assert [row[:2] + row[3:] for row in actual] == [("all_gather", ("dp",), WEIGHT, 1)]


def test_decode_over_a_sharded_cache_sums_scores() -> None:
    pm = manager("serve_long_context", "sp:8").for_mode("decode")
    capacity = 64
    cache = (sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM)
    query = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)

    def attend(q: Any, v: Any) -> Any:
        scores = sw.shard(
            jnp.einsum("bthd,bshd->bhts", q, v),
            (sw.BATCH, sw.HEAD, sw.QUERY_LENGTH, sw.BIAS_KV_SEQ),
        )
        return sw.shard(jnp.einsum("bhts,bshd->bthd", jnp.exp(scores), v), query)

    actual = rows(
        pm.plan(
            attend,
            jax.ShapeDtypeStruct((1, 1, HEADS, DIM), jnp.float32),
            jax.ShapeDtypeStruct((1, capacity, HEADS, DIM), jnp.float32),
            specs=(query, cache),
        )
    )
    assert [row[:2] + row[3:] for row in actual] == [("all_reduce", ("sp",), HEADS * DIM * F32, 1)]


def test_ring_permutes_once_per_step() -> None:
    pm = manager("sequence", "sp:8")

    def ring(x: Any) -> Any:
        def body(x: Any) -> Any:
            def step(x: Any, _: Any) -> Any:
                pairs = [(at, (at + 1) % 8) for at in range(8)]
                return jax.lax.ppermute(x, "sp", pairs), None

            return jax.lax.scan(step, x, None, length=7)[0]

        return pm.shard_map(body, in_axes=[HIDDEN], out_axes=HIDDEN)(x)

    actual = rows(pm.plan(ring, X, specs=(HIDDEN,)))
    local = BATCH * LENGTH // 8 * EMBED * F32
    assert [row[:2] + row[3:] for row in actual] == [("permute", ("sp",), local, 7)]


def test_dispatch_and_return_are_two_all_to_alls() -> None:
    mesh = sw.abstract_mesh("ep:8")
    pm = sw.PartitionManager(sw.Strategy.preset("moe_ep"), mesh=mesh)
    spec = PartitionSpec("ep")

    def dispatch(x: Any) -> Any:
        def body(x: Any) -> Any:
            sent = jax.lax.all_to_all(x, "ep", 0, 0, tiled=True)
            return jax.lax.all_to_all(sent * 2, "ep", 0, 0, tiled=True)

        return jax.shard_map(body, in_specs=spec, out_specs=spec)(x)

    tokens = jax.ShapeDtypeStruct((64, EMBED), jnp.float32)
    actual = rows(pm.plan(dispatch, tokens, specs=((sw.BATCH, sw.EMBED),)))
    local = 64 // 8 * EMBED * F32
    assert [row[:2] + row[3:] for row in actual] == [("all_to_all", ("ep",), local, 1)] * 2


def test_one_trace_is_priced_under_many_strategies() -> None:
    pm = manager("fsdp_tp", "fsdp:2,tp:4")
    traced = trace(pm, mlp, (shapes(SPECS), X), specs=(SPECS, HIDDEN))
    for preset, mesh in [("fsdp", "fsdp:8"), ("tensor", "tp:8"), ("fsdp_tp", "fsdp:4,tp:2")]:
        other = manager(preset, mesh)
        assert traced.fits(other)
        assert walk(traced, other).events == plan(other, mlp).events


def test_one_rule_changes_the_events_of_its_axis() -> None:
    before = manager("fsdp_tp", "fsdp:2,tp:4")
    rules = sw.Strategy.model_validate({"rules": {"mlp_intermediate": "-"}})
    after = sw.PartitionManager(sw.Strategy.preset("fsdp_tp") | rules, mesh=before.mesh)
    named = [event for event in plan(before, mlp).events if "MLP_INTERMEDIATE" in event.axes]
    assert len(named) == 1
    assert not [event for event in plan(after, mlp).events if "MLP_INTERMEDIATE" in event.axes]
    kept = {(event.kind, event.mesh_axes, event.axes) for event in plan(after, mlp).events}
    assert kept == {("all_gather", ("fsdp",), ("EMBED",))}


def test_events_name_lines_of_the_model() -> None:
    report = plan(manager("fsdp_tp", "fsdp:2,tp:4"), gradient, outputs=SPECS)
    assert {event.source.split(":")[0] for event in report.events} == {"test_walk.py"}
    assert {event.path for event in report.events if event.axes == ("EMBED",)} == {"up", "down"}


def test_a_replicated_matmul_is_idle() -> None:
    report = plan(manager("ddp", "dp:2,tp:4"), mlp)
    assert {item.mesh_axes for item in report.walked.idle} == {("tp",)}


def test_unknown_primitive_makes_plan_incomplete() -> None:
    report: PlanReport = manager("ddp", "dp:8").plan(
        jnp.linalg.cholesky, jax.ShapeDtypeStruct((8, 8), jnp.float32)
    )
    assert not report.walked.complete
    assert "incomplete: no rule for cholesky" in str(report)


def test_plan_leaves_the_manager_as_it_was() -> None:
    pm = manager("fsdp_tp", "fsdp:2,tp:4")
    plan(pm, mlp)
    with pm:
        text = str(jax.jit(mlp).trace(shapes(SPECS), X).jaxpr)
    assert "annotate_axes" not in text
    assert "sharding_constraint" in text


def test_flops_are_those_of_one_device() -> None:
    report = plan(manager("fsdp_tp", "fsdp:2,tp:4"), mlp)
    assert report.walked.flops == 2 * 2 * BATCH * LENGTH * EMBED * INNER // 8


def test_vmap_leaves_the_new_dim_alone() -> None:
    pm = manager("fsdp_tp", "fsdp:2,tp:4")
    xs = jax.ShapeDtypeStruct((3, *X.shape), jnp.float32)

    def mapped(params: Any, xs: Any) -> Any:
        return jax.vmap(lambda x: mlp(params, x))(xs)

    actual = rows(pm.plan(mapped, shapes(SPECS), xs, specs=(SPECS, (sw.EMPTY, *HIDDEN))))
    hidden = 3 * BATCH // 2 * LENGTH * EMBED * F32
    assert ("all_reduce", ("tp",), ("MLP_INTERMEDIATE",), hidden, 1) in actual


SEQUENCE = (sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)
Y = jax.ShapeDtypeStruct((8, 16, 64), jnp.float32)


def cross_entropy(y: Any, labels: Any) -> Any:
    picked = jnp.take_along_axis(jax.nn.log_softmax(y), labels[..., None], -1)
    return -picked.mean()


@pytest.mark.parametrize(
    "function",
    [
        lambda y: jnp.where(y > 0, y, 0.0),
        jax.nn.elu,
        # Newer versions of JAX have primitives of their own for these.
        jax.grad(lambda y: jnp.tanh(y).sum()),
        jnp.log2,
        jax.vmap(lambda a: sw.shard(a * 2, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)),
        lambda y: sw.hint(y * 2, sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE),
    ],
)
def test_elementwise_work_sends_nothing(function: Callable[..., Any]) -> None:
    report: PlanReport = manager("fsdp_tp", "fsdp:2,tp:4").plan(function, Y, specs=(SEQUENCE,))
    assert rows(report) == []
    assert report.walked.complete


def test_gradient_of_cross_entropy_gathers_no_logits() -> None:
    labels = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    report: PlanReport = manager("fsdp", "fsdp:8").plan(
        jax.grad(cross_entropy),
        Y,
        labels,
        specs=((sw.BATCH, sw.QUERY_LENGTH, sw.VOCAB), (sw.BATCH, sw.QUERY_LENGTH)),
    )
    assert [row for row in rows(report) if row[3] > F32] == []


def test_pairwise_work_gathers_one_operand() -> None:
    def pairs(s: Any) -> Any:
        same = (s[:, :, None] == s[:, None, :]).astype(jnp.float32)
        return sw.shard(same, sw.BATCH, sw.QUERY_LENGTH, sw.BIAS_KV_SEQ)

    report: PlanReport = manager("sequence", "fsdp:2,sp:4").plan(
        pairs, jax.ShapeDtypeStruct((8, 64), jnp.int32), specs=((sw.BATCH, sw.QUERY_LENGTH),)
    )
    assert [row[:2] + row[3:] for row in rows(report)] == [
        ("all_gather", ("sp",), 8 // 2 * 64 * 4, 1)
    ]


def test_scan_over_a_sharded_stack_gathers_it() -> None:
    pm = manager("fsdp", "fsdp:8")
    sharding = jax.sharding.NamedSharding(pm.mesh, PartitionSpec("fsdp"))
    stack = jax.ShapeDtypeStruct((8, 64, 64), jnp.float32, sharding=sharding)

    def net(x: Any, stack: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return sw.shard(jnp.tanh(x @ w), sw.BATCH, sw.EMBED), None

        return jax.lax.scan(layer, x, stack)[0]

    x = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    actual = rows(pm.plan(net, x, stack, specs=((sw.BATCH, sw.EMBED), None)))
    assert [row[:2] + row[3:] for row in actual] == [
        ("all_gather", ("fsdp",), 8 * 64 * 64 * F32, 1)
    ]


def test_lookup_in_sharded_rows_adds_results() -> None:
    pm, table = manager("fsdp", "fsdp:8"), (sw.BATCH, sw.EMPTY)
    actual = rows(
        pm.plan(
            lambda rows, at: sw.shard(rows[at], *table),
            jax.ShapeDtypeStruct((64, 32), jnp.float32),
            jax.ShapeDtypeStruct((16,), jnp.int32),
            specs=(table, (sw.BATCH,)),
        )
    )
    assert ("all_gather", ("fsdp",), 16 * 4, 1) in [row[:2] + row[3:] for row in actual]
    assert {row[0] for row in actual} > {"all_gather"}


def test_python_scalar_keeps_its_weak_type() -> None:
    x = jax.ShapeDtypeStruct((8, 16, 64), jnp.bfloat16)
    report: PlanReport = manager("fsdp_tp", "fsdp:2,tp:4").plan(
        lambda x, scale: sw.shard(x * scale, *HIDDEN), x, 2.0, specs=(SEQUENCE, None)
    )
    assert {event.dtype for event in report.events} == {"bfloat16"}


def test_arguments_that_do_not_fit_are_refused() -> None:
    pm = manager("fsdp_tp", "fsdp:2,tp:4")
    with raises(sw.StrategyError, "tuple", 2):
        pm.plan(lambda a, b: a, X, X, specs=(HIDDEN,))
    other = jax.sharding.NamedSharding(sw.abstract_mesh("dp:8"), PartitionSpec("dp"))
    elsewhere = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=other)
    with raises(sw.MeshMismatchError, "dp", 8, "fsdp", 2, fix="pm.abstract"):
        pm.plan(lambda a: a, elsewhere)


def test_shard_map_on_the_mesh_of_the_manager() -> None:
    pm = sw.PartitionManager(
        sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("dp:1,fsdp:2,sp:1,ep:1,tp:4")
    )

    def summed(y: Any) -> Any:
        body = pm.shard_map(lambda a: jax.lax.psum(a, "tp"), in_axes=[SEQUENCE], out_axes=HIDDEN)
        return body(y)

    actual = rows(pm.plan(summed, Y, specs=(SEQUENCE,)))
    assert [row[:2] + row[3:] for row in actual] == [
        ("all_reduce", ("tp",), 8 // 2 * 16 * 64 // 4 * F32, 1)
    ]


@pytest.mark.parametrize(("matmul", "size"), [(jnp.float32, 4), (jnp.bfloat16, 2)])
def test_a_sum_is_added_before_it_is_converted(matmul: Any, size: int) -> None:
    """`matmul` is the type of the terms; the result is converted to the other type."""
    other = jnp.bfloat16 if matmul == jnp.float32 else jnp.float32

    def forward(params: Any, x: Any) -> Any:
        inner = sw.shard(x @ params["up"], sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)
        narrow = inner.astype(jnp.bfloat16), params["down"].astype(jnp.bfloat16)
        y = jnp.einsum("bsi,ie->bse", *narrow, preferred_element_type=matmul)
        return sw.shard(y.astype(other), HIDDEN)

    report = plan(manager("tensor", "tp:8"), forward)
    hidden = BATCH * LENGTH * EMBED * size
    assert rows(report) == [("all_reduce", ("tp",), ("MLP_INTERMEDIATE",), hidden, 1)]
    assert report.events[0].dtype == jnp.dtype(matmul).name


def test_sum_that_is_widened_only_to_add_sends_narrow_terms() -> None:
    """JAX adds bfloat16 in float32. Compilers send the bfloat16 sums of the shards."""

    def forward(x: Any) -> Any:
        return sw.shard(x.astype(jnp.bfloat16), HIDDEN).sum(axis=(1, 2))

    def wide(x: Any) -> Any:
        return sw.shard(x.astype(jnp.bfloat16), HIDDEN).astype(jnp.float32).sum(axis=(1, 2))

    pm = manager("sequence", "sp:8")
    for function, size in ((forward, 2), (wide, 4)):
        report = pm.plan(function, X, specs=(HIDDEN,))
        assert rows(report) == [("all_reduce", ("sp",), ("QUERY_LENGTH",), BATCH * size, 1)]


def test_part_of_a_manual_sum_is_a_reduce_scatter() -> None:
    pm = manager("fsdp", "fsdp:8")

    def forward(x: Any) -> Any:
        total = pm.shard_map(
            lambda a: jax.lax.psum(a, "fsdp").sum(1), in_axes=[HIDDEN], out_axes=(sw.EMPTY,) * 2
        )
        exact = pm.shard_map(
            lambda a: jax.lax.psum(a, "fsdp"), in_axes=[HIDDEN], out_axes=(sw.EMPTY,) * 3
        )
        part = sw.shard(exact(x), sw.EMPTY, sw.EMPTY, sw.FSDP)
        return total(x), part

    report = pm.plan(forward, X, specs=(HIDDEN,))
    size = BATCH // 8 * LENGTH * EMBED * F32
    assert rows(report) == [
        ("all_reduce", ("fsdp",), ("BATCH",), size, 1),
        ("reduce_scatter", ("fsdp",), ("BATCH",), size, 1),
    ]


def test_sum_that_is_cut_later_is_a_reduce_scatter() -> None:
    def forward(params: Any, x: Any) -> Any:
        gradient = jnp.einsum(
            "bse,bsi->ei", sw.shard(x, HIDDEN), x @ sw.gather(params, SPECS)["up"]
        )
        whole = sw.shard(gradient, sw.EMPTY, sw.EMPTY)
        return sw.shard(whole.astype(jnp.bfloat16), SPECS["up"].axes, role="param")

    def used_twice(params: Any, x: Any) -> Any:
        gradient = jnp.einsum(
            "bse,bsi->ei", sw.shard(x, HIDDEN), x @ sw.gather(params, SPECS)["up"]
        )
        whole = sw.shard(gradient, sw.EMPTY, sw.EMPTY)
        return sw.shard(whole, SPECS["up"].axes, role="param"), whole

    pm, axis = manager("fsdp", "fsdp:8"), (("fsdp",), ("BATCH",))
    gather = ("all_gather", ("fsdp",), ("EMBED",), WEIGHT, 1)
    assert rows(plan(pm, forward)) == [gather, ("reduce_scatter", *axis, WEIGHT, 1)]
    assert rows(plan(pm, used_twice)) == [gather, ("all_reduce", *axis, WEIGHT, 1)]


def test_branch_of_zeros_takes_the_sharding_of_the_other() -> None:
    def pick(which: Any, y: Any) -> Any:
        return jax.lax.cond(which, jnp.zeros_like, lambda y: y * 2, y)

    which = jax.ShapeDtypeStruct((), jnp.bool_)
    report: PlanReport = manager("fsdp_tp", "fsdp:2,tp:4").plan(
        pick, which, Y, specs=(None, SEQUENCE)
    )
    assert rows(report) == []


def test_loop_on_data_makes_plan_incomplete() -> None:
    def doubled(x: Any) -> Any:
        return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ x, x)

    report: PlanReport = manager("ddp", "dp:8").plan(
        doubled, jax.ShapeDtypeStruct((8, 8), jnp.float32)
    )
    assert report.walked.unknown == {"while (number of runs)": 1}


def test_other_mesh_axes_shard_the_body_of_a_map() -> None:
    pm, spec = manager("fsdp_tp", "fsdp:2,tp:4"), PartitionSpec("fsdp")

    def partly(x: Any) -> Any:
        def body(a: Any) -> Any:
            return jax.lax.psum(a.sum(-1), "fsdp")

        total = jax.shard_map(
            body, in_specs=spec, out_specs=PartitionSpec(), axis_names=frozenset({"fsdp"})
        )
        return total(sw.shard(x, sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE))

    report: PlanReport = pm.plan(partly, X, specs=(HIDDEN,))
    assert report.walked.complete
    size = X.dtype.itemsize * X.size // X.shape[-1] // 2
    found = [(each.kind, each.mesh_axes, each.logical_bytes) for each in report.events]
    assert found == [(Kind.ALL_REDUCE, (axis,), size) for axis in ("tp", "fsdp")]


def test_nested_vmap_leaves_both_new_dims_alone() -> None:
    y = jax.ShapeDtypeStruct((8, 4, 16, 64), jnp.float32)
    inner = jax.vmap(lambda a: sw.shard(a, sw.MLP_INTERMEDIATE), in_axes=1, out_axes=1)
    report: PlanReport = manager("fsdp_tp", "fsdp:2,tp:4").plan(
        jax.vmap(jax.vmap(inner)),
        y,
        specs=((sw.BATCH, sw.EMPTY, sw.MLP_INTERMEDIATE, sw.EMPTY),),
    )
    assert rows(report) == []


def attend(q: Any, k: Any) -> Any:
    return attention.dot_product_attention(q, k, k, causal=True, mode="train")


def test_answers_of_attention_shape_the_trace() -> None:
    pm = manager("fsdp_tp", "fsdp:2,tp:4")
    q = jax.ShapeDtypeStruct((8, 16, 8, 16), jnp.float32)
    # The second trace finds attention's answers kept, and must report them too.
    first, second = (trace(pm, attend, (q, q)) for _ in range(2))
    assert first.answers
    assert first.answers == second.answers
    assert second.fits(pm)
    assert not second.fits(manager("fsdp_tp", "fsdp:8"))


def test_json_is_plain_data() -> None:
    data = plan(manager("fsdp_tp", "fsdp:2,tp:4"), mlp).to_json()
    assert data["sent_bytes"] == sum(e["runs"] * e["wire_bytes"] for e in data["events"])
    assert np.all([isinstance(event["kind"], str) for event in data["events"]])
