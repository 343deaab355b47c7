"""Shard one array by a resolved spec, on Auto, Explicit, mixed and partly Manual meshes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardwright import _jax
from shardwright.errors import (
    MeshMismatchError,
    MeshSpecError,
    Problem,
    StrategyError,
    raise_problems,
)
from shardwright.manager.memory import in_host_memory, to_device
from shardwright.resolution.partition_specs import (
    UNCONSTRAINED,
    canonical_spec,
    entry_names,
    entry_of,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A spec on the current mesh. It is hashable, as a static argument of a custom JVP must be.

    Attributes:
      spec: The whole spec, without Manual mesh axes.
      auto: The part of the spec over Auto mesh axes, or None if the mesh has none.
      explicit: The part of the spec over Explicit mesh axes, or None if the mesh has none.
      mesh: The manager's mesh, with the axis types of the ambient mesh where that is possible.
      ambient: Whether a mesh is ambient.
      sharding: Argument of the constraint over Auto mesh axes: a `NamedSharding` on the manager's
        mesh if JAX allows it, else a bare spec (a `PartitionSpec` without a mesh). JAX refuses a
        bare spec in an eager `grad` or `vmap` of an array that was created before the mesh became
        ambient. JAX refuses a sharding on the whole mesh inside `shard_map`, and if the mesh also
        has Explicit axes.
      plain: Whether a trace needs only the constraint over Auto mesh axes.
    """

    spec: PartitionSpec
    auto: PartitionSpec | None
    explicit: PartitionSpec | None
    mesh: Mesh | AbstractMesh
    ambient: bool
    sharding: NamedSharding | PartitionSpec
    plain: bool


def make_placement(
    spec: PartitionSpec, mesh: Mesh | AbstractMesh, ambient: AbstractMesh | None
) -> Placement:
    """Split a spec by the axis types of the ambient mesh, else by those of the manager's mesh.

    Raises:
      MeshMismatchError: A dim has an Auto mesh axis before an Explicit one.
    """
    mesh = mesh_here(mesh, ambient)
    types = dict(zip((ambient or mesh).axis_names, (ambient or mesh).axis_types, strict=True))
    auto = _part(spec, [axis for axis, kind in types.items() if kind is AxisType.Auto])
    explicit = _part(spec, [axis for axis, kind in types.items() if kind is AxisType.Explicit])
    if auto is not None and explicit is not None:
        raise_problems(order_problems(spec, types))
    manual = AxisType.Manual in types.values()
    bare = isinstance(mesh, AbstractMesh) or (
        ambient is not None and (manual or explicit is not None)
    )
    return Placement(
        spec=spec,
        auto=auto,
        explicit=explicit,
        mesh=mesh,
        ambient=ambient is not None,
        sharding=(auto or PartitionSpec())
        if bare
        else NamedSharding(mesh, auto or PartitionSpec()),
        plain=explicit is None
        and auto is not None
        and (ambient is not None or isinstance(mesh, Mesh)),
    )


def mesh_here(mesh: Mesh | AbstractMesh, ambient: AbstractMesh | None) -> Mesh | AbstractMesh:
    """Return a mesh with the axis types of the ambient mesh, which JAX requires.

    An abstract mesh is returned unchanged, and so is any mesh inside `shard_map`.
    """
    if (
        ambient is None
        or isinstance(mesh, AbstractMesh)
        or ambient.axis_types == mesh.axis_types
        or ambient.manual_axes
    ):
        return mesh
    # JAX interns meshes, so equal arguments give the identical mesh, and nothing is traced again.
    return Mesh(mesh.devices, mesh.axis_names, axis_types=ambient.axis_types)


def _part(spec: PartitionSpec, axes: list[str]) -> PartitionSpec | None:
    if not axes:
        return None
    entries: list[Any] = []
    for entry in spec.partitions:
        if entry is UNCONSTRAINED or entry is None:
            entries.append(entry)
        else:
            entries.append(entry_of(tuple(axis for axis in entry_names(entry) if axis in axes)))
    return canonical_spec(entries, spec.unreduced & {*axes})


