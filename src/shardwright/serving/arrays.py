"""The arrays of an engine, and the compiled functions that change them.

`SlotArrays` has a prefill batch and slots; `PageArrays` has pools of pages. The loop calls both in
the same way. If a call fails, the arrays are either unchanged, or deleted because they were
donated. `renew` replaces deleted arrays.
"""

from __future__ import annotations

import abc
import collections.abc
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Final, final

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardwright import _jax
from shardwright.caches.change import readable
from shardwright.caches.paged.cache import PagedCache
from shardwright.caches.spec import CacheSpec
from shardwright.errors import ServingError
from shardwright.manager.manager import PartitionManager
from shardwright.serving import steps
from shardwright.serving.pages import NO_PAGE
from shardwright.serving.request import Sampling
from shardwright.serving.sampling import Sampled, rules_of
from shardwright.serving.setup import Setup, on_device
from shardwright.serving.steps import Caches, PagedBatch, Pools
from shardwright.serving.weights import Update, Version, next_version, update_weights
from shardwright.vocabulary.modes import MODE_DECODE, MODE_INSERT, MODE_PREFILL

# Engines with the same model and the same sizes share these compiled functions.
# The caches are donated. Otherwise the old and the new caches would be in memory together.
_prefill = jax.jit(steps.prefill, static_argnums=0, donate_argnums=1)
_decode = jax.jit(steps.decode, static_argnums=(0, 1), donate_argnums=(2, 3))
_insert = jax.jit(steps.insert, donate_argnums=0)
_park = jax.jit(steps.park, donate_argnums=0)
_resume = jax.jit(steps.resume, donate_argnums=0)
_clear = jax.jit(steps.clear, donate_argnums=0)
_clear_slots = jax.jit(steps.clear_slots, donate_argnums=0)
_prefill_pages = jax.jit(steps.prefill_pages, static_argnums=(0, 1), donate_argnums=(2, 3))
_decode_pages = jax.jit(steps.decode_pages, static_argnums=(0, 1, 2), donate_argnums=(3, 4))
# Stands for the latest token of a sequence, if it is on the devices and the host does not know it.
ON_DEVICE: Final = -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SequenceState:
    """The state of a sequence, which a call of a compiled function gets.

    A call is in flight until the host has fetched its results.

    Attributes:
      slot: Its slot.
      pages: Its pages, in order, if the host assigns pages. NO_PAGE stands for a page that was
        given back.
      length: Number of its tokens in the cache, after the calls in flight.
      last: Its latest token, or ON_DEVICE if a call in flight draws it.
      index: Number of tokens that it has written, after the calls in flight.
      limit: Largest number of tokens that it may write.
      sampling: How its next token is sampled.
    """

    slot: int
    pages: collections.abc.Sequence[int]
    length: int
    last: int
    index: int
    limit: int
    sampling: Sampling


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheUsage:
    """The number of tokens and pages that the caches hold.

    The numbers show whether slots or pages leak.

    Attributes:
      row_lengths: Number of tokens in each row of the prefill batch, the maximum over layers.
      slot_lengths: Number of tokens in each slot, the maximum over layers.
      pages: Number of pages in use, the maximum over layers. 0 unless the cache is paged.
    """

    row_lengths: tuple[int, ...]
    slot_lengths: tuple[int, ...]
    pages: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RefusalCodes:
    """Codes of `Refusal`, which the devices may not have computed yet.

    Attributes:
      parts: Arrays `[rows]`, one for each time that the prompts were copied.
    """

    parts: tuple[jax.Array, ...]

    @classmethod
    def of(cls, *parts: jax.Array) -> RefusalCodes:
        """Return the codes in a form that this process can read; see `Sampled.readable`."""
        return cls(parts=tuple(map(readable, parts)))

    def fetch(self) -> Any:
        """Wait for the codes, and return them, `[rows]`. A code is 0 if no copy was refused."""
        # 0 means that nothing was refused, and other codes are larger, so take the maximum.
        return functools.reduce(np.maximum, map(np.asarray, self.parts))


