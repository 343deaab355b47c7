"""A small model written for eformer; its two arguments decide whose names it uses."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

HIDDEN, HEADS, HEAD_DIM, INNER, VOCAB = 16, 4, 4, 32, 32


@dataclasses.dataclass(frozen=True)
class Model:
    """Attention and two MLP layers on token ids `[batch, length]`, with the four common calls."""

    es: ModuleType
    ct: ModuleType
    pm: Any

    def attention(self, params: Any, x: Any, mode: Any) -> Any:
        es, ct, pm = self.es, self.ct, self.pm
        batch, length, _ = x.shape
        q, k, v = (
            (x @ params[name]).reshape(batch, length, HEADS, HEAD_DIM) for name in ("q", "k", "v")
        )
        q = es.apply_logical_sharding(q, dynamic_axes=ct.AttnQSharding, partition_manager=pm)
        k, v = (
            es.apply_logical_sharding(
                t,
                axes=[ct.BATCH, None, ct.KV_HEAD, ct.KV_HEAD_DIM],
                mode=mode,
                partition_manager=pm,
            )
            for t in (k, v)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(HEAD_DIM)
        scores = pm.shard(scores, axes=[ct.BATCH, ct.HEAD, ct.QUERY_LENGTH, ct.EMPTY], mode=mode)
        mask = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, ct.DEFAULT_MASK_VALUE))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, HIDDEN)
        return es.apply_logical_sharding(
            mixed @ params["o"], dynamic_axes=ct.HiddenStateSharding, partition_manager=pm
        )

    def mlp(self, params: Any, x: Any, mode: Any) -> Any:
        es, ct, pm = self.es, self.ct, self.pm
        inner = jax.nn.silu(x @ params["up"])
        spec = pm.resolve(
            axes=[ct.BATCH, ct.QUERY_LENGTH, ct.MLP_INTERMEDIATE], mode=mode, shape=inner.shape
        )
        inner = es.with_sharding_constraint(inner, spec)
        return es.apply_logical_sharding(
            inner @ params["down"], dynamic_axes=ct.HiddenStateSharding, partition_manager=pm
        )

    def __call__(self, params: Any, tokens: Any, mode: Any = None) -> Any:
        mode = self.ct.MODE_TRAIN if mode is None else mode
        x = jax.nn.one_hot(tokens, VOCAB) @ params["embed"]
        x = self.es.apply_logical_sharding(
            x, dynamic_axes=self.ct.HiddenStateSharding, partition_manager=self.pm
        )
        x = x + self.attention(params["attn"], x, mode)
        for layer in ("mlp_0", "mlp_1"):
            x = x + self.mlp(params[layer], x, mode)
        return x @ params["embed"].T

    def loss(self, params: Any, tokens: Any) -> Any:
        logits = self(params, tokens[:, :-1])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1))


def rules(ct: ModuleType, pm: Any) -> list[tuple[str, Any]]:
    """Return path rules with specs of layouts."""
    column, row = (pm.resolve(layout) for layout in (ct.ColumnWise, ct.RowWise))
    return [
        ("(q|k|v|up)$", column),
        ("(o|down)$", row),
        (
            "embed",
            jax.P(
                pm.paxis.vocab_axis,
                (pm.paxis.fully_sharded_data_parallel_axis, pm.paxis.sequence_parallel_axis),
            ),
        ),
    ]


def init() -> Any:
    rng = np.random.default_rng(0)

    def make(*shape: int) -> Any:
        return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    return {
        "attn": {name: make(HIDDEN, HIDDEN) for name in ("q", "k", "v", "o")},
        **{
            layer: {"up": make(HIDDEN, INNER), "down": make(INNER, HIDDEN)}
            for layer in ("mlp_0", "mlp_1")
        },
        "embed": make(VOCAB, HIDDEN),
    }


def train(loss: Any, params: Any, tokens: Any, steps: int = 4) -> tuple[list[float], Any]:
    """Return the losses and the parameters of a few steps of gradient descent."""

    @jax.jit
    def step(params: Any, tokens: Any) -> tuple[Any, Any]:
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradient), value

    losses = []
    for _ in range(steps):
        params, value = step(params, tokens)
        losses.append(float(value))
    return losses, params
