"""A mesh or a manager that a block leaves set is reset and reported."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import Mesh

import shardwright as sw
from shardwright._jax import legacy_meshes
from shardwright.manager import context
from shardwright.testing.ambient import AmbientLeftError, isolated
from tests.raising import facts, raises


@pytest.mark.mesh("dp:2", strategy="ddp")
def test_managers_and_mesh_are_reset(manager: sw.PartitionManager) -> None:
    def leave_two() -> None:
        manager.__enter__()
        manager.for_mode("decode").__enter__()

    says = facts(
        "PartitionManager", "ddp", "dp:2", "decode", fix=("with manager:", "PartitionManager")
    )
    with raises(AmbientLeftError, says), isolated():
        leave_two()
    assert sw.current_manager() is manager
    assert jax.sharding.get_mesh() == manager.mesh
    assert context.depth() == 1


@pytest.mark.mesh("dp:2")
def test_error_of_the_block_is_raised(mesh: Mesh) -> None:
    def fail() -> float:
        jax.set_mesh(mesh)
        return 1 / 0

    with pytest.raises(ZeroDivisionError, match="division"), isolated():
        fail()
    assert jax.sharding.get_mesh().empty


def test_abstract_mesh_left_set_is_detected() -> None:
    with raises(AmbientLeftError, "dp", 2, fix="with jax.set_mesh(mesh):"), isolated():
        jax.sharding.use_abstract_mesh(sw.abstract_mesh("dp:2")).__enter__()
    assert jax.sharding.get_abstract_mesh().empty


@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")
def test_legacy_meshes_are_not_reset() -> None:
    def leave_two() -> None:
        mesh.__enter__()
        sw.create_mesh("tp:2").__enter__()

    mesh = sw.create_mesh("dp:2")
    with mesh:
        with (
            raises(AmbientLeftError, "tp", 2, fix=("with jax.set_mesh(mesh):", "dp")),
            isolated(),
        ):
            leave_two()
        assert legacy_meshes() == (mesh,)


def test_clean_block_raises_nothing() -> None:
    with isolated(), sw.PartitionManager(sw.Strategy.preset("ddp"), mesh=sw.create_mesh("dp:2")):
        assert context.depth() == 1
