"""On TPUs too, a scan over layers keeps what an unrolled stack keeps."""

from __future__ import annotations

from tests import tpu_compile
from tests.layers import tpu_scan

pytestmark = tpu_compile.MARKS
MB = 10**6
RESIDUAL = tpu_scan.LENGTH * tpu_scan.EMBED * 2  # bytes on each device, in bfloat16


def test_memory_of_a_scan_with_remat() -> None:
    programs = tpu_scan.measure()
    for program in programs:
        print(f"{program}: {program.temporary / MB:.1f} MB per device")
    scan, unrolled, layer = programs
    # With remat each layer keeps its input.
    assert scan.temporary <= 1.1 * (layer.temporary + tpu_scan.LAYERS * RESIDUAL)
    assert scan.temporary <= 1.2 * unrolled.temporary
