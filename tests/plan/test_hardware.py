"""Chips, slices, and where mesh axes are on them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
from jax.experimental import mesh_utils

import shardwright as sw
from shardwright.plan.hardware import Topology, parse_topology, read_hardware, smallest_slice
from shardwright.plan.layout import lay_out
from tests.raising import Facts, facts, raises

HARDWARE = read_hardware()


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """What `create_device_mesh` reads of a TPU device."""

    coords: tuple[int, ...]
    core_on_chip: int = 0
    device_kind: str = "TPU v4"
    platform: str = "tpu"
    process_index: int = 0


def fake_devices(topology: Topology) -> list[Any]:
    shape = (*topology.shape, *[1] * (3 - len(topology.shape)))
    ranges = [range(length) for length in reversed(shape)]
    return [FakeDevice(coords=tuple(reversed(at))) for at in itertools.product(*ranges)]


def lengths_of_jax(topology: Topology, sizes: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return the number of devices that JAX's mesh has along each physical axis, by mesh axis."""
    devices = mesh_utils.create_device_mesh(
        tuple(sizes.values()), fake_devices(topology), allow_split_physical_axes=True
    )
    lengths = {}
    for position, axis in enumerate(sizes):
        line = devices[tuple(slice(None) if at == position else 0 for at in range(devices.ndim))]
        along = {side: len({device.coords[at] for device in line}) for at, side in enumerate("xyz")}
        lengths[axis] = {side: length for side, length in along.items() if length > 1}
    return lengths


def lengths_of(topology: Topology, sizes: dict[str, int]) -> dict[str, dict[str, int]]:
    layout = lay_out(topology, sizes)
    return {axis: {part.side: part.size for part in layout.parts[axis]} for axis in sizes}


@pytest.mark.parametrize(
    ("slice_", "sizes"),
    [
        ("v5p:4x4x4", (16, 4)),
        ("v5p:4x4x4", (64, 1)),
        ("v5p:4x4x4", (4, 4, 4)),
        ("v5p:4x4x8", (16, 8)),
        ("v5p:4x4x8", (8, 16)),
        ("v5p:8x8x16", (128, 8)),
        ("v5e:16x16", (16, 16)),
        ("v5e:4x8", (4, 8)),
        ("v5e:2x4", (8,)),
    ],
)
def test_layout_equals_device_mesh_of_jax(slice_: str, sizes: tuple[int, ...]) -> None:
    topology = parse_topology(slice_, HARDWARE)
    named = dict(zip(("dp", "fsdp", "tp"), sizes, strict=False))
    assert lengths_of(topology, named) == lengths_of_jax(topology, named)


def draw_sizes(rng: random.Random, devices: int) -> dict[str, int]:
    sizes = {}
    for axis in ("pp", "dp", "fsdp")[: rng.randint(0, 3)]:
        sizes[axis] = rng.choice([size for size in range(1, devices + 1) if devices % size == 0])
        devices //= sizes[axis]
    return {**sizes, "tp": devices}


def test_random_layouts_equal_device_meshes_of_jax() -> None:
    rng, different = random.Random(0), []
    slices = [
        Topology(chip=HARDWARE[chip], shape=shape)
        for chip in ("v5p", "v5e")
        for shape in HARDWARE[chip].slices()
        if math.prod(shape) <= 256
    ]
    for topology in slices:
        for _ in range(15):
            sizes = draw_sizes(rng, topology.devices)
            if lengths_of(topology, sizes) != lengths_of_jax(topology, sizes):
                different.append((str(topology), sizes))
    assert different == []


def test_split_axes_cover_the_slice() -> None:
    """Every device is covered once, and no part of a physical axis is a ring."""
    topology = parse_topology("v5p:4x4x4", HARDWARE)
    for sizes in ((32, 2), (2, 32), (8, 8), (2, 2, 16)):
        named = dict(zip(("dp", "fsdp", "tp"), sizes, strict=False))
        layout = lay_out(topology, named)
        covered: dict[str, int] = {}
        for axis, size in named.items():
            parts = layout.parts[axis]
            assert math.prod(part.size for part in parts) == size
            for part in parts:
                covered[part.side] = covered.get(part.side, 1) * part.size
                assert part.ring == part.whole == (part.size == 4)
        assert covered == {"x": 4, "y": 4, "z": 4}
    assert "tp on 2 of x" in str(lay_out(topology, {"fsdp": 32, "tp": 2}))


def test_rates_count_links_and_rings() -> None:
    cube = parse_topology("v5p:4x4x4", HARDWARE)
    layout = lay_out(cube, {"fsdp": 16, "tp": 4})
    assert layout.rates(("tp",)) == (2 * 90e9, 2 * 100e9)
    assert layout.rates(("fsdp",)) == (4 * 90e9, 4 * 100e9)
    # On a v5e a side of 8 is not a ring, and a side of 16 is one.
    flat = lay_out(parse_topology("v5e:8x16", HARDWARE), {"fsdp": 8, "tp": 16})
    assert flat.rates(("fsdp",)) == (45e9, 50e9)
    assert flat.rates(("tp",)) == (90e9, 100e9)
    # 2x2x1 is smaller than a cube.
    assert not parse_topology("v5p:2x2x1", HARDWARE).is_ring("x")


