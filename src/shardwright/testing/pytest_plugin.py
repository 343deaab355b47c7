"""The part of the pytest plugin that needs JAX: cases of markers, devices, meshes and cleanup.

The hooks and fixtures are in `shardwright_pytest`, which loads in every pytest run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from shardwright.errors import MeshSpecError, ShardingError, did_you_mean
from shardwright.manager.manager import PartitionManager
from shardwright.mesh.build import INFER, MeshSpec, create_mesh, parse_mesh, resolve_axis_types
from shardwright.testing.ambient import AmbientLeftError, isolated
from shardwright.testing.meshes import USUAL, flagged_devices, requested_devices, try_for_devices
from shardwright.vocabulary.modes import mode_name, parse_mode

_ARGUMENTS = ("axis_types", "strategy", "mode")
_CASE = "_mesh_case"
_EXAMPLE = '@pytest.mark.mesh("dp:2,tp:4")'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshCase:
    """One case of a `mesh` marker.

    Attributes:
      spec: the mesh, or None for the mesh of the strategy.
      axis_types: as in `create_mesh`.
      strategy: the name of a preset, the path of a file from pytest's root, anything that a manager
        takes, or None.
      mode: the mode of the manager, or None.
    """

    spec: MeshSpec | None
    axis_types: Any
    strategy: Any
    mode: str | None

    @property
    def id(self) -> str:
        """The case as part of a test's name: `dp2-tp4-explicit-fsdp_tp-decode`."""
        return "-".join(
            part
            for part in (self._mesh_id(), self._types_id(), self._strategy_id(), self._mode_id())
            if part
        )

    def _mesh_id(self) -> str:
        if self.spec is None:
            return ""
        return "-".join(
            f"{name}{'N' if size == INFER else size}"
            for name, size in zip(self.spec.names, self.spec.sizes, strict=True)
        )

    def _types_id(self) -> str:
        if self.spec is None:
            return ""
        types = dict(
            zip(self.spec.names, resolve_axis_types(self.spec.names, self.axis_types), strict=True)
        )
        explicit = [name for name, kind in types.items() if kind == jax.sharding.AxisType.Explicit]
        return (
            "explicit"
            if len(explicit) == len(types)
            else "".join(f"explicit_{name}" for name in explicit)
        )

    def _strategy_id(self) -> str:
        if isinstance(self.strategy, str | Path):
            return "+".join(Path(name.strip()).stem for name in str(self.strategy).split("|"))
        return "" if self.strategy is None else str(getattr(self.strategy, "name", "") or "rules")

    def _mode_id(self) -> str:
        return "" if self.mode is None else mode_name(self.mode)


def generate(metafunc: pytest.Metafunc) -> None:
    """Make one test for each mesh of the nearest markers.

    Raises:
      Collector.CollectError: a marker cannot be read.
    """
    try:
        cases = [
            case for marker in _nearest_markers(metafunc.definition) for case in cases_of(marker)
        ]
    except ShardingError as error:
        raise pytest.Collector.CollectError(f"{metafunc.definition.nodeid}: {error}") from error
    if cases:
        metafunc.parametrize(_CASE, cases, ids=[case.id for case in cases], indirect=True)


def _nearest_markers(definition: Any) -> list[pytest.Mark]:
    """Return the `mesh` markers of the function, its class or its module, in written order.

    If several of them have markers, only those of the nearest one count.
    """
    marked = list(definition.iter_markers_with_node("mesh"))
    # pytest yields the nearest node first.
    nearest = [mark for node, mark in marked if node is marked[0][0]]
    # Decorators apply from the bottom up, so reverse their order. The `pytestmark` of a module is
    # in order already.
    return nearest if marked and isinstance(marked[0][0], pytest.Module) else nearest[::-1]


def cases_of(marker: pytest.Mark) -> list[MeshCase]:
    """Return the cases of one marker: the product of its axis types, strategies and modes.

    Raises:
      MeshSpecError: the mesh cannot be read, an argument is unknown, or the marker names neither a
        mesh nor a strategy.
      StrategyError: the mode is unknown.
    """
    for name in marker.kwargs:
        if name not in _ARGUMENTS:
            hint = did_you_mean(name, _ARGUMENTS)
            raise MeshSpecError(
                f"the marker mesh has no argument {name!r}",
                fix=f"{hint} it takes {', '.join(_ARGUMENTS)}".strip(),
            )
    strategies = _several(marker.kwargs.get("strategy"))
    if not marker.args and None in strategies:
        raise MeshSpecError(
            "the marker mesh names neither a mesh nor a strategy",
            fix=f"write {_EXAMPLE}, or "
            '@pytest.mark.mesh(strategy="fsdp_tp") for the mesh of the strategy',
        )
    specs: list[MeshSpec | None] = [parse_mesh(text) for text in marker.args] or [None]
    axis_types = _several(marker.kwargs.get("axis_types", "auto"))
    for spec, types in itertools.product(specs, axis_types):
        # Wrong axis types fail here, when tests are collected, and not in each test.
        resolve_axis_types(spec.names if spec else (), types if spec else "auto")
    if not marker.args and "axis_types" in marker.kwargs:
        raise MeshSpecError(
            "axis_types is given without a mesh",
            fix="write the mesh too; a strategy's own mesh has the strategy's axis types",
        )
    modes = [
        None if mode is None else parse_mode(mode) for mode in _several(marker.kwargs.get("mode"))
    ]
    product = itertools.product(specs, axis_types, strategies, modes)
    return [
        MeshCase(spec=spec, axis_types=types, strategy=strategy, mode=mode)
        for spec, types, strategy, mode in product
    ]


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def prepare(requested: int | None) -> None:
    """Request the devices of the session before a backend starts.

    If XLA_FLAGS or `jax_num_cpu_devices` request at least as many devices as the plugin's option,
    they stay as they are.
    """
    already = max(requested_devices(), flagged_devices())
    if requested:
        count = max(requested, already)
    else:
        # A count of 1 is JAX's default, so it does not mean that anybody requested devices.
        count = already if already > 1 else USUAL
    try_for_devices(count)


