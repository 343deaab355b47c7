"""`PartitionManager`: rules, a mesh and a mode as one frozen value that answers questions.

The other methods are in the modules beside this one: `arrays` (shard, hint, shard_map), `weights`
(gather), `trees` (shardings, abstract, init) and `training` (optimizer state, the jitted step).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardwright import _jax
from shardwright.errors import raise_problems
from shardwright.manager import context, upward
from shardwright.manager.arguments import check_rules_on_mesh, compiled_rules, mesh_for
from shardwright.manager.arrays import ArrayMethods
from shardwright.manager.core import needs_sharding
from shardwright.manager.facts import manager_facts
from shardwright.manager.training import TrainingMethods
from shardwright.manager.weights import WeightMethods
from shardwright.mesh.build import mesh_sizes
from shardwright.processes import agreement
from shardwright.processes.compare import ProcessOptions
from shardwright.resolution.decisions import Resolution
from shardwright.resolution.partition_axis import PartitionAxis
from shardwright.resolution.problems import suggest_for_missing_size
from shardwright.resolution.recent import Recent
from shardwright.resolution.request import Request
from shardwright.resolution.rules import AxisRules, share_values
from shardwright.vocabulary.annotations import join_axes
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.modes import mode_name, parse_mode

# `jax.make_mesh` makes Explicit axes, which surprises people who write `h @ w`.
_EXPLICIT_NOTE = (
    "The mesh has Explicit axes, over which JAX asks for the sharding of a result.\n"
    "  fix   build the mesh with sw.create_mesh, whose axes are Auto; or write "
    "sw.einsum(..., out=axes)"
)


class PartitionManager(ArrayMethods, WeightMethods, TrainingMethods):
    """Resolve annotations on one mesh under one set of rules, and shard arrays accordingly.

    `with pm:` makes the manager ambient for `sw.shard`, `sw.hint` and `sw.gather`. The manager is
    then part of the cache key of jit. Equality and hash cover rules, policy, mode and mesh.

    If the mesh spans several processes, the first entry outside of a trace waits until all of them
    have entered an equal manager.

    Args:
      strategy: A `Strategy`, compiled `AxisRules`, or a `PartitionAxis`.
      mesh: A `Mesh` or an `AbstractMesh`. Defaults to the mesh of the strategy, which starts the
        backend. For rules without a strategy, defaults to the ambient mesh.
      mode: Mode of calls that do not pass one. Defaults to None; see `for_mode`.
      agree: Whether to compare rules, mesh and data between the processes of the mesh, through the
        coordination store of `jax.distributed`. Defaults to True.
      watchdog: Seconds that a process of the mesh may be missing before the others print its rank
        and exit. Defaults to None: wait forever.

    Raises:
      StrategyError: The strategy does not compile, or it has no mesh and `mesh` is None, or an
        option is invalid.
      MeshSpecError: `mesh` is not a mesh, or rules are given without a mesh while none is ambient.
      MeshMismatchError: A rule names a mesh axis that is neither standard nor in the mesh. Or the
        mesh has an axis of more than one device that is neither standard nor idle nor named by any
        rule. Neither is an error under `missing = "replicate"`.
    """

    __slots__ = (
        "__weakref__",
        "_cache",
        "_hash",
        "_key",
        "_met",
        "_modes",
        "_options",
        "_sizes",
        "_uniform",
        "_values",
        "mesh",
        "mode",
        "name",
        "rules",
    )

    _modes: dict[str, PartitionManager]
    _values: tuple[AxisRules, Mesh | AbstractMesh, str | None]
    _hash: int
    _key: context.Key | None

    def __init__(
        self,
        strategy: Any,
        *,
        mesh: Mesh | AbstractMesh | None = None,
        mode: str | None = None,
        agree: bool = True,
        watchdog: float | None = None,
    ) -> None:
        options = ProcessOptions(agree=agree, watchdog=watchdog)
        rules, own_mesh = compiled_rules(strategy), mesh_for(strategy, mesh)
        name = "" if isinstance(strategy, (AxisRules, PartitionAxis)) else strategy.name
        self._set(rules, own_mesh, None if mode is None else parse_mode(mode), name, {}, options)
        if self.mode is not None:
            self._modes[self.mode] = self
        check_rules_on_mesh(rules, self._sizes)

    def _set(
        self,
        rules: AxisRules,
        mesh: Mesh | AbstractMesh,
        mode: str | None,
        name: str,
        modes: dict[str, PartitionManager],
        options: ProcessOptions,
    ) -> None:
        """Set all slots. The managers of all modes share `modes`."""
        identity = (rules, mesh, mode)
        slots = {
            "rules": rules,
            "mesh": mesh,
            "mode": mode,
            "name": name,
            "_sizes": mesh_sizes(mesh),
            "_uniform": len(set(mesh.axis_types)) == 1,
            "_cache": Recent(),
            "_modes": modes,
            "_values": identity,
            "_hash": hash(identity),
            "_key": None,
            "_met": isinstance(mesh, AbstractMesh) or not mesh.is_multi_process,
            "_options": options,
        }
        for slot, value in slots.items():
            object.__setattr__(self, slot, value)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"a PartitionManager is frozen: build another one instead of setting {name!r}"
        )

    if not TYPE_CHECKING:  # so that a type checker still reports misspelled names
        # Methods that rooms above the manager implement.
        def __getattr__(self, name: str) -> Any:
            method = upward.bind(name, self)
            if method is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return method

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *upward.UPWARD})

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, PartitionManager) and share_values(self, other))

    def __hash__(self) -> int:
        return self._hash

    def __copy__(self) -> PartitionManager:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PartitionManager:
        return self

    def __reduce__(self) -> Any:
        if isinstance(self.mesh, Mesh):
            raise TypeError(
                "a PartitionManager on devices cannot be pickled: "
                "pickle the Strategy, and build the manager where it is used"
            )
        return _built, (self.rules, self.mesh, self.mode, self.name, {}, self._options)

    def __repr__(self) -> str:
        sizes = ",".join(f"{axis}:{size}" for axis, size in self._sizes.items())
        mode = "" if self.mode is None else f", mode={mode_name(self.mode)!r}"
        return f"PartitionManager({self.name or 'rules'!r}, mesh={sizes!r}{mode})"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        from shardwright.manager.html import manager_html

        return manager_html(self)

    def __enter__(self) -> PartitionManager:
        if not self._met and not _jax.in_trace():
            self._meet()
        context.enter(self, self.mesh, self._key or self._make_key())
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        context.leave(self)
        if error is None or not _jax.is_sharding_type_error(error):
            return
        if _EXPLICIT_NOTE not in getattr(error, "__notes__", ()):
            error.add_note(_EXPLICIT_NOTE)

    def _meet(self) -> None:
        """Compare this manager with the other processes of its mesh, at its first entry.

        Only the first thread waits. If the comparison fails, the next entry compares again.
        """
        object.__setattr__(self, "_met", True)
        try:
            agreement.meet(
                self.mesh,
                self._options,
                repr(self),
                lambda: manager_facts(self.rules, self.mesh, self.mode, self._options),
            )
        except BaseException:
            object.__setattr__(self, "_met", False)
            raise

    def _make_key(self) -> context.Key:
        """Return the manager's part of JAX's cache keys. Equal managers have equal keys."""
        key = context.key_of((self.rules.fingerprint(), self.mesh, self.mode), repr(self))
        object.__setattr__(self, "_key", key)
        return key

    # Questions.

    def for_mode(self, mode: str) -> PartitionManager:
        """Return the manager whose calls resolve in a mode; the identical object at each call.

        Raises:
          StrategyError: The mode is unknown.
        """
        parsed = parse_mode(mode)
        if parsed == self.mode:
            return self
        if parsed not in self._modes:
            values = (self.rules, self.mesh, parsed, self.name, self._modes, self._options)
            # setdefault, so that concurrent threads get the same object.
            self._modes.setdefault(parsed, _built(*values))
        return self._modes[parsed]

    def explain(
        self,
        *axes: Any,
        mode: str | None = None,
        role: Role | str | None = None,
        shape: Sequence[int] | None = None,
        path: str | None = None,
    ) -> Resolution:
        """Return the spec of an annotation, and the decision of each dim.

        If the annotation does not resolve, the result has `problems` and no spec. The result is the
        same inside and outside of `shard_map`. For local shapes, call `sw.explain` with `manual=`.

        Args:
          *axes: Axis strings and composites, or one annotation.
          mode: Runtime mode. Defaults to the manager's mode, else to the layout's, else to train.
          role: Role of the array. Defaults to param for weight layouts and `ArraySpec`s, else to
            activation.
          shape: Global shape, required if the spec depends on sizes.
          path: Path of the array, for `[[tensors]]` entries and for messages.
        """
        return self.answer(Request(join_axes(axes), shape, mode, role, path))

    def resolve(
        self,
        *axes: Any,
        mode: str | None = None,
        role: Role | str | None = None,
        shape: Sequence[int] | None = None,
        path: str | None = None,
    ) -> PartitionSpec:
        """Return the spec of an annotation. The arguments are those of `explain`.

        Raises:
          ShardingError: The annotation does not resolve. The error has the `problems` of `explain`.
        """
        return self.explain(*axes, mode=mode, role=role, shape=shape, path=path).require()

    def sharding(
        self,
        *axes: Any,
        mode: str | None = None,
        role: Role | str | None = None,
        shape: Sequence[int] | None = None,
        path: str | None = None,
        memory_kind: str | None = None,
    ) -> NamedSharding:
        """Return the sharding of an annotation. Equal specs give the identical object.

        The arguments are those of `explain`. `memory_kind` defaults to the default memory of the
        devices.

        Raises:
          ShardingError: The annotation does not resolve. The error has the `problems` of `explain`.
          StrategyError: A rule is `?`, but a sharding must decide every dim.
        """
        resolution = self.explain(*axes, mode=mode, role=role, shape=shape, path=path)
        return self._sharding(resolution, memory_kind)

    def mesh_axes(
        self, axis: str, size: int | None = None, *, mode: str | None = None
    ) -> tuple[str, ...]:
        """Return the mesh axes that an axis of an activation is sharded over.

        Raises:
          ShapeRequiredError: The result depends on the size, and `size` is None.
          StrategyError: The rule is `?`, so the compiler decides.
        """
        resolution = self.explain((axis,), mode=mode, shape=None if size is None else (size,))
        problems = suggest_for_missing_size(resolution, "pass size=")
        raise_problems(problems or needs_sharding(resolution), resolution=resolution)
        return resolution.decisions[0].mesh_axes

    def axis_size(self, axis: str, size: int | None = None, *, mode: str | None = None) -> int:
        """Return the number of shards of an axis of an activation.

        Raises:
          ShapeRequiredError: The result depends on the size, and `size` is None.
          StrategyError: The rule is `?`, so the compiler decides.
        """
        return math.prod(self._sizes[name] for name in self.mesh_axes(axis, size, mode=mode))


def _built(*values: Any) -> PartitionManager:
    """Return a manager from the arguments of `_set`, which were checked before."""
    manager = object.__new__(PartitionManager)
    manager._set(*values)
    return manager


jax.tree_util.register_static(PartitionManager)
