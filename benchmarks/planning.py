"""`python -m benchmarks.planning`: measure the time to count a large state, and that of searches.

The state is that of DeepSeek-V3, unrolled, on 16,384 devices: parameters, two moments, and caches
of 4,096 sequences of 8,192 tokens. The search is for the training step of an 8B decoder on 64 v5p
chips. Both times have targets, and two searches must give the same result. The command `search` has
the same target for Llama 3 8B on three clusters. This command exits with 1 if a target is missed.
"""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
import time
from typing import Any, Final

import jax

import shardwright as sw
from shardwright.interop.hf import Sizes, programs, read_config
from shardwright.plan.search.run import WALKS
from shardwright.plan.state import Category, CountedArray, StateBytes, count_state
from shardwright.resolution.request import ShardingRequest
from shardwright.trees.annotated import annotated_leaves
from shardwright.vocabulary.axes import Role
from tests.plan.decoder import Decoder

CONFIG: Final = "tests/interop/hf/configs/deepseek-v3.json"
STATE_SECONDS, SEARCH_SECONDS = 3.0, 60.0
CANDIDATES = 1000
LLAMA: Final = "tests/interop/hf/configs/llama-3-8b.json"
CLUSTERS: Final = ("2xv5p:4x4x4", "16xh100:8", "4xgb200:72")


def count(sizes: Sizes) -> tuple[StateBytes, float]:
    """Count the state of training and the caches of serving. Return it with the processor time."""
    mesh = sw.abstract_mesh("fsdp:64,ep:32,tp:8")
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh, mode="decode")
    program = programs(sizes, batch=4096, length=8192)["decode"]
    params, caches, _ = program.shapes
    start = time.process_time()
    held = []
    for tree, specs, roles in (
        (params, program.specs[0], {Role.PARAM: Category.PARAMETERS, Role.STATE: None}),
        (caches, program.specs[1], {Role.ACTIVATION: Category.CACHE}),
    ):
        for leaf in annotated_leaves(tree, specs):
            shape = leaf.value.shape
            for role, category in roles.items():
                request = ShardingRequest(leaf.annotation, shape, pm.mode, role, leaf.path)
                copies = 2 if category is None else 1
                kind = category or Category.OPTIMIZER
                each = CountedArray(path=leaf.path, value=leaf.value, source=request, category=kind)
                held += [each] * copies
    return count_state(pm, held), time.process_time() - start


def search() -> tuple[Any, float, float]:
    """Search, and return the report, the processor time and the wall time."""
    processor, wall = time.process_time(), time.perf_counter()
    found = sw.search(
        Decoder().program("train"),
        {name: sw.Strategy.preset(name) for name in ("fsdp_tp", "fsdp_tp_sp")},
        topology="v5p:4x4x4",
        axes=("dp", "fsdp", "sp", "tp"),
        vary={"vocab": (None, "-"), "params.embed": (None, "-"), "policy.zero1": (None, "dp")},
    )
    return found, time.process_time() - processor, time.perf_counter() - wall


def command(topology: str) -> float:
    """Return the processor time of the command `search` in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = ["search", LLAMA, "--mode", "train", "--topology", topology, "--json"]
    run = [sys.executable, "-m", "shardwright", *words]
    subprocess.run(run, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def loop() -> float:
    """Return the processor time of a loop of known work.

    It shows the speed of the machine, which may vary by a factor of two.
    """
    start = time.process_time()
    total, seen = 0, {}
    for number in range(6_000_000):
        total += number * number % 7
        if number % 5 == 0:
            seen[number & 1023] = number, total
    return time.process_time() - start


def main() -> int:
    """Measure, print, and return 0 if all targets are met."""
    state, seconds = count(read_config(CONFIG))
    kinds = ", ".join(f"{kind} {state.of(kind).per_device:,} B" for kind in state.categories)
    good = seconds < STATE_SECONDS
    print(f"{_verdict(good)}: state of {len(state.leaves):,} arrays in {seconds:.2f} s: {kinds}")
    found, processor, wall = search()
    enough = found.judged >= CANDIDATES and found.walked == WALKS
    fast = processor < SEARCH_SECONDS
    print(
        f"{_verdict(enough and fast)}: {found.judged:,} candidates judged, {found.walked} walked, "
        f"{processor:.1f} s of processor time, {wall:.1f} s of wall time"
    )
    again = search()[0]
    digests = [
        hashlib.sha256(json.dumps(each.to_json()).encode()).hexdigest()[:12]
        for each in (found, again)
    ]
    print(f"{_verdict(len(set(digests)) == 1)}: two searches give {' and '.join(digests)}")
    times = {}
    for topology in CLUSTERS:
        known, seconds = loop(), command(topology)
        times[topology] = seconds
        words = f"search of {LLAMA} on {topology}: {seconds:.1f} s of processor time"
        words += f", when a loop of known work takes {(known + loop()) / 2:.2f} s"
        print(f"{_verdict(seconds < SEARCH_SECONDS)}: {words}")
    fast = fast and max(times.values()) < SEARCH_SECONDS
    return 0 if good and enough and fast and len(set(digests)) == 1 else 1


def _verdict(met: bool) -> str:
    return "pass" if met else "FAIL"


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
