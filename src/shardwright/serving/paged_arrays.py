"""The pools of a paged engine, and the compiled functions that change them."""

from __future__ import annotations

import collections.abc
import dataclasses
from collections.abc import Mapping
from typing import Final

import jax
import numpy as np

from shardwright.serving import paged_steps
from shardwright.serving.arrays import Setup, Weights, on_device
from shardwright.serving.paged_steps import Batch, Pools
from shardwright.serving.pages import NO_PAGE
from shardwright.serving.request import Sampling
from shardwright.serving.sampling import Drawn, rules_of
from shardwright.vocabulary.modes import MODE_DECODE, MODE_PREFILL

# Engines with the same model and the same sizes share these compiled functions.
_prefill = jax.jit(paged_steps.prefill, static_argnums=(0, 1), donate_argnums=(2, 3))
_decode = jax.jit(paged_steps.decode, static_argnums=(0, 1, 2), donate_argnums=(3, 4))
# In place of a latest token that the host does not know.
ON_DEVICE: Final = -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """A sequence in a call.

    Attributes:
      pages: Its pages, in order. NO_PAGE stands for a page that was given back.
      length: Number of tokens in these pages, after the calls in flight.
      last: Its latest token, or ON_DEVICE if a call in flight draws it.
      index: Number of tokens that it has written, after the calls in flight.
      limit: Largest number of tokens that it may write.
      sampling: How its next token is drawn.
    """

    pages: collections.abc.Sequence[int]
    length: int
    last: int
    index: int
    limit: int
    sampling: Sampling


class PagedArrays(Weights):
    """The pools of an engine. Every call replaces them.

    Attributes:
      pools: Pages of keys and values, per layer.
      last: `[slots]` int32, the latest token of each slot, which is replicated.
      spec: Spec of the cache of all slots.
      page_size: Rows of a page.
      pages: Number of pages.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        caches = setup.create_slots().caches
        self.spec = caches[0].spec
        self.pools: Pools = paged_steps.pools_of(caches)
        self.last = self._empty_last()
        self.pages, self.page_size = self.pools[0][0].shape[:2]
        self._columns = -(-self.spec.capacity // self.page_size)

    def prefill(
        self,
        chunks: Mapping[int, collections.abc.Sequence[int]],
        sequences: Mapping[int, Sequence],
        first: Mapping[int, int],
    ) -> Drawn:
        """Read chunks of prompts. Return `[rows]` tokens or codes, as `steps.prefill` does.

        Args:
          chunks: Tokens by row.
          sequences: The prompts, by row.
          first: Slot by row, of the prompts whose first token is drawn.
        """
        setup = self._setup
        tokens = np.zeros((setup.prefill_rows, setup.chunk), np.int32)
        entries = np.zeros((2, setup.prefill_rows), np.int32)
        entries[1] = setup.slots
        for row, chunk in chunks.items():
            tokens[row, : len(chunk)] = chunk
            entries[:, row] = len(chunk), first.get(row, setup.slots)
        spec = dataclasses.replace(self.spec, batch=setup.prefill_rows)
        batch = self._batch(setup.prefill_rows, sequences)
        with setup.under(MODE_PREFILL):
            self.pools, self.last, following = _prefill(
                setup.model, spec, self.pools, self.last, setup.params, tokens, entries, batch
            )
        readable: Drawn = following.readable()
        return readable

    def decode(self, sequences: Mapping[int, Sequence]) -> Drawn:
        """Give slots their next tokens. Return `[decode_steps, slots]` tokens or codes.

        Args:
          sequences: Sequences by slot. Their pages have room for these tokens.
        """
        setup = self._setup
        batch = self._batch(setup.slots, sequences)
        with setup.under(MODE_DECODE):
            self.pools, self.last, drawn = _decode(
                setup.model,
                self.spec,
                self.decode_steps,
                self.pools,
                self.last,
                setup.params,
                batch,
            )
        readable: Drawn = drawn.readable()
        return readable

    def compile(self) -> None:
        """Run every compiled function once, on no sequences, so that nothing changes."""
        self.prefill({}, {}, {})
        self.decode({})

    def renew(self, part: str) -> None:
        """Replace the pools by empty ones."""
        del part
        self.pools = paged_steps.pools_of(self._setup.create_slots().caches)
        self.last = self._empty_last()

    def size(self, part: str) -> int:
        """Return the number of slots."""
        del part
        return self._setup.slots

    def vocabulary(self) -> int:
        """Return the number of tokens that the model has logits for, without running it."""
        batch = self._batch(self._setup.slots, {})
        return self._vocabulary(
            paged_steps.layers(self.spec, self.pools, batch.tables, batch.state[0])
        )

    def _empty_last(self) -> jax.Array:
        with self._setup.under(MODE_DECODE):
            last: jax.Array = paged_steps.empty_last(self._setup.slots, self.spec.mode)
            return on_device(last, self._setup.device)

    def _batch(self, count: int, sequences: Mapping[int, Sequence]) -> Batch:
        tables = np.full((count, self._columns), self.pages, np.int32)
        for at, sequence in sequences.items():
            pages = np.asarray(sequence.pages, np.int32)
            tables[at, : len(pages)] = np.where(pages == NO_PAGE, self.pages, pages)
        state = np.zeros((3, count), np.int32)
        for at, each in sequences.items():
            state[:, at] = each.length, each.last, each.index
        rules = rules_of(
            count,
            {at: each.sampling for at, each in sequences.items()},
            {at: each.limit for at, each in sequences.items()},
        )
        return Batch(tables=tables, state=state, rules=rules)
