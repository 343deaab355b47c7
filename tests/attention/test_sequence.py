"""The parts that attention over a sharded sequence is made of."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.attention.call import Arithmetic, AttentionCall, Operands
from shardwright.attention.inputs import read, read_options
from shardwright.attention.kernels import ring
from shardwright.attention.masks import MaskRules
from shardwright.attention.parts import sequence
from shardwright.testing import cpu_mesh

CAUSAL = Arithmetic(scale=1.0, mask=MaskRules(causal=True), q_block=512, kv_block=1024)


def call_of(recipe: Arithmetic, *, q_offset: int | None) -> AttentionCall:
    sizes = {
        "batch": 1,
        "q_length": 8,
        "kv_length": 8,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 1,
        "v_dim": 1,
    }
    return AttentionCall(**sizes, dtype="float32", mode="train", recipe=recipe, q_offset=q_offset)


def shard_of(*, rows: int, heads: int, dim: int) -> Operands:
    q, kv = np.zeros((1, rows, heads, dim), np.float32), np.zeros((1, rows, 1, dim), np.float32)
    return Operands(q=q, k=kv, v=kv, q_positions=None, kv_positions=None)


def blocks(
    shard: Operands, recipe: Arithmetic = CAUSAL, *, q_offset: int | None = 0
) -> tuple[int, int]:
    actual = sequence.blocks(recipe, shard, call_of(recipe, q_offset=q_offset))
    return actual.q_block, actual.kv_block


def test_logits_of_a_block_fit_the_keys_of_a_shard() -> None:
    assert blocks(shard_of(rows=2048, heads=1, dim=256)) == (512, 1024)
    assert blocks(shard_of(rows=2048, heads=4, dim=64)) == (256, 256)
    assert blocks(shard_of(rows=2048, heads=64, dim=8)) == (128, 128)
    assert blocks(shard_of(rows=16, heads=64, dim=8)) == (16, 16)


def test_blocks_do_not_cross_the_middle_of_a_shard() -> None:
    wide = 4096
    assert blocks(shard_of(rows=1536, heads=1, dim=wide), q_offset=None) == (384, 768)
    assert blocks(shard_of(rows=1536, heads=1, dim=wide)) == (512, 1024)
    assert blocks(shard_of(rows=13, heads=1, dim=wide), q_offset=None) == (7, 7)
    assert blocks(shard_of(rows=1, heads=1, dim=wide), q_offset=None) == (1, 1)
    nothing_to_skip = dataclasses.replace(CAUSAL, mask=MaskRules())
    assert blocks(shard_of(rows=1536, heads=1, dim=wide), nothing_to_skip, q_offset=None) == (
        512,
        1024,
    )


@pytest.mark.parametrize(
    ("v_dim", "dtype", "arrays"), [(4, "float32", 1), (6, "float32", 1), (4, "bfloat16", 2)]
)
def test_keys_and_values_pack_into_one_array(v_dim: int, dtype: str, arrays: int) -> None:
    k, v = jnp.arange(24.0).reshape(1, 3, 2, 4), jnp.ones((1, 3, 2, v_dim), dtype)
    packed = sequence.pack(k, v)
    assert len(packed) == arrays
    assert sum(array.nbytes for array in packed) == k.nbytes + v.nbytes
    for actual, wanted in zip(sequence.unpack(packed, head_dim=4), (k, v), strict=True):
        assert actual.dtype == wanted.dtype
        np.testing.assert_array_equal(actual, wanted)


@pytest.mark.full
def test_unrolled_ring_equals_loop() -> None:
    """`scan_ring_attention=False`."""
    strategy = sw.Strategy.loads('[rules]\nquery_length = "sp"\nkv_length = "sp"\n')
    q, k, v = (
        jax.random.normal(key, (1, 16, 2, 4)) for key in jax.random.split(jax.random.key(0), 3)
    )
    with sw.PartitionManager(strategy, mesh=cpu_mesh("sp:4")):
        operands, call = read(q, k, v, read_options({"causal": True, "mode": "train"}))
        assert call.loop

        def run(call: AttentionCall) -> Any:
            loss = lambda q: jnp.sum(jnp.sin(ring.run(operands.replace(q=q), call).o))  # noqa: E731
            lowered = jax.jit(jax.value_and_grad(loss)).lower(q)
            return lowered.as_text().count("stablehlo.collective_permute"), lowered.compile()(q)

        rolled, unrolled = run(call), run(dataclasses.replace(call, loop=False))
    # Forward and backward; nobody asks for the gradients of the keys, so they do not travel.
    assert (rolled[0], unrolled[0]) == (1 + 1, 3 + 3)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), rolled[1], unrolled[1]
    )
