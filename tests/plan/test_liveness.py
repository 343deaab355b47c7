"""Live memory: counts worked out by hand, and the compiler's own account as a bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.plan.fit import Verdict, judge
from shardwright.plan.planner import PlanReport
from shardwright.plan.walk.buffers import add_local
from shardwright.plan.walk.entries import TEMPORARY, Buffer, Peak
from shardwright.plan.walk.liveness import Timeline
from shardwright.testing import cpu_mesh

HIDDEN = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
BATCH, LENGTH, EMBED, INNER, LAYERS = 8, 16, 64, 128, 3
F32 = 4
X = jax.ShapeDtypeStruct((BATCH, LENGTH, EMBED), jnp.float32)
UP = sw.ArraySpec((EMBED, INNER), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE))
STACKED = sw.ArraySpec(
    (LAYERS, EMBED, EMBED), jnp.float32, (sw.EMPTY, sw.EMBED, sw.MLP_INTERMEDIATE)
)
LAYER = sw.ArraySpec((EMBED, EMBED), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE))
# Bytes of the input and of a hidden state on each of 8 devices along fsdp.
HELD = BATCH * LENGTH * EMBED * F32 // 8


def buffer(size: int, *operands: Buffer, fused: bool = False) -> Buffer:
    return Buffer(size=size, kind=TEMPORARY, operands=operands if fused else None, min_bytes=size)


def shape(spec: sw.ArraySpec) -> Any:
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype)


def plan(
    function: Callable[..., Any], *shapes: Any, mesh: Any = None, **options: Any
) -> PlanReport:
    abstract = sw.abstract_mesh("fsdp:8")
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=mesh or abstract)
    report: PlanReport = pm.plan(function, *shapes, **options)
    return report


def test_peak_is_most_that_is_alive() -> None:
    a, b, c = buffer(10), buffer(20), buffer(5)
    timeline = Timeline()
    timeline.add(births=[a])
    timeline.add([a], [b])
    timeline.add([b], [c], moved=4)
    # a dies when b is made; b is read while c is made. The memory of c is taken from the start.
    assert timeline.peak([c]) == Peak(sure=5, low=35, high=35, kinds={TEMPORARY: 35})
    assert timeline.peak([c], kept=[a]).high == 10 + 20 + 5 + 4


def test_fused_value_keeps_its_operands() -> None:
    a, b, c = buffer(10), buffer(20), buffer(30)
    d, e = buffer(25, a, b, fused=True), buffer(1)
    timeline = Timeline()
    timeline.add(births=[a, b])
    timeline.add([a, b], [d])
    timeline.add([], [c])
    timeline.add([d, c], [e])
    assert timeline.peak([e]).high == 10 + 20 + 30 + 1
    timeline.add([d], [buffer(0)])  # a second use: the value is held
    assert timeline.peak([e]).high == 25 + 30 + 1


def test_value_with_several_uses_is_fused_if_its_operands_are_smaller() -> None:
    a = buffer(10)
    b, c = buffer(20, a, fused=True), buffer(1)
    timeline = Timeline()
    timeline.add(births=[a])
    timeline.add([a], [b])
    timeline.add([b], [c])
    timeline.add([b, c], [buffer(0)])
    assert timeline.peak([c]).high == 10 + 1


def test_value_that_is_also_reduced_is_held() -> None:
    """As the exponentials of a softmax: their sum is needed before they are divided."""

    def softmax(x: Any) -> Any:
        exponentials = jnp.exp(x.astype(jnp.float32))
        return exponentials / exponentials.sum(-1, keepdims=True)

    x = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    size = 64 * 128
    exponentials, result = size * F32, size * F32
    sums = 64 * F32
    assert plan(softmax, x).memory.high == size * 2 + exponentials + sums + result
    assert plan(lambda x: softmax(x) @ jnp.ones((128, 128)), x).memory.high > exponentials + result


def test_chain_of_fused_values_overwrites_its_start_at_best() -> None:
    """As the gradient of logits: it is a chain that starts with the logits, and has two uses."""
    logits, total = buffer(100), buffer(1)
    shifted = buffer(100, logits, total, fused=True)
    gradient = buffer(100, shifted, fused=True)
    first, second = buffer(3), buffer(4)
    timeline = Timeline()
    timeline.add(births=[logits])
    timeline.add([logits], [total])
    timeline.add([logits, total], [shifted])
    timeline.add([shifted], [gradient])
    timeline.add([gradient], [first])
    timeline.add([gradient], [second])
    actual = timeline.peak([first, second])
    # The memory of both results is taken from the start.
    assert (actual.low, actual.high) == (100 + 3 + 4, 100 + 1 + 100 + 3 + 4)


def test_part_by_part_value_is_not_whole_at_best() -> None:
    gathered, result = Buffer(size=80, kind=TEMPORARY, min_bytes=10), buffer(5)
    timeline = Timeline()
    timeline.add(births=[gathered])
    timeline.add([gathered], [result])
    actual = timeline.peak([result])
    assert (actual.low, actual.high) == (10 + 5, 80 + 5)


@pytest.mark.parametrize(("first", "low"), [(12, 30 + 20), (25, 25 + 30 + 20)])
def test_memory_of_a_later_result_holds_one_value_that_fits(first: int, low: int) -> None:
    start, large, middle, result = buffer(first), buffer(30), buffer(4), buffer(20)
    timeline = Timeline()
    timeline.add(births=[start])
    timeline.add([start], [large])
    timeline.add([large], [middle])
    timeline.add([middle], [result])
    assert timeline.peak([result]).low == low
    assert timeline.peak([result], within=True).low == max(first + 30, 30 + 4)


def test_memory_of_a_later_result_holds_no_argument_and_no_value_twice() -> None:
    argument, start = Buffer(size=4, kind="parameters"), buffer(3)
    large, one, two = buffer(50), buffer(20), buffer(20)
    timeline = Timeline()
    timeline.add(births=[argument])
    timeline.add([argument], [start])
    timeline.add([start], [large])
    timeline.add([large], [one], in_place=[large])
    timeline.add([one], [two])
    # When `large` is made, only `start` is in the memory of a result.
    assert timeline.peak([one, two], kept=[argument]).low == 4 + 50 + 20 + 20


@pytest.mark.parametrize(("recomputes", "low"), [(False, 113), (True, 137)])
def test_gradient_that_frees_a_weight_may_come_first(recomputes: bool, low: int) -> None:
    """XLA's list scheduler runs the equation that frees the most bytes."""
    weight, hidden, cotangent = buffer(32), buffer(8), buffer(64)
    of_weight, of_hidden, result = buffer(33), buffer(8), buffer(1)
    timeline = Timeline()
    timeline.add(births=[weight, hidden, cotangent])
    timeline.add([cotangent, hidden], [of_weight], matmul=True)
    timeline.add([cotangent, weight], [of_hidden], matmul=True)
    timeline.add([of_weight, of_hidden], [result])
    inner = Peak(recomputes=recomputes)
    timeline.add([result], [end := buffer(0)], inner=inner)
    assert timeline.peak([end], within=True).low == low


