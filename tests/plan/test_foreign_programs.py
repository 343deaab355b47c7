"""Programs in the styles of other authors: a plan without marks equals the compiled program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.plan.planner import PlanReport
from tests.plan.foreign_programs import PROGRAMS, Compared
from tests.tpu_compile import MARKS, measure

# XLA:CPU does not merge the sums of several products of one value, and gathers what `top_k` reads.
NOT_ON_CPUS = {
    "two_inputs_of_one_matmul",
    "llama_block",
    "one_hot_experts",
    "one_hot_experts_trained",
    "dense_experts",
    "microbatches",
}
MOST_MARKED = 6
HID = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)


def check(compared: Compared) -> None:
    assert compared.marks or not compared.differences, compared


@pytest.mark.full
def test_plan_equals_program_for_cpus() -> None:
    names = sorted(PROGRAMS.keys() - NOT_ON_CPUS)
    compared = measure("tests.plan.foreign_programs", Compared, "--cpu", *names)
    assert [each.name for each in compared] == names
    for each in compared:
        check(each)


def test_there_are_thirty_programs() -> None:
    assert len(PROGRAMS) == 30
    assert PROGRAMS.keys() >= NOT_ON_CPUS


class TestTPU:
    pytestmark = MARKS

    def test_plan_equals_program_for_tpus(self) -> None:
        compared = measure("tests.plan.foreign_programs", Compared)
        assert [each.name for each in compared] == list(PROGRAMS)
        for each in compared:
            check(each)
        assert sum(bool(each.marks) for each in compared) <= MOST_MARKED


def plan(function: Any, x: Any, axes: Any, *, weights: Any, preset: str, mesh: str) -> PlanReport:
    pm = sw.PartitionManager(sw.Strategy.preset(preset), mesh=sw.abstract_mesh(mesh))
    shapes = {name: jax.ShapeDtypeStruct(w.shape, w.dtype) for name, w in weights.items()}
    report: PlanReport = pm.plan(
        jax.grad(function), shapes, x, specs=(weights, axes), outputs=weights
    )
    return report


def test_maximum_is_sent_before_its_conversion() -> None:
    """A TPU takes the maximum of bfloat16 logits before it converts them."""
    logits = (sw.BATCH, sw.VOCAB)
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=sw.abstract_mesh("tp:8"))
    x = jax.ShapeDtypeStruct((16, 1024), jnp.bfloat16)
    for function, dtype in ((jnp.max, "bfloat16"), (jnp.min, "bfloat16"), (jnp.sum, "float32")):
        report = pm.plan(
            lambda x, f=function: jnp.exp(f(x.astype(jnp.float32), -1)), x, specs=(logits,)
        )
        [event] = report.events
        assert (event.dtype, event.logical_bytes) == (dtype, 16 * (2 if dtype[0] == "b" else 4))


def test_constraint_is_not_passed_through_a_reduction() -> None:
    """The gradient of positions is a sum over the batch, which is whole before it is cut.

    `TestTPU` compares the same program. XLA:CPU has an all-reduce in both cases.
    """
    program = PROGRAMS["learned_positions"]
    ((axes, shape, dtype),) = program.inputs
    report = plan(
        program.function,
        jax.ShapeDtypeStruct(shape, dtype),
        axes,
        weights=program.weights,
        preset=program.preset,
        mesh="fsdp:8",
    )
    sums = [str(event.kind) for event in report.events if "reduce" in str(event.kind)]
    assert sums == ["all_reduce"]


@pytest.mark.parametrize(
    ("classes", "width", "kind"),
    [
        (1000, 1024, "all_reduce"),
        (1000, 2048, "reduce_scatter"),
        (1024, 1024, "reduce_scatter"),
        (100, 1024, "reduce_scatter"),
    ],
)
def test_parts_of_a_turned_matrix_are_whole_tiles(classes: int, width: int, kind: str) -> None:
    """The gradient of a classifier: 1000 classes are not a multiple of 128 lanes."""
    weights = {"head": sw.ArraySpec((width, classes), jnp.bfloat16, (sw.EMBED, sw.EMPTY))}

    def loss(w: Any, x: Any) -> Any:
        head = sw.gather(w["head"], sw.EMBED, sw.EMPTY)
        return ((x @ head).astype(jnp.float32) ** 2).sum()

    x = jax.ShapeDtypeStruct((64, width), jnp.bfloat16)
    report = plan(loss, x, (sw.BATCH, sw.EMBED), weights=weights, preset="fsdp", mesh="fsdp:8")
    kinds = [str(event.kind) for event in report.events if event.logical_bytes > 1000]
    assert kinds == ["all_gather", kind]


def test_sum_in_a_loop_that_is_cut_later_is_marked() -> None:
    weights = {"up": sw.ArraySpec((64, 64), jnp.bfloat16, (sw.EMBED, sw.MLP_INTERMEDIATE))}

    def loss(w: Any, x: Any) -> Any:
        up = sw.gather(w["up"], sw.EMBED, sw.MLP_INTERMEDIATE)

        def part(total: Any, x: Any) -> Any:
            return total + ((x @ up).astype(jnp.float32) ** 2).sum(), None

        return jax.lax.scan(part, jnp.zeros(()), x)[0]

    x = jax.ShapeDtypeStruct((4, 16, 64), jnp.bfloat16)
    axes = (sw.EMPTY, sw.BATCH, sw.EMBED)
    report = plan(loss, x, axes, weights=weights, preset="fsdp", mesh="fsdp:8")
    [choice] = report.walked.choices
    assert (choice.mesh_axis, "the loop's body" in choice.fix) == ("fsdp", True)
    report = plan(loss, x, axes, weights=weights, preset="ddp", mesh="dp:8")
    assert not report.walked.choices


def test_dispatch_in_one_product_is_marked() -> None:
    """A one-hot MoE whose slots are constrained to experts only: a TPU gathers, and then sums."""
    pm = sw.PartitionManager(sw.Strategy.preset("moe_ep"), mesh=sw.abstract_mesh("ep:8"))
    sent = jax.ShapeDtypeStruct((16, 32, 8, 4), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((8, 16, 4, 64), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((16, 32, 64), jnp.bfloat16)
    mask = (sw.BATCH, sw.EMPTY, sw.EMPTY, sw.EMPTY)
    expert = (sw.EXPERT, sw.EMPTY, sw.EMPTY, sw.EMPTY)

    def dispatch(sent: Any, x: Any) -> Any:
        return sw.shard(jnp.einsum("bsec,bsd->ebcd", sent, x), expert)

    def combine(sent: Any, slots: Any) -> Any:
        return sw.shard(jnp.einsum("bsec,ebcd->bsd", sent, slots), HID)

    for function, arrays, axes in (
        (dispatch, (sent, x), (mask, HID)),
        (combine, (sent, slots), (mask, expert)),
    ):
        report = pm.plan(function, *arrays, specs=axes)
        assert [choice.mesh_axis for choice in report.walked.choices] == ["ep"]
