"""A stack of transformer layers: attention, cross-attention if there is any, then an MLP or an
MoE layer.

The layers are scanned or unrolled, with a remat policy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardwright.attention.masks import Window
from shardwright.caches.base import KVCache
from shardwright.errors import LayerError
from shardwright.layers import attention_block, mlp_block, moe, moe_block
from shardwright.layers.attention_block import (
    THETA,
    WINDOW,
    AttentionConfig,
    AttentionState,
    theta_rule,
)
from shardwright.layers.dropout import dropout
from shardwright.layers.fp8 import DenseUse
from shardwright.layers.inputs import (
    check_params,
    check_valid,
    read_keys,
)
from shardwright.layers.mlp_block import MlpConfig
from shardwright.layers.moe import MoEState
from shardwright.layers.moe_block import MoEBlockConfig
from shardwright.layers.pipeline import ambient_pipeline, pipeline
from shardwright.layers.pipeline_loss import Head, pipeline_loss
from shardwright.layers.placement import RESIDUAL, check_residual, element, path_of, place
from shardwright.layers.remat import REMAT, remat_policy
from shardwright.layers.rope import RopeFrequencies
from shardwright.layers.stages import LayerInputs
from shardwright.trees.initialize import stack_specs
from shardwright.vocabulary.integers import with_article
from shardwright.vocabulary.read import (
    RATE,
    instance,
    integer,
    one_of,
    read_all,
    read_fields,
    read_value,
    refuse,
)

MLP: Final = instance(MlpConfig, MoEBlockConfig)
_NO_SEGMENT: Final = -(2**31)  # segment id of padding rows, which callers cannot use


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """A stack of layers.

    Attributes:
      layers: Number of layers.
      attention: Attention of every layer.
      mlp: The MLP or the MoE layer of every layer. A tuple is a pattern that repeats:
        `(MlpConfig(...), MoEBlockConfig(...))` alternates the two.
      cross: Cross-attention of every layer, between attention and MLP, or None.
      windows: Window of each layer, as a pattern that repeats: `((1023, 0), None)` alternates local
        and global attention. Defaults to the window of `attention`.
      thetas: `rope_theta` of each layer, as a pattern that repeats. Defaults to the `rope_theta` of
        `attention`.
      dropout: Probability of dropping an element of a block's output, if `keys` has a dropout key.
      remat: What is kept for the backward pass. "none" keeps everything, "full" keeps only the
        residual, "dots" keeps results of matmuls with weights, and "blocks" keeps the outputs of
        the blocks.
      scan: Whether the layers run as one `jax.lax.scan` over stacked parameters, so that only one
        layer of each kind is compiled. Layers after the last whole pattern run after the scan.
        Caches need `scan=False`: see `unstack` and `unstack_state`.

    Raises:
      LayerError: The sizes do not fit each other, or a value is not valid.
    """

    layers: Annotated[int, integer(fix="pass layers=12")]
    attention: AttentionConfig
    mlp: MlpConfig | MoEBlockConfig | tuple[MlpConfig | MoEBlockConfig, ...]
    cross: AttentionConfig | None = None
    windows: tuple[Window | None, ...] = ()
    thetas: tuple[float | RopeFrequencies | None, ...] = ()
    dropout: Annotated[float, RATE] = 0.0
    remat: Annotated[str, one_of(REMAT)] = "none"
    scan: bool = True

    def __post_init__(self) -> None:
        read_fields(self, error=LayerError)
        given: list[Any] = [("mlp", mlp, MLP) for mlp in self.mlps]
        given += [("windows", window, WINDOW) for window in self.windows]
        given += [("thetas", theta, THETA) for theta in self.thetas]
        read_all(given, error=LayerError)
        # Every block reads the residual and adds to it, so all blocks have its size.
        blocks: list[tuple[str, Any]] = [("mlp", mlp) for mlp in self.mlps]
        if self.cross is not None:
            attention_block.check_cross(self.cross, "cross")
            blocks.append(("cross", self.cross))
        patterns = {"windows": self.windows, "thetas": self.thetas, "mlp": self.mlps}
        refuse(
            LayerError,
            *(theta_rule("thetas", theta, self.attention.size) for theta in self.thetas),
            *(
                (
                    block.embed != self.attention.embed,
                    "",
                    f"{name}.embed={block.embed}, and attention.embed={self.attention.embed}",
                    "write the size of the residual in both",
                )
                for name, block in blocks
            ),
            *(
                (
                    len(pattern) > self.layers,
                    "",
                    f"{name} has {len(pattern)} entries for {self.layers} layers",
                    "write a pattern that repeats, or one entry per layer",
                )
                for name, pattern in patterns.items()
            ),
            (not self.mlps, "", "mlp is an empty tuple", "give at least one MlpConfig"),
            (
                self.scan and max(map(len, patterns.values())) <= self.layers < self.period,
                "scan",
                f"one repeat of the patterns is {self.period} layers, and layers={self.layers}",
                "pass scan=False, or give more layers",
            ),
        )

    @property
    def mlps(self) -> tuple[MlpConfig | MoEBlockConfig, ...]:
        """The pattern of MLPs and MoE blocks, which repeats over the layers."""
        return self.mlp if isinstance(self.mlp, tuple) else (self.mlp,)

    @property
    def period(self) -> int:
        """Number of layers after which the patterns repeat; 1 if all layers are alike."""
        return math.lcm(len(self.windows) or 1, len(self.thetas) or 1, len(self.mlps))

    @property
    def trips(self) -> int:
        """How often the patterns repeat: the number of steps of a scan."""
        return self.layers // self.period

    def window(self, number: int) -> Window | None:
        """Return the window of a layer."""
        return self.windows[number % len(self.windows)] if self.windows else self.attention.window

    def attention_of(self, number: int) -> AttentionConfig:
        """Return the attention of a layer."""
        changes: dict[str, Any] = {"window": self.window(number)}
        if self.thetas:
            changes["rope_theta"] = self.thetas[number % len(self.thetas)]
        return dataclasses.replace(self.attention, **changes)

    def mlp_of(self, number: int) -> MlpConfig | MoEBlockConfig:
        """Return the MLP or the MoE layer of a layer."""
        return self.mlps[number % len(self.mlps)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackState:
    """What the layers of a stack carry from call to call.

    Attributes:
      caches: One KV cache per layer, or None.
      moe: One `MoEState` per tree of parameters, or None for an MLP. With `scan`, the arrays of a
        state have a leading dim with an entry per layer of the tree. Before the first call, `moe`
        itself is None.
      scaling: With delayed scaling, one tree per tree of parameters; else None. In an argument,
        this is `fp8.uses(scaling, channel)`. In a result, it is the amaxes of inputs and kernels;
        with caches, it is the argument unchanged, so the result can be passed to the next call.
    """

    caches: list[KVCache] | None = None
    moe: list[MoEState | None] | None = None
    scaling: list[Any] | None = None

    @property
    def aux(self) -> Any:
        """Sum of the losses of all routers, float32. Add it to the loss. 0 without an MoE layer."""
        stats = [moe_state.stats for moe_state in self.moe or () if moe_state is not None]
        return sum((jnp.sum(each.aux) for each in stats if each is not None), jnp.float32(0))


STATE: Final = instance(StackState, fix="pass transformer_block.StackState(caches=...)")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerKeys:
    """The dropout keys of one layer; None drops nothing.

    Each block has two keys: one for dropout inside of the block, and one for its output.
    """

    attention: Any = None
    after_attention: Any = None
    mlp: Any = None
    after_mlp: Any = None
    cross: Any = None
    after_cross: Any = None


def specs(config: TransformerConfig) -> list[Any]:
    """Return the parameters as `ArraySpec`s.

    With `scan` there is one tree per layer of the pattern, with a leading LAYERS dim, and then one
    tree per layer after the scan. Without `scan` there is one tree per layer. Each tree is
    `{"attention": ..., "mlp": ...}`, with `cross` if the config has it.

    If the strategy of the ambient manager has a circular pipeline, the leading dims are
    `[repeats, layers / repeats]`.

    Raises:
      IndivisibleError: The repeats of the pipeline do not divide the layers.
    """
    count, pipelined = _trees_of(config), ambient_pipeline()
    repeats = 1 if pipelined is None else pipelined.repeats
    shared = {"attention": attention_block.specs(config.attention)}
    if config.cross is not None:
        shared["cross"] = attention_block.specs(config.cross)
    mlps = [config.mlp_of(number) for number in range(count)]
    layers = [{**shared, "mlp": _module_of(mlp).specs(mlp)} for mlp in mlps]
    return [
        stack_specs(layer, config.trips, repeats=repeats) if _is_scanned(config, number) else layer
        for number, layer in enumerate(layers)
    ]


def _module_of(mlp: MlpConfig | MoEBlockConfig) -> Any:
    return moe_block if isinstance(mlp, MoEBlockConfig) else mlp_block


def init_scaling(config: TransformerConfig) -> list[Any] | None:
    """Return the first state of delayed scaling, one tree per tree of parameters.

    None if no block uses delayed scaling. MoE layers have no scaling.
    """
    trees = []
    for number in range(_trees_of(config)):
        layers = config.trips if _is_scanned(config, number) else None
        mlp, own = config.mlp_of(number), None
        if not isinstance(mlp, MoEBlockConfig):
            own = mlp_block.init_scaling(mlp, layers=layers)
        attention = attention_block.init_scaling(config.attention, layers=layers)
        trees.append({"attention": attention, "mlp": own})
    return trees if jax.tree.leaves(trees) else None


def unstack(
    config: TransformerConfig, params: Sequence[Any]
) -> tuple[TransformerConfig, list[Any]]:
    """Return config and parameters without `scan`, for serving.

    A scan would copy the stack of all caches at each step.

    Raises:
      LayerError: The parameters are not those that `specs` describes.
    """
    _check_trees(specs(config), params, None)
    if not config.scan:
        return config, list(params)
    pipelined = ambient_pipeline()
    repeats = 1 if pipelined is None else pipelined.repeats
    layers = [_of_layer(config, params, number, repeats) for number in range(config.layers)]
    return dataclasses.replace(config, scan=False), layers


def _of_layer(
    config: TransformerConfig, trees: Sequence[Any], number: int, repeats: int = 1
) -> Any:
    """Return the parameters or the states of one layer from the trees that the scan stacks."""
    # Tree t of the scan has the layers t, t + period, t + 2 * period and so on.
    trip, tree = divmod(number, config.period)
    if not config.scan:
        return trees[number]
    if trip == config.trips:  # after the scan
        return trees[config.period + tree]
    # [repeats, layers / repeats, ...] has the layers in order.
    at = (trip,) if repeats == 1 else divmod(trip, config.trips // repeats)
    return jax.tree.map(lambda leaf: element(leaf, at), trees[tree])


def unstack_state(config: TransformerConfig, state: StackState) -> StackState:
    """Convert a state of scanned layers to that of layers without `scan`, for serving.

    Serving needs the biases of training, else tokens would go to other experts. It needs the scales
    of training, else fp8 values would be rounded to other numbers. Each MoE layer gets statistics
    of 0. So a call returns a state of the same structure, which may be the carry of a loop.

    Args:
      config: The config, as for `unstack`.
      state: The state with the trained biases and, with delayed scaling, `fp8.uses(scaling)`.

    Raises:
      LayerError: The state does not belong to this config.
    """
    _check_state(config, state)

    def moe_state_of(number: int) -> MoEState | None:
        mlp = config.mlp_of(number)
        if not isinstance(mlp, MoEBlockConfig):
            return None
        given = None if state.moe is None else _of_layer(config, state.moe, number)
        return moe.init_state(mlp.moe, bias=None if given is None else given.bias)

    numbers = range(config.layers)
    return StackState(
        caches=state.caches,
        moe=_if_any([moe_state_of(number) for number in numbers]),
        scaling=state.scaling and [_of_layer(config, state.scaling, number) for number in numbers],
    )


def init_caches(
    config: TransformerConfig, kind: str = "dense", *, batch: int, capacity: int, **options: Any
) -> list[KVCache]:
    """Create an empty cache per layer, already sharded; see `caches.init` for the arguments.

    Pass the list as the `caches` of a `StackState`.

    Raises:
      LayerError: The caches keep a window, but `windows` gives some layers no window.
      CacheError: As `caches.init` raises it.
    """
    caches = [
        attention_block.init_cache(
            config.attention, kind, batch=batch, capacity=capacity, **options
        )
        for _ in range(config.layers)
    ]
    _check_rings(config, caches)
    return caches


def apply(
    config: TransformerConfig,
    params: Sequence[Any],
    x: Any,
    *,
    keys: Mapping[str, jax.Array] | None = None,
    state: StackState | None = None,
    path: str | None = None,
    positions: Any = None,
    segment_ids: Any = None,
    valid: Any = None,
    encoded: Any = None,
    encoded_segment_ids: Any = None,
    run: Callable[..., tuple[Any, Any]] = pipeline,
) -> tuple[jax.Array, StackState]:
    """Return the residual after all layers, and the state.

    Each layer is `x += attention(x)`, then `x += mlp(x)`. With `cross`, `x += cross(x, encoded)` is
    between the two. Keys and values of `encoded` are computed again in each call. The norm after
    the last layer is not part of the stack. In a compiled program, a cache refuses tokens that do
    not fit, and attention adds 0 to the residual of these tokens.

    Args:
      config: Sizes and options.
      params: The trees that `specs` describes, as stored.
      x: The residual, `[batch, length, embed]`.
      keys: `{"dropout": key}`. By default nothing is dropped.
      state: Caches, the biases of the routers, and with delayed scaling its scales. Defaults to
        none of these. Under `jit`, donate it.
      path: Path of `params` in the model, required if the strategy has `[[tensors]]` entries.
      positions: As in `attention_block.apply`.
      segment_ids: As in `attention_block.apply`.
      valid: `[batch, length]` bool, True for tokens and False for padding. Tokens do not attend to
        padding, and MoE layers send padding to no expert. The results of padding have no meaning.
      encoded: As in `attention_block.apply`, for the cross-attention of every layer.
      encoded_segment_ids: As in `attention_block.apply`.
      run: Function that runs the layers of a scan, such as `sw.pipeline`.

    Returns:
      (x, state). The state has the caches with the new tokens. For each MoE layer, the state has
      the same bias, and this call's statistics.

    Raises:
      LayerError: Caches are given with `scan`, or the number of caches, of MoE states, of scalings
        or of trees is wrong. Or only one of `encoded` and cross-attention is given. Or the
        parameters do not match the config, or a name in `keys` is unknown.
      RankMismatchError: `x` is not `[batch, length, embed]`.
      CacheError: The tokens do not fit a cache, and the call is not traced.
      ShardingError: The rules of the ambient manager do not fit the arrays.
    """
    check_residual(x, config.attention.embed)
    state = StackState() if state is None else state
    _check_state(config, state)
    _check_encoded(config, encoded, encoded_segment_ids)
    _check_trees(specs(config), params, path)
    _check_pipeline(config)
    given = {
        "attention": {"positions": positions, **_padding(x, segment_ids, valid, state)},
        "cross": {"segment_ids": segment_ids, "encoded_segment_ids": encoded_segment_ids},
        "moe": {"valid": valid},
    }
    x, key = place(x, RESIDUAL), read_keys(keys)
    biases = [None] * len(params) if state.moe is None else state.moe
    scalings = state.scaling or [{"attention": None, "mlp": None} for _ in params]
    first = config.period if config.scan else 0
    moe_states: list[Any] = []
    seen: list[Any] = []
    if config.scan:
        states = (biases, scalings)
        x, moe_states, seen = _scan(config, params, x, run, key, states, path, given, encoded)
    given["cross"]["encoded"] = encoded
    caches = []
    for at in range(first, len(params)):
        # `params[first:]` are the layers that are not scanned: the last ones of the stack.
        number = config.layers - len(params) + at
        cache = None if state.caches is None else state.caches[number]
        # Inference with a cache has no backward pass, so remat is of no use. Remat would also trace
        # the layer, and inside a trace a full cache cannot raise an error.
        remat = config.remat if cache is None else "none"
        # These layers are outside of the scan, so `_layer` must keep XLA from merging the
        # recomputation with the first computation.
        own_config = dataclasses.replace(config, remat=remat, scan=False)
        run_layer = _layer(own_config, number, path_of(path, at), given)
        own = (biases[at], scalings[at])
        x, cache, after = run_layer(params[at], x, _keys(config, key, number), cache, own)
        caches.append(cache)
        moe_states.append(after[0])
        seen.append(after[1])
    return x, StackState(
        caches=None if state.caches is None else caches,
        moe=_if_any(moe_states),
        # Inference updates no scale, so the scales are returned unchanged for the next call.
        scaling=_if_any(seen) if state.caches is None else state.scaling,
    )


def loss(
    config: TransformerConfig,
    params: Sequence[Any],
    x: Any,
    *,
    head: Head,
    head_params: Any,
    head_inputs: Any,
    **options: Any,
) -> tuple[jax.Array, StackState]:
    """Return (loss, state) of a model that ends in these layers and a head.

    The loss is the sum of `head(head_params, y, inputs)` over the microbatches of a pipeline, plus
    `state.aux`. This function works for every strategy, and `schedule = "1f1b"` needs it.

    Args:
      config: As in `apply`.
      params: As in `apply`.
      x: As in `apply`.
      head: As in `sw.pipeline_loss`, on the residual after all layers.
      head_params: As in `sw.pipeline_loss`.
      head_inputs: As in `sw.pipeline_loss`.
      **options: As in `apply`.

    Raises:
      ShardingError: As `apply` and `sw.pipeline_loss` raise it.
    """
    pipelined = ambient_pipeline()
    if pipelined is None:
        y, state = apply(config, params, x, **options)
        return head(head_params, y, head_inputs) + state.aux, state
    count = pipelined.microbatches

    def aux(output: Any) -> Any:
        return StackState(moe=output[0]).aux / count

    def run(layer: Any, params: Any, x: Any, **options: Any) -> tuple[Any, Any]:
        of_head = (head, head_params, head_inputs)
        return pipeline_loss(layer, params, x, *of_head, aux=aux, **options)

    return apply(config, params, x, run=run, **options)


def _scan(
    config: TransformerConfig,
    params: Any,
    x: Any,
    run: Callable[..., tuple[Any, Any]],
    key: Any,
    states: tuple[Any, Any],
    path: str | None,
    given: Any,
    encoded: Any,
) -> tuple[jax.Array, list[Any], list[Any]]:
    """Run the scanned layers; return the result, and the MoE states and scalings of each tree."""
    count = config.period

    def trip(trees: Any, x: Any, inputs: LayerInputs) -> tuple[Any, tuple[list[Any], list[Any]]]:
        given, after = dict(inputs.rows), []
        given["cross"] = {**given["cross"], "encoded": inputs.streamed}
        for at, (tree, *own) in enumerate(zip(trees, *inputs.per_layer, strict=True)):
            run_layer = _layer(config, at, path_of(path, at), given)
            # Number layers over the whole stack: a layer then has the same keys as without scan.
            keys = _keys(config, inputs.keys, inputs.number * count + at)
            x, _, state = run_layer(tree, x, keys, None, tuple(own))
            after.append(state)
        return x, ([moe_state for moe_state, _ in after], [seen for _, seen in after])

    # MoE layers and fp8 compute loads and scales from several rows, so they are not `by_row`.
    blocks: tuple[Any, ...] = (config.attention, config.cross or config.attention, *config.mlps)
    combines_rows = any(isinstance(each, MoEBlockConfig) or each.recipe for each in blocks)
    stacked, *per_layer = (list(trees)[:count] for trees in (params, *states))
    result, (moe_states, seen) = run(
        trip,
        stacked,
        x,
        specs=specs(config)[:count],
        keys=key,
        rows=given,
        streamed=encoded,
        per_layer=per_layer,
        path=path,
        by_row=key is None and not combines_rows,
    )
    if ambient_pipeline() is None:
        moe_states, seen = jax.tree.map(lambda leaf: leaf[0], (moe_states, seen))
    else:
        moe_states = list(map(_over_microbatches, moe_states))
        seen = jax.tree.map(lambda leaf: leaf.max(0), seen)
    return result, moe_states, seen


def _over_microbatches(after: Any) -> Any:
    """Return the state of an MoE layer, given a state with a leading dim of microbatches.

    Microbatches have equal sizes, so the router loss is the mean of their router losses.
    """
    if after is None:
        return None
    stats = moe.MoEStats(
        load=after.stats.load.sum(0),
        dropped=after.stats.dropped.sum(0),
        aux=after.stats.aux.mean(0),
    )
    return MoEState(bias=None if after.bias is None else after.bias[0], stats=stats)


def _if_any(states: list[Any]) -> list[Any] | None:
    return states if jax.tree.leaves(states) else None


def _layer(config: TransformerConfig, number: int, path: str | None, given: Any) -> Any:
    """Return one layer under the remat policy, as a function whose arguments are all arrays."""
    attention = config.attention_of(number)
    run = functools.partial(_run_layer, config, attention, config.mlp_of(number), path, given)
    policy = remat_policy(config.remat)
    if policy is None:
        return run
    # In a scan, XLA cannot merge the recomputation with the first computation anyway, so
    # `prevent_cse` is not needed.
    return jax.checkpoint(run, policy=policy, prevent_cse=not config.scan)


def _run_layer(
    config: TransformerConfig,
    attention: AttentionConfig,
    mlp: MlpConfig | MoEBlockConfig,
    path: str | None,
    given: Any,
    params: Any,
    x: Any,
    keys: LayerKeys,
    cache: Any,
    states: tuple[Any, Any],
) -> tuple[Any, Any, tuple[Any, Any]]:
    moe_state, scaling = states
    x = checkpoint_name(x, "residual")
    added, attended = attention_block.apply(
        attention,
        params["attention"],
        x,
        keys=_dropout_keys(keys.attention),
        state=AttentionState(cache=cache, scaling=scaling["attention"]),
        path=path_of(path, "attention"),
        **given["attention"],
    )
    x = _add(x, dropout(added, keys.after_attention, config.dropout))
    if config.cross is not None:
        added, _ = attention_block.apply(
            config.cross,
            params["cross"],
            x,
            keys=_dropout_keys(keys.cross),
            path=path_of(path, "cross"),
            **given["cross"],
        )
        x = _add(x, dropout(added, keys.after_cross, config.dropout))
    is_moe = isinstance(mlp, MoEBlockConfig)
    added, state = _module_of(mlp).apply(
        mlp,
        params["mlp"],
        x,
        keys=_dropout_keys(keys.mlp),
        state=moe_state if is_moe else scaling["mlp"],
        path=path_of(path, "mlp"),
        **(given["moe"] if is_moe else {}),
    )
    x = _add(x, dropout(added, keys.after_mlp, config.dropout))
    seen = {"attention": attended.scaling, "mlp": None if is_moe else state}
    return x, attended.cache, (state if is_moe else None, seen)


def _padding(x: Any, segment_ids: Any, valid: Any, state: StackState) -> dict[str, Any]:
    """Return the arguments that tell attention which rows are tokens: `segment_ids` and `valid`."""
    check_valid(valid, x.shape[:2])
    if valid is None or state.caches is not None:
        return {"segment_ids": segment_ids, "valid": valid}
    # Rows of padding get a segment that no token has. Attention across segments is masked.
    ids = 1 if segment_ids is None else segment_ids
    return {"segment_ids": jnp.where(valid, ids, _NO_SEGMENT), "valid": None}


def _add(x: Any, added: Any) -> Any:
    # The residual keeps its dtype: it is the carry of a scan, whose type cannot change.
    return place(x + added.astype(x.dtype), RESIDUAL)


def _keys(config: TransformerConfig, key: Any, number: Any) -> LayerKeys:
    """Return the keys of a layer. They do not depend on `scan`."""
    if key is None:
        return LayerKeys()
    crossing = () if config.cross is None else ("cross", "after_cross")
    names = ("attention", "after_attention", "mlp", "after_mlp", *crossing)
    # Each use has its own key: with equal keys, attention and the MLP would drop the same elements.
    keys = jax.random.split(jax.random.fold_in(key, number), len(names))
    return LayerKeys(**dict(zip(names, keys, strict=True)))


def _dropout_keys(key: Any) -> dict[str, Any] | None:
    return None if key is None else {"dropout": key}


def _check_state(config: TransformerConfig, state: Any) -> None:
    read_value("state", state, STATE, error=LayerError)
    check_moe_states(config, state.moe)
    _check_scaling(config, state.scaling)
    if state.caches is None:
        return
    if config.scan:
        raise LayerError(
            "caches cannot be used with scan=True",
            path="state",
            fix="config, params = transformer_block.unstack(config, params)",
        )
    fix = "pass transformer_block.init_caches(config, batch=..., capacity=...)"
    _check_count("caches", state.caches, config.layers, path="state", fix=fix)
    _check_rings(config, state.caches)


def _check_pipeline(config: TransformerConfig) -> None:
    """Refuse options that the stages of a pipeline cannot run, if the strategy has a pipeline."""
    if (pipelined := ambient_pipeline()) is None:
        return
    off = 'write schedule = "none" under [pipeline]'
    rest = config.layers % config.period
    after = f"{rest} of {config.layers} layers are after the last whole pattern"
    refuse(
        LayerError,
        (
            not config.scan,
            "scan",
            f'schedule = "{pipelined.schedule}" runs stacked layers, and scan=False',
            f"pass scan=True; or {off}, which serving with caches needs",
        ),
        (
            config.scan and rest,
            "layers",
            f"{after}, and no stage runs them",
            f"choose layers that are a multiple of {config.period}",
        ),
    )


def _check_count(name: str, values: Any, count: int, *, path: str, fix: str) -> None:
    """Check that `values` is a sequence of `count` entries."""
    if not isinstance(values, Sequence) or len(values) != count:
        is_list = isinstance(values, Sequence)
        has = f"has {len(values)} entries" if is_list else f"is {with_article(type(values))}"
        raise LayerError(f"{name} {has}, and the config needs {count}", path=path, fix=fix)


def _trees_of(config: TransformerConfig) -> int:
    """Return the number of trees of parameters."""
    if not config.scan:
        return config.layers
    return config.period + config.layers % config.period


def _is_scanned(config: TransformerConfig, tree: int) -> bool:
    """Return whether the arrays of a tree have a leading dim of layers."""
    return config.scan and tree < config.period


def _check_trees(specs: Sequence[Any], params: Any, path: str | None) -> None:
    """Check the number of trees of parameters, and each tree."""
    create = "transformer_block.specs(config)"
    fix = f"pass the list that {create} describes"
    _check_count("params", params, len(specs), path="params", fix=fix)
    for number, (own, tree) in enumerate(zip(specs, params, strict=True)):
        place = f"params[{number}]" if path is None else f"{path}/{number}"
        check_params(own, tree, path=place, create=create)


def _check_encoded(config: TransformerConfig, encoded: Any, segment_ids: Any) -> None:
    """Check that the output of an encoder is given if, and only if, the layers read one."""
    if config.cross is not None and encoded is None:
        what = "it is missing, and the layers have cross-attention, which reads it"
        fix = "pass the output of an encoder, [batch, encoded length, embed]"
        raise LayerError(what, path="encoded", fix=fix)
    for name, value in (("encoded", encoded), ("encoded_segment_ids", segment_ids)):
        if config.cross is None and value is not None:
            fix = "add cross=AttentionConfig(causal=False, rope_theta=None, ...) to "
            fix += f"TransformerConfig, or leave {name} out"
            what = "the layers have no cross-attention to read it"
            raise LayerError(what, path=name, fix=fix)


def check_moe_states(config: TransformerConfig, moe_states: Any) -> None:
    """Check that each tree of parameters has an entry: an `MoEState`, or None for an MLP."""
    if moe_states is None:
        return
    fix = (
        "pass one MoEState per tree, and None where a layer has an MLP; to split the states of a "
        "scan by layer, call transformer_block.unstack_state(config, state), or "
        "init_caches(state=state) of an nnx Transformer"
    )
    _check_count("moe", moe_states, _trees_of(config), path="state", fix=fix)
    for number, moe_state in enumerate(moe_states):
        if moe_state is None:
            continue
        if not isinstance(config.mlp_of(number), MoEBlockConfig):
            raise LayerError(
                f"moe[{number}] is a {type(moe_state).__name__}, and layer {number} has an MLP",
                path="state",
                fix="pass None there",
            )
        _check_layers(config, number, f"moe[{number}].bias", moe_state.bias, own_rank=1)


def _check_scaling(config: TransformerConfig, scaling: Any) -> None:
    """Check that scaling has one tree for each tree of parameters. Blocks check the rest."""
    if scaling is None:
        return
    fix = "pass fp8.uses(transformer_block.init_scaling(config))"
    _check_count("scaling", scaling, _trees_of(config), path="state", fix=fix)
    for number, tree in enumerate(scaling):
        if not isinstance(tree, Mapping) or set(tree) != {"attention", "mlp"}:
            what = f"scaling[{number}] is not a dict of attention and mlp"
            raise LayerError(what, path="state", fix=fix)
        for use in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, DenseUse)):
            scale = use.x if isinstance(use, DenseUse) else None
            _check_layers(config, number, f"the scales of scaling[{number}]", scale, own_rank=0)


def _check_layers(
    config: TransformerConfig, tree: int, name: str, value: Any, *, own_rank: int
) -> None:
    """Check that scanned arrays of the state have a leading dim of layers, and others have none."""
    shape = getattr(value, "shape", None)
    scanned = _is_scanned(config, tree)
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


def _check_rings(config: TransformerConfig, caches: list[KVCache]) -> None:
    """Refuse a cache with a window in a layer whose entry of `windows` is None."""
    for number, cache in enumerate(caches if config.windows else ()):
        if isinstance(cache, KVCache) and cache.spec.window and config.window(number) is None:
            raise LayerError(
                f"layer {number} attends to all tokens, and its cache keeps {cache.spec.window}",
                path="caches",
                fix="create the cache of this layer with "
                'attention_block.init_cache(config.attention, "dense", '
                "batch=..., capacity=...)",
            )