def test_list_order_counts_bytes_that_the_last_reader_frees() -> None:
    shared, own = buffer(50), buffer(20)
    one, two, end = buffer(10), buffer(10), buffer(0)
    timeline = Timeline()
    timeline.add(births=[shared, own])
    timeline.add([shared], [one], matmul=True)
    timeline.add([own], [two], matmul=True)
    timeline.add([shared, one, two], [end])
    assert timeline.peak([end], within=True).low == 50 + 20 + 10


def test_list_order_puts_fused_values_before_their_readers() -> None:
    first, second, other = buffer(4), buffer(8), buffer(16)
    inner = buffer(4, first, fused=True)
    outer = buffer(4, inner, second, fused=True)
    one, two = buffer(1), buffer(2)
    timeline = Timeline()
    timeline.add(births=[first, second, other])
    timeline.add([other], [two], matmul=True)
    timeline.add([first], [inner])
    timeline.add([inner, second], [outer])
    timeline.add([outer], [one], matmul=True)
    assert timeline.peak([one, two], within=True).low == 4 + 8 + 16 + 2


def test_sine_of_same_positions_is_computed_once_and_early() -> None:
    positions, later = buffer(2), buffer(30)
    timeline = Timeline()
    timeline.add(births=[positions])
    first = timeline.angle("sin", 10, [positions])
    timeline.add([first], [buffer(1)])
    timeline.add(births=[later])
    assert timeline.angle("sin", 10, [buffer(10, positions, fused=True)]) is first
    other = timeline.angle("cos", 10, [positions])
    assert other is not first
    timeline.add([first, other, later], [buffer(3)])
    # The cosine is computed at the start too.
    assert timeline.peak([]).high == 10 + 10 + 30 + 3

    early = Timeline()
    early.add(births=[positions, later])
    early.add([later], [result := buffer(5)])
    angle = early.angle("sin", 10, [positions])
    early.add([angle, result], [buffer(1)])
    assert early.peak([]).high == 2 + 30 + 10 + 5


