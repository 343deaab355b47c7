"""Virtual CPU devices, and meshes of them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from shardwright.errors import MeshSpecError
from shardwright.mesh.build import INFER, AxisTypes, MeshLike, create_mesh, parse_mesh
from shardwright.vocabulary.integers import read_integer

USUAL = 8
_OPTION = "jax_num_cpu_devices"
_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def virtual_devices(count: int) -> list[jax.Device]:
    """Give this process at least `count` CPU devices and return the first `count`.

    Call this function before the first operation of JAX. The first operation starts the backend,
    and then the number of devices is fixed. If XLA_FLAGS or `jax_num_cpu_devices` ask for more
    devices, their number stays. If they ask for fewer, it is raised to `count`. A second call with
    the same count changes nothing.

    Raises:
      MeshSpecError: `count` is below 1, the backend already runs with fewer devices, or JAX has
        no CPU backend.
    """
    fix = "pass the number of devices, such as 8"
    count = read_integer("count", count, error=MeshSpecError, fix=fix)
    return _ensure(wanted=count, needed=count)[:count]


def cpu_mesh(
    axis_dims: MeshLike, axis_names: Sequence[str] | None = None, *, axis_types: AxisTypes = "auto"
) -> Mesh:
    """Build a mesh of virtual CPU devices.

    The process gets 8 devices, or more if the mesh needs more. The mesh takes the first of these
    devices.

    Args:
      axis_dims: as in `create_mesh`; -1 takes all CPU devices of the process.
      axis_names: as in `create_mesh`.
      axis_types: as in `create_mesh`.

    Raises:
      MeshSpecError: the mesh cannot be read, or the backend runs with too few CPU devices.
    """
    spec = parse_mesh(axis_dims, axis_names)
    needed = math.prod(size for size in spec.sizes if size != INFER)
    # The number of devices is fixed once the backend starts, so take enough for later meshes too.
    devices = _ensure(wanted=max(USUAL, needed), needed=needed)
    return create_mesh(axis_dims, axis_names, devices=devices, axis_types=axis_types)


def requested_devices() -> int:
    """Return the number of CPU devices requested so far. Defaults to 1."""
    # JAX's own default is -1, which means that XLA_FLAGS decides.
    option = int(getattr(jax.config, _OPTION, -1))
    return option if option > 0 else flagged_devices()


def flagged_devices() -> int:
    """Return the number of CPU devices in XLA_FLAGS, or 1 if the flags have no such number.

    JAX's own option overrides this number.
    """
    flags = _FLAG.findall(os.environ.get("XLA_FLAGS", ""))
    return int(flags[-1]) if flags else 1


def try_for_devices(count: int) -> None:
    """Request `count` CPU devices. The caller checks how many JAX gives."""
    try:
        if requested_devices() < count:
            jax.config.update(_OPTION, count)
    except AttributeError:
        pass  # This version of JAX lacks the option: only XLA_FLAGS sets the number.
    except RuntimeError:
        pass  # The backend already runs, so the number is fixed.


def _ensure(*, wanted: int, needed: int) -> list[jax.Device]:
    """Request `wanted` devices if no backend runs yet. Return all devices, at least `needed`."""
    try_for_devices(wanted)
    try:
        devices: list[jax.Device] = jax.local_devices(backend="cpu")
    except RuntimeError as err:
        raise MeshSpecError(
            "JAX has no CPU backend here", rule=str(err), fix='let JAX_PLATFORMS include "cpu"'
        ) from err
    if len(devices) < needed:
        have = "1 CPU device" if len(devices) == 1 else f"{len(devices)} CPU devices"
        raise MeshSpecError(
            f"{needed} virtual CPU devices are needed, but JAX already runs with {have}",
            fix=f"call virtual_devices({needed}) before JAX's first operation (in a notebook: "
            "restart the kernel and call it in the first cell), "
            f"or start Python with XLA_FLAGS=--xla_force_host_platform_device_count={needed}",
        )
    return devices
