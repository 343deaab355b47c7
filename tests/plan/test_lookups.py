"""Embedding look-ups whose table and tokens are sharded over the same mesh axes, against XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright import _jax
from tests.plan.against_xla import compiled_bytes, planned_bytes

TOKENS = (sw.BATCH, sw.QUERY_LENGTH)
BATCH, WIDTH = 16, 64


def check(
    preset: str, mesh: str, rows: int, length: int, *, gathered: bool, marked: bool = False
) -> None:
    """Compare the plan of a look-up's gradient with XLA's program for CPU devices."""
    specs = {"table": sw.ArraySpec((rows, WIDTH), jnp.float32, (sw.VOCAB, sw.EMBED))}

    def loss(params: Any, tokens: Any) -> Any:
        table = sw.gather(params, specs)["table"] if gathered else params["table"]
        return (sw.shard(table[tokens], *TOKENS, sw.EMBED) ** 2).sum()

    several = "," in mesh

    def manager(real: bool) -> sw.PartitionManager:
        build = sw.create_mesh if real else sw.abstract_mesh
        return sw.PartitionManager(sw.Strategy.preset(preset), mesh=build(mesh))

    shape = (BATCH, length)
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    report = manager(False).plan(
        jax.grad(loss), params, tokens, specs=(specs, TOKENS), outputs=specs
    )
    assert bool(report.walked.choices) is (marked or (several and not _jax.moves_rows_alone()))
    if report.walked.choices:
        return
    pm = manager(True)
    given = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=pm.sharding(TOKENS, shape=shape))
    actual = compiled_bytes(pm, jax.grad(loss), (pm.abstract(specs), given), specs)
    assert planned_bytes(report) == actual


# A device has 2 * length tokens with fsdp:8. It sums the table if these are more than its rows.
@pytest.mark.full(but=["62-32-True", "256-256-False"])
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize(("rows", "length"), [(64, 32), (62, 32), (256, 32), (256, 256)])
def test_gradient_of_table_over_batch_axis(rows: int, length: int, gathered: bool) -> None:
    check("fsdp", "fsdp:8", rows, length, gathered=gathered)


@pytest.mark.full(but=["256-32"])
@pytest.mark.parametrize(("rows", "length"), [(64, 32), (256, 32), (1024, 32), (256, 256)])
def test_gradient_of_table_over_two_axes(rows: int, length: int) -> None:
    check("fsdp_tp", "fsdp:4,tp:2", rows, length, gathered=True)


@pytest.mark.parametrize(("rows", "length"), [(256, 32), (1024, 32)])
def test_lookup_in_table_over_two_axes(rows: int, length: int) -> None:
    check("fsdp_tp", "fsdp:4,tp:2", rows, length, gathered=False)


@pytest.mark.full(but=["256-32"])
@pytest.mark.parametrize(("rows", "length"), [(256, 32), (1024, 32), (256, 256)])
def test_batch_over_more_axes_than_table(rows: int, length: int) -> None:
    check("fsdp", "dp:2,fsdp:4", rows, length, gathered=True)


@pytest.mark.parametrize(
    ("preset", "mesh", "gathered"),
    [
        ("fsdp_tp", "fsdp:2,tp:4", True),
        ("fsdp", "dp:2,fsdp:4", False),
        ("fsdp_tp", "dp:2,fsdp:2,tp:2", True),
        ("fsdp_tp_sp", "fsdp:2,sp:4", True),
    ],
)
def test_lookups_that_split_mesh_axes_are_marked(preset: str, mesh: str, gathered: bool) -> None:
    check(preset, mesh, 256, 32, gathered=gathered, marked=True)
