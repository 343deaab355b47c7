"""The conformance tests as a user runs them, in a subclass.

They pass, skip with a reason, and fail if the implementation is wrong.
"""

from __future__ import annotations

import re

import pytest

from shardwright.testing import AttentionConformance
from shardwright.testing.attention_cases import AXIS_TYPES, CASES, DTYPES, MESHES
from tests.testing.runs import run_pytest, said

MINE = """
import functools

from shardwright.attention import Implementation, Result, extend, register
from shardwright.testing import AttentionConformance

def supports(call):
    return (*extend.lengths_are_whole(call), *extend.no_weights(call))

def never(call):
    return ("never",)

def run(operands, call, factor=1.0):
    def kernel(shard):
        state = extend.forward(shard, call.recipe, state=extend.start(shard.q, shard.v))
        o, lse = extend.finish(state, sinks=shard.sinks)
        return Result(o=o.astype(call.dtype) * factor, lse=lse if call.return_lse else None)

    return extend.run_on_shards(kernel, operands, call)

wrong = functools.partial(run, factor=1.01)
register(Implementation(name="right", supports=supports, run=run))
register(Implementation(name="wrong", supports=supports, run=wrong))
register(Implementation(name="tired", supports=never, run=run))

class Few(AttentionConformance):
    @classmethod
    def cells(cls):
        return super().cells()[:cls.count]

class TestRight(Few):
    implementation, count = "right", 6

class TestWrong(Few):
    implementation, count = "wrong", 1

class TestTired(Few):
    implementation, count = "tired", 6

class TestOtherWords(Few):
    implementation, count = "right", 6
    refuses = staticmethod(lambda call: False)
"""


@pytest.mark.full
def test_outcomes_of_a_subclass(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_pytest(pytester, monkeypatch, {"test_mine.py": MINE}, "-rA", "--tb=line")
    text = said(done)
    outcomes = {
        word: set(re.findall(rf"{word} .*?::(Test\w+)::", text)) for word in ("PASSED", "FAILED")
    }
    assert outcomes == {
        "PASSED": {"TestRight", "TestWrong", "TestOtherWords"},
        "FAILED": {"TestWrong", "TestTired", "TestOtherWords"},
    }
    assert (
        "refused: the length of the queries is sharded over sp; the length of the keys is "
        "sharded over sp"
    ) in text
    assert re.search(r"wrong-full-float32-dp-auto: o: .* is more than 2e-06", text)
    assert "tired refuses every cell" in text
    assert re.search(r"right-\S+.*: \['the length of the queries is sharded over sp'", text)


def test_default_cells_cover_every_parameter() -> None:
    few = AttentionConformance.cells()
    assert {cell.case for cell in few} == set(CASES)
    assert {cell.mesh for cell in few} == set(MESHES)
    assert {(cell.dtype, cell.axis_types) for cell in few} == {
        (dtype, kind) for dtype in DTYPES for kind in AXIS_TYPES
    }
    assert len(set(map(str, few))) == len(few) == 2 * len(CASES)


def test_all_cells_are_the_whole_table() -> None:
    class Every(AttentionConformance):
        every = True

    cells = Every.cells()
    assert (
        len(cells)
        == len(set(map(str, cells)))
        == sum(2 if case.mode == "train" else 1 for case in CASES) * len(MESHES) * 4
    )
    assert {cell.mode for cell in cells} == {"train", "prefill", "decode"}
