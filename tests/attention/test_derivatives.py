"""Every kind of derivative through every implementation, or a clear refusal."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.attention import dot_product_attention
from shardwright.testing import cpu_mesh
from shardwright.testing.attention_cases import STRATEGY
from tests.attention.conformance import QUICK
from tests.raising import raises

Arrays = tuple[jax.Array, ...]
MESHES = {
    "ring": "sp:2",
    "ulysses": "sp:2",
    "allgather_kv": "sp:2",
    "flash_decode": "sp:2",
    "blockwise": "dp:2",
}


def arrays() -> Arrays:
    shapes = ((2, 4, 2, 4), (2, 4, 2, 4), (2, 4, 2, 4), (1, 2, 4, 4), (2,))
    return tuple(
        jnp.asarray(np.random.default_rng(at).normal(size=shape), jnp.float32)
        for at, shape in enumerate(shapes)
    )


def loss(given: Arrays, *, implementation: str) -> jax.Array:
    *qkv, bias, sinks = given
    mode = "decode" if implementation == "flash_decode" else "train"
    more = {} if implementation == "sdpa" else {"sinks": sinks}
    return jnp.sum(
        jnp.sin(
            dot_product_attention(
                *qkv, bias=bias, causal=True, mode=mode, implementation=implementation, **more
            )
        )
    )


def derivatives(f: Callable[[Arrays], jax.Array], given: Arrays) -> Any:
    """A gradient, and a product of the Hessian with a direction in both orders of modes."""
    along = tuple(jnp.cos(3 * x) for x in given)

    def slope(given: Arrays) -> jax.Array:
        return sum(map(jnp.vdot, jax.grad(f)(given), along))

    return jax.jvp(jax.grad(f), (given,), (along,)), jax.grad(slope)(given)


@pytest.mark.full
@pytest.mark.parametrize(
    "implementation", ["blockwise", "ring", "ulysses", "allgather_kv", "flash_decode", "sdpa"]
)
@pytest.mark.ci
def test_derivatives_of_gradients(implementation: str) -> None:
    pm = sw.PartitionManager(
        sw.Strategy.loads(STRATEGY), mesh=cpu_mesh(MESHES.get(implementation, "dp:1"))
    )
    f = functools.partial(loss, implementation=implementation)
    with pm:
        actual = jax.jit(lambda given: derivatives(f, given), compiler_options=QUICK)(arrays())
    reference = functools.partial(loss, implementation="vanilla")
    if implementation == "sdpa":

        def reference(given: Arrays) -> jax.Array:
            return loss((*given[:4], jnp.full(2, -jnp.inf)), implementation="vanilla")

    want = jax.jit(lambda given: derivatives(reference, given), compiler_options=QUICK)(arrays())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), actual, want)


@pytest.mark.full
def test_hessian_and_batched_gradients() -> None:
    q, *rest = arrays()

    def of_q(q: jax.Array, implementation: str) -> jax.Array:
        return loss((q, *rest), implementation=implementation)

    def everything(q: jax.Array, implementation: str) -> Any:
        f = functools.partial(of_q, implementation=implementation)
        batch = jnp.stack([q, 2 * q])
        return (
            jax.vmap(jax.grad(f))(batch),
            jax.grad(lambda batch: jnp.sum(jax.vmap(f)(batch)))(batch),
        )

    actual, want = (
        jax.jit(everything, static_argnums=1, compiler_options=QUICK)(q, name)
        for name in ("blockwise", "vanilla")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), actual, want)
    actual, want = (
        jax.jit(
            lambda row, name=name: jax.hessian(lambda row: of_q(q.at[0, 1].set(row), name))(row),
            compiler_options=QUICK,
        )(q[0, 1])
        for name in ("blockwise", "vanilla")
    )
    np.testing.assert_allclose(actual, want, atol=1e-5)


@pytest.mark.full(but=["ring", "blockwise"])
@pytest.mark.parametrize("implementation", ["blockwise", "ring", "allgather_kv", "ulysses"])
@pytest.mark.ci
def test_saved_names_avoid_second_forward_pass(implementation: str) -> None:
    """Count the products in the program: a forward pass has two for each read of the keys."""
    pm = sw.PartitionManager(sw.Strategy.loads(STRATEGY), mesh=cpu_mesh(MESHES[implementation]))
    q, k, v, _, _ = arrays()

    def attend(q: jax.Array) -> jax.Array:
        return dot_product_attention(q, k, v, mode="train", implementation=implementation)

    def products(policy: Any) -> int:
        checkpointed = jax.checkpoint(attend, policy=policy)
        with pm:
            grad = jax.grad(lambda q: jnp.sum(jnp.sin(checkpointed(q))))
            return count_products(jax.make_jaxpr(grad)(q).jaxpr)

    save = jax.checkpoint_policies
    again = products(save.nothing_saveable)
    once = products(save.save_only_these_names("attention_output", "attention_lse"))
    with pm:
        forward = count_products(jax.make_jaxpr(attend)(q).jaxpr)
    assert again - once == forward > 0


def count_products(jaxpr: Any) -> int:
    """Count the products of a program. Its text shows a function once that is called twice."""
    count = 0
    for equation in jaxpr.eqns:
        count += equation.primitive.name == "dot_general"
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            count += count_products(inner) if hasattr(inner, "eqns") else 0
    return count


@pytest.mark.full(but=["dp:2"])
@pytest.mark.parametrize("mesh", ["", "dp:2"])
@pytest.mark.ci
def test_splash_refuses_derivatives_of_gradients(mesh: str) -> None:
    q, k, v = (jnp.ones((2, 128, 1, 128)) for _ in range(3))

    def f(q: jax.Array) -> jax.Array:
        return jnp.sum(
            dot_product_attention(q, k, v, causal=True, mode="train", implementation="splash")
        )

    pm = sw.PartitionManager(sw.Strategy.loads(STRATEGY), mesh=cpu_mesh(mesh)) if mesh else None
    with contextlib.nullcontext() if pm is None else pm:
        for derivative in (
            lambda: jax.jvp(jax.grad(f), (q,), (q,)),
            lambda: jax.jit(jax.hessian(f))(q),
        ):
            with raises(
                sw.AttentionError, "splash", "hessian", "jvp", path="implementation", fix="vanilla"
            ):
                derivative()


@pytest.mark.full(but=["blockwise"])
@pytest.mark.parametrize("implementation", ["blockwise", "sdpa", "splash"])
@pytest.mark.ci
def test_forward_mode_alone_is_refused(implementation: str) -> None:
    """JAX refuses it, and names the mode. `vanilla` has it."""

    def f(q: jax.Array, implementation: str) -> jax.Array:
        return dot_product_attention(q, q, q, mode="train", implementation=implementation)

    q = jnp.ones((2, 8, 1, 8))
    _, slope = jax.jvp(lambda q: f(q, "vanilla"), (q,), (q,))
    np.testing.assert_allclose(slope, q, atol=1e-6)
    with pytest.raises(TypeError, match=r"forward-mode .* custom_vjp"):
        jax.jvp(lambda q: f(q, implementation), (q,), (q,))
