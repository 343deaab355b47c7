"""Annotations: tuples of axes, layouts, merged and stacked dims, and the fixes for invalid ones."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.vocabulary.annotations import PartOf, as_annotation, read_annotation
from shardwright.vocabulary.axes import SEMANTIC_AXES, axis_label, canonical_axis, file_name
from shardwright.vocabulary.lowering import Dim, describe, lower
from tests.raising import Facts, facts, raises

GOOD = [
    (),
    (sw.BATCH,),
    (sw.BATCH, sw.EMPTY, (sw.HEAD, sw.HEAD_DIM)),
    (sw.EMBED, sw.merged((sw.KV_HEAD, 8), (sw.KV_HEAD_DIM, 128))),
    sw.ColumnWise,
    sw.ColumnWise(),
    sw.DynamicShardingAxes([sw.BATCH], 0),
    sw.stacked(sw.ColumnWise),
    sw.ArraySpec((4,), jnp.float32, (sw.NORM,)),
    P("dp"),
]
BAD = [
    [sw.BATCH],
    [],
    None,
    "batch",
    3,
    {"a": (sw.BATCH,)},
    (sw.BATCH, None),
    (sw.BATCH, [sw.EMBED]),
    (3,),
    ((sw.BATCH,), 1),
    int,
    ("a", ((),)),
]


@pytest.mark.parametrize("value", GOOD, ids=repr)
def test_is_annotation(value: Any) -> None:
    assert sw.is_annotation(value)
    assert as_annotation(value) == value


@pytest.mark.parametrize("value", BAD, ids=repr)
def test_not_an_annotation(value: Any) -> None:
    assert not sw.is_annotation(value)


def test_named_tuple_of_arrays_is_a_tree() -> None:
    state = jax.tree.structure(
        {"a": (sw.BATCH,), "b": [sw.ColumnWise, (sw.EMBED, (sw.HEAD, sw.HEAD_DIM))]},
        is_leaf=sw.is_annotation,
    )
    assert state.num_leaves == 3


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ([sw.BATCH, sw.EMBED], (sw.BATCH, sw.EMBED)),
        ([sw.BATCH, [sw.HEAD, sw.HEAD_DIM]], (sw.BATCH, (sw.HEAD, sw.HEAD_DIM))),
        ((sw.BATCH, [sw.EMBED]), (sw.BATCH, (sw.EMBED,))),
        ([], ()),
    ],
)
def test_list_as_an_annotation(given: Any, means: Any) -> None:
    assert as_annotation(given) == means


@pytest.mark.parametrize(
    ("value", "says", "fix"),
    [
        (
            (sw.BATCH, None),
            facts("__BATCH__", "tuple", fix="EMPTY"),
            "write EMPTY for a dim that is not sharded",
        ),
        ((sw.BATCH, 3), facts("__BATCH__", 3, "tuple", fix="BATCH"), "use axis strings"),
        (
            (sw.BATCH, (sw.EMBED, 4)),
            facts("__BATCH__", "__EMBED__", 4, "tuple", fix="BATCH"),
            "use axis strings",
        ),
        ("batch", facts("batch", "annotation", fix="BATCH"), "write a tuple of axes"),
        (None, facts("annotation", fix="BATCH"), "write a tuple of axes"),
        ({"a": 1}, facts("annotation"), "for a tree call shardings"),
        (int, facts("annotation"), "write a tuple of axes"),
    ],
)
def test_invalid_annotation_has_a_fix(value: Any, says: Facts, fix: str) -> None:
    with raises(sw.StrategyError, says) as caught:
        as_annotation(value)
    assert fix in caught.value.fix


@pytest.mark.parametrize("axis", SEMANTIC_AXES)
def test_every_spelling_of_an_axis_is_the_same_axis(axis: str) -> None:
    assert type(axis) is str
    for spelling in (file_name(axis), file_name(axis).upper(), axis):
        assert canonical_axis(spelling) == axis
        assert lower((spelling,)) == lower((axis,))
    assert axis_label(axis) == axis.strip("_")


@pytest.mark.parametrize(
    ("short", "axis"),
    [("dp", sw.DP), ("FSDP", sw.FSDP), ("tp", sw.TP), ("ep", sw.EP), ("sp", sw.SP), ("PP", sw.PP)],
)
def test_parallelism_axes_have_short_names(short: str, axis: str) -> None:
    assert canonical_axis(short) == axis
    assert axis_label(axis) == short.upper()


def test_not_given_is_a_singleton() -> None:
    assert pickle.loads(pickle.dumps(sw.NOT_GIVEN)) is sw.NOT_GIVEN
    assert sw.EMPTY_VAL() is sw.NOT_GIVEN
    assert not sw.NOT_GIVEN
    assert repr(sw.NOT_GIVEN) == "NOT_GIVEN"


def test_the_mask_value_is_large_finite_and_negative() -> None:
    assert -0.7 * float(np.finfo(np.float32).max) == sw.DEFAULT_MASK_VALUE


class TestMerged:
    def test_size_of_a_merged_dim(self) -> None:
        dim = sw.merged((sw.KV_HEAD, 8), (sw.KV_HEAD_DIM, 128))
        assert dim.size == 1024
        assert hash(dim) == hash(sw.merged(("kv_head", 8), ("KV_HEAD_DIM", 128)))
        assert dim == sw.merged(("kv_head", 8), ("KV_HEAD_DIM", 128))
        assert pickle.loads(pickle.dumps(dim)) == dim

    def test_a_dim_that_is_not_the_product_is_refused(self) -> None:
        with raises(sw.RankMismatchError, 8, 128, dim=1, axis="KV_HEAD*KV_HEAD_DIM", size=1000):
            lower((sw.EMBED, sw.merged((sw.KV_HEAD, 8), (sw.KV_HEAD_DIM, 128))), (64, 1000))

    @pytest.mark.parametrize(
        "members",
        [
            (sw.HEAD,),
            ((sw.HEAD,),),
            ((sw.HEAD, 0),),
            ((sw.HEAD, -1),),
            ((sw.HEAD, 2.0),),
            ((sw.HEAD, True),),
            ((3, sw.HEAD),),
            ((sw.HEAD, "8"),),
        ],
    )
    def test_members_are_pairs_of_axis_and_size(self, members: Any) -> None:
        with raises(sw.StrategyError, "__HEAD__", fix="KV_HEAD"):
            sw.merged(*members)

    def test_no_members_are_refused(self) -> None:
        with raises(sw.StrategyError, "merged", fix="KV_HEAD"):
            sw.merged()


class TestStacked:
    def test_of_a_tuple(self) -> None:
        assert sw.stacked((sw.EMBED, sw.VOCAB)) == (sw.LAYERS, sw.EMBED, sw.VOCAB)
        assert sw.stacked([sw.EMBED]) == (sw.LAYERS, sw.EMBED)
        assert sw.stacked(()) == (sw.LAYERS,)

    @pytest.mark.parametrize(
        "layout", [sw.ColumnWise, sw.ColumnWise(), sw.ColumnWise.bias, sw.HiddenStateSharding]
    )
    def test_of_a_layout(self, layout: Any) -> None:
        first, many = lower(layout), lower(sw.stacked(layout))
        assert many.dims == (Dim(axes=(sw.LAYERS,)), *first.dims)
        assert (many.mode, many.role) == (first.mode, first.role)
        assert sw.stacked(layout) == sw.stacked(layout)
        assert hash(sw.stacked(layout)) == hash(sw.stacked(layout))

    def test_of_an_array_spec(self) -> None:
        spec = sw.ArraySpec((4, 8), jnp.bfloat16, sw.ColumnWise, jax.nn.initializers.normal())
        many = sw.stacked(spec, layers=3)
        assert many.shape == (3, 4, 8)
        assert many.dtype == jnp.bfloat16
        arrays = many.init(jax.random.key(0), many.shape, many.dtype)
        assert arrays.shape == (3, 4, 8)
        assert arrays.dtype == jnp.bfloat16
        # One key per layer: layers differ, and each is what its key gives alone.
        keys = jax.random.split(jax.random.key(0), 3)
        np.testing.assert_array_equal(arrays[1], spec.init(keys[1], spec.shape, spec.dtype))
        assert not np.array_equal(arrays[0], arrays[1])

    def test_layers_go_with_an_array_spec_only(self) -> None:
        with raises(sw.StrategyError, "ArraySpec", "PartOf", fix="layers"):
            sw.stacked((sw.EMBED,), layers=3)
        with raises(sw.StrategyError, "ArraySpec", "PartOf", fix="layers"):
            sw.stacked(sw.ArraySpec((4,), jnp.float32, (sw.NORM,)))

    def test_stacking_twice_is_refused(self) -> None:
        with raises(sw.AxisConflictError, "EMBED", axis="LAYERS", fix="axis"):
            sw.stacked(sw.stacked((sw.EMBED,)))
        with raises(sw.AxisConflictError, "ColumnWise", axis="LAYERS", fix="axis"):
            sw.stacked(sw.stacked(sw.ColumnWise))

    def test_of_a_literal_spec_is_a_literal_spec(self) -> None:
        """Its entries are mesh axes: as axes they would be looked up in the rules, or be names that
        nobody knows.
        """
        assert sw.stacked(P("tp")) == P(None, "tp")
        assert sw.stacked(P()) == P(None)
        assert sw.stacked(P(("dp", "tp"), P.UNCONSTRAINED, None)) == P(
            None, ("dp", "tp"), P.UNCONSTRAINED, None
        )
        assert sw.stack_specs({"w": sw.ArraySpec((8,), jnp.float32, P("tp"))}, 3)["w"].axes == P(
            None, "tp"
        )
        rules = sw.Strategy(
            mesh={"tp": 2, "model": 4}, rules={"tensor_parallel": "model"}
        ).compile()
        assert sw.resolve(
            sw.stacked(P("tp")), rules, {"tp": 2, "model": 4}, shape=(3, 8)
        ).spec == P(None, "tp")
        with raises(sw.MissingMeshAxisError, "mesh", "axis", "dp", dim=1, fix="tp"):
            sw.resolve(sw.stacked(P("dp")), rules, {"tp": 2, "model": 4}, shape=(3, 8))

    @pytest.mark.parametrize("use", [sw.stacked, lower])
    def test_reduced_spec_is_refused(self, use: Any) -> None:
        with raises(sw.StrategyError, "spec", "reduced", "dp", fix="jax.reshard"):
            use(P("tp", reduced={"dp"}))

    @pytest.mark.parametrize("layers", [2.9, "3", 0, -1, True, [3]])
    def test_invalid_number_of_layers(self, layers: Any) -> None:
        spec = sw.ArraySpec((4,), jnp.float32, (sw.NORM,))
        for call in (lambda: sw.stacked(spec, layers), lambda: sw.stack_specs({"a": spec}, layers)):
            with raises(sw.StrategyError, "layers", fix="layers"):
                call()
        assert sw.stacked(spec, np.int32(3)).shape == (3, 4)


class TestWhatIsChecked:
    """Annotations check their arguments; the message says what is wrong and how to write it."""

    @pytest.mark.parametrize(
        ("member", "says"),
        [
            ((sw.HEAD, 8, 2), facts("__HEAD__", 8, 2, fix="KV_HEAD")),
            ([sw.HEAD, 8], facts("__HEAD__", 8, fix="KV_HEAD")),
            ((sw.HEAD, "8"), facts("__HEAD__", 8, fix="KV_HEAD")),
            ((sw.HEAD, 0), facts("__HEAD__", 0, fix="KV_HEAD")),
            ((sw.HEAD, -2), facts("__HEAD__", -2, fix="KV_HEAD")),
        ],
    )
    def test_members_of_a_merged_dim(self, member: Any, says: Facts) -> None:
        with raises(sw.StrategyError, says):
            sw.merged(member)
        with raises(sw.StrategyError, "axis", fix=("KV_HEAD", "8")):
            sw.merged()
        assert sw.merged((sw.HEAD, 1)).size == 1
        assert lower((sw.BATCH,)).dims[0].size is None

    @pytest.mark.parametrize(
        ("shape", "says"),
        [
            ("ab", facts("ab", fix=("x.shape", "tuple"))),
            ((4, None), facts("(4, None)", fix=("x.shape", "tuple"))),
            ((4, -1), facts("(4, -1)", fix=("x.shape", "tuple"))),
        ],
    )
    def test_shapes(self, shape: Any, says: Facts) -> None:
        for make in (
            lambda: sw.ArraySpec(shape, jnp.float32, (sw.BATCH, sw.EMBED)),
            lambda: PartOf(annotation=(sw.BATCH, sw.EMBED), shape=shape, dims=(0,)),
        ):
            with raises(sw.RankMismatchError, says):
                make()

    def test_fields_of_an_array_spec(self) -> None:
        spec = sw.ArraySpec([np.int64(4), 0], jnp.float32, [sw.EMBED, [sw.BATCH, sw.LENGTH]])
        assert (spec.shape, spec.ndim, spec.axes) == ((4, 0), 2, (sw.EMBED, (sw.BATCH, sw.LENGTH)))
        assert type(spec.shape[0]) is int
        with raises(sw.StrategyError, "float33", "dtype", fix="jnp.float32"):
            sw.ArraySpec((4,), "float33", (sw.EMBED,))

    def test_an_array_spec_has_the_shape_of_its_array(self) -> None:
        spec = sw.ArraySpec((4, 8), jnp.float32, (sw.EMBED, sw.VOCAB))
        assert lower(spec) == lower(spec, (4, 8)) == lower((sw.EMBED, sw.VOCAB))
        for shape in ((4, 7), (4, 9), (4,)):
            with raises(sw.RankMismatchError, str(shape), "ArraySpec", "(4, 8)"):
                lower(spec, shape)
        merged = sw.ArraySpec(
            (4, 8), jnp.float32, (sw.EMBED, sw.merged((sw.HEAD, 2), (sw.HEAD_DIM, 4)))
        )
        assert lower(merged).dims[1].size == 8

    def test_fields_of_a_part(self) -> None:
        part = PartOf(annotation=[sw.EMBED, sw.VOCAB], shape=[np.int32(4), 8], dims=[1])
        assert (part.annotation, part.shape, part.dims) == ((sw.EMBED, sw.VOCAB), (4, 8), (1,))
        assert type(part.shape[0]) is int
        with raises(sw.RankMismatchError, "EMBED", "VOCAB", 2, 1, "(4,)", fix="EMPTY"):
            PartOf(annotation=(sw.EMBED, sw.VOCAB), shape=(4,), dims=(0,))
        for dims in ((3,), (2,), (0, 0), (-1,)):
            with raises(sw.RankMismatchError, "EMBED", "VOCAB", 2, path="w", fix="dim"):
                PartOf(annotation=(sw.EMBED, sw.VOCAB), shape=(4, 8), dims=dims, path="w")

    def test_a_part_keeps_the_mode_and_is_stored(self) -> None:
        part = PartOf(
            annotation=sw.DynamicShardingAxes([sw.BATCH, sw.EMBED], "decode"),
            shape=(4, 8),
            dims=(1,),
            path="w",
        )
        assert (lower(part).mode, lower(part).role) == (sw.MODE_DECODE, sw.Role.PARAM)
        for shape in ((), (8, 1)):
            with raises(sw.RankMismatchError, len(shape), "(1)", "DynamicShardingAxes", "BATCH", 1):
                lower(part, shape)
        with raises(
            sw.RankMismatchError, 1, "DynamicShardingAxes", "BATCH", path="w", dim=0, size=9
        ) as caught:
            lower(part, (9,))
        assert caught.value.size == 9

    def test_a_stack_of_parts(self) -> None:
        part = PartOf(annotation=(sw.EMBED, sw.VOCAB), shape=(4, 8), dims=(1, None, 0), path="w")
        many = sw.stacked(part, 3)
        assert many == PartOf(
            annotation=(sw.LAYERS, sw.EMBED, sw.VOCAB),
            shape=(3, 4, 8),
            dims=(0, 2, None, 1),
            path="w",
        )
        spec = sw.stacked(sw.ArraySpec((8, 1, 4), jnp.float32, part), 3)
        assert (spec.axes, spec.shape, spec.init) == (many, (3, 8, 1, 4), None)

    def test_a_stack_of_one_layer(self) -> None:
        spec = sw.ArraySpec((4,), jnp.float32, (sw.NORM,))
        assert sw.stacked(spec, 1).shape == (1, 4)
        with raises(sw.StrategyError, "ArraySpec", "PartOf", fix=("layers", "32")):
            sw.stacked((sw.EMBED,), 1)

    def test_labels(self) -> None:
        assert [dim.label for dim in lower((sw.BATCH, (sw.HEAD, sw.EMBED), sw.EMPTY)).dims] == [
            "BATCH",
            "HEAD+EMBED",
            "_",
        ]
        assert [dim.semantic_axis for dim in lower(sw.ColumnWise).dims] == [
            sw.EMBED,
            sw.MLP_INTERMEDIATE,
        ]
        assert [dim.semantic_axis for dim in lower((sw.BATCH, sw.EMPTY)).dims] == ["", ""]
        assert {dim.semantic_axis for dim in lower(sw.ExpertTensorParallel).dims} == {""}

    def test_a_wrong_entry_has_its_dim(self) -> None:
        with raises(sw.StrategyError, "__BATCH__", "__EMBED__", 3, "tuple", fix="BATCH") as caught:
            as_annotation((sw.BATCH, sw.EMBED, 3))
        assert caught.value.dim == 2
        with raises(sw.RankMismatchError, "dp", 2, 1, "(2,)", fix="entry"):
            lower(P("dp", "tp"), (2,))

    def test_one_annotation_from_arguments(self) -> None:
        axes = (sw.BATCH, (sw.HEAD, sw.EMBED))
        assert (
            read_annotation(axes)
            == read_annotation((axes,))
            == read_annotation((list(axes),))
            == axes
        )
        assert read_annotation((sw.BATCH,)) == (sw.BATCH,)
        merged = sw.merged((sw.HEAD, 2), (sw.HEAD_DIM, 4))
        assert read_annotation((merged,)) == (merged,)
        assert read_annotation((sw.ColumnWise,)) is sw.ColumnWise
        assert read_annotation(()) == ()

    def test_lowered_layouts_and_literal_specs(self) -> None:
        for layout, role in (
            (sw.ColumnWise, sw.Role.PARAM),
            (sw.HiddenStateSharding(mode="prefill"), None),
            (sw.Replicated, None),
        ):
            assert lower(layout).role is role
            assert lower(layout).mode == layout.mode
        assert lower(sw.Replicated).dims == ()
        literal = lower(P("dp", None, ("dp2", "tp"), P.UNCONSTRAINED), (1, 2, 3, 4, 5)).dims
        assert [dim.literal for dim in literal] == [("dp",), (), ("dp2", "tp"), ("?",), ()]
        assert [
            describe(annotation)
            for annotation in (P("dp", None), sw.DynamicShardingAxes([sw.BATCH]))
        ] == [
            str(P("dp", None)),
            "DynamicShardingAxes(BATCH)",
        ]

    @pytest.mark.parametrize("size", [1000, 2000])
    def test_a_merged_dim_of_another_size(self, size: int) -> None:
        with raises(sw.RankMismatchError, size, "HEAD", 8, "HEAD_DIM", 128, fix="merged") as caught:
            lower((sw.merged((sw.HEAD, 8), (sw.HEAD_DIM, 128)),), (size,))
        assert (caught.value.dim, caught.value.axis, caught.value.size) == (
            0,
            "HEAD*HEAD_DIM",
            size,
        )

    @pytest.mark.parametrize(
        ("annotation", "rank", "fix"),
        [
            (
                sw.stacked(sw.ColumnWise),
                2,
                (
                    "for its bias use ColumnWise.bias; for a bias stacked over layers, "
                    "stacked(ColumnWise.bias)"
                ),
            ),
            (sw.ColumnWise, 0, "write one axis per dim, EMPTY where a dim is not sharded"),
            (sw.ColumnWise, 4, "write one axis per dim, EMPTY where a dim is not sharded"),
            (sw.HiddenStateSharding, 5, "write one axis per dim, EMPTY where a dim is not sharded"),
            ((), 1, "add the missing dim's axis, or EMPTY; for a stack of layers use stacked(())"),
            (
                (sw.EMBED,),
                2,
                "add the missing dim's axis, or EMPTY; for a stack of layers use stacked((EMBED,))",
            ),
            (
                (sw.EMBED, sw.VOCAB),
                3,
                (
                    "add the missing dim's axis, or EMPTY; for a stack of layers use "
                    "stacked((EMBED, VOCAB))"
                ),
            ),
        ],
    )
    def test_the_fix_for_another_rank(self, annotation: Any, rank: int, fix: str) -> None:
        with raises(sw.RankMismatchError, "rank", 2) as caught:
            lower(annotation, (2,) * rank)
        assert caught.value.fix == fix
