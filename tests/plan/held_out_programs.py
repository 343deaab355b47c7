"""Programs beside those that most rules of the plan's memory were made with.

The rules of loops without rematerialization were made with the last two.
"""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

import shardwright as sw
from tests.plan import foreign_programs
from tests.plan.foreign_programs import (
    BF16,
    F32,
    HEADS,
    HID,
    I32,
    INNER,
    KEYS,
    LOGITS,
    TOKENS,
    Foreign,
    attend,
    cross_entropy,
    loss_of,
    rms,
    spec,
)

PROGRAMS: dict[str, Foreign] = {}
B, S, D, F, H, K, V = 32, 1024, 1536, 4096, 12, 128, 24576
FSDP, TP = {"fsdp": 8}, {"fsdp": 2, "tp": 4}


def program(weights: Any, **options: Any) -> Any:
    def register(function: Any) -> Any:
        PROGRAMS[function.__name__] = Foreign(function=function, weights=weights, **options)
        return function

    return register


UP = spec(D, F, axes=(sw.EMBED, sw.MLP_INTERMEDIATE))
DOWN = spec(F, D, axes=(sw.MLP_INTERMEDIATE, sw.EMBED))
PROJ = spec(D, H, K, axes=(sw.EMBED, sw.HEAD, sw.HEAD_DIM))
OUT = spec(H, K, D, axes=(sw.HEAD, sw.HEAD_DIM, sw.EMBED))
TABLE = spec(V, D, axes=(sw.VOCAB, sw.EMBED))
LAYER = {"q": PROJ, "k": PROJ, "v": PROJ, "o": OUT, "up": UP, "down": DOWN}


def layer(w: Any, x: Any) -> Any:
    w = sw.gather(w, LAYER)
    h = rms(x, jnp.ones(D, F32))
    q, k, v = (jnp.einsum("bsd,dhk->bshk", h, w[n]) for n in "qkv")
    mixed = attend(sw.shard(q, HEADS), sw.shard(k, KEYS), sw.shard(v, KEYS))
    x = sw.shard(x + jnp.einsum("bshk,hkd->bsd", mixed, w["o"]), HID)
    inner = jax.nn.gelu(sw.shard(rms(x, jnp.ones(D, F32)) @ w["up"], INNER))
    return sw.shard(x + inner @ w["down"], HID)


STACK = {n: spec(3, *w.shape, axes=(sw.EMPTY, *w.axes)) for n, w in LAYER.items()}
WORDS: Final = ((TOKENS, (B, S), I32),)


@program({**STACK, "table": TABLE}, inputs=WORDS * 2)
def encoder_with_labels(w: Any, tokens: Any, labels: Any) -> Any:
    """An encoder in a scan with remat, a tied head, a cross entropy."""
    table = sw.gather(w["table"], sw.VOCAB, sw.EMBED)
    x = sw.shard(table[tokens], HID)
    stack = {n: w[n] for n in LAYER}
    x, _ = lax.scan(jax.checkpoint(lambda x, w: (layer(w, x), None)), x, stack)
    return cross_entropy(sw.shard(x @ table.T, LOGITS), labels)


@program({**STACK, "table": TABLE}, inputs=WORDS, preset="fsdp_tp", mesh=TP, grad=False)
def prefill(w: Any, tokens: Any) -> Any:
    """The logits of the last token."""
    table = sw.gather(w["table"], sw.VOCAB, sw.EMBED)
    x = sw.shard(table[tokens], HID)
    x, _ = lax.scan(lambda x, w: (layer(w, x), None), x, {n: w[n] for n in LAYER})
    return sw.shard(x[:, -1] @ table.T, sw.BATCH, sw.VOCAB)


@program(
    {**{f"{n}{i}": w for i in range(3) for n, w in LAYER.items()}},
    inputs=((HID, (B, S, D), BF16),),
    preset="fsdp_tp",
    mesh=TP,
)
def unrolled_without_remat(w: Any, x: Any) -> Any:
    x = sw.shard(x, HID)
    for i in range(3):
        x = layer({n: w[f"{n}{i}"] for n in LAYER}, x)
    return loss_of(x)


LOW = {
    "a": spec(D, 16, axes=(sw.EMBED, sw.EMPTY), dtype=F32),
    "b": spec(16, F, axes=(sw.EMPTY, sw.MLP_INTERMEDIATE), dtype=F32),
}


@program(LOW, inputs=((HID, (B, S, D), BF16), ((sw.EMBED, sw.EMPTY), (D, F), BF16)))
def low_rank_adapters(w: Any, x: Any, base: Any) -> Any:
    """LoRA: the large weight is an argument that is not trained."""
    a, b = (w[n].astype(BF16) for n in "ab")
    return loss_of(jax.nn.silu(sw.shard(x, HID) @ base + (x @ a) @ b))


@program(
    {"tokens": spec(S, S, axes=(sw.EMPTY, sw.EMPTY)), "up": UP, "down": DOWN},
    inputs=((HID, (B, S, D), BF16),),
    preset="ddp",
    mesh={"dp": 8},
)
def mixer(w: Any, x: Any) -> Any:
    """MLP-Mixer: a matmul over the tokens, then a feed-forward layer, in float32 between them."""
    y = x + jnp.einsum("bsd,st->btd", jax.nn.gelu(x), w["tokens"])
    h = y.astype(F32)
    h = ((h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)).astype(BF16)
    return loss_of(y + jax.nn.gelu(h @ w["up"]) @ w["down"])


GATED = {"gate": UP, "up": UP, "down": DOWN}
PAIR = {f"{n}{i}": w for i in range(2) for n, w in GATED.items()}


@program(PAIR, inputs=((HID, (B, S, D), BF16),), preset="fsdp_tp", mesh={"fsdp": 4, "tp": 2})
def gates_in_a_loop(w: Any, x: Any) -> Any:
    """Two gated layers that run twice, without remat."""
    w = sw.gather(w, PAIR)

    def layers(x: Any, _: Any) -> Any:
        for i in range(2):
            gate, up = (sw.shard(x @ w[f"{n}{i}"], INNER) for n in ("gate", "up"))
            x = sw.shard(x + (jax.nn.silu(gate) * up) @ w[f"down{i}"], HID)
        return x, None

    return loss_of(lax.scan(layers, sw.shard(x, HID), length=2)[0])


ATTENTION = {"q": PROJ, "k": PROJ, "v": PROJ, "o": OUT}


@program(
    {**ATTENTION, "head": TABLE},
    inputs=((HID, (B, S, D), BF16),),
    preset="tensor",
    mesh={"dp": 2, "tp": 4},
)
def attention_in_a_loop(w: Any, x: Any) -> Any:
    """One layer that runs twice, without remat, and a large head behind it."""

    def layer(x: Any, _: Any) -> Any:
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[n]) for n in "qkv")
        mixed = attend(sw.shard(q, HEADS), sw.shard(k, KEYS), sw.shard(v, KEYS))
        return sw.shard(x + jnp.einsum("bshk,hkd->bsd", mixed, w["o"]), HID), None

    x = lax.scan(layer, sw.shard(x, HID), length=2)[0]
    return loss_of(sw.shard(x @ w["head"].T, LOGITS))


assert not PROGRAMS.keys() & foreign_programs.PROGRAMS.keys()
