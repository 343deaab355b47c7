"""Export a planned program, so that another process can compile it for any devices."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final

import jax
import jax.export
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding

from shardwright.errors import ProgramError, ShardingError
from shardwright.manager import context
from shardwright.manager.core import Manager
from shardwright.plan.planner import Program
from shardwright.plan.trace import Trace, argument_of
from shardwright.resolution.partition_specs import entry_names
from shardwright.resolution.request import ShardingRequest

# Chips that libtpu compiles for: the kind and the cores of a device, as JAX names them there.
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
      specs: Per array, the mesh axes of each dim. The serialized program does not have those of
        unused arrays.
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
      program: What to export.
      traced: Its trace, which has the annotations of the arguments and results.
      platform: `tpu`, `gpu` or `cpu`.
      chip: Name of the chip, which kernels are made for. Required if the program calls one.

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

    def sharding(source: ShardingRequest | NamedSharding | None) -> NamedSharding | None:
        if source is None:
            return None
        if isinstance(source, NamedSharding):
            return NamedSharding(mesh, source.spec)
        return NamedSharding(mesh, abstract.answer(source).require())

    leaves, structure = jax.tree.flatten(tuple(program.shapes))
    arguments = [
        argument_of(leaf, sharding(source) or NamedSharding(mesh, jax.P()))
        for leaf, source in zip(leaves, traced.inputs, strict=True)
    ]
    donated = [
        at in program.donated
        for at, tree in enumerate(program.shapes)
        for _ in jax.tree.leaves(tree)
    ]

    # Lists of arrays: `jax.export` serializes only those classes that are registered with it.
    def flat(*arrays: Any) -> list[Any]:
        return jax.tree.leaves(program.function(*jax.tree.unflatten(structure, arrays)))

    positions = tuple(at for at, may_overwrite in enumerate(donated) if may_overwrite)
    step = jax.jit(
        flat,
        out_shardings=[sharding(goal) for goal in traced.outputs],
        donate_argnums=positions,
    )
    try:
        with abstract, context.TARGET(platform):
            exported = jax.export.export(
                step,
                # JAX has two kinds of GPUs.
                platforms=["cuda" if platform == "gpu" else platform],
                disabled_checks=_CALLS,
            )(*arguments)
    # `ShardingError` is a ValueError, and already names the annotation.
    except ShardingError:
        raise
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ProgramError(
            f"JAX cannot export the program for {platform}: {error!s:.300}",
            fix="plan it without --verify",
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
# Kernels and orders of dims in memory are custom calls. Export refuses them because another version
# of JAX may not read them. Here, both processes have the same version.
_CALLS = [
    jax.export.DisabledSafetyCheck.custom_call(name)
    for name in (
        *("tpu_custom_call", "LayoutConstraint"),
        *("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"),
    )
]
