"""On TPUs decode reads a cache in place: no copy in another order or dtype."""

from __future__ import annotations

from tests import tpu_compile
from tests.attention.tpu_decode import CAPACITIES, KINDS, SHAPES, measure

pytestmark = tpu_compile.MARKS


def test_temporary_memory_does_not_grow_with_the_cache() -> None:
    actual = measure()
    assert len(actual) == len(KINDS) * len(SHAPES) * len(CAPACITIES)
    for program in actual:
        what = (
            f"{program.kind}, {program.kv_heads} kv heads of {program.head_dim}, "
            f"{program.capacity} rows"
        )
        print(
            f"{what:44} append {program.append:8} attend {program.attend:8} bytes of temporary "
            f"memory, {program.held} of the cache"
        )
        assert program.append <= 2**18, what
        assert program.attend <= 2**20, what
    for short, long in zip(actual[::2], actual[1::2], strict=True):
        assert long.held > 7 * short.held
        assert long.attend <= short.attend + 2**16
