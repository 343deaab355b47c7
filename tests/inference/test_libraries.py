"""Models of other libraries keep their source; their axes are inferred without guesses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from tests.inference.models import TOKENS

SEEDS = [("BATCH", "LENGTH")]
QUERY = (sw.EMBED, sw.HEAD, sw.HEAD_DIM)


def test_linen_model() -> None:
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            hidden = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(hidden, hidden)
            hidden = nn.LayerNorm()(x)
            return x + nn.Dense(32)(nn.gelu(nn.Dense(80)(hidden)))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            embed = nn.Embed(96, 32)
            x = embed(tokens) + nn.Embed(16, 32)(jnp.arange(tokens.shape[1])[None])
            for _ in range(2):
                x = nn.remat(Block)()(x)
            return embed.attend(nn.LayerNorm()(x))

    model = Model()
    variables = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    inferred = sw.infer_axes(model.apply, variables, TOKENS, seeds=SEEDS, strict=True)
    axes = inferred.annotations["params"]
    block = axes["CheckpointBlock_1"]
    attention = block["MultiHeadDotProductAttention_0"]
    assert attention["query"]["kernel"] == attention["value"]["kernel"] == QUERY
    assert attention["out"]["kernel"] == (sw.HEAD, sw.HEAD_DIM, sw.EMBED)
    assert block["Dense_1"]["kernel"] == (sw.EMBED, sw.MLP_INTERMEDIATE)
    assert axes["Embed_1"]["embedding"] == (sw.LENGTH, sw.EMBED)
    # Lines of the model, not those of flax.
    assert {dim.evidence.source.split(":")[0] for dim in inferred.evidence} == {"test_libraries.py"}


def test_nnx_model() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(96, 32, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                num_heads=4, in_features=32, decode=False, rngs=rngs
            )
            self.up = nnx.Linear(32, 80, rngs=rngs)
            self.down = nnx.Linear(80, 32, rngs=rngs)

        def __call__(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            x = x + self.attention(x)
            x = x + self.down(jax.nn.silu(self.up(x)))
            return self.embed.attend(x)

    graph, state = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    inferred = sw.infer_axes(
        lambda params, tokens: nnx.merge(graph, params)(tokens),
        state,
        TOKENS,
        seeds=SEEDS,
        strict=True,
    )
    axes: dict[str, list[Any]] = {}
    for dim in inferred.evidence:
        axes.setdefault(dim.path.removesuffix("/value"), []).append(dim.axis)
    assert tuple(axes["attention/query/kernel"]) == QUERY
    assert tuple(axes["down/kernel"]) == (sw.MLP_INTERMEDIATE, sw.EMBED)
    assert tuple(axes["embed/embedding"]) == (sw.VOCAB, sw.EMBED)