def order_problems(spec: PartitionSpec, types: Mapping[str, AxisType]) -> list[Problem]:
    """Return a problem for each dim with an Auto mesh axis before an Explicit one."""
    problems = []
    for dim, entry in enumerate(spec.partitions):
        kinds = [types[axis] for axis in entry_names(entry)]
        if AxisType.Auto in kinds and AxisType.Explicit in kinds[kinds.index(AxisType.Auto) :]:
            names = entry_names(entry)
            what = f"{'+'.join(names)} puts an Auto mesh axis before an Explicit one in one dim, "
            fix = "write the Explicit mesh axis first in the rule, "
            problem = Problem(
                error=MeshMismatchError,
                what=f"{what}which JAX cannot express",
                dim=dim,
                mesh_axes=names,
                fix=f"{fix}or give both the same axis type",
            )
            problems.append(problem)
    return problems


def place(x: Any, placement: Placement, *, compared: bool = False) -> Any:
    """Place one array: with a constraint or a reshard inside a trace, else with a transfer.

    `compared` is as in `put`.
    """
    if isinstance(x, jax.core.Tracer):
        return constrain(x, placement)
    check_kept(x)
    if _jax.in_trace():
        return constrain(x, placement)
    return put(x, placement, compared=compared)


def check_kept(x: Any, *, path: str = "") -> None:
    """Check that JAX can cast a NumPy array or a number to 32 bits, as it does if x64 is off.

    Integers must fit in 32 bits. Floats may be rounded, and tiny floats become zero, but a finite
    float must stay finite.

    Raises:
      StrategyError: A value does not fit.
    """
    wide: bool = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    if wide or isinstance(x, (jax.Array, jax.core.Tracer)):
        return
    # Compare exact types: in Python a bool is an int too, but JAX does not cast it.
    plain = _PYTHON.get(type(x))
    dtype = getattr(x, "dtype", None) if plain is None else np.dtype(plain)
    if not isinstance(dtype, np.dtype) or dtype.name not in _HALVES or not np.size(x):
        return
    half = np.dtype(_HALVES[dtype.name])
    if _fits(x, half):
        return
    kind = dtype if plain is None else f"a Python {type(x).__name__}"
    what = (
        f"values of {kind} do not fit {half}, which JAX casts them to while jax_enable_x64 is off"
    )
    fix = 'jax.config.update("jax_enable_x64", True), or cast the values yourself'
    raise StrategyError(what, path=path, fix=fix)


_PYTHON: Final[dict[type, str]] = {int: "int64", float: "float64", complex: "complex128"}
_HALVES: Final = {
    "int64": "int32",
    "uint64": "uint32",
    "float64": "float32",
    "complex128": "complex64",
}


def _fits(x: Any, half: np.dtype[Any]) -> bool:
    if half.kind in "iu":
        limits = np.iinfo(half)
        return int(np.min(x)) >= limits.min and int(np.max(x)) <= limits.max
    for part in (np.real(x), np.imag(x)) if half.kind == "c" else (x,):
        # `fmin` and `fmax` make no copy, and skip NaNs, so a NaN does not hide a number that is too
        # large. Copy the finite values only if the minimum or the maximum is not finite.
        ends = [np.fmin.reduce(part, axis=None), np.fmax.reduce(part, axis=None)]
        if not np.isfinite(ends).all():
            finite = np.asarray(part)[np.isfinite(part)]
            ends = [finite.min(), finite.max()] if finite.size else []
        # The two parts of a complex64 are float32 too, so one cast works for all kinds.
        with np.errstate(over="ignore"):
            if not np.isfinite(np.asarray(ends).astype(np.float32)).all():
                return False
    return True


def constrain(x: Any, placement: Placement) -> Any:
    """Constrain an array inside a trace."""
    if placement.plain:
        # Nearly all calls return here, so this test comes first: a trace makes thousands of calls.
        return jax.lax.with_sharding_constraint(x, placement.sharding)
    if placement.explicit is None:
        return x if placement.auto is None else _constrain_auto(x, placement)
    if placement.auto is None:
        return _reshard(x, placement)
    return _reshard_and_constrain(x, placement)


