"""On TPUs decode reads a cache in place: no copy in another order or dtype."""

from __future__ import annotations

from tests import tpu_compile
from tests.attention.tpu_decode import CAPACITIES, KINDS, SHAPES, measure

pytestmark = tpu_compile.MARKS


def test_temporary_memory_does_not_grow_with_the_cache() -> None:
    found = measure()
    assert len(found) == len(KINDS) * len(SHAPES) * len(CAPACITIES)
    for one in found:
        what = f"{one.kind}, {one.kv_heads} kv heads of {one.head_dim}, {one.capacity} rows"
        print(
            f"{what:44} append {one.append:8} attend {one.attend:8} bytes of temporary "
            f"memory, {one.held} of the cache"
        )
        assert one.append <= 2**18, what
        assert one.attend <= 2**20, what
    for short, long in zip(found[::2], found[1::2], strict=True):
        assert long.held > 7 * short.held
        assert long.attend <= short.attend + 2**16
