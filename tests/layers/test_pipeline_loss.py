"""The loss of a pipeline is the sum over microbatches of that of the plain layers and a head."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.layers import loss, transformer_block
from shardwright.plan.collectives import Kind, read_collectives
from shardwright.testing import cpu_mesh
from tests.layers import blocks, pipeline_memory
from tests.layers.test_pipeline import (
    CONFIGS,
    COUNT,
    PARAMS,
    RANDOM,
    arguments,
    in_repeats,
    order,
)
from tests.layers.test_pipeline import X as RESIDUAL
from tests.raising import raises

HEAD = RANDOM.normal(size=(16, 24)).astype(np.float32) * 0.3
LABELS = RANDOM.integers(0, 24, (32, 6))
TOKENS = np.float32(32 * 6)
EMBED_VOCAB = (sw.EMBED, sw.VOCAB)


def manager(schedule: str, mesh: str, *, kind: Any = "auto", **changes: Any) -> Any:
    table = {
        "schedule": schedule,
        "microbatches": COUNT,
        "repeats": 2 if schedule == "circular" else 1,
        **changes,
    }
    rules = {"batch": "dp+fsdp+pp", "layers": "pp", "capacity": "dp+fsdp"}
    strategy = sw.Strategy.preset("fsdp_tp") | sw.Strategy(rules=rules, pipeline=table)
    return sw.PartitionManager(strategy, mesh=cpu_mesh(mesh, axis_types=kind), mode="train")


def head(weight: Any, y: Any, given: Any) -> Any:
    """Return the cross-entropy of labels, divided by the number of tokens of the whole batch."""
    labels = given["labels"]
    return loss.cross_entropy(jnp.tanh(y), weight, labels).weighted.total / given["tokens"]


@functools.cache
def one_by_one(name: str, shards: int) -> Any:
    """Return loss, gradients and loads of experts of plain layers, one microbatch at a time."""
    config, given = CONFIGS[name], arguments(name)
    encoded = given.pop("encoded", None)

    def total(params: Any, x: Any, weight: Any, encoded: Any, inputs: Any, key: Any) -> Any:
        own = inputs["given"] if encoded is None else {**inputs["given"], "encoded": encoded}
        keys = {"dropout": key} if name == "dropout" else None
        y, state = transformer_block.apply(config, params, x, keys=keys, **own)
        loss = head(weight, y, {"labels": inputs["labels"], "tokens": TOKENS})
        loads = [each.stats.load for each in state.moe or () if each is not None]
        return loss + state.aux / COUNT, loads

    by = (0, 1, 2) if encoded is None else (0, 1, 2, 3)
    step = jax.jit(jax.value_and_grad(total, by, has_aux=True))
    parts = order(shards)
    found = []
    for number, rows in enumerate(parts):
        own = None if encoded is None else encoded[rows]
        inputs = {"given": {k: v[rows] for k, v in given.items()}, "labels": LABELS[rows]}
        key = jax.random.fold_in(jax.random.key(7), number)
        found.append(step(PARAMS[name], RESIDUAL[rows], HEAD, own, inputs, key))
    back = np.argsort(parts.reshape(-1))
    sums: Any = jax.tree.map(lambda *each: sum(each), *found)
    (loss, loads), (of_params, _, of_head, *_) = sums
    of_rows = [
        np.concatenate(each)[back] for each in zip(*(g[1::2] for _, g in found), strict=True)
    ]
    return (loss, loads), (of_params, of_rows[0], of_head, *of_rows[1:])


@functools.lru_cache(maxsize=1)  # for tests that follow each other and look at one program
def check(
    name: str, schedule: str, mesh: str, kind: Any, *, forward: bool = True, **changes: Any
) -> Any:
    """Compare loss, gradients and statistics; return the program and the manager.

    With `forward`, the loss is also computed without gradients: the layers run first.
    """
    config, given = CONFIGS[name], arguments(name)
    with manager(schedule, mesh, kind=kind, **changes) as pm:
        repeats = pm.rules.pipeline.repeats
        specs = transformer_block.specs(config)
        params = pm.shard(in_repeats(PARAMS[name], repeats), specs, role="param")
        weight = pm.shard(HEAD, *EMBED_VOCAB, role="param")
        x, *encoded = (
            pm.shard(array, sw.BATCH, sw.LENGTH, sw.EMBED)
            for array in (RESIDUAL, *([given.pop("encoded")] if name == "cross" else []))
        )
        rows = {key: pm.shard(value, sw.BATCH, sw.QUERY_LENGTH) for key, value in given.items()}
        labels = pm.shard(LABELS, sw.BATCH, sw.QUERY_LENGTH)

        def total(params: Any, x: Any, weight: Any, encoded: Any, rows: Any, key: Any) -> Any:
            own = {**rows, **({"encoded": encoded[0]} if encoded else {})}
            value, state = transformer_block.loss(
                config,
                params,
                x,
                head=head,
                head_params=weight,
                head_inputs={"labels": labels, "tokens": TOKENS},
                keys={"dropout": key} if name == "dropout" else None,
                **own,
            )
            return 3 * value, state  # the gradients are multiplied by the cotangent

        arrays = (params, x, weight, encoded, rows, jax.random.key(7))
        step = jax.jit(jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True))
        program = step.lower(*arrays).compile()
        (value, state), gradients = program(*arrays)
        if forward:
            blocks.assert_close(jax.jit(total)(*arrays)[0], value, rtol=3e-6)
        shards = math.prod(pm.sizes.get(axis, 1) for axis in ("dp", "fsdp"))
    (wanted, loads), by = one_by_one(name, shards)
    blocks.assert_close(value / 3, wanted, rtol=3e-6)
    own = jax.tree.map(lambda leaf: leaf / 3, (*gradients[:3], *gradients[3]))
    blocks.assert_close(own, (in_repeats(by[0], repeats), *by[1:]), rtol=2e-5)
    stats = [each.stats.load for each in state.moe or () if each is not None]
    if stats:
        np.testing.assert_array_equal(
            sum(load.sum(0) for load in stats), sum(load.sum(0) for load in loads)
        )
    return program, pm


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "schedule", "mesh", "kind"),
    [
        ("cross", "1f1b", "pp:4,dp:2", "explicit"),
        ("moe", "1f1b", "pp:2,fsdp:2,ep:2", "auto"),
        ("moe", "circular", "pp:2,fsdp:2,tp:2", "explicit"),
        ("dropout", "1f1b", "pp:2,dp:4", "auto"),
        ("dropout", "1f1b", "pp:1,dp:2", "auto"),
        ("lora", "1f1b", "pp:4,fsdp:2", "explicit"),
        ("fp8", "1f1b", "pp:2,fsdp:2,tp:2", "auto"),
        ("windows", "1f1b", "pp:2,fsdp:2,tp:2", "explicit"),
        ("dense", "gpipe", "pp:4,tp:2", "auto"),
        ("dense", "1f1b", "pp:8", "auto"),
        ("dense", "1f1b", "pp:2,fsdp:2,tp:2", "auto"),
    ],
)
def test_equals_the_sum_over_microbatches(name: str, schedule: str, mesh: str, kind: Any) -> None:
    check(name, schedule, mesh, kind)


CELLS = [
    (name, schedule, mesh, kind)
    for mesh in ("pp:1,fsdp:4,tp:2", "pp:2,dp:2,tp:2", "pp:2,fsdp:4", "pp:4,tp:2", "pp:4,fsdp:2")
    for schedule in ("gpipe", "circular", "1f1b")
    for name, config in CONFIGS.items()
    for kind in ("auto", "explicit")
    if name != "fp8" and not config.trips % ((2 if schedule == "circular" else 1) * int(mesh[3]))
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "schedule", "mesh", "kind"), CELLS)
def test_equals_the_sum_everywhere(name: str, schedule: str, mesh: str, kind: Any) -> None:
    check(name, schedule, mesh, kind)


@pytest.mark.full(but=["1f1b-pp:4,dp:2-tick-auto"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(
    ("schedule", "mesh", "gather"),
    [
        ("gpipe", "pp:2,dp:2,tp:2", "tick"),
        ("circular", "pp:2,dp:2,fsdp:2", "tick"),
        ("1f1b", "pp:2,dp:2,tp:2", "tick"),
        ("1f1b", "pp:2,dp:2,fsdp:2", "once"),
        ("gpipe", "pp:2,fsdp:4", "once"),
        ("1f1b", "pp:4,dp:2", "tick"),
    ],
)
def test_gradients_are_reduced_once(schedule: str, mesh: str, gather: str, kind: Any) -> None:
    """Over the data axes that shard no weight in the ticks; those of the head, by microbatch."""
    program, pm = check("dense", schedule, mesh, kind, forward=False, gather=gather)
    over = {"dp"} if gather == "tick" else {"dp", "fsdp"}
    sums = [
        each
        for each in read_collectives(program, pm.mesh)
        if each.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
        and over & {*each.mesh_axes}
        and each.logical_bytes > HEAD.nbytes + 4
    ]
    assert {each.count for each in sums} == {1}
    of_stage = sum(leaf.nbytes for leaf in jax.tree.leaves(PARAMS["dense"])) // pm.sizes["pp"]
    # Over fsdp or tp, a device has a half of each matrix.
    halves = gather == "tick" and mesh.split(",")[-1] != "dp:2"
    assert sum(each.logical_bytes for each in sums) >= of_stage // (2 if halves else 1)


@pytest.mark.full(but=["dp"])
@pytest.mark.parametrize("axis", ["dp", "fsdp"])
def test_over_pp_1f1b_sends_microbatches(axis: str) -> None:
    """Forward ticks send two microbatches, ticks of both passes three, backward ticks two."""
    program, pm = check("dense", "1f1b", f"pp:4,{axis}:2", "auto", forward=False, gather="tick")
    over_pp = [each for each in read_collectives(program, pm.mesh) if "pp" in each.mesh_axes]
    permutes = [each for each in over_pp if each.kind is Kind.PERMUTE]
    assert sum(each.count or 0 for each in permutes) == 3 * COUNT + 2 * 2 * (4 - 1)
    assert {each.logical_bytes for each in permutes} == {RESIDUAL.nbytes // COUNT // 2}
    # All labels and segment ids on each stage; the gradient of the head, and the loss.
    rest = {kind: [each.logical_bytes for each in over_pp if each.kind is kind] for kind in Kind}
    assert rest[Kind.ALL_GATHER] == [LABELS.size * 4 // 2] * 2
    assert sum(rest[Kind.ALL_REDUCE]) == HEAD.nbytes // (2 if axis == "fsdp" else 1) + 4
    assert len(over_pp) == len(permutes) + 2 + len(rest[Kind.ALL_REDUCE])


def residual_layer(w: Any, x: Any, inputs: Any) -> Any:
    hidden = sw.shard(x @ sw.gather(w, sw.EMBED, sw.EMPTY), sw.BATCH, sw.EMPTY)
    return sw.shard(x + jnp.tanh(hidden) * inputs.rows, sw.BATCH, sw.EMBED), None


def square_head(w: Any, y: Any, _: Any) -> Any:
    return jnp.sum((y @ w) ** 2)


@pytest.mark.full(but=["bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_own_layers_and_rows_of_size_one(dtype: str) -> None:
    """Gradients of parameters have their dtype, and are added in float32."""
    spec = sw.ArraySpec((16, 16), dtype, (sw.EMBED, sw.EMPTY))
    w = RANDOM.normal(size=(8, 16, 16)).astype(np.float32) * 0.2
    last = RANDOM.normal(size=(16, 4)).astype(np.float32)
    x = RANDOM.normal(size=(32, 16)).astype(np.float32)

    def total(w: Any, x: Any, last: Any) -> Any:
        half = jnp.full((1, 1), 0.5, x.dtype)
        given = (w, x, square_head, last, None)
        stack = sw.stack_specs(spec, 8)
        return sw.pipeline_loss(residual_layer, *given, specs=stack, rows=half)[0]

    step = jax.jit(jax.value_and_grad(total, (0, 1, 2)))
    arrays = [jnp.asarray(each, dtype) for each in (w, x, last)]
    plain = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=cpu_mesh("dp:1"), mode="train")
    with plain:
        wanted = step(*(each.astype(jnp.float32) for each in arrays))
    for kind in ("auto", "explicit"):
        with manager("1f1b", "pp:4,fsdp:2", kind=kind) as pm:
            stored = pm.shard(arrays[0], sw.stack_specs(spec, 8), role="param")
            rows = pm.shard(arrays[1], sw.BATCH, sw.EMBED)
            value, got = step(stored, rows, pm.shard(arrays[2], sw.EMBED, sw.EMPTY, role="param"))
        assert all(each.dtype == dtype for each in got)
        # Three digits of bfloat16: what is compared with has float32 throughout.
        rtol = 2e-5 if dtype == "float32" else 3e-2
        blocks.assert_close((value, *got), (wanted[0], *wanted[1]), rtol=rtol)


@pytest.mark.full
def test_memory_of_1f1b_does_not_grow_with_microbatches() -> None:
    """Beside x and its gradient, which all schedules have."""
    given = pipeline_memory.ON_CPUS
    of_1f1b, of_gpipe = (
        [
            pipeline_memory.Program(schedule, count, cpu_mesh("pp:4"), **given)
            .compiled()
            .memory_analysis()
            .temp_size_in_bytes
            for count in (8, 16, 32)
        ]
        for schedule in ("1f1b", "gpipe")
    )
    microbatch = given["rows"] * pipeline_memory.WIDTH * 4
    # A stage has one microbatch of x in four; temporaries are x and its gradient, at most twice.
    for few, many in itertools.pairwise(zip((8, 16, 32), of_1f1b, strict=True)):
        assert many[1] - few[1] <= 2.1 * (many[0] - few[0]) / 4 * microbatch
    for few, many in itertools.pairwise(zip((8, 16, 32), of_gpipe, strict=True)):
        assert many[1] - few[1] >= (many[0] - few[0]) * microbatch


def test_a_pipeline_under_1f1b_needs_the_loss() -> None:
    with (
        manager("1f1b", "pp:2,dp:4"),
        raises(sw.LayerError, "1f1b", path=..., fix=("sw.pipeline_loss", "transformer_block.loss")),
    ):
        jax.eval_shape(
            functools.partial(transformer_block.apply, CONFIGS["dense"]), PARAMS["dense"], RESIDUAL
        )


@pytest.mark.parametrize("mesh", [None, "pp:1", "pp:2,dp:4"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_head_that_returns_no_scalar(schedule: str, mesh: str | None) -> None:
    stack = sw.stack_specs(sw.ArraySpec((16,), jnp.float32, (sw.EMPTY,)), 4)
    given = np.ones((4, 16), np.float32), np.ones((64, 16), np.float32)
    rows = 64 if mesh is None else 64 // COUNT
    heads = {f"({rows},)": lambda w, y, _: y.sum(-1), "()": lambda w, y, _: (y.sum(), y)}
    with manager(schedule, mesh) if mesh else contextlib.nullcontext():
        for shape, head in heads.items():

            def total(params: Any, x: Any, head: Any = head) -> Any:
                run = functools.partial(sw.pipeline_loss, lambda w, x, _: (x + w, None))
                return run(params, x, head, None, None, specs=stack)[0]

            with raises(sw.LayerError, "head", "one scalar", shape, fix="sum"):
                jax.eval_shape(jax.grad(total), *given)
