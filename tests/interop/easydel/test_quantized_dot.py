"""Dots on integers: values, error bounds, gradients, programs, and the same bits on every mesh."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.interop.easydel import quantize, quantized_dot_general
from shardwright.testing import assert_collectives, assert_no_collectives, cpu_mesh
from shardwright.trees.factored_weights import Quantized, quantized
from tests.raising import Facts, facts, raises

MATMUL = (((1,), (0,)), ((), ()))

# name: shapes of both operands, dimension numbers
DOTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]] = {
    "matrix": ((8, 32), (32, 16), MATMUL),
    "dense": ((2, 4, 32), (32, 16), (((2,), (0,)), ((), ()))),
    "dense_general": ((4, 8, 16), (16, 8, 6), (((2, 1), (0, 1)), ((), ()))),
    "scores": ((2, 5, 3, 16), (2, 7, 3, 16), (((3,), (3,)), ((0, 2), (0, 2)))),
    "batch_in_the_middle": ((5, 3, 16), (16, 4, 3), (((2,), (0,)), ((1,), (2,)))),
    "several_of_each": ((3, 6, 2, 5, 4), (4, 2, 7, 3, 5), (((4, 3), (0, 4)), ((2, 0), (1, 3)))),
    "vector": ((32,), (32,), (((0,), (0,)), ((), ()))),
    "matrix_vector": ((8, 32), (32,), MATMUL),
    "outer": ((5,), (7,), (((), ()), ((), ()))),
    "elementwise": ((5, 3), (5, 3), (((), ()), ((0, 1), (0, 1)))),
}


def operands(name: str, dtype: Any = np.float32) -> tuple[Any, Any, Any]:
    left, right, dims = DOTS[name]
    rng = np.random.default_rng(len(name))
    return (
        jnp.asarray(rng.normal(size=left), dtype),
        jnp.asarray(rng.normal(size=right), dtype),
        dims,
    )


def relative(actual: Any, expected: Any) -> float:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def as_integers(x: Any, shared: Sequence[int], bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantize in NumPy by the definition, in float64 after the division."""
    largest = 2 ** (bits - 1) - 1
    scale = np.abs(np.asarray(x, np.float32)).max(axis=tuple(shared), keepdims=True) / np.float32(
        largest
    )
    return np.rint(np.asarray(x, np.float32) / scale).astype(np.int64), scale.astype(np.float64)


# Quantized arrays.


@pytest.mark.parametrize("bits", range(4, 9))
def test_rounding_error_is_half_a_step(bits: int) -> None:
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32) * np.logspace(
        -3, 3, 8, dtype=np.float32
    )
    stored = quantize(x, shared=(0,), bits=bits)
    assert (stored.value.dtype, stored.value.shape, stored.scale.dtype, stored.scale.shape) == (
        jnp.int8,
        (16, 8),
        jnp.float32,
        (1, 8),
    )
    largest = 2 ** (bits - 1) - 1
    np.testing.assert_array_equal(np.abs(stored.value).max(axis=0), np.full(8, largest))
    assert np.all(np.abs(stored.value * stored.scale - x) <= 0.5001 * stored.scale)
    np.testing.assert_array_equal(stored.value, as_integers(x, (0,), bits)[0])
    # Symmetric: quantizing the negative gives the negative.
    np.testing.assert_array_equal(quantize(-x, shared=(0,), bits=bits).value, -stored.value)


@pytest.mark.full
def test_zeros_and_tiny_numbers() -> None:
    x = np.zeros((2, 4), np.float32)
    x[1] = [1e-38, -1e-40, 0, 1e-39]
    stored = quantize(x, shared=(1,))
    assert np.isfinite(stored.scale).all()
    assert not np.asarray(stored.value[0]).any()
    np.testing.assert_allclose(stored.value * stored.scale, x, atol=1.2e-38)
    assert not np.asarray(quantized_dot_general(jnp.zeros((2, 4)), jnp.ones((4, 3)), MATMUL)).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.full(but=["nan"])
