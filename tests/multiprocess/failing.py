"""One of several processes of which the last one fails on purpose, under a watchdog.

`python -m tests.multiprocess.failing PORT RANK COUNT HOW SECONDS` prints the time at which the last
process fails, and what the others print afterwards.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import jax
import numpy as np

import shardwright as sw
from tests.multiprocess.divergent import RULES, connect


def fail(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ValueError("the last process raises")
    if how == "sleep":
        time.sleep(100)
    if how == "end":
        sys.exit()
    if how == "part":  # the others wait in `shard`, which is not a collective
        time.sleep(100)


def main(port: int, rank: int, count: int, how: str, seconds: float) -> None:
    # These are JAX's defaults. With 10 seconds, JAX itself aborts before a watchdog of 8 seconds.
    connect(port, rank, count, heartbeat_timeout_seconds=100, shutdown_timeout_seconds=300)
    culprit = 0 if how == "coordinator" else count - 1
    pm = sw.PartitionManager(
        sw.Strategy.loads(RULES), mesh=sw.create_mesh(f"dp:{count},tp:4"), watchdog=seconds
    )
    with pm:
        x = pm.shard(np.ones((8, 8), np.float32), sw.BATCH, sw.EMBED)
        total = jax.jit(lambda x: x.sum(), out_shardings=pm.sharding())
        assert float(total(x)) == 64
        if how == "healthy":
            healthy(total, x, rank, seconds)
            print("all is well", flush=True)
            return
        if rank == culprit:
            time.sleep(1)
            print(f"fails at {time.time():.2f}", flush=True)
            fail("kill" if how == "coordinator" else how)
        if how == "part":
            pm.shard(np.ones((8, 8), np.float32), sw.BATCH, sw.EMBED)
        for _ in range(3):
            total(x).block_until_ready()


def healthy(total: Any, x: Any, rank: int, seconds: float) -> None:
    """Do what a watchdog must not mistake for a failure, for longer than its time."""
    begun = time.monotonic()
    while time.monotonic() < begun + 1.5 * seconds:  # steps that mostly wait, in other lines
        time.sleep(0.05 + 0.1 * rank)
        y = total(x)
        if rank:
            y.block_until_ready()
        else:
            float(y)
    time.sleep(0.5 * seconds * rank)  # less than the time of the watchdog
    float(total(x))
    begun = time.monotonic()
    while rank == 0 and time.monotonic() < begun + 1.5 * seconds:
        sum(range(1000))  # process 0 computes alone; the other one has ended


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
