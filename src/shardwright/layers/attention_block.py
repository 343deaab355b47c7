"""The attention of a transformer layer: norm, projections, attention, output projection."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from shardwright.attention.api import dot_product_attention
from shardwright.attention.cached import append_and_attend, next_positions
from shardwright.attention.masks import MaskRules, Window
from shardwright.caches import create
from shardwright.caches.base import KVCache
from shardwright.errors import LayerError
from shardwright.layers import fp8, norm, projection
from shardwright.layers.dtypes import FLOAT32, Dtypes
from shardwright.layers.fp8 import Recipe, read_recipe
from shardwright.layers.fp8.recipe import RECIPE
from shardwright.layers.inputs import SIZE, check_params, read_keys
from shardwright.layers.lora import LoraConfig
from shardwright.layers.norm import RMS, NormConfig
from shardwright.layers.placement import OPERAND, RESIDUAL, check_residual, check_rows, place
from shardwright.layers.projection import gather_weights, parts_of, project
from shardwright.layers.rope import RopeFrequencies, rope
from shardwright.manager import context
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.axes import (
    BATCH,
    EMBED,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    QUERY_LENGTH,
)
from shardwright.vocabulary.modes import MODE_TRAIN
from shardwright.vocabulary.read import (
    RATE,
    Faults,
    FieldKind,
    instance,
    number,
    read_fields,
    read_value,
    refuse,
)

QUERIES = (BATCH, QUERY_LENGTH, HEAD, HEAD_DIM)
NEW_ROWS = (BATCH, QUERY_LENGTH, KV_HEAD, KV_HEAD_DIM)


def _read_window(_: str, window: Any) -> tuple[Any, Faults]:
    MaskRules(window=window)  # refuses an invalid window
    return window, []


def _read_theta(name: str, theta: Any) -> tuple[Any, Faults]:
    has_base = theta is not None and not isinstance(theta, RopeFrequencies)
    return BASE.read(name, theta) if has_base else (theta, [])


FACTOR: Final = number("positive", fix="pass a number, or leave {name} out for the default")
WINDOW: Final = FieldKind(_read_window)
BASE: Final = number(
    "positive", fix="pass a number, rope_frequencies(...), or None for no rotary positions"
)
THETA: Final = FieldKind(_read_theta)
STATE: Final = instance(
    KVCache, fix="pass attention_block.init_cache(config, batch=..., capacity=...)"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Sizes and options of attention.

    Attributes:
      embed: Size of the residual.
      heads: Heads of queries.
      kv_heads: Heads of keys and values; they divide `heads`. Defaults to `heads`.
      head_dim: Size of a head. Defaults to `embed / heads`.
      causal: Whether a query attends only to keys up to its own position.
      window: (left, right): a query attends to `left` positions before its own and to `right`
        positions after it. Defaults to all positions, or to the window that a cache keeps.
      softcap: c in `c * tanh(logits / c)`. Defaults to none.
      scale: Factor of the logits. Defaults to `1 / sqrt(head_dim)`.
      rope_theta: Base of the rotary frequencies, or the frequencies of `layers.rope_frequencies`.
        None: no rotary positions.
      sinks: Whether each head has a sink: a learned logit that takes part in the softmax but has no
        value.
      norm: The norm before the block, or None.
      qk_norm: The norm of each head of queries and keys, applied before the rotary embedding, or
        None.
      bias: Whether the projections have biases.
      dropout: Probability of dropping an attention weight, if `keys` has a dropout key.
      init: Initializer of the kernels. Defaults to that of `dense.specs`.
      dtypes: Dtypes of the parameters, matmuls, result and cache.
      recipe: How the projections are computed in fp8: an `fp8.Recipe` or its name. None: not in
        fp8. The attention itself, between queries, keys and values, is never in fp8.
      lora: Low-rank adaptation of the four projections, or None.

    Raises:
      LayerError: A size, rate or option is not valid, or the sizes do not fit each other.
    """

    embed: Annotated[int, SIZE]
    heads: Annotated[int, SIZE]
    kv_heads: Annotated[int, SIZE] | None = None
    head_dim: Annotated[int, SIZE] | None = None
    causal: bool = True
    window: Annotated[Window | None, WINDOW] = None
    softcap: Annotated[float, FACTOR] | None = None
    scale: Annotated[float, FACTOR] | None = None
    rope_theta: Annotated[float | RopeFrequencies | None, THETA] = 10_000.0
    sinks: bool = False
    norm: NormConfig | None = RMS
    qk_norm: NormConfig | None = None
    bias: bool = False
    dropout: Annotated[float, RATE] = 0.0
    init: Callable[..., Any] | None = None
    dtypes: Dtypes = FLOAT32
    recipe: Annotated[Recipe | str | None, RECIPE] = None
    lora: LoraConfig | None = None

    def __post_init__(self) -> None:
        read_fields(self, error=LayerError)
        # The class is frozen, because `jit` hashes a config. So set fields by `object.__setattr__`.
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        divides = self.head_dim is not None or not self.embed % self.heads
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", self.embed // self.heads)
        refuse(
            LayerError,
            (
                not divides,
                "",
                f"heads={self.heads} do not divide embed={self.embed}",
                "pass head_dim=, or a number of heads that divides embed",
            ),
            (
                self.heads % self.key_heads,
                "",
                f"kv_heads={self.kv_heads} do not divide heads={self.heads}",
                "pass a divisor of heads: each kv head serves the same number of query heads",
            ),
            *([theta_rule("rope_theta", self.rope_theta, self.size)] if divides else []),
        )

    @property
    def key_heads(self) -> int:
        """`kv_heads`, as an integer."""
        assert self.kv_heads is not None
        return self.kv_heads

    @property
    def size(self) -> int:
        """`head_dim`, as an integer."""
        assert self.head_dim is not None
        return self.head_dim


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionState:
    """The state of attention in fp8 with delayed scaling.

    Attributes:
      cache: A KV cache, or None.
      scaling: In an argument, `fp8.uses(scaling, channel)`. In a result, the amaxes of the block's
        inputs and kernels. With a cache, the result has the scaling of the argument unchanged, so
        the result can be passed to the next call.
    """

    cache: Any = None
    scaling: Any = None


