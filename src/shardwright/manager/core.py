"""`Manager`: rules, a mesh, a mode and an effect as one frozen value, for all packages above."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn, Self, TypeVar

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardwright import _jax
from shardwright.errors import (
    ManualAxisError,
    MeshMismatchError,
    Problem,
    StrategyError,
    raise_problems,
)
from shardwright.manager import constraint, context, memory
from shardwright.manager.effect import CONSTRAIN, Effect
from shardwright.manager.facts import manager_facts
from shardwright.mesh.build import MeshSizes, mesh_sizes
from shardwright.processes import agreement
from shardwright.processes.compare import ProcessGroup, ProcessOptions, process_group
from shardwright.resolution.decisions import Outcome, Resolution
from shardwright.resolution.partition_specs import entry_names
from shardwright.resolution.problems import decision_rule, dim_problem
from shardwright.resolution.recent import Recent
from shardwright.resolution.request import ShardingRequest
from shardwright.resolution.resolver import explain_request
from shardwright.resolution.rules import AxisRules
from shardwright.vocabulary.modes import mode_name, parse_mode

# JAX's meshes have Explicit axes by default, which surprises people who write `h @ w`.
_EXPLICIT_NOTE = (
    "The mesh has Explicit axes, over which JAX asks for the sharding of a result.\n"
    "  fix   build the mesh with Auto axes, as sw.create_mesh does by default; or say the sharding "
    "of the result: sw.einsum(..., out=axes) for a matmul, layers.embedding for a lookup, "
    "layers.loss for a cross entropy"
)

_MEMORY_NOTE = (
    "One operand is in host memory, and JAX computes on the device.\n"
    "  fix   jit the step with pm.jit_step, which moves optimizer state, gather parameters with "
    "sw.gather, and update them with sw.offloaded(optimizer, specs).apply_gradients; or move the "
    "operand yourself, jax.device_put(x, jax.memory.Space.Device)"
)

M = TypeVar("M", bound="Manager")


class Manager:
    """Rules, a mesh, a mode and an effect. `PartitionManager` is its only subclass.

    Equality and hash cover these four. Functions of this package and of the packages above
    take this value. Nothing is set after `__init__`; what is derived from the fields is in `cache`.

    Attributes:
      rules: Compiled rules.
      mesh: A mesh with devices, or an abstract one.
      mode: Mode of requests that do not have one, or None.
      name: Name of the strategy, or empty.
      effect: The constraints or annotations that `shard`, `hint` and `gather` add to a trace.
      options: Options for the processes of the mesh.
      sizes: Size of each mesh axis.
      cache: Values derived from the fields; see `remember`.
    """

    __slots__ = (
        "__weakref__",
        "_hash",
        "_modes",
        "_once",
        "_uniform",
        "cache",
        "effect",
        "mesh",
        "mode",
        "name",
        "options",
        "rules",
        "sizes",
    )

    rules: AxisRules
    mesh: Mesh | AbstractMesh
    mode: str | None
    name: str
    effect: Effect
    options: ProcessOptions
    sizes: MeshSizes
    cache: Recent
    _modes: dict[str, Self]
    _once: dict[str, Any]
    _uniform: bool
    _hash: int

    def __init__(
        self,
        rules: AxisRules,
        mesh: Mesh | AbstractMesh,
        *,
        mode: str | None = None,
        name: str = "",
        options: ProcessOptions,
        effect: Effect = CONSTRAIN,
        modes: dict[str, Self] | None = None,
    ) -> None:
        """Set all slots.

        The managers that `for_mode` returns share the dict `modes`.
        """
        modes = {} if modes is None else modes
        slots = {
            "rules": rules,
            "mesh": mesh,
            "mode": mode,
            "name": name,
            "effect": effect,
            "options": options,
            "sizes": mesh_sizes(mesh),
            "cache": Recent(),
            "_modes": modes,
            # Values that must last, unlike those of the cache: JAX's key, and whether this manager
            # has been compared with those of the other processes.
            "_once": {},
            "_uniform": len(set(mesh.axis_types)) == 1,
            "_hash": hash((rules, mesh, mode, effect)),
        }
        for slot, value in slots.items():
            object.__setattr__(self, slot, value)
        if mode is not None:
            modes.setdefault(mode, self)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"a PartitionManager is frozen: build another one instead of setting {name!r}"
        )

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Manager)
            and self._hash == other._hash
            and self.mode == other.mode
            and self.effect == other.effect
            and self.mesh == other.mesh
            # Compare the rules last: comparing their tables takes longest.
            and self.rules == other.rules
        )

    def __hash__(self) -> int:
        return self._hash

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> Any:
        if isinstance(self.mesh, Mesh):
            raise TypeError(
                "a PartitionManager on devices cannot be pickled: "
                "pickle the Strategy, and build the manager where it is used"
            )
        if self.effect is not CONSTRAIN:
            raise TypeError("the manager of a plan cannot be pickled: pickle the original manager")
        fields = {"mode": self.mode, "name": self.name, "options": self.options}
        return _built, (type(self), self.rules, self.mesh, fields)

    def __repr__(self) -> str:
        sizes = ",".join(f"{axis}:{size}" for axis, size in self.sizes.items())
        mode = "" if self.mode is None else f", mode={mode_name(self.mode)!r}"
        return f"PartitionManager({self.name or 'rules'!r}, mesh={sizes!r}{mode})"

    def __enter__(self) -> Self:
        once = self._once
        if "met" not in once:
            self._meet()
        context.enter(self, self.mesh, once.get("key") or self._make_key())
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        context.leave(self)
        if error is None:
            return
        note = ""
        if _jax.is_sharding_type_error(error):
            note = _EXPLICIT_NOTE
        elif _jax.mixes_memories(error):
            note = _MEMORY_NOTE
        # The error passes through each enclosing `with pm:`, so add the note only once.
        if note and note not in getattr(error, "__notes__", ()):
            error.add_note(note)

    def _meet(self) -> None:
        """Compare this manager with those of the other processes of its mesh, at its first entry.

        Nothing happens in a trace. Only the first thread waits. If the comparison fails, the next
        entry compares again.
        """
        mesh, this_entry = self.mesh, object()
        if isinstance(mesh, Mesh) and mesh.is_multi_process and _jax.in_trace():
            return
        # `setdefault` of a dict is atomic, so one thread alone gets its own object back.
        if self._once.setdefault("met", this_entry) is not this_entry:
            return
        try:
            agreement.meet(
                mesh,
                self.options,
                repr(self),
                lambda: manager_facts(self.rules, mesh, self.mode, self.options),
            )
        except BaseException:
            del self._once["met"]
            raise

    def _make_key(self) -> context.Key:
        """Return the manager's part of JAX's cache keys. Equal managers have equal keys."""
        # JAX never frees a key, so a key has only a digest of the rules: it does not keep the rules
        # or their resolutions alive.
        values = (self.rules.fingerprint(), self.mesh, self.mode, self.effect.token)
        key: context.Key = self._once.setdefault("key", context.key_of(values, repr(self)))
        return key

    def for_mode(self, mode: str) -> Self:
        """Return this manager with the given mode. For one mode, it is always the same object.

        Raises:
          StrategyError: The mode is unknown.
        """
        parsed = parse_mode(mode)
        if parsed == self.mode:
            return self
        if parsed not in self._modes:
            # The new manager adds itself to `_modes`, unless another thread was first.
            self.having(mode=parsed, modes=self._modes)
        return self._modes[parsed]

    def having(self, **fields: Any) -> Self:
        """Return a manager of the same class with other fields, and empty caches.

        Args:
          **fields: Any of `rules`, `mesh`, `mode`, `name`, `options` and `effect`. The rules and
            the mesh must fit together.
        """
        names = ("mode", "name", "options", "effect")
        known = {name: getattr(self, name) for name in names}
        rules, mesh = fields.pop("rules", self.rules), fields.pop("mesh", self.mesh)
        return _built(type(self), rules, mesh, {**known, **fields})

    def answer(self, request: ShardingRequest, ambient: AbstractMesh | None = None) -> Resolution:
        """Resolve a request whose answer goes to Python code, and let the effect record it.

        Such a request leaves nothing in a trace. A plan has to know of it, because the code may
        branch on the answer. A spec that JAX cannot express on the mesh is a problem too.

        Args:
          request: The request.
          ambient: The ambient mesh, whose axis types apply. None means the manager's mesh.
        """
        resolution = self.decide(request, ambient)
        if self.effect.record is not None:
            self.effect.record(request.under(self.mode), resolution)
        return resolution

    def decide(self, request: ShardingRequest, ambient: AbstractMesh | None = None) -> Resolution:
        """Resolve a request as `answer` does, but do not record it.

        This is for requests whose annotation stays in the trace of a plan: the plan resolves it
        again.
        """
        resolution = explain_request(request.under(self.mode), self.rules, self.sizes)
        # Only mixed axis types have specs that JAX cannot express: Auto before Explicit in one dim,
        # or Manual after an axis that is not Manual. Only Explicit axes can keep a sum unreduced.
        # All else needs no check.
        spec = resolution.spec
        if spec is None or (ambient is None and self._uniform and not spec.unreduced):
            return resolution
        mesh = self.mesh if ambient is None else ambient
        if len(set(mesh.axis_types)) == 1 and not spec.unreduced:
            return resolution
        problems = [*_order_problems(resolution, mesh), *late_manual_problems(resolution)]
        problems += _auto_sum_problems(resolution, mesh)
        if not problems:
            return resolution
        refused: Resolution = self.cache.keep(
            ("refused", resolution), dataclasses.replace(resolution, problems=tuple(problems))
        )
        return refused

    def remember(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return the cached value of a key. If there is none, compute and cache it.

        Packages above cache here the values that they derive from resolutions, so that no cache
        outlives the manager. At least the last 10,000 values are kept.

        Args:
          key: Key of the value. It starts with the name of the calling function.
          compute: Function that returns the value, which must not be None.
        """
        value = self.cache[key]
        return self.cache.keep(key, compute()) if value is None else value

    @property
    def reads_paths(self) -> bool:
        """Whether decisions depend on the path: a rule reads it, or a plan records it."""
        return bool(self.rules.tensors) or self.effect.record is not None

    def group(self) -> ProcessGroup | None:
        """Return the processes to compare with: None for a local mesh, or under `agree=False`."""
        if isinstance(self.mesh, AbstractMesh) or not self.mesh.is_multi_process:
            return None
        return process_group(self.mesh) if self.options.agree else None

    def sharding_of(self, resolution: Resolution, memory_kind: str | None = None) -> NamedSharding:
        """Return the sharding of a resolution. Equal specs give the identical object.

        `memory_kind` takes precedence over the rules of `[memory]`.

        Raises:
          ShardingError: The resolution has problems.
          StrategyError: A rule leaves a dim to the compiler; or a rule puts the array on the host,
            and the backend has no memory there.
        """
        spec = resolution.require()
        if PartitionSpec.UNCONSTRAINED in spec.partitions:
            raise_problems(needs_sharding(resolution), resolution=resolution)
        if memory_kind is None and resolution.on_host:
            memory_kind = memory.host_kind(self.mesh, resolution.memory, resolution.path)
        key = ("sharding", spec, memory_kind)
        known = self.cache[key]
        if known is None:
            known = self.cache.keep(key, NamedSharding(self.mesh, spec, memory_kind=memory_kind))
        sharding: NamedSharding = known
        return sharding

    def manual_axes(self, ambient: AbstractMesh | None) -> frozenset[str]:
        """Check that an ambient mesh is the manager's mesh, and return its Manual axes.

        Raises:
          MeshMismatchError: The ambient mesh has other names or sizes.
        """
        if ambient is None:
            return frozenset()
        # Abstract meshes with different devices are unequal, so a user's abstract mesh may differ
        # from `mesh.abstract_mesh`. Specs depend only on names and sizes.
        if ambient.shape_tuple != self.mesh.shape_tuple:
            what = f"the ambient mesh is {dict(ambient.shape_tuple)}, the manager's mesh is "
            what += f"{dict(self.mesh.shape_tuple)}"
            fix = "enter the manager (with pm:) instead of another mesh, or build the manager on "
            raise MeshMismatchError(what, fix=f"{fix}that mesh")
        kinds = zip(ambient.axis_names, ambient.axis_types, strict=True)
        return frozenset(axis for axis, kind in kinds if kind is AxisType.Manual)


