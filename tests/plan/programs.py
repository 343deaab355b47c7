"""Programs with known collectives, and the collectives that JAX states before compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from shardwright.plan.collectives.collective import Kind
from shardwright.testing import cpu_mesh

FIXTURES = Path(__file__).parent / "fixtures"

Axes = tuple[str, ...]
Op = Callable[[Any, Axes], Any]

# A mesh, and the axes that a collective goes over.
PLACES: dict[str, tuple[str, Axes]] = {
    "dp of 1": ("dp:8", ("dp",)),
    "dp of 2": ("dp:2,tp:4", ("dp",)),
    "tp of 2": ("dp:2,tp:4", ("tp",)),
    "both of 2": ("dp:4,tp:2", ("dp", "tp")),
    "middle of 3": ("dp:2,fsdp:2,tp:2", ("fsdp",)),
    "outer two of 3": ("dp:2,fsdp:2,tp:2", ("dp", "tp")),
}


def ways(mesh: Mesh, axes: Axes) -> int:
    return int(np.prod([mesh.shape[axis] for axis in axes]))


def _gathered(x: Any, axes: Axes) -> Any:
    return jnp.sin(lax.all_gather(x, axes)).sum(0)


def _scattered(x: Any, axes: Axes) -> Any:
    return jnp.tile(lax.psum_scatter(x, axes, tiled=True), (lax.psum(1, axes), 1))


def _exchanged(x: Any, axes: Axes) -> Any:
    return lax.all_to_all(x, axes, 0, 0, tiled=True)


def _shifted(x: Any, axes: Axes) -> Any:
    count = lax.psum(1, axes)
    return lax.ppermute(x, axes, [(at, (at + 1) % count) for at in range(count)])


# Each keeps the shape, so that it can be the body of a loop.
OPS: dict[str, Op] = {
    "psum": lax.psum,
    "pmax": lax.pmax,
    "all_gather": _gathered,
    "psum_scatter": _scattered,
    "all_to_all": _exchanged,
    "ppermute": _shifted,
}


def in_loops(op: Op, axes: Axes) -> Callable[[Any], Any]:
    """Run an operation by itself, in a fori_loop of 7, and in a scan of 3 around a fori_loop of 2.

    14 times in all.
    """

    def step(x: Any) -> Any:
        return jnp.sin(op(x, axes))

    def program(x: Any) -> Any:
        x = lax.fori_loop(0, 7, lambda _, y: step(y), step(x))
        return lax.scan(
            lambda y, _: (lax.fori_loop(0, 2, lambda _, z: step(z), y), None), x, length=3
        )[0]

    return program


def mapped(f: Callable[[Any], Any], sizes: str) -> tuple[Mesh, Callable[[Any], Any]]:
    """Return a mesh and a function's shard_map over all of it; every device has its own rows."""
    mesh = cpu_mesh(sizes)
    spec = jax.P(mesh.axis_names)
    # Without tracking, a loop's carry may be varying in one step and not in the next.
    return mesh, jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


_PRIMITIVES = {
    "psum": Kind.ALL_REDUCE,
    "psum_invariant": Kind.ALL_REDUCE,
    "pmax": Kind.ALL_REDUCE,
    "all_gather": Kind.ALL_GATHER,
    "reduce_scatter": Kind.REDUCE_SCATTER,
    "all_to_all": Kind.ALL_TO_ALL,
    "ppermute": Kind.PERMUTE,
}

# (kind, mesh axes, bytes of the whole array, element type) of one run.
Run = tuple[Kind, frozenset[str], int, str]


def traced_runs(f: Callable[..., Any], *args: Any) -> dict[Run, int]:
    """Count the collectives of a function's jaxpr.

    JAX's own record of them, which no compiler has touched.
    """
    counts: dict[Run, int] = {}
    for times, equation in _equations(jax.make_jaxpr(f)(*args).jaxpr, 1):
        kind = _PRIMITIVES.get(equation.primitive.name)
        if kind is not None:
            axes = (
                equation.params["axes"]
                if "axes" in equation.params
                else equation.params["axis_name"]
            )
            whole = (equation.outvars if kind is Kind.ALL_GATHER else equation.invars)[0].aval
            names = frozenset((axes,) if isinstance(axes, str) else axes)
            run = (
                kind,
                names,
                whole.size * whole.dtype.itemsize,
                {"float32": "f32", "bfloat16": "bf16"}[str(whole.dtype)],
            )
            counts[run] = counts.get(run, 0) + times
    return counts


def _equations(jaxpr: Any, times: int) -> Iterator[tuple[int, Any]]:
    for equation in jaxpr.eqns:
        assert equation.primitive.name != "while", "a while has no length in a jaxpr"
        yield times, equation
        inside = (
            times * equation.params.get("length", 1) if equation.primitive.name == "scan" else times
        )
        for value in equation.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner, inside)


def compiled_runs(actual: Any) -> dict[Run, int]:
    """Count what was read from a compiled program in the same terms."""
    counts: dict[Run, int] = {}
    for item in actual:
        run = (item.kind, frozenset(item.mesh_axes), item.logical_bytes, item.dtype)
        counts[run] = counts.get(run, 0) + item.count
    return counts
