"""What offloading saves of the device memory of a step, by a TPU compile, and what a plan says."""

from __future__ import annotations

import pytest

from tests.manager.tpu_offload import PROGRAMS, Step
from tests.tpu_compile import MARKS, measure

pytestmark = MARKS
# The plan does not count what is in flight between host and device: 90 MiB of 12,197. The stack of
# float32 updates of `updates` is copied by the compiler, and the plan misses that.
SLACK = 1.01
WIDEST = 1.2
# No rule is known for when XLA fetches state that is updated whole.
UNSURE = {"whole", "layers", "updates", "params"}


@pytest.fixture(scope="module")
def found() -> dict[str, Step]:
    return {step.name: step for step in measure("tests.manager.tpu_offload", Step)}


def test_offloading_lowers_the_peak_by_the_state(found: dict[str, Step]) -> None:
    """Of 26,300 MiB, whole leaves leave 17,140, one layer at a time 12,200."""
    device = found["device"]
    assert device.host == 0
    for name in ("whole", "layers"):
        # The step of the optimizer stays on the device.
        assert found[name].host >= device.state - 4
        assert found[name].state == device.state
    saved = {name: (device.peak - found[name].peak) / device.state for name in ("whole", "layers")}
    assert saved["layers"] >= 0.8
    assert saved["whole"] < saved["layers"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_plan_holds_the_compiled_peak(name: str, found: dict[str, Step]) -> None:
    step = found[name]
    assert step.complete
    if name == "params":
        assert step.host_temporaries, (
            "its gradients are on the host: no field has the device's peak"
        )
    elif name != "updates":
        assert step.low <= SLACK * step.peak
        assert step.peak <= SLACK * step.high
    assert step.planned_host - step.host in range(4213 * 2**20 + 1)
    # The gradient of the embedding is summed whole.
    kinds = ("all_gather", "all_to_all")
    for kind in kinds:
        assert step.sent.get(kind, 0) == pytest.approx(step.planned.get(kind, 0), rel=0.001)


@pytest.mark.parametrize("name", sorted({*PROGRAMS} - UNSURE))
def test_range_of_host_programs_is_narrow(name: str, found: dict[str, Step]) -> None:
    assert found[name].high <= WIDEST * found[name].low
