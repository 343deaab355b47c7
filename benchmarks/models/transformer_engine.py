"""TransformerEngine's `TransformerLayer` between a token embedding and logits.

The layer's Python code runs on a CPU, with a stand-in for its compiled extension
(`tools/te_cpu.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import jax

import shardwright as sw
from benchmarks.models.case import TOKENS, VOCAB, Case, Sharded, mesh_of
from tools import te_cpu

# Logical names of the embedding, which is not part of a layer, and their axes.
ENDS: Final = {"vocab": (sw.VOCAB, "param"), "embed": (sw.EMBED, "param")}


def shard_transformer_engine(pm: Any, bridge: Any, boxed: Any, names: Any) -> Any:
    values, axes = bridge.arrays(boxed), bridge.annotate(boxed, names)
    return jax.device_put(values, pm.shardings(values, axes)), bridge.rules(pm, names)


def transformer_engine(checkouts: Path, kv_heads: int = 4) -> Case:
    """Return a language model of two layers: fused queries, keys and values, and rotary positions.

    The embedding is annotated by names of its own, as a user of the layer does.
    """
    from shardwright.interop import flax as bridge
    from shardwright.interop.transformer_engine import NAMES

    root = str(checkouts / "TransformerEngine")
    sys.path.insert(0, root)
    te = te_cpu.load(root)
    model = language_model(te, kv_heads)
    boxed = model.init(jax.random.key(0), TOKENS)
    names, params = {**NAMES, **ENDS}, bridge.arrays(boxed)

    def own(sizes: tuple[int, int, int]) -> Any:
        import flax.linen as nn

        mesh = mesh_of(("dp", "fsdp", "tp"), sizes)
        with own_rules(te, mesh) as rules:
            return nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)

    def shard(pm: Any) -> Sharded:
        placed, context = shard_transformer_engine(pm, bridge, boxed, names)
        return Sharded(params=placed, forward=model.apply, context=context)

    return Case(
        name="TransformerEngine layers",
        source="NVIDIA/TransformerEngine: transformer_engine/jax/flax, through tools/te_cpu.py",
        params=params,
        forward=model.apply,
        user=shard_transformer_engine,
        shard=shard,
        own=own,
    )


def language_model(te: Any, kv_heads: int) -> Any:
    """Return a model that shares its table between tokens and logits."""
    import flax.linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            init = nn.with_logical_partitioning(nn.initializers.normal(0.5), ("vocab", "embed"))
            embed = nn.Embed(VOCAB, 32, embedding_init=init)
            x = embed(tokens)
            for at in range(2):
                x = te.flax.TransformerLayer(
                    hidden_size=32,
                    mlp_hidden_size=64,
                    num_attention_heads=4,
                    num_gqa_groups=kv_heads,
                    layernorm_type="rmsnorm",
                    hidden_dropout=0.0,
                    attention_dropout=0.0,
                    enable_relative_embedding=False,
                    enable_rotary_pos_emb=True,
                    name=f"layer{at}",
                )(x, deterministic=True)
            return embed.attend(x)

    return Model()


@contextmanager
def own_rules(te: Any, mesh: Any) -> Iterator[Any]:
    """Yield the rules of a `MeshResource` with mesh axes for data, FSDP and tensor parallelism."""
    resource = te.sharding.MeshResource(dp_resource="dp", fsdp_resource="fsdp", tp_resource="tp")
    with jax.set_mesh(mesh), te.sharding.global_shard_guard(resource):
        yield te.flax.extend_logical_axis_rules((("vocab", "tp"), ("embed", "fsdp")))
