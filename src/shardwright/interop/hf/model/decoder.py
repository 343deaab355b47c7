"""The reference decoder: plans use it in place of the model that a `config.json` describes.

Training scans over the layers, with remat. Prefill and decode append to caches, layer by layer.
Plans name lines of this file as places in the model, so each part of a layer has a line of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardwright.caches.base import KVCache
from shardwright.errors import LayerError, StrategyError, did_you_mean
from shardwright.interop.hf.model import latent
from shardwright.interop.hf.model.latent import LatentConfig
from shardwright.interop.hf.model.sizes import Sizes, Stack
from shardwright.layers import attention_block, embedding, loss, mlp_block, moe, moe_block, norm
from shardwright.layers.moe_block import MoEBlockConfig
from shardwright.layers.pipeline import ambient_pipeline, pipeline
from shardwright.layers.placement import RESIDUAL, place, use
from shardwright.layers.remat import REMAT, remat_policy
from shardwright.layers.stages import LayerInputs
from shardwright.manager import context
from shardwright.manager.einsum import einsum
from shardwright.plan.planner import Program
from shardwright.trees.initialize import stack_specs
from shardwright.trees.optimizer_state import annotate_state
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.axes import (
    BATCH,
    EMBED,
    EMPTY,
    EXPERT_GATE,
    LAYERS,
    QUERY_LENGTH,
    VOCAB,
)

TOKENS = (BATCH, QUERY_LENGTH)
LAST = (BATCH, EMPTY, VOCAB)  # logits of the last token
MODES = ("train", "prefill", "decode")
# A plan depends only on shapes, so these may have any value.
_RATE, _DECAY, _SQUARE_DECAY, _EPSILON = 1e-4, 0.9, 0.95, 1e-8


def programs(
    sizes: Sizes, *, batch: int, length: int, remat: str = "full", chunks: int = 1, repeats: int = 1
) -> dict[str, Program]:
    """Return what to plan: a training step with Adam, prefill of prompts, and one decode step.

    Args:
      sizes: Sizes of the decoder.
      batch: Number of sequences on all devices.
      length: Tokens of a sequence; in decode, rows of a cache.
      remat: Remat policy: "none", "full", "dots" or "blocks".
      chunks: The loss is computed in this number of parts, one after the other. The number must
        divide the length.
      repeats: The same value as `repeats` under `[pipeline]` of the strategy for training.

    Raises:
      StrategyError: `remat` is unknown.
      IndivisibleError: `repeats` does not divide the layers.
    """
    if remat not in REMAT:
        hint = did_you_mean(remat, REMAT)
        fix = f"{hint} remat is one of {', '.join(REMAT)}".strip()
        raise StrategyError(f"remat={remat!r} is unknown", fix=fix)
    model = Decoder(sizes, remat, chunks, repeats)
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
        "mlp": moe_block.specs(mlp) if isinstance(mlp, MoEBlockConfig) else mlp_block.specs(mlp),
    }
    if stack.router_bias:
        tree["router_bias"] = _router_bias(stack)
    if stack.norm_after is not None:
        for name in ("after_attention", "after_mlp"):
            tree[name] = norm.specs(stack.norm_after, attention.embed, attention.dtypes)
    return tree


def _router_bias(stack: Stack) -> ArraySpec:
    assert isinstance(stack.mlp, MoEBlockConfig)
    zeros = jax.nn.initializers.zeros
    return ArraySpec((stack.mlp.moe.experts,), jnp.float32, (EXPERT_GATE,), zeros)


def decoder_specs(sizes: Sizes, *, stacked: bool, repeats: int = 1) -> dict[str, Any]:
    """Return the parameters as `ArraySpec`s: per layer, or stacked for a scan.

    With `stacked`, each stack has one tree for each layer of its pattern, whose arrays have a
    leading dim LAYERS. After these trees come the layers after the last whole pattern, one tree
    each. `repeats` is the argument of `stack_specs`.
    """
    layers: list[Any] = []
    for stack in sizes.stacks:
        each = stack_specs_of(stack)
        # A scan takes whole patterns. The layers after the last whole pattern are computed one by
        # one.
        trips, rest = divmod(stack.layers, stack.period) if stacked else (0, stack.layers)
        scanned = [stack_specs(each, trips, repeats=repeats)] * stack.period if trips else []
        layers += [*scanned, *[each] * rest]
    tree = {
        "embedding": embedding.specs(sizes.vocab, sizes.embed, dtypes=sizes.dtypes),
        "layers": layers,
        "norm": norm.specs(sizes.norm, sizes.embed, sizes.dtypes),
    }
    if not sizes.tied:
        tree["head"] = loss.specs(sizes.vocab, sizes.embed, dtypes=sizes.dtypes)
    return tree


class Decoder:
    """The decoder of the given sizes, under a remat policy."""

    def __init__(self, sizes: Sizes, remat: str, chunks: int = 1, repeats: int = 1) -> None:
        self.sizes = sizes
        self.remat = remat
        self.chunks = chunks
        self.repeats = repeats

    def layer(
        self, stack: Stack, number: int, w: Any, x: Any, cache: Any = None, valid: Any = None
    ) -> tuple[Any, Any]:
        """Return the residual after one layer, and its cache."""
        attention = stack.attention_of(number)
        if isinstance(attention, LatentConfig):
            added, cache = latent.apply(attention, w["attention"], x, cache=cache)
        else:
            # With a cache, the positions follow from the lengths of the cache.
            places = None if cache is not None else latent.positions_of(x)
            added, cache = attention_block.apply(
                attention, w["attention"], x, state=cache, positions=places, valid=valid
            )
        x = place(x + self.normed(stack, w, "after_attention", added), RESIDUAL)
        if isinstance(stack.mlp, MoEBlockConfig):
            state = None
            if stack.router_bias:
                bias = use(w["router_bias"], _router_bias(stack))
                state = moe.init_state(stack.mlp.moe, bias=bias)
            added, _ = moe_block.apply(stack.mlp, w["mlp"], x, state=state, valid=valid)
        else:
            added, _ = mlp_block.apply(stack.mlp, w["mlp"], x)
        return place(x + self.normed(stack, w, "after_mlp", added), RESIDUAL), cache

    def normed(self, stack: Stack, w: Any, name: str, added: Any) -> Any:
        """Return what a block adds, after the norm that follows the block in some models."""
        if stack.norm_after is None:
            return added
        own = norm.specs(stack.norm_after, self.sizes.embed, self.sizes.dtypes)
        return norm.apply(stack.norm_after, use(w[name], own), added)

    def scanned(self, params: Any, x: Any) -> Any:
        """Return the residual after all layers, whose parameters are stacked.

        Raises:
          LayerError: The strategy has a pipeline with another value of `repeats`.
        """
        settings = ambient_pipeline()
        repeats = 1 if settings is None else settings.repeats
        if repeats != self.repeats:
            raise LayerError(
                f"the strategy has repeats = {repeats}, and this decoder repeats={self.repeats}",
                path="layers",
                rule=_rule_of_layers(),
                fix=f"pass repeats={repeats} to programs; on the command line, --set "
                f"repeats={repeats}",
            )
        trees = iter(params)
        for stack in self.sizes.stacks:
            trips, rest = divmod(stack.layers, stack.period)
            if trips:
                own = list(itertools.islice(trees, stack.period))
                each = stack_specs(stack_specs_of(stack), trips, repeats=repeats)
                stacked = [each] * stack.period
                step = functools.partial(self.trip, stack)
                by_row = not isinstance(stack.mlp, MoEBlockConfig)
                x, _ = pipeline(step, own, x, specs=stacked, by_row=by_row)
            x, _ = self.trained(stack, x, list(itertools.islice(trees, rest)), is_scan=False)
        return x

    def trip(self, stack: Stack, trees: list[Any], x: Any, _: LayerInputs) -> tuple[Any, None]:
        """Return the residual after one step of the scan, which runs one pattern of layers."""
        return self.trained(stack, x, trees)

    def trained(
        self, stack: Stack, x: Any, trees: list[Any], *, is_scan: bool = True
    ) -> tuple[Any, None]:
        """Return the residual after the first layers of a pattern, each under the remat policy."""
        for number, w in enumerate(trees):
            run: Any = functools.partial(self.uncached, stack, number)
            if (policy := remat_policy(self.remat)) is not None:
                # A scan is a barrier that keeps XLA from merging the forward pass of a layer with
                # its recomputation.
                run = jax.checkpoint(run, policy=policy, prevent_cse=not is_scan)
            x = run(w, x)
        return x, None

    def uncached(self, stack: Stack, number: int, w: Any, x: Any) -> Any:
        """Return the residual after one layer."""
        return self.layer(stack, number, w, checkpoint_name(x, "residual"))[0]

    def start(self, params: Any, tokens: Any) -> Any:
        """Return the embeddings of tokens."""
        x = embedding.apply(params["embedding"], tokens, dtypes=self.sizes.dtypes)
        scale = self.sizes.embed_scale
        # The original model rounds the factor to the dtype of the residual.
        return x if scale is None else x * jnp.asarray(scale, x.dtype)

    def end(self, params: Any, x: Any) -> Any:
        """Return the residual after the last norm."""
        own = norm.specs(self.sizes.norm, self.sizes.embed, self.sizes.dtypes)
        return norm.apply(self.sizes.norm, use(params["norm"], own), x)

    def head(self, params: Any) -> Any:
        """Return the output projection, or the embedding table if it is also the projection."""
        return params["embedding" if self.sizes.tied else "head"]

    def train_step(self, params: Any, moments: Any, tokens: Any) -> tuple[Any, Any]:
        """Return parameters and moments after a step of Adam."""

        def mean_loss(params: Any) -> Any:
            x = self.scanned(params["layers"], self.start(params, tokens))
            x = self.end(params, x)
            # The last label is the first token: a plan needs only shapes, not a correct loss.
            labels = jnp.roll(tokens, -1, axis=1)
            options: dict[str, Any] = {"tied": self.sizes.tied, "dtypes": self.sizes.dtypes}
            options["softcap"] = self.sizes.softcap
            head = self.head(params)
            return loss.cross_entropy(x, head, labels, chunks=self.chunks, **options).mean

        gradients = jax.grad(mean_loss)(params)

        def update(p: Any, g: Any, m: Any, v: Any) -> tuple[Any, Any, Any]:
            g = g.astype(jnp.float32)
            m, v = _DECAY * m + (1 - _DECAY) * g, _SQUARE_DECAY * v + (1 - _SQUARE_DECAY) * g * g
            return p - (_RATE * m / (jnp.sqrt(v) + _EPSILON)).astype(p.dtype), m, v

        structure: Any
        # `tree.map` would return one tree of triples, but the step needs three trees.
        leaves, structure = jax.tree.flatten(params)
        others = (jax.tree.leaves(tree) for tree in (gradients, *moments))
        new = [update(*each) for each in zip(leaves, *others, strict=True)]
        params, first, second = (structure.unflatten(part) for part in zip(*new, strict=True))
        return params, (first, second)

    def serve(self, params: Any, caches: list[Any], tokens: Any) -> tuple[Any, list[Any]]:
        """Return the logits of the last token, and the caches after the append."""
        x, written = self.appended(params, caches, tokens)
        return self.last_logits(params, x), written

    def appended(
        self, params: Any, caches: Any, tokens: Any, valid: Any = None
    ) -> tuple[Any, list[Any]]:
        """Return the residual after the last layer, and the caches after the append.

        Raises:
          LayerError: The strategy has a pipeline, whose stages have no caches.
        """
        if (settings := ambient_pipeline()) is not None:
            raise LayerError(
                f'schedule = "{settings.schedule}" runs stacked layers, and layers with caches are '
                "not stacked: each device would hold all layers",
                path="layers",
                rule=_rule_of_layers(),
                fix='write schedule = "none" under [pipeline], or serve under a strategy without '
                "pp; plan training with --mode train",
            )
        x = self.start(params, tokens)
        written = []
        # The caches of all layers have equal lengths, so compute rotary positions only once.
        length: Any = next((cache.length for cache in caches if isinstance(cache, KVCache)), None)
        layers = zip(self.numbered(), params["layers"], caches, strict=True)
        for (stack, number), w, cache in layers:
            if isinstance(cache, KVCache):
                cache = dataclasses.replace(cache, length=length)  # noqa: PLW2901
            x, cache = self.layer(stack, number, w, x, cache, valid)  # noqa: PLW2901
            written.append(cache)
        return x, written

    def numbered(self) -> list[tuple[Stack, int]]:
        """Return the stack of each layer, and the number of the layer in the stack."""
        return [(stack, number) for stack in self.sizes.stacks for number in range(stack.layers)]

    def logits(
        self, params: Any, tokens: Any, caches: Any, valid: Any
    ) -> tuple[jax.Array, list[Any]]:
        """Return the logits of all tokens, and the caches. An engine calls this as its model."""
        x, written = self.appended(params, list(caches), tokens, valid)
        sizes = self.sizes
        return (
            loss.logits(
                self.end(params, x),
                self.head(params),
                tied=sizes.tied,
                softcap=sizes.softcap,
                dtypes=sizes.dtypes,
            ),
            written,
        )

    def last_logits(self, params: Any, x: Any) -> Any:
        """Return the logits of the last token. Their length dim, of size 1, is not sharded."""
        # Only the last token gets logits, so the norm and the matmul skip all others.
        x = self.end(params, place(x[:, -1:], (BATCH, EMPTY, EMBED)))
        tied, dtype = self.sizes.tied, self.sizes.dtypes.compute
        head = use(self.head(params), (VOCAB, EMBED) if tied else (EMBED, VOCAB)).astype(dtype)
        values = einsum(
            "ble,ve->blv" if tied else "ble,ev->blv",
            x.astype(dtype),
            head,
            out=LAST,
            preferred_element_type=jnp.float32,
        )
        cap = self.sizes.softcap
        return values if cap is None else cap * jnp.tanh(values / cap)

    def training(self, batch: int, length: int) -> Program:
        """Return the training step."""
        specs = decoder_specs(self.sizes, stacked=True, repeats=self.repeats)
        params = _shapes(specs)
        moment = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
        tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
        # First and second moments of Adam, in float32 as in most trainers.
        moments = (moment, moment)
        axes = annotate_state(moments, specs)
        return Program(
            self.train_step,
            (params, moments, tokens),
            (specs, axes, TOKENS),
            (specs, axes),
            ("parameters", "optimizer", "inputs"),
            # Donated: the step replaces parameters and moments, and may write into their memory.
            (0, 1),
            any_mesh=True,
        )

    def serving(self, batch: int, tokens: int, capacity: int) -> Program:
        """Return a step that appends tokens to caches."""
        specs = decoder_specs(self.sizes, stacked=False)
        caches, axes = self._caches(batch, capacity)
        # In prefill, the inputs are whole prompts. In decode, they are one token of each sequence.
        prompt = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
        return Program(
            self.serve,
            (_shapes(specs), caches, prompt),
            (specs, axes, TOKENS),
            (LAST, axes),
            ("parameters", "cache", "inputs"),
            # Donated: an append writes into the memory of the caches.
            (1,),
            any_mesh=True,
        )

    def _caches(self, batch: int, capacity: int) -> tuple[list[Any], list[Any]]:
        """Return the caches of the layers as shapes, and their annotations."""
        caches: list[Any] = []
        axes: list[Any] = []
        for stack, number in self.numbered():
            config = stack.attention_of(number)
            if isinstance(config, LatentConfig):
                cache: Any = latent.cache_shape(config, batch=batch, capacity=capacity)
                own: Any = latent.ROWS
            else:
                make = functools.partial(
                    attention_block.init_cache, config, batch=batch, capacity=capacity
                )
                left = None if config.window is None else config.window[0]
                if left is not None and left + 1 < capacity:
                    # A ring holds the positions before a query, and the query's own position.
                    size = left + 1
                    make = functools.partial(make, kind="sliding", capacity=size, window=size)
                cache = jax.eval_shape(make)
                own = cache.axes()
            caches.append(cache)
            axes.append(own)
        return caches, axes


def _rule_of_layers() -> str:
    """Return the text and the place of the rule that shards stored layers."""
    manager = context.current()
    if manager is None:
        return ""
    return str(manager.explain(LAYERS, role="param").decisions[0].rule)


def _shapes(specs: Mapping[str, Any]) -> Any:
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, ArraySpec),
    )
