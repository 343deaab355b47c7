"""An annotated decoder of 8 billion parameters, as programs to plan: train, prefill, decode.

`shardwright plan tests/plan/decoder.py:programs ...` plans it. Attention is plain, so that every
matmul is in the trace.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import shardwright as sw
from shardwright.plan import Program

HIDDEN = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
INSIDE = (sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)
QUERY = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)
KEY = (sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM)
TOKENS = (sw.BATCH, sw.QUERY_LENGTH)
LOGITS = (sw.BATCH, sw.QUERY_LENGTH, sw.VOCAB)
F32, BF16 = jnp.float32, jnp.bfloat16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Sizes of a decoder, and of what it runs on."""

    embed: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    vocab: int = 128256
    layers: int = 32
    batch: int = 64
    length: int = 2048

    def layer(self) -> dict[str, sw.ArraySpec]:
        """Weights of one layer."""
        query = ((self.embed, self.heads, self.dim), (sw.EMBED, sw.HEAD, sw.HEAD_DIM))
        key = ((self.embed, self.kv_heads, self.dim), (sw.EMBED, sw.KV_HEAD, sw.KV_HEAD_DIM))
        out = ((self.heads, self.dim, self.embed), (sw.HEAD, sw.HEAD_DIM, sw.EMBED))
        up = ((self.embed, self.inner), (sw.EMBED, sw.MLP_INTERMEDIATE))
        down = ((self.inner, self.embed), (sw.MLP_INTERMEDIATE, sw.EMBED))
        named = {"q": query, "k": key, "v": key, "o": out, "gate": up, "up": up, "down": down}
        return {name: sw.ArraySpec(shape, BF16, axes) for name, (shape, axes) in named.items()}

    def specs(self) -> dict[str, Any]:
        """All weights; those of the layers are stacked."""
        table = sw.ArraySpec((self.vocab, self.embed), BF16, (sw.VOCAB, sw.EMBED))
        head = sw.ArraySpec((self.embed, self.vocab), BF16, (sw.EMBED, sw.VOCAB))
        return {
            "layers": sw.stack_specs(self.layer(), self.layers),
            "embed": table,
            "head": head,
        }

    def block(self, x: Any, weights: Any, cache: Any = None) -> tuple[Any, Any]:
        """One layer. With a cache, queries attend to it, and their keys are not written."""
        w = sw.gather(weights, self.layer())
        q = sw.shard(jnp.einsum("bse,ehd->bshd", x, w["q"]), QUERY)
        k = sw.shard(jnp.einsum("bse,ehd->bshd", x, w["k"]), KEY)
        v = sw.shard(jnp.einsum("bse,ehd->bshd", x, w["v"]), KEY)
        keys, values = (k, v) if cache is None else cache
        groups = q.reshape(*q.shape[:2], self.kv_heads, -1, self.dim)
        scores = jnp.einsum("bskgd,btkd->bkgst", groups, keys).astype(F32) * self.dim**-0.5
        mixed = jnp.einsum("bkgst,btkd->bskgd", jax.nn.softmax(scores).astype(BF16), values)
        mixed = sw.shard(mixed.reshape(q.shape), QUERY)
        x = sw.shard(x + jnp.einsum("bshd,hde->bse", mixed, w["o"]), HIDDEN)
        inside = jax.nn.silu(sw.shard(x @ w["gate"], INSIDE)) * sw.shard(x @ w["up"], INSIDE)
        return sw.shard(x + inside @ w["down"], HIDDEN), (k, v)

    def logits(self, params: Any, tokens: Any, caches: Any = None) -> tuple[Any, Any]:
        """Logits of all positions, and the keys and values of all layers."""
        table = sw.gather(params["embed"], sw.VOCAB, sw.EMBED)
        x = sw.shard(table[tokens], HIDDEN)

        def step(x: Any, scanned: Any) -> tuple[Any, Any]:
            weights, cache = scanned
            return jax.checkpoint(self.block)(x, weights, cache)

        x, written = jax.lax.scan(step, x, (params["layers"], caches))
        head = sw.gather(params["head"], sw.EMBED, sw.VOCAB)
        return sw.shard(x @ head, LOGITS), written

    def train_step(self, params: Any, moments: Any, tokens: Any) -> Any:
        """A step with one moment per weight."""

        def loss(params: Any) -> Any:
            logits = self.logits(params, tokens)[0].astype(F32)
            return jax.nn.logsumexp(logits, -1).mean()

        gradients = jax.grad(loss)(params)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g.astype(F32), moments, gradients)
        params = jax.tree.map(lambda p, m: p - (0.1 * m).astype(p.dtype), params, moments)
        return params, moments

    def program(self, mode: str) -> Program:
        """Return what runs in a mode."""
        specs = self.specs()
        params = shapes(specs)
        if mode == "train":
            moments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, F32), params)
            tokens = jax.ShapeDtypeStruct((self.batch, self.length), jnp.int32)
            axes = sw.annotate_state(moments, specs)
            return Program(
                self.train_step,
                (params, moments, tokens),
                (specs, axes, TOKENS),
                (specs, axes),
                ("parameters", "optimizer", "inputs"),
                (0, 1),
            )
        if mode == "prefill":
            tokens = jax.ShapeDtypeStruct((self.batch, self.length), jnp.int32)
            return Program(
                lambda params, tokens: self.logits(params, tokens)[0][:, -1],
                (params, tokens),
                (specs, TOKENS),
                None,
                ("parameters", "inputs"),
            )
        cached = (self.layers, self.batch, self.length, self.kv_heads, self.dim)
        cache = jax.ShapeDtypeStruct(cached, BF16)
        tokens = jax.ShapeDtypeStruct((self.batch, 1), jnp.int32)
        axes = (sw.EMPTY, *KEY)
        return Program(
            lambda params, caches, tokens: self.logits(params, tokens, caches)[0][:, -1],
            (params, (cache, cache), tokens),
            (specs, (axes, axes), TOKENS),
            None,
            ("parameters", "cache", "inputs"),
        )


def shapes(specs: Any) -> Any:
    """Return the shapes of weights."""
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, sw.ArraySpec),
    )


def programs() -> dict[str, Program]:
    """Return the three programs of the decoder of 8 billion parameters."""
    return {mode: Decoder().program(mode) for mode in ("train", "prefill", "decode")}
