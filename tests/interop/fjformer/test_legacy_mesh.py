"""Functions that old code calls under the legacy `with mesh:` use that mesh."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.interop import fjformer
from shardwright.testing import cpu_mesh
from tests.raising import raises

X = np.arange(64.0, dtype=np.float32).reshape(8, 8)


@pytest.fixture(autouse=True)
def _no_warning_of_ours() -> Iterator[None]:
    """JAX deprecates `with mesh:`; reading the current mesh must not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*with mesh.*", category=DeprecationWarning)
        yield


def constrained(x: Any) -> Any:
    return fjformer.with_sharding_constraint(x, P("dp", "tp"))


def eager(x: Any) -> Any:
    return constrained(x)


def jitted(x: Any) -> Any:
    return jax.jit(lambda x: constrained(x * 1))(x)


def gradient(x: Any) -> Any:
    return jax.jit(jax.grad(lambda x: (constrained(x) ** 2).sum() / 2))(x)


def scanned(x: Any) -> Any:
    return jax.jit(
        lambda x: jax.lax.scan(lambda c, _: (constrained(c), None), x, None, length=2)[0]
    )(x)


@pytest.mark.parametrize("program", [eager, jitted, gradient, scanned])
def test_constraint_under_a_legacy_mesh(program: Callable[[Any], Any]) -> None:
    mesh = cpu_mesh("dp:2,tp:4")
    with mesh:
        actual = program(jnp.asarray(X))
    assert actual.sharding.is_equivalent_to(jax.NamedSharding(mesh, P("dp", "tp")), 2)
    np.testing.assert_array_equal(actual, X)


@pytest.mark.parametrize("kind", ["explicit", {"tp": "explicit"}], ids=["explicit", "mixed"])
@pytest.mark.parametrize("program", [eager, jitted])
def test_explicit_axes_of_a_legacy_mesh(kind: Any, program: Callable[[Any], Any]) -> None:
    """Under `with mesh:` JAX does not type arrays, so the array must be on the mesh already."""
    mesh = cpu_mesh("dp:2,tp:4", axis_types=kind)
    x = jax.device_put(X, jax.NamedSharding(mesh, P()))
    with mesh:
        actual = program(x)
    assert actual.sharding.is_equivalent_to(jax.NamedSharding(mesh, P("dp", "tp")), 2)
    np.testing.assert_array_equal(actual, X)


def test_names_under_a_legacy_mesh() -> None:
    seen = []

    def f(x: Any) -> Any:
        seen.append(
            (fjformer.names_in_current_mesh("dp", "tp"), fjformer.names_in_current_mesh("fsdp"))
        )
        return x

    with cpu_mesh("dp:2,tp:4"):
        f(X)
        jax.jit(f)(X)
    assert seen == [(True, False)] * 2
    assert not fjformer.names_in_current_mesh("dp")


def test_misfits_under_a_legacy_mesh() -> None:
    with (
        cpu_mesh("dp:2,tp:4"),
        raises(sw.IndivisibleError, "dp=2", size=7),
    ):
        constrained(np.ones((7, 8)))


def test_functions_under_a_legacy_mesh() -> None:
    mesh = cpu_mesh("dp:2,tp:4")
    with mesh:
        shard, _ = fjformer.make_shard_and_gather_fns({"w": P("dp", "tp")})
    assert shard["w"](X).sharding == jax.NamedSharding(mesh, P("dp", "tp"))


def test_set_mesh_before_legacy_mesh() -> None:
    legacy, ambient = cpu_mesh("dp:2,tp:4"), cpu_mesh("dp:4,tp:2")
    with legacy, jax.set_mesh(ambient):
        assert constrained(X).sharding.mesh == ambient
    with jax.set_mesh(ambient), legacy:
        assert constrained(X).sharding.mesh == ambient, "as JAX resolves a PartitionSpec there"


def test_manager_before_legacy_mesh() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("ddp"), mesh=cpu_mesh("dp:4,tp:2"))
    with cpu_mesh("dp:2,tp:4"), pm:
        assert constrained(X).sharding.mesh == pm.mesh


def test_inside_shard_map_under_a_legacy_mesh() -> None:
    mesh = cpu_mesh("dp:2,tp:4")

    def local(x: Any) -> Any:
        assert fjformer.names_in_current_mesh("dp", "tp")
        return constrained(x) * 2

    with mesh:
        f = jax.jit(
            jax.shard_map(local, mesh=mesh, in_specs=P("dp", "tp"), out_specs=P("dp", "tp"))
        )
        np.testing.assert_array_equal(f(X), X * 2)


def test_eformer_under_a_legacy_mesh() -> None:
    from shardwright.interop import eformer

    mesh = cpu_mesh("dp:2,tp:4")
    with mesh:
        assert eformer.get_incontext_mesh() == mesh
        assert isinstance(eformer.get_incontext_mesh(), Mesh)
        assert eformer.names_in_current_mesh("dp")