def specs(config: AttentionConfig) -> dict[str, Any]:
    """Return the parameters of the block as `ArraySpec`s."""
    options: dict[str, Any] = {
        "init": config.init,
        "dtypes": config.dtypes,
        "bias": config.bias,
        "adaptation": config.lora,
    }
    embed = [(EMBED, config.embed)]
    heads = [(HEAD, config.heads), (HEAD_DIM, config.size)]
    rows = [(KV_HEAD, config.key_heads), (KV_HEAD_DIM, config.size)]
    # The projections are separate kernels, because kv heads may be sharded over other mesh axes
    # than query heads.
    tree: dict[str, Any] = {
        "query": projection.specs(embed, heads, **options),
        "key": projection.specs(embed, rows, **options),
        "value": projection.specs(embed, rows, **options),
        "out": projection.specs(heads, embed, **options),
    }
    if config.norm is not None:
        tree["norm"] = norm.specs(config.norm, config.embed, config.dtypes)
    if config.qk_norm is not None:
        for name in ("query_norm", "key_norm"):
            tree[name] = norm.specs(config.qk_norm, config.size, config.dtypes)
    if config.sinks:
        logits = ArraySpec((config.heads,), config.dtypes.param, (HEAD,), jax.nn.initializers.zeros)
        tree["sinks"] = {"logits": logits}
    return tree


def init_scaling(config: AttentionConfig, *, layers: int | None = None) -> dict[str, Any] | None:
    """Return the first state of delayed scaling; None for other recipes.

    Args:
      config: Sizes and options.
      layers: Size of a leading dim, for stacked parameters. Defaults to none.
    """
    # The scaling is grouped by input: q, k and v share one quantized input.
    groups = {"qkv": ("query", "key", "value"), "out": ("out",)}
    return projection.init_scaling(config.recipe, groups, layers)


