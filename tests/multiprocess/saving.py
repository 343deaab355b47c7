"""One of some processes that save a state again and again, until one of them is killed.

`python -m tests.multiprocess.saving PORT RANK COUNT FOLDER KILLED AFTER` restores the newest
checkpoint, checks it, and saves the following steps. AFTER seconds after the first of them, the
processes in KILLED, such as `01`, end without a chance to clean up.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright import checkpoint
from shardwright.checkpoint import chunks
from tests.multiprocess.divergent import connect

SHAPES = {"w": (512, 256), "norm": (64,)}
SPECS = {"w": P("fsdp"), "norm": P()}
KEEP = 3


def values_of(step: int) -> dict[str, Any]:
    """Return what the checkpoint of a step holds, as NumPy arrays and a number."""
    random = np.random.default_rng(step)
    arrays = {name: random.normal(size=shape) for name, shape in SHAPES.items()}
    return {"step": step, **{name: x.astype(np.float32) for name, x in arrays.items()}}


def placed(values: dict[str, Any], mesh: jax.sharding.Mesh) -> dict[str, Any]:
    def place(name: str, x: Any) -> Any:
        sharding = NamedSharding(mesh, SPECS[name])
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return {name: place(name, x) if name in SPECS else x for name, x in values.items()}


def check(restored: dict[str, Any], step: int) -> None:
    """Check that the shards of this process are those that were saved, bit for bit."""
    assert restored["step"] == step
    for name, x in values_of(step).items():
        if name in SPECS:
            for shard in restored[name].addressable_shards:
                assert np.asarray(shard.data).tobytes() == x[shard.index].tobytes(), name


def main(port: int, rank: int, count: int, folder: str, killed: str, after: float) -> None:
    connect(port, rank, count)
    chunks.PIECE = 2**17  # `w` is read in four pieces
    mesh = sw.create_mesh(f"fsdp:{4 * count}")
    step = 0
    if checkpoint.steps(folder):
        step = checkpoint.steps(folder)[-1]
        check(checkpoint.restore(folder, placed(values_of(0), mesh)), step)
    print(f"restored {step}", flush=True)
    first = step + 1
    while True:
        step += 1
        state = placed(values_of(step), mesh)
        checkpoint.save(folder, state, step=step, keep=KEEP, wait=step == first or step % 2 == 0)
        if step == first and str(rank) in killed:
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4], sys.argv[5], float(sys.argv[6]))
