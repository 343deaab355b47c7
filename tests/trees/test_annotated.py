"""Trees: arrays created sharded, path rules, stacks of layers."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.interop import fjformer
from shardwright.trees import annotated, initialize
from tests.raising import Facts, facts, raises
from tests.small_model import KERNEL, manager, normal, spec_tree, specs

P = jax.P
zeros = jax.nn.initializers.zeros


# ArraySpecs.


def test_abstract_then_shardings_then_arrays() -> None:
    pm = manager()
    wanted = {
        "embed": P("tp", "fsdp"),
        "blocks": [{"up": P("fsdp", "tp")}, {"up": P("fsdp", "tp")}],
        "norm": P(),
    }
    assert spec_tree(pm.shardings(specs())) == wanted
    shapes = initialize.abstract(specs())
    assert (shapes["embed"].shape, shapes["blocks"][1]["up"].dtype) == ((64, 16), jnp.bfloat16)
    arrays = pm.init(specs(), jax.random.key(0))
    assert jax.tree.map(lambda leaf: leaf.sharding.spec, arrays) == wanted
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), arrays) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), shapes
    )
    np.testing.assert_array_equal(arrays["norm"], np.ones(16))
    assert 0.015 < np.std(arrays["embed"]) < 0.025


@pytest.mark.full
def test_init_never_holds_a_whole_copy() -> None:
    """Each device holds its eighth.

    Outputs by the compiled program's own account, and temporaries far below one whole array.
    """
    pm = manager()
    big = {
        "w": sw.ArraySpec((1024, 1024), jnp.float32, KERNEL, normal),
        "v": sw.ArraySpec((1024, 512), jnp.float32, KERNEL, normal),
    }
    shardings = pm.shardings(big)
    compiled = (
        jax.jit(initialize.initializer(big), out_shardings=shardings)
        .lower(jax.random.key(0))
        .compile()
    )
    assert compiled.output_shardings == shardings
    memory = compiled.memory_analysis()
    whole = 4 * 1024 * (1024 + 512)
    assert memory.output_size_in_bytes <= whole // 8 + 1024
    assert memory.temp_size_in_bytes < 4 * 1024 * 1024, (
        "less than one whole array beside the shards"
    )
    arrays = pm.init(big, jax.random.key(0))
    for leaf in jax.tree.leaves(arrays):
        assert {shard.data.size * 8 for shard in leaf.addressable_shards} == {leaf.size}


@pytest.mark.full
def test_values_depend_on_the_path_only() -> None:
    key = jax.random.key(7)
    cache = manager("single", "dp:1").init(specs(), key)
    many = manager().init(specs(), key)
    # Not bit by bit: another partition fuses otherwise, and the last bit with it.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-6
        ),
        cache,
        many,
    )
    grown = manager().init(
        {**specs(), "another": sw.ArraySpec((8,), jnp.float32, (sw.NORM,), zeros)}, key
    )
    np.testing.assert_allclose(grown["embed"], many["embed"], rtol=1e-6)
    assert not np.array_equal(
        np.asarray(many["blocks"][0]["up"]), np.asarray(many["blocks"][1]["up"], np.float32)
    ), "a key for each path"
    assert not np.array_equal(manager().init(specs(), jax.random.key(8))["embed"], many["embed"])


def test_specs_without_init_are_all_named() -> None:
    bare = {
        "a": sw.ArraySpec((8,), jnp.float32, (sw.NORM,)),
        "b": [sw.ArraySpec((8,), jnp.float32, (sw.NORM,))],
    }
    with raises(sw.StrategyError, "ArraySpec", path="a", fix="ArraySpec", count=2) as caught:
        manager().init(bare, jax.random.key(0))
    assert [problem.path for problem in caught.value.problems] == ["a", "b/0"]
    assert spec_tree(manager().shardings(bare)) == {"a": P(), "b": [P()]}


def test_array_spec_is_checked_at_creation() -> None:
    with raises(sw.RankMismatchError, "EMBED", "MLP_INTERMEDIATE", 2, 3, fix="EMPTY"):
        sw.ArraySpec((4, 8, 8), jnp.float32, KERNEL)
    assert sw.ArraySpec([8, np.int64(8)], jnp.float32, [sw.EMBED, sw.EMPTY]).axes == (
        sw.EMBED,
        sw.EMPTY,
    )
    assert hash(sw.ArraySpec((8, 8), jnp.float32, KERNEL)) == hash(
        sw.ArraySpec((8, 8), jnp.float32, KERNEL)
    )


# Stacks.


def test_stacked_specs_scan_over_layers() -> None:
    pm = manager()
    layer = {
        "up": sw.ArraySpec((16, 32), jnp.float32, KERNEL, normal),
        "down": sw.ArraySpec((32, 16), jnp.float32, sw.RowWise, normal),
    }
    stack = sw.stack_specs(layer, 3)
    assert stack["up"].shape == (3, 16, 32)
    assert stack["up"].axes == (sw.LAYERS, *KERNEL)
    arrays = pm.init(stack, jax.random.key(0))
    assert (arrays["up"].sharding.spec, arrays["down"].sharding.spec) == (
        P(None, "fsdp", "tp"),
        P(None, "tp", "fsdp"),
    )
    assert not np.array_equal(arrays["up"][0], arrays["up"][1]), "each layer has its own key"
    x = pm.shard(np.ones((8, 16), np.float32), sw.BATCH, sw.EMPTY)

    def run(stack: Any, x: Any) -> Any:
        def step(x: Any, w: Any) -> Any:
            assert w["up"].shape == (16, 32)
            return x + jnp.tanh(x @ pm.gather(w["up"], *KERNEL)) @ pm.gather(
                w["down"], sw.RowWise
            ), None

        return jax.lax.scan(step, x, stack)[0]

    wanted = np.ones((8, 16), np.float32)
    for at in range(3):
        wanted = wanted + np.tanh(wanted @ np.asarray(arrays["up"][at])) @ np.asarray(
            arrays["down"][at]
        )
    np.testing.assert_allclose(jax.jit(run)(arrays, x), wanted, rtol=1e-5)


# Path rules.

RULES = [("embed", (sw.VOCAB, sw.EMBED)), (r"up$", KERNEL), ("norm", (sw.NORM,))]


def test_first_match_wins() -> None:
    shapes = initialize.abstract(specs())
    matched = sw.match_paths(
        shapes, [("blocks/1", sw.Replicated), *RULES, ("blocks/0", sw.ColumnWise)]
    )
    assert matched.annotations["blocks"] == [{"up": KERNEL}, {"up": sw.Replicated}]
    assert (matched.unmatched, matched.unused, matched.shadowed) == ((), (), ("blocks/0",))
    assert spec_tree(manager().shardings(shapes, matched.annotations))["blocks"] == [
        {"up": P("fsdp", "tp")},
        {"up": P()},
    ]
    literal = sw.match_paths(shapes, [(".*", P())])
    assert set(
        jax.tree.leaves(
            spec_tree(manager().shardings(shapes, literal.annotations)),
            is_leaf=lambda leaf: isinstance(leaf, P),
        )
    ) == {P()}


def test_unmatched_unused_and_shadowed() -> None:
    shapes = {**initialize.abstract(specs()), "step": jax.ShapeDtypeStruct((), jnp.int32)}
    with raises(sw.StrategyError, "rule", "matches", path="blocks/0/up", count=3) as caught:
        sw.match_paths(shapes, [("embed", (sw.VOCAB, sw.EMBED)), ("nowhere", ())])
    assert [problem.path for problem in caught.value.problems] == [
        "blocks/0/up",
        "blocks/1/up",
        "norm",
    ]
    loose = sw.match_paths(
        shapes, [("embed", (sw.VOCAB, sw.EMBED)), ("nowhere", ()), ("^emb", ())], strict=False
    )
    assert loose.unmatched == ("blocks/0/up", "blocks/1/up", "norm")
    assert (loose.unused, loose.shadowed) == (("nowhere",), ("^emb",))
    assert loose.annotations["norm"] is sw.Replicated
    assert loose.annotations["step"] == (), "scalars need no rule"


def test_duplicate_pattern_is_reported() -> None:
    matched = sw.match_paths({"a": np.zeros(4)}, [("a", (sw.NORM,)), ("a", (sw.EMBED,))])
    assert matched.annotations == {"a": (sw.NORM,)}
    assert matched.shadowed == ("a",)


def test_loose_path_rules_give_annotations() -> None:
    tree = {"w": np.zeros((8, 4)), "norm": np.zeros(8), "step": np.zeros(())}
    matched = sw.match_paths(tree, [("w", (sw.EMBED, sw.MLP_INTERMEDIATE))], strict=False)
    assert (matched.unmatched, matched.annotations["norm"]) == (("norm",), sw.Replicated)
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=sw.create_mesh("fsdp:8"))
    specs = jax.tree.map(lambda sharding: sharding.spec, pm.shardings(tree, matched.annotations))
    assert specs == {"w": P("fsdp"), "norm": P(), "step": P()}
    with raises(sw.StrategyError, "rule", path="norm", fix="PartitionSpec"):
        fjformer.match_partition_rules([("w", P("fsdp"))], tree)


def test_bad_path_rules() -> None:
    for pattern, says in (
        ("a{99999999999}", facts("rule", 0)),
        ("(" * 5000 + ")" * 5000, facts("rule", 0)),
    ):
        with raises(sw.StrategyError, says):
            sw.match_paths({"a": 1}, [(pattern, P())])
    with raises(sw.StrategyError, "rule", 1):
        sw.match_paths({"a": np.zeros(4)}, [("a", (sw.NORM,)), ("[a", (sw.NORM,))])
    with raises(sw.StrategyError, 3, fix="BATCH"):
        sw.match_paths({"a": np.zeros(4)}, [("a", 3)])


def test_paths_of_every_kind_of_tree() -> None:
    Point = collections.namedtuple("Point", ["x"])  # noqa: PYI024
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    nested = {"a": [shape, {"b": (shape, Point(shape))}], "c": Box(w=shape)}
    assert [leaf.path for leaf in annotated.annotated_leaves(nested, (sw.NORM,))] == [
        "a/0",
        "a/1/b/0",
        "a/1/b/1/x",
        "c/w",
    ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Box:
    w: Any


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_narrowed_dtype_names_its_cause() -> None:
    """The initializer does return the dtype that it is given: JAX itself narrows it."""
    wide = {
        "w": sw.ArraySpec((8,), jnp.float64, (sw.NORM,), zeros),
        "v": sw.ArraySpec((8,), jnp.float32, (sw.NORM,), zeros),
    }
    with raises(
        sw.StrategyError,
        "ArraySpec",
        "float64",
        "JAX",
        "float32",
        "jax_enable_x64",
        path="w",
        fix="float32",
    ):
        manager().init(wide, jax.random.key(0))
    with jax.enable_x64(True):
        arrays = manager().init(wide, jax.random.key(0))
    assert (arrays["w"].dtype, arrays["v"].dtype) == (jnp.float64, jnp.float32)


# Annotated trees.


def test_prefixes_cover_whole_subtrees() -> None:
    shapes = initialize.abstract(specs())
    annotations = {"embed": (sw.VOCAB, sw.EMBED), "blocks": KERNEL, "norm": (sw.NORM,)}
    assert spec_tree(manager().shardings(shapes, annotations)) == spec_tree(
        manager().shardings(specs())
    )


LEAF = ("leaf", "ndarray", "(4,)")
MISFITS: dict[str, tuple[Any, Any, Facts | tuple[Facts, ...]]] = {
    "one missing": (
        {"x": {"k": 4, "q": 4}},
        {"x": {"q": (sw.NORM,)}},
        facts("the tree has this path", path="x/k"),
    ),
    "one too many": (
        {"x": {"q": 4}},
        {"x": {"q": (sw.NORM,), "qq": ()}},
        facts("annotations has this path", path="x/qq"),
    ),
    "one mistyped": (
        {"gate": 4},
        {"gaet": (sw.NORM,)},
        (facts("the tree has", path="gate", count=2), facts("path", path="gaet", fix="gate")),
    ),
    "a list too long": (
        {"x": [4]},
        {"x": [(sw.NORM,), (sw.NORM,)]},
        facts("annotations has this path", path="x/1"),
    ),
    "a level too deep": (
        {"x": 4},
        {"x": {"w": (sw.NORM,)}},
        facts(*LEAF, "dict", path="x", fix="leaf"),
    ),
    "an empty level": ({"x": 4}, {"x": {}}, facts(*LEAF, "dict", path="x")),
    "nothing": ({"x": {"y": 4}}, {"x": {"y": None}}, facts(*LEAF, "None", path="x/y")),
    "another container": (
        {"x": {"y": 4}},
        {"x": [(sw.NORM,)]},
        facts("dict", "list", path="x"),
    ),
    "a list of axes": (
        {"x": 4},
        {"x": [sw.NORM]},
        facts(*LEAF, "list", path="x", fix="tuple"),
    ),
    "the whole": (4, {"x": (sw.NORM,)}, facts(*LEAF, "dict")),
}


@pytest.mark.parametrize("name", MISFITS)
def test_misfit_is_named_by_path(name: str) -> None:
    sizes, annotations, says = MISFITS[name]
    with raises(sw.StrategyError, says):
        manager().shardings(jax.tree.map(np.zeros, sizes), annotations)


def test_container_data_differs() -> None:
    Module = jax.tree_util.register_dataclass(
        dataclasses.make_dataclass("Module", ["w", "name"]), data_fields=["w"], meta_fields=["name"]
    )
    with raises(sw.StrategyError, "data", "b", "a", "w", "array", fix="annotate"):
        manager().shardings(Module(np.zeros(4), "a"), Module((sw.NORM,), "b"))


def test_path_match_is_not_annotations() -> None:
    arrays = {"a": np.zeros(4), "b": np.zeros(4)}
    matched = sw.match_paths(arrays, [(".*", (sw.NORM,))])
    with raises(sw.StrategyError, "PathMatch", "tree", fix="match_paths"):
        manager().shardings(arrays, matched)
    assert spec_tree(manager().shardings(arrays, matched.annotations)) == {"a": P(), "b": P()}


def test_bad_annotations_are_all_named() -> None:
    shapes = {"a": np.zeros(4), "b": {"c": np.zeros(4)}, "d": np.zeros(4)}
    with raises(sw.StrategyError, "int", path="a", fix="ArraySpec", count=2) as caught:
        manager().shardings(shapes, {"a": 3, "b": (sw.NORM,), "d": 4.5})
    assert [problem.path for problem in caught.value.problems] == ["a", "d"]
    with raises(sw.StrategyError, "tree", path="b", count=2):
        manager().shardings(shapes, {"a": (sw.NORM,)})
    with raises(
        sw.StrategyError,
        facts("(4,)", path="a", fix="ArraySpec"),
        facts("(4,)", path="b/c", fix="ArraySpec"),
        facts("(4,)", path="d", fix="ArraySpec"),
    ):
        manager().shardings(shapes)


def test_fixes_name_what_is_wrong() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=sw.abstract_mesh("fsdp:2"))
    matrix = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    tree, axes = {"w": matrix}, {"w": (sw.EMBED, sw.VOCAB)}

    def fix(call: Any) -> str:
        with pytest.raises(sw.ShardingError) as caught:
            call()
        return str(caught.value.fix)

    one = pm.shard_map(lambda x: x, in_axes=(sw.BATCH,), out_axes=(sw.BATCH,))
    expected = "write a tuple with one axis per dim: (BATCH,), or (BATCH, EMPTY) for two dims"
    assert fix(lambda: one(matrix)) == expected
    both = "convert one of the trees, so that both have the same containers"
    assert fix(lambda: pm.shardings(collections.OrderedDict(tree), axes)) == both
    assert "annotate every leaf" in fix(lambda: pm.shardings(tree, {"w": [axes]}))
