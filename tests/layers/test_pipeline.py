"""A pipeline equals the scan that runs once for each microbatch: values, gradients, collectives."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.layers import attention_block, mlp_block, moe_block, transformer_block
from shardwright.layers.lora import LoraConfig
from shardwright.layers.moe import MoEConfig
from shardwright.plan.collectives import Kind, read_collectives
from shardwright.testing import cpu_mesh
from tests.layers import blocks
from tests.raising import facts, raises

ATTENTION = attention_block.AttentionConfig(embed=16, heads=4)
MLP = mlp_block.MlpConfig(embed=16, hidden=32)
RANK = LoraConfig(rank=2, alpha=6.0)
MOE = moe_block.MoEBlockConfig(
    moe=MoEConfig(embed=16, hidden=16, experts=4, per_token=2, balance_loss=0.1, z_loss=0.1)
)
DENSE = transformer_block.TransformerConfig(layers=8, attention=ATTENTION, mlp=MLP)
CONFIGS = {
    "dense": DENSE,
    "lora": dataclasses.replace(
        DENSE,
        attention=dataclasses.replace(ATTENTION, lora=RANK),
        mlp=dataclasses.replace(MLP, lora=RANK),
        remat="blocks",
    ),
    "windows": dataclasses.replace(DENSE, windows=((3, 0), None)),
    "moe": dataclasses.replace(DENSE, mlp=(MLP, MOE)),
    "dropout": dataclasses.replace(
        DENSE,
        attention=dataclasses.replace(ATTENTION, dropout=0.2),
        mlp=dataclasses.replace(MLP, dropout=0.2),
        dropout=0.2,
    ),
    "fp8": dataclasses.replace(
        DENSE,
        attention=dataclasses.replace(ATTENTION, recipe="current"),
        mlp=dataclasses.replace(MLP, recipe="current"),
    ),
    "cross": dataclasses.replace(
        DENSE, cross=dataclasses.replace(ATTENTION, causal=False, rope_theta=None)
    ),
}
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(32, 6, 16)).astype(np.float32)
ENCODED = RANDOM.normal(size=(32, 5, 16)).astype(np.float32)
SEGMENTS = np.sort(RANDOM.integers(1, 3, (32, 6)), axis=1)
COUNT = 8  # microbatches


def manager(
    mesh: str, *, repeats: int = 1, kind: Any = "auto", batch: str = "dp+fsdp+pp", **rules: str
) -> sw.PartitionManager:
    strategy = sw.Strategy.preset("fsdp_tp") | sw.Strategy(
        rules={"batch": batch, "layers": "pp", "capacity": "dp+fsdp", **rules},
        pipeline={
            "schedule": "gpipe" if repeats == 1 else "circular",
            "microbatches": COUNT,
            "repeats": repeats,
        },
    )
    return sw.PartitionManager(strategy, mesh=cpu_mesh(mesh, axis_types=kind), mode="train")


def arguments(name: str) -> dict[str, Any]:
    """Return the arguments of a config that have rows, and the key."""
    given: dict[str, Any] = {"segment_ids": SEGMENTS}
    if name == "cross":
        given |= {"encoded": ENCODED, "encoded_segment_ids": np.ones((32, 5), np.int32)}
    if name == "moe":
        given["valid"] = SEGMENTS[:, :1] == SEGMENTS
    return given


def loss_of(config: Any, given: dict[str, Any], *, dropped: bool) -> Any:
    """Return a function of (params, x, key) that returns a loss and what it is made of."""

    def loss(params: Any, x: Any, key: Any, given: dict[str, Any] = given) -> Any:
        keys = {"dropout": key} if dropped else None
        y, state = transformer_block.apply(config, params, x, keys=keys, **given)
        weight = jnp.cos(jnp.arange(math.prod(x.shape[1:]))).reshape(x.shape[1:])
        return jnp.sum(jnp.sin(y) * weight) + 8 * state.aux, (y, state)

    return loss


DENSE_TOTAL = blocks.total(lambda params, x: transformer_block.apply(DENSE, params, x)[0])

# Not under a manager, whose strategy may ask for repeats.
PARAMS = {
    name: blocks.random_params(transformer_block.specs(config)) for name, config in CONFIGS.items()
}


def order(shards: int, count: int = COUNT) -> np.ndarray:
    """Return the rows of each microbatch: the i-th part of each shard of the batch."""
    return np.arange(32).reshape(shards, count, -1).swapaxes(0, 1).reshape(count, -1)


@functools.cache
def one_by_one(name: str, shards: int) -> Any:
    """Run the stack once for each microbatch, without a manager; gradients are those of the sum."""
    config, given = CONFIGS[name], arguments(name)
    parts = order(shards)

    def total(params: Any, x: Any, encoded: Any) -> Any:
        def of_part(number: Any) -> Any:
            rows = jnp.asarray(parts)[number]
            own = {key: jnp.asarray(value)[rows] for key, value in given.items()}
            if encoded is not None:
                own["encoded"] = encoded[rows]
            key = jax.random.fold_in(jax.random.key(7), number)
            f = loss_of(config, own, dropped=name == "dropout")
            loss, (y, state) = f(params, x[rows], key)
            # `state.aux` of the pipeline is the mean over microbatches.
            return loss - 8 * state.aux * (1 - 1 / COUNT), y, state

        losses, ys, states = jax.lax.map(of_part, jnp.arange(COUNT))
        back = np.argsort(parts.reshape(-1))
        return jnp.sum(losses), (ys.reshape(x.shape)[back], states)

    arrays = (PARAMS[name], X, given.get("encoded"))
    where = (0, 1) if name != "cross" else (0, 1, 2)
    return jax.jit(jax.value_and_grad(total, where, has_aux=True))(*arrays)


def in_repeats(tree: Any, repeats: int) -> Any:
    if repeats == 1:
        return tree
    return jax.tree.map(lambda leaf: leaf.reshape(repeats, -1, *leaf.shape[1:]), tree)


def compiled(name: str, pm: sw.PartitionManager, repeats: int = 1) -> tuple[Any, Any]:
    """Return a compiled training step, and its arguments. Enter the manager."""
    config, given = CONFIGS[name], arguments(name)
    specs = transformer_block.specs(config)
    params = pm.shard(in_repeats(PARAMS[name], repeats), specs, role="param")
    x, *encoded = (
        pm.shard(array, sw.BATCH, sw.LENGTH, sw.EMBED)
        for array in (X, *([given.pop("encoded")] if name == "cross" else []))
    )
    rows = {key: pm.shard(value, sw.BATCH, sw.QUERY_LENGTH) for key, value in given.items()}

    def loss(params: Any, x: Any, encoded: Any, rows: Any, key: Any) -> Any:
        own = {**rows, **({"encoded": encoded[0]} if encoded else {})}
        return loss_of(config, own, dropped=name == "dropout")(params, x, key)

    step = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    arrays = (params, x, encoded, rows, jax.random.key(7))
    return jax.jit(step).lower(*arrays).compile(), arrays


def check(name: str, mesh: str, repeats: int, kind: Any, **options: Any) -> Any:
    """Run a config in a pipeline and compare values, gradients and statistics."""
    with manager(mesh, repeats=repeats, kind=kind, **options) as pm:
        program, arrays = compiled(name, pm, repeats)
        (loss, (y, state)), (of_params, of_x, of_encoded) = program(*arrays)
        shards = math.prod(pm.sizes.get(axis, 1) for axis in ("dp", "fsdp"))
    (wanted, (wanted_y, states)), gradients = one_by_one(name, shards)
    # The loss sums all elements, so its last bits depend on the order of the devices.
    blocks.assert_close((loss, y), (wanted, wanted_y), rtol=5e-6)
    own = (of_params, of_x, *of_encoded)
    blocks.assert_close(own, (in_repeats(gradients[0], repeats), *gradients[1:]), rtol=2e-5)
    for at, after in enumerate(state.moe or ()):
        if after is not None:
            each = states.moe[at].stats
            np.testing.assert_array_equal(after.stats.load, each.load.sum(0))
            np.testing.assert_array_equal(after.stats.dropped, each.dropped.sum(0))
    return program, pm


@pytest.mark.full(but=["lora-pp:2,fsdp:2,tp:2-2-explicit"])
@pytest.mark.parametrize(
    ("name", "mesh", "repeats", "kind"),
    [
        ("lora", "pp:2,fsdp:2,tp:2", 2, "explicit"),
        ("windows", "pp:4,fsdp:2", 1, "auto"),
        ("moe", "pp:2,fsdp:2,ep:2", 2, "auto"),
        ("dropout", "pp:2,dp:4", 2, "auto"),
        ("cross", "pp:4,dp:2", 1, "explicit"),
        ("dropout", "dp:2", 2, "auto"),
        ("fp8", "pp:2,fsdp:4", 2, "auto"),
        ("fp8", "pp:4,fsdp:2", 1, "explicit"),
    ],
)
@pytest.mark.ci
def test_equals_the_scan_of_each_microbatch(name: str, mesh: str, repeats: int, kind: Any) -> None:
    check(name, mesh, repeats, kind)


MESHES = ("pp:1,fsdp:4,tp:2", "pp:2,dp:2,tp:2", "pp:2,fsdp:4", "pp:4,tp:2", "pp:4,fsdp:2")


# A stage of a repeat has at least one whole pattern. fp8 has the cells above.
CELLS = [
    (name, mesh, repeats, kind)
    for mesh in MESHES
    for repeats in (1, 2)
    for name, config in CONFIGS.items()
    for kind in ("auto", "explicit")
    if name != "fp8" and not config.trips % (repeats * int(mesh[3]))
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh", "repeats", "kind"), CELLS)
def test_equals_the_scan_everywhere(name: str, mesh: str, repeats: int, kind: Any) -> None:
    check(name, mesh, repeats, kind)


@pytest.mark.full
@pytest.mark.ci
def test_over_pp_only_microbatches_are_sent() -> None:
    """Two permutes per tick, forward; results too, backward; nothing at the entry and the exit.

    Values and gradients are compared as well.
    """
    program, pm = check("dense", "pp:2,fsdp:2,tp:2", 1, "auto")
    found = list(read_collectives(program, pm.mesh))
    over_pp = [each for each in found if "pp" in each.mesh_axes]
    permutes = [each for each in over_pp if each.kind is Kind.PERMUTE]
    ticks = COUNT + 2 - 1
    assert sum(each.count or 0 for each in permutes) == 4 * ticks
    rows = X.nbytes // COUNT // 2  # of a microbatch, on a shard over fsdp
    assert {each.logical_bytes for each in permutes} == {rows}
    # The loss, and the segment ids, of which each stage holds all.
    rest = [(each.kind, each.logical_bytes) for each in over_pp if each not in permutes]
    assert sorted(rest) == [(Kind.ALL_GATHER, SEGMENTS.size * 4 // 2), (Kind.ALL_REDUCE, 4)]
    # In each tick, forward and backward, the weights of four layers.
    gathers = [each for each in found if each.mesh_axes == ("fsdp",)]
    runs = [each.count for each in gathers if each.kind is Kind.ALL_GATHER]
    assert runs == [4 * ticks] * 12


def test_without_other_axes_the_result_is_bit_equal() -> None:
    def layer(w: Any, x: Any, inputs: Any) -> Any:
        return x + jnp.tanh(x @ w), inputs.number

    w = RANDOM.normal(size=(8, 16, 16)).astype(np.float32) * 0.3
    specs = sw.stack_specs(sw.ArraySpec((16, 16), jnp.float32, (sw.EMBED, sw.EMPTY)), 8)
    for repeats in (1, 2):
        with manager("pp:4", repeats=repeats) as pm:
            own = sw.stack_specs(
                sw.ArraySpec((16, 16), jnp.float32, (sw.EMBED, sw.EMPTY)), 8, repeats=repeats
            )
            stored = pm.shard(in_repeats(w, repeats), own, role="param")
            x = pm.shard(X[:, 0], sw.BATCH, sw.EMBED)
            run = jax.jit(lambda w, x, own=own: sw.pipeline(layer, w, x, specs=own))
            y, numbers = run(stored, x)
        np.testing.assert_array_equal(numbers, np.tile(np.arange(8), (COUNT, 1)))
        plain = jax.jit(lambda w, x: sw.pipeline(layer, w, x, specs=specs)[0])
        parts = order(1)
        each = jnp.concatenate([plain(w, X[rows, 0]) for rows in parts])
        np.testing.assert_array_equal(y, each[np.argsort(parts.reshape(-1))])


@functools.cache
def of_the_whole_batch() -> Any:
    return jax.jit(jax.value_and_grad(DENSE_TOTAL, (0, 1), has_aux=True))(PARAMS["dense"], X)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.ci
def test_schedule_none_gathers_layers(kind: str) -> None:
    pm = manager("pp:2,fsdp:4", kind=kind)
    strategy = sw.Strategy.preset("fsdp") | sw.Strategy(
        rules={"batch": "fsdp+pp", "layers": "pp"}, pipeline={"schedule": "none"}
    )
    with sw.PartitionManager(strategy, mesh=pm.mesh, mode="train") as plain:
        specs = transformer_block.specs(DENSE)
        params = plain.shard(PARAMS["dense"], specs, role="param")
        x = plain.shard(X, sw.BATCH, sw.LENGTH, sw.EMBED)
        got = jax.jit(jax.value_and_grad(DENSE_TOTAL, (0, 1), has_aux=True))(params, x)
    blocks.assert_close(got, of_the_whole_batch())


@pytest.mark.full
@pytest.mark.parametrize(
    ("batch", "kind"), [("dp", "auto"), ("dp", "explicit"), ("pp+dp", "explicit")]
)
@pytest.mark.ci
def test_batch_may_leave_pp_out_or_first(batch: str, kind: str) -> None:
    """Which rows are in a microbatch does not change results without statistics of rows."""
    with manager("pp:2,dp:2", batch=batch, kind=kind, capacity="dp") as pm:
        params = pm.shard(PARAMS["dense"], transformer_block.specs(DENSE), role="param")
        x = pm.shard(X, sw.BATCH, sw.LENGTH, sw.EMBED)
        got = jax.jit(jax.value_and_grad(DENSE_TOTAL, (0, 1), has_aux=True))(params, x)
    blocks.assert_close(got, of_the_whole_batch())


@pytest.mark.full
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.ci
def test_a_call_may_be_eager(kind: str) -> None:
    def layer(w: Any, x: Any, inputs: Any) -> Any:
        return x + inputs.per_layer * jnp.tanh(x @ w), None

    spec = sw.ArraySpec((16, 16), jnp.float32, (sw.EMBED, sw.EMPTY))
    with manager("pp:2,fsdp:2", repeats=2, kind=kind) as pm:
        specs = sw.stack_specs(spec, 4, repeats=2)
        w = pm.shard(np.full(specs.shape, 0.1, np.float32), specs, role="param")
        x = pm.shard(X[:, 0], sw.BATCH, sw.EMPTY)

        def total(w: Any, x: Any, scales: Any) -> Any:
            return jnp.sum(sw.pipeline(layer, w, x, specs=specs, per_layer=scales)[0] ** 2)

        step = jax.value_and_grad(total, (0, 1, 2))
        arrays = (w, x, jnp.arange(4.0))
        blocks.assert_close(step(*arrays), jax.jit(step)(*arrays))


@pytest.mark.full
def test_gradients_of_rows_in_16_bits() -> None:
    """Their sum over pp is one of float32: XLA's CPU backend aborts at one of bfloat16."""

    def layer(w: Any, x: Any, inputs: Any) -> Any:
        hidden = jnp.tanh(x @ sw.gather(w, sw.EMBED, sw.EMPTY)) * inputs.rows
        return sw.shard(x + hidden, sw.BATCH, sw.EMBED), None

    w = RANDOM.normal(size=(8, 16, 16)).astype(np.float32) * 0.2
    scales = RANDOM.normal(size=(32, 16)).astype(np.float32)
    found = []
    for dtype in ("bfloat16", "float32"):
        spec = sw.ArraySpec((16, 16), dtype, (sw.EMBED, sw.EMPTY))
        specs = sw.stack_specs(spec, 8, repeats=2)

        def total(w: Any, x: Any, rows: Any, specs: Any = specs) -> Any:
            y, _ = sw.pipeline(layer, w, x, specs=specs, rows=rows)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        with manager("pp:4,fsdp:2", repeats=2) as pm:
            x, rows = (
                pm.shard(jnp.asarray(each, dtype), sw.BATCH, sw.EMBED) for each in (X[:, 0], scales)
            )
            stored = pm.shard(jnp.asarray(in_repeats(w, 2), dtype), specs, role="param")
            found.append(jax.jit(jax.grad(total, (0, 1, 2)))(stored, x, rows))
    assert all(each.dtype == jnp.bfloat16 for each in found[0])
    blocks.assert_close(*found, rtol=5e-2)


