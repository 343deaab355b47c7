"""Annotations that contradict the program are found, and equal names are not reported."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import pytest

import shardwright as sw
from shardwright.inference.inferred import Inferred
from shardwright.lints.finding import Code, Severity
from shardwright.lints.names import lint_names
from shardwright.vocabulary.annotations import is_annotation
from tests.inference import models
from tests.inference.models import GPT2, LLAMA, MODELS, Model, is_leaf
from tests.inference.more_models import EVERY_MODEL
from tests.raising import raises

SYNONYMS = {"NORM": "EMBED", "KV_HEAD_DIM": "HEAD_DIM"}


def infer(model: Model) -> Inferred:
    return sw.infer_axes(model.forward, model.shapes, *model.inputs, seeds=model.seeds)


def dim_of(text: str) -> Any:
    if ":" not in text:
        return text
    members = [part.split(":") for part in text.split("*")]
    return sw.merged(*((name, int(size)) for name, size in members))


def annotations(model: Model) -> Any:
    return jax.tree.map(
        lambda leaf: tuple(dim_of(text) for text in leaf[1].split()), model.params, is_leaf=is_leaf
    )


def plain(axes: tuple[Any, ...]) -> list[str]:
    """Return axes as text, with one word for synonyms."""
    return [SYNONYMS.get(str(axis), str(axis)) for axis in axes]


def test_hand_annotations_have_no_findings() -> None:
    for model in MODELS:
        assert lint_names(annotations(model), infer(model)) == (), model.name


@pytest.mark.parametrize(
    ("given", "least"),
    [(MODELS, 100), pytest.param(EVERY_MODEL[len(MODELS) :], 40, marks=pytest.mark.full)],
    ids=["first", "more"],
)
def test_every_swap_is_found(given: list[Model], least: int) -> None:
    """Swap the annotations of two arrays of one rank, in every model."""
    missed, swaps = [], 0
    for model in given:
        inferred = infer(model)
        leaves, tree = jax.tree.flatten(annotations(model), is_leaf=is_annotation)
        shapes = [shape.shape for shape in jax.tree.leaves(model.shapes)]
        swapped_already = set()
        for i, j in itertools.combinations(range(len(leaves)), 2):
            pair = (leaves[i], leaves[j], shapes[i], shapes[j])
            if len(shapes[i]) != len(shapes[j]) or plain(leaves[i]) == plain(leaves[j]):
                continue
            if pair in swapped_already or not fits(*pair):
                continue  # another layer has the same pair; or the sizes are an error anyway
            swapped_already.add(pair)
            changed = list(leaves)
            changed[i], changed[j] = leaves[j], leaves[i]
            swaps += 1
            if not lint_names(jax.tree.unflatten(tree, changed), inferred):
                missed.append((model.name, leaves[i], leaves[j]))
    assert missed == []
    assert swaps > least


def fits(first: Any, second: Any, first_shape: Any, second_shape: Any) -> bool:
    try:
        for axes, shape in ((first, second_shape), (second, first_shape)):
            sw.ArraySpec(shape, "float32", axes)
    except sw.ShardingError:
        return False
    return True


def changed(model: Model, axes: tuple[Any, ...], *path: Any) -> Any:
    """Return the annotations with another one at a path."""
    tree = annotations(model)
    at = tree
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = axes
    return tree


def test_sizes_of_merged_dims_and_composites() -> None:
    model = models.FLAT_LLAMA
    good = annotations(model)
    inferred = infer(model)
    assert lint_names(good, inferred) == ()
    for name, axes in (
        ("q", (sw.merged((sw.HEAD, 6), (sw.HEAD_DIM, 4)), sw.EMBED)),
        ("q", (good["q"][0], (sw.BATCH, sw.VOCAB))),
    ):
        findings = lint_names({**good, name: axes}, inferred)
        assert len(findings) == 1, (name, axes)
    assert lint_names({**good, "q": (good["q"][0], (sw.EMBED, sw.LAYERS))}, inferred) == ()


def test_finding_has_place_and_source_line() -> None:
    wrong_axes = ("MLP_INTERMEDIATE", "_", "HEAD_DIM")
    tree = changed(LLAMA, wrong_axes, "layers", 1, "attention", "q")
    findings = lint_names(tree, infer(LLAMA))
    assert [(finding.key, finding.severity, finding.code) for finding in findings] == [
        ("layers/1/attention/q dim 0", Severity.WARNING, Code.OTHER_NAME),
        ("layers/1/attention/q dim 1", Severity.NOTE, Code.OTHER_NAME),
    ]
    wrong, replicated = findings
    assert "the dim is named MLP_INTERMEDIATE, and the program uses it as EMBED" in wrong.message
    assert wrong.fix == "write EMBED"
    assert wrong.source.startswith("models.py:")
    assert "the dim is not named, and the program uses it as HEAD: queries" in replicated.message


def test_every_swap_of_two_dims_is_found() -> None:
    """Swap two dims of any arrays in an MoE layer, with and without a common size."""
    inferred = infer(models.EINSUM_MOE)
    leaves, tree = jax.tree.flatten(annotations(models.EINSUM_MOE), is_leaf=is_annotation)
    places = [(leaf, dim) for leaf, axes in enumerate(leaves) for dim in range(len(axes))]
    missed, swaps = [], 0
    for (i, at), (j, other) in itertools.combinations(places, 2):
        if plain((leaves[i][at],)) == plain((leaves[j][other],)):
            continue
        changed = [list(axes) for axes in leaves]
        changed[i][at], changed[j][other] = leaves[j][other], leaves[i][at]
        found = lint_names(jax.tree.unflatten(tree, list(map(tuple, changed))), inferred)
        swaps += 1
        if not found:
            missed.append((i, at, leaves[i][at], j, other, leaves[j][other]))
    assert missed == []
    assert swaps > 100


def test_finding_shows_the_sizes_of_a_merged_dim() -> None:
    axes = ("EMBED", sw.merged(("HEAD", 12), ("HEAD_DIM", 2)))
    (finding,) = lint_names(changed(models.FLAT_LLAMA, axes, "o"), infer(models.FLAT_LLAMA))
    says = "is named HEAD:12*HEAD_DIM:2, and the program uses it as HEAD:4*HEAD_DIM:6"
    assert says in finding.message


def test_layouts_are_compared_by_meaning() -> None:
    tree = changed(LLAMA, sw.ColumnWise, "layers", 0, "up")
    assert lint_names(tree, infer(LLAMA)) == ()


def test_equal_heads_of_keys_have_two_names() -> None:
    tree = annotations(models.BERT)
    attention = tree["layers"][0]["attention"]
    attention["k"] = ("EMBED", "KV_HEAD", "KV_HEAD_DIM")
    assert lint_names(tree, infer(models.BERT)) == ()


def test_axes_of_your_own_are_compared_with_each_other() -> None:
    tree = changed(models.VIT, ("CATEGORIES",), "head_bias")
    (finding,) = lint_names(tree, infer(models.VIT))
    assert finding.key == "head_bias dim 0 CATEGORIES"
    assert "this dim and head dim 1 CLASSES as one dim" in finding.message


def test_norm_along_an_axis_of_your_own() -> None:
    """A scale behind a convolution may be named NORM, as behind EMBED. Another name is found."""

    def forward(params: Any, x: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            x, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.nn.relu(y * params["scale"])

    shapes = {"kernel": (3, 3, 8, 16), "scale": (16,)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    image = jax.ShapeDtypeStruct((4, 8, 8, 8), "float32")
    inferred = sw.infer_axes(forward, params, image, seeds=[(sw.BATCH, None, None, None)])
    kernel = (sw.EMPTY, sw.EMPTY, "channels_in", "channels")
    assert lint_names({"kernel": kernel, "scale": (sw.NORM,)}, inferred) == ()
    windows = ("window", "window", *kernel[2:])
    assert lint_names({"kernel": windows, "scale": (sw.NORM,)}, inferred) == ()
    (finding,) = lint_names({"kernel": kernel, "scale": ("channels_in",)}, inferred)
    assert "kernel dim 3 CHANNELS" in finding.message


def test_channels_are_named_by_the_kind_of_array() -> None:
    """A ResNet by the words of images has no finding, although inference uses those of an MLP."""

    def conv(x: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def forward(params: Any, x: Any) -> Any:
        for block in params["blocks"]:
            hidden = jax.nn.relu(conv(x, block["up"]) * block["scale"])
            x = x + conv(hidden, block["down"])
        return x

    shapes = {"up": (3, 3, 16, 24), "scale": (24,), "down": (3, 3, 24, 16)}
    block = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    params = {"blocks": [block, block]}
    image = jax.ShapeDtypeStruct((4, 8, 8, 16), "float32")
    seeds = [(sw.BATCH, sw.HEIGHT, sw.WIDTH, None)]
    inferred = sw.infer_axes(forward, params, image, seeds=seeds)
    kernel = (sw.EMPTY, sw.EMPTY, sw.CHANNEL_IN, sw.CHANNEL_OUT)
    axes = {"up": kernel, "scale": (sw.CHANNEL,), "down": kernel}
    assert lint_names({"blocks": [axes, axes]}, inferred) == ()
    swapped = {**axes, "up": (sw.EMPTY, sw.EMPTY, sw.MLP_INTERMEDIATE, sw.CHANNEL_OUT)}
    assert lint_names({"blocks": [swapped, axes]}, inferred) != ()


def test_conflicts_are_findings() -> None:
    def forward(params: Any, tokens: Any) -> Any:
        total = jax.lax.scan(lambda x, row: (x + (x @ row) * row, None), params[0], params)[0]
        return params[tokens] + total

    shape = jax.ShapeDtypeStruct((96, 24), "float32")
    inferred = sw.infer_axes(forward, shape, models.TOKENS, seeds=[("BATCH", "LENGTH")])
    findings = lint_names(("VOCAB", "EMBED"), inferred)
    assert "two names" in findings[0].message


def test_unlike_trees_and_ranks() -> None:
    inferred = infer(GPT2)
    with raises(sw.StrategyError, "annotation", path="h/0/down"):
        lint_names({"wte": ("VOCAB", "EMBED")}, inferred)
    with pytest.raises(sw.RankMismatchError):
        lint_names(changed(GPT2, ("VOCAB",), "wte"), inferred)
