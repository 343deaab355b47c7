"""How long inference takes for many unrolled layers, beside the trace alone."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

import shardwright as sw

RUNS: Final = 15
TOKENS: Final = jax.ShapeDtypeStruct((2, 16), jnp.int32)
LAYER: Final = {
    "norm1": (32,),
    "q": (32, 4, 8),
    "k": (32, 2, 8),
    "v": (32, 2, 8),
    "o": (4, 8, 32),
    "norm2": (32,),
    "gate": (32, 64),
    "up": (32, 64),
    "down": (64, 32),
}


def shapes(layers: int) -> Any:
    """Return the shapes of a decoder that nobody annotated."""
    tree = {"table": (96, 32), "layers": [LAYER] * layers, "norm": (32,)}
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        tree,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )


def forward(params: Any, tokens: Any) -> Any:
    """Return logits. The table of embeddings is also the output head.

    Two query heads share each head of keys and values.
    """
    x = params["table"][tokens]
    for layer in params["layers"]:
        x = x + attention(layer, normed(x, layer["norm1"]))
        hidden = normed(x, layer["norm2"])
        x = x + (jax.nn.silu(hidden @ layer["gate"]) * (hidden @ layer["up"])) @ layer["down"]
    return normed(x, params["norm"]) @ params["table"].T


def attention(layer: Any, x: Any) -> Any:
    """Return causal attention with rotary positions."""
    q = rotated(jnp.einsum("ble,ehd->blhd", x, layer["q"]))
    k = rotated(jnp.einsum("ble,ekd->blkd", x, layer["k"]))
    v = jnp.einsum("ble,ekd->blkd", x, layer["v"])
    k, v = (jnp.repeat(rows, 2, axis=2) for rows in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return jnp.einsum("bqhd,hde->bqe", mixed, layer["o"])


def rotated(x: Any) -> Any:
    """Return queries or keys, rotated by their positions."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * 1e4 ** (-jnp.arange(half) / half)
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def normed(x: Any, scale: Any) -> Any:
    """Return `x` divided by its root mean square."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def ratios(layers: int) -> dict[str, Any]:
    """Return the median, the smallest and the largest of the ratios of pairs of runs.

    Each run starts without JAX's caches. Seconds are processor time, not wall time.
    """
    params = shapes(layers)

    def trace() -> None:
        jax.make_jaxpr(forward)(params, TOKENS)

    def infer() -> None:
        sw.infer_axes(forward, params, TOKENS, seeds=[(sw.BATCH, sw.LENGTH)], strict=True)

    infer()  # imports
    pairs = [(_seconds(trace), _seconds(infer)) for _ in range(RUNS)]
    found = [second / first for first, second in pairs]
    return {
        "layers": layers,
        "runs": RUNS,
        "ratio": statistics.median(found),
        "least": min(found),
        "most": max(found),
        "trace": statistics.median(first for first, _ in pairs),
        "inference": statistics.median(second for _, second in pairs),
    }


def _seconds(call: Callable[[], None]) -> float:
    jax.clear_caches()
    gc.collect()
    start = time.process_time()
    call()
    return time.process_time() - start
