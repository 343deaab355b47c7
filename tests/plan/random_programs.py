"""Random annotated programs: layers, meshes and rules drawn from a seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import shardwright as sw

MESHES = (
    "fsdp:2,tp:4",
    "fsdp:4,tp:2",
    "dp:2,fsdp:2,tp:2",
    "fsdp:8",
    "tp:8",
    "dp:2,tp:4",
    "fsdp:2,sp:2,tp:2",
)
SIZES = {
    sw.BATCH: 16,
    sw.QUERY_LENGTH: 32,
    sw.EMBED: 64,
    sw.MLP_INTERMEDIATE: 128,
    sw.HEAD: 8,
    sw.HEAD_DIM: 16,
    sw.VOCAB: 256,
}
HIDDEN = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """A program drawn from a seed.

    Attributes:
      text: What it is, for a person.
      strategy: The rules.
      mesh: Text of the mesh.
      function: `(weights, x) -> outputs`.
      weights: Name -> (shape, annotation).
      result: Annotation of the result, or None for gradients of the weights.
    """

    text: str
    strategy: sw.Strategy
    mesh: str
    function: Callable[[Any, Any], Any]
    weights: dict[str, tuple[tuple[int, ...], tuple[str, ...]]]
    result: tuple[str, ...] | None

    def specs(self) -> dict[str, sw.ArraySpec]:
        """The weights as specs."""
        return {
            name: sw.ArraySpec(sizes, jnp.float32, axes)
            for name, (sizes, axes) in self.weights.items()
        }

    def shapes(self) -> tuple[Any, Any]:
        """The arguments, without shardings."""
        weights = {
            name: jax.ShapeDtypeStruct(sizes, jnp.float32)
            for name, (sizes, _) in self.weights.items()
        }
        return weights, jax.ShapeDtypeStruct(shape(*HIDDEN), jnp.float32)

    def outputs(self) -> Any:
        """Annotations of the outputs."""
        return self.specs() if self.result is None else self.result


def shape(*axes: str) -> tuple[int, ...]:
    return tuple(SIZES[axis] for axis in axes)


def draw_strategy(rng: random.Random, mesh: str) -> tuple[sw.Strategy, str]:
    """Draw rules for a mesh; return them and their text."""
    names = [part.split(":")[0] for part in mesh.split(",")]
    fsdp = [name for name in names if name in ("dp", "fsdp", "sp")]
    tensor = "tp" if "tp" in names else "-"
    stored = rng.choice(["+".join(fsdp) or "-", "fsdp" if "fsdp" in names else "-", "-"])
    rules = {
        "batch": rng.choice(["+".join(name for name in fsdp if name != "sp") or "-"] * 4 + ["-"]),
        "query_length": "sp" if "sp" in names else "-",
        "embed": rng.choice(["-", "-", "-", tensor]),
        "mlp_intermediate": rng.choice([tensor] * 4 + ["-"]),
        "head": rng.choice([tensor] * 4 + ["-"]),
        "vocab": rng.choice([tensor, tensor, "-"]),
        "head_dim": "-",
    }
    strategy = sw.Strategy.model_validate(
        {
            "rules": rules,
            "params": {"embed": stored},
            "policy": {"gather": "+".join(fsdp) or "-", "conflict": "first_dim"},
        }
    )
    return strategy, f"{mesh} {rules} stored={stored}"


def draw(seed: int) -> Drawn:
    """Draw a program; the same one for the same seed."""
    rng = random.Random(seed)
    mesh = rng.choice(MESHES)
    strategy, text = draw_strategy(rng, mesh)
    kinds = [
        rng.choice(["mlp", "mlp", "attention", "gated", "norm"]) for _ in range(rng.randint(1, 3))
    ]
    scanned, remat, gradient = rng.random() < 0.35, rng.random() < 0.25, rng.random() < 0.6
    layers, weights = [], {}
    for number, kind in enumerate(kinds):
        layer, own = LAYERS[kind]
        weights |= {f"{number}_{name}": value for name, value in own.items()}
        layers.append((number, layer, list(own)))
    head = rng.random() < 0.4
    if head:
        weights["head"] = (shape(sw.EMBED, sw.VOCAB), (sw.EMBED, sw.VOCAB))
    repeats = rng.randint(2, 4)

    def block(weights: Any, h: Any) -> Any:
        for number, layer, own in layers:
            h = layer({name: weights[f"{number}_{name}"] for name in own}, h)
        return h

    step = jax.checkpoint(block) if remat else block

    def forward(weights: Any, x: Any) -> Any:
        h = sw.shard(x, *HIDDEN)
        if scanned:
            h, _ = jax.lax.scan(lambda h, _: (step(weights, h), None), h, None, length=repeats)
        else:
            h = step(weights, h)
        if head:
            logits = jnp.einsum("bte,ev->btv", h, sw.gather(weights["head"], sw.EMBED, sw.VOCAB))
            return sw.shard(logits, sw.BATCH, sw.QUERY_LENGTH, sw.VOCAB)
        return h

    def loss(weights: Any, x: Any) -> Any:
        return (forward(weights, x) ** 2).sum()

    result = (sw.BATCH, sw.QUERY_LENGTH, sw.VOCAB) if head else HIDDEN
    drawn = f"{kinds} scan={scanned} remat={remat} gradient={gradient} head={head}"
    return Drawn(
        text=f"{seed}: {text} {drawn}",
        strategy=strategy,
        mesh=mesh,
        function=jax.grad(loss) if gradient else forward,
        weights=weights,
        result=None if gradient else result,
    )


def mlp(w: Any, h: Any) -> Any:
    up = jnp.einsum("bte,ef->btf", h, sw.gather(w["up"], sw.EMBED, sw.MLP_INTERMEDIATE))
    up = jnp.tanh(sw.shard(up, sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE))
    down = jnp.einsum("btf,fe->bte", up, sw.gather(w["down"], sw.MLP_INTERMEDIATE, sw.EMBED))
    return h + sw.shard(down, *HIDDEN)


def gated(w: Any, h: Any) -> Any:
    inner = (sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)
    up = sw.shard(
        jnp.einsum("bte,ef->btf", h, sw.gather(w["up"], sw.EMBED, sw.MLP_INTERMEDIATE)), *inner
    )
    gate = sw.shard(
        jnp.einsum("bte,ef->btf", h, sw.gather(w["gate"], sw.EMBED, sw.MLP_INTERMEDIATE)), *inner
    )
    down = jnp.einsum(
        "btf,fe->bte", jax.nn.silu(gate) * up, sw.gather(w["down"], sw.MLP_INTERMEDIATE, sw.EMBED)
    )
    return h + sw.shard(down, *HIDDEN)


def attention(w: Any, h: Any) -> Any:
    heads = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)
    q, k, v = (
        sw.shard(
            jnp.einsum("bte,ehk->bthk", h, sw.gather(w[name], sw.EMBED, sw.HEAD, sw.HEAD_DIM)),
            *heads,
        )
        for name in "qkv"
    )
    k, v = (sw.shard(x, sw.BATCH, sw.EMPTY, sw.HEAD, sw.HEAD_DIM) for x in (k, v))
    scores = sw.shard(
        jnp.einsum("bthk,bshk->bhts", q, k), sw.BATCH, sw.HEAD, sw.QUERY_LENGTH, sw.EMPTY
    )
    out = sw.shard(jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v), *heads)
    return h + sw.shard(
        jnp.einsum("bthk,hke->bte", out, sw.gather(w["o"], sw.HEAD, sw.HEAD_DIM, sw.EMBED)), *HIDDEN
    )


def norm(w: Any, h: Any) -> Any:
    scale = jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6)
    return sw.shard(h * scale * sw.gather(w["scale"], sw.NORM), *HIDDEN)


UP = (shape(sw.EMBED, sw.MLP_INTERMEDIATE), (sw.EMBED, sw.MLP_INTERMEDIATE))
DOWN = (shape(sw.MLP_INTERMEDIATE, sw.EMBED), (sw.MLP_INTERMEDIATE, sw.EMBED))
PROJECTION = (shape(sw.EMBED, sw.HEAD, sw.HEAD_DIM), (sw.EMBED, sw.HEAD, sw.HEAD_DIM))
LAYERS: dict[str, Any] = {
    "mlp": (mlp, {"up": UP, "down": DOWN}),
    "gated": (gated, {"up": UP, "gate": UP, "down": DOWN}),
    "attention": (
        attention,
        {
            **dict.fromkeys("qkv", PROJECTION),
            "o": (shape(sw.HEAD, sw.HEAD_DIM, sw.EMBED), (sw.HEAD, sw.HEAD_DIM, sw.EMBED)),
        },
    ),
    "norm": (norm, {"scale": (shape(sw.EMBED), (sw.NORM,))}),
}
