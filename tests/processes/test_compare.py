"""Messages about values that differ between processes."""

from __future__ import annotations

from shardwright.processes.compare import Fact, disagreement


def test_first_difference_stands_for_its_kind() -> None:
    """Also where one process does not have the value, such as a device of a larger mesh."""
    devices = {f"device at dp={at}": Fact(f"device {at}", kind="device") for at in range(2)}
    error = disagreement([(1, devices), (0, {"mesh axes": Fact("dp:2")})], "pm", "build one mesh")
    paths = [problem.path for problem in error.problems]
    assert paths == ["mesh axes", "device at dp=0 and 1 more"]
