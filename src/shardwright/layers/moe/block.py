"""The layer: route each device's tokens, send them to their experts, and sum the results.

    tokens x [t, E]  --slots-->  [X, C, E]  --all-to-all-->  [X / ep, ep * C, E]  --experts-->
    [X / ep, ep * C, E]  --all-to-all-->  [X, C, E]  --weighted sum-->  y [t, E]

t: tokens of a device, E: embed, X: experts, C: slots that one sender has at one expert, ep: devices
that the experts are sharded over. If the tokens are replicated over these ep devices, no tokens are
sent. Each device then runs its own experts on all tokens, and an all-reduce adds the results.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from shardwright import _jax
from shardwright.errors import LayerError, RankMismatchError, StrategyError
from shardwright.layers.activation import activation
from shardwright.layers.inputs import check_params, check_valid, read_keys
from shardwright.layers.moe.config import MoEConfig, specs
from shardwright.layers.moe.dispatch import (
    ExpertSlots,
    assign_rows,
    assign_slots,
    combine,
    fill_slots,
)
from shardwright.layers.moe.exchange import Exchange, choose_exchange, serve_ragged
from shardwright.layers.moe.experts import ExpertMatmul, choose_matmul, run_experts, sorted_matmul
from shardwright.layers.moe.routing import Routes, route
from shardwright.layers.placement import is_inside_shard_map
from shardwright.manager import context
from shardwright.manager.context import platform_of
from shardwright.manager.manager import PartitionManager
from shardwright.resolution.request import ShardingRequest
from shardwright.vocabulary.axes import (
    BATCH,
    CAPACITY,
    EMBED,
    EMPTY,
    EXPERT,
    EXPERT_GATE,
    MLP_INTERMEDIATE,
    QUERY_LENGTH,
)
from shardwright.vocabulary.read import instance, read_value, refuse

NOTHING_SENT = Exchange(name="none", why="nothing is sent", rows=0, most=0, native=False)
_UP = (EXPERT, EMBED, MLP_INTERMEDIATE)
_DOWN = (EXPERT, MLP_INTERMEDIATE, EMBED)
_USED_AS = {
    "router": (EMBED, EXPERT_GATE),
    "gate": _UP,
    "up": _UP,
    "down": _DOWN,
    "shared_gate": (EMBED, MLP_INTERMEDIATE),
    "shared_up": (EMBED, MLP_INTERMEDIATE),
    "shared_down": (MLP_INTERMEDIATE, EMBED),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoEStats:
    """Statistics of the router over all tokens of the batch, on all devices.

    Attributes:
      load: [experts] int32, how many tokens picked each expert. Dropped tokens count, and rows that
        are not `valid` do not.
      dropped: int32, how many copies of tokens found no slot; 0 if dropless.
      aux: float32, the losses of the router times their factors. Add it to the loss.
    """

    load: Any
    dropped: Any
    aux: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoEState:
    """State of the router.

    Attributes:
      bias: [experts] float32, added to the scores when experts are picked, but not to the weights.
        None adds nothing.
      stats: `MoEStats` of the last call, or None before it.
    """

    bias: Any = None
    stats: MoEStats | None = None


def init_state(config: MoEConfig, *, bias: Any = None) -> MoEState:
    """Return a state with statistics of 0. It has the structure of the states that `apply` returns.

    Args:
      config: The MoE layer.
      bias: [experts] float32, or None.
    """
    stats = MoEStats(
        load=jnp.zeros(config.experts, jnp.int32), dropped=jnp.int32(0), aux=jnp.float32(0)
    )
    return MoEState(bias=bias, stats=stats)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """How the tokens of one call reach their experts.

    Attributes:
      sent: Mesh axes that tokens are sent over. Both the experts and the tokens are sharded over
        these mesh axes.
      summed: Mesh axes that results are summed over. The experts or their hidden dims are sharded
        over these mesh axes, but the tokens are not.
      expert_axes: Mesh axes that the experts are sharded over.
      token_axes: Mesh axes that the tokens are sharded over.
      senders: Number of shards of the tokens.
      own_tokens: Number of tokens of a shard.
      shards: Number of shards of the experts.
      slots: Number of slots that each sender has at each expert.
      exchange: How tokens are sent to the experts.
      matmul: How the experts of a device multiply their slots.
    """

    sent: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    expert_axes: tuple[str, ...] = ()
    token_axes: tuple[str, ...] = ()
    senders: int = 1
    own_tokens: int
    shards: int = 1
    slots: int
    exchange: Exchange
    matmul: ExpertMatmul

    @property
    def why(self) -> str:
        """The reason why tokens are sent or not sent."""
        if not self.expert_axes:
            return "every device has all experts: nothing is sent"
        axes = "+".join(self.expert_axes)
        if self.sent and self.exchange.name == "ragged":
            return f"tokens and experts are sharded over {axes}: two ragged all-to-alls"
        if self.sent:
            return f"tokens and experts are sharded over {axes}: two all-to-alls"
        return f"the tokens are replicated over {axes}: each device runs its own experts"


def apply(
    config: MoEConfig,
    params: Any,
    x: Any,
    *,
    keys: Any = None,
    state: MoEState | None = None,
    path: str | None = None,
    mode: str | None = None,
    valid: Any = None,
) -> tuple[Any, MoEState]:
    """Send each token through its experts and return the weighted sum of their results.

    If there is an ambient manager, its rules shard the experts and the tokens. Otherwise nothing is
    sharded.

    Args:
      config: The MoE layer.
      params: Arrays as `specs(config)` describes them, stored as the manager shards parameters.
      x: Tokens, (BATCH, QUERY_LENGTH, EMBED) or flattened to (BATCH, EMBED). Inside a `shard_map`,
        x is a shard of the tokens.
      keys: Not used, because the layer has no randomness. All blocks have this argument, so that
        they are called alike.
      state: State of the router. Defaults to a state without a bias.
      path: Path of `params` in the model, required if the strategy has `[[tensors]]` entries.
      mode: Runtime mode. Defaults to the manager's.
      valid: bool of the shape of x without EMBED, False for padding. A False row takes no slot and
        does not count in the statistics and the losses. The y of the row is 0. None: all rows are
        tokens.

    Returns:
      (y, state). y has the shape of x, in `config.dtypes.output`. The state has the same bias and
      this call's statistics. Statistics that are not used cost nothing under jit.

    Raises:
      IndivisibleError: The experts or the tokens do not divide over their mesh axes.
      LayerError: A parameter is missing, has a wrong shape or is not described by the config. Or
        `valid` has another shape or dtype.
      ManualAxisError: All shards of a surrounding `shard_map` have the same x, so each of them
        would send all tokens.
      RankMismatchError: x does not have 2 or 3 dims, or its last dim is not `embed`.
      StrategyError: The strategy shards a dim that the layer needs whole.
    """
    read_keys(keys)
    state = MoEState() if state is None else state
    _check(config, params, x, state, path)
    check_valid(valid, x.shape[:-1])
    x = x.astype(config.dtypes.compute)
    manager: PartitionManager | None = context.current()
    if manager is None:
        tokens = math.prod(x.shape[:-1])
        slots = config.capacity.slots(tokens, config.per_token, config.experts)
        exchange, matmul = _choose(
            config, shards=1, slots=slots, tokens=tokens, sent=False, platform=platform_of(None)
        )
        dispatch = Dispatch(own_tokens=tokens, slots=slots, exchange=exchange, matmul=matmul)
        y, sums = _on_shard(config, dispatch, params, state.bias, x, valid)
    else:
        if is_inside_shard_map():
            # `shard` refuses tokens that all shards share: each shard would send the same tokens.
            x = manager.shard(x, _token_axes(x.shape), mode=mode)
        dispatch = explain(config, x.shape, mode=mode)
        # `gather` undoes the FSDP sharding of the weights. Other mesh axes, such as those of
        # EXPERT, still shard the weights inside the `shard_map`, by `_USED_AS`.
        params = manager.gather(params, specs(config), path=path, mode=mode)
        axes = _token_axes(x.shape)
        # The sums are over all devices, so they are replicated outside of the `shard_map`.
        totals = {"load": (EMPTY,), "losses": (EMPTY,)} if config.has_loss else {"load": (EMPTY,)}
        in_axes = (
            {name: _USED_AS[name] for name in params},
            None if state.bias is None else (EMPTY,),
            axes,
            None if valid is None else axes[:-1],
        )
        # Remember the function in the manager, so that layers with the same options share one
        # trace.
        on_shard = manager.remember(
            ("moe", config, dispatch, axes, state.bias is None, valid is None, mode),
            lambda: manager.shard_map(
                functools.partial(_on_shard, config, dispatch),
                in_axes=in_axes,
                out_axes=(axes, totals),
                mode=mode,
            ),
        )
        y, sums = on_shard(params, state.bias, x, valid)
    whole = dispatch.own_tokens * dispatch.senders
    stats = _stats(config, sums, tokens=None if valid is not None else whole)
    return y.astype(config.dtypes.output), MoEState(bias=state.bias, stats=stats)


def explain(config: MoEConfig, shape: tuple[int, ...], *, mode: str | None = None) -> Dispatch:
    """Return how tokens of a shape reach their experts under the ambient manager.

    Args:
      config: The MoE layer.
      shape: Shape of x: global, or inside a `shard_map` the shape of the shard.
      mode: Runtime mode. Defaults to the manager's.

    Raises:
      ShardingError: As in `apply`.
    """
    manager: PartitionManager = context.require("moe.explain", method=False)
    sizes = dict(zip(manager.mesh.axis_names, manager.mesh.axis_sizes, strict=True))
    # Inside a `shard_map`, `shape` is that of a shard over the Manual axes.
    manual = manager.manual_axes(_jax.ambient_mesh())
    request = ShardingRequest(_token_axes(shape), shape, mode, None, None, manual)
    tokens = manager.answer(request)
    tokens.require()
    up = (config.experts, config.embed, config.hidden)
    experts = manager.explain(_UP, mode=mode, shape=up)
    experts.require()
    *token_dims, embed = tokens.decisions
    if embed.mesh_axes or experts.decisions[1].mesh_axes:
        raise StrategyError(
            "the strategy shards EMBED of activations, and a router needs whole tokens",
            fix='write embed = "-" under [rules]',
        )
    # A mesh axis of size 1 needs no sending and no sum, so it has no influence on the choice.
    token_axes = tuple(axis for dim in token_dims for axis in dim.mesh_axes if sizes[axis] > 1)
    expert_axes = tuple(axis for axis in experts.decisions[0].mesh_axes if sizes[axis] > 1)
    hidden_axes = tuple(axis for axis in experts.decisions[2].mesh_axes if sizes[axis] > 1)
    both = tuple(axis for axis in expert_axes if axis in token_axes)
    twice = [axis for axis in hidden_axes if axis in token_axes]
    refuse(
        StrategyError,
        (
            # `_serve` either sends tokens over all mesh axes of the experts, or over none of them.
            both and both != expert_axes,
            "",
            f"experts are sharded over {'+'.join(expert_axes)}, tokens only over {'+'.join(both)}",
            "shard BATCH over all mesh axes of EXPERT, or over none of them",
        ),
        (
            # If a mesh axis sharded both, the all-reduce over the hidden axes would add results of
            # different tokens.
            twice,
            "",
            f"{'+'.join(twice)} shards both the tokens and MLP_INTERMEDIATE of the experts",
            "give BATCH and MLP_INTERMEDIATE different mesh axes",
        ),
    )
    _check_shared(config, manager, mode, hidden_axes)
    senders = math.prod(sizes[axis] for axis in token_axes)
    split = math.prod(sizes[axis] for axis in token_axes if axis not in manual)
    own_tokens = math.prod(shape[:-1]) // split
    # The capacity is per sender: C slots at each expert for the tokens of this device alone.
    slots = config.capacity.slots(own_tokens, config.per_token, config.experts)
    shards = math.prod(sizes[axis] for axis in expert_axes)
    exchange, matmul = _choose(
        config,
        shards=shards,
        slots=slots,
        tokens=own_tokens,
        sent=bool(both),
        platform=platform_of(manager.mesh),
    )
    dispatch = Dispatch(
        sent=both,
        summed=(*(() if both else expert_axes), *hidden_axes),
        expert_axes=expert_axes,
        token_axes=token_axes,
        senders=senders,
        own_tokens=own_tokens,
        shards=shards,
        slots=slots,
        exchange=exchange,
        matmul=matmul,
    )
    _check_capacity(config, dispatch, manager, mode)
    return dispatch


def _choose(
    config: MoEConfig, *, shards: int, slots: int, tokens: int, sent: bool, platform: str
) -> tuple[Exchange, ExpertMatmul]:
    """Choose how the tokens of a device are sent, and how experts multiply what they receive."""
    exchange = NOTHING_SENT
    if sent:
        exchange = choose_exchange(
            config, shards=shards, slots=slots, tokens=tokens, platform=platform
        )
    if exchange.name == "ragged":
        return exchange, sorted_matmul(exchange.rows)
    # If tokens are sent, an expert has slots for the tokens of each sender.
    senders = shards if sent else 1
    matmul = choose_matmul(
        config,
        experts=config.experts // shards,
        slots=slots * senders,
        tokens=tokens * senders,
        platform=platform,
    )
    return exchange, matmul


def _check_capacity(
    config: MoEConfig, dispatch: Dispatch, manager: PartitionManager, mode: str | None
) -> None:
    """Check that CAPACITY is sharded over each mesh axis that shards tokens but not experts."""
    # Only the mesh axes of the resolution are read, so the number of rows does not matter, as long
    # as it is a multiple of the number of devices.
    rows = max(dispatch.slots, 1) * math.prod(manager.mesh.axis_sizes)
    shape = (config.experts, rows, config.embed)
    capacity = manager.explain((EXPERT, CAPACITY, EMBED), mode=mode, shape=shape)
    capacity.require()
    needed = [axis for axis in dispatch.token_axes if axis not in dispatch.expert_axes]
    if missing := [axis for axis in needed if axis not in capacity.decisions[1].mesh_axes]:
        raise StrategyError(
            f"CAPACITY must be sharded over {'+'.join(missing)}, like the tokens",
            fix=f'write capacity = "{"+".join(needed)}" under [rules]',
        )


def _check_shared(
    config: MoEConfig, manager: PartitionManager, mode: str | None, hidden_axes: tuple[str, ...]
) -> None:
    """Check that shared experts are sharded like routed ones, because one sum reduces both."""
    if not config.shared:
        return
    wide = config.shared * config.hidden
    down = manager.explain(_USED_AS["shared_down"], mode=mode, shape=(wide, config.embed))
    down.require()
    sizes = manager.mesh.shape
    axes = tuple(axis for axis in down.decisions[0].mesh_axes if sizes[axis] > 1)
    if axes != hidden_axes:
        raise StrategyError(
            f"the hidden size {config.hidden} of an expert is sharded over "
            f"{'+'.join(hidden_axes) or 'no mesh axis'}, but that of the shared experts, "
            f"{config.shared} * {config.hidden}, over {'+'.join(axes) or 'no mesh axis'}",
            fix="choose a hidden size that divides over the first candidate of the rule for "
            "MLP_INTERMEDIATE, or give the rule one candidate",
        )


def _token_axes(shape: tuple[int, ...]) -> tuple[str, ...]:
    return (BATCH, EMBED) if len(shape) == 2 else (BATCH, QUERY_LENGTH, EMBED)


def _check(config: MoEConfig, params: Any, x: Any, state: MoEState, path: str | None) -> None:
    shape = getattr(x, "shape", None)
    if shape is None or len(shape) not in (2, 3) or shape[-1] != config.embed:
        raise RankMismatchError(
            f"the tokens have shape {shape}, but the MoE layer takes [..., {config.embed}]",
            fix=f"pass (BATCH, QUERY_LENGTH, EMBED) or (BATCH, EMBED) with EMBED {config.embed}",
        )
    check_params(specs(config), params, path=path, create="moe.specs(config)")
    read_value("state", state, instance(MoEState), error=LayerError)
    if state.bias is not None and state.bias.shape != (config.experts,):
        raise LayerError(
            f"the router's bias has shape {state.bias.shape}, not ({config.experts},)",
            fix="pass one number per expert, such as jnp.zeros(experts)",
        )


def _on_shard(
    config: MoEConfig, dispatch: Dispatch, params: Any, bias: Any, x: Any, valid: Any
) -> tuple[Any, dict[str, Any]]:
    """Run the layer on one device's tokens and experts. All collectives of the layer are here."""
    tokens = x.reshape(-1, config.embed)
    is_token = None if valid is None else valid.reshape(-1)
    if is_token is not None:
        # Set padding to 0: it may be NaN, and the gradient of the router sums over all rows.
        tokens = jnp.where(is_token[:, None], tokens, 0)
    routes = route(config, params["router"], bias, tokens, is_token)
    if dispatch.exchange.name == "ragged":
        slots = assign_rows(routes.experts, experts=config.experts)
        rows = fill_slots(tokens, slots)
        results = serve_ragged(config, dispatch.exchange, dispatch.sent, params, rows, slots.load)
    else:
        slots = assign_slots(routes.experts, experts=config.experts, slots=dispatch.slots)
        results = _serve(config, dispatch, params, fill_slots(tokens, slots), slots)
    y = combine(results, slots, routes.weights)
    if config.shared:
        y = y + _shared(config, dispatch, params, tokens)
    # The sum of a token's copies is float32. Cast it before the all-reduce, which then sends half
    # the bytes for bfloat16.
    y = y.astype(x.dtype)
    if dispatch.summed:
        y = jax.lax.psum(y, dispatch.summed)
    return y.reshape(x.shape), _sums(config, dispatch, routes, slots)


