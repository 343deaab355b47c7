"""On eight TPUs, FSDP gathers quantized kernels as fp8: half the bytes."""

from __future__ import annotations

from tests import tpu_compile
from tests.layers.tpu_fp8 import INPUTS, OUTPUTS, Gathered, measure

pytestmark = tpu_compile.MARKS


def test_gathers_of_quantized_kernels() -> None:
    size = INPUTS * OUTPUTS
    values = [f"f8e4m3fn[{INPUTS},{OUTPUTS}]"] * 2
    assert measure() == [
        Gathered(recipe="delayed", floats=values, bytes=2 * size),
        Gathered(recipe="current", floats=values, bytes=2 * size),
        Gathered(recipe="mxfp8", floats=values, bytes=2 * size + 2 * size // 32),
    ]
