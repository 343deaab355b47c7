"""On eight TPUs the example's insert gathers no rows of its cache."""

from __future__ import annotations

from tests import tpu_compile
from tests.examples.tpu_insert import MESHES, SLOTS, measure

pytestmark = tpu_compile.MARKS


def test_insert_gathers_no_cache() -> None:
    actual = measure()
    assert len(actual) == len(MESHES)
    for program in actual:
        # Lengths and slots are sent, to free a slot and to fill it: a few bytes per slot and layer.
        # A device holds many KiB of rows.
        assert sum(program.sent.values()) <= 128 * SLOTS, program
        assert program.held > 2**15
