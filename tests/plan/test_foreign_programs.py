"""Programs in the styles of other authors: a plan without marks equals the compiled program."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.dims.table import reshape
from shardwright.plan.collectives.collective import Kind
from shardwright.plan.planner import PlanReport
from shardwright.plan.walk.factors import fitting, placed, spread
from tests.plan import foreign_programs, held_out_programs
from tests.plan.foreign_programs import PROGRAMS, Compared
from tests.tpu_compile import MARKS, measure

# XLA:CPU does not merge the sums of several matmuls of one value, or the two gradients of a tied
# table, and gathers what `top_k` reads.
NOT_ON_CPUS = {
    "two_inputs_of_one_matmul",
    "llama_block",
    "one_hot_experts",
    "one_hot_experts_trained",
    "dense_experts",
    "tied_heads_over_two_axes",
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


def test_every_exception_is_a_program() -> None:
    assert PROGRAMS.keys() >= NOT_ON_CPUS


@pytest.mark.full(
    but=[
        "scanned_layers",
        "llama_block_with_remat",
        "cross_attention",
        "grouped_queries",
        "prefill",
        "microbatches",
        "dense_experts",
        "tied_heads",
        "low_rank_adapters",
        "megatron_forward",
        "raw_constraints",
        "top_k_of_logits",
        "one_hot_experts",
        "embedding",
        "fused_gate",
    ]
)
@pytest.mark.parametrize("name", [*PROGRAMS, *held_out_programs.PROGRAMS])
def test_memory_is_in_order(name: str) -> None:
    case = (PROGRAMS | held_out_programs.PROGRAMS)[name]
    memory = foreign_programs.plan(case).memory
    assert 0 < memory.sure <= memory.low <= memory.high


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


def test_gradient_of_a_tied_table_moves_like_its_rows() -> None:
    """XLA adds the rows of the lookup to that of the head, in one scatter.

    `TestTPU` compares the same program. A lookup alone gathers nothing, and neither do rows that
    are converted before they are added (libtpu 0.0.42.1).
    """
    tied = PROGRAMS["tied_heads_over_two_axes"]
    table = foreign_programs.spec(8192, 1024, axes=(sw.VOCAB, sw.EMBED), dtype=jnp.float32)

    def converted(w: Any, tokens: Any, _: Any) -> Any:
        held = sw.gather(w["table"], sw.VOCAB, sw.EMBED)
        x = sw.shard(held.astype(jnp.bfloat16)[tokens], HID)
        logits = sw.shard(x.astype(jnp.float32) @ held.T, foreign_programs.LOGITS)
        return foreign_programs.loss_of(logits)

    def gathered(program: foreign_programs.Foreign) -> list[int]:
        events = foreign_programs.plan(program).events
        return [
            event.logical_bytes
            for event in events
            if event.kind is Kind.ALL_GATHER and "tp" in event.mesh_axes
        ]

    rows, columns, itemsize = 8192, 1024 // 4, 2
    assert gathered(tied) == [rows * columns * itemsize]
    assert not gathered(PROGRAMS["embedding_over_two_axes"])
    wide = dataclasses.replace(tied, function=converted, weights={"table": table})
    assert not gathered(wide)


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


def test_dispatch_in_one_matmul_is_marked() -> None:
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


def kinds_of(axes: Any, *shape: int, mesh: str, matmul: bool) -> list[str]:
    """Return the collectives of the gradient of a stored array that is added, or multiplied."""
    weights = {"w": sw.ArraySpec(shape, jnp.float32, axes)}

    def loss(w: Any, x: Any) -> Any:
        w = sw.gather(w["w"], *axes)
        return ((x @ w if matmul else x + w) ** 2).sum()

    rows = (64, 32, shape[0]) if matmul else (64, 32, *shape[-1:])
    x = jax.ShapeDtypeStruct(rows if len(shape) < 3 else (64, *shape[1:]), jnp.float32)
    report = plan(loss, x, HID, weights=weights, preset="fsdp", mesh=mesh)
    marks = ["marked"] if report.walked.choices else []
    return [str(e.kind) for e in report.events if e.kind != "all_gather"] + marks


@pytest.mark.parametrize(
    ("axes", "shape", "mesh", "matmul", "kinds"),
    [
        # A vector is summed whole.
        ((sw.EMBED,), (4096,), "fsdp:4", False, ["all_reduce"]),
        # Rows of an elementwise sum stay along the lanes: 64 numbers are half a tile.
        ((sw.EMPTY, sw.EMPTY, sw.EMBED), (1, 256, 512), "fsdp:8", False, ["all_reduce"]),
        ((sw.EMPTY, sw.EMPTY, sw.EMBED), (1, 256, 512), "fsdp:4", False, ["reduce_scatter"]),
        # A matmul is turned if its other dim is a multiple of 128.
        ((sw.EMPTY, sw.EMBED), (256, 512), "fsdp:8", True, ["reduce_scatter"]),
        ((sw.EMPTY, sw.EMBED), (16, 512), "fsdp:8", True, ["all_reduce"]),
        # Parts of 98 rows are padded to 104.
        ((sw.EMBED, sw.EMPTY), (784, 512), "fsdp:8", True, ["reduce_scatter", "marked"]),
        # Rows of 48 numbers may be laid out along the sublanes.
        ((sw.EMBED, sw.EMPTY), (512, 48), "fsdp:8", True, ["reduce_scatter", "marked"]),
    ],
)
def test_sums_by_layout(
    axes: Any, shape: tuple[int, ...], mesh: str, *, matmul: bool, kinds: list[str]
) -> None:
    assert kinds_of(axes, *shape, mesh=mesh, matmul=matmul) == kinds


def test_rows_of_a_sharded_table_are_summed_under_vmap() -> None:
    """A slice under vmap keeps a dim of size 1, which selects an entry all the same."""
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=sw.abstract_mesh("tp:8"))

    def look_up(table: Any, ids: Any) -> Any:
        return jax.vmap(lambda at: jax.lax.dynamic_index_in_dim(table, at, keepdims=False))(ids)

    shapes = jax.ShapeDtypeStruct((1024, 64), jnp.float32), jax.ShapeDtypeStruct((16,), jnp.int32)
    report = pm.plan(look_up, *shapes, specs=((sw.VOCAB, sw.EMPTY), (sw.EMPTY,)))
    [event] = report.events
    assert (str(event.kind), event.logical_bytes) == ("all_reduce", 16 * 64 * 4)


@pytest.mark.parametrize(
    ("of_one", "names", "marked"),
    [
        ("gathered", "a", False),
        ("gathered", "aa", True),
        ("gathered", "ab", False),
        ("gathered", "aba", True),
        ("gathered each time", "aa", True),
        ("converted each time", "aa", True),
    ],
)
def test_several_lookups_of_one_table_are_marked(of_one: str, names: str, *, marked: bool) -> None:
    table = sw.ArraySpec((512, 64), jnp.float32, (sw.VOCAB, sw.EMBED))
    ids = jax.ShapeDtypeStruct((64, 32), jnp.int32)

    def loss(w: Any, ids: Any) -> Any:
        once = {name: sw.gather(w[name], *table.axes) for name in w}
        total = 0.0
        for at, name in enumerate(names):
            each = once[name]
            if of_one == "gathered each time":
                each = sw.gather(w[name], *table.axes)
            if of_one == "converted each time":
                each = each.astype(jnp.bfloat16)
            total += (each[(ids + at) % 512].astype(jnp.float32) ** 2).sum()
        return total

    report = plan(
        loss,
        ids,
        (sw.BATCH, sw.EMPTY),
        weights=dict.fromkeys(names, table),
        preset="fsdp",
        mesh="fsdp:4,tp:2",
    )
    doubted = {choice.mesh_axis for choice in report.walked.choices if "lookups" in choice.fix}
    assert doubted == ({"fsdp"} if marked else set())


def test_maximum_of_integers_is_sent_as_it_is() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("ddp"), mesh=sw.abstract_mesh("dp:8"))
    ids = jax.ShapeDtypeStruct((64,), jnp.int32)
    report = pm.plan(lambda x: jnp.max((x != 0).astype(jnp.int32)) + 1, ids, specs=((sw.BATCH,),))
    assert [event.dtype for event in report.events] == ["int32"]


@pytest.mark.parametrize(
    ("dims", "old", "new", "expected"),
    [
        ((("y", "z"),), (8,), (4, 2), (("y",), ("z",))),
        ((("y",), ("z",)), (4, 2), (8,), (("y", "z"),)),
        ((("y", "z"),), (16,), (2, 8), ((), ())),
        ((("y",), ("z",)), (8, 2), (16,), (("y",),)),
        ((("z", "y"),), (16,), (2, 8), (("z",), ("y",))),
    ],
)
def test_mesh_axes_are_shared_out_to_split_dims(
    dims: Any, old: Any, new: Any, expected: Any
) -> None:
    sizes, known = {"y": 4, "z": 2}, reshape(old, new)
    order = fitting(known, placed(known, known.operands[0], dims, sizes), sizes)
    assert spread(known, known.results[0], order, sizes) == expected
