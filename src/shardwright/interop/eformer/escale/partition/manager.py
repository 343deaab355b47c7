"""eformer's `PartitionManager`: rules without a mesh, applied on the current mesh."""

from __future__ import annotations

import dataclasses
from typing import Any, final

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardwright.errors import NoManagerError, ShapeRequiredError, StrategyError
from shardwright.interop.eformer.absent import __getattr__  # noqa: F401
from shardwright.interop.eformer.axis import (
    PartitionAxis,
    Registered,
    registered_axes,
    written_spec,
)
from shardwright.interop.eformer.errors import WrongTypeError
from shardwright.interop.eformer.escale.partition.constraints import (
    POLICY_VARIABLE,
    default_policy,
    is_strict,
    parse_policy,
    warn_of_changes,
)
from shardwright.interop.eformer.meshes import no_mesh
from shardwright.manager import context
from shardwright.manager import manager as native
from shardwright.manager.ambient import current_mesh
from shardwright.resolution.decisions import Resolution
from shardwright.resolution.rules import AxisRules, Policy
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.axes import EMPTY_VAL, NOT_GIVEN
from shardwright.vocabulary.layouts import DynamicShardingAxes, StackedLayout
from shardwright.vocabulary.lowering import mode_of_layout
from shardwright.vocabulary.modes import MODE_TRAIN

__all__ = [
    "PartitionAxis",
    "PartitionManager",
    "apply_logical_sharding",
    "get_current_partition_manager",
    "get_partition_manager",
]