def test_non_finite_values_stay_visible(bad: float) -> None:
    x = np.ones((3, 4), np.float32)
    x[1, 2] = bad
    actual = np.asarray(quantized_dot_general(x, jnp.ones((4, 2)), MATMUL))
    assert not np.isfinite(actual[1]).any()
    np.testing.assert_allclose(actual[[0, 2]], 4.0, rtol=1e-6)


@pytest.mark.full
def test_empty_arrays() -> None:
    assert quantized_dot_general(jnp.ones((0, 4)), jnp.ones((4, 2)), MATMUL).shape == (0, 2)
    np.testing.assert_array_equal(
        quantized_dot_general(jnp.ones((3, 0)), jnp.ones((0, 2)), MATMUL), np.zeros((3, 2))
    )


# Values.


@pytest.mark.parametrize(("name", "bits"), [*((name, 8) for name in DOTS), ("several_of_each", 5)])
@pytest.mark.full(but=["matrix-8", "several_of_each-8"])
def test_dot_equals_dot_of_integers(name: str, bits: int) -> None:
    x, y, dims = operands(name)
    (left, left_scale), (right, right_scale) = (
        as_integers(array, shared, bits) for array, shared in zip((x, y), dims[0], strict=True)
    )
    float_dot = functools.partial(jax.lax.dot_general, dimension_numbers=dims, precision="highest")
    expected = float_dot(
        (left * left_scale).astype(np.float32), (right * right_scale).astype(np.float32)
    )
    actual = jax.jit(functools.partial(quantized_dot_general, dimension_numbers=dims, bits=bits))(
        x, y
    )
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.02), (7, 0.04), (6, 0.08), (5, 0.16), (4, 0.35)])
def test_error_depends_on_bits(bits: int, bound: float) -> None:
    x, y, dims = operands("dense_general")
    exact = jax.lax.dot_general(x, y, dims, precision="highest")
    actual = jax.jit(functools.partial(quantized_dot_general, dimension_numbers=dims, bits=bits))(
        x, y
    )
    assert 0 < relative(actual, exact) < bound
    # No element has a larger error than the two roundings allow.
    count = np.prod([x.shape[dim] for dim in dims[0][0]])
    half = [0.5 * np.abs(array).max() / (2 ** (bits - 1) - 1) for array in (x, y)]
    worst = count * (half[0] * np.abs(y).max() + half[1] * np.abs(x).max() + half[0] * half[1])
    assert np.abs(actual - exact).max() <= worst


@pytest.mark.full
def test_scale_per_channel_keeps_small_channels() -> None:
    """One scale for a whole operand would lose the small rows entirely."""
    x, y, dims = operands("matrix")
    x = x * jnp.logspace(-6, 6, 8)[:, None]
    exact = jax.lax.dot_general(x, y, dims, precision="highest")
    actual = quantized_dot_general(x, y, dims)
    assert max(relative(actual[row], exact[row]) for row in range(8)) < 0.03


@pytest.mark.parametrize(
    ("left", "right", "preferred", "result"),
    [
        (jnp.bfloat16, jnp.bfloat16, None, jnp.bfloat16),
        (jnp.bfloat16, jnp.float32, None, jnp.float32),
        (jnp.float16, jnp.float16, jnp.float32, jnp.float32),
    ],
)
def test_dtypes_equal_those_of_float_dot(
    left: Any, right: Any, preferred: Any, result: Any
) -> None:
    x, y, dims = operands("matrix")
    x, y = x.astype(left), y.astype(right)

    def loss(x: Any, y: Any) -> Any:
        return (
            quantized_dot_general(x, y, dims, preferred_element_type=preferred)
            .astype(jnp.float32)
            .sum()
        )

    assert quantized_dot_general(x, y, dims, preferred_element_type=preferred).dtype == result
    assert [g.dtype for g in jax.eval_shape(jax.grad(loss, (0, 1)), x, y)] == [left, right]


@pytest.mark.full
def test_long_contraction_does_not_overflow() -> None:
    """127 * 127 * 140,000 exceeds int32."""
    x, y = jnp.ones((1, 140_000)), jnp.ones((140_000, 1))
    np.testing.assert_allclose(
        jax.jit(functools.partial(quantized_dot_general, dimension_numbers=MATMUL))(x, y),
        140_000.0,
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        quantized_dot_general(x[:, :133_000], y[:133_000], MATMUL), 133_000.0, rtol=1e-6
    )


