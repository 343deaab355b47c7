"""Parameter trees of two published models, as annotated abstract arrays: nothing is allocated.

Shapes follow the published configurations of the models. Every tree is built leaf by leaf, so that
no cache can depend on the identity of a tree.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardwright import (
    EMBED,
    EXPERT_GATE,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    MLP_INTERMEDIATE,
    NORM,
    VOCAB,
    ArraySpec,
)

Q_LORA = "__Q_LORA__"
KV_LORA = "__KV_LORA__"
Leaves = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The parameters of a model, and the strategy of a user.

    Attributes:
      name: The published name.
      leaves: Returns shape and axes by `/`-joined path.
      preset: Name of the preset.
      overlay: Text of a strategy file that overlays the preset.
      devices8: Mesh of 8 devices.
      cluster: Mesh of a training cluster, without devices.
    """

    name: str
    leaves: Callable[[], Leaves]
    preset: str
    overlay: str = "version = 1\n"
    devices8: str
    cluster: str


def llama_405b() -> Leaves:
    """Return the 1,137 parameters of Llama 3.1 405B."""
    embed, heads, kv_heads, dim, hidden, vocab = 16384, 128, 8, 128, 53248, 128256
    leaves: Leaves = {
        "embed": ((vocab, embed), (VOCAB, EMBED)),
        "norm": ((embed,), (NORM,)),
        "lm_head": ((embed, vocab), (EMBED, VOCAB)),
    }
    for layer in range(126):
        at = f"layers/{layer}"
        leaves |= {
            f"{at}/attn_norm": ((embed,), (NORM,)),
            f"{at}/mlp_norm": ((embed,), (NORM,)),
            f"{at}/attn/q": ((embed, heads, dim), (EMBED, HEAD, HEAD_DIM)),
            f"{at}/attn/k": ((embed, kv_heads, dim), (EMBED, KV_HEAD, KV_HEAD_DIM)),
            f"{at}/attn/v": ((embed, kv_heads, dim), (EMBED, KV_HEAD, KV_HEAD_DIM)),
            f"{at}/attn/o": ((heads, dim, embed), (HEAD, HEAD_DIM, EMBED)),
            **_mlp(f"{at}/mlp", embed, hidden),
        }
    return leaves


def deepseek_v3() -> Leaves:
    """Return the 45,456 parameters of DeepSeek-V3, with one leaf per expert matrix."""
    embed, vocab = 7168, 129280
    leaves: Leaves = {
        "embed": ((vocab, embed), (VOCAB, EMBED)),
        "norm": ((embed,), (NORM,)),
        "lm_head": ((embed, vocab), (EMBED, VOCAB)),
    }
    for layer in range(61):
        leaves |= _mla(f"layers/{layer}", embed)
        at = f"layers/{layer}/mlp"
        if layer < 3:
            leaves |= _mlp(at, embed, 18432)
            continue
        leaves |= {
            f"{at}/router": ((embed, 256), (EMBED, EXPERT_GATE)),
            f"{at}/router_bias": ((256,), (EXPERT_GATE,)),
        }
        leaves |= _mlp(f"{at}/shared", embed, 2048)
        for expert in range(256):
            leaves |= _mlp(f"{at}/experts/{expert}", embed, 2048)
    return leaves


def _mla(at: str, embed: int) -> Leaves:
    heads, q_lora, kv_lora = 128, 1536, 512
    return {
        f"{at}/attn_norm": ((embed,), (NORM,)),
        f"{at}/mlp_norm": ((embed,), (NORM,)),
        f"{at}/attn/q_a": ((embed, q_lora), (EMBED, Q_LORA)),
        f"{at}/attn/q_norm": ((q_lora,), (NORM,)),
        f"{at}/attn/q_b": ((q_lora, heads, 192), (Q_LORA, HEAD, HEAD_DIM)),
        f"{at}/attn/kv_a": ((embed, kv_lora + 64), (EMBED, KV_LORA)),
        f"{at}/attn/kv_norm": ((kv_lora,), (NORM,)),
        f"{at}/attn/k_b": ((kv_lora, heads, 128), (KV_LORA, HEAD, HEAD_DIM)),
        f"{at}/attn/v_b": ((kv_lora, heads, 128), (KV_LORA, HEAD, KV_HEAD_DIM)),
        f"{at}/attn/o": ((heads, 128, embed), (HEAD, HEAD_DIM, EMBED)),
    }


def _mlp(at: str, embed: int, hidden: int) -> Leaves:
    return {
        f"{at}/gate": ((embed, hidden), (EMBED, MLP_INTERMEDIATE)),
        f"{at}/up": ((embed, hidden), (EMBED, MLP_INTERMEDIATE)),
        f"{at}/down": ((hidden, embed), (MLP_INTERMEDIATE, EMBED)),
    }


MODELS = (
    Model(
        name="Llama 3.1 405B",
        leaves=llama_405b,
        preset="fsdp_tp",
        devices8="dp:1,fsdp:2,sp:1,ep:1,tp:4",
        cluster="dp:8,fsdp:256,sp:1,ep:1,tp:8",
    ),
    Model(
        name="DeepSeek-V3",
        leaves=deepseek_v3,
        preset="moe_ep",
        overlay=(
            'version = 1\n[axes]\nq_lora = "rank of the query projection"\n'
            'kv_lora = "rank of the key and value projections"\n'
            '[rules]\nq_lora = "-"\nkv_lora = "-"\n'
        ),
        devices8="dp:1,fsdp:2,sp:1,ep:2,tp:2",
        cluster="dp:8,fsdp:64,sp:1,ep:8,tp:4",
    ),
)


def build(
    leaves: Leaves, make: Callable[[tuple[int, ...], tuple[str, ...]], Any], *, share: bool = True
) -> dict[str, Any]:
    """Return a new nested dict with `make(shape, axes)` at each path.

    Each leaf has its own shape tuple. With `share`, equal axes are one tuple, as in a model that
    names its annotations once. Equal keys are one string, as Python does for names in source code.
    Without `share`, every leaf and key has its own tuple and string.
    """
    tree: dict[str, Any] = {}
    named: dict[tuple[str, ...], tuple[str, ...]] = {}
    for path, (shape, axes) in leaves.items():
        *parents, last = map(sys.intern, path.split("/")) if share else path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        own = (*list(axes),)
        node[last] = make((*list(shape),), named.setdefault(axes, own) if share else own)
    return tree


def abstract_arrays(leaves: Leaves, *, share: bool = True) -> dict[str, Any]:
    """Return a new tree of `jax.ShapeDtypeStruct`s; `share` as in `build`."""
    return build(leaves, lambda shape, _: jax.ShapeDtypeStruct(shape, jnp.bfloat16), share=share)


def annotations(leaves: Leaves, *, share: bool = True) -> dict[str, Any]:
    """Return a new tree of annotations; `share` as in `build`."""
    return build(leaves, lambda _, axes: axes, share=share)


def specs(leaves: Leaves) -> dict[str, Any]:
    """Return a new tree of `ArraySpec`s."""
    return build(leaves, lambda shape, axes: ArraySpec(shape, jnp.bfloat16, axes))
