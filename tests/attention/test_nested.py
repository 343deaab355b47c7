"""A gradient through attention inside a `shard_map` over the data axes, as in accumulation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.attention import call, dot_product_attention
from shardwright.testing import cpu_mesh
from shardwright.testing.attention_cases import STRATEGY
from tests.attention.conformance import QUICK

MESHES = {
    "blockwise": "dp:2,tp:2",
    "sdpa": "dp:2,tp:2",
    "splash": "dp:2,tp:2",
    "ring": "dp:2,sp:2",
    "ulysses": "dp:2,sp:2",
    "allgather_kv": "dp:2,sp:2",
    "flash_decode": "dp:2,sp:2",
}
SAVE = jax.checkpoint_policies.save_only_these_names(call.OUTPUT_NAME, call.LSE_NAME)
Tree = dict[str, jax.Array]


def loss(params: Tree, x: jax.Array, *, remat: Callable[..., Any], **options: Any) -> jax.Array:
    """Layers in a scan that share their sinks."""
    if options["implementation"] != "sdpa":
        options["sinks"] = params["sinks"]

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return x + dot_product_attention(x * w, x, x, causal=True, **options), None

    return jnp.sum(lax.scan(remat(layer), x, params["w"])[0] ** 2)


@pytest.mark.full
@pytest.mark.parametrize("implementation", MESHES)
@pytest.mark.ci
def test_gradient_inside_shard_map(implementation: str) -> None:
    """Two microbatches on every data shard; plain, with remat, and with a policy."""
    pm = sw.PartitionManager(sw.Strategy.loads(STRATEGY), mesh=cpu_mesh(MESHES[implementation]))
    draw = np.random.default_rng(0).standard_normal
    params = {"w": jnp.float32(draw((2, 2, 8))), "sinks": jnp.float32(draw(2))}
    x = jnp.float32(draw((8, 16, 2, 8)))
    mode = "decode" if implementation == "flash_decode" else "train"
    options = {"mode": mode, "implementation": implementation}

    def every(params: Tree, x: jax.Array, gradient: Callable[..., Tree]) -> list[Tree]:
        kinds = (lambda f: f, jax.checkpoint, functools.partial(jax.checkpoint, policy=SAVE))
        return [gradient(params, x, remat=remat) for remat in kinds]

    def whole(params: Tree, x: jax.Array, **remat: Any) -> Tree:
        return jax.grad(functools.partial(loss, **remat, mode="train", implementation="vanilla"))(
            params, x
        )

    def accumulated(params: Tree, x: jax.Array, **remat: Any) -> Tree:
        f = functools.partial(loss, **remat, **options)

        @functools.partial(jax.shard_map, in_specs=(P(), P("dp")), out_specs=P(), axis_names={"dp"})
        def run(params: Tree, x: jax.Array) -> Tree:
            varying = lax.pcast(params, ("dp",), to="varying")

            def add(total: Tree, part: jax.Array) -> tuple[Tree, None]:
                return jax.tree.map(jnp.add, total, jax.grad(f)(varying, part)), None

            start = jax.tree.map(jnp.zeros_like, varying)
            return lax.psum(lax.scan(add, start, x.reshape(2, -1, *x.shape[1:]))[0], "dp")

        return run(params, x)

    programs = [
        jax.jit(functools.partial(every, gradient=gradient), compiler_options=QUICK)
        for gradient in (whole, accumulated)
    ]
    want = programs[0](params, x)
    if implementation == "sdpa":
        no_sinks = {**params, "sinks": jnp.full(2, -jnp.inf)}
        want = [{**each, "sinks": jnp.zeros(2)} for each in programs[0](no_sinks, x)]
    with pm:
        actual = programs[1](params, x)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * float(np.abs(b).max()))


def test_opaque_kernels_need_a_free_mesh_axis() -> None:
    """Inside a `shard_map` over all mesh axes, splash is refused and blockwise runs."""
    from shardwright.attention import explain

    pm = sw.PartitionManager(sw.Strategy.loads(STRATEGY), mesh=cpu_mesh("dp:2"))
    seen = []

    def local(x: jax.Array) -> jax.Array:
        seen.append(explain(x, x, x, mode="train", implementation="splash").refusals[0].reasons)
        return dot_product_attention(x, x, x, mode="train")

    with pm:
        run = jax.shard_map(local, in_specs=P("dp"), out_specs=P("dp"))
        jax.make_jaxpr(run)(jnp.ones((2, 8, 2, 8)))
    assert seen == [("it cannot run inside a shard_map over all mesh axes, dp",)]
