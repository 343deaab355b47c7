"""Ragged exchange: its index arithmetic equals a NumPy model, and its results those of slots."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.layers import moe
from shardwright.layers.moe import exchange
from shardwright.layers.moe.exchange import choose_exchange
from shardwright.testing import assert_collectives, cpu_mesh
from tests.layers.moe.reference import (
    NOTHING_GATHERED,
    config,
    dense,
    error,
    manager,
    parameters,
    tokens,
)
from tests.layers.moe.test_results import check

DEVICES, EXPERTS, ROWS = 4, 8, 12
RNG = np.random.default_rng(0)


def random_loads(case: int) -> np.ndarray:
    """Return [devices, experts] loads that sum to ROWS per device; some are adversarial."""
    if case == 0:  # all rows of all devices to one expert
        return np.eye(EXPERTS, dtype=np.int32)[np.full(DEVICES, 5)] * ROWS
    if case == 1:  # device 3 gets nothing
        return np.array([RNG.multinomial(ROWS, [1 / 6] * 6 + [0, 0]) for _ in range(DEVICES)])
    return np.array(
        [RNG.multinomial(ROWS, RNG.dirichlet(np.ones(EXPERTS))) for _ in range(DEVICES)]
    )


def model(buffers: list[np.ndarray], routes: list[Any], size: int) -> list[np.ndarray]:
    """`ragged_all_to_all` as its documentation states it, one device after another."""
    results = [np.zeros((size, *rows.shape[1:]), rows.dtype) for rows in buffers]
    for sender, (rows, route) in enumerate(zip(buffers, routes, strict=True)):
        for receiver in range(len(buffers)):
            count = route.send_sizes[receiver]
            assert count == routes[receiver].recv_sizes[sender]
            start, to = route.input_offsets[receiver], route.output_offsets[receiver]
            assert to == routes[receiver].recv_offsets[sender]
            results[receiver][to : to + count] = rows[start : start + count]
    return results


@pytest.mark.parametrize("case", range(6))
def test_routes_bring_rows_to_their_experts_and_back(case: int) -> None:
    loads = np.asarray(random_loads(case), np.int32)
    own = EXPERTS // DEVICES
    planned = [exchange.plan_routes(jnp.asarray(loads), device) for device in range(DEVICES)]
    planned = jax.tree.map(np.asarray, planned)
    # A row is (sender, expert, its number among the sender's rows for that expert).
    buffers = [
        np.array([(s, x, n) for x in range(EXPERTS) for n in range(loads[s, x])])
        for s in range(DEVICES)
    ]
    size = DEVICES * ROWS
    received = model(buffers, [forth for forth, _ in planned], size)
    for device, rows in enumerate(received):
        counts = loads[:, device * own : (device + 1) * own]
        wanted = [
            (s, x, n)
            for x in range(device * own, (device + 1) * own)
            for s in range(DEVICES)
            for n in range(loads[s, x])
        ]
        order = np.asarray(exchange.by_expert(jnp.asarray(counts), size))
        assert sorted(order) == list(range(size))
        assert [tuple(row) for row in rows[order][: len(wanted)]] == wanted
    returned = model(received, [back for _, back in planned], ROWS)
    for rows, mine in zip(returned, buffers, strict=True):
        np.testing.assert_array_equal(rows, mine)


def test_twin_equals_the_model() -> None:
    """The twin of `ragged_all_to_all`, and its gradient, on four devices."""
    loads = np.asarray(random_loads(2), np.int32)
    size = DEVICES * ROWS
    native = exchange.Exchange(name="ragged", why="", rows=size, most=ROWS, native=False)
    rows = RNG.normal(size=(DEVICES, ROWS, 3)).astype(np.float32)
    weights = RNG.normal(size=(DEVICES, size, 3)).astype(np.float32)

    def local(rows: Any, weights: Any) -> Any:
        routes = exchange.plan_routes(jnp.asarray(loads), jax.lax.axis_index("ep"))

        def weighted(rows: Any) -> Any:
            sent = exchange.send(rows, routes, size, native, ("ep",))
            return jnp.sum(sent * weights[0]), sent

        gradient, sent = jax.grad(weighted, has_aux=True)(rows[0])
        return gradient[None], sent[None]

    mapped = jax.shard_map(
        local, mesh=cpu_mesh("ep:4"), in_specs=(P("ep"), P("ep")), out_specs=(P("ep"), P("ep"))
    )
    gradient, sent = jax.jit(mapped)(rows, weights)
    planned = [exchange.plan_routes(jnp.asarray(loads), device) for device in range(DEVICES)]
    routes, back = zip(*jax.tree.map(np.asarray, planned), strict=True)
    np.testing.assert_array_equal(sent, model(list(rows), list(routes), size))
    np.testing.assert_array_equal(gradient, model(list(weights), list(back), ROWS))


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["fsdp:2,ep:4", "ep:8", "fsdp:4,ep:2", "fsdp:2,ep:2,tp:2"])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (8, 1), (8, 8), (64, 2), (64, 8)])
@pytest.mark.ci
@pytest.mark.pairwise
def test_ragged_exchange_equals_dense(mesh: str, experts: int, k: int) -> None:
    moe_config = config(experts=experts, per_token=k, exchange="ragged", shared=1, normalize=k > 1)
    assert not check(manager("moe_ep", mesh), moe_config)


def test_ragged_exchange_equals_slots_under_adversarial_routing() -> None:
    """All tokens go to one expert, and one token is not a number."""
    moe_config = config(per_token=1, exchange="ragged")
    params, x = parameters(moe_config), np.abs(tokens(8, 4, 16))
    params["router"] = np.zeros_like(params["router"])
    params["router"][:, 5] = 1
    run = jax.jit(functools.partial(moe.apply, moe_config))
    with manager("moe_ep", "fsdp:2,ep:4"):
        y, state = run(params, x)
        spoilt = x.copy()
        spoilt[2, 1, 0] = np.nan
        other = np.array(run(params, spoilt)[0])
    assert state.stats.load.tolist() == [0, 0, 0, 0, 0, 32, 0, 0]
    assert error(y, dense(moe_config, params, x)) <= 1e-6
    assert np.isnan(other[2, 1]).all()
    other[2, 1] = y[2, 1]
    np.testing.assert_array_equal(other, y)


@pytest.mark.full
@pytest.mark.ci
def test_collectives_of_the_twin() -> None:
    moe_config = config(exchange="ragged")
    strategy = sw.Strategy.preset("moe_ep") | NOTHING_GATHERED
    with sw.PartitionManager(strategy, mesh=cpu_mesh("fsdp:2,ep:4")) as pm:
        params = jax.device_put(parameters(moe_config), pm.shardings(moe.specs(moe_config)))
        x = pm.shard(tokens(8, 4, 16), sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
        program = jax.jit(lambda params, x: moe.apply(moe_config, params, x)[0])
        # The all-gather is that of the loads.
        assert_collectives(program, params, x, all_to_all=2, all_gather=1, only=True)


def test_choice_of_exchange() -> None:
    def chosen(platform: str = "tpu", **changes: Any) -> str:
        sizes = {"shards": 4, "slots": 32, "tokens": 32}
        found = choose_exchange(config(**changes), platform=platform, **sizes)
        return f"{found.name}, {found.rows} rows: {found.why}"

    assert chosen() == "ragged, 256 rows: a device fills 64 of 256 slots"
    assert chosen("cpu") == "slots, 256 rows: XLA for CPU has no ragged all-to-all"
    assert chosen(experts=16) == "ragged, 256 rows: a device fills 64 of 512 slots"
    assert chosen(capacity=moe.CapacityFactor(2.0)) == (
        "slots, 256 rows: the capacity limits the slots"
    )
    assert chosen(matmul="padded") == "slots, 256 rows: the padded matmul needs slots"
    assert chosen(per_token=8) == "slots, 256 rows: all slots are filled"
    assert chosen(exchange="slots") == "slots, 256 rows: the config names it"
    assert chosen("cpu", exchange="ragged") == (
        "ragged, 256 rows: the config names it; XLA for CPU runs its twin"
    )


def test_explain_names_the_exchange() -> None:
    with manager("moe_ep", "fsdp:2,ep:4"):
        ragged = moe.explain(config(exchange="ragged"), (8, 4, 16))
        slots = moe.explain(config(), (8, 4, 16))
    assert ragged.why == "tokens and experts are sharded over ep: two ragged all-to-alls"
    assert ragged.matmul.why == "the rows arrive sorted, without empty slots"
    assert slots.exchange.name == "slots"
    with manager("fsdp_tp", "fsdp:2,tp:4"):
        assert moe.explain(config(), (8, 4, 16)).exchange.name == "none"