def _constrain_auto(x: Any, placement: Placement) -> Any:
    if placement.ambient or isinstance(placement.mesh, Mesh):
        return jax.lax.with_sharding_constraint(x, placement.sharding)
    # A bare spec requires an ambient mesh. If no mesh is ambient and the inputs are uncommitted,
    # JAX silently ignores a `NamedSharding` on an abstract mesh. So make the mesh ambient.
    with jax.sharding.use_abstract_mesh(placement.mesh):
        return jax.lax.with_sharding_constraint(x, placement.sharding)


def _reshard(x: Any, placement: Placement) -> Any:
    spec = _filled(placement.explicit, jax.typeof(x).sharding.spec)
    if placement.ambient:
        return jax.reshard(x, spec)
    if isinstance(placement.mesh, AbstractMesh):
        with jax.sharding.use_abstract_mesh(placement.mesh):
            return jax.reshard(x, spec)
    return jax.reshard(x, NamedSharding(placement.mesh, spec))


@functools.partial(jax.jit, static_argnums=1)
def _reshard_and_constrain(x: Any, placement: Placement) -> Any:
    """Reshard and constrain in one jitted function. Outside of jit, each would undo the other."""
    return _constrain_auto(_reshard(x, placement), placement)


def _filled(spec: Any, current: PartitionSpec) -> PartitionSpec:
    """Fill the UNCONSTRAINED dims and `reduced` of a spec from the current spec of the array.

    An UNCONSTRAINED dim keeps its current mesh axes, except those that the spec uses.
    """
    if UNCONSTRAINED not in spec.partitions and not current.reduced:
        return spec  # type: ignore[no-any-return]
    # Only `with_sharding_constraint` takes UNCONSTRAINED. A mesh axis may be in a spec only once,
    # so a dim loses the mesh axes that the new spec uses elsewhere.
    used = {axis for entry in spec.partitions for axis in entry_names(entry)} | spec.unreduced
    current_entries = (*current.partitions, *[None] * len(spec.partitions))
    entries = []
    for entry, current_entry in zip(spec.partitions, current_entries, strict=False):
        entries.append(
            entry_of(tuple(axis for axis in entry_names(current_entry) if axis not in used))
            if entry is UNCONSTRAINED
            else entry
        )
    # The cotangent of a reduced array is unreduced, so a loop adds gradients without a collective.
    # If the array were not marked as reduced, each gradient would be reduced at its matmul, which
    # is correct but slow. A mesh axis that the array is gathered over is marked too, since JAX
    # wants the sum of a matmul unreduced over all mesh axes that the matmul contracts, or over
    # none. The transpose of the gather is then a reduce-scatter.
    sharded = {axis for entry in current.partitions for axis in entry_names(entry)}
    reduced = current.reduced and (current.reduced | sharded) - used
    return PartitionSpec(*entries, unreduced=spec.unreduced, reduced=reduced)


def no_devices() -> MeshSpecError:
    """Return the error of placing an array on an abstract mesh."""
    return MeshSpecError(
        "the manager's mesh is abstract: there are no devices to place an array on",
        fix="build the manager on create_mesh(...), "
        "or trace with jax.eval_shape or jax.jit(f).trace(...)",
    )


