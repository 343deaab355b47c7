"""Create a mesh, and find the current mesh, under the names of eformer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardwright.errors import MeshSpecError, MissingMeshAxisError, did_you_mean
from shardwright.interop.eformer.errors import NoMeshError
from shardwright.manager.ambient import current_mesh, current_mesh_has
from shardwright.mesh import build
from shardwright.mesh.text import parse_mesh
from shardwright.resolution.partition_specs import entry_names

DEFAULT_SHARDING_STG = (1, -1, 1, 1, 1)
DEFAULT_NAMED_SHARDING_STG = ("dp", "fsdp", "ep", "tp", "sp")


def no_mesh() -> NoMeshError:
    """Return the error to raise if there is no mesh."""
    return NoMeshError(
        "No mesh found under this context manager",
        fix="with jax.set_mesh(mesh): ... around the call, or PartitionManager(paxis, mesh=mesh)",
    )


def get_incontext_mesh(raise_error: bool = True) -> Mesh | AbstractMesh:
    """Return the current mesh. If there is none, return the empty mesh or raise an error.

    Raises:
      NoMeshError: There is no mesh, and `raise_error` is True.
    """
    mesh = current_mesh()
    if mesh is None and raise_error:
        raise no_mesh()
    # If no mesh is set, JAX too returns an empty mesh.
    return mesh if mesh is not None else Mesh(np.empty((), dtype=object), ())


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
    """Build a mesh. This starts the backend.

    Args:
      axis_dims: Total sizes of the mesh axes, over all slices, in the order of `axis_names`. One
        size may be -1.
      axis_names: Names of the axes.
      dcn_mesh_dims: For each axis, the number of slices that it crosses.
      should_sort_granules_by_key: Must be True; slices are always sorted.
      allow_split_physical_axes: Must be True. If the mesh fits in no other way, a physical axis of
        the torus is split.
      backend: Platform. Defaults to JAX's default.
      use_jax: Has no effect: with both values, axes are Auto unless `axis_types` says otherwise.
      axis_types: "auto", "explicit" or "manual" for all axes, or one per name.

    Raises:
      MeshSpecError: Sizes, names, types or slices do not fit each other or the devices, or an
        option is not supported.
    """
    # eformer passes both options on to `mesh_utils.create_hybrid_device_mesh`. `build.create_mesh`
    # has no such options.
    for name, value in (
        ("should_sort_granules_by_key", should_sort_granules_by_key),
        ("allow_split_physical_axes", allow_split_physical_axes),
    ):
        if not value:
            raise MeshSpecError(
                f"{name}=False has no equivalent",
                fix="leave the option out; to keep the order of devices, begin the text of a "
                'mesh with "!"',
            )
    names = tuple(axis_names)
    if axis_types is None or isinstance(axis_types, str | AxisType):
        axis_types = (axis_types or "auto",)
    kinds = [kind.strip().lower() if isinstance(kind, str) else kind for kind in axis_types]
    if len(kinds) not in (1, len(names)):
        raise MeshSpecError(
            f"there are {len(kinds)} axis_types for {len(names)} axes",
            fix="give one type for all axes, or one type per axis name",
        )
    types: Any = dict(zip(names, kinds * len(names) if len(kinds) == 1 else kinds, strict=True))
    dcn = None
    if dcn_mesh_dims is not None:
        if len(dcn_mesh_dims) != len(names):
            raise MeshSpecError(
                f"there are {len(dcn_mesh_dims)} dcn_mesh_dims for {len(names)} axes",
                fix="give one size per axis name, and 1 for an axis that does not cross slices",
            )
        dims = zip(names, dcn_mesh_dims, strict=True)
        # An axis with the size 1 does not cross slices.
        dcn = {name: size for name, size in dims if size != 1}
    # `build.create_mesh` builds no Manual axes, because only `shard_map` makes axes Manual. So
    # build them as Auto axes first: the types do not change the order of the devices.
    manual = [name for name, kind in types.items() if kind in ("manual", AxisType.Manual)]
    mesh = build.create_mesh(
        axis_dims if isinstance(axis_dims, str) else tuple(axis_dims),
        names,
        backend=backend or "",
        axis_types=types | dict.fromkeys(manual, "auto"),
        dcn=dcn,
    )
    if not manual:
        return mesh
    built = dict(zip(names, mesh.axis_types, strict=True)) | dict.fromkeys(manual, AxisType.Manual)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=tuple(built.values()))


def parse_mesh_from_string(axis_dims: str, names: Sequence[str]) -> Mesh:
    """Build a mesh from `"dp:2,tp:4"` or `"2,4"`, in the order of `names`.

    Raises:
      MeshSpecError: The text cannot be read, or its names are not `names` in the same order.
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
            what = (
                f"the text has the axes {', '.join(spec.names)}, but names has {', '.join(names)}"
            )
            raise MeshSpecError(
                what,
                fix="write the same axes in the same order; the devices are laid out in this order",
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
    """Enter a context in which operations run on the CPU by default."""
    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device):
        yield device


@contextlib.contextmanager
def cpu_context() -> Iterator[Mesh]:
    """Enter a mesh of all CPU devices with `jax.set_mesh`."""
    with force_cpu(), jax.set_mesh(created := create_cpu_mesh()):
        yield created


def get_mesh_axis_names(mesh: Mesh | AbstractMesh | None = None) -> list[str]:
    """Return the axis names of a mesh. The mesh defaults to the current mesh."""
    return list((get_incontext_mesh() if mesh is None else mesh).axis_names)


names_in_current_mesh = current_mesh_has


def get_axes_size_in_mesh(
    axis_names: str | Sequence[str], mesh: Mesh | AbstractMesh | None = None
) -> int:
    """Return the product of the sizes of mesh axes. The mesh defaults to the current mesh.

    Raises:
      MissingMeshAxisError: The mesh lacks one of the axes.
      NoMeshError: There is no mesh.
    """
    sizes = (get_incontext_mesh() if mesh is None else mesh).shape
    names = entry_names(axis_names)
    for name in names:
        if name not in sizes:
            raise MissingMeshAxisError(
                f"mesh axis {name!r} is not in the mesh {dict(sizes)}",
                fix=did_you_mean(name, sizes) or "add it",
            )
    return math.prod(sizes[name] for name in names)


def get_mesh_axis_size(axis_names: str | Sequence[str]) -> int:
    """Return the number of devices along mesh axes. Call it inside `shard_map`."""
    return jax.lax.axis_size(axis_names)


def get_submesh_device_index(axis_names: str | Sequence[str]) -> Any:
    """Return the index of this device along mesh axes, major first. Call it inside `shard_map`."""
    # In a tuple, the index along the first axis changes slowest, in JAX as in eformer.
    return jax.lax.axis_index(axis_names)
