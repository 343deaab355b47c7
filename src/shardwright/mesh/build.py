"""Build a `jax.sharding.Mesh` over one or several slices, or an `AbstractMesh` without devices."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardwright.errors import MeshMismatchError, MeshSpecError, did_you_mean
from shardwright.mesh.check import INFER, check_axes
from shardwright.mesh.text import DEFAULT_MESH_AXES, MeshLike, MeshSpec, parse_mesh, resolve_sizes

__all__ = [
    "DEFAULT_MESH_AXES",
    "INFER",
    "MeshLike",
    "MeshSizes",
    "MeshSpec",
    "abstract_mesh",
    "arrange_devices",
    "create_mesh",
    "get_jax_mesh",
    "get_ranks_and_size",
    "mesh_axis_types",
    "mesh_sizes",
    "parse_mesh",
    "resolve_axis_types",
    "resolve_sizes",
]

AxisTypeName = Literal["auto", "explicit"]
AxisTypes = AxisTypeName | AxisType | Mapping[str, AxisTypeName | AxisType]

# By default, the first of these axes whose size allows it crosses slices. Only these axes
# communicate rarely enough for the network between slices.
_SLICE_AXES: Final = ("pp", "dp", "fsdp")
_AXIS_TYPES: Final = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def create_mesh(
    axis_dims: MeshLike = (1, INFER, 1, 1),
    axis_names: Sequence[str] | None = None,
    backend: str = "",
    *,
    devices: Sequence[Any] | None = None,
    axis_types: AxisTypes = "auto",
    dcn: Mapping[str, int] | None = None,
) -> Mesh:
    """Build a mesh. This starts the backend.

    Args:
      axis_dims: Sizes, slowest first: `(2, -1, 1, 4)` or `"2,-1,1,4"` in the order of `axis_names`,
        or with names `"dp:2,fsdp:-1,tp:4"` or `{"dp": 2, "fsdp": -1, "tp": 4}`. Each is a total
        over all slices. One may be -1: it gets the remaining devices. In text, a leading `!` keeps
        the device order instead of following the topology inside each slice.
      axis_names: Names of the axes, if `axis_dims` has only sizes. Defaults to ("dp", "fsdp", "tp",
        "sp").
      backend: Platform, such as "cpu". Defaults to JAX's default platform.
      devices: Devices to use. Defaults to all devices of the backend. Without a -1, the mesh uses
        only as many of the first devices as it needs.
      axis_types: "auto" or "explicit" for all axes, or a mapping of axis name to type. Axes without
        a type are auto.
      dcn: The part of each axis that crosses slices, `{"dp": 2}`. By default, the first of pp, dp
        and fsdp whose size is a multiple of the number of slices crosses all slices. If the
        platform has no slices and `dcn` is given, each process counts as a slice.

    Raises:
      MeshSpecError: The mesh cannot be read, or the sizes do not fit the devices or the slices.
    """
    spec = parse_mesh(axis_dims, axis_names, dcn=dcn)
    # Check names and types before reading the devices, because that starts the backend.
    types = resolve_axis_types(spec.names, axis_types)
    chosen = _devices(devices, backend)
    spec = resolve_sizes(spec, len(chosen), hint=_more_devices(spec, chosen))
    # As in `jax.make_mesh`, a mesh of fewer devices takes the first ones.
    grid = arrange_devices(spec, chosen[: math.prod(spec.sizes)])
    return Mesh(grid, spec.names, axis_types=types)


def get_jax_mesh(axis_dims: str, names: Sequence[str] = ("x", "y", "z")) -> Mesh:
    """Build a mesh from text. This starts the backend. `create_mesh` also reads other forms.

    Args:
      axis_dims: `"2,-1,4"` in the order of `names`, where missing sizes at the end are 1; or
        `"dp:2,fsdp:-1,tp:4"` in the order written, with each of `names` exactly once. A leading `!`
        keeps the device order instead of following the topology.
      names: Names of the mesh axes.

    Raises:
      MeshSpecError: The text cannot be read, has more sizes than there are names, has names that
        differ from `names`, or does not fit the devices.
    """
    if not isinstance(axis_dims, str):
        fix = 'write "2,-1,4", or call create_mesh, which takes sizes too'
        raise MeshSpecError(f"axis_dims is {axis_dims!r}, not text", fix=fix)
    if ":" in axis_dims:
        spec = parse_mesh(axis_dims)
        if sorted(spec.names) != sorted(names):
            what = f"the text names {', '.join(spec.names)}, names is {', '.join(names)}"
            fix = "give every name exactly once, with the size 1 where it is not used"
            raise MeshSpecError(what, fix=fix)
        return create_mesh(axis_dims)
    missing = len(names) - (axis_dims.count(",") + 1)
    return create_mesh(axis_dims + ",1" * missing, names)


def get_ranks_and_size(mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """Return the rank of this process in its model-parallel group (mp) and the rank of the group
    (dp).

    The processes of a group hold one copy of the model, which is split over tp * sp devices. A mesh
    axis that the mesh lacks counts as 1:

    - `mp_node_size = max(1, tp * sp // local devices)`
    - `dp_node_size = processes // mp_node_size`
    - `dp_node_rank = process index // mp_node_size`
    - `mp_node_rank = process index % mp_node_size`

    Returns:
      A dict of `mesh` and these four numbers.

    Raises:
      MeshMismatchError: There are several processes, and `tp * sp` is neither a divisor nor a
        multiple of the local devices, or the processes do not divide into groups.
    """
    sizes = mesh_sizes(mesh)
    # The mesh may be on a backend that is not the default one.
    platform = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else None
    local, processes, index = (
        jax.local_device_count(platform),
        jax.process_count(platform),
        jax.process_index(platform),
    )
    split = sizes.get("tp", 1) * sizes.get("sp", 1)
    nodes = max(1, split // local)
    if processes > 1 and (max(split, local) % min(split, local) or processes % nodes):
        what = f"tp * sp = {split} does not divide evenly over {processes} processes with "
        what += f"{local} devices each"
        fix = f"choose tp * sp as a divisor or a multiple of {local}, so that the processes "
        raise MeshMismatchError(what, fix=fix + "divide into equal groups")
    return {
        "mesh": mesh,
        "mp_node_size": nodes,
        "dp_node_size": processes // nodes,
        "dp_node_rank": index // nodes,
        "mp_node_rank": index % nodes,
    }


def abstract_mesh(
    axis_dims: MeshLike,
    axis_names: Sequence[str] | None = None,
    *,
    devices: int | None = None,
    axis_types: AxisTypes = "auto",
) -> AbstractMesh:
    """Build a mesh of any size without devices, for planning and tests.

    This does not start a backend.

    Args:
      axis_dims: As in `create_mesh`. A -1 requires `devices`.
      axis_names: As in `create_mesh`.
      devices: Number of devices to plan for.
      axis_types: As in `create_mesh`.

    Raises:
      MeshSpecError: The mesh cannot be read, has a -1 without `devices`, or does not fit `devices`.

    >>> abstract_mesh("fsdp:2048,tp:8").size
    16384
    """
    spec = parse_mesh(axis_dims, axis_names)
    types = resolve_axis_types(spec.names, axis_types)
    if devices is not None:
        spec = resolve_sizes(spec, devices)
    elif INFER in spec.sizes:
        name = spec.names[spec.sizes.index(INFER)]
        what, fix = f"mesh axis {name} = -1 needs a number of devices", "pass devices=8"
        raise MeshSpecError(what, fix=f"{fix}, or give the size", mesh_axes=(name,))
    # Always pass the types: the axes of an `AbstractMesh` default to Auto in JAX 0.10, and to
    # Explicit in JAX 0.11 and 0.12.
    return AbstractMesh(spec.sizes, spec.names, axis_types=types)


class MeshSizes(dict[str, int]):
    """Checked sizes by mesh axis, in mesh order. Treat it as read-only.

    Attributes:
      pairs: The sizes as a tuple, for use in a cache key.
    """

    __slots__ = ("pairs",)
    pairs: tuple[tuple[str, int], ...]

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__(sizes)
        self.pairs = tuple(sizes.items())


def mesh_sizes(
    mesh: Mesh | AbstractMesh | Mapping[str, int] | Sequence[tuple[str, int]],
) -> MeshSizes:
    """Return axis name → size in mesh order, from a mesh, a mapping or (name, size) pairs.

    JAX allows two axes of the same name, and names that a rule cannot contain. Here both are
    errors.

    Raises:
      MeshSpecError: The value is not a mesh, a name is not allowed or occurs twice, or a size is
        not a positive integer.

    >>> mesh_sizes([("dp", 2), ("tp", 4)])
    {'dp': 2, 'tp': 4}
    """
    # Do not check a `MeshSizes` again, because each call of `explain` calls this function.
    if isinstance(mesh, MeshSizes):
        return mesh
    if isinstance(mesh, Mesh | AbstractMesh):
        return MeshSizes(check_axes(list(zip(mesh.axis_names, mesh.axis_sizes, strict=True))))
    if isinstance(mesh, Mapping):
        return MeshSizes(check_axes(list(mesh.items())))
    if isinstance(mesh, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in mesh
    ):
        return MeshSizes(check_axes([(name, size) for name, size in mesh]))
    fix = 'give a Mesh, an AbstractMesh, {"dp": 2, "tp": 4}, (("dp", 2), ("tp", 4)), or '
    fix += 'abstract_mesh("dp:2,tp:4")'
    raise MeshSpecError(f"{mesh!r} of type {type(mesh).__name__} is not a mesh", fix=fix)


def mesh_axis_types(mesh: Mesh | AbstractMesh) -> dict[str, AxisType]:
    """Return axis name → Auto, Explicit or (inside `shard_map`) Manual, in mesh order."""
    return dict(zip(mesh_sizes(mesh), mesh.axis_types, strict=True))


def resolve_axis_types(names: Sequence[str], axis_types: AxisTypes) -> tuple[AxisType, ...]:
    """Return one `AxisType` per name, in the form that `Mesh` takes.

    Raises:
      MeshSpecError: A type is neither auto nor explicit, or `axis_types` names an axis that is not
        in `names`.
    """
    if not isinstance(axis_types, Mapping):
        return (_axis_type(axis_types, "axis_types"),) * len(names)
    if unknown := [name for name in axis_types if name not in names]:
        what = f"axis_types names {unknown[0]!r}, which is not an axis of the mesh"
        fix = did_you_mean(str(unknown[0]), names) or f"name some of {', '.join(names)}"
        raise MeshSpecError(what, fix=fix)
    given = ((axis_types.get(name, "auto"), f"axis_types[{name!r}]") for name in names)
    return tuple(_axis_type(*each) for each in given)


def arrange_devices(spec: MeshSpec, devices: Sequence[Any]) -> np.ndarray:
    """Arrange devices in an array of shape `spec.sizes`.

    The function is pure. It reads only `platform`, `process_index`, `slice_index` and the TPU
    coordinates of the devices. Inside a slice, the order of TPUs follows their torus. Other devices
    keep the given order; with `!`, TPUs keep it too. The part of an axis that crosses slices varies
    slowest: `dp:4` with `dcn.dp:2` has dp 0 and 1 in the first slice.

    Raises:
      MeshSpecError: There are more than 32 axes; the number of devices is not the product of the
        sizes; a device occurs twice; the devices are of several platforms; the slices differ in
        size, or do not match `spec.dcn`; no pipeline or data axis can be split over the slices; or
        the torus cannot form the mesh.
    """
    # JAX cannot read an array of devices with more than 32 dims. An abstract mesh has no devices,
    # and may have more axes.
    if (count := len(spec.names)) > 32:
        what = f"the mesh has {count} axes, and devices can be arranged along at most 32"
        raise MeshSpecError(what, fix="leave out axes of size 1")
    _check_devices(spec, devices)
    slices = _slices(spec, devices)
    dcn = _dcn(spec, slices)
    inner = tuple(size // part for size, part in zip(spec.sizes, dcn, strict=True))
    blocks = np.stack([_arrange_slice(spec, inner, members) for members in slices.values()])
    # After the first reshape, the dims are the parts across slices, then the parts inside a slice.
    # The last reshape joins the two parts of each axis, so the transpose makes them neighbors. The
    # part across slices is major.
    paired = [axis for dim in range(len(inner)) for axis in (dim, len(inner) + dim)]
    return blocks.reshape(dcn + inner).transpose(paired).reshape(spec.sizes)


def _check_devices(spec: MeshSpec, devices: Sequence[Any]) -> None:
    platforms = sorted({device.platform for device in devices})
    what = ""
    if len(devices) != math.prod(spec.sizes):
        what = f"mesh {spec} does not fit {len(devices)} devices"
    elif len(set(devices)) != len(devices):
        repeated = next(device for device in devices if list(devices).count(device) > 1)
        what = f"device {repeated} is listed twice"
    elif len(platforms) > 1:
        what = f"devices of several platforms: {', '.join(platforms)}"
    if what:
        fix = "give as many different devices of one platform as the product of the sizes"
        raise MeshSpecError(what, fix=fix)


def _slices(spec: MeshSpec, devices: Sequence[Any]) -> dict[int, list[Any]]:
    """Group devices by slice, in slice order.

    If the spec has a dcn part and the platform has no slices, group them by process.
    """
    by_slice = _grouped(devices, "slice_index")
    # GPU and CPU clusters often have one process per device. So processes count as slices only if
    # dcn is given. A TPU slice may have several processes with a fast network between them, so TPU
    # processes never count as slices.
    if len(by_slice) == 1 and math.prod(spec.dcn) > 1 and devices[0].platform != "tpu":
        by_slice = _grouped(devices, "process_index")
    counts = {len(members) for members in by_slice.values()}
    if len(counts) > 1:
        group = _group(devices)
        listing = ", ".join(
            f"{group} {index} has {len(members)}" for index, members in by_slice.items()
        )
        fix = f"pass devices= with the same number of devices of each {group}"
        raise MeshSpecError(f"{group}s of unequal size: {listing}", fix=fix)
    return by_slice


def _group(devices: Sequence[Any]) -> str:
    """Return the word that errors use for a group of devices that fast links join."""
    return "domain" if devices[0].platform == "gpu" else "slice"


def _grouped(devices: Sequence[Any], attribute: str) -> dict[int, list[Any]]:
    groups: dict[int, list[Any]] = {}
    for device in devices:
        # CPU devices lack the attribute, and some clients set it to None. Both mean one slice.
        groups.setdefault(getattr(device, attribute, 0) or 0, []).append(device)
    return dict(sorted(groups.items()))


def _dcn(spec: MeshSpec, slices: Mapping[int, Sequence[Any]]) -> tuple[int, ...]:
    """Return the part of each axis that crosses slices."""
    count, group = len(slices), _group(next(iter(slices.values())))
    if spec.dcn:
        if math.prod(spec.dcn) != count:
            pairs = zip(spec.names, spec.dcn, strict=True)
            crossing = " * ".join(f"{name}={part}" for name, part in pairs if part > 1)
            what = f"dcn puts {crossing or 'nothing'} across {group}s ({math.prod(spec.dcn)}), "
            what += f"but the number of {group}s is {count}"
            fix = "leave dcn out" if count == 1 else f"make the product of dcn {count}"
            raise MeshSpecError(what, fix=fix)
        return spec.dcn
    return default_dcn(spec, count, group=group)


def default_dcn(spec: MeshSpec, count: int, *, group: str = "slice") -> tuple[int, ...]:
    """Return the part of each axis that crosses `count` slices, if the mesh does not state it.

    In errors, `group` is the word for a slice, such as `domain` for GPUs.

    Raises:
      MeshSpecError: No pipeline or data axis can be split over the slices.
    """
    if count == 1:
        return (1,) * len(spec.sizes)
    sizes = dict(zip(spec.names, spec.sizes, strict=True))
    for axis in _SLICE_AXES:
        if sizes.get(axis, 1) % count == 0:
            return tuple(count if name == axis else 1 for name in spec.names)
    # No single axis suffices, as for dp:4,fsdp:4 over 16 hosts. So let pp, dp and fsdp, in this
    # order, each take as many of the slices as it can.
    parts, rest = dict.fromkeys(spec.names, 1), count
    for axis in _SLICE_AXES:
        part = math.gcd(sizes.get(axis, 1), rest)
        parts |= {axis: part} if axis in sizes else {}
        rest //= part
    if rest == 1:
        return tuple(parts.values())
    what = f"mesh {spec} over {count} {group}s: the product of {', '.join(_SLICE_AXES)} is "
    rule = f"tensor, sequence and expert axes cross {group}s only if dcn names them: "
    fix = f"make dp or fsdp a multiple of {count}"
    for axis, size in sizes.items():
        part = math.gcd(size // parts[axis], rest)
        parts[axis] *= part
        rest //= part
    if rest == 1:
        crossing = {axis: part for axis, part in parts.items() if part > 1}
        texts = ",".join(f"dcn.{axis}:{part}" for axis, part in crossing.items())
        fix = f"{fix}, or write which axes cross: dcn={crossing}, or the mesh {spec},{texts}"
    raise MeshSpecError(
        f"{what}not a multiple of {count}",
        rule=f"{rule}the network between {group}s is slow",
        fix=fix,
    )


def _arrange_slice(spec: MeshSpec, shape: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    """Arrange the devices of one slice in an array of shape `shape`."""
    if spec.contiguous or devices[0].platform != "tpu":
        # `np.array` would guess a shape from the devices. Assignment keeps each device as one
        # element.
        grid = np.empty(len(devices), dtype=object)
        grid[:] = devices
        return grid.reshape(shape)
    from jax.experimental import mesh_utils

    try:
        try:
            return mesh_utils.create_device_mesh(shape, devices)
        except NotImplementedError:
            # The mesh does not fit if each mesh axis takes whole axes of the torus. Splitting a
            # torus axis costs bandwidth, so it is tried last.
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (NotImplementedError, AssertionError, ValueError) as err:
        what = (
            f"mesh {spec}: the torus of {len(devices)} TPU devices has no "
            f"{'x'.join(map(str, shape))} arrangement"
        )
        fix = (
            f'write "!{spec}" to take the devices in their order, or pass devices= that form a box'
        )
        raise MeshSpecError(what, rule=textwrap.shorten(str(err), 200), fix=fix) from err


def _devices(devices: Sequence[Any] | None, backend: str) -> list[Any]:
    if devices is None:
        try:
            return jax.devices(backend or None)
        except RuntimeError as err:
            what, fix = f"no devices of backend {backend or 'default'!r}", 'such as "cpu"'
            raise MeshSpecError(
                what, rule=str(err), fix=f"name an installed backend, {fix}"
            ) from err
    if backend:
        what = f"devices and backend {backend!r} are both given"
        raise MeshSpecError(what, fix="give only devices or only backend")
    is_sequence = isinstance(devices, Iterable) and not isinstance(devices, str)
    chosen = list(devices) if is_sequence else [devices]
    wrong = [device for device in chosen if not isinstance(device, jax.Device)]
    if wrong:
        what = f"{wrong[0]!r} of type {type(wrong[0]).__name__} in devices= is not a device"
        fix = "pass a flat sequence of some of jax.devices(), or the name of a platform, "
        fix += 'backend="cpu"; abstract_mesh takes a number of devices'
        raise MeshSpecError(what, fix=fix)
    return chosen


def _more_devices(spec: MeshSpec, devices: Sequence[Any]) -> str:
    """Return how to get more devices. Too few CPU devices is a common first error in a notebook."""
    needed = math.prod(size for size in spec.sizes if size != INFER)
    planning = "abstract_mesh plans without devices"
    if not devices or devices[0].platform != "cpu" or needed <= len(devices):
        return planning
    count = 8 if 8 % needed == 0 else needed
    virtual = (
        f"shardwright.testing.virtual_devices({count}) before JAX's first operation (in a "
        f"notebook: restart the kernel and call it in the first cell)"
    )
    return f"for virtual CPU devices call {virtual}; {planning}"


def _axis_type(value: object, place: str) -> AxisType:
    # Manual is left out: only `shard_map` makes mesh axes Manual.
    if value in (AxisType.Auto, AxisType.Explicit):
        return AxisType(value)
    if isinstance(value, str) and value in _AXIS_TYPES:
        return _AXIS_TYPES[value]
    hint = did_you_mean(value.lower(), _AXIS_TYPES) if isinstance(value, str) else ""
    fix = hint or 'write "auto", "explicit" or {"tp": "explicit"}'
    raise MeshSpecError(f"{place} is {value!r}, neither auto nor explicit", fix=fix)