def _serve(
    config: MoEConfig, dispatch: Dispatch, params: Any, filled: Any, slots: ExpertSlots
) -> Any:
    """Return the results of the slots, [experts * slots, embed].

    If tokens are not sent, the slots of experts of other devices have results of 0.
    """
    rows = filled.reshape(config.experts, dispatch.slots, config.embed)
    if dispatch.sent:
        # [X, C, E] becomes [X / ep, ep * C, E]: an expert has C slots of each sender, in order.
        rows = jax.lax.all_to_all(rows, dispatch.sent, split_axis=0, concat_axis=1, tiled=True)
        results = run_experts(config, dispatch.matmul, params, rows)
        results = jax.lax.all_to_all(
            results, dispatch.sent, split_axis=1, concat_axis=0, tiled=True
        )
        return results.reshape(slots.total, config.embed)
    if dispatch.shards == 1:
        return run_experts(config, dispatch.matmul, params, rows).reshape(slots.total, config.embed)
    own = config.experts // dispatch.shards
    first = jax.lax.axis_index(dispatch.expert_axes) * own
    own_rows = jax.lax.dynamic_slice_in_dim(rows, first, own)
    results = run_experts(config, dispatch.matmul, params, own_rows)
    whole = jnp.zeros(rows.shape, results.dtype)
    whole = jax.lax.dynamic_update_slice_in_dim(whole, results, first, axis=0)
    return whole.reshape(slots.total, config.embed)


