"""Answers without arrays: specs, shardings, abstract trees, numbers of shards; and the mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from tests.manager.programs import (
    AXIS_TYPES,
    RULES,
    make_manager,
    make_mesh,
    numbers,
    rules,
    sharded_over,
)
from tests.raising import raises

P = jax.P


def test_spec_of_roles_and_modes() -> None:
    pm = make_manager()
    axes = (sw.BATCH, sw.EMBED)
    assert pm.resolve(*axes) == P("dp", "tp")
    assert pm.resolve(*axes, mode="decode") == pm.for_mode("decode").resolve(*axes) == P("dp")
    assert pm.resolve(sw.EMBED, sw.MLP_INTERMEDIATE, role="param") == P("dp", "tp")
    assert pm.resolve(sw.EMBED, sw.MLP_INTERMEDIATE, role="param", mode="decode") == P(
        "dp", "tp"
    ), "modes leave parameters alone"
    assert pm.resolve(sw.EMBED, sw.MLP_INTERMEDIATE, role="use", mode="decode") == P(None, "tp")
    assert pm.resolve(sw.KV_HEAD, shape=(8,)) == P("tp")
    assert pm.resolve(sw.KV_HEAD, shape=(6,)) == P()
    assert pm.resolve() == P()


@pytest.mark.parametrize(
    ("annotation", "options", "said"),
    [
        ((sw.BATCH,), {"mode": "prefill"}, "call"),
        ((sw.BATCH,), {}, "default"),
        (sw.HiddenStateSharding, {"shape": (8, 1, 8)}, "layout_dim"),
        (sw.HiddenStateSharding(mode="decode"), {}, "layout"),
        (sw.HiddenStateSharding, {"mode": "train", "shape": (8, 1, 8)}, "call"),
    ],
)
def test_source_of_the_mode(annotation: Any, options: dict[str, Any], said: str) -> None:
    assert make_manager().explain(annotation, **options).mode_from == said


def test_manager_mode_before_layout_mode() -> None:
    resolution = make_manager().for_mode("train").explain(sw.HiddenStateSharding, shape=(8, 1, 8))
    assert (resolution.mode, resolution.mode_from) == (sw.MODE_TRAIN, "manager")


def test_mesh_axes_and_axis_size() -> None:
    pm = make_manager()
    assert pm.mesh_axes(sw.EMBED) == ("tp",)
    assert (pm.axis_size(sw.EMBED), pm.axis_size(sw.BATCH), pm.axis_size(sw.LENGTH)) == (4, 2, 1)
    assert pm.mesh_axes(sw.EMBED, mode="decode") == pm.for_mode("decode").mesh_axes(sw.EMBED) == ()
    assert (pm.mesh_axes(sw.KV_HEAD, 8), pm.mesh_axes(sw.KV_HEAD, 6)) == (("tp",), ())
    assert (pm.axis_size(sw.KV_HEAD, 8), pm.axis_size(sw.KV_HEAD, 6)) == (4, 1)
    for ask in (pm.mesh_axes, pm.axis_size):
        with raises(sw.ShapeRequiredError, "candidate", "applies", dim=0, axis="KV_HEAD"):
            ask(sw.KV_HEAD)
        with raises(sw.IndivisibleError, "tp=4", dim=0, axis="EMBED", size=6, fix="tp | -"):
            ask(sw.EMBED, 6)
        with raises(sw.UnknownAxisError, "axis", axis="NONSENSE", fix="what it is"):
            ask("nonsense")


def test_size_one_mesh_axes_are_ignored() -> None:
    pm = make_manager(sizes="dp:8,tp:1")
    assert (pm.mesh_axes(sw.EMBED), pm.axis_size(sw.EMBED), pm.axis_size(sw.KV_HEAD)) == ((), 1, 1)


def test_shardings_serve_jit_and_device_put() -> None:
    pm = make_manager()
    tree = {"w": numbers(8, 8), "b": numbers(8), "step": jnp.zeros((), jnp.int32)}
    axes = {"w": (sw.EMBED, sw.MLP_INTERMEDIATE), "b": (sw.MLP_INTERMEDIATE,), "step": ()}
    shardings = pm.shardings(tree, axes)
    assert jax.tree.map(lambda sharding: sharding.spec, shardings) == {
        "w": P("dp", "tp"),
        "b": P("tp"),
        "step": P(),
    }
    placed = jax.device_put(tree, shardings)
    out = jax.jit(lambda tree: tree, in_shardings=(shardings,), out_shardings=shardings)(placed)
    assert jax.tree.map(lambda leaf: leaf.sharding.spec, out) == jax.tree.map(
        lambda sharding: sharding.spec, shardings
    )


def test_shardings_of_a_tree_report_every_path() -> None:
    pm = make_manager()
    tree = {"a": {"w": numbers(7, 8)}, "b": {"w": numbers(8, 6)}, "c": numbers(8, 8)}
    with raises(sw.IndivisibleError, "dp=2", path="a/w", size=7, fix="dp | -", count=2) as caught:
        pm.shardings(tree, (sw.EMBED, sw.MLP_INTERMEDIATE))
    assert [(problem.path, problem.dim) for problem in caught.value.problems] == [
        ("a/w", 0),
        ("b/w", 1),
    ]


def test_abstract_tree_lowers_without_arrays() -> None:
    pm = make_manager()
    specs = {"w": sw.ArraySpec((8, 8), jnp.bfloat16, (sw.EMBED, sw.MLP_INTERMEDIATE))}
    abstract = pm.abstract(specs)
    assert (abstract["w"].shape, abstract["w"].dtype, abstract["w"].sharding.spec) == (
        (8, 8),
        jnp.bfloat16,
        P("dp", "tp"),
    )
    compiled = jax.jit(lambda tree: tree["w"] * 2).lower(abstract).compile()
    assert compiled.output_shardings.spec == P("dp", "tp")


def test_size_dependent_rules_on_any_mesh() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("fsdp:2048,tp:8"))
    assert pm.resolve(sw.EMBED, sw.MLP_INTERMEDIATE, role="param", shape=(16384, 53248)) == P(
        "fsdp", "tp"
    )
    assert pm.axis_size(sw.BATCH) == 2048


# The case of an Explicit mesh that is not entered is left out: JAX lowers it for one device.
@pytest.mark.parametrize(("kind", "entered"), [("auto", True), ("auto", False), ("explicit", True)])
def test_abstract_manager_traces_and_lowers(kind: str, entered: bool) -> None:
    pm = sw.PartitionManager(rules(), mesh=sw.abstract_mesh("dp:2,tp:4", axis_types=kind))
    shape = jax.ShapeDtypeStruct((8, 8), np.float32)

    def run() -> Any:
        def f(x):
            return (sw if entered else pm).shard(x * 2, sw.BATCH, sw.EMBED)

        jax.eval_shape(f, shape)
        return jax.jit(f).trace(shape).lower(lowering_platforms=("cpu",)).as_text()

    if entered:
        with pm:
            text = run()
    else:
        text = run()
    assert '[{"dp"}, {"tp"}]' in text


def test_abstract_manager_places_nothing() -> None:
    pm = sw.PartitionManager(rules(), mesh=sw.abstract_mesh("dp:2,tp:4"))
    for place in (pm.shard, pm.hint, pm.gather):
        with raises(sw.MeshSpecError, "manager", "mesh", fix="create_mesh"):
            place(numbers(8, 8), (sw.EMPTY, sw.EMPTY))


def test_where_the_mesh_comes_from() -> None:
    strategy = sw.Strategy.loads(RULES + "[mesh]\ndp = 2\ntp = -1\n")
    assert dict(sw.PartitionManager(strategy).mesh.shape) == {"dp": 2, "tp": 4}
    assert sw.PartitionManager(strategy, mesh=make_mesh(sizes="dp:8,tp:1")).axis_size(sw.BATCH) == 8
    with raises(sw.MeshSpecError, "rules", "mesh", fix="mesh"):
        sw.PartitionManager(rules())
    with jax.set_mesh(make_mesh()):
        assert sw.PartitionManager(rules()) == make_manager()
    with raises(sw.StrategyError, "strategy", "manager_tests", "mesh", path="<toml>", fix="mesh"):
        sw.PartitionManager(sw.Strategy.loads(RULES))


def test_rules_and_mesh_must_agree() -> None:
    own = (
        RULES.replace('vocab = "tp"', 'vocab = "columns"') + "[mesh]\ndp = 2\ntp = 2\ncolumns = 2\n"
    )
    strategy = sw.Strategy.loads(own)
    assert sw.PartitionManager(strategy).mesh_axes(sw.VOCAB) == ("columns",)
    with raises(sw.MeshMismatchError, "columns", "dp", 2, "tp", fix="dp"):
        sw.PartitionManager(strategy, mesh=make_mesh())
    with (
        jax.set_mesh(make_mesh(sizes="tp:4,dp:2")),
        raises(sw.MeshMismatchError, "tp", 4, "dp", 2),
    ):
        make_manager().shard(numbers(8, 8), sw.BATCH, sw.EMBED)


@pytest.mark.parametrize("axes", [(5,), ((None,),), ((sw.BATCH, 5),), ({"a": (sw.BATCH,)},)])
def test_explain_of_an_invalid_request(axes: Any) -> None:
    pm = make_manager()
    resolution = pm.explain(*axes)
    assert not resolution.ok
    with raises(sw.StrategyError, "annotation"):
        pm.resolve(*axes)


@pytest.mark.parametrize("ambient", list(AXIS_TYPES))
@pytest.mark.parametrize("kind", list(AXIS_TYPES))
@pytest.mark.full(but=["auto-auto", "explicit-explicit"])
def test_ambient_mesh_of_other_axis_types(kind: str, ambient: str) -> None:
    """Names and sizes must agree. The ambient axis types decide between reshard and constraint."""
    pm, x = make_manager(kind), numbers(8, 8)
    doubled = pm.shard_map(
        lambda x: x * 2, in_axes=[(sw.BATCH, sw.EMBED)], out_axes=(sw.BATCH, sw.EMBED)
    )
    with jax.set_mesh(make_mesh(ambient)):
        placed = pm.shard(x, sw.BATCH, sw.EMBED)
        weight = pm.shard(x, sw.EMBED, sw.MLP_INTERMEDIATE, role="param")
        used = jax.grad(lambda w: (pm.gather(w, sw.EMBED, sw.MLP_INTERMEDIATE) ** 2).sum())
        for actual in (
            placed,
            jax.jit(lambda x: pm.shard(x, sw.BATCH, sw.EMBED))(x),
            jax.jit(used)(weight),
        ):
            assert actual.sharding.spec == P("dp", "tp")
        for actual in (doubled(x), doubled(placed), jax.jit(doubled)(x)):
            np.testing.assert_array_equal(actual, x * 2)
            assert actual.sharding.spec == P("dp", "tp")
    assert placed.sharding.mesh.axis_types == make_mesh(ambient).axis_types


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_global_array_of_one_process(kind: str) -> None:
    pm = make_manager(kind)
    array = pm.global_array(numbers(8, 8), sw.BATCH, sw.EMBED)
    assert sharded_over(array, pm.mesh, "dp", "tp")
    np.testing.assert_array_equal(array, numbers(8, 8))
    assert sharded_over(
        pm.global_array(numbers(8, 6), sw.BATCH, sw.KV_HEAD, global_shape=(8, 6)), pm.mesh, "dp"
    )
    assert sharded_over(
        pm.global_array(numbers(8, 8), (sw.BATCH, sw.EMBED), mode="decode"), pm.mesh, "dp"
    )
    assert pm.global_array(np.int32(3), ()).sharding.is_fully_replicated
    with raises(
        sw.ShapeRequiredError, "candidate", "applies", dim=1, axis="KV_HEAD", fix="global_shape"
    ):
        pm.global_array(numbers(8, 8), sw.BATCH, sw.KV_HEAD)
    with raises(sw.RankMismatchError, "BATCH", 1, "(8, 8)"):
        pm.global_array(numbers(8, 8), sw.BATCH)
    with raises(sw.IndivisibleError, "tp=4", dim=1, axis="EMBED", size=6, fix="tp | -"):
        pm.global_array(numbers(8, 6), sw.BATCH, sw.EMBED, global_shape=(8, 6))
    with raises(sw.IndivisibleError, "tp=4", dim=1, axis="EMBED", size=6, fix="tp | -"):
        pm.global_array(numbers(8, 6), sw.BATCH, sw.EMBED)
    np.testing.assert_array_equal(pm.global_array([1, 2, 3, 4], sw.BATCH), [1, 2, 3, 4])
    for local in ("x", None, [object()], np.array(["a"])):
        with raises(sw.StrategyError, "dtype"):
            pm.global_array(local, sw.BATCH)
    for shape in ((8,), (8, None), 8, (8, 8, 1)):
        with raises(sw.ShardingError, "(8, 8)", path="global_shape"):
            pm.global_array(numbers(8, 8), sw.BATCH, sw.EMBED, global_shape=shape)
    with raises(sw.ShardingError, "(8, 8)", "(16, 8)", "dp", "tp", path="global_shape"):
        pm.global_array(numbers(8, 8), sw.BATCH, sw.EMBED, global_shape=(16, 8))


@pytest.mark.parametrize("ask", ["shard", "hint", "gather"])
def test_mode_of_a_request_under_a_mode(ask: str) -> None:
    """An empty mode is refused, and an error says where its mode is from."""
    pm = make_manager().for_mode("decode")
    x = np.ones((3, 8), np.float32)
    with raises(sw.StrategyError, "mode"):
        getattr(pm, ask)(x, sw.BATCH, sw.EMBED, mode="")
    if ask == "shard":
        with pytest.raises(sw.ShardingError) as caught:
            pm.shard(x, sw.BATCH, sw.EMBED)
        assert caught.value.resolution is not None
        assert caught.value.resolution.mode_from == "manager"
