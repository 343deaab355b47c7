"""Cases of tests/conformance with the names of eformer, beyond those of test_behaviors.py."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.interop import eformer as ef
from tests.raising import raises

TYPES: dict[str, Any] = {
    "auto": "auto",
    "explicit": "explicit",
    "dp explicit": ("explicit", "auto"),
    "tp explicit": ("auto", "explicit"),
}


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(("rows", "wanted"), [(16, P(("fsdp", "dp"))), (12, P("fsdp")), (2, P())])
def test_prefix_strict_and_dropped(rows: int, wanted: P) -> None:
    mesh = ef.create_mesh((4, 2), ("fsdp", "dp"))

    def manager(policy: Any) -> ef.PartitionManager:
        return ef.PartitionManager(ef.PartitionAxis(), mesh=mesh, policy=policy)

    prefix = manager(sw.Policy(indivisible="prefix"))
    assert prefix.shard(numbers(rows), [ef.BATCH], ef.MODE_TRAIN).sharding.spec == wanted
    assert prefix.explain([ef.BATCH], ef.MODE_TRAIN, shape=(rows,)).spec == wanted
    if rows != 16:
        with raises(
            sw.IndivisibleError, rows, "fsdp=4", "dp=2", dim=0, axis="BATCH", fix="batch_axis"
        ):
            manager("strict").shard(numbers(rows), [ef.BATCH], ef.MODE_TRAIN)
        dropped = manager("eformer")
        assert dropped.shard(numbers(rows), [ef.BATCH], ef.MODE_TRAIN).sharding.spec == P()
        assert f"{rows} % 8 != 0" in str(dropped.explain([ef.BATCH], ef.MODE_TRAIN, shape=(rows,)))


@pytest.mark.parametrize("where", ["with mesh", "set_mesh", "its own"])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.full(but=["auto-its own", "explicit-its own", "tp explicit-set_mesh"])
def test_every_mesh_and_context(kind: str, where: str) -> None:
    mesh = ef.create_mesh((2, 4), ("dp", "tp"), axis_types=TYPES[kind])
    pm = ef.PartitionManager(ef.PartitionAxis(), mesh=mesh if where == "its own" else None)
    x = jax.device_put(numbers(4, 8), NamedSharding(mesh, P()))

    def body(x: Any) -> Any:
        return ef.apply_logical_sharding(
            2 * x, axes=[ef.BATCH, ef.HEAD], mode=ef.MODE_TRAIN, partition_manager=pm
        )

    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", DeprecationWarning)  # JAX's, of the next line
        stack.enter_context(
            {
                "with mesh": mesh,
                "set_mesh": jax.set_mesh(mesh) if where == "set_mesh" else None,
                "its own": pm,
            }[where]
        )
        warnings.simplefilter("error")
        actual = [jax.jit(body)(x), body(x)]
        if kind == "auto":
            for axes in (("dp",), ("dp", "tp")):
                inside = jax.shard_map(
                    body, mesh=mesh, in_specs=P(*axes), out_specs=P(*axes), axis_names={*axes}
                )
                actual.append(jax.jit(inside)(x))
    for y in actual:
        np.testing.assert_array_equal(y, 2 * numbers(4, 8))
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("dp", "tp")), 2)


def test_repeated_calls_do_not_grow_caches() -> None:
    mesh = ef.create_mesh((2, 4), ("dp", "tp"))
    step = jax.jit(lambda x: x + 1)
    with jax.set_mesh(mesh):
        for _ in range(3):
            pm = ef.PartitionManager(ef.PartitionAxis())
            step(pm.shard(numbers(4, 8), [ef.BATCH, ef.HEAD], ef.MODE_TRAIN))
            step(ef.with_sharding_constraint(numbers(4, 8), P("dp", "tp")))
    assert step._cache_size() == 1


def test_quantized_weight_and_scale() -> None:
    pm = ef.PartitionManager(ef.PartitionAxis(), mesh=ef.create_mesh((2, 4), ("fsdp", "tp")))
    weight = {"value": np.ones((64, 32), np.int8), "scale": np.ones((64 // 16, 32), np.float32)}
    assert {x.sharding.spec for x in pm.shard(weight, ef.ColumnWise).values()} == {P("fsdp", "tp")}
    with raises(
        sw.IndivisibleError,
        "fsdp=2",
        path="scale",
        dim=0,
        axis="FSDP+SP (EMBED)",
        size=1,
        fix="fully_sharded_data_parallel_axis",
    ):
        pm.shard({**weight, "scale": np.ones((1, 32), np.float32)}, ef.ColumnWise)