@jax.tree_util.register_static
@final
@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class PartitionManager:
    """Resolve axes by a `PartitionAxis`, and place arrays accordingly on the current mesh.

    The manager uses the axes that are registered when it is built. It is frozen and hashable. While
    it is entered, it is part of jit's cache key.

    Args:
      paxis: The rules.
      mesh: Defaults to that of `jax.set_mesh`, of a surrounding `shard_map`, or of a legacy
        `with mesh:`.
      policy: What happens to a dim that does not fit. `"strict"` raises an error. `"eformer"`
        replicates the dim, and `explain` shows this. A `Policy` is possible too. Defaults to the
        environment variable `SHARDWRIGHT_EFORMER_POLICY`, which is read once, else to `"strict"`.

    Raises:
      WrongTypeError: `paxis` is not a `PartitionAxis`.
      StrategyError: The policy is unknown, or registered aliases form a cycle.
    """

    paxis: PartitionAxis
    mesh: Mesh | AbstractMesh | None
    rules: AxisRules
    registered: Registered
    note: str
    _hash: int
    _key: context.Key

    def __init__(
        self,
        paxis: PartitionAxis,
        *,
        mesh: Mesh | AbstractMesh | None = None,
        policy: Policy | str | None = None,
    ) -> None:
        if not isinstance(paxis, PartitionAxis):
            raise WrongTypeError(
                f"Expected PartitionAxis, got {type(paxis).__name__}",
                fix="pass shardwright.interop.eformer.PartitionAxis(...); a Strategy goes to "
                "shardwright.PartitionManager",
            )
        registered = registered_axes()
        default = default_policy() if policy is None else ""
        rules = paxis.compile(
            policy=parse_policy(default or policy or "strict"), registered=registered
        )
        # JAX keeps the key, so the key must not hold the manager. `repr(paxis)` stands for `paxis`
        # in the key, because it shows all fields.
        key = (rules.fingerprint(), mesh, repr(paxis))
        # The dataclass is frozen, so set its fields by `object.__setattr__`.
        for name, value in {
            "paxis": paxis,
            "mesh": mesh,
            "rules": rules,
            "registered": registered,
            # Where the policy comes from, if the program does not state one.
            "note": f"policy {default!r} by {POLICY_VARIABLE}" if default else "",
            "_hash": hash((rules, mesh)),
            "_key": context.key_of(key, f"PartitionManager({paxis!r})"),
        }.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, PartitionManager)
            and (self.mesh, self.rules, self.paxis) == (other.mesh, other.rules, other.paxis)
        )

    def __hash__(self) -> int:
        return self._hash

    # A copied model shares its manager, because a mesh of devices cannot be copied.
    def __copy__(self) -> PartitionManager:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PartitionManager:
        return self

    def __repr__(self) -> str:
        return f"PartitionManager({self.paxis!r}, mesh={self.mesh!r}, policy={self.rules.policy!r})"

    def __enter__(self) -> PartitionManager:
        context.enter(self, self.mesh, self._key)
        return self

    def __exit__(self, *exc: object) -> None:
        context.leave(self)

    def resolve(
        self,
        axes: Any = NOT_GIVEN,
        mode: Any = NOT_GIVEN,
        dynamic_axes: Any = NOT_GIVEN,
        shape: Any = NOT_GIVEN,
    ) -> PartitionSpec:
        """Return the spec that the rules give, with one entry per dim.

        `shard` checks sizes. This method checks them only if a rule depends on a size.

        Args:
          axes: A list with an entry per dim, or a layout. An entry is an axis, None, or a list of
            axes (one dim over several).
          mode: A runtime mode, or the index of a dim. If this dim has the size 1, the mode is
            decode, else train. Defaults to the mode of the layout, else to train.
          dynamic_axes: A layout.
          shape: Required if the mode is an index.

        Raises:
          UnknownAxisError, AxisConflictError, ShapeRequiredError, StrategyError: The problems that
            `explain` lists.
        """
        annotation, mode_name = self._request(axes, mode, dynamic_axes)
        sizes = None if _absent(shape) else tuple(shape)
        if not isinstance(annotation, DynamicShardingAxes):
            return self.native().resolve(annotation, mode=mode_name, shape=sizes)
        layout_mode = annotation.mode if mode_name is None else mode_name
        if isinstance(layout_mode, int) and sizes is None:
            raise ShapeRequiredError(
                "when using dynamic mode detection shape should be provided",
                fix="pass shape=x.shape",
            )
        runtime_mode = mode_of_layout(layout_mode, sizes)
        mesh = current_mesh() if self.mesh is None else self.mesh
        try:
            dims = [tuple(dim) if isinstance(dim, list) else dim for dim in annotation.axes]
            rules = self.paxis.compile(registered=self.registered)
            return written_spec(dims, rules, runtime_mode, mesh)
        except ShapeRequiredError:  # a rule has several candidates, unlike in eformer
            if sizes is None:
                raise
            return self.native().resolve(annotation, mode=runtime_mode, shape=sizes)

    def explain(
        self,
        axes: Any = NOT_GIVEN,
        mode: Any = NOT_GIVEN,
        dynamic_axes: Any = NOT_GIVEN,
        shape: Any = NOT_GIVEN,
    ) -> Resolution:
        """Return the decision of `shard` for each dim on the current mesh, and what a policy drops.

        Raises:
          NoMeshError: There is no mesh.
        """
        annotation, mode_name = self._request(axes, mode, dynamic_axes)
        found = self.native().explain(
            annotation, mode=mode_name, shape=None if _absent(shape) else shape
        )
        return dataclasses.replace(found, notes=(*found.notes, self.note)) if self.note else found

    def shard(
        self,
        x: Any,
        axes: Any = NOT_GIVEN,
        mode: Any = NOT_GIVEN,
        dynamic_axes: Any = NOT_GIVEN,
        auto_correct: bool = True,
    ) -> Any:
        """Place an array, or each array of a tree, by the spec of its axes on the current mesh.

        Args:
          x: JAX or NumPy arrays.
          axes: See `resolve`.
          mode: See `resolve`.
          dynamic_axes: See `resolve`.
          auto_correct: False makes every misfit an error, whatever the policy.

        Raises:
          NoMeshError: There is no mesh.
          ShardingError: The axes do not fit. The error lists the problems of all leaves.
        """
        annotation, mode_name = self._request(axes, mode, dynamic_axes)
        manager = self.native(strict=not auto_correct)
        warn_of_changes(manager, x, annotation, mode_name)
        return manager.shard(x, annotation, mode=mode_name)

    def native(self, *, strict: bool = False) -> native.PartitionManager:
        """Return the `shardwright.PartitionManager` of these rules on the current mesh.

        If managers share one `PartitionAxis` object, and have equal rules and the same mesh, they
        return the same object.

        Raises:
          NoMeshError: There is no mesh.
          MeshMismatchError: Under a strict policy, the mesh and the rules do not fit together.
        """
        mesh = self.mesh if self.mesh is not None else current_mesh()
        if mesh is None:
            raise no_mesh()
        rules = self.paxis.compile(registered=self.registered) if strict else self.rules
        # The cache belongs to the `PartitionAxis`, because some code builds a manager per call.
        manager: native.PartitionManager | None = self.paxis._cache.get((rules, mesh))
        if manager is None:
            manager = self.paxis._cache.setdefault(
                (rules, mesh), native.PartitionManager(rules, mesh=mesh)
            )
        return manager

    def _request(self, axes: Any, mode: Any, dynamic_axes: Any) -> tuple[Any, str | None]:
        """Return the annotation of a call, and its mode. Axes in a list become a layout."""
        annotation, mode_name = read_request(axes, mode, dynamic_axes)
        if not isinstance(annotation, DynamicShardingAxes):
            return annotation, mode_name
        key = (annotation, self.rules)
        layout = self.paxis._cache.get(key)
        if layout is None:
            layout = self.paxis._cache[key] = self._spelled(annotation)
        return layout, mode_name

    def _spelled(self, layout: DynamicShardingAxes) -> DynamicShardingAxes:
        """Check the names of a layout, and replace its mesh axes by their parallelism axes."""
        dims = self.paxis.spelled(layout.axes, self.rules)
        same = dims == tuple(tuple(dim) if isinstance(dim, list) else dim for dim in layout.axes)
        return layout if same else DynamicShardingAxes(dims, layout.mode)

    # The methods that `shardwright.shard`, `hint` and `gather` call on the ambient manager.

    def place(
        self, x: Any, axes: tuple[Any, ...], mode: str | None, role: Any, strict: bool = True
    ) -> Any:
        """See `shardwright.shard`."""
        return self.native().place(x, axes, mode, role, strict)

    def hint(self, x: Any, *axes: Any, mode: str | None = None, role: Any = None) -> Any:
        """See `shardwright.PartitionManager.hint`."""
        return self.native().hint(x, *axes, mode=mode, role=role)

    def gather(
        self,
        w: Any,
        *axes: Any,
        path: str | None = None,
        mode: str | None = None,
        shape: Any = None,
    ) -> Any:
        """See `shardwright.PartitionManager.gather`."""
        return self.native().gather(w, *axes, path=path, mode=mode, shape=shape)


