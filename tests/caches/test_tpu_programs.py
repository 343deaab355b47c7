"""On eight TPUs an append of bfloat16 sends nothing, copies nothing and writes in place."""

from __future__ import annotations

from tests import tpu_compile
from tests.caches.tpu_programs import COUNTS, MESHES, measure

pytestmark = tpu_compile.MARKS


def test_appends() -> None:
    actual = measure()
    assert len(actual) == len(MESHES) * len(COUNTS)
    for program in actual:
        print(
            f"{program.mesh:24} {program.count:4} tokens: {program.temporary} bytes "
            f"of temporary memory, "
            f"{program.held} of the cache, {program.new} new"
        )
        assert program.collectives == 0
        assert program.alias >= program.held  # arrays are padded to tiles
        assert program.alias < 1.01 * program.held
        assert program.temporary <= 2**17
