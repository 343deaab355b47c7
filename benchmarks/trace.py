"""Trace 1,000 constraints, compared with `jax.lax.with_sharding_constraint`.

The function consists of constraints, on arrays of four kinds in turn. It is a new function in every
repetition, so JAX traces it again. The baseline gets ready-made `NamedSharding`s. "shard" calls
`sw.shard` under a manager that has already resolved these annotations, as in the second layer of a
model. "shard, first" uses a new manager.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardwright as sw
from benchmarks import timing
from benchmarks.timing import Row, Target
from shardwright.testing.meshes import cpu_mesh

COUNT = 1000
RAW = "with_sharding_constraint"
TARGETS = {"shard": Target(at_most=1.15), "shard, first": Target(at_most=1.15)}
KINDS: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = (
    ((8, 64, 256), (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)),
    ((8, 64, 8, 32), (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)),
    ((8, 64, 1024), (sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)),
    ((8, 8, 64, 64), (sw.BATCH, sw.HEAD, sw.QUERY_LENGTH, sw.BIAS_KV_SEQ)),
)
Constrain = Callable[[Any, tuple[str, ...]], Any]


def run(*, peers: bool, repeats: int) -> list[Row]:
    """Measure on 8 CPU devices, fsdp 2 and tp 4."""
    strategy = sw.Strategy.preset("fsdp_tp")
    mesh = cpu_mesh("dp:1,fsdp:2,sp:1,ep:1,tp:4")
    warm = sw.PartitionManager(strategy, mesh=mesh)
    specs = {axes: warm.resolve(axes, shape=shape) for shape, axes in KINDS}
    shardings = {axes: NamedSharding(mesh, spec) for axes, spec in specs.items()}
    cases = {
        RAW: lambda: _entered(
            warm, lambda x, axes: jax.lax.with_sharding_constraint(x, shardings[axes])
        ),
        "bare specs": lambda: _entered(
            warm, lambda x, axes: jax.lax.with_sharding_constraint(x, specs[axes])
        ),
        "shard": lambda: _entered(warm, lambda x, axes: sw.shard(x, *axes)),
        "shard, first": lambda: _entered(
            _fresh(strategy, mesh), lambda x, axes: sw.shard(x, *axes)
        ),
    }
    with contextlib.ExitStack() as stack:
        if peers:
            from benchmarks import peers as others

            tracers = others.tracers(strategy.compile(), mesh, stack)
            cases |= {
                name: functools.partial(trace, KINDS, COUNT) for name, trace in tracers.items()
            }
        for name, prepare in cases.items():
            _check(name, prepare(), mesh, specs)
        times = timing.interleave(cases, repeats=3 * repeats)
    case = f"{COUNT:,} constraints, 8 CPU devices"
    names = [name for name in cases if name != RAW]
    return [
        timing.ratio(times, name, against=RAW, subject="trace", case=case, target=TARGETS.get(name))
        for name in names
    ]


def _fresh(strategy: sw.Strategy, mesh: Mesh) -> sw.PartitionManager:
    timing.clear_module_caches()
    return sw.PartitionManager(strategy.compile(), mesh=mesh)


def _entered(manager: sw.PartitionManager, constrain: Constrain) -> Callable[[], Any]:
    def trace() -> Any:
        with manager:
            return trace_constraints(constrain)

    return trace


def trace_constraints(constrain: Constrain) -> Any:
    """Trace a new function of `COUNT` constraints and return its jaxpr."""

    def constrained(arrays: list[Any]) -> list[Any]:
        arrays = list(arrays)
        for step in range(COUNT):
            at = step % len(KINDS)
            arrays[at] = constrain(arrays[at], KINDS[at][1])
        return arrays

    return jax.make_jaxpr(constrained)(
        [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape, _ in KINDS]
    )


def _check(
    name: str, trace: Callable[[], Any], mesh: Mesh, specs: dict[tuple[str, ...], PartitionSpec]
) -> None:
    """Check, untimed, that a case traces every constraint with the same shardings."""
    constraints = [
        equation
        for equation in trace().jaxpr.eqns
        if equation.primitive.name == "sharding_constraint"
    ]
    assert len(constraints) == COUNT, (
        f"{name} traces {len(constraints)} constraints instead of {COUNT}"
    )
    for step, equation in enumerate(constraints):
        shape, axes = KINDS[step % len(KINDS)]
        spec = equation.params["sharding"].spec
        same = NamedSharding(mesh, spec).is_equivalent_to(
            NamedSharding(mesh, specs[axes]), len(shape)
        )
        assert same, f"{name} constrains {axes} to {spec}, ours to {specs[axes]}"
