"""The table of features on the page equals what the implementations answer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.attention import AttentionCall, Implementation, explain
from shardwright.attention.implementation import SHIPPED
from shardwright.attention.kernels import cudnn
from shardwright.testing import Golden, cpu_mesh
from tests.docs.snippets import ROOT

PAGE = ROOT / "docs" / "attention.md"
START, END = "<!-- features -->\n", "<!-- /features -->"
ROWS, HEADS = 128, 4
# Mesh, rules and platform of the calls. An implementation has a feature if it serves one of them.
PLACES = {
    "heads": ("dp:2,tp:2", '[rules]\nbatch = "dp"\nhead = "tp"\nkv_head = "tp"\n', "cpu"),
    "heads, TPU": ("dp:2,tp:2", '[rules]\nbatch = "dp"\nhead = "tp"\nkv_head = "tp"\n', "tpu"),
    "heads, GPU": ("dp:2,tp:2", '[rules]\nbatch = "dp"\nhead = "tp"\nkv_head = "tp"\n', "gpu"),
    "sequence": ("sp:2", '[rules]\nquery_length = "sp"\nkv_length = "sp"\n', "cpu"),
    "keys": ("sp:2", '[rules]\nkv_length = "sp"\n', "cpu"),
}
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": (7, None)},
    "window to both sides": {"window": (7, 7)},
    "chunks": {"causal": True, "chunk": 16},
    "segments": {"segment_ids": jnp.zeros((2, ROWS), jnp.int32)},
    "lengths": {"lengths": jnp.full(2, ROWS)},
    "positions as arrays (zigzag, caches)": {"causal": True, "positions": jnp.arange(ROWS)},
    "more keys than queries": {"causal": True, "q_length": 8},
    "dense mask": {"mask": jnp.ones((1, 1, ROWS, ROWS), bool)},
    "bias": {"bias": jnp.zeros((1, 1, ROWS, ROWS))},
    "sinks": {"sinks": jnp.zeros(HEADS)},
    "softcap": {"softcap": 30.0},
    "dropout": {"dropout": 0.1, "dropout_key": 0},
    "`v_dim` other than `head_dim`": {"v_dim": 16},
    "float32": {"dtype": "float32"},
    "int8 and float8 keys": {
        "kv_dtype": "int8",
        "k_scale": jnp.ones((2, ROWS, 2)),
        "v_scale": jnp.ones((2, ROWS, 2)),
    },
    "logsumexp": {"return_lse": True},
    "weights": {"return_weights": True},
}


def call_of(
    place: str,
    *,
    q_length: int = ROWS,
    v_dim: int = 64,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    **options: Any,
) -> AttentionCall:
    mesh, rules, platform = PLACES[place]
    arrays = (
        ((2, q_length, HEADS, 64), dtype),
        ((2, ROWS, 2, 64), kv_dtype or dtype),
        ((2, ROWS, 2, v_dim), kv_dtype or dtype),
    )
    with sw.PartitionManager(sw.Strategy.loads(rules), mesh=cpu_mesh(mesh)):
        call = explain(
            *(jax.ShapeDtypeStruct(*array) for array in arrays),
            mode="train",
            implementation="vanilla",
            **options,
        ).call
    return dataclasses.replace(call, platform=platform)


def has(implementation: Implementation, feature: str) -> bool:
    calls = [call_of(place, **FEATURES[feature]) for place in PLACES]
    few = [dataclasses.replace(call, q_length=8) for call in calls]
    return any(not implementation.refusals(call) for call in (*calls, *few))


def table() -> str:
    names = [kernel.name for kernel in SHIPPED]
    lines = [
        f"| | {' | '.join(f'`{name}`' for name in names)} |",
        f"| --- |{' :-: |' * len(names)}",
    ]
    lines += [
        f"| {feature} | {' | '.join('✓' if has(kernel, feature) else '' for kernel in SHIPPED)} |"
        for feature in FEATURES
    ]
    return "\n".join(" ".join(line.split()) for line in lines) + "\n"


def test_table_of_features(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a machine where cuDNN works.
    monkeypatch.setattr(cudnn, "failure_on", lambda kind: "")
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    golden.file(PAGE, f"{before}{START}\n{table()}\n{END}{rest.partition(END)[2]}")


def test_every_implementation_has_a_row() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = [
        line.split("|")[1]
        for line in text[
            text.index("## Which implementation") : text.index("<!-- features")
        ].splitlines()
        if "|" in line
    ]
    assert [
        kernel.name for kernel in SHIPPED if not any(f"`{kernel.name}`" in row for row in rows)
    ] == []
