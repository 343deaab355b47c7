"""Slots that a caller names: which of them exist, which are named twice, and what the others become."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from shardwright.caches.base import Refusal


def which(slots: jax.Array, batch: int) -> jax.Array:
    """Return `[n, batch]` bool: entry i names slot b. A number that no slot has names none."""
    return slots[:, None] == jnp.arange(batch, dtype=jnp.int32)[None]


def of_entries(named: jax.Array, values: jax.Array) -> jax.Array:
    """Return `[n]` bool: whether `values[b]`, `[batch]` bool, holds of the slot that each entry names."""
    return jnp.any(named & values[None], axis=1)


def to_slots(
    named: jax.Array, done: jax.Array, values: jax.Array | int, old: jax.Array
) -> jax.Array:
    """Return `[batch]`: `values[i]`, which are not negative, in the slots that the entries name that are done, else what was there.

    Args:
      named: `[n, batch]` bool; done entries name different slots.
      done: `[n]` bool.
      values: `[n]` int32, or one for all.
      old: `[batch]` int32.
    """
    given = jnp.where(
        named & done[:, None], jnp.reshape(jnp.asarray(values, jnp.int32), (-1, 1)), -1
    )
    new = jnp.max(given, axis=0)
    return jnp.where(new < 0, old, new)


def first_reason(*reasons: tuple[jax.Array, Refusal]) -> jax.Array:
    """Return int8 codes: of the first reason that holds, 0 where none does."""
    codes = jnp.zeros(reasons[0][0].shape, jnp.int8)
    for holds, why in reversed(reasons):
        codes = jnp.where(holds, jnp.int8(why), codes)
    return codes


def freeing(named: jax.Array, held: jax.Array) -> jax.Array:
    """Return `[n]` codes of entries that empty slots, which hold `[batch]` tokens."""
    return first_reason(*naming_reasons(named), (of_entries(named, held == 0), Refusal.SLOT_EMPTY))


def length_reason(wanted: jax.Array, held: jax.Array) -> tuple[jax.Array, Refusal]:
    """Return the reason against lengths that are negative, or more than is held."""
    return (wanted < 0) | (wanted > held), Refusal.LENGTH_OUT_OF_RANGE


def outside_group(parents: jax.Array, own: jax.Array, *, batch: int, group: int) -> jax.Array:
    """Return `[batch]` bool: whether the parent of each slot, `own`, lies outside its aligned group of slots, or does not exist."""
    return (parents < 0) | (parents >= batch) | (parents // group != own // group)


def naming_reasons(named: jax.Array) -> Sequence[tuple[jax.Array, Refusal]]:
    """Return the reasons against the names themselves: every entry that names a slot that another one names too is refused."""
    twice = jnp.sum(named, axis=0) > 1
    return (~jnp.any(named, axis=1), Refusal.SLOT_OUT_OF_RANGE), (
        of_entries(named, twice),
        Refusal.SLOT_TWICE,
    )
