"""`jax.nn.dot_product_attention`: rows without keys are zeros; when cuDNN is tried and refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.attention import explain
from shardwright.attention.api import dot_product_attention
from shardwright.attention.call import AttentionCall
from shardwright.attention.inputs import read, read_options
from shardwright.attention.kernels import cudnn, sdpa
from shardwright.testing import assert_no_collectives, cpu_mesh
from tests.attention.conformance import QUICK
from tests.raising import raises

# Minutes of compiling: the conformance table has a few cells of every implementation by default.
pytestmark = pytest.mark.full

RULES = '[rules]\nbatch = "dp"\nhead = "tp"\nkv_head = "tp | -"\n'


def arrays(*, rows: int = 16, kv_heads: int = 2, dtype: str = "float32") -> tuple[jax.Array, ...]:
    shapes = ((4, rows, 4, 8), (4, 16, kv_heads, 8), (4, 16, kv_heads, 8))
    return tuple(
        jax.random.normal(jax.random.key(at), shape, dtype) for at, shape in enumerate(shapes)
    )


@pytest.fixture(autouse=True)
def _cudnn_is_not_known() -> Iterator[None]:
    yield
    cudnn.failure_on.cache_clear()


def value_and_grads(*, implementation: str, given: tuple[jax.Array, ...], **options: Any) -> Any:
    def loss(given: tuple[jax.Array, ...]) -> Any:
        o = dot_product_attention(*given, mode="train", implementation=implementation, **options)
        return jnp.sum(jnp.sin(o)), o

    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)(given)


def test_row_without_keys_is_exactly_zero() -> None:
    options = {"lengths": jnp.array([0, 16, 3, 9]), "given": arrays()}
    (_, o), grads = value_and_grads(implementation="sdpa", **options)
    (_, want), want_grads = value_and_grads(implementation="vanilla", **options)
    assert not np.any(o[0])
    assert all(not np.any(grad[0]) for grad in grads)
    np.testing.assert_allclose(o, want, atol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, want_grads)
    plain = jax.nn.dot_product_attention(
        *options["given"], key_value_seq_lengths=options["lengths"].astype(jnp.int32)
    )
    assert np.any(plain[0]), "JAX by itself returns the mean of the values"


def test_last_query_is_at_last_key() -> None:
    given = arrays(rows=4)
    (_, o), _ = value_and_grads(implementation="sdpa", given=given, causal=True)
    (_, want), _ = value_and_grads(implementation="vanilla", given=given, causal=True)
    np.testing.assert_allclose(o, want, atol=2e-6)
    assert np.abs(o - jax.nn.dot_product_attention(*given, is_causal=True)).max() > 0.1, (
        "JAX counts from the first key"
    )


@pytest.mark.parametrize("layout", ["BTHD", "BHTD"])
def test_bfloat16_sums_are_float32_in_every_layout(layout: str) -> None:
    shape = {"BTHD": (4, 200, 2, 8), "BHTD": (4, 2, 200, 8)}[layout]
    given = tuple(jax.random.normal(jax.random.key(at), shape, "bfloat16") for at in range(3))
    (_, o), grads = value_and_grads(implementation="sdpa", given=given, causal=True, layout=layout)
    exact = tuple(x.astype(jnp.float32) for x in given)
    (_, want), want_grads = value_and_grads(
        implementation="vanilla", given=exact, causal=True, layout=layout
    )
    for actual, wanted in zip((o, *grads), (want, *want_grads), strict=True):
        assert actual.dtype == jnp.bfloat16
        assert np.linalg.norm(actual.astype(jnp.float32) - wanted) <= 4e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize(("mesh", "kv_heads"), [("dp:2,tp:2", 2), ("dp:4", 1)])
def test_no_communication_over_batch_and_heads(mesh: str, kv_heads: int) -> None:
    pm = sw.PartitionManager(sw.Strategy.loads(RULES), mesh=cpu_mesh(mesh))
    given = arrays(kv_heads=kv_heads)
    axes = (
        (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM),
        *[(sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM)] * 2,
    )

    def both(given: tuple[jax.Array, ...], do: jax.Array) -> Any:
        attend = functools.partial(
            dot_product_attention, mode="train", implementation="sdpa", causal=True
        )
        o, pull_back = jax.vjp(attend, *given)
        return o, pull_back(do)

    with pm:
        laid = tuple(pm.shard(x, *names) for x, names in zip(given, axes, strict=True))
        compiled = jax.jit(both, compiler_options=QUICK).lower(laid, laid[0]).compile()
    assert_no_collectives(compiled, mesh=pm.mesh)


def call_of(*, dtype: str = "bfloat16", rows: int = 16, **options: Any) -> AttentionCall:
    return explain(
        *arrays(rows=rows, dtype=dtype), mode="train", implementation="sdpa", **options
    ).call


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"softcap": 2.0}, "it has no softcap, and softcap is 2.0"),
        ({"sinks": jnp.zeros(4)}, "it has no sinks"),
        ({"dropout": 0.5, "dropout_key": 1}, "it has no dropout, and dropout is 0.5"),
        ({"return_lse": True}, "its logsumexp has no gradient"),
        ({"return_weights": True}, "it never has all weights at once, and the call asks for them"),
    ],
)
def test_missing_arguments_are_refused(options: dict[str, Any], says: str) -> None:
    assert sdpa.supports(call_of(**options)) == (says,)


def on_gpu(monkeypatch: pytest.MonkeyPatch, *, failure: str = "") -> None:
    """Pretend that cuDNN was tried on the machine, as after the first call."""
    monkeypatch.setattr(cudnn, "failure_on", lambda kind: failure)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "float32"}, "it computes in bfloat16 and float16, and the call is in float32"),
        ({"segment_ids": jnp.zeros((4, 16), jnp.int32)}, "it takes no segments"),
        (
            {"mask": jnp.ones((1, 1, 16, 16), bool)},
            "it adds a dense mask to the logits, and the sums overflow",
        ),
        (
            {"bias": jnp.ones((1, 1, 16, 16))},
            "its gradient of a bias depends on the shape of the bias",
        ),
        ({"causal": True, "chunk": 4}, "it does not compute in chunks, and chunk is 4"),
        ({"window": (3, 3)}, "its window ends at the query, and window is (3, 3)"),
        ({"window": (3, None)}, "its window ends at the query, and window is (3, None)"),
        (
            {"causal": True, "positions": jnp.arange(16)},
            "its masks count rows, and positions are arrays",
        ),
        (
            {"causal": True, "rows": 4},
            "its first query is at position 0, and that of the call is at 12",
        ),
        (
            {"window": (3, 0), "lengths": jnp.ones(4, jnp.int32)},
            "with a window and lengths a query may see no key, and its result is undefined",
        ),
        ({"softcap": 2.0}, "it has no softcap, and softcap is 2.0"),
    ],
)
def test_limits_of_cudnn_are_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], says: str
) -> None:
    on_gpu(monkeypatch)
    assert cudnn.supports(dataclasses.replace(call_of(**options), platform="gpu")) == (says,)


def test_cudnn_inside_shard_map_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch)
    call, mesh = dataclasses.replace(call_of(), platform="gpu"), cpu_mesh("dp:2")
    seen = []

    def local(x: jax.Array) -> jax.Array:
        seen.append(cudnn.supports(call))
        return x

    jax.make_jaxpr(jax.shard_map(local, mesh=mesh, in_specs=jax.P("dp"), out_specs=jax.P("dp")))(
        jnp.zeros(2)
    )
    assert seen == [("it cannot run inside a shard_map over all mesh axes, dp",)]


@pytest.mark.parametrize("dim", [4, 136])
def test_head_dims_of_cudnn(monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    on_gpu(monkeypatch)
    call = dataclasses.replace(call_of(), platform="gpu", head_dim=dim, v_dim=dim)
    assert cudnn.supports(call) == (
        f"its head_dim is a multiple of 8 up to 128, and head_dim is {dim}",
    )


CUDNN: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"causal": True, "window": (3, None)},
    "window to the left": {"window": (5, 0), "scale": 0.3},
    "causal lengths": {"causal": True, "lengths": jnp.array([0, 16, 3, 9])},
}


@pytest.mark.parametrize("name", CUDNN)
def test_arguments_passed_to_cudnn(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Both implementations of JAX mean the same, so XLA's replaces cuDNN's without a GPU."""
    on_gpu(monkeypatch)
    real, requests = jax.nn.dot_product_attention, []

    def by_xla(*given: Any, implementation: str, **rest: Any) -> Any:
        requests.append(implementation)
        return real(*given, implementation="xla", **rest)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    given, options = arrays(dtype="bfloat16"), read_options({**CUDNN[name], "mode": "train"})
    pm = sw.PartitionManager(sw.Strategy.loads(RULES), mesh=cpu_mesh("dp:2,tp:2"))
    with pm:
        _, call = read(*given, options)
        call = dataclasses.replace(call, platform="gpu")
        assert cudnn.supports(call) == ()

        def loss(given: tuple[jax.Array, ...]) -> Any:
            o = cudnn.run(read(*given, options)[0], call).o
            return jnp.sum(jnp.sin(o.astype(jnp.float32))), o

        (_, o), grads = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)(
            given
        )
    assert requests == ["cudnn"]
    (_, want), want_grads = value_and_grads(implementation="vanilla", given=given, **CUDNN[name])
    pairs = zip((o, *grads), (want, *want_grads), strict=True)
    for actual, wanted in (
        (np.asarray(pair, np.float32), np.asarray(other, np.float32)) for pair, other in pairs
    ):
        assert np.linalg.norm(actual - wanted) <= 1e-2 * np.linalg.norm(wanted)
    if "lengths" in CUDNN[name]:
        assert not np.any(o[0])
        assert all(not np.any(grad[0]) for grad in grads)


