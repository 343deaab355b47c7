"""`python -m benchmarks.moving`: the peak memory of moves on 8 CPU devices, and of `device_put`.

Each case runs in a fresh process. The process first compiles with one leaf, and then resets its
peak. The numbers are growths of the resident set. So they count all devices, and the memory of the
compiler. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MIB = 2**20
PIECE = 64 * MIB
# Leaves and MiB of a leaf: trees of 512 MiB and 2 GiB, and one leaf of 1 GiB.
TREES = {"512 MiB, 16 leaves": (16, 32), "2 GiB, 16 leaves": (16, 128), "1 GiB, 1 leaf": (1, 1024)}
DONATED, KEPT, DEVICE_PUT = "reshard, donated", "reshard", "device_put"
WAYS = (DONATED, KEPT, DEVICE_PUT)
# Make the C library return freed memory at once. The resident set is then the memory in use.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(MIB),
    "MALLOC_TRIM_THRESHOLD_": str(MIB),
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "JAX_PLATFORMS": "cpu",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The measured peak of a move.

    Attributes:
      growth: Bytes of the resident set at the peak, beyond those before the move.
      planned: The plan's upper bound of the growth; 0 for `device_put`, which has none.
      allowed: Target and three pieces; with donation, the largest leaf and three pieces.
      seconds: Time of the move.
    """

    growth: int
    planned: int
    allowed: int
    seconds: float


def measure(tree: str, way: str) -> Peak:
    """Measure one case in a fresh process."""
    source = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.moving", "--case", tree, way],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": f"{source / 'src'}:{source}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return Peak(**json.loads(done.stdout.splitlines()[-1]))


def _measure_here(tree: str, way: str) -> Peak:
    import jax
    import numpy as np

    import shardwright as sw
    from shardwright.testing import cpu_mesh

    leaves, size = TREES[tree]
    train = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=cpu_mesh("fsdp:8"))
    serve = sw.PartitionManager(sw.Strategy.preset("serve_tp"), mesh=cpu_mesh("tp:8"))
    # A stack of layers, sharded over one dimension before and over another one after.
    axes = (sw.LAYERS, sw.EMBED, sw.MLP_INTERMEDIATE)
    shape = (size // 4, 1024, 1024)

    def leaf(number: int) -> Any:
        numbers = np.random.default_rng(number).random((1, *shape[1:]), np.float32)
        return train.reshard(np.broadcast_to(numbers, shape), axes)

    def move(values: Any) -> Any:
        if way == DEVICE_PUT:
            moved = jax.device_put(values, serve.shardings(values, axes))
        else:
            moved = serve.reshard(values, axes, piece=PIECE, donate=way == DONATED)
        return jax.block_until_ready(moved)

    move([leaf(0)])
    values = [leaf(number) for number in range(leaves)]
    plan = serve.plan_reshard(values, axes, piece=PIECE, donate=way == DONATED)
    before = _reset_peak()
    start = time.perf_counter()
    moved = move(values)
    seconds = time.perf_counter() - start
    growth = _peak() - before
    del moved
    largest = max(each.route.target_bytes for each in plan.leaves)
    allowed = 3 * PIECE + (largest if way == DONATED else plan.target_bytes)
    planned = 0 if way == DEVICE_PUT else plan.peak_growth
    return Peak(growth=growth, planned=planned, allowed=allowed, seconds=seconds)


def _reset_peak() -> int:
    """Reset the peak of this process, and return its resident bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def _peak() -> int:
    """Return the most resident bytes since the reset.

    `getrusage` cannot be used: its number may be that of the parent process, if the parent was
    larger.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main(argv: list[str] | None = None) -> int:
    """Print the table. Return 1 if a move takes more than its plan says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moving", description=__doc__)
    parser.add_argument("--case", nargs=2, metavar=("TREE", "WAY"), help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.case:
        print(json.dumps(dataclasses.asdict(_measure_here(*given.case))))
        return 0
    failed = False
    print("| tree | way | peak growth | planned | seconds |\n| --- | --- | --- | --- | --- |")
    for tree in TREES:
        for way in WAYS:
            peak = measure(tree, way)
            planned = f"{peak.planned / MIB:,.0f} MiB" if peak.planned else "-"
            growth = f"{peak.growth / MIB:,.0f} MiB"
            print(f"| {tree} | {way} | {growth} | {planned} | {peak.seconds:.1f} |", flush=True)
            failed |= way != DEVICE_PUT and peak.growth > peak.allowed
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
