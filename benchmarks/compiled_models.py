"""Programs of three models, small enough to compile each of them for TPUs in seconds.

Weights and matmuls are bfloat16. The decoder and the MoE model are reference decoders. The third
model is the decoder of T5X. Its source, with the names of its dims, is read from a checkout.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp

import shardwright as sw
from shardwright import caches
from shardwright.interop.hf import Sizes, Stack, programs
from shardwright.interop.logical_rules import Names, to_logical_axis_rules
from shardwright.layers.attention_block import AttentionConfig
from shardwright.layers.dtypes import Dtypes
from shardwright.layers.mlp_block import MlpConfig
from shardwright.layers.moe import MoEConfig
from shardwright.layers.moe_block import MoEBlockConfig
from shardwright.plan.planner import Program

BF16: Final = Dtypes(param="bfloat16", compute="bfloat16", cache="bfloat16")
EMBED, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 2048, 4096, 16, 8, 128, 8192, 2
EXPERTS, EXPERT_HIDDEN = 8, 1024
BATCH, LENGTH, PROMPTS = 16, 256, 8
TOKENS: Final = (sw.BATCH, sw.QUERY_LENGTH)
LOGITS: Final = (sw.BATCH, sw.QUERY_LENGTH, sw.VOCAB)
LAST: Final = (sw.BATCH, sw.EMPTY, sw.VOCAB)  # logits of one token

# Names of T5X's decoder.
NAMES: Final[Names] = {
    "batch": (sw.BATCH, "activation"),
    "length": (sw.QUERY_LENGTH, "activation"),
    # The model constrains its weights again, after they were gathered.
    "embed": (sw.EMBED, "activation"),
    "heads": (sw.HEAD, "activation"),
    "kv": (sw.HEAD_DIM, "activation"),
    "joined_kv": (sw.HEAD, "param"),
    "mlp": sw.MLP_INTERMEDIATE,
    "vocab": sw.VOCAB,
    "relpos_buckets": (sw.EMPTY, "param"),
}
SIZES: Final = {
    "batch": BATCH,
    "embed": EMBED,
    "heads": HEADS,
    "kv": HEAD_DIM,
    "joined_kv": HEADS * HEAD_DIM,
    "mlp": HIDDEN,
    "vocab": VOCAB,
}


def decoder() -> dict[str, Program]:
    """Return the programs of a decoder by mode."""
    mlp = MlpConfig(embed=EMBED, hidden=HIDDEN, dtypes=BF16)
    return _reference(mlp)


def moe_decoder() -> dict[str, Program]:
    """Return the programs of an MoE model of eight experts by mode."""
    # "auto" depends on the backend: programs are planned on CPUs, but compiled for TPUs.
    experts = MoEConfig(
        embed=EMBED,
        hidden=EXPERT_HIDDEN,
        experts=EXPERTS,
        per_token=2,
        exchange="slots",
        dtypes=BF16,
    )
    return _reference(MoEBlockConfig(moe=experts))


def _reference(mlp: Any) -> dict[str, Program]:
    attention = AttentionConfig(
        embed=EMBED, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtypes=BF16
    )
    sizes = Sizes(
        family="llama",
        vocab=VOCAB,
        embed=EMBED,
        stacks=(Stack(layers=LAYERS, attention=attention, mlp=mlp),),
        tied=False,
        longest=LENGTH,
        dtypes=BF16,
    )
    made = programs(sizes, batch=BATCH, length=LENGTH)
    return {**made, "insert": insert(KV_HEADS)}


def insert(kv_heads: int) -> Program:
    """Return a program that copies prefilled caches of all layers into slots of larger caches."""

    def shape(batch: int) -> Any:
        return jax.eval_shape(
            lambda: caches.init(
                "dense",
                batch=batch,
                capacity=LENGTH,
                kv_heads=kv_heads,
                head_dim=HEAD_DIM,
                dtype="bfloat16",
            )
        )

    def copy(targets: Any, sources: Any, slots: Any) -> Any:
        pairs = zip(targets, sources, strict=True)
        return [target.insert(source, slots).cache for target, source in pairs]

    target, source = shape(BATCH), shape(PROMPTS)
    axes = [target.axes()] * LAYERS
    return Program(
        copy,
        ([target] * LAYERS, [source] * LAYERS, jax.ShapeDtypeStruct((PROMPTS,), jnp.int32)),
        (axes, [source.axes()] * LAYERS, (sw.EMPTY,)),
        axes,
        ("cache", "inputs", "inputs"),
        (0,),
    )


def t5x_decoder(checkout: Path) -> dict[str, Program]:
    """Return the programs of T5X's decoder by mode, from its source in a checkout.

    Its dims have the names that its own source gives them. `sw.gather` gathers the weights before
    the model is applied. The model has no insert, so the insert program uses this library's caches.
    """
    network = _import_network(checkout)
    config = network.TransformerConfig(
        vocab_size=VOCAB,
        dtype=jnp.bfloat16,
        emb_dim=EMBED,
        num_heads=HEADS,
        num_layers=LAYERS,
        head_dim=HEAD_DIM,
        mlp_dim=HIDDEN,
        mlp_activations=("silu", "linear"),
        dropout_rate=0.0,
    )
    model = network.DecoderWrapper(config)
    whole = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    variables = jax.eval_shape(
        lambda tokens: model.init(jax.random.key(0), tokens, tokens, enable_dropout=False), whole
    )
    specs = _t5x_specs(variables)
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)
    cache, cache_axes = _t5x_cache(model, params, whole)

    train, prefill, decode = _t5x_steps(model, specs)
    moments = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
    moment_axes = sw.annotate_state(moments, specs)
    held = ("parameters", "cache", "inputs")
    results = (LAST, cache_axes)
    token = jax.ShapeDtypeStruct((BATCH, 1), jnp.int32)
    return {
        "train": Program(
            train,
            (params, moments, whole),
            (specs, moment_axes, TOKENS),
            (specs, moment_axes),
            ("parameters", "optimizer", "inputs"),
            (0, 1),
        ),
        "prefill": Program(
            prefill, (params, cache, whole), (specs, cache_axes, TOKENS), results, held, (1,)
        ),
        "decode": Program(
            decode, (params, cache, token), (specs, cache_axes, TOKENS), results, held, (1,)
        ),
        "insert": insert(HEADS),
    }


def _t5x_specs(variables: Any) -> Any:
    """Return the parameters as `ArraySpec`s, from the names in the collection `params_axes`."""

    def spec(path: Any, leaf: Any) -> sw.ArraySpec:
        node = variables["params_axes"]
        for key in path[:-1]:
            node = node[key.key]
        targets = [NAMES[name] for name in node[f"{path[-1].key}_axes"].names]
        axes = tuple(target if isinstance(target, str) else target[0] for target in targets)
        return sw.ArraySpec(leaf.shape, jnp.dtype(BF16.param), axes)

    return jax.tree_util.tree_map_with_path(spec, variables["params"])


def _t5x_steps(model: Any, specs: Any) -> tuple[Callable[..., Any], ...]:
    """Return the functions of training, prefill and decode of T5X's decoder."""
    import flax.linen as nn

    def apply(params: Any, tokens: Any, cache: Any = None, **options: Any) -> Any:
        weights = sw.gather(params, specs)
        pm = sw.current_manager()
        sizes = {**SIZES, "length": tokens.shape[1]}
        with nn.logical_axis_rules(to_logical_axis_rules(pm, NAMES, sizes=sizes)):
            state = {"params": weights} if cache is None else {"params": weights, "cache": cache}
            mutable = False if cache is None else ["cache"]
            return model.apply(
                state, tokens, tokens, enable_dropout=False, mutable=mutable, **options
            )

    def loss(params: Any, tokens: Any) -> Any:
        logits = sw.shard(apply(params, tokens), *LOGITS)
        labels = jnp.roll(tokens, -1, axis=1)
        hit = jax.nn.one_hot(labels, VOCAB, dtype=jnp.float32)
        return (jax.nn.logsumexp(logits, -1) - (logits * hit).sum(-1)).mean()

    def train(params: Any, moments: Any, tokens: Any) -> Any:
        gradients = jax.grad(loss)(params, tokens)
        moments = jax.tree.map(
            lambda m, g: 0.9 * m + 0.1 * g.astype(jnp.float32), moments, gradients
        )
        return jax.tree.map(lambda p, m: p - (1e-3 * m).astype(p.dtype), params, moments), moments

    def serve(params: Any, cache: Any, tokens: Any, **options: Any) -> Any:
        logits, state = apply(params, tokens, cache, **options)
        return sw.shard(logits[:, -1:], *LAST), state["cache"]

    def prefill(params: Any, cache: Any, tokens: Any) -> Any:
        return serve(
            params, cache, tokens, prefill=True, prefill_lengths=jnp.full((BATCH,), LENGTH)
        )

    def decode(params: Any, cache: Any, tokens: Any) -> Any:
        return serve(params, cache, tokens, decode=True, max_decode_length=LENGTH)

    return train, prefill, decode


