"""Splash on every shard: rows without keys, skipped blocks, what it refuses, what it sends."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.attention import explain
from shardwright.attention.api import dot_product_attention
from shardwright.attention.kernels import splash
from shardwright.testing import assert_collectives, assert_no_collectives, cpu_mesh
from tests.attention.conformance import QUICK

# Minutes of compiling: the conformance table has a few cells of every implementation by default.
pytestmark = pytest.mark.full

RULES = '[rules]\nbatch = "dp"\nhead = "tp"\nkv_head = "tp | -"\n'


def arrays(
    *, q_length: int = 128, kv_length: int = 128, kv_heads: int = 1, batch: int = 2
) -> tuple[jax.Array, ...]:
    shapes = (
        (batch, q_length, 2, 8),
        (batch, kv_length, kv_heads, 8),
        (batch, kv_length, kv_heads, 8),
    )
    return tuple(jax.random.normal(jax.random.key(at), shape) for at, shape in enumerate(shapes))


def both(implementation: str, given: tuple[jax.Array, ...], **options: Any) -> Any:
    def loss(given: tuple[jax.Array, ...]) -> Any:
        o = dot_product_attention(*given, mode="train", implementation=implementation, **options)
        return jnp.sum(jnp.sin(o)), o

    (_, o), grads = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)(given)
    return o, *grads


# Several blocks each, some of which nobody sees; the first of each sequence's queries see no key.
CASES: dict[str, dict[str, Any]] = {
    "more queries than keys": {"q_length": 300, "kv_length": 140, "causal": True},
    "a window over a longer past": {"q_length": 130, "kv_length": 500, "window": (20, 0)},
    "nobody's segment": {
        "segment_ids": jnp.zeros((2, 128), jnp.int32).at[:, :9].set(-(2**30)),
        "kv_segment_ids": jnp.zeros((2, 128), int),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle_with_skipped_blocks(name: str) -> None:
    options = dict(CASES[name])
    given = arrays(
        **{size: options.pop(size) for size in ("q_length", "kv_length") if size in options}
    )
    actual, wanted = both("splash", given, **options), both("vanilla", given, **options)
    for computed, want, tolerance in zip(actual, wanted, (2e-6, 1e-5, 1e-5, 1e-5), strict=True):
        assert np.isfinite(computed).all()
        np.testing.assert_allclose(computed, want, rtol=tolerance, atol=tolerance)
    nothing = ~np.any(wanted[0], axis=-1)  # queries that see no key
    assert np.any(nothing) == (name != "a window over a longer past")
    assert not np.any(actual[0][nothing])
    assert not np.any(actual[1][nothing])


def exact(given: tuple[Any, ...], do: Any) -> tuple[Any, ...]:
    """Return a softmax's output and gradients, in float64, of the head that is there."""
    q, k, v, do = (np.asarray(item, np.float64)[0, :, 0] for item in (*given, do))
    scale = q.shape[1] ** -0.5
    logits = q @ k.T * scale
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    dp = do @ v.T
    ds = p * (dp - (p * dp).sum(axis=1, keepdims=True)) * scale
    return p @ v, ds @ k, ds.T @ q, p.T @ do


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_any_scale_is_exact_in_bfloat16(head_dim: int) -> None:
    random = np.random.default_rng(0)
    q, k, v, do = (
        jnp.asarray(random.standard_normal((1, 128, 1, head_dim)) * spread, "bfloat16")
        for spread in (36, 1, 1, 1)
    )
    o, pull_back = jax.vjp(
        functools.partial(dot_product_attention, mode="train", implementation="splash"), q, k, v
    )
    for actual, want in zip((o, *pull_back(do)), exact((q, k, v), do), strict=True):
        error = np.asarray(actual, np.float64)[0, :, 0] - want
        assert np.linalg.norm(error) <= 2e-2 * np.linalg.norm(want)


def test_logsumexp_has_a_gradient() -> None:
    given = arrays(q_length=130, kv_length=200)

    def loss(given: tuple[jax.Array, ...], implementation: str) -> Any:
        output = dot_product_attention(
            *given, mode="train", causal=True, return_lse=True, implementation=implementation
        )
        return jnp.sum(jnp.sin(output.o)) + jnp.sum(jnp.cos(output.lse))

    actual, wanted = (jax.grad(loss)(given, name) for name in ("splash", "vanilla"))
    for computed, want in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(computed, want, rtol=1e-5, atol=1e-5)