@pytest.mark.parametrize(("recomputes", "most"), [(False, 41), (True, 23)])
def test_backward_pass_of_a_loop_may_run_first(recomputes: bool, most: int) -> None:
    """Each gradient of a hidden state gives that of a weight, and the one before it."""
    timeline = Timeline()
    timeline.recomputes = recomputes
    later, weights = buffer(10), []
    timeline.add(births=[later])
    for _ in range(3):
        earlier, weight = buffer(10), buffer(1)
        timeline.add([later], [weight], matmul=True)
        timeline.add([later], [earlier], matmul=True)
        weights.append(weight)
        later = earlier
    peak = timeline.peak([*weights, later], within=True)
    assert (peak.high, peak.recomputes) == (most, recomputes)


def test_unread_value_stays_behind_its_operands() -> None:
    """Depth-first, the results of `b` come first, because `b` has more readers."""
    a, b = buffer(10), buffer(30)
    operand = buffer(20, a, fused=True)
    of_b, last = [buffer(1) for _ in range(3)], buffer(1)
    timeline = Timeline()
    timeline.add(births=[a])
    timeline.add([a], [operand])
    timeline.add([a], [b])
    for each in of_b:
        timeline.add([b], [each])
    timeline.add([operand], [buffer(5, operand, fused=True)])
    timeline.add([operand], [last])
    assert timeline.peak([*of_b, last], within=True).high == 10 + 30 + 3


def test_overwritten_operand_is_counted_once() -> None:
    a, b = Buffer(size=10, kind="parameters"), buffer(10)
    timeline = Timeline()
    timeline.add(births=[a])
    timeline.add([a], [b], in_place=[a])
    assert timeline.peak([b]).high == 10
    assert timeline.peak([b], kept=[a]).high == 20


def test_matmul_holds_weight_input_and_result() -> None:
    def f(w: Any, x: Any) -> Any:
        result = sw.shard(x, HIDDEN) @ sw.gather(w, UP)
        return sw.shard(result, sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)

    memory = plan(f, shape(UP), X, specs=(UP, HIDDEN)).memory
    stored, gathered = EMBED * INNER * F32 // 8, EMBED * INNER * F32
    result = BATCH * LENGTH * INNER * F32 // 8
    assert memory.high == stored + HELD + gathered + result
    # Compilers for TPUs gather it whole, too.
    assert memory.low == memory.high
    assert memory.kinds == {
        "parameters": stored,
        "inputs": HELD,
        TEMPORARY: gathered,
        "results": result,
    }


