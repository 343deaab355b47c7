"""A tuple of annotations pairs with a tuple of values, and is refused over other containers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.lints.catalogue import lint
from shardwright.plan.compare import compare
from shardwright.testing import assert_spec, cpu_mesh
from shardwright.trees.annotated import annotated_leaves
from shardwright.trees.tensors import Tensor, as_tensors
from tests.raising import raises

RULES = """
[mesh]
dp = 2
fsdp = 2
tp = 2
[rules]
batch = "dp"
head = "tp"
head_dim = "-"
embed = "fsdp"
vocab = "tp"
length = "-"
"""
PAIR = ((sw.HEAD, sw.BATCH), (sw.EMBED, sw.VOCAB))


class Weights(NamedTuple):
    """Two arrays by name."""

    first: Any
    second: Any


def manager() -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.loads(RULES), mesh=cpu_mesh("dp:2,fsdp:2,tp:2"))


def array(*shape: int) -> Any:
    return jnp.zeros(shape or (8, 8), jnp.float32)


CONTAINERS = {
    "list": lambda: [array(), array()],
    "NamedTuple": lambda: Weights(array(), array()),
    "dict": lambda: {"a": array(), "b": array()},
}
CALLS = {
    "shardings": lambda pm, x: pm.shardings(x, PAIR),
    "abstract": lambda pm, x: pm.abstract(x, PAIR),
    "shard": lambda pm, x: pm.shard(x, PAIR),
    "shard, star": lambda pm, x: pm.shard(x, *PAIR),
    "hint": lambda pm, x: pm.hint(x, PAIR),
    "gather": lambda pm, x: pm.gather(x, PAIR),
    "in_axes": lambda pm, x: pm.shard_map(lambda y: y, in_axes=[PAIR], out_axes=())(x),
    "state_shardings": lambda pm, x: pm.state_shardings(
        jax.eval_shape(optax.sgd(1e-2, momentum=0.9).init, x), x, PAIR
    ),
    "assert_spec": lambda pm, x: assert_spec(x, PAIR, manager=pm),
    "nested": lambda pm, x: pm.shardings({"w": x, "n": array(8)}, {"w": PAIR, "n": (sw.EMBED,)}),
}
SPECS = [P("tp", "dp"), P("fsdp", "tp")]


def specs(tree: Any) -> list[P]:
    return [leaf.spec for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("call", CALLS)
def test_ambiguous_tuple_is_refused(container: str, call: str) -> None:
    with raises(
        sw.StrategyError, container_name(container), "tuple", 2, path=..., fix="HEAD"
    ) as caught:
        CALLS[call](manager(), CONTAINERS[container]())
    fix = caught.value.problems[0].fix
    assert "one annotation each" in fix
    assert "for every array" in fix
    assert "((HEAD, BATCH), (EMBED, VOCAB))" in fix


def container_name(container: str) -> str:
    return "Weights" if container == "NamedTuple" else container


def test_error_shows_both_readings() -> None:
    with raises(sw.StrategyError, "tuple", 2, path="layer", fix="HEAD") as caught:
        manager().shardings({"layer": [array(), array()]}, {"layer": PAIR})
    problem = caught.value.problems[0]
    assert problem.path == "layer"
    assert problem.fix == (
        "one annotation each: a list of (HEAD, BATCH), (EMBED, VOCAB)\n"
        "one annotation of composites for every array: "
        "a list of ((HEAD, BATCH), (EMBED, VOCAB)), ((HEAD, BATCH), (EMBED, VOCAB))"
    )


def test_both_spellings_are_accepted() -> None:
    pm = manager()
    two = ((sw.BATCH, sw.LENGTH), (sw.EMBED, sw.VOCAB))
    assert specs(pm.shardings([array(), array()], list(two))) == [P("dp"), P("fsdp", "tp")]
    assert specs(pm.shardings([array(), array()], [two, two])) == [P("dp", ("fsdp", "tp"))] * 2


@pytest.mark.parametrize(
    "other", [array(8), {"c": array(8), "d": array(8)}], ids=["exact", "prefix"]
)
def test_tuple_pairs_at_any_path(other: Any) -> None:
    """Another place's prefix must not change what a tuple means."""
    pm = manager()
    shardings = pm.shardings({"a": (array(), array()), "b": other}, {"a": PAIR, "b": (sw.EMBED,)})
    assert specs(shardings["a"]) == SPECS
    placed = pm.shard({"a": (array(), array()), "b": other}, {"a": PAIR, "b": (sw.EMBED,)})
    assert [leaf.sharding.spec for leaf in placed["a"]] == SPECS