# Gradients.


def gradients(dot: Any, x: Any, y: Any, weight: Any) -> tuple[Any, Any]:
    actual: tuple[Any, Any] = jax.jit(jax.grad(lambda x, y: (dot(x, y) * weight).sum(), (0, 1)))(
        x, y
    )
    return actual


@pytest.mark.parametrize(
    ("name", "bits", "bound"), [*((name, 8, 0.03) for name in DOTS), ("several_of_each", 4, 0.5)]
)
@pytest.mark.full(but=["matrix-8-0.03", "several_of_each-8-0.03"])
def test_gradients_are_straight_through(name: str, bits: int, bound: float) -> None:
    """Up to rounding of the cotangent, they equal those of a float dot of rounded operands."""
    x, y, dims = operands(name)
    float_dot = functools.partial(jax.lax.dot_general, dimension_numbers=dims, precision="highest")
    weight = jnp.asarray(
        np.random.default_rng(1).normal(size=jax.eval_shape(float_dot, x, y).shape), jnp.float32
    )

    @jax.jit
    def run(x: Any, y: Any) -> tuple[Any, Any, Any]:
        quantized = [
            quantize(array, shared=shared, bits=bits)
            for array, shared in zip((x, y), dims[0], strict=True)
        ]
        rounded = [array.value * array.scale for array in quantized]
        ours = gradients(
            functools.partial(quantized_dot_general, dimension_numbers=dims, bits=bits),
            x,
            y,
            weight,
        )
        return ours, gradients(float_dot, *rounded, weight), gradients(float_dot, x, y, weight)

    for ours, straight, exact in zip(*run(x, y), strict=True):
        assert ours.shape == exact.shape
        assert np.isfinite(ours).all()
        assert relative(ours, straight) < bound * 2 / 3
        assert 0 < relative(ours, exact) < bound


@pytest.mark.full
def test_training_converges_on_integers() -> None:
    key = jax.random.key(0)
    target = jax.random.normal(key, (16, 4)) / 4
    x = jax.random.normal(jax.random.key(1), (64, 16))
    w = jnp.zeros((16, 4))

    @jax.jit
    def step(w: Any) -> Any:
        loss, g = jax.value_and_grad(
            lambda w: jnp.mean((quantized_dot_general(x, w, MATMUL) - x @ target) ** 2)
        )(w)
        return w - 1.0 * g, loss

    losses = [float((out := step(w), w := out[0])[0][1]) for _ in range(60)]
    assert losses[-1] < 1e-3 * losses[0]


