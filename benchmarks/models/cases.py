"""The models: what each needs, what its user writes, and its own rules.

The functions `shard_…` hold the lines that a user writes. Code that a repository needs for other
names, or on a CPU, is in the functions that make a case.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import shardwright as sw
from benchmarks.models.case import LENGTH, SEEDS, TOKENS, VOCAB, Case, Sharded, mesh_of
from benchmarks.models.maxtext import maxtext
from benchmarks.models.transformer_engine import transformer_engine


def shard_by_trace(pm: Any, params: Any, forward: Any) -> Any:
    inferred = sw.infer_axes(forward, params, TOKENS, seeds=SEEDS)
    return jax.device_put(params, pm.shardings(params, inferred.annotations))


def lm1b(checkouts: Path) -> Case:
    """Return flax's language model in linen."""
    import flax.linen as nn

    sys.path.insert(0, str(checkouts / "flax/examples/lm1b"))
    import models
    from configs import default

    config = models.TransformerConfig(
        vocab_size=VOCAB,
        output_vocab_size=VOCAB,
        emb_dim=32,
        num_heads=4,
        num_layers=2,
        qkv_dim=32,
        mlp_dim=64,
        max_len=LENGTH,
        deterministic=True,
    )
    model = models.TransformerLM(config)
    boxed = model.init(jax.random.key(0), TOKENS)
    params = nn.unbox(boxed)

    def own(sizes: tuple[int, int, int]) -> Any:
        mesh = mesh_of(("data", "fsdp", "tensor"), sizes)
        rules = default.get_config().logical_axis_rules
        return nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)

    return Case(
        name="lm1b",
        source="google/flax: examples/lm1b/models.py",
        # With an epsilon of 1e-8, the rounding of tiny gradients changes the loss by 7e-6.
        epsilon=1e-6,
        params=params,
        forward=model.apply,
        user=shard_by_trace,
        shard=lambda pm: Sharded(
            params=shard_by_trace(pm, params, model.apply), forward=model.apply
        ),
        own=own,
    )


def gemma(checkouts: Path) -> Case:
    """Return flax's Gemma in nnx, with the shapes of Gemma 3."""
    from flax import nnx

    sys.path.insert(0, str(checkouts / "flax/examples/gemma"))
    import modules
    import transformer
    import transformer_cfg

    config = transformer_cfg.TransformerConfig(
        num_layers=2,
        num_embed=VOCAB,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=1,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=(modules.AttentionType.GLOBAL,) * 2,
    )
    graph, params = nnx.split(transformer.Transformer(config, rngs=nnx.Rngs(0)))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (8, LENGTH, LENGTH))
    places = jnp.broadcast_to(jnp.arange(LENGTH), (8, LENGTH))

    def forward(params: Any, tokens: Any) -> Any:
        return nnx.merge(graph, params)(tokens, places, None, mask)[0]

    def own(sizes: tuple[int, int, int]) -> Any:
        mesh = mesh_of(("data", "fsdp", "tp"), sizes)
        ruled = dataclasses.replace(
            config, shd_config=transformer_cfg.ShardingConfig.fsdp_tp_sharding()
        )
        with nnx.use_eager_sharding(False):
            model = nnx.eval_shape(lambda: transformer.Transformer(ruled, rngs=nnx.Rngs(0)))
        return nnx.get_named_sharding(nnx.state(model), mesh)

    return Case(
        name="gemma",
        source="google/flax: examples/gemma/transformer.py",
        params=params,
        forward=forward,
        user=shard_by_trace,
        shard=lambda pm: Sharded(params=shard_by_trace(pm, params, forward), forward=forward),
        own=own,
    )


def manager_of_llama3(mesh: str) -> sw.PartitionManager:
    """Return a manager with the rules of `fsdp_tp` on the mesh axes x, y and z."""
    batch, stored, tensor = {"fsdp:8": (8, 8, 1), "fsdp:4,tp:2": (4, 4, 2)}.get(mesh, (2, 1, 4))
    sizes = {"x": batch, "y": tensor, "z": 1}
    rules = {"batch": "x", "length": "-", "embed": "-", "head": "y+z", "kv_head": "y | -"}
    rules |= {"head_dim": "-", "mlp_intermediate": "y+z", "vocab": "y+z", "norm": "-"}
    weights = {"embed": "x"} if stored > 1 else {}
    strategy = sw.Strategy(mesh=sizes, rules=rules, params=weights, policy={"gather": "x"})
    return sw.PartitionManager(strategy, mesh=sw.create_mesh(sizes, axis_types="explicit"))


def shard_llama3(pm: Any, bridge: Any, module: Any, config: Any) -> Any:
    specs = bridge.annotate(module.Weights.abstract(config))
    rules = bridge.rules(pm, module.ShardingRules, sizes={"kv_heads": config.kv_heads})
    return specs, rules, lambda params: sw.gather(params, specs)


