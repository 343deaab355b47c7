"""Low-rank adaptation and relative position biases."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest

import shardwright as sw
from shardwright.layers import (
    attention_block,
    lora,
    mlp_block,
    relative_bias,
    transformer_block,
)
from shardwright.layers.lora import LoraConfig
from shardwright.layers.relative_bias import RelativeBiasConfig
from tests.layers import blocks
from tests.raising import facts, raises

X = np.random.default_rng(0).normal(size=(8, 4, 16)).astype(np.float32)
OUT = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)
INNER = (sw.BATCH, sw.QUERY_LENGTH, sw.EMPTY)


def test_lora_equals_numpy() -> None:
    config = LoraConfig(rank=4, alpha=8.0)
    made = lora.specs(config, [(sw.EMBED, 16)], [(sw.HEAD, 8), (sw.HEAD_DIM, 2)])
    assert made["b"].init is not None
    assert not made["b"].init(jax.random.key(0), made["b"].shape, made["b"].dtype).any()
    assert (LoraConfig(rank=4).scale, config.scale) == (1.0, 2.0)
    params = blocks.random_params(made)
    wanted = 2 * np.einsum("ble,er,rhd->blhd", X.astype(np.float64), params["a"], params["b"])
    for kind in ("auto", "explicit"):
        with blocks.make_manager("fsdp_tp", kind) as pm:
            weights = pm.shard(params, made, role="use")
            got = jax.jit(lambda p, x: lora.apply(config, p, x, out=OUT, inner=INNER))(weights, X)
            assert got.sharding.is_equivalent_to(pm.sharding(OUT, shape=got.shape), 4)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


RANK = LoraConfig(rank=2, alpha=6.0)
ATTENTION = attention_block.AttentionConfig(embed=16, heads=8, kv_heads=4, bias=True, lora=RANK)
MLP = mlp_block.MlpConfig(embed=16, hidden=32, bias=True, lora=RANK)
ADAPTED: dict[str, tuple[Any, Any]] = {
    "attention": (attention_block, ATTENTION),
    "mlp": (mlp_block, MLP),
    "stack": (
        transformer_block,
        transformer_block.TransformerConfig(layers=2, attention=ATTENTION, mlp=MLP),
    ),
}


def merged(tree: Any) -> Any:
    """Return parameters without adaptation: each kernel plus three times `A B`."""
    if not isinstance(tree, dict):
        return [merged(part) for part in tree] if isinstance(tree, list) else tree
    if "lora" not in tree:
        return {name: merged(part) for name, part in tree.items()}
    kernel = np.asarray(tree["kernel"], np.float64)
    a, b = tree["lora"]["a"], tree["lora"]["b"]
    # Parameters of a stack have a leading dim of layers.
    is_stack = a.ndim + b.ndim - kernel.ndim == 3
    pairs = zip(a, b, strict=True) if is_stack else [(a, b)]
    matmul = np.stack([np.tensordot(*pair, 1) for pair in pairs])
    matmul = matmul if is_stack else matmul[0]
    assert matmul.shape == kernel.shape
    rest = {name: leaf for name, leaf in tree.items() if name != "lora"}
    return {**rest, "kernel": (kernel + 3 * matmul).astype(np.float32)}


@pytest.mark.parametrize(
    ("name", "preset", "kind"),
    [
        ("mlp", None, None),
        *[
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ("attention", None, None),
                ("stack", None, None),
                ("attention", "fsdp_tp_sp", "explicit"),
                ("mlp", "fsdp_tp_sp", "mixed"),
                ("stack", "fsdp_tp_sp", "auto"),
                ("stack", "tensor", "explicit"),
            ]
        ],
    ],
)
def test_adapted_block_equals_merged_kernels(
    name: str, preset: str | None, kind: str | None
) -> None:
    block, config = ADAPTED[name]
    specs = block.specs(config)
    params = blocks.random_params(specs)
    plain = {"lora": None}
    if name == "stack":
        plain = {
            part: dataclasses.replace(getattr(config, part), lora=None)
            for part in ("attention", "mlp")
        }
    base = dataclasses.replace(config, **plain)
    wanted = jax.jit(lambda p, x: block.apply(base, p, x)[0])(merged(params), X)
    run = jax.jit(
        jax.value_and_grad(blocks.total(lambda p, x: block.apply(config, p, x)[0]), has_aux=True)
    )
    (_, y), gradients = run(params, X)
    blocks.assert_close(y, wanted, rtol=1e-4)
    if preset is None or kind is None:
        return
    with blocks.make_manager(preset, kind) as pm:
        stored = pm.shard(params, specs, role="param")
        (_, sharded), got = run(stored, X)
    blocks.assert_close((sharded, got), (y, gradients), rtol=1e-4)
    for gradient, value in zip(jax.tree.leaves(got), jax.tree.leaves(stored), strict=True):
        assert gradient.sharding.is_equivalent_to(value.sharding, value.ndim)


@pytest.mark.full
def test_adaptation_of_a_block_in_fp8() -> None:
    """Kernels are in fp8, the adaptation is not."""
    config = dataclasses.replace(MLP, recipe="current")
    params = blocks.random_params(mlp_block.specs(config))
    y, wanted = (
        jax.jit(lambda p, x, own=own: mlp_block.apply(own, p, x)[0])(params, X)
        for own in (config, MLP)
    )
    assert np.linalg.norm(y - wanted) < 0.1 * np.linalg.norm(wanted)
    plain = dataclasses.replace(config, lora=None)
    for part in ("up", "down"):
        del params[part]["lora"]
    without = jax.jit(lambda p, x: mlp_block.apply(plain, p, x)[0])(params, X)
    assert np.linalg.norm(without - wanted) > 0.2 * np.linalg.norm(wanted)


def bucket_by_paper(distance: int, buckets: int, most: int, both: bool) -> int:
    """Return the bucket of one distance, as the paper describes it."""
    start = 0
    if both:
        buckets //= 2
        start = buckets if distance > 0 else 0
        distance = -abs(distance)
    behind = max(-distance, 0)
    half = buckets // 2
    if behind < half:
        return start + behind
    share = math.log(behind / half) / math.log(most / half)
    return start + min(half + int(share * (buckets - half) + 1e-6), buckets - 1)


def test_buckets_equal_the_formula() -> None:
    distances = np.arange(-300, 301)
    for buckets, most, both in ((32, 128, False), (32, 128, True), (8, 20, True), (5, 9, False)):
        config = RelativeBiasConfig(heads=2, buckets=buckets, max_distance=most, bidirectional=both)
        got = relative_bias.bucket(config, distances)
        wanted = [bucket_by_paper(int(d), buckets, most, both) for d in distances]
        assert got.tolist() == wanted, (buckets, most, both)


def test_bias_of_heads_and_positions() -> None:
    config = RelativeBiasConfig(heads=8, buckets=8, max_distance=16)
    table = blocks.random_params(relative_bias.specs(config))
    whole = relative_bias.apply(config, table, q_length=12, kv_length=12)
    assert whole.shape == (1, 8, 12, 12)
    np.testing.assert_array_equal(whole[0, :, 5, 3], table[:, 2])
    last = relative_bias.apply(config, table, q_length=1, kv_length=12, q_start=7)
    np.testing.assert_array_equal(last[:, :, 0], whole[:, :, 7])
    with blocks.make_manager("fsdp_tp", "explicit") as pm:
        stored = pm.shard(table, relative_bias.specs(config), role="use")
        sharded = jax.jit(
            lambda table: relative_bias.apply(config, table, q_length=12, kv_length=12)
        )(stored)
    np.testing.assert_array_equal(sharded, whole)
    assert sharded.sharding.spec[1] == "tp"


def test_bad_input() -> None:
    config = RelativeBiasConfig(heads=2)
    cases: list[tuple[Any, str]] = [
        (lambda: LoraConfig(rank=0), facts(0, path="rank", fix="rank")),
        (lambda: LoraConfig(alpha=-1), facts(-1, path="alpha")),
        (
            lambda: lora.apply(
                LoraConfig(rank=3), {"a": X[0].T, "b": X[0]}, X, out=OUT, inner=INNER
            ),
            facts("(16, 4)", "(4, 16)", 3),
        ),
        (
            lambda: lora.apply(
                LoraConfig(rank=4), {"a": X[0].T, "b": X[0][:2]}, X, out=OUT, inner=INNER
            ),
            facts("(16, 4)", "(2, 16)", 4),
        ),
        (lambda: RelativeBiasConfig(heads=0), facts(0, path="heads", fix="heads")),
        (
            lambda: RelativeBiasConfig(heads=2, buckets=1),
            facts("buckets", 1, "max_distance", 128, fix="max_distance"),
        ),
        (
            lambda: RelativeBiasConfig(heads=2, max_distance=16),
            facts("buckets", 32, 16, "max_distance", fix="max_distance"),
        ),
        (
            lambda: relative_bias.apply(config, np.ones((2, 3)), q_length=1, kv_length=1),
            facts("(2, 3)", path="table"),
        ),
    ]
    for call, message in cases:
        with raises(sw.ShardingError, message) as caught:
            call()
        assert "fix  " in str(caught.value)
