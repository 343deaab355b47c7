"""The planned range of memory holds the peak of the compiler for TPUs, which is recorded."""

from __future__ import annotations

import json
from typing import Final

import pytest

from tests.plan import tpu_memory
from tests.plan.tpu_memory import CASES, PROGRAMS, RECORD, Measured
from tests.tpu_compile import MARKS, measure

PEAKS: Final[dict[str, int]] = json.loads(RECORD.read_text(encoding="utf-8"))["peaks"]
# Indices of lookups, sums over rows, semaphores and tables of results. Plans do not count them.
SMALL: Final = 2**19
WIDEST: Final = 1.3
# The plan holds the parts of all gradients until they are used.
WIDE: Final = {"train, remat, unrolled, fsdp_tp", "train, windows, unrolled, fsdp"}


def check(measured: Measured) -> None:
    """The upper end comes first: a program that does not fit must not seem to fit."""
    assert measured.peak <= measured.high + SMALL, measured
    assert measured.low <= measured.peak, measured


@pytest.mark.full(
    but=[
        "train, remat, fsdp_tp",
        "forward, fsdp_tp",
        "two_matmuls_of_one_input",
        "vocabulary_of_32000",
        "microbatches",
    ]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_range_holds_the_recorded_peak(name: str) -> None:
    memory = tpu_memory.plan(name).memory
    check(Measured(name=name, low=memory.low, high=memory.high, peak=PEAKS[name]))


@pytest.mark.full(but=["forward, unrolled, fsdp"])
@pytest.mark.parametrize("name", [each.key for each in CASES if each.key not in WIDE])
@pytest.mark.ci
def test_range_of_a_decoder_is_narrow(name: str) -> None:
    memory = tpu_memory.plan(name).memory
    assert memory.high <= WIDEST * memory.low


def test_every_program_has_a_recorded_peak() -> None:
    assert PEAKS.keys() == PROGRAMS.keys()


class TestTPU:
    pytestmark = MARKS

    def test_recorded_peaks_are_those_of_the_compiler(self) -> None:
        measured = measure("tests.plan.tpu_memory", Measured)
        assert [each.name for each in measured] == list(PROGRAMS)
        for each in measured:
            assert each.peak == pytest.approx(PEAKS[each.name], rel=0.01), each
            check(each)