@contextlib.contextmanager
def placed(
    case: MeshCase, root: Path, *, requested: int | None = None, backend: str = "cpu"
) -> Iterator[Mesh]:
    """Build the mesh of a case for one test, which computes on the devices of that mesh.

    Yields the mesh. If a test leaves a mesh or a manager set, the test fails, and the mesh or
    manager is reset.
    """
    devices = _devices(case, requested, backend)
    try:
        if case.spec is None:
            mesh = _strategy(case.strategy, root).make_mesh(devices=devices)
        else:
            mesh = create_mesh(str(case.spec), devices=devices, axis_types=case.axis_types)
    except ShardingError as error:
        raise _failure(str(error)) from None
    # Place uncommitted arrays on the platform of the mesh, if JAX's default is another platform.
    is_default = devices[0].platform == jax.default_backend()
    place = contextlib.nullcontext() if is_default else jax.default_device(devices[0])
    with nothing_left(), place:
        yield mesh


@contextlib.contextmanager
def managed(case: MeshCase, mesh: Mesh, *, root: Path) -> Iterator[PartitionManager]:
    """Enter a manager with the strategy of a case on a mesh, for one test."""
    if case.strategy is None:
        raise _failure(
            f"the marker names no strategy for the manager: write {_EXAMPLE[:-1]}, "
            f'strategy="fsdp_tp")'
        )
    try:
        manager = PartitionManager(_strategy(case.strategy, root), mesh=mesh, mode=case.mode)
    except ShardingError as error:
        raise _failure(str(error)) from None
    # Enter the manager first, so that `nothing_left` does not count it as left behind.
    with manager, nothing_left():
        yield manager


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Reset a mesh or a manager that a test leaves set, and fail the test."""
    try:
        with isolated():
            yield
    except AmbientLeftError as error:
        raise _failure(str(error)) from None


def _failure(message: str) -> BaseException:
    """Return a test failure with a message and no traceback."""
    return pytest.fail.Exception(message, pytrace=False)


def _strategy(strategy: Any, root: Path) -> Any:
    """Read a strategy; a relative path starts at pytest's root."""
    from shardwright.strategy.model import Strategy

    return Strategy.read(strategy, root=root) if isinstance(strategy, str | Path) else strategy


def _devices(case: MeshCase, requested: int | None, backend: str) -> list[jax.Device]:
    """Return the devices of a backend, or fail the test if a case needs more."""
    needed = math.prod(size for size in case.spec.sizes if size != INFER) if case.spec else 1
    try:
        devices: list[jax.Device] = jax.local_devices(backend=backend)
    except RuntimeError as error:
        raise _failure(f"no {backend} devices here: {error}") from None
    if len(devices) < needed:
        raise _failure(
            _too_few(
                f"mesh {case.spec}",
                needed=needed,
                have=len(devices),
                requested=requested,
                backend=backend,
            )
        )
    return devices


def _too_few(mesh: str, *, needed: int, have: int, requested: int | None, backend: str) -> str:
    """Return the message about too few devices: the reason and the fix."""
    label = f"{backend.upper()} device{'' if have == 1 else 's'}"
    what = f"{mesh} needs {needed}, but JAX runs with {have} {label}"
    option = f"pytest --virtual-devices {needed}"
    more = (
        f"set virtual_devices = {needed} for pytest (in pyproject.toml under "
        f"[tool.pytest.ini_options]), or run {option}"
    )
    if backend != "cpu":
        return (
            f"{what}\n"
            f"  fix   run without --mesh-backend for virtual CPU devices, or select the tests "
            f"that fit {have} {label}"
        )
    if requested and have < requested:
        return (
            f"{what}: something used JAX before virtual_devices = {requested} was read, such as "
            f"another plugin\n"
            f"  fix   start pytest with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}, or move that use of "
            f"JAX into a fixture"
        )
    if requested or requested_devices() == have > 1:
        source = (
            f"virtual_devices = {requested}"
            if requested
            else f"set by XLA_FLAGS or a conftest.py, or the default of {USUAL}"
        )
        return f"{what}: {source}\n  fix   {more}"
    return (
        f"{what}: a module or a conftest.py used JAX while tests were collected\n"
        f"  fix   {more}: both set the number before a module is imported; or move that use of "
        f"JAX into a test or a fixture"
    )
