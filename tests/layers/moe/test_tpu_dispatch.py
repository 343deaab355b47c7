"""On TPUs the dispatch is two all-to-alls, and four with all gradients."""

from __future__ import annotations

from tests import tpu_compile
from tests.layers.moe.tpu_dispatch import Program

pytestmark = tpu_compile.MARKS


def test_dispatch_on_tpus() -> None:
    programs = tpu_compile.measure("tests.layers.moe.tpu_dispatch", Program)
    by_name = {program.name: program for program in programs}
    for program in programs:
        print(program)
    for name, all_to_alls in {"forward": 2, "gradient": 4, "gradient of parameters": 3}.items():
        program = by_name[name]
        sums = {} if name == "forward" else {"all_reduce": 2}
        assert program.product == "ragged"
        assert program.counts == {"all_to_all": all_to_alls, **sums}, name
        assert program.sent["all_to_all"] == all_to_alls * program.slot_bytes, name