def _built(cls: type[M], rules: AxisRules, mesh: Mesh | AbstractMesh, fields: dict[str, Any]) -> M:
    """Return a manager from values that were checked before."""
    manager = object.__new__(cls)
    Manager.__init__(manager, rules, mesh, **fields)
    return manager


def needs_sharding(resolution: Resolution) -> list[Problem]:
    """Return a problem for each dim that a rule leaves to the compiler."""
    return [
        dim_problem(
            StrategyError,
            resolution,
            decision,
            '"?" leaves this dim to the compiler, but a sharding must decide every dim',
            fix='use shard or hint inside jit, or give the axis a rule without "?"',
        )
        for decision in resolution.decisions
        if decision.outcome is Outcome.UNCONSTRAINED
    ]


def _order_problems(resolution: Resolution, mesh: Mesh | AbstractMesh) -> list[Problem]:
    """Return a problem for each dim with an Auto mesh axis before an Explicit one."""
    assert resolution.spec is not None
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    problems = {
        problem.dim: problem for problem in constraint.order_problems(resolution.spec, types)
    }
    return [
        dataclasses.replace(
            problems[decision.dim],
            path=resolution.path,
            axis=decision.label,
            rule=decision_rule(resolution, decision),
        )
        for decision in resolution.decisions
        if decision.dim in problems
    ]


