"""The process that compiles: `python -m shardwright.plan.verify.worker FOLDER`.

A compiler may run out of memory or abort, and libtpu reads its settings when it is loaded. So each
program is compiled in a process of its own. The folder has `request.json` and `program.bin`; the
process writes `result.json`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardwright import _jax
from shardwright.manager.memory import HOST
from shardwright.mesh.build import arrange_devices
from shardwright.mesh.text import MeshSpec
from shardwright.plan.collectives.read import read_collectives

_MEMORY = (
    *("argument_size", "output_size", "alias_size", "temp_size", "peak_memory"),
    *("host_argument_size", "host_temp_size"),
)
_CONSTANT = re.compile(r" constant\((\{[^\n]*?\})\)")
_LITERAL = 100  # characters of a constant's values that stay in the text


def main(folder: Path) -> None:
    """Compile the program of a folder and write the result into it."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    try:
        result = compile_program((folder / "program.bin").read_bytes(), request)
    except jax.errors.JaxRuntimeError as error:
        # A program that needs too much memory is a result. Other failures are errors.
        key = "refused" if "RESOURCE_EXHAUSTED" in str(error) else "error"
        result = {key: str(error)}
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def compile_program(program: bytes, request: Mapping[str, Any]) -> dict[str, Any]:
    """Compile an exported program, and return its collectives and its memory as plain data.

    Args:
      program: The serialized program.
      request: The platform, topology, options of the topology, mesh, specs, donated and effort;
        `hlo` if the text of the compiled program is wanted too.
    """
    exported = jax.export.deserialize(bytearray(program))
    mesh = make_mesh(request)
    # Pass the shardings again: the serialized program has none for unused arguments, which
    # would be compiled as replicated.
    arguments = [
        jax.ShapeDtypeStruct(
            aval.shape,
            aval.dtype,
            sharding=NamedSharding(
                mesh,
                PartitionSpec(*(tuple(names) or None for names in entries)),
                memory_kind=HOST if aval.memory_space is jax.memory.Space.Host else None,
            ),
        )
        for aval, entries in zip(exported.in_avals, request["specs"], strict=True)
    ]
    options: dict[str, Any] = {}
    if request["platform"] == "tpu" and request["effort"] == "low":
        options = {"exec_time_optimization_effort": -1.0}
    started = time.monotonic()
    step = jax.jit(exported.call, donate_argnums=tuple(request["donated"]))
    compiled = step.lower(*arguments).compile(compiler_options=options or None)
    seconds = time.monotonic() - started
    memory = compiled.memory_analysis()
    results = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(
            exported.out_avals, jax.tree.leaves(compiled.output_shardings), strict=True
        )
    ]
    return {
        "seconds": seconds,
        "memory": {name: int(getattr(memory, f"{name}_in_bytes")) for name in _MEMORY},
        "collectives": [each.to_json() for each in read_collectives(compiled, mesh)],
        **(
            {
                "hlo": _hashed(_jax.whole_hlo_text(compiled)),
                "placed": [_placed(arguments), _placed(results)],
            }
            if request.get("hlo")
            else {}
        ),
    }


def _placed(arrays: Sequence[jax.ShapeDtypeStruct]) -> str:
    """Return a hash of which device holds which part of each array, without names of mesh axes."""

    @functools.cache
    def blocks(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> str:
        held: Mapping[Any, Any] = sharding.devices_indices_map(shape)
        text = {
            device.id: [part.indices(size) for part, size in zip(index, shape, strict=True)]
            for device, index in held.items()
        }
        return str(sorted(text.items()))

    texts = "\n".join(blocks(array.sharding, array.shape) for array in arrays)
    return hashlib.sha256(texts.encode()).hexdigest()


def _hashed(text: str) -> str:
    """Return the text of a program with hashes in place of the values of large constants."""

    def short(match: re.Match[str]) -> str:
        digest = hashlib.sha256(match[1].encode()).hexdigest()
        return match[0] if len(match[1]) <= _LITERAL else f" constant({{{digest[:32]}...}})"

    return _CONSTANT.sub(short, text)


def make_mesh(request: Mapping[str, Any]) -> Mesh:
    """Return the mesh of the target, its axes assigned to the slice as `mesh_utils` assigns them.

    Raises:
      RuntimeError: The compiler does not know the topology.
    """
    sizes: dict[str, int] = request["mesh"]
    shape = tuple(sizes.values())
    auto = (AxisType.Auto,) * len(shape)
    if request["platform"] == "cpu":
        # Set this before the first use of a backend, which fixes the number of its devices.
        jax.config.update("jax_num_cpu_devices", math.prod(shape))
        return Mesh(np.array(jax.devices("cpu")).reshape(shape), tuple(sizes), axis_types=auto)
    if request["platform"] == "gpu":
        gpus = topologies.get_topology_desc(platform="cuda", **request["options"]).devices
        return Mesh(np.array(gpus).reshape(shape), tuple(sizes), axis_types=auto)
    count = request.get("slices", 1)
    options = {**request["options"], **({"num_slices": count} if count > 1 else {})}
    topology = topologies.get_topology_desc(
        topology_name=request["topology"], platform="tpu", **options
    )
    if count > 1:
        spec = MeshSpec(names=tuple(sizes), sizes=shape, dcn=tuple(request["dcn"]))
        return Mesh(arrange_devices(spec, topology.devices), tuple(sizes), axis_types=auto)
    try:
        devices = mesh_utils.create_device_mesh(
            shape, devices=topology.devices, allow_split_physical_axes=True
        )
    except (NotImplementedError, TypeError, ValueError, AssertionError):
        # JAX cannot assign some meshes to a slice. Any order of the devices sends the same bytes.
        devices = np.array(topology.devices).reshape(shape)
    return Mesh(devices, tuple(sizes), axis_types=auto)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