class Arrays(abc.ABC):
    """The weights and the caches of an engine. Every call replaces the caches that it changes.

    A call returns before the devices have computed its results. `fetch` waits for a result.

    Attributes:
      read_part: Name of the attribute that `prefill` changes.
      slot_part: Name of the attribute that `decode` changes.
      version: Version of the weights.
    """

    read_part: ClassVar[str]
    slot_part: ClassVar[str]

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.version: Version = 0

    @property
    def decode_steps(self) -> int:
        """Largest number of tokens that a slot gets in one call."""
        return self._setup.decode_steps

    @abc.abstractmethod
    def prefill(
        self,
        chunks: Mapping[int, collections.abc.Sequence[int]],
        sequences: Mapping[int, SequenceState],
        *,
        first: Collection[int] = (),
        kept: Collection[int] = (),
    ) -> Sampled:
        """Read chunks of prompts.

        Args:
          chunks: Tokens by row of the prefill batch.
          sequences: The prompts, by row.
          first: Rows whose chunk ends the prompt: the token after the chunk is the first token of
            the text.
          kept: Rows that already hold the first part of a prompt.

        Returns:
          `[rows]`, the token that would follow each chunk, or a code such as `steps.NO_NUMBER`.
        """

    @abc.abstractmethod
    def decode(self, sequences: Callable[[], Mapping[int, SequenceState]]) -> Sampled:
        """Give active slots their next tokens. Return `[decode_steps, slots]` tokens or codes.

        Args:
          sequences: Function that returns the sequences by slot. It is called only if the devices
            do not hold the state of the sequences.
        """

    @abc.abstractmethod
    def insert(self, sequences: Mapping[int, SequenceState]) -> RefusalCodes | None:
        """Move completely read prompts from the prefill batch to their slots.

        Args:
          sequences: Sequences by row. If `last` is ON_DEVICE, the first token is the one that the
            latest `prefill` has sampled. The host need not know it.

        Returns:
          `[rows]` codes. None if prompts are read into their pages, so that nothing moves.
        """

    @abc.abstractmethod
    def park(self, into: Mapping[int, int]) -> RefusalCodes | None:
        """Move partly read prompts to their slots; see `insert`.

        Args:
          into: Slot by row.
        """

    @abc.abstractmethod
    def resume(self, taken: Mapping[int, int]) -> RefusalCodes | None:
        """Move partly read prompts from their slots to the prefill batch; see `insert`.

        Args:
          taken: Slot by row.
        """

    @abc.abstractmethod
    def clear_rows(self, rows: collections.abc.Sequence[int]) -> None:
        """Empty rows of the prefill batch, if it has caches of its own."""

    @abc.abstractmethod
    def clear_slots(self, slots: collections.abc.Sequence[int]) -> None:
        """Empty slots, if they have caches of their own."""

    @abc.abstractmethod
    def usage(self, slot_lengths: collections.abc.Sequence[int], free_pages: int) -> CacheUsage:
        """Return the numbers of tokens and pages in the caches.

        Numbers that only the host knows are arguments.

        Args:
          slot_lengths: Number of tokens of each slot, according to the records of the host.
          free_pages: Number of pages that, according to these records, no request uses.
        """

    @abc.abstractmethod
    def compile(self) -> None:
        """Run every compiled function once, on no sequences, so that nothing changes."""

    @abc.abstractmethod
    def renew(self, part: str) -> None:
        """Replace a part of the arrays by empty arrays."""

    @abc.abstractmethod
    def size(self, part: str) -> int:
        """Return the number of sequences in a part."""

    @abc.abstractmethod
    def _layers(self) -> Caches:
        """Return the caches that the model gets in `decode`."""

    def update_weights(
        self,
        params: Any,
        prefill_params: Any,
        version: Version | None,
        *,
        piece: int | str,
        donate: bool,
    ) -> Update:
        """Replace the weights; see `weights.update_weights`. If a move fails, keep the old ones."""
        version = next_version(self.version, version)
        self._setup, update = update_weights(
            self._setup, params, prefill_params, version, piece=piece, donate=donate
        )
        self.version = version
        return update

    def weights_are_deleted(self) -> bool:
        """Tell whether arrays of the weights were deleted, or donated to another function."""
        return _jax.is_deleted((self._setup.params, self._setup.prefill_params))

    def vocabulary(self) -> int:
        """Return the number of tokens for which the model has logits. This only traces the model.

        Raises:
          ServingError: The model does not return what `Model` describes, or does not use `valid`.
        """
        setup = self._setup
        tokens, valid = np.zeros((setup.slots, 1), np.int32), np.zeros((setup.slots, 1), bool)
        with setup.under(MODE_DECODE):
            read = jax.make_jaxpr(functools.partial(steps.read, setup.model), return_shape=True)
            traced, (logits, _) = read(setup.params, tokens, self._layers(), valid)
        # `valid` is the last input of the traced program, and some equation must read it.
        used = (variable for equation in traced.jaxpr.eqns for variable in equation.invars)
        if not any(variable is traced.jaxpr.invars[-1] for variable in used):
            raise ServingError(
                "the model does not use valid, so padding would be written to its caches",
                path="model",
                fix="pass valid to attention: append_and_attend(..., valid=valid)",
            )
        return int(logits.shape[2])


