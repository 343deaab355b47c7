"""Export a planned program, so that another process can compile it for any devices."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final

import jax
import jax.export
from jax.sharding import AbstractDevice, AbstractMesh

from shardwright.errors import ProgramError, ShardingError
from shardwright.manager import context
from shardwright.manager.core import Manager
from shardwright.manager.memory import DEVICE, HOST, in_host_memory
from shardwright.plan.planner import Program
from shardwright.plan.trace import Trace, argument_of, fetching, hosted_outputs, sharding_of
from shardwright.resolution.partition_specs import entry_names

# Chips that libtpu compiles for -> JAX's name of the kind of a device, and its number of cores.
DEVICES: Final = {
    "v4": ("TPU v4", 2),
    "v5e": ("TPU v5 lite", 1),
    "v5p": ("TPU v5", 2),
    "v6e": ("TPU v6 lite", 1),
    "tpu7x": ("TPU7x", 1),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A program without devices.

    Attributes:
      program: The serialized `jax.export.Exported`. Its arguments are a flat list of arrays.
      text: The program as text without source lines, so that equal programs have equal texts.
      specs: Per array, the mesh axes of each dim. The serialized program does not have the mesh
        axes of unused arrays.
      donated: Positions of the arrays whose memory the program may overwrite.
      mesh: Size of each mesh axis.
    """

    program: bytes
    text: str
    specs: tuple[tuple[tuple[str, ...], ...], ...]
    donated: tuple[int, ...]
    mesh: dict[str, int]


def export_program(
    manager: Manager, program: Program, traced: Trace, *, platform: str, chip: str = ""
) -> Exported:
    """Export a program under a manager. No device is needed.

    Args:
      manager: Strategy, mesh and mode.
      program: The program to export.
      traced: Its trace, which has the annotations of the arguments and results.
      platform: `tpu`, `gpu` or `cpu`.
      chip: Name of the chip that kernels are made for. Required if the program calls a kernel.

    Raises:
      ShardingError: An annotation does not resolve.
      ProgramError: The program has a part that JAX cannot export.
    """
    shape = manager.mesh.shape
    device = None
    if chip in DEVICES:
        kind, cores = DEVICES[chip]
        device = AbstractDevice(device_kind=kind, num_cores=cores, platform=platform)
    mesh = AbstractMesh(
        tuple(shape.values()),
        tuple(shape),
        axis_types=manager.mesh.axis_types,
        abstract_device=device,
    )
    abstract = manager.having(mesh=mesh)

    leaves, structure = jax.tree.flatten(tuple(program.shapes))
    arguments = [
        argument_of(leaf, sharding_of(source, abstract))
        for leaf, source in zip(leaves, traced.inputs, strict=True)
    ]
    donated = [
        at in program.donated
        for at, tree in enumerate(program.shapes)
        for _ in jax.tree.leaves(tree)
    ]

    hosted = hosted_outputs(traced, abstract, donated)

    # Take and return lists of arrays, because `jax.export` serializes only classes that are
    # registered with it.
    def flat(*arrays: Any) -> list[Any]:
        function = fetching(abstract, program.function)
        results = jax.tree.leaves(function(*jax.tree.unflatten(structure, arrays)))
        return [
            jax.device_put(x, jax.memory.Space.Host) if goes and not in_host_memory(x) else x
            for x, goes in zip(results, hosted, strict=True)
        ]

    positions = tuple(at for at, may_overwrite in enumerate(donated) if may_overwrite)
    goals = [None if goal is None else sharding_of(goal, abstract) for goal in traced.outputs]
    step = jax.jit(
        flat,
        out_shardings=[
            None if goal is None else goal.with_memory_kind(HOST if goes else DEVICE)
            for goal, goes in zip(goals, hosted, strict=True)
        ],
        donate_argnums=positions,
    )
    try:
        with abstract, context.TARGET(platform):
            exported = jax.export.export(
                step,
                # `jax.export` takes "cuda" or "rocm" for GPUs, and not "gpu".
                platforms=["cuda" if platform == "gpu" else platform],
                disabled_checks=_CALLS,
            )(*arguments)
    # `ShardingError` is a ValueError, and already names the annotation.
    except ShardingError:
        raise
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ProgramError(
            f"JAX cannot export the program for {platform}: {error!s:.300}",
            fix="plan this program without --verify",
        ) from error
    return Exported(
        program=bytes(exported.serialize()),
        text=_LOCATION.sub("", exported.mlir_module()),
        specs=tuple(
            tuple(entry_names(entry) for entry in argument.sharding.spec.partitions)
            for argument in arguments
        ),
        donated=positions,
        mesh=dict(shape),
    )


_LOCATION = re.compile(
    r'^#loc.*$| ?loc\((?:#loc\d*|unknown|"[^"]*"(?:\(#loc\d*\))?)\)', re.MULTILINE
)
# Kernels, and constraints on the order of dims in memory, are custom calls. `jax.export` refuses
# custom calls, because another version of JAX may not read them. Here, both processes have the same
# version.
_CALLS = [
    jax.export.DisabledSafetyCheck.custom_call(name)
    for name in (
        *("tpu_custom_call", "LayoutConstraint", "annotate_device_placement"),
        *("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"),
    )
]
