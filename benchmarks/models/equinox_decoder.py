"""A decoder made of equinox's own layers. It does not use shardwright."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp


class Block(eqx.Module):
    """Attention and MLP of one example: [length, embed] to [length, embed]."""

    norms: list[eqx.nn.RMSNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, embed: int, heads: int, *, key: Any) -> None:
        first, second = jax.random.split(key)
        self.norms = [eqx.nn.RMSNorm(embed, use_bias=False) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(heads, embed, key=first)
        self.mlp = eqx.nn.MLP(embed, embed, 4 * embed, 1, jax.nn.gelu, key=second)

    def __call__(self, x: Any) -> Any:
        hidden = jax.vmap(self.norms[0])(x)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attention(hidden, hidden, hidden, mask=mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Decoder(eqx.Module):
    """A decoder of one example: [length] tokens to [length, vocab]."""

    embedding: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, vocab: int, embed: int, heads: int, layers: int, *, key: Any) -> None:
        keys = jax.random.split(key, layers + 2)
        self.embedding = eqx.nn.Embedding(vocab, embed, key=keys[0])
        self.blocks = [Block(embed, heads, key=key) for key in keys[1:-1]]
        self.head = eqx.nn.Linear(embed, vocab, use_bias=False, key=keys[-1])

    def __call__(self, tokens: Any) -> Any:
        x = jax.vmap(self.embedding)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def call(model: Decoder, tokens: Any) -> Any:
    """Return the logits of a batch."""
    return jax.vmap(model)(tokens)
