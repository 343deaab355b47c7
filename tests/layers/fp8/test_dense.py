"""The quantized dense: equal to NumPy, equal on every mesh; it gathers and keeps fp8."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.errors import LayerError, RankMismatchError
from shardwright.layers import fp8
from shardwright.plan.collectives import read_collectives
from shardwright.testing import cpu_mesh
from tests.layers import blocks
from tests.layers.fp8.test_quantize import block_by_block
from tests.raising import Facts, facts, raises

RECIPES = ["delayed", "current", "mxfp8"]
# `make test` leaves out the other recipes: a compilation each.
SAMPLED = ["delayed", *[pytest.param(r, marks=pytest.mark.full) for r in ("current", "mxfp8")]]
INPUT = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
OUT = {
    "gate": (sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE),
    "heads": (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM),
}
SPECS = {
    "gate": sw.ArraySpec((64, 128), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE)),
    "heads": sw.ArraySpec((64, 4, 32), jnp.float32, (sw.EMBED, sw.HEAD, sw.HEAD_DIM)),
}
X = np.random.default_rng(0).normal(size=(8, 32, 64)).astype(np.float32)
PARAMS = blocks.random_params(SPECS)


def state_of(recipe: str) -> Any:
    """Return a state in the middle of a training run; None for recipes without a state."""
    state = fp8.init(fp8.read_recipe(recipe), SPECS)
    factors = iter((90.0, 400.0, 300.0, 2000.0, 3000.0))
    if state is None:
        return None
    tensors = lambda node: isinstance(node, fp8.TensorScaling)  # noqa: E731
    return jax.tree.map(
        lambda node: (
            fp8.TensorScaling(scale=jnp.float32(next(factors)), history=node.history)
            if tensors(node)
            else node
        ),
        state,
        is_leaf=tensors,
    )


def matmuls(recipe: str, params: Any, x: Any, channel: Any) -> Any:
    kernels = {name: fp8.stored(w, SPECS[name]) for name, w in params.items()}
    use = fp8.uses(state_of(recipe), channel)
    result = fp8.dense(x, kernels, recipe=recipe, use=use, axes=INPUT, out=OUT)
    return result.ys, result.seen


def loss(recipe: str, params: Any, x: Any, channel: Any) -> Any:
    ys, seen = matmuls(recipe, params, x, channel)
    return sum(jnp.sum(jnp.sin(y)) for y in ys.values()), (ys, seen)


def differentiated(recipe: str) -> Any:
    return jax.value_and_grad(functools.partial(loss, recipe), (0, 1, 2), has_aux=True)


@functools.cache
def unsharded(recipe: str) -> Any:
    channel = fp8.new_channel(state_of(recipe))
    return jax.jit(differentiated(recipe))(PARAMS, X, channel)


def rounded(x: np.ndarray, recipe: str, scale: float, dim: int, form: str) -> np.ndarray:
    """Return what fp8 keeps of an array, in float64."""
    x = np.asarray(x, np.float32)
    if recipe == "mxfp8":
        values, powers = block_by_block(x, dim, form)
        return values.astype(np.float64) * np.repeat(powers, 32, axis=dim)
    limit = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}[form]
    if recipe == "current":
        scale = np.float32(limit) / np.abs(x).max()
    values = np.clip(x * np.float32(scale), -limit, limit).astype(form)
    return values.astype(np.float64) / np.float64(np.float32(scale))


@pytest.mark.parametrize("recipe", SAMPLED)
def test_values_and_gradients_of_numpy(recipe: str) -> None:
    e4 = "float8_e4m3fn"
    e5 = e4 if recipe == "mxfp8" else "float8_e5m2"
    x_scale, scales = 90.0, {"gate": 400.0, "heads": 300.0}
    grad_scales = {"gate": 2000.0, "heads": 3000.0}
    (_, (ys, _)), (grads, dx, _) = unsharded(recipe)
    wanted_dx = np.zeros(X.shape)
    for name, w in PARAMS.items():
        flat = w.reshape(64, -1)
        first = rounded(w, recipe, scales[name], 0, e4).reshape(flat.shape)
        y = rounded(X, recipe, x_scale, 2, e4) @ first
        np.testing.assert_allclose(np.asarray(ys[name]).reshape(y.shape), y, rtol=1e-4, atol=1e-4)
        # From here on with the gradient that was computed, so that rounding starts equal.
        dy = np.cos(np.asarray(ys[name]))
        last = rounded(dy, recipe, grad_scales[name], dy.ndim - 1, e5).reshape(y.shape)
        own = rounded(w, recipe, scales[name], w.ndim - 1, e4).reshape(flat.shape)
        wanted_dx += last @ own.T
        tokens = rounded(dy, recipe, grad_scales[name], 1, e5).reshape(-1, flat.shape[1])
        dw = rounded(X, recipe, x_scale, 1, e4).reshape(-1, 64).T @ tokens
        got = np.asarray(grads[name]).reshape(flat.shape)
        np.testing.assert_allclose(got, dw, atol=2e-3 * np.abs(dw).max())
    np.testing.assert_allclose(dx, wanted_dx, atol=2e-3 * np.abs(wanted_dx).max())


def test_reports_of_delayed_scaling() -> None:
    (_, (ys, seen)), (_, _, sent) = unsharded("delayed")
    assert seen.x == np.abs(X).max()
    for name, w in PARAMS.items():
        assert seen.kernels[name] == np.abs(w).max()
        np.testing.assert_allclose(sent[name].amax, np.abs(np.cos(ys[name])).max(), rtol=1e-6)
        assert sent[name].count == 1


def run_sharded(recipe: str, preset: str, kind: str) -> Any:
    """Return the manager, the compiled training program, and its result."""
    channel = fp8.new_channel(state_of(recipe))
    with blocks.make_manager(preset, kind) as pm:
        params, x = pm.shard(PARAMS, SPECS, role="param"), pm.shard(X, INPUT)
        compiled = jax.jit(differentiated(recipe)).lower(params, x, channel).compile()
        result = compiled(params, x, channel)
    for gradient, value in zip(jax.tree.leaves(result[1][0]), jax.tree.leaves(params), strict=True):
        assert gradient.sharding.is_equivalent_to(value.sharding, value.ndim)
    return pm, compiled, result


SHARDED = [
    (recipe, preset, kind)
    for recipe in RECIPES
    for preset, kind in [
        ("fsdp_tp", "auto"),
        ("fsdp_tp", "explicit"),
        ("fsdp_tp", "mixed"),
        ("fsdp_tp_sp", "auto"),
        ("tensor", "explicit"),
        ("fsdp", "auto"),
    ]
    # The part of EMBED (64) over fsdp=8, or of QUERY_LENGTH (32) over tp, is not a multiple of 32.
    if not (recipe == "mxfp8" and preset in ("fsdp", "fsdp_tp_sp"))
]


@pytest.mark.full(but=["delayed-fsdp_tp-auto"])
@pytest.mark.parametrize(("recipe", "preset", "kind"), SHARDED)
def test_sharded_equals_unsharded(recipe: str, preset: str, kind: str) -> None:
    _, _, result = run_sharded(recipe, preset, kind)
    (value, aux), grads = result
    (wanted_value, wanted_aux), wanted_grads = unsharded(recipe)
    np.testing.assert_allclose(value, wanted_value, atol=1e-3)  # a sum of 65,536 sines
    blocks.assert_close((aux, grads), (wanted_aux, wanted_grads))


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("mxfp8", marks=pytest.mark.full)])
def test_kernels_are_gathered_as_bits_and_again(recipe: str) -> None:
    pm, compiled, _ = run_sharded(recipe, "fsdp_tp", "auto")
    text = compiled.as_text()
    gathers = re.findall(r"= (\w+)\[([\d,]+)\]\S* all-gather\(", text)
    # Over tp=4 a device uses (64, 32) of `gate` and (64, 1, 32) of `heads`: each is gathered in the
    # forward and in the backward pass. With blocks, so are the exponents, 1/32 of that.
    sizes = sorted(int(np.prod([int(size) for size in shape.split(",")])) for _, shape in gathers)
    values, exponents = [64 * 32] * 4, [64] * 4 if recipe == "mxfp8" else []
    assert {dtype for dtype, _ in gathers} == {"u8"}
    assert sizes == [*exponents, *values]
    sent = [c for c in read_collectives(compiled, pm.mesh) if c.kind.value == "all_gather"]
    assert sum(c.total_bytes or 0 for c in sent) == sum(sizes)


@pytest.mark.parametrize("recipe", RECIPES)
def test_residuals_are_fp8(recipe: str) -> None:
    channel = fp8.new_channel(state_of(recipe))
    pulled = jax.eval_shape(
        lambda params, x, channel: jax.vjp(
            lambda *args: matmuls(recipe, *args)[0], params, x, channel
        )[1],
        PARAMS,
        X,
        channel,
    )
    large = [leaf for leaf in jax.tree.leaves(pulled) if leaf.size > 1]
    assert {leaf.dtype.itemsize for leaf in large} == {1}
    # The input once for both kernels, and each kernel.
    values = [leaf.size for leaf in large if leaf.dtype != np.uint8]
    assert sorted(values) == sorted([X.size, *(w.size for w in PARAMS.values())])


@pytest.mark.parametrize(
    ("preset", "x", "message"),
    [
        ("fsdp", X, facts("(64, 128)", 32, "fsdp=8", dim=0, axis="EMBED", fix="current")),
        (None, X[:, :31], facts("(8, 31, 64)", 32, 31, dim=1, axis="QUERY_LENGTH", fix="current")),
        ("tensor", X[..., :33], facts("(8, 32, 33)", 32, 33, dim=2, axis="EMBED", fix="current")),
    ],
)
def test_blocks_that_do_not_fit(preset: str | None, x: Any, message: Facts) -> None:
    params = {name: w[: x.shape[-1]] for name, w in PARAMS.items()}
    run = lambda: differentiated("mxfp8")(params, x, None)  # noqa: E731
    if preset is None:
        with raises(LayerError, message):
            run()
        return
    with blocks.make_manager(preset, "auto"), raises(LayerError, message):
        run()


@pytest.mark.full
def test_one_token_needs_no_blocks_of_tokens() -> None:
    # Only the backward pass contracts the tokens.
    ys, _ = jax.jit(functools.partial(matmuls, "mxfp8"))(PARAMS, X[:, :1], None)
    np.testing.assert_allclose(ys["gate"], unsharded("mxfp8")[0][1][0]["gate"][:, :1], rtol=1e-5)


@pytest.mark.full(but=["delayed"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_float16_sums_in_float32(recipe: str) -> None:
    """Sums of products of numbers up to 448 and 57,344 leave the range of float16."""
    x, w = X.astype(np.float16), PARAMS["gate"]
    kernels, state = {"gate": w}, state_of(recipe)
    state = state and fp8.init(fp8.DelayedScaling(), kernels)
    use = fp8.uses(state)
    if use is not None:
        use = dataclasses.replace(
            use, x=jnp.float32(90), kernels={"gate": jnp.float32(400)}, grads={"gate": 2000.0}
        )

    def loss(x: Any) -> Any:
        y = fp8.dense(x, kernels, recipe=recipe, use=use).ys["gate"]
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    dx, y = jax.jit(jax.grad(loss, has_aux=True))(x)
    assert dx.dtype == y.dtype == jnp.float16
    e4 = "float8_e4m3fn"
    wanted = rounded(x, recipe, 90.0, 2, e4) @ rounded(w, recipe, 400.0, 0, e4)
    np.testing.assert_allclose(y, wanted, rtol=2e-3, atol=2e-3)
    grad = rounded(np.cos(y), recipe, 2000.0, 2, e4 if recipe == "mxfp8" else "float8_e5m2")
    wanted = grad @ rounded(w, recipe, 400.0, 1, e4).T
    np.testing.assert_allclose(dx, wanted, rtol=1e-2, atol=4e-2)


@functools.partial(jax.jit, static_argnums=1)
def with_the_gate(x: Any, recipe: str) -> Any:
    return fp8.dense(x, {"k": PARAMS["gate"]}, recipe=recipe).ys["k"]


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@pytest.mark.parametrize("size", [1e-37, 3e-36, 1e-30, 1e37])
def test_tiny_and_huge_values(recipe: str, size: float) -> None:
    """Also where the scale of fp8, 448 / amax, has no float32 or its inverse no normal one."""
    x = (np.float32(size) * X[0]).astype(np.float32)
    x[0] = 0
    y = with_the_gate(x, recipe)
    exact = X[0].astype(np.float64) @ PARAMS["gate"]
    error = np.asarray(y, np.float64)[1:] / size - exact[1:]
    assert np.linalg.norm(error) < 0.1 * np.linalg.norm(exact)
    assert not np.asarray(y[0]).any()


@pytest.mark.full(but=["current"])
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@pytest.mark.ci
def test_no_tokens(recipe: str) -> None:
    """The largest value of nothing is 0."""
    kernel = np.ones((32, 64), np.float32)
    run = jax.value_and_grad(lambda k, x: jnp.sum(fp8.dense(x, {"k": k}, recipe=recipe).ys["k"]))
    value, gradient = jax.jit(run)(kernel, np.ones((0, 32, 32), np.float32))
    assert float(value) == 0
    assert not np.asarray(gradient).any()


def test_shapes_that_do_not_fit() -> None:
    with raises(RankMismatchError, "(64, 128)", 1, "(8, 32, 32)", path="gate"):
        fp8.dense(X[..., :32], {"gate": PARAMS["gate"]}, recipe="current")
    with raises(LayerError, path="recipe", fix="layers.dense.dense"):
        fp8.dense(X, {"gate": PARAMS["gate"]}, recipe=None)


@pytest.mark.full
def test_bias_and_compute_dtype() -> None:
    bias = jnp.arange(128.0)
    options: Any = {"recipe": "current", "biases": {"gate": bias}, "dtype": "bfloat16"}
    result = fp8.dense(X, {"gate": PARAMS["gate"]}, **options)
    assert result.ys["gate"].dtype == jnp.bfloat16
    exact = X @ PARAMS["gate"] + np.arange(128.0)
    np.testing.assert_allclose(np.asarray(result.ys["gate"], np.float32), exact, atol=2.0)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_amax_is_global_but_for_the_pipeline(recipe: str) -> None:
    # Stage 1 has ten times larger inputs than stage 0; each stage has a state of its own.
    mesh = cpu_mesh("pp:2,fsdp:4")
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=mesh, mode="train")
    rows = X * np.linspace(1, 4, 8, dtype=np.float32)[:, None, None]
    factors = np.array([1.0, 10.0], np.float32)
    stacked = np.stack([PARAMS["gate"], PARAMS["gate"][::-1] * 3])
    spec = jax.sharding.PartitionSpec

    def state_of_stage(count: Any = None) -> Any:
        return fp8.init(fp8.read_recipe(recipe), ["gate"], layers=count)

    def stage(kernel: Any, x: Any, factor: Any, channel: Any) -> Any:
        def local(w: Any, x: Any, channel: Any) -> Any:
            own = jax.tree.map(lambda leaf: leaf[0], channel)
            kernels = {"gate": fp8.stored(w, SPECS["gate"])}
            use = fp8.uses(state_of_stage(), own)
            result = fp8.dense(x * factor[0], kernels, recipe=recipe, use=use)
            y = result.ys["gate"]
            return jnp.sum(jnp.sin(y)), (y, jax.tree.map(lambda leaf: leaf[None], result.seen))

        x = jax.lax.pcast(x, "pp", to="varying")
        grads, (y, seen) = jax.grad(local, (0, 1, 2), has_aux=True)(kernel[0], x, channel)
        return jax.tree.map(lambda leaf: leaf[None], grads[:2]), grads[2], y[None], seen

    channel = fp8.new_channel(state_of_stage(2))
    stages = jax.shard_map(
        stage,
        mesh=mesh,
        in_specs=(spec("pp", "fsdp"), spec("fsdp"), spec("pp"), spec("pp")),
        out_specs=(spec("pp", "fsdp"), spec("pp"), spec("pp", "fsdp"), spec("pp")),
    )
    with pm:
        grads, sent, ys, seen = jax.jit(stages)(stacked, rows, factors, channel)
    for at, factor in enumerate(factors):

        def whole(w: Any, x: Any, channel: Any, factor: float = factor) -> Any:
            use = fp8.uses(state_of_stage(), channel)
            result = fp8.dense(x * factor, {"gate": w}, recipe=recipe, use=use)
            return jnp.sum(jnp.sin(result.ys["gate"])), (result.ys["gate"], result.seen)

        none = fp8.new_channel(state_of_stage())
        wanted = jax.grad(whole, (0, 1, 2), has_aux=True)(stacked[at], rows, none)
        own = jax.tree.map(lambda leaf, at=at: leaf[at], (grads, sent, ys, seen))
        got = ((own[0][0], own[0][1], own[1]), (own[2], own[3]))
        blocks.assert_close(got, wanted, rtol=1e-5)
