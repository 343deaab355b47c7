"""Laws of the time of a collective: random clusters, meshes and chips."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest

import shardwright as sw
from shardwright.errors import MeshSpecError
from shardwright.plan.collectives.collective import Kind, ring_bytes
from shardwright.plan.hardware import Topology, read_hardware
from shardwright.plan.layout import Layout, lay_out
from shardwright.plan.links import SecondsRange, collective_seconds
from tests.plan.test_hardware import draw_sizes
from tests.plan.test_search import program

HARDWARE = read_hardware()
CASES = 200
SIZE = 2**24


def draw(rng: random.Random) -> Topology:
    chip = rng.choice(list(HARDWARE.values()))
    shapes = [shape for shape in chip.slices() if math.prod(shape) <= 256]
    count = rng.choice([1, 2, 3, 4, 8]) if chip.dcn_rate else 1
    return Topology(chip=chip, shape=rng.choice(shapes), slices=count)


def seconds(layout: Layout, kind: Kind, axes: tuple[str, ...], size: int) -> SecondsRange:
    devices = layout.devices_inside(axes) * layout.slices_of(axes)
    return collective_seconds(
        layout, kind, axes, logical_bytes=size, wire_bytes=ring_bytes(kind, size, devices)
    )


def broken_laws(layout: Layout, sizes: dict[str, int]) -> list[str]:
    """Return the laws that a layout breaks."""
    broken = []
    if any(
        layout.devices_inside([axis]) * layout.slices_of([axis]) != size
        for axis, size in sizes.items()
    ):
        broken.append("each axis has its devices, inside and across")
    axes = [axis for axis, size in sizes.items() if size > 1]
    groups = [group for count in (1, 2) for group in itertools.combinations(axes, count)]
    for group, kind in itertools.product(groups, Kind):
        span, more = (seconds(layout, kind, group, size) for size in (SIZE, 2 * SIZE))
        if not 0 < span.low <= span.high < math.inf:
            broken.append(f"{kind} over {group} takes {span}")
        if more.low < span.low or more.high < span.high:
            broken.append(f"{kind} over {group} takes less time for more bytes")
        chip, slices = layout.topology.chip, layout.slices_of(group)
        if kind is Kind.PERMUTE and slices > 1 and span.low < SIZE / chip.dcn_rate:
            broken.append(f"{kind} over {group} is faster than the network")
    return broken


def test_times_over_random_clusters_keep_the_laws() -> None:
    rng, failures, laid_out = random.Random(0), [], 0
    for _ in range(CASES):
        topology = draw(rng)
        sizes = draw_sizes(rng, topology.devices)
        try:
            layout = lay_out(topology, sizes)
        except MeshSpecError:  # tp alone cannot cross slices
            continue
        laid_out += 1
        failures += [(str(topology), sizes, law) for law in broken_laws(layout, sizes)]
    assert failures == []
    assert laid_out > CASES // 2


def test_a_domain_may_be_one_device() -> None:
    chip = dataclasses.replace(HARDWARE["mi300x"], domain=1, shapes=((1,),))
    sizes = {"fsdp": 4, "tp": 1}
    layout = lay_out(Topology(chip=chip, shape=(1,), slices=4), sizes)
    assert layout.rates(["fsdp"]) == (0, 0)
    assert broken_laws(layout, sizes) == []


@pytest.mark.full(but=["2xh100:4"])
@pytest.mark.parametrize("topology", ["2xv5p:2x2x1", "2xh100:4", "8xh100:1"])
def test_search_over_axes_that_only_cross(topology: str) -> None:
    """With default axes, a mesh axis may lie wholly across slices or domains."""
    found = sw.search(program(32), topology=topology, walks=8)
    assert any(
        not each.report.layout.parts[axis] and each.report.layout.slices_of([axis]) > 1
        for each in found.candidates
        if each.report.layout is not None
        for axis in each.report.layout.parts
    )
