"""Kernels on shards: the kv heads that they read, and gradients of replicated operands."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

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
from shardwright.attention.parts.shards import run_on_shards
from shardwright.testing.meshes import cpu_mesh
from tests.attention.conformance import QUICK
from tests.attention.operands import floats, make_operands, without

# Minutes of compiling: the conformance table has a few cells of every implementation by default.
pytestmark = pytest.mark.full

RECIPE = Arithmetic(scale=0.3, mask=MaskRules(causal=True), q_block=8, kv_block=8)
SIZES: dict[str, Any] = {"batch": 4, "q_length": 16, "kv_length": 16, "head_dim": 8, "v_dim": 6}


def operands(**heads: int) -> Operands:
    return without(
        make_operands(**SIZES, **heads),
        "mask",
        "q_segment_ids",
        "kv_segment_ids",
        "seed",
        "batch_index",
        "head_index",
    )


def gradients(attend: Any, given: Operands) -> Any:
    def loss(arrays: dict[str, Any]) -> Any:
        return jnp.sum(jnp.sin(attend(given.replace(**arrays))))

    return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(floats(given))


def assert_same(actual: Any, wanted: Any) -> None:
    np.testing.assert_allclose(actual[0], wanted[0], rtol=1e-5)
    for name in wanted[1]:
        np.testing.assert_allclose(
            actual[1][name], wanted[1][name], rtol=1e-5, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize(
    ("mesh", "heads", "specs"),
    [
        ("dp:2,tp:4", (8, 4), JointSpecs(batch=("dp",), heads=("tp",), kv_heads=("tp",))),
        ("dp:2,tp:4", (8, 2), JointSpecs(batch=("dp",), heads=("tp",), grouping=KVHeads.INDEX)),
        (
            "ep:2,tp:4",
            (8, 2),
            JointSpecs(heads=("ep", "tp"), kv_heads=("ep",), grouping=KVHeads.PREFIX),
        ),
        ("dp:2,tp:2", (8, 8), JointSpecs(batch=("dp",), heads=("tp",), grouping=KVHeads.INDEX)),
        ("dp:2,tp:2", (6, 3), JointSpecs(batch=("dp",), heads=("tp",), grouping=KVHeads.INDEX)),
    ],
    ids=["same", "one each", "prefix", "whole groups", "groups cut in two"],
)
def test_each_shard_reads_the_kv_heads_of_its_queries(
    mesh: str, heads: tuple[int, int], specs: JointSpecs
) -> None:
    given = operands(heads=heads[0], kv_heads=heads[1])
    call = AttentionCall(
        **SIZES,
        heads=heads[0],
        kv_heads=heads[1],
        dtype="float32",
        mode="__train__",
        recipe=RECIPE,
        specs=specs,
        mesh=cpu_mesh(mesh),
    )

    def sharded(x: Operands) -> Any:
        return run_on_shards(lambda shard: Result(o=blockwise.attend(shard, RECIPE)[0]), x, call).o

    assert_same(gradients(sharded, given), gradients(lambda x: vanilla.attend(x, RECIPE).o, given))


@pytest.mark.parametrize("check_vma", [True, False])
def test_replicated_gradients_are_summed_once(check_vma: bool) -> None:
    given = operands(heads=4, kv_heads=2)
    specs = JointSpecs(batch=("dp",)).operands(given)
    names = [name for name in Operands.__dataclass_fields__ if getattr(given, name) is not None]

    def local(*arrays: Any) -> Any:
        shard = Operands(**dict(zip(names, arrays, strict=True)))
        return blockwise.attend(shard, RECIPE)[0]

    over = jax.shard_map(
        local,
        mesh=cpu_mesh("dp:4"),
        in_specs=tuple(getattr(specs, name) for name in names),
        out_specs=P("dp"),
        check_vma=check_vma,
    )
    assert specs.sinks == specs.bias == P()
    assert_same(
        gradients(lambda x: over(*(getattr(x, name) for name in names)), given),
        gradients(lambda x: vanilla.attend(x, RECIPE).o, given),
    )