@pytest.mark.full
def test_vmap_checkpoint_and_scan_change_nothing() -> None:
    x, y, dims = operands("matrix")
    dot = functools.partial(quantized_dot_general, dimension_numbers=dims)
    expected = gradients(dot, x, y, 1.0)
    stacked = jax.vmap(lambda x: gradients(dot, x, y, 1.0))(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(stacked[0][0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(stacked[1][0], expected[1], rtol=1e-6)
    for ours, theirs in zip(gradients(jax.checkpoint(dot), x, y, 1.0), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    _, scanned = jax.lax.scan(lambda carry, x: (carry, dot(x, y)), 0, jnp.stack([x, 2 * x]))
    np.testing.assert_array_equal(scanned[0], dot(x, y))


# The program.


def dots(text: str) -> list[str]:
    """Every dot of a compiled program, as the dtypes of its result and its operands."""
    actual = []
    for computation in text.split("\n\n"):
        dtypes = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", computation))
        for result, arguments in re.findall(r"= (\w+)\[\S* dot\(([^)]*)\)", computation):
            names = re.findall(r"%[\w.-]+", arguments)
            actual.append(f"{result}({', '.join(dtypes[name] for name in names)})")
    return actual


def test_program_multiplies_int8() -> None:
    x, y, dims = operands("matrix")
    dot = functools.partial(quantized_dot_general, dimension_numbers=dims)
    assert dots(jax.jit(dot).lower(x, y).compile().as_text()) == ["s32(s8, s8)"]
    lowered = jax.jit(lambda x, y, g: jax.vjp(dot, x, y)[1](g)).lower(x, y, jnp.ones((8, 16)))
    assert re.findall(
        r"dot_general .* : \(tensor<\w+x(\w+)>, tensor<\w+x(\w+)>\) -> tensor<\w+x(\w+)>",
        lowered.as_text(),
    ) == [
        ("i8", "i8", "i32"),
        ("i8", "i8", "i32"),
    ]
    backward = lowered.compile().as_text()
    # XLA for CPUs widens one backward dot, whose left operand is transposed, from int8 to int32.
    assert sorted(dots(backward)) == ["s32(s32, s32)", "s32(s8, s8)"]
    floats = (
        jax.jit(functools.partial(jax.lax.dot_general, dimension_numbers=dims))
        .lower(x, y)
        .compile()
        .as_text()
    )
    assert dots(floats) == ["f32(f32, f32)"]


def test_residuals_are_integers() -> None:
    x, y, dims = operands("matrix")
    _, pullback = jax.vjp(functools.partial(quantized_dot_general, dimension_numbers=dims), x, y)
    kept = {
        (leaf.dtype.name, leaf.shape)
        for leaf in jax.tree.leaves(pullback)
        if hasattr(leaf, "dtype") and leaf.size > 1
    }
    assert kept == {
        ("int8", (8, 32)),
        ("float32", (8, 1)),
        ("int8", (32, 16)),
        ("float32", (1, 16)),
    }


# Meshes.

LAYOUTS = {
    "batch": (P("dp"), P()),
    "columns": (P("dp"), P(None, "tp")),
    "contracted": (P("dp", "tp"), P("tp")),
    "contracted_over_both": (P(None, ("dp", "tp")), P(("dp", "tp"))),
    "stored_elsewhere": (P("tp"), P("dp", "tp")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.full(but=["contracted"])
def test_sharded_equals_unsharded(layout: str) -> None:
    x, y, dims = operands("matrix")
    weight = jnp.asarray(np.random.default_rng(3).normal(size=(8, 16)), jnp.float32)
    dot = functools.partial(quantized_dot_general, dimension_numbers=dims)

    @jax.jit
    def run(x: Any, y: Any, weight: Any) -> tuple[Any, Any]:
        return dot(x, y), gradients(dot, x, y, weight)

    expected = run(x, y, weight)
    mesh = cpu_mesh("dp:2,tp:4")
    placed = [
        jax.device_put(array, jax.NamedSharding(mesh, spec))
        for array, spec in zip((x, y), LAYOUTS[layout], strict=True)
    ]
    # A float dot contracted over eight devices has an error of 1e-5. Integer sums are exact; only
    # their scaling may round.
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6),
        run(*placed, weight),
        expected,
    )


def test_only_contracted_mesh_axes_cost_collectives() -> None:
    x, y, dims = operands("matrix")
    mesh = cpu_mesh("dp:2,tp:4")
    dot = functools.partial(quantized_dot_general, dimension_numbers=dims)

    def placed(layout: str) -> list[Any]:
        return [
            jax.device_put(array, jax.NamedSharding(mesh, spec))
            for array, spec in zip((x, y), LAYOUTS[layout], strict=True)
        ]

    assert_no_collectives(dot, *placed("columns"))
    # The sums and the scales of both operands; the compiler may send them together.
    assert_collectives(dot, *placed("contracted"), all_reduce=range(2, 4), only=True)
    assert_no_collectives(dot, *placed("contracted"), axis="dp")


@pytest.mark.parametrize("layout", ["batch", "columns"])
@pytest.mark.full
def test_gradient_sharding_over_explicit_axes(layout: str) -> None:
    x, y, dims = operands("matrix")
    dot = functools.partial(quantized_dot_general, dimension_numbers=dims)
    expected = dot(x, y), gradients(dot, x, y, 1.0)
    mesh = cpu_mesh("dp:2,tp:4", axis_types="explicit")
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(array, jax.NamedSharding(mesh, spec))
            for array, spec in zip((x, y), LAYOUTS[layout], strict=True)
        ]
        actual = jax.jit(lambda x, y: (dot(x, y), gradients(dot, x, y, 1.0)))(*placed)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), actual, expected
    )
    assert [
        g.sharding.is_equivalent_to(x.sharding, 2) for g, x in zip(actual[1], placed, strict=True)
    ] == [True, True]


def test_contracted_explicit_axes_take_out_sharding() -> None:
    x, y, dims = operands("matrix")
    mesh = cpu_mesh("dp:2,tp:4", axis_types="explicit")
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(array, jax.NamedSharding(mesh, spec))
            for array, spec in zip((x, y), LAYOUTS["contracted"], strict=True)
        ]
        dot = functools.partial(
            quantized_dot_general, dimension_numbers=dims, out_sharding=P("dp", "tp")
        )
        actual = jax.jit(dot)(*placed)
        grads = jax.jit(lambda x, y: gradients(dot, x, y, 1.0))(*placed)
    np.testing.assert_allclose(actual, quantized_dot_general(x, y, dims), rtol=1e-6)
    assert actual.sharding.spec == P("dp", "tp")
    assert [
        g.sharding.is_equivalent_to(x.sharding, 2) for g, x in zip(grads, placed, strict=True)
    ] == [True, True]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.full
