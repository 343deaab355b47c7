"""What the dispatch sends: counts and bytes, from compiled programs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.layers import moe
from shardwright.plan.collectives import Kind, read_collectives
from shardwright.testing import assert_collectives, cpu_mesh
from tests.layers.moe.reference import NOTHING_GATHERED, config, parameters, tokens


@pytest.fixture(scope="module")
def pm() -> sw.PartitionManager:
    strategy = sw.Strategy.preset("moe_ep") | NOTHING_GATHERED
    return sw.PartitionManager(strategy, mesh=cpu_mesh("fsdp:2,ep:4"))


def arguments(pm: sw.PartitionManager, moe_config: moe.MoEConfig) -> tuple[Any, Any]:
    params = jax.device_put(parameters(moe_config), pm.shardings(moe.specs(moe_config)))
    return params, pm.shard(tokens(8, 4, 16), sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)


def loss_of(moe_config: moe.MoEConfig) -> Callable[[Any, Any], Any]:
    return lambda params, x: jnp.square(moe.apply(moe_config, params, x)[0]).sum()


@pytest.mark.parametrize("capacity", [moe.Dropless(), moe.CapacityFactor(2.0)], ids=str)
def test_forward_is_two_all_to_alls(pm: sw.PartitionManager, capacity: Any) -> None:
    moe_config = config(capacity=capacity)
    with pm:
        slots = moe.explain(moe_config, (8, 4, 16)).slots
        assert_collectives(
            lambda params, x: moe.apply(moe_config, params, x)[0],
            *arguments(pm, moe_config),
            all_to_all=2,
            only=True,
            axis="ep",
            bytes=2 * 8 * slots * 16 * 4,  # experts * slots * embed * float32, twice
        )


def test_gradient_is_four_all_to_alls_and_two_sums(pm: sw.PartitionManager) -> None:
    moe_config = config()
    loss = loss_of(moe_config)

    with pm:
        given = arguments(pm, moe_config)
        gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
        assert_collectives(gradient, *given, all_to_all=4, all_reduce=2, only=True)
        of_parameters = jax.jit(jax.grad(loss))
        assert_collectives(of_parameters, *given, all_to_all=3, all_reduce=2, only=True)
        slots = moe.explain(moe_config, (8, 4, 16)).slots
        events = read_collectives(gradient.lower(*given).compile(), pm.mesh)
    sent = [event.logical_bytes for event in events if event.kind is Kind.ALL_TO_ALL]
    assert sent == [8 * slots * 16 * 4] * 4  # experts * slots * embed * float32


@pytest.mark.full
@pytest.mark.parametrize("capacity", [moe.Dropless(), moe.CapacityFactor(1.5)], ids=str)
def test_no_array_has_the_tokens_of_all_devices(capacity: Any) -> None:
    """8 sequences of 7 tokens, one sequence per device: no array has 8 x 7 or 56 of anything."""
    moe_config = config(experts=12, capacity=capacity)
    manager = sw.PartitionManager(sw.Strategy.preset("moe_ep"), mesh=cpu_mesh("fsdp:2,ep:4"))
    params, x = parameters(moe_config), tokens(8, 7, 16)

    def shapes(*given: Any) -> set[tuple[int, ...]]:
        program = jax.jit(jax.value_and_grad(loss_of(moe_config), argnums=(0, 1)))
        text = program.lower(*given).compile().as_text()
        return {tuple(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", text)}

    def holds_all(shape: tuple[int, ...]) -> bool:
        return 56 in shape or (8, 7) in itertools.pairwise(shape)

    assert any(map(holds_all, shapes(params, x)))  # without a mesh
    with manager:
        placed = jax.device_put(params, manager.shardings(moe.specs(moe_config)))
        given = placed, manager.shard(x, sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
        assert not any(map(holds_all, shapes(*given)))


def test_statistics_are_two_sums(pm: sw.PartitionManager) -> None:
    moe_config = config(balance_loss=0.01, z_loss=0.001)
    with pm:
        program = jax.jit(lambda params, x: moe.apply(moe_config, params, x)[1].stats)
        assert_collectives(program, *arguments(pm, moe_config), all_reduce=2, only=True)


def test_replicated_tokens_are_summed_not_sent() -> None:
    moe_config = config(shared=1)
    strategy = sw.Strategy.preset("fsdp_tp") | NOTHING_GATHERED
    with sw.PartitionManager(strategy, mesh=cpu_mesh("fsdp:2,ep:2,tp:2")) as pm:
        program = jax.jit(lambda params, x: moe.apply(moe_config, params, x)[0])
        assert_collectives(program, *arguments(pm, moe_config), all_reduce=1, only=True)


@pytest.mark.full
def test_gradients_of_the_rows_are_summed_once_over_tp() -> None:
    # Gate and up both have a gradient of the rows. Without the cast there are two sums.
    moe_config = config()
    strategy = sw.Strategy.preset("tensor") | NOTHING_GATHERED
    with sw.PartitionManager(strategy, mesh=cpu_mesh("dp:2,tp:4")) as pm:
        gradient = jax.jit(jax.grad(loss_of(moe_config), argnums=1))
        compiled = gradient.lower(*arguments(pm, moe_config)).compile()
        largest = max(
            event.logical_bytes
            for event in read_collectives(compiled, pm.mesh)
            if event.mesh_axes == ("tp",)
        )
        # experts * slots * embed * float32
        rows = 8 * moe.explain(moe_config, (8, 4, 16)).slots * 16 * 4
    assert rows <= largest < 1.1 * rows


def test_experts_are_never_gathered_over_ep() -> None:
    moe_config = config()
    with sw.PartitionManager(sw.Strategy.preset("moe_ep"), mesh=cpu_mesh("fsdp:2,ep:4")) as pm:
        program = jax.jit(lambda params, x: moe.apply(moe_config, params, x)[0])
        given = arguments(pm, moe_config)
        # gate, up and down over fsdp; the router, which is stored over fsdp and ep, over both.
        mesh = pm.mesh
        gathers = [
            (event.mesh_axes, event.logical_bytes)
            for event in read_collectives(program.lower(*given).compile(), mesh)
            if event.kind is Kind.ALL_GATHER
        ]
        # [8, 16, 24] float32 of the experts, a quarter of it per device of ep.
        assert sorted(gathers) == [(("fsdp",), 2 * 16 * 24 * 4)] * 3 + [
            (("fsdp", "ep"), 16 * 8 * 4)
        ]
