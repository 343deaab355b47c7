"""The demo's model in plain JAX, with literal `PartitionSpec`s: one table of them per mesh.

The demo must compile to the same programs as this model. This module imports neither the library
nor the demo.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tests.layers import hand_written

FSDP2_TP4 = hand_written.FSDP_TP
DP2_TP4 = hand_written.TENSOR
FSDP2_SP2_TP2 = dataclasses.replace(
    FSDP2_TP4,
    stored={
        "table": P("tp", ("fsdp", "sp")),
        "qkv": P(("fsdp", "sp"), "tp"),
        "out": P("tp", None, ("fsdp", "sp")),
        "up": P(("fsdp", "sp"), None, "tp"),
        "down": P("tp", ("fsdp", "sp")),
        "head": P(("fsdp", "sp"), "tp"),
        "norm": P(),
    },
    residual=P("fsdp", "sp"),
    operand=P("fsdp", "sp"),
    heads=P("fsdp", "sp", "tp"),
    up=P("fsdp", "sp", None, "tp"),
    hidden=P("fsdp", "sp", "tp"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandWritten(hand_written.HandWritten):
    """The model on one mesh, with an output projection of its own, and caches."""

    scan: bool = False

    def logits(self, params: Any, x: jax.Array) -> jax.Array:
        head = self.read(params["lm_head"], "head")
        return self.put(jnp.einsum("ble,ev->blv", x, head), self.specs.hidden)

    def parameters(self) -> dict[str, Any]:
        # `super()` does not work in a class with slots.
        parameters = hand_written.HandWritten.parameters(self)
        return {
            "embedding": parameters.pop("table"),
            **parameters,
            "lm_head": self.specs.stored["head"],
        }

    def table(self, params: Any) -> Any:
        return params["embedding"]

    def decode_step(self) -> Callable[..., Any]:
        """Return the jitted decode step, caches and last bytes donated.

        A cache is any dataclass with `length`, `k` and `v`.
        """
        slots = P(self.specs.operand[0])

        def decode(params: Any, caches: list[Any], last: jax.Array) -> tuple[Any, jax.Array]:
            occupied = caches[0].length[:, None] > 0
            x, written = self.look_up(self.read(params["embedding"], "table"), last[:, None]), []
            for layer, cache in zip(params["layers"], caches, strict=True):
                x, after = self.cached_layer(layer, x, cache, occupied)
                written.append(after)
            last_norm = self.read(params["norm"]["scale"], "norm")
            x = self.put(hand_written.rms_norm(x, last_norm), self.specs.operand)
            likeliest = jnp.argmax(self.logits(params, x)[:, 0], axis=-1).astype(jnp.int32)
            return written, self.put(likeliest, slots)

        return jax.jit(decode, donate_argnums=(1, 2))

    def cached_layer(self, layer: Any, x: jax.Array, cache: Any, valid: jax.Array) -> Any:
        put, specs = self.put, self.specs
        weights = self.read_block(layer["attention"])
        slots = P(specs.operand[0])
        is_token = put(valid, slots)
        positions = cache.length[:, None] + jnp.cumsum(is_token, axis=1, dtype=jnp.int32) - 1
        q, k, v = self.queries(weights, x, jnp.where(is_token, positions, -1))
        cache, positions = self.append(cache, k, v, is_token)
        positions = put(positions, slots)
        rows = put(self.attend(q, cache.k, cache.v, positions, cache.length), specs.heads)
        rows = jnp.where(positions[:, :, None, None] >= 0, rows, 0)
        x = put(x + self.out(weights, rows), specs.residual)
        return put(x + self.mlp(self.read_block(layer["mlp"]), x), specs.residual), cache

    def append(self, cache: Any, k: jax.Array, v: jax.Array, is_token: jax.Array) -> Any:
        """Return the cache with the new rows, and the positions of the new rows."""
        slots, capacity = P(self.specs.operand[0]), cache.k.shape[1]
        positions = cache.length[:, None] + jnp.cumsum(is_token, axis=1, dtype=jnp.int32) - 1
        after = cache.length + jnp.sum(is_token, axis=1, dtype=jnp.int32)
        overflows = after > capacity
        accepted = is_token & ~overflows[:, None]
        targets = jnp.where(
            accepted & (positions >= after[:, None] - capacity), positions, capacity
        )

        @jax.vmap
        def write(rows: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
            return rows.at[at].set(new, mode="drop")

        def local(old: Any, new: Any, at: jax.Array) -> Any:
            at = jnp.where((at >= 0) & (at < capacity), at, capacity)
            return [write(rows, values, at) for rows, values in zip(old, new, strict=True)]

        both = [self.specs.heads] * 2
        where = {"in_specs": (both, both, slots), "out_specs": both}
        written = jax.shard_map(local, mesh=self.mesh, **where)([cache.k, cache.v], [k, v], targets)
        length = self.put(jnp.where(overflows, cache.length, after), slots)
        cache = dataclasses.replace(cache, length=length, k=written[0], v=written[1])
        return cache, jnp.where(accepted, positions, -1)
