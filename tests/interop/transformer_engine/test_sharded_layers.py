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
from tests.layers.blocks import assert_close

KINDS = {"auto": "auto", "explicit": "explicit", "mixed": {"tp": "explicit"}}
FIELDS: list[dict[str, Any]] = [
    {"enable_sequence_parallel": True},
    {"num_gqa_groups": 2, "enable_rotary_pos_emb": True, "transpose_batch_sequence": True},
    {"num_gqa_groups": 2, "fuse_qkv_params": False, "use_bias": True, "drop_path": 0.2},
    {
        "low_rank_adaptation_scope": "all",
        "mlp_activations": ("silu", "linear"),
        "softmax_type": "learnable",
        "intermediate_dropout": 0.3,
    },
    {
        "enable_sequence_parallel": True,
        "layernorm_type": "rmsnorm",
        "output_layernorm": True,
        "apply_residual_connection_post_layernorm": True,
        "rotary_pos_emb_group_method": "alternate",
        "enable_rotary_pos_emb": True,
        "window_size": (2, 0),
    },
]
OWN = {"heads": (sw.HEAD, "param"), "relpos_buckets": (sw.HEAD_DIM, "param")}
RULES = (("heads", "tp"), ("relpos_buckets", None))


@contextlib.contextmanager
def resource(mesh: Any) -> Any:
    own = te.MeshResource(fsdp_resource="fsdp", tpsp_resource="tp")
    with jax.set_mesh(mesh), te.autocast(mesh_resource=own):
        yield


@contextlib.contextmanager
def manager(mesh: Any) -> Any:
    with sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh, mode="train"):
        yield


def placed(boxed: Any, mesh: Any) -> Any:
    """Return the parameters, sharded by the logical names of their boxes."""
    with resource(mesh):
        rules = te.extend_logical_axis_rules(RULES)
    specs = nn.logical_to_mesh(nn.get_partition_spec(boxed), rules)["params"]
    params = nn.unbox(boxed)["params"]
    return jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, jax.NamedSharding(mesh, spec)), params, specs
    )


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [resource, manager])
@pytest.mark.parametrize("fields", FIELDS, ids=range(len(FIELDS)))
@pytest.mark.pairwise
def test_layer_on_a_mesh(fields: Any, context: Any, kind: str) -> None:
    layer = te.flax.TransformerLayer(
        hidden_size=16,
        mlp_hidden_size=32,
        num_attention_heads=4,
        layer_type=te.flax.TransformerLayerType.DECODER,
        **fields,
    )
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 4, 16)), jnp.float32)
    x = x.swapaxes(0, 1) if layer.transpose_batch_sequence else x
    causal = np.triu(np.ones((4, 4), np.uint8), 1)
    masks = [jnp.asarray(np.broadcast_to(mask, (8, 1, 4, 4))) for mask in (causal, causal * 0)]
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    boxed = layer.init(rngs, x, x, *masks)

    def loss(params: Any, x: Any) -> Any:
        y = layer.apply({"params": params}, x, x * 0.5, *masks, rngs=rngs)
        return jnp.sum(jnp.sin(y)), y

    run = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    wanted = run(nn.unbox(boxed)["params"], x)
    mesh = sw.create_mesh("fsdp:4,tp:2", axis_types=KINDS[kind])
    params = placed(boxed, mesh)
    with context(mesh):
        got = run(params, x)
    assert "fsdp" in str(got[1].sharding)
    assert "tp" in str(got[0][0]["mlp"]["wi_kernel"].sharding)
    # The gradient of the bias of keys is 0, as softmax does not change: only rounding is left.
    assert_close(got, wanted, least=0.1)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.full
def test_decode_on_a_mesh(kind: str) -> None:
    module = te.flax.MultiHeadAttention(4, 4, transpose_batch_sequence=False, num_gqa_groups=2)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 4, 16)), jnp.float32)
    boxed = module.init(jax.random.key(0), x, x, decode=True, deterministic=True)
    cache, rows = nn.unbox(boxed)["cache"], []
    expected, _ = module.apply({"params": nn.unbox(boxed)["params"]}, x, x, deterministic=True)
    mesh = sw.create_mesh("fsdp:4,tp:2", axis_types=KINDS[kind])
    params = placed(boxed, mesh)

    @jax.jit
    def step(cache: Any, x: Any) -> Any:
        (y, _), state = module.apply(
            {"params": params, "cache": cache},
            x,
            x,
            decode=True,
            deterministic=True,
            mutable=["cache"],
        )
        return y, state["cache"]

    with resource(mesh):
        for at in range(4):
            row, cache = step(cache, x[:, at : at + 1])
            rows.append(np.asarray(row))
    np.testing.assert_allclose(np.concatenate(rows, axis=1), expected, atol=1e-5)
