"""Trees: from ArraySpecs to arrays born in their shards, path rules, stacks of layers, optimizer state."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright import tree
from shardwright.testing import cpu_mesh

P = jax.P
normal, zeros, ones = jax.nn.initializers.normal(0.02), jax.nn.initializers.zeros, jax.nn.initializers.ones
KERNEL = (sw.EMBED, sw.MLP_INTERMEDIATE)


def manager(preset: str = "fsdp_tp", sizes: str = "fsdp:4,tp:2") -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset(preset), mesh=cpu_mesh(sizes))


def specs(embed: int = 16, hidden: int = 32) -> dict[str, Any]:
    """A small model: a table, two layers' kernels, a norm."""
    return {
        "embed": sw.ArraySpec((64, embed), jnp.float32, (sw.VOCAB, sw.EMBED), normal),
        "blocks": [
            {"up": sw.ArraySpec((embed, hidden), jnp.float32, KERNEL, normal)},
            {"up": sw.ArraySpec((embed, hidden), jnp.bfloat16, KERNEL, normal)},
        ],
        "norm": sw.ArraySpec((embed,), jnp.float32, (sw.NORM,), ones),
    }


def spec_tree(shardings: Any) -> Any:
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


# ArraySpecs.


def test_abstract_then_shardings_then_arrays() -> None:
    pm = manager()
    wanted = {"embed": P("tp", "fsdp"), "blocks": [{"up": P("fsdp", "tp")}, {"up": P("fsdp", "tp")}], "norm": P()}
    assert spec_tree(pm.shardings(specs())) == wanted
    shapes = tree.abstract(specs())
    assert (shapes["embed"].shape, shapes["blocks"][1]["up"].dtype) == ((64, 16), jnp.bfloat16)
    made = pm.init(specs(), jax.random.key(0))
    assert jax.tree.map(lambda leaf: leaf.sharding.spec, made) == wanted
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), made) == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes)
    np.testing.assert_array_equal(made["norm"], np.ones(16))
    assert 0.015 < np.std(made["embed"]) < 0.025


def test_an_unsharded_copy_is_never_held() -> None:
    """Each device holds its eighth: outputs by the compiled program's own account, and temporaries far below one whole array."""
    pm = manager()
    big = {"w": sw.ArraySpec((1024, 1024), jnp.float32, KERNEL, normal), "v": sw.ArraySpec((1024, 512), jnp.float32, KERNEL, normal)}
    shardings = pm.shardings(big)
    compiled = jax.jit(tree.initialiser(big), out_shardings=shardings).lower(jax.random.key(0)).compile()
    assert compiled.output_shardings == shardings
    memory = compiled.memory_analysis()
    whole = 4 * 1024 * (1024 + 512)
    assert memory.output_size_in_bytes <= whole // 8 + 1024
    assert memory.temp_size_in_bytes < 4 * 1024 * 1024, "less than one whole array beside the shards"
    made = pm.init(big, jax.random.key(0))
    for leaf in jax.tree.leaves(made):
        assert {shard.data.size * 8 for shard in leaf.addressable_shards} == {leaf.size}


def test_values_do_not_depend_on_the_mesh_nor_on_the_neighbours() -> None:
    key = jax.random.key(7)
    one = manager("single", "dp:1").init(specs(), key)
    many = manager().init(specs(), key)
    # Not bit by bit: another partition fuses otherwise, and the last bit with it.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-6), one, many)
    grown = manager().init({**specs(), "another": sw.ArraySpec((8,), jnp.float32, (sw.NORM,), zeros)}, key)
    np.testing.assert_allclose(grown["embed"], many["embed"], rtol=1e-6)
    assert not np.array_equal(np.asarray(many["blocks"][0]["up"]), np.asarray(many["blocks"][1]["up"], np.float32)), "a key for each path"
    assert not np.array_equal(manager().init(specs(), jax.random.key(8))["embed"], many["embed"])


def test_specs_without_an_initialiser_are_named_all_at_once() -> None:
    bare = {"a": sw.ArraySpec((8,), jnp.float32, (sw.NORM,)), "b": [sw.ArraySpec((8,), jnp.float32, (sw.NORM,))]}
    with pytest.raises(sw.StrategyError, match=r"^2 problems") as caught:
        manager().init(bare, jax.random.key(0))
    assert [problem.path for problem in caught.value.problems] == ["a", "b/0"]
    assert spec_tree(manager().shardings(bare)) == {"a": P(), "b": [P()]}


