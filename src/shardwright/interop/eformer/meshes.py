"""Meshes as eformer makes them and finds them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardwright import _jax
from shardwright.errors import MeshSpecError, MissingMeshAxisError, did_you_mean
from shardwright.interop.eformer.errors import NoMeshError
from shardwright.manager import context
from shardwright.mesh import build
from shardwright.mesh.text import parse_mesh

DEFAULT_SHARDING_STG = (1, -1, 1, 1, 1)
DEFAULT_NAMED_SHARDING_STG = ("dp", "fsdp", "ep", "tp", "sp")


def no_mesh() -> NoMeshError:
    """Return the error of a call that found no mesh."""
    return NoMeshError(
        "No mesh found under this context manager",
        fix="with jax.set_mesh(mesh): ... around the call, or PartitionManager(paxis, mesh=mesh)",
    )


def current_mesh() -> Mesh | AbstractMesh | None:
    """Return the mesh of `jax.set_mesh`, a surrounding `shard_map`, a legacy `with mesh:` or the entered manager, or None.

    With its devices where they can be known, which is nearly always.
    """
    found = _jax.mesh_at_hand()
    if found is not None:
        return found
    manager = context.current()
    return None if manager is None else manager.mesh


def get_incontext_mesh(raise_error: bool = True) -> Mesh | AbstractMesh:
    """Return the mesh at hand; if there is none, the empty mesh or an error.

    Raises:
      NoMeshError: there is none, and `raise_error` is True.
    """
    found = current_mesh()
    if found is None and raise_error:
        raise no_mesh()
    return found if found is not None else Mesh(np.empty((), dtype=object), ())


def create_mesh(
    axis_dims: Sequence[int] | str = DEFAULT_SHARDING_STG,
    axis_names: Sequence[str] = DEFAULT_NAMED_SHARDING_STG,
    dcn_mesh_dims: Sequence[int] | None = None,
    should_sort_granules_by_key: bool = True,
    allow_split_physical_axes: bool = True,
    backend: str | None = None,
    use_jax: bool = False,
    axis_types: Any = None,
) -> Mesh:
    """Build a mesh; starts the backend.

    Args:
      axis_dims: total sizes, slices included, slowest first; one may be -1.
      axis_names: their names.
      dcn_mesh_dims: the part of each axis that crosses slices.
      should_sort_granules_by_key: only True: slices are always in their order.
      allow_split_physical_axes: only True: an axis of the torus is split where no other arrangement exists.
      backend: platform; absent: the default one.
      use_jax: makes no difference; axes are Auto unless `axis_types` says otherwise.
      axis_types: "auto" or "explicit" for all axes, or one per name.

    Raises:
      MeshSpecError: sizes, names, types or slices that do not fit, or an option that has no equivalent.
    """
    for name, value in (
        ("should_sort_granules_by_key", should_sort_granules_by_key),
        ("allow_split_physical_axes", allow_split_physical_axes),
    ):
        if not value:
            raise MeshSpecError(
                f"{name}=False has no equivalent",
                fix='leave it out; a leading "!" in the text of a mesh keeps device order',
            )
    names = tuple(axis_names)
    return build.create_mesh(
        axis_dims if isinstance(axis_dims, str) else tuple(axis_dims),
        names,
        backend=backend or "",
        axis_types=_axis_types(names, axis_types),
        dcn=_dcn(names, dcn_mesh_dims),
    )


def _axis_types(names: tuple[str, ...], axis_types: Any) -> Any:
    if axis_types is None:
        return "auto"
    if isinstance(axis_types, str | AxisType):
        return axis_types.strip().lower() if isinstance(axis_types, str) else axis_types
    types = tuple(axis_types)
    if len(types) == 1:
        return _axis_types(names, types[0])
    if len(types) != len(names):
        raise MeshSpecError(
            f"{len(types)} axis_types for {len(names)} axes",
            fix="give one for all, or one per name",
        )
    return {name: _axis_types(names, kind) for name, kind in zip(names, types, strict=True)}


def _dcn(names: tuple[str, ...], dims: Sequence[int] | None) -> dict[str, int] | None:
    if dims is None:
        return None
    if len(dims) != len(names):
        raise MeshSpecError(
            f"{len(dims)} dcn_mesh_dims for {len(names)} axes",
            fix="give one per name, 1 where it stays inside a slice",
        )
    return {name: size for name, size in zip(names, dims, strict=True) if size != 1}


def parse_mesh_from_string(axis_dims: str, names: Sequence[str]) -> Mesh:
    """Build a mesh from `"dp:2,tp:4"` or `"2,4"`, in the order of `names`.

    Raises:
      MeshSpecError: text that cannot be read, other names, or names in another order.
    """
    if ":" in axis_dims:
        spec = parse_mesh(axis_dims)
        for name in spec.names:
            if name not in names:
                fix = did_you_mean(name, names) or f"use {', '.join(names)}"
                raise MeshSpecError(
                    f"Axis name {name!r} not found in provided names: {', '.join(names)}", fix=fix
                )
        if spec.names != tuple(names):
            what = f"the text has the axes {', '.join(spec.names)}, names has {', '.join(names)}"
            raise MeshSpecError(
                what,
                fix="write the same axes in the same order: it is that of the devices, slowest first",
            )
        return build.create_mesh(axis_dims)
    return build.create_mesh(axis_dims, tuple(names))


def create_cpu_mesh(
    axis_dims: Sequence[int] = DEFAULT_SHARDING_STG,
    axis_names: Sequence[str] = DEFAULT_NAMED_SHARDING_STG,
) -> Mesh:
    """Build a mesh of this machine's CPU devices."""
    return create_mesh(axis_dims, axis_names, backend="cpu")


