"""A decoder like that of `test_zero_cost.py` in plain JAX, with literal `PartitionSpec`s.

A train step of the blocks must compile to the same program. This module does not import the
library.
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
FLOAT32 = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Specs:
    """The specs on one mesh.

    Attributes:
      stored: Of each kind of weight, as stored.
      used: The same, as used.
      residual: Of the residual.
      operand: Of what enters a matmul, and of tokens.
      heads: Of queries, keys and values.
      up: Of the results of the up projections.
      hidden: Of what enters the down projection, and of logits.
      vocab: Mesh axes that shard the vocabulary.
    """

    stored: dict[str, P]
    used: dict[str, P]
    residual: P
    operand: P
    heads: P
    up: P
    hidden: P
    vocab: tuple[str, ...]


_TENSOR = {
    "table": P("tp"),
    "qkv": P(None, "tp"),
    "out": P("tp"),
    "up": P(None, None, "tp"),
    "down": P("tp"),
    "head": P(None, "tp"),
    "norm": P(),
}
FSDP_TP = Specs(
    stored={
        "table": P("tp", "fsdp"),
        "qkv": P("fsdp", "tp"),
        "out": P("tp", None, "fsdp"),
        "up": P("fsdp", None, "tp"),
        "down": P("tp", "fsdp"),
        "head": P("fsdp", "tp"),
        "norm": P(),
    },
    used=_TENSOR,
    residual=P("fsdp"),
    operand=P("fsdp"),
    heads=P("fsdp", None, "tp"),
    up=P("fsdp", None, None, "tp"),
    hidden=P("fsdp", None, "tp"),
    vocab=("tp",),
)
TENSOR = dataclasses.replace(
    FSDP_TP,
    stored=_TENSOR,
    residual=P("dp"),
    operand=P("dp"),
    heads=P("dp", None, "tp"),
    up=P("dp", None, None, "tp"),
    hidden=P("dp", None, "tp"),
)
FSDP = Specs(
    stored={
        "table": P(None, "fsdp"),
        "qkv": P("fsdp"),
        "out": P(None, None, "fsdp"),
        "up": P("fsdp"),
        "down": P(None, "fsdp"),
        "norm": P(),
    },
    used=dict.fromkeys(_TENSOR, P()),
    residual=P("fsdp"),
    operand=P("fsdp"),
    heads=P("fsdp"),
    up=P("fsdp"),
    hidden=P("fsdp"),
    vocab=(),
)
SPECS = {
    "fsdp": FSDP,
    "tensor": TENSOR,
    "fsdp_tp": FSDP_TP,
    "fsdp_tp_sp": dataclasses.replace(FSDP_TP, residual=P("fsdp", "tp")),
}
_KIND = {"query": "qkv", "key": "qkv", "value": "qkv"}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(w: jax.Array, use: NamedSharding, stored: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(w, use)


def _gather_forward(w: jax.Array, use: NamedSharding, stored: NamedSharding) -> Any:
    return jax.lax.with_sharding_constraint(w, use), None


def _gather_backward(use: NamedSharding, stored: NamedSharding, _: None, g: jax.Array) -> Any:
    return (jax.lax.with_sharding_constraint(g, stored),)


gather.defvjp(_gather_forward, _gather_backward)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandWritten:
    """The model on one mesh. With `scan` the layers are stacked."""

    mesh: Mesh
    specs: Specs
    layers: int
    scan: bool
    attend: Callable[..., jax.Array] = dataclasses.field(default_factory=lambda: attend)

    def put(self, x: jax.Array, spec: P) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def read(self, weights: Any, kind: str) -> Any:
        """Gather the weights of one kind."""
        use, stored = (
            NamedSharding(self.mesh, specs[kind]) for specs in (self.specs.used, self.specs.stored)
        )
        return jax.tree.map(lambda w: gather(w, use, stored), weights)

    def read_block(self, weights: Any) -> Any:
        return {name: self.read(part, _KIND.get(name, name)) for name, part in weights.items()}

    def loss(self, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        x, labels = self.residual(params, batch["inputs"]), batch["targets"]
        return self.cross_entropy(params, x, self.put(labels, self.specs.operand))

    def residual(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Return the residual after the last norm."""
        x = self.look_up(self.read(self.table(params), "table"), tokens)
        if self.scan:
            x, _ = jax.lax.scan(lambda x, layer: (self.layer(layer, x), None), x, params["layers"])
        else:
            for layer in params["layers"]:
                x = self.layer(layer, x)
        return self.put(rms_norm(x, self.read(params["norm"]["scale"], "norm")), self.specs.operand)

    def table(self, params: Any) -> Any:
        """Return the stored embedding table."""
        return params["table"]

    def logits(self, params: Any, x: jax.Array) -> jax.Array:
        table = self.read(self.table(params), "table")
        return self.put(jnp.einsum("ble,ve->blv", x, table), self.specs.hidden)

    def look_up(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        names, specs = self.specs.vocab, self.specs

        def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
            rows = table.shape[0]
            tokens = tokens - jax.lax.axis_index(names) * rows if names else tokens
            is_here = (tokens >= 0) & (tokens < rows)
            found = table.at[jnp.where(is_here, tokens, 0)].get(mode="promise_in_bounds")
            found = jnp.where(is_here[..., None], found, jnp.zeros((), found.dtype))
            return jax.lax.psum(found, names) if names else found

        where = {"in_specs": (P(*names), specs.operand), "out_specs": specs.operand}
        return self.put(
            jax.shard_map(local, mesh=self.mesh, **where)(table, tokens), specs.residual
        )

    def layer(self, layer: Any, x: jax.Array) -> jax.Array:
        put, residual = self.put, self.specs.residual
        weights = self.read_block(layer["attention"])
        q, k, v = self.queries(weights, x, jnp.arange(x.shape[1])[None])
        rows = put(self.attend(q, k, v), self.specs.heads)
        x = put(x + self.out(weights, rows), residual)
        return put(x + self.mlp(self.read_block(layer["mlp"]), x), residual)

    def queries(self, weights: Any, x: jax.Array, positions: jax.Array) -> list[jax.Array]:
        """Return queries, keys and values."""
        put, specs = self.put, self.specs
        x = put(rms_norm(put(x, specs.residual), weights["norm"]["scale"]), specs.operand)
        q, k, v = (
            put(matmul(x, weights[name]["kernel"]), specs.heads)
            for name in ("query", "key", "value")
        )
        return [rotate(q, positions), rotate(k, positions), v]

    def out(self, weights: Any, rows: jax.Array) -> jax.Array:
        rows = self.put(rows, self.specs.heads)
        return self.put(matmul(rows, weights["out"]["kernel"], contract=2), self.specs.residual)

    def mlp(self, weights: Any, x: jax.Array) -> jax.Array:
        put, specs = self.put, self.specs
        x = put(rms_norm(put(x, specs.residual), weights["norm"]["scale"]), specs.operand)
        up = put(matmul(x, weights["up"]["kernel"]), specs.up)
        hidden = put(jax.nn.silu(up[..., 0, :]) * up[..., 1, :], specs.hidden)
        return put(matmul(hidden, weights["down"]["kernel"]), specs.residual)

    def cross_entropy(self, params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        logits = self.logits(params, x)
        counts = (labels != -100) & (labels >= 0)
        total = jax.nn.logsumexp(logits, axis=-1)
        hit = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == labels[..., None]
        chosen = jnp.sum(jnp.where(hit, logits, 0), axis=-1)
        tokens = jnp.maximum(jnp.sum(counts, dtype=jnp.int32), 1).astype(jnp.float32)
        return jnp.sum(jnp.where(counts, total - chosen, 0)) / tokens

    def train_step(self, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
        """Return the jitted step of `optax.adamw` with a constant learning rate."""

        def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
            loss, gradients = jax.value_and_grad(self.loss)(state["params"], batch)
            updates, opt = optimizer.update(gradients, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

        params = self.parameters()
        adam = optax.ScaleByAdamState(count=P(), mu=params, nu=params)
        specs = {"params": params, "opt": (adam, optax.EmptyState(), optax.EmptyState())}
        state = jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec),
            specs,
            is_leaf=lambda leaf: isinstance(leaf, P),
        )
        tokens = NamedSharding(self.mesh, self.specs.residual)
        where = {"in_shardings": (state, tokens), "out_shardings": (state, None)}
        return jax.jit(step, donate_argnums=0, **where)

    def parameters(self) -> dict[str, Any]:
        """Return the specs of the stored parameters."""
        blocks = {
            "attention": ("key", "norm", "out", "query", "value"),
            "mlp": ("down", "norm", "up"),
        }

        def spec(name: str) -> P:
            own = self.specs.stored[_KIND.get(name, name)]
            return P(None, *own) if self.scan and name != "norm" else own

        layer = {
            block: {name: {"scale" if name == "norm" else "kernel": spec(name)} for name in names}
            for block, names in blocks.items()
        }
        return {
            "table": self.specs.stored["table"],
            "layers": layer if self.scan else [layer] * self.layers,
            "norm": {"scale": P()},
        }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale


def matmul(x: jax.Array, w: jax.Array, *, contract: int = 1) -> jax.Array:
    last = tuple(range(x.ndim - contract, x.ndim))
    return jax.lax.dot_general(x, w, ((last, tuple(range(contract))), ((), ())))


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    frequencies = np.float32(10_000.0 ** (-np.arange(half) / half))
    # A negative position is padding.
    positions = jnp.maximum(positions, 0).astype(jnp.float32)
    angles = positions[:, :, None, None] * frequencies.reshape(1, 1, 1, half)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@jax.jit
def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array | None = None,
    lengths: jax.Array | None = None,
) -> jax.Array:
    """Attend to the keys up to the own position; with a cache, to those below its lengths."""
    batch, length, heads, size = q.shape
    kv_length, kv_heads = k.shape[1:3]
    own, keys = jnp.arange(length)[None] if positions is None else positions, jnp.arange(kv_length)
    seen = keys[None, None, None, :] <= own[:, None, :, None]
    if lengths is not None:
        is_key = keys[None] < lengths[:, None]
        v = jnp.where(is_key[:, :, None, None], v, jnp.zeros((), v.dtype))
        seen = seen & (keys[None, None, None, :] < lengths[:, None, None, None])
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, size)
    logits = jnp.einsum("btkgd,bskd->bkgts", grouped, k, **FLOAT32)
    logits = logits.reshape(batch, heads, length, kv_length) * size**-0.5
    logits = jnp.where(seen, logits, MASKED)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, initial=MASKED))
    p = jnp.where(seen, jnp.exp(logits - top), 0.0)
    total = jnp.sum(p, axis=-1, keepdims=True)
    groups = (batch, kv_heads, heads // kv_heads, length, kv_length)
    weights = (p / jnp.where(total == 0.0, 1.0, total)).reshape(groups)
    out = jnp.einsum("bkgts,bskd->bkgtd", weights, v, **FLOAT32)
    return jnp.swapaxes(out.reshape(batch, heads, length, size), 1, 2)
