"""Signatures, variables, results, gradients and masks equal those of TransformerEngine itself."""

from __future__ import annotations

import pytest

pytest.importorskip("flax.linen")

from shardwright.interop.transformer_engine import flax as modules
from tests.interop.transformer_engine import cases, goldens, layer_fields


def members(*groups: str) -> list[object]:
    """Return the cases of groups, as parameters of a test."""
    pairs = [(group, case) for group in groups for case in cases.CASES[group]]
    # A mixed decoder has all that the encoder of the same fields has.
    encoders = {f"encoder-{layer_fields.ALONE + at}" for at in range(layer_fields.MIXED)}
    marks = {"mlp-7": pytest.mark.ci} | dict.fromkeys(encoders, pytest.mark.product)
    return [
        pytest.param(*pair, id=f"{pair[0]}-{pair[1].name}", marks=marks.get(pair[1].name, ()))
        for pair in pairs
    ]


@pytest.mark.parametrize("name", cases.MODULES)
def test_signatures(name: str) -> None:
    expected = goldens.read("signatures")["modules"][name]
    assert cases.signatures(getattr(modules, name)) == expected


@pytest.mark.full
@pytest.mark.parametrize(
    ("group", "case"), members("norm_and_dense", "mlp_and_softmax", "attention")
)
def test_variables_results_and_gradients(group: str, case: cases.Case) -> None:
    problems = goldens.problems_of(group, case)
    assert not problems, "\n".join(problems)


# The goldens are not compiled as a whole, so neither is ours: the first layers compile operations.
@pytest.mark.full
@pytest.mark.parametrize(("group", "case"), members("layers"))
def test_variables_results_and_gradients_of_layers(group: str, case: cases.Case) -> None:
    problems = goldens.problems_of(group, case)
    assert not problems, "\n".join(problems)