def _shared(config: MoEConfig, dispatch: Dispatch, params: Any, tokens: Any) -> Any:
    """Return the results of the shared experts, [tokens, embed] float32."""
    names = ("shared_gate", "shared_up", "shared_down")
    gate, up, down = (params[name].astype(tokens.dtype) for name in names)
    hidden = activation(config.activation, tokens @ gate) * (tokens @ up)
    result = (hidden @ down).astype(jnp.float32)
    if not dispatch.sent and dispatch.shards > 1:
        # Keep only the first device's result: a sum over devices must count shared experts once.
        is_first = jax.lax.axis_index(dispatch.expert_axes) == 0
        result = jnp.where(is_first, result, 0)
    return result


def _sums(
    config: MoEConfig, dispatch: Dispatch, routes: Routes, slots: ExpertSlots
) -> dict[str, Any]:
    """Return the sums that the statistics need, over all tokens.

    They take one all-reduce of integers, and one of floats if the router has a loss.
    """
    sums = {"load": jnp.append(slots.load, slots.dropped)}
    if config.has_loss:
        sums["losses"] = jnp.append(routes.probabilities.sum(0), routes.squares.sum())
    if not dispatch.token_axes:
        return sums
    # Along mesh axes that replicate the tokens, the sums are equal, so leave these mesh axes out.
    return {name: jax.lax.psum(value, dispatch.token_axes) for name, value in sums.items()}


def _stats(config: MoEConfig, sums: dict[str, Any], *, tokens: int | None) -> MoEStats:
    """Return the statistics. `tokens` is None if some rows are padding."""
    load, dropped = sums["load"][:-1], sums["load"][-1]
    aux = jnp.zeros((), jnp.float32)
    if config.has_loss:
        count: Any = max(tokens or 0, 1)
        if tokens is None:
            # Count tokens by their picks: each token has picked `per_token` experts.
            count = jnp.maximum(load.sum() // config.per_token, 1)
        # Equation 4 of Switch Transformers: X * sum(f * P), where f is the share of the picks and P
        # the mean probability of an expert. The f of all experts sum to 1 here, also with several
        # experts per token, so an even load has the loss 1.
        picked = load.astype(jnp.float32) / (count * config.per_token)
        mean = sums["losses"][:-1] / count
        balance = config.experts * jnp.sum(picked * mean)
        aux = config.balance_loss * balance + config.z_loss * sums["losses"][-1] / count
    return MoEStats(load=load, dropped=dropped, aux=aux)
