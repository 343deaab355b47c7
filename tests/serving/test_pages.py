"""Pages of a pool: random operations, judged by a model that searches lists of tokens."""

from __future__ import annotations

import dataclasses
import random

import pytest

from shardwright.serving.pages import NO_PAGE, Pages, PageTable

COUNT, SIZE, WINDOW = 12, 3, 7


@dataclasses.dataclass(eq=False)
class Text:
    """A text in the pool, and the tokens of it that are written."""

    table: PageTable
    tokens: list[int]
    written: int = 0


class Reference:
    """What each page holds, as the writes left it. It has no free list, no counts and no tree."""

    def __init__(self) -> None:
        self.content: dict[int, list[int]] = {}

    def write(self, text: Text, end: int) -> None:
        for at in range(text.written, end):
            page = text.table.pages[at // SIZE]
            assert page != NO_PAGE
            rows = self.content.setdefault(page, [])
            # A row is written once by its owner. A page that is taken again starts at its first.
            del rows[at % SIZE :]
            rows.append(text.tokens[at])
        text.written = end

    def check(self, pages: Pages, texts: list[Text]) -> None:
        used: dict[int, set[int]] = {}
        for text in texts:
            for column, page in enumerate(text.table.pages):
                if page == NO_PAGE:
                    continue
                used.setdefault(page, set()).add(column)
                first = column * SIZE
                rows = text.tokens[first : min(first + SIZE, text.written)]
                assert self.content.get(page, [])[: len(rows)] == rows
        # A shared page is at the same place of every text that uses it.
        assert all(len(columns) == 1 for columns in used.values())
        assert pages.used == len(used)
        assert pages.available == COUNT - len(used)


def write_some(pages: Pages, reference: Reference, text: Text, draw: random.Random) -> None:
    if text.written == len(text.table.pages) * SIZE:
        text.written = pages.adopt(text.table, text.tokens, text.written)
    end = min(text.written + draw.randint(1, 5), len(text.tokens))
    if not pages.grow(text.table, end):
        assert pages.missing(text.table, end) > pages.available
        return
    reference.write(text, end)
    pages.offer(text.table, text.tokens[: text.written])


def run(operations: int, seed: int, *, window: bool) -> Pages:
    draw, pages, reference = random.Random(seed), Pages(count=COUNT, size=SIZE), Reference()
    texts: list[Text] = []
    starts = [[draw.randrange(3) for _ in range(20)] for _ in range(3)]
    for _ in range(operations):
        what = draw.choice(["open", "write", "write", "write", "close", "forget"])
        if what == "open" and len(texts) < 5:
            start = draw.choice(starts)[: draw.randint(1, 20)]
            tokens = [*start, *(draw.randrange(3) for _ in range(draw.randint(1, 8)))]
            texts.append(Text(pages.open(), tokens))
        elif what == "write" and texts:
            text = draw.choice(texts)
            write_some(pages, reference, text, draw)
            if window:
                pages.leave_before(text.table, text.written - WINDOW + 1)
        elif what == "close" and texts:
            pages.close(texts.pop(draw.randrange(len(texts))).table)
        elif what == "forget" and draw.random() < 0.1:
            pages.forget()
        reference.check(pages, texts)
    for text in texts:
        pages.close(text.table)
    assert (pages.used, pages.available) == (0, COUNT)
    pages.forget()
    table = pages.open()
    assert pages.grow(table, COUNT * SIZE)
    assert sorted(table.pages) == list(range(COUNT))
    return pages


@pytest.mark.parametrize("window", [False, True])
def test_random_operations_leak_no_page(window: bool) -> None:
    hits = sum(run(1_000, seed, window=window).hits for seed in range(3))
    assert hits > 50


@pytest.mark.full
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("seed", range(10, 20))
def test_ten_thousand_random_operations_leak_no_page(seed: int, window: bool) -> None:
    assert run(10_000, seed, window=window).hits > 100


def test_last_token_is_never_adopted() -> None:
    pages = Pages(count=4, size=2)
    first, second = pages.open(), pages.open()
    assert pages.grow(first, 4)
    pages.offer(first, [1, 2, 3, 4])
    # All four tokens are in pages, but the logits of the last one are needed.
    assert pages.adopt(second, [1, 2, 3, 4], 0) == 2
    assert second.pages == first.pages[:1]
    assert pages.hits == 1


def test_least_recently_used_prefix_goes_first() -> None:
    pages = Pages(count=2, size=1)
    for token in (1, 2):
        table = pages.open()
        assert pages.grow(table, 1)
        pages.offer(table, [token])
        pages.close(table)
    again = pages.open()
    assert pages.adopt(again, [1, 9], 0) == 1  # used again, and now the latest
    pages.close(again)
    assert pages.grow(pages.open(), 1)
    assert pages.adopt(pages.open(), [2, 9], 0) == 0
    assert pages.adopt(pages.open(), [1, 9], 0) == 1