def put(x: Any, placement: Placement, *, compared: bool = False) -> Any:
    """Place a concrete array. Return the same object if it already has the sharding.

    Args:
      x: A JAX or NumPy array, or a number.
      placement: Where it goes.
      compared: Whether NumPy data is known to be equal in all processes. Otherwise JAX compares it,
        by a collective.

    Raises:
      MeshSpecError: The mesh is abstract.
      StrategyError: The value is not an array.
    """
    if isinstance(placement.mesh, AbstractMesh):
        raise no_devices()
    if not _jax.is_array(x):
        fix = "for a value that has only a shape, call pm.shardings or pm.abstract"
        raise StrategyError(f"a {type(x).__name__} holds no values to place", fix=fix)
    current = x.sharding if isinstance(x, jax.Array) else None
    current_spec = (
        current.spec
        if isinstance(current, NamedSharding) and current.mesh == placement.mesh
        else PartitionSpec()
    )
    # An array in host memory stays there.
    kind = None if current is None or current.memory_kind == "device" else current.memory_kind
    sharding = NamedSharding(
        placement.mesh, _filled(placement.spec, current_spec), memory_kind=kind
    )
    # Even for an array that is in place, `device_put` takes about 20 µs: 0.2 s for a tree of 10,000
    # arrays. JAX does not keep the placement of an uncommitted array, so such an array goes through
    # `device_put`.
    if current is not None and current.is_equivalent_to(sharding, x.ndim) and x.committed:
        return x
    # In one process, `device_put` gives the same result, and takes less time for a replicated
    # array. So use it there.
    if compared and isinstance(x, np.ndarray) and not sharding.is_fully_addressable:
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part], dtype)
    return jax.device_put(x, sharding)


def gather(w: Any, use: Placement, stored: Placement) -> Any:
    """Constrain a stored weight to the spec of its use, and its cotangent to the stored spec.

    A weight in host memory moves to the device, and its cotangent to the host. Both placements are
    static, so the backward pass does not read the ambient manager.
    """
    check_kept(w)
    if in_host_memory(w):
        # Move the shards first, then gather on the devices: the host link has no all-gather.
        # Without the barrier, XLA for TPUs gathers on the hosts, over their network.
        w = jax.lax.optimization_barrier(to_device(w, NamedSharding(stored.mesh, stored.spec)))
    if stored.explicit is None:
        return _gather_auto(w, use, stored)
    # Over Explicit axes a cotangent has the sharding of its primal. So give the weight its stored
    # sharding first.
    w = place(w, stored)
    if stored.auto is None or not (isinstance(w, jax.core.Tracer) or _jax.in_trace()):
        return place(w, use)
    return _gather_mixed(w, use, stored)


# JAX transposes a plain constraint to the same constraint, which would request a gathered gradient
# instead of a reduce-scatter. So this function has a custom derivative. It is a JVP, because a
# custom VJP refuses `jax.jvp` and `jax.hessian`.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _gather_auto(w: Any, use: Placement, stored: Placement) -> Any:
    return place(w, use)


@_gather_auto.defjvp
def _gather_auto_jvp(
    use: Placement, stored: Placement, primals: tuple[Any], tangents: tuple[Any]
) -> tuple[Any, Any]:
    """Constrain the tangent to the stored spec. The transpose does the same for the cotangent."""
    return _gather_auto(*primals, use, stored), place(*tangents, stored)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _gather_mixed(w: Any, use: Placement, stored: Placement) -> Any:
    """Gather over Explicit and Auto axes in one jitted function, as in `_reshard_and_constrain`.

    The transpose of a reshard returns to the sharding of its input, which is the stored sharding.
    """
    return _gather_auto(_reshard(w, use), auto_part(use), auto_part(stored))


def auto_part(placement: Placement) -> Placement:
    """Return a copy of a placement that has only the constraint over Auto mesh axes."""
    return dataclasses.replace(placement, explicit=None)


def global_shape(sharding: NamedSharding, local: Sequence[int]) -> tuple[int, ...]:
    """Return the global shape of an array, given the shape of the part that this process has."""
    sizes = sharding.mesh.shape
    spec = (*sharding.spec.partitions, *[None] * len(local))
    shards = tuple(
        math.prod(sizes[axis] for axis in entry_names(spec[dim])) for dim in range(len(local))
    )
    # Count the shards of this process along each dim, with an array of one element per shard.
    indices = sharding.addressable_devices_indices_map(shards).values()
    local_shards = [
        len({index[dim].indices(count) for index in indices if index is not None})
        for dim, count in enumerate(shards)
    ]
    return tuple(
        size * count // local_count
        for size, count, local_count in zip(local, shards, local_shards, strict=True)
    )
