"""`call_on_shards`: place arguments over Explicit mesh axes, then call `shard_map`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.manager.shards import call_on_shards, place_for_shard_map
from tests.manager.programs import make_manager, numbers, sharded_over

P = jax.P


def double_rows(x: Any, named: Any) -> Any:
    return x * 2 + jax.lax.psum(named["bias"], "tp")


@pytest.mark.parametrize("kind", ["auto", "explicit", "tp explicit"])
@pytest.mark.parametrize("ambient", [False, True])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.full(but=["False-True-explicit", "False-False-auto"])
@pytest.mark.pairwise
def test_arguments_are_placed_then_mapped(kind: str, ambient: bool, jit: bool) -> None:
    mesh = make_manager(kind).mesh
    x, bias = numbers(8, 8), numbers(8)

    def run(x: Any, bias: Any) -> Any:
        return call_on_shards(
            double_rows, (x, {"bias": bias}), (P("dp"), {"bias": P()}), out_specs=P("dp"), mesh=mesh
        )

    run = jax.jit(run) if jit else run
    if not ambient:
        result = run(x, bias)
    else:
        with jax.set_mesh(mesh):
            result = run(x, bias)
    np.testing.assert_allclose(result, x * 2 + bias * mesh.shape["tp"])
    assert sharded_over(result, mesh, "dp")


def test_auto_arguments_stay_unchanged() -> None:
    mesh = make_manager("auto").mesh
    x = jnp.ones((8, 8))
    (same,) = place_for_shard_map((x,), (P("dp"),), mesh=mesh)
    assert same is x


def test_explicit_arguments_are_resharded() -> None:
    mesh = make_manager("explicit").mesh
    (placed,) = place_for_shard_map((jnp.ones((8, 8)),), (P("dp"),), mesh=mesh)
    assert sharded_over(placed, mesh, "dp")
