"""More small models that nobody annotated: a parallel block, speech, and decode with a cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.inference.models import (
    BATCH,
    EMBED,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LENGTH,
    LLAMA_ATTENTION,
    MODELS,
    NORMS,
    PLAIN_ATTENTION,
    PLAIN_MLP,
    TOKENS,
    VOCAB,
    Model,
    attend,
    layer_norm,
    plain_attention,
    plain_mlp,
    rms_norm,
    rotary,
)


def parallel(params: Any, tokens: Any) -> Any:
    """Attention and MLP read the same normed input, as in GPT-J; queries and keys are normed."""
    x = params["table"][tokens]
    for layer in params["layers"]:
        hidden = layer_norm(x, *layer["norm"])
        q, k, v = (jnp.einsum("ble,ehd->bhld", hidden, layer[name]) for name in "qkv")
        q, k = (rms_norm(rows, layer["head_norm"]).swapaxes(1, 2) for rows in (q, k))
        mixed = attend(rotary(q), rotary(k), v.swapaxes(1, 2)).reshape(BATCH, LENGTH, -1)
        x = x + mixed @ layer["o"] + plain_mlp(layer["mlp"], hidden)
    return x @ params["head"]


PARALLEL_LAYER = {
    "norm": NORMS,
    **{name: PLAIN_ATTENTION[name] for name in "qkv"},
    "head_norm": ((HEAD_DIM,), "HEAD_DIM"),
    "o": ((HEADS * HEAD_DIM, EMBED), "HEAD:4*HEAD_DIM:6 EMBED"),
    "mlp": PLAIN_MLP,
}
PARALLEL = Model(
    "parallel blocks",
    parallel,
    {
        "table": ((VOCAB, EMBED), "VOCAB EMBED"),
        "layers": [PARALLEL_LAYER] * 2,
        "head": ((EMBED, VOCAB), "EMBED VOCAB"),
    },
)

FRAMES, MELS = 20, 8


def speech(params: Any, frames: Any, tokens: Any) -> Any:
    """Convolve spectra, encode them, and decode tokens that attend to them, as Whisper does."""
    memory = frames
    for name, stride in (("conv1", 1), ("conv2", 2)):
        kernel = params[name]
        memory = jax.lax.conv_general_dilated(
            memory, kernel, (stride,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        memory = jax.nn.gelu(memory + params[f"{name}_bias"])
    memory = memory + params["positions"]
    memory = memory + plain_attention(params["encoder"], memory, memory)
    memory = memory + plain_mlp(params["encoder_mlp"], memory)
    x = params["table"][tokens]
    x = x + plain_attention(params["own"], x, x, causal=True)
    x = x + plain_attention(params["cross"], x, memory)
    x = x + plain_mlp(params["decoder_mlp"], layer_norm(x, *params["norm"]))
    return x @ params["table"].T


SPEECH = Model(
    "speech",
    speech,
    {
        "conv1": ((3, MELS, EMBED), "_ _ EMBED"),
        "conv1_bias": ((EMBED,), "NORM"),
        "conv2": ((3, EMBED, EMBED), "_ _ EMBED"),
        "conv2_bias": ((EMBED,), "NORM"),
        "positions": ((FRAMES // 2, EMBED), "LENGTH EMBED"),
        "encoder": PLAIN_ATTENTION,
        "encoder_mlp": PLAIN_MLP,
        "own": PLAIN_ATTENTION,
        "cross": PLAIN_ATTENTION,
        "decoder_mlp": PLAIN_MLP,
        "norm": NORMS,
        "table": ((VOCAB, EMBED), "VOCAB EMBED"),
    },
    (jax.ShapeDtypeStruct((BATCH, FRAMES, MELS), jnp.float32), TOKENS),
    (("BATCH", "LENGTH", "_"), ("BATCH", "LENGTH")),
)


def decode(params: Any, tokens: Any, keys: Any, values: Any, start: Any) -> Any:
    """Append one token to a cache of grouped keys and values, and attend to all of it."""
    x = params["table"][tokens]
    weights = params["attention"]
    normed = rms_norm(x, weights["norm"])
    q = jnp.einsum("ble,ehd->blhd", normed, weights["q"])
    k, v = (jnp.einsum("ble,ekd->blkd", normed, weights[name]) for name in "kv")
    keys = jax.lax.dynamic_update_slice(keys, k, (0, start, 0, 0))
    values = jax.lax.dynamic_update_slice(values, v, (0, start, 0, 0))
    grouped = q.reshape(BATCH, 1, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    scores = jax.nn.softmax(jnp.einsum("bqkgd,bskd->bkgqs", grouped, keys))
    mixed = jnp.einsum("bkgqs,bskd->bqkgd", scores, values).reshape(BATCH, 1, HEADS, HEAD_DIM)
    x = x + jnp.einsum("blhd,hde->ble", mixed, weights["o"])
    hidden = jax.nn.silu(x @ params["gate"]) * (x @ params["up"])
    return (x + hidden @ params["down"]) @ params["table"].T, keys, values


CACHE = jax.ShapeDtypeStruct((BATCH, 32, KV_HEADS, HEAD_DIM), jnp.float32)
DECODE = Model(
    "decode with a cache",
    decode,
    {
        "table": ((VOCAB, EMBED), "VOCAB EMBED"),
        "attention": LLAMA_ATTENTION,
        "gate": ((EMBED, HIDDEN), "EMBED MLP_INTERMEDIATE"),
        "up": ((EMBED, HIDDEN), "EMBED MLP_INTERMEDIATE"),
        "down": ((HIDDEN, EMBED), "MLP_INTERMEDIATE EMBED"),
    },
    (
        jax.ShapeDtypeStruct((BATCH, 1), jnp.int32),
        CACHE,
        CACHE,
        jax.ShapeDtypeStruct((), jnp.int32),
    ),
    (("BATCH", "LENGTH"), None, None, None),
)

EVERY_MODEL = (*MODELS, PARALLEL, SPEECH, DECODE)
