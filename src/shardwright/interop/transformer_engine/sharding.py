"""Logical axis names of TransformerEngine, and which mesh axes they stand for.

Names are mapped to mesh axes by the first of these that is set: flax's logical axis rules, an
ambient `PartitionManager` (through `NAMES`), a `MeshResource`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, Final

import jax
from jax.sharding import PartitionSpec

from shardwright import _jax
from shardwright.errors import (
    AxisConflictError,
    MissingMeshAxisError,
    NoManagerError,
    RankMismatchError,
    StrategyError,
    UnknownAxisError,
    did_you_mean,
)
from shardwright.interop.logical_rules import Names
from shardwright.manager import constraint, context
from shardwright.manager.constraint import make_placement
from shardwright.resolution.partition_specs import entry_names
from shardwright.vocabulary.axes import (
    BATCH,
    EMBED,
    EMPTY,
    HEAD,
    LENGTH,
    MLP_INTERMEDIATE,
    NORM,
    QUERY_LENGTH,
)

BATCH_AXES: Final = "nvte_batch"
SEQLEN_AXES: Final = "nvte_seqlen"
SEQLEN_TP_AXES: Final = "nvte_seqlen_tp"
SEQLEN_CP_AXES: Final = "nvte_seqlen_cp"
HEAD_AXES: Final = "nvte_head"
HIDDEN_AXES: Final = "nvte_hidden"
HIDDEN_TP_AXES: Final = "nvte_hidden_tp"
JOINED_AXES: Final = "nvte_joined"
W_NO_SHARD_AXES: Final = "nvte_w_no_shard"
W_FSDP_AXES: Final = "nvte_w_fsdp"
W_TP_AXES: Final = "nvte_w_tp"
W_JOINED_AXES: Final = "nvte_w_joined"

# The axis and the role of each name, for `interop.flax` and under an ambient manager.
NAMES: Final[Names] = MappingProxyType(
    {
        BATCH_AXES: (BATCH, "activation"),
        SEQLEN_AXES: (QUERY_LENGTH, "activation"),
        SEQLEN_TP_AXES: (LENGTH, "activation"),
        SEQLEN_CP_AXES: (QUERY_LENGTH, "activation"),
        HEAD_AXES: (HEAD, "activation"),
        HIDDEN_AXES: (EMBED, "activation"),
        HIDDEN_TP_AXES: (MLP_INTERMEDIATE, "activation"),
        JOINED_AXES: EMPTY,
        W_NO_SHARD_AXES: (NORM, "param"),
        W_FSDP_AXES: (EMBED, "param"),
        W_TP_AXES: (MLP_INTERMEDIATE, "param"),
        W_JOINED_AXES: EMPTY,
    }
)


@dataclasses.dataclass(frozen=True)
class MeshResource:
    """Which mesh axis each kind of parallelism uses. None turns a kind off.

    Attributes:
      dp_resource: Data parallelism.
      tp_resource: Tensor parallelism of heads and hidden dims.
      tpsp_resource: Tensor parallelism that also shards the sequence. Set this field or
        `tp_resource`, not both.
      fsdp_resource: Batch and weights. If its mesh axis has more than one device, the batch is
        sharded over it instead of over `dp_resource`.
      pp_resource: Stages of layers. Each stage has its own fp8 scales.
      cp_resource: The sequence in attention.
      ep_resource: Experts.
    """

    dp_resource: str | None = None
    tp_resource: str | None = None
    tpsp_resource: str | None = None
    fsdp_resource: str | None = None
    pp_resource: str | None = None
    cp_resource: str | None = None
    ep_resource: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AutocastSettings:
    """The settings of a thread, which the contexts of this bridge change.

    Attributes:
      resource: The `MeshResource`, or None.
      recipe: The fp8 recipe, of `shardwright.layers.fp8`, or None.
    """

    resource: MeshResource | None = None
    recipe: Any = None


def current_settings() -> AutocastSettings:
    """Return the settings of this thread."""
    settings: AutocastSettings | None = context.SETTINGS.value
    return AutocastSettings() if settings is None else settings


@contextlib.contextmanager
def settings_entered(settings: AutocastSettings) -> Iterator[None]:
    """Set the settings of this thread, and restore the earlier ones on exit.

    The settings are part of jit's cache key: a jitted function is traced again under other
    settings.
    """
    resource: Any = settings.resource
    if not isinstance(resource, MeshResource | None):
        raise StrategyError(
            f"mesh_resource is a {type(resource).__name__}", fix="pass MeshResource(...)"
        )
    with context.SETTINGS(settings):
        yield


@contextlib.contextmanager
def global_shard_guard(resource: MeshResource | None) -> Iterator[None]:
    """Set the `MeshResource` of this thread, and restore the earlier one on exit.

    The recipe does not change. A jitted function is traced again under another `MeshResource`.
    """
    with settings_entered(dataclasses.replace(current_settings(), resource=resource)):
        yield


def global_mesh_resource() -> MeshResource:
    """Return the `MeshResource` that is set.

    Raises:
      NoManagerError: No `MeshResource` is set.
      AxisConflictError: `tp_resource` and `tpsp_resource` both have more than one device.
    """
    resource = current_settings().resource
    if resource is None:
        raise NoManagerError(
            "no MeshResource is set",
            fix="with global_shard_guard(MeshResource(...)):, or autocast(mesh_resource=...), or "
            "enter a PartitionManager",
        )
    mesh = _jax.mesh_at_hand()
    both = (resource.tp_resource, resource.tpsp_resource)
    if mesh is not None and all(_size(mesh, axis) > 1 for axis in both):
        raise AxisConflictError(
            f"tp_resource={both[0]!r} and tpsp_resource={both[1]!r} both have more than one device",
            fix="set only one of the two; tpsp_resource also shards the sequence",
        )
    return resource


def _size(mesh: Any, axis: str | None) -> int:
    """Return the size of a mesh axis, 1 for None."""
    if axis is None:
        return 1
    if axis not in mesh.axis_names:
        known = ", ".join(mesh.axis_names)
        raise MissingMeshAxisError(
            f"the MeshResource names {axis!r}, and the mesh has {known}",
            fix=f"{did_you_mean(axis, mesh.axis_names)} name an axis of the mesh".strip(),
        )
    return int(mesh.shape[axis])


def _manual_axes() -> tuple[str, ...]:
    """Return the mesh axes that a surrounding `shard_map` has made Manual."""
    mesh = _jax.ambient_mesh()
    return () if mesh is None else tuple(mesh.manual_axes)


def mesh_axes_of_names() -> dict[str, str | None]:
    """Return the mesh axis that the `MeshResource` gives each name; empty if there is no mesh.

    Raises:
      NoManagerError: There is a mesh, and no `MeshResource` is set.
      MissingMeshAxisError: The `MeshResource` names an axis that the mesh lacks.
    """
    mesh = _jax.mesh_at_hand()
    # Inside a `shard_map` over all axes, there is nothing left to shard.
    if mesh is None or set(_manual_axes()) == set(mesh.axis_names):
        return {}
    resource = global_mesh_resource()
    # Also check the axes that no name uses, so that a misspelled axis is found before its first
    # use.
    for axis in dataclasses.astuple(resource):
        _size(mesh, axis)
    is_sharded = _size(mesh, resource.tpsp_resource) > 1
    # `tpsp_resource` also shards the dims that `tp_resource` shards. At most one of the two has
    # more than one device.
    tensor = resource.tpsp_resource if is_sharded else resource.tp_resource
    is_fsdp = _size(mesh, resource.fsdp_resource) > 1
    return {
        # FSDP replaces plain data parallelism, as in `get_sharding_map_logic_axis_to_mesh_axis`.
        BATCH_AXES: resource.fsdp_resource if is_fsdp else resource.dp_resource,
        SEQLEN_AXES: None,
        SEQLEN_TP_AXES: resource.tpsp_resource,
        SEQLEN_CP_AXES: resource.cp_resource,
        HEAD_AXES: tensor,
        HIDDEN_AXES: None,
        HIDDEN_TP_AXES: tensor,
        JOINED_AXES: None,
        W_NO_SHARD_AXES: None,
        W_FSDP_AXES: resource.fsdp_resource,
        W_TP_AXES: tensor,
        W_JOINED_AXES: None,
    }


def extend_logical_axis_rules(
    rules: Iterable[tuple[str, str | None]],
) -> tuple[tuple[str, str | None], ...]:
    """Return `rules`, followed by a rule for each name of TransformerEngine that `rules` lacks.

    Without a mesh, the rules are returned as they are.

    Args:
      rules: Pairs of a logical name and a mesh axis or None.

    Raises:
      StrategyError: A rule is not such a pair.
      AxisConflictError: A rule gives one of TransformerEngine's names another mesh axis than the
        `MeshResource`, or a second mesh axis.
    """
    pairs: Any = tuple(tuple(rule) if isinstance(rule, Sequence) else rule for rule in rules)
    for rule in pairs:
        match rule:
            case (str(), str() | None):
                continue
        raise StrategyError(
            f"{rule!r} is not a pair of a logical name and one mesh axis or None",
            fix='write ("batch", "data")',
        )
    known = mesh_axes_of_names()
    for name, axis in known.items():
        given = [value for own, value in pairs if own == name]
        # TransformerEngine also asserts that a rule for one of its names agrees with the
        # MeshResource.
        if given not in ([], [axis]):
            raise AxisConflictError(
                f"the rules map {name!r} to {', '.join(map(repr, given))}, and the MeshResource to "
                f"{axis!r}",
                fix="leave the name out of the rules, or change the MeshResource",
            )
    given_names = {name for name, _ in pairs}
    return (*pairs, *(item for item in known.items() if item[0] not in given_names))


def constrain(x: jax.Array, names: Sequence[str | None] | None) -> jax.Array:
    """Constrain the sharding of `x` by the logical names of its dims.

    Without names, `x` is not constrained. If no name has a mesh axis, a manager replicates `x`, but
    flax's rules and a `MeshResource` do not constrain `x`.

    Raises:
      RankMismatchError: There are more or fewer names than dims.
      UnknownAxisError: A manager is ambient, and a name is not in `NAMES`.
      NoManagerError: There is a mesh, and neither rules, nor a manager, nor a `MeshResource`.
    """
    if not names:
        return x
    if len(names) != x.ndim:
        raise RankMismatchError(
            f"x has shape {x.shape}, and its dims have the names {tuple(names)}",
            path="x",
            fix=f"give {x.ndim} names, None for a dim that is not sharded",
        )
    from flax.linen import get_logical_axis_rules
    from flax.linen.spmd import logical_to_mesh_axes

    if get_logical_axis_rules():
        return _constrain_to_spec(x, logical_to_mesh_axes(tuple(names)))
    manager = context.current()
    if manager is not None:
        placed: jax.Array = manager.shard(x, tuple(_axis_of(name) for name in names))
        return placed
    table = mesh_axes_of_names()
    # "" is not a name of the table, so a dim without a name is not sharded.
    return _constrain_to_spec(x, PartitionSpec(*(table.get(name or "") for name in names)))


def shards_of(
    names: Sequence[str | None] | None, shape: Sequence[int], *, role: str
) -> tuple[tuple[tuple[str, int], ...], ...] | None:
    """Return, for each dim, the mesh axes that its name stands for, with their sizes.

    Return None if the mesh axes are not known, because there are no names, no mesh or no
    `MeshResource`, or because a manager does not know a name. Inside `shard_map`, where shapes are
    local, return None too.

    Args:
      names: A name or None for each dim.
      shape: Sizes of the dims.
      role: "activation" or "param".
    """
    from flax.linen import get_logical_axis_rules
    from flax.linen.spmd import logical_to_mesh_axes

    manager, mesh, spec = context.current(), _jax.mesh_at_hand(), None
    if not names or len(names) != len(shape) or _manual_axes():
        return None
    if get_logical_axis_rules():
        spec = logical_to_mesh_axes(tuple(names))
    elif manager is not None:
        mesh = manager.mesh
        if all(name is None or name in NAMES for name in names):
            axes = tuple(map(_axis_of, names))
            spec = manager.explain(axes, shape=tuple(shape), role=role).spec
    elif current_settings().resource is not None:
        table = mesh_axes_of_names()
        spec = PartitionSpec(*(table.get(name or "") for name in names))
    if spec is None or mesh is None:
        return None
    sizes = mesh.shape
    return tuple(
        tuple((axis, sizes[axis]) for axis in entry_names(entry) if axis in sizes)
        # A spec may leave out trailing dims that are not sharded.
        for entry in (*spec, *[None] * (len(shape) - len(spec)))
    )


def _axis_of(name: str | None) -> str:
    if name is None:
        return EMPTY
    if name not in NAMES:
        raise UnknownAxisError(
            f"{name!r} is not a logical name of TransformerEngine",
            fix=f"{did_you_mean(name, NAMES)} enter flax's logical axis rules, with "
            "interop.flax.rules(pm, names)".strip(),
        )
    target = NAMES[name]
    return target if isinstance(target, str) else target[0]


def _constrain_to_spec(x: jax.Array, spec: Any) -> jax.Array:
    mesh = _jax.mesh_at_hand()
    manual = _manual_axes()

    def free(entry: Any) -> Any:
        axes = entry if isinstance(entry, tuple) else (entry,)
        # JAX refuses Manual axes in a constraint: the array is already local along them.
        left = tuple(axis for axis in axes if axis is not None and axis not in manual)
        return left or None

    entries = tuple(map(free, spec or ()))
    if mesh is None or not any(entries):
        return x
    placement = make_placement(PartitionSpec(*entries), mesh, _jax.ambient_mesh())
    placed: jax.Array = constraint.constrain(x, placement)
    return placed
