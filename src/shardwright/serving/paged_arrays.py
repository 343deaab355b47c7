"""The pools of a paged engine, and the compiled functions that change them."""

from __future__ import annotations

import collections.abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from shardwright.serving import paged_steps
from shardwright.serving.arrays import Setup, Weights
from shardwright.serving.paged_steps import Batch, Pools
from shardwright.serving.pages import NO_PAGE
from shardwright.serving.request import Sampling
from shardwright.serving.sampling import rules_of
from shardwright.vocabulary.modes import MODE_DECODE, MODE_PREFILL

# Engines with the same model and the same sizes share these compiled functions.
_prefill = jax.jit(paged_steps.prefill, static_argnums=(0, 1), donate_argnums=2)
_decode = jax.jit(paged_steps.decode, static_argnums=(0, 1, 2), donate_argnums=3)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """A sequence in a call.

    Attributes:
      pages: Its pages, in order. NO_PAGE stands for a page that was given back.
      length: Number of tokens in these pages.
      last: Its latest token.
      index: Number of tokens that it has written.
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
      spec: Spec of the cache of all slots.
      page_size: Rows of a page.
      pages: Number of pages.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        caches = setup.create_slots().caches
        self.spec = caches[0].spec
        self.pools: Pools = paged_steps.pools_of(caches)
        self.pages, self.page_size = self.pools[0][0].shape[:2]
        self._columns = -(-self.spec.capacity // self.page_size)

    def prefill(
        self,
        chunks: Mapping[int, collections.abc.Sequence[int]],
        sequences: Mapping[int, Sequence],
    ) -> Any:
        """Read chunks of prompts. Return `[rows]` int32, as `steps.prefill` does.

        Args:
          chunks: Tokens by row.
          sequences: The prompts, by row.
        """
        setup = self._setup
        tokens = np.zeros((setup.prefill_rows, setup.chunk), np.int32)
        counts = np.zeros(setup.prefill_rows, np.int32)
        for row, chunk in chunks.items():
            tokens[row, : len(chunk)] = chunk
            counts[row] = len(chunk)
        spec = dataclasses.replace(self.spec, batch=setup.prefill_rows)
        batch = self._batch(setup.prefill_rows, sequences)
        with setup.under(MODE_PREFILL):
            self.pools, following = _prefill(
                setup.model, spec, self.pools, setup.params, tokens, counts, batch
            )
        return following

    def decode(self, sequences: Mapping[int, Sequence]) -> Any:
        """Give slots their next tokens. Return `[decode_steps, slots]` tokens or codes.

        Args:
          sequences: Sequences by slot. Their pages have room for these tokens.
        """
        setup = self._setup
        batch = self._batch(setup.slots, sequences)
        with setup.under(MODE_DECODE):
            self.pools, drawn = _decode(
                setup.model, self.spec, self.decode_steps, self.pools, setup.params, batch
            )
        return drawn

    def compile(self) -> None:
        """Run every compiled function once, on no sequences, so that nothing changes."""
        self.prefill({}, {})
        self.decode({})

    def renew(self, part: str) -> None:
        """Replace the pools by empty ones."""
        del part
        self.pools = paged_steps.pools_of(self._setup.create_slots().caches)

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
