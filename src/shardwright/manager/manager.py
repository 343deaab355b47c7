"""`PartitionManager`: rules, a mesh and a mode as one frozen value, and everything that is asked of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, final

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardwright import _jax
from shardwright.errors import (
    MeshMismatchError,
    MeshSpecError,
    Problem,
    ShapeRequiredError,
    ShardingError,
    StrategyError,
    raise_problems,
)
from shardwright.manager import constraint, context, manual_gather
from shardwright.manager.arguments import check_rules_on_mesh, compiled_rules, jit_key, own_mesh
from shardwright.manager.constraint import Placement
from shardwright.manager.problems import (
    in_words_of,
    late_manual,
    local_rank,
    must_lie,
    no_dtype,
    not_varying,
    other_shape,
    path_wanted,
    refused_by_jax,
    with_fix,
)
from shardwright.mesh.build import mesh_sizes
from shardwright.resolution import resolver
from shardwright.resolution.decisions import ModeFrom, Outcome, Resolution
from shardwright.resolution.partition_axis import PartitionAxis
from shardwright.resolution.recent import Recent, Shardings
from shardwright.resolution.rules import AxisRules, share_values
from shardwright.trees import annotated
from shardwright.vocabulary.annotations import (
    ArraySpec,
    as_shape,
    asked_annotation,
    is_annotation,
    lower,
    one_annotation,
    tree_of_annotations,
)
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.modes import mode_name, parse_mode


@final
class PartitionManager:
    """Resolve annotations on one mesh under one set of rules, and make arrays lie so.

    Enter it (`with pm:`) to make it ambient for `shard`, `hint` and `gather`; it is then part of jit's cache key. Equality
    and hash cover rules, policy, mode and mesh.

    Args:
      strategy: a `Strategy`, compiled `AxisRules`, or a `PartitionAxis`.
      mesh: a `Mesh` or an `AbstractMesh`; absent: the strategy's own, which starts the backend, or the ambient one.
      mode: the mode of calls that name none; see `for_mode`.

    Raises:
      StrategyError: the strategy does not compile, or names no mesh where none is given.
      MeshMismatchError: a rule names a mesh axis that is neither standard nor in the mesh, or the mesh has one (of more
        than one device) that is neither standard nor named by any rule; not under `missing = "replicate"`.
    """

    __slots__ = (
        "__weakref__",
        "_cache",
        "_hash",
        "_key",
        "_modes",
        "_sizes",
        "_values",
        "mesh",
        "mode",
        "name",
        "rules",
    )

    mesh: Mesh | AbstractMesh
    mode: str | None
    name: str
    rules: AxisRules
    _sizes: dict[str, int]
    _cache: Recent
    _modes: dict[str, PartitionManager]
    _values: tuple[AxisRules, Mesh | AbstractMesh, str | None]
    _hash: int
    _key: context.Key | None

    def __init__(
        self, strategy: Any, *, mesh: Mesh | AbstractMesh | None = None, mode: str | None = None
    ) -> None:
        rules = compiled_rules(strategy)
        found = mesh if mesh is not None else own_mesh(strategy)
        if not isinstance(found, (Mesh, AbstractMesh)):
            fix = 'pass create_mesh("dp:2,tp:4"), or abstract_mesh("dp:2,tp:4") to plan without devices'
            raise MeshSpecError(f"mesh={mesh!r} is neither a Mesh nor an AbstractMesh", fix=fix)
        name = "" if isinstance(strategy, (AxisRules, PartitionAxis)) else strategy.name
        self._set(rules, found, None if mode is None else parse_mode(mode), name, {})
        if self.mode is not None:
            self._modes[self.mode] = self
        check_rules_on_mesh(rules, self._sizes)

    def _set(
        self,
        rules: AxisRules,
        mesh: Mesh | AbstractMesh,
        mode: str | None,
        name: str,
        modes: dict[str, Any],
    ) -> None:
        values = {
            "rules": rules,
            "mesh": mesh,
            "mode": mode,
            "name": name,
            "_sizes": mesh_sizes(mesh),
            "_cache": Recent(),
            "_modes": modes,
        }
        identity = (rules, mesh, mode)
        for key, value in {
            **values,
            "_values": identity,
            "_hash": hash(identity),
            "_key": None,
        }.items():
            object.__setattr__(self, key, value)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"a PartitionManager is frozen: build another one instead of setting {name!r}"
        )

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
                "a PartitionManager on devices cannot be pickled: pickle the Strategy, and build the manager where it is used"
            )
        return _restored, (self.rules, self.mesh, self.mode, self.name)

    def __repr__(self) -> str:
        sizes = ",".join(f"{axis}:{size}" for axis, size in self._sizes.items())
        mode = "" if self.mode is None else f", mode={mode_name(self.mode)!r}"
        return f"PartitionManager({self.name or 'rules'!r}, mesh={sizes!r}{mode})"

    def __enter__(self) -> PartitionManager:
        context.enter(self, self.mesh, self._key or jit_key(self))
        return self

    def __exit__(self, *exc: object) -> None:
        context.leave(self)

    # Questions.

    def for_mode(self, mode: str) -> PartitionManager:
        """Return the manager whose calls resolve in a mode; the identical object each time."""
        parsed = parse_mode(mode)
        if parsed == self.mode:
            return self
        found = self._modes.get(parsed)
        if found is None:
            found = object.__new__(PartitionManager)
            found._set(self.rules, self.mesh, parsed, self.name, self._modes)
            # Not an assignment: threads that ask at once get one object.
            found = self._modes.setdefault(parsed, found)
        return found

    def explain(
        self,
        *axes: Any,
        mode: str | None = None,
        role: Role | str | None = None,
        shape: Sequence[int] | None = None,
        path: str | None = None,
    ) -> Resolution:
        """Return the spec of an annotation and why, dim by dim; a failing request too, with `problems` and no spec."""
        return self._explain(asked_annotation(axes), mode, role, shape, path)

    def _explain(
        self,
        annotation: Any,
        mode: str | None,
        role: Role | str | None,
        shape: Sequence[int] | None,
        path: str | None,
    ) -> Resolution:
        return self._resolution(annotation, mode, role, shape, path, self.mesh, frozenset())

    def _resolution(
        self,
        annotation: Any,
        mode: str | None,
        role: Role | str | None,
        shape: Sequence[int] | None,
        path: str | None,
        mesh: Mesh | AbstractMesh,
        manual: frozenset[str],
    ) -> Resolution:
        """Resolve, on this manager's mesh or the ambient one of its shape; what JAX cannot express there is a problem too."""
        said, said_by = (mode, ModeFrom.CALL) if mode is not None else (self.mode, ModeFrom.MANAGER)
        found = resolver.explain(
            annotation,
            self.rules,
            self._sizes,
            mode=said,
            role=role,
            shape=shape,
            path=path,
            manual=manual,
            mode_from=said_by,
        )
        if len(set(mesh.axis_types)) == 1 or found.spec is None:
            return found
        problems = constraint.order_problems(
            found.spec, dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        )
        problems = [*in_words_of(found, problems), *late_manual(found)]
        if not problems:
            return found
        refused: Resolution = self._cache.keep(
            ("refused", found), dataclasses.replace(found, problems=tuple(problems))
        )
        return refused

    def resolve(
        self,
        *axes: Any,
        mode: str | None = None,
        role: Role | str | None = None,
        shape: Sequence[int] | None = None,
        path: str | None = None,
    ) -> PartitionSpec:
        """Return the spec of an annotation.

        Raises:
          ShardingError: what `explain` would list under `problems`.
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
        """Return the sharding of an annotation; the identical object for the same spec.

        Raises:
          StrategyError: the rule says `?`: an array must lie somewhere.
        """
        found = self.explain(*axes, mode=mode, role=role, shape=shape, path=path)
        return self._sharding(found, memory_kind)

    def mesh_axes(
        self, axis: str, size: int | None = None, *, mode: str | None = None
    ) -> tuple[str, ...]:
        """Return the mesh axes that an axis of an activation lies over.

        Raises:
          ShapeRequiredError: that depends on the size.
          StrategyError: the rule says `?`, so the compiler decides.
        """
        shape = None if size is None else (size,)
        found = self.explain((axis,), mode=mode, shape=shape)
        raise_problems(with_fix(found, "pass size="), resolution=found)
        if found.decisions[0].outcome is Outcome.UNCONSTRAINED:
            raise_problems([must_lie(found, found.decisions[0])], resolution=found)
        return found.decisions[0].mesh_axes

    def axis_size(self, axis: str, size: int | None = None, *, mode: str | None = None) -> int:
        """Return the number of shards of an axis of an activation.

        Raises:
          ShapeRequiredError: that depends on the size.
        """
        shards = 1
        for name in self.mesh_axes(axis, size, mode=mode):
            shards *= self._sizes[name]
        return shards

    # Trees.

    def shardings(
        self,
        values: Any,
        annotations: Any = None,
        *,
        mode: str | None = None,
        role: Role | str = Role.PARAM,
    ) -> Any:
        """Return a tree of shardings for `jit`, `device_put` or a checkpoint.

        Args:
          values: a tree of anything with a shape; `ArraySpec` leaves bring their annotations.
          annotations: a tree of annotations, or of prefixes.
          mode: runtime mode; absent: the manager's.
          role: param unless said otherwise.

        Raises:
          ShardingError: every leaf's problems at once, each with its path.
        """
        if isinstance(annotations, list):
            annotations = tree_of_annotations((annotations,))
        if not self.rules.tensors:
            paired = annotated.pair(values, annotations)
            with contextlib.suppress(
                AttributeError, TypeError, ShardingError
            ):  # leaves that must be reported by their paths
                if paired is not None:
                    # No list between look-up and tree: of 45,000 leaves it is worth 4 %.
                    return jax.tree.unflatten(
                        paired.structure,
                        map(self._by_annotation(mode, role).__getitem__, paired.keys()),
                    )
        return self._each(values, annotations, lambda leaf: self._leaf_sharding(leaf, mode, role))

    def _by_annotation(self, mode: str | None, role: Role | str) -> Shardings:
        key = ("shardings", mode, role)
        known = self._cache.get(key) or self._cache.recall(key)
        if known is None:
            known = self._cache.keep(
                key, Shardings(lambda one, shape: self._annotated_sharding(one, shape, mode, role))
            )
        shardings: Shardings = known
        return shardings

    def _annotated_sharding(
        self, annotation: Any, shape: tuple[int, ...], mode: str | None, role: Role | str
    ) -> NamedSharding:
        if not is_annotation(annotation):
            raise TypeError
        return self._sharding(self._explain(annotation, mode, role, shape, None), None)

    def _leaf_sharding(
        self, leaf: annotated.Leaf, mode: str | None, role: Role | str
    ) -> NamedSharding:
        found = self.explain(
            leaf.annotation, mode=mode, role=role, shape=np.shape(leaf.value), path=leaf.path
        )
        return self._sharding(found, None)

    def _each(self, values: Any, annotations: Any, make: Callable[[annotated.Leaf], Any]) -> Any:
        """Map every annotated leaf, collecting the problems of all of them before raising."""
        results: list[Any] = []
        problems: list[Problem] = []
        resolution = None
        for leaf in annotated.annotated_leaves(values, annotations):
            try:
                results.append(make(leaf))
            except ShardingError as error:
                found = [
                    p if p.path else dataclasses.replace(p, path=leaf.path) for p in error.problems
                ]
                problems += found
                resolution = resolution or error.resolution
        raise_problems(problems, resolution=resolution)
        structure = jax.tree.structure(values, is_leaf=lambda leaf: isinstance(leaf, ArraySpec))
        return jax.tree.unflatten(structure, results)

    def abstract(
        self,
        values: Any,
        annotations: Any = None,
        *,
        mode: str | None = None,
        role: Role | str = Role.PARAM,
    ) -> Any:
        """Return a tree of `jax.ShapeDtypeStruct`s with shardings, to lower, compile ahead of time, or restore into.

        Raises:
          IndivisibleError: a symbolic size of `jax.export` that may not divide, which JAX refuses for an input.
          ShardingError: as `shardings` does.
        """
        shardings = self.shardings(values, annotations, mode=mode, role=role)
        raise_problems([*no_dtype(values), *refused_by_jax(values, shardings)])
        return jax.tree.map(
            lambda value, sharding: jax.ShapeDtypeStruct(
                value.shape, value.dtype, sharding=sharding
            ),
            values,
            shardings,
            is_leaf=lambda leaf: isinstance(leaf, ArraySpec),
        )

    def init(self, specs: Any, key: Any, *, mode: str | None = None) -> Any:
        """Initialise a tree of `ArraySpec`s in one jit, each array born in its shards.

        Raises:
          StrategyError: leaves without `init`.
          MeshSpecError: the mesh is abstract.
          ShardingError: as `shardings` does.
        """
        if isinstance(self.mesh, AbstractMesh):
            raise constraint.no_devices()
        asked = (*jax.tree.flatten(specs), mode)
        kept: tuple[Any, Any] = self._cache.recall("init") or (None, None)
        before, made = kept
        # Only the last one is kept: jax.nn.initializers makes functions that are equal to no other, call by call.
        if before != asked:
            made = jax.jit(
                annotated.initialiser(specs), out_shardings=self.shardings(specs, mode=mode)
            )
            self._cache.replace("init", (asked, made))
        return made(key)

    def state_shardings(
        self,
        state: Any,
        params: Any,
        annotations: Any = None,
        *,
        overrides: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Any:
        """Return the shardings of an optimizer's state: each leaf lies like the parameter that it follows, and beyond by `zero1`.

        Args:
          state: the state, or `jax.eval_shape(tx.init, abstract_params)`.
          params: arrays, `ShapeDtypeStruct`s or `ArraySpec`s.
          annotations: of the parameters; absent where they are `ArraySpec`s.
          overrides: pattern -> annotation for state leaves that follow no parameter.
          mode: runtime mode; absent: the manager's.

        Raises:
          StrategyError, RankMismatchError: leaves that follow no parameter; all of them at once.
        """
        from shardwright.trees.optimizer_state import annotate_state

        annotated = annotate_state(
            state, params, annotations, overrides=overrides, by_path=bool(self.rules.tensors)
        )
        return self.shardings(state, annotated, mode=mode, role=Role.STATE)

    def global_array(
        self,
        local: Any,
        *axes: Any,
        global_shape: Sequence[int] | None = None,
        mode: str | None = None,
    ) -> jax.Array:
        """Build a global array from each process's part of it.

        Args:
          local: this process's data.
          *axes: annotation of the global array.
          global_shape: where the spec depends on sizes; absent: inferred from the local shape and the spec.
          mode: runtime mode; absent: the manager's.

        Raises:
          ShapeRequiredError: the spec depends on sizes, and `global_shape` is absent.
        """
        annotation = one_annotation(axes)
        found = self.explain(annotation, mode=mode, shape=global_shape)
        if ShapeRequiredError in {problem.error for problem in found.problems}:
            raise_problems(with_fix(found, "pass global_shape="), resolution=found)
        if len(found.decisions) != local.ndim:
            raise_problems([local_rank(found, local)], resolution=found)
        constraint.check_kept(local)
        sharding = self._sharding(found, None)
        shape = (
            constraint.global_shape(sharding, local.shape)
            if global_shape is None
            else tuple(global_shape)
        )
        self.resolve(annotation, mode=mode, shape=shape)
        made: jax.Array = jax.make_array_from_process_local_data(sharding, local, shape)
        return made

    # Placing.

    def shard(
        self, x: Any, *axes: Any, mode: str | None = None, role: Role | str | None = None
    ) -> Any:
        """Make an array, or every array of a tree, lie as its annotation resolves. Strict: what does not fit raises.

        Args:
          x: JAX or NumPy arrays, or a tree of them.
          *axes: axis strings and composites, or one annotation, or a tree of annotations.
          mode: runtime mode; absent: the manager's, else the layout's own, else train.
          role: absent: param for weight layouts, else activation.

        Raises:
          ShardingError: see `resolve`; for a tree, every leaf's problems at once.
          ManualAxisError: inside `shard_map`, over a Manual mesh axis that the value does not vary over.
          MeshMismatchError: the ambient mesh is not the manager's.
        """
        return self._place(x, axes, mode, role, True)

    def hint(
        self, x: Any, *axes: Any, mode: str | None = None, role: Role | str | None = None
    ) -> Any:
        """Like `shard`, best effort: a dim that is indivisible, in conflict or Manual is left to the compiler."""
        return self._place(x, axes, mode, role, False)

    def gather(
        self,
        w: Any,
        *axes: Any,
        path: str | None = None,
        mode: str | None = None,
        shape: Any = None,
    ) -> Any:
        """Constrain a stored weight, or a tree of them, to where it is used, and its gradient back to where it is stored.

        Inside `shard_map` it is an all-gather of the shard, whose transpose is a reduce-scatter. Derivatives exist of any order.

        Args:
          w: a weight, or a tree.
          *axes: its annotation, as for `shard`.
          path: the weight's path, where a `[[tensors]]` entry may cover it; of a tree, the path in front of it, "" at the root.
          mode: runtime mode; absent: the manager's.
          shape: the global shape (of a tree, a tree of them), needed inside `shard_map` where the value does not show it.

        Raises:
          ShardingError: the annotation does not fit the weight, the rules or the mesh.
          StrategyError: no `path`, and a `[[tensors]]` entry names an axis of the weight.
          ShapeRequiredError, ManualAxisError: inside `shard_map`, `w` does not show its shard, or is not split as its use is.
        """
        if _jax.is_array(w):
            return self._gather(w, one_annotation(axes), path, mode, shape)
        prefix, shapes = f"{path}/" if path else "", iter(annotated.shapes_like(w, shape))

        def one(leaf: annotated.Leaf) -> Any:
            return self._gather(
                leaf.value,
                leaf.annotation,
                None if path is None else prefix + leaf.path,
                mode,
                next(shapes),
            )

        return self._each(w, tree_of_annotations(axes), one)

    def shard_map(
        self,
        f: Callable[..., Any],
        *,
        in_axes: Sequence[Any],
        out_axes: Any,
        sizes: Mapping[str, int] | None = None,
        mode: str | None = None,
        check_vma: bool = True,
    ) -> Callable[..., Any]:
        """Return `jax.shard_map` of a function, jitted, in semantic axes: each axis resolves once, from the inputs' sizes.

        Args:
          f: function of local arrays.
          in_axes: one annotation, or tree of them, per positional argument.
          out_axes: one annotation, or a tuple, list or dict of them.
          sizes: global size of axes that stand in no input.
          mode: runtime mode; absent: the manager's.
          check_vma: as for `jax.shard_map`: whether JAX tracks which mesh axes values vary over.

        Raises:
          AxisConflictError: one axis would lie differently in two arguments.
          StrategyError: a rule says `?`.
        """
        if not isinstance(in_axes, (tuple, list)):
            raise StrategyError(
                f"in_axes={in_axes!r} is not a tuple",
                fix="write one annotation, or tree of them, per positional argument",
            )

        from shardwright.manager.shard_map import SemanticShardMap, checked_outputs, known_sizes

        def explain(annotation: Any, shape: Sequence[int] | None, path: str | None) -> Resolution:
            ambient = _jax.ambient_mesh()
            return self._resolution(
                annotation, mode, None, shape, path, ambient or self.mesh, self.manual_axes(ambient)
            )

        by_axis = known_sizes(sizes or {}, self.rules)
        outputs = checked_outputs(out_axes)
        return SemanticShardMap(
            f, tuple(in_axes), outputs, by_axis, self.mesh, explain, self.manual_axes, check_vma
        )

    def _place(
        self,
        x: Any,
        axes: tuple[Any, ...],
        mode: str | None,
        role: Role | str | None,
        strict: bool,
        path: str | None = None,
    ) -> Any:
        """Place an array; or, where no path is given, a tree, each of its leaves under its path."""
        # Nearly every call has a tracer, thousands of times in a trace: it is asked for once, and little else is called.
        traced = isinstance(x, jax.core.Tracer)
        if not traced and path is None and not _jax.is_array(x):
            return self._place_tree(x, axes, mode, role, strict)
        shape = x.shape if traced else np.shape(x)
        # Only exceptions by path make the answer depend on the path. The ambient mesh may be the empty one.
        key: Any = (
            axes,
            shape,
            mode,
            role,
            strict,
            jax.sharding.get_abstract_mesh(),
            path and self.rules.tensors and path,
        )
        try:
            found = self._cache.get(key) or self._cache.recall(key)
        except TypeError:  # something that cannot be a key, such as a list among the axes
            found, key = None, None
        if found is None:
            found = self._placement(one_annotation(axes), shape, mode, role, path, strict)
            if key is not None:
                self._cache.keep(key, found)
        where, resolution = found
        if resolution is not None and strict:
            self._check_varying(x, resolution, path)
        if where is None:
            return x
        return constraint.constrain(x, where) if traced else constraint.place(x, where)

    def _place_tree(
        self, x: Any, axes: tuple[Any, ...], mode: str | None, role: Role | str | None, strict: bool
    ) -> Any:
        annotations = tree_of_annotations(axes)
        return self._each(
            x,
            annotations,
            lambda leaf: self._place(leaf.value, (leaf.annotation,), mode, role, strict, leaf.path),
        )

    def _placement(
        self,
        annotation: Any,
        shape: tuple[int, ...],
        mode: str | None,
        role: Any,
        path: str | None,
        strict: bool,
    ) -> tuple[Placement | None, Resolution | None]:
        """Return where an array of this shape goes, and the resolution if it names Manual mesh axes."""
        ambient = _jax.ambient_mesh()
        manual = self.manual_axes(ambient)
        found = self._resolution(annotation, mode, role, shape, path, ambient or self.mesh, manual)
        if not strict:
            found = resolver.left_open(found)
        spec = found.require()
        if strict and path is None and found.role is not Role.ACTIVATION:
            dims = resolver.lower_fitted(annotation, shape, self.rules)[0].dims
            raise_problems(path_wanted(annotation, dims, self.rules), resolution=found)
        uses_manual = found if any(decision.manual for decision in found.decisions) else None
        if manual == frozenset(self._sizes):
            return None, uses_manual
        return constraint.make_placement(spec, self.mesh, ambient), uses_manual

    def _check_varying(self, x: Any, found: Resolution, path: str | None) -> None:
        """Check that an array varies over every Manual mesh axis that its dims should lie over."""
        problems = not_varying(found, _jax.varying_axes(x), path)
        # The resolution is kept for every path that it holds for; the error is about this one.
        raise_problems(
            problems,
            resolution=dataclasses.replace(found, path=path or found.path) if problems else None,
        )

    def manual_axes(self, ambient: AbstractMesh | None) -> frozenset[str]:
        """Check that an ambient mesh is the manager's, and return its Manual axes.

        Raises:
          MeshMismatchError: its names or sizes are others.
        """
        if ambient is None:
            return frozenset()
        if ambient.shape_tuple != self.mesh.shape_tuple:
            raise MeshMismatchError(
                f"the ambient mesh is {dict(ambient.shape_tuple)}, the manager's {dict(self.mesh.shape_tuple)}",
                fix="enter the manager (with pm:) instead of another mesh, or build the manager on that mesh",
            )
        kinds = zip(ambient.axis_names, ambient.axis_types, strict=True)
        return frozenset(axis for axis, kind in kinds if kind is AxisType.Manual)

    def _gather(
        self, w: Any, annotation: Any, path: str | None, mode: str | None, shape: Any
    ) -> Any:
        local, ambient = np.shape(w), jax.sharding.get_abstract_mesh()
        if isinstance(annotation, ArraySpec):
            shape = annotation.shape if shape is None else shape
            lower(annotation, as_shape(shape) if ambient.manual_axes else local)
            annotation = annotation.axes
        shape = None if shape is None else as_shape(shape)
        key: Any = (
            "gather",
            annotation,
            local,
            shape,
            mode,
            path and self.rules.tensors and path,
            ambient,
        )
        if ambient.manual_axes:
            varying = _jax.varying_axes(w) if _jax.tracks_varying() else None
            key = (*key, varying, context.mapped_inputs())
            if (plan := self._cache.get(key) or self._cache.recall(key)) is None:
                plan = self._cache.keep(
                    key, self._plan_gather(annotation, local, shape, path, mode, varying)
                )
            return plan(w)
        raise_problems([other_shape(local, shape, path)] if shape not in (None, local) else ())
        found = self._cache.get(key) or self._cache.recall(key)
        if found is None:
            found = [
                self._placement(annotation, local, mode, role, path, True)[0]
                for role in (Role.USE, Role.PARAM)
            ]
            self._cache.keep(key, found)
        return constraint.gather(w, *found)

    def _plan_gather(
        self,
        annotation: Any,
        local: tuple[int, ...],
        shape: Any,
        path: str | None,
        mode: str | None,
        varying: frozenset[str] | None,
    ) -> manual_gather.ManualGather:
        manual = self.manual_axes(_jax.ambient_mesh())
        dims = resolver.lower_local(annotation, local, self.rules)
        raise_problems(path_wanted(annotation, dims, self.rules) if path is None else ())
        weight = manual_gather.Weight(
            resolve=lambda role, whole: self._explain(annotation, mode, role, whole, path),
            dims=dims,
            local=local,
            shape=shape,
            varying=varying,
            manual={
                axis: size for axis, size in self._sizes.items() if axis in manual and size > 1
            },
            path=path or "",
        )
        return manual_gather.plan_gather(weight, context.mapped_inputs(), mesh=self.mesh)

    def _sharding(self, found: Resolution, memory_kind: str | None) -> NamedSharding:
        spec = found.require()
        if PartitionSpec.UNCONSTRAINED in spec.partitions:
            open_dims = [
                decision
                for decision in found.decisions
                if decision.outcome is Outcome.UNCONSTRAINED
            ]
            raise_problems([must_lie(found, decision) for decision in open_dims], resolution=found)
        key = ("sharding", spec, memory_kind)
        made = self._cache.get(key) or self._cache.recall(key)
        if made is None:
            made = self._cache.keep(key, NamedSharding(self.mesh, spec, memory_kind=memory_kind))
        sharding: NamedSharding = made
        return sharding


def _restored(
    rules: AxisRules, mesh: AbstractMesh, mode: str | None, name: str
) -> PartitionManager:
    manager = object.__new__(PartitionManager)
    manager._set(rules, mesh, mode, name, {})
    return manager


jax.tree_util.register_static(PartitionManager)
