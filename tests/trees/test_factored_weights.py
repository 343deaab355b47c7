"""Quantized weights and low-rank pairs: sharded like their weight, and equal to one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.testing import cpu_mesh
from shardwright.trees.factored_weights import LowRank, Quantized, low_rank, quantized, scale_axes
from tests.raising import raises

P = jax.P
KERNEL = (sw.EMBED, sw.MLP_INTERMEDIATE)
normal = jax.nn.initializers.normal(1.0)


def manager(
    preset: str = "fsdp_tp", sizes: str = "fsdp:4,tp:2", **more: Any
) -> sw.PartitionManager:
    return sw.PartitionManager(
        sw.Strategy.preset(preset) | sw.Strategy(**more), mesh=cpu_mesh(sizes)
    )


def weight(
    shape: tuple[int, ...] = (64, 96), axes: Any = KERNEL, dtype: Any = jnp.float32
) -> sw.ArraySpec:
    return sw.ArraySpec(shape, dtype, axes, normal)


def specs(shardings: Any) -> list[Any]:
    return [sharding.spec for sharding in jax.tree.leaves(shardings)]


# Values and scales.


@pytest.mark.parametrize(
    ("blocks", "scale_shape", "scale_spec"),
    [
        ((-1, 1), (1, 96), P(None, "tp")),
        ((64, 1), (1, 96), P(None, "tp")),
        ((1, -1), (64, 1), P("fsdp")),
        ((-1, -1), (1, 1), P()),
        ((16, 1), (4, 96), P("fsdp", "tp")),
        ((16, 48), (4, 2), P("fsdp", "tp")),
        ((1, 1), (64, 96), P("fsdp", "tp")),
    ],
)
def test_scales_follow_their_values(blocks: Any, scale_shape: Any, scale_spec: Any) -> None:
    for axes in (KERNEL, sw.ColumnWise):
        parts = quantized(weight(axes=axes), blocks, zero_point=jnp.int8)
        assert (parts.value.shape, parts.value.dtype, parts.scale.shape, parts.scale.dtype) == (
            (64, 96),
            jnp.int8,
            scale_shape,
            jnp.float32,
        )
        assert (parts.zero_point.shape, parts.zero_point.dtype) == (scale_shape, jnp.int8)
        shardings = manager().shardings({"w": parts})["w"]
        assert (shardings.value.spec, shardings.scale.spec, shardings.zero_point.spec) == (
            P("fsdp", "tp"),
            scale_spec,
            scale_spec,
        )


@pytest.mark.parametrize(("rows", "fits"), [(8, True), (16, True), (32, False)])
def test_block_is_never_split(rows: int, fits: bool) -> None:
    """Where it fits, the values of each device are scaled by what the same device holds."""
    parts = quantized(weight(), (rows, 1))
    if not fits:
        with raises(
            sw.IndivisibleError, 2, 32, "fsdp", path="w/scale", dim=0, axis="EMBED", fix="EMPTY"
        ) as caught:
            manager().shardings({"w": parts})
        assert "choose a block size whose number of blocks divides" in caught.value.fix
        return
    shardings = manager().shardings(parts)
    values = shardings.value.devices_indices_map(parts.value.shape)
    for device, (scale_rows, scale_columns) in shardings.scale.devices_indices_map(
        parts.scale.shape
    ).items():
        row, column = values[device]
        assert (scale_rows.start * rows, scale_rows.stop * rows) == (row.start, row.stop)
        assert scale_columns == column


@pytest.mark.full(but=["int8"])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int4])
def test_sharded_equals_unsharded_in_place(dtype: Any) -> None:
    weight_parts = quantized(weight(), (16, 1), dtype=dtype, zero_point=jnp.float32)
    w = jax.random.normal(jax.random.key(0), (64, 96))
    top = jnp.iinfo(dtype).max
    blocks = w.reshape(4, 16, 96)
    scale = jnp.abs(blocks).max(1) / top
    parts = Quantized(
        value=jnp.round(blocks / scale[:, None]).reshape(64, 96).astype(dtype),
        scale=scale,
        zero_point=jnp.zeros((4, 96)),
    )

    def dequantized(parts: Quantized) -> Any:
        apart = parts.value.reshape(4, 16, 96).astype(jnp.float32)
        return ((apart - parts.zero_point[:, None]) * parts.scale[:, None]).reshape(64, 96)

    shardings = manager().shardings(weight_parts)
    placed = jax.device_put(parts, shardings)
    assert jax.tree.map(lambda leaf: leaf.sharding, placed) == shardings
    jitted = jax.jit(dequantized, out_shardings=shardings.value)
    np.testing.assert_array_equal(jitted(placed), dequantized(parts))
    np.testing.assert_allclose(dequantized(parts), w, atol=float(scale.max()) / 2 + 1e-6)
    text = jitted.lower(placed).compile().as_text()
    assert not [
        name
        for name in ("all-gather", "all-to-all", "collective-permute", "all-reduce")
        if name in text
    ]


def test_scales_of_existing_values() -> None:
    pm = manager()
    assert pm.sharding(scale_axes(KERNEL, (64, 96), scale_shape=(4, 96)), shape=(4, 96)).spec == P(
        "fsdp", "tp"
    )
    for scale_shape in ((96,), (3, 96), (64, 0), (128, 96)):
        with raises(sw.RankMismatchError, "(64, 96)", path="w", fix="keepdims") as caught:
            scale_axes(KERNEL, (64, 96), scale_shape=scale_shape, path="w")
        assert "keepdims=True" in caught.value.fix


@pytest.mark.parametrize(
    "make",
    [lambda axes: quantized(axes, (1, 1), path="w"), lambda axes: low_rank(axes, 4, path="w")],
)
def test_parts_need_the_shape(make: Any) -> None:
    for axes in (KERNEL, sw.ColumnWise, np.zeros((4, 4))):
        with raises(sw.StrategyError, "ArraySpec", path="w", fix="ArraySpec"):
            make(axes)


def test_invalid_blocks() -> None:
    for blocks in (16, (16,), (24, 0), (None, 1), (64, 0)):
        with raises(sw.RankMismatchError, "EMBED", 64, 96, path="w", fix="dim"):
            quantized(weight(), blocks, path="w")  # type: ignore[arg-type]


def test_exceptions_by_path_cover_every_part() -> None:
    pm = manager(tensors=[{"match": "^head$", "embed": "tp", "mlp_intermediate": "fsdp"}])
    parts = {
        "head": quantized(weight(), (16, 1), path="head"),
        "other": quantized(weight(), (16, 1), path="other"),
    }
    assert specs(pm.shardings(parts)) == [P("tp", "fsdp")] * 2 + [P("fsdp", "tp")] * 2
    pair = {"head": low_rank(weight(), 4, path="head")}
    assert specs(pm.shardings(pair)) == [P("tp"), P(None, "fsdp")]


def test_parts_of_a_stack_of_layers() -> None:
    parts = sw.stack_specs({"w": quantized(weight(), (16, 1)), "pair": low_rank(weight(), 4)}, 3)
    assert (parts["w"].scale.shape, parts["pair"].a.shape) == ((3, 4, 96), (3, 64, 4))
    shardings = manager().shardings(parts)
    assert (shardings["w"].scale.spec, shardings["pair"].a.spec, shardings["pair"].b.spec) == (
        P(None, "fsdp", "tp"),
        P(None, "fsdp"),
        P(None, None, "tp"),
    )


# Low-rank pairs.


@pytest.mark.parametrize(
    ("axes", "shape", "how", "a", "b"),
    [
        (KERNEL, (64, 96), {}, ((64, 4), P("fsdp")), ((4, 96), P(None, "tp"))),
        (sw.RowWise, (96, 64), {}, ((96, 4), P("tp")), ((4, 64), P(None, "fsdp"))),
        (
            (sw.EMBED, sw.HEAD, sw.HEAD_DIM),
            (64, 8, 4),
            {},
            ((64, 4), P("fsdp")),
            ((4, 8, 4), P(None, "tp")),
        ),
        (
            (sw.HEAD, sw.HEAD_DIM, sw.EMBED),
            (8, 4, 64),
            {"inputs": 2},
            ((8, 4, 4), P("tp")),
            ((4, 64), P(None, "fsdp")),
        ),
        (
            (sw.LAYERS, *KERNEL),
            (3, 64, 96),
            {"leading": 1},
            ((3, 64, 4), P(None, "fsdp")),
            ((3, 4, 96), P(None, None, "tp")),
        ),
    ],
)
def test_pair_follows_inputs_and_outputs(axes: Any, shape: Any, how: Any, a: Any, b: Any) -> None:
    parts = low_rank(weight(shape, axes, jnp.bfloat16), 4, **how)
    shardings = manager().shardings(parts)
    assert ((parts.a.shape, shardings.a.spec), (parts.b.shape, shardings.b.spec)) == (a, b)
    assert (parts.a.dtype, low_rank(weight(), 4, dtype=jnp.float32).b.dtype) == (
        jnp.bfloat16,
        jnp.float32,
    )


def test_pair_starts_as_zero() -> None:
    arrays = manager().init(
        {"w": low_rank(weight((64, 8, 4), (sw.EMBED, sw.HEAD, sw.HEAD_DIM)), 32)}, jax.random.key(0)
    )["w"]
    assert 0.9 < float(jnp.std(arrays.a)) * 8 < 1.1, "variance 1 / inputs"
    assert not np.asarray(arrays.b).any()
    deep = manager().init(
        low_rank(weight((4, 64, 96), (sw.LAYERS, *KERNEL)), 32, leading=1), jax.random.key(0)
    )
    assert 0.9 < float(jnp.std(deep.a)) * 8 < 1.1


@pytest.mark.full
def test_sharded_equals_unsharded() -> None:
    pm = manager()
    trees = {"w": weight(), "pair": low_rank(weight(), 4)}
    parts = {
        "w": jax.random.normal(jax.random.key(0), (64, 96)),
        "pair": LowRank(a=jnp.ones((64, 4)) / 8, b=jnp.ones((4, 96)) / 8),
    }
    x = jax.random.normal(jax.random.key(1), (8, 64))

    def loss(parts: Any, x: Any, pm: Any = None) -> Any:
        if pm is not None:
            parts = pm.gather(parts, trees)
            x = pm.shard(x, sw.BATCH, sw.EMBED)
        return jnp.tanh(x @ parts["w"] + x @ parts["pair"].a @ parts["pair"].b).sum()

    want, wanted = jax.value_and_grad(loss)(parts, x)
    shardings = pm.shardings(trees)
    placed = jax.device_put(parts, shardings)
    actual, gradients = jax.jit(
        lambda parts, x: jax.value_and_grad(loss)(parts, x, pm), out_shardings=(None, shardings)
    )(placed, x)
    np.testing.assert_allclose(actual, want, rtol=1e-5)
    jax.tree.map(
        lambda value, other: np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-5),
        gradients,
        wanted,
    )
    assert jax.tree.map(lambda leaf: leaf.sharding, gradients) == shardings


@pytest.mark.full(but=["axes"])
@pytest.mark.parametrize("axes", [KERNEL, sw.ColumnWise], ids=["axes", "layout"])
def test_stacks_of_stacks(axes: Any) -> None:
    """Adapters of five users over a stack of three layers: one slice each equals its own pair."""
    pm, pair = manager(), low_rank(weight(axes=axes), 8)
    layers = sw.stack_specs(pair, 3)
    users = sw.stack_specs(layers, 5, axis=sw.EMPTY)
    assert (users.a.shape, users.b.shape) == ((5, 3, 64, 8), (5, 3, 8, 96))
    assert specs(pm.shardings(users)) == [P(None, None, "fsdp"), P(None, None, None, "tp")]
    scales = sw.stack_specs(sw.stack_specs(quantized(weight(axes=axes), (-1, 1)), 3), 5, axis="_")
    assert specs(pm.shardings(scales))[1] == P(None, None, None, "tp")
    created = pm.init({"up": users}, jax.random.key(0))["up"].a
    assert created.sharding.spec == P(None, None, "fsdp")
    assert len({float(value) for value in np.asarray(created)[:, :, 0, 0].flat}) == 15
    with raises(sw.AxisConflictError, "already", "starts", axis="LAYERS", fix="axis") as caught:
        sw.stack_specs(layers, 5)
    assert "axis=EMPTY" in caught.value.fix
    with raises(sw.StrategyError, "ColumnWise", "EXPERT", fix="ArraySpec"):
        sw.stacked(sw.ColumnWise, axis=sw.EXPERT)


def test_invalid_pairs() -> None:
    with raises(
        sw.StrategyError, "LAYERS", "EMBED", "MLP_INTERMEDIATE", 0, fix="leading"
    ) as caught:
        low_rank(weight((3, 64, 96), (sw.LAYERS, *KERNEL)), 4)
    assert "leading=1" in caught.value.fix
    for how in ({"inputs": 2}, {"inputs": 0}, {"leading": 1}, {"leading": -1}):
        with raises(sw.RankMismatchError, "EMBED", "MLP_INTERMEDIATE", 2, fix="inputs"):
            low_rank(weight(), 4, **how)
    with raises(sw.StrategyError, "rank", "pair", 0):
        low_rank(weight(), 0)
    with raises(
        sw.StrategyError, "EXPERT", "EMBED", "MLP_INTERMEDIATE", 0, fix="leading"
    ) as caught:
        low_rank(weight((4, 64, 96), (sw.EXPERT, *KERNEL)), 8)
    assert "leading=1" in caught.value.fix
    with raises(sw.StrategyError, "LAYERS", "EXPERT", "EMBED", 1, fix="leading") as caught:
        low_rank(weight((2, 4, 64, 96), (sw.LAYERS, sw.EXPERT, *KERNEL)), 8, leading=1)
    assert "leading=2" in caught.value.fix
    assert low_rank(weight((4, 64, 96), (sw.EXPERT, *KERNEL)), 8, leading=1).a.shape == (4, 64, 8)
    assert low_rank(weight((64, 4), (sw.EMBED, sw.EXPERT)), 8).b.shape == (8, 4), (
        "a router's outputs"
    )
    with raises(sw.StrategyError, "pair", "dtype", "int8", path="w", fix=("dtype", "jnp.bfloat16")):
        low_rank(weight(dtype=jnp.int8), 8, path="w")
    assert low_rank(weight(dtype=jnp.int8), 8, dtype=jnp.bfloat16).a.dtype == jnp.bfloat16
