"""How rows travel between the devices of the experts: as slots, or as ragged rows.

`slots` is an all-to-all of all slots, also of the empty ones. `ragged` sends only the rows that
tokens fill. The devices first exchange the numbers of rows, by an all-gather of one number per
expert. Then each device sends its rows by one `jax.lax.ragged_all_to_all`. XLA for CPU does not
have that collective. On CPUs, a function of this file, the *twin* of the collective, pads the rows
for each receiver and sends them by an all-to-all. The twin and the collective have equal results.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final

import jax
import jax.numpy as jnp

from shardwright import _jax
from shardwright.layers.moe.config import Dropless, MoEConfig
from shardwright.layers.moe.experts import run_sorted

# Platforms whose compiler has `ragged_all_to_all`.
# XLA for CPU raises UNIMPLEMENTED with JAX 0.10, 0.11 and 0.12.
NATIVE: Final = ("tpu", "gpu")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How a device sends rows to the experts, and their results back.

    Attributes:
      name: "slots" or "ragged"; "none" if nothing is sent.
      why: The reason for this choice.
      rows: Largest number of rows that a device can receive.
      most: Largest number of rows that a device can send to one receiver.
      native: Whether the compiler has `ragged_all_to_all`; otherwise the twin runs.
    """

    name: str
    why: str
    rows: int
    most: int
    native: bool


