"""On eight TPUs an append of bfloat16 sends nothing, copies nothing and writes in place."""

from __future__ import annotations

from tests import tpu_compile
from tests.caches.tpu_programs import COUNTS, MESHES, measure

pytestmark = tpu_compile.MARKS


def test_appends() -> None:
    found = measure()
    assert len(found) == len(MESHES) * len(COUNTS)
    for one in found:
        print(
            f"{one.mesh:24} {one.count:4} tokens: {one.temporary} bytes of temporary memory, "
            f"{one.held} of the cache, {one.new} new"
        )
        assert one.collectives == 0
        assert one.alias >= one.held  # arrays are padded to tiles
        assert one.alias < 1.01 * one.held
        assert one.temporary <= 2**17
