"""Over a sharded sequence each shard runs the platform's own kernel, or blocks with a reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.attention import explain, zigzag
from shardwright.attention.api import dot_product_attention
from shardwright.attention.choose import choose
from shardwright.attention.implementation import find
from shardwright.attention.inputs import read, read_options
from shardwright.attention.kernels import cudnn
from shardwright.testing import cpu_mesh
from tests.attention.conformance import QUICK

# Minutes of interpreting.
full = pytest.mark.full

RULES = """
[rules]
batch = "dp"
query_length = "sp"
kv_length = "sp"
head = "tp"
kv_head = "tp | -"
"""
NAMES = ("ring", "ulysses", "allgather_kv")


def arrays(rows: int = 256, *, kv_heads: int = 2, dtype: str = "float32") -> tuple[jax.Array, ...]:
    shapes = ((2, rows, 4, 16), (2, rows, kv_heads, 16), (2, rows, kv_heads, 16))
    return tuple(
        jnp.asarray(np.random.default_rng(at).normal(size=shape), dtype)
        for at, shape in enumerate(shapes)
    )


def manager(mesh: str, axis_types: Any = "auto") -> sw.PartitionManager:
    return sw.PartitionManager(
        sw.Strategy.loads(RULES), mesh=cpu_mesh(mesh, axis_types=axis_types)
    ).for_mode("train")


def as_on(platform: str, name: str, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run an implementation as it does on another platform; kernels for TPUs are interpreted."""
    operands, call = read(*given, read_options({**options, "mode": "train"}))
    call = dataclasses.replace(call, platform=platform)
    inner = choose(call, implementation=name).inner
    assert inner == {"tpu": "splash on each shard", "gpu": "cudnn on each shard"}[platform]
    return find(name).run(operands, call)


def value_and_grads(run: Callable[[tuple[Any, ...]], Any], given: tuple[Any, ...]) -> Any:
    def loss(given: tuple[Any, ...]) -> Any:
        result = run(given)
        o = result if isinstance(result, jax.Array) else result.o
        total = jnp.sum(jnp.sin(o.astype(jnp.float32)))
        if o is not result and result.lse is not None:
            total += jnp.sum(jnp.where(jnp.isneginf(result.lse), 0.0, jnp.cos(result.lse)))
        return total, o

    (_, o), grads = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)(given)
    return o, *grads


def check(
    platform: str,
    name: str,
    mesh: str,
    given: tuple[Any, ...],
    *,
    axis_types: Any = "auto",
    tolerance: float = 1e-5,
    **options: Any,
) -> None:
    """Compare values and gradients, of sinks too, with those of one device."""
    given = (*given, options.pop("sinks")) if "sinks" in options else given

    def with_sinks(rest: tuple[Any, ...]) -> dict[str, Any]:
        return {**options, "sinks": rest[0]} if rest else options

    def oracle(given: tuple[Any, ...]) -> Any:
        q, k, v, *rest = given
        return dot_product_attention(
            q, k, v, mode="train", implementation="vanilla", **with_sinks(tuple(rest))
        )

    def sharded(given: tuple[Any, ...]) -> Any:
        return as_on(platform, name, given[:3], with_sinks(given[3:]))

    wanted = value_and_grads(oracle, given)
    with manager(mesh, axis_types):
        actual = value_and_grads(sharded, given)
    pairs = zip(actual, wanted, strict=True)
    for pair, want in ((np.asarray(a, np.float32), np.asarray(b, np.float32)) for a, b in pairs):
        assert np.isfinite(pair).all()
        assert np.linalg.norm(pair - want) <= tolerance * max(1.0, float(np.linalg.norm(want)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.full
def test_splash_runs_on_each_shard(name: str) -> None:
    check("tpu", name, "sp:2", arrays(), causal=True)


SEGMENTS = np.sort(np.random.default_rng(0).integers(0, 3, (2, 256), np.int32))
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "window, capped": {"causal": True, "window": (40, 0), "softcap": 5.0},
    "packed": {"causal": True, "segment_ids": SEGMENTS},
    "lengths": {"lengths": np.array([0, 131], np.int32)},
    "zigzag": {"causal": True, "positions": np.asarray(zigzag.positions(256, shards=4))},
    "sinks, logsumexp": {"causal": True, "sinks": jnp.array([1.0, 0, 2, -1]), "return_lse": True},
}


@full
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.alternate
def test_equals_one_device(name: str, case: str) -> None:
    check("tpu", name, "sp:4", arrays(), **CASES[case])


@full
@pytest.mark.parametrize("name", NAMES)
def test_one_kv_head_over_three_mesh_axes(name: str) -> None:
    check("tpu", name, "dp:2,sp:2,tp:2", arrays(kv_heads=1), axis_types="explicit", causal=True)


@full
@pytest.mark.parametrize("name", ["ring", "allgather_kv"])
def test_shards_of_odd_length(name: str) -> None:
    check("tpu", name, "sp:3", arrays(3 * 67), causal=True)


@pytest.mark.full
@pytest.mark.ci
def test_cudnn_runs_in_ulysses(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's attention replaces cuDNN's: both compute the same."""
    monkeypatch.setattr(cudnn, "failure_on", lambda kind: "")
    real, requests = jax.nn.dot_product_attention, []

    def by_xla(*given: Any, implementation: str, **rest: Any) -> Any:
        requests.append(implementation)
        return real(*given, implementation="xla", **rest)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    check("gpu", "ulysses", "sp:2", arrays(32, dtype="bfloat16"), tolerance=1e-2, causal=True)
    assert set(requests) == {"cudnn"}


@pytest.mark.parametrize(
    ("platform", "options", "says"),
    [
        ("tpu", {"bias": jnp.zeros((1, 1, 256, 256))}, "splash cannot: it takes no bias"),
        ("tpu", {"dropout": 0.5, "dropout_key": 1}, "splash cannot: it has no dropout"),
        ("gpu", {"softcap": 3.0}, "cudnn cannot: it has no softcap"),
    ],
)
def test_blocks_serve_what_the_kernel_refuses(
    platform: str, options: dict[str, Any], says: str
) -> None:
    with manager("sp:2"):
        call = explain(*arrays(dtype="bfloat16"), implementation="ulysses", **options).call
    text = str(choose(dataclasses.replace(call, platform=platform), implementation="ulysses"))
    assert f"  runs  blockwise on each shard; {says}" in text


def test_no_choice_on_cpus() -> None:
    with manager("sp:2"):
        assert "runs" not in str(explain(*arrays(), implementation="ring"))
