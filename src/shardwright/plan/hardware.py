"""Read the data of chips, slices of TPUs and domains of GPUs: rates, usable memory and shapes.

The values are in `hardware.toml`, each with its source and date. A file of the user can replace
them.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import itertools
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from shardwright.errors import MeshSpecError, Problem, StrategyError, did_you_mean, raise_problems

SliceShape = tuple[int, ...]

_CELLS: Final = ("bf16_tflops", "hbm_gib", "hbm_gbps", "link_gbps")
# Rates of matmuls in other types. A type without a rate has the rate of bfloat16.
_TYPES: Final = ("fp8_tflops", "f32_tflops")
_HOST: Final = ("host_gbps", "host_gib")
_NETWORKS: Final = ("infiniband_gbps", "roce_gbps", "efa_gbps", "tcpx_gbps", "tcpxo_gbps")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """The keys of a table of `hardware.toml`, by the kind of their values.

    Attributes:
      numbers: Positive integers.
      flags: Booleans.
      lists: Lists of shapes.
      cells: Tables with a value, a source and a date.
      optional: Tables like those in `cells`, which may be absent.
    """

    numbers: tuple[str, ...]
    flags: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    cells: tuple[str, ...] = _CELLS
    optional: tuple[str, ...]

    @property
    def required(self) -> tuple[str, ...]:
        """The keys that a table must have."""
        return (*self.numbers, *self.flags, *self.lists, *self.cells)


_SLICES: Final = _Keys(
    numbers=("dims", "devices_per_chip", "cube", "longest", "most_chips", "wraps"),
    lists=("shapes",),
    optional=("dcn_gbps", *_TYPES, *_HOST),
)
_DOMAINS: Final = _Keys(
    numbers=("domain", "links"),
    flags=("nvlink", "switched", "switch_sums"),
    cells=(*_CELLS, "pool_share", "workspace_mib"),
    optional=(*_TYPES, *_NETWORKS, *_HOST),
)
# Names of slices in Google Cloud, such as v5litepod-16. In the names of some chips, the number
# counts cores, and a chip has two: https://cloud.google.com/tpu/docs/supported-tpu-configurations
_CLOUD_NAME: Final = re.compile(r"([A-Za-z0-9]+)-([0-9]{1,6})")
_CLOUD_CHIPS: Final = {"v5litepod": "v5e"}
_COUNTED_IN_CORES: Final = frozenset({"v4", "v5p"})
_NEAREST = 3  # number of slices that an error proposes
_TOPOLOGY = re.compile(
    r"(?:([0-9]{1,4})x)?([A-Za-z][A-Za-z0-9_-]*):([0-9]{1,4}(?:x[0-9]{1,4}){0,3})(?:@([a-z]+))?"
)
_MOST_DOMAINS: Final = 4096  # largest number of domains to try for a program


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A kind of accelerator.

    Attributes:
      name: Its name, such as `v5p`.
      dims: Number of dimensions of its interconnect.
      devices: Number of devices that JAX sees per chip.
      shapes: Shapes of the small slices, which are not made of cubes.
      cube: Length of the side of a cube. All sides of a large slice are multiples of this length. 0
        if large slices are not made of cubes.
      longest: Longest side of a slice.
      most_chips: Number of chips of the largest slice.
      wraps: A side is a ring if its length is a multiple of this number.
      flops: bfloat16 operations per second of one device, at peak.
      fp8_flops: float8 operations per second of one device, at peak.
      f32_flops: float32 operations per second of one device, at JAX's default precision.
      hbm_bytes: Bytes of memory that a program may use on one device.
      hbm_rate: Bytes per second that one device reads or writes in its memory.
      link_rates: Range of the rate of one link in one direction, in bytes per second. If a chip is
        several devices, this is the share of one device.
      dcn_rate: Bytes per second that one device sends to other slices or domains; 0 if that is not
        known.
      sources: Key of `hardware.toml` -> source and date of its value.
      domain: Largest number of GPUs that NVLink, Infinity Fabric or PCIe joins. 0 for TPUs.
      links: Links of one device inside a domain.
      nvlink: Whether the links of a domain are faster than PCIe.
      switched: Whether a switch lets each pair of devices use all links.
      switch_sums: Whether the switch computes the sums of all-reduces in a domain (NVLink SHARP).
      pool_share: Share of the device's memory that JAX allocates as a pool. The pool has
        `hbm_bytes`.
      workspace: Bytes of the pool that XLA gives to cuBLAS.
      networks: Network between domains -> bytes per second that one device sends over it.
      host_rate: Bytes per second between a device and its host, one way; 0 if that is not known.
      host_bytes: Bytes of the host's memory for each device; 0 if that is not known.
    """

    name: str
    dims: int
    devices: int
    shapes: tuple[SliceShape, ...]
    cube: int
    longest: int
    most_chips: int
    wraps: int
    flops: float
    fp8_flops: float
    f32_flops: float
    hbm_bytes: int
    hbm_rate: float
    link_rates: tuple[float, float]
    dcn_rate: float
    sources: Mapping[str, str]
    domain: int = 0
    links: int = 1
    nvlink: bool = False
    switched: bool = False
    switch_sums: bool = False
    pool_share: float = 1.0
    workspace: int = 0
    networks: Mapping[str, float] = dataclasses.field(default_factory=dict)
    host_rate: float = 0.0
    host_bytes: int = 0

    def slices(self) -> Iterator[SliceShape]:
        """Yield the shapes of all slices. For GPUs, yield each number of devices of a domain."""
        yield from self.shapes
        if not self.cube:
            return
        sides = range(self.cube, self.longest + 1, self.cube)
        # Sides in ascending order, as slices are sold: 4x4x8, and not 8x4x4.
        for shape in itertools.combinations_with_replacement(sides, self.dims):
            if math.prod(shape) <= self.most_chips:
                yield shape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Slices of TPUs, or domains of GPUs.

    Attributes:
      chip: Kind of the chips.
      shape: Chips along each side; for GPUs, the number of devices in a domain.
      slices: Number of such slices or domains.
      crossing: The part of each mesh axis that crosses slices, as `dcn` of a mesh. If it is empty,
        `default_dcn` splits pp, dp or fsdp over the slices.
      network: Name of the network between domains, if the text of the topology gives one.
    """

    chip: Chip
    shape: SliceShape
    slices: int = 1
    crossing: Mapping[str, int] = dataclasses.field(default_factory=dict)
    network: str = ""

    @property
    def devices(self) -> int:
        """Number of devices of all slices."""
        return math.prod(self.shape) * self.chip.devices * self.slices

    @property
    def platform(self) -> str:
        """The platform whose kernels run on the chips, `tpu` or `gpu`."""
        return "gpu" if self.chip.domain else "tpu"

    @property
    def group(self) -> str:
        """The word for devices that fast links join: `slice` of TPUs, `domain` of GPUs."""
        return "domain" if self.chip.domain else "slice"

    @property
    def sides(self) -> dict[str, int]:
        """Length of each physical axis: x, y, z, and `core` if a chip is several devices."""
        if self.chip.domain:
            return {"gpus": self.shape[0]}
        sides = dict(zip("xyzw", self.shape, strict=False))
        return sides if self.chip.devices == 1 else {**sides, "core": self.chip.devices}

    def is_ring(self, side: str) -> bool:
        """Tell whether the links along a side wrap around.

        In a 3D slice, the links wrap around along all sides or along none.
        """
        # Optical switches join the faces of 4x4x4 cubes. Smaller 3D slices have no rings.
        lengths = self.shape if len(self.shape) > 2 else (self.sides[side],)
        if self.chip.domain:
            return False
        return side != "core" and all(length % self.chip.wraps == 0 for length in lengths)

    def __str__(self) -> str:
        count = "" if self.slices == 1 else f"{self.slices}x"
        network = f"@{self.network}" if self.network else ""
        return f"{count}{self.chip.name}:{'x'.join(map(str, self.shape))}{network}"


def read_hardware(overlay: str | None = None) -> dict[str, Chip]:
    """Return the known chips by name.

    Args:
      overlay: A TOML file in the format of `hardware.toml`. Its values replace those of the
        package, and it may add chips.

    Raises:
      StrategyError: The file cannot be read, or has problems. The error lists all of them.
    """
    own = importlib.resources.files("shardwright.plan") / "hardware.toml"
    data: dict[str, Any] = tomllib.loads(own.read_text(encoding="utf-8"))
    source = "hardware.toml"
    if overlay is not None:
        source = Path(overlay).name
        for name, cells in _read_overlay(overlay).items():
            # A user's file replaces single keys, so it may have only the keys that differ.
            data[name] = {**data.get(name, {}), **cells}
    problems: list[Problem] = []
    for name, cells in data.items():
        problems += [
            Problem(
                error=StrategyError,
                what=what,
                path=f"{source} {name}.{key}".removesuffix("."),
                fix=fix,
            )
            for key, what, fix in _faults(cells)
        ]
    raise_problems(problems)
    return {name: _chip(name, cells) for name, cells in data.items()}


def _read_overlay(name: str) -> dict[str, Any]:
    try:
        data = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        what = f"cannot read {name!r}: {(error.strerror or str(error)).lower()}"
        raise StrategyError(what, fix="check the path and its permissions") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        what = f"{Path(name).name} is not TOML: {error}"
        raise StrategyError(what, fix="write one table per chip, such as [v5p]") from error
    for chip, cells in data.items():
        if not isinstance(cells, dict):
            what = f"{Path(name).name}: {chip!r} is not a table"
            raise StrategyError(what, fix="write one table per chip, such as [v5p]")
    return data


def _keys(cells: Mapping[str, Any]) -> _Keys:
    return _DOMAINS if "domain" in cells else _SLICES


def _faults(cells: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (key, what, fix) for each fault of one chip."""
    keys = _keys(cells)
    known = (*keys.required, *keys.optional)
    for key in cells:
        if key not in known:
            yield key, "is unknown", did_you_mean(key, known) or f"keys are {', '.join(known)}"
    missing = [key for key in keys.required if key not in cells]
    if missing:
        fix = "a new chip needs every key; the page on plans has an example that explains them"
        yield "", f"lacks {', '.join(missing)}", fix
    for key in keys.flags:
        if type(cells.get(key, True)) is not bool:
            yield key, f"{cells[key]!r} is not true or false", f"write {key} = true"
    for key in keys.numbers:
        value = cells.get(key, 1)
        # `isinstance` would take True for an integer. `cube` may be 0, if all slices are listed.
        if type(value) is not int or value < (key != "cube"):
            yield key, f"{value!r} is not a positive integer", f"write {key} = 4"
    shapes = cells.get("shapes", [])
    if not isinstance(shapes, list) or not all(
        isinstance(text, str) and re.fullmatch(r"[0-9]{1,4}(x[0-9]{1,4}){0,3}", text)
        for text in shapes
    ):
        yield "shapes", f"{shapes!r} is not a list of shapes", 'write shapes = ["2x2", "2x4"]'
    for key in (*keys.cells, *keys.optional):
        if key not in cells:
            continue
        numbers = ("low", "high") if key == "link_gbps" else ("value",)
        cell = cells[key]
        # A number without source and date is refused, because nobody could check it.
        if not isinstance(cell, dict) or set(cell) != {*numbers, "source", "date"}:
            example = ", ".join(f"{number} = 100" for number in numbers)
            fix = f'write {key} = {{ {example}, source = "where", date = "2026-01-31" }}'
            what = f"{cell!r} is not a table of {', '.join((*numbers, 'source', 'date'))}"
            yield key, what, fix
        elif not all(type(cell[each]) in (int, float) and cell[each] > 0 for each in numbers):
            yield (
                key,
                f"{cell!r} has a value that is not a positive number",
                "write a positive number",
            )


