"""`PartitionAxis`: its defaults, and that it compiles to the same rules as a file."""

from __future__ import annotations

import dataclasses

import jax
import pytest

import shardwright as sw
from shardwright.errors import StrategyError
from shardwright.vocabulary.modes import MODES
from tests.raising import raises

P = jax.P
MESH = {"dp": 2, "fsdp": 2, "ep": 2, "tp": 2, "sp": 2}

# The same rules as a strategy file: what the defaults mean, in every mode.
FILE = """
version = 1
[rules]
batch = "fsdp+dp"
length = "sp"
query_length = "sp"
kv_length = "sp"
embed = "tp"
head = "tp"
kv_head = "tp"
head_dim = "-"
kv_head_dim = "-"
mlp_intermediate = "tp"
vocab = "tp"
expert = "ep"
expert_gate = "-"
bias_head_seq = "-"
bias_kv_seq = "-"
[params]
embed = "fsdp+sp"
[modes.decode]
query_length = "-"
head_dim = "-"
kv_head_dim = "-"
"""

TRAIN = {
    sw.BATCH: P(("fsdp", "dp")),
    sw.LENGTH: P("sp"),
    sw.QUERY_LENGTH: P("sp"),
    sw.KV_LENGTH: P("sp"),
    sw.EMBED: P("tp"),
    sw.HEAD: P("tp"),
    sw.KV_HEAD: P("tp"),
    sw.HEAD_DIM: P(),
    sw.KV_HEAD_DIM: P(),
    sw.MLP_INTERMEDIATE: P("tp"),
    sw.VOCAB: P("tp"),
    sw.EXPERT: P("ep"),
    sw.EXPERT_GATE: P(),
    sw.BIAS_HEAD_SEQ: P(),
    sw.BIAS_KV_SEQ: P(),
}
GENERATION = {**TRAIN, sw.QUERY_LENGTH: P()}


def specs(axis: sw.PartitionAxis, mode: str, role: str = "activation") -> dict[str, P]:
    rules = axis.compile()
    return {name: sw.resolve((name,), rules, MESH, mode=mode, role=role).spec for name in TRAIN}


