"""On eight TPUs, sequence parallelism turns each all-reduce into a gather and a reduce-scatter."""

from __future__ import annotations

from tests import tpu_compile
from tests.layers.tpu_blocks import Compiled, measure

pytestmark = tpu_compile.MARKS


def test_collectives_of_a_layer_over_tp() -> None:
    assert measure() == [
        Compiled(preset="fsdp_tp", all_gather=0, reduce_scatter=0, all_reduce=2),
        Compiled(preset="fsdp_tp_sp", all_gather=2, reduce_scatter=2, all_reduce=0),
    ]
