"""How many devices a fresh process gets; `cpu_mesh` itself is tested with the other meshes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.testing.runs import SRC

CALLS = {
    "cpu_mesh('dp:2')": {"": 8, "4": 8, "16": 16},
    "virtual_devices(6)": {"": 6, "4": 6, "16": 16},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("flag", ["16", "", "4"])
@pytest.mark.full
@pytest.mark.ci
def test_larger_number_in_xla_flags_is_kept(call: str, flag: str) -> None:
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in {"XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    }
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SRC)}
    if flag:
        # XLA obeys the last one.
        env["XLA_FLAGS"] = (
            f"--xla_force_host_platform_device_count=3 "
            f"--xla_force_host_platform_device_count={flag}"
        )
    code = (
        f"from shardwright.testing import cpu_mesh, virtual_devices; {call}; import jax; "
        f"print(jax.device_count())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout == f"{CALLS[call][flag]}\n", done.stderr
