"""Check what callers give to a stack of layers; each block checks its own part again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from shardwright.caches.base import KVCache
from shardwright.errors import LayerError
from shardwright.layers.fp8 import DenseUse
from shardwright.layers.inputs import check_params
from shardwright.layers.moe_block import MoEBlockConfig

if TYPE_CHECKING:  # the stack imports this module
    from shardwright.layers.transformer_block import TransformerConfig


def trees_of(config: TransformerConfig) -> int:
    """Return the number of trees of parameters."""
    if not config.scan:
        return config.layers
    return config.period + config.layers % config.period


def is_scanned(config: TransformerConfig, tree: int) -> bool:
    """Return whether the arrays of a tree have a leading dim of layers."""
    return config.scan and tree < config.period


def check_trees(specs: Sequence[Any], params: Any, path: str | None) -> None:
    """Check the number of trees of parameters, and each tree."""
    trees, create = len(specs), "transformer_block.specs(config)"
    if not isinstance(params, Sequence) or len(params) != trees:
        is_list = isinstance(params, Sequence)
        has = f"{len(params)} trees" if is_list else f"is a {type(params).__name__}"
        raise LayerError(
            f"params {'has ' if is_list else ''}{has}, and the config describes {trees} trees",
            path="params",
            fix=f"pass the list that {create} describes",
        )
    for number, (own, tree) in enumerate(zip(specs, params, strict=True)):
        place = f"params[{number}]" if path is None else f"{path}/{number}"
        check_params(own, tree, path=place, create=create)


def check_encoded(config: TransformerConfig, encoded: Any, segment_ids: Any) -> None:
    """Check that the output of an encoder is given if, and only if, the layers read one."""
    if config.cross is not None and encoded is None:
        raise LayerError(
            "the layers have cross-attention, and encoded is not given",
            path="encoded",
            fix="pass the output of an encoder, [batch, encoded length, embed]",
        )
    if config.cross is None and not (encoded is None and segment_ids is None):
        raise LayerError(
            "encoded is given, and the layers have no cross-attention",
            path="encoded",
            fix="TransformerConfig(cross=AttentionConfig(causal=False, rope_theta=None, ...))",
        )


def check_moe_states(config: TransformerConfig, moe_states: Any) -> None:
    """Check that there is a state per tree of parameters, and None for an MLP."""
    trees = trees_of(config)
    if moe_states is not None and len(moe_states) != trees:
        raise LayerError(
            f"state has {len(moe_states)} MoE states for {trees} trees of parameters",
            path="state",
            fix="pass one MoEState per tree, and None where a layer has an MLP; that of a scan "
            "becomes that of its layers by transformer_block.unstack_state(config, state), or by "
            "init_caches(state=state) of an nnx Transformer",
        )
    for number, moe_state in enumerate(moe_states or ()):
        if moe_state is None:
            continue
        if not isinstance(config.mlp_of(number), MoEBlockConfig):
            raise LayerError(
                f"moe[{number}] is a {type(moe_state).__name__}, and layer {number} has an MLP",
                path="state",
                fix="pass None there",
            )
        _check_layers(config, number, f"moe[{number}].bias", moe_state.bias, own_rank=1)


def check_scaling(config: TransformerConfig, scaling: Any) -> None:
    """Check that scaling has a tree per tree of parameters; each block checks its own part."""
    if scaling is None:
        return
    trees, fix = trees_of(config), "pass fp8.uses(transformer_block.init_scaling(config))"
    if not isinstance(scaling, Sequence) or len(scaling) != trees:
        has = f"{len(scaling)} trees" if isinstance(scaling, Sequence) else type(scaling).__name__
        raise LayerError(f"scaling has {has} for {trees} trees", path="state", fix=fix)
    for number, tree in enumerate(scaling):
        if not isinstance(tree, Mapping) or set(tree) != {"attention", "mlp"}:
            has = ", ".join(map(str, tree)) if isinstance(tree, Mapping) else type(tree).__name__
            raise LayerError(
                f"scaling[{number}] has {has}, not attention and mlp", path="state", fix=fix
            )
        for use in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, DenseUse)):
            scale = use.x if isinstance(use, DenseUse) else None
            _check_layers(config, number, f"the scales of scaling[{number}]", scale, own_rank=0)


def _check_layers(
    config: TransformerConfig, tree: int, name: str, value: Any, *, own_rank: int
) -> None:
    """Check that an array of the state has a leading dim of layers with `scan`, and else none."""
    shape = getattr(value, "shape", None)
    scanned = is_scanned(config, tree)
    wanted = (config.trips,) if scanned else ()
    if shape is None or shape[: len(shape) - own_rank] == wanted:
        return
    fix = "pass the state of one layer per tree: transformer_block.unstack_state(config, state)"
    if scanned:
        fix = f"stack the layers of a tree in the leading dim, whose size is {config.trips}"
    raise LayerError(
        f"{name} have shape {shape}" if own_rank == 0 else f"{name} has shape {shape}",
        path="state",
        fix=fix,
    )


def check_caches(config: TransformerConfig, caches: Any) -> None:
    """Check that there is a cache per layer, and no scan."""
    if caches is None:
        return
    if config.scan:
        raise LayerError(
            "caches cannot be used with scan=True",
            path="state",
            fix="config, params = transformer_block.unstack(config, params)",
        )
    if len(caches) != config.layers:
        raise LayerError(
            f"state has {len(caches)} caches for {config.layers} layers",
            path="state",
            fix="pass transformer_block.init_caches(config, batch=..., capacity=...)",
        )
    check_rings(config, caches)


def check_rings(config: TransformerConfig, caches: list[KVCache]) -> None:
    """Refuse a cache that keeps a window for a layer that `windows` says attends to all tokens."""
    for number, cache in enumerate(caches if config.windows else ()):
        if isinstance(cache, KVCache) and cache.spec.window and config.window(number) is None:
            raise LayerError(
                f"layer {number} attends to all tokens, and its cache keeps {cache.spec.window}",
                path="caches",
                fix='create its cache with attention_block.init_cache(config.attention, "dense", '
                "batch=..., capacity=...)",
            )
