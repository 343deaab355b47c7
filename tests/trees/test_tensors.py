"""Named tensors of trees of specs, annotations and tensors, and their bytes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.plan import bytes_by_path
from shardwright.trees.tensors import Tensor, as_tensors, is_dtype
from tests.raising import raises


def test_tree_becomes_tensors() -> None:
    ready = Tensor(path="elsewhere", axes=(sw.BATCH,))
    tree = {
        "up": sw.ArraySpec((8, 4), jnp.bfloat16, (sw.EMBED, sw.VOCAB)),
        "down": sw.RowWise,
        "acts": [(sw.BATCH, sw.EMBED), ready],
        "s": (),
    }
    assert as_tensors(tree) == (
        Tensor(path="acts/0", axes=(sw.BATCH, sw.EMBED)),
        ready,
        Tensor(path="down", axes=sw.RowWise),
        Tensor(path="s", axes=()),
        Tensor(
            path="up", axes=(sw.EMBED, sw.VOCAB), shape=(8, 4), role=sw.Role.PARAM, dtype="bfloat16"
        ),
    )
    assert as_tensors([]) == as_tensors(()) == ()


def test_bad_leaf_is_refused_by_path() -> None:
    with raises(sw.StrategyError, "str", "ArraySpec", path="layers/0", fix="ArraySpecs"):
        as_tensors({"layers": ["BATCH"]})


def test_bytes_are_exact() -> None:
    tensor = Tensor(path="w", axes=(sw.EMBED, sw.VOCAB), shape=(4096, 128256), dtype="bfloat16")
    assert tensor.bytes_over(8) == 4096 * 128256 * 2 // 8
    assert Tensor(path="w", axes=(sw.EMBED,), shape=(4,)).bytes_over(1) is None
    assert Tensor(path="w", axes=(sw.EMBED,), dtype="float32").bytes_over(1) is None


def test_small_dtypes_are_packed() -> None:
    """Here and in the account of a tree's memory."""
    for dtype, size in (("int4", 24 // 2), ("uint2", 24 // 4), ("int8", 24), ("bool", 24)):
        tensor = Tensor(path="w", axes=(sw.EMBED, sw.VOCAB), shape=(8, 24), dtype=dtype)
        sharding = jax.NamedSharding(sw.abstract_mesh("tp:8"), jax.P("tp"))
        assert (
            tensor.bytes_over(8)
            == bytes_by_path(jax.ShapeDtypeStruct((8, 24), dtype), sharding).per_device
            == size
        )
    assert Tensor(path="w", axes=(sw.EMBED,), shape=(3,), dtype="int4").bytes_over(1) == 2


def test_prng_keys_have_no_bytes() -> None:
    (key,) = as_tensors(sw.ArraySpec((2,), jax.random.key(0).dtype, (sw.EMBED,)))
    assert key.bytes_over(1) is None


@pytest.mark.parametrize(
    "name", ["bfloat16", "float32", "int4", "uint8", "bool", "complex64", "float8_e4m3fn"]
)
def test_valid_dtypes(name: str) -> None:
    assert is_dtype(name)


@pytest.mark.parametrize(
    "name",
    ["object", "str", "datetime64", "longdouble", "bf16", "i4,i4", ">f4", "", None, 3, jnp.float32],
)
def test_invalid_dtypes(name: object) -> None:
    assert not is_dtype(name)
