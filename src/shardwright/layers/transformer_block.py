"""A stack of transformer layers: attention and MLP, scanned or unrolled, with a remat policy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import jax

from shardwright.attention.masks import Window
from shardwright.caches.base import KVCache
from shardwright.errors import LayerError, did_you_mean
from shardwright.layers import attention_block, mlp_block
from shardwright.layers.attention_block import AttentionConfig
from shardwright.layers.dropout import check_rate, dropout
from shardwright.layers.mlp_block import MlpConfig
from shardwright.layers.placement import RESIDUAL, check_residual, place
from shardwright.trees.initialize import stack_specs
from shardwright.vocabulary.integers import read_integer

# What the forward pass keeps of each layer. The rest is computed again in the backward pass.
REMAT: Final[Mapping[str, Callable[..., Any] | None]] = MappingProxyType(
    {
        "none": None,
        "full": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "blocks": jax.checkpoint_policies.save_only_these_names("attention_out", "mlp_down"),
    }
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """A stack of layers.

    Attributes:
      layers: Number of layers.
      attention: Attention of every layer.
      mlp: MLP of every layer.
      windows: Window of each layer, as a pattern that repeats: `((1023, 0), None)` alternates
        local and global attention. Defaults to that of `attention` for all.
      dropout: Probability of dropping an element of a block's output, if `keys` has a dropout key.
      remat: What is kept for the backward pass. "none" keeps everything, "full" keeps only the
        residual, "dots" keeps products with weights, and "blocks" keeps the outputs of the blocks.
      scan: Whether the layers are one `jax.lax.scan` over stacked parameters, which compiles one
        layer. Not possible with caches, see `unstack`.

    Raises:
      LayerError: The sizes do not fit each other, or a value is not valid.
    """

    layers: int
    attention: AttentionConfig
    mlp: MlpConfig
    windows: tuple[Window | None, ...] = ()
    dropout: float = 0.0
    remat: str = "none"
    scan: bool = True

    def __post_init__(self) -> None:
        read_integer("layers", self.layers, error=LayerError, fix="pass layers=12")
        check_rate("dropout", self.dropout)
        if self.mlp.embed != self.attention.embed:
            raise LayerError(
                f"mlp.embed={self.mlp.embed} differs from attention.embed={self.attention.embed}",
                fix="give both the size of the residual",
            )
        if self.remat not in REMAT:
            hint = did_you_mean(str(self.remat), REMAT)
            raise LayerError(
                f"remat={self.remat!r} is unknown",
                fix=f"{hint} write one of {', '.join(REMAT)}".strip(),
            )
        if self.layers % len(self.pattern):
            raise LayerError(
                f"windows has {len(self.pattern)} entries, which do not divide {self.layers} "
                "layers",
                fix="write a pattern that repeats, or one window per layer",
            )

    @property
    def pattern(self) -> tuple[Window | None, ...]:
        """The pattern of windows that repeats over the layers. It may have one entry."""
        return tuple(self.windows) or (self.attention.window,)


def specs(config: TransformerConfig) -> list[Any]:
    """Return the parameters as `ArraySpec`s.

    With `scan` there is one tree per window of the pattern, with a leading LAYERS dim. Without
    `scan` there is one tree per layer. Each tree is `{"attention": ..., "mlp": ...}`.
    """
    layer = {
        "attention": attention_block.specs(config.attention),
        "mlp": mlp_block.specs(config.mlp),
    }
    if not config.scan:
        return [layer] * config.layers
    count = len(config.pattern)
    return [stack_specs(layer, config.layers // count)] * count


def unstack(
    config: TransformerConfig, params: Sequence[Any]
) -> tuple[TransformerConfig, list[Any]]:
    """Return config and parameters without `scan`, for serving.

    A scan would copy the stack of caches at each step.
    """
    if not config.scan:
        return config, list(params)
    count = len(config.pattern)
    layers = [
        jax.tree.map(lambda w, at=number // count: w[at], params[number % count])
        for number in range(config.layers)
    ]
    return dataclasses.replace(config, scan=False), layers


def init_caches(
    config: TransformerConfig, kind: str = "dense", *, batch: int, capacity: int, **options: Any
) -> list[KVCache]:
    """Create an empty cache per layer, already sharded; see `caches.init` for the arguments."""
    return [
        attention_block.init_cache(
            config.attention, kind, batch=batch, capacity=capacity, **options
        )
        for _ in range(config.layers)
    ]


def apply(
    config: TransformerConfig,
    params: Sequence[Any],
    x: Any,
    *,
    keys: Mapping[str, jax.Array] | None = None,
    state: Sequence[KVCache] | None = None,
    path: str | None = None,
    positions: Any = None,
    segment_ids: Any = None,
    valid: Any = None,
) -> tuple[jax.Array, list[KVCache] | None]:
    """Return the residual after all layers, and the caches.

    Each layer is `x += attention(x)`, then `x += mlp(x)`. The norm after the last layer is not
    part of the stack.

    Args:
      config: Sizes and options.
      params: The trees that `specs` describes, as stored.
      x: The residual, `[batch, length, embed]`.
      keys: `{"dropout": key}`. By default nothing is dropped.
      state: One cache per layer, as `init_caches` returns them. Under `jit`, donate them.
      path: Path of `params` in the model, required if the strategy has `[[tensors]]` entries.
      positions: As in `attention_block.apply`.
      segment_ids: As in `attention_block.apply`.
      valid: As in `attention_block.apply`.

    Raises:
      LayerError: Caches are given with `scan`, or the number of caches or of trees is wrong.
      RankMismatchError: `x` is not `[batch, length, embed]`.
      ShardingError: The rules of the ambient manager do not fit the arrays.
    """
    check_residual(x, config.attention.embed)
    _check_counts(config, params, state)
    given = {"positions": positions, "segment_ids": segment_ids, "valid": valid}
    x, key = place(x, RESIDUAL), (keys or {}).get("dropout")
    if config.scan:
        return _scan(config, params, x, key, path, given), None
    after = []
    for number, layer_params in enumerate(params):
        run = _layer(config, number, None if path is None else f"{path}/{number}", given)
        cache = None if state is None else state[number]
        x, cache = run(layer_params, x, _layer_key(key, number), cache)
        after.append(cache)
    return x, None if state is None else after


def _scan(
    config: TransformerConfig, params: Any, x: Any, key: Any, path: str | None, given: Any
) -> jax.Array:
    count = len(config.pattern)
    runs = [
        _layer(config, at, None if path is None else f"{path}/{at}", given) for at in range(count)
    ]

    def body(x: Any, trip: Any) -> tuple[Any, None]:
        trees, number = trip
        for at, (run, tree) in enumerate(zip(runs, trees, strict=True)):
            x, _ = run(tree, x, _layer_key(key, number * count + at), None)
        return x, None

    numbers = jax.numpy.arange(config.layers // count)
    residual: jax.Array = jax.lax.scan(body, x, (list(params), numbers))[0]
    return residual


def _layer(config: TransformerConfig, number: int, path: str | None, given: Any) -> Any:
    """Return one layer as a function of arrays alone, under the remat policy."""
    window = config.pattern[number % len(config.pattern)]
    attention = dataclasses.replace(config.attention, window=window)
    run = functools.partial(_run_layer, config, attention, path, given)
    if config.remat == "none":
        return run
    # A scan is a barrier that keeps XLA from merging the second computation with the first.
    return jax.checkpoint(run, policy=REMAT[config.remat], prevent_cse=not config.scan)


def _run_layer(
    config: TransformerConfig,
    attention: AttentionConfig,
    path: str | None,
    given: Any,
    params: Any,
    x: Any,
    keys: Any,
    cache: Any,
) -> tuple[Any, Any]:
    own, after_attention, inner, after_mlp = [None] * 4 if keys is None else list(keys)

    def part(name: str) -> str | None:
        return None if path is None else f"{path}/{name}"

    added, cache = attention_block.apply(
        attention,
        params["attention"],
        x,
        keys=None if own is None else {"dropout": own},
        state=cache,
        path=part("attention"),
        **given,
    )
    x = _add(x, dropout(added, after_attention, config.dropout))
    added, _ = mlp_block.apply(
        config.mlp,
        params["mlp"],
        x,
        keys=None if inner is None else {"dropout": inner},
        path=part("mlp"),
    )
    return _add(x, dropout(added, after_mlp, config.dropout)), cache


def _add(x: Any, added: Any) -> Any:
    return place(x + added.astype(x.dtype), RESIDUAL)


def _layer_key(key: Any, number: Any) -> Any:
    """Return the four keys of a layer; the same ones with `scan` and without."""
    return None if key is None else jax.random.split(jax.random.fold_in(key, number), 4)


def _check_counts(config: TransformerConfig, params: Any, state: Any) -> None:
    trees = len(config.pattern) if config.scan else config.layers
    if len(params) != trees:
        raise LayerError(
            f"params has {len(params)} trees, and the config describes {trees}",
            path="params",
            fix="pass the list that transformer_block.specs(config) describes",
        )
    if state is None:
        return
    if config.scan:
        raise LayerError(
            "caches cannot be used with scan=True",
            path="state",
            fix="config, params = transformer_block.unstack(config, params)",
        )
    if len(state) != config.layers:
        raise LayerError(
            f"state has {len(state)} caches for {config.layers} layers",
            path="state",
            fix="pass transformer_block.init_caches(config, batch=..., capacity=...)",
        )
