"""`import shardwright`, compared with `import jax`, each in a new process without a backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import shardwright
from benchmarks import timing
from benchmarks.timing import Row, Target

TARGET = Target(at_most=1.25)
OURS, JAX = "import shardwright", "import jax"
CLOCK = "import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
# jax_num_cpu_devices can be set only while no backend runs. So setting it shows, without private
# names, whether a backend runs.
PROBE = (
    "import shardwright, jax; jax.config.update('jax_num_cpu_devices', 3); assert "
    "len(jax.devices()) == 3"
)


def run(*, peers: bool, repeats: int) -> list[Row]:
    """Measure the statements inside new processes, in turn.

    For each statement, a first process that is not timed fills the bytecode caches.

    Raises:
      AssertionError: the import starts a backend.
    """
    del peers
    probe = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert probe.returncode == 0, f"import shardwright starts a backend: {probe.stderr}"
    times: dict[str, list[float]] = {JAX: [], OURS: []}
    for repeat in range(-1, repeats):
        for statement in (JAX, OURS) if repeat % 2 else (OURS, JAX):
            taken = _seconds(statement)
            if repeat >= 0:
                times[statement].append(taken)
    return [
        timing.ratio(
            times,
            OURS,
            against=JAX,
            subject="import",
            case="fresh processes, no backend started",
            target=TARGET,
        )
    ]


def _seconds(statement: str) -> float:
    command = [sys.executable, "-c", CLOCK.format(statement=statement)]
    return float(
        subprocess.run(
            command, env=_environment(), capture_output=True, text=True, check=True
        ).stdout
    )


def _environment() -> dict[str, str]:
    """Return an environment with this package, CPU devices and no XLA flags."""
    assert shardwright.__file__ is not None
    source = str(Path(shardwright.__file__).parents[1])
    paths = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    # Let Python write bytecode. Otherwise every import would compile this package again, while an
    # installed jax may have bytecode.
    dropped = {"XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "PYTHONDONTWRITEBYTECODE"}
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return {**kept, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