def _absent(value: Any) -> bool:
    return value is None or isinstance(value, EMPTY_VAL)


def read_request(axes: Any, mode: Any, dynamic_axes: Any) -> tuple[Any, str | None]:
    """Return the annotation of a call, and its mode if the mode is a name.

    A list or a class becomes an instance of a layout. A mode that is an index becomes the mode of
    the layout.

    Raises:
      StrategyError: The call has no annotation, or it has two: `axes` and `dynamic_axes`.
    """
    if _absent(axes) == _absent(dynamic_axes):
        what = (
            "neither axes nor dynamic_axes is given"
            if _absent(axes)
            else "axes and dynamic_axes are both given"
        )
        raise StrategyError(
            what, fix="pass one: axes=[BATCH, LENGTH, EMBED], or dynamic_axes=HiddenStateSharding"
        )
    annotation = dynamic_axes if _absent(axes) else axes
    mode_name = None if _absent(mode) or isinstance(mode, int) else mode
    # An integer mode is the index of a dim. The index is for the layout, which reads the mode from
    # the size of this dim.
    index = {"mode": mode} if isinstance(mode, int) else {}
    if isinstance(annotation, type) and issubclass(annotation, DynamicShardingAxes):
        return annotation(**index), mode_name
    if isinstance(annotation, DynamicShardingAxes):
        return type(annotation)(annotation.axes, **{"mode": annotation.mode, **index}), mode_name
    if isinstance(annotation, (StackedLayout, ArraySpec, PartitionSpec)):
        return annotation, mode_name
    return DynamicShardingAxes(annotation, **{"mode": MODE_TRAIN, **index}), mode_name


def get_current_partition_manager() -> Any:
    """Return the ambient manager, which may be a `shardwright.PartitionManager`, or None."""
    return context.current()


# eformer returns the manager that was built last. Here, a manager is not ambient until it is
# entered.
get_partition_manager = get_current_partition_manager


def apply_logical_sharding(
    x: Any,
    partition_manager: Any = NOT_GIVEN,
    axes: Any = NOT_GIVEN,
    mode: Any = NOT_GIVEN,
    dynamic_axes: Any = NOT_GIVEN,
    auto_correct: bool = True,
) -> Any:
    """Place an array by the spec that its axes resolve to.

    Example: `apply_logical_sharding(x, dynamic_axes=HiddenStateSharding, partition_manager=pm)`.

    Args:
      x: JAX or NumPy arrays.
      partition_manager: A manager of this package, or a `shardwright.PartitionManager`. Defaults to
        the ambient manager.
      axes: See `PartitionManager.resolve`.
      mode: See `PartitionManager.resolve`.
      dynamic_axes: See `PartitionManager.resolve`.
      auto_correct: See `PartitionManager.shard`.

    Raises:
      NoManagerError: No manager is given, and none is entered in this thread.
      ShardingError: See `PartitionManager.shard`.
    """
    manager = context.current() if _absent(partition_manager) else partition_manager
    if manager is None:
        raise NoManagerError(
            "No PartitionManager is available in this thread",
            fix="pass partition_manager=, or make the call inside `with pm:`",
        )
    if isinstance(manager, PartitionManager):
        return manager.shard(x, axes, mode, dynamic_axes, auto_correct)
    if not isinstance(manager, native.PartitionManager):
        raise WrongTypeError(
            f"{manager!r} is not a PartitionManager",
            fix="pass a PartitionManager of shardwright.interop.eformer or of shardwright",
        )
    if not auto_correct and not is_strict(manager.rules.policy):
        raise StrategyError(
            "auto_correct=False needs a strict policy",
            fix="make the [policy] of the strategy strict",
        )
    annotation, mode_name = read_request(axes, mode, dynamic_axes)
    return manager.shard(x, annotation, mode=mode_name)
