"""Element types that XLA for CPU widens are read as in the program."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding

from shardwright.plan import Collective, read_collectives
from shardwright.plan.collectives.collective import Kind
from shardwright.testing import assert_collectives, cpu_mesh

P = jax.P
# As HLO calls it, what CPU sends instead, bits of one element.
NARROW = {
    "int4": ("s4", "s8", 4),
    "uint4": ("u4", "u8", 4),
    "float4_e2m1fn": ("f4e2m1fn", "f16", 4),
    "float8_e4m3fn": ("f8e4m3fn", "f16", 8),
    "float8_e5m2": ("f8e5m2", "f16", 8),
    "float8_e8m0fnu": ("f8e8m0fnu", "f32", 8),
    "int8": ("s8", "s8", 8),
    "bfloat16": ("bf16", "f32", 16),
    "float16": ("f16", "f16", 16),
}


def read(f: Any, *args: Any) -> dict[Kind, Collective]:
    """Return a program's collectives by kind; of each there is one."""
    collectives = read_collectives(jax.jit(f).lower(*args).compile(), cpu_mesh("dp:2,tp:4"))
    assert len({collective.kind for collective in collectives}) == len(collectives)
    return {collective.kind: collective for collective in collectives}


def lying(shape: tuple[int, ...], dtype: Any, *spec: Any) -> Any:
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(cpu_mesh("dp:2,tp:4"), P(*spec))
    )


def each_way(x: Any) -> Any:
    ring = [(at, (at + 1) % 4) for at in range(4)]
    return (
        lax.psum(x, "tp"),
        lax.psum_scatter(x, "tp", tiled=True),
        lax.all_gather(x, "tp", tiled=True),
        lax.all_to_all(x, "tp", 0, 0, tiled=True),
        lax.ppermute(x, "tp", ring),
    )


@pytest.mark.full(but=["float8_e4m3fn", "bfloat16", "int4", "int8"])
@pytest.mark.parametrize("name", NARROW)
def test_collectives_of_narrow_types(name: str) -> None:
    spec = P(("dp", "tp"))
    f = jax.shard_map(
        each_way, mesh=cpu_mesh("dp:2,tp:4"), in_specs=spec, out_specs=spec, check_vma=False
    )
    actual = read(f, lying((8 * 16, 8), jnp.dtype(name), ("dp", "tp")))
    own, wire, bits = NARROW[name]
    assert {(collective.dtype, collective.wire_dtype) for collective in actual.values()} == {
        (own, wire)
    }
    whole = 16 * 8 * bits // 8
    assert {kind: collective.logical_bytes for kind, collective in actual.items()} == {
        Kind.ALL_REDUCE: whole,
        Kind.REDUCE_SCATTER: whole,
        Kind.ALL_GATHER: 4 * whole,
        Kind.ALL_TO_ALL: whole,
        Kind.PERMUTE: whole,
    }


@pytest.mark.parametrize("name", ["int4", "float8_e4m3fn"])
def test_gathered_quantized_weights(name: str) -> None:
    def layer(x: Any, w: Any) -> Any:
        return (
            x
            @ lax.with_sharding_constraint(w, NamedSharding(cpu_mesh("dp:2,tp:4"), P()))
            .astype(jnp.float32)
            .T
        )

    def layers(x: Any, ws: Any) -> Any:
        return lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]

    x, stacked = lying((8, 32), jnp.float32, "dp"), lying((3, 32, 32), jnp.dtype(name), None, "tp")
    whole = 32 * 32 * NARROW[name][2] // 8
    assert_collectives(
        layer, x, lying((32, 32), jnp.dtype(name), "tp"), all_gather=1, bytes=whole, only=True
    )
    assert_collectives(layers, x, stacked, all_gather=3, bytes=3 * whole, only=True)
    with pytest.raises(
        AssertionError,
        match=rf"1 expected, {whole} .* found(?s:.*){NARROW[name][0]} \(as {NARROW[name][1]}\)",
    ):
        assert_collectives(layer, x, lying((32, 32), jnp.dtype(name), "tp"), bytes=1)


@pytest.mark.parametrize(
    ("narrow", "wide", "name"),
    [("float8_e4m3fn", "float16", "f16"), ("int8", "int32", "s32"), ("int4", "int8", "s8")],
)
def test_sum_widened_by_the_program(narrow: str, wide: str, name: str) -> None:
    def f(x: Any) -> Any:
        return lax.psum(x.astype(wide), "tp").astype(narrow)

    spec = P(("dp", "tp"))
    mapped = jax.shard_map(
        f, mesh=cpu_mesh("dp:2,tp:4"), in_specs=spec, out_specs=spec, check_vma=False
    )
    (first,) = read(mapped, lying((8 * 16, 8), jnp.dtype(narrow), ("dp", "tp"))).values()
    assert (first.kind, first.dtype, first.wire_dtype) == (Kind.ALL_REDUCE, name, name)


def test_master_copy_gathered_in_bfloat16() -> None:
    """CPU drops the conversions around it, so the compiled program alone does not tell.

    Bytes are asked of the function.
    """
    spec = P(("dp", "tp"))
    mesh = cpu_mesh("dp:2,tp:4")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def f(w: Any) -> Any:
        return (
            lax.all_gather(jnp.sin(w).astype(jnp.bfloat16), "tp", tiled=True).astype(jnp.float32)
            * 2
        )

    w, whole = lying((8 * 16, 8), jnp.float32, ("dp", "tp")), 4 * 16 * 8 * 2
    assert_collectives(f, w, all_gather=1, bytes=whole)
    assert_collectives(f.lower(w), all_gather=1, bytes=whole)
    assert_collectives(f.lower(w).compile(), all_gather=1, bytes=2 * whole)