@final
class SlotArrays(Arrays):
    """Slots, and a prefill batch from which prompts are copied to them.

    Attributes:
      rows: Caches of the prefill batch, one per layer.
      slots: The state of decoding, which every step takes and returns.
    """

    read_part, slot_part = "rows", "slots"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        # The tokens that the latest prefill has sampled. `insert` reads them on the devices, before
        # the host does.
        self._following: Sampled | None = None
        self.rows = setup.create_rows()
        self.slots = setup.create_slots()

    def prefill(
        self,
        chunks: Mapping[int, collections.abc.Sequence[int]],
        sequences: Mapping[int, SequenceState],
        *,
        first: Collection[int] = (),
        kept: Collection[int] = (),
    ) -> Sampled:
        """Read chunks of prompts into the prefill batch; see `Arrays.prefill`."""
        del first
        setup = self._setup
        tokens, entries = _chunks_of(chunks, (setup.prefill_rows, setup.chunk))
        entries[1, list(kept)] = 1
        with setup.under(MODE_PREFILL):
            self.rows, self._following = _prefill(
                setup.model,
                self.rows,
                setup.prefill_params,
                tokens,
                entries,
                _rules_of(setup.prefill_rows, sequences),
            )
        return self._following.readable()

    def insert(self, sequences: Mapping[int, SequenceState]) -> RefusalCodes:
        """Copy rows of the prefill batch into their slots; see `Arrays.insert`."""
        setup, rows = self._setup, self._setup.prefill_rows
        entries = np.stack(
            [
                _targets({row: each.slot for row, each in sequences.items()}, rows, setup.slots),
                _targets({row: each.last for row, each in sequences.items()}, rows, ON_DEVICE),
            ]
        )
        source, following = self._rows_for_insert(), self._following_for_insert()
        rules = _rules_of(rows, sequences)
        with setup.under(MODE_INSERT):
            self.slots, refused = _insert(self.slots, source, entries, following, rules)
        return RefusalCodes.of(refused)

    def park(self, into: Mapping[int, int]) -> RefusalCodes:
        """Copy partly read prompts into their slots; see `Arrays.park`."""
        setup = self._setup
        slots = _targets(into, setup.prefill_rows, setup.slots)
        source = self._rows_for_insert()
        with setup.under(MODE_INSERT):
            self.slots, refused = _park(self.slots, source, slots)
        return RefusalCodes.of(refused)

    def resume(self, taken: Mapping[int, int]) -> RefusalCodes:
        """Copy prompts from their slots into the prefill batch; see `Arrays.resume`."""
        setup, rows = self._setup, self._setup.prefill_rows
        slots = _targets(taken, rows, setup.slots)
        source, refused_before = self.slots.caches, list[jax.Array]()
        # A jitted function takes arrays of one set of devices, so the prompts cross to the other
        # mesh by device_put, as a whole prefill batch.
        if not setup.shares_mesh:
            source, *refused_before = self._in_transit(slots)
            slots = _targets({row: row for row in taken}, rows, rows)
        with setup.under(MODE_PREFILL):
            self.rows, refused = _resume(self.rows, source, slots)
        return RefusalCodes.of(refused, *refused_before)

    def decode(self, sequences: Callable[[], Mapping[int, SequenceState]]) -> Sampled:
        """Give active slots their next tokens; see `Arrays.decode`."""
        del sequences
        # `rules` is not donated, because it would have to be returned, and decode only reads it.
        setup, slots = self._setup, self.slots
        with setup.under(MODE_DECODE):
            caches, ends, sampled = _decode(
                setup.model, setup.decode_steps, slots.caches, slots.ends, slots.rules, setup.params
            )
        self.slots = dataclasses.replace(slots, caches=caches, ends=ends)
        readable_tokens: Sampled = sampled.readable()
        return readable_tokens

    def clear_rows(self, rows: collections.abc.Sequence[int]) -> None:
        """Empty rows of the prefill batch."""
        with self._setup.under(MODE_PREFILL):
            self.rows = _clear(self.rows, _padded(rows, self._setup.prefill_rows))

    def clear_slots(self, slots: collections.abc.Sequence[int]) -> None:
        """Empty slots."""
        with self._setup.under(MODE_DECODE):
            self.slots = _clear_slots(self.slots, _padded(slots, self._setup.slots))

    def usage(self, slot_lengths: collections.abc.Sequence[int], free_pages: int) -> CacheUsage:
        """Read the content of the caches from the devices; see `Arrays.usage`."""
        del slot_lengths, free_pages
        paged = [cache for cache in self.slots.caches if isinstance(cache, PagedCache)]
        pages = [np.count_nonzero(np.asarray(readable(cache.references))) for cache in paged]
        return CacheUsage(
            row_lengths=_lengths(self.rows),
            slot_lengths=_lengths(self.slots.caches),
            pages=int(max(pages, default=0)),
        )

    def compile(self) -> None:
        """Run every compiled function once, on no rows and no slots, so that nothing changes."""
        self.prefill({}, {})
        self.insert({})
        self.park({})
        self.resume({})
        self.decode(dict)
        self.clear_rows(())
        self.clear_slots(())

    def renew(self, part: str) -> None:
        """Replace "rows" or "slots" by empty arrays."""
        if part == "rows":
            self.rows = self._setup.create_rows()
        else:
            self.slots = self._setup.create_slots()

    def size(self, part: str) -> int:
        """Return the number of "rows" or "slots"."""
        return self._setup.prefill_rows if part == "rows" else self._setup.slots

    def _layers(self) -> Caches:
        return self.slots.caches

    def _rows_for_insert(self) -> Caches:
        """Return the caches of the prefill batch on the mesh of the slots."""
        setup = self._setup
        if setup.shares_mesh:
            return self.rows
        assert setup.manager is not None
        return _moved(self.rows, setup.manager.for_mode(MODE_PREFILL))

    def _following_for_insert(self) -> Sampled:
        """Return the tokens that the latest `prefill` has sampled, on the mesh of the slots."""
        setup, following = self._setup, self._following
        assert following is not None
        if setup.shares_mesh:
            return following
        assert setup.manager is not None
        replicated = NamedSharding(setup.manager.mesh, PartitionSpec())
        return Sampled(packed=jax.device_put(following.packed, replicated))

    def _in_transit(self, slots: np.ndarray) -> tuple[Caches, jax.Array]:
        """Copy prompts from their slots into a new prefill batch on the mesh of prefill.

        Return the caches of this batch, and `[rows]` codes of `Refusal`.

        Args:
          slots: `[rows]` int32, the slot whose prompt each row gets, as in `steps.resume`.
        """
        setup = self._setup
        assert setup.manager is not None
        assert setup.prefill_manager is not None
        # A prompt that was read in part passes through this batch on its way from the mesh of the
        # slots to the mesh of prefill.
        transit = setup.create_rows(setup.manager)
        with setup.manager.for_mode(MODE_PREFILL):
            rows, refused = _resume(transit, self.slots.caches, slots)
        return _moved(rows, setup.prefill_manager.for_mode(MODE_PREFILL)), refused


