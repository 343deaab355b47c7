"""Convolutions and poolings: what a plan states, and what XLA sends on CPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardwright as sw
from shardwright.plan.walk.ledger import LAYOUT_FIXES
from tests.plan.against_xla import compiled_bytes, planned_bytes

IMAGES = (sw.BATCH, sw.EMPTY, sw.EMPTY, sw.EMPTY)
NHWC = ("NHWC", "HWIO", "NHWC")
X = jax.ShapeDtypeStruct((16, 8, 8, 8), jnp.float32)


SPATIAL = """
version = 1
[axes]
channels = "channels that a convolution writes"
kernel_channels = "the same, of its kernel"
[rules]
batch = "fsdp"
height = "sp"
channels = "tp"
kernel_channels = "{}"
"""


def kernel(*shape: int, axes: Any = (sw.EMPTY, sw.EMPTY, sw.EMPTY, sw.EMBED)) -> sw.ArraySpec:
    return sw.ArraySpec(shape, jnp.float32, axes)


def patches(w: Any, x: Any) -> Any:
    return lax.conv_general_dilated(x, w, (4, 4), "VALID", dimension_numbers=NHWC)


def padded(w: Any, x: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)


def depthwise(w: Any, x: Any) -> Any:
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=8
    )


def pooled(w: Any, x: Any) -> Any:
    largest = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    mean = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return (largest + mean) * w[0, 0, 0]


@pytest.mark.full(but=["True-patches-w0", "False-pooled-w3", "True-depthwise-w2"])
@pytest.mark.parametrize(
    ("function", "w"),
    [
        (patches, kernel(4, 4, 8, 32)),
        (padded, kernel(3, 3, 8, 16)),
        (depthwise, kernel(3, 3, 1, 8)),
        (pooled, kernel(1, 1, 1, 8)),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_plan_equals_the_compiled_program(function: Any, w: sw.ArraySpec, *, grad: bool) -> None:
    def loss(w: Any, x: Any) -> Any:
        gathered = sw.gather(w, *w_axes)
        return jnp.sum(jnp.tanh(function(gathered, x)) ** 2)

    w_axes = w.axes
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=sw.create_mesh("fsdp:8"))
    program = jax.grad(loss) if grad else loss
    shape = jax.ShapeDtypeStruct(w.shape, w.dtype)
    outputs = w if grad else None
    report = pm.plan(program, shape, X, specs=(w, IMAGES), outputs=outputs)
    arguments = [pm.abstract(w), pm.abstract(sw.ArraySpec(X.shape, X.dtype, IMAGES))]
    assert report.walked.complete
    # TPUs may sum the gradient of a kernel whole.
    assert bool(report.walked.choices) == (grad and function is not pooled)
    assert planned_bytes(report) == compiled_bytes(pm, program, arguments, outputs)


def test_operations_of_a_convolution() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=sw.abstract_mesh("fsdp:8"))
    for function, w, per_result in (
        (patches, kernel(4, 4, 8, 32), 4 * 4 * 8),
        (padded, kernel(3, 3, 8, 16), 3 * 3 * 8),
        (depthwise, kernel(3, 3, 1, 8), 3 * 3),
    ):
        shape = jax.ShapeDtypeStruct(w.shape, w.dtype)
        report = pm.plan(function, shape, X, specs=(None, IMAGES))
        results = jax.eval_shape(function, shape, X).size
        assert report.walked.flops == 2 * per_result * results // 8


@pytest.mark.parametrize(("size", "stride"), [(3, 1), (4, 4), (3, 2)])
def test_operations_of_gradients_skip_the_zeros_between_elements(size: int, stride: int) -> None:
    def loss(w: Any, x: Any) -> Any:
        strides = (stride, stride)
        y = lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=NHWC)
        return (y * y).sum()

    w = jax.ShapeDtypeStruct((size, size, 8, 16), jnp.float32)
    gradients = jax.grad(loss, argnums=(0, 1))
    planned = sw.PartitionManager(sw.Strategy.preset("ddp"), mesh=sw.abstract_mesh("dp:1"))
    operations = planned.plan(gradients, w, X).walked.flops
    compiled = jax.jit(gradients).lower(w, X).compile().cost_analysis()["flops"]
    assert 0.8 <= operations / compiled <= 1.5


def strided(w: Any, x: Any) -> Any:
    return lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=NHWC)


def valid(w: Any, x: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=NHWC)


def largest(size: int, stride: int) -> Any:
    def function(w: Any, x: Any) -> Any:
        window, strides = (1, size, size, 1), (1, stride, stride, 1)
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, "SAME") * w[0, 0, 0]

    return function


@pytest.mark.full(but=["fsdp:2,sp:2,tp:2"])
@pytest.mark.parametrize("mesh", ["fsdp:2,sp:4", "fsdp:2,sp:2,tp:2"])
def test_rows_of_neighbors_are_permuted(mesh: str) -> None:
    """Where rows and columns of images are sharded; parts of `valid` are not equal."""
    pm = sw.PartitionManager(sw.Strategy.loads(SPATIAL.format("-")), mesh=sw.create_mesh(mesh))
    images = (sw.BATCH, "height", "channels", sw.EMPTY)
    x = sw.ArraySpec((4, 32, 16, 8), jnp.float32, images)
    whole = (sw.EMPTY,) * 4
    different = {}
    for name, function, shape, outputs in [
        ("padded", padded, (3, 3, 8, 16), images),
        ("padded by 2", padded, (5, 5, 8, 16), images),
        ("strided", strided, (7, 7, 8, 16), images),
        ("patches", patches, (4, 4, 8, 32), images),
        ("depthwise", depthwise, (3, 3, 1, 8), images),
        ("max of overlapping windows", largest(3, 2), (1, 1, 1, 8), images),
        ("gradient of padded", padded, (3, 3, 8, 16), (whole, images)),
        ("gradient of strided", strided, (7, 7, 8, 16), (whole, images)),
        ("gradient of valid", valid, (3, 3, 8, 16), (whole, images)),
        ("gradient of depthwise", depthwise, (3, 3, 1, 8), (whole, images)),
        ("gradient of a max", largest(2, 2), (1, 1, 1, 8), (whole, images)),
    ]:

        def loss(w: Any, x: Any, function: Any = function) -> Any:
            return jnp.sum(jnp.tanh(function(w, x)) ** 2)

        program = jax.grad(loss, (0, 1)) if outputs[0] is whole else function
        w = sw.ArraySpec(shape, jnp.float32, whole)
        report = pm.plan(program, _shape(w), _shape(x), specs=(whole, images), outputs=outputs)
        sent = compiled_bytes(pm, program, [pm.abstract(w), pm.abstract(x)], outputs)
        # Doubts are those of every gradient of a kernel.
        doubts = {choice.fix for choice in report.walked.choices} - LAYOUT_FIXES
        if planned_bytes(report) != sent or doubts:
            different[name] = planned_bytes(report), sent, doubts
    assert not different


def test_returned_rows_that_do_not_divide_are_gathered() -> None:
    """XLA returns such a dim whole, and gathers its padding too; used further, it stays sharded."""
    pm = sw.PartitionManager(sw.Strategy.loads(SPATIAL.format("-")), mesh=sw.create_mesh("sp:4"))
    images, whole = (sw.EMPTY, "height", sw.EMPTY, sw.EMPTY), (sw.EMPTY,) * 4
    x = sw.ArraySpec((4, 32, 16, 8), jnp.float32, images)
    w = sw.ArraySpec((3, 3, 8, 8), jnp.float32, whole)

    def shifted(w: Any, x: Any) -> Any:
        padding = ((-1, 1), (0, 0))
        return lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=NHWC)

    def pooled(w: Any, x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 3, 3, 1), "VALID")

    def used(w: Any, x: Any) -> Any:
        return valid(w, x).mean(1)

    different = {}
    for function, gathers in ((valid, True), (shifted, True), (pooled, True), (used, False)):
        report = pm.plan(function, _shape(w), _shape(x), specs=(whole, images))
        sent = compiled_bytes(pm, function, [pm.abstract(w), pm.abstract(x)])
        assert (("all_gather", ("sp",)) in sent) == gathers
        if planned_bytes(report) != sent or report.walked.choices:
            different[function.__name__] = planned_bytes(report), sent, report.walked.choices
    assert not different


def test_returned_rows_over_two_mesh_axes_that_do_not_divide_are_marked() -> None:
    text = SPATIAL.format("-").replace('"sp"', '"fsdp+sp"')
    pm = sw.PartitionManager(sw.Strategy.loads(text), mesh=sw.abstract_mesh("fsdp:2,sp:4"))
    images, whole = (sw.EMPTY, "height", sw.EMPTY, sw.EMPTY), (sw.EMPTY,) * 4
    x = jax.ShapeDtypeStruct((4, 32, 16, 8), jnp.float32)
    w = jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float32)
    report = pm.plan(valid, w, x, specs=(whole, images))
    assert {choice.mesh_axis for choice in report.walked.choices} == {"fsdp", "sp"}


@pytest.mark.parametrize("function", [valid, largest(3, 3)])
def test_columns_are_sent_of_the_rows_that_windows_span(function: Any) -> None:
    pm = sw.PartitionManager(
        sw.Strategy.loads(SPATIAL.format("-")), mesh=sw.create_mesh("sp:2,tp:4")
    )
    images, whole = (sw.EMPTY, "height", "channels", sw.EMPTY), (sw.EMPTY,) * 4
    x = sw.ArraySpec((4, 32, 32, 8), jnp.float32, images)
    w = sw.ArraySpec((3, 3, 8, 8), jnp.float32, whole)

    def total(w: Any, x: Any) -> Any:
        return function(w, x).sum()

    report = pm.plan(total, _shape(w), _shape(x), specs=(whole, images))
    assert not report.walked.choices
    sent = compiled_bytes(pm, total, [pm.abstract(w), pm.abstract(x)])
    assert planned_bytes(report) == sent


def _shape(spec: sw.ArraySpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype)


@pytest.mark.parametrize("mesh", ["fsdp:8", "fsdp:2"])
def test_gradient_of_overlapping_maxima_is_marked(mesh: str) -> None:
    """Also where each part has the rows that the windows of its neighbor reach."""
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=sw.abstract_mesh(mesh))

    def loss(x: Any) -> Any:
        return jnp.sum(largest(3, 2)(jnp.ones((1, 1, 1, 8)), x))

    report = pm.plan(jax.grad(loss), X, specs=((sw.EMPTY, sw.BATCH, sw.EMPTY, sw.EMPTY),))
    assert {choice.mesh_axis for choice in report.walked.choices} == {"fsdp"}


@pytest.mark.parametrize(("size", "stored", "warned"), [(3, "tp", 1), (3, "-", 0), (1, "tp", 0)])
def test_xla_may_compute_sharded_space_and_channels_wrongly(
    size: int, stored: str, warned: int
) -> None:
    """A plan warns of exactly the case that XLA computes wrongly.

    If a case of this test fails because the values agree, this JAX is right, and the warning can
    be removed for it.
    """
    images, results = (sw.BATCH, "height", sw.EMPTY, sw.EMPTY), (*IMAGES[:1], "height", sw.EMPTY)
    axes = (sw.EMPTY, sw.EMPTY, sw.EMPTY, "kernel_channels")
    strategy = sw.Strategy.loads(SPATIAL.format(stored))

    def function(w: Any, x: Any) -> Any:
        return sw.shard(padded(w, x), *results, "channels")

    draw = np.random.default_rng(0)
    w = draw.normal(size=(size, size, 3, 16)).astype(np.float32)
    x = draw.normal(size=(8, 16, 16, 3)).astype(np.float32)
    pm = sw.PartitionManager(strategy, mesh=sw.create_mesh("fsdp:2,sp:2,tp:2"))
    report = pm.plan(function, w, x, specs=(axes, images))
    assert sum("spatial_and_channel" in each.fix for each in report.walked.choices) == warned
    with pm:
        placed = pm.shard(w, *axes, role="param"), pm.shard(x, *images)
        actual = np.asarray(jax.jit(function)(*placed))
    ratio = np.median(actual / np.asarray(jax.jit(padded)(w, x)))
    assert ratio == pytest.approx(2 if warned else 1, rel=1e-3)


@pytest.mark.full(but=["sizes0-3-1-True", "sizes4-1-1-False"])
@pytest.mark.parametrize(
    ("sizes", "size", "stride", "wrong"),
    [
        ((2, 2, 2), 3, 1, True),
        ((2, 2, 2), 3, 2, True),
        ((1, 4, 2), 3, 1, True),  # the forward pass is right
        ((1, 2, 4), 3, 1, True),
        ((2, 2, 2), 1, 1, False),
        ((2, 4, 1), 3, 1, False),
        ((4, 1, 2), 3, 1, False),
    ],
)
def test_xla_may_compute_such_gradients_wrongly(
    sizes: tuple[int, int, int], size: int, stride: int, *, wrong: bool
) -> None:
    """The kernel's gradient is wrong where rows and channels are sharded and the window is larger.

    If a case fails because the gradient is right, this JAX is right, and the warning can go.
    """
    mesh = ",".join(f"{axis}:{n}" for axis, n in zip(("fsdp", "sp", "tp"), sizes, strict=True))
    axes = (sw.EMPTY, sw.EMPTY, sw.EMPTY, "kernel_channels")
    images = (sw.BATCH, "height", sw.EMPTY, sw.EMPTY)

    def gradient(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            y = lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=NHWC)
            return jnp.sin(sw.shard(y, *images[:3], "channels")).sum()

        return jax.grad(loss)(w)

    draw = np.random.default_rng(0)
    w = draw.normal(size=(size, size, 16, 16)).astype(np.float32)
    x = draw.normal(size=(8, 16, 16, 16)).astype(np.float32)
    strategy = sw.Strategy.loads(SPATIAL.format("tp"))
    pm = sw.PartitionManager(strategy, mesh=sw.create_mesh(mesh))
    report = pm.plan(gradient, w, x, specs=(axes, images))
    assert any("spatial_and_channel" in each.fix for each in report.walked.choices) == wrong
    with sw.PartitionManager(strategy, mesh=sw.create_mesh("fsdp:1")):
        expected = np.asarray(jax.jit(gradient)(w, x))
    with pm:
        placed = pm.shard(w, *axes, role="param"), pm.shard(x, *images)
        actual = np.asarray(jax.jit(gradient)(*placed))
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert (error > 0.1) == wrong, error


def test_other_sharded_dims_of_such_a_convolution_stay_doubts() -> None:
    """A width and channels compete for tp, beside a height that XLA may compute wrongly."""
    strategy = sw.Strategy.loads(SPATIAL.format("tp"))
    pm = sw.PartitionManager(strategy, mesh=sw.abstract_mesh("fsdp:2,sp:2,tp:2"))
    w = jax.ShapeDtypeStruct((3, 1, 8, 16), jnp.float32)
    axes = (sw.EMPTY, sw.EMPTY, sw.EMPTY, "kernel_channels")
    images = (sw.BATCH, "height", "channels", sw.EMPTY)
    report = pm.plan(padded, w, X, specs=(axes, images))
    doubts = {each.mesh_axis: each.fix for each in report.walked.choices}
    assert "spatial_and_channel" in doubts["sp"]
    assert doubts["tp"].startswith("annotate the result")
    # Where windows reach beyond the neighbors, the height is gathered, which is no second doubt.
    tall = jax.ShapeDtypeStruct((2 * X.shape[1] - 1, 1, 8, 16), jnp.float32)
    report = pm.plan(padded, tall, X, specs=(axes, images))
    (doubt,) = [each.fix for each in report.walked.choices if each.mesh_axis == "sp"]
    assert "spatial_and_channel" in doubt