@contextlib.contextmanager
def force_cpu() -> Iterator[jax.Device]:
    """Run operations on the CPU by default."""
    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device):
        yield device


@contextlib.contextmanager
def cpu_context() -> Iterator[Mesh]:
    """Make a mesh of all CPU devices ambient, by `jax.set_mesh`."""
    with force_cpu(), jax.set_mesh(created := create_cpu_mesh()):
        yield created


def get_mesh_axis_names(mesh: Mesh | AbstractMesh | None = None) -> list[str]:
    """Return the names of a mesh's axes, by default of the mesh at hand."""
    return list((get_incontext_mesh() if mesh is None else mesh).axis_names)


def names_in_current_mesh(*names: str) -> bool:
    """Tell whether the mesh at hand has all of these axes; without a mesh it has none."""
    return {*names} <= {*get_incontext_mesh(raise_error=False).axis_names}


def get_axes_size_in_mesh(
    axis_names: str | Sequence[str], mesh: Mesh | AbstractMesh | None = None
) -> int:
    """Return the product of mesh axes' sizes, by default of the mesh at hand.

    Raises:
      MissingMeshAxisError: the mesh lacks one.
      NoMeshError: there is no mesh.
    """
    sizes = (get_incontext_mesh() if mesh is None else mesh).shape
    names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    for name in names:
        if name not in sizes:
            raise MissingMeshAxisError(
                f"mesh axis {name!r} is not in the mesh {dict(sizes)}",
                fix=did_you_mean(name, sizes) or "add it",
            )
    return math.prod(sizes[name] for name in names)


def get_mesh_axis_size(axis_names: str | Sequence[str]) -> int:
    """Return, inside `shard_map`, the number of devices along mesh axes."""
    return math.prod(
        jax.lax.axis_size(name)
        for name in ((axis_names,) if isinstance(axis_names, str) else axis_names)
    )


def get_submesh_device_index(axis_names: str | Sequence[str]) -> Any:
    """Return, inside `shard_map`, this device's place along mesh axes, the first of which is the slowest."""
    index: Any = 0
    for name in (axis_names,) if isinstance(axis_names, str) else axis_names:
        index = index * jax.lax.axis_size(name) + jax.lax.axis_index(name)
    return index
