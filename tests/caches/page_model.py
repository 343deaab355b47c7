"""A model of the paged cache in lists and dicts, and random operations on it."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

from shardwright.caches import Refusal

Refusals = list[Refusal]


@dataclasses.dataclass(slots=True, kw_only=True)
class PageModel:
    """A reference cache in plain Python, slot by slot.

    Attributes:
      pages: of the pool.
      page_size: rows of a page.
      capacity: tokens that a slot may hold.
      tables: the pages of each slot.
      sequences: the tokens of each slot, recorded without pages.
      rows: the content of each row of a page.
    """

    pages: int
    page_size: int
    capacity: int
    tables: list[list[int]]
    sequences: list[list[int]]
    rows: dict[tuple[int, int], int]

    @classmethod
    def empty(cls, *, batch: int, pages: int, page_size: int, capacity: int) -> PageModel:
        tables, sequences = ([[] for _ in range(batch)] for _ in range(2))
        return cls(
            pages=pages,
            page_size=page_size,
            capacity=capacity,
            tables=tables,
            sequences=sequences,
            rows={},
        )

    @property
    def references(self) -> Counter[int]:
        return Counter(page for table in self.tables for page in table)

    @property
    def free_list(self) -> list[int]:
        return [page for page in range(self.pages) if page not in self.references]

    def read(self, slot: int) -> list[int]:
        at = [divmod(position, self.page_size) for position in range(len(self.sequences[slot]))]
        return [self.rows[self.tables[slot][column], row] for column, row in at]

    def put(self, slot: int, tokens: list[int]) -> Refusal:
        """One slot's part of an append."""
        if not tokens:
            return Refusal.NONE
        length = len(self.sequences[slot])
        table = self.tables[slot]
        if length + len(tokens) > self.capacity:
            return Refusal.OVERFLOW
        copies = length % self.page_size > 0 and self.references[table[-1]] > 1
        need = -(-(length + len(tokens)) // self.page_size) - len(table) + copies
        free = self.free_list
        if need > len(free):
            return Refusal.NO_FREE_PAGE
        if copies:
            old = table.pop()
            for row in range(length % self.page_size):
                self.rows[free[0], row] = self.rows[old, row]
        table += free[:need]
        for position, token in enumerate(tokens, length):
            column, row = divmod(position, self.page_size)
            self.rows[table[column], row] = token
        self.sequences[slot] += tokens
        return Refusal.NONE

    def drop(self, slot: int, length: int) -> None:
        del self.sequences[slot][length:]
        del self.tables[slot][-(-length // self.page_size) :]

    def naming(self, slots: list[int]) -> Refusals:
        batch, named = len(self.tables), Counter(slots)

        def refusal(slot: int) -> Refusal:
            if not 0 <= slot < batch:
                return Refusal.SLOT_OUT_OF_RANGE
            return Refusal.SLOT_TWICE if named[slot] > 1 else Refusal.NONE

        return [refusal(slot) for slot in slots]

    def append(self, tokens: list[list[int]]) -> Refusals:
        return [self.put(slot, new) for slot, new in enumerate(tokens)]

    def insert(self, sequences: list[list[int]], slots: list[int]) -> Refusals:
        refused = self.naming(slots)
        in_use = [bool(sequence) for sequence in self.sequences]
        for i, (sequence, slot) in enumerate(zip(sequences, slots, strict=True)):
            if not refused[i]:
                refused[i] = Refusal.SLOT_IN_USE if in_use[slot] else self.put(slot, sequence)
        return refused

    def free(self, slots: list[int]) -> Refusals:
        refused = self.naming(slots)
        for i, slot in enumerate(slots):
            if not refused[i] and not self.sequences[slot]:
                refused[i] = Refusal.SLOT_EMPTY
            elif not refused[i]:
                self.drop(slot, 0)
        return refused

    def rewind(self, lengths: list[int]) -> Refusals:
        refused = []
        for slot, length in enumerate(lengths):
            bad = not 0 <= length <= len(self.sequences[slot])
            refused.append(Refusal.LENGTH_OUT_OF_RANGE if bad else Refusal.NONE)
            if not bad:
                self.drop(slot, length)
        return refused

    def reorder(self, parents: list[int]) -> Refusals:
        tables, sequences, batch = self.tables, self.sequences, len(self.tables)
        ok = [0 <= parent < batch for parent in parents]
        parents = [
            parent if good else slot
            for slot, (parent, good) in enumerate(zip(parents, ok, strict=True))
        ]
        self.tables, self.sequences = (
            [list(tables[p]) for p in parents],
            [list(sequences[p]) for p in parents],
        )
        return [Refusal.NONE if good else Refusal.SLOT_OUT_OF_RANGE for good in ok]

    def share(self, sources: list[int], slots: list[int], lengths: list[int]) -> Refusals:
        refused = self.naming(slots)
        held = [len(sequence) for sequence in self.sequences]
        for i, (source, slot, length) in enumerate(zip(sources, slots, lengths, strict=True)):
            if not 0 <= source < len(held):
                refused[i] = Refusal.SLOT_OUT_OF_RANGE
            elif not refused[i]:
                if held[slot]:
                    refused[i] = Refusal.SLOT_IN_USE
                elif not held[source]:
                    refused[i] = Refusal.SLOT_EMPTY
                elif not 0 <= length <= held[source]:
                    refused[i] = Refusal.LENGTH_OUT_OF_RANGE
            if not refused[i]:
                self.sequences[slot] = self.sequences[source][:length]
                self.tables[slot] = self.tables[source][: -(-length // self.page_size)]
        return refused


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation by name, and its arguments: the same ones for the model and for the cache."""

    name: str
    arguments: dict[str, Any]


NAMES = ("append", "append", "append", "insert", "free", "rewind", "reorder", "share")


def random_operation(
    random: random.Random, model: PageModel, *, first: int, most: int, entries: int
) -> Operation:
    """Return an operation, mostly valid, sometimes with a slot, length or parent out of range.

    Args:
      random: source of random numbers.
      model: the model before the operation.
      first: number of the first new token.
      most: tokens that one slot gets at most.
      entries: slots that an operation names.
    """
    batch = len(model.tables)
    name = random.choice(NAMES)
    held = [len(sequence) for sequence in model.sequences]

    def new(count: int) -> list[list[int]]:
        starts = [first + i * most for i in range(count)]
        tokens = [random.choice((0, 1, 1, random.randint(0, most))) for _ in starts]
        return [
            list(range(start, start + number)) for start, number in zip(starts, tokens, strict=True)
        ]

    def wrong(number: int, chance: float = 0.03) -> int:
        return (
            random.choice((-1, batch, batch + 7, 2**31 - 1, -batch))
            if random.random() < chance
            else number
        )

    def some(of: list[int]) -> list[int]:
        # Padded with a slot that does not exist.
        chosen = random.sample(of, min(len(of), random.randint(1, entries))) if of else []
        chosen = [
            *([random.choice([*chosen, random.randrange(batch)])] if random.random() < 0.2 else []),
            *chosen,
        ]
        return ([wrong(slot) for slot in chosen] + [batch] * entries)[:entries]

    empty = [slot for slot in range(batch) if not held[slot]]
    full = [slot for slot in range(batch) if held[slot]]
    if name == "append":
        return Operation(name=name, arguments={"tokens": new(batch)})
    if name == "insert":
        return Operation(name=name, arguments={"sequences": new(entries), "slots": some(empty)})
    if name == "free":
        return Operation(
            name=name, arguments={"slots": some(full if random.random() < 0.8 else empty)}
        )
    if name == "rewind":
        lengths = [
            wrong(length - random.choice((0, 0, 1, 2, random.randint(0, length))))
            for length in held
        ]
        return Operation(name=name, arguments={"lengths": lengths})
    if name == "reorder":
        anywhere = [random.choice((slot, slot, random.randrange(batch))) for slot in range(batch)]
        return Operation(name=name, arguments={"parents": [*map(wrong, anywhere)]})
    sources = [
        wrong(random.choice(full if full and random.random() < 0.8 else range(batch)))
        for _ in range(entries)
    ]
    lengths = [random.randint(0, held[source]) if 0 <= source < batch else 0 for source in sources]
    lengths = [
        length if random.random() < 0.95 else random.choice((-1, 10**6)) for length in lengths
    ]
    return Operation(
        name=name, arguments={"sources": sources, "slots": some(empty), "lengths": lengths}
    )


def apply(model: PageModel, operation: Operation) -> Refusals:
    refusals: Refusals = getattr(model, operation.name)(**operation.arguments)
    return refusals