def test_cudnn_is_not_tried_on_other_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "failure_on", lambda kind: pytest.fail("cuDNN was tried"))
    with raises(sw.AttentionError, "cudnn", snippet=("GPUs", "cpu"), fix="blockwise"):
        dot_product_attention(*arrays(dtype="bfloat16"), mode="train", implementation="cudnn")


def test_missing_gpu_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn.failure_on.cache_clear()
    call = dataclasses.replace(call_of(), platform="gpu")
    assert cudnn.supports(call) == ("this process has no GPU; its backend is cpu",)


def test_failure_of_cudnn_is_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudnn.failure_on.cache_clear()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    tried = []

    def fail(*given: Any, **rest: Any) -> Any:
        tried.append(rest["implementation"])
        raise RuntimeError("cuDNN is not detected.\nmore")

    monkeypatch.setattr(jax.nn, "dot_product_attention", fail)
    call = dataclasses.replace(call_of(), platform="gpu")
    # Also while something is being traced, on a mesh whose axes are Explicit.
    with jax.set_mesh(cpu_mesh("dp:2", axis_types="explicit")):
        jax.make_jaxpr(lambda: len(cudnn.supports(call)))()
    assert cudnn.supports(call) == ("cuDNN does not work on this machine: cuDNN is not detected.",)
    assert tried == ["cudnn"]


def test_cudnn_is_tried_without_ambient_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn.failure_on.cache_clear()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    real = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *x, implementation, **rest: real(*x, implementation="xla", **rest),
    )
    with jax.set_mesh(cpu_mesh("dp:2", axis_types="explicit")):
        jax.make_jaxpr(lambda: len(cudnn.failure_on("here")))()
    assert cudnn.failure_on("here") == ""
    assert cudnn.failure_on.cache_info().misses == 1