def _import_network(checkout: Path) -> Any:
    """Import only the modules of the decoder, because the package itself imports TensorFlow.

    Raises:
      FileNotFoundError: The folder is not a checkout of T5X.
    """
    name, folder = "t5x", checkout / "t5x"
    for part in ("", "examples", "decoder_only"):
        name, folder = (f"{name}.{part}", folder / part) if part else (name, folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"{checkout} is not a checkout of T5X: it lacks {folder}")
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return importlib.import_module(f"{name}.network")


def _t5x_cache(model: Any, params: Any, tokens: Any) -> tuple[Any, Any]:
    """Return the caches of the model after a prefill as shapes, and their annotations."""

    def start(params: Any, tokens: Any) -> Any:
        options = {"decode": True, "max_decode_length": LENGTH, "enable_dropout": False}
        return model.apply({"params": params}, tokens, tokens, mutable=["cache"], **options)[1]

    by_name = {
        "cached_key": (sw.BATCH, sw.KV_HEAD, sw.KV_HEAD_DIM, sw.KV_LENGTH),
        "cached_value": (sw.BATCH, sw.KV_HEAD, sw.KV_HEAD_DIM, sw.KV_LENGTH),
        "cached_bias": (sw.EMPTY, sw.HEAD, sw.EMPTY, sw.KV_LENGTH),
        "cache_index": (sw.BATCH,),
    }

    def shape(path: Any, leaf: Any) -> Any:
        # After a prefill, each sequence has its own index.
        sizes = (BATCH,) if path[-1].key == "cache_index" else leaf.shape
        return jax.ShapeDtypeStruct(sizes, leaf.dtype)

    cache = jax.tree_util.tree_map_with_path(shape, jax.eval_shape(start, params, tokens)["cache"])
    axes = jax.tree_util.tree_map_with_path(lambda path, _: by_name[path[-1].key], cache)
    return cache, axes
