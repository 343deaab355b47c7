"""Start the processes of a test on this machine, and collect what they print."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Exit code and output of one process, and when it ended, as `time.time` has it."""

    code: int
    text: str
    at: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(module: str, arguments: Sequence[object], output: Path) -> subprocess.Popen[str]:
    """Start `python -m module arguments` with the repository on its path, on CPU devices."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "JAX_PLATFORMS": "cpu"}
    # A number of devices there would win over that of the workers.
    env["XLA_FLAGS"] = re.sub(r"--xla_force_host\S+", "", os.environ.get("XLA_FLAGS", ""))
    with output.open("w") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT,
            env=env,
            stdout=stream,
            stderr=subprocess.STDOUT,
            text=True,
        )


def run(
    module: str,
    arguments: Sequence[object],
    folder: Path,
    *,
    count: int = 2,
    wall_s: float = 300,
    together: bool = True,
) -> list[Ended]:
    """Run `count` processes with `PORT RANK *arguments` until all have ended.

    Args:
      module: What each of them runs.
      arguments: Further arguments.
      folder: Where their outputs go.
      count: Number of processes.
      wall_s: Seconds after which the rest is ended.
      together: End the rest as soon as one fails, because they would wait in a collective.
    """
    port = free_port()
    outputs = [folder / f"{module}-{rank}.txt" for rank in range(count)]
    begun = time.monotonic()
    running = [
        start(module, [port, rank, *arguments], output) for rank, output in enumerate(outputs)
    ]
    ended_at = [0.0] * count
    while time.monotonic() < begun + wall_s:
        for rank, process in enumerate(running):
            if process.poll() is not None and not ended_at[rank]:
                ended_at[rank] = time.time()
        if all(ended_at):
            break
        if together and any(process.poll() not in (None, 0) for process in running):
            time.sleep(1)  # the others may have something to say too
            break
        time.sleep(0.05)
    for rank, process in enumerate(running):
        if process.poll() is None:
            process.kill()
        process.wait()
        ended_at[rank] = ended_at[rank] or time.time()
    return [
        Ended(code=process.returncode, text=output.read_text(), at=at)
        for process, output, at in zip(running, outputs, ended_at, strict=True)
    ]
