"""Layers that are written by hand for `benchmarks.moe`, with literal specs, without this library.

The parameters are those of `moe.specs` and `mlp_block.specs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def _put(mesh: Mesh, x: Any, *spec: Any) -> Any:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(w: Any, use: NamedSharding, stored: NamedSharding) -> Any:
    return jax.lax.with_sharding_constraint(w, use)


_gather.defvjp(
    lambda w, use, stored: (_gather(w, use, stored), None),
    lambda use, stored, _, ct: (jax.lax.with_sharding_constraint(ct, stored),),
)


def _routes(router: Any, tokens: Any, per_token: int) -> tuple[Any, Any]:
    """Return the experts of each token, and their weights."""
    scores = jax.nn.softmax(jnp.matmul(tokens, router, precision="highest"))
    weights, picked = jax.lax.top_k(scores, per_token)
    return picked, weights / weights.sum(-1, keepdims=True)


def one_hot_moe(mesh: Mesh, per_token: int, slots: int, params: Any, x: Any) -> Any:
    """Return the MoE layer as einsums of all tokens with one-hot masks.

    The compiler adds the collectives.

    Args:
      mesh: With the axes fsdp and ep.
      per_token: Experts of a token.
      slots: Slots of an expert for the tokens of all devices.
      params: router, gate, up and down.
      x: [batch, length, embed].
    """
    batch, length, embed = x.shape
    tokens = _put(mesh, x.reshape(batch * length, embed), ("fsdp", "ep"))
    picked, weights = _routes(params["router"], tokens, per_token)
    experts = params["router"].shape[1]
    is_picked = jax.nn.one_hot(picked, experts, dtype=jnp.int32)
    # The slot of a copy is the number of copies before it at the same expert.
    flat = is_picked.reshape(-1, experts)
    before = ((jnp.cumsum(flat, axis=0) - flat) * flat).sum(-1).reshape(picked.shape)
    slot = jax.nn.one_hot(before, slots, dtype=x.dtype)
    combine = jnp.einsum("tk,tkx,tkc->txc", weights, is_picked.astype(x.dtype), slot)
    dispatch = (combine > 0).astype(x.dtype)
    rows = _put(mesh, jnp.einsum("txc,te->xce", dispatch, tokens), "ep", "fsdp")
    hidden = jax.nn.silu(jnp.einsum("xce,xef->xcf", rows, params["gate"]))
    hidden = hidden * jnp.einsum("xce,xef->xcf", rows, params["up"])
    results = _put(mesh, jnp.einsum("xcf,xfe->xce", hidden, params["down"]), "ep", "fsdp")
    y = _put(mesh, jnp.einsum("txc,xce->te", combine, results), ("fsdp", "ep"))
    return _put(mesh, y.reshape(x.shape), ("fsdp", "ep"))


def all_to_all_moe(mesh: Mesh, per_token: int, slots: int, params: Any, x: Any) -> Any:
    """Return the MoE layer as one `shard_map` with two all-to-alls.

    Args:
      mesh: With the axes fsdp and ep.
      per_token: Experts of a token.
      slots: Slots of a sender at each expert.
      params: router, gate, up and down, stored over fsdp too.
      x: [batch, length, embed].
    """
    stored, used = P("ep", "fsdp"), P("ep")
    tables = {
        "router": (P(("fsdp", "ep")), P()),
        "gate": (stored, used),
        "up": (stored, used),
        "down": (P("ep", None, "fsdp"), used),
    }
    weights = {
        name: _gather(params[name], NamedSharding(mesh, use), NamedSharding(mesh, kept))
        for name, (kept, use) in tables.items()
    }

    def local(params: Any, x: Any) -> Any:
        tokens = x.reshape(-1, x.shape[-1])
        experts = params["router"].shape[1]
        picked, scores = _routes(params["router"], tokens, per_token)
        flat = picked.reshape(-1)
        load = jnp.zeros(experts, jnp.int32).at[flat].add(1)
        order = jnp.argsort(flat, stable=True)
        rank = jnp.arange(flat.size) - (jnp.cumsum(load) - load)[flat[order]]
        slot = jnp.zeros_like(flat).at[order].set(rank)
        places = jnp.where(slot < slots, flat * slots + slot, experts * slots)
        rows = jnp.zeros((experts * slots, x.shape[-1]), x.dtype)
        rows = rows.at[places].set(jnp.repeat(tokens, per_token, axis=0), mode="drop")
        rows = rows.reshape(experts, slots, -1)
        rows = jax.lax.all_to_all(rows, "ep", split_axis=0, concat_axis=1, tiled=True)
        hidden = jax.nn.silu(jnp.einsum("xre,xef->xrf", rows, params["gate"]))
        hidden = hidden * jnp.einsum("xre,xef->xrf", rows, params["up"])
        results = jnp.einsum("xrf,xfe->xre", hidden, params["down"])
        results = jax.lax.all_to_all(results, "ep", split_axis=1, concat_axis=0, tiled=True)
        copies = results.reshape(experts * slots, -1).at[places].get(mode="fill", fill_value=0)
        copies = copies.reshape(*picked.shape, -1) * scores[..., None]
        return copies.sum(1).reshape(x.shape)

    uses = {name: use for name, (_, use) in tables.items()}
    tokens = P(("fsdp", "ep"))
    return jax.shard_map(local, mesh=mesh, in_specs=(uses, tokens), out_specs=tokens)(weights, x)


def mlp(mesh: Mesh, params: Any, x: Any) -> Any:
    """Return what a gated MLP adds to the residual, with constraints over fsdp and tp."""

    def weight(name: str, use: P, stored: P) -> Any:
        return _gather(
            params[name]["kernel"], NamedSharding(mesh, use), NamedSharding(mesh, stored)
        )

    up = weight("up", P(None, None, "tp"), P("fsdp", None, "tp"))
    down = weight("down", P("tp"), P("tp", "fsdp"))
    scale = _gather(params["norm"]["scale"], NamedSharding(mesh, P()), NamedSharding(mesh, P()))
    x = _put(mesh, x, "fsdp")
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale
    x = _put(mesh, x, "fsdp")
    hidden = _put(mesh, jnp.einsum("ble,eaf->blaf", x, up), "fsdp", None, None, "tp")
    hidden = jax.nn.silu(hidden[..., 0, :]) * hidden[..., 1, :]
    hidden = _put(mesh, hidden, "fsdp", None, "tp")
    return _put(mesh, jnp.einsum("blf,fe->ble", hidden, down), "fsdp")


def flax_mlp(embed: int, hidden: int) -> tuple[Any, Callable[..., Any]]:
    """Return the abstract parameters and the function of the MLP in linen, with logical names."""
    from flax import linen as nn

    rules = (("batch", "fsdp"), ("embed", None), ("mlp", "tp"), ("stored", "fsdp"))

    class Mlp(nn.Module):  # type: ignore[misc]
        @nn.compact
        def __call__(self, x: Any) -> Any:
            def dense(features: int, names: tuple[str, str]) -> Any:
                init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
                return nn.Dense(features, use_bias=False, kernel_init=init)

            x = nn.with_logical_constraint(x, ("batch", None, "embed"))
            x = nn.RMSNorm()(x)
            gate = nn.silu(dense(hidden, ("stored", "mlp"))(x))
            x = gate * dense(hidden, ("stored", "mlp"))(x)
            x = nn.with_logical_constraint(x, ("batch", None, "mlp"))
            x = dense(embed, ("mlp", "stored"))(x)
            return nn.with_logical_constraint(x, ("batch", None, "embed"))

    module = Mlp()
    x = jax.ShapeDtypeStruct((1, 1, embed), jnp.float32)
    params = jax.eval_shape(module.init, jax.random.key(0), x)

    def apply(params: Any, x: Any) -> Any:
        with nn.logical_axis_rules(rules):
            return module.apply(params, x)

    return params, apply
