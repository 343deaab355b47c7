"""The space of a search: strategies, meshes of a slice, orders of mesh axes, settings of rules."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax

from shardwright.errors import MeshSpecError, ShardingError, StrategyError
from shardwright.plan.planner import Program
from shardwright.plan.search.settings import MESH, Settings, check_overrides, with_settings
from shardwright.vocabulary.annotations import is_annotation
from shardwright.vocabulary.axes import EXPERT
from shardwright.vocabulary.modes import MODE_TRAIN

if TYPE_CHECKING:
    from shardwright.strategy.model import Strategy

# On meshes with axes of size 1, these presets also give plain data parallelism, FSDP or TP.
TRAIN: Final = ("fsdp_tp", "fsdp_tp_sp")
SERVE: Final = ("serve_tp", "serve_long_context")
EXPERTS: Final = "moe_ep"
MOST: Final = 20_000  # largest number of candidates; to judge so many takes two to three minutes


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Return the mesh axes of size > 1 as text."""
    return ",".join(f"{axis}:{size}" for axis, size in sizes.items() if size > 1) or "one device"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One candidate of a space.

    Attributes:
      name: Name of the strategy that it comes from.
      settings: Settings of that strategy that the candidate changes.
      sizes: Size of each mesh axis, in mesh order.
    """

    name: str
    settings: Settings
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        settings = ", ".join(f'{key} = "{text}"' for key, text in self.settings.items())
        return f"{self.name} on {mesh_text(self.sizes)}{' with ' if settings else ''}{settings}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The choices of a search.

    Attributes:
      strategies: Name -> strategy with a `[mesh]`.
      devices: Number of devices.
      axes: Mesh axes that may have a size above 1, or None for all.
      pins: Settings that every candidate has. `mesh.tp` is the size of a mesh axis.
      vary: Settings with their alternatives. None keeps the setting of the strategy. A pin of the
        same setting replaces the alternatives.
      orders: Whether to try every order of the mesh axes of size > 1.
      modes: Modes of the programs, in which the settings must apply.
    """

    strategies: Mapping[str, Strategy]
    devices: int
    axes: Sequence[str] | None = None
    pins: Settings = dataclasses.field(default_factory=dict)
    vary: Mapping[str, Sequence[str | None]] = dataclasses.field(default_factory=dict)
    orders: bool = False
    modes: Sequence[str] = ()

    @property
    def fixed_axes(self) -> tuple[str, ...]:
        """Mesh axes of the strategies that have size 1 because `axes` leaves them out."""
        known = dict.fromkeys(axis for each in self.strategies.values() for axis in each.mesh)
        axes = known if self.axes is None else self.axes
        return tuple(axis for axis in known if axis not in axes)

    def points(self) -> list[Point]:
        """Return every candidate, always in the same order.

        Raises:
          MeshSpecError: `axes` or a pin names a mesh axis that no strategy has, or a pinned size is
            not a number.
          StrategyError: A strategy has no mesh, there is no candidate, or there are too many.
        """
        self._check_axes()
        fixed = {key: text for key, text in self.pins.items() if not key.startswith(MESH)}
        keys = [key for key in self.vary if key not in self.pins]
        chosen = [
            {key: text for key, text in zip(keys, texts, strict=True) if text is not None}
            for texts in self._alternatives(keys)
        ]
        meshes = {
            name: list(self._meshes(name, strategy)) for name, strategy in self.strategies.items()
        }
        own = {name: _that_apply(each, chosen) for name, each in self.strategies.items()}
        # Count the candidates before they are built: there may be millions.
        count = sum(len(each) * len(own[name]) for name, each in meshes.items())
        if not count:
            raise StrategyError(
                "there are no candidates",
                fix="name at least one strategy and one mesh axis, or remove pins",
            )
        if count > MOST:
            raise StrategyError(
                f"there are {count:,} candidates, and a search judges at most {MOST:,}",
                fix='name the mesh axes that may vary, such as axes=("fsdp", "tp"), or vary less',
            )
        return [
            Point(name=name, settings={**settings, **fixed}, sizes=sizes)
            for name, each in meshes.items()
            for settings in own[name]
            for sizes in each
        ]

    def strategy(self, name: str, settings: Settings) -> Strategy:
        """Return a strategy with settings.

        Raises:
          ShardingError: A setting is invalid, does not fit the strategy, or does not apply in every
            mode.
        """
        strategy = with_settings(self.strategies[name], settings)
        check_overrides(name, strategy, settings, self.modes)
        return strategy

    def check_settings(self) -> None:
        """Check the pins in each strategy, and that each alternative fits at least one strategy.

        Otherwise the same error would drop each candidate. An alternative may be valid only beside
        alternatives of other keys of its table: `repeats`, for example, needs a circular pipeline.

        Raises:
          ShardingError: A pin does not fit a strategy, or an alternative fits none.
        """
        pins = {key: text for key, text in self.pins.items() if not key.startswith(MESH)}
        for name in self.strategies:
            self.strategy(name, pins)
        for key, texts in self.vary.items():
            table = key.rpartition(".")[0]
            others = [each for each in self.vary if table and each.rpartition(".")[0] == table]
            for text in texts:
                if text is not None and key not in pins:
                    beside = [
                        dict(zip(others, each, strict=True)) for each in self._alternatives(others)
                    ]
                    tried = [{**each, key: text, **pins} for each in ({}, *beside)]
                    self._check_alternative(tried)

    def _check_alternative(self, tried: Sequence[dict[str, str | None]]) -> None:
        errors: list[ShardingError] = []
        for texts in tried:
            settings = {key: text for key, text in texts.items() if text is not None}
            for name in self.strategies:
                try:
                    self.strategy(name, settings)
                except ShardingError as error:
                    errors.append(error)
                else:
                    return
        raise errors[0]

    def _alternatives(self, keys: Sequence[str]) -> Iterator[tuple[str | None, ...]]:
        # An alternative that is written twice would give equal candidates.
        return itertools.product(*(tuple(dict.fromkeys(self.vary[key])) for key in keys))

    def _check_axes(self) -> None:
        known = {axis: None for strategy in self.strategies.values() for axis in strategy.mesh}
        pinned = [key.removeprefix(MESH) for key in self.pins if key.startswith(MESH)]
        for axis in (*(self.axes or ()), *pinned):
            if axis not in known:
                fix = f"the mesh axes are {', '.join(known)}"
                raise MeshSpecError(f"no strategy has the mesh axis {axis!r}", fix=fix)
        for axis in pinned:
            text = self.pins[MESH + axis]
            if not text.isdecimal() or not int(text):
                what = f"pin {MESH}{axis} = {text!r} is not a positive integer"
                raise MeshSpecError(what, fix=f"write {MESH}{axis} = 4")

    def _meshes(self, name: str, strategy: Strategy) -> Iterator[dict[str, int]]:
        """Yield every mesh of the devices over the axes of a strategy."""
        if not strategy.mesh:
            what = f"strategy {name} has no [mesh]"
            raise StrategyError(what, fix="name its mesh axes in [mesh]")
        vary = [axis for axis in strategy.mesh if self.axes is None or axis in self.axes]
        for split in _splits(self.devices, len(vary)):
            chosen = dict(zip(vary, split, strict=True))
            sizes = {axis: chosen.get(axis, 1) for axis in strategy.mesh}
            if all(self._allows(axis, size) for axis, size in sizes.items()):
                yield from _orders(sizes) if self.orders else [sizes]

    def _allows(self, axis: str, size: int) -> bool:
        pinned = self.pins.get(MESH + axis)
        return pinned is None or int(pinned) == size