def init_cache(
    config: AttentionConfig, kind: str = "dense", *, batch: int, capacity: int, **options: Any
) -> KVCache:
    """Create an empty cache for the block, already sharded; see `caches.init` for the arguments."""
    cache: KVCache = create.init(
        kind,
        batch=batch,
        capacity=capacity,
        kv_heads=config.key_heads,
        head_dim=config.size,
        dtype=config.dtypes.cache,
        **options,
    )
    return cache


def apply(
    config: AttentionConfig,
    params: dict[str, Any],
    x: Any,
    *,
    keys: Mapping[str, jax.Array] | None = None,
    state: KVCache | AttentionState | None = None,
    path: str | None = None,
    positions: Any = None,
    segment_ids: Any = None,
    valid: Any = None,
    bias: Any = None,
    encoded: Any = None,
    encoded_segment_ids: Any = None,
) -> tuple[jax.Array, Any]:
    """Return what the block adds to the residual `x`, and the cache after the append.

    Without a cache the tokens of `x` attend to each other. With a cache, the tokens of row i of `x`
    are appended to slot i at its next positions, and attend to all tokens of this slot. So prefill,
    chunked prefill and decode are the same call. The mode is that of the cache; without a cache, it
    is that of the ambient manager. In a compiled program, tokens that do not fit into the cache are
    not appended, and the block adds 0 to their residual.

    With `encoded`, this is cross-attention: keys and values are projected from `encoded`, and every
    token of `x` attends to all rows of `encoded`. The norm is not applied to `encoded`.

    Args:
      config: Sizes and options. For cross-attention, a config without causality, window and rotary
        positions.
      params: The tree that `specs` describes, as stored.
      x: `[batch, length, embed]`.
      keys: `{"dropout": key}`. By default nothing is dropped. Not allowed with a cache.
      state: A cache, such as that of `init_cache`. Under `jit`, donate it. With delayed scaling, an
        `AttentionState`; then the returned state is one too.
      path: Path of `params` in the model, required if the strategy has `[[tensors]]` entries.
      positions: `[batch, length]`, for rotary positions and masks. Defaults to 0, 1, 2 and so on.
        Not allowed with a cache, which has its own positions.
      segment_ids: `[batch, length]`. Packed sequences do not attend to each other. Not allowed with
        a cache.
      valid: `[batch, length]` bool, True for tokens and False for padding. Only allowed with a
        cache.
      bias: As in `dot_product_attention`. Not allowed with a cache.
      encoded: `[batch, encoded length, embed]`, such as the output of an encoder. Not allowed with
        a cache or positions.
      encoded_segment_ids: `[batch, encoded length]`. A token of `x` attends to the rows of
        `encoded` that have the segment id of the token. Without `segment_ids`, all tokens of `x`
        have the id 1, so 0 marks padding in `encoded`.

    Raises:
      RankMismatchError: `x` or `encoded` is not `[batch, length, embed]`.
      LayerError: Two arguments exclude each other, or the config does not fit cross-attention. Or
        the parameters do not match the config, or a name in `keys` is unknown.
      AttentionError: As `dot_product_attention` raises it.
      CacheError: The tokens do not fit the cache, and the call is not traced.
      ShardingError: The rules of the ambient manager do not fit the arrays.
    """
    check_residual(x, config.embed)
    key, recipe, described = read_keys(keys), read_recipe(config.recipe), specs(config)
    cache: Any = state
    scaling = None
    if isinstance(state, AttentionState):
        cache, scaling = state.cache, state.scaling
    given = {"positions": positions, "segment_ids": segment_ids, "bias": bias}
    _check_arguments(cache, x, recipe, scaling, valid, {**given, 'keys["dropout"]': key})
    if encoded is not None or encoded_segment_ids is not None:
        _check_encoded(config, encoded, encoded_segment_ids, cache, given)
    if encoded_segment_ids is not None:
        # Tokens without segment ids get the id 1, so they see the rows of `encoded` with the id 1.
        own = jnp.ones(x.shape[:2], jnp.int32) if segment_ids is None else segment_ids
        given |= {"segment_ids": own, "kv_segment_ids": encoded_segment_ids}
    check_params(described, params, path=path, create="attention_block.specs(config)")
    weights = gather_weights(recipe, params, described, path=path)
    states = parts_of(recipe, scaling, ("qkv", "out"))
    x = place(x, RESIDUAL)
    if config.norm is not None:
        x = norm.apply(config.norm, weights["norm"], x, dtype=config.dtypes.compute)
    # With sequence parallelism the residual is gathered here, after the norm.
    x = place(x.astype(config.dtypes.compute), OPERAND)
    at = positions
    if cache is not None:
        at = next_positions(cache, q_length=x.shape[1], valid=valid)
    elif at is None:
        at = jnp.arange(x.shape[1])[None]
    rows, seen = _project(config, weights, (x, encoded), at, states["qkv"])
    sinks = weights["sinks"]["logits"] if config.sinks else None
    if cache is None:
        context_rows = _attend(config, rows, given | {"sinks": sinks}, key)
    else:
        context_rows, cache = _attend_to_cache(config, rows, cache, valid, sinks)
    # A remat policy can keep the context by this name, as in TransformerEngine.
    context_rows = checkpoint_name(place(context_rows, QUERIES), "context")
    # With sequence parallelism this matmul ends in a reduce-scatter.
    outs = project(
        context_rows.astype(config.dtypes.compute),
        weights,
        out={"out": RESIDUAL},
        axes=QUERIES,
        recipe=recipe,
        state=states["out"],
        adaptation=config.lora,
        contract=2,
    )
    if isinstance(state, AttentionState):
        if cache is None and seen is not None:
            scaling = {"qkv": seen, "out": outs.seen}
        cache = AttentionState(cache=cache, scaling=scaling)
    y = outs.ys["out"].astype(config.dtypes.output)
    return checkpoint_name(y, "attention_out"), cache


