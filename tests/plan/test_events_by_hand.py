"""Events of nine annotated models, equal to counts that follow from sizes alone.

Each row is kind, mesh axes, semantic axes, bytes of one run and number of runs. All are exact.
"""

from __future__ import annotations

import functools
import linecache
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import shardwright as sw
from shardwright import attention
from shardwright.layers import moe
from shardwright.plan.collectives.read import read_collectives
from shardwright.plan.planner import PlanReport
from shardwright.testing import cpu_mesh
from tests.plan.decoder import Decoder
from tests.plan.test_walk import BATCH as B
from tests.plan.test_walk import EMBED as E
from tests.plan.test_walk import F32, HIDDEN, SPECS, Row, X, manager, mlp, rows, shapes
from tests.plan.test_walk import INNER as I
from tests.plan.test_walk import LENGTH as L

LAYERS = 3
STACKED = sw.stack_specs(SPECS, LAYERS)
QUERY = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)
KEY = (sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM)
WEIGHT = E * I * F32
Planned = Callable[[], tuple[PlanReport, list[Row]]]


def stack(params: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (mlp(w, x), None), x, params)[0]


def stack_gradient(params: Any, x: Any) -> Any:
    return jax.grad(lambda params: (stack(params, x) ** 2).sum())(params)


def planned(pm: sw.PartitionManager, function: Any, outputs: Any = None) -> PlanReport:
    report: PlanReport = pm.plan(
        function, shapes(STACKED), X, specs=(STACKED, HIDDEN), outputs=outputs
    )
    return report


def fsdp_forward() -> tuple[PlanReport, list[Row]]:
    report = planned(manager("fsdp", "fsdp:8"), stack)
    return report, [("all_gather", ("fsdp",), ("EMBED",), WEIGHT, LAYERS)] * 2


def fsdp_train() -> tuple[PlanReport, list[Row]]:
    report = planned(manager("fsdp", "fsdp:8"), stack_gradient, STACKED)
    gathers = [("all_gather", ("fsdp",), ("EMBED",), WEIGHT, LAYERS)] * 2
    scatters = [("reduce_scatter", ("fsdp",), ("BATCH",), WEIGHT, LAYERS)] * 2
    return report, gathers + scatters