def test_shard_map_sums_gradients_of_replicated_operand(
    check_vma: bool,
) -> None:
    x, y, dims = operands("matrix")
    dot = functools.partial(quantized_dot_general, dimension_numbers=dims)
    with jax.set_mesh(cpu_mesh("dp:8")):
        local = jax.shard_map(dot, in_specs=(P("dp"), P()), out_specs=P("dp"), check_vma=check_vma)
        np.testing.assert_allclose(jax.jit(local)(x, y), dot(x, y), rtol=1e-6)
        actual = jax.jit(lambda x, y: gradients(local, x, y, 1.0))(x, y)
    exact = gradients(lambda x, y: x @ y, x, y, 1.0)
    assert [relative(ours, theirs) < 0.03 for ours, theirs in zip(actual, exact, strict=True)] == [
        True,
        True,
    ]


# Stored operands.


@pytest.mark.parametrize("name", ["dense_general", "several_of_each", "matrix_vector"])
@pytest.mark.full(but=["dense_general"])
def test_quantized_operand_equals_rounding_in_call(name: str) -> None:
    x, y, dims = operands(name)
    stored = jax.jit(functools.partial(quantize, shared=dims[0][1]))(y)
    run = jax.jit(jax.value_and_grad(lambda x, y: (quantized_dot_general(x, y, dims) ** 2).sum()))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
        run(x, stored),
        run(x, y),
    )


def test_quantized_operand_passes_jit_and_shardings() -> None:
    x, y, dims = operands("matrix")
    stored = quantize(y, shared=(0,))
    mesh = cpu_mesh("dp:2,tp:4")
    placed = jax.device_put(
        stored,
        Quantized(value=jax.NamedSharding(mesh, P("tp")), scale=jax.NamedSharding(mesh, P())),
    )
    actual = jax.jit(lambda x, y: quantized_dot_general(x, y, dims))(x, placed)
    np.testing.assert_array_equal(actual, quantized_dot_general(x, y, dims))


def test_quantized_weight_is_annotated_like_weight() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=cpu_mesh("fsdp:2,tp:4"))
    x, y, dims = operands("matrix")
    spec = sw.ArraySpec((32, 16), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE))
    shardings = pm.shardings(quantized(spec, (-1, 1)))
    placed = jax.jit(functools.partial(quantize, shared=(0,)), out_shardings=shardings)(y)
    assert (placed.value.sharding.spec, placed.scale.sharding.spec) == (
        P("fsdp", "tp"),
        P(None, "tp"),
    )
    actual = jax.jit(functools.partial(quantized_dot_general, dimension_numbers=dims))(x, placed)
    np.testing.assert_allclose(actual, quantized_dot_general(x, y, dims), rtol=1e-6, atol=1e-6)


# What it is not.


@pytest.mark.parametrize("bits", [3, 9, 16, 0, -8, 8.0, "8", True])
def test_invalid_bits(bits: Any) -> None:
    with raises(sw.LayerError, bits, 4):
        quantized_dot_general(jnp.ones((2, 2)), jnp.ones((2, 2)), MATMUL, bits=bits)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.bool, jnp.complex64])
