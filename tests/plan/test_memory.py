"""Bytes by path: exact for every kind of leaf, and shown as a table."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import shardwright as sw
from shardwright.plan import bytes_by_path
from shardwright.show.memory import memory_text
from shardwright.testing import cpu_mesh
from tests.raising import raises

P = jax.P
MESH = sw.abstract_mesh("dp:2,fsdp:4")


def leaf(shape: tuple[int, ...], spec: Any, dtype: Any = jnp.float32, mesh: Any = MESH) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


@pytest.mark.parametrize(
    ("spec", "per_device", "replicated", "over"),
    [
        (P(), 512, 7 * 512, ("dp", "fsdp")),
        (P("fsdp"), 128, 512, ("dp",)),
        (P("dp"), 256, 3 * 512, ("fsdp",)),
        (P("fsdp", "dp"), 64, 0, ()),
        (P(None, ("dp", "fsdp")), 64, 0, ()),
    ],
)
def test_copies_are_counted_in_bytes(
    spec: Any, per_device: int, replicated: int, over: tuple[str, ...]
) -> None:
    actual = bytes_by_path({"w": leaf((8, 16), spec)}).leaves[0]
    assert (actual.path, actual.shape, actual.dtype, actual.spec) == ("w", (8, 16), "float32", spec)
    assert (actual.total, actual.per_device, actual.replicated, actual.replicated_over) == (
        512,
        per_device,
        replicated,
        over,
    )
    assert actual.held == actual.total + actual.replicated == 8 * per_device
    assert actual.copies == actual.held // actual.total


def test_mesh_axis_of_size_one_has_no_copy() -> None:
    actual = bytes_by_path(leaf((8,), P("fsdp"), mesh=sw.abstract_mesh("dp:1,fsdp:4"))).leaves[0]
    assert (actual.path, actual.replicated, actual.replicated_over) == ("", 0, ())


@pytest.mark.parametrize(
    "dtype",
    [
        jnp.int4,
        jnp.uint4,
        jnp.int2,
        jnp.bool_,
        jnp.int8,
        jnp.float8_e4m3fn,
        jnp.bfloat16,
        jnp.complex64,
    ],
)
def test_bytes_equal_the_compiler(dtype: Any) -> None:
    """Against the account of a compiled program, which knows nothing of this module."""
    mesh = cpu_mesh("dp:2,fsdp:4")
    sharding = NamedSharding(mesh, P("fsdp"))
    compiled = (
        jax.jit(lambda: jnp.zeros((64, 512), dtype), out_shardings=sharding).lower().compile()
    )
    tree_bytes = bytes_by_path(jax.ShapeDtypeStruct((64, 512), dtype, sharding=sharding))
    assert tree_bytes.per_device == compiled.memory_analysis().output_size_in_bytes
    assert tree_bytes.total == 4 * tree_bytes.per_device


def test_small_elements_take_whole_bytes() -> None:
    assert bytes_by_path(leaf((3,), P(), jnp.int4)).total == 2
    assert bytes_by_path(leaf((), P(), jnp.int2)).total == 1


def test_concrete_arrays_equal_their_shards() -> None:
    mesh = cpu_mesh("dp:2,fsdp:4")
    arrays = {
        "a": jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, P("fsdp"))),
        "b": [jax.device_put(np.ones(6, np.int8), NamedSharding(mesh, P()))],
        "key": jax.device_put(jax.random.key(0), NamedSharding(mesh, P())),
        "alone": jnp.ones(5),
    }
    actual = {entry.path: entry for entry in bytes_by_path(arrays).leaves}
    assert list(actual) == ["a", "alone", "b/0", "key"]
    for path in ("a", "alone", "b/0"):
        array = arrays["b"][0] if path == "b/0" else arrays[path]
        assert actual[path].held == sum(shard.data.nbytes for shard in array.addressable_shards)
    assert (actual["key"].total, actual["key"].dtype, actual["key"].replicated) == (
        8,
        "key<fry>",
        56,
    )
    assert (actual["alone"].devices, actual["alone"].replicated) == (1, 0)
    assert actual["alone"].spec is None


def test_tree_with_separate_shardings() -> None:
    """Where an optimizer keeps nothing there is nothing to count.

    One sharding may cover a part of the tree.
    """
    specs = {
        "w": sw.ArraySpec((8, 8), jnp.bfloat16, (sw.EMBED, sw.MLP_INTERMEDIATE)),
        "none": None,
        "b": [np.ones(4, np.float32)] * 2,
    }
    everywhere, split = NamedSharding(MESH, P()), NamedSharding(MESH, P("dp", "fsdp"))
    tree_bytes = bytes_by_path(specs, {"w": split, "none": None, "b": everywhere})
    assert [array.dtype for array in tree_bytes.leaves] == ["float32", "float32", "bfloat16"]
    assert [(array.path, array.total, array.per_device) for array in tree_bytes.leaves] == [
        ("b/0", 16, 16),
        ("b/1", 16, 16),
        ("w", 128, 16),
    ]
    assert (tree_bytes.total, tree_bytes.per_device, tree_bytes.held, tree_bytes.replicated) == (
        160,
        48,
        384,
        224,
    )
    assert tree_bytes.replicated_share == 224 / 384
    assert [array.path for array in tree_bytes.select("^b/").leaves] == ["b/0", "b/1"]
    assert [array.path for array in tree_bytes.most_replicated().leaves] == ["b/0", "b/1"]
    assert bytes_by_path({}).replicated_share == 0.0


def test_partial_sums_are_not_copies() -> None:
    mesh = sw.abstract_mesh("dp:2,fsdp:4", axis_types="explicit")
    actual = bytes_by_path(leaf((8,), P("fsdp", unreduced={"dp"}), mesh=mesh)).leaves[0]
    assert (actual.replicated, actual.replicated_over) == (0, ())


def test_leaves_without_sharding_are_all_named() -> None:
    with raises(sw.StrategyError, "(2,)", "sharding", path="a", fix="shardings", count=2) as caught:
        bytes_by_path({"a": np.ones(2), "b": leaf((8,), P()), "c": 3})
    assert [problem.path for problem in caught.value.problems] == ["a", "c"]
    with raises(sw.StrategyError, "UNCONSTRAINED", "bytes"):
        bytes_by_path(leaf((8,), P(P.UNCONSTRAINED)))
    with raises(sw.StrategyError, "(6,)", "NamedSharding", "mesh", 6, path="w"):
        bytes_by_path({"w": np.ones(6)}, NamedSharding(MESH, P("fsdp")))
    with raises(sw.StrategyError, "b", "a", fix="pm.shardings"):
        bytes_by_path({"a": np.ones(2)}, {"b": NamedSharding(MESH, P())})


def test_plain_data() -> None:
    actual = bytes_by_path({"w": leaf((8, 16), P(("dp", "fsdp")))}).to_json()
    assert actual["leaves"][0]["spec"] == [["dp", "fsdp"]]
    assert actual["leaves"][0]["shape"] == [8, 16]
    assert (actual["per_device"], actual["replicated"]) == (64, 0)


def test_the_table() -> None:
    tree_bytes = bytes_by_path({"embed": leaf((8, 16), P("fsdp")), "norm": leaf((4096,), P())})
    assert memory_text(tree_bytes.most_replicated(), rows=1).splitlines() == [
        "path  shape  dtype    spec  bytes     per device  replicated  over",
        "norm  4096   float32  P()   16.0 KiB  16.0 KiB    112.0 KiB   dp fsdp",
        "and 1 more",
        (
            "2 arrays, 16.5 KiB; 16.1 KiB per device; 112.5 KiB of 129.0 KiB held on all "
            "devices are "
            "copies (87.2%)"
        ),
    ]


def test_bad_pattern_is_shown() -> None:
    tree_bytes = bytes_by_path({"w": leaf((8,), P())})
    with raises(sw.StrategyError, "regular", "expression"):
        tree_bytes.select("(")


def test_long_path_keeps_specs_whole() -> None:
    path = "transformer/" + "decoder/" * 12 + "kernel"
    sharding = NamedSharding(sw.abstract_mesh("dp:2,tp:4"), P(None, ("dp", "tp")))
    lines = memory_text(
        bytes_by_path({path: jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=sharding)})
    ).splitlines()
    assert f"{path}  4x8    float32  P(None, ('dp', 'tp'))  128 B" in "\n".join(lines)
