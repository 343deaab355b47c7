"""Time: worked out by hand from bytes, operations and rates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.plan.collectives.collective import Kind
from shardwright.plan.hardware import parse_topology, read_hardware
from shardwright.plan.layout import lay_out
from shardwright.plan.links import SecondsRange
from shardwright.plan.time import estimate_time
from shardwright.plan.walk.entries import Peak
from shardwright.plan.walk.events import Event, Walked, Work

CUBE = parse_topology("v5p:4x4x4", read_hardware())
LAYOUT = lay_out(CUBE, {"fsdp": 16, "tp": 4})


def event(kind: Kind, *mesh_axes: str, wire: int, runs: int = 1, maybe: bool = False) -> Event:
    return Event(
        kind=kind,
        mesh_axes=mesh_axes,
        dtype="bfloat16",
        logical_bytes=wire,
        wire_bytes=wire,
        runs=runs,
        maybe=maybe,
    )


def walked(*events: Event, flops: int = 0, matmul_bytes: int = 0) -> Walked:
    return Walked(
        events=events,
        choices=(),
        idle=(),
        unknown={},
        work=Work(flops=flops, min_flops=flops, matmul_bytes=matmul_bytes),
        memory=Peak(),
    )


def sending(*events: Event) -> dict[tuple[str, ...], SecondsRange]:
    return estimate_time(walked(*events), LAYOUT, state_bytes=0).links


def test_matmuls_take_peak_to_half_of_it() -> None:
    time = estimate_time(walked(flops=459 * 10**12), LAYOUT, state_bytes=0)
    assert time.matmuls == SecondsRange(low=1.0, high=2.0)
    assert (time.low, time.high) == (1.0, 2.0)


def test_memory_reads_arguments_to_all_operands() -> None:
    bytes_ = 2765 * 10**9
    time = estimate_time(walked(matmul_bytes=3 * bytes_), LAYOUT, state_bytes=bytes_)
    assert time.memory == SecondsRange(low=1.0, high=3.0)
    assert (time.low, time.high) == (1.0, 3.0)


def test_sending_uses_all_links_of_an_axis() -> None:
    """Tp is a ring of 4: two links of 90 to 100 GB/s. Fsdp is two such rings."""
    second = 200 * 10**9
    spans = sending(
        event(Kind.ALL_GATHER, "tp", wire=second, runs=3),
        event(Kind.ALL_GATHER, "tp", wire=second),
        event(Kind.ALL_REDUCE, "fsdp", wire=2 * second),
        event(Kind.ALL_REDUCE, "fsdp", "tp", wire=3 * second),
    )
    slow = pytest.approx(10 / 9)
    assert spans["tp",].low == 4
    assert spans["tp",].high == pytest.approx(40 / 9)
    assert spans["fsdp",] == SecondsRange(low=1.0, high=slow)
    assert spans["fsdp", "tp"] == SecondsRange(low=1.0, high=slow)


def test_special_collectives_have_their_own_ranges() -> None:
    second = 200 * 10**9
    exchange = sending(event(Kind.ALL_TO_ALL, "tp", wire=second))["tp",]
    assert (exchange.low, exchange.high) == (0.25, pytest.approx(10 / 9))
    shift = sending(event(Kind.PERMUTE, "tp", wire=second))["tp",]
    assert (shift.low, shift.high) == (1.0, pytest.approx(20 / 9))
    branch = sending(event(Kind.ALL_GATHER, "tp", wire=second, maybe=True))["tp",]
    assert (branch.low, branch.high) == (0.0, pytest.approx(10 / 9))


def test_small_collectives_take_hops() -> None:
    """The farthest device of two rings of 4 is 2 + 2 hops away."""
    span = sending(event(Kind.ALL_REDUCE, "fsdp", wire=8, runs=10))["fsdp",]
    assert span.high == pytest.approx(10 * 4e-6)


def test_all_overlaps_or_nothing_does() -> None:
    second = 200 * 10**9
    events = (
        event(Kind.ALL_GATHER, "tp", wire=3 * second),
        event(Kind.ALL_GATHER, "fsdp", wire=second),
    )
    time = estimate_time(walked(*events, flops=459 * 10**12), LAYOUT, state_bytes=0)
    assert time.low == 3.0
    assert time.high == pytest.approx(2 + (3 + 0.5) * 10 / 9)


def test_report_has_a_time_only_on_a_slice() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=sw.abstract_mesh("fsdp:8"))
    x: Any = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    assert pm.plan(lambda x: x @ x, x).time is None
    report = pm.plan(lambda x: x @ x, x, topology="v5e:2x4")
    assert report.time is not None
    assert report.time.matmuls.low == 2 * 64**3 / 197e12
    assert report.to_json()["time"]["low"] == report.time.low
    rows = [line.split()[0] for line in report.text().splitlines() if line]
    assert rows[-4:-1] == ["matmuls", "memory", "all"]
