"""Read chips and slices: their rates, usable memory and shapes.

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
_NUMBERS: Final = ("dims", "devices_per_chip", "cube", "longest", "most_chips", "wraps")
_OPTIONAL: Final = ("dcn_gbps",)
_KEYS: Final = (*_NUMBERS, "shapes", *_CELLS, *_OPTIONAL)
# Names of slices in Google Cloud, such as v5litepod-16. Some of them count the cores of the chips,
# which are two per chip: https://cloud.google.com/tpu/docs/supported-tpu-configurations
_CLOUD_NAME: Final = re.compile(r"([A-Za-z0-9]+)-([0-9]{1,6})")
_CLOUD_CHIPS: Final = {"v5litepod": "v5e"}
_COUNTED_IN_CORES: Final = frozenset({"v4", "v5p"})
_NEAREST = 3  # number of slices that an error proposes
_TOPOLOGY = re.compile(
    r"(?:([0-9]{1,4})x)?([A-Za-z][A-Za-z0-9_-]*):([0-9]{1,4}(?:x[0-9]{1,4}){0,3})"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A kind of accelerator.

    Attributes:
      name: Its name, such as `v5p`.
      dims: Number of dimensions of its interconnect.
      devices: Number of devices that JAX sees per chip.
      shapes: Shapes of the small slices, which are not made of cubes.
      cube: Length of the side of a cube. All sides of a large slice are multiples of it. 0 if there
        are no such slices.
      longest: Longest side of a slice.
      most_chips: Number of chips of the largest slice.
      wraps: A side is a ring if its length is a multiple of this number.
      flops: bfloat16 operations per second of one device, at peak.
      hbm_bytes: Bytes of memory that a program may use on one device.
      hbm_rate: Bytes per second that one device reads or writes in its memory.
      link_rates: Lowest and highest bytes per second of one link in one direction, per device.
      dcn_rate: Bytes per second that one device sends to other slices; 0 if that is not known.
      sources: Key of `hardware.toml` -> source and date of its value.
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
    hbm_bytes: int
    hbm_rate: float
    link_rates: tuple[float, float]
    dcn_rate: float
    sources: Mapping[str, str]

    def slices(self) -> Iterator[SliceShape]:
        """Yield the shapes of all slices."""
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
    """A slice of chips.

    Attributes:
      chip: Kind of the chips.
      shape: Chips along each side.
      slices: Number of such slices.
      crossing: The part of each mesh axis that crosses slices, as `dcn` of a mesh. Empty means that
        the slices split the first of pp, dp and fsdp that they can.
    """

    chip: Chip
    shape: SliceShape
    slices: int = 1
    crossing: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def devices(self) -> int:
        """Number of devices of all slices."""
        return math.prod(self.shape) * self.chip.devices * self.slices

    @property
    def platform(self) -> str:
        """The platform whose kernels run on the chips. All chips are TPUs."""
        return "tpu"

    @property
    def sides(self) -> dict[str, int]:
        """Length of each physical axis: x, y, z, and `core` if a chip is several devices."""
        sides = dict(zip("xyzw", self.shape, strict=False))
        return sides if self.chip.devices == 1 else {**sides, "core": self.chip.devices}

    def is_ring(self, side: str) -> bool:
        """Tell whether the links along a side wrap around. In a 3D slice, all sides do or none."""
        # Optical switches join the faces of 4x4x4 cubes. Smaller 3D slices have no rings.
        lengths = self.shape if len(self.shape) > 2 else (self.sides[side],)
        return side != "core" and all(length % self.chip.wraps == 0 for length in lengths)

    def __str__(self) -> str:
        count = "" if self.slices == 1 else f"{self.slices}x"
        return f"{count}{self.chip.name}:{'x'.join(map(str, self.shape))}"


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
            # Key by key, so that the file of a user may name only what differs.
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


def _faults(cells: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (key, what, fix) for each fault of one chip."""
    for key in cells:
        if key not in _KEYS:
            yield key, "is unknown", did_you_mean(key, _KEYS) or f"keys are {', '.join(_KEYS)}"
    missing = [key for key in _KEYS if key not in cells and key not in _OPTIONAL]
    if missing:
        fix = "a new chip needs every key; the page on plans has an example that explains them"
        yield "", f"lacks {', '.join(missing)}", fix
    for key in _NUMBERS:
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
    for key in (*_CELLS, *_OPTIONAL):
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
    devices = cells["devices_per_chip"]
    link = cells["link_gbps"]
    return Chip(
        name=name,
        dims=cells["dims"],
        devices=devices,
        shapes=tuple(_sides(text) for text in cells["shapes"]),
        cube=cells["cube"],
        longest=cells["longest"],
        most_chips=cells["most_chips"],
        wraps=cells["wraps"],
        # The file has the rates of a chip, and the memory of a device.
        flops=cells["bf16_tflops"]["value"] * 1e12 / devices,
        # Memory is in GiB, of 2**30 bytes, and rates are in GB/s, of 10**9, as vendors state them.
        hbm_bytes=int(cells["hbm_gib"]["value"] * 2**30),
        hbm_rate=cells["hbm_gbps"]["value"] * 1e9 / devices,
        link_rates=(link["low"] * 1e9 / devices, link["high"] * 1e9 / devices),
        dcn_rate=cells.get("dcn_gbps", {"value": 0})["value"] * 1e9 / devices,
        sources={
            key: f"{cells[key]['source']}, {cells[key]['date']}"
            for key in (*_CELLS, *_OPTIONAL)
            if key in cells
        },
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
            or "write a chip and its slice: v5p:4x4x4, or 2xv5p:4x4x4 for two slices",
        )
    chip = hardware.get(match[2])
    if chip is None:
        hint = did_you_mean(match[2], hardware)
        known = f"chips are {', '.join(hardware)}"
        raise MeshSpecError(f"no chip {match[2]!r}", fix=f"{hint} {known}".strip())
    shape = _sides(match[3])
    slices = list(chip.slices())
    if shape not in slices:
        nearest = sorted(slices, key=lambda known: _distance(known, shape))[:_NEAREST]
        names = ", ".join("x".join(map(str, known)) for known in nearest)
        raise MeshSpecError(
            f"{chip.name} has no slice {match[3]}", fix=f"the nearest slices are {names}"
        )
    count = int(match[1] or 1)
    if count < 1:
        raise MeshSpecError(f"{text!r:.80} has no slice", fix=f"write 2x{match[2]}:{match[3]}")
    if count > 1 and not chip.dcn_rate:
        raise MeshSpecError(
            f"the rate between slices of {chip.name} is not known",
            fix=f"give [{chip.name}] a dcn_gbps in a file of --hardware, or plan one slice",
        )
    return Topology(chip=chip, shape=shape, slices=count)