def _that_apply(strategy: Strategy, chosen: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return each combination of settings once.

    If the strategy has no pipeline, the settings of pipelines are left out.
    """
    found: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    for settings in chosen:
        has_pipeline = strategy.pipeline.schedule or "pipeline.schedule" in settings
        own = {
            key: text
            for key, text in settings.items()
            if has_pipeline or not key.startswith("pipeline.")
        }
        found.setdefault(tuple(own.items()), own)
    return [*found.values()]


def _orders(sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield a mesh with its axes of size > 1 in every order, the given one first."""
    large = [axis for axis, size in sizes.items() if size > 1]
    for order in itertools.permutations(large):
        places = iter(order)
        # Axes of size 1 stay in place. They use no links, so moving them would repeat a candidate.
        names = [next(places) if size > 1 else axis for axis, size in sizes.items()]
        yield {axis: sizes[axis] for axis in names}


def _splits(devices: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write a number as a product of `parts` factors, in a fixed order."""
    if parts == 0:
        if devices == 1:
            yield ()
        return
    for first in range(1, devices + 1):
        if devices % first == 0:
            for rest in _splits(devices // first, parts - 1):
                yield (first, *rest)


def default_strategies(programs: Mapping[str, Program]) -> dict[str, Strategy]:
    """Return the presets that suit programs: name -> strategy.

    Args:
      programs: Mode -> program. All of them share a strategy.
    """
    from shardwright.strategy.model import Strategy

    names = [*(TRAIN if MODE_TRAIN in programs else SERVE)]
    if MODE_TRAIN in programs and any(
        _names_experts(getattr(leaf, "axes", leaf))
        for program in programs.values()
        for leaf in jax.tree.leaves(program.specs, is_leaf=is_annotation)
    ):
        names.append(EXPERTS)
    return {name: Strategy.preset(name) for name in names}


def _names_experts(axes: Any) -> bool:
    if isinstance(axes, (tuple, list)):
        return any(map(_names_experts, axes))
    return bool(axes == EXPERT)
