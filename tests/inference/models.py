"""Small models that nobody annotated, each with the axes that a person would write.

A model has its forward function, shapes of parameters with their axes as text, and seeds of its
inputs. Its source does not import the library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

BATCH, LENGTH, VOCAB, EMBED, HEADS, HEAD_DIM, HIDDEN = 2, 10, 96, 24, 4, 6, 40
KV_HEADS, EXPERTS, LAYERS = 2, 5, 3
TOKENS = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A model with its hand annotation.

    Attributes:
      name: Name in messages.
      forward: `forward(params, *inputs)`.
      params: Tree of `(shape, axes as text)`.
      inputs: Shapes of the inputs.
      seeds: Their axes.
    """

    name: str
    forward: Callable[..., Any]
    params: Any
    inputs: tuple[Any, ...] = (TOKENS,)
    seeds: tuple[Any, ...] = (("BATCH", "LENGTH"),)

    @property
    def shapes(self) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf[0], jnp.float32), self.params, is_leaf=is_leaf
        )

    @property
    def axes(self) -> list[list[str]]:
        return [leaf[1].split() for leaf in jax.tree.leaves(self.params, is_leaf=is_leaf)]


def is_leaf(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str)


def layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale + bias


def rms_norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def attend(q: Any, k: Any, v: Any, *, causal: bool = True) -> Any:
    """Return attention over `[batch, length, heads, head_dim]`."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    if causal:
        mask = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
        scores = jnp.where(mask, scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def rotary(x: Any) -> Any:
    half = x.shape[-1] // 2
    frequencies = 1e4 ** (-jnp.arange(half) / half)
    angles = (jnp.arange(x.shape[1])[:, None] * frequencies)[:, None]
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def gpt2_block(layer: Any, x: Any) -> Any:
    hidden = layer_norm(x, *layer["norm1"])
    q, k, v = jnp.split(hidden @ layer["qkv"] + layer["qkv_bias"], 3, axis=-1)
    q, k, v = (part.reshape(*x.shape[:2], HEADS, HEAD_DIM) for part in (q, k, v))
    mixed = attend(q, k, v).reshape(*x.shape[:2], HEADS * HEAD_DIM)
    x = x + mixed @ layer["out"] + layer["out_bias"]
    hidden = layer_norm(x, *layer["norm2"])
    hidden = jax.nn.gelu(hidden @ layer["up"] + layer["up_bias"])
    return x + hidden @ layer["down"] + layer["down_bias"]


GPT2_LAYER = {
    "norm1": [((EMBED,), "NORM"), ((EMBED,), "NORM")],
    "qkv": ((EMBED, 3 * HEADS * HEAD_DIM), "EMBED HEAD:12*HEAD_DIM:6"),
    "qkv_bias": ((3 * HEADS * HEAD_DIM,), "HEAD:12*HEAD_DIM:6"),
    "out": ((HEADS * HEAD_DIM, EMBED), "HEAD:4*HEAD_DIM:6 EMBED"),
    "out_bias": ((EMBED,), "NORM"),
    "norm2": [((EMBED,), "NORM"), ((EMBED,), "NORM")],
    "up": ((EMBED, HIDDEN), "EMBED MLP_INTERMEDIATE"),
    "up_bias": ((HIDDEN,), "MLP_INTERMEDIATE"),
    "down": ((HIDDEN, EMBED), "MLP_INTERMEDIATE EMBED"),
    "down_bias": ((EMBED,), "NORM"),
}


def gpt2(params: Any, tokens: Any) -> Any:
    x = params["wte"][tokens] + params["wpe"][jnp.arange(tokens.shape[1])]
    for layer in params["h"]:
        x = gpt2_block(layer, x)
    return layer_norm(x, *params["norm"]) @ params["wte"].T


GPT2 = Model(
    "gpt2",
    gpt2,
    {
        "wte": ((VOCAB, EMBED), "VOCAB EMBED"),
        "wpe": ((16, EMBED), "LENGTH EMBED"),
        "h": [GPT2_LAYER, GPT2_LAYER],
        "norm": [((EMBED,), "NORM"), ((EMBED,), "NORM")],
    },
)


def llama_attention(layer: Any, x: Any) -> Any:
    q = rotary(jnp.einsum("ble,ehd->blhd", x, layer["q"]))
    k = rotary(jnp.einsum("ble,ekd->blkd", x, layer["k"]))
    v = jnp.einsum("ble,ekd->blkd", x, layer["v"])
    k, v = (jnp.repeat(rows, HEADS // KV_HEADS, axis=2) for rows in (k, v))
    return jnp.einsum("blhd,hde->ble", attend(q, k, v), layer["o"])


LLAMA_ATTENTION = {
    "norm": ((EMBED,), "NORM"),
    "q": ((EMBED, HEADS, HEAD_DIM), "EMBED HEAD HEAD_DIM"),
    "k": ((EMBED, KV_HEADS, HEAD_DIM), "EMBED KV_HEAD KV_HEAD_DIM"),
    "v": ((EMBED, KV_HEADS, HEAD_DIM), "EMBED KV_HEAD KV_HEAD_DIM"),
    "o": ((HEADS, HEAD_DIM, EMBED), "HEAD HEAD_DIM EMBED"),
}


def llama(params: Any, tokens: Any) -> Any:
    x = jnp.take(params["embedding"], tokens, axis=0)
    for layer in params["layers"]:
        x = x + llama_attention(layer["attention"], rms_norm(x, layer["attention"]["norm"]))
        hidden = rms_norm(x, layer["norm"])
        x = x + (jax.nn.silu(hidden @ layer["gate"]) * (hidden @ layer["up"])) @ layer["down"]
    return rms_norm(x, params["norm"]) @ params["head"]


LLAMA_LAYER = {
    "attention": LLAMA_ATTENTION,
    "norm": ((EMBED,), "NORM"),
    "gate": ((EMBED, HIDDEN), "EMBED MLP_INTERMEDIATE"),
    "up": ((EMBED, HIDDEN), "EMBED MLP_INTERMEDIATE"),
    "down": ((HIDDEN, EMBED), "MLP_INTERMEDIATE EMBED"),
}
LLAMA_ENDS = {
    "embedding": ((VOCAB, EMBED), "VOCAB EMBED"),
    "norm": ((EMBED,), "NORM"),
    "head": ((EMBED, VOCAB), "EMBED VOCAB"),
}
LLAMA = Model("llama", llama, {**LLAMA_ENDS, "layers": [LLAMA_LAYER] * LAYERS})


def flat_llama(params: Any, tokens: Any) -> Any:
    """Flat projections in the order [out, in], and grouped queries without copies of the keys."""
    x = params["embedding"][tokens]
    hidden = rms_norm(x, params["norm"])
    q = (hidden @ params["q"].T).reshape(BATCH, LENGTH, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    k = (hidden @ params["k"].T).reshape(BATCH, LENGTH, KV_HEADS, HEAD_DIM)
    v = (hidden @ params["v"].T).reshape(BATCH, LENGTH, KV_HEADS, HEAD_DIM)
    scores = jax.nn.softmax(jnp.einsum("bqkgd,bskd->bkgqs", q, k))
    mixed = jnp.einsum("bkgqs,bskd->bqkgd", scores, v).reshape(BATCH, LENGTH, HEADS * HEAD_DIM)
    x = x + mixed @ params["o"].T
    gate, up = jnp.split(x @ params["gate_up"].T, 2, axis=-1)
    return (x + (jax.nn.silu(gate) * up) @ params["down"].T) @ params["embedding"].T


FLAT_LLAMA = Model(
    "flat llama",
    flat_llama,
    {
        "embedding": ((VOCAB, EMBED), "VOCAB EMBED"),
        "norm": ((EMBED,), "NORM"),
        "q": ((HEADS * HEAD_DIM, EMBED), "HEAD:4*HEAD_DIM:6 EMBED"),
        "k": ((KV_HEADS * HEAD_DIM, EMBED), "KV_HEAD:2*KV_HEAD_DIM:6 EMBED"),
        "v": ((KV_HEADS * HEAD_DIM, EMBED), "KV_HEAD:2*KV_HEAD_DIM:6 EMBED"),
        "o": ((EMBED, HEADS * HEAD_DIM), "EMBED HEAD:4*HEAD_DIM:6"),
        "gate_up": ((2 * HIDDEN, EMBED), "MLP_INTERMEDIATE EMBED"),
        "down": ((EMBED, HIDDEN), "EMBED MLP_INTERMEDIATE"),
    },
)

MOE_PARAMS = {
    **LLAMA_ENDS,
    "attention": LLAMA_ATTENTION,
    "router": ((EMBED, EXPERTS), "EMBED EXPERT_GATE"),
    "up": ((EXPERTS, EMBED, HIDDEN), "EXPERT EMBED MLP_INTERMEDIATE"),
    "down": ((EXPERTS, HIDDEN, EMBED), "EXPERT MLP_INTERMEDIATE EMBED"),
}


def einsum_experts(params: Any, x: Any) -> Any:
    """Dispatch by one-hot masks and einsums, as in GShard."""
    gates = jax.nn.softmax(x @ params["router"])
    weights, chosen = jax.lax.top_k(gates, 2)
    slots = jnp.cumsum(jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32), axis=1) - 1
    mask = jax.nn.one_hot(slots, 4) * jax.nn.one_hot(chosen, EXPERTS)[..., None]
    dispatch = mask.sum(2)
    combine = (mask * weights[..., None, None]).sum(2)
    rows = jnp.einsum("blxc,ble->bxce", dispatch, x)
    hidden = jax.nn.relu(jnp.einsum("bxce,xef->bxcf", rows, params["up"]))
    return jnp.einsum(
        "bxce,blxc->ble", jnp.einsum("bxcf,xfe->bxce", hidden, params["down"]), combine
    )


def ragged_experts(params: Any, x: Any) -> Any:
    """Sort rows by expert, and multiply each group by its matrix."""
    rows = x.reshape(-1, EMBED)
    weights, chosen = jax.lax.top_k(jax.nn.softmax(rows @ params["router"]), 2)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    ordered = jnp.repeat(rows, 2, axis=0)[order]
    hidden = jax.nn.relu(jax.lax.ragged_dot(ordered, params["up"], sizes))
    made = jax.lax.ragged_dot(hidden, params["down"], sizes)[jnp.argsort(order)]
    return (made.reshape(-1, 2, EMBED) * weights[..., None]).sum(1).reshape(x.shape)


def moe(params: Any, tokens: Any, experts: Any) -> Any:
    x = params["embedding"][tokens]
    x = x + llama_attention(params["attention"], rms_norm(x, params["attention"]["norm"]))
    x = x + experts(params, x)
    return rms_norm(x, params["norm"]) @ params["head"]


EINSUM_MOE = Model("einsum moe", lambda p, t: moe(p, t, einsum_experts), MOE_PARAMS)
RAGGED_MOE = Model("ragged moe", lambda p, t: moe(p, t, ragged_experts), MOE_PARAMS)

PROJECTION = ((EMBED, HEADS, HEAD_DIM), "EMBED HEAD HEAD_DIM")
HEAD_BIAS = ((HEADS, HEAD_DIM), "HEAD HEAD_DIM")
PLAIN_ATTENTION = {
    "q": PROJECTION,
    "q_bias": HEAD_BIAS,
    "k": PROJECTION,
    "k_bias": HEAD_BIAS,
    "v": PROJECTION,
    "v_bias": HEAD_BIAS,
    "o": ((HEADS, HEAD_DIM, EMBED), "HEAD HEAD_DIM EMBED"),
    "o_bias": ((EMBED,), "NORM"),
}
PLAIN_MLP = {
    "up": ((EMBED, HIDDEN), "EMBED MLP_INTERMEDIATE"),
    "up_bias": ((HIDDEN,), "MLP_INTERMEDIATE"),
    "down": ((HIDDEN, EMBED), "MLP_INTERMEDIATE EMBED"),
    "down_bias": ((EMBED,), "NORM"),
}
NORMS = [((EMBED,), "NORM"), ((EMBED,), "NORM")]


def plain_attention(weights: Any, x: Any, memory: Any, *, causal: bool = False) -> Any:
    q = jnp.einsum("ble,ehd->blhd", x, weights["q"]) + weights["q_bias"]
    k = jnp.einsum("ble,ehd->blhd", memory, weights["k"]) + weights["k_bias"]
    v = jnp.einsum("ble,ehd->blhd", memory, weights["v"]) + weights["v_bias"]
    mixed = attend(q, k, v, causal=causal)
    return jnp.einsum("blhd,hde->ble", mixed, weights["o"]) + weights["o_bias"]


def plain_mlp(weights: Any, x: Any) -> Any:
    hidden = jax.nn.gelu(x @ weights["up"] + weights["up_bias"])
    return hidden @ weights["down"] + weights["down_bias"]


def bert(params: Any, tokens: Any, kinds: Any, mask: Any) -> Any:
    positions = params["positions"][None, : tokens.shape[1]]
    x = params["words"][tokens] + positions + params["kinds"][kinds]
    x = layer_norm(x, *params["norm"]) * mask[..., None]
    for layer in params["layers"]:
        x = layer_norm(x + plain_attention(layer["attention"], x, x), *layer["norm1"])
        x = layer_norm(x + plain_mlp(layer["mlp"], x), *layer["norm2"])
    return x @ params["words"].T + params["bias"]


BERT = Model(
    "bert",
    bert,
    {
        "words": ((VOCAB, EMBED), "VOCAB EMBED"),
        "positions": ((16, EMBED), "LENGTH EMBED"),
        "kinds": ((2, EMBED), "_ EMBED"),
        "norm": NORMS,
        "layers": [{"attention": PLAIN_ATTENTION, "norm1": NORMS, "mlp": PLAIN_MLP, "norm2": NORMS}]
        * 2,
        "bias": ((VOCAB,), "VOCAB"),
    },
    (TOKENS, TOKENS, jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.float32)),
    (("BATCH", "LENGTH"),) * 3,
)


def encoder_decoder(params: Any, source: Any, target: Any) -> Any:
    """Embed the source and the target by one table, as T5 does, with a relative bias."""
    memory = params["table"][source]
    distances = jnp.arange(source.shape[1])[:, None] - jnp.arange(source.shape[1])[None]
    bias = params["bias"][jnp.clip(distances + 4, 0, 7)].transpose(2, 0, 1)
    q, k, v = (jnp.einsum("ble,ehd->blhd", memory, params["encoder"][name]) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, v)
    memory = memory + jnp.einsum("blhd,hde->ble", mixed, params["encoder"]["o"])
    memory = memory + plain_mlp(params["encoder_mlp"], memory)
    x = params["table"][target]
    x = x + plain_attention(params["own"], x, x, causal=True)
    x = x + plain_attention(params["cross"], x, memory)
    x = x + plain_mlp(params["decoder_mlp"], x)
    return x @ params["head"]


ENCODER_DECODER = Model(
    "encoder-decoder",
    encoder_decoder,
    {
        "table": ((VOCAB, EMBED), "VOCAB EMBED"),
        "bias": ((8, HEADS), "_ HEAD"),
        "encoder": {name: PLAIN_ATTENTION[name] for name in "qkvo"},
        "encoder_mlp": PLAIN_MLP,
        "own": PLAIN_ATTENTION,
        "cross": PLAIN_ATTENTION,
        "decoder_mlp": PLAIN_MLP,
        "head": ((EMBED, VOCAB), "EMBED VOCAB"),
    },
    (jax.ShapeDtypeStruct((BATCH, 14), jnp.int32), TOKENS),
    (("BATCH", "LENGTH"), ("BATCH", "LENGTH")),
)


def vit(params: Any, images: Any) -> Any:
    patches = jax.lax.conv_general_dilated(
        images, params["patch"], (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = (patches + params["patch_bias"]).reshape(images.shape[0], -1, EMBED)
    first = jnp.broadcast_to(params["class"], (images.shape[0], 1, EMBED))
    x = jnp.concatenate([first, x], axis=1) + params["positions"]
    for layer in params["layers"]:
        hidden = layer_norm(x, *layer["norm1"])
        x = x + plain_attention(layer["attention"], hidden, hidden)
        x = x + plain_mlp(layer["mlp"], layer_norm(x, *layer["norm2"]))
    return layer_norm(x, *params["norm"])[:, 0] @ params["head"] + params["head_bias"]


VIT = Model(
    "vit",
    vit,
    {
        "patch": ((4, 4, 3, EMBED), "_ _ _ EMBED"),
        "patch_bias": ((EMBED,), "NORM"),
        "class": ((1, 1, EMBED), "_ _ EMBED"),
        "positions": ((1, 17, EMBED), "_ LENGTH EMBED"),
        "layers": [{"attention": PLAIN_ATTENTION, "norm1": NORMS, "mlp": PLAIN_MLP, "norm2": NORMS}]
        * 2,
        "norm": NORMS,
        "head": ((EMBED, 7), "EMBED CLASSES"),
        "head_bias": ((7,), "CLASSES"),
    },
    (jax.ShapeDtypeStruct((BATCH, 16, 16, 3), jnp.float32),),
    (("BATCH", None, None, "_"),),
)


def scanned(params: Any, tokens: Any) -> Any:
    """Scan over layers with remat, a tied head, and a hidden size equal to the vocabulary."""

    def layer(x: Any, weights: Any) -> Any:
        x = x + llama_attention(weights["attention"], rms_norm(x, weights["attention"]["norm"]))
        hidden = jax.nn.gelu(rms_norm(x, weights["norm"]) @ weights["up"])
        return x + hidden @ weights["down"], None

    one_hot = jax.nn.one_hot(tokens, VOCAB)
    x, _ = jax.lax.scan(jax.checkpoint(layer), one_hot @ params["table"], params["layers"])
    return rms_norm(x, params["norm"]) @ params["table"].T


def stack(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: ((LAYERS, *leaf[0]), f"LAYERS {leaf[1]}"), tree, is_leaf=is_leaf
    )


SCANNED = Model(
    "scanned",
    scanned,
    {
        "table": ((VOCAB, EMBED), "VOCAB EMBED"),
        "norm": ((EMBED,), "NORM"),
        "layers": stack(
            {
                "attention": LLAMA_ATTENTION,
                "norm": ((EMBED,), "NORM"),
                "up": ((EMBED, VOCAB), "EMBED MLP_INTERMEDIATE"),
                "down": ((VOCAB, EMBED), "MLP_INTERMEDIATE EMBED"),
            }
        ),
    },
)

LATENT = 10


def latent_attention(params: Any, tokens: Any) -> Any:
    """Queries and keys by way of low ranks, with a rotary part that all heads share (MLA)."""
    x = params["table"][tokens]
    shape = (*tokens.shape, HEADS)
    q = rms_norm(x @ params["q_down"], params["q_norm"]) @ params["q_up"]
    plain_q, rotary_q = jnp.split(q.reshape(*shape, 12), [8], axis=-1)
    latent, shared = jnp.split(x @ params["kv_down"], [LATENT], axis=-1)
    kv = rms_norm(latent, params["kv_norm"]) @ params["kv_up"]
    plain_k, v = jnp.split(kv.reshape(*shape, 14), [8], axis=-1)
    shared = jnp.broadcast_to(rotary(shared[:, :, None]), (*shape, 4))
    q = jnp.concatenate([plain_q, rotary(rotary_q)], axis=-1)
    mixed = attend(q, jnp.concatenate([plain_k, shared], axis=-1), v)
    x = x + mixed.reshape(*tokens.shape, HEADS * 6) @ params["o"]
    return (x + plain_mlp(params["mlp"], x)) @ params["table"].T


MLA = Model(
    "latent attention",
    latent_attention,
    {
        "table": ((VOCAB, EMBED), "VOCAB EMBED"),
        "q_down": ((EMBED, 14), "EMBED _"),
        "q_norm": ((14,), "_"),
        "q_up": ((14, HEADS * 12), "_ HEAD:4*HEAD_DIM:12"),
        "kv_down": ((EMBED, LATENT + 4), "EMBED _"),
        "kv_norm": ((LATENT,), "_"),
        "kv_up": ((LATENT, HEADS * 14), "_ HEAD:4*HEAD_DIM:14"),
        "o": ((HEADS * 6, EMBED), "HEAD:4*HEAD_DIM:6 EMBED"),
        "mlp": PLAIN_MLP,
    },
)


def state_space(params: Any, tokens: Any) -> Any:
    """Scan over time with a state per channel, as Mamba does."""
    x = params["table"][tokens]
    hidden = jax.nn.silu(x @ params["in"])
    step_sizes = jax.nn.softplus(hidden @ params["dt_down"] @ params["dt_up"])
    rates, reads = hidden @ params["B"], hidden @ params["C"]

    def step(state: Any, rows: Any) -> Any:
        hidden, step_size, rate, read = rows
        decay = jnp.exp(step_size[..., None] * params["A"])
        state = state * decay + (step_size * hidden)[..., None] * rate[:, None]
        return state, jnp.einsum("bfn,bn->bf", state, read)

    rows = jax.tree.map(lambda array: array.swapaxes(0, 1), (hidden, step_sizes, rates, reads))
    _, mixed = jax.lax.scan(step, jnp.zeros((tokens.shape[0], HIDDEN, 5)), rows)
    x = x + (mixed.swapaxes(0, 1) + params["D"] * hidden) @ params["out"]
    return x @ params["table"].T


STATE_SPACE = Model(
    "state space",
    state_space,
    {
        "table": ((VOCAB, EMBED), "VOCAB EMBED"),
        "in": ((EMBED, HIDDEN), "EMBED MLP_INTERMEDIATE"),
        "dt_down": ((HIDDEN, 3), "MLP_INTERMEDIATE _"),
        "dt_up": ((3, HIDDEN), "_ MLP_INTERMEDIATE"),
        "A": ((HIDDEN, 5), "MLP_INTERMEDIATE STATE"),
        "B": ((HIDDEN, 5), "MLP_INTERMEDIATE STATE"),
        "C": ((HIDDEN, 5), "MLP_INTERMEDIATE STATE"),
        "D": ((HIDDEN,), "MLP_INTERMEDIATE"),
        "out": ((HIDDEN, EMBED), "MLP_INTERMEDIATE EMBED"),
    },
)


def gemma(params: Any, tokens: Any) -> Any:
    """One kv head, keys and values in one array, capped scores and logits."""
    x = params["table"][tokens] * EMBED**0.5
    q = rotary(jnp.einsum("ble,hed->blhd", x, params["q"]))
    k, v = jnp.einsum("ble,ced->cbld", x, params["kv"])
    scores = jnp.tanh(jnp.einsum("bqhd,bkd->bhqk", q, k) / 50) * 50
    mixed = jnp.einsum("bhqk,bkd->bqhd", jax.nn.softmax(scores), v)
    x = x + jnp.einsum("blhd,hde->ble", mixed, params["o"])
    gate, up = jnp.einsum("ble,cef->cblf", x, params["up"])
    x = x + (jax.nn.gelu(gate) * up) @ params["down"]
    return jnp.tanh(rms_norm(x, 1 + params["norm"]) @ params["table"].T / 30) * 30


GEMMA = Model(
    "gemma",
    gemma,
    {
        "table": ((VOCAB, EMBED), "VOCAB EMBED"),
        "q": ((HEADS, EMBED, HEAD_DIM), "HEAD EMBED HEAD_DIM"),
        "kv": ((2, EMBED, HEAD_DIM), "_ EMBED HEAD_DIM"),
        "o": ((HEADS, HEAD_DIM, EMBED), "HEAD HEAD_DIM EMBED"),
        "up": ((2, EMBED, HIDDEN), "_ EMBED MLP_INTERMEDIATE"),
        "down": ((HIDDEN, EMBED), "MLP_INTERMEDIATE EMBED"),
        "norm": ((EMBED,), "NORM"),
    },
)


def vmapped(params: Any, tokens: Any) -> Any:
    """A model of one token or one head, vmapped, with weights [out, in], as in equinox."""

    def one(tokens: Any) -> Any:
        x = jax.vmap(lambda token: params["table"][token])(tokens) + params["positions"][:LENGTH]
        q, k, v = (
            jax.vmap(lambda row, name=name: params[name] @ row + params["bias"])(x).reshape(
                LENGTH, HEADS, HEAD_DIM
            )
            for name in "qkv"
        )

        def head(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.softmax(q @ k.T) @ v

        mixed = jax.vmap(head, in_axes=1, out_axes=1)(q, k, v).reshape(LENGTH, -1)
        x = x + jax.vmap(lambda row: params["o"] @ row)(mixed)
        x = x + jax.vmap(lambda row: params["down"] @ jax.nn.gelu(params["up"] @ row))(x)
        return jax.vmap(lambda row: params["head"] @ row)(x)

    return jax.vmap(one)(tokens)


FLAT = ((HEADS * HEAD_DIM, EMBED), "HEAD:4*HEAD_DIM:6 EMBED")
VMAPPED = Model(
    "vmapped",
    vmapped,
    {
        "table": ((VOCAB, EMBED), "VOCAB EMBED"),
        "positions": ((16, EMBED), "LENGTH EMBED"),
        "q": FLAT,
        "k": FLAT,
        "v": FLAT,
        "bias": ((HEADS * HEAD_DIM,), "HEAD:4*HEAD_DIM:6"),
        "o": ((EMBED, HEADS * HEAD_DIM), "EMBED HEAD:4*HEAD_DIM:6"),
        "up": ((HIDDEN, EMBED), "MLP_INTERMEDIATE EMBED"),
        "down": ((EMBED, HIDDEN), "EMBED MLP_INTERMEDIATE"),
        "head": ((VOCAB, EMBED), "VOCAB EMBED"),
    },
)

MODELS = (
    GPT2,
    LLAMA,
    FLAT_LLAMA,
    EINSUM_MOE,
    RAGGED_MOE,
    BERT,
    ENCODER_DECODER,
    VIT,
    SCANNED,
    MLA,
    STATE_SPACE,
    GEMMA,
    VMAPPED,
)
