"""On eight TPUs, `serve_long_context` keeps a long cache in its shards."""

from __future__ import annotations

from tests import tpu_compile
from tests.caches.tpu_long_context import CAPACITIES, CHUNK, SLOTS, measure

pytestmark = tpu_compile.MARKS


def test_long_context() -> None:
    actual = {(program.what, program.capacity): program for program in measure()}
    for program in actual.values():
        print(
            f"{program.what:8} {program.capacity:6} rows: {program.sent} bytes sent, "
            f"{program.temporary} of temporary memory, {program.held} of the cache"
        )
    for capacity in CAPACITIES:
        insert, chunk, decode = (actual[what, capacity] for what in ("insert", "chunk", "decode"))
        assert insert.sent == 0
        assert insert.temporary <= 2 * insert.held
        # Per token: a chunk has more tokens than a decode step has slots.
        assert 0 < chunk.sent / CHUNK <= 1.25 * decode.sent / SLOTS
    for what in ("insert", "chunk", "decode"):
        assert len({actual[what, capacity].sent for capacity in CAPACITIES}) == 1, what
