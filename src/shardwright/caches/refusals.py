"""Why an operation leaves a slot unchanged: the codes, and the array functions that compute them.

Some operations name slots: entry i of an `[n]` argument names slot `slots[i]`. `named`, `[n,
batch]` bool, says which entry names which slot. The functions use `named` instead of indexing,
because a number out of range then names no slot, and because the result does not depend on how the
batch is sharded.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp


class Refusal(enum.IntEnum):
    """Why an operation left a slot unchanged. Compiled programs return arrays of these codes."""

    NONE = 0
    OVERFLOW = 1
    SLOT_OUT_OF_RANGE = 2
    SLOT_TWICE = 3
    SLOT_IN_USE = 4
    SLOT_EMPTY = 5
    NO_FREE_PAGE = 6
    LENGTH_OUT_OF_RANGE = 7
    OVERWRITTEN = 8
    POSITIONS_MISSING = 9

    @property
    def meaning(self) -> str:
        """The reason in words."""
        return _MEANINGS[self]


_MEANINGS = {
    Refusal.NONE: "done",
    Refusal.OVERFLOW: "the tokens exceed the capacity of the slot",
    Refusal.SLOT_OUT_OF_RANGE: "there is no such slot",
    Refusal.SLOT_TWICE: "the slot is named twice",
    Refusal.SLOT_IN_USE: "the slot holds a sequence: free it first",
    Refusal.SLOT_EMPTY: "the slot is empty",
    Refusal.NO_FREE_PAGE: "too few pages are free",
    Refusal.LENGTH_OUT_OF_RANGE: "the length is negative, or larger than that of the slot",
    Refusal.OVERWRITTEN: "newer tokens have overwritten rows that the slot would need",
    Refusal.POSITIONS_MISSING: "the source lacks positions that this cache keeps",
}

# A condition per entry or slot, and the code of the entries or slots for which it holds.
ConditionalRefusal = tuple[jax.Array, Refusal]


def first_refusal(*reasons: ConditionalRefusal) -> jax.Array:
    """Return int8 codes: the first reason whose condition holds, 0 where none does."""
    codes = jnp.zeros(reasons[0][0].shape, jnp.int8)
    # Write the first reason last, so that it replaces the others.
    for condition, refusal in reversed(reasons):
        codes = jnp.where(condition, jnp.int8(refusal), codes)
    return codes


def named_slots(slots: jax.Array, batch: int) -> jax.Array:
    """Return `[n, batch]` bool: whether entry i names slot b."""
    return slots[:, None] == jnp.arange(batch, dtype=jnp.int32)[None]


def at_named(named: jax.Array, values: jax.Array) -> jax.Array:
    """Return `[n]` bool: for each entry, the value of the slot that it names.

    A slot that does not exist has the value False.
    """
    return jnp.any(named & values[None], axis=1)


def at_slots(named: jax.Array, values: jax.Array) -> jax.Array:
    """Return `[batch]` bool: for each slot, whether an entry with a true value names it."""
    return jnp.any(named & values[:, None], axis=0)


def set_named(
    old: jax.Array, named: jax.Array, done: jax.Array, values: jax.Array | int
) -> jax.Array:
    """Return `[batch]` int32: `old`, with the value of each accepted entry in the slot it names.

    Args:
      old: `[batch]` int32.
      named: `[n, batch]` bool. Accepted entries name different slots.
      done: `[n]` bool, whether each entry is accepted. Other entries change nothing.
      values: `[n]` int32, not negative, or one value for all.
    """
    entry_values = jnp.where(
        named & done[:, None], jnp.reshape(jnp.asarray(values, jnp.int32), (-1, 1)), -1
    )
    # At most one accepted entry names a slot, so the maximum is the value of that entry, or -1 if
    # there is none.
    new = jnp.max(entry_values, axis=0)
    return jnp.where(new < 0, old, new)


def invalid_names(named: jax.Array) -> tuple[ConditionalRefusal, ConditionalRefusal]:
    """Return the reasons to refuse entries: the slot does not exist, or several entries name it."""
    twice = jnp.sum(named, axis=0) > 1
    return (
        (~jnp.any(named, axis=1), Refusal.SLOT_OUT_OF_RANGE),
        (at_named(named, twice), Refusal.SLOT_TWICE),
    )


def refuse_free(named: jax.Array, length: jax.Array) -> jax.Array:
    """Return the codes of the operation `free`, `[n]`; `length` is `[batch]`."""
    return first_refusal(*invalid_names(named), (at_named(named, length == 0), Refusal.SLOT_EMPTY))


def invalid_length(wanted: jax.Array, held: jax.Array) -> ConditionalRefusal:
    """Return the reason to refuse lengths: negative, or more than the slot holds."""
    return (wanted < 0) | (wanted > held), Refusal.LENGTH_OUT_OF_RANGE


def outside_group(parents: jax.Array, own: jax.Array, *, group: int) -> jax.Array:
    """Return `[batch]` bool: whether a slot's parent does not exist or is in another group.

    Each group is `group` consecutive slots. The groups cover exactly the slots, so a parent that
    does not exist is in no slot's group.

    Args:
      parents: `[batch]` int32.
      own: `[batch]` int32, the number of each slot.
      group: Size of a group.
    """
    return parents // group != own // group