def test_an_array_spec_is_checked_when_it_is_written() -> None:
    with pytest.raises(sw.RankMismatchError, match=r"\(EMBED, MLP_INTERMEDIATE\) has 2 dims, the array has 3"):
        sw.ArraySpec((4, 8, 8), jnp.float32, KERNEL)
    with pytest.raises(sw.AxisConflictError, match="the axis stands twice in one annotation"):
        sw.ArraySpec((8, 8), jnp.float32, (sw.EMBED, sw.EMBED))
    assert sw.ArraySpec([8, np.int64(8)], jnp.float32, [sw.EMBED, sw.EMPTY]).axes == (sw.EMBED, sw.EMPTY)
    assert hash(sw.ArraySpec((8, 8), jnp.float32, KERNEL)) == hash(sw.ArraySpec((8, 8), jnp.float32, KERNEL))


# Stacks.


def test_stacked_specs_scan_over_layers() -> None:
    pm = manager()
    layer = {"up": sw.ArraySpec((16, 32), jnp.float32, KERNEL, normal), "down": sw.ArraySpec((32, 16), jnp.float32, sw.RowWise, normal)}
    stack = sw.stack_specs(layer, 3)
    assert stack["up"].shape == (3, 16, 32)
    assert stack["up"].axes == (sw.LAYERS, *KERNEL)
    made = pm.init(stack, jax.random.key(0))
    assert (made["up"].sharding.spec, made["down"].sharding.spec) == (P(None, "fsdp", "tp"), P(None, "tp", "fsdp"))
    assert not np.array_equal(made["up"][0], made["up"][1]), "each layer has its own key"
    x = pm.shard(np.ones((8, 16), np.float32), sw.BATCH, sw.EMPTY)

    def run(stack: Any, x: Any) -> Any:
        def step(x: Any, w: Any) -> Any:
            assert w["up"].shape == (16, 32)
            return x + jnp.tanh(x @ pm.gather(w["up"], *KERNEL)) @ pm.gather(w["down"], sw.RowWise), None

        return jax.lax.scan(step, x, stack)[0]

    wanted = np.ones((8, 16), np.float32)
    for at in range(3):
        wanted = wanted + np.tanh(wanted @ np.asarray(made["up"][at])) @ np.asarray(made["down"][at])
    np.testing.assert_allclose(jax.jit(run)(made, x), wanted, rtol=1e-5)


# Path rules.

RULES = [("embed", (sw.VOCAB, sw.EMBED)), (r"up$", KERNEL), ("norm", (sw.NORM,))]


def test_first_match_wins_and_layouts_and_specs_may_stand_for_axes() -> None:
    shapes = tree.abstract(specs())
    found = sw.match_paths(shapes, [("blocks/1", sw.Replicated), *RULES, ("blocks/0", sw.ColumnWise)])
    assert found.annotations["blocks"] == [{"up": KERNEL}, {"up": sw.Replicated}]
    assert (found.unmatched, found.unused, found.shadowed) == ((), (), ("blocks/0",))
    assert spec_tree(manager().shardings(shapes, found.annotations))["blocks"] == [{"up": P("fsdp", "tp")}, {"up": P()}]
    literal = sw.match_paths(shapes, [(".*", P())])
    assert set(jax.tree.leaves(spec_tree(manager().shardings(shapes, literal.annotations)), is_leaf=lambda leaf: isinstance(leaf, P))) == {
        P()
    }


def test_unmatched_unused_and_shadowed() -> None:
    shapes = {**tree.abstract(specs()), "step": jax.ShapeDtypeStruct((), jnp.int32)}
    with pytest.raises(sw.StrategyError, match=r"^3 problems") as caught:
        sw.match_paths(shapes, [("embed", (sw.VOCAB, sw.EMBED)), ("nowhere", ())])
    assert [problem.path for problem in caught.value.problems] == ["blocks/0/up", "blocks/1/up", "norm"]
    loose = sw.match_paths(shapes, [("embed", (sw.VOCAB, sw.EMBED)), ("nowhere", ()), ("^emb", ())], strict=False)
    assert loose.unmatched == ("blocks/0/up", "blocks/1/up", "norm")
    assert (loose.unused, loose.shadowed) == (("nowhere",), ("^emb",))
    assert loose.annotations["norm"] is None
    assert loose.annotations["step"] == (), "scalars need no rule"


def test_one_pattern_twice_is_reported_once_each() -> None:
    found = sw.match_paths({"a": np.zeros(4)}, [("a", (sw.NORM,)), ("a", (sw.EMBED,))])
    assert found.annotations == {"a": (sw.NORM,)}
    assert found.shadowed == ("a",)