def test_positions_as_arrays() -> None:
    given, positions = arrays(), jnp.asarray(np.random.default_rng(0).permutation(128))
    options = {"causal": True, "window": (30, 0), "positions": positions}
    actual, wanted = both("splash", given, **options), both("vanilla", given, **options)
    for computed, want in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(computed, want, rtol=1e-5, atol=1e-5)


def lowered(
    mesh: str,
    *,
    axis_types: Any = "auto",
    kv_heads: int = 2,
    dtype: str = "float32",
    **options: Any,
) -> Any:
    """A forward and a backward pass on a mesh, and the mesh."""
    pm = sw.PartitionManager(sw.Strategy.loads(RULES), mesh=cpu_mesh(mesh, axis_types=axis_types))
    axes = (
        (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM),
        *[(sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM)] * 2,
    )

    def run(given: tuple[jax.Array, ...], do: jax.Array) -> Any:
        attend = functools.partial(
            dot_product_attention, mode="train", implementation="splash", **options
        )
        o, pull_back = jax.vjp(attend, *given)
        return o, pull_back(do)

    with pm:
        laid = tuple(
            pm.shard(x.astype(dtype), *names)
            for x, names in zip(arrays(kv_heads=kv_heads), axes, strict=True)
        )
        return jax.jit(run, compiler_options=QUICK).lower(laid, laid[0]), pm.mesh


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_no_communication_over_batch_and_heads(axis_types: str) -> None:
    program, mesh = lowered("dp:2,tp:2", axis_types=axis_types, causal=True)
    assert_no_collectives(program, mesh=mesh)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_kv_head_gradients_sum_in_float32(
    dtype: str,
) -> None:
    program, mesh = lowered("dp:2,tp:2", causal=True, kv_heads=1, dtype=dtype)
    of_one = 4 * 1 * 128 * 8
    assert_collectives(
        program, all_reduce=range(1, 3), bytes=2 * of_one, axis="tp", mesh=mesh, only=True
    )


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.parametrize("mesh", ["ep:2,dp:2", "ep:2,tp:2"])
def test_unused_mesh_axis(mesh: str, axis_types: Any) -> None:
    given, sinks = arrays(kv_heads=2), jnp.array([0.5, -0.5])
    wanted = both("vanilla", given, causal=True, sinks=sinks)
    with sw.PartitionManager(sw.Strategy.loads(RULES), mesh=cpu_mesh(mesh, axis_types=axis_types)):
        actual = both("splash", given, causal=True, sinks=sinks)
    for computed, want, tolerance in zip(actual, wanted, (2e-6, 1e-5, 1e-5, 1e-5), strict=True):
        np.testing.assert_allclose(computed, want, rtol=tolerance, atol=tolerance)
    program, where = lowered(mesh, axis_types=axis_types, causal=True)
    assert_no_collectives(program, mesh=where)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"return_weights": True}, "it never has all weights at once, and the call asks for them"),
        ({"mask": jnp.ones((1, 1, 128, 128), bool)}, "it takes no dense mask"),
        ({"bias": jnp.ones((1, 1, 128, 128))}, "it takes no bias"),
        ({"dropout": 0.5, "dropout_key": 1}, "it has no dropout, and dropout is 0.5"),
    ],
)
def test_refusals(options: dict[str, Any], says: str) -> None:
    call = explain(*arrays(), mode="train", **options).call
    assert splash.supports(call) == (says,)


def test_gpu_and_float16_are_refused() -> None:
    call = explain(*arrays(), mode="train").call
    gpu, half = (
        dataclasses.replace(call, platform="gpu"),
        dataclasses.replace(call, dtype="float16"),
    )
    assert splash.supports(gpu) == ("its kernel is for TPUs, and the platform is gpu",)
    assert splash.supports(half) == ("TPUs do not compute in float16",)


def test_auto_choice_on_tpus() -> None:
    from shardwright.attention.choose import choose

    call = dataclasses.replace(explain(*arrays(), mode="train", causal=True).call, platform="tpu")
    assert choose(call).name == "splash"
    refused = choose(dataclasses.replace(call, bias_shape=(1, 1, 128, 128)))
    assert refused.name == "blockwise"
    assert "not   splash: it takes no bias" in str(refused)