@pytest.mark.parametrize("mode", MODES)
def test_defaults_in_every_mode(mode: str) -> None:
    wanted = GENERATION if mode in sw.GENERATION_MODES else TRAIN
    assert specs(sw.PartitionAxis(), mode) == wanted
    assert specs(sw.PartitionAxis(), mode, "param") == {**TRAIN, sw.EMBED: P(("fsdp", "sp"))}, (
        "modes leave parameters alone"
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("role", ["activation", "param", "use"])
def test_defaults_equal_the_file(mode: str, role: str) -> None:
    rules = sw.Strategy.loads(FILE).compile()
    assert specs(sw.PartitionAxis(), mode, role) == {
        name: sw.resolve((name,), rules, MESH, mode=mode, role=role).spec for name in TRAIN
    }


def test_ported_layouts() -> None:
    rules = sw.PartitionAxis().compile()
    assert sw.resolve(sw.HiddenStateSharding, rules, MESH, shape=(8, 4, 8)).spec == P(
        ("fsdp", "dp"), "sp", "tp"
    )
    assert sw.resolve(sw.HiddenStateSharding, rules, MESH, shape=(8, 1, 8)).spec == P(
        ("fsdp", "dp"), None, "tp"
    )
    assert sw.resolve(sw.AttnKVSharding, rules, MESH, mode="decode").spec == P(
        ("fsdp", "dp"), "sp", "tp"
    )
    assert sw.resolve(sw.ColumnWise, rules, MESH).spec == P(("fsdp", "sp"), "tp")
    assert sw.resolve(sw.RowWise, rules, MESH).spec == P("tp", ("fsdp", "sp"))


def test_one_new_token_follows_the_query_length() -> None:
    """In decode and insert; elsewhere, and for longer sequences, LENGTH has its own rule."""
    residual = (sw.BATCH, sw.LENGTH, sw.EMBED)
    rules = sw.PartitionAxis().compile()
    for mode in ("decode", "insert"):
        answer = sw.explain(residual, rules, MESH, mode=mode, shape=(8, 1, 8))
        assert answer.spec == P(("fsdp", "dp"), None, "tp")
        assert answer.decisions[1].rule.key == "decode_query_sequence_axis"
        assert sw.resolve(residual, rules, MESH, mode=mode, shape=(8, 4, 8)).spec == P(
            ("fsdp", "dp"), "sp", "tp"
        )
        with raises(sw.IndivisibleError, "sp=2", axis="LENGTH", size=3, fix="sequence_axis"):
            sw.resolve(residual, rules, MESH, mode=mode, shape=(8, 3, 8))
    for mode in ("train", "prefill"):
        with raises(sw.IndivisibleError, "sp=2", axis="LENGTH", size=1, fix="sequence_axis"):
            sw.resolve(residual, rules, MESH, mode=mode, shape=(8, 1, 8))
    # Inside a shard_map over sp, a local length of 1 is a shard of a longer sequence.
    local = sw.explain(
        residual, rules, MESH, mode="insert", shape=(8, 1, 8), manual=frozenset({"sp"})
    )
    assert local.decisions[1].manual == ("sp",)
    own = sw.PartitionAxis(decode_query_sequence_axis="sp").compile()
    with raises(
        sw.IndivisibleError, "sp=2", axis="LENGTH", size=1, fix="decode_query_sequence_axis"
    ):
        sw.resolve(residual, own, MESH, mode="decode", shape=(8, 1, 8))


def test_none_replicates_and_not_given_inherits() -> None:
    axis = sw.PartitionAxis(
        head_axis=None,
        decode_kv_head_axis=None,
        decode_batch_axis="dp",
        query_sequence_axis=sw.NOT_GIVEN,
    )
    assert specs(axis, "train") == {**TRAIN, sw.HEAD: P()}
    assert specs(axis, "decode") == {**GENERATION, sw.HEAD: P(), sw.KV_HEAD: P(), sw.BATCH: P("dp")}
    assert specs(axis, "insert") == specs(axis, "decode"), "decode attributes serve insert"
    assert specs(axis, "prefill") == specs(axis, "train")


def test_default_of_decode_key_sequence() -> None:
    assert specs(sw.PartitionAxis(key_sequence_axis=None), "decode")[sw.KV_LENGTH] == P()
    assert specs(sw.PartitionAxis(decode_key_sequence_axis=("dp", "sp")), "decode")[
        sw.KV_LENGTH
    ] == P(("dp", "sp"))
    assert specs(sw.PartitionAxis(decode_key_sequence_axis=("dp", "sp")), "train")[
        sw.KV_LENGTH
    ] == P("sp")


def test_renamed_mesh_axes_change_all_defaults() -> None:
    axis = sw.PartitionAxis(
        data_parallel_axis="data",
        fully_sharded_data_parallel_axis="shard",
        tensor_parallel_axis="model",
        sequence_parallel_axis="seq",
        expert_parallel_axis="experts",
    )
    rules = axis.compile()
    mesh = {"data": 2, "shard": 2, "model": 2, "seq": 2, "experts": 2}
    spec = lambda axes, **options: sw.resolve(axes, rules, mesh, **options).spec  # noqa: E731
    assert spec((sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)) == P(("shard", "data"), "seq", "model")
    assert spec((sw.EXPERT, sw.EMBED, sw.MLP_INTERMEDIATE), role="param") == P(
        "experts", ("shard", "seq"), "model"
    )
    assert spec(sw.ColumnWise) == P(("shard", "seq"), "model")
    assert spec((sw.DP, sw.TP)) == P("data", "model")


def test_values_of_every_kind() -> None:
    axis = sw.PartitionAxis(
        batch_axis=("dp", "fsdp"),
        head_axis=sw.TP,
        kv_head_axis="tp | -",
        vocab_axis=[sw.FSDP, "tp"],
        tensor_parallel_axis="tp",
    )
    assert specs(dataclasses.replace(axis, kv_head_axis="tp"), "train") == {
        **TRAIN,
        sw.BATCH: P(("dp", "fsdp")),
        sw.VOCAB: P(("fsdp", "tp")),
    }
    rules = axis.compile()
    assert [sw.resolve((sw.KV_HEAD,), rules, MESH, shape=(heads,)).spec for heads in (2, 3)] == [
        P("tp"),
        P(),
    ]


def test_replicated_parallelism_axes() -> None:
    """If a mesh axis is None, no default uses it any more."""
    axis = sw.PartitionAxis(tensor_parallel_axis=None, sequence_parallel_axis=None)
    assert specs(axis, "train") == {
        **dict.fromkeys(TRAIN, P()),
        sw.BATCH: P(("fsdp", "dp")),
        sw.EXPERT: P("ep"),
    }
    assert specs(axis, "train", "param")[sw.EMBED] == P("fsdp")


def test_equal_values_compile_to_equal_rules() -> None:
    assert sw.PartitionAxis().compile() == sw.PartitionAxis().compile()
    assert hash(sw.PartitionAxis().compile()) == hash(sw.PartitionAxis().compile())
    assert sw.PartitionAxis(head_axis="tp").compile() == sw.PartitionAxis().compile()
    assert sw.PartitionAxis(head_axis=None).compile() != sw.PartitionAxis().compile()


def test_policy_of_the_caller() -> None:
    policy = sw.Policy(indivisible="replicate")
    rules = sw.PartitionAxis().compile(policy=policy)
    assert sw.resolve((sw.HEAD,), rules, MESH, shape=(3,)).spec == P()
    with raises(sw.IndivisibleError, "tp=2", dim=0, axis="HEAD", size=3, fix="head_axis"):
        sw.resolve((sw.HEAD,), sw.PartitionAxis().compile(), MESH, shape=(3,))


def test_rule_source_names_the_attribute() -> None:
    resolution = sw.resolve(
        (sw.BATCH, sw.QUERY_LENGTH), sw.PartitionAxis().compile(), MESH, mode="decode"
    )
    assert [decision.rule.key for decision in resolution.decisions] == [
        "batch_axis",
        "decode_query_sequence_axis",
    ]
    assert {decision.rule.source for decision in resolution.decisions} == {"PartitionAxis"}


def test_bad_values_are_named_all_at_once() -> None:
    with raises(StrategyError, "dp", fix="+", count=4) as caught:
        sw.PartitionAxis(
            head_axis=3, batch_axis=("dp", "dp"), vocab_axis=(), decode_head_axis="tp |"
        ).compile()
    assert [problem.axis for problem in caught.value.problems] == [
        "batch_axis",
        "head_axis",
        "vocab_axis",
        "decode_head_axis",
    ]


def test_a_manager_of_attributes() -> None:
    pm = sw.PartitionManager(sw.PartitionAxis(), mesh=sw.create_mesh("dp:1,fsdp:2,tp:2,sp:2"))
    assert pm.resolve(sw.BATCH, sw.QUERY_LENGTH, sw.EMBED) == P("fsdp", "sp", "tp")