def llama3(checkouts: Path, kv_heads: int = 4) -> Case:
    """Return Llama 3 of jax-llm-examples. Its mesh axes are x, y and z."""
    from shardwright.interop import jax_llm_examples as bridge

    sys.path.insert(0, str(checkouts / "jax-llm-examples/llama3"))
    from llama3_jax import model as module

    # The model's norm rounds to bfloat16 whatever the config says, but the comparison needs
    # float32.
    module.jnp = types.SimpleNamespace(**{**vars(jnp), "bfloat16": jnp.float32})
    explicit = (jax.sharding.AxisType.Explicit,) * 3
    names = ("x", "y", "z")
    alone = jax.make_mesh((1, 1, 1), names, axis_types=explicit, devices=jax.devices()[:1])
    config = module.Config(
        embed=32,
        ffw_size=64,
        q_heads=4,
        kv_heads=kv_heads,
        num_layers=2,
        head_dim=8,
        vocab_size=VOCAB,
        max_seq_len=LENGTH,
        causal=True,
        use_prefill_attn_kernel=False,
        use_decode_attn_kernel=False,
        dtype=jnp.float32,
        quant_layer=False,
        quant_cache=False,
        mesh=alone,
    )
    params = module.Weights.init(jax.random.key(0), config)

    def run(config: Any) -> Callable[[Any, Any], Any]:
        return lambda params, tokens: module.forward(tokens, tokens * 0 + 1, params, config)[0]

    def shard(pm: Any) -> Sharded:
        specs, rules, gather = shard_llama3(pm, bridge, module, config)
        placed = jax.device_put(jax.device_get(params), pm.shardings(specs))
        apply = run(dataclasses.replace(config, rules=rules, mesh=pm.mesh))
        return Sharded(
            params=placed, forward=lambda params, tokens: apply(gather(params), tokens), context=pm
        )

    def own(sizes: tuple[int, int, int]) -> Any:
        mesh = jax.make_mesh((sizes[0] * sizes[1], sizes[2], 1), names, axis_types=explicit)
        return module.Weights.shardings(dataclasses.replace(config, mesh=mesh))

    return Case(
        name="llama3",
        source="jax-ml/jax-llm-examples: llama3/llama3_jax/model.py",
        params=params,
        forward=run(config),
        user=shard_llama3,
        shard=shard,
        own=own,
        manager=manager_of_llama3,
    )


def shard_equinox(pm: Any, bridge: Any, model: Any, call: Any) -> Any:
    inferred = bridge.infer(model, TOKENS, seeds=SEEDS, call=call)
    return bridge.place(model, pm, inferred.annotations)


def equinox_decoder(checkouts: Path) -> Case:
    """Return a decoder made of equinox's layers, because equinox itself has no decoder."""
    import equinox as eqx

    from benchmarks.models.equinox_decoder import Decoder, call
    from shardwright.interop import equinox as bridge

    model = Decoder(VOCAB, 32, 4, 2, key=jax.random.key(0))
    params, rest = bridge.arrays(model), eqx.filter(model, eqx.is_array, inverse=True)

    def forward(params: Any, tokens: Any) -> Any:
        return call(eqx.combine(params, rest), tokens)

    def shard(pm: Any) -> Sharded:
        placed = shard_equinox(pm, bridge, model, call)
        return Sharded(params=bridge.arrays(placed), forward=forward)

    return Case(
        name="equinox decoder",
        source="patrick-kidger/equinox: parts of equinox.nn, as a decoder",
        params=params,
        forward=forward,
        user=shard_equinox,
        shard=shard,
        own=lambda sizes: None,
    )


def shard_haliax(pm: Any, bridge: Any, model: Any) -> Any:
    sizes = bridge.sizes_of(model)
    context = bridge.rules(pm, sizes=sizes)
    return bridge.place(model, pm), context


def levanter(checkouts: Path, kv_heads: int = 4) -> Case:
    """Return the Llama of levanter, in haliax."""
    import equinox as eqx
    import haliax as hax

    from shardwright.interop import haliax as bridge

    sys.path.insert(0, str(checkouts / "levanter/src"))
    from levanter.layers.attention import AttentionBackend, AttentionMask
    from levanter.models.llama import LlamaConfig, LlamaLMHeadModel

    config = LlamaConfig(
        seq_len=LENGTH,
        hidden_dim=32,
        intermediate_dim=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=kv_heads,
        attn_backend=AttentionBackend.VANILLA,
        gradient_checkpointing=False,
    )
    model = LlamaLMHeadModel.init(hax.Axis("vocab", VOCAB), config, key=jax.random.key(0))
    params, rest = eqx.partition(model, eqx.is_array)
    axes = (hax.Axis("batch", len(TOKENS)), config.Pos)

    def forward(params: Any, tokens: Any) -> Any:
        whole = eqx.combine(params, rest)
        return whole(hax.named(tokens, axes), attn_mask=AttentionMask.causal()).array

    def shard(pm: Any) -> Sharded:
        placed, context = shard_haliax(pm, bridge, model)
        return Sharded(params=eqx.filter(placed, eqx.is_array), forward=forward, context=context)

    def own(sizes: tuple[int, int, int]) -> Any:
        mesh = mesh_of(("replica", "data", "model"), sizes)
        mapping = {"embed": "data", "mlp": "model", "heads": "model"}
        specs = hax.partitioning.pspec_for(params, mapping, preserve_existing_shardings=False)
        specs = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, jax.P))
        return [jax.NamedSharding(mesh, spec) for spec in specs]

    return Case(
        name="levanter llama",
        source="stanford-crfm/levanter: src/levanter/models/llama.py",
        params=params,
        forward=forward,
        user=shard_haliax,
        shard=shard,
        own=own,
    )


CASES: dict[str, Callable[..., Case]] = {
    "lm1b": lm1b,
    "gemma": gemma,
    "llama3": llama3,
    "equinox": equinox_decoder,
    "levanter": levanter,
    "transformer_engine": transformer_engine,
    "maxtext": maxtext,
}
