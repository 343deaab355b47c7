"""The tables of models on the page of inference: `python -m tests.inference.model_table`.

The second one has published models, as `python -m benchmarks.inference` has written them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import shardwright as sw
from shardwright.vocabulary.merged_dims import axis_text
from tests.docs.snippets import ROOT
from tests.inference.models import Model
from tests.inference.more_models import EVERY_MODEL

_TABLE = re.compile(r"(<!-- (models|published) -->\n).*?(<!-- end -->)", re.DOTALL)
_RESULTS = ROOT / "benchmarks" / "results" / "inference" / "jax-0.10.2.json"
_COUNTS = ("dims", "right", "guesses", "open", "wrong, not marked")
_HEAD = ("model", *_COUNTS, "constraints")

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


def published() -> Sequence[Mapping[str, Any]]:
    """Return the results of published models."""
    found: Sequence[Mapping[str, Any]] = json.loads(_RESULTS.read_text(encoding="utf-8"))["names"]
    return found


def markdown(kind: str) -> str:
    """Return a table: "models" or "published"."""
    if kind == "models":
        return _markdown(_HEAD, rows())
    results = [tuple(row[key] for key in ("model", *_COUNTS)) for row in published()]
    sums = [sum(column) for column in zip(*(row[1:] for row in results), strict=True)]
    return _markdown(("model", *_COUNTS), [*results, ("all", *sums)])


def _markdown(head: Sequence[str], body: Iterable[Sequence[Any]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(map(str, row)) for row in body)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_table(text: str) -> str:
    """Return a page with the tables between their markers."""
    assert len(_TABLE.findall(text)) == 2, "the page lacks markers"
    return _TABLE.sub(lambda found: f"{found[1]}\n{markdown(found[2])}\n\n{found[3]}", text)


if __name__ == "__main__":
    print(markdown("models"), markdown("published"), sep="\n\n")
