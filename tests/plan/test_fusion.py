"""Values that compilers for TPUs do not hold, and what they hold in addition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.plan.walk.entries import TEMPORARY, Buffer, Entry, Peak
from shardwright.plan.walk.fusion import Fusion, find_reads, fused_buffers
from shardwright.plan.walk.liveness import Timeline

BF16, F32 = jnp.bfloat16, jnp.float32
KIB = 2**10


def memory(function: Callable[..., Any], *shapes: Any, **options: Any) -> Peak:
    """Return the memory of a program on one device of eight."""
    mesh = options.pop("mesh", "fsdp:8")
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=sw.abstract_mesh(mesh))
    peak: Peak = pm.plan(function, *shapes, **options).memory
    return peak


def shape(*sizes: int, dtype: Any = F32) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def test_slices_of_a_stack_are_read_in_place() -> None:
    def total(stack: Any) -> Any:
        return jax.lax.scan(lambda sums, x: (sums + jnp.exp(x).sum(), None), jnp.zeros(()), stack)[
            0
        ]

    stack = 16 * 64 * 64 * 4
    assert memory(total, shape(16, 64, 64)).high < stack + KIB


def test_stacked_results_are_written_where_they_are_made() -> None:
    def made(x: Any, weights: Any) -> Any:
        return jax.lax.scan(lambda x, w: (x, x @ w), x, weights)[1]

    x, weights, results = (n * 128 * 128 * 4 for n in (1, 4, 4))
    peak = memory(made, shape(128, 128), shape(4, 128, 128))
    assert (peak.low, peak.high) == (x + weights + results,) * 2


@pytest.mark.parametrize(("slices", "most"), [(0, 10), (1, 16)])
def test_value_of_a_slice_is_made_once_for_two_matmuls(slices: int, most: int) -> None:
    """As the gradient of a gate, which takes its derivative from a stack of the forward pass."""

    def buffer(*operands: Buffer) -> Buffer:
        return Buffer(size=8, kind=TEMPORARY, operands=operands)

    gradient = Buffer(size=8, kind=TEMPORARY)
    stacked = [buffer() for _ in range(slices)]
    value = buffer(gradient, *stacked)
    timeline = Timeline()
    timeline.add(births=[gradient, *stacked])
    timeline.add([gradient, *stacked], [value])
    results = [Buffer(size=1, kind=TEMPORARY) for _ in range(2)]
    for result in results:
        timeline.add([value], [result], matmul=True)
    assert timeline.peak(results, within=True).high == most


def test_results_without_a_donated_argument_count_from_the_start() -> None:
    def step(w: Any, x: Any) -> Any:
        return w + (jnp.tanh(x @ x) @ x).sum()

    arguments, size = (shape(128, 128), shape(128, 128)), 128 * 128 * 4
    own, donated = (memory(step, *arguments, donated=given).high for given in ((), (0,)))
    assert (own, donated) == (5 * size, 4 * size)


def buffer(size: int, *operands: Buffer, **options: Any) -> Buffer:
    return Buffer(size=size, kind=TEMPORARY, operands=operands or None, min_bytes=size, **options)


def entry(uses: tuple[Buffer, ...], birth: Buffer, *, matmul: bool = False) -> Entry:
    return Entry(
        uses=uses,
        births=(birth,),
        in_place=(),
        inner=Peak(),
        loop=False,
        matmul=matmul,
        moved=0,
        parts=0,
        early=False,
    )


@pytest.mark.parametrize(("row", "held"), [(2**20, True), (2**24, False)])
def test_exponentials_are_held_where_a_kernel_has_whole_rows(row: int, held: bool) -> None:
    """Those of scores of attention are, and those of logits of a large vocabulary are not."""
    scores = Buffer(size=16, kind=TEMPORARY, row=row)
    weights = buffer(32, scores, costly=True, reduced=True)
    total, result = buffer(1), buffer(0)
    entries = [
        entry((), scores, matmul=True),
        entry((scores,), weights),
        entry((weights,), total),
        entry((weights, total), result),
    ]
    reads = find_reads(entries, [result], ())
    assert (weights not in fused_buffers(entries, reads, Fusion.NARROW)) == held
    assert (weights not in fused_buffers(entries, reads, Fusion.MOST)) == held


@pytest.mark.parametrize("reduced", [False, True])
def test_costly_value_of_a_held_operand(reduced: bool) -> None:
    """Two matmuls compute an activation again, and not a softmax."""
    operand = Buffer(size=32, kind=TEMPORARY)
    value = buffer(32, operand, costly=True, reduced=reduced)
    one, other, result = (Buffer(size=1, kind=TEMPORARY) for _ in range(3))
    entries = [
        entry((), operand, matmul=True),
        entry((operand,), value),
        entry((value,), one, matmul=True),
        entry((value,), other, matmul=True),
        entry((operand, one, other), result, matmul=True),
    ]
    reads = find_reads(entries, [result], ())
    assert (value not in fused_buffers(entries, reads, Fusion.NARROW)) == reduced


def test_softmax_of_grouped_queries_is_not_held() -> None:
    """The transpose of their scores moves the dim that the softmax adds up."""

    def gradient(q: Any, k: Any) -> Any:
        scores = jax.nn.softmax(jnp.einsum("bqgrk,bsgk->bgrqs", q, k).astype(F32))
        return jnp.einsum("bgrqs,bsgk->bqgrk", scores.astype(BF16), k).astype(F32).sum()

    q, k = shape(8, 512, 2, 4, 128, dtype=BF16), shape(8, 512, 2, 128, dtype=BF16)
    specs = ((sw.BATCH, *[sw.EMPTY] * 4), (sw.BATCH, *[sw.EMPTY] * 3))
    scores = 2 * 4 * 512 * 512 * 2
    assert memory(jax.grad(gradient), q, k, specs=specs).low < 2 * scores + scores


def test_value_joins_a_kernel_that_has_all_its_uses() -> None:
    start, end = Buffer(size=32, kind=TEMPORARY), buffer(1)
    twice = buffer(32, start)
    one, other = buffer(32, twice), buffer(32, twice)
    summed = buffer(32, one, other)
    entries = [
        entry((), start, matmul=True),
        entry((start,), twice),
        entry((twice,), one),
        entry((twice,), other),
        entry((one, other), summed),
        entry((summed,), end, matmul=True),
    ]
    reads = find_reads(entries, [end], ())
    assert {twice, one, other, summed} == reads.joined
    assert twice in fused_buffers(entries, reads, Fusion.NARROW)


def test_matmul_with_one_elementwise_use_is_not_held_at_best() -> None:
    x = buffer(8)
    matmul = Buffer(size=32, kind=TEMPORARY, min_bytes=32)
    other, total = buffer(32), buffer(4)
    summed = buffer(32, other, matmul)
    timeline = Timeline()
    timeline.add(births=[x])
    timeline.add([x], [other], matmul=True)
    timeline.add([x], [matmul], matmul=True)
    timeline.add([other, matmul], [summed])
    timeline.add([summed], [total])
    timeline.add([summed, total], [result := buffer(0)])
    assert timeline.peak([result]).low < 32 + 32 <= timeline.peak([result]).high


@pytest.mark.parametrize(
    ("embed", "hidden", "held"),
    [(1024, 1024, False), (1024, 1280, True), (256, 4096, False), (512, 4096, True)],
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_matmul_inside_the_kernel_of_a_weight_gradient(
    embed: int, hidden: int, held: bool, dtype: Any
) -> None:
    """The same eight cases were compiled for v5e: 1.2 million elements of the weight are few."""
    rows = 8192

    def gradient(x: Any, h: Any, g: Any, w: Any) -> Any:
        return x.T @ (jax.nn.silu(h) * (g @ w.T))

    sizes = ((rows, embed), (rows, hidden), (rows, embed), (hidden, embed))
    shapes = [shape(*each, dtype=dtype) for each in sizes]
    peak = memory(gradient, *shapes, mesh="fsdp:1", specs=((sw.BATCH, sw.EMPTY),) * 4)
    elements = sum(each.size for each in shapes) + embed * hidden + held * rows * hidden
    assert peak.low == peak.high == elements * shapes[0].dtype.itemsize


@pytest.mark.parametrize(
    ("parts", "is_result", "held"), [(0, False, False), (1, False, True), (0, True, True)]
)
def test_matmul_inside_a_kernel_needs_one_reader_that_is_no_loop(
    parts: int, is_result: bool, held: bool
) -> None:
    g, h, x, end = buffer(7), buffer(11), buffer(13), buffer(5)
    inner = Buffer(size=100, kind=TEMPORARY, min_bytes=100, weight=10)
    scaled = buffer(100, inner, h)
    timeline = Timeline()
    timeline.add(births=[g, h])
    timeline.add([g], [inner], matmul=True)
    timeline.add([inner, h], [scaled])
    timeline.add(births=[x])
    timeline.add([x, scaled], [end], matmul=True, parts=parts)
    results = [end, inner] if is_result else [end]
    # Inside the kernel, `g` is read instead of the result of the inner matmul.
    assert timeline.peak(results).high == 11 + 13 + 5 + (100 if held else 7)


def test_matmul_inside_the_kernel_of_a_forward_pass_is_held_at_most() -> None:
    """XLA also weighs the time, which no plan knows, so the result counts at the upper end."""

    def forward(x: Any, up: Any, down: Any) -> Any:
        return jnp.tanh(x @ up) @ down

    specs = ((sw.BATCH, sw.EMPTY), (sw.EMPTY, sw.EMPTY), (sw.EMPTY, sw.EMPTY))
    shapes = shape(8192, 1024), shape(1024, 1024), shape(1024, 1024)
    peak = memory(forward, *shapes, mesh="fsdp:1", specs=specs)
    assert (peak.low, peak.high) == (4 * 18 * 2**20, 4 * 26 * 2**20)


def test_table_with_short_rows_is_copied_for_a_lookup() -> None:
    """512 columns over eight devices: the table is stored column by column."""
    copied, whole = (
        memory(
            lambda table, tokens: sw.gather(table, sw.VOCAB, sw.EMBED)[tokens],
            shape(4096, columns, dtype=BF16),
            shape(8, dtype=jnp.int32),
            specs=(sw.ArraySpec((4096, columns), BF16, (sw.VOCAB, sw.EMBED)), (sw.BATCH,)),
        )
        for columns in (512, 1024)
    )
    assert copied.low >= 2 * 4096 * 512 * 2
    assert whole.high < 1.5 * 4096 * 1024 * 2


def test_patches_of_an_image_are_padded() -> None:
    def patches(images: Any) -> Any:
        parts = images.reshape(8, 4, 16, 4, 16, 3).transpose(0, 1, 3, 2, 4, 5)
        return parts.reshape(8, 16, 768) @ jnp.ones((768, 128), BF16)

    padded = 8 * 4 * 4 * 16 * 128 * 3 * 2  # 16 by 16 elements take 16 rows of 128 lanes
    peak = memory(patches, shape(8, 64, 64, 3, dtype=BF16))
    assert padded <= peak.low
    assert 2 * padded <= peak.high


def test_gradient_of_picked_logits_takes_no_memory() -> None:
    def loss(logits: Any, labels: Any) -> Any:
        return jnp.take_along_axis(logits.astype(F32), labels[:, None], -1).sum()

    logits = 64 * 4096 * 2
    given = (shape(64, 4096, dtype=BF16), shape(64, dtype=jnp.int32))
    assert memory(jax.grad(loss), *given).high <= 2 * logits + 4 * KIB
