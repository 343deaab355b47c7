"""Live memory: counts worked out by hand, and the compiler's own account as a bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.plan.fit import Verdict, judge
from shardwright.plan.planner import PlanReport
from shardwright.plan.walk.buffers import local_peak
from shardwright.plan.walk.liveness import TEMPORARY, Buffer, Peak, Timeline
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
    return Buffer(size=size, kind=TEMPORARY, operands=operands if fused else None)


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
    # a dies when b is made; b is read while c is made.
    assert timeline.peak([c]) == Peak(low=5, high=30, kinds={TEMPORARY: 30})
    assert timeline.peak([c], kept=[a]).high == 10 + 20 + 5 + 4


def test_fused_value_keeps_its_operands() -> None:
    a, b, c = buffer(10), buffer(20), buffer(30)
    d, e = buffer(100, a, b, fused=True), buffer(1)
    timeline = Timeline()
    timeline.add(births=[a, b])
    timeline.add([a, b], [d])
    timeline.add([], [c])
    timeline.add([d, c], [e])
    assert timeline.peak([e]).high == 10 + 20 + 30 + 1
    timeline.add([d], [buffer(0)])  # a second use: the value is held
    assert timeline.peak([e]).high == 100 + 30 + 1


def test_overwritten_operand_is_counted_once() -> None:
    a, b = buffer(10), buffer(10)
    timeline = Timeline()
    timeline.add(births=[a])
    timeline.add([a], [b], in_place=[a])
    assert timeline.peak([b]).high == 10
    assert timeline.peak([b], kept=[a]).high == 20


def test_product_holds_weight_input_and_result() -> None:
    def f(w: Any, x: Any) -> Any:
        result = sw.shard(x, HIDDEN) @ sw.gather(w, UP)
        return sw.shard(result, sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)

    memory = plan(f, shape(UP), X, specs=(UP, HIDDEN)).memory
    stored, gathered = EMBED * INNER * F32 // 8, EMBED * INNER * F32
    result = BATCH * LENGTH * INNER * F32 // 8
    assert memory.high == stored + HELD + gathered + result
    assert memory.low == stored + HELD + result
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
    # The argument, the result, and inside the branch two products.
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
def test_product_copies_input_whose_batch_dims_are_not_first(heads: int, copies: int) -> None:
    def high(keys_axes: str) -> int:
        """Return the peak inside a `shard_map` of a product with keys in this order."""
        sizes = {"b": 8, "n": heads, "t": 128, "h": 16}
        keys = jnp.zeros([sizes[axis] for axis in keys_axes])
        query = jnp.zeros((8, heads, 16))

        def product(keys: Any, query: Any) -> Any:
            masked = jax.jit(jnp.where)(keys > 0, keys, 0)
            return jnp.einsum(f"{keys_axes},bnh->bnt", masked, query)

        return local_peak(jax.make_jaxpr(product)(keys, query).jaxpr).high

    assert high("btnh") - high("bnth") == copies * 8 * heads * 128 * 16 * F32


@pytest.mark.parametrize(
    ("low", "high", "complete", "verdict"),
    [
        (10, 95, True, Verdict.FITS),
        (10, 96, True, Verdict.CLOSE),
        (100, 200, True, Verdict.CLOSE),
        (101, 200, True, Verdict.DOES_NOT_FIT),
        (10, 20, False, Verdict.CLOSE),
        (101, 200, False, Verdict.DOES_NOT_FIT),
    ],
)
def test_verdict_comes_from_the_range(
    low: int, high: int, complete: bool, verdict: Verdict
) -> None:
    assert judge(Peak(low=low, high=high), 100, complete=complete) is verdict
