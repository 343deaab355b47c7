"""State: bytes by category equal to arithmetic without the resolver, and to compiled programs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright import caches
from shardwright.plan.state import Category, StateBytes, count_tensors
from shardwright.show.plan import state_text
from shardwright.testing import cpu_mesh
from shardwright.trees.tensors import Tensor
from tests.raising import Facts, facts, raises

HIDDEN = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
SPECS = {
    "up": sw.ArraySpec((64, 128), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE)),
    "key": sw.ArraySpec((64, 2, 16), jnp.float32, (sw.EMBED, sw.KV_HEAD, sw.KV_HEAD_DIM)),
    "norm": sw.ArraySpec((64,), jnp.float32, (sw.NORM,)),
}
CACHE = (sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM)


def shapes(specs: Any) -> Any:
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, sw.ArraySpec),
    )


def step(params: Any, moments: Any, x: Any) -> Any:
    """One step of momentum over a loss that uses every parameter."""

    def loss(params: Any) -> Any:
        w = sw.gather(params, SPECS)
        h = sw.shard(x, HIDDEN) * w["norm"]
        return (h @ w["up"]).sum() + jnp.einsum("bld,dkh->", h, w["key"])

    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, jax.grad(loss)(params))
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments


X = jax.ShapeDtypeStruct((8, 16, 64), jnp.float32)
HOLDS = ("parameters", "optimizer", "inputs")


def planned(manager: sw.PartitionManager, **options: Any) -> StateBytes:
    given = {"specs": (SPECS, SPECS, HIDDEN), "holds": HOLDS, **options}
    state: StateBytes = manager.plan(step, shapes(SPECS), shapes(SPECS), X, **given).state
    return state


def test_categories_equal_hand_counts() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("fsdp:2,tp:4"))
    state = planned(pm)
    # up over both axes; key over fsdp alone, since 2 heads do not divide by 4; norm replicated.
    parameters = (64 * 128 // 8 + 64 * 2 * 16 // 2 + 64) * 4
    inputs = 8 * 16 * 64 * 4 // 2
    for category in ("parameters", "gradients", "optimizer"):
        assert state.of(category).per_device == parameters
        assert state.of(category).replicated == 64 * 2 * 16 * 4 * 3 + 64 * 4 * 7
    assert state.of("inputs").per_device == inputs
    assert state.of().per_device == 2 * parameters + inputs
    assert state.stored.per_device == 3 * parameters


@pytest.mark.full(but=["ddp_zero1"])
@pytest.mark.parametrize("preset", ["fsdp_tp", "ddp_zero1"])
def test_arguments_equal_compiled_sizes(preset: str) -> None:
    if preset == "ddp_zero1":
        strategy = sw.Strategy.preset("ddp") | sw.Strategy(policy={"zero1": "dp | -"})
        mesh = cpu_mesh("dp:8")
    else:
        strategy, mesh = sw.Strategy.preset(preset), cpu_mesh("fsdp:4,tp:2")
    pm = sw.PartitionManager(strategy, mesh=mesh)
    arguments = (
        pm.abstract(SPECS),
        pm.abstract(SPECS, role="state"),
        jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=pm.sharding(HIDDEN, shape=X.shape)),
    )
    with pm:
        compiled = jax.jit(step).lower(*arguments).compile()
    counted = compiled.memory_analysis().argument_size_in_bytes
    assert planned(pm).of().per_device == counted


def test_causes_name_rule_and_bytes_saved() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("fsdp:2,tp:4"))
    leaves = {leaf.bytes.path: leaf for leaf in planned(pm).leaves if leaf.category == "parameters"}
    (cause,) = leaves["key"].causes
    assert (cause.mesh_axis, cause.rule, cause.why, cause.saves) == (
        "tp",
        'kv_head = "tp | -"',
        "tp: 2 % 4 != 0",
        64 * 2 * 16 // 2 * 4 * 3 // 4,
    )
    assert "fsdp_tp.toml" in cause.place
    assert [each.why for each in leaves["norm"].causes] == [
        "no candidate has fsdp",
        "no candidate has tp",
    ]
    assert leaves["up"].causes == ()


def test_cause_of_sizes_that_no_mesh_axis_divides() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("ddp"), mesh=sw.abstract_mesh("dp:2,tp:4"))
    report = pm.plan(jnp.sum, jnp.ones((6, 9)), specs=((sw.EMBED, sw.EMPTY),))
    why = {cause.mesh_axis: cause.why for cause in report.state.leaves[0].causes}
    assert why == {"dp": "no candidate has dp", "tp": "tp: no dim is divisible by 4"}


def test_state_without_annotation_is_named() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=sw.abstract_mesh("fsdp:8"))
    report = pm.plan(lambda x, n: x + n, jnp.ones(8), 1.0)
    assert [leaf.causes[0].why for leaf in report.state.leaves] == ["not annotated", "a scalar"]
    assert report.state.categories == (Category.INPUTS,)


@pytest.mark.parametrize(
    ("holds", "says"),
    [
        (("parameters",), facts("tuple", 3, fix="parameters")),
        (("parameters", "optimiser", "inputs"), facts("optimiser", fix="optimizer")),
        (("gradients", None, None), facts("gradients")),
        (({"up": "parameters"}, None, None), facts("up", "key", "norm", fix="parameters")),
    ],
)
def test_invalid_holds_are_refused(holds: Any, says: Facts) -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=sw.abstract_mesh("fsdp:8"))
    with raises(sw.StrategyError, says):
        planned(pm, holds=holds)


def test_state_of_an_optimizer_without_annotations_is_refused() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("fsdp:2,tp:4"))
    with pytest.raises(sw.StrategyError) as caught:
        planned(pm, specs=(SPECS, None, HIDDEN))
    (problem,) = caught.value.problems
    arrays = "3 arrays have neither an annotation nor a sharding: key, norm, up"
    assert problem.what == f"argument 1 holds optimizer, but {arrays}"
    assert "sw.annotate_state(state, specs)" in problem.fix
    annotated = sw.annotate_state(shapes(SPECS), SPECS)
    assert planned(pm, specs=(SPECS, annotated, HIDDEN)) == planned(pm)


def test_caches_without_annotations_are_refused() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("serve_tp"), mesh=sw.abstract_mesh("tp:2"))
    cache = jax.eval_shape(
        lambda: caches.init("dense", batch=8, capacity=64, kv_heads=2, head_dim=16)
    )

    def planned_cache(specs: Any) -> Any:
        return pm.plan(lambda cache: cache, cache, specs=specs, holds=("cache",))

    with pytest.raises(sw.StrategyError) as caught:
        planned_cache(None)
    (problem,) = caught.value.problems
    assert "argument 0 holds cache, but " in problem.what
    assert "with cache.axes()" in problem.fix
    assert planned_cache((cache.axes(),)).state.of("cache").per_device


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"specs": (SPECS, {"up": SPECS["up"]}, HIDDEN)}, "specs[1]/key"),
        ({"outputs": (SPECS, {"up": SPECS["up"]})}, "outputs/1/key"),
        ({"outputs": {"up": SPECS["up"]}}, "outputs"),
    ],
)
def test_an_error_names_the_argument(given: Any, path: str) -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("fsdp:2,tp:4"))
    with pytest.raises(sw.StrategyError) as caught:
        planned(pm, **given)
    assert caught.value.problems[0].path == path


def test_category_covers_a_subtree() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=sw.abstract_mesh("fsdp:8"))
    state = {"params": shapes(SPECS), "moments": shapes(SPECS), "seen": X}
    report = pm.plan(
        lambda state: state,
        state,
        specs=({"params": SPECS, "moments": SPECS, "seen": HIDDEN},),
        holds=({"params": "parameters", "moments": "optimizer", "seen": None},),
    )
    counts = {str(each): len(report.state.of(each).leaves) for each in report.state.categories}
    assert counts == {"parameters": 3, "gradients": 3, "optimizer": 3, "inputs": 1}


def test_tensors_count_state_and_caches() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("fsdp:2,tp:2"))
    tensors = [
        Tensor(path="up", axes=SPECS["up"].axes, shape=(64, 128), role="param", dtype="bfloat16"),
        Tensor(path="cache/keys", axes=CACHE, shape=(8, 32, 2, 16), dtype="bfloat16"),
        Tensor(path="hidden", axes=HIDDEN, shape=(8, 16, 64), dtype="bfloat16"),
        Tensor(path="odd", axes=(sw.NORM,), role="param", dtype="bfloat16"),
    ]
    state = count_tensors(pm, tensors, caches=["cache/keys"], copies=2)
    up, cache = 64 * 128 * 2 // 4, 8 * 32 * 2 * 16 * 2 // 4
    counted = [state.of(each).per_device for each in state.categories]
    assert counted == [up, up, 2 * up, cache]
    assert [text.split()[0] for text in state.missing] == ["hidden", "odd"]
    assert "not counted: odd has no shape" in state_text(state)
    decode = count_tensors(pm.for_mode("decode"), tensors, caches=["cache/keys"], train=False)
    assert decode.categories == (Category.PARAMETERS, Category.CACHE)


# An MoE model of 671B parameters, unrolled: 61 layers, the last 58 of which have 256 experts.
_EMBED, _HEADS, _INNER, _EXPERTS = 7168, 128, 2048, 256
_NORM = ((sw.NORM,), (_EMBED,))
_ATTENTION = {
    "q_down": ((sw.EMBED, sw.EMPTY), (_EMBED, 1536)),
    "q_up": ((sw.EMPTY, sw.HEAD, sw.HEAD_DIM), (1536, _HEADS, 192)),
    "kv_down": ((sw.EMBED, sw.EMPTY), (_EMBED, 576)),
    "kv_up": ((sw.EMPTY, sw.HEAD, sw.HEAD_DIM), (512, _HEADS, 256)),
    "out": ((sw.HEAD, sw.HEAD_DIM, sw.EMBED), (_HEADS, 128, _EMBED)),
    "norm_in": _NORM,
    "norm_out": _NORM,
}
_UP = ((sw.EMBED, sw.MLP_INTERMEDIATE), (_EMBED, 18432))
_DOWN = ((sw.MLP_INTERMEDIATE, sw.EMBED), (18432, _EMBED))
_EXPERT = {
    name: ((sw.EXPERT, *axes), (_EXPERTS, *shape))
    for name, axes, shape in (
        ("gate", (sw.EMBED, sw.MLP_INTERMEDIATE), (_EMBED, _INNER)),
        ("up", (sw.EMBED, sw.MLP_INTERMEDIATE), (_EMBED, _INNER)),
        ("down", (sw.MLP_INTERMEDIATE, sw.EMBED), (_INNER, _EMBED)),
    )
}


def large_moe() -> dict[str, Any]:
    tree: dict[str, Any] = {
        "embed": ((sw.VOCAB, sw.EMBED), (129280, _EMBED)),
        "head": ((sw.EMBED, sw.VOCAB), (_EMBED, 129280)),
    }
    for layer in range(61):
        block = dict(_ATTENTION)
        block |= {"gate": _UP, "up": _UP, "down": _DOWN} if layer < 3 else _EXPERT
        tree |= {f"layers/{layer}/{name}": leaf for name, leaf in block.items()}
    return tree


def test_large_moe_equals_arithmetic() -> None:
    """The counts use `ways` alone, written by hand for this strategy and mesh."""
    ways = {sw.EMBED: 64, sw.MLP_INTERMEDIATE: 8, sw.VOCAB: 8, sw.HEAD: 8, sw.EXPERT: 32}
    # 61 layers keep 576 numbers per token of 4,096 sequences of 8,192 tokens.
    cache = Tensor(
        path="cache",
        axes=(sw.LAYERS, sw.BATCH, sw.KV_LENGTH, sw.EMPTY),
        role="activation",
        shape=(61, 4096, 8192, 576),
        dtype="bfloat16",
    )
    mesh = sw.abstract_mesh("fsdp:64,ep:32,tp:8")
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh)
    tree = large_moe()
    tensors = [
        Tensor(path=path, axes=axes, shape=shape, role="param", dtype="bfloat16")
        for path, (axes, shape) in tree.items()
    ]
    state = count_tensors(pm, tensors, copies=2)
    serving = count_tensors(pm.for_mode("decode"), [*tensors, cache], caches=["cache"], train=False)
    local = sum(
        math.prod(-(-size // ways.get(axis, 1)) for axis, size in zip(axes, shape, strict=True))
        for axes, shape in tree.values()
    )
    assert state.of("parameters").total == 2 * sum(math.prod(s) for _, s in tree.values())
    assert 660e9 < state.of("parameters").total / 2 < 680e9
    assert state.of("parameters").per_device == 2 * local
    assert state.of("optimizer").per_device == 4 * local
    assert serving.of("parameters").per_device == 2 * local
    assert serving.of("cache").per_device == 2 * 61 * (4096 // 64) * 8192 * 576
