"""The demo's model in plain JAX, with literal `PartitionSpec`s: one table of them per mesh.

The demo must compile to the same program as this model. This module imports neither the library
nor the demo.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MASKED = -0.7 * float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Specs:
    """The specs on one mesh: of stored weights, of the same weights in use, and of activations."""

    stored: dict[str, P]
    used: dict[str, P]
    tokens: P
    hidden: P
    queries: P
    new_rows: P
    cache: P
    scores: P
    mlp: P
    logits: P


FSDP2_TP4 = Specs(
    stored={
        "embedding": P("tp", "fsdp"),
        "qkv": P("fsdp", "tp"),
        "o": P("tp", None, "fsdp"),
        "up": P("fsdp", "tp"),
        "down": P("tp", "fsdp"),
        "lm_head": P("fsdp", "tp"),
        "norm": P(),
    },
    used={
        "embedding": P("tp"),
        "qkv": P(None, "tp"),
        "o": P("tp"),
        "up": P(None, "tp"),
        "down": P("tp"),
        "lm_head": P(None, "tp"),
        "norm": P(),
    },
    tokens=P("fsdp"),
    hidden=P("fsdp"),
    queries=P("fsdp", None, "tp"),
    new_rows=P("fsdp", None, "tp"),
    cache=P("fsdp", None, "tp"),
    scores=P("fsdp", "tp"),
    mlp=P("fsdp", None, "tp"),
    logits=P("fsdp", None, "tp"),
)
_TENSOR = {
    "embedding": P("tp"),
    "qkv": P(None, "tp"),
    "o": P("tp"),
    "up": P(None, "tp"),
    "down": P("tp"),
    "lm_head": P(None, "tp"),
    "norm": P(),
}
DP2_TP4 = Specs(
    stored=_TENSOR,
    used=_TENSOR,
    tokens=P("dp"),
    hidden=P("dp"),
    queries=P("dp", None, "tp"),
    new_rows=P("dp", None, "tp"),
    cache=P("dp", None, "tp"),
    scores=P("dp", "tp"),
    mlp=P("dp", None, "tp"),
    logits=P("dp", None, "tp"),
)
FSDP2_SP2_TP2 = Specs(
    stored={
        "embedding": P("tp", ("fsdp", "sp")),
        "qkv": P(("fsdp", "sp"), "tp"),
        "o": P("tp", None, ("fsdp", "sp")),
        "up": P(("fsdp", "sp"), "tp"),
        "down": P("tp", ("fsdp", "sp")),
        "lm_head": P(("fsdp", "sp"), "tp"),
        "norm": P(),
    },
    used=_TENSOR,
    tokens=P("fsdp", "sp"),
    hidden=P("fsdp", "sp"),
    queries=P("fsdp", "sp", "tp"),
    new_rows=P("fsdp", "sp", "tp"),
    cache=P("fsdp", "sp", "tp"),
    scores=P("fsdp", "tp", "sp"),
    mlp=P("fsdp", "sp", "tp"),
    logits=P("fsdp", "sp", "tp"),
)
_KIND = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "up"}


def parameter_tree(table: dict[str, P], layers: int) -> dict[str, Any]:
    """Lay one table out as the parameters' tree."""
    layer = {"attention": ("norm", "q", "k", "v", "o"), "mlp": ("norm", "gate", "up", "down")}
    layer_specs = {
        part: {name: table[_KIND.get(name, name)] for name in names}
        for part, names in layer.items()
    }
    return {
        "embedding": table["embedding"],
        "layers": [layer_specs] * layers,
        "norm": table["norm"],
        "lm_head": table["lm_head"],
    }


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(w: jax.Array, use: NamedSharding, stored: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(w, use)


def _gather_forward(
    w: jax.Array, use: NamedSharding, stored: NamedSharding
) -> tuple[jax.Array, None]:
    return jax.lax.with_sharding_constraint(w, use), None


def _gather_backward(
    use: NamedSharding, stored: NamedSharding, _: None, g: jax.Array
) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(g, stored),)


