"""What is refused, each with one clear error, before anything is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright import attention
from shardwright.attention.masks import Mask
from shardwright.testing.meshes import cpu_mesh
from tests.raising import Facts, facts, raises

Q, K = (
    jax.ShapeDtypeStruct((2, 6, 4, 8), jnp.float32),
    jax.ShapeDtypeStruct((2, 6, 2, 8), jnp.float32),
)
S10 = jax.ShapeDtypeStruct((2, 10, 2, 8), jnp.float32)


def of(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


I8 = of(2, 6, 2, 8, dtype=jnp.int8)
INT8 = {"k": I8, "v": I8, "k_scale": of(2, 6, 2), "v_scale": of(2, 6, 2)}
BAD: list[tuple[dict[str, Any], Facts]] = [
    (
        {"q": of(2, 6, 8)},
        facts("(2, 6, 8)", 4, path="q", fix=("BTHD", "head_dim")),
    ),
    ({"q": [[1.0]]}, facts(4, "dims", path="q", fix="BTHD")),
    (
        {"k": of(2, 6, 2, 8, dtype=jnp.bfloat16)},
        facts("bfloat16", "float32", path="k", fix="dtype"),
    ),
    (
        {"q": of(2, 6, 4, 8, dtype=jnp.int8)},
        facts("int8", path="q", fix=("float32", "bfloat16")),
    ),
    (
        {"q": of(2, 6, 4, 8, dtype=np.float64)},
        facts("q is float64", path="q", fix=("float32", "cast it")),
    ),
    (
        {"v": of(2, 6, 2, 8, dtype=jnp.int32)},
        facts("v is int32", path="v", fix=("float32", "cast it")),
    ),
    ({"k": of(3, 6, 2, 8)}, facts(3, 2, path="k", fix="BTHD")),
    ({"k": of(2, 6, 2, 4)}, facts("head_dim", 4, 8, path="k", fix="BTHD")),
    ({"v": of(2, 5, 2, 8)}, facts(5, 6, path="v", fix="BTHD")),
    ({"v": of(2, 6, 4, 8)}, facts(4, 2, path="v", fix="BTHD")),
    ({"q": of(2, 6, 5, 8)}, facts(5, 2, path="k", fix="multiple of the kv heads")),
    ({"q": of(2, 0, 4, 8)}, facts("(2, 0, 4, 8)", "dims", path="q")),
    (
        {"layout": "BHTD", "v": of(2, 6, 3, 8)},
        facts(3, 2, path="v", fix=("BHTD", "head_dim")),
    ),
    ({"layout": "THD"}, facts("layout", "THD", fix=("BTHD", "head_dim"))),
    ({"mode": "insert"}, facts("mode", "insert", fix="decode")),
    ({"window": 4}, facts("window", 4)),
    ({"chunk": 0}, facts("chunk", 0)),
    (
        {"mask": of(2, 6, 6, dtype=jnp.bool_)},
        facts("(2, 6, 6)", "q_length", "kv_length", "(2, 4, 6, 6)", path="mask", fix="q_length"),
    ),
    (
        {"mask": of(2, 2, 6, 6, dtype=jnp.bool_)},
        facts("(2, 2, 6, 6)", "q_length", "kv_length", "(2, 4, 6, 6)", path="mask"),
    ),
    ({"mask": of(2, 1, 6, 6)}, facts("float32", path="mask", fix=("bool", "True"))),
    (
        {"bias": of(6, 6)},
        facts("(6, 6)", "q_length", "kv_length", "(2, 4, 6, 6)", path="bias", fix="q_length"),
    ),
    ({"bias": of(1, 1, 6, 6, dtype=jnp.bool_)}, facts("bool", path="bias")),
    ({"sinks": of(2)}, facts("(2,)", "(4,)", path="sinks")),
    (
        {"segment_ids": of(6, dtype=jnp.int32)},
        facts("(6,)", "(2, 6)", path="segment_ids"),
    ),
    ({"segment_ids": of(2, 6)}, facts("float32", path="segment_ids", fix="integers")),
    (
        {"k": S10, "v": S10, "segment_ids": of(2, 6, dtype=jnp.int32)},
        facts(6, 10, path="segment_ids", fix="kv_segment_ids"),
    ),
    (
        {"kv_segment_ids": of(2, 6, dtype=jnp.int32)},
        facts("segment_ids", path="kv_segment_ids"),
    ),
    (
        {"mask": Mask(q_segment_ids=of(2, 6, dtype=jnp.int32))},
        facts("q_segment_ids", "kv_segment_ids", path="mask", fix="q_segment_ids"),
    ),
    (
        {"mask": Mask(kv_segment_ids=of(2, 6, dtype=jnp.int32))},
        facts("kv_segment_ids", "q_segment_ids", path="mask", fix="q_segment_ids"),
    ),
    ({"lengths": np.array([3, 7])}, facts(7, 0, 6, path="lengths")),
    ({"lengths": np.array([3, -1])}, facts(-1, 0, 6, path="lengths")),
    ({"lengths": 3}, facts("int", path="lengths", fix="integers")),
    ({"positions": np.arange(-1, 5)}, facts(-1, 0, 1073741824, path="positions")),
    (
        {"positions": np.arange(5)},
        facts("(5,)", "(2, 6)", "(1, 6)", "(6,)", path="positions"),
    ),
    (
        {"mode": "prefill", "positions": np.arange(6)},
        facts("prefill", 6, path="positions", fix="kv_positions"),
    ),
    (
        {"k": S10, "v": S10, "positions": np.arange(6)},
        facts(6, 10, path="positions", fix="kv_positions"),
    ),
    (
        {"causal": True, "kv_positions": np.arange(6)},
        facts("positions", path="kv_positions"),
    ),
    (
        {"k": S10, "v": S10, "causal": True, "lengths": np.array([3, 4])},
        facts(6, 10, path="lengths", fix="kv_positions"),
    ),
    ({"scale": float("nan")}, facts("nan", path="scale")),
    ({"softcap": 0.0}, facts("0.0", path="softcap", fix="None")),
    ({"dropout": 1.0, "dropout_key": 1}, facts("1.0", "[0, 1)", path="dropout")),
    ({"dropout": 0.5}, facts("dropout", "0.5", path="dropout_key", fix="JAX")),
    (
        {"k": I8, "v": I8},
        facts("int8", "k_scale", path="k_scale", fix=("float32", "(2, 6, 2)")),
    ),
    (
        {"k": I8, "v": I8, "k_scale": of(2, 6, 2)},
        facts("int8", "v_scale", path="v_scale", fix="float32"),
    ),
    (
        {"k": I8, "k_scale": of(2, 6, 2)},
        facts("float32", "int8", path="v", fix="dtype"),
    ),
    ({"v": of(2, 6, 2, 8, dtype=jnp.float8_e4m3fn)}, facts("float8_e4m3fn", "float32", path="v")),
    (
        {"k_scale": of(2, 6, 2)},
        facts("float32", path="k_scale", fix=("leave k_scale out", "int8", "float8_e4m3fn")),
    ),
    (
        {**INT8, "v_scale": of(2, 6, 2, dtype=jnp.bfloat16)},
        facts("bfloat16", "float32", path="v_scale", fix="(2, 6, 2)"),
    ),
    (
        {**INT8, "k_scale": of(2, 6, 4)},
        facts("(2, 6, 4)", path="k_scale", fix=("float32", "(2, 6, 2)")),
    ),
    ({**INT8, "k_scale": 2.0}, facts("float", path="k_scale", fix="float32")),
    (
        {
            **INT8,
            "layout": "BHTD",
            "q": of(2, 4, 6, 8),
            "k": of(2, 2, 6, 8, dtype=jnp.int8),
            "v": of(2, 2, 6, 8, dtype=jnp.int8),
        },
        facts("(2, 6, 2)", path="k_scale", fix=("float32", "(2, 2, 6)")),
    ),
    (
        {"implementation": "blokwise"},
        facts("implementation", "blokwise", fix="blockwise"),
    ),
    ({"casual": True}, facts("casual", fix="causal")),
]


@pytest.mark.parametrize(("given", "says"), BAD, ids=[" ".join(given) for given, _ in BAD])
def test_bad_argument_is_named(given: dict[str, Any], says: Facts) -> None:
    with raises(sw.AttentionError, says):
        attention.explain(**{"q": Q, "k": K, "v": K, "mode": "train", **given})


def test_each_shape_of_positions_is_named_once() -> None:
    one = of(1, 6, 2, 8)
    with raises(sw.AttentionError, facts("(6,)", path="positions")) as caught:
        attention.explain(one, one, one, mode="train", positions=np.arange(5))
    assert caught.value.what.count("(1, 6)") == 1


def test_unknown_mode_suggests_another() -> None:
    with raises(sw.StrategyError, "mode", "trian", fix="train"):
        attention.explain(Q, K, K, mode="trian")


def test_no_manager_and_no_mode() -> None:
    for call in (attention.explain, attention.dot_product_attention):
        with raises(sw.NoManagerError, "PartitionManager", fix=("pm.for_mode", "train")):
            call(Q, K, K)


def test_mode_of_the_manager() -> None:
    pm = sw.PartitionManager(sw.Strategy.loads('[rules]\nbatch = "dp"\n'), mesh=cpu_mesh("dp:2"))
    with pm.for_mode("decode"):
        assert attention.explain(Q, K, K).call.mode == sw.MODE_DECODE
    with pm, raises(sw.AttentionError, "mode", fix="train"):
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
        raises(
            sw.AttentionError,
            "shard_map",
            "sp",
            path="q",
            dim=1,
            axis="QUERY_LENGTH",
            fix="shard_map",
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
        (
            jax.random.split(jax.random.key(0), 3),
            facts("key", "(3,)", path="dropout_key", fix="jax.random.key"),
        ),
        (np.arange(2), facts("int64", "(2,)", path="dropout_key", fix="jax.random.key")),
        (0.5, facts("float", "key", path="dropout_key", fix="jax.random.key")),
        ("seed", facts("str", "key", path="dropout_key", fix="jax.random.key")),
    ):
        with raises(sw.AttentionError, says):
            attend(key)


def test_dropout_inside_shard_map_is_refused() -> None:
    pm = sw.PartitionManager(sw.Strategy.loads('[rules]\nbatch = "dp"\n'), mesh=cpu_mesh("dp:2"))
    axes = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)

    def inside(x: jax.Array) -> Any:
        return attention.dot_product_attention(x, x, x, mode="train", dropout=0.5, dropout_key=1)

    with (
        pm,
        raises(sw.AttentionError, "shard_map", "dp", path="dropout", fix="shard_map"),
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

    says = facts("int8", "cache", "gradient", fix="jax.lax.stop_gradient")
    for differentiate in (jax.grad(loss), jax.jit(jax.grad(loss, argnums=1))):
        with raises(sw.AttentionError, says):
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
