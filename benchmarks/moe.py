"""`python -m benchmarks.moe`: an MoE layer, compared with layers written by hand.

The first part compares the sent bytes and the temporaries of two compiled programs: the dispatch of
`layers.moe`, and einsums with one-hot masks, which leave the collectives to the compiler. Both have
the same routes and the same slots. The run fails if their results differ.

The second part compares the times to trace an MLP block and an MoE layer of `layers` with those of
the same layers written by hand: in plain JAX with constraints, and in flax linen. The ratios are
those of interleaved repetitions in one run. An MoE layer of `layers` is traced once for all layers
that are alike.

Results go to `benchmarks/results/moe/cpu.json`; a test compares the page with them.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

import shardwright as sw
from benchmarks import moe_by_hand as by_hand
from benchmarks import report, timing
from shardwright.layers import mlp_block, moe
from shardwright.plan.collectives import read_collectives
from shardwright.testing.meshes import cpu_mesh, virtual_devices

RESULTS: Final = Path(__file__).parent / "results" / "moe" / "cpu.json"
BATCH, LENGTH, EMBED, HIDDEN, EXPERTS, PER_TOKEN = 16, 256, 256, 512, 8, 2
# The capacity is twice that of an even load: nothing is dropped, so results can be compared.
CONFIG: Final = moe.MoEConfig(
    embed=EMBED,
    hidden=HIDDEN,
    experts=EXPERTS,
    per_token=PER_TOKEN,
    capacity=moe.CapacityFactor(2.0),
    exchange="slots",
    matmul="padded",
)
MLP: Final = mlp_block.MlpConfig(embed=EMBED, hidden=HIDDEN)
TOKENS = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
# Weights are stored as they are used, so that only the dispatch is compared.
NOTHING_GATHERED = sw.Strategy.loads('version = 1\n[params]\nembed = "-"\n[policy]\ngather = "-"\n')
TARGET: Final = timing.Target(at_most=1.15)
LAYERS_TRACED: Final = 8


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moe")
    parser.add_argument("--repeats", type=int, default=15, help="repetitions per median (15)")
    given = parser.parse_args(argv)
    virtual_devices(8)
    strategy = sw.Strategy.preset("moe_ep") | NOTHING_GATHERED
    programs = compare_programs(
        sw.PartitionManager(strategy, mesh=cpu_mesh("fsdp:2,ep:4"), mode="train")
    )
    rows = [row.to_json() for row in trace_times(given.repeats)]
    for row in [*programs, *rows]:
        print(row)
    data = {"context": report.context(peers={}), "programs": programs, "trace": rows}
    RESULTS.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["verdict"] == "MISSED" for row in rows) else 0


def compare_programs(pm: sw.PartitionManager) -> list[dict[str, Any]]:
    """Compile both layers, forward and backward, and count sent bytes and temporaries.

    Raises:
      AssertionError: The results differ, or tokens are dropped.
    """
    with pm:
        slots = moe.explain(CONFIG, (BATCH, LENGTH, EMBED)).slots * pm.mesh.size
    layers: dict[str, Callable[..., Any]] = {
        "layers.moe": lambda params, x: moe.apply(CONFIG, params, x)[0],
        "one-hot einsum": functools.partial(by_hand.one_hot_moe, pm.mesh, PER_TOKEN, slots),
    }
    params = pm.abstract(moe.specs(CONFIG))
    x = pm.abstract(sw.ArraySpec((BATCH, LENGTH, EMBED), jnp.float32, TOKENS), role="activation")
    rows, results = [], {}
    for name, layer in layers.items():
        for what, function in {
            "forward": layer,
            "training": jax.grad(functools.partial(_loss, layer), argnums=(0, 1)),
        }.items():
            with pm:
                compiled = jax.jit(function).lower(params, x).compile()
            rows.append({"layer": name, "pass": what, **_counted(compiled, pm.mesh)})
            if what == "forward":
                results[name] = compiled(*_arrays(pm))
    _check_equal(pm, results)
    return rows


def _loss(layer: Callable[..., Any], params: Any, x: Any) -> Any:
    return jnp.square(layer(params, x)).sum()


def _counted(compiled: Any, mesh: Any) -> dict[str, Any]:
    counts: collections.Counter[str] = collections.Counter()
    sent = 0
    for each in read_collectives(compiled, mesh):
        counts[each.kind.value.replace("_", "-")] += each.count or 1
        sent += each.total_bytes or 0
    return {
        "collectives": dict(sorted(counts.items())),
        "sent": sent,
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
    }


def _arrays(pm: sw.PartitionManager) -> tuple[Any, Any]:
    params = pm.init(moe.specs(CONFIG), jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, EMBED)).astype(np.float32)
    return params, pm.shard(x, TOKENS)


def _check_equal(pm: sw.PartitionManager, results: dict[str, Any]) -> None:
    with pm:
        _, state = jax.jit(functools.partial(moe.apply, CONFIG))(*_arrays(pm))
    assert state.stats is not None
    assert int(state.stats.dropped) == 0, "tokens are dropped, so results cannot be compared"
    first, second = (np.asarray(result, np.float64) for result in results.values())
    error = np.abs(first - second).max() / np.abs(second).max()
    assert error < 1e-5, f"the results differ by {error}"


def trace_times(repeats: int) -> list[timing.Row]:
    """Trace eight layers of each kind, forward and backward, without compiling."""
    mesh = cpu_mesh("fsdp:2,tp:4")
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh, mode="train")
    dense = pm.abstract(mlp_block.specs(MLP))
    experts = sw.PartitionManager(sw.Strategy.preset("moe_ep"), mesh=cpu_mesh("fsdp:2,ep:4"))
    params = experts.abstract(moe.specs(CONFIG))
    with experts:
        slots = moe.explain(CONFIG, (BATCH, LENGTH, EMBED)).slots
    flax_params, flax_mlp = by_hand.flax_mlp(EMBED, HIDDEN)
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, EMBED), jnp.float32)
    cases = {
        "mlp": {
            "layers": (pm, dense, lambda params, x: mlp_block.apply(MLP, params, x)[0]),
            "by hand": (pm, dense, functools.partial(by_hand.mlp, mesh)),
            "flax": (pm, flax_params, flax_mlp),
        },
        "moe": {
            "layers": (experts, params, lambda params, x: moe.apply(CONFIG, params, x)[0]),
            "by hand": (
                experts,
                params,
                functools.partial(by_hand.all_to_all_moe, experts.mesh, PER_TOKEN, slots),
            ),
        },
    }
    rows = []
    for layer, kinds in cases.items():
        prepared = {name: functools.partial(_tracer, *kind, x) for name, kind in kinds.items()}
        times = timing.interleave(prepared, repeats=repeats)
        case = f"{LAYERS_TRACED} layers, forward and backward"
        for against in [name for name in kinds if name != "layers"]:
            row = timing.ratio(
                times,
                "layers",
                against=against,
                subject=layer,
                case=case,
                target=TARGET,
            )
            rows.append(row)
    return rows


def _tracer(
    pm: sw.PartitionManager, params: Any, layer: Callable[..., Any], x: Any
) -> Callable[[], Any]:
    """Return a function that traces a new stack of layers."""

    def trace() -> Any:
        def loss(params: Any, x: Any) -> Any:
            for _ in range(LAYERS_TRACED):
                x = x + layer(params, x)
            return jnp.square(x).sum()

        with pm:
            return jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(params, x)

    return trace


if __name__ == "__main__":
    raise SystemExit(main())
