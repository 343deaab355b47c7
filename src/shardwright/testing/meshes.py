"""Virtual CPU devices, and meshes of them: eight devices on a laptop behave as eight devices do."""

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
    """Give this process at least `count` CPU devices and return the first `count`; again is harmless.

    Starts the backend. Call it before JAX's first operation: later the number is fixed. It takes the place of a
    smaller number in XLA_FLAGS or `jax_num_cpu_devices`; a larger one stays.

    Raises:
      MeshSpecError: a count below 1, a backend that runs with fewer, or no CPU backend.
    """
    fix = "pass the number of devices, such as 8"
    count = read_integer("count", count, error=MeshSpecError, fix=fix)
    return _ensure(wanted=count, needed=count)[:count]


def cpu_mesh(
    axis_dims: MeshLike, axis_names: Sequence[str] | None = None, *, axis_types: AxisTypes = "auto"
) -> Mesh:
    """Build a mesh on the first virtual CPU devices, of which a process gets 8 unless the mesh needs more.

    Args:
      axis_dims: as in `create_mesh`; -1 takes all of the process's CPU devices.
      axis_names: as in `create_mesh`.
      axis_types: as in `create_mesh`.

    Raises:
      MeshSpecError: a mesh that cannot be read, or a backend that runs with too few CPU devices.
    """
    spec = parse_mesh(axis_dims, axis_names)
    needed = math.prod(size for size in spec.sizes if size != INFER)
    devices = _ensure(wanted=max(USUAL, needed), needed=needed)
    return create_mesh(axis_dims, axis_names, devices=devices, axis_types=axis_types)


def asked_devices() -> int:
    """Return the number of CPU devices that JAX was asked for so far; 1 where nobody said anything."""
    option = int(getattr(jax.config, _OPTION, -1))
    return option if option > 0 else flagged_devices()


def flagged_devices() -> int:
    """Return the number of CPU devices that XLA_FLAGS asks for, 1 without; JAX's own option comes before it."""
    flags = _FLAG.findall(os.environ.get("XLA_FLAGS", ""))
    return int(flags[-1]) if flags else 1


def try_for_devices(count: int) -> None:
    """Ask for `count` CPU devices; what JAX then has is for the caller to see."""
    try:
        if asked_devices() < count:
            jax.config.update(_OPTION, count)
    except AttributeError:
        pass  # A JAX without the option: only XLA_FLAGS sets the number.
    except RuntimeError:
        pass  # The backend runs: what it has must do.


def _ensure(*, wanted: int, needed: int) -> list[jax.Device]:
    """Ask for `wanted` devices where the backend still listens, and return all of the process's, at least `needed`."""
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
            f"{needed} virtual CPU devices are needed, JAX already runs with {have}",
            fix=f"call virtual_devices({needed}) before JAX's first operation (in a notebook: restart the kernel, first cell), "
            f"or start Python with XLA_FLAGS=--xla_force_host_platform_device_count={needed}",
        )
    return devices
