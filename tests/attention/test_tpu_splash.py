"""On eight TPUs splash compiles for every option, and sends only shared gradients."""

from __future__ import annotations

import pytest

from tests import tpu_compile
from tests.attention.tpu_splash import PROGRAMS, Compiled, measure

pytestmark = tpu_compile.MARKS


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    actual = measure()
    for program in actual.values():
        print(
            f"{program.name:24} {program.temporary / 1e6:8.1f} MB of temporary memory per device, "
            f"forward and backward; {program.counts}"
        )
    return actual


def test_three_kernels(compiled: dict[str, Compiled]) -> None:
    own = {
        name: program.kernels
        for name, program in compiled.items()
        if PROGRAMS[name].implementation == "splash"
    }
    assert own == dict.fromkeys(own, 3)  # forward, queries, keys


def test_shared_gradients_sum_in_float32(
    compiled: dict[str, Compiled],
) -> None:
    sums = {name: compiled[name] for name in ("window, capped, sinks", "one kv head")}
    assert {name for name, program in compiled.items() if program.counts} == set(sums)
    assert all(size.counts == {"all_reduce": 1} for size in sums.values())
    program = PROGRAMS["one kv head"]  # over dp:2,tp:4
    assert sums["one kv head"].sent == {
        "all_reduce": 4
        * program.batch
        // 2
        * program.kv_length
        * (program.head_dim + program.v_dim)
    }


def test_memory_is_below_that_of_blocks(
    compiled: dict[str, Compiled],
) -> None:
    assert compiled["plain"].temporary * 25 < compiled["plain by sdpa"].temporary
    assert compiled["plain"].temporary < compiled["plain by blockwise"].temporary
