"""Inference and the plan know the primitives of each family in `dims`."""

from __future__ import annotations

import pytest

from shardwright.dims import primitives
from shardwright.dims.table import _RULES as DIMS
from shardwright.inference.walk import RULES as INFERENCE
from shardwright.plan.walk.program import _RULES as PLAN

# Inference takes these for elementwise, since all their shapes are equal.
EQUAL_SHAPES = {"rev", "sort"}


@pytest.mark.parametrize("family", ["REDUCTIONS", "SCATTERS", "VIEWS", "CUTS"])
def test_all_know_family(family: str) -> None:
    names = getattr(primitives, family)
    assert names <= INFERENCE.keys() | EQUAL_SHAPES
    assert names <= DIMS.keys()
    assert names <= PLAN.keys()