def _chip(name: str, cells: Mapping[str, Any]) -> Chip:
    keys = _keys(cells)
    devices = cells.get("devices_per_chip", 1)
    link = cells["link_gbps"]

    def rate(key: str, scale: float, default: float = 0.0) -> float:
        """Return the rate of one device, from the file's rate of the whole chip."""
        return cells[key]["value"] * scale / devices if key in cells else default

    flops = rate("bf16_tflops", 1e12)
    share = cells.get("pool_share", {"value": 1.0})["value"]
    # Memory is in GiB, of 2**30 bytes, and rates are in GB/s, of 10**9, as vendors state them.
    networks = {key.removesuffix("_gbps"): rate(key, 1e9) for key in cells if key in _NETWORKS}
    # GPUs: a domain, such as 8 GPUs on NVLink, is one side of 1 to `domain` devices.
    most = cells.get("domain", 0)
    shapes = cells.get("shapes", [str(count) for count in range(1, most + 1)])
    return Chip(
        name=name,
        dims=cells.get("dims", 1),
        devices=devices,
        shapes=tuple(_sides(text) for text in shapes),
        cube=cells.get("cube", 0),
        longest=cells.get("longest", most),
        most_chips=cells.get("most_chips", most),
        wraps=cells.get("wraps", 1),
        flops=flops,
        fp8_flops=rate("fp8_tflops", 1e12, flops),
        f32_flops=rate("f32_tflops", 1e12, flops),
        # `hbm_gib` in the file is per device, and the rates are per chip.
        hbm_bytes=int(cells["hbm_gib"]["value"] * share * 2**30),
        hbm_rate=rate("hbm_gbps", 1e9),
        link_rates=(link["low"] * 1e9 / devices, link["high"] * 1e9 / devices),
        # The first network of the table is the default.
        dcn_rate=next(iter(networks.values()), rate("dcn_gbps", 1e9)),
        sources={
            key: f"{cells[key]['source']}, {cells[key]['date']}"
            for key in (*keys.cells, *keys.optional)
            if key in cells
        },
        domain=most,
        links=cells.get("links", 1),
        nvlink=cells.get("nvlink", False),
        switched=cells.get("switched", False),
        switch_sums=cells.get("switch_sums", False),
        pool_share=share,
        workspace=int(cells.get("workspace_mib", {"value": 0})["value"] * 2**20),
        networks=networks,
        host_rate=rate("host_gbps", 1e9),
        host_bytes=int(rate("host_gib", 2**30)),
    )


