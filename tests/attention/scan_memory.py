"""Temporary memory of a gradient through attention in a `lax.scan` over layers.

    python -m tests.attention.scan_memory [length ...]

prints a table: implementation × length × (one layer, unrolled, scan, scan with remat), in MiB per
device, and the bound that `test_scan_memory` asserts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

import shardwright as sw
from shardwright.attention import dot_product_attention
from shardwright.testing import cpu_mesh, virtual_devices
from shardwright.testing.attention_cases import STRATEGY

MESHES: Final = {
    "blockwise": "",
    "blockwise on a mesh": "dp:2,tp:2",
    "ring": "sp:4",
    "ulysses": "sp:4",
    "allgather_kv": "sp:4",
    "flash_decode": "sp:4",
    "splash": "dp:2,tp:2",
}
LAYERS, HEADS, HEAD_DIM = 4, 4, 64
MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of temporary memory per device, by program, and what the layers keep."""

    layer: int
    unrolled: int
    scan: int
    remat: int
    kept: int

    @property
    def bound(self) -> float:
        """1.1 × (one unrolled layer, and q, k, v, output and logsumexp of all layers).

        For ulysses, the input of each layer is added.
        """
        return 1.1 * (self.layer + self.kept)


def measure(name: str, length: int) -> Memory:
    """Compile the gradient of a stack of layers in four forms.

    Args:
      name: A key of `MESHES`, whose first word is the implementation.
      length: Number of tokens.
    """
    pm = None
    if MESHES[name]:
        pm = sw.PartitionManager(sw.Strategy.loads(STRATEGY), mesh=cpu_mesh(MESHES[name]))
    implementation = name.partition(" ")[0]
    mode = "decode" if implementation == "flash_decode" else "train"

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        q = x * w
        o = dot_product_attention(q, x, x, causal=True, mode=mode, implementation=implementation)
        return x + o, None

    def scan(body: Callable[..., Any]) -> Callable[..., Any]:
        return lambda w, x: jnp.sum(lax.scan(body, x, w)[0])

    def unrolled(w: jax.Array, x: jax.Array) -> jax.Array:
        for each in w:
            x, _ = layer(x, each)
        return jnp.sum(x)

    with contextlib.nullcontext() if pm is None else pm:
        batch = 2 if "dp" in MESHES[name] else 1
        shape = (batch, length, HEADS, HEAD_DIM)

        def temporary(loss: Callable[..., Any], layers: int = LAYERS) -> int:
            w = jax.ShapeDtypeStruct((layers, HEAD_DIM), jnp.float32)
            x = jax.ShapeDtypeStruct(shape, jnp.float32)
            if pm is not None:
                axes = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)
                sharding = pm.for_mode(mode).sharding(axes, shape=shape)
                x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
            compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(w, x).compile()
            return int(compiled.memory_analysis().temp_size_in_bytes)

        rows = batch * length * HEADS // (1 if pm is None else pm.mesh.size)
        if implementation == "flash_decode":
            rows *= pm.mesh.size  # the keys alone are sharded
        return Memory(
            layer=temporary(unrolled, 1),
            unrolled=temporary(unrolled),
            scan=temporary(scan(layer)),
            remat=temporary(scan(jax.checkpoint(layer))),
            # k and v are the input of the layer, except that ulysses keeps them as it swaps them.
            kept=4 * LAYERS * rows * ((5 if name == "ulysses" else 4) * HEAD_DIM + 1),
        )


if __name__ == "__main__":
    virtual_devices(8)
    print(f"jax {jax.__version__}, {LAYERS} layers, MiB of temporary memory per device")
    titles = ("one layer", "unrolled", "scan", "scan + remat", "bound")
    print(f"{'':24}{'length':>8}" + "".join(f"{title:>14}" for title in titles))
    for name in MESHES:
        for length in map(int, sys.argv[1:] or ("1024", "2048", "4096")):
            if name == "splash" and length > 1024:
                continue  # interpreted: its program is one of loops over blocks
            found = measure(name, length)
            sizes = (found.layer, found.unrolled, found.scan, found.remat, found.bound)
            cells = "".join(f"{size / MIB:14.1f}" for size in sizes)
            print(f"{name:24}{length:8}{cells}", flush=True)
