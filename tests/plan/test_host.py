"""Plans of values in host memory: bytes of both memories, shardings, times and verdicts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import shardwright as sw
from shardwright.plan.fit import Verdict
from shardwright.plan.hardware import parse_topology, read_hardware
from shardwright.plan.planner import PlanReport, Program, trace_program
from shardwright.show.search import candidate_rows
from tests.manager.test_memory import (
    AXES,
    OPTIMIZER,
    SPECS,
    loss_fn,
    make_batch,
    train_step,
)

MIB = 2**20
HIDDEN = (sw.BATCH, sw.EMBED)
BIG = {"w": sw.ArraySpec((1024, 1024), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE))}
HOLDS = ("parameters", "optimizer", "inputs")


def make_manager(mesh: str = "fsdp:4,tp:2", axis_types: Any = "auto", **memory: Any) -> Any:
    strategy = sw.Strategy.preset("fsdp_tp") | sw.Strategy(memory=memory)
    return sw.PartitionManager(
        strategy, mesh=sw.abstract_mesh(mesh, axis_types=axis_types), mode="train"
    )


def big_step(params: Any, moments: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        return jnp.sum(sw.shard(sw.shard(x, HIDDEN) @ sw.gather(params, BIG)["w"], HIDDEN) ** 2)

    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, jax.grad(loss)(params))
    return jax.tree.map(jnp.subtract, params, moments), moments


def big_plan(pm: Any, **options: Any) -> PlanReport:
    shapes = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    options = {"specs": (BIG, BIG, HIDDEN), "holds": HOLDS, "donated": (0, 1), **options}
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    report: PlanReport = pm.plan(big_step, shapes, shapes, x, topology="v5e:2x4", **options)
    return report


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.parametrize("outputs", [None, (BIG, BIG)])
def test_state_moves_in_front_of_the_step_and_back(outputs: Any, axis_types: str) -> None:
    """Of 4 MiB, each of 8 devices has 0.5 MiB of the moments, which cross the link twice."""
    mesh = "fsdp:4,tp:2" if axis_types == "auto" else "fsdp:8"
    device = big_plan(make_manager(mesh, axis_types), outputs=outputs)
    host = big_plan(make_manager(mesh, axis_types, state="host"), outputs=outputs)
    assert device.memory.host == device.host_bytes == 0
    assert host.memory.host == MIB // 2
    assert host.host_bytes == MIB
    assert [str(each) for each in host.events] == [str(each) for each in device.events]
    assert host.walked.complete
    # At best, the copy exists only while the moments are updated.
    assert host.memory.low <= device.memory.low <= host.memory.high
    assert host.state.of("optimizer").per_device == 0
    assert host.time is not None
    assert device.time is not None
    seconds = pytest.approx(MIB / 15e9)
    assert host.time.host.high == seconds
    assert host.time.host.low * 2 == seconds
    assert host.time.high == pytest.approx(device.time.high + MIB / 15e9)
    text = str(host)
    assert "memory of the host for each device: 512.0 KiB of 44.7 GiB on v5e" in text
    assert "host link" in text


def test_both_memories_are_judged() -> None:
    topology = parse_topology("v5e:2x4", read_hardware())

    def verdict(host_bytes: int) -> Verdict | None:
        chip = dataclasses.replace(topology.chip, host_bytes=host_bytes, host_rate=0.0)
        report = big_plan(make_manager(state="host"))
        assert report.layout is not None
        layout = dataclasses.replace(
            report.layout, topology=dataclasses.replace(topology, chip=chip)
        )
        report = dataclasses.replace(report, layout=layout)
        assert "not timed: 1.0 MiB between device and host" in str(report)
        return report.verdict

    assert verdict(MIB) is Verdict.FITS
    assert verdict(MIB // 2) is Verdict.CLOSE
    assert verdict(MIB // 4) is Verdict.DOES_NOT_FIT
    assert verdict(0) is Verdict.FITS, "it is not known"


def test_offloading_remat_keeps_shardings() -> None:
    specs = {
        "up": sw.ArraySpec((64, 256), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE)),
        "down": sw.ArraySpec((256, 64), jnp.float32, (sw.MLP_INTERMEDIATE, sw.EMBED)),
    }
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs)
    x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)

    def mlp(p: Any, x: Any) -> Any:
        w = sw.gather(p, specs)
        up = sw.shard(sw.shard(x, HIDDEN) @ w["up"], sw.BATCH, sw.MLP_INTERMEDIATE)
        return (sw.shard(jax.nn.silu(checkpoint_name(up, "h")) @ w["down"], HIDDEN) ** 2).sum()

    def plan(**memory: Any) -> PlanReport:
        pm = make_manager(saved=memory)
        policy = pm.remat_policy("h")
        run = jax.grad(jax.checkpoint(mlp, policy=policy))
        report: PlanReport = pm.plan(run, shapes, x, specs=(specs, HIDDEN), outputs=specs)
        return report

    kept, moved = plan(), plan(h="host")
    assert moved.walked.complete
    assert [(e.kind, e.mesh_axes, e.logical_bytes) for e in moved.events] == [
        (e.kind, e.mesh_axes, e.logical_bytes) for e in kept.events
    ]
    assert kept.memory.host == 0
    assert moved.memory.host == 4096 * 256 * 4 // 8
    assert moved.host_bytes == 2 * moved.memory.host


def decoder_plan(pm: Any, optimizer: Any, step: Any) -> PlanReport:
    state = {"params": pm.abstract(SPECS), "moments": pm.abstract_state(optimizer, SPECS)}
    holds = ({"params": "parameters", "moments": "optimizer"}, "inputs")
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batch())
    report: PlanReport = pm.plan(step, state, batch, specs=(None, AXES), holds=holds, donated=(0,))
    return report


def test_offloaded_state_is_updated_in_place_on_the_host() -> None:
    optimizer = sw.offloaded(OPTIMIZER, SPECS)

    def by_layer(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        params, moments = optimizer.apply_gradients(grads, state["moments"], state["params"])
        return {"params": params, "moments": moments}, loss

    device = decoder_plan(make_manager(), OPTIMIZER, train_step)
    moments = device.state.of("optimizer").per_device - 4  # the step stays on the device
    weights = device.state.of("parameters").per_device
    state = decoder_plan(make_manager(state="host"), optimizer, by_layer)
    assert state.memory.host == moments
    assert state.host_bytes == 2 * moments
    both = decoder_plan(make_manager(state="host", params="host"), optimizer, by_layer)
    assert both.walked.complete
    # The gradients arrive on the host too.
    assert both.memory.host == moments + 2 * weights
    assert both.memory.high < state.memory.high < device.memory.high


def test_trace_fits_only_rules_that_put_the_same_on_the_host() -> None:
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    shapes = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    program = Program(big_step, (shapes, shapes, x), (BIG, BIG, HIDDEN), holds=HOLDS, any_mesh=True)
    device, host = make_manager(), make_manager(state="host")
    traced = trace_program(host, program)
    assert traced.fits(host)
    assert traced.renaming(make_manager("fsdp:8", state="host")) == {}
    assert not traced.fits(device)
    assert traced.renaming(device) is None


def test_search_varies_memory_and_says_what_it_costs() -> None:
    shapes = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    program = Program(
        big_step,
        (shapes, shapes, x),
        (BIG, BIG, HIDDEN),
        holds=HOLDS,
        donated=(0, 1),
        any_mesh=True,
    )
    found = sw.search(
        program,
        {"fsdp_tp": sw.Strategy.preset("fsdp_tp")},
        topology="v5e:2x4",
        axes=("fsdp",),
        vary={"memory.state": ("device", "host"), "memory.saved.h": (None, "device")},
    )
    by_memory = {each.settings["memory.state"]: each for each in found.candidates}
    device, host = by_memory["device"], by_memory["host"]
    assert found.best is not None
    assert found.best.settings["memory.state"] == "device", "it is faster"
    assert (device.host_bytes, host.host_bytes) == (0, MIB)
    assert host.seconds - device.seconds == pytest.approx(MIB / 15e9)
    assert host.strategy.memory.state == "host"
    assert host.report.state.of("optimizer").per_device == 0
    (head, *rows) = candidate_rows([device, host])
    assert [row[head.index("host link")] for row in rows] == ["-", "1.0 MiB, at most 69.91 µs"]