def scanned(w: Any, x: Any) -> Any:
    def body(h: Any, layer: Any) -> Any:
        return sw.shard(jnp.tanh(h @ sw.gather(layer, LAYER)), HIDDEN), None

    h, _ = jax.lax.scan(jax.checkpoint(body), sw.shard(x, HIDDEN), w)
    return (h**2).sum()


def test_scan_stacks_one_hidden_state_per_layer() -> None:
    gradient = plan(jax.grad(scanned), shape(STACKED), X, specs=(STACKED, HIDDEN)).memory
    weights = LAYERS * EMBED * EMBED * F32 // 8
    # The stacked inputs of the layers, the carry, and the gradients stacked by the second scan.
    assert gradient.low >= weights + HELD + LAYERS * HELD
    assert gradient.kinds["loops"] >= LAYERS * HELD + weights


@pytest.mark.full(but=["scanned1"])
@pytest.mark.parametrize("function", [jax.grad(scanned), scanned])
def test_low_end_is_below_the_compiler(function: Any) -> None:
    mesh = cpu_mesh("fsdp:8")
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=mesh)
    arguments = (
        jax.ShapeDtypeStruct(STACKED.shape, STACKED.dtype, sharding=pm.sharding(STACKED)),
        jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=pm.sharding(HIDDEN, shape=X.shape)),
    )
    with pm:
        compiled = jax.jit(function).lower(*arguments).compile()
    sizes = compiled.memory_analysis()
    needed = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + sizes.output_size_in_bytes
    memory = plan(function, shape(STACKED), X, specs=(STACKED, HIDDEN), mesh=mesh).memory
    assert memory.low <= needed
    assert sizes.argument_size_in_bytes <= memory.low <= memory.high


def test_donated_argument_is_overwritten() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * x

    arguments = (jnp.ones((64, 64)), jnp.ones((64, 64)))
    size = 64 * 64 * F32
    assert plan(step, *arguments).memory.high == 3 * size
    assert plan(step, *arguments, donated=(0,)).memory.high == 2 * size


def test_branches_count_the_larger_one() -> None:
    def f(flag: Any, x: Any) -> Any:
        return jax.lax.cond(flag, lambda x: (x @ x) @ x, lambda x: x, x)

    size = 64 * 64 * F32
    high = plan(f, jnp.array(True), jnp.ones((64, 64))).memory.high
    # The argument, the result, and inside the branch two matmuls.
    assert high == 1 + 4 * size


def test_shard_map_counts_local_shapes() -> None:
    mesh = sw.abstract_mesh("fsdp:8")

    def f(x: Any) -> Any:
        inner = jax.shard_map(
            lambda x: jnp.einsum("bd,be->bde", x, x).sum(2),
            mesh=mesh,
            in_specs=jax.P("fsdp"),
            out_specs=jax.P("fsdp"),
        )
        return inner(x)

    given = jax.NamedSharding(mesh, jax.P("fsdp"))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=given)
    local = 64 * 32 * F32 // 8
    assert plan(f, x).memory.high >= 2 * local + 32 * local


@pytest.mark.parametrize(("heads", "copies"), [(2, 1), (1, 0)])
def test_matmul_copies_input_whose_batch_dims_are_not_first(heads: int, copies: int) -> None:
    def high(keys_axes: str) -> int:
        """Return the peak inside a `shard_map` of a matmul with keys in this order."""
        sizes = {"b": 8, "n": heads, "t": 128, "h": 16}
        keys = jnp.zeros([sizes[axis] for axis in keys_axes])
        query = jnp.zeros((8, heads, 16))

        def matmul(keys: Any, query: Any) -> Any:
            masked = jax.jit(jnp.where)(keys > 0, keys, 0)
            return jnp.einsum(f"{keys_axes},bnh->bnt", masked, query)

        jaxpr = jax.make_jaxpr(matmul)(keys, query).jaxpr
        timeline = Timeline()
        results = add_local(jaxpr, [None, None], timeline)
        return timeline.peak([each for each in results if each is not None], within=True).high

    assert high("btnh") - high("bnth") == copies * 8 * heads * 128 * 16 * F32


