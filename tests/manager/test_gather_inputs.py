"""`gather` under `check_vma=False`, where inputs of one local shape have several global shapes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from tests.raising import raises

P = jax.P


def fsdp() -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=sw.create_mesh("fsdp:8"))


@pytest.mark.parametrize("whole", [(sw.EMPTY,), P()], ids=["EMPTY", "literal"])
def test_whole_input_beside_a_shard(whole: Any) -> None:
    pm = fsdp()
    stored = sw.ArraySpec((64,), jnp.float32, (sw.EMBED,))

    def total(shard: Any, value: Any, shape: Any = None) -> Any:
        return jax.lax.psum(pm.gather(value, sw.EMBED, shape=shape).sum(), "fsdp")

    def run(*, shape: Any = None, check_vma: bool = False) -> Any:
        f = functools.partial(total, shape=shape)
        mapped = pm.shard_map(f, in_axes=[stored, whole], out_axes=(), check_vma=check_vma)
        return mapped(jnp.ones(64), jnp.ones(8))

    with raises(sw.ShapeRequiredError, "(8,)", "(64,)", fix="check_vma"):
        run()
    assert run(check_vma=True) == run(shape=(8,)) == 64


def test_whole_dim_beside_a_shard() -> None:
    strategy = sw.Strategy.preset("fsdp_tp")
    pm = sw.PartitionManager(strategy, mesh=sw.create_mesh("fsdp:2,tp:4"))
    kernel = (sw.EMBED, sw.MLP_INTERMEDIATE)

    def total(shard: Any, value: Any) -> Any:
        return jax.lax.psum(pm.gather(value, *kernel).sum(), ("fsdp", "tp"))

    for whole in ((sw.EMPTY, sw.MLP_INTERMEDIATE), P(None, "tp")):
        in_axes = [sw.ColumnWise, whole]
        mapped = pm.shard_map(total, in_axes=in_axes, out_axes=(), check_vma=False)
        with raises(sw.ShapeRequiredError, "(32, 2)", "(64, 8)", "(32, 8)", fix="check_vma"):
            mapped(jnp.ones((64, 8)), jnp.ones((32, 8)))
        alone = pm.shard_map(
            lambda value: total(None, value), in_axes=[whole], out_axes=(), check_vma=False
        )
        assert alone(jnp.ones((32, 8))) == 512


def test_whole_layers_beside_a_shard() -> None:
    pm = fsdp()
    stored = sw.ArraySpec((64,), jnp.float32, (sw.EMBED,))
    in_axes = [stored, (sw.EMPTY, sw.EMPTY)]

    def total(shard: Any, layers: Any) -> Any:
        return jax.lax.psum(pm.gather(layers[0], sw.EMBED).sum(), "fsdp")

    mapped = pm.shard_map(total, in_axes=in_axes, out_axes=(), check_vma=False)
    with raises(sw.ShapeRequiredError, "(8,)", "(64,)", fix="check_vma"):
        mapped(jnp.ones(64), jnp.ones((2, 8)))


def test_shard_of_the_size_of_a_gathered_weight() -> None:
    pm = fsdp()
    stored = sw.ArraySpec((64,), jnp.float32, (sw.EMBED,))

    def total(shard: Any, value: Any) -> Any:
        return jax.lax.psum(pm.gather(value, sw.EMBED).sum(), "fsdp")

    for check_vma in (True, False):
        in_axes = [stored, P("fsdp")]
        mapped = pm.shard_map(total, in_axes=in_axes, out_axes=(), check_vma=check_vma)
        with raises(sw.ShapeRequiredError, "(64,)", "(512,)", fix="check_vma"):
            mapped(jnp.ones(64), jnp.ones(512))


def test_literal_input_over_a_mesh_axis_of_size_1() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=sw.create_mesh("dp:1,fsdp:8"))

    def total(value: Any) -> Any:
        return jax.lax.psum(pm.gather(value, sw.EMBED, sw.EMPTY).sum(), ("dp", "fsdp"))

    mapped = pm.shard_map(total, in_axes=[P("fsdp", "dp")], out_axes=(), check_vma=False)
    assert mapped(jnp.ones((64, 2))) == 8 * 128
