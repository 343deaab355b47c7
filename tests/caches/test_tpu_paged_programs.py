"""On eight TPUs a decode step over bfloat16 pages writes in place and copies no pool."""

from __future__ import annotations

from tests import tpu_compile
from tests.caches.tpu_paged_programs import COUNTS, MESHES, measure

pytestmark = tpu_compile.MARKS


def test_steps() -> None:
    actual = measure()
    assert len(actual) == len(MESHES) * len(COUNTS)
    for program in actual:
        print(
            f"{program.mesh:26} {program.count:4} tokens: {program.temporary} bytes "
            f"of temporary memory, "
            f"{program.held} of the cache"
        )
        assert program.copies == 0
        assert program.alias >= program.held  # arrays are padded to tiles
        assert program.alias < 1.01 * program.held
        assert program.temporary < program.held / 2  # a pool of keys, or of values
