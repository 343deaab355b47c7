"""The operator's metadata: the source of each attribute, the specs, and the JSON round trip."""

from __future__ import annotations

import functools
import json
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.attention import KVHeads, dot_product_attention, explain
from shardwright.interop.easydel import AttentionMetadata, AttentionOutput, AttentionRegistry
from shardwright.interop.easydel.attention_metadata import get_mode
from shardwright.testing.meshes import cpu_mesh
from tests.raising import Facts, facts, raises

RULES = """[rules]
batch = "dp"
query_length = "sp"
kv_length = "sp"
head = "tp"
kv_head = "tp | -"
bias_head_seq = "tp | -"
bias_kv_seq = "-"
"""
OTHER_HEADS = RULES.replace('kv_head = "tp | -"', 'kv_head = "sp"').replace(
    'kv_length = "sp"', 'kv_length = "-"'
)
DECODE = '[modes.decode]\nquery_length = "-"\nbias_kv_seq = "sp"\n'


def manager(mesh: str = "dp:2,sp:2,tp:2", rules: str = RULES + DECODE) -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.loads(rules), mesh=cpu_mesh(mesh))


def metadata(**given: Any) -> AttentionMetadata:
    return AttentionMetadata(jnp.float32, **{"partition_manager": manager(), **given})


def test_defaults() -> None:
    actual = AttentionMetadata(sw.NOT_GIVEN, mesh=cpu_mesh("dp:2,tp:2"))
    assert (actual.runtime_dtype, actual.runtime_softmax_dtype) == (jnp.float32, jnp.float32)
    assert (
        actual.sequence_axis_name,
        actual.backend,
        actual.platform,
        actual.scan_ring_attention,
    ) == (
        "sp",
        "cpu",
        "cpu",
        True,
    )
    assert (actual.softmax_scale, actual.dropout_prob) == (None, 0.0)
    assert (actual.blocksize_q, actual.blocksize_k, actual.blocksize_b) == (512, 1024, 1)
    assert actual.partition_axis == sw.PartitionAxis()
    assert actual.partition_manager == sw.PartitionManager(sw.PartitionAxis(), mesh=actual.mesh)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"blocksize_b": 2}, facts(2, "kernel", path="blocksize_b", fix="blocksize_q")),
        (
            {"sequence_axis_name": "seq"},
            facts("seq", "dp", "tp", path="sequence_axis_name", fix="query_length"),
        ),
        ({"platform": "triton"}, facts("triton", "cpu", path="platform", fix="cpu")),
        (
            {"runtime_softmax_dtype": jnp.float64},
            facts("float64", "float32", path="runtime_softmax_dtype", fix="float32"),
        ),
    ],
)
def test_attributes_without_effect_are_refused(given: dict[str, Any], says: Facts) -> None:
    with raises(sw.AttentionError, says):
        metadata(**{"partition_manager": manager(mesh="dp:2,tp:2"), **given})


def test_float64_is_refused_as_a_runtime_dtype() -> None:
    q = jnp.ones((2, 4, 2, 4))
    wide = AttentionMetadata(jnp.float64, mesh=cpu_mesh("dp:2"))
    with raises(sw.AttentionError, "float64", path="runtime_dtype", fix="float32"):
        dot_product_attention(q, q, q, mode="train", metadata=wide)


def test_sequence_axis_must_match_the_rules() -> None:
    pm = manager(mesh="dp:2,fsdp:2", rules='[rules]\nquery_length = "fsdp"\nkv_length = "fsdp"\n')
    q = jnp.ones((2, 4, 2, 4))
    for name in ("fsdp", sw.NOT_GIVEN):
        resolution = explain(
            q, q, q, mode="train", metadata=metadata(partition_manager=pm, sequence_axis_name=name)
        )
        assert resolution.call.specs.q_length == ("fsdp",)
    wrong = metadata(partition_manager=pm, sequence_axis_name="dp")
    with raises(sw.AttentionError, "fsdp", "dp", path="sequence_axis_name", fix="fsdp"):
        explain(q, q, q, mode="train", metadata=wrong)