@final
class PageArrays(Arrays):
    """The pools of an engine whose host assigns pages to requests.

    In each call, the host passes the tables, the lengths and the sampling: everything except the
    pools and the tokens that it has not fetched. So nothing has to be inserted into slots or
    cleared.

    Attributes:
      pools: Pages of keys and values, per layer.
      last: `[slots]` int32, the latest token of each slot, sharded like the slots.
      spec: Spec of the cache of all slots.
      page_size: Rows of a page.
      pages: Number of pages.
    """

    read_part = slot_part = "pools"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        caches = setup.create_slots().caches
        self.spec: CacheSpec = caches[0].spec
        # Only the pages are kept: the host passes tables and lengths in every call.
        self.pools: Pools = steps.pools_of(caches)
        self.last = self._no_tokens()
        self.pages, self.page_size = self.pools[0][0].shape[:2]
        self._columns = -(-self.spec.capacity // self.page_size)

    def prefill(
        self,
        chunks: Mapping[int, collections.abc.Sequence[int]],
        sequences: Mapping[int, SequenceState],
        *,
        first: Collection[int] = (),
        kept: Collection[int] = (),
    ) -> Sampled:
        """Read chunks of prompts into their pages; see `Arrays.prefill`."""
        del kept
        setup = self._setup
        tokens, entries = _chunks_of(chunks, (setup.prefill_rows, setup.chunk))
        slots = {row: sequences[row].slot for row in first}
        entries[1] = _targets(slots, setup.prefill_rows, setup.slots)
        spec = dataclasses.replace(self.spec, batch=setup.prefill_rows)
        batch = self._batch(setup.prefill_rows, sequences)
        with setup.under(MODE_PREFILL):
            self.pools, self.last, following = _prefill_pages(
                setup.model, spec, self.pools, self.last, setup.params, tokens, entries, batch
            )
        readable_tokens: Sampled = following.readable()
        return readable_tokens

    def decode(self, sequences: Callable[[], Mapping[int, SequenceState]]) -> Sampled:
        """Give slots their next tokens; see `Arrays.decode`.

        The pages of the slots have room for these tokens.
        """
        setup = self._setup
        batch = self._batch(setup.slots, sequences())
        with setup.under(MODE_DECODE):
            self.pools, self.last, sampled = _decode_pages(
                setup.model,
                self.spec,
                self.decode_steps,
                self.pools,
                self.last,
                setup.params,
                batch,
            )
        readable_tokens: Sampled = sampled.readable()
        return readable_tokens

    def insert(self, sequences: Mapping[int, SequenceState]) -> None:
        """Do nothing: a prompt is read into the pages that its request also uses in decode."""

    def park(self, into: Mapping[int, int]) -> None:
        """Do nothing; see `insert`."""

    def resume(self, taken: Mapping[int, int]) -> None:
        """Do nothing; see `insert`."""

    def clear_rows(self, rows: collections.abc.Sequence[int]) -> None:
        """Do nothing: the tables of a call name the pages that it reads."""

    def clear_slots(self, slots: collections.abc.Sequence[int]) -> None:
        """Do nothing; see `clear_rows`."""

    def usage(self, slot_lengths: collections.abc.Sequence[int], free_pages: int) -> CacheUsage:
        """Return the records of the host: the devices do not know which request uses a page."""
        return CacheUsage(
            row_lengths=(0,) * self._setup.prefill_rows,
            slot_lengths=tuple(slot_lengths),
            pages=self.pages - free_pages,
        )

    def compile(self) -> None:
        """Run every compiled function once, on no sequences, so that nothing changes."""
        self.prefill({}, {})
        self.decode(dict)

    def renew(self, part: str) -> None:
        """Replace the pools by empty pools."""
        del part
        self.pools = steps.pools_of(self._setup.create_slots().caches)
        self.last = self._no_tokens()

    def size(self, part: str) -> int:
        """Return the number of slots."""
        del part
        return self._setup.slots

    def _layers(self) -> Caches:
        batch = self._batch(self._setup.slots, {})
        return steps.layers(self.spec, self.pools, batch.tables, batch.state[0])

    def _no_tokens(self) -> jax.Array:
        with self._setup.under(MODE_DECODE):
            last: jax.Array = steps.no_tokens(self._setup.slots, self.spec.mode)
            return on_device(last, self._setup.device)

    def _batch(self, count: int, sequences: Mapping[int, SequenceState]) -> PagedBatch:
        # In a table, the number of pages, which is one past the last index, means "no page".
        tables = np.full((count, self._columns), self.pages, np.int32)
        state = np.zeros((3, count), np.int32)
        for at, each in sequences.items():
            pages = np.asarray(each.pages, np.int32)
            # JAX counts negative indices from the end, so NO_PAGE must not reach the devices.
            tables[at, : len(pages)] = np.where(pages == NO_PAGE, self.pages, pages)
            state[:, at] = each.length, each.last, each.index
        return PagedBatch(tables=tables, state=state, rules=_rules_of(count, sequences))


def _moved(caches: Caches, target: PartitionManager) -> Caches:
    """Return the caches of a prefill batch on the mesh of a manager."""
    return tuple(
        jax.device_put(cache, target.shardings(cache, cache.axes(), role="activation"))
        for cache in caches
    )


def _chunks_of(
    chunks: Mapping[int, collections.abc.Sequence[int]], shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens `[rows, chunk]`, and the `entries` `[2, rows]` of a prefill.

    Row 0 of the entries has the number of tokens of each row. Row 1 has zeros, which the caller
    replaces.
    """
    tokens, entries = np.zeros(shape, np.int32), np.zeros((2, shape[0]), np.int32)
    for row, chunk in chunks.items():
        tokens[row, : len(chunk)] = chunk
        entries[0, row] = len(chunk)
    return tokens, entries


def _rules_of(count: int, sequences: Mapping[int, SequenceState]) -> np.ndarray:
    """Return how many tokens each sequence of a batch writes, and how it draws them."""
    sampling = {at: each.sampling for at, each in sequences.items()}
    return rules_of(count, sampling, {at: each.limit for at, each in sequences.items()})


def _lengths(caches: Caches) -> tuple[int, ...]:
    lengths = np.max([np.asarray(readable(cache.length)) for cache in caches], axis=0)
    return tuple(lengths.tolist())


def _targets(into: Mapping[int, int], size: int, none: int) -> np.ndarray:
    """Return the target of each of `size` sequences: `none` if a sequence has no target."""
    return np.asarray([into.get(at, none) for at in range(size)], np.int32)


def _padded(numbers: collections.abc.Sequence[int], size: int) -> np.ndarray:
    """Return numbers of rows or slots, padded with the number `size`, which is out of range."""
    return np.asarray([*numbers, *[size] * (size - len(numbers))], np.int32)