def test_bad_path_rules() -> None:
    with pytest.raises(sw.StrategyError, match=r"rule 1: not a regular expression: unterminated character set"):
        sw.match_paths({"a": np.zeros(4)}, [("a", (sw.NORM,)), ("[a", (sw.NORM,))])
    with pytest.raises(sw.StrategyError, match="3 is not an annotation"):
        sw.match_paths({"a": np.zeros(4)}, [("a", 3)])


def test_paths_of_every_kind_of_tree() -> None:
    Point = collections.namedtuple("Point", ["x"])  # noqa: PYI024
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    nested = {"a": [shape, {"b": (shape, Point(shape))}], "c": Box(w=shape)}
    assert [leaf.path for leaf in tree.annotated_leaves(nested, (sw.NORM,))] == ["a/0", "a/1/b/0", "a/1/b/1/x", "c/w"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Box:
    w: Any


# Annotated trees.


def test_prefixes_cover_whole_subtrees() -> None:
    shapes = tree.abstract(specs())
    annotations = {"embed": (sw.VOCAB, sw.EMBED), "blocks": KERNEL, "norm": (sw.NORM,)}
    assert spec_tree(manager().shardings(shapes, annotations)) == spec_tree(manager().shardings(specs()))


def test_bad_annotations_are_named_all_at_once() -> None:
    shapes = {"a": np.zeros(4), "b": {"c": np.zeros(4)}, "d": np.zeros(4)}
    with pytest.raises(sw.StrategyError, match=r"^2 problems\n 1. a: int is not an annotation") as caught:
        manager().shardings(shapes, {"a": 3, "b": (sw.NORM,), "d": 4.5})
    assert [problem.path for problem in caught.value.problems] == ["a", "d"]
    with pytest.raises(sw.StrategyError, match="the tree of annotations does not fit the tree"):
        manager().shardings(shapes, {"a": (sw.NORM,)})
    with pytest.raises(sw.StrategyError, match=r"ndarray of shape \(4,\) is not an annotation"):
        manager().shardings(shapes)


# Optimizer state.

optax = pytest.importorskip("optax")


def params() -> dict[str, Any]:
    return specs()


def chained() -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def masked() -> Any:
    return optax.masked(optax.adam(1e-3), {"embed": True, "blocks": [{"up": True}, {"up": False}], "norm": False})


def multi() -> Any:
    labels = {"embed": "adam", "blocks": [{"up": "adam"}, {"up": "sgd"}], "norm": "sgd"}
    return optax.multi_transform({"adam": optax.adam(1e-3), "sgd": optax.sgd(1e-2, momentum=0.9)}, labels)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: optax.sgd(1e-2),
    "sgd momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(1e-3, weight_decay=0.1),
    "lion": lambda: optax.lion(1e-4),
    "rmsprop": lambda: optax.rmsprop(1e-3, momentum=0.9, centered=True),
    "lamb": lambda: optax.lamb(1e-3),
    "adagrad": lambda: optax.adagrad(1e-2),
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(1e-3, 100)),
    "chain": chained,
    "masked": masked,
    "multi_transform": multi,
    "accumulated": lambda: optax.MultiSteps(optax.adam(1e-3), every_k_schedule=2).gradient_transformation(),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_state_lies_like_the_parameters_that_it_follows(name: str) -> None:
    """Structure equal to tx.init's, and no moment of a sharded parameter replicated."""
    pm = manager()
    tx = OPTIMIZERS[name]()
    shapes = tree.abstract(params())
    state = jax.eval_shape(tx.init, shapes)
    shardings = pm.state_shardings(state, params())
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    by_shape = {(64, 16): P("tp", "fsdp"), (16, 32): P("fsdp", "tp"), (16,): P(), (): P()}
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert sharding.spec == by_shape[leaf.shape]


@pytest.mark.parametrize("name", ["adamw", "chain", "masked", "multi_transform"])
def test_state_is_born_in_its_shards_and_a_step_keeps_it_there(name: str) -> None:
    pm = manager()
    tx = OPTIMIZERS[name]()
    shardings = pm.state_shardings(jax.eval_shape(tx.init, tree.abstract(params())), params())
    values = pm.init(params(), jax.random.key(0))
    made = jax.jit(tx.init, out_shardings=shardings)(values)
    assert jax.tree.structure(made) == jax.tree.structure(tx.init(values))

    def step(state: Any, values: Any) -> Any:
        updates, state = tx.update(jax.tree.map(jnp.ones_like, values), state, values)
        return state, optax.apply_updates(values, updates)

    param_shardings = pm.shardings(params())
    after, moved = jax.jit(step, out_shardings=(shardings, param_shardings))(made, values)
    assert jax.tree.map(lambda leaf: leaf.sharding, moved) == param_shardings
    assert jax.tree.structure(after) == jax.tree.structure(made)


