"""`PartitionManager` as eformer has it: rules without a mesh of their own, applied on whatever mesh is at hand."""

from __future__ import annotations

from typing import Any, NoReturn, final

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardwright.errors import NoManagerError, ShapeRequiredError, StrategyError
from shardwright.interop.eformer import registry
from shardwright.interop.eformer.axis import PartitionAxis, written_spec
from shardwright.interop.eformer.constraints import is_strict, parse_policy, warn_of_changes
from shardwright.interop.eformer.errors import WrongTypeError
from shardwright.interop.eformer.meshes import current_mesh, no_mesh
from shardwright.manager import context
from shardwright.manager import manager as native
from shardwright.resolution.decisions import Resolution
from shardwright.resolution.rules import AxisRules, Policy
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.axes import EMPTY_VAL, NOT_GIVEN
from shardwright.vocabulary.layouts import DynamicShardingAxes, StackedLayout
from shardwright.vocabulary.lowering import mode_of_layout
from shardwright.vocabulary.modes import MODE_TRAIN


@jax.tree_util.register_static
@final
class PartitionManager:
    """Resolve axes by a `PartitionAxis`, and make arrays lie so on the mesh at hand.

    The axes registered when it is built are its own: what is registered later changes nothing. Frozen and hashable; entered,
    it is part of jit's cache key.

    Args:
      paxis: the rules.
      mesh: a mesh of its own; absent: that of `jax.set_mesh`, of a surrounding `shard_map`, or of a legacy `with mesh:`.
      policy: what is done with a dim that does not fit: `"strict"`: an error; `"eformer"`: it is replicated, recorded in what
        `explain` returns; or any `Policy`.

    Raises:
      WrongTypeError: no `PartitionAxis`.
      StrategyError: no such policy, or registered aliases in a circle.
    """

    __slots__ = ("__weakref__", "_hash", "_key", "mesh", "paxis", "registered", "rules")

    paxis: PartitionAxis
    mesh: Mesh | AbstractMesh | None
    rules: AxisRules
    registered: registry.Registered
    _hash: int
    _key: context.Key

    def __init__(
        self,
        paxis: PartitionAxis,
        *,
        mesh: Mesh | AbstractMesh | None = None,
        policy: Policy | str = "strict",
    ) -> None:
        if not isinstance(paxis, PartitionAxis):
            raise WrongTypeError(
                f"Expected PartitionAxis, got {type(paxis).__name__}",
                fix="pass shardwright.interop.eformer.PartitionAxis(...); a Strategy goes to shardwright.PartitionManager",
            )
        registered = registry.registered_axes()
        rules = paxis.compile(policy=parse_policy(policy), registered=registered)
        values: dict[str, Any] = {
            "paxis": paxis,
            "mesh": mesh,
            "registered": registered,
            "rules": rules,
            "_hash": hash((rules, mesh)),
            # What JAX keeps must not keep the manager; the text of paxis has every field that counts for equality.
            "_key": context.Key(
                (rules.fingerprint(), mesh, repr(paxis)), f"PartitionManager({paxis!r})"
            ),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"a PartitionManager is frozen: build another one instead of setting {name!r}"
        )

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, PartitionManager) and (self.mesh, self.rules, self.paxis) == (
            other.mesh,
            other.rules,
            other.paxis,
        )

    def __hash__(self) -> int:
        return self._hash

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
        """Return the spec that the rules write, one entry per axis, divisibility unseen: `shard` is what looks at sizes.

        Args:
          axes: a list of axes, None and lists of axes (one dim over several), or a layout.
          mode: a runtime mode, or the index of a dim whose size picks it: 1 means decode, any other train. It goes before the
            layout's own; without either it is train.
          dynamic_axes: a layout.
          shape: needed where the mode is an index.

        Raises:
          UnknownAxisError, AxisConflictError, ShapeRequiredError, StrategyError: what `explain` would list.
        """
        annotation, said = self._asked(axes, mode, dynamic_axes)
        sizes = None if _absent(shape) else tuple(shape)
        if not isinstance(annotation, DynamicShardingAxes):
            return self.native().resolve(annotation, mode=said, shape=sizes)
        asked = annotation.mode if said is None else said
        if isinstance(asked, int) and sizes is None:
            raise ShapeRequiredError(
                "when using dynamic mode detection shape should be provided",
                fix="pass shape=x.shape",
            )
        found = mode_of_layout(asked, sizes)
        mesh = current_mesh() if self.mesh is None else self.mesh
        try:
            dims = [tuple(dim) if isinstance(dim, list) else dim for dim in annotation.axes]
            return written_spec(dims, self.paxis.compile(registered=self.registered), found, mesh)
        except ShapeRequiredError:  # a rule with several candidates, which eformer does not have
            if sizes is None:
                raise
            return self.native().resolve(annotation, mode=found, shape=sizes)

    def explain(
        self,
        axes: Any = NOT_GIVEN,
        mode: Any = NOT_GIVEN,
        dynamic_axes: Any = NOT_GIVEN,
        shape: Any = NOT_GIVEN,
    ) -> Resolution:
        """Return how `shard` would decide on the mesh at hand, dim by dim: also what a permissive policy drops.

        Raises:
          NoMeshError: there is no mesh.
        """
        annotation, said = self._asked(axes, mode, dynamic_axes)
        return self.native().explain(annotation, mode=said, shape=None if _absent(shape) else shape)

    def shard(
        self,
        x: Any,
        axes: Any = NOT_GIVEN,
        mode: Any = NOT_GIVEN,
        dynamic_axes: Any = NOT_GIVEN,
        auto_correct: bool = True,
    ) -> Any:
        """Make an array, or every array of a tree, lie as its axes resolve on the mesh at hand.

        Args:
          x: JAX or NumPy arrays.
          axes: see `resolve`.
          mode: see `resolve`.
          dynamic_axes: see `resolve`.
          auto_correct: False: what does not fit is an error whatever the policy.

        Raises:
          NoMeshError: there is no mesh.
          ShardingError: what does not fit; every leaf's problems at once.
        """
        annotation, said = self._asked(axes, mode, dynamic_axes)
        used = self.native(strict=not auto_correct)
        warn_of_changes(used, x, annotation, said)
        return used.shard(x, annotation, mode=said)

    def native(self, *, strict: bool = False) -> native.PartitionManager:
        """Return the `shardwright.PartitionManager` of these rules on the mesh at hand; the same one each time.

        Raises:
          NoMeshError: there is no mesh.
          MeshMismatchError: under a strict policy, a mesh and rules that do not go together.
        """
        mesh = self.mesh if self.mesh is not None else current_mesh()
        if mesh is None:
            raise no_mesh()
        rules = self.paxis.compile(registered=self.registered) if strict else self.rules
        # Kept with the rules: some code builds a manager for every call.
        made: native.PartitionManager | None = self.paxis._cache.get((rules, mesh))
        if made is None:
            made = self.paxis._cache.setdefault(
                (rules, mesh), native.PartitionManager(rules, mesh=mesh)
            )
        return made

    def _asked(self, axes: Any, mode: Any, dynamic_axes: Any) -> tuple[Any, str | None]:
        """Return what is asked for as a layout, and the mode that goes before the layout's own; other annotations as they are."""
        annotation, said = asked(axes, mode, dynamic_axes)
        if not isinstance(annotation, DynamicShardingAxes):
            return annotation, said
        key = (annotation, self.rules)
        found = self.paxis._cache.get(key)
        if found is None:
            found = self.paxis._cache[key] = self._spelled(annotation)
        return found, said

    def _spelled(self, layout: DynamicShardingAxes) -> DynamicShardingAxes:
        """Return a layout whose names are all known; another one where a mesh axis among them was spelled as a parallelism axis."""
        dims = self.paxis.spelled(layout.axes, self.rules)
        same = dims == tuple(tuple(dim) if isinstance(dim, list) else dim for dim in layout.axes)
        return layout if same else DynamicShardingAxes(dims, layout.mode)

    # What `shardwright.shard`, `hint` and `gather` ask of the entered manager.

    def _place(
        self, x: Any, axes: tuple[Any, ...], mode: str | None, role: Any, strict: bool
    ) -> Any:
        return self.native()._place(x, axes, mode, role, strict)

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


