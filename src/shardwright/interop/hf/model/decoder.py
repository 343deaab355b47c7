"""The reference decoder, which is planned in place of the model of a `config.json`.

Training scans over the layers, with remat. Prefill and decode append to caches, layer by layer.
Plans name lines of this file, so each part of a layer has a line of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.caches.base import KVCache
from shardwright.errors import StrategyError, did_you_mean
from shardwright.interop.hf.model import latent
from shardwright.interop.hf.model.latent import LatentConfig
from shardwright.interop.hf.model.sizes import Sizes, Stack
from shardwright.layers import attention_block, embedding, loss, mixture_block, mlp_block, norm
from shardwright.layers.mixture_block import MixtureConfig
from shardwright.layers.placement import RESIDUAL, place, use
from shardwright.layers.transformer_block import REMAT
from shardwright.manager.einsum import einsum
from shardwright.plan.planner import Program
from shardwright.trees.initialize import stack_specs
from shardwright.trees.optimizer_state import annotate_state
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.axes import BATCH, EMBED, EMPTY, QUERY_LENGTH, VOCAB

TOKENS = (BATCH, QUERY_LENGTH)
LAST = (BATCH, EMPTY, VOCAB)  # logits of the last token
MODES = ("train", "prefill", "decode")
_RATE, _DECAY, _SQUARE_DECAY, _EPSILON = 1e-4, 0.9, 0.95, 1e-8


def programs(
    sizes: Sizes, *, batch: int, length: int, remat: str = "full", chunks: int = 1
) -> dict[str, Program]:
    """Return what to plan: a training step with Adam, prefill of prompts, and one decode step.

    Args:
      sizes: Sizes of the decoder.
      batch: Sequences in all.
      length: Tokens of a sequence; in decode, rows of a cache.
      remat: What the forward pass keeps: none, full, dots or blocks.
      chunks: Number of parts that the loss is computed in. It divides the length.

    Raises:
      StrategyError: `remat` is unknown.
    """
    if remat not in REMAT:
        hint = did_you_mean(remat, REMAT)
        fix = f"{hint} remat is one of {', '.join(REMAT)}".strip()
        raise StrategyError(f"remat={remat!r} is unknown", fix=fix)
    model = _Decoder(sizes, remat, chunks)
    return {
        "train": model.training(batch, length),
        "prefill": model.serving(batch, length, length),
        "decode": model.serving(batch, 1, length),
    }


def stack_specs_of(stack: Stack) -> dict[str, Any]:
    """Return the parameters of one layer as `ArraySpec`s."""
    attention, mlp = stack.attention, stack.mlp
    tree: dict[str, Any] = {
        "attention": latent.specs(attention)
        if isinstance(attention, LatentConfig)
        else attention_block.specs(attention),
        "mlp": mixture_block.specs(mlp) if isinstance(mlp, MixtureConfig) else mlp_block.specs(mlp),
    }
    if stack.norms_after:
        for name in ("after_attention", "after_mlp"):
            tree[name] = norm.specs(norm.RMS, attention.embed, attention.dtypes)
    return tree


def decoder_specs(sizes: Sizes, *, stacked: bool) -> dict[str, Any]:
    """Return the parameters as `ArraySpec`s: of each layer, or stacked for a scan."""
    layers: list[Any] = []
    for stack in sizes.stacks:
        each = stack_specs_of(stack)
        layers += [stack_specs(each, stack.layers)] if stacked else [each] * stack.layers
    tree = {
        "embedding": embedding.specs(sizes.vocab, sizes.embed, dtypes=sizes.dtypes),
        "layers": layers,
        "norm": norm.specs(norm.RMS, sizes.embed, sizes.dtypes),
    }
    if not sizes.tied:
        tree["head"] = loss.specs(sizes.vocab, sizes.embed, dtypes=sizes.dtypes)
    return tree


class _Decoder:
    """The decoder of some sizes, under a remat policy."""

    def __init__(self, sizes: Sizes, remat: str, chunks: int) -> None:
        self.sizes = sizes
        self.remat = remat
        self.chunks = chunks

    def layer(self, stack: Stack, w: Any, x: Any, cache: Any = None) -> tuple[Any, Any]:
        """Return the residual after one layer, and its cache."""
        after = norm.specs(norm.RMS, self.sizes.embed, self.sizes.dtypes)
        if isinstance(stack.attention, LatentConfig):
            added, cache = latent.apply(stack.attention, w["attention"], x, cache=cache)
        else:
            places = None if cache is not None else latent.positions_of(x)
            added, cache = attention_block.apply(
                stack.attention, w["attention"], x, state=cache, positions=places
            )
        if stack.norms_after:
            added = norm.apply(norm.RMS, use(w["after_attention"], after), added)
        x = place(x + added, RESIDUAL)
        if isinstance(stack.mlp, MixtureConfig):
            added, _ = mixture_block.apply(stack.mlp, w["mlp"], x)
        else:
            added, _ = mlp_block.apply(stack.mlp, w["mlp"], x)
        if stack.norms_after:
            added = norm.apply(norm.RMS, use(w["after_mlp"], after), added)
        return place(x + added, RESIDUAL), cache

    def scanned(self, params: Any, x: Any) -> Any:
        """Return the residual after all layers, whose parameters are stacked."""
        for stack, trees in zip(self.sizes.stacks, params, strict=True):

            def step(x: Any, w: Any, stack: Stack = stack) -> tuple[Any, None]:
                return self.layer(stack, w, x)[0], None

            if self.remat != "none":
                step = jax.checkpoint(step, policy=REMAT[self.remat], prevent_cse=False)
            x, _ = jax.lax.scan(step, x, trees)
        return x

    def start(self, params: Any, tokens: Any) -> Any:
        """Return the residual of tokens."""
        return embedding.apply(params["embedding"], tokens, dtypes=self.sizes.dtypes)

    def end(self, params: Any, x: Any) -> Any:
        """Return the residual after the last norm."""
        own = norm.specs(norm.RMS, self.sizes.embed, self.sizes.dtypes)
        return norm.apply(norm.RMS, use(params["norm"], own), x)

    def head(self, params: Any) -> Any:
        """Return the output projection, or the table in its place."""
        return params["embedding" if self.sizes.tied else "head"]

    def train_step(self, params: Any, moments: Any, tokens: Any) -> tuple[Any, Any]:
        """Return parameters and moments after a step of Adam."""

        def mean_loss(params: Any) -> Any:
            x = self.scanned(params["layers"], self.start(params, tokens))
            x = self.end(params, x)
            labels = jnp.roll(tokens, -1, axis=1)
            options: dict[str, Any] = {"tied": self.sizes.tied, "dtypes": self.sizes.dtypes}
            head = self.head(params)
            return loss.cross_entropy(x, head, labels, chunks=self.chunks, **options).mean

        gradients = jax.grad(mean_loss)(params)

        def update(p: Any, g: Any, m: Any, v: Any) -> tuple[Any, Any, Any]:
            g = g.astype(jnp.float32)
            m, v = _DECAY * m + (1 - _DECAY) * g, _SQUARE_DECAY * v + (1 - _SQUARE_DECAY) * g * g
            return p - (_RATE * m / (jnp.sqrt(v) + _EPSILON)).astype(p.dtype), m, v

        structure: Any
        leaves, structure = jax.tree.flatten(params)
        others = (jax.tree.leaves(tree) for tree in (gradients, *moments))
        new = [update(*each) for each in zip(leaves, *others, strict=True)]
        params, first, second = (structure.unflatten(part) for part in zip(*new, strict=True))
        return params, (first, second)

    def serve(self, params: Any, caches: list[Any], tokens: Any) -> tuple[Any, list[Any]]:
        """Return the logits of the last token, and the caches after the append."""
        x = self.start(params, tokens)
        stacks = [stack for stack in self.sizes.stacks for _ in range(stack.layers)]
        written = []
        layers = zip(stacks, params["layers"], _with_same_lengths(caches), strict=True)
        for stack, w, cache in layers:
            x, cache = self.layer(stack, w, x, cache)  # noqa: PLW2901
            written.append(cache)
        return self.last_logits(params, x), written

    def last_logits(self, params: Any, x: Any) -> Any:
        """Return the logits of the last token, whose length of 1 is not sharded."""
        x = self.end(params, place(x[:, -1:], (BATCH, EMPTY, EMBED)))
        tied, dtype = self.sizes.tied, self.sizes.dtypes.compute
        head = use(self.head(params), (VOCAB, EMBED) if tied else (EMBED, VOCAB)).astype(dtype)
        return einsum(
            "ble,ve->blv" if tied else "ble,ev->blv",
            x.astype(dtype),
            head,
            out=LAST,
            preferred_element_type=jnp.float32,
        )

    def training(self, batch: int, length: int) -> Program:
        """Return the training step."""
        specs = decoder_specs(self.sizes, stacked=True)
        params = _shapes(specs)
        moment = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
        tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
        moments = (moment, moment)
        axes = annotate_state(moments, specs)
        return Program(
            self.train_step,
            (params, moments, tokens),
            (specs, axes, TOKENS),
            (specs, axes),
            ("parameters", "optimizer", "inputs"),
            (0, 1),
            any_mesh=True,
        )

    def serving(self, batch: int, tokens: int, capacity: int) -> Program:
        """Return a step that appends tokens to caches."""
        specs = decoder_specs(self.sizes, stacked=False)
        caches, axes = self._caches(batch, capacity)
        prompt = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
        return Program(
            self.serve,
            (_shapes(specs), caches, prompt),
            (specs, axes, TOKENS),
            (LAST, axes),
            ("parameters", "cache", "inputs"),
            (1,),
            any_mesh=True,
        )

    def _caches(self, batch: int, capacity: int) -> tuple[list[Any], list[Any]]:
        """Return the cache of each layer as shapes, and their annotations."""
        caches: list[Any] = []
        axes: list[Any] = []
        for stack in self.sizes.stacks:
            config = stack.attention
            if isinstance(config, LatentConfig):
                cache: Any = latent.cache_shape(config, batch=batch, capacity=capacity)
                own: Any = latent.ROWS
            else:
                make = _cache_maker(config, batch, capacity)
                cache = jax.eval_shape(make)
                own = cache.axes()
            caches += [cache] * stack.layers
            axes += [own] * stack.layers
        return caches, axes


def _with_same_lengths(caches: list[Any]) -> list[Any]:
    """Return the caches with the lengths of the first one.

    All layers have the same lengths, so rotary positions are computed once, not once a layer.
    """
    dense = [cache for cache in caches if isinstance(cache, KVCache)]
    return [
        dataclasses.replace(cache, length=dense[0].length) if isinstance(cache, KVCache) else cache
        for cache in caches
    ]


def _cache_maker(config: attention_block.AttentionConfig, batch: int, capacity: int) -> Any:
    """Return a function that makes a cache. A layer with a window has a ring of its length."""
    window = None if config.window is None else config.window[0]
    if window is None or window + 1 >= capacity:
        return lambda: attention_block.init_cache(config, batch=batch, capacity=capacity)
    size = window + 1
    return lambda: attention_block.init_cache(
        config, "sliding", batch=batch, capacity=size, window=size
    )


def _shapes(specs: Mapping[str, Any]) -> Any:
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, ArraySpec),
    )