def test_function_inside_shard_map_is_fused() -> None:
    mesh = sw.abstract_mesh("fsdp:8")

    @jax.jit
    def gelu(x: Any) -> Any:
        return x * jnp.tanh(x)

    def f(x: Any) -> Any:
        inner = jax.shard_map(
            lambda x: gelu(x) @ jnp.ones((32, 32)),
            mesh=mesh,
            in_specs=jax.P("fsdp"),
            out_specs=jax.P("fsdp"),
        )
        return inner(x)

    given = jax.NamedSharding(mesh, jax.P("fsdp"))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=given)
    # The argument and the result: neither ones nor a result of the function.
    assert plan(f, x).memory.high == 2 * (64 * 32 * F32 // 8)


def test_sum_over_devices_may_be_part_by_part() -> None:
    mesh = sw.abstract_mesh("fsdp:8")
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("fsdp")))
    x = jax.ShapeDtypeStruct(
        (128, 64), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P(None, "fsdp"))
    )

    def f(x: Any, w: Any) -> Any:
        return jnp.sum(jnp.square(x @ w), 0)

    memory = plan(f, x, w).memory
    arguments, matmul = (64 * 64 + 128 * 64) * F32 // 8, 128 * 64 * F32
    assert memory.low < arguments + matmul <= memory.high


def through_layers(equation: str, w: Any, x: Any) -> Any:
    def body(x: Any, layer: Any) -> Any:
        return jnp.einsum(equation, x, layer).reshape(x.shape), None

    return jax.lax.scan(body, x, w)[0]


@pytest.mark.parametrize(
    ("equation", "shape", "copies"),
    [
        ("be,efh->bfh", (64, 2, 32), 1),
        ("be,ef->bf", (64, 64), 0),
        ("be,fhe->bfh", (2, 32, 64), 0),
    ],
)
def test_scan_copies_stacked_weights_with_two_dims_after_the_contracted_one(
    equation: str, shape: tuple[int, ...], copies: int
) -> None:
    weight = jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    size = LAYERS * 64 * 64 * F32

    high = plan(lambda w, x: through_layers(equation, w, x), weight, x).memory.high
    assert (1 + copies) * size < high < (1.5 + copies) * size


