"""`python -m benchmarks.moving`: the peak memory of moves, of `device_put`, and of restoring.

Each case runs in a fresh process with 8 CPU devices. The process first compiles with one leaf, and
then resets its peak. The numbers are growths of the resident set. So they count all devices, and
the memory of the compiler. Linux only.
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
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 2**20
PIECE = 64 * MIB
# Leaves and MiB of a leaf: trees of 512 MiB and 2 GiB, and one leaf of 1 GiB.
TREES = {"512 MiB, 16 leaves": (16, 32), "2 GiB, 16 leaves": (16, 128), "1 GiB, 1 leaf": (1, 1024)}
DONATED, KEPT, DEVICE_PUT = "reshard, donated", "reshard", "device_put"
SAVE = "save"
# The target of a restoration is another strategy, the same strategy, or a copy on two devices.
RESTORE, RESTORE_SAME, RESTORE_COPIES = "restore", "restore, as saved", "restore, two copies"
RESTORES = (RESTORE, RESTORE_SAME, RESTORE_COPIES)
WAYS = (DONATED, KEPT, DEVICE_PUT, *RESTORES)
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
      planned: The plan's upper bound of the growth; 0 without a plan.
      allowed: Bytes of the target tree and three pieces; with donation, of the largest leaf and
        three pieces. `device_put` is not checked.
      seconds: Time of the move.
    """

    growth: int
    planned: int
    allowed: int
    seconds: float


def measure(tree: str, way: str) -> Peak:
    """Measure one case in a fresh process."""
    if way not in RESTORES:
        return Peak(**json.loads(_run(tree, way)))
    with tempfile.TemporaryDirectory() as folder:
        _run(tree, SAVE, folder)
        return Peak(**json.loads(_run(tree, way, folder)))


def _run(*case: str) -> str:
    """Run one case in a fresh process, and return the last line that it prints."""
    source = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.moving", "--case", *case],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": f"{source / 'src'}:{source}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.splitlines()[-1]


@dataclasses.dataclass(frozen=True, slots=True)
class _Case:
    """A tree of stacked layers. The move changes the dim that is sharded."""

    tree: str

    @property
    def shape(self) -> tuple[int, ...]:
        return (TREES[self.tree][1] // 4, 1024, 1024)

    @property
    def axes(self) -> tuple[Any, ...]:
        import shardwright as sw

        return (sw.LAYERS, sw.EMBED, sw.MLP_INTERMEDIATE)

    @property
    def train(self) -> Any:
        return _manager("fsdp", "fsdp:8")

    @property
    def serve(self) -> Any:
        return _manager("serve_tp", "tp:8")

    def leaf(self, number: int) -> Any:
        import numpy as np

        numbers = np.random.default_rng(number).random((1, *self.shape[1:]), np.float32)
        return self.train.reshard(np.broadcast_to(numbers, self.shape), self.axes)

    def leaves(self) -> list[Any]:
        return [self.leaf(number) for number in range(TREES[self.tree][0])]


def _manager(preset: str, mesh: str) -> Any:
    import shardwright as sw
    from shardwright.testing import cpu_mesh

    return sw.PartitionManager(sw.Strategy.preset(preset), mesh=cpu_mesh(mesh))


def _move(tree: str, way: str) -> Peak:
    """Measure a move in this process."""
    import jax

    case = _Case(tree)
    serve, axes = case.serve, case.axes

    def move(values: Any) -> Any:
        if way == DEVICE_PUT:
            return jax.device_put(values, serve.shardings(values, axes))
        return serve.reshard(values, axes, piece=PIECE, donate=way == DONATED)

    jax.block_until_ready(move([case.leaf(0)]))
    values = case.leaves()
    plan = serve.plan_reshard(values, axes, piece=PIECE, donate=way == DONATED)
    growth, seconds = _growth(lambda: move(values))
    largest = max(each.route.target_bytes for each in plan.leaves)
    allowed = 3 * PIECE + (largest if way == DONATED else plan.target_bytes)
    planned = 0 if way == DEVICE_PUT else plan.peak_growth
    return Peak(growth=growth, planned=planned, allowed=allowed, seconds=seconds)


def _restore(tree: str, way: str, folder: str) -> Peak:
    """Measure the restoration of what was saved under `fsdp`."""
    import jax

    from shardwright import checkpoint

    case = _Case(tree)
    leaf = jax.ShapeDtypeStruct(case.shape, "float32")
    targets = {
        RESTORE: case.serve,
        RESTORE_SAME: case.train,
        RESTORE_COPIES: _manager("ddp", "dp:2"),
    }
    sharding = targets[way].shardings(leaf, case.axes)
    small = {"x": jax.device_put(jax.numpy.ones((8, 1024, 1024)), sharding)}
    with tempfile.TemporaryDirectory() as warm:
        checkpoint.save(warm, small, step=1)
        checkpoint.restore(warm, small)
    target = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)] * TREES[tree][0]
    growth, seconds = _growth(lambda: checkpoint.restore(folder, target))
    copies = 2 if way == RESTORE_COPIES else 1
    size = sum(x.dtype.itemsize * x.size for x in target) * copies
    return Peak(growth=growth, planned=0, allowed=size + 3 * PIECE, seconds=seconds)


def _growth(call: Callable[[], Any]) -> tuple[int, float]:
    """Return by how many bytes a call grows the resident set at its peak, and its seconds."""
    import jax

    before = _reset_peak()
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    seconds = time.perf_counter() - start
    growth = _peak() - before
    del result
    return growth, seconds


def _run_here(tree: str, way: str, folder: str = "") -> str:
    """Run one case in this process, and return its peak as JSON."""
    from shardwright import checkpoint

    if way == SAVE:
        checkpoint.save(folder, _Case(tree).leaves(), step=1)
        return "saved"
    peak = _restore(tree, way, folder) if way in RESTORES else _move(tree, way)
    return json.dumps(dataclasses.asdict(peak))


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
    """Print the table. Return 1 if a move or a restoration takes more than allowed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moving", description=__doc__)
    parser.add_argument("--case", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.case:
        print(_run_here(*given.case))
        return 0
    failed = False
    print("| tree | way | peak growth | planned | allowed | seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for tree in TREES:
        for way in WAYS:
            peak = measure(tree, way)
            planned = f"{peak.planned / MIB:,.0f} MiB" if peak.planned else "-"
            growth, allowed = (f"{x / MIB:,.0f} MiB" for x in (peak.growth, peak.allowed))
            row = (tree, way, growth, planned, allowed, f"{peak.seconds:.1f}")
            print("|", " | ".join(row), "|", flush=True)
            failed |= way != DEVICE_PUT and peak.growth > peak.allowed
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
