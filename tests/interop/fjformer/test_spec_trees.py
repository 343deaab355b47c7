"""Trees of `PartitionSpec`s written by hand: names, constraints, path rules, functions."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.interop.fjformer import (
    get_names_from_partition_spec,
    make_shard_and_gather_fns,
    match_partition_rules,
    names_in_current_mesh,
    names_in_mesh,
    tree_apply,
    with_sharding_constraint,
)
from shardwright.testing import cpu_mesh
from tests.raising import Facts, facts, raises


class Pair(NamedTuple):
    first: P
    second: P


# Names.


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (P("tp", ("fsdp", "sp"), None), ["tp", "fsdp", "sp"]),
        ({"z": P("tp"), "a": [P("dp", "tp"), None, {"b": P(("sp", "dp"))}]}, ["tp", "dp", "sp"]),
        (Pair(P("sp"), P(P.UNCONSTRAINED, "dp")), ["sp", "dp"]),
        ((("fsdp", "sp"), "tp", None), ["fsdp", "sp", "tp"]),
        (optax.TraceState(trace={"w": P("tp")}), ["tp"]),
        ("dp", ["dp"]),
        (P(), []),
        (None, []),
    ],
)
def test_names_in_order_and_once(specs: Any, names: list[str]) -> None:
    assert (
        get_names_from_partition_spec(specs)
        == get_names_from_partition_spec(partition_specs=specs)
        == names
    )


def test_names_of_a_named_sharding() -> None:
    assert get_names_from_partition_spec([NamedSharding(cpu_mesh("dp:2,tp:4"), P("tp"))]) == ["tp"]


@pytest.mark.parametrize("bad", [3, np.ones(2), {"dp"}])
def test_names_of_an_invalid_spec(bad: Any) -> None:
    with raises(sw.StrategyError, "spec", fix="PartitionSpecs"):
        get_names_from_partition_spec({"w": bad})


def test_names_of_the_current_mesh() -> None:
    assert names_in_mesh is names_in_current_mesh
    assert not names_in_current_mesh("dp")
    assert names_in_current_mesh()
    with jax.set_mesh(cpu_mesh("dp:2,tp:4")):
        assert names_in_current_mesh("tp", "dp")
        assert not names_in_current_mesh("tp", "sp")
        assert jax.jit(lambda x: x + names_in_current_mesh("tp"))(0) == 1
    with sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=cpu_mesh("tp:4")):
        assert names_in_current_mesh("tp")
    assert not names_in_current_mesh("tp")


def test_names_of_a_manager_inside_a_trace() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=cpu_mesh("tp:4"))

    def inside(x: Any) -> Any:
        with pm:
            return x + names_in_current_mesh("tp")

    assert jax.jit(inside)(0) == 1


def test_names_as_a_list_are_an_error() -> None:
    with raises(sw.MeshSpecError, "dp", "mesh", "axis", fix="dp"):
        names_in_current_mesh(["dp"])  # type: ignore[arg-type]


# Constraints.


@pytest.mark.parametrize("axis_types", ["auto", "explicit", {"tp": "explicit"}])
@pytest.mark.parametrize("jit", [False, True])
def test_constraint_on_every_axis_type(axis_types: Any, jit: bool) -> None:
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    constrain = lambda x: with_sharding_constraint(x, P("tp", "dp"))  # noqa: E731
    with jax.set_mesh(cpu_mesh("dp:2,tp:4", axis_types=axis_types)):
        actual = (jax.jit(constrain) if jit else constrain)(x)
    np.testing.assert_array_equal(actual, x)
    assert actual.sharding.spec == P("tp", "dp")
    assert actual.addressable_shards[0].data.shape == (2, 4)


def test_constraint_is_in_the_program() -> None:
    with jax.set_mesh(cpu_mesh("dp:2,tp:4")):
        lowered = (
            jax.jit(lambda x: 2 * with_sharding_constraint(x, P("tp")))
            .lower(jnp.ones((8, 8)))
            .as_text()
        )
    assert re.search(r'sharding_constraint .*\[\{"tp"\}, \{\}\]', lowered)


def test_constraint_without_the_mesh_axes() -> None:
    x = jnp.ones((8, 8))
    assert with_sharding_constraint(x, P("tp")) is x
    with jax.set_mesh(cpu_mesh("dp:8")):
        assert with_sharding_constraint(x, P("tp")) is x
        assert with_sharding_constraint(x, {"never": P("dp", "tp")}) is x
        lowered = (
            jax.jit(lambda x: 2 * with_sharding_constraint(x, P("dp", "tp"))).lower(x).as_text()
        )
    assert "sharding_constraint" not in lowered


def test_constraint_of_a_tree() -> None:
    tree = {"a": jnp.ones((8, 8)), "b": [jnp.ones(8), jnp.ones((8, 2))]}
    with jax.set_mesh(cpu_mesh("dp:2,tp:4")):
        actual = with_sharding_constraint(tree, {"a": P("dp", "tp"), "b": P("tp")})
        assert jax.tree.map(lambda leaf: leaf.sharding.spec, actual) == {
            "a": P("dp", "tp"),
            "b": [P("tp"), P("tp")],
        }
        with pytest.raises(ValueError, match="pytree structure error"):
            with_sharding_constraint(tree, {"c": P("dp")})
        with raises(sw.StrategyError, "dp", "str", "PartitionSpec", path="0", fix="PartitionSpec"):
            with_sharding_constraint(tree["a"], ("dp", None))


def test_constraint_error_has_a_path() -> None:
    tree = {"a": jnp.ones((6, 8)), "b": jnp.ones(8)}
    with jax.set_mesh(cpu_mesh("dp:2,tp:4")):
        with raises(sw.IndivisibleError, "tp=4", path="a", size=6, count=2) as caught:
            jax.jit(
                lambda tree: with_sharding_constraint(tree, {"a": P("tp"), "b": P("dp", None)})
            )(tree)
        assert [(problem.path, problem.error) for problem in caught.value.problems] == [
            ("a", sw.IndivisibleError),
            ("b", sw.RankMismatchError),
        ]
        with raises(sw.AxisConflictError, "dp", 0):
            with_sharding_constraint(jnp.ones((8, 8)), P("dp", "dp"))


def test_constraint_inside_shard_map() -> None:
    mesh = cpu_mesh("dp:2,tp:4")
    constrain = lambda x: with_sharding_constraint(2 * x, P("dp", "tp"))  # noqa: E731
    x = jnp.arange(64.0).reshape(8, 8)
    with jax.set_mesh(mesh):
        full = jax.jit(jax.shard_map(constrain, in_specs=P("dp", "tp"), out_specs=P("dp", "tp")))(x)
        part = jax.jit(
            jax.shard_map(constrain, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
        )(x)
    np.testing.assert_array_equal(full, 2 * x)
    np.testing.assert_array_equal(part, 2 * x)
    assert part.sharding.spec == P("dp", "tp")


# Path rules.

PARAMS = {
    "embed": np.ones((64, 16), np.float32),
    "blocks": [{"up": {"kernel": np.ones((16, 32), np.float32), "bias": np.ones(32, np.float32)}}],
    "temperature": np.ones((1,), np.float32),
}
RULES = (
    ("embed", P("tp", "fsdp")),
    ("kernel", P("fsdp", "tp")),
    ("blocks/0", P("tp")),
    (".*", P()),
)
SPECS = {
    "embed": P("tp", "fsdp"),
    "blocks": [{"up": {"kernel": P("fsdp", "tp"), "bias": P("tp")}}],
    "temperature": P(),
}


def test_first_matching_rule_wins() -> None:
    assert match_partition_rules(RULES, PARAMS) == SPECS
    assert match_partition_rules(iter(RULES), jax.eval_shape(lambda: PARAMS)) == SPECS


def test_single_elements_are_replicated() -> None:
    tree = {"scale": np.ones((1, 1)), "step": 3, "count": jnp.int32(0), "empty": np.ones((0, 4))}
    actual = match_partition_rules([(".*", P(None, "tp"))], tree)
    assert actual == {"scale": P(), "step": P(), "count": P(), "empty": P(None, "tp")}


def test_match_a_train_state() -> None:
    tx = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    state = {"params": PARAMS, "opt": jax.eval_shape(tx.init, PARAMS), "nothing": None}
    actual = match_partition_rules(RULES, state)
    assert jax.tree.structure(actual) == jax.tree.structure(state)
    assert actual["opt"][1][0].mu == SPECS
    assert actual["opt"][1][0].count == P()


def test_rules_with_semantic_axes() -> None:
    rules = [("kernel", (sw.EMBED, sw.MLP_INTERMEDIATE)), ("embed", sw.RowWise), ("bias", P("tp"))]
    with raises(sw.NoManagerError, "match_partition_rules", "PartitionManager"):
        match_partition_rules(rules, PARAMS)
    with sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=cpu_mesh("fsdp:4,tp:2")):
        assert match_partition_rules(rules, PARAMS) == SPECS
        with raises(
            sw.IndivisibleError,
            "fsdp=4",
            path="kernel",
            dim=0,
            axis="EMBED",
            size=6,
            fix="fsdp+sp | -",
        ):
            match_partition_rules(rules, {"kernel": np.ones((6, 4))})


def test_unmatched_paths_are_listed() -> None:
    with raises(
        ValueError, "partition", "rule", path="blocks/0/up/bias", fix="PartitionSpec", count=2
    ) as caught:
        match_partition_rules(RULES[:2], {**PARAMS, "head": np.ones((4, 4))})
    assert isinstance(caught.value, sw.StrategyError)
    assert [problem.path for problem in caught.value.problems] == ["blocks/0/up/bias", "head"]
    assert "patterns in order: embed, kernel" in str(caught.value)


def test_spec_longer_than_its_array() -> None:
    with raises(
        sw.RankMismatchError,
        "fsdp",
        "tp",
        2,
        "(32,)",
        path="blocks/0/up/bias",
        fix="PartitionManager.state_shardings",
    ):
        match_partition_rules([(".*", P("fsdp", "tp"))], PARAMS)
    with raises(sw.StrategyError, "rule", 0):
        match_partition_rules([("(", P())], PARAMS)


# To the mesh and back.


def test_shard_and_gather_round_trip() -> None:
    with jax.set_mesh(cpu_mesh("fsdp:4,tp:2")):
        shard_fns, gather_fns = make_shard_and_gather_fns(SPECS)
    placed = tree_apply(shard_fns, PARAMS)
    assert jax.tree.map(lambda leaf: leaf.sharding.spec, placed) == SPECS
    assert placed["embed"].addressable_shards[0].data.shape == (32, 4)
    assert len(placed["temperature"].sharding.device_set) == 8
    back = tree_apply(gather_fns, placed)
    assert {type(leaf) for leaf in jax.tree.leaves(back)} == {np.ndarray}
    jax.tree.map(np.testing.assert_array_equal, back, PARAMS)


MIXED = {
    "f4": np.ones((8, 2), np.float32),
    "f2": jnp.ones(8, jnp.float16),
    "ids": np.arange(8, dtype=np.int32),
    "on": np.ones(8, bool),
    "x": 0.5,
}


def test_single_float_dtype_casts_floats() -> None:
    specs = jax.tree.map(lambda leaf: P("dp") if np.ndim(leaf) else P(), MIXED)
    with jax.set_mesh(cpu_mesh("dp:8")):
        shard_fns, gather_fns = make_shard_and_gather_fns(specs, jnp.bfloat16)
        placed = tree_apply(shard_fns, MIXED)
    expected = {
        "f4": jnp.bfloat16,
        "f2": jnp.bfloat16,
        "ids": jnp.int32,
        "on": jnp.bool,
        "x": jnp.bfloat16,
    }
    assert jax.tree.map(lambda leaf: leaf.dtype, placed) == jax.tree.map(jnp.dtype, expected)
    assert all(
        isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) == 8
        for leaf in jax.tree.leaves(placed)
    )
    plain = jax.tree.map(jnp.asarray, MIXED)
    for source in (plain, MIXED, placed):
        gathered = tree_apply(gather_fns, source)
        assert jax.tree.map(lambda leaf: leaf.dtype, gathered) == jax.tree.map(jnp.dtype, expected)
        assert {type(leaf) for leaf in jax.tree.leaves(gathered)} == {np.ndarray}
    np.testing.assert_array_equal(gathered["ids"], np.arange(8))


def test_tree_of_dtypes() -> None:
    specs = {"a": P("dp"), "b": P("dp"), "c": P("dp")}
    dtypes = {
        "a": jnp.bfloat16,
        "b": jax.ShapeDtypeStruct((8,), jnp.float32),
        "c": np.zeros(1, np.int8),
    }
    with jax.set_mesh(cpu_mesh("dp:8")):
        shard_fns, gather_fns = make_shard_and_gather_fns(specs, dtypes)
        placed = tree_apply(shard_fns, {name: np.arange(8.0, dtype=np.float16) for name in specs})
    assert [placed[name].dtype for name in "abc"] == [jnp.bfloat16, jnp.float32, jnp.int8]
    assert [tree_apply(gather_fns, placed)[name].dtype for name in "abc"] == [
        jnp.bfloat16,
        jnp.float32,
        jnp.int8,
    ]


def test_dtype_of_a_single_leaf() -> None:
    with jax.set_mesh(cpu_mesh("dp:8")):
        shard_fn, gather_fn = make_shard_and_gather_fns(
            P("dp"), jax.ShapeDtypeStruct((8,), jnp.int8)
        )
    assert shard_fn(np.arange(8.0)).dtype == jnp.int8
    assert gather_fn(np.arange(8.0)).dtype == np.int8


def test_mesh_from_call_or_sharding() -> None:
    shard_fns, _ = make_shard_and_gather_fns({"w": P("dp")})
    with raises(sw.NoManagerError, "mesh", "devices", fix="jax.set_mesh"):
        tree_apply(shard_fns, {"w": np.ones(8)})
    with sw.PartitionManager(sw.Strategy.preset("ddp"), mesh=cpu_mesh("dp:4")):
        assert len(tree_apply(shard_fns, {"w": np.ones(8)})["w"].sharding.device_set) == 4
    sharding = NamedSharding(cpu_mesh("tp:2"), P("tp"), memory_kind="pinned_host")
    placed = make_shard_and_gather_fns(sharding)[0](np.ones(8))
    assert placed.sharding.is_equivalent_to(sharding, 1)
    assert placed.sharding.memory_kind == "pinned_host"


def test_array_with_another_sharding() -> None:
    with jax.set_mesh(cpu_mesh("dp:2,tp:4")):
        shard_fns, _ = make_shard_and_gather_fns([P("tp"), P(None, "tp")])
    first = shard_fns[0](np.arange(32.0).reshape(4, 8))
    second = shard_fns[1](first)
    assert (first.sharding.spec, second.sharding.spec) == (P("tp"), P(None, "tp"))
    np.testing.assert_array_equal(second, np.arange(32.0).reshape(4, 8))


@pytest.mark.parametrize(
    ("specs", "dtypes", "says"),
    [
        ({"w": ("dp", None)}, None, "^w/0: 'dp' of type str is not a PartitionSpec"),
        (P("dp"), jnp.int8, "dtype_specs is int8, but one dtype for all leaves must be a float"),
        ({"w": P("dp")}, {"v": jnp.float32}, "structure error|key mismatch"),
        ({"w": P("dp")}, {"w": "no such"}, "'no such' not understood"),
        ({"w": P("dp")}, {"w": object()}, "no attribute 'dtype'"),
        (
            {"w": P("dp")},
            np.float64,
            (
                r"dtype_specs has float64, but JAX uses float32 while jax_enable_x64 is "
                r"off\n  fix   jax\.conf"
            ),
        ),
        ({"w": P("dp")}, {"w": jnp.int64}, "dtype_specs has int64, but JAX uses int32"),
    ],
)
def test_invalid_function_arguments(specs: Any, dtypes: Any, says: str) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError), match=says):
        make_shard_and_gather_fns(specs, dtypes)


def test_misfits_are_not_placed() -> None:
    with jax.set_mesh(cpu_mesh("dp:8")):
        shard_fns, _ = make_shard_and_gather_fns({"w": P("dp"), "v": P("tp"), "n": P()})
    says = facts("dp=8", path="w", dim=0, size=6, fix="None")
    with raises(sw.IndivisibleError, says):
        tree_apply({"w": shard_fns["w"]}, {"w": np.ones(6)})
    with raises(sw.MissingMeshAxisError, "mesh", "axis", "tp", path="v", dim=0, fix="dp"):
        shard_fns["v"](np.ones(8))
    with raises(
        sw.StrategyError,
        "int64",
        "int32",
        "JAX",
        "jax_enable_x64",
        path="n",
        fix="jax.config.update",
    ):
        shard_fns["n"](np.array([1, 2**40]))
    assert shard_fns["n"](np.array([1, 2**20])).dtype == jnp.int32


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            np.full((8,), 1e300),
            facts("float64", "float32", "JAX", "jax_enable_x64", path=..., fix="jax.config.update"),
        ),
        (
            np.full((8,), 2**40 + 7),
            facts("int64", "int32", "JAX", "jax_enable_x64", path=..., fix="jax.config.update"),
        ),
        (2**40, facts("int", "int32", "JAX", "jax_enable_x64", fix="jax.config.update")),
    ],
)
def test_values_beyond_32_bits_are_not_placed(value: Any, says: Facts) -> None:
    with jax.set_mesh(cpu_mesh("dp:8")):
        shard_fns, _ = make_shard_and_gather_fns({"w": P()})
        with raises(sw.StrategyError, says):
            shard_fns["w"](value)
        if np.ndim(value):
            with raises(sw.StrategyError, says):
                with_sharding_constraint(value, P("dp"))
        wide, _ = make_shard_and_gather_fns({"w": P()}, {"w": jnp.bfloat16})
        if np.ndim(value) and value.dtype == np.int64:
            assert wide["w"](value).dtype == jnp.bfloat16, "cast first"


def test_keys_are_placed_not_cast() -> None:
    key = jax.random.key(0)
    with jax.set_mesh(cpu_mesh("dp:8")):
        shard_fns, gather_fns = make_shard_and_gather_fns({"k": P()})
        placed = shard_fns["k"](key)
        assert (placed.dtype, placed.sharding.spec) == (key.dtype, P())
        with pytest.raises(TypeError, match="key_data"):
            gather_fns["k"](placed)
        same, _ = make_shard_and_gather_fns({"k": P()}, {"k": key})
        assert same["k"](key).dtype == key.dtype
        other, _ = make_shard_and_gather_fns({"k": P()}, {"k": jnp.float32})
        with pytest.raises((TypeError, ValueError, NotImplementedError)):
            other["k"](key)