gather.defvjp(_gather_forward, _gather_backward)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandWritten:
    """The model on one mesh; `sizes` is anything with the sizes as attributes."""

    mesh: Mesh
    specs: Specs
    sizes: Any

    def named(self, tree: Any) -> Any:
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec),
            tree,
            is_leaf=lambda leaf: isinstance(leaf, P),
        )

    def put(self, x: jax.Array, spec: P) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def read(self, weights: Any) -> Any:
        """Gather a subtree of weights whose keys are their kinds."""
        if isinstance(weights, dict):
            return {
                name: self.read(part) if isinstance(part, dict) else self.read_one(part, name)
                for name, part in weights.items()
            }
        return weights

    def read_one(self, w: jax.Array, name: str) -> jax.Array:
        kind = _KIND.get(name, name)
        return gather(
            w,
            NamedSharding(self.mesh, self.specs.used[kind]),
            NamedSharding(self.mesh, self.specs.stored[kind]),
        )

    def forward(
        self, params: Any, tokens: jax.Array, cache: Any = None, real: Any = None
    ) -> tuple[jax.Array, Any]:
        put, specs = self.put, self.specs
        steps = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        positions = steps if cache is None else cache["length"][:, None] + steps
        table = self.read_one(params["embedding"], "embedding")
        x = put(
            jnp.einsum(
                "bqv,ve->bqe", jax.nn.one_hot(tokens, self.sizes.vocab, dtype=table.dtype), table
            ),
            specs.hidden,
        )
        layers = []
        for at, stored in enumerate(params["layers"]):
            weights = self.read(stored)
            held = None if cache is None else cache["layers"][at]
            mixed, held = self.attention(weights["attention"], x, positions, held, real)
            x = put(x + mixed, specs.hidden)
            x = put(x + self.mlp(weights["mlp"], x), specs.hidden)
            layers.append(held)
        x = self.rms_norm(x, self.read_one(params["norm"], "norm"))
        head = self.read_one(params["lm_head"], "lm_head")
        logits = put(jnp.einsum("bqe,ev->bqv", x, head), specs.logits)
        return logits, None if cache is None else {
            "layers": layers,
            "length": cache["length"] + real,
        }

    def attention(
        self, weights: Any, x: jax.Array, positions: jax.Array, held: Any, real: Any
    ) -> tuple[jax.Array, Any]:
        put, specs = self.put, self.specs
        x = self.rms_norm(x, weights["norm"])
        q = put(self.rope(jnp.einsum("bqe,ehd->bqhd", x, weights["q"]), positions), specs.queries)
        k = put(self.rope(jnp.einsum("bqe,ekd->bqkd", x, weights["k"]), positions), specs.new_rows)
        v = put(jnp.einsum("bqe,ekd->bqkd", x, weights["v"]), specs.new_rows)
        if held is not None:
            held = {
                "k": self.write(held["k"], k, positions, real),
                "v": self.write(held["v"], v, positions, real),
            }
            k, v = held["k"], held["v"]
        out = put(self.attend(q, k, v, positions), specs.queries)
        return jnp.einsum("bqhd,hde->bqe", out, weights["o"]), held

    def write(
        self, rows: jax.Array, new: jax.Array, positions: jax.Array, real: jax.Array
    ) -> jax.Array:
        at = jnp.where(jnp.arange(new.shape[1]) < real[:, None], positions, rows.shape[1])
        written = jax.vmap(lambda row, values, index: row.at[index].set(values, mode="drop"))(
            rows, new, at
        )
        return self.put(written, self.specs.cache)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
        k = jnp.repeat(self.put(k, self.specs.cache), q.shape[2] // k.shape[2], axis=2)
        v = jnp.repeat(self.put(v, self.specs.cache), q.shape[2] // v.shape[2], axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
        seen = jnp.arange(k.shape[1]) <= positions[:, None, :, None]
        scores = self.put(jnp.where(seen, scores, MASKED), self.specs.scores)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)

    def mlp(self, weights: Any, x: jax.Array) -> jax.Array:
        x = self.rms_norm(x, weights["norm"])
        hidden = jax.nn.silu(jnp.einsum("bqe,em->bqm", x, weights["gate"])) * jnp.einsum(
            "bqe,em->bqm", x, weights["up"]
        )
        return jnp.einsum("bqm,me->bqe", self.put(hidden, self.specs.mlp), weights["down"])

    def rms_norm(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        return (
            x
            * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.sizes.norm_eps)
            * scale
        )

    def rope(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        half = x.shape[-1] // 2
        frequencies = self.sizes.rope_theta ** (-jnp.arange(half) / half)
        angles = positions[:, :, None, None] * frequencies
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        first, second = x[..., :half], x[..., half:]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def loss(self, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits, _ = self.forward(params, batch["inputs"])
        hit = jnp.arange(self.sizes.vocab) == batch["targets"][:, :, None]
        chosen = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    def train_step(self, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
        """Return the jitted step of `optax.adamw` with a constant learning rate."""

        def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
            loss, gradients = jax.value_and_grad(self.loss)(state["params"], batch)
            updates, opt = optimizer.update(gradients, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

        params = parameter_tree(self.specs.stored, self.sizes.layers)
        adam = optax.ScaleByAdamState(count=P(), mu=params, nu=params)
        state = self.named(
            {"params": params, "opt": (adam, optax.EmptyState(), optax.EmptyState())}
        )
        where = {
            "in_shardings": (state, self.named(self.specs.tokens)),
            "out_shardings": (state, None),
        }
        return jax.jit(step, donate_argnums=0, **where)

    def decode_step(self) -> Callable[..., Any]:
        """Return the jitted decode step, cache and last bytes donated."""

        def decode(params: Any, cache: Any, last: jax.Array) -> tuple[Any, jax.Array]:
            occupied = (cache["length"] > 0).astype(jnp.int32)
            logits, cache = self.forward(params, last[:, None], cache, occupied)
            return cache, jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)

        rows, slots = self.specs.cache, P(self.specs.cache[0])
        cache = self.named(
            {"layers": [{"k": rows, "v": rows}] * self.sizes.layers, "length": slots}
        )
        return jax.jit(decode, out_shardings=(cache, self.named(slots)), donate_argnums=(1, 2))
