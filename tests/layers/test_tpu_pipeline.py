"""Stages compile on eight TPUs where they call attention more than once."""

from __future__ import annotations

from tests import tpu_compile
from tests.layers.tpu_pipeline import Compiled, measure

pytestmark = tpu_compile.MARKS


def test_attention_in_the_stages() -> None:
    assert measure() == [
        Compiled(schedule=schedule, kernels=True, kinds=["permute"])
        for schedule in ("gpipe", "1f1b")
    ]