def _sides(text: str) -> SliceShape:
    return tuple(int(side) for side in text.split("x"))


def parse_topology(text: str, hardware: Mapping[str, Chip]) -> Topology:
    """Return the slice that text such as `v5p:4x4x4` names.

    Raises:
      MeshSpecError: There is no such chip or slice. The error names the nearest slices.
    """
    match = _TOPOLOGY.fullmatch(text.strip())
    if match is None:
        raise MeshSpecError(
            f"{text!r:.80} is not a topology",
            fix=_shapes_of_name(text.strip(), hardware)
            or "write a chip and its slice: v5p:4x4x4, or 2xv5p:4x4x4 for two slices; for GPUs, "
            "the domains (hosts, or racks of an NVL72) and the GPUs of each: 16xh100:8",
        )
    chip = hardware.get(match[2])
    if chip is None:
        hint = did_you_mean(match[2], hardware)
        known = f"chips are {', '.join(hardware)}"
        raise MeshSpecError(f"no chip {match[2]!r}", fix=f"{hint} {known}".strip())
    shape = _sides(match[3])
    slices = list(chip.slices())
    group = "domain" if chip.domain else "slice"
    if chip.domain and shape not in slices:
        raise MeshSpecError(
            f"{chip.name} has domains of 1 to {chip.domain} GPUs, got {match[3]}",
            fix=f"write {chip.name}:{chip.domain}; for more GPUs, write the number of domains "
            f"first: 2x{chip.name}:{chip.domain}",
        )
    if shape not in slices:
        nearest = sorted(slices, key=lambda known: _distance(known, shape))[:_NEAREST]
        names = ", ".join("x".join(map(str, known)) for known in nearest)
        raise MeshSpecError(
            f"{chip.name} has no slice {match[3]}", fix=f"the nearest slices are {names}"
        )
    count = int(match[1] or 1)
    if count < 1:
        raise MeshSpecError(f"{text!r:.80} has no {group}", fix=f"write 2x{match[2]}:{match[3]}")
    network = match[4] or ""
    if network and network not in chip.networks:
        known = ", ".join(chip.networks) or "none"
        raise MeshSpecError(
            f"{chip.name} has no network {network!r}", fix=f"its networks are {known}"
        )
    if network:
        chip = dataclasses.replace(chip, dcn_rate=chip.networks[network])
    if count > 1 and not chip.dcn_rate:
        key = _NETWORKS[0] if chip.domain else "dcn_gbps"
        raise MeshSpecError(
            f"the rate between {group}s of {chip.name} is not known",
            fix=f"give [{chip.name}] a {key} in a file of --hardware, or plan one {group}",
        )
    return Topology(chip=chip, shape=shape, slices=count, network=network)


