"""Signatures, variables, results, gradients and masks equal those of TransformerEngine itself."""

from __future__ import annotations

import pytest

pytest.importorskip("flax.linen")

from shardwright.interop.transformer_engine import flax as modules
from tests.interop.transformer_engine import cases, goldens

ALL = [(group, case) for group, members in cases.CASES.items() for case in members]


@pytest.mark.parametrize("name", cases.MODULES)
def test_signatures(name: str) -> None:
    expected = goldens.read("signatures")["modules"][name]
    assert cases.signatures(getattr(modules, name)) == expected


@pytest.mark.sweep(keep=2, wide=6)
@pytest.mark.parametrize(
    ("group", "case"), [pytest.param(*each, id=f"{each[0]}-{each[1].name}") for each in ALL]
)
def test_variables_results_and_gradients(group: str, case: cases.Case) -> None:
    problems = goldens.problems_of(group, case)
    assert not problems, "\n".join(problems)