def test_tuples_of_containers_pair() -> None:
    tree = (array(), [array(), array()])
    leaves = annotated_leaves({"a": tree, "b": [array(8)]}, {"a": PAIR, "b": (sw.EMBED,)})
    assert [(leaf.path, leaf.annotation) for leaf in leaves] == [
        ("a/0", PAIR[0]),
        ("a/1/0", PAIR[1]),
        ("a/1/1", PAIR[1]),
        ("b/0", (sw.EMBED,)),
    ]


@pytest.mark.parametrize(
    "tree",
    [
        [array(), array(), array()],
        [array(8, 8, 8), array()],
        {"a": [array(), array()]},
        array(),
    ],
    ids=["three", "another rank", "deeper", "an array"],
)
def test_annotation_covers_the_subtree(tree: Any) -> None:
    two = ((sw.BATCH, sw.LENGTH), (sw.EMBED, sw.VOCAB))
    assert {leaf.annotation for leaf in annotated_leaves(tree, two)} == {two}


def test_composites_cover_a_list() -> None:
    shardings = manager().shardings([array(), array()], ((sw.BATCH, sw.LENGTH), sw.VOCAB))
    assert specs(shardings) == [P("dp", "tp")] * 2


class TestOutputs:
    """What a tuple stands for in `out_axes` follows the outputs, as everywhere."""

    AXES = ((sw.BATCH, sw.LENGTH), (sw.EMBED, sw.LENGTH))

    def call(self, f: Any, out_axes: Any) -> Any:
        x = np.arange(16, dtype=np.float32).reshape(4, 4)
        mapped = manager().shard_map(
            f, in_axes=[(sw.BATCH, sw.EMPTY), (sw.EMBED, sw.EMPTY)], out_axes=out_axes
        )
        return mapped(x, x + 16)

    def test_a_tuple_of_outputs_pairs_below_the_top(self) -> None:
        actual = self.call(
            lambda x, y: {"a": (x, y), "b": x}, {"a": self.AXES, "b": (sw.BATCH, sw.EMPTY)}
        )
        assert [leaf.sharding.spec for leaf in actual["a"]] == [P("dp"), P("fsdp")]
        np.testing.assert_array_equal(actual["a"][1], np.arange(16, 32).reshape(4, 4))

    def test_a_list_of_outputs_is_refused(self) -> None:
        with raises(sw.StrategyError, "tuple", 2, path="output a", fix="BATCH"):
            self.call(lambda x, y: {"a": [x, y]}, {"a": self.AXES})

    def test_one_output_of_composites(self) -> None:
        axes = {"a": ((sw.BATCH, sw.LENGTH), (sw.EMBED, sw.VOCAB))}
        actual = self.call(lambda x, y: {"a": x + y[:1]}, axes)
        assert actual["a"].sharding.spec == P("dp", ("fsdp", "tp"))


class TestTreesOfAnnotationsAlone:
    """Without arrays nothing says which reading is meant."""

    @pytest.mark.parametrize("tree", [PAIR, {"w": PAIR}], ids=["root", "below"])
    def test_a_tuple_of_annotations_is_refused(self, tree: Any) -> None:
        pm = manager()
        for call in (
            lambda: as_tensors(tree),
            lambda: lint(sw.Strategy.loads(RULES), tree),
            lambda: compare(pm, pm, tensors=tree),
        ):
            with raises(sw.StrategyError, "tuple", 2, path=..., fix="HEAD") as caught:
                call()
            assert "[(HEAD, BATCH), (EMBED, VOCAB)]" in caught.value.fix
            assert "Tensor(path=" in caught.value.fix

    def test_both_spellings_are_accepted(self) -> None:
        assert [tensor.axes for tensor in as_tensors(list(PAIR))] == list(PAIR)
        assert as_tensors([Tensor(path="w", axes=PAIR)])[0].axes == PAIR

    def test_one_composite_is_one_tensor(self) -> None:
        assert as_tensors({"x": ((sw.FSDP, sw.DP),)})[0].axes == ((sw.FSDP, sw.DP),)
        assert as_tensors({"x": ((sw.FSDP, sw.DP), sw.TP)})[0].axes == ((sw.FSDP, sw.DP), sw.TP)
