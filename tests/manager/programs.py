"""One set of rules, four kinds of mesh, and the programs in which a constraint may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.testing import cpu_mesh

RULES = """
version = 1
name = "manager_tests"
[axes]
open = "left to the compiler"
open_last = "left to the compiler where it does not divide"
[rules]
batch = "dp"
length = "-"
embed = "tp"
mlp_intermediate = "tp"
head = "tp"
kv_head = "tp | -"
vocab = "tp"
open = "?"
open_last = "tp | ?"
[params]
embed = "dp"
open = "-"
open_last = "-"
[modes.decode]
embed = "-"
[policy]
gather = "dp"
"""

AXIS_TYPES: dict[str, Any] = {
    "auto": "auto",
    "explicit": "explicit",
    "tp explicit": {"tp": "explicit"},
    "dp explicit": {"dp": "explicit"},
}


def rules(text: str = RULES) -> sw.AxisRules:
    return sw.Strategy.loads(text, source="rules.toml").compile()


def make_mesh(kind: str = "auto", sizes: str = "dp:2,tp:4") -> Mesh:
    return cpu_mesh(sizes, axis_types=AXIS_TYPES[kind])


def make_manager(
    kind: str = "auto", *, text: str = RULES, sizes: str = "dp:2,tp:4"
) -> sw.PartitionManager:
    return sw.PartitionManager(rules(text), mesh=make_mesh(kind, sizes))


def numbers(*shape: int) -> np.ndarray:
    """Return distinct float32 values of any shape."""
    return np.linspace(-1.0, 1.0, int(np.prod(shape)), dtype=np.float32).reshape(shape)


Body = Callable[[Any], Any]


def scan(f: Body) -> Body:
    return lambda x: jax.lax.scan(lambda carry, _: (f(carry), None), x, length=2)[0]


def vmap(f: Body) -> Body:
    return lambda x: jax.vmap(f)(jnp.stack([x, x + 1, x + 2]))


def pull_back(f: Body) -> Body:
    """Return the gradient of `f` along its own output, with a cotangent that is on the mesh."""

    def run(x: Any) -> Any:
        y, vjp = jax.vjp(f, x)
        return vjp(y)[0]

    return run


def grad(f: Body) -> Body:
    return jax.grad(lambda x: (f(x) ** 2).sum())


def remat(f: Body) -> Body:
    return pull_back(jax.checkpoint(f))


def scan_remat_grad(f: Body) -> Body:
    return pull_back(scan(jax.checkpoint(f)))


# Name -> a transformation of a function of one array. All but `grad` work everywhere.
TRANSFORMS: dict[str, Callable[[Body], Body]] = {
    "plain": lambda f: f,
    "scan": scan,
    "vmap": vmap,
    "pull_back": pull_back,
    "remat": remat,
    "scan_remat_grad": scan_remat_grad,
}


def sharded_over(x: Any, mesh: Mesh, *entries: Any) -> bool:
    """Tell whether an array is sharded by a literal spec."""
    return bool(x.sharding.is_equivalent_to(NamedSharding(mesh, P(*entries)), x.ndim))


def assert_like(actual: Any, wanted: Any) -> None:
    """Compare two trees of arrays: the same dtypes, the same values to float32 tolerance."""
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    for leaf, other in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert leaf.dtype == other.dtype
        np.testing.assert_allclose(
            np.asarray(leaf, np.float64), np.asarray(other, np.float64), rtol=2e-5, atol=2e-6
        )


def counting(f: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """Return a function that calls `f`, and a list that grows with each call or trace."""
    calls: list[int] = []

    def counted(*args: Any) -> Any:
        calls.append(len(calls))
        return f(*args)

    return counted, calls