@pytest.mark.parametrize(("name", "shape"), [("rows", (32,)), ("streamed", (1, 4))])
def test_first_dims_that_count_no_rows(name: str, shape: Any) -> None:
    specs = sw.stack_specs(sw.ArraySpec((16,), jnp.float32, (sw.EMPTY,)), 4)
    given = {name: {"own": np.zeros(shape)}}
    run = functools.partial(sw.pipeline, lambda w, x, _: (x + w, None), specs=specs, **given)
    with (
        manager("pp:2,dp:2"),
        raises(sw.RankMismatchError, 16, path=f"{name}/own", fix="dim 0"),
    ):
        jax.eval_shape(run, np.zeros((4, 16)), np.zeros((16, 16)))


def test_unrepeated_stack_in_a_circular_pipeline() -> None:
    stack = sw.stack_specs(sw.ArraySpec((16,), jnp.float32, (sw.EMPTY,)), 4)
    run = functools.partial(sw.pipeline, lambda w, x, _: (x + w, None), specs=stack)
    with manager("pp:2", repeats=2), raises(sw.LayerError, (4, 16), "(2, ...)", fix="repeats=2"):
        jax.eval_shape(run, np.zeros((4, 16)), X)


def test_rows_of_a_shard_that_do_not_divide() -> None:
    stack = sw.stack_specs(sw.ArraySpec((16,), jnp.float32, (sw.EMPTY,)), 4)
    run = functools.partial(sw.pipeline, lambda w, x, _: (x + w, None), specs=stack)
    says = "48 rows, 12 on each of 4 shards over fsdp, and 12 rows do not divide into 8"
    with manager("pp:2,fsdp:4"), raises(sw.IndivisibleError, says, path="x", fix=32):
        jax.eval_shape(run, np.zeros((4, 16)), np.zeros((48, 6, 16)))


