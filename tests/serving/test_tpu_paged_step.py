"""On eight TPUs, all layers of a paged step share one set of tables, and pools are sharded."""

from __future__ import annotations

from tests import tpu_compile
from tests.serving.tpu_paged_step import LAYERS, MESHES, measure

pytestmark = tpu_compile.MARKS


def test_tables_are_shared_by_layers() -> None:
    steps = measure()
    for step in steps:
        print(
            f"{step.mesh:10} {step.layers} layers: {step.integers} of {step.collectives} "
            f"collectives send integers, pool {step.pool} bytes, dense {step.dense}"
        )
    assert [(step.mesh, step.layers) for step in steps] == [
        (mesh, layers) for mesh in MESHES for layers in LAYERS
    ]
    for mesh in MESHES:
        few, many = (step for step in steps if step.mesh == mesh)
        assert few.integers == many.integers <= 2
        assert few.collectives < many.collectives
        assert few.pool == many.pool <= 1.05 * few.dense