def test_operands_must_be_floats(dtype: Any) -> None:
    with raises(sw.LayerError, jnp.dtype(dtype), "quantized", fix="jax.lax.dot_general"):
        quantized_dot_general(jnp.ones((2, 2)), jnp.ones((2, 2), dtype), MATMUL)


def test_scales_along_contracted_dim() -> None:
    stored = quantize(jnp.ones((4, 2)), shared=(1,))
    with raises(sw.LayerError, "(4, 2)", "(4, 1)", fix="(0,)"):
        quantized_dot_general(jnp.ones((3, 4)), stored, MATMUL)


def test_quantized_operand_with_zero_points() -> None:
    stored = dataclasses.replace(
        quantize(jnp.ones((4, 2)), shared=(0,)), zero_point=jnp.zeros((1, 2))
    )
    with raises(sw.LayerError, "quantized"):
        quantized_dot_general(jnp.ones((3, 4)), stored, MATMUL)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float32, jnp.int16, jnp.int32, jnp.uint8])
def test_quantized_values_must_fit_int8(dtype: Any) -> None:
    stored = Quantized(value=jnp.full((64, 2), 1.5, dtype), scale=jnp.ones((1, 2)))
    with raises(sw.LayerError, jnp.dtype(dtype), 8, path=..., fix="quantize(x, shared=(0,))"):
        quantized_dot_general(jnp.ones((1, 64)), stored, MATMUL)


@pytest.mark.full
def test_quantized_values_of_four_bits() -> None:
    stored = Quantized(value=jnp.full((64, 2), -3, jnp.int4), scale=jnp.ones((1, 2)))
    np.testing.assert_allclose(
        quantized_dot_general(jnp.ones((1, 64)), stored, MATMUL), [[-192, -192]], rtol=1e-6
    )


def test_long_contraction_of_smallest_integer() -> None:
    stored = Quantized(value=jnp.full((133_000, 1), -128, jnp.int8), scale=jnp.ones((1, 1)))
    np.testing.assert_allclose(
        quantized_dot_general(jnp.ones((1, 133_000)), stored, MATMUL),
        [[-128 * 133_000.0]],
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    ("scale", "says"),
    [
        (jnp.ones((1, 4)), facts("(64, 8)", "(1, 4)")),
        (jnp.float32(1), facts("(64, 8)")),
        (jnp.ones((1, 8), jnp.int32), facts("int32")),
    ],
)
def test_mismatched_scales(scale: Any, says: Facts) -> None:
    with raises(sw.LayerError, says):
        quantized_dot_general(
            jnp.ones((3, 64)), Quantized(value=jnp.ones((64, 8), jnp.int8), scale=scale), MATMUL
        )


@pytest.mark.full
def test_floats_of_fp8_are_quantized() -> None:
    x, y = jnp.array([[1.5, -3.0]], jnp.float8_e4m3fn), jnp.array([[2.0], [0.5]], jnp.float8_e4m3fn)
    assert quantize(x, shared=(1,)).value.tolist() == [[64, -127]]
    assert quantize(x, shared=(1,)).scale.dtype == jnp.float32
    out = quantized_dot_general(x, y, MATMUL)
    assert (out.dtype, out.tolist()) == (jnp.float8_e4m3fn, [[1.5]])
    wide = jnp.asarray(y, jnp.float32)
    np.testing.assert_allclose(
        quantized_dot_general(x, wide, MATMUL, preferred_element_type=jnp.float32),
        [[1.5]],
        rtol=0.02,
    )
    with pytest.raises(ValueError, match=r"(?=.*float8_e4m3fn)(?=.*float32).*astype"):
        quantized_dot_general(x, wide, MATMUL)
    grads = jax.grad(
        lambda x, y: quantized_dot_general(x, y, MATMUL).astype(jnp.float32).sum(), argnums=(0, 1)
    )(x, y)
    assert [grad.dtype for grad in grads] == [jnp.float8_e4m3fn] * 2


def test_mismatched_operands() -> None:
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        quantized_dot_general(jnp.ones((2, 3)), jnp.ones((4, 2)), MATMUL)