def _shapes_of_name(text: str, hardware: Mapping[str, Chip]) -> str:
    """Return the fix for a topology that is written as a cloud names it (`v5p-32`), or ""."""
    match = _CLOUD_NAME.fullmatch(text)
    chip = None if match is None else hardware.get(_CLOUD_CHIPS.get(match[1], match[1]))
    if match is None or chip is None:
        return ""
    chips = int(match[2]) // (2 if match[1] in _COUNTED_IN_CORES else 1)
    found = [Topology(chip=chip, shape=each) for each in chip.slices() if math.prod(each) == chips]
    if chip.domain and not found and chips % chip.domain == 0:
        found = [Topology(chip=chip, shape=(chip.domain,), slices=chips // chip.domain)]
    if not found:
        return "" if chip.domain else f"{text} has {chips} chips, and {chip.name} has no such slice"
    unit = f"{chips} {'GPU' if chip.domain else 'chip'}{'s' if chips > 1 else ''}"
    return f"{text} has {unit}: write {' or '.join(map(str, found[:_NEAREST]))}"


def smallest_slice(chip: Chip, needed: int) -> Topology | None:
    """Return the smallest slice, or number of domains, whose memory holds `needed` bytes.

    Returns:
      None if the largest slice is too small.
    """
    large = [each for each in all_topologies(chip) if each.devices * chip.hbm_bytes >= needed]
    return min(large, key=lambda each: (each.devices, each.shape), default=None)


def all_topologies(chip: Chip) -> Iterator[Topology]:
    """Yield all slices of a chip; for GPUs, the parts of a domain, then 2, 4, 8... domains."""
    for shape in chip.slices():
        if not chip.domain or chip.domain % shape[0] == 0:
            yield Topology(chip=chip, shape=shape)
    count = 2
    while chip.domain and chip.dcn_rate and count <= _MOST_DOMAINS:
        yield Topology(chip=chip, shape=(chip.domain,), slices=count)
        count *= 2


def _distance(known: SliceShape, wanted: SliceShape) -> tuple[float, int]:
    """Return a distance between two slices: first by the number of chips, then by the sides."""
    chips = math.prod(known) / max(1, math.prod(wanted))
    pairs = itertools.zip_longest(sorted(known), sorted(wanted), fillvalue=1)
    # Take the logarithm, so that half as many chips are as near as twice as many.
    return abs(math.log(chips)), sum(abs(a - b) for a, b in pairs)
