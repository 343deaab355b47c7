"""The tensors of published checkpoints: their names and bytes, as index files give them."""

from __future__ import annotations

import collections
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.interop import hf
from shardwright.interop.hf.names import NameTable, missing
from shardwright.vocabulary.annotations import MergedDim, PartOf

PATH = Path(__file__).parents[1] / "golden" / "hf_published.json"
TREES = json.loads(PATH.read_text(encoding="utf-8"))["trees"]
_SPAN = re.compile(r"\{(\d+)-(\d+)\}")
PLAIN = [tree for tree in TREES if "names" in tree]


def expanded(pattern: str) -> Iterator[str]:
    """Yield the names of `model.layers.{0-31}.mlp.up_proj.weight`."""
    spans = [range(int(first), int(last) + 1) for first, last in _SPAN.findall(pattern)]
    form = _SPAN.sub("{}", pattern)
    return (form.format(*numbers) for numbers in itertools.product(*spans))


def expected_shape(table: NameTable, name: str) -> tuple[int, ...]:
    row = re.sub(r"(?<=\.)\d+(?=\.)", "#", name.removeprefix("model."))
    words = table.rows[row].removesuffix(" ?").split()
    return tuple(table.dims[word].size or 0 for word in words)


@pytest.mark.parametrize("tree", PLAIN, ids=[tree["repository"] for tree in PLAIN])
def test_names_and_bytes_of_an_index(tree: dict[str, Any]) -> None:
    """An index gives no shapes, but the bytes of all tensors together."""
    table = NameTable.of(tree["config"])
    names = [name for pattern in tree["names"] for name in expanded(pattern)]
    assert len(names) == tree["tensors"]
    assert missing(names, tree["config"]) == []
    shapes = {name: expected_shape(table, name) for name in names}
    assert sum(map(math.prod, shapes.values())) * tree["bits"] // 8 == tree["total_size"]
    values = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    axes = hf.annotate(values, tree["config"])
    # Eight ways over heads, and KV heads that do not divide: no head is split.
    mesh = sw.abstract_mesh("fsdp:2,tp:8")
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh)
    kinds = {re.sub(r"\.\d+\.", ".0.", name): name for name in names if "self_attn" in name}
    for name in kinds.values():
        spec = pm.explain(axes[name], role="param", shape=shapes[name])
        for entry, decision in zip(axes[name], spec.decisions, strict=True):
            if isinstance(entry, MergedDim):
                heads = entry.members[0][1]
                assert heads % (8 if decision.mesh_axes else 1) == 0


@pytest.mark.full
def test_all_tensors_of_deepseek_r1() -> None:
    """91,991 tensors in FP8 with block scales."""
    tree = next(tree for tree in TREES if "shapes" in tree)
    shapes = {
        name: tuple(shape)
        for pattern, shape in tree["shapes"].items()
        for name in expanded(pattern)
    }
    assert len(shapes) == tree["tensors"]
    weights = {name: shape for name, shape in shapes.items() if not name.endswith("_inv")}
    assert missing(shapes, tree["config"]) == []
    values = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    axes = hf.annotate(values, tree["config"])
    kinds = collections.Counter(type(annotation) for annotation in axes.values())
    assert kinds == {tuple: len(weights), PartOf: len(shapes) - len(weights)}
    # Every scale goes with its weight: 16 blocks of 128 over fsdp and tp.
    mesh = sw.abstract_mesh("fsdp:8,tp:4")
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh)
    shardings = pm.shardings(values, axes)
    for name, sharding in shardings.items():
        if name.endswith("_inv"):
            assert sharding.spec == shardings[name.removesuffix("_scale_inv")].spec
