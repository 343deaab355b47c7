"""The matmuls of the experts with their rows: over all slots, or over the filled ones.

An expert of a dropless MoE layer has a slot for every token, and most slots are empty. `padded`
multiplies all slots. `ragged` moves the filled slots together and multiplies only these, by one
`jax.lax.ragged_dot` with a group of rows per expert.

To add a matmul, write a function of `(config, weights, rows, most)`. Add the function to
`_MATMULS`, and its name to `MoEConfig.matmul`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp

from shardwright import _jax
from shardwright.layers.activation import activation
from shardwright.layers.moe.config import NOT_ZERO_AT_ZERO, MoEConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMatmul:
    """How the experts of one device multiply their rows.

    Attributes:
      name: "padded" or "ragged".
      why: The reason for this choice.
      rows: Number of rows that all experts of the device together multiply.
    """

    name: str
    why: str
    rows: int


def choose_matmul(
    config: MoEConfig, *, experts: int, slots: int, tokens: int, platform: str
) -> ExpertMatmul:
    """Choose the matmul with the fewest rows, if config, activation and platform allow it.

    Args:
      config: The MoE layer.
      experts: Number of experts of the device.
      slots: Number of slots of each expert, for all senders together.
      tokens: Number of tokens of all senders.
      platform: "cpu", "gpu" or "tpu".
    """
    padded = experts * slots
    # At most `most` slots are filled, because a token picks an expert at most once.
    most = min(padded, tokens * min(config.per_token, experts))
    if config.matmul != "auto":
        rows = padded if config.matmul == "padded" else most
        return ExpertMatmul(name=config.matmul, why="the config names it", rows=rows)
    if config.activation in NOT_ZERO_AT_ZERO:
        why = f"{config.activation}(0) is not 0, so empty slots must be multiplied"
    elif most == padded:
        why = f"all {padded} slots may be filled"
    # XLA for CPU lowers `ragged_dot` to a dense matmul of every row with every expert.
    elif platform == "cpu":
        why = "XLA for CPU has no fast grouped matmul"
    else:
        why = f"at most {most} of {padded} slots are filled"
        return ExpertMatmul(name="ragged", why=why, rows=most)
    return ExpertMatmul(name="padded", why=why, rows=padded)


def sorted_matmul(rows: int) -> ExpertMatmul:
    """Return the matmul of rows that arrive without empty slots."""
    return ExpertMatmul(name="ragged", why="the rows arrive sorted, without empty slots", rows=rows)


def run_experts(config: MoEConfig, matmul: ExpertMatmul, params: Any, rows: Any) -> Any:
    """Run each expert on its slots.

    Args:
      config: The MoE layer.
      matmul: As `choose_matmul` returns it.
      params: gate and up `[experts, embed, hidden]`, down `[experts, hidden, embed]`.
      rows: `[experts, slots, embed]`. An empty slot is 0.

    Returns:
      `[experts, slots, embed]`.
    """
    # Make `rows` vary over the mesh axes of the weights once, before the matmuls of gate and up.
    # Then each device adds the gradients from both, and one all-reduce sums them over the shards.
    rows, *weights = _jax.vary_together([rows, *_weights(params, rows.dtype)])
    return _MATMULS[matmul.name](config, weights, rows, matmul.rows)


def _padded(config: MoEConfig, weights: list[Any], rows: Any, most: int) -> Any:
    del most
    # x: expert, r: row, e: embed, f: hidden.
    gate, up, down = weights
    hidden = activation(config.activation, jnp.einsum("xre,xef->xrf", rows, gate))
    hidden = hidden * jnp.einsum("xre,xef->xrf", rows, up)
    return jnp.einsum("xrf,xfe->xre", hidden, down)


def run_sorted(config: MoEConfig, params: Any, rows: Any, sizes: Any) -> Any:
    """Run each expert on its rows. The rows of an expert are contiguous.

    Args:
      config: The MoE layer.
      params: As in `run_experts`.
      rows: `[rows, embed]`, sorted by expert. Rows after those of the last expert are not
        multiplied.
      sizes: `[experts]` int32, the number of rows of each expert.

    Returns:
      `[rows, embed]`. Rows after those of the last expert have no meaning.
    """
    rows, *weights = _jax.vary_together([rows, *_weights(params, rows.dtype)])
    return _grouped(config, weights, rows, sizes)


def _weights(params: Any, dtype: Any) -> list[Any]:
    return [params[name].astype(dtype) for name in ("gate", "up", "down")]


def _ragged(config: MoEConfig, weights: list[Any], rows: Any, most: int) -> Any:
    flat = rows.reshape(-1, rows.shape[-1])
    # A row of zeros counts as an empty slot. A token of zeros may count as an empty slot too,
    # because its result and its gradients are 0.
    is_filled = jnp.any(flat != 0, axis=-1)
    sizes = is_filled.reshape(rows.shape[:2]).sum(axis=1, dtype=jnp.int32)
    # The indices are ascending, so the rows of an expert stay together.
    (places,) = jnp.nonzero(is_filled, size=most, fill_value=flat.shape[0])
    packed = flat.at[places].get(mode="fill", fill_value=0)
    results = _grouped(config, weights, packed, sizes)
    free = jnp.zeros_like(flat, dtype=results.dtype)
    return free.at[places].set(results, mode="drop").reshape(rows.shape)


def _grouped(config: MoEConfig, weights: list[Any], rows: Any, sizes: Any) -> Any:
    gate, up, down = weights
    hidden = activation(config.activation, jax.lax.ragged_dot(rows, gate, sizes))
    hidden = hidden * jax.lax.ragged_dot(rows, up, sizes)
    return jax.lax.ragged_dot(hidden, down, sizes)


_MATMULS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {"padded": _padded, "ragged": _ragged}
)
