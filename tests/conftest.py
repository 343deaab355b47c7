"""Eight virtual CPU devices for the whole session, and the meshes that most tests want."""

from __future__ import annotations

import pytest
from jax.sharding import Mesh

from shardwright.testing.meshes import cpu_mesh, virtual_devices

# At import: a test module may use JAX while it is collected, and after that the number is fixed.
virtual_devices(8)


@pytest.fixture
def mesh_dp2_tp4() -> Mesh:
    return cpu_mesh("dp:2,tp:4")


@pytest.fixture
def mesh_dp4_tp2() -> Mesh:
    return cpu_mesh("dp:4,tp:2")


@pytest.fixture
def mesh_fsdp2_tp2_ep2() -> Mesh:
    return cpu_mesh("fsdp:2,tp:2,ep:2")
