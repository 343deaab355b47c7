"""`shard`, `hint` and `gather` on every kind of mesh, under every transformation."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.testing import cpu_mesh
from tests.manager.programs import (
    AXIS_TYPES,
    TRANSFORMS,
    Body,
    assert_like,
    grad,
    make_manager,
    numbers,
    sharded_over,
)
from tests.raising import facts, raises

KINDS = list(AXIS_TYPES)


def stand_in(operation: str, pm: sw.PartitionManager, *, entered: bool) -> Body:
    """A non-linear function of one array with the operation in its middle."""
    if operation == "none":

        def place(x: Any) -> Any:
            return x
    elif operation == "gather":
        free, method = sw.gather, pm.gather

        def place(x):
            return (free if entered else method)(x, sw.EMBED, sw.MLP_INTERMEDIATE)
    else:
        free, method = getattr(sw, operation), getattr(pm, operation)

        def place(x):
            return (free if entered else method)(x, sw.BATCH, sw.EMBED)

    return lambda x: jnp.sin(place(x)) * 1.5


def ambient(pm: sw.PartitionManager, *, entered: bool) -> Any:
    return pm if entered else contextlib.nullcontext()


# `hint` differs from `shard` in few ways, so each mesh has it in the longest program only.
PROGRAMS = [
    *[
        ("shard", transform, jit, entered)
        for transform in TRANSFORMS
        for jit in (True, False)
        for entered in (True, False)
    ],
    *[
        ("hint", transform, True, entered)
        for transform in ("plain", "scan_remat_grad")
        for entered in (True, False)
    ],
]


@pytest.mark.parametrize(("operation", "transform", "jit", "entered"), PROGRAMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full(
    but=[
        "dp explicit-shard-scan-True-False",
        "explicit-shard-remat-False-False",
        "auto-shard-pull_back-True-False",
        "auto-shard-plain-True-True",
    ]
)
@pytest.mark.pairwise
def test_activation_is_sharded_by_rule(
    operation: str, kind: str, transform: str, jit: bool, entered: bool
) -> None:
    pm = make_manager(kind)
    start = numbers(8, 12)
    wanted = TRANSFORMS[transform](stand_in("none", pm, entered=False))(jnp.asarray(start))
    f = TRANSFORMS[transform](stand_in(operation, pm, entered=entered))
    with ambient(pm, entered=entered):
        actual = (jax.jit(f) if jit else f)(pm.shard(start, sw.BATCH, sw.EMBED))
    assert_like(actual, wanted)
    assert sharded_over(
        actual, pm.mesh, *((None, "dp", "tp") if transform == "vmap" else ("dp", "tp"))
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", ["plain", "vmap"])
@pytest.mark.full(but=["plain-auto", "plain-tp explicit", "vmap-explicit", "vmap-dp explicit"])
def test_replicated_activation_is_resharded(kind: str, transform: str) -> None:
    """The input is replicated, so only the constraint can have sharded it."""
    pm = make_manager(kind)
    start = numbers(8, 12)
    with pm:
        actual = jax.jit(TRANSFORMS[transform](stand_in("shard", pm, entered=True)))(
            pm.shard(start, sw.Replicated)
        )
        still = jax.jit(stand_in("none", pm, entered=True))(pm.shard(start, sw.Replicated))
    assert sharded_over(
        actual, pm.mesh, *((None, "dp", "tp") if transform == "vmap" else ("dp", "tp"))
    )
    assert still.sharding.is_fully_replicated
    assert_like(
        actual, TRANSFORMS[transform](stand_in("none", pm, entered=False))(jnp.asarray(start))
    )


@pytest.mark.parametrize("entered", [True, False], ids=["entered", "method"])
@pytest.mark.full
def test_uncommitted_arrays_on_auto_meshes(entered: bool) -> None:
    pm = make_manager("auto")
    start = jnp.asarray(numbers(8, 12))
    with ambient(pm, entered=entered):
        for f in (
            stand_in("shard", pm, entered=entered),
            jax.jit(stand_in("shard", pm, entered=entered)),
        ):
            assert sharded_over(f(start), pm.mesh, "dp", "tp")
            actual = grad(f)(start)
            assert sharded_over(actual, pm.mesh, "dp", "tp")
            assert_like(actual, grad(stand_in("none", pm, entered=False))(jnp.asarray(start)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.full(but=["jit-auto", "eager-explicit"])
def test_grad_of_a_loss_inside_the_manager(kind: str, jit: bool) -> None:
    pm = make_manager(kind)
    start = numbers(8, 12)
    f = grad(stand_in("shard", pm, entered=True))
    with pm:
        actual = (jax.jit(f) if jit else f)(pm.shard(start, sw.BATCH, sw.EMBED))
    assert_like(actual, grad(stand_in("none", pm, entered=False))(jnp.asarray(start)))
    assert sharded_over(actual, pm.mesh, "dp", "tp")


@pytest.mark.parametrize("entered", [True, False], ids=["entered", "method"])
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("transform", ["plain", "pull_back", "remat", "vmap"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full(
    but=[
        "tp explicit-vmap-eager-method",
        "explicit-remat-eager-entered",
        "dp explicit-vmap-jit-entered",
        "auto-pull_back-jit-method",
        "auto-plain-jit-entered",
    ]
)
@pytest.mark.pairwise
def test_weight_is_gathered(kind: str, transform: str, jit: bool, entered: bool) -> None:
    """Forward as used, (-, tp); its gradient as stored, (dp, tp)."""
    pm = make_manager(kind)
    start = numbers(8, 12)
    wanted = TRANSFORMS[transform](stand_in("none", pm, entered=False))(jnp.asarray(start))
    f = TRANSFORMS[transform](stand_in("gather", pm, entered=entered))
    with ambient(pm, entered=entered):
        actual = (jax.jit(f) if jit else f)(
            pm.shard(start, sw.EMBED, sw.MLP_INTERMEDIATE, role="param")
        )
    assert_like(actual, wanted)
    spec = {"plain": (None, "tp"), "vmap": (None, None, "tp")}.get(transform, ("dp", "tp"))
    assert sharded_over(actual, pm.mesh, *spec)


@pytest.mark.parametrize("kind", KINDS)
def test_spellings_of_axes_place_alike(kind: str) -> None:
    pm = make_manager(kind)
    x = numbers(8, 12)
    ways = [
        pm.shard(x, sw.BATCH, sw.EMBED),
        pm.shard(x, (sw.BATCH, sw.EMBED)),
        pm.shard(x, [sw.BATCH, sw.EMBED]),
        pm.shard(x, "batch", "EMBED"),
    ]
    for actual in ways:
        assert sharded_over(actual, pm.mesh, "dp", "tp")
        np.testing.assert_array_equal(actual, x)


def test_composite_over_two_mesh_axes() -> None:
    pm = make_manager("auto")
    actual = pm.shard(numbers(8, 3), (sw.BATCH, sw.VOCAB), sw.EMPTY)
    assert sharded_over(actual, pm.mesh, ("dp", "tp"), None)
    assert pm.shard(numbers(3, 8), sw.EMPTY, (sw.LENGTH, sw.VOCAB)).sharding.spec == jax.P(
        None, "tp"
    )


def test_layout_classes_and_instances_place_alike() -> None:
    pm = make_manager("auto")
    x = numbers(8, 4, 12)
    for layout in (
        sw.HiddenStateSharding,
        sw.HiddenStateSharding(),
        sw.HiddenStateSharding(mode="train"),
    ):
        assert sharded_over(pm.shard(x, layout), pm.mesh, "dp", None, "tp")
    # Length 1 at dim 1 means decode, where EMBED is replicated.
    assert sharded_over(pm.shard(x[:, :1], sw.HiddenStateSharding), pm.mesh, "dp")


@pytest.mark.full(but=["jit-explicit", "eager-dp explicit", "jit-auto", "eager-tp explicit"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_replicated_replicates(kind: str, jit: bool) -> None:
    pm = make_manager(kind)
    with pm:
        x = pm.shard(numbers(8, 12), sw.BATCH, sw.EMBED)

        def f(x):
            return sw.shard(x, sw.Replicated) * 1

        assert (jax.jit(f) if jit else f)(x).sharding.is_fully_replicated
    assert_like(pm.shard(x, sw.Replicated), numbers(8, 12))


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_mode_of_the_call_then_of_the_manager(jit: bool) -> None:
    pm = make_manager("auto")
    x = numbers(8, 12)

    def run(manager: sw.PartitionManager, mode: str | None) -> Any:
        def f(x):
            return manager.shard(x, sw.BATCH, sw.EMBED, mode=mode) * 1

        return (jax.jit(f) if jit else f)(x)

    assert sharded_over(run(pm, None), pm.mesh, "dp", "tp")
    assert sharded_over(run(pm, "decode"), pm.mesh, "dp")
    assert sharded_over(run(pm.for_mode("decode"), None), pm.mesh, "dp")
    assert sharded_over(run(pm.for_mode("decode"), "train"), pm.mesh, "dp", "tp")
    assert sharded_over(run(pm, "insert"), pm.mesh, "dp"), "insert inherits from decode"


def test_constraint_is_in_the_program() -> None:
    pm = make_manager("auto")
    text = jax.jit(lambda x: pm.shard(x, sw.BATCH, sw.EMBED)).lower(jnp.zeros((8, 12))).as_text()
    assert text.count("sdy.sharding_constraint") == 1
    assert '[{"dp"}, {"tp"}]' in text


def test_hint_leaves_an_indivisible_dim() -> None:
    pm = make_manager("auto")
    x = pm.shard(numbers(8, 6), sw.BATCH, sw.EMPTY)
    with raises(sw.IndivisibleError, "tp=4", dim=1, axis="EMBED", size=6, fix="tp | -"):
        pm.shard(x, sw.BATCH, sw.EMBED)
    text = jax.jit(lambda x: pm.hint(x, sw.BATCH, sw.EMBED)).lower(x).as_text()
    assert '[{"dp"}, {?}]' in text
    assert sharded_over(pm.hint(x, sw.BATCH, sw.EMBED), pm.mesh, "dp")
    np.testing.assert_array_equal(pm.hint(x, sw.BATCH, sw.EMBED), numbers(8, 6))


def test_hint_leaves_a_conflicting_dim() -> None:
    pm = make_manager("auto")
    x = numbers(8, 8)
    with raises(sw.AxisConflictError, "tp", 0, "EMBED", dim=1, axis="HEAD", fix="EMPTY"):
        pm.shard(x, sw.EMBED, sw.HEAD)
    text = jax.jit(lambda x: pm.hint(x, sw.EMBED, sw.HEAD)).lower(x).as_text()
    assert '[{"tp"}, {?}]' in text


def test_hint_refuses_wrong_axes_and_ranks() -> None:
    pm = make_manager("auto")
    with raises(sw.UnknownAxisError, "axis", axis="EMBEDD", fix="EMBED"):
        pm.hint(numbers(8, 8), sw.BATCH, "embedd")
    with raises(sw.RankMismatchError, "BATCH", 1, 2, "(8, 8)", fix="EMPTY"):
        pm.hint(numbers(8, 8), sw.BATCH)


def test_hint_without_a_manager_does_nothing() -> None:
    x = numbers(3, 5)
    assert sw.hint(x, sw.BATCH, sw.EMBED) is x
    assert jax.jit(lambda x: sw.hint(x, "nonsense"))(x).sharding.num_devices == 1


def test_tensor_entries_are_told_apart_by_path() -> None:
    """Two weights of one shape and one annotation, one of them covered by a [[tensors]] entry."""
    text = """
    version = 1
    [rules]
    embed = "tp"
    [params]
    embed = "dp"
    [policy]
    gather = "dp"
    [[tensors]]
    match = "head"
    embed = "-"
    """
    pm = make_manager(text=text)
    tree = {"block": numbers(8, 4), "head": numbers(8, 4)}
    axes = (sw.EMBED, sw.EMPTY)
    placed = pm.shard(tree, axes, role="param")
    assert placed["block"].sharding.spec == jax.P("dp")
    assert placed["head"].sharding.spec == jax.P(), (
        "the entry for head must not lose to a cached answer"
    )
    both = pm.shardings(tree, axes)
    assert (both["block"].spec, both["head"].spec) == (jax.P("dp"), jax.P())
    grads = jax.jit(
        jax.grad(
            lambda tree: sum((leaf**2).sum() for leaf in pm.gather(tree, axes, path="").values())
        )
    )(placed)
    assert sharded_over(grads["block"], pm.mesh, "dp")
    assert grads["head"].sharding.is_fully_replicated
    assert pm.resolve(axes, role="param", path="head/kernel") == jax.P()


@pytest.mark.parametrize("value", [2**40 + 7, -(2**40), 1e300, -1e300, complex(0, 1e300)])
def test_values_beyond_32_bits_are_refused(value: Any) -> None:
    x = np.full((8, 8), value)
    x[0, 0] = 0
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=cpu_mesh("fsdp:4,tp:2"))
    axes = (sw.BATCH, sw.EMPTY)
    says = facts(x.dtype, "jax_enable_x64", fix="jax.config.update")
    for call in (
        pm.shard,
        pm.hint,
        pm.global_array,
        pm.gather,
        jax.jit(lambda: pm.shard(x, *axes)),
    ):
        with raises(sw.StrategyError, says):
            call(*((x, *axes) if hasattr(call, "__self__") else ()))
    with raises(
        sw.StrategyError, x.dtype, "JAX", "jax_enable_x64", path="a/b", fix="jax.config.update"
    ):
        pm.shard({"a": {"b": x}}, {"a": {"b": axes}})


@pytest.mark.parametrize("value", [2**40, 1e300, complex(0, 1e300)])
def test_numbers_beyond_32_bits_are_refused(value: Any) -> None:
    pm = make_manager()
    with raises(
        sw.StrategyError, type(value).__name__, "JAX", "jax_enable_x64", fix="jax.config.update"
    ):
        pm.shard(value)
    assert pm.shard(type(value)(3)) == 3


def test_shapes_are_not_placed() -> None:
    with raises(sw.StrategyError, "ShapeDtypeStruct", fix="pm.shardings"):
        make_manager().shard(jax.ShapeDtypeStruct((8, 8), jnp.float32), sw.BATCH, sw.EMBED)


def test_values_that_fit_32_bits_are_rounded() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=cpu_mesh("fsdp:4,tp:2"))
    for x in (
        np.full(8, 2**31 - 1),
        np.full(8, -(2**31)),
        np.full(8, 0.1),
        np.array([np.inf, np.nan, 1e30, -np.inf] * 2),
        np.full(8, np.inf),
    ):
        np.testing.assert_array_equal(
            pm.shard(x, sw.EMPTY), x.astype(np.int32 if x.dtype.kind == "i" else np.float32)
        )


def test_a_placed_array_may_share_memory() -> None:
    """Only what moves is copied, so donating the result may delete an array that was placed."""
    axes = {"norm": (sw.NORM,), "up": (sw.EMBED, sw.MLP_INTERMEDIATE)}
    given = {"norm": jnp.ones(8), "up": jnp.ones((8, 8))}
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=cpu_mesh("fsdp:4,tp:2"))
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    step(pm.shard(jax.tree.map(jnp.copy, given), axes, role="param"))
    assert not any(x.is_deleted() for x in given.values())
    step(pm.shard(given, axes, role="param"))
    assert given["norm"].is_deleted()
    assert not given["up"].is_deleted()