def fsdp_tp_forward() -> tuple[PlanReport, list[Row]]:
    report = planned(manager("fsdp_tp", "fsdp:2,tp:4"), stack)
    return report, [
        *[("all_gather", ("fsdp",), ("EMBED",), WEIGHT // 4, LAYERS)] * 2,
        ("all_reduce", ("tp",), ("MLP_INTERMEDIATE",), B // 2 * L * E * F32, LAYERS),
    ]


def fsdp_tp_train() -> tuple[PlanReport, list[Row]]:
    report = planned(manager("fsdp_tp", "fsdp:2,tp:4"), stack_gradient, STACKED)
    hidden = B // 2 * L * E * F32
    return report, [
        *[("all_gather", ("fsdp",), ("EMBED",), WEIGHT // 4, LAYERS)] * 2,
        # Forward and backward.
        *[("all_reduce", ("tp",), ("MLP_INTERMEDIATE",), hidden, LAYERS)] * 2,
        *[("reduce_scatter", ("fsdp",), ("BATCH",), WEIGHT // 4, LAYERS)] * 2,
    ]


def data_parallel_train() -> tuple[PlanReport, list[Row]]:
    report = planned(manager("ddp", "dp:8"), stack_gradient, STACKED)
    return report, [("all_reduce", ("dp",), ("BATCH",), WEIGHT, LAYERS)] * 2


def sharded_cache_decode() -> tuple[PlanReport, list[Row]]:
    heads, dim, capacity = 8, 16, 64
    pm = manager("serve_long_context", "sp:8").for_mode("decode")
    cache = jax.ShapeDtypeStruct((1, capacity, heads, dim), jnp.float32)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return attention.dot_product_attention(q, k, v)

    report = pm.plan(
        attend,
        jax.ShapeDtypeStruct((1, 1, heads, dim), jnp.float32),
        cache,
        cache,
        specs=(QUERY, KEY, KEY),
    )
    # Each device sends its partial result: `dim` numbers and their weight per head.
    return report, [("all_gather", ("sp",), ("KV_LENGTH",), 8 * heads * (dim + 1) * F32, 1)]


def expert_dispatch_and_return() -> tuple[PlanReport, list[Row]]:
    experts, per_token = 16, 2
    config = moe.MoEConfig(
        embed=E, hidden=I, experts=experts, per_token=per_token, capacity=moe.CapacityFactor(1.0)
    )
    specs = moe.specs(config)
    pm = manager("moe_ep", "ep:8").for_mode("train")
    tokens = jax.ShapeDtypeStruct((16, 8, E), jnp.float32)
    report = pm.plan(
        lambda params, x: moe.apply(config, params, x)[0],
        shapes(specs),
        tokens,
        specs=(specs, HIDDEN),
    )
    slots = 16 * 8 // 8 * per_token // experts
    sent = ("all_to_all", ("ep",), ("EP (EXPERT)",), experts * slots * E * F32, 1)
    return report, [
        ("all_gather", ("ep",), ("EMBED",), E * experts * F32, 1),  # the router
        # Nobody uses the statistics of the router, so their sum is not planned.
        sent,
        sent,
    ]


def ring_attention() -> tuple[PlanReport, list[Row]]:
    batch, length, heads, dim = 2, 64, 8, 16
    ring = sw.Strategy.model_validate({"attention": {"train": "ring"}})
    pm = sw.PartitionManager(
        sw.Strategy.preset("sequence") | ring, mesh=sw.abstract_mesh("sp:8")
    ).for_mode("train")

    def gradients(q: Any, k: Any, v: Any) -> Any:
        def loss(*args: Any) -> Any:
            return (attention.dot_product_attention(*args, causal=True) ** 2).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    array = jax.ShapeDtypeStruct((batch, length, heads, dim), jnp.float32)
    report = pm.plan(gradients, array, array, array, specs=(QUERY, KEY, KEY))
    pair = 2 * batch * length // 8 * heads * dim * F32  # keys and values travel together
    axis = ("sp",), ("KV_LENGTH",)
    return report, [
        ("permute", *axis, pair, 1),  # their gradients travel one step more, back home
        *[("permute", *axis, pair, 7)] * 3,  # forward; backward, with their gradients
    ]


def zero1_step() -> tuple[PlanReport, list[Row]]:
    pm = manager("ddp", "dp:8", zero1="dp")
    up = {"up": SPECS["up"]}

    def step(params: Any, moments: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            hidden = sw.shard(x, HIDDEN) @ sw.gather(params, up)["up"]
            return (hidden**2).sum()

        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, jax.grad(loss)(params))
        updated = {"up": sw.shard(params["up"] - moments["up"], SPECS["up"].axes, role="param")}
        return updated, moments

    report = pm.plan(
        step,
        shapes(up),
        shapes(up),
        X,
        specs=(up, up, HIDDEN),
        holds=("parameters", "optimizer", "inputs"),
    )
    return report, [
        # Each device updates its part of the weights, and sends it to the others.
        ("all_gather", ("dp",), ("EMBED",), WEIGHT, 1),
        ("all_reduce", ("dp",), ("BATCH",), WEIGHT, 1),
    ]


MODELS: tuple[Planned, ...] = (
    fsdp_forward,
    fsdp_train,
    fsdp_tp_forward,
    fsdp_tp_train,
    data_parallel_train,
    sharded_cache_decode,
    expert_dispatch_and_return,
    ring_attention,
    zero1_step,
)


@functools.cache
def once(model: Planned) -> Any:
    return model()


def test_events_equal_counts_by_hand() -> None:
    wrong = {}
    for model in MODELS:
        report, expected = once(model)
        assert report.walked.complete
        if rows(report) != sorted(expected):
            wrong[model.__name__] = rows(report), sorted(expected)
    assert not wrong


def test_events_name_lines_of_their_models() -> None:
    """Each event has the line of the model that causes it, never a line of the library."""
    calls = {
        "all_gather": ("gather(", "dot_product_attention(", "moe.apply(", "sw.shard("),
        "reduce_scatter": ("gather(",),
        "all_reduce": ("gather(", "@", "sw.shard("),  # of a matmul, forward and backward
        "all_to_all": ("moe.apply(",),
        "permute": ("dot_product_attention(",),
    }
    for model in MODELS:
        report, _ = once(model)
        for event in report.events:
            file, _, line = event.source.partition(":")
            text = linecache.getline(str(Path(__file__).with_name(file)), int(line))
            assert any(call in text for call in calls[str(event.kind)]), (model.__name__, event)


Identity = tuple[str, tuple[str, ...], tuple[str, ...], str, int]
SMALL = Decoder(
    embed=64, inner=128, heads=8, kv_heads=4, dim=16, vocab=256, layers=2, batch=8, length=32
).program("train")


def identities(rules: dict[str, dict[str, str]]) -> Counter[Identity]:
    """What the events of a training step of a decoder are, without their bytes."""
    strategy = sw.Strategy.preset("fsdp_tp") | sw.Strategy.model_validate(rules)
    pm = sw.PartitionManager(strategy, mesh=sw.abstract_mesh("fsdp:2,tp:4"), mode="train")
    report = pm.plan(SMALL.function, *SMALL.shapes, specs=SMALL.specs, outputs=SMALL.outputs)
    return Counter(
        (str(event.kind), event.mesh_axes, event.axes, event.source, event.runs)
        for event in report.events
    )


@functools.cache
def unchanged() -> Counter[Identity]:
    return identities({})


def test_one_rule_changes_the_events_that_name_its_axis() -> None:
    """If an axis is replicated, exactly the events that it causes are gone, and none is new."""
    before = unchanged()
    for axis in ("batch", "vocab", "mlp_intermediate"):
        after = identities({"rules": {axis: "-"}})
        named = {key: count for key, count in before.items() if axis.upper() in key[2]}
        assert named
        assert before - after == Counter(named), axis
        assert not after - before, axis


def test_parameter_rule_changes_gathers_and_kinds_of_sums() -> None:
    before, after = unchanged(), identities({"params": {"embed": "-"}})
    # The gradient of the embedding also gathers the indices, over the mesh axis of the batch.
    assert [key for key in before if key[0] == "all_gather" and "BATCH" not in key[2]] == [
        key for key in before if "EMBED" in key[2]
    ]
    assert not [key for key in after if "EMBED" in key[2]]
    # Gradients are no longer scattered, so all of each is summed on every device.
    scattered = [key for key in before if key[0] == "reduce_scatter"]
    assert {("all_reduce", *key[1:]) for key in scattered} <= set(after)


def test_part_that_is_cut_again_is_summed_whole() -> None:
    """Conditioning has no length: its gradients are summed over fsdp, and stored over fsdp+sp."""
    pm = sw.PartitionManager(sw.Strategy.preset("sequence"), mesh=cpu_mesh("fsdp:4,sp:2"))
    weight = sw.ArraySpec((E, I), jnp.float32, (sw.EMBED, sw.EMPTY))
    x = jax.ShapeDtypeStruct((B, E), jnp.float32, sharding=pm.sharding((sw.BATCH, sw.EMBED)))

    def gradient(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: jnp.sin(x @ sw.gather(w, weight)).sum())(w)

    given, specs = jax.ShapeDtypeStruct((E, I), jnp.float32), (weight, (sw.BATCH, sw.EMBED))
    found = rows(pm.plan(gradient, given, x, specs=specs, outputs=weight))
    assert found == [
        ("all_gather", ("fsdp", "sp"), ("EMBED",), WEIGHT, 1),
        ("all_reduce", ("fsdp",), ("BATCH",), WEIGHT, 1),
    ]
    with pm:
        step = jax.jit(gradient, out_shardings=pm.sharding(weight))
        compiled = read_collectives(step.lower(pm.abstract(weight), x).compile(), pm.mesh)
    assert sorted((str(each.kind), each.mesh_axes, each.total_bytes) for each in compiled) == [
        (kind, mesh_axes, size) for kind, mesh_axes, _, size, _ in found
    ]