def test_copy_of_stacked_weights_stays_for_later_loops() -> None:
    weight = jax.ShapeDtypeStruct((LAYERS, 64, 2, 32), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    large = 5000 * 64 * F32

    def between(w: Any, x: Any) -> Any:
        x = through_layers("be,efh->bfh", w, x)
        x = x + jnp.tanh(jnp.ones((5000, 8)) @ x).sum(0)
        return through_layers("bfh,efh->be", w, x.reshape(8, 2, 32))

    size = LAYERS * 64 * 64 * F32
    assert plan(between, weight, x).memory.high >= 2 * size + large


def test_stacked_activations_are_not_copied() -> None:
    def f(x: Any) -> Any:
        def forward(x: Any, _: None) -> tuple[Any, Any]:
            return jnp.tanh(x), x

        def backward(x: Any, kept: Any) -> tuple[Any, None]:
            return jnp.einsum("be,efh->bfh", x, kept).reshape(x.shape), None

        start = x.reshape(64, 2, 32)
        _, stacked = jax.lax.scan(forward, start, length=LAYERS)
        return jax.lax.scan(backward, x[:8], stacked)[0]

    size = 64 * 64 * F32
    assert plan(f, jax.ShapeDtypeStruct((64, 64), jnp.float32)).memory.high < 7 * size


def test_result_with_another_use_is_in_the_lower_end() -> None:
    def both(w: Any, x: Any) -> Any:
        y = x @ w
        return y, jnp.tanh(y)

    size = 1024 * 1024 * F32
    assert plan(both, SQUARE, SQUARE).memory.low >= 4 * size


@pytest.mark.parametrize(
    ("sure", "low", "high", "complete", "verdict"),
    [
        (10, 10, 95, True, Verdict.FITS),
        (10, 10, 96, True, Verdict.CLOSE),
        (100, 110, 200, True, Verdict.CLOSE),
        (100, 111, 200, True, Verdict.DOES_NOT_FIT),
        (101, 101, 101, True, Verdict.DOES_NOT_FIT),
        (10, 10, 20, False, Verdict.CLOSE),
        (101, 101, 200, False, Verdict.DOES_NOT_FIT),
    ],
)
def test_verdict_comes_from_the_range(
    sure: int, low: int, high: int, complete: bool, verdict: Verdict
) -> None:
    peak = Peak(sure=sure, low=low, high=high)
    assert judge(peak, 100, complete=complete) is verdict


SQUARE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
BY_TENSOR = (sw.MLP_INTERMEDIATE, sw.EMPTY)


def of(function: Any, *shapes: Any, specs: Any, outputs: Any = None) -> Peak:
    """The memory of a program with four tensor-parallel devices."""
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=sw.abstract_mesh("dp:2,tp:4"))
    report = pm.plan(function, *shapes, specs=specs, outputs=outputs)
    peak: Peak = report.memory
    return peak


def test_results_that_every_device_makes_are_counted() -> None:
    made = of(lambda: jnp.zeros((1024, 1024)), specs=(), outputs=BY_TENSOR)
    assert (made.sure, made.high) == (1024**2, 1024**2)
    assert made.kinds == {"results": 1024**2}
    whole = of(lambda: jnp.zeros((1024, 1024)), specs=())
    assert whole.high == 4 * 1024**2


def test_gathered_results_are_counted_whole() -> None:
    def double(x: Any) -> Any:
        return x * 2

    gathered = of(double, SQUARE, specs=(BY_TENSOR,), outputs=(sw.EMPTY, sw.EMPTY))
    part = 1024**2  # x, its double before the gather, and four such parts after it
    assert (gathered.sure, gathered.high) == (5 * part, 6 * part)


@pytest.mark.parametrize(("contracted", "held"), [(1024, 4), (16384, 6)])
def test_scattered_results_do_not_hold_their_sums(contracted: int, held: int) -> None:
    """A long matmul adds a sum up part by part. A short one adds it up as a whole."""

    def sums(x: Any, y: Any) -> Any:
        return [sw.shard(x, *reversed(BY_TENSOR)) @ sw.shard(y, BY_TENSOR) for _ in range(8)]

    specs = ((sw.EMPTY, sw.MLP_INTERMEDIATE), BY_TENSOR)
    left, right = (
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((1024, contracted), (contracted, 1024))
    )
    peak = of(sums, left, right, specs=specs, outputs=[BY_TENSOR] * 8)
    part = 1024**2
    # Both inputs, one sum or the parts of it that are sent, and the results.
    assert peak.high == 2 * (contracted // 1024) * part + held * part + 8 * part


@pytest.mark.parametrize(("columns", "held"), [(1002, 2.75), (1024, 2)])
def test_sum_whose_tiles_have_a_large_prime_factor_is_reduced_whole(
    columns: int, held: float
) -> None:
    """XLA cannot scatter 1002 tiles, which are 6 times 167. It all-reduces them."""
    shape = (256, 128 * columns)
    size = 256 * 128 * columns * F32

    def update(x: Any, y: Any, old: Any) -> Any:
        return old - sw.shard(sw.shard(x, BY_TENSOR).T @ sw.shard(y, BY_TENSOR), BY_TENSOR)

    shapes = [jax.ShapeDtypeStruct(each, jnp.float32) for each in ((256, 256), shape, shape)]
    peak = of(update, *shapes, specs=(BY_TENSOR,) * 3, outputs=BY_TENSOR)
    # Shards of two arguments and of the result, and either the sum with its shard, or two sums.
    assert peak.high == pytest.approx(held * size, rel=0.01)


@pytest.mark.parametrize(("mesh", "parts", "copies"), [("tp:4,dp:2", 6, 0), ("tp:8", 8, 1)])
def test_collective_matmul_in_a_loop_copies_its_left_operand(
    mesh: str, parts: int, copies: int
) -> None:
    specs = ((sw.EMPTY, sw.MLP_INTERMEDIATE), BY_TENSOR)
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=sw.abstract_mesh(mesh))
    left = jax.ShapeDtypeStruct((1024, 16384), jnp.float32)
    right = jax.ShapeDtypeStruct((16384, 1024), jnp.float32)
    peak = pm.plan(jnp.matmul, left, right, specs=specs, outputs=BY_TENSOR).memory
    size = 4 * 1024 * 16384 // pm.mesh.shape["tp"]
    part = size // 16
    # Both operands, the parts of the sum, and the result.
    assert peak.high == (2 + copies) * size + parts * part + part