def _auto_sum_problems(resolution: Resolution, mesh: Mesh | AbstractMesh) -> list[Problem]:
    """Return a problem if a sum should stay unreduced over an Auto mesh axis."""
    sums = resolution.unreduced
    if sums is None:
        return []
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    auto = [axis for axis in entry_names(sums.entry) if types[axis] is AxisType.Auto]
    if not auto:
        return []
    what = f"{_joined(auto)} is Auto, and XLA alone decides where it reduces a sum over Auto axes"
    fix = f'make it Explicit, axis_types = {{ {auto[0]} = "explicit" }}, or leave out Unreduced'
    problem = dim_problem(MeshMismatchError, resolution, sums, what, mesh_axes=auto, fix=fix)
    return [dataclasses.replace(problem, dim=None, axis=f"unreduced over {problem.axis}")]


def late_manual_problems(resolution: Resolution) -> list[Problem]:
    """Return a problem for each dim with a Manual mesh axis after one that is not Manual.

    `shard_map` has already split the array over the Manual axis, so the Manual axis must be the
    major one.
    """
    return [
        dim_problem(
            ManualAxisError,
            resolution,
            decision,
            f"{_joined(decision.manual)} is Manual here and so comes first, "
            f"but the rule {_joined(decision.mesh_axes)} puts it later",
            mesh_axes=decision.mesh_axes,
            fix=f"shard_map over {_joined(decision.mesh_axes)}, "
            f"write {_joined(decision.manual)} first in the rule, or use hint",
        )
        for decision in resolution.decisions
        if decision.mesh_axes[: len(decision.manual)] != decision.manual
    ]


def _joined(mesh_axes: Sequence[str]) -> str:
    return "+".join(mesh_axes)
