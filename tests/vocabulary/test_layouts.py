"""The named layouts and those of users: axes and modes of the class and of its instances."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest

import shardwright as sw
from shardwright.vocabulary.axes import DP, EMPTY, EP, FSDP, SP, TP, Role
from shardwright.vocabulary.layouts import LAYOUTS
from tests.raising import Facts, facts, raises

TRAIN = sw.MODE_TRAIN
TABLE: list[tuple[type[sw.DynamicShardingAxes], list[Any], str | int]] = [
    (sw.HiddenStateSharding, [sw.BATCH, sw.QUERY_LENGTH, sw.EMBED], 1),
    (sw.AttnQSharding, [sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM], 1),
    (sw.AttnKVSharding, [sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM], 1),
    (sw.RowWise, [TP, [FSDP, SP]], TRAIN),
    (sw.SRowWise, [TP], TRAIN),
    (sw.ColumnWise, [[FSDP, SP], TP], TRAIN),
    (sw.SColumnWise, [[FSDP, SP]], TRAIN),
    (sw.Replicated, [EMPTY], TRAIN),
    (sw.ExpertColumnWise, [EP, FSDP, TP], TRAIN),
    (sw.ExpertColumnWiseAlt, [EP, [FSDP, SP], TP], TRAIN),
    (sw.ExpertRowWise, [EP, TP, FSDP], TRAIN),
    (sw.ExpertRowWiseAlt, [EP, TP, [FSDP, SP]], TRAIN),
    (sw.UnifiedExpertColumnWise, [[FSDP, SP, EP], EMPTY, TP], TRAIN),
    (sw.UnifiedExpertRowWise, [[FSDP, SP, EP], TP, EMPTY], TRAIN),
    (sw.ExpertActivations, [DP, SP, EP, TP], TRAIN),
    (sw.ExpertActivationsAlt, [DP, SP, [TP, FSDP]], TRAIN),
    (sw.ExpertTensorParallel, [TP, EMPTY, EMPTY], TRAIN),
]
BIASES: list[tuple[Any, list[Any]]] = [
    (sw.ColumnWise.bias, [TP]),
    (sw.RowWise.bias, [EMPTY]),
    (sw.ExpertColumnWise.bias, [EP, TP]),
    (sw.ExpertColumnWiseAlt.bias, [EP, TP]),
    (sw.ExpertRowWise.bias, [EP, EMPTY]),
    (sw.ExpertRowWiseAlt.bias, [EP, EMPTY]),
]
ids = [layout.__name__ for layout, _, _ in TABLE]


@pytest.mark.parametrize(("layout", "axes", "mode"), TABLE, ids=ids)
def test_axes_and_mode_of_class_and_instance(layout: Any, axes: list[Any], mode: str | int) -> None:
    for form in (layout, layout()):
        assert form.axes == axes
        assert type(form.axes) is list
        assert form.mode == mode
        assert type(form.mode) is type(mode)


@pytest.mark.parametrize(("layout", "axes", "mode"), TABLE, ids=ids)
def test_axes_is_a_fresh_list_each_time(layout: Any, axes: list[Any], mode: str | int) -> None:
    for form in (layout, layout()):
        form.axes.append("spoilt")
        for entry in form.axes:
            if isinstance(entry, list):
                entry.clear()
        assert form.axes == axes


@pytest.mark.parametrize(("layout", "axes", "mode"), TABLE, ids=ids)
def test_an_instance_is_a_named_tuple_of_axes_and_mode(
    layout: Any, axes: list[Any], mode: str | int
) -> None:
    instance = layout()
    assert isinstance(instance, tuple)
    assert len(instance) == 2
    assert instance._fields == ("axes", "mode")
    dims, own_mode = instance
    assert [list(dim) if isinstance(dim, tuple) else dim for dim in dims] == axes
    assert own_mode == mode
    assert layout(axes, mode) == instance


@pytest.mark.parametrize(("layout", "axes", "mode"), TABLE, ids=ids)
def test_layouts_hash_compare_and_pickle(layout: Any, axes: list[Any], mode: str | int) -> None:
    instance = layout()
    assert instance == layout()
    assert hash(instance) == hash(layout())
    again = pickle.loads(pickle.dumps(instance))
    assert again == instance
    assert type(again) is layout
    assert pickle.loads(pickle.dumps(layout)) is layout
    assert instance != tuple(instance)
    assert tuple(instance) != instance


def test_the_table_is_complete() -> None:
    biases = {bias for bias, _ in BIASES}
    assert {layout for layout, _, _ in TABLE} | biases == {*LAYOUTS.values()}


@pytest.mark.parametrize(("bias", "axes"), BIASES, ids=lambda value: getattr(value, "__name__", ""))
def test_biases_are_layouts(bias: Any, axes: list[Any]) -> None:
    assert bias.axes == axes
    assert bias().axes == axes
    assert bias.mode == TRAIN
    assert bias.role is Role.PARAM


def test_layouts_without_a_bias_have_none() -> None:
    assert [layout for layout in LAYOUTS.values() if layout.bias is not None] == [
        *(
            sw.ColumnWise,
            sw.RowWise,
            sw.ExpertColumnWise,
            sw.ExpertColumnWiseAlt,
            sw.ExpertRowWise,
            sw.ExpertRowWiseAlt,
        ),
    ]


def test_weight_layouts_resolve_as_parameters() -> None:
    activations = {
        sw.HiddenStateSharding,
        sw.AttnQSharding,
        sw.AttnKVSharding,
        sw.ExpertActivations,
        sw.ExpertActivationsAlt,
        sw.Replicated,
    }
    assert {layout for layout in LAYOUTS.values() if layout.role is None} == activations
    assert {layout.role for layout in LAYOUTS.values()} == {None, Role.PARAM}


def test_equal_layouts_of_two_names_differ() -> None:
    assert sw.SRowWise() != sw.ColumnWise.bias()
    assert sw.SRowWise() != sw.DynamicShardingAxes([TP], sw.MODE_TRAIN)
    assert len({sw.SRowWise(), sw.ColumnWise.bias(), sw.SRowWise()}) == 2


class Scores(sw.DynamicShardingAxes):
    """As a user would write it."""

    axes = [sw.BATCH, sw.HEAD, None, [sw.KV_LENGTH, sw.HEAD_DIM]]  # noqa: RUF012  as other code
    mode = "prefill"


class StoredScores(Scores, role="param"):
    """Inherits axes and mode."""


class DecodedScores(Scores):
    mode = 2


def test_a_users_class_reads_like_ours() -> None:
    for form in (Scores, Scores(), StoredScores, StoredScores()):
        assert form.axes == [sw.BATCH, sw.HEAD, EMPTY, [sw.KV_LENGTH, sw.HEAD_DIM]]
        assert form.mode == sw.MODE_PREFILL
    assert Scores.role is None
    assert StoredScores.role is Role.PARAM
    assert DecodedScores.axes == Scores.axes
    assert DecodedScores.mode == DecodedScores().mode == 2


def test_a_users_class_hashes_compares_and_pickles() -> None:
    assert pickle.loads(pickle.dumps(Scores())) == Scores()
    assert Scores() != StoredScores()
    assert len({Scores(), Scores(), StoredScores()}) == 2


def test_subclass_of_a_weight_layout() -> None:
    class Wide(sw.ColumnWise):
        axes = (FSDP, TP)

    assert Wide.semantic_axes == ()
    assert Wide.role is Role.PARAM
    assert sw.ColumnWise.axes == [[FSDP, SP], TP]


def test_the_base_class_takes_axes_and_a_mode() -> None:
    instance = sw.DynamicShardingAxes([sw.BATCH, None, [FSDP, SP]], mode=1)
    assert instance.axes == [sw.BATCH, EMPTY, [FSDP, SP]]
    assert instance.mode == 1
    assert sw.DynamicShardingAxes([sw.BATCH], "decode").mode == sw.MODE_DECODE
    assert sw.DynamicShardingAxes([sw.BATCH]).mode == sw.MODE_TRAIN
    assert sw.DynamicShardingAxes(axes=[sw.BATCH], mode=0) == sw.DynamicShardingAxes((sw.BATCH,), 0)
    assert pickle.loads(pickle.dumps(instance)) == instance


def test_layout_with_another_mode() -> None:
    assert sw.HiddenStateSharding(mode="decode").mode == sw.MODE_DECODE
    assert sw.HiddenStateSharding.mode == 1
    with raises(
        sw.StrategyError, "ColumnWise", "FSDP", "SP", "TP", fix="DynamicShardingAxes"
    ) as caught:
        sw.ColumnWise([TP, FSDP])
    assert "DynamicShardingAxes(axes, mode)" in caught.value.fix


@pytest.mark.parametrize("mode", ["training", "", None, 1.0, True])
def test_an_unknown_mode_is_refused(mode: Any) -> None:
    with raises(sw.StrategyError, "mode", fix="train"):
        sw.DynamicShardingAxes([sw.BATCH], mode)
    with raises(sw.StrategyError, "mode", fix="train"):
        sw.DynamicShardingAxes([sw.BATCH])._replace(mode=mode)


ROWS = sw.DynamicShardingAxes([sw.BATCH, sw.EMBED], "train")
CHANGES: list[tuple[dict[str, Any], sw.DynamicShardingAxes]] = [
    ({"mode": "decode"}, sw.DynamicShardingAxes([sw.BATCH, sw.EMBED], "decode")),
    ({"axes": [sw.BATCH, None]}, sw.DynamicShardingAxes([sw.BATCH, None], "train")),
    ({"axes": [[FSDP, SP], TP], "mode": 1}, sw.DynamicShardingAxes([[FSDP, SP], TP], 1)),
    ({}, ROWS),
]


@pytest.mark.parametrize(("change", "wanted"), CHANGES)
def test_replace_and_make_normalize(change: dict[str, Any], wanted: sw.DynamicShardingAxes) -> None:
    actual = [
        ROWS._replace(**change),
        sw.DynamicShardingAxes._make({"axes": ROWS[0], "mode": ROWS[1], **change}.values()),
    ]
    if sys.version_info >= (3, 13):
        actual.append(copy.replace(ROWS, **change))
    for replaced in actual:
        assert (type(replaced), tuple(replaced), hash(replaced)) == (
            type(wanted),
            tuple(wanted),
            hash(wanted),
        )
        assert sw.explain(replaced, sw.PartitionAxis().compile(), {"tp": 2}, shape=(8, 8)).ok


@pytest.mark.parametrize(
    ("layout", "change", "says"),
    [
        (ROWS, {"axes": sw.BATCH}, facts("axes", "layout", "__BATCH__", fix="EMPTY")),
        (ROWS, {"axes": [sw.BATCH, 3]}, facts(3, "dim", "layout", fix="EMPTY")),
        (ROWS, {"axes": [[sw.BATCH, EMPTY]]}, facts("BATCH", "EMPTY", fix="EMPTY")),
        (ROWS, {"mode": "training"}, facts("mode", "training", fix="train")),
        (
            sw.ColumnWise(),
            {"axes": [TP, FSDP]},
            facts("ColumnWise", "FSDP", "SP", "TP", fix="DynamicShardingAxes"),
        ),
    ],
)
def test_replace_and_make_raise_like_a_call(
    layout: Any, change: dict[str, Any], says: Facts
) -> None:
    values = {"axes": layout[0], "mode": layout[1], **change}
    for call in (
        lambda: type(layout)(**values),
        lambda: layout._replace(**change),
        lambda: layout._make(values.values()),
    ):
        with raises(sw.StrategyError, says):
            call()


@pytest.mark.parametrize("values", [(), ([sw.BATCH],), ([sw.BATCH], "train", "more")])
def test_make_takes_axes_and_a_mode(values: Any) -> None:
    with pytest.raises(ValueError, match="values to unpack"):
        sw.DynamicShardingAxes._make(values)


def test_a_named_layout_keeps_its_class() -> None:
    instance = sw.ColumnWise()._replace(mode="decode")
    assert (type(instance), instance.mode) == (sw.ColumnWise, sw.MODE_DECODE)


def test_class_with_an_unknown_mode() -> None:
    with raises(sw.StrategyError, "mode", "trian", fix="train"):

        class Bad(sw.DynamicShardingAxes):
            axes = (sw.BATCH,)
            mode = "trian"


def test_the_base_class_needs_axes() -> None:
    with raises(sw.StrategyError, "DynamicShardingAxes", "axes", fix="DynamicShardingAxes"):
        sw.DynamicShardingAxes()


@pytest.mark.parametrize("name", ["axes", "mode"])
def test_a_layout_cannot_be_changed(name: str) -> None:
    instance = sw.HiddenStateSharding()
    with pytest.raises(AttributeError, match=r"set|attribute|frozen"):
        setattr(instance, name, "decode")
    assert instance.mode == 1
    assert instance.axes == [sw.BATCH, sw.QUERY_LENGTH, sw.EMBED]
