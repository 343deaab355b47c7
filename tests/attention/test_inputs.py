"""What is refused, each with one clear error, before anything is traced."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright import attention
from shardwright.attention.masks import Mask
from shardwright.testing.meshes import cpu_mesh

Q, K = (
    jax.ShapeDtypeStruct((2, 6, 4, 8), jnp.float32),
    jax.ShapeDtypeStruct((2, 6, 2, 8), jnp.float32),
)
S10 = jax.ShapeDtypeStruct((2, 10, 2, 8), jnp.float32)


def of(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


I8 = of(2, 6, 2, 8, dtype=jnp.int8)
INT8 = {"k": I8, "v": I8, "k_scale": of(2, 6, 2), "v_scale": of(2, 6, 2)}
BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"q": of(2, 6, 8)},
        (
            "q: q has shape (2, 6, 8), not 4 dims\n"
            "  fix   layout BTHD is [batch, length, heads, head_dim]"
        ),
    ),
    ({"q": [[1.0]]}, "q: q has shape None, not 4 dims"),
    (
        {"k": of(2, 6, 2, 8, dtype=jnp.bfloat16)},
        "k: k is bfloat16, and q is float32\n  fix   cast q, k and v to one dtype",
    ),
    (
        {"q": of(2, 6, 4, 8, dtype=jnp.int8)},
        "q: q is int8\n  fix   attention computes in float32, bfloat16, float16: cast it",
    ),
    ({"k": of(3, 6, 2, 8)}, "k: batch is 3 in k, and 2 in q"),
    ({"k": of(2, 6, 2, 4)}, "k: head_dim is 4 in k, and 8 in q"),
    ({"v": of(2, 5, 2, 8)}, "v: length is 5 in v, and 6 in k"),
    ({"v": of(2, 6, 4, 8)}, "v: heads is 4 in v, and 2 in k"),
    ({"q": of(2, 6, 5, 8)}, "k: 5 query heads do not divide over 2 kv heads"),
    ({"q": of(2, 0, 4, 8)}, "q: q has shape (2, 0, 4, 8): a dim is empty"),
    (
        {"layout": "BHTD", "v": of(2, 6, 3, 8)},
        "v: length is 3 in v, and 2 in k\n  fix   layout BHTD is [batch, heads, length, head_dim]",
    ),
    ({"layout": "THD"}, "unknown layout 'THD'\n  fix   BTHD is [batch, length, heads, head_dim]"),
    ({"mode": "insert"}, "mode insert moves rows of a cache and does not attend"),
    ({"window": 4}, "window=4 is not a pair of lengths"),
    ({"chunk": 0}, "chunk must be a positive integer, got 0"),
    (
        {"mask": of(2, 6, 6, dtype=jnp.bool_)},
        (
            "mask: mask has shape (2, 6, 6), and the logits are [batch, heads, q_length, "
            "kv_length] = (2, 4, 6, 6)"
        ),
    ),
    ({"mask": of(2, 2, 6, 6, dtype=jnp.bool_)}, "mask: mask has shape (2, 2, 6, 6)"),
    ({"mask": of(2, 1, 6, 6)}, "mask: mask is float32, not bool\n  fix   True means attend"),
    ({"bias": of(6, 6)}, "bias: bias has shape (6, 6), and the logits are"),
    ({"bias": of(1, 1, 6, 6, dtype=jnp.bool_)}, "bias: bias is bool, not floating point"),
    ({"sinks": of(2)}, "sinks: sinks have shape (2,), not (4,)"),
    (
        {"segment_ids": of(6, dtype=jnp.int32)},
        "segment_ids: segment_ids has shape (6,), not (2, 6)",
    ),
    ({"segment_ids": of(2, 6)}, "segment_ids: segment_ids is float32, not integers"),
    (
        {"k": S10, "v": S10, "segment_ids": of(2, 6, dtype=jnp.int32)},
        "segment_ids: segment_ids cover 6 queries, and there are 10 keys",
    ),
    (
        {"kv_segment_ids": of(2, 6, dtype=jnp.int32)},
        "kv_segment_ids: kv_segment_ids without segment_ids",
    ),
    (
        {"mask": Mask(q_segment_ids=of(2, 6, dtype=jnp.int32))},
        "mask: a mask has q_segment_ids without kv_segment_ids\n  fix   give both",
    ),
    (
        {"mask": Mask(kv_segment_ids=of(2, 6, dtype=jnp.int32))},
        "mask: a mask has kv_segment_ids without q_segment_ids\n  fix   give both",
    ),
    ({"lengths": np.array([3, 7])}, "lengths: lengths has 7, outside 0 to 6"),
    ({"lengths": np.array([3, -1])}, "lengths: lengths has -1, outside 0 to 6"),
    ({"lengths": 3}, "lengths: lengths is int, not integers"),
    ({"positions": np.arange(-1, 5)}, "positions: positions has -1, outside 0 to 1073741824"),
    (
        {"positions": np.arange(5)},
        "positions: positions has shape (5,), not (2, 6) or (1, 6) or (6,)",
    ),
    (
        {"mode": "prefill", "positions": np.arange(6)},
        (
            "positions: in prefill, positions of 6 queries do not determine those of 6 keys\n"
            "  fix   pass kv_positions too"
        ),
    ),
    (
        {"k": S10, "v": S10, "positions": np.arange(6)},
        "positions: in train, positions of 6 queries do not determine those of 10 keys",
    ),
    (
        {"causal": True, "kv_positions": np.arange(6)},
        "kv_positions: kv_positions without positions",
    ),
    (
        {"k": S10, "v": S10, "causal": True, "lengths": np.array([3, 4])},
        (
            "lengths: with lengths, the positions of 6 queries among 10 keys are ambiguous in "
            "train\n  fix   pass positions and kv_positions"
        ),
    ),
    ({"scale": float("nan")}, "scale: scale=nan is not a finite Python number"),
    ({"softcap": 0.0}, "softcap: softcap=0.0 is not positive\n  fix   pass a positive number"),
    ({"dropout": 1.0, "dropout_key": 1}, "dropout: dropout=1.0 is not in [0, 1)\n"),
    ({"dropout": 0.5}, "dropout_key: dropout=0.5 without a key"),
    (
        {"k": I8, "v": I8},
        "k_scale: k is int8 and has no scale\n  fix   pass k_scale=, float32 of shape (2, 6, 2)",
    ),
    ({"k": I8, "v": I8, "k_scale": of(2, 6, 2)}, "v_scale: v is int8 and has no scale"),
    (
        {"k": I8, "k_scale": of(2, 6, 2)},
        "v: v is float32, and k is int8\n  fix   quantize both to one dtype, or neither",
    ),
    ({"v": of(2, 6, 2, 8, dtype=jnp.float8_e4m3fn)}, "v: v is float8_e4m3fn, and k is float32"),
    (
        {"k_scale": of(2, 6, 2)},
        (
            "k_scale: k_scale is given, and k is float32\n"
            "  fix   pass scales only with keys and values in int8, float8_e4m3fn"
        ),
    ),
    (
        {**INT8, "v_scale": of(2, 6, 2, dtype=jnp.bfloat16)},
        "v_scale: v_scale is bfloat16 of shape (2, 6, 2)\n  fix   pass float32 of shape",
    ),
    (
        {**INT8, "k_scale": of(2, 6, 4)},
        (
            "k_scale: k_scale is float32 of shape (2, 6, 4)\n"
            "  fix   pass float32 of shape (2, 6, 2), one scale"
        ),
    ),
    ({**INT8, "k_scale": 2.0}, "k_scale: k_scale is float of shape None"),
    (
        {
            **INT8,
            "layout": "BHTD",
            "q": of(2, 4, 6, 8),
            "k": of(2, 2, 6, 8, dtype=jnp.int8),
            "v": of(2, 2, 6, 8, dtype=jnp.int8),
        },
        "k_scale: k_scale is float32 of shape (2, 6, 2)\n  fix   pass float32 of shape (2, 2, 6)",
    ),
    (
        {"implementation": "blokwise"},
        "unknown attention implementation 'blokwise'\n  fix   did you mean 'blockwise'?",
    ),
    ({"casual": True}, "unknown option 'casual'\n  fix   did you mean 'causal'?"),
]


@pytest.mark.parametrize(("given", "says"), BAD, ids=[says[:40] for _, says in BAD])
def test_bad_argument_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(sw.AttentionError, match=re.escape(says)):
        attention.explain(**{"q": Q, "k": K, "v": K, "mode": "train", **given})


def test_unknown_mode_suggests_another() -> None:
    with pytest.raises(
        sw.StrategyError, match="unknown mode 'trian'\n  fix   did you mean 'train'"
    ):
        attention.explain(Q, K, K, mode="trian")


def test_no_manager_and_no_mode() -> None:
    for call in (attention.explain, attention.dot_product_attention):
        with pytest.raises(
            sw.NoManagerError,
            match=r"attention needs a PartitionManager, and none is entered in this thread\n"
            r"  fix   enter a manager that has a mode, with pm\.for_mode\(\"train\"\): \.\.\., ",
        ):
            call(Q, K, K)


def test_mode_of_the_manager() -> None:
    pm = sw.PartitionManager(sw.Strategy.loads('[rules]\nbatch = "dp"\n'), mesh=cpu_mesh("dp:2"))
    with pm.for_mode("decode"):
        assert attention.explain(Q, K, K).call.mode == sw.MODE_DECODE
    with pm, pytest.raises(sw.AttentionError, match="neither the call nor the manager has"):
        attention.explain(Q, K, K)


def test_shard_of_a_sequence_is_refused() -> None:
    pm = sw.PartitionManager(
        sw.Strategy.loads('[rules]\nbatch = "dp"\nquery_length = "sp"\nkv_length = "sp"\n'),
        mesh=cpu_mesh("dp:2,sp:2"),
    )
    axes = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)

    def inside(x: jax.Array) -> Any:
        return attention.dot_product_attention(x, x, x, mode="train", causal=True)

    with (
        pm,
        pytest.raises(
            sw.AttentionError,
            match="q dim 1 QUERY_LENGTH: a shard_map around the call has split the length over sp",
        ),
    ):
        pm.shard_map(inside, in_axes=(axes,), out_axes=axes)(jnp.zeros((2, 4, 2, 8)))


def test_key_of_dropout() -> None:
    """A key of the old kind drops what the new one drops; what is not one key is refused."""
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8))

    def attend(key: Any) -> Any:
        return attention.dot_product_attention(x, x, x, mode="train", dropout=0.5, dropout_key=key)

    np.testing.assert_array_equal(attend(jax.random.PRNGKey(7)), attend(jax.random.key(7)))
    np.testing.assert_array_equal(attend(7), attend(np.int64(7)))
    np.testing.assert_array_equal(attend(7), attend(jnp.uint32(7)))
    for key, says in (
        (jax.random.split(jax.random.key(0), 3), r"an array of key<fry>, shape \(3,\)"),
        (np.arange(2), r"an array of int64, shape \(2,\)"),
        (0.5, "float"),
        ("seed", "str"),
    ):
        with pytest.raises(sw.AttentionError, match=f"dropout_key is {says}, not one key"):
            attend(key)


def test_dropout_inside_shard_map_is_refused() -> None:
    pm = sw.PartitionManager(sw.Strategy.loads('[rules]\nbatch = "dp"\n'), mesh=cpu_mesh("dp:2"))
    axes = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)

    def inside(x: jax.Array) -> Any:
        return attention.dot_product_attention(x, x, x, mode="train", dropout=0.5, dropout_key=1)

    with (
        pm,
        pytest.raises(
            sw.AttentionError,
            match=(
                "dropout: dropout inside a shard_map over dp: which weights are dropped "
                "depends on global"
            ),
        ),
    ):
        pm.shard_map(inside, in_axes=(axes,), out_axes=axes)(jnp.zeros((2, 4, 2, 8)))


def test_inside_shard_map_over_the_batch() -> None:
    pm = sw.PartitionManager(sw.Strategy.loads('[rules]\nbatch = "dp"\n'), mesh=cpu_mesh("dp:2"))
    x = jax.random.normal(jax.random.key(0), (2, 4, 2, 8))
    axes = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)

    def inside(x: jax.Array) -> Any:
        return attention.dot_product_attention(x, x, x, mode="train", causal=True)

    with pm:
        actual = pm.shard_map(inside, in_axes=(axes,), out_axes=axes)(x)
    np.testing.assert_allclose(actual, inside(x), rtol=2e-6, atol=2e-6)


def test_quantized_keys_have_no_gradient() -> None:
    q, k, scale = jnp.ones((2, 6, 4, 8)), jnp.ones((2, 6, 2, 8), jnp.int8), jnp.ones((2, 6, 2))

    def loss(q: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.sum(
            attention.dot_product_attention(q, k, k, k_scale=scale, v_scale=scale, mode="decode")
        )

    says = (
        "attention to int8 keys and values reads a cache and has no gradient\n"
        "  fix   train with unquantized keys and values"
    )
    for differentiate in (jax.grad(loss), jax.jit(jax.grad(loss, argnums=1))):
        with pytest.raises(sw.AttentionError, match=says):
            differentiate(q, scale)


def test_quantized_keys_refused_without_scales() -> None:
    choice = attention.explain(Q, mode="decode", **INT8)
    assert choice.name == "blockwise"
    assert "float32 with int8 keys, decode" in str(choice)
    refused = {refusal.name: refusal.reasons for refusal in choice.refusals}
    assert all(
        "it takes no scales, and k and v are int8" in refused[name]
        for name in ("ring", "ulysses", "allgather_kv", "sdpa", "splash")
    )
