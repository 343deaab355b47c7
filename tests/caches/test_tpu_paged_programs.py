"""On eight TPUs a decode step over bfloat16 pages writes in place and copies no pool."""

from __future__ import annotations

from tests import tpu_compile
from tests.caches.tpu_paged_programs import COUNTS, MESHES, measure

pytestmark = tpu_compile.MARKS


def test_steps() -> None:
    found = measure()
    assert len(found) == len(MESHES) * len(COUNTS)
    for one in found:
        print(
            f"{one.mesh:26} {one.count:4} tokens: {one.temporary} bytes of temporary memory, "
            f"{one.held} of the cache"
        )
        assert one.copies == 0
        assert one.alias >= one.held  # arrays are padded to tiles
        assert one.alias < 1.01 * one.held
        assert one.temporary < one.held / 2  # a pool of keys, or of values