def test_print_takes_no_memory() -> None:
    def print_twice(x: Any) -> Any:
        jax.debug.print("{x}", x=x)
        jax.debug.callback(lambda _: None, x)
        return x @ x

    assert plan(print_twice, SQUARE).memory == plan(lambda x: x @ x, SQUARE).memory


def test_arrays_that_a_program_closes_over_are_counted() -> None:
    mask = np.tril(np.ones((1024, 1024), np.float32))

    def outer(x: Any) -> Any:
        return x * mask

    for function in (outer, jax.jit(outer)):
        peak = of(function, SQUARE, specs=(BY_TENSOR,), outputs=BY_TENSOR)
        assert peak.kinds["constants"] == 4 * 1024**2
        assert peak.sure == 6 * 1024**2


def test_int4_takes_half_a_byte() -> None:
    x = jax.ShapeDtypeStruct((16, 16), jnp.int4)
    assert of(lambda x: x.astype(jnp.int8), x, specs=(None,)).high == 128 + 256


def test_peak_names_the_values_that_are_held() -> None:
    def squares(x: Any) -> Any:
        return [(x @ x.T).sum() for _ in range(3)], x @ x

    peak = of(squares, SQUARE, specs=((sw.EMPTY, sw.EMPTY),))
    [made] = [each for each in peak.live if each.kind == "temporary"]
    assert (made.dtype, made.shape, made.count) == ("float32", (1024, 1024), 1)
    assert made.source.startswith("test_liveness.py:")
    assert sum(each.size for each in peak.live) == peak.high


def test_loops_name_the_values_of_their_bodies() -> None:
    def looped(x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ x) @ x, None), x, None, length=3)[0]

    peak = of(looped, SQUARE, specs=((sw.EMPTY, sw.EMPTY),))
    assert {each.kind for each in peak.live} >= {"inputs", "loops", "temporary"}
    assert sum(each.size for each in peak.live) == peak.high


def test_updated_argument_keeps_its_kind() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=sw.abstract_mesh("dp:2,tp:4"))

    def write(cache: Any, row: Any) -> Any:
        return jax.lax.dynamic_update_slice(cache, row, (0, 0))

    row = jax.ShapeDtypeStruct((1, 1024), jnp.float32)
    kept, donated = (
        pm.plan(
            write, SQUARE, row, specs=(BY_TENSOR, None), holds=("cache", "inputs"), donated=given
        ).memory
        for given in ((), (0,))
    )
    assert donated.kinds == {"cache": 1024**2, "inputs": 4096}
    assert kept.kinds == {"cache": 1024**2, "results": 1024**2, "inputs": 4096}