def test_defaults_from_the_configuration() -> None:
    config = types.SimpleNamespace(
        attn_dtype=jnp.bfloat16,
        attn_softmax_dtype=jnp.float32,
        blocksize_q=64,
        mesh=cpu_mesh("dp:2"),
        dropout_prob=0.5,
    )
    actual = AttentionMetadata.from_config(config, softmax_scale=0.25)
    assert (actual.runtime_dtype, actual.blocksize_q, actual.blocksize_k) == (
        jnp.bfloat16,
        64,
        1024,
    )
    assert (actual.mesh, actual.softmax_scale, actual.dropout_prob) == (config.mesh, 0.25, 0.0)
    assert AttentionMetadata(jnp.float32, base_config=config, blocksize_q=8).blocksize_q == 8


def test_ambient_manager_is_the_default() -> None:
    pm = manager()
    with pm:
        assert AttentionMetadata(jnp.float32).partition_manager is pm
        assert (
            AttentionMetadata(jnp.float32, partition_axis=sw.PartitionAxis()).partition_manager
            != pm
        )


def test_missing_mesh_is_named() -> None:
    with raises(ValueError, path="mesh", fix="mesh"):
        AttentionMetadata(jnp.float32)


def test_specs_by_mode_and_layout() -> None:
    sizes = {"head": 8, "kv_head": 2}
    train = metadata().get_shardings("train", sizes=sizes)
    q = P("dp", "sp", "tp")
    assert train == (q, q, q, P("dp", "tp", "sp"), P("dp", None, "sp"), q)
    assert train._fields == ("query", "key", "value", "bias", "mask", "output")
    decode = metadata().get_shardings("decode", BTHD=False, sizes=sizes)
    assert decode.query == decode.output == P("dp", "tp")
    assert decode.key == decode.value == P("dp", "tp", "sp")
    assert (decode.bias, decode.mask) == (P("dp", "tp", None, "sp"), P("dp", None, None, "sp"))


def test_kv_heads_follow_the_query_heads() -> None:
    many = metadata(partition_manager=manager("dp:2,tp:4"))
    sizes = {sw.HEAD: 8, sw.KV_HEAD: 2}
    actual = many.get_shardings("train", sizes=sizes)
    assert (actual.query, actual.key) == (P("dp", None, "tp"), P("dp"))
    assert many.joint("train", sizes=sizes).grouping is KVHeads.INDEX
    assert (
        "over tp, each shard picks the heads that its queries read (tp: 2 % 4 != 0"
        in many.joint("train", sizes=sizes).why
    )
    repeated = many.get_shardings("train", qkv_mni_sharding=True, sizes=sizes)
    assert repeated.key == P("dp", None, "tp")
    parts = metadata(
        partition_manager=manager(
            "ep:2,tp:2",
            RULES.replace('head = "tp"\nkv', 'head = "ep+tp"\nkv').replace(
                '"tp | -"\nbias_head', '"ep"\nbias_head'
            ),
        )
    )
    assert parts.get_shardings("train", sizes=sizes).key == P(None, None, "ep")
    assert parts.joint("train", sizes=sizes).grouping is KVHeads.PREFIX


def test_keys_length_over_a_mesh_axis_of_heads() -> None:
    rules = RULES.replace('kv_length = "sp"', 'kv_length = "tp"').replace(
        'kv_head = "tp | -"', 'kv_head = "-"'
    )
    actual = metadata(partition_manager=manager("dp:2,tp:2", rules)).joint(
        "decode", sizes={"head": 8, "kv_head": 2}
    )
    assert (actual.grouping, actual.kv_length, actual.heads) == (KVHeads.FACTOR, ("tp",), ("tp",))