def choose_exchange(
    config: MoEConfig, *, shards: int, slots: int, tokens: int, platform: str
) -> Exchange:
    """Choose how rows are sent.

    Args:
      config: The MoE layer.
      shards: Number of shards of the experts.
      slots: Number of slots that each sender has at each expert.
      tokens: Number of tokens of a device.
      platform: "cpu", "gpu" or "tpu".
    """
    own = config.experts // shards
    # A token picks an expert at most once, so at most min(per_token, own) of its copies go to one
    # device.
    most, native = tokens * min(config.per_token, own), platform in NATIVE
    ragged = functools.partial(
        Exchange, name="ragged", rows=shards * most, most=most, native=native
    )
    padded = functools.partial(
        Exchange, name="slots", rows=config.experts * slots, most=own * slots, native=native
    )
    if config.exchange == "slots":
        return padded(why="the config names it")
    if config.exchange == "ragged":
        twin = "" if native else f"; XLA for {platform.upper()} runs its twin"
        return ragged(why=f"the config names it{twin}")
    if not isinstance(config.capacity, Dropless):
        return padded(why="the capacity limits the slots")
    if config.matmul == "padded":
        return padded(why="the padded matmul needs slots")
    if config.per_token == config.experts:
        return padded(why="all slots are filled")
    if not native:
        return padded(why=f"XLA for {platform.upper()} has no ragged all-to-all")
    return ragged(
        why=f"a device fills {tokens * config.per_token} of {config.experts * slots} slots"
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRoute:
    """What one device sends and receives in one direction.

    Each array is int32, with one entry per device.

    Attributes:
      input_offsets: Where the rows for each receiver start in the buffer that this device sends.
      send_sizes: How many rows each receiver gets.
      output_offsets: Where the rows of this device start in the buffer of each receiver.
      recv_sizes: How many rows come from each sender.
      recv_offsets: Where the rows of each sender start in the buffer that this device receives.
    """

    input_offsets: Any
    send_sizes: Any
    output_offsets: Any
    recv_sizes: Any
    recv_offsets: Any


def plan_routes(loads: Any, device: Any) -> tuple[ExpertRoute, ExpertRoute]:
    """Return the routes of a device to the experts and back.

    Args:
      loads: [devices, experts] int32, how many rows of each device go to each expert. The experts
        are divided among the devices in order.
      device: Index of the device.
    """
    devices, experts = loads.shape
    # `sizes` is [senders, receivers]. A sender's rows are sorted by expert, and so by receiver too.
    # A receiver's buffer is sorted by sender.
    sizes = loads.reshape(devices, devices, experts // devices).sum(-1)
    in_sender = jnp.cumsum(sizes, axis=1) - sizes
    in_receiver = jnp.cumsum(sizes, axis=0) - sizes
    # `output_offsets` are places in the buffers of the receivers, as `jax.lax.ragged_all_to_all`
    # wants them. So a sender must know the loads of all other senders.
    forth = ExpertRoute(
        input_offsets=in_sender[device],
        send_sizes=sizes[device],
        output_offsets=in_receiver[device],
        recv_sizes=sizes[:, device],
        recv_offsets=in_receiver[:, device],
    )
    # The route back swaps senders and receivers: its sizes and places are transposed.
    back = ExpertRoute(
        input_offsets=in_receiver[:, device],
        send_sizes=sizes[:, device],
        output_offsets=in_sender[:, device],
        recv_sizes=sizes[device],
        recv_offsets=in_sender[device],
    )
    return forth, back


def serve_ragged(
    config: MoEConfig, exchange: Exchange, axes: tuple[str, ...], params: Any, rows: Any, load: Any
) -> Any:
    """Send rows to their experts, run the experts, and return the results in the order of `rows`.

    Args:
      config: The MoE layer.
      exchange: As `choose_exchange` returns it.
      axes: Mesh axes of the experts.
      params: The experts of this device.
      rows: [rows, embed], sorted by expert.
      load: [experts] int32, how many rows each expert gets from this device.
    """
    loads = jax.lax.all_gather(load, axes)
    device = jax.lax.axis_index(axes)
    routes = plan_routes(loads, device)
    received = send(rows, routes, exchange.rows, exchange, axes)
    own = config.experts // loads.shape[0]
    # `counts` is [senders, own experts].
    counts = jax.lax.dynamic_slice_in_dim(loads, device * own, own, axis=1)
    # The buffer is sorted by sender, and `ragged_dot` needs the rows of an expert together.
    order = by_expert(counts, exchange.rows)
    results = run_sorted(config, params, received[order], counts.sum(0))
    # `order` is a permutation of all rows, so no two updates of the scatter have the same target.
    unsorted = jnp.zeros_like(results).at[order].set(results, unique_indices=True)
    return send(unsorted, routes[::-1], rows.shape[0], exchange, axes)


def by_expert(counts: Any, rows: int) -> Any:
    """Return the order that sorts a buffer by expert, with the empty rows last.

    Args:
      counts: [senders, experts] int32. The buffer has the rows of sender 0, sorted by expert, then
        those of sender 1, and so on.
      rows: Number of rows of the buffer.
    """
    senders, experts = counts.shape
    ends = jnp.cumsum(counts.reshape(-1))
    # The side "right" skips groups without rows, because each of them ends where the group before
    # it ends.
    group = jnp.searchsorted(ends, jnp.arange(rows), side="right")
    expert = jnp.where(group < senders * experts, group % experts, experts)
    return jnp.argsort(expert, stable=True)


# JAX's transpose of `ragged_all_to_all` sends both offsets by all-to-alls of their own. The route
# back is planned already, so this gradient sends only rows.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def send(
    rows: Any,
    routes: tuple[ExpertRoute, ExpertRoute],
    size: int,
    exchange: Exchange,
    axes: tuple[str, ...],
) -> Any:
    """Send rows along the first route; the gradient goes along the second.

    Args:
      rows: [rows, embed].
      routes: The route of `rows`, and the route in the opposite direction.
      size: Number of rows of the result. Rows that no device sends are 0.
      exchange: The collective, and the largest number of rows for one receiver.
      axes: Mesh axes.
    """
    route = routes[0]
    empty = jnp.zeros((size, *rows.shape[1:]), rows.dtype)
    if not exchange.native:
        return padded_all_to_all(rows, empty, route, axes, most=exchange.most)
    rows, empty = _jax.vary_together([rows, empty])
    return jax.lax.ragged_all_to_all(
        rows,
        empty,
        route.input_offsets,
        route.send_sizes,
        route.output_offsets,
        route.recv_sizes,
        axis_name=axes,
    )


def _send(rows: Any, routes: Any, size: int, exchange: Exchange, axes: Any) -> Any:
    return send(rows, routes, size, exchange, axes), (routes, rows.shape[0])


def _send_back(size: int, exchange: Exchange, axes: Any, kept: Any, gradient: Any) -> Any:
    routes, rows = kept
    # Routes are integers, which have no gradient.
    return send(gradient, routes[::-1], rows, exchange, axes), None


send.defvjp(_send, _send_back)


def padded_all_to_all(rows: Any, empty: Any, route: ExpertRoute, axes: Any, *, most: int) -> Any:
    """Replace `jax.lax.ragged_all_to_all` by an all-to-all of padded rows.

    Args:
      rows: [rows, embed].
      empty: Buffer of the result.
      route: The route of the rows that are sent.
      axes: Mesh axes.
      most: Largest number of rows for one receiver.
    """
    step = jnp.arange(most, dtype=jnp.int32)
    # `is_sent` and `places` are [receivers, most].
    is_sent = step < route.send_sizes[:, None]
    places = jnp.where(is_sent, route.input_offsets[:, None] + step, rows.shape[0])
    # `chunks` is [receivers, most, embed]. The index `rows.shape[0]` is outside, so `get` gives 0.
    chunks = rows.at[places].get(mode="fill", fill_value=0)
    chunks = jax.lax.all_to_all(chunks, axes, split_axis=0, concat_axis=0, tiled=True)
    # Each row of padding gets a distinct place after the buffer, so the indices of the scatter are
    # unique.
    spare = empty.shape[0] + jnp.arange(chunks.shape[0] * most).reshape(chunks.shape[:2])
    is_received = step < route.recv_sizes[:, None]
    targets = jnp.where(is_received, route.recv_offsets[:, None] + step, spare)
    return empty.at[targets].set(chunks, mode="drop", unique_indices=True)