def _shapes_of_name(text: str, hardware: Mapping[str, Chip]) -> str:
    """Return the slices that a cloud's name such as `v5p-32` stands for, as a fix, or ""."""
    match = _CLOUD_NAME.fullmatch(text)
    chip = None if match is None else hardware.get(_CLOUD_CHIPS.get(match[1], match[1]))
    if match is None or chip is None:
        return ""
    chips = int(match[2]) // (2 if match[1] in _COUNTED_IN_CORES else 1)
    shapes = [shape for shape in chip.slices() if math.prod(shape) == chips]
    if not shapes:
        return f"{text} has {chips} chips, and {chip.name} has no such slice"
    names = [str(Topology(chip=chip, shape=shape)) for shape in shapes[:_NEAREST]]
    unit = "1 chip" if chips == 1 else f"{chips} chips"
    return f"{text} has {unit}: write {' or '.join(names)}"


def smallest_slice(chip: Chip, needed: int) -> Topology | None:
    """Return the slice with the fewest devices whose usable memory holds `needed` bytes.

    Returns:
      None if the largest slice is too small.
    """
    slices = [Topology(chip=chip, shape=shape) for shape in chip.slices()]
    large = [each for each in slices if each.devices * chip.hbm_bytes >= needed]
    return min(large, key=lambda each: (each.devices, each.shape), default=None)


def _distance(known: SliceShape, wanted: SliceShape) -> tuple[float, int]:
    """Return a distance between two slices: first by the number of chips, then by the sides."""
    chips = math.prod(known) / max(1, math.prod(wanted))
    pairs = itertools.zip_longest(sorted(known), sorted(wanted), fillvalue=1)
    # Half as many chips are as far away as twice as many.
    return abs(math.log(chips)), sum(abs(a - b) for a, b in pairs)
