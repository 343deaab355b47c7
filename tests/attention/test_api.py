"""The public call: default positions, oracles of other libraries, dropout on every mesh."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

import shardwright as sw
from shardwright import attention
from shardwright.attention import Implementation, implementation, masks
from shardwright.attention.sharding import KEY_AXES, QUERY_AXES
from shardwright.testing.meshes import cpu_mesh
from tests.attention.conformance import STRATEGY

TOLERANCE = {"rtol": 2e-6, "atol": 2e-6}


def arrays(
    *, batch: int = 4, q_length: int = 24, kv_length: int = 24, heads: int = 4, kv_heads: int = 2
) -> dict[str, jax.Array]:
    shapes = {
        "q": (batch, q_length, heads, 8),
        "k": (batch, kv_length, kv_heads, 8),
        "v": (batch, kv_length, kv_heads, 8),
    }
    return {
        name: jnp.asarray(np.random.default_rng(at).normal(size=shape), jnp.float32)
        for at, (name, shape) in enumerate(shapes.items())
    }


def attend(values: dict[str, Any], **options: Any) -> Any:
    return attention.dot_product_attention(**values, **{"mode": "train", **options})


# Oracles that others wrote.


@pytest.mark.parametrize("implementation", ["vanilla", "blockwise"])
def test_equals_jax_nn(implementation: str) -> None:
    x = arrays()
    bias = jax.random.normal(jax.random.key(1), (1, 4, 24, 24))
    lengths = jnp.array([24, 7, 1, 12], jnp.int32)
    output = attend(
        x,
        implementation=implementation,
        causal=True,
        window=(4, None),
        bias=bias,
        lengths=lengths,
        scale=0.7,
    )
    want = jax.nn.dot_product_attention(
        *x.values(),
        bias=bias,
        is_causal=True,
        scale=0.7,
        local_window_size=(4, 0),
        key_value_seq_lengths=lengths,
    )
    # A row whose window is beyond the length has no keys: ours is 0, JAX's a mean of values.
    some = (np.arange(24)[None] - 4 < np.asarray(lengths)[:, None])[:, :, None, None]
    np.testing.assert_allclose(np.where(some, output, 0.0), np.where(some, want, 0.0), **TOLERANCE)
    np.testing.assert_array_equal(np.where(some, 0.0, output), 0.0)
    assert not some.all()


@pytest.mark.parametrize("implementation", ["vanilla", "blockwise"])
@pytest.mark.full
def test_equals_jax_splash(implementation: str) -> None:
    x = arrays(batch=2, q_length=16, kv_length=16, heads=2, kv_heads=1)
    ids = jnp.sort(jax.random.randint(jax.random.key(1), (2, 16), 0, 3))
    sinks = jnp.array([0.5, -1.0])
    mask = jnp.tril(jnp.ones((16, 16), bool))

    def reference(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        def head(batch: int, at: int) -> Any:
            segments = splash.SegmentIds(q=ids[batch], kv=ids[batch])
            rows = (q[batch, :, at] * 0.4, k[batch, :, 0], v[batch, :, 0])
            return splash.attention_reference(
                mask, *rows, segments, sinks[at], attn_logits_soft_cap=3.0
            )

        return jnp.stack(
            [jnp.stack([head(batch, at) for at in range(2)], axis=1) for batch in range(2)]
        )

    def ours(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        options = {"causal": True, "segment_ids": ids, "sinks": sinks, "softcap": 3.0, "scale": 0.4}
        return attend({"q": q, "k": k, "v": v}, implementation=implementation, **options)

    given = (*x.values(), sinks)
    np.testing.assert_allclose(ours(*given), reference(*given), **TOLERANCE)
    weigh = jax.random.normal(jax.random.key(2), given[0].shape)
    actual, want = (
        jax.jit(jax.grad(lambda *a, f=f: jnp.sum(f(*a) * weigh), argnums=(0, 1, 2, 3)))(*given)
        for f in (ours, reference)
    )
    for pair, other in zip(actual, want, strict=True):
        np.testing.assert_allclose(pair, other, rtol=1e-5, atol=1e-5)


# Positions of queries and keys.


def seen_by(values: dict[str, Any], **options: Any) -> np.ndarray:
    """Which keys each query of the first sequence sees, by head 0."""
    output = attend(values, **{"implementation": "vanilla", "return_weights": True, **options})
    return np.asarray(output.weights[0, 0] > 0).astype(int)


def test_last_query_is_at_last_key() -> None:
    few = seen_by(arrays(q_length=2, kv_length=4), causal=True)
    np.testing.assert_array_equal(few, [[1, 1, 1, 0], [1, 1, 1, 1]])
    many = seen_by(arrays(q_length=4, kv_length=2), causal=True)
    np.testing.assert_array_equal(many, [[0, 0], [0, 0], [1, 0], [1, 1]])


def test_last_query_is_at_last_valid_key_in_decode() -> None:
    lengths = jnp.array([3, 4, 4, 4])
    actual = seen_by(arrays(q_length=2, kv_length=4), causal=True, lengths=lengths, mode="decode")
    np.testing.assert_array_equal(actual, [[1, 1, 0, 0], [1, 1, 1, 0]])


def test_lengths_do_not_move_queries_in_training() -> None:
    actual = seen_by(arrays(q_length=4, kv_length=4), causal=True, lengths=jnp.array([2, 4, 4, 4]))
    np.testing.assert_array_equal(actual, [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]])


def test_key_positions_default_by_mode() -> None:
    x = arrays(q_length=4, kv_length=4)
    order = jnp.array([3, 0, 2, 1])
    np.testing.assert_array_equal(
        seen_by(x, causal=True, positions=order),
        (np.asarray(order)[None] <= np.asarray(order)[:, None]),
    )
    cache = seen_by(x, causal=True, positions=order, mode="decode")
    np.testing.assert_array_equal(cache, (np.arange(4)[None] <= np.asarray(order)[:, None]))


def test_mask_value_equals_keywords() -> None:
    x = arrays()
    ids = jnp.sort(jax.random.randint(jax.random.key(1), (4, 24), 0, 3))
    value = masks.causal() & masks.window(left=5) & masks.segments(ids)
    np.testing.assert_array_equal(
        attend(x, mask=value), attend(x, causal=True, window=(5, None), segment_ids=ids)
    )
    as_argument = jax.jit(lambda mask: attend(x, mask=mask))(value)
    np.testing.assert_allclose(
        as_argument, jax.jit(lambda: attend(x, mask=value))(), rtol=1e-5, atol=1e-6
    )


# Dropout.


@pytest.mark.full
def test_dropout_is_equal_on_every_mesh() -> None:
    x = arrays(batch=4, q_length=64, kv_length=64)
    x["v"] = jnp.ones_like(x["v"])
    plain = attend(x, dropout=0.25, dropout_key=jax.random.key(3))
    assert abs(float(plain.mean()) - 1.0) < 0.02
    assert float(plain.std()) > 0.05
    with sw.PartitionManager(sw.Strategy.loads(STRATEGY), mesh=cpu_mesh("dp:2,tp:4")):
        sharded = attend(x, dropout=0.25, dropout_key=jax.random.key(3))
    np.testing.assert_allclose(sharded, plain, **TOLERANCE)
    assert not np.allclose(attend(x, dropout=0.25, dropout_key=4), plain, atol=1e-3)


@pytest.mark.full
def test_dropout_rate() -> None:
    output = attend(
        arrays(q_length=96, kv_length=96),
        implementation="vanilla",
        dropout=0.1,
        dropout_key=1,
        return_weights=True,
    )
    kept = float((output.weights > 0).mean())
    assert abs(kept - 0.9) < 0.005
    for axes in ((0, 1, 2), (0, 1, 3), (1, 2, 3), (0, 2, 3)):
        assert float(jnp.abs((output.weights > 0).mean(axis=axes) - 0.9).max()) < 0.06


# The sharding of the output, and retracing.


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.full(but=["auto"])
def test_output_is_sharded_like_q_without_communication(axis_types: Any) -> None:
    pm = sw.PartitionManager(
        sw.Strategy.loads(STRATEGY), mesh=cpu_mesh("dp:2,tp:4", axis_types=axis_types)
    )
    values = arrays()
    with pm:
        placed = {
            name: sw.shard(x, QUERY_AXES if name == "q" else KEY_AXES) for name, x in values.items()
        }
        compiled = jax.jit(lambda x: attend(x, causal=True)).lower(placed).compile()
        assert compiled(placed).sharding.is_equivalent_to(
            pm.sharding(QUERY_AXES, shape=values["q"].shape), 4
        )
        assert attend(placed, causal=True).sharding.spec[:3] == ("dp", None, "tp")
    sent = re.findall(
        r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)", compiled.as_text()
    )
    assert sent == []


@pytest.mark.full(but=["flash_decode"])
@pytest.mark.parametrize("implementation", ["vanilla", "blockwise", "flash_decode", "sdpa"])
def test_dtypes_are_not_promoted(implementation: str) -> None:
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        grads = jax.jit(
            jax.grad(
                lambda x: jnp.sum(
                    attend(x, causal=True, window=(5, 0), implementation=implementation)
                )
            )
        )(arrays())
        pages = jnp.ones((6, 4, 2, 8))
        o = attention.paged_attention(
            jnp.ones((2, 1, 4, 8)),
            pages,
            pages,
            block_tables=jnp.array([[4, 0], [5, 0]]),
            lengths=jnp.array([7, 2]),
        )
    assert all(np.isfinite(grad).all() for grad in grads.values())
    np.testing.assert_allclose(o, 1.0, rtol=1e-6)


def test_eager_call_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []

    def run(operands: Any, call: Any) -> Any:
        traced.append(call)
        return implementation.find("vanilla").run(operands, call)

    monkeypatch.setattr(implementation, "_own", ())
    attention.register(
        Implementation(name="counting", aliases=("counted",), supports=lambda call: (), run=run)
    )
    for _ in range(3):
        attend(arrays(), implementation="counted", causal=True)
    attend(arrays(), implementation="counting", causal=False)
    assert len(traced) == 2
    assert attention.explain(**arrays(), mode="train").name == "blockwise"


def test_choice_prints_its_reasons() -> None:
    with sw.PartitionManager(sw.Strategy.loads(STRATEGY), mesh=cpu_mesh("dp:2,tp:4")):
        text = str(
            attention.explain(**arrays(), mode="train", implementation="auto", return_weights=True)
        )
    assert text.startswith(
        "vanilla   only vanilla returns weights\n"
        "  call  batch 4, 24 x 24, heads 4/2, head_dim 8, float32, train, cpu\n"
        "  mesh  batch dp, heads tp; kv heads are replicated; over tp, each shard picks the "
        "heads that its queries read (tp: 2 % 4 != 0; replicated"
    )
    assert (
        "  not   blockwise: it never has all weights at once, and the call asks for them\n" in text
    )