def test_annotations_beside_the_parameters_serve_too() -> None:
    shapes = tree.abstract(params())
    state = jax.eval_shape(optax.adam(1e-3).init, shapes)
    annotations = {"embed": (sw.VOCAB, sw.EMBED), "blocks": KERNEL, "norm": (sw.NORM,)}
    pm = manager()
    assert spec_tree(pm.state_shardings(state, shapes, annotations)) == spec_tree(pm.state_shardings(state, params()))


def test_factored_moments_follow_nothing_until_they_are_annotated() -> None:
    """Adafactor keeps row and column sums of large kernels, and one-element stand-ins for what it does not keep."""
    pm = manager()
    big = {"w": sw.ArraySpec((128, 256), jnp.float32, KERNEL, normal)}
    state = jax.eval_shape(optax.adafactor(1e-3, min_dim_size_to_factor=128).init, tree.abstract(big))
    with pytest.raises(
        sw.RankMismatchError, match=r"differs from its parameter w \(EMBED, MLP_INTERMEDIATE\) of shape \(128, 256\)"
    ) as caught:
        pm.state_shardings(state, big)
    named = {problem.path.split("/")[-2]: problem for problem in caught.value.problems}
    assert {"v_row", "v_col"} <= set(named)
    assert "overrides={" in named["v_row"].fix
    overrides = {"v_row/w": (sw.EMBED,), "v_col/w": (sw.MLP_INTERMEDIATE,), r"/v/w": (sw.EMPTY,)}
    found = pm.state_shardings(state, big, overrides=overrides)
    flat = {tree.path_text(path): sharding.spec for path, sharding in jax.tree_util.tree_flatten_with_path(found)[0]}
    assert {path.split("/")[-2]: spec for path, spec in flat.items() if path.endswith("/w")} == {
        "v_row": P("fsdp"),
        "v_col": P("tp"),
        "v": P(),
    }
    assert jax.tree.structure(found) == jax.tree.structure(state)


def test_the_suggested_override_is_accepted_as_it_stands() -> None:
    pm = manager()
    state = {"extra.[0]": np.zeros((8, 8))}
    with pytest.raises(sw.StrategyError, match="follows no parameter") as caught:
        pm.state_shardings(state, params())
    pattern = caught.value.fix.split("{", 1)[1].split(":", 1)[0]
    assert spec_tree(pm.state_shardings(state, params(), overrides={eval(pattern): KERNEL})) == {"extra.[0]": P("fsdp", "tp")}


def test_longest_path_wins_among_parameters_of_one_name() -> None:
    pm = manager()
    nested = {
        "w": sw.ArraySpec((16, 32), jnp.float32, KERNEL, normal),
        "block": {"w": sw.ArraySpec((16, 32), jnp.float32, sw.Replicated, normal)},
    }
    state = jax.eval_shape(optax.adam(1e-3).init, tree.abstract(nested))
    mu = pm.state_shardings(state, nested)[0].mu
    assert spec_tree(mu) == {"w": P("fsdp", "tp"), "block": {"w": P()}}


def test_a_single_array_as_parameters() -> None:
    pm = manager()
    one = sw.ArraySpec((16, 32), jnp.float32, KERNEL, normal)
    state = jax.eval_shape(optax.adam(1e-3).init, tree.abstract(one))
    assert pm.state_shardings(state, one)[0].mu.spec == P("fsdp", "tp")


def test_parameters_in_a_plain_tuple() -> None:
    """The state's annotations are a tuple of tuples of axes too, which must not be read as one annotation of composites."""
    pm = manager()
    pair = (sw.ArraySpec((16, 32), jnp.float32, KERNEL, normal), sw.ArraySpec((32, 16), jnp.float32, KERNEL[::-1], normal))
    state = jax.eval_shape(optax.sgd(1e-2, momentum=0.9).init, tree.abstract(pair))
    assert jax.tree.leaves(spec_tree(pm.state_shardings(state, pair)), is_leaf=lambda leaf: isinstance(leaf, P)) == [
        P("fsdp", "tp"),
        P("tp", "fsdp"),
    ]
