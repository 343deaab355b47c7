"""gather in forward mode: jvp, jacfwd and Hessians, in every program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.testing import assert_collectives
from tests.manager.programs import (
    AXIS_TYPES,
    TRANSFORMS,
    assert_like,
    make_manager,
    numbers,
    sharded_over,
)

KERNEL = (sw.EMBED, sw.MLP_INTERMEDIATE)

Gather = Callable[[Any], Any]


def loss(gather: Gather, w: Any) -> Any:
    return jnp.sum(jnp.sin(gather(w)) ** 2 * numbers(*np.shape(w)))


def jvp(gather: Gather, w: Any, v: Any) -> Any:
    return jax.jvp(lambda w: loss(gather, w), (w,), (v,))


def jacfwd(gather: Gather, w: Any, v: Any) -> Any:
    return jax.jacfwd(lambda w: loss(gather, w))(w)


def linearize(gather: Gather, w: Any, v: Any) -> Any:
    y, apply = jax.linearize(lambda w: loss(gather, w), w)
    return y, apply(v)


def hessian(gather: Gather, w: Any, v: Any) -> Any:
    return jax.hessian(lambda w: loss(gather, w))(w)


def forward_over_reverse(gather: Gather, w: Any, v: Any) -> Any:
    return jax.jvp(jax.grad(lambda w: loss(gather, w)), (w,), (v,))[1]


def reverse_over_forward(gather: Gather, w: Any, v: Any) -> Any:
    return jax.grad(lambda w: jvp(gather, w, v)[1])(w)


def forward_over_forward(gather: Gather, w: Any, v: Any) -> Any:
    return jax.jvp(lambda w: jvp(gather, w, v)[1], (w,), (v,))


def reverse_over_reverse(gather: Gather, w: Any, v: Any) -> Any:
    return jax.grad(lambda w: jnp.sum(jax.grad(lambda w: loss(gather, w))(w) * v))(w)


DERIVATIVES = (
    jvp,
    jacfwd,
    linearize,
    hessian,
    forward_over_reverse,
    reverse_over_forward,
    forward_over_forward,
    reverse_over_reverse,
)


CASES = [(kind, True) for kind in AXIS_TYPES] + [("auto", False), ("tp explicit", False)]


@pytest.mark.parametrize(("kind", "jit"), CASES)
@pytest.mark.full(but=["auto-True"])
def test_derivatives_equal_unsharded(kind: str, jit: bool) -> None:
    pm = make_manager(kind, sizes="dp:2,tp:2")
    w, v = numbers(2, 4), numbers(2, 4)[::-1] * 2
    derivatives = DERIVATIVES if jit else (jvp, forward_over_reverse, reverse_over_forward)

    def run(gather: Gather, w: Any, v: Any) -> Any:
        return {derivative.__name__: derivative(gather, w, v) for derivative in derivatives}

    placed = pm.shard(w, *KERNEL, role="param"), pm.shard(v, *KERNEL, role="param")
    with pm:
        f = lambda w, v: run(lambda w: sw.gather(w, *KERNEL), w, v)  # noqa: E731
        actual = (jax.jit(f) if jit else f)(*placed)
    assert_like(actual, jax.jit(lambda w, v: run(lambda w: w, w, v))(w, v))


@pytest.mark.parametrize("kind", list(AXIS_TYPES))
@pytest.mark.parametrize("name", list(TRANSFORMS))
@pytest.mark.full(but=["plain-auto", "scan-explicit", "pull_back-explicit"])
def test_jvp_in_every_program(name: str, kind: str) -> None:
    pm = make_manager(kind)
    w, v = numbers(8, 12), numbers(8, 12) * 3

    def run(gather: Gather) -> Any:
        f = TRANSFORMS[name](lambda w: jnp.sin(gather(w)))
        return lambda w, v: jax.jvp(f, (w,), (v,))

    # Over Explicit axes a scan's carry keeps its type: gathered values return to the stored spec.
    def gather(w: Any) -> Any:
        return pm.shard(pm.gather(w, *KERNEL), *KERNEL, role="param")

    placed = pm.shard(w, *KERNEL, role="param"), pm.shard(v, *KERNEL, role="param")
    with pm:
        actual = jax.jit(run(gather))(*placed)
    assert_like(actual, run(lambda w: w)(w, v))


@pytest.mark.parametrize("kind", list(AXIS_TYPES))
@pytest.mark.full(but=["auto"])
def test_vmap_of_jvp_and_jvp_of_vmap(kind: str) -> None:
    pm = make_manager(kind)
    ws, v = np.stack([numbers(8, 12), numbers(8, 12) + 1]), numbers(8, 12)
    for order in (
        lambda f: jax.vmap(lambda w: jax.jvp(f, (w,), (v,))[1]),
        lambda f: lambda ws: jax.jvp(jax.vmap(f), (ws,), (ws * 2,))[1],
        lambda f: jax.vmap(jax.grad(lambda w: f(w).sum())),
    ):
        with pm:
            actual = jax.jit(order(lambda w: jnp.sin(sw.gather(w, *KERNEL))))(ws)
        assert_like(actual, order(jnp.sin)(ws))


def test_gradient_and_hessian_are_as_stored() -> None:
    pm = make_manager()
    w = pm.shard(numbers(8, 12), *KERNEL, role="param")
    f = lambda w: loss(lambda w: pm.gather(w, *KERNEL), w)  # noqa: E731
    assert sharded_over(jax.jit(jax.grad(f))(w), pm.mesh, "dp", "tp")
    product = jax.jit(lambda w, v: jax.jvp(jax.grad(f), (w,), (v,))[1])
    assert sharded_over(product(w, w), pm.mesh, "dp", "tp")


def test_collectives_of_a_jvp() -> None:
    """The weight and its tangent are gathered once each. Nothing else of that size is sent."""
    pm = make_manager("auto", sizes="dp:8,tp:1")
    x, w = numbers(16, 32), numbers(32, 64)

    def apply(w: Any, x: Any) -> Any:
        return pm.shard(x @ pm.gather(w, *KERNEL), sw.BATCH, sw.EMPTY)

    placed = pm.shard(w, *KERNEL, role="param"), pm.shard(x, sw.BATCH, sw.EMPTY)
    forward = jax.jit(lambda w, x: jax.jvp(lambda w: apply(w, x), (w,), (w,)))
    assert_collectives(forward, *placed, all_gather=2, mesh=pm.mesh)
    assert_like(forward(*placed), (jnp.asarray(x @ w), jnp.asarray(x @ w)))