def test_sizes_from_the_configuration() -> None:
    config = types.SimpleNamespace(num_attention_heads=8, num_key_value_heads=3)
    assert metadata(base_config=config).get_shardings("train").key == P("dp", "sp")
    with raises(sw.ShapeRequiredError, "candidate", "applies", axis="KV_HEAD", dim=0):
        metadata().get_shardings("train", sizes={"head": 8})


def test_broadcast_dim_of_bias_is_not_sharded() -> None:
    sizes = {"head": 8, "kv_head": 2, "bias_head_seq": 1}
    assert metadata().get_shardings("train", sizes=sizes).bias == P("dp", None, "sp")


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (OTHER_HEADS, facts("sp", "tp", path="k")),
        (RULES + 'head_dim = "ep"\n', facts("head_dim", "ep", path="q", fix="head_dim")),
        (
            RULES.replace('kv_length = "sp"', 'kv_length = "?"'),
            facts("?", "dim", "kernel", path="k", fix="?"),
        ),
    ],
)
def test_inconsistent_rules_are_refused(rules: str, says: Facts) -> None:
    with raises(sw.AttentionError, says):
        metadata(
            partition_manager=manager(
                "dp:2,sp:2,tp:2,ep:1" if "ep" not in rules else "sp:2,tp:2,ep:2", rules
            )
        ).get_shardings("train", sizes={"head": 8, "kv_head": 2, "head_dim": 8, "kv_length": 8})


def test_metadata_json_and_pytree() -> None:
    held = AttentionMetadata(
        jnp.bfloat16,
        mesh=cpu_mesh("dp:2,tp:2"),
        partition_axis=sw.PartitionAxis(batch_axis=("dp",)),
        softmax_scale=0.5,
    )
    assert jax.tree.leaves(held) == []
    assert AttentionMetadata.from_dict(held.to_dict()) == held
    assert AttentionMetadata.from_json(held.to_json()) == held
    assert json.loads(held.to_json(indent=1))["mesh"] == {
        "sizes": {"dp": 2, "tp": 2},
        "types": ["auto", "auto"],
    }
    other = held.replace(mesh=cpu_mesh("dp:4"), blocksize_q=8)
    assert (other.partition_manager.mesh, other.blocksize_q) == (cpu_mesh("dp:4"), 8)
    with raises(
        sw.AttentionError, "JSON", "partition_axis", path="partition_manager", fix="from_json"
    ):
        metadata().to_json()


def test_output_json() -> None:
    output = AttentionOutput(
        attention_outputs=jnp.arange(4, dtype=jnp.bfloat16).reshape(1, 2, 1, 2)
    )
    back = AttentionOutput.from_json(output.to_json())
    assert back.attention_weights is None
    assert back.attention_outputs.dtype == jnp.bfloat16
    np.testing.assert_array_equal(back.attention_outputs, output.attention_outputs)
    assert AttentionOutput.from_dict(output.to_dict()).attention_outputs is output.attention_outputs
    assert len(jax.tree.leaves(output)) == 1


def test_instance_uses_its_metadata() -> None:
    q, k, v = (jax.random.normal(jax.random.key(at), (2, 4, 2, 8)) for at in range(3))
    held = AttentionMetadata(jnp.float32, mesh=cpu_mesh("dp:2"), softmax_scale=0.1)
    actual = AttentionRegistry.create("vanilla", held)(
        q, k, v, mode="train", causal=True, return_weights=True
    )
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=0.1)
    np.testing.assert_allclose(actual.attention_outputs, want, atol=2e-6)
    np.testing.assert_allclose(actual.attention_weights.sum(axis=-1), 1.0, atol=1e-6)
    with raises(sw.AttentionError, "blockwise", "weights", fix="auto"):
        AttentionRegistry.create("blockwise", held)(q, k, v, mode="train", return_weights=True)