def _project(
    config: AttentionConfig,
    weights: dict[str, Any],
    inputs: tuple[Any, Any],
    positions: Any,
    state: Any,
) -> tuple[list[Any], Any]:
    """Return queries, keys and values, and the fp8 amaxes of their projections.

    Queries and keys are normalized and rotated, if the config says so.

    Args:
      config: Sizes and options.
      weights: The result of `gather_weights`.
      inputs: `x`, and `encoded` or None.
      positions: Positions of the tokens, for the rotation.
      state: The `DenseUse` of delayed scaling, or None.
    """
    options: dict[str, Any] = {"axes": OPERAND, "recipe": read_recipe(config.recipe)}
    options["adaptation"] = config.lora
    x, encoded = inputs
    query, pair = {"query": QUERIES}, {"key": NEW_ROWS, "value": NEW_ROWS}
    if encoded is None:
        result = project(x, weights, out=query | pair, state=state, **options)
        ys, seen = result.ys, result.seen
    else:
        # Do not normalize `encoded`: an encoder ends with a norm of its own, as in T5.
        encoded = place(jnp.asarray(encoded).astype(config.dtypes.compute), OPERAND)
        ys = project(x, weights, out=query, **options).ys
        ys |= project(encoded, weights, out=pair, **options).ys
        seen = None
    rows = []
    for name in (*query, *pair):
        y = ys[name]
        if name != "value" and config.qk_norm is not None:
            # Normalize q and k before the rotation, as in Qwen 3 and Gemma 3.
            y = norm.apply(config.qk_norm, weights[f"{name}_norm"], y)
        if name != "value" and config.rope_theta is not None:
            y = _rotate(config.rope_theta, y, positions)
        rows.append(checkpoint_name(y, name))
    return rows, seen


def _rotate(theta: float | RopeFrequencies, y: Any, positions: Any) -> Any:
    if isinstance(theta, RopeFrequencies):
        return rope(y, positions, frequencies=np.asarray(theta.values), scale=theta.scale)
    return rope(y, positions, theta=theta)


def _attend(config: AttentionConfig, rows: list[Any], given: dict[str, Any], key: Any) -> Any:
    manager = context.current()
    return dot_product_attention(
        *rows,
        # Without a manager nothing is sharded, so the mode does not matter.
        mode=MODE_TRAIN if manager is None or manager.mode is None else None,
        causal=config.causal,
        window=config.window,
        softcap=config.softcap,
        scale=config.scale,
        dropout=config.dropout if key is not None else 0.0,
        dropout_key=key,
        **given,
    )


