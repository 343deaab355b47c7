"""Run a block sharded and unsharded, and read the table of collectives in the docs."""

from __future__ import annotations

import collections
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.plan.collectives import read_collectives
from shardwright.testing import cpu_mesh

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "development" / "layers.md"
MESHES = {
    "fsdp": "fsdp:8",
    "tensor": "dp:2,tp:4",
    "fsdp_tp": "fsdp:2,tp:4",
    "fsdp_tp_sp": "fsdp:2,tp:4",
}
AXIS_TYPES: dict[str, Any] = {"auto": "auto", "explicit": "explicit", "mixed": None}
# `make test` leaves out the other cases: a compilation each.
SAMPLE = [("fsdp_tp_sp", "explicit")]
# A mesh with one axis is not mixed.
CASES = [
    (preset, kind)
    for preset, mesh in MESHES.items()
    for kind in AXIS_TYPES
    if "," in mesh or kind != "mixed"
]

Loss = Callable[..., tuple[jax.Array, Any]]  # (params, *arrays) -> (loss, output)


def make_manager(preset: str, kind: str, *, mode: str = "train") -> sw.PartitionManager:
    """Return the manager of a preset; a mixed mesh has one Explicit axis, the last."""
    mesh = MESHES[preset]
    axis_types = AXIS_TYPES[kind] or {mesh.split(",")[-1].split(":")[0]: "explicit"}
    return sw.PartitionManager(
        sw.Strategy.preset(preset), mesh=cpu_mesh(mesh, axis_types=axis_types), mode=mode
    )


def random_params(specs: Any) -> Any:
    """Return parameters in host memory: no two elements are equal, and nothing is compiled."""
    rng = np.random.default_rng(1)

    def values(spec: sw.ArraySpec) -> np.ndarray:
        size = 1.0 if spec.ndim == 1 else 0.25
        return rng.normal(size=spec.shape, scale=size).astype(spec.dtype)

    return jax.tree.map(values, specs, is_leaf=lambda node: isinstance(node, sw.ArraySpec))


def total(f: Callable[..., Any]) -> Loss:
    """Return a scalar function of the output of `f`, and the output itself."""

    def loss(*args: Any) -> tuple[jax.Array, Any]:
        y = f(*args)
        sums = [jnp.sum(jnp.sin(part)) for part in jax.tree.leaves(y)]
        return jnp.stack(sums).sum(), y

    return loss


def values_and_gradients(f: Callable[..., Any], params: Any, x: Any) -> Any:
    """Return the output and the gradients by the parameters and by `x`, if that is floats."""
    return jax.jit(_differentiated(f, x))(params, x)


def _differentiated(f: Callable[..., Any], x: Any) -> Any:
    arguments = (0, 1) if jnp.issubdtype(x.dtype, jnp.floating) else (0,)
    return jax.value_and_grad(total(f), arguments, has_aux=True)


def check_sharded(
    name: str, f: Callable[..., Any], inputs: Any, wanted: Any, preset: str, kind: str
) -> Any:
    """Run a function of `(params, x)` under a preset: values, gradients and collectives.

    Args:
      name: Its name in the table of the docs.
      f: The function.
      inputs: (params, their specs, x, the axes of x).
      wanted: `values_and_gradients` without a manager.
      preset: Name.
      kind: Of the mesh.

    Returns:
      The output, sharded.
    """
    params, specs, x, axes = inputs
    documented_counts = {preset: counts for preset, *counts in documented(name)}
    with make_manager(preset, kind) as pm:
        stored, x = pm.shard(params, specs, role="param"), pm.shard(x, axes)
        training = jax.jit(_differentiated(f, x)).lower(stored, x).compile()
        forward = jax.jit(f).lower(stored, x).compile()
        got = training(stored, x)
    assert_close(got, wanted)
    for gradient, value in zip(jax.tree.leaves(got[1][0]), jax.tree.leaves(stored), strict=True):
        assert gradient.sharding.is_equivalent_to(value.sharding, value.ndim)
    forward_counts, training_counts = documented_counts[preset]
    assert counted(forward, pm) == forward_counts, (preset, kind)
    # JAX 0.12, and 0.10 in a scan, shards what the gradient of a shard_map keeps over all axes of a
    # mixed mesh, and gathers it again.
    if kind != "mixed" or (jax.__version_info__ < (0, 11) and name != "transformer_block"):
        assert counted(training, pm) == training_counts, (preset, kind)
    return got[0][1]


def cases() -> Any:
    """Return the (preset, kind) of a test: a sample, and all others marked full."""
    return pytest.mark.parametrize(
        ("preset", "kind"),
        [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.full) for case in CASES],
    )


def assert_close(got: Any, wanted: Any, *, rtol: float = 2e-5, least: float = 1e-6) -> None:
    """Compare trees leaf by leaf, relative to the largest value of each leaf, or to `least`."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(wanted)
    faults = []
    for (path, leaf), own in zip(pairs, structure.flatten_up_to(got), strict=True):
        left, right = np.asarray(own, np.float64), np.asarray(leaf, np.float64)
        assert left.shape == right.shape
        error = np.max(np.abs(left - right), initial=0)
        if not error <= rtol * np.max(np.abs(right), initial=least):
            faults.append(f"{jax.tree_util.keystr(path)}: {error}")
    assert not faults, faults


def counted(compiled: Any, pm: sw.PartitionManager) -> dict[str, int]:
    """Return how often a compiled program runs each kind of collective."""
    found: collections.Counter[str] = collections.Counter()
    for collective in read_collectives(compiled, pm.mesh):
        found[collective.kind.value.replace("_", "-")] += 1
    return dict(found)


def documented(block: str) -> Iterator[tuple[str, dict[str, int], dict[str, int]]]:
    """Yield preset, forward counts and training counts from the table of a block in the docs."""
    for row in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().strip("`") for cell in row.strip("|").split("|")]
        if len(cells) == 4 and cells[0] == block and cells[1] in MESHES:
            yield cells[1], _counts(cells[2]), _counts(cells[3])


def _counts(cell: str) -> dict[str, int]:
    return {kind: int(count) for count, kind in re.findall(r"(\d+) ([a-z-]+)", cell)}
