"""`python -m benchmarks.accumulate`: compare the bytes that ways to accumulate gradients send.

One training step of 8 microbatches, with a scan over layers, is compiled for the eight TPUs of a
v5e:2x4, on a machine without TPUs. Each way has the same model, weights and batch. For each way and
mesh, the command prints the bytes that one device sends in a step, and how many collectives of
gradients run in the loop. It exits with 1 if `accumulate` reduces the gradient of a replicated
weight in the loop, or sends more than another way. It needs libtpu (the extra `tpu-aot`) and optax.
`--json FILE` writes the results that the page on accumulation shows.

The other ways are written from their documentation:

- `loop`: a scan over microbatches that adds `jax.grad`, as in many training scripts.
- `MaxText`: weights are marked `reduced` over the data axis before the loop, so that gradients are
  `unreduced` in the loop. This needs Explicit mesh axes, and no mesh axis of FSDP (MaxText #5099).
  Otherwise this way is the same as `loop`.
- `MultiSteps`: the wrapper of optax. A step is 8 calls, one for each microbatch.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import functools
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.tpu_compile import SETTINGS, TOPOLOGY

if __name__ == "__main__":
    os.environ.update(SETTINGS)  # libtpu reads them when it is loaded

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.layers import Weighted, accumulate
from shardwright.plan.collectives.read import read_collectives

N, BATCH, LENGTH, LAYERS, EMBED, HIDDEN, HEADS, HEAD_DIM = 8, 128, 256, 4, 1024, 4096, 8, 128
MESHES: Final = {"ddp": "dp:8", "fsdp": "fsdp:8", "fsdp, two replicas": "dp:2,fsdp:4"}

RESIDUAL: Final = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
INNER: Final = (sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)
HEADED: Final = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)
SCORES: Final = (sw.BATCH, sw.HEAD, sw.QUERY_LENGTH, sw.EMPTY)


def _spec(shape: tuple[int, ...], *axes: str) -> sw.ArraySpec:
    return sw.ArraySpec(shape, jnp.float32, axes)


LAYER: Final = {
    "norm": _spec((EMBED,), sw.NORM),
    **{n: _spec((EMBED, HEADS, HEAD_DIM), sw.EMBED, sw.HEAD, sw.HEAD_DIM) for n in "qkv"},
    "o": _spec((HEADS, HEAD_DIM, EMBED), sw.HEAD, sw.HEAD_DIM, sw.EMBED),
    "up": _spec((EMBED, HIDDEN), sw.EMBED, sw.MLP_INTERMEDIATE),
    "down": _spec((HIDDEN, EMBED), sw.MLP_INTERMEDIATE, sw.EMBED),
}
SPECS: Final = {name: sw.stacked(spec, LAYERS) for name, spec in LAYER.items()}
WEIGHT_BYTES: Final = sum(4 * int(np.prod(spec.shape)) for spec in SPECS.values())


def total_loss(weights: Any, x: Any) -> Any:
    """Return the sum of the squares of the output of a stack of decoder layers.

    The weights of the layers are gathered layer by layer.
    """

    def layer(x: Any, w: Any) -> Any:
        w = sw.gather(w, LAYER)
        # JAX refuses `x * w` for a reduced weight and a sharded x. An einsum is allowed.
        scaled = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        h = sw.einsum("bse,e->bse", scaled, w["norm"], out=RESIDUAL)
        q, k, v = (sw.einsum("bse,ehd->bshd", h, w[name], out=HEADED) for name in "qkv")
        scores = jax.nn.softmax(sw.einsum("bshd,bthd->bhst", q, k, out=SCORES))
        mixed = sw.einsum("bhst,bthd->bshd", scores, v, out=HEADED)
        x += sw.einsum("bshd,hde->bse", mixed, w["o"], out=RESIDUAL)
        inner = jax.nn.silu(sw.einsum("bse,em->bsm", x, w["up"], out=INNER))
        return x + sw.einsum("bsm,me->bse", inner, w["down"], out=RESIDUAL), None

    return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2)


def _parts(x: Any) -> Any:
    """Return the batch as microbatches, each sharded over the batch axes."""
    # The microbatches of a device are cut from its own rows, so that no way sends the batch.
    manager = sw.current_manager()
    shards = manager.axis_size(sw.BATCH, BATCH)
    cut = sw.shard(x.reshape(shards, N, -1, LENGTH, EMBED), sw.BATCH, *[sw.EMPTY] * 4)
    rows = jnp.swapaxes(cut, 0, 1)
    return sw.shard(rows.reshape(N, -1, LENGTH, EMBED), sw.EMPTY, *RESIDUAL)


def one_batch(weights: Any, x: Any) -> Any:
    return jax.grad(total_loss)(weights, x)


def loop(weights: Any, x: Any, *, deferred: frozenset[str] = frozenset()) -> Any:
    """Add the gradients of microbatches in a scan.

    MaxText's way is the same loop, with `deferred` mesh axes in the types of weights and sums.
    """

    def marked(tree: Any, mark: str) -> Any:
        def one(leaf: Any) -> Any:
            entries = jax.typeof(leaf).sharding.spec.partitions
            return jax.reshard(leaf, P(*entries, **{mark: set(deferred)}))

        return jax.tree.map(one, tree) if deferred else tree

    held = marked(weights, "reduced")
    zeros = marked(
        jax.tree.map(lambda w, s: sw.shard(jnp.zeros_like(w), s, role="param"), weights, SPECS),
        "unreduced",
    )

    def add(sums: Any, part: Any) -> Any:
        return jax.tree.map(jnp.add, sums, jax.grad(total_loss)(held, part)), None

    return sw.shard(jax.lax.scan(add, zeros, _parts(x))[0], SPECS, role="param")


def ours(weights: Any, x: Any, *, gather: Any) -> Any:
    def loss(weights: Any, x: Any, channel: Any) -> Any:
        del channel
        return Weighted(total_loss(weights, x), 1), None

    return accumulate(loss, N, specs=SPECS, gather=gather)(weights, x).grads


OPTIMIZER: Final = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=N)


def multi_steps(weights: Any, state: Any, x: Any) -> Any:
    updates, state = OPTIMIZER.update(jax.grad(total_loss)(weights, x), state, weights)
    return optax.apply_updates(weights, updates), state


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one device sends in a step.

    Attributes:
      way: How gradients are accumulated.
      preset: Preset and mesh.
      mesh: The mesh.
      sent: Bytes of all collectives, as a ring sends them.
      inside: How many collectives reduce gradients in the loop, all trips counted. Gradients are
        the float arrays that are not scalars.
    """

    way: str
    preset: str
    mesh: str
    sent: int
    inside: int