def test_chip_of_two_devices_shares_its_rates() -> None:
    topology = parse_topology("tpu7x:4x4x4", HARDWARE)
    assert topology.devices == 128
    assert topology.chip.flops == 2307e12 / 2
    assert topology.chip.hbm_bytes == int(94.75 * 2**30)
    layout = lay_out(topology, {"fsdp": 64, "tp": 2})
    assert str(layout) == "tpu7x:4x4x4: fsdp on x (ring) + y (ring) + z (ring), tp on core"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("v5p", facts("v5p", fix="v5p")),
        ("v5p-64", facts("v5p-64", fix="v5p")),
        ("v5q:4x4x4", facts("chip", "v5q", fix="v5p")),
        ("v5e:16x32", facts("v5e", fix="nearest")),
        ("v5p:4x4x5", facts("v5p", fix="nearest")),
        ("v5p:8x4x4", facts("v5p")),
        ("v5p:0x4x4", facts("v5p")),
    ],
)
def test_unknown_topologies_name_the_nearest(text: str, says: Facts) -> None:
    with raises(sw.MeshSpecError, says):
        parse_topology(text, HARDWARE)


def test_mesh_of_another_size_is_refused() -> None:
    with raises(sw.MeshSpecError, "fsdp", 8, "v5p", 64):
        lay_out(parse_topology("v5p:4x4x4", HARDWARE), {"fsdp": 8})


def test_smallest_slice_holds_the_bytes() -> None:
    """A v5e has 15.75 GiB that a program may use."""
    chip = HARDWARE["v5e"]
    for gib, slice_ in ((15, "v5e:1x1"), (16, "v5e:2x2"), (63, "v5e:2x2"), (64, "v5e:2x4")):
        assert str(smallest_slice(chip, gib * 2**30)) == slice_
    assert smallest_slice(chip, 257 * 16 * 2**30) is None


def test_every_cell_has_source_and_date() -> None:
    for chip in HARDWARE.values():
        cells = {"bf16_tflops", "hbm_gbps", "hbm_gib", "link_gbps"}
        cells |= {"pool_share", "workspace_mib"} if chip.domain else set()
        assert cells <= set(chip.sources)
        assert not chip.domain or any(f"{name}_gbps" in chip.sources for name in chip.networks)
        assert all(len(source) > len(", 2026-11-22") for source in chip.sources.values())
        assert list(chip.slices())


def test_a_file_overlays_cells_and_adds_chips(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    cell = 'source = "measured", date = "2026-11-22"'
    path.write_text(f"[v5e]\nhbm_gib = {{ value = 15.0, {cell} }}\n", encoding="utf-8")
    chip = read_hardware(str(path))["v5e"]
    assert chip.hbm_bytes == 15 * 2**30
    assert chip.sources["hbm_gib"] == "measured, 2026-11-22"
    assert chip.flops == HARDWARE["v5e"].flops


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[v5e]\nhbm = 3", facts("unknown", path="mine.toml v5e.hbm", fix="hbm_gib")),
        (
            "[new]\ndims = 2",
            facts(
                "devices_per_chip",
                "most_chips",
                "bf16_tflops",
                "hbm_gib",
                "hbm_gbps",
                path="mine.toml new",
                fix="chip",
            ),
        ),
        ("[v5e]\nhbm_gib = 15", facts(15, "source", path="mine.toml v5e.hbm_gib", fix="where")),
        ("[v5e]\ndims = 0", facts(0, path="mine.toml v5e.dims")),
        ("[v5e]\nshapes = 4", facts(4, "list", path="mine.toml v5e.shapes", fix="2x2")),
        ("v5e = 4", facts("mine.toml", "v5e", fix="v5p")),
        ("v5e", facts("mine.toml", "TOML", "=", "key/value", fix="v5p")),
    ],
)
def test_bad_overlays_are_refused(tmp_path: Path, text: str, says: Facts) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with raises(sw.StrategyError, says):
        read_hardware(str(path))
    with raises(sw.StrategyError, "absent.toml", "file"):
        read_hardware(str(tmp_path / "absent.toml"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("v5litepod-16", "v5litepod-16 has 16 chips: write v5e:4x4"),
        ("v5e-8", "v5e-8 has 8 chips: write v5e:2x4"),
        ("v6e-256", "v6e-256 has 256 chips: write v6e:16x16"),
        # These names count the cores, two per chip.
        ("v5p-128", "v5p-128 has 64 chips: write v5p:4x4x4"),
        ("v4-8", "v4-8 has 4 chips: write v4:2x2x1"),
        ("v5e-7", "v5e-7 has 7 chips, and v5e has no such slice"),
        ("v9-8", "write a chip and its slice"),
        ("h100-1", "h100-1 has 1 GPU: write h100:1"),
        ("h100-16", "h100-16 has 16 GPUs: write 2xh100:8"),
        ("h100-12", "for GPUs, the domains"),
    ],
)
def test_cloud_names_of_slices_are_explained(name: str, says: str) -> None:
    with raises(sw.MeshSpecError, name, "topology") as raised:
        parse_topology(name, read_hardware())
    assert says in raised.value.fix


def test_split_sides_have_their_lengths() -> None:
    slice_ = parse_topology("v5e:4x8", read_hardware())
    text = str(lay_out(slice_, {"dp": 2, "fsdp": 16}))
    assert text == "v5e:4x8: dp on 2 of x, fsdp on 2 of x + y   (sides of the slice: x = 4)"
    assert "sides" not in str(lay_out(slice_, {"dp": 4, "fsdp": 8}))
