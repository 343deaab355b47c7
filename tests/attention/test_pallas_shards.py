"""Kernels that JAX cannot differentiate: kv heads per shard, and sums of shared gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.attention.call import (
    Arithmetic,
    AttentionCall,
    JointSpecs,
    KVHeads,
    Operands,
    Result,
)
from shardwright.attention.kernels import blockwise, vanilla
from shardwright.attention.masks import MaskRules
from shardwright.attention.parts.shards import run_opaque
from shardwright.testing import assert_collectives, cpu_mesh
from tests.attention.conformance import QUICK
from tests.attention.operands import floats, make_operands, without

# Minutes of compiling: the conformance table has a few cells of every implementation by default.
pytestmark = pytest.mark.full

RECIPE = Arithmetic(scale=0.3, mask=MaskRules(causal=True), q_block=8, kv_block=8)
SIZES: dict[str, Any] = {"batch": 4, "q_length": 16, "kv_length": 16, "head_dim": 8, "v_dim": 6}
SPLITS = {
    "same": ("dp:2,tp:4", (8, 4), JointSpecs(batch=("dp",), heads=("tp",), kv_heads=("tp",))),
    "one each": (
        "dp:2,tp:4",
        (8, 2),
        JointSpecs(batch=("dp",), heads=("tp",), grouping=KVHeads.INDEX),
    ),
    "prefix": (
        "ep:2,tp:4",
        (8, 2),
        JointSpecs(heads=("ep", "tp"), kv_heads=("ep",), grouping=KVHeads.PREFIX),
    ),
    "whole groups": (
        "dp:2,tp:2",
        (8, 8),
        JointSpecs(batch=("dp",), heads=("tp",), grouping=KVHeads.INDEX),
    ),
    "groups cut in two": (
        "dp:2,tp:2",
        (6, 3),
        JointSpecs(batch=("dp",), heads=("tp",), grouping=KVHeads.INDEX),
    ),
    "an axis of no use": ("ep:2,tp:2", (6, 3), JointSpecs(heads=("tp",), grouping=KVHeads.INDEX)),
    "no axis at all": ("ep:2,tp:2", (4, 2), JointSpecs()),
}


def operands(**heads: int) -> Operands:
    arrays = make_operands(**SIZES, **heads)
    return without(
        arrays, "mask", "q_segment_ids", "kv_segment_ids", "seed", "batch_index", "head_index"
    )


def call_of(name: str, *, dtype: str = "float32") -> AttentionCall:
    mesh, (heads, kv_heads), specs = SPLITS[name]
    return AttentionCall(
        **SIZES,
        heads=heads,
        kv_heads=kv_heads,
        dtype=dtype,
        mode="__train__",
        recipe=RECIPE,
        sinks=True,
        specs=specs,
        mesh=cpu_mesh(mesh),
    )


def gradients(attend: Any, given: Operands) -> Any:
    def loss(arrays: dict[str, Any]) -> Any:
        return jnp.sum(jnp.sin(attend(given.replace(**arrays)).astype(jnp.float32)))

    return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(floats(given))


def attend(shard: Operands) -> Result:
    return Result(o=blockwise.attend(shard, RECIPE)[0])


@pytest.mark.parametrize("name", SPLITS)
def test_each_shard_reads_the_kv_heads_of_its_queries(name: str) -> None:
    call = call_of(name)
    given = operands(heads=call.heads, kv_heads=call.kv_heads)
    actual = gradients(lambda x: run_opaque(attend, x, call).o, given)
    wanted = gradients(lambda x: vanilla.attend(x, RECIPE).o, given)
    np.testing.assert_allclose(actual[0], wanted[0], rtol=1e-5)
    for gradient in wanted[1]:
        np.testing.assert_allclose(
            actual[1][gradient], wanted[1][gradient], rtol=1e-5, atol=1e-5, err_msg=gradient
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_shared_gradients_are_sent_in_float32(
    dtype: str,
) -> None:
    call = call_of("one each", dtype=dtype)
    given = operands(heads=call.heads, kv_heads=call.kv_heads)
    given = without(given, "bias").replace(
        **{name: getattr(given, name).astype(dtype) for name in ("q", "k", "v")}
    )
    assert call.mesh is not None
    where = call.specs.operands(given)
    laid = {
        name: jax.device_put(x, jax.NamedSharding(call.mesh, getattr(where, name)))
        for name, x in floats(given).items()
    }

    def both(laid: dict[str, Any], do: jax.Array) -> Any:
        o, pull_back = jax.vjp(lambda laid: run_opaque(attend, given.replace(**laid), call).o, laid)
        return o, pull_back(do)

    do = jax.device_put(
        jnp.ones((4, 16, call.heads, 6), dtype), jax.NamedSharding(call.mesh, call.specs.output)
    )
    lowered = jax.jit(both, compiler_options=QUICK).lower(laid, do)
    of_keys, of_sinks = 4 * 2 * 16 * 2 * (8 + 6), 4 * 8 // 4
    assert_collectives(lowered, all_reduce=range(1, 3), bytes=of_keys, axis="tp", mesh=call.mesh)
    assert_collectives(
        lowered, all_reduce=range(1, 4), bytes=of_keys + of_sinks, mesh=call.mesh, only=True
    )