def test_refusals() -> None:
    params, x = PARAMS["dense"], X
    stack = functools.partial(transformer_block.apply, DENSE)
    with manager("pp:2,dp:4") as pm:
        with raises(sw.IndivisibleError, 8, 40, path="x", fix=32):
            jax.eval_shape(stack, params, np.zeros((40, 6, 16), np.float32))
        unrolled, trees = (
            dataclasses.replace(DENSE, scan=False),
            [jax.tree.map(lambda leaf, at=at: leaf[at], params[0]) for at in range(8)],
        )
        with raises(sw.LayerError, "scan=False", path="scan", fix="scan=True"):
            jax.eval_shape(functools.partial(transformer_block.apply, unrolled), trees, x)
        nine = dataclasses.replace(DENSE, layers=9, windows=((3, 0), None))
        with raises(sw.LayerError, 1, 9, path="layers", fix=2):
            jax.eval_shape(
                functools.partial(transformer_block.apply, nine),
                blocks.random_params(transformer_block.specs(nine)),
                x,
            )
        inside = jax.shard_map(
            lambda x: stack(params, x)[0],
            mesh=pm.mesh,
            in_specs=jax.P("dp"),
            out_specs=jax.P("dp"),
            axis_names={"dp"},
        )
        with raises(sw.LayerError, "shard_map", fix="outside"):
            jax.eval_shape(inside, x)
    with (
        manager("pp:2,dp:4", repeats=2),
        raises(sw.LayerError, (8, 16), path=..., fix="transformer_block.specs"),
    ):
        jax.eval_shape(stack, params, x)
    with manager("pp:3,dp:2"), raises(sw.IndivisibleError, 8, "pp=3", path=...):
        jax.eval_shape(stack, params, np.zeros((48, 6, 16), np.float32))