def test_call_overrides_metadata() -> None:
    manager = sw.PartitionManager(
        sw.Strategy.loads('[rules]\nbatch = "dp"\n'), mesh=cpu_mesh("dp:2")
    )
    held = AttentionMetadata(
        jnp.float32,
        partition_manager=manager,
        softmax_scale=0.1,
        dropout_prob=0.5,
        blocksize_q=64,
        scan_ring_attention=False,
    )
    own = held.options({"mode": "train", "dropout_key": 1})
    assert (own.dropout, own.scale, own.q_block, own.loop, own.dtype) == (
        0.5,
        0.1,
        64,
        False,
        jnp.float32,
    )
    options = {
        "scale": 0.3,
        "dropout": 0.0,
        "q_block": 8,
        "kv_block": 16,
        "loop": True,
        "dtype": jnp.bfloat16,
        "platform": "tpu",
    }
    actual = held.options({"mode": "train", **options})
    assert {name: getattr(actual, name) for name in options} == options
    # Dropout of the metadata is for training, whoever says that it is.
    assert held.options({"mode": "prefill"}).dropout is None
    assert held.replace(partition_manager=manager.for_mode("train")).options({}).dropout == 0.5
    assert held.replace(partition_manager=manager.for_mode("decode")).options({}).dropout is None


def test_dropout_zero_in_a_call_wins() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 4, 2, 8))
    held = AttentionMetadata(jnp.float32, mesh=cpu_mesh("dp:2"), dropout_prob=0.5)
    attend = functools.partial(
        dot_product_attention, x, x, x, mode="train", implementation="vanilla"
    )
    np.testing.assert_allclose(attend(metadata=held, dropout=0.0), attend(), atol=2e-6)
    assert np.abs(attend(metadata=held, dropout_key=1) - attend()).max() > 0.1
    with raises(sw.AttentionError, "dropout", "0.5", path="dropout_key", fix="JAX"):
        attend(metadata=held)


def test_static_methods() -> None:
    instance = AttentionRegistry.create("vanilla", metadata())
    q = jnp.zeros((2, 1, 4, 8))
    assert (
        instance.get_mode(q),
        instance.get_mode(q, BTHD=False),
        get_mode(q, mode="prefill"),
    ) == (
        sw.MODE_DECODE,
        sw.MODE_TRAIN,
        sw.MODE_PREFILL,
    )
    assert instance.get_impl_metadata() is instance.metadata
    assert instance.current_backend() == "cpu"
    k, v = instance.repeat_kv_heads(jnp.arange(2.0).reshape(1, 1, 2, 1), jnp.ones((1, 1, 2, 1)), 2)
    np.testing.assert_array_equal(k[0, 0, :, 0], [0, 0, 1, 1])
    assert v.shape == (1, 1, 4, 1)
    mask = instance._combine_query_kv_masks(
        jnp.array([True, False]), jnp.array([True, True, False])
    )
    np.testing.assert_array_equal(mask, [[True, True, False], [False, False, False]])
    np.testing.assert_array_equal(instance._split_attention_mask(mask)[0], [True, False])
    np.testing.assert_array_equal(instance._split_attention_mask(mask)[1], [True, True, False])
    np.testing.assert_array_equal(instance._create_causal_mask(2), [[True, False], [True, True]])


def test_create_stable_sharding() -> None:
    instance = AttentionRegistry.create("vanilla", metadata())
    state = P("dp", "sp", "tp")
    assert instance.create_stable_sharding(state) == state
    assert instance.create_stable_sharding() is None
    assert instance.create_stable_sharding(state, dep=None) is None
    assert instance.create_stable_sharding(state, [0, 2]) == P("dp", None, "tp")
    assert instance.create_stable_sharding(P("dp"), [0, 2]) == P("dp", None, None)
    assert instance.create_stable_sharding(state, [1], clone_ps=P(None, "tp")) == P(None, "tp")
    assert instance.create_stable_sharding(state, [0, 2], tensor=jnp.zeros((4, 1, 3, 8))) == P("dp")
