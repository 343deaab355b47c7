"""Comparing two managers: what moved, and the exact bytes, as JAX counts them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.plan.compare import Comparison, compare
from shardwright.trees.tensors import Tensor
from tests.raising import raises

TREE = {
    "embed": sw.ArraySpec((64, 32), jnp.bfloat16, (sw.VOCAB, sw.EMBED)),
    "up": sw.ArraySpec((32, 128), jnp.float32, sw.ColumnWise),
    "norm": sw.ArraySpec((32,), jnp.float32, (sw.NORM,)),
}


def manager(preset: str, mesh: str) -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset(preset), mesh=sw.abstract_mesh(mesh))


def paths(actual: Comparison) -> list[str]:
    return list(dict.fromkeys(row.tensor.path for row in actual.changed))


def held(pm: sw.PartitionManager) -> int:
    """Bytes per device of the tree, from JAX's own shard shapes."""
    leaves = jax.tree.leaves(
        pm.abstract(TREE), is_leaf=lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in leaves
    )


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("fsdp", "fsdp:2,tp:4"), ("fsdp_tp", "fsdp:2,tp:4")),
        (("ddp", "dp:8"), ("fsdp", "fsdp:8")),
        (("fsdp_tp", "fsdp:2,tp:4"), ("fsdp_tp", "fsdp:4,tp:2")),
    ],
)
def test_totals_equal_jax_shard_bytes(left: tuple[str, str], right: tuple[str, str]) -> None:
    before, after = manager(*left), manager(*right)
    comparison = compare(before, after, tensors=TREE)
    assert [(total.before, total.after, total.uncounted) for total in comparison.totals()] == [
        (held(before), held(after), 0)
    ] * 4


def test_two_strategies() -> None:
    comparison = compare(
        manager("fsdp", "fsdp:2,tp:4"), manager("fsdp_tp", "fsdp:2,tp:4"), tensors=TREE
    )
    assert paths(comparison) == ["embed", "up"]
    row = comparison.changed[0]
    assert (row.before.mesh_axes, row.after.mesh_axes) == (((), ("fsdp",)), (("tp",), ("fsdp",)))
    assert (row.before.bytes, row.after.bytes, row.grows) == (2048, 512, -1536)
    assert row.moved
    assert comparison.ok


def test_other_axis_sizes_are_a_difference() -> None:
    comparison = compare(
        manager("fsdp_tp", "fsdp:2,tp:4"), manager("fsdp_tp", "fsdp:4,tp:2"), tensors=TREE
    )
    assert paths(comparison) == ["embed", "up"]
    row = comparison.changed[0]
    assert (row.moved, row.grows) == (False, 0)
    assert (row.before.shards, row.after.shards) == ((4, 2), (2, 4))


def test_same_manager_has_no_difference() -> None:
    comparison = compare(
        manager("fsdp_tp", "fsdp:2,tp:4"), manager("fsdp_tp", "fsdp:2,tp:4"), tensors=TREE
    )
    assert comparison.changed == ()
    assert len(comparison.rows) == 12


def test_two_modes_of_one_manager() -> None:
    pm = manager("fsdp_tp", "fsdp:2,sp:2,tp:2")
    acts = [
        Tensor(
            path="x",
            axes=(sw.BATCH, sw.QUERY_LENGTH, sw.EMBED),
            shape=(8, 16, 32),
            dtype="bfloat16",
        )
    ]
    (row,) = compare(pm.for_mode("train"), pm.for_mode("decode"), tensors=acts).changed
    assert (row.mode, row.mode_after) == (sw.MODE_TRAIN, sw.MODE_DECODE)
    assert (row.before.mesh_axes, row.after.mesh_axes) == (
        (("fsdp",), ("sp",), ()),
        (("fsdp",), (), ()),
    )
    assert row.grows == 8 * 16 * 32 * 2 // 4
    with raises(sw.StrategyError, "manager", "mode", fix="pm.for_mode"):
        compare(pm.for_mode("train"), pm, tensors=acts)


def test_weight_counts_as_stored() -> None:
    used = [
        Tensor(
            path="w", axes=(sw.EMBED, sw.VOCAB), shape=(32, 64), role=sw.Role.USE, dtype="float32"
        )
    ]
    row = compare(manager("fsdp", "fsdp:2"), manager("ddp", "fsdp:2"), tensors=used).changed[0]
    assert row.role is sw.Role.PARAM
    assert (row.before.bytes, row.after.bytes) == (4096, 8192)


def test_side_without_a_spec() -> None:
    comparison = compare(manager("ddp", "fsdp:3"), manager("fsdp", "fsdp:3"), tensors=TREE)
    assert not comparison.ok
    assert paths(comparison) == ["embed", "up"]
    assert (
        comparison.changed[0].after.mesh_axes,
        comparison.changed[0].after.bytes,
        comparison.changed[0].grows,
    ) == (None, None, None)
    assert [(total.before, total.after, total.uncounted) for total in comparison.totals()] == [
        (128, 128, 2)
    ] * 4


def test_unconstrained_dims_have_no_bytes() -> None:
    text = '[mesh]\ndp = 2\n[rules]\nbatch = "{}"\n'
    left, right = (
        sw.PartitionManager(
            sw.Strategy.loads(text.format(rule)), mesh=sw.abstract_mesh("dp:2"), mode="train"
        )
        for rule in ("?", "-")
    )
    (row,) = compare(
        left, right, tensors=[Tensor(path="x", axes=(sw.BATCH,), shape=(8,), dtype="int8")]
    ).changed
    assert (row.before.mesh_axes, row.before.bytes, row.after.bytes) == ((("?",),), None, 8)


def test_dtype_without_bytes_is_named() -> None:
    single = manager("ddp", "dp:2")
    with raises(sw.StrategyError, "dtype", "key<fry>", path="rng", fix="float32"):
        compare(
            single,
            single,
            tensors=[Tensor(path="rng", axes=(sw.BATCH,), shape=(8,), dtype="key<fry>")],
        )
    key = {"rng": sw.ArraySpec((8,), jax.random.key(0).dtype, (sw.BATCH,))}
    assert {row.before.bytes for row in compare(single, single, tensors=key).rows} == {None}
    packed = [Tensor(path="w", axes=(sw.EMPTY,), shape=(7,), dtype="int4")]
    assert {row.before.bytes for row in compare(single, single, tensors=packed).rows} == {4}