@pytest.mark.parametrize(("repeats", "number"), [(1, "layers"), (2, "layers per repeat")])
def test_fix_of_layers_that_do_not_divide(repeats: int, number: str) -> None:
    """A rule of layers with a fallback runs under schedule = "none" only."""
    pm, fix = manager("pp:4", repeats=repeats), 'schedule = "none"'
    (problem,) = pm.explain(sw.LAYERS, shape=(6,), role="param").problems
    assert problem.fix.startswith(f"choose a number of {number} that pp divides, or another pp")
    assert fix in problem.fix
    assert problem.edit is None
    sw.Strategy.loads(STRATEGY.format(layers="pp | -", more=f"[pipeline]\n{fix}")).compile()


STRATEGY = '[mesh]\npp = 2\n[rules]\nbatch = "pp"\nlayers = "{layers}"\n{more}'
GPIPE = '[pipeline]\nschedule = "gpipe"\nmicrobatches = 8\n'


@pytest.mark.parametrize(
    ("layers", "more", "says"),
    [
        ("pp", "", facts("pp", path=..., fix=("gpipe", "none"))),
        ("pp", "[pipeline]\nmicrobatches = 8", facts("pp", path=..., fix="gpipe")),
        ("-", "[pipeline]\nmicrobatches = 8", facts("schedule", path=..., fix="gpipe")),
        ("-", GPIPE, facts("gpipe", "pp", path=..., fix='layers = "pp"')),
        ("pp | -", GPIPE, facts("gpipe", "pp", path=..., fix='layers = "pp"')),
        ("pp", '[pipeline]\nschedule = "gpipe"', facts("microbatches", path=..., fix=8)),
        ("pp", GPIPE + "repeats = 2", facts("repeats", 2, path=..., fix="circular")),
        ("pp", GPIPE + "repeats = 0", facts(0, path=..., fix=1)),
        ("pp", GPIPE + '[policy]\norder = "rules"', facts("rules", path=..., fix="dims")),
    ],
)
def test_strategies_that_cannot_run(layers: str, more: str, says: Any) -> None:
    with raises(sw.StrategyError, says):
        sw.Strategy.loads(STRATEGY.format(layers=layers, more=more))


