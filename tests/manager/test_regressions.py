"""Regressions: each of these once gave a wrong answer silently, or an error that was not ours."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright as sw
from shardwright.testing import cpu_mesh
from tests.raising import Facts, facts, raises

P = jax.P


def manager(text: str, *, sizes: str = "dp:2,fsdp:2,tp:2", **kwargs: Any) -> sw.PartitionManager:
    mesh = "[mesh]\n" + "".join(f"{part.replace(':', ' = ')}\n" for part in sizes.split(","))
    return sw.PartitionManager(sw.Strategy.loads(mesh + text), mesh=cpu_mesh(sizes, **kwargs))


def test_shard_map_reuses_composites() -> None:
    pm = manager('[policy]\nconflict = "first_dim"\n[rules]\nbatch = "dp"')
    x = jnp.arange(32.0).reshape(4, 8)
    axes = (sw.BATCH, (sw.DP, sw.FSDP))
    actual = pm.shard_map(
        lambda x: jax.lax.psum(x, "dp").sum(0, keepdims=True),
        in_axes=(axes,),
        out_axes=(sw.EMPTY, axes[1]),
    )(x)
    np.testing.assert_allclose(actual, x.sum(0, keepdims=True))
    with raises(sw.AxisConflictError, "composite", path="output", axis="FSDP"):
        pm.shard_map(lambda x: x, in_axes=(axes,), out_axes=(sw.EMPTY, sw.FSDP))(x)


def test_shard_map_inside_a_partly_manual_region() -> None:
    pm = manager('[rules]\nbatch = "dp"\nhead = "tp"')
    x = jnp.arange(32.0).reshape(4, 8)

    def inner(x: Any) -> Any:
        return pm.shard_map(
            lambda x: x * 2, in_axes=((sw.BATCH, sw.HEAD),), out_axes=(sw.BATCH, sw.HEAD)
        )(x)

    outer = jax.jit(
        jax.shard_map(inner, mesh=pm.mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
    )
    np.testing.assert_allclose(outer(x), x * 2)


def test_no_two_parameters_share_a_key() -> None:
    pm = manager("[rules]\n")
    spec = sw.ArraySpec((8,), jnp.float32, (sw.NORM,), jax.nn.initializers.normal())
    alike = pm.init(
        {"plumless": spec, "buckeroo": spec, "a/b": spec, "a": {"b": spec}}, jax.random.key(0)
    )
    values = [tuple(np.asarray(leaf)) for leaf in jax.tree.leaves(alike)]
    assert len(set(values)) == 4


def test_init_in_another_mode_is_sharded_anew() -> None:
    pm = manager('[params]\nnorm = "tp"\n[modes.decode.params]\nnorm = "-"\n')
    spec = sw.ArraySpec((8,), jnp.float32, (sw.NORM,), jax.nn.initializers.ones)
    shards = [
        pm.init(spec, jax.random.key(0), mode=mode).sharding.shard_shape((8,))
        for mode in ("train", "decode")
    ]
    assert shards == [(4,), (8,)]


def test_init_of_wrong_shape_or_dtype() -> None:
    pm = manager("[rules]\n")
    wrong = sw.ArraySpec(
        (8,), jnp.float32, (sw.NORM,), lambda key, shape, dtype: jnp.zeros((16,), jnp.int32)
    )
    with raises(sw.RankMismatchError, "int32", "(16,)", "ArraySpec", "float32", "(8,)", path="a"):
        pm.init({"a": wrong}, jax.random.key(0))


def test_state_follows_whole_copies_only() -> None:
    params = [np.ones(8), np.ones(8), np.ones((8, 8))]
    annotations = [(sw.HEAD,), (sw.NORM,), (sw.EMBED, sw.MLP_INTERMEDIATE)]
    state = {"sums": jax.eval_shape(optax.sm3(0.1).init, params)[0].mu}
    with raises(
        sw.StrategyError,
        facts("(8,)", path="sums/0/0"),
        facts("(8,)", path="sums/1/0"),
        facts("(8,)", path="sums/2/0"),
        facts("(8,)", path="sums/2/1"),
    ):
        sw.annotate_state(state, params, annotations)
    both = {"w": np.ones((8, 4)), "enc": {"w": np.ones((8, 4))}}
    axes = {"w": (sw.EMBED, sw.HEAD), "enc": {"w": (sw.HEAD, sw.EMBED)}}
    with raises(sw.StrategyError, "state", "(8, 4)", path="mu/dec/w"):
        sw.annotate_state({"mu": {"dec": {"w": np.ones((8, 4))}}}, both, axes)
    assert sw.annotate_state({"mu": both}, both, axes, by_path=False) == {"mu": axes}


def test_merged_dims_of_fitted_ranks() -> None:
    pm = manager('[rules]\nkv_head = "tp"\nembed = "-"\n[policy]\npreset = "eformer"')
    with raises(sw.RankMismatchError, "KV_HEAD", 8, "KV_HEAD_DIM", 128, size=7):
        pm.sharding((sw.EMBED, sw.merged((sw.KV_HEAD, 8), (sw.KV_HEAD_DIM, 128))), shape=(16, 7, 3))


def test_layout_is_gathered_by_its_own_rule() -> None:
    text = """
    [rules]
    tensor_parallel = "fsdp"
    mlp_intermediate = "tp"
    embed = "-"
    [params]
    embed = "dp"
    [policy]
    gather = "dp+fsdp"
    """
    pm = manager(text)
    assert (
        pm.resolve(sw.ColumnWise, role="use", shape=(8, 8))
        == pm.resolve(sw.EMBED, sw.TP, role="use", shape=(8, 8))
        == P(None, "fsdp")
    )


def test_hint_leaves_a_manual_dim_open() -> None:
    pm = manager('[rules]\nbatch = "dp"\nhead = "tp"')

    def inner(x: Any) -> Any:
        return pm.hint(x, sw.BATCH, sw.HEAD)

    outer = jax.jit(
        jax.shard_map(inner, mesh=pm.mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
    )
    assert '[{?}, {"tp"}]' in outer.lower(jnp.ones((4, 8))).as_text()


@pytest.mark.parametrize("kind", ["explicit", {"tp": "explicit"}])
def test_gradient_of_weights_placed_elsewhere(kind: Any) -> None:
    pm = manager(
        '[rules]\nhead = "tp"\n[params]\nembed = "fsdp"\n[policy]\ngather = "fsdp"', axis_types=kind
    )
    w = jnp.arange(32.0).reshape(4, 8)
    with pm:
        actual = jax.jit(jax.grad(lambda w: (pm.gather(w, sw.EMBED, sw.HEAD) ** 2).sum()))(
            jnp.asarray(w)
        )
    np.testing.assert_allclose(actual, 2 * w)


def test_own_mesh_axis_needs_a_rule() -> None:
    mesh = cpu_mesh("data:2,model:4")
    with raises(sw.MeshMismatchError, "data=2", "dp", "fsdp", "ep", fix="data") as caught:
        sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=mesh)
    assert [problem.mesh_axes for problem in caught.value.problems] == [("data",), ("model",)]


def test_an_own_mesh_axis_of_size_one_may_be_idle() -> None:
    """A mesh axis of one device needs no rule."""
    mesh = sw.abstract_mesh("data:1,fsdp:8,model:1")
    assert sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=mesh).resolve(
        sw.EMBED, role="param", shape=(16,)
    ) == P("fsdp")
    with raises(sw.MeshMismatchError, "model=2", "dp", "fsdp", "ep", fix="model") as caught:
        sw.PartitionManager(
            sw.Strategy.preset("fsdp"), mesh=sw.abstract_mesh("data:1,fsdp:4,model:2")
        )
    assert [problem.mesh_axes for problem in caught.value.problems] == [("model",)]


def test_spellings_are_not_repaired() -> None:
    with raises(sw.UnknownAxisError, "axis", path="<toml>:4 rules.batch_", fix="batch"):
        sw.Strategy.loads('[mesh]\ndp = 2\n[rules]\nbatch_ = "dp"')
    with raises(sw.StrategyError, "axis", path="<toml>:2 axes.rotary_", fix="rotary_dim"):
        sw.Strategy.loads('[axes]\nrotary_ = "x"')
    with raises(sw.StrategyError, "__HEAD__", "__BATCH__", fix="EMPTY"):
        sw.DynamicShardingAxes({sw.BATCH, sw.HEAD}, "train")  # type: ignore[arg-type]


@dataclasses.dataclass
class Scaled:
    """An initializer that cannot be hashed."""

    scale: float = 2.0

    def __call__(self, key: Any, shape: Any, dtype: Any) -> Any:
        return jnp.full(shape, self.scale, dtype)


def test_initializer_without_hash() -> None:
    pm = manager('[rules]\nhead = "tp"\n[params]\nembed = "fsdp"\n[policy]\ngather = "fsdp"')
    spec = sw.ArraySpec((4, 8), jnp.float32, (sw.EMBED, sw.HEAD), Scaled())
    assert pm.shard(np.ones((4, 8), np.float32), spec).sharding.spec == P("fsdp", "tp")
    assert pm.gather(pm.shard(np.ones((4, 8), np.float32), spec), spec).sharding.spec == P(
        None, "tp"
    )
    assert float(pm.init({"a": spec}, jax.random.key(0))["a"][0, 0]) == 2.0


@pytest.mark.parametrize("shape", [8, ("8",), (-8,), (8.5,), "84"])
def test_invalid_shape_is_refused(shape: Any) -> None:
    pm = manager('[rules]\nbatch = "dp"')
    with raises(sw.RankMismatchError, fix="x.shape"):
        pm.resolve(sw.BATCH, shape=shape)
    with raises(sw.RankMismatchError, fix="x.shape"):
        sw.ArraySpec(shape, jnp.float32, (sw.BATCH,))


@pytest.mark.parametrize(
    "arguments", [{"mode": ["train"]}, {"role": {}}, {"mode": "zz"}, {"role": "weight"}]
)
def test_invalid_mode_or_role_error(arguments: dict[str, Any]) -> None:
    pm = manager('[rules]\nbatch = "dp"')
    assert not pm.explain(sw.BATCH, shape=(8,), **arguments).ok
    with raises(sw.StrategyError, "unknown"):
        pm.shard(np.ones(8), sw.BATCH, **arguments)


def test_host_memory_is_kept() -> None:
    pm = manager('[rules]\nbatch = "dp"')
    aside = jax.device_put(
        np.ones((8, 4), np.float32), pm.sharding(sw.BATCH, sw.EMPTY, memory_kind="pinned_host")
    )
    assert pm.shard(aside, sw.BATCH, sw.EMPTY).sharding.memory_kind == "pinned_host"
    assert pm.shard(aside, sw.EMPTY, sw.BATCH).sharding.memory_kind == "pinned_host"


def test_spellings_share_one_answer() -> None:
    pm = manager('[rules]\nbatch = "dp"')
    assert pm.explain(sw.BATCH, mode="decode") is pm.explain(sw.BATCH, mode=sw.MODE_DECODE)
    decode = pm.for_mode("decode")
    assert decode.for_mode("train").for_mode("decode") is decode


def test_partition_axis_may_replicate() -> None:
    rules = sw.PartitionAxis(
        tensor_parallel_axis=None, head_axis=sw.TP, vocab_axis=(sw.FSDP, sw.TP)
    ).compile()
    assert sw.resolve((sw.HEAD, sw.VOCAB), rules, {"fsdp": 2, "tp": 4}, shape=(8, 8)).spec == P(
        None, "fsdp"
    )


def test_explain_reports_mixed_mesh_order() -> None:
    mesh = sw.create_mesh("fsdp:2,tp:4", axis_types={"fsdp": "auto", "tp": "explicit"})
    strategy = sw.Strategy.loads(
        'version = 1\n[mesh]\nfsdp = 2\ntp = 4\n[rules]\nvocab = "fsdp+tp"\n'
    )
    resolution = sw.PartitionManager(strategy, mesh=mesh).explain(
        sw.VOCAB, shape=(16,), path="lm_head"
    )
    assert not resolution.ok
    assert resolution.spec is None
    with raises(sw.MeshMismatchError, "fsdp", "tp", "JAX", path="lm_head", dim=0, axis="VOCAB"):
        resolution.require()
    manager = sw.PartitionManager(strategy, mesh=mesh)
    with raises(
        sw.MeshMismatchError, "fsdp", "tp", "JAX", path="head", dim=0, axis="VOCAB"
    ) as caught:
        manager.shard({"head": np.ones(16, np.float32)}, (sw.VOCAB,))
    assert caught.value.resolution.path == "head"
    assert 'vocab = "fsdp+tp"' in caught.value.rule


def test_mesh_axes_of_an_open_axis() -> None:
    strategy = sw.Strategy.loads(
        'version = 1\n[mesh]\ndp = 8\n[rules]\nbatch = "dp"\nlength = "?"\n'
    )
    manager = sw.PartitionManager(strategy, mesh=sw.abstract_mesh("dp:8"))
    for ask in (manager.mesh_axes, manager.axis_size):
        with raises(sw.StrategyError, "?", "dim", fix="?"):
            ask(sw.LENGTH)


def test_only_abstract_managers_pickle() -> None:
    strategy = sw.Strategy.preset("fsdp_tp")
    planned = sw.PartitionManager(
        strategy, mesh=sw.abstract_mesh("dp:1,fsdp:2,sp:1,ep:1,tp:4"), mode="decode"
    )
    again = pickle.loads(pickle.dumps(planned))
    assert again == planned
    assert hash(again) == hash(planned)
    assert again.resolve(sw.BATCH, sw.HEAD, shape=(8, 8)) == planned.resolve(
        sw.BATCH, sw.HEAD, shape=(8, 8)
    )
    with pytest.raises(TypeError, match="cannot be pickled: pickle the Strategy"):
        pickle.dumps(sw.PartitionManager(strategy, mesh=cpu_mesh("dp:1,fsdp:2,sp:1,ep:1,tp:4")))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda pm: pm.abstract({"a": {"b": 1.0}}, {"a": {"b": ()}}),
            facts("float", "dtype", path="a/b", fix="ShapeDtypeStructs"),
        ),
        (
            lambda pm: pm.shard_map(lambda x: x, in_axes=None, out_axes=()),
            facts("in_axes", "tuple"),
        ),
        (
            lambda pm: pm.state_shardings({}, {}, {}, overrides=["x"]),
            facts("overrides", "x", fix="pattern"),
        ),
        (lambda pm: sw.match_paths({}, {"kernel": (sw.EMBED,)}), facts(0, "kernel", fix="pattern")),
    ],
)
def test_arguments_of_the_wrong_kind(call: Any, says: Facts) -> None:
    manager = sw.PartitionManager(sw.Strategy.preset("ddp"), mesh=cpu_mesh("dp:8"))
    with raises(sw.StrategyError, says):
        call(manager)
