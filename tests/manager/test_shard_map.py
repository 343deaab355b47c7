"""`pm.shard_map`: an axis resolves once per call, from the inputs; outputs reuse it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from tests.manager.programs import RULES, assert_like, counting, make_manager, numbers, sharded_over
from tests.raising import facts, raises

P = jax.P
X = (sw.BATCH, sw.EMBED)
ROWS = (sw.BATCH, sw.EMPTY)


def local_shapes(seen: list[Any], f: Any) -> Any:
    """Return `f`, which records the shapes of its arguments."""

    def noted(*args: Any) -> Any:
        seen.append([jnp.shape(arg) for arg in args])
        return f(*args)

    return noted


@pytest.mark.full(but=["jit-explicit", "eager-tp explicit", "eager-auto"])
@pytest.mark.parametrize("kind", ["auto", "explicit", "tp explicit"])
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_local_shapes_values_and_place(kind: str, jit: bool) -> None:
    pm = make_manager(kind)
    seen: list[Any] = []
    f = pm.shard_map(local_shapes(seen, lambda x, w: x * w), in_axes=[X, (sw.EMBED,)], out_axes=X)
    args = pm.shard(numbers(8, 8), *X), pm.shard(numbers(8), sw.EMBED)
    actual = (jax.jit(f) if jit else f)(*args)
    assert seen[0] == [(4, 2), (2,)]
    assert_like(actual, jnp.asarray(numbers(8, 8) * numbers(8)))
    assert sharded_over(actual, pm.mesh, "dp", "tp")


@pytest.mark.parametrize("kind", ["auto", "explicit", "tp explicit"])
def test_arguments_are_placed_first(kind: str) -> None:
    pm = make_manager(kind)
    f = pm.shard_map(lambda x: jax.lax.psum(x, "tp"), in_axes=[X], out_axes=(sw.BATCH, sw.EMPTY))
    with pm:
        for x in (jnp.asarray(numbers(8, 8)), pm.shard(numbers(8, 8), sw.EMPTY, sw.EMPTY)):
            for run in (f, jax.jit(f)):
                result = run(x)
                np.testing.assert_allclose(
                    result, numbers(8, 8).reshape(8, 4, 2).sum(1), rtol=1e-5, atol=1e-6
                )
                assert sharded_over(result, pm.mesh, "dp")


def test_sum_over_the_mesh_axes_of_an_axis() -> None:
    """A contraction over EMBED, written by hand and the same under every strategy."""
    x, w = numbers(8, 16), numbers(16, 4)
    for text in (
        RULES,
        RULES.replace('embed = "tp"', 'embed = "-"'),
        RULES.replace('embed = "tp"', 'embed = "dp+tp"').replace('batch = "dp"', 'batch = "-"'),
    ):
        pm = make_manager(text=text)

        def contract(x: Any, w: Any, pm: sw.PartitionManager = pm) -> Any:
            axes = pm.mesh_axes(sw.EMBED)
            return jax.lax.psum(x @ w, axes) if axes else x @ w

        f = pm.shard_map(contract, in_axes=[X, (sw.EMBED, sw.EMPTY)], out_axes=(sw.BATCH, sw.EMPTY))
        np.testing.assert_allclose(jax.jit(f)(x, w), x @ w, rtol=2e-5, atol=2e-6)
        actual = jax.jit(jax.grad(lambda w, f=f: (f(x, w) ** 2).sum()))(w)
        np.testing.assert_allclose(
            actual, jax.grad(lambda w: ((x @ w) ** 2).sum())(w), rtol=2e-4, atol=1e-5
        )


def test_outputs_reuse_input_axes() -> None:
    """With `kv_head = "tp | -"`, 6 heads are replicated, and so they are in the output."""
    pm = make_manager()
    for heads, spec in ((8, P(None, "tp")), (6, P())):
        f = pm.shard_map(
            lambda x: x.sum(0),
            in_axes=[(sw.LENGTH, sw.EMPTY, sw.KV_HEAD)],
            out_axes=(sw.EMPTY, sw.KV_HEAD),
        )
        actual = jax.jit(f)(numbers(4, 3, heads))
        assert sharded_over(actual, pm.mesh, *spec)
        np.testing.assert_allclose(actual, numbers(4, 3, heads).sum(0), rtol=1e-5, atol=1e-6)


def test_axis_sharded_in_two_ways_is_refused() -> None:
    pm = make_manager()
    f = pm.shard_map(lambda x, y: x, in_axes=[(sw.KV_HEAD,), (sw.KV_HEAD,)], out_axes=(sw.KV_HEAD,))
    with raises(
        sw.AxisConflictError, "tp", 0, path="argument 1", dim=0, axis="KV_HEAD", fix="EMPTY"
    ):
        f(numbers(8), numbers(6))
    np.testing.assert_array_equal(f(numbers(8), numbers(8)), numbers(8))


@pytest.mark.parametrize("key", [sw.KV_HEAD, "kv_head", "KV_HEAD"])
def test_sizes_of_axes_without_input(key: str) -> None:
    pm = make_manager()

    def spread(x):
        return jnp.ones((2, 2)) * jax.lax.pcast(x.sum() * 0 + 1, ("tp",), to="varying")

    with raises(
        sw.ShapeRequiredError, "axis", "mesh", path="output", axis="KV_HEAD", fix="KV_HEAD"
    ) as caught:
        pm.shard_map(spread, in_axes=[(sw.LENGTH,)], out_axes=(sw.EMPTY, sw.KV_HEAD))(numbers(4))
    assert "pass sizes={KV_HEAD: ...}" in str(caught.value)
    actual = pm.shard_map(
        spread, in_axes=[(sw.LENGTH,)], out_axes=(sw.EMPTY, sw.KV_HEAD), sizes={key: 8}
    )(numbers(4))
    assert actual.shape == (2, 8)
    assert sharded_over(actual, pm.mesh, None, "tp")


def test_an_unambiguous_axis_needs_no_size() -> None:
    pm = make_manager()

    def spread(x):
        return jax.lax.pcast(jnp.zeros((2,)) + x.sum(), ("tp",), to="varying")

    actual = pm.shard_map(spread, in_axes=[(sw.LENGTH,)], out_axes=(sw.VOCAB,))(numbers(4))
    assert (actual.shape, actual.sharding.spec) == ((8,), P("tp"))


def test_trees_of_arguments_and_results() -> None:
    pm = make_manager()
    batch = {"x": numbers(8, 8), "scale": numbers(8), "step": jnp.int32(2)}
    axes = {"x": X, "scale": (sw.EMBED,), "step": ()}
    f = pm.shard_map(
        lambda b, y: ({"x": b["x"] * b["scale"]}, y * b["step"]),
        in_axes=[axes, X],
        out_axes=({"x": X}, X),
    )
    first, second = jax.jit(f)(batch, numbers(8, 8))
    assert_like(first, {"x": jnp.asarray(batch["x"] * batch["scale"])})
    assert_like(second, jnp.asarray(numbers(8, 8) * 2))
    prefix = pm.shard_map(lambda tree: tree, in_axes=[X], out_axes=X)
    assert_like(
        jax.jit(prefix)({"a": numbers(8, 8), "b": [numbers(2, 4)]}),
        {"a": jnp.asarray(numbers(8, 8)), "b": [jnp.asarray(numbers(2, 4))]},
    )
    listed = pm.shard_map(
        lambda x: x, in_axes=[[sw.BATCH, sw.EMBED]], out_axes=[sw.BATCH, sw.EMBED]
    )
    assert_like(jax.jit(listed)(numbers(8, 8)), jnp.asarray(numbers(8, 8)))


def test_literal_specs_and_layouts() -> None:
    pm = make_manager()

    def same(x):
        return x * 1

    assert sharded_over(
        pm.shard_map(same, in_axes=[sw.Replicated], out_axes=sw.Replicated)(numbers(8, 8)), pm.mesh
    )
    assert sharded_over(
        pm.shard_map(same, in_axes=[sw.HiddenStateSharding], out_axes=sw.HiddenStateSharding)(
            numbers(8, 2, 8)
        ),
        pm.mesh,
        "dp",
        None,
        "tp",
    )
    assert sharded_over(
        pm.shard_map(same, in_axes=[P("dp", "tp")], out_axes=P("dp", "tp"))(numbers(8, 8)),
        pm.mesh,
        "dp",
        "tp",
    )


def test_modes() -> None:
    pm = make_manager()
    seen: list[Any] = []
    f = local_shapes(seen, lambda x: x)
    pm.shard_map(f, in_axes=[X], out_axes=X, mode="decode")(numbers(8, 8))
    pm.for_mode("decode").shard_map(f, in_axes=[X], out_axes=X)(numbers(8, 8))
    assert {tuple(shapes[0]) for shapes in seen} == {(4, 8)}


def test_policy_applies_in_shard_map() -> None:
    pm = make_manager(text=RULES.replace("[policy]", '[policy]\nindivisible = "replicate"'))
    actual = pm.shard_map(lambda x: x * 2, in_axes=[X], out_axes=X)(numbers(8, 6))
    assert sharded_over(actual, pm.mesh, "dp")
    with raises(
        sw.IndivisibleError, "tp=4", path="argument 0", dim=1, axis="EMBED", size=6, fix="tp | -"
    ):
        make_manager().shard_map(lambda x: x, in_axes=[X], out_axes=X)(numbers(8, 6))


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_the_same_call_never_retraces(jit: bool) -> None:
    pm = make_manager()
    body, traces = counting(lambda x: x * 2)
    f = pm.shard_map(body, in_axes=[X], out_axes=X)
    f = jax.jit(f) if jit else f
    x = pm.shard(numbers(8, 8), *X)
    for _ in range(3):
        f(x)
    assert len(traces) == 1
    f(pm.shard(numbers(16, 8), *X))
    assert len(traces) == 2


def test_nested_over_the_remaining_axes() -> None:
    """The outer map is plain JAX over dp alone. The inner map has the remaining axes."""
    pm = make_manager()
    inner = pm.shard_map(
        lambda x: jax.lax.psum(x, "tp"),
        in_axes=[(sw.EMPTY, sw.EMBED)],
        out_axes=(sw.EMPTY, sw.EMPTY),
    )
    outer = jax.shard_map(
        inner, mesh=pm.mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"}
    )
    actual = jax.jit(outer)(numbers(8, 4))
    np.testing.assert_allclose(actual, numbers(8, 4).sum(1, keepdims=True), rtol=1e-5, atol=1e-6)


def test_inside_a_manager_and_inside_jit() -> None:
    pm = make_manager()
    with pm:
        f = jax.jit(
            lambda x: sw.shard(
                pm.shard_map(lambda x: x * 2, in_axes=[X], out_axes=X)(sw.shard(x, *X)),
                sw.Replicated,
            )
        )
        actual = f(numbers(8, 8))
        assert actual.sharding.is_fully_replicated
        assert_like(actual, jnp.asarray(numbers(8, 8) * 2))
    with (
        jax.set_mesh(make_manager(sizes="dp:4,tp:2").mesh),
        raises(sw.MeshMismatchError, "dp", 4, "tp", 2),
    ):
        pm.shard_map(lambda x: x, in_axes=[X], out_axes=X)(numbers(8, 8))


def test_under_scan_vmap_and_remat() -> None:
    pm = make_manager()
    f = pm.shard_map(
        lambda x, w: jnp.tanh(jax.lax.all_gather(x, "tp", axis=1, tiled=True) @ w),
        in_axes=[X, (sw.EMPTY, sw.EMBED)],
        out_axes=X,
    )

    def plain(x, w):
        return jnp.tanh(x @ w)

    x, ws = numbers(8, 8), numbers(3, 8, 8)

    def loss(f: Any, ws: Any) -> Any:
        return (jax.lax.scan(lambda x, w: (jax.checkpoint(f)(x, w), None), x, ws)[0] ** 2).sum()

    with pm:
        actual = jax.jit(jax.grad(lambda ws: loss(f, ws)))(ws)
    np.testing.assert_allclose(
        actual, jax.grad(lambda ws: loss(plain, ws))(ws), rtol=2e-4, atol=1e-5
    )
    batched = jax.jit(jax.vmap(f, in_axes=(None, 0)))(x, ws)
    np.testing.assert_allclose(
        batched, jax.vmap(plain, in_axes=(None, 0))(x, ws), rtol=2e-5, atol=1e-5
    )


ERRORS: dict[str, tuple[Any, tuple[Any, ...], type[sw.ShardingError], str]] = {
    "too many arguments": (
        {"in_axes": [X], "out_axes": X},
        (8, 8),
        sw.StrategyError,
        facts(2, "in_axes", 1, fix="in_axes"),
    ),
    "wrong rank": (
        {"in_axes": [(sw.BATCH,)], "out_axes": X},
        (8,),
        sw.RankMismatchError,
        facts("BATCH", 1, 2, "(8, 8)", path="argument 0", fix="EMPTY"),
    ),
    "unknown axis": (
        {"in_axes": [("nonsense", "_")], "out_axes": X},
        (8,),
        sw.UnknownAxisError,
        facts("axis", path="argument 0", dim=0, axis="NONSENSE", fix="what it is"),
    ),
    "unknown output axis": (
        {"in_axes": [X], "out_axes": ("nonsense",)},
        (8,),
        sw.UnknownAxisError,
        facts("axis", path="output", axis="NONSENSE", fix="what it is"),
    ),
    "twice in an output": (
        {"in_axes": [X], "out_axes": (sw.EMBED, sw.HEAD)},
        (8,),
        sw.AxisConflictError,
        facts("mesh", "axis", "tp", path="output", dim=1, axis="HEAD", fix="EMPTY"),
    ),
    "twice in a composite": (
        {"in_axes": [X], "out_axes": (sw.BATCH, (sw.EMBED, sw.HEAD))},
        (8,),
        sw.AxisConflictError,
        facts("mesh", "axis", "tp", path="output", dim=1, axis="EMBED+HEAD", fix="EMPTY"),
    ),
    "no annotation": (
        {"in_axes": [3], "out_axes": X},
        (8,),
        sw.StrategyError,
        facts("int", path="argument 0", fix="ArraySpec"),
    ),
    "an axis as output": (
        {"in_axes": [X], "out_axes": sw.BATCH},
        (8,),
        sw.StrategyError,
        facts("__BATCH__", path="output", fix="BATCH"),
    ),
    "None in an output": (
        {"in_axes": [X], "out_axes": (sw.BATCH, None)},
        (8,),
        sw.StrategyError,
        facts("__BATCH__", "tuple", path="output", dim=1, fix="EMPTY"),
    ),
    "a number in an output": (
        {"in_axes": [X], "out_axes": {"a": (sw.BATCH, 5)}},
        (8,),
        sw.StrategyError,
        facts("__BATCH__", 5, "tuple", path="output a", dim=1, fix="BATCH"),
    ),
    "two bad outputs": (
        {"in_axes": [X], "out_axes": ((sw.BATCH, 5), 3)},
        (8,),
        sw.StrategyError,
        (
            facts("__BATCH__", 5, "tuple", path="output 0", dim=1, fix=("BATCH", "EMPTY")),
            facts(3, path="output 1", fix="BATCH"),
        ),
    ),
    "a literal output": (
        {"in_axes": [X], "out_axes": P("nope")},
        (8,),
        sw.MissingMeshAxisError,
        facts("mesh", "axis", "nope", path="output", dim=0, fix="dp"),
    ),
    "an open output": (
        {"in_axes": [X], "out_axes": P(P.UNCONSTRAINED)},
        (8,),
        sw.StrategyError,
        facts("UNCONSTRAINED", "dim", path="output", dim=0),
    ),
    "a size of no axis": (
        {"in_axes": [X], "out_axes": X, "sizes": {"bacth": 8}},
        (8,),
        sw.UnknownAxisError,
        facts("axis", path="sizes", axis="BACTH", fix="BATCH"),
    ),
    "a size that is none": (
        {"in_axes": [X], "out_axes": X, "sizes": {"head": -1}},
        (8,),
        sw.RankMismatchError,
        facts("(-1,)", fix="x.shape"),
    ),
    "another size": (
        {"in_axes": [X], "out_axes": X, "sizes": {"embed": 16}},
        (8,),
        sw.RankMismatchError,
        facts(8, 16, path="argument 0", dim=1, axis="EMBED"),
    ),
}


@pytest.mark.parametrize("case", list(ERRORS))
def test_errors_name_the_argument(case: str) -> None:
    axes, sizes, error, message = ERRORS[case]
    with raises(error, message):
        make_manager().shard_map(lambda *args: args[0], **axes)(
            *(numbers(8, size) for size in sizes)
        )


@pytest.mark.parametrize(
    ("in_axes", "out_axes", "result"),
    [
        (X, [sw.BATCH, sw.EMBED], lambda x: x),
        (X, (sw.BATCH, sw.merged((sw.HEAD, 4), (sw.HEAD_DIM, 2))), lambda x: x),
        (X, P("dp", "tp"), lambda x: x),
        (ROWS, (sw.merged((sw.BATCH, 8), (sw.LENGTH, 1)),), lambda x: x[:, 0]),
        (ROWS, (((sw.BATCH, sw.LENGTH),),), lambda x: (x[:, 0],)),
        (ROWS, ((sw.BATCH,), (), None), lambda x: (x[:, 0], jnp.float32(1), None)),
        (ROWS, [(sw.BATCH,), {"a": ROWS}], lambda x: [x[:, 0], {"a": x}]),
    ],
)
def test_valid_output_annotations(in_axes: Any, out_axes: Any, result: Any) -> None:
    pm = make_manager()
    actual = pm.shard_map(result, in_axes=[in_axes], out_axes=out_axes)(numbers(8, 8))
    jax.tree.map(np.testing.assert_array_equal, actual, result(numbers(8, 8)))


def test_values_beyond_32_bits_are_refused() -> None:
    f = make_manager().shard_map(lambda x, y: x, in_axes=[X, X], out_axes=X)
    with raises(
        sw.StrategyError,
        "int64",
        "int32",
        "JAX",
        "jax_enable_x64",
        path="argument 1",
        fix="jax.config.update",
    ):
        f(numbers(8, 8), np.full((8, 8), 2**40))


def test_problems_of_all_arguments_at_once() -> None:
    f = make_manager().shard_map(lambda x, y: x, in_axes=[X, X], out_axes=X)
    with raises(
        sw.IndivisibleError, "dp=2", path="argument 0", size=7, fix="dp | -", count=2
    ) as caught:
        f(numbers(7, 8), numbers(8, 6))
    assert [problem.path for problem in caught.value.problems] == ["argument 0", "argument 1"]
