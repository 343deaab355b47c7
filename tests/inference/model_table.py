"""The table of models on the page of inference: `python -m tests.inference.model_table`."""

from __future__ import annotations

import re

import shardwright as sw
from shardwright.inference.report import axis_text
from tests.inference.models import Model
from tests.inference.more_models import EVERY_MODEL

_TABLE = re.compile(r"(<!-- models -->\n).*?(<!-- end -->)", re.DOTALL)
_HEAD = ("model", "dims", "right", "guesses", "open", "wrong, not marked", "constraints")

Row = tuple[str, int, int, int, int, int, int]


def row_of(model: Model) -> Row:
    """Return how many dims of a model are named as a person names them, and how many are not."""
    inferred = sw.infer_axes(model.forward, model.shapes, *model.inputs, seeds=model.seeds)
    expected = [axis for row in model.axes for axis in row]
    right = wrong = 0
    for dim, axis in zip(inferred.evidence, expected, strict=True):
        is_right = not dim.is_open and axis_text(dim.axis) == axis
        right += is_right
        wrong += not is_right and not dim.is_open and not dim.guess
    counts = (len(inferred.guesses), len(inferred.open), wrong, len(inferred.constraints))
    return (model.name, len(expected), right, *counts)


def rows() -> list[Row]:
    """Return a row per model, and one of sums."""
    every = [row_of(model) for model in EVERY_MODEL]
    sums = [sum(column) for column in zip(*(row[1:] for row in every), strict=True)]
    return [*every, ("all", *sums)]  # type: ignore[list-item]


def markdown() -> str:
    """Return the rows as a table."""
    lines = [_HEAD, ("---",) * len(_HEAD), *(tuple(map(str, row)) for row in rows())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_table(text: str) -> str:
    """Return a page with the table between its markers."""
    assert _TABLE.search(text), "the page has no markers"
    return _TABLE.sub(lambda found: f"{found[1]}\n{markdown()}\n\n{found[2]}", text)


if __name__ == "__main__":
    print(markdown())