def _mesh(text: str, kind: AxisType) -> Mesh:
    sizes = {axis: int(size) for axis, size in (part.split(":") for part in text.split(","))}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    return Mesh(
        np.array(devices).reshape(*sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes)
    )


def measure(way: str, preset: str) -> Row:
    """Compile a way to accumulate, and count what it sends."""
    calls, kind, function = WAYS[way]
    pm = sw.PartitionManager(
        sw.Strategy.preset(preset.partition(",")[0]),
        mesh=_mesh(MESHES[preset], kind),
        mode="train",
    )
    weights = pm.abstract(SPECS)
    x = sw.ArraySpec((BATCH // calls, LENGTH, EMBED), jnp.float32, RESIDUAL)
    given = [weights, pm.abstract(x, role="activation")]
    if way == "MultiSteps":
        given.insert(1, pm.abstract_state(OPTIMIZER, SPECS))
    if way == "MaxText":
        deferred = frozenset(pm.mesh.axis_names if pm.mesh.axis_names == ("dp",) else ())
        function = functools.partial(function, deferred=deferred)
    results = jax.tree.map(lambda shape: shape.sharding, tuple(given[:-1]))
    with pm:
        out = results if len(results) > 1 else results[0]
        traced = jax.jit(function, out_shardings=out).trace(*given)
    # A program that is compiled with low effort sends the same bytes. Compiling it takes a quarter
    # of the time.
    compiled = traced.lower(lowering_platforms=("tpu",)).compile(
        compiler_options={"exec_time_optimization_effort": -1.0}
    )
    events = read_collectives(compiled, pm.mesh)
    return Row(
        way=way,
        preset=preset,
        mesh=MESHES[preset],
        sent=calls * sum(each.total_wire_bytes or 0 for each in events),
        inside=sum(
            calls * (each.count or 0)
            for each in events
            if calls * (each.count or 0) >= N
            and str(each.kind) in ("all_reduce", "reduce_scatter")
            and each.logical_bytes > 8
        ),
    )


# The number of calls of a step, the type of the mesh axes, and the function that is compiled.
WAYS: Final[dict[str, tuple[int, AxisType, Callable[..., Any]]]] = {
    "one batch": (1, AxisType.Auto, one_batch),
    "loop": (1, AxisType.Auto, loop),
    "MultiSteps": (N, AxisType.Auto, multi_steps),
    "MaxText": (1, AxisType.Explicit, loop),
    'accumulate, "each"': (1, AxisType.Auto, functools.partial(ours, gather="each")),
    'accumulate, "once"': (1, AxisType.Auto, functools.partial(ours, gather="once")),
}


def judge(rows: list[Row]) -> dict[str, bool]:
    """Return each target, and whether it is met."""
    verdicts = {}
    for preset in MESHES:
        sent = {row.way: row.sent for row in rows if row.preset == preset}
        mine = min(size for way, size in sent.items() if way.startswith("accumulate"))
        others = min(size for way, size in sent.items() if way in ("loop", "MaxText", "MultiSteps"))
        verdicts[f"{preset}: accumulate sends no more than the others"] = mine <= others * 1.001
    inside = sum(
        row.inside for row in rows if row.preset == "ddp" and row.way.startswith("accumulate")
    )
    verdicts["ddp: accumulate reduces no gradient in the loop"] = inside == 0
    return verdicts


def table(rows: list[Row]) -> str:
    """Return the rows as a table of Markdown, with bytes in units of the size of all weights."""
    lines = [
        "| way | " + " | ".join(f"{preset} ({mesh})" for preset, mesh in MESHES.items()) + " |",
        "| --- |" + " ---: |" * len(MESHES),
    ]
    for way in WAYS:
        cells = [
            f"{row.sent / WEIGHT_BYTES:.1f} W, {row.inside}"
            for preset in MESHES
            for row in rows
            if (row.way, row.preset) == (way, preset)
        ]
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Compile, print, and return 0 if the targets are met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accumulate", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    given = parser.parse_args(argv)
    rows = []
    for preset in MESHES:
        for way in WAYS:
            rows.append(measure(way, preset))
            print(rows[-1], flush=True)
    print(table(rows))
    verdicts = judge(rows)
    for words, met in verdicts.items():
        print(f"{'pass' if met else 'FAIL'}: {words}")
    if given.json is not None:
        names = ("jax", "jaxlib", "libtpu", "optax")
        context = {name: importlib.metadata.version(name) for name in names}
        context |= {"target": TOPOLOGY, "date": dt.datetime.now(dt.UTC).date().isoformat()}
        lines = ",\n".join(json.dumps(dataclasses.asdict(row)) for row in rows)
        text = f'{{"context": {json.dumps(context)},\n"rows": [\n{lines}\n]}}\n'
        given.json.write_text(text, encoding="utf-8")
    return 0 if all(verdicts.values()) else 1


def read_rows(path: Path) -> tuple[list[Row], dict[str, str]]:
    """Return the rows of a file of results, and the context."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return [Row(**row) for row in data["rows"]], data["context"]


if __name__ == "__main__":
    sys.exit(main())