def _attend_to_cache(
    config: AttentionConfig, rows: list[Any], cache: KVCache, valid: Any, sinks: Any
) -> tuple[Any, KVCache]:
    stored = cache.spec.dtype  # attention computes in the dtype of the cache
    q, k, v = (row.astype(stored) for row in rows)
    result = append_and_attend(
        q,
        k,
        v,
        cache,
        valid=valid,
        sinks=sinks,
        causal=config.causal,
        window=config.window,
        softcap=config.softcap,
        scale=config.scale,
    )
    # A tracer has no value, and shards of other processes cannot be read. In both cases, the cache
    # drops tokens that do not fit, without an error.
    refused = result.change.refused
    if not isinstance(refused, jax.core.Tracer) and refused.is_fully_addressable:
        result.change.check(fix="create the cache with a larger capacity=, or free the slot first")
    return result.o, result.cache


def _check_arguments(
    state: Any, x: Any, recipe: Any, scaling: Any, valid: Any, given: dict[str, Any]
) -> None:
    wrong, word, fix = {"valid": valid}, "only", "pass segment_ids= for padding"
    if state is not None:
        read_value("state", state, STATE, error=LayerError)
        wrong, word = given, "not"
        fix = "leave it out: a cache has its own positions, and is for inference only"
    slots = x.shape[0] if state is None else state.batch
    refuse(
        LayerError,
        *(
            (value is not None, name, f"{name} is {word} allowed with a cache", fix)
            for name, value in wrong.items()
        ),
        (
            slots != x.shape[0],
            "state",
            f"the cache has {slots} slots, and x has a batch of {x.shape[0]}",
            "create the cache with this batch=, or pass one row of x per slot, and valid=",
        ),
        (
            scaling is not None and recipe is None,
            "state",
            "state has scaling, and the config has no recipe",
            'write recipe="delayed" in the config, or pass AttentionState(cache=...)',
        ),
    )


def theta_rule(name: str, theta: Any, head_dim: int) -> tuple[object, str, str, str]:
    """Return a check for `refuse`: a head has at most `head_dim / 2` frequencies.

    Each frequency rotates two elements of a head.
    """
    count = len(theta.values) if isinstance(theta, RopeFrequencies) else 0
    what = f"{name} has {count} frequencies, and head_dim is {head_dim}"
    return 2 * count > head_dim, name, what, f"pass at most {head_dim // 2}"


def check_cross(config: AttentionConfig, path: str) -> None:
    """Check that a config fits cross-attention.

    Raises:
      LayerError: The config compares positions of two different sequences, by causality, window or
        rotation. Or the config has delayed scaling.
    """
    options = {"causal": False, "window": None, "rope_theta": None}
    refuse(
        LayerError,
        *(
            (
                getattr(config, name) != value,
                path,
                f"{name}={getattr(config, name)!r} compares positions of different sequences",
                "pass AttentionConfig(causal=False, rope_theta=None, ...)",
            )
            for name, value in options.items()
        ),
        (
            isinstance(config.recipe, fp8.DelayedScaling),
            path,
            "delayed scaling has one input scale for q, k and v; cross-attention has two inputs",
            'use recipe="current"',
        ),
    )


def _check_encoded(
    config: AttentionConfig, encoded: Any, segment_ids: Any, cache: Any, given: dict[str, Any]
) -> None:
    """Check the arguments of cross-attention."""
    check_cross(config, "config")
    check_rows("encoded", encoded, config.embed)
    fix = "leave one of the two out: tokens see all rows of encoded, which are not appended"
    wrong = {"a cache": cache, "positions": given["positions"]}
    refuse(
        LayerError,
        *(
            (value is not None, "encoded", f"encoded is not allowed with {name}", fix)
            for name, value in wrong.items()
        ),
        (
            given["segment_ids"] is not None and segment_ids is None,
            "encoded_segment_ids",
            "segment_ids is given without encoded_segment_ids",
            "pass the id of each row of encoded",
        ),
    )
