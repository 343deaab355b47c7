"""Splash at the edges of a padded block of 128 rows: one row, one less, a whole one, one more."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.attention import dot_product_attention
from shardwright.attention.call import Arithmetic, Operands
from shardwright.attention.kernels import vanilla
from shardwright.attention.kernels.splash_blocks import SplashBlocks
from shardwright.attention.masks import MaskRules
from tests.attention.conformance import QUICK

EDGES = (1, 127, 128, 129)


RECIPE = Arithmetic(scale=0.3, mask=MaskRules(causal=True), q_block=128, kv_block=128)


@pytest.mark.full
@pytest.mark.parametrize(("q_length", "kv_length"), [*itertools.product(EDGES, EDGES)])
def test_gradients_at_block_edges(q_length: int, kv_length: int) -> None:
    """With sinks, the logsumexp, and half as many kv heads."""
    draw = np.random.default_rng(0).standard_normal
    shapes = {"q": (2, q_length, 4, 8), "k": (2, kv_length, 2, 8), "v": (2, kv_length, 2, 8)}
    floats = {name: jnp.float32(draw(shape)) for name, shape in (*shapes.items(), ("sinks", (4,)))}
    positions = {
        "q_positions": jnp.arange(q_length)[None],
        "kv_positions": jnp.arange(kv_length)[None],
    }

    def of_splash(operands: Operands) -> tuple[jax.Array, jax.Array]:
        o, lse, _ = SplashBlocks(interpret=True).attend(operands, RECIPE)
        return o, lse

    def of_vanilla(operands: Operands) -> tuple[jax.Array, jax.Array]:
        result = vanilla.attend(operands, RECIPE)
        return result.o, result.lse

    def both(attend: Callable[[Operands], tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        def loss(floats: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            o, lse = attend(Operands(**floats, **positions))
            return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(lse)), o

        gradient = jax.value_and_grad(loss, has_aux=True)
        return jax.tree.leaves(jax.jit(gradient, compiler_options=QUICK)(floats))

    for actual, want in zip(both(of_splash), both(of_vanilla), strict=True):
        np.testing.assert_allclose(actual, want, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_gradient_of_one_query() -> None:
    """Attention pooling."""
    q, k = jnp.ones((2, 1, 2, 8)), jax.random.normal(jax.random.key(0), (2, 9, 2, 8))

    def loss(k: jax.Array, implementation: str) -> jax.Array:
        o = dot_product_attention(q, k, k, mode="train", implementation=implementation)
        return jnp.sum(jnp.sin(o))

    actual, want = (jax.grad(loss)(k, name) for name in ("splash", "vanilla"))
    np.testing.assert_allclose(actual, want, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("q_length", EDGES)
def test_state_at_block_edges(q_length: int) -> None:
    """Keys in two sets, as ring attention adds them: the state is padded and cut again."""
    recipe = Arithmetic(scale=0.3, mask=MaskRules(), q_block=128, kv_block=128)
    draw = np.random.default_rng(0).standard_normal
    q, k, v = (jnp.float32(draw((1, length, 2, 8))) for length in (q_length, 129, 129))
    positions = {"q_positions": jnp.arange(q_length)[None]}
    splash = SplashBlocks(interpret=True)

    def part(rows: slice) -> Operands:
        return Operands(
            q=q, k=k[:, rows], v=v[:, rows], kv_positions=jnp.arange(129)[None, rows], **positions
        )

    first, second, whole = part(slice(1)), part(slice(1, None)), part(slice(None))
    state = splash.forward(second, recipe, state=splash.forward(first, recipe))
    o, lse, _ = splash.finish(state, whole)
    want, pull_back = jax.vjp(
        lambda q, k, v: vanilla.attend(whole.replace(q=q, k=k, v=v), recipe).o, q, k, v
    )
    np.testing.assert_allclose(o, want, rtol=2e-6, atol=2e-6)
    do = jnp.cos(want)
    rows = {"lse": lse, "do": do, "delta": jnp.einsum("bthd,bthd->bht", o, do)}
    once = splash.backward(second, recipe, **rows)
    both = splash.backward(second, recipe, **rows, onto=once)
    np.testing.assert_allclose(both.q, 2 * once.q, rtol=1e-5, atol=1e-5)
    dq, dk, dv = pull_back(do)
    np.testing.assert_allclose(once.k, dk[:, 1:], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(both.v, 2 * dv[:, 1:], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(once.q + splash.backward(first, recipe, **rows).q, dq, atol=1e-5)
