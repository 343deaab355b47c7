"""Move the tokens of one device to the slots of the experts, and the results back.

A slot is a place for one token at one expert. The tokens of a device fill the slots of an expert in
the order of the tokens, so the same tokens get the same slots in every run. A token has one copy
per expert that it picked. A copy of padding has the index `experts`, one past the last expert: it
gets no slot, and is not in the load of any expert. These functions work on the tokens of one
device; the collectives are in `block`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSlots:
    """The slot of each copy of a token.

    Attributes:
      places: [tokens * per_token] int32, expert * slots + slot. A dropped copy and a copy of
        padding have a place >= `total`.
      load: [experts] int32, how many tokens picked each expert, the dropped ones included.
      dropped: int32, how many copies found no slot.
      total: Number of slots of all experts.
    """

    places: Any
    load: Any
    dropped: Any
    total: int = dataclasses.field(metadata={"static": True})


def assign_slots(picked: Any, *, experts: int, slots: int) -> ExpertSlots:
    """Give each copy of a token a slot at its expert, in order, until the slots are full.

    Args:
      picked: [tokens, per_token] int32.
      experts: Number of experts.
      slots: Slots per expert.
    """
    flat = picked.reshape(-1)
    load, rank = _rank(flat, experts)
    # Padding has the expert number `experts`: `load` does not count it, and it gets no slot.
    is_copy = flat < experts
    # A copy's slot is its rank minus the rank of the first copy for the same expert.
    slot = rank - (jnp.cumsum(load) - load)[flat]
    total = experts * slots
    is_kept = is_copy & (slot < slots)
    return ExpertSlots(
        places=jnp.where(is_kept, flat * slots + slot, _outside(total, flat)),
        load=load,
        dropped=jnp.sum(is_copy & ~is_kept, dtype=jnp.int32),
        total=total,
    )


def assign_rows(picked: Any, *, experts: int) -> ExpertSlots:
    """Give each copy of a token a row.

    Rows are sorted by expert, then by token; empty rows are last.

    Args:
      picked: [tokens, per_token] int32.
      experts: Number of experts.
    """
    flat = picked.reshape(-1)
    load, rank = _rank(flat, experts)
    places = jnp.where(flat < experts, rank, _outside(flat.size, flat))
    return ExpertSlots(places=places, load=load, dropped=jnp.int32(0), total=flat.size)


def _outside(total: int, flat: Any) -> Any:
    """Return a distinct place for each copy, because the indices of the scatter must be unique."""
    return total + jnp.arange(flat.size, dtype=jnp.int32)


def _rank(flat: Any, experts: int) -> tuple[Any, Any]:
    """Return the load of each expert, and the rank of each copy in a sort by expert."""
    load = jnp.zeros(experts, jnp.int32).at[flat].add(1, mode="drop")
    # A stable sort keeps the order of the tokens, so a full expert drops the last tokens, in every
    # run.
    order = jnp.argsort(flat, stable=True)
    place = jnp.arange(flat.size, dtype=jnp.int32)
    # The scatter inverts the permutation `order`: `order[place]` is the copy at a place in the
    # sort, and `result[copy]` is the place of a copy.
    return load, jnp.zeros_like(flat).at[order].set(place)


def fill_slots(x: Any, assigned: ExpertSlots) -> Any:
    """Return the tokens in their slots, [experts * slots, embed]; empty slots are 0.

    Args:
      x: [tokens, embed].
      assigned: The slots of the tokens.
    """
    # `places` has the copies of a token next to each other, so repeat each token. `max` is for a
    # device that has no tokens.
    copies = jnp.repeat(x, assigned.places.size // max(x.shape[0], 1), axis=0)
    empty = jnp.zeros((assigned.total, x.shape[1]), x.dtype)
    return empty.at[assigned.places].set(copies, mode="drop", unique_indices=True)


def combine(results: Any, assigned: ExpertSlots, weights: Any) -> Any:
    """Return the weighted sum of each token's results, [tokens, embed] float32.

    Dropped copies add 0.

    Args:
      results: [experts * slots, embed].
      assigned: The slots of the tokens.
      weights: [tokens, per_token] float32.
    """
    copies = results.at[assigned.places].get(mode="fill", fill_value=0)
    copies = copies.reshape(*weights.shape, results.shape[-1]).astype(jnp.float32)
    is_kept = (assigned.places < assigned.total).reshape(weights.shape)
    # Do not compute `0 * weight`, which is NaN if the weight is not finite.
    scaled = jnp.where(is_kept[..., None], copies * weights[..., None], 0)
    return scaled.sum(axis=1)
