"""Values and gradients of the MoE layer, beside the dense reference."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import shardwright as sw
from shardwright.layers import moe
from shardwright.layers.dtypes import Dtypes
from shardwright.layers.moe import block
from shardwright.layers.moe.experts import choose_matmul
from tests.layers.moe.reference import config, dense, error, manager, parameters, tokens

TOKENS = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
MESHES = [
    ("moe_ep", "fsdp:2,ep:4"),
    ("fsdp_tp", "fsdp:2,ep:2,tp:2"),
    ("serve_tp", "ep:2,tp:4"),
    ("moe_ep", "ep:8"),
    ("moe_ep", "fsdp:4,ep:2"),
    ("moe_ep", "fsdp:2,ep:2,tp:2"),
    ("moe_ep", "fsdp:2,sp:2,ep:2"),
    ("fsdp", "fsdp:8"),
    ("fsdp_tp", "fsdp:2,tp:4"),
    ("fsdp_tp", "fsdp:4,tp:2"),
    ("tensor", "tp:8"),
    ("serve_tp", "dp:2,ep:4"),
    ("serve_tp", "tp:8"),
    ("single", "dp:1"),
]


def check(pm: sw.PartitionManager, moe_config: moe.MoEConfig) -> str:
    """Return what differs from the dense reference by more than 1e-6."""
    params, x = parameters(moe_config), tokens(8, 4, moe_config.embed)

    def expected_loss(params: Any, x: Any) -> Any:
        y = dense(moe_config, params, x)
        return jnp.square(y).sum(), y

    def loss(params: Any, x: Any) -> Any:
        y, state = moe.apply(moe_config, params, x)
        return jnp.square(y).sum(), (y, state.stats)

    gradient = jax.value_and_grad(expected_loss, argnums=(0, 1), has_aux=True)
    (_, expected), expected_gradients = jax.jit(gradient)(params, x)
    with pm:
        placed = jax.device_put(params, pm.shardings(moe.specs(moe_config)))
        placed_x = pm.shard(x, *TOKENS)
        gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, (y, stats)), gradients = jax.jit(gradient)(placed, placed_x)
    assert int(stats.dropped) == 0
    assert int(stats.load.sum()) == 32 * moe_config.per_token
    errors = {"y": error(y, expected), "x": error(gradients[1], expected_gradients[1])}
    for name, value in gradients[0].items():
        errors[name] = error(value, expected_gradients[0][name])
    wrong = {name: value for name, value in errors.items() if not value <= 1e-6}
    return f"{pm.name} {dict(pm.mesh.shape)}: {wrong}" if wrong else ""


def sweep(cases: list[tuple[str, str]]) -> None:
    moe_config = config(shared=1)
    assert not [fault for case in cases if (fault := check(manager(*case), moe_config))]


def test_sharded_equals_dense() -> None:
    sweep(MESHES[:2])


@pytest.mark.full
def test_sharded_equals_dense_on_more_meshes() -> None:
    sweep(MESHES[2:6])


@pytest.mark.full
def test_ragged_matmul_equals_dense() -> None:
    moe_config = config(shared=1, matmul="ragged")
    assert not check(manager(*MESHES[0]), moe_config)


@pytest.mark.full
def test_ragged_matmul_equals_dense_on_more_meshes() -> None:
    moe_config = config(shared=1, matmul="ragged")
    assert not [fault for case in MESHES[1:6] if (fault := check(manager(*case), moe_config))]


@pytest.mark.full
def test_sharded_equals_dense_on_all_meshes() -> None:
    sweep(MESHES[6:])


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([(8, 1), (64, 8)], marks=pytest.mark.full, id="some"),
        pytest.param([(4, 1), (4, 2), (8, 8), (64, 1), (64, 2)], marks=pytest.mark.full, id="all"),
    ],
)
def test_sharded_equals_dense_for_counts(counts: list[tuple[int, int]]) -> None:
    pm = manager("moe_ep", "fsdp:2,ep:4")
    # The normalized weight of a single expert is 1, and the router's gradient is then only noise.
    moe_configs = [config(experts=experts, per_token=k, normalize=k > 1) for experts, k in counts]
    faults = [check(pm, moe_config) for moe_config in moe_configs]
    assert not [fault for fault in faults if fault]


@pytest.mark.full
def test_sharded_equals_dense_on_explicit_axes() -> None:
    for types in ((AxisType.Explicit, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)):
        mesh = jax.make_mesh((2, 4), ("fsdp", "ep"), axis_types=types)
        assert not check(sw.PartitionManager(sw.Strategy.preset("moe_ep"), mesh=mesh), config())


@pytest.mark.full
def test_without_a_manager() -> None:
    moe_config = config(shared=2)
    params, x = parameters(moe_config), tokens(3, 5, 16)
    y, _ = moe.apply(moe_config, params, x)
    assert error(y, dense(moe_config, params, x)) <= 1e-6
    flat, _ = moe.apply(moe_config, params, x.reshape(15, 16))
    np.testing.assert_array_equal(flat.reshape(y.shape), y)


def test_equal_layers_share_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    moe_config = config()
    params, x = parameters(moe_config), tokens(8, 4, 16)
    traces = []
    route = block.route

    def counted(*args: Any) -> Any:
        traces.append(args)
        return route(*args)

    monkeypatch.setattr(block, "route", counted)
    with manager("moe_ep", "fsdp:2,ep:4"):
        for _ in range(3):
            moe.apply(moe_config, params, x)
    assert len(traces) <= 2


@pytest.mark.full
def test_decode_with_one_token_per_device_and_with_none() -> None:
    moe_config = config()
    params, x = parameters(moe_config), tokens(8, 1, 16)
    with manager("moe_ep", "fsdp:2,ep:4", mode="decode"):
        assert moe.explain(moe_config, (8, 1, 16)).slots == 1
        y, _ = moe.apply(moe_config, params, x)
        empty, state = moe.apply(moe_config, params, x[:0])
        small = config(dtypes=Dtypes(compute="bfloat16"))
        half, _ = moe.apply(small, params, x)
    assert error(y, dense(moe_config, params, x)) <= 1e-6
    assert empty.shape == (0, 1, 16)
    assert int(state.stats.load.sum()) == 0
    assert half.dtype == jnp.bfloat16
    assert error(half, y) < 0.03


def test_a_prompt_that_does_not_divide_falls_back() -> None:
    moe_config = config()
    params, x = parameters(moe_config), tokens(1, 4, 16)
    with manager("serve_tp", "ep:4,tp:2", mode="prefill"):
        assert moe.explain(moe_config, x.shape).sent == ()
        y, _ = jax.jit(functools.partial(moe.apply, moe_config))(params, x)
    assert error(y, dense(moe_config, params, x)) <= 1e-6


@pytest.mark.parametrize("matmul", ["padded", pytest.param("ragged", marks=pytest.mark.full)])
def test_all_tokens_to_one_expert(matmul: str) -> None:
    moe_config = config(per_token=1, matmul=matmul)
    params, x = parameters(moe_config), np.abs(tokens(8, 4, 16))
    params["router"] = np.zeros_like(params["router"])
    params["router"][:, 5] = 1
    with manager("moe_ep", "fsdp:2,ep:4"):
        y, state = moe.apply(moe_config, params, x)
    assert state.stats.load.tolist() == [0, 0, 0, 0, 0, 32, 0, 0]
    assert error(y, dense(moe_config, params, x)) <= 1e-6


@pytest.mark.full(but=["ragged"])
@pytest.mark.parametrize("matmul", ["padded", "ragged"])
@pytest.mark.ci
def test_not_a_number_stays_in_its_row(matmul: str) -> None:
    moe_config = config(matmul=matmul)
    params, x = parameters(moe_config), tokens(8, 4, 16)
    with manager("moe_ep", "fsdp:2,ep:4"):
        run = jax.jit(functools.partial(moe.apply, moe_config))
        expected, _ = run(params, x.copy())
        x[2, 1, 0] = np.nan
        y, _ = run(params, x)
    y, expected = np.array(y), np.array(expected)
    assert np.isnan(y[2, 1]).all()
    y[2, 1] = expected[2, 1]
    np.testing.assert_array_equal(y, expected)


def test_permuted_experts_give_the_same_result() -> None:
    moe_config = config(experts=8, per_token=2)
    params, x = parameters(moe_config), tokens(8, 4, 16)
    order = np.random.default_rng(2).permutation(8)
    permuted = {name: value[order] for name, value in params.items() if name != "router"}
    permuted["router"] = params["router"][:, order]
    with manager("moe_ep", "fsdp:2,ep:4"):
        y, state = moe.apply(moe_config, params, x)
        other, other_state = moe.apply(moe_config, permuted, x)
    assert error(other, y) <= 1e-6
    np.testing.assert_array_equal(other_state.stats.load, np.array(state.stats.load)[order])


def test_choice_of_matmul() -> None:
    def chosen(platform: str = "tpu", **changes: Any) -> str:
        sizes = {"experts": 2, "slots": 4 * 32, "tokens": 4 * 32}
        matmul = choose_matmul(config(**changes), platform=platform, **sizes)
        return f"{matmul.name}, {matmul.rows} rows: {matmul.why}"

    assert chosen(per_token=1) == "ragged, 128 rows: at most 128 of 256 slots are filled"
    assert chosen(per_token=2) == "padded, 256 rows: all 256 slots may be filled"
    assert chosen("cpu", per_token=1) == (
        "padded, 256 rows: XLA for CPU has no fast grouped matmul"
    )
    assert chosen(per_token=1, activation="sigmoid") == (
        "padded, 256 rows: sigmoid(0) is not 0, so empty slots must be multiplied"
    )
    assert chosen(per_token=1, matmul="padded") == "padded, 256 rows: the config names it"
    assert chosen("cpu", per_token=1, matmul="ragged") == "ragged, 128 rows: the config names it"