def test_overlays_are_checked_together() -> None:
    layers, schedule = sw.Strategy(rules={"layers": "pp"}), sw.Strategy.loads(GPIPE)
    assert (layers | schedule).compile().pipeline is not None
    for half, fix in ((layers, "schedule"), (schedule, 'layers = "pp"')):
        with raises(sw.StrategyError, "pp", path=..., fix=fix):
            half.compile()


def test_explain_says_which_layers_a_stage_holds() -> None:
    pm = manager("pp:2,dp:4", repeats=2)
    note = "4 layers in each of 2 repeats: layers of stage 0: 0-1, 4-5; stage 1: 2-3, 6-7"
    assert pm.explain(sw.LAYERS, shape=(4,), role="param").notes == (note,)
    many = manager("pp:8").explain(sw.LAYERS, shape=(8,), role="param").notes
    assert many == ("layers of stage 0: 0; stage 1: 1; ...; stage 7: 7",)


@pytest.mark.parametrize(
    ("kind", "repeats"),
    [
        ("explicit", 2),
        *[pytest.param(*each, marks=pytest.mark.full) for each in (("auto", 2), ("explicit", 1))],
    ],
)
def test_unstack_takes_layers_of_stages(kind: str, repeats: int) -> None:
    """In the order of the layers, so that what a pipeline has trained is served without one."""
    _, wanted = transformer_block.unstack(CONFIGS["moe"], PARAMS["moe"])
    with manager("pp:2,fsdp:2", repeats=repeats, kind=kind) as pm:
        specs = transformer_block.specs(CONFIGS["moe"])
        params = pm.shard(in_repeats(PARAMS["moe"], repeats), specs, role="param")
        config, layers = transformer_block.unstack(CONFIGS["moe"], params)
    assert not config.scan
    jax.tree.map(np.testing.assert_array_equal, layers, wanted)


def test_initial_values_do_not_depend_on_repeats() -> None:
    init = jax.nn.initializers.normal()
    spec = sw.ArraySpec((4,), jnp.float32, (sw.EMBED,), init)
    flat, cut = sw.stack_specs(spec, 6), sw.stack_specs(spec, 6, repeats=2)
    assert cut.shape == (2, 3, 4)
    assert cut.axes == (sw.EMPTY, sw.LAYERS, sw.EMBED)
    assert cut == sw.stack_specs(spec, 6, repeats=2)
    key = jax.random.key(0)
    values = [each.init(key, each.shape, each.dtype) for each in (flat, cut)]
    np.testing.assert_array_equal(values[0].reshape(2, 3, 4), values[1])
    with raises(sw.IndivisibleError, 6, "repeats=4", path="repeats", fix="pipeline"):
        sw.stack_specs(spec, 6, repeats=4)
