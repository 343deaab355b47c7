"""On TPUs the dispatch of slots is two all-to-alls, and that of rows two ragged ones."""

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
        program = by_name[f"slots {name}"]
        sums = {} if name == "forward" else {"all_reduce": 2}
        assert program.matmul == "ragged"
        assert program.counts == {"all_to_all": all_to_alls, **sums}, name
        assert program.sent["all_to_all"] == all_to_alls * program.slot_bytes, name
        ragged = by_name[f"ragged {name}"]
        assert ragged.ragged == all_to_alls, name
        assert program.ragged == 0
        # XLA gathers the numbers of rows, an int32 per device and expert, as an all-reduce.
        sums = {"all_reduce": 1 + sums.get("all_reduce", 0)}
        assert ragged.counts == {"ragged_all_to_all": all_to_alls, **sums}, name
        if name == "forward":
            assert ragged.sent["all_reduce"] == 4 * 16 * 4
