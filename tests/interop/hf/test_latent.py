"""Attention over latent rows: with a cache, keys and values are never built."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import shardwright as sw
from shardwright.interop.hf.model import latent
from shardwright.testing import cpu_mesh
from tests.layers import blocks

CONFIG = latent.LatentConfig(
    embed=16, heads=2, rank=8, query_rank=None, plain_dim=4, rope_dim=4, value_dim=6
)


def test_a_short_prompt_gives_the_same_with_and_without_a_cache() -> None:
    params = blocks.random_params(latent.specs(CONFIG))
    x = np.random.default_rng(0).normal(size=(1, 2, 16)).astype(np.float32)
    shape = latent.cache_shape(CONFIG, batch=1, capacity=2)
    run = jax.jit(functools.partial(latent.apply, CONFIG))
    pm = sw.PartitionManager(sw.Strategy.preset("single"), mesh=cpu_mesh("dp:1"), mode="train")
    with pm:
        whole, _ = run(params, x)
    with pm.for_mode("prefill"):
        cached, _ = run(params, x, cache=jnp.zeros(shape.shape, shape.dtype))
    np.testing.assert_allclose(cached, whole, rtol=1e-5, atol=1e-5)