def asked(axes: Any, mode: Any, dynamic_axes: Any) -> tuple[Any, str | None]:
    """Return the one annotation of a call, a list or a class as an instance of its layout, and the mode if it is a name.

    A mode that is an index becomes the layout's own.

    Raises:
      StrategyError: no annotation, or two.
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
    said = None if _absent(mode) or isinstance(mode, int) else mode
    index = {"mode": mode} if isinstance(mode, int) else {}
    if isinstance(annotation, type) and issubclass(annotation, DynamicShardingAxes):
        return annotation(**index), said
    if isinstance(annotation, DynamicShardingAxes):
        return type(annotation)(annotation.axes, **{"mode": annotation.mode, **index}), said
    if isinstance(annotation, (StackedLayout, ArraySpec, PartitionSpec)):
        return annotation, said
    return DynamicShardingAxes(annotation, **{"mode": MODE_TRAIN, **index}), said


def get_current_partition_manager() -> Any:
    """Return the manager entered in this thread (it may be a `shardwright.PartitionManager`), or None."""
    return context.current()


def get_partition_manager() -> Any:
    """Return the manager entered in this thread, or None: the last one built is never taken for it."""
    return context.current()


def apply_logical_sharding(
    x: Any,
    partition_manager: Any = NOT_GIVEN,
    axes: Any = NOT_GIVEN,
    mode: Any = NOT_GIVEN,
    dynamic_axes: Any = NOT_GIVEN,
    auto_correct: bool = True,
) -> Any:
    """Make an array lie as its axes resolve: `apply_logical_sharding(x, dynamic_axes=HiddenStateSharding, partition_manager=pm)`.

    Args:
      x: JAX or NumPy arrays.
      partition_manager: this package's, or a `shardwright.PartitionManager` of a strategy file; absent: the entered one.
      axes: see `PartitionManager.resolve`.
      mode: see `PartitionManager.resolve`.
      dynamic_axes: see `PartitionManager.resolve`.
      auto_correct: see `PartitionManager.shard`.

    Raises:
      NoManagerError: no manager is given, and none is entered in this thread.
      ShardingError: see `PartitionManager.shard`.
    """
    manager = context.current() if _absent(partition_manager) else partition_manager
    if manager is None:
        raise NoManagerError(
            "No PartitionManager is available in this thread",
            fix="pass partition_manager=, or call it inside `with pm:`",
        )
    if isinstance(manager, PartitionManager):
        return manager.shard(x, axes, mode, dynamic_axes, auto_correct)
    if not isinstance(manager, native.PartitionManager):
        raise WrongTypeError(
            f"{manager!r} is no PartitionManager",
            fix="pass one of shardwright.interop.eformer, or of shardwright",
        )
    if not auto_correct and not is_strict(manager.rules.policy):
        raise StrategyError(
            "auto_correct=False needs a strict policy",
            fix="drop what [policy] of the strategy allows",
        )
    annotation, said = asked(axes, mode, dynamic_axes)
    return manager.shard(x, annotation, mode=said)
