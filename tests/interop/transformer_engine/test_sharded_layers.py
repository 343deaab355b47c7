"""A layer on a mesh gives what it gives without one."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax.linen")

import flax.linen as nn

import shardwright as sw
import shardwright.interop.transformer_engine as te


@contextlib.contextmanager
def resource() -> Any:
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=auto)
    own = te.MeshResource(fsdp_resource="fsdp", tpsp_resource="tp")
    with jax.set_mesh(mesh), te.autocast(mesh_resource=own):
        yield


@contextlib.contextmanager
def manager() -> Any:
    mesh = sw.create_mesh("fsdp:4,tp:2", axis_types="auto")
    with sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh):
        yield


@pytest.mark.parametrize("context", [resource, manager])
@pytest.mark.wide
def test_layer_on_a_mesh(context: Any) -> None:
    layer = te.flax.TransformerLayer(
        hidden_size=8, mlp_hidden_size=16, num_attention_heads=2, enable_sequence_parallel=True
    )
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 4, 8)), jnp.float32)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = nn.unbox(layer.init(rngs, x))["params"]

    def loss(params: Any) -> Any:
        y = layer.apply({"params": params}, x, rngs={"dropout": jax.random.key(2)})
        return jnp.sum(jnp.sin(y)), y

    run = jax.jit(jax.grad(loss, has_aux=True))
    grads, y = run(params)
    with context():
        sharded_grads, sharded = run(params)
    assert "tp" in str(sharded.sharding) or "fsdp" in str(sharded.sharding)
    np.testing.assert_allclose(sharded, y, atol=1e-5)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        other = sharded_grads
        for key in path:
            other = other[key.key]
        np.testing.assert_allclose(other, leaf, atol=2e-5, err_msg=str(path))
