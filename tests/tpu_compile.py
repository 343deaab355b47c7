"""Compile for eight TPUs on a machine without TPUs.

The modules `tpu_*` share this code. Each prints one line of JSON per program.

    python -m tests.attention.tpu_memory

Needs libtpu, which the extra `tpu-aot` brings; `make test-tpu` runs all of it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeVar

import pytest

ROOT = Path(__file__).parents[1]
# Quiet where there is no TPU, and harmless next to another process that compiles.
SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
TOPOLOGY = "v5e:2x4"
MARKS = [
    pytest.mark.tpu,
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: make test-tpu"
    ),
]

Found = TypeVar("Found")


def measure(module: str, into: type[Found], *names: str) -> list[Found]:
    """Run a module in its own process, and return what it prints.

    libtpu reads its settings once, when it is loaded, so each module needs its own process.

    Args:
      module: its name.
      into: the class of what it prints.
      names: its arguments; none for everything.
    """
    paths = os.pathsep.join(
        [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": paths}
    command = [sys.executable, "-m", module, *names]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [into(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def tell(actual: Any) -> None:
    """Print a dataclass for `measure`."""
    print(json.dumps(dataclasses.asdict(actual)), flush=True)


def tpu_mesh(**sizes: int) -> Any:
    """Return eight TPUs as a mesh of Auto axes."""
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices)
    return Mesh(
        devices.reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def compile_for_tpus(function: Any, *arguments: Any, **options: Any) -> Any:
    """Return the program of a function of shapes; the options are those of `jax.jit`."""
    import jax

    return (
        jax.jit(function, **options).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
    )


def temporary(compiled: Any) -> int:
    """Return bytes per device beside arguments and results."""
    actual: int = compiled.memory_analysis().temp_size_in_bytes
    return actual


def held(tree: Any) -> int:
    """Return bytes per device of a tree of shapes."""
    import jax
    import numpy as np

    return sum(
        x.dtype.itemsize * int(np.prod(x.sharding.shard_shape(x.shape)))
        for x in jax.tree.leaves(tree)
    )


def collectives(compiled: Any, mesh: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Return the number of runs and the total logical bytes of each kind of collective."""
    from shardwright.plan.collectives.read import read_collectives

    counts: dict[str, int] = {}
    sent: dict[str, int] = {}
    for collective in read_collectives(compiled, mesh):
        assert collective.count is not None, f"it is unknown how often {collective} runs"
        assert collective.total_bytes is not None, f"it is unknown what {collective} sends"
        counts[str(collective.kind)] = counts.get(str(collective.kind), 0) + collective.count
        sent[str(collective.kind)] = sent.get(str(collective.kind), 0) + collective.total_bytes
    return counts, sent
