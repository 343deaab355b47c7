"""On eight TPUs, `serve_long_context` keeps a long cache in its shards."""

from __future__ import annotations

from tests import tpu_compile
from tests.caches.tpu_long_context import (
    CAPACITIES,
    CHUNK,
    SIZES,
    SLOTS,
    Compiled,
    measure,
)

pytestmark = tpu_compile.MARKS


def test_long_context() -> None:
    actual = {(program.what, program.dim, program.capacity): program for program in measure()}
    for program in actual.values():
        print(
            f"{program.what:8} heads of {program.dim:3}, {program.capacity:6} rows: "
            f"{program.sent} bytes sent, {program.temporary} of temporary memory, "
            f"{program.held} of the cache"
        )
    for dim in SIZES:
        insert, chunk, decode = (
            [actual[what, dim, capacity] for capacity in CAPACITIES]
            for what in ("insert", "chunk", "decode")
        )
        assert all(each.sent == 0 for each in insert)
        assert all(each.temporary <= 2 * each.held for each in insert)
        assert len({each.sent for each in chunk}) == len({each.sent for each in decode}) == 1
        # Per token: a chunk has more tokens than a decode step has slots. Its queries, keys and
        # values are sharded, and those of a decode step are not.
        assert 0 < chunk[0].sent / CHUNK <= 1.25 * decode[0].sent / SLOTS
    assert chunk_of(actual, 32) <= 4 < chunk_of(actual, 128)


def chunk_of(actual: dict[tuple[str, int, int], Compiled], dim: int) -> float:
    """Return how many decode steps send as much as a chunk."""
    chunk, decode = (actual[what, dim, CAPACITIES[-1]] for what in ("chunk", "decode"))
    return chunk.sent / decode.sent
