"""Ragged matmuls outside of `shard_map`: what a plan states, and what XLA sends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import shardwright as sw
from shardwright.plan import Program
from shardwright.plan.verify.run import verify_plan
from tests.plan.against_xla import compiled_bytes, planned_bytes
from tests.tpu_compile import MARKS

STRATEGY = sw.Strategy.loads(
    """
    version = 1
    [axes]
    rows = "tokens, ordered by expert"
    inner = "features that are summed"
    outer = "features of the result"
    [rules]
    rows = "dp"
    inner = "tp"
    outer = "tp"
    expert = "ep"
    """
)
NO = sw.EMPTY
# Axes of the rows, of the matrices, and of the result.
ON_ALL = {
    "outer": ((NO, NO), (NO, NO, "outer"), (NO, "outer")),
    "inner of both": ((NO, "inner"), (NO, "inner", NO), (NO, NO)),
    "inner of the matrices": ((NO, NO), (NO, "inner", NO), (NO, NO)),
}
ON_TPU = {
    "inner of the rows": ((NO, "inner"), (NO, NO, NO), (NO, NO)),
    "rows": (("rows", NO), (NO, NO, NO), ("rows", NO)),
    "rows and outer": (("rows", NO), (NO, NO, "outer"), ("rows", "outer")),
    "experts": ((NO, NO), (sw.EXPERT, NO, NO), (NO, NO)),
}


def loss(x: Any, w: Any, sizes: Any) -> Any:
    return jnp.sum(jnp.tanh(lax.ragged_dot(x, w, sizes)) ** 2)


def program(axes: Any, *, grad: bool, size: int = 16) -> Program:
    x, w, result = axes
    shapes = (
        jax.ShapeDtypeStruct((64 * size, 2 * size), jnp.float32),
        jax.ShapeDtypeStruct((8, 2 * size, 4 * size), jnp.float32),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    function = jax.grad(loss, (0, 1)) if grad else lax.ragged_dot
    return Program(function, shapes, (x, w, (NO,)), (x, w) if grad else result)


def test_plan_equals_the_program_for_cpus() -> None:
    pm = sw.PartitionManager(STRATEGY, mesh=sw.create_mesh("dp:2,ep:2,tp:2"))
    different = {}
    for name, axes in ON_ALL.items():
        for grad in (False, True):
            own = program(axes, grad=grad)
            report = pm.plan(own.function, *own.shapes, specs=own.specs, outputs=own.outputs)
            arguments = [
                pm.abstract(sw.ArraySpec(shape.shape, shape.dtype, each))
                for shape, each in zip(own.shapes, own.specs, strict=True)
            ]
            sent = compiled_bytes(pm, own.function, arguments, own.outputs)
            assert report.walked.complete
            if planned_bytes(report) != sent or report.walked.choices:
                different[name, grad] = planned_bytes(report), sent
    assert not different


def test_rows_and_experts_are_marked() -> None:
    """CPUs keep them sharded."""
    pm = sw.PartitionManager(STRATEGY, mesh=sw.abstract_mesh("dp:2,ep:2,tp:2"))
    own = program((("rows", NO), (sw.EXPERT, NO, NO), ("rows", NO)), grad=False)
    report = pm.plan(own.function, *own.shapes, specs=own.specs, outputs=own.outputs)
    assert {choice.mesh_axis for choice in report.walked.choices} == {"dp", "ep"}


def test_operations_are_those_of_one_matrix_for_each_row() -> None:
    pm = sw.PartitionManager(STRATEGY, mesh=sw.abstract_mesh("dp:1"))
    own = program(ON_ALL["outer"], grad=False)
    report = pm.plan(own.function, *own.shapes)
    rows, inner = own.shapes[0].shape
    assert report.walked.flops == 2 * rows * inner * own.shapes[1].shape[2]


class TestOnTpu:
    pytestmark = MARKS

    def test_plan_equals_the_program_for_tpus(self) -> None:
        pm = sw.PartitionManager(STRATEGY, mesh=sw.abstract_mesh("dp:2,ep:2,tp:2"))
        different = {}
        for name, axes in (ON_ALL | ON_TPU).items():
            for grad in (False, True):
                found = verify_plan(pm, program(axes, grad=grad, size=128), topology="v5e:2x4")
                if not all(row.equal for row in found.traffic):
                    different[name, grad] = found.traffic
        assert not different
