"""Convolutions and poolings: what a plan states, and what XLA sends on CPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardwright as sw
from tests.plan.against_xla import compiled_bytes, planned_bytes

IMAGES = (sw.BATCH, sw.EMPTY, sw.EMPTY, sw.EMPTY)
NHWC = ("NHWC", "HWIO", "NHWC")
X = jax.ShapeDtypeStruct((16, 8, 8, 8), jnp.float32)


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


def test_sharded_space_is_marked() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=sw.abstract_mesh("fsdp:8"))
    w, rows = kernel(3, 3, 8, 16), (sw.EMPTY, sw.BATCH, sw.EMPTY, sw.EMPTY)
    for function in (padded, pooled):
        shape = jax.ShapeDtypeStruct(w.shape if function is padded else (1, 1, 1, 8), w.dtype)
        report = pm.plan(function, shape, X, specs=(None, rows))
        assert {choice.mesh_axis for choice in report.walked.choices} == {"fsdp"}


SPATIAL = """
version = 1
[axes]
height = "rows of an image"
channels = "channels that a convolution writes"
kernel_channels = "the same, of its kernel"
[rules]
batch = "fsdp"
height = "sp"
channels = "tp"
kernel_channels = "{}"
"""


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


def test_other_sharded_dims_of_such_a_convolution_stay_doubts() -> None:
    """A width over tp is gathered, beside a height over sp that XLA may compute wrongly."""
    strategy = sw.Strategy.loads(SPATIAL.format("tp"))
    pm = sw.PartitionManager(strategy, mesh=sw.abstract_mesh("fsdp:2,sp:2,tp:2"))
    w = jax.ShapeDtypeStruct((3, 1, 8, 16), jnp.float32)
    axes = (sw.EMPTY, sw.EMPTY, sw.EMPTY, "kernel_channels")
    images = (sw.BATCH, "height", "channels", sw.EMPTY)
    report = pm.plan(padded, w, X, specs=(axes, images))
    doubts = {each.mesh_axis: each.fix for each in report.walked.choices}
    assert "spatial_and_channel" in doubts["sp"]
    assert doubts["tp"].startswith("gather the dim")
