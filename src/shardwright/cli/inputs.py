"""Read values of the command line: axes, shapes, strategies, meshes."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax.sharding import AbstractMesh

from shardwright.errors import MeshSpecError, StrategyError, did_you_mean
from shardwright.manager.manager import PartitionManager
from shardwright.mesh.build import (
    INFER,
    MeshSpec,
    abstract_mesh,
    mesh_sizes,
    parse_mesh,
    resolve_sizes,
)
from shardwright.strategy.files import file_to_edit, strategy_names
from shardwright.strategy.limits import MOST_ELEMENTS, has_too_many_elements
from shardwright.vocabulary.annotations import stacked
from shardwright.vocabulary.axes import EMPTY, canonical_axis
from shardwright.vocabulary.layouts import LAYOUTS
from shardwright.vocabulary.merged_dims import merged

# `--help`, `presets` and `schema` read no slice, so they need not wait for the import of `plan`.
if TYPE_CHECKING:
    from shardwright.plan.hardware import Topology

_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# `(?(1)\))` requires the closing parenthesis exactly if `stacked(` opened one.
_LAYOUT = re.compile(r"(stacked\()?([A-Za-z]+)(\.bias)?(?(1)\))")
_FIX = (
    "write axes such as BATCH QUERY_LENGTH EMBED, _ for a dim that is not sharded, "
    "DP+FSDP, KV_HEAD:8*KV_HEAD_DIM:128, or a layout"
)


def read_axes(words: Sequence[str]) -> Any:
    """Return the annotation that words spell: one word per dim, or the name of a layout.

    Raises:
      StrategyError: A word is not a dim or a layout, or the words are empty text.

    >>> read_axes(["BATCH", "_", "dp+fsdp"])
    ('__BATCH__', '_', ('__DATA_PARALLEL__', '__FULLY_SHARDED_DATA_PARALLEL__'))
    """
    # A comma separates words like a space, so `BATCH,LENGTH` is two words.
    dims = [word for text in words for word in text.replace(",", " ").split()]
    if dims == ["()"]:
        return ()
    # Empty text is probably an unset shell variable. No words at all (`axes = []` in a file) mean a
    # scalar.
    if words and not dims:
        fix = "write (), for a scalar, or axes such as BATCH QUERY_LENGTH EMBED"
        raise StrategyError("the axes are empty text", fix=fix)
    layout = _layout(dims[0]) if len(dims) == 1 else None
    return layout if layout is not None else tuple(_dim(word) for word in dims)


def _layout(word: str) -> Any:
    match = _LAYOUT.fullmatch(word)
    if match is None or match[2] not in LAYOUTS:
        # Axes are all in upper or all in lower case, and layouts are in mixed case. So `Columnwise`
        # is a misspelled layout.
        if word.isupper() or word.islower():
            return None
        hint = did_you_mean(match[2] if match else word, LAYOUTS)
        if hint:
            raise StrategyError(f"no layout {word!r}", fix=hint)
        return None
    layout: Any = LAYOUTS[match[2]]
    if match[3]:
        if layout.bias is None:
            named = ", ".join(
                f"{name}.bias" for name, known in LAYOUTS.items() if known.bias is not None
            )
            raise StrategyError(f"layout {match[2]} has no bias", fix=f"biases are {named}")
        layout = layout.bias
    return stacked(layout) if match[1] else layout


def _dim(word: str) -> Any:
    if word in (EMPTY, "EMPTY"):
        return EMPTY
    if ":" in word or "*" in word:
        members = []
        for part in word.split("*"):
            name, _, size = part.partition(":")
            count = _whole(size)
            if not _AXIS.fullmatch(name) or not count:
                fix = "write a merged dim as KV_HEAD:8*KV_HEAD_DIM:128"
                raise StrategyError(f"{word!r}: {part!r} is not AXIS:SIZE", fix=fix)
            members.append((canonical_axis(name), count))
        return merged(*members)
    names = word.split("+")
    for name in names:
        if not _AXIS.fullmatch(name):
            raise StrategyError(f"{word!r} is not a dim", fix=_FIX)
    axes = tuple(EMPTY if name in (EMPTY, "EMPTY") else canonical_axis(name) for name in names)
    return axes if len(axes) > 1 else axes[0]


def read_shape(text: str) -> tuple[int, ...]:
    """Return the shape that text such as `16,4096` spells; `()` for a scalar. An argparse type.

    Raises:
      argparse.ArgumentTypeError: The text is not a shape.
    """
    if text.strip() == "()":
        return ()
    # `16x4096` is valid too, because tables print shapes in this way.
    parts = [part.strip() for part in re.split(r"[,x]", text)]
    sizes = [size for part in parts if (size := _whole(part)) is not None]
    if len(sizes) < len(parts):
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is not a shape; write the sizes with commas, such as 16,4096,4096"
        )
    if has_too_many_elements(sizes):
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} has too many elements; write sizes whose product is < 2^63"
        )
    return tuple(sizes)


def _whole(text: str) -> int | None:
    """Return the integer that a text spells, or None if it cannot be the size of a dim."""
    # 2**63 has 19 digits. `int` raises an error for a very long text.
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) > MOST_ELEMENTS:
        return None
    return int(text)


def read_count(text: str) -> int:
    """Return a positive integer. An argparse type.

    Raises:
      argparse.ArgumentTypeError: The text is not a positive integer.
    """
    count = _whole(text)
    if count is None or count < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a positive integer")
    return count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A manager on an abstract mesh, its strategy, and the strategy's name on the command line."""

    manager: PartitionManager
    strategy: str
    combined: Any
    dcn: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def on(self, topology: Topology) -> Topology:
        """Return a topology that has, for each mesh axis, the number of slices that it crosses."""
        # A mesh axis whose size in `dcn` is 1 stays within a slice.
        crossing = {axis: part for axis, part in self.dcn.items() if part > 1}
        return dataclasses.replace(topology, crossing=crossing)

    @property
    def file(self) -> str:
        """The name of the file in which the user changes rules."""
        return file_to_edit(self.combined.name, self.combined.source())

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each mesh axis."""
        return mesh_sizes(self.manager.mesh)

    def __str__(self) -> str:
        sizes = ",".join(f"{name}:{size}" for name, size in self.sizes.items())
        count = self.manager.mesh.size
        return f"strategy {self.strategy} on {sizes} ({count} device{'' if count == 1 else 's'})"


def read_setting(strategy: str, *, mesh: str | None, devices: int | None) -> Setting:
    """Load a strategy and put it on a mesh without devices.

    Args:
      strategy: `fsdp_tp`, `mine.toml`, or `fsdp_tp | mine.toml` for an overlay.
      mesh: Text such as `dp:2,tp:4`. Defaults to the strategy's own.
      devices: Number of devices, from which a size of -1 is computed.

    Raises:
      ShardingError: A strategy or a mesh cannot be read, or they do not fit each other.
    """
    return make_setting(*read_strategy(strategy), mesh=mesh, devices=devices)


def make_setting(combined: Any, label: str, *, mesh: str | None, devices: int | None) -> Setting:
    """Put a loaded strategy on a mesh without devices, as `read_setting` does.

    Raises:
      ShardingError: A mesh cannot be read, or the strategy does not fit it.
    """
    manager = PartitionManager(combined, mesh=read_mesh(combined, label, mesh, devices))
    dcn = dict(combined.dcn)
    if mesh is not None:
        # `mesh` replaces `[mesh]` and `[dcn]` of the strategy. `zip` is not strict, because
        # `spec.dcn` is empty if the mesh has only one slice.
        spec = parse_mesh(mesh)
        dcn = dict(zip(spec.names, spec.dcn, strict=False))
    return Setting(manager=manager, strategy=label, combined=combined, dcn=dcn)


def read_slice(name: str | None, hardware: str | None) -> Topology | None:
    """Return the slice of `--topology`, with the chips of `--hardware`. None without `--topology`.

    Raises:
      ShardingError: There is no such slice, or `--hardware` is given without `--topology`.
    """
    if name is not None:
        from shardwright.plan.hardware import parse_topology, read_hardware

        return parse_topology(name, read_hardware(hardware))
    if hardware is not None:
        what = "--hardware describes chips, but no --topology is given"
        raise StrategyError(what, fix="add --topology v5p:4x4x4, or 2xh100:8 for GPUs")
    return None


def read_strategy(text: str) -> tuple[Any, str]:
    """Load a strategy, or an overlay of several. Return the result and its label.

    Args:
      text: `fsdp_tp`, `mine.toml`, or `fsdp_tp | mine.toml`.

    Raises:
      ShardingError: A strategy cannot be read, or has problems.
    """
    from shardwright.strategy.model import Strategy

    names = strategy_names(text)
    for name in names:
        # A mesh written with a space becomes two words: `--mesh dp:2 tp:4`.
        if re.fullmatch(r"\w+:-?\d+", name):
            fix = f"a mesh is one word, its axes joined by commas: --mesh dp:2,{name}"
            raise StrategyError(f"{name!r} is not a strategy", fix=fix)
    return Strategy.read(text), strategy_label(text)


def strategy_label(text: str) -> str:
    """Return the names of a strategy and its overlays as reports show them, without folders."""
    label = " | ".join(map(os.path.basename, strategy_names(text)))
    # File names may have bytes that are not UTF-8, so escape these bytes.
    return label.encode("utf-8", "backslashreplace").decode("utf-8")


def read_mesh_text(strategy: Any, text: str | None, devices: int | None) -> MeshSpec | None:
    """Return the mesh that a text describes.

    Without a text, return the strategy's own mesh, or None if the strategy has no mesh or if the
    number of devices is not given.

    Raises:
      MeshSpecError: The mesh cannot be read, or does not fit the number of devices.
    """
    if text is None and (devices is None or not strategy.mesh):
        return None
    spec = (
        parse_mesh(text)
        if text is not None
        else parse_mesh(dict(strategy.mesh), dcn=dict(strategy.dcn) or None)
    )
    return spec if devices is None else resolve_sizes(spec, devices)


def read_mesh(strategy: Any, label: str, text: str | None, devices: int | None) -> AbstractMesh:
    """Return an abstract mesh: the mesh that a text describes, or else the strategy's own mesh.

    The types of the mesh axes (Auto, Explicit or Manual) are those in the strategy.

    Raises:
      MeshSpecError: The mesh cannot be read, or a size is unknown.
    """
    if text is None and not strategy.mesh:
        raise MeshSpecError(f"strategy {label} has no [mesh]", fix="give a mesh: --mesh dp:2,tp:4")
    source: Any = text if text is not None else dict(strategy.mesh)
    spec = parse_mesh(source)
    # Raise here, because the fix of `abstract_mesh` would name its argument, not `--devices`.
    if devices is None and INFER in spec.sizes:
        where = f" in strategy {label}" if text is None else ""
        name = spec.names[spec.sizes.index(INFER)]
        what = f"mesh axis {name} = -1{where} needs a number of devices"
        raise MeshSpecError(what, fix="add --devices 8, or give all sizes: --mesh dp:2,tp:4")
    types: Any = strategy.axis_types
    if text is not None and not isinstance(types, str):
        # The strategy may give types to mesh axes that the mesh of the text does not have.
        types = {name: each for name, each in types.items() if name in spec.names}
    built = abstract_mesh(source, devices=devices, axis_types=types)
    if built.size > MOST_ELEMENTS:
        raise MeshSpecError(
            "the mesh has too many devices", fix="write sizes whose product is < 2^63"
        )
    return built
