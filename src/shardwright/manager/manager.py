"""`PartitionManager`: what a user calls. Each method calls one function.

Most of these functions are in this package. The methods `plan`, `profile`, `plan_reshard` and
`reshard` import functions of packages above, inside their bodies. These functions take a `Manager`,
so the imports form no cycle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardwright.errors import raise_problems
from shardwright.manager import place as arrays
from shardwright.manager import remat, trees, weights
from shardwright.manager import step as steps
from shardwright.manager.arguments import check_rules_on_mesh, compiled_rules, mesh_for
from shardwright.manager.core import Manager, needs_sharding
from shardwright.mesh.build import mesh_sizes
from shardwright.processes.compare import ProcessOptions
from shardwright.resolution.decisions import Resolution
from shardwright.resolution.partition_axis import PartitionAxis
from shardwright.resolution.problems import suggest_for_missing_size
from shardwright.resolution.request import ShardingRequest
from shardwright.resolution.rules import AxisRules
from shardwright.vocabulary.annotations import join_axes, read_annotation
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.modes import parse_mode
from shardwright.vocabulary.shown import html_of

if TYPE_CHECKING:
    from shardwright.plan.hardware import Topology
    from shardwright.plan.planner import PlanReport
    from shardwright.plan.profile.result import Profile
    from shardwright.reshard.move import Progress
    from shardwright.reshard.tree import ReshardPlan


@final
class PartitionManager(Manager):
    """Resolve annotations on one mesh under one set of rules, and shard arrays accordingly.

    `with pm:` makes the manager ambient for `sw.shard`, `sw.hint` and `sw.gather`. The manager is
    then part of the cache key of jit. Equality and hash cover rules, policy, mode, mesh and effect.

    If the mesh spans several processes, the first entry outside of a trace waits until all of them
    have entered an equal manager.

    Args:
      strategy: A `Strategy`, compiled `AxisRules`, or a `PartitionAxis`.
      mesh: A `Mesh` or an `AbstractMesh`. Defaults to the mesh of the strategy; building it starts
        the backend. For rules without a strategy, defaults to the ambient mesh.
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

    __slots__ = ()

    # `sw.shard` calls this method on the ambient manager, which may also be the manager of
    # interop/eformer.
    place = arrays.place

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
        mode = None if mode is None else parse_mode(mode)
        check_rules_on_mesh(rules, mesh_sizes(own_mesh))
        super().__init__(rules, own_mesh, mode=mode, name=name, options=options)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        return html_of(self)

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
        return self.answer(ShardingRequest(join_axes(axes), shape, mode, role, path))

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

        The arguments are those of `explain`. `memory_kind` defaults to the memory that `[memory]`
        of the strategy names, else to the default memory of the devices.

        Raises:
          ShardingError: The annotation does not resolve. The error has the `problems` of `explain`.
          StrategyError: A rule is `?`, but a sharding must decide every dim. Or a rule puts the
            array on the host, and the backend has no memory there.
        """
        resolution = self.explain(*axes, mode=mode, role=role, shape=shape, path=path)
        return self.sharding_of(resolution, memory_kind)

    def mesh_axes(
        self, axis: str, size: int | None = None, *, mode: str | None = None
    ) -> tuple[str, ...]:
        """Return the mesh axes that an axis of an activation is sharded over.

        Raises:
          ShapeRequiredError: The result depends on the size, and `size` is None.
          StrategyError: The rule is `?`, so the compiler decides.
        """
        resolution = self.explain((axis,), mode=mode, shape=None if size is None else (size,))
        problems = suggest_for_missing_size(resolution.problems, "pass size=")
        raise_problems(problems or needs_sharding(resolution), resolution=resolution)
        return resolution.decisions[0].mesh_axes

    def axis_size(self, axis: str, size: int | None = None, *, mode: str | None = None) -> int:
        """Return the number of shards of an axis of an activation.

        Raises:
          ShapeRequiredError: The result depends on the size, and `size` is None.
          StrategyError: The rule is `?`, so the compiler decides.
        """
        return math.prod(self.sizes[name] for name in self.mesh_axes(axis, size, mode=mode))

    def shard(
        self, x: Any, *axes: Any, mode: str | None = None, role: Role | str | None = None
    ) -> Any:
        """Shard an array, or every array of a tree, as its annotation resolves.

        Inside a trace, `shard` adds a sharding constraint, or a reshard over Explicit mesh axes.
        Outside of a trace it places the array. `shard` is strict: an array that does not fit raises
        an error. NumPy data must be equal in all processes of the mesh; this is checked. Like
        `jax.device_put`, `shard` copies only what it moves: the result may share memory with `x`,
        so a function that donates the result may delete arrays of `x`. `shard` never moves an array
        between the memories of host and device.

        Args:
          x: JAX or NumPy arrays, or a tree of them.
          *axes: Axis strings and composites, or one annotation, or a tree of annotations.
          mode: Runtime mode. Defaults to the manager's mode, else to the layout's, else to train.
          role: Role of the array. Defaults to param for weight layouts, else to activation.

        Raises:
          ShardingError: See `resolve`. For a tree, the problems of all leaves at once.
          ManualAxisError: Inside `shard_map`, the spec has a Manual mesh axis that the value does
            not vary over.
          MeshMismatchError: The ambient mesh is not the manager's.
          AgreementError: NumPy data differs between processes. Under `agree=False`, JAX makes this
            check.
        """
        return arrays.place(self, x, axes, mode, role)

    def hint(
        self, x: Any, *axes: Any, mode: str | None = None, role: Role | str | None = None
    ) -> Any:
        """Like `shard`, but leave indivisible, conflicting and Manual dims to the compiler."""
        return arrays.place(self, x, axes, mode, role, False)

    def gather(
        self,
        w: Any,
        *axes: Any,
        path: str | None = None,
        mode: str | None = None,
        shape: Any = None,
    ) -> Any:
        """Gather a stored weight, or a tree of them, into the sharding that computation uses.

        The weight is constrained to its `use` sharding, and its gradient to its `param` sharding.
        A weight in host memory first moves to the device, and its gradient moves to the host.
        Inside `shard_map` this is an all-gather of the shard, whose transpose is a reduce-scatter.
        `gather` has derivatives of any order.

        Args:
          w: A weight, or a tree of weights.
          *axes: The annotation of `w`, as for `shard`.
          path: Path of the weight, required if a `[[tensors]]` entry may match it. For a tree, the
            path of the tree itself: "" at the root.
          mode: Runtime mode. Defaults to the manager's mode.
          shape: Global shape, or a tree of shapes. Required inside `shard_map` if the global shape
            cannot be inferred from the value.

        Raises:
          ShardingError: The annotation does not fit the weight, the rules or the mesh.
          StrategyError: `path` is None, and a `[[tensors]]` entry names an axis of the weight.
          ShapeRequiredError: Inside `shard_map`, the global shape of `w` is unknown or ambiguous.
          ManualAxisError: Inside `shard_map`, `w` is not split over the mesh axes of its use.
        """
        return weights.gather(self, w, axes, path=path, mode=mode, shape=shape)

    def global_array(
        self,
        local: Any,
        *axes: Any,
        global_shape: Sequence[int] | None = None,
        mode: str | None = None,
    ) -> jax.Array:
        """Build a global array from the parts that the processes have.

        The parts must have one shape and dtype. If devices of several processes hold the same
        shard, as under a replicated spec, these processes must pass equal data for it. The
        processes compare this data at each call.

        Args:
          local: The part of this process: a NumPy array, or a value that `np.asarray` accepts.
          *axes: Annotation of the global array.
          global_shape: Global shape. Defaults to the shape that the local shape and the spec imply.
          mode: Runtime mode. Defaults to the manager's mode.

        Raises:
          ShapeRequiredError: The spec depends on sizes, and `global_shape` is not given.
          AgreementError: The parts of the processes differ in shape or dtype, or copies of one
            shard differ.
          StrategyError: `local` is not an array of numbers.
        """
        annotation = read_annotation(axes)
        return arrays.global_array(self, local, annotation, global_shape=global_shape, mode=mode)

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
        """Return the jitted `jax.shard_map` of a function, given annotations instead of specs.

        Each axis resolves once per call, from the sizes of the inputs.

        Inside another `shard_map`, the result has derivatives in reverse mode only, and only with
        respect to its arguments, not to values that `f` closes over.

        Args:
          f: Function of local arrays.
          in_axes: One annotation, or a tree of annotations, per positional argument.
          out_axes: One annotation, or a tuple, list or dict of annotations.
          sizes: Global sizes of axes that no input has. Defaults to none.
          mode: Runtime mode. Defaults to the manager's mode.
          check_vma: Whether JAX tracks which mesh axes values vary over. Defaults to True.

        Raises:
          AxisConflictError: One axis would be sharded in two ways.
          StrategyError: A rule is `?`, which leaves the dim to the compiler.
        """
        return arrays.shard_map(
            self,
            f,
            in_axes=in_axes,
            out_axes=out_axes,
            sizes=sizes,
            mode=mode,
            check_vma=check_vma,
        )

    def shardings(
        self,
        values: Any,
        annotations: Any = None,
        *,
        mode: str | None = None,
        role: Role | str = Role.PARAM,
    ) -> Any:
        """Return a tree of shardings for `jit`, `device_put` or a checkpoint.

        Their memory kinds are those of `[memory]` of the strategy.

        Args:
          values: A tree of values with a shape. `ArraySpec` leaves have their own annotations.
          annotations: A tree of annotations. One annotation covers all leaves below its path.
          mode: Runtime mode. Defaults to the manager's mode.
          role: Role of the arrays. Defaults to param.

        Raises:
          ShardingError: The problems of all leaves at once, each with its path.
        """
        return trees.shardings(self, values, annotations, mode=mode, role=role)

    def abstract(
        self,
        values: Any,
        annotations: Any = None,
        *,
        mode: str | None = None,
        role: Role | str = Role.PARAM,
    ) -> Any:
        """Return a tree of `jax.ShapeDtypeStruct`s with shardings.

        Use it to lower a program, to compile ahead of time, or to restore a checkpoint.
        The arguments are those of `shardings`.

        Raises:
          IndivisibleError: JAX cannot know whether a symbolic size of `jax.export` divides, so it
            refuses the sharding.
          ShardingError: See `shardings`.
        """
        return trees.abstract(self, values, annotations, mode=mode, role=role)

    def agree(
        self,
        values: Any,
        annotations: Any = None,
        *,
        mode: str | None = None,
        role: Role | str = Role.PARAM,
    ) -> None:
        """Check that every process of the mesh has the same tree: paths, shapes, dtypes, specs.

        All processes of the mesh must call this method. The call is not a collective: it waits for
        at most 8 seconds. It does nothing on a mesh of one process, and under `agree=False`. The
        arguments are those of `shardings`.

        Raises:
          AgreementError: A leaf differs between processes, or a process did not make the call.
          ShardingError: See `shardings`.
        """
        trees.agree(self, values, annotations, mode=mode, role=role)

    def init(self, specs: Any, key: Any, *, mode: str | None = None) -> Any:
        """Initialize a tree of `ArraySpec`s in one jit. Each array is created already sharded.

        Args:
          specs: A tree of `ArraySpec`s with `init`.
          key: PRNG key. Each leaf uses this key with the leaf's path folded in, so a new parameter
            does not change the values of others.
          mode: Runtime mode. Defaults to the manager's mode.

        Raises:
          StrategyError: Leaves have no `init`.
          MeshSpecError: The mesh is abstract.
          ShardingError: See `shardings`.
        """
        return trees.init(self, specs, key, mode=mode)

    def state_shardings(
        self,
        state: Any,
        params: Any,
        annotations: Any = None,
        *,
        overrides: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Any:
        """Return the shardings of an optimizer's state.

        Each leaf, such as a moment, is sharded like the parameter that it follows, and also over
        the mesh axes of `zero1`.

        Args:
          state: The state, or `jax.eval_shape(optimizer.init, params)`.
          params: Arrays, `ShapeDtypeStruct`s or `ArraySpec`s.
          annotations: Annotations of the parameters, required if these are not `ArraySpec`s.
          overrides: Annotation by path pattern, for leaves that follow no parameter. Defaults to
            none.
          mode: Runtime mode. Defaults to the manager's mode.

        Raises:
          StrategyError, RankMismatchError: A leaf follows no parameter. The error has all such
            leaves.
        """
        return steps.state_shardings(
            self, state, params, annotations, overrides=overrides, mode=mode
        )

    def abstract_state(
        self,
        optimizer: Any,
        params: Any,
        annotations: Any = None,
        *,
        overrides: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Any:
        """Return an optimizer's state as `jax.ShapeDtypeStruct`s with shardings, without arrays.

        `{"params": pm.abstract(specs), "moments": pm.abstract_state(optimizer, specs)}` describes a
        training state. Use it to jit a step, to compile ahead of time, or as the target of a
        restored checkpoint.

        Args:
          optimizer: Anything with `init(params)`, such as an optax transformation.
          params: Arrays, `ShapeDtypeStruct`s or `ArraySpec`s.
          annotations: Annotations of the parameters, required if these are not `ArraySpec`s.
          overrides: Annotation by path pattern, for leaves that follow no parameter. Defaults to
            none.
          mode: Runtime mode. Defaults to the manager's mode.

        Raises:
          StrategyError: The optimizer has no `init`.
          ShardingError: See `state_shardings`.
        """
        return steps.abstract_state(
            self, optimizer, params, annotations, overrides=overrides, mode=mode
        )

    def init_state(
        self,
        optimizer: Any,
        params: Any,
        annotations: Any = None,
        *,
        overrides: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Any:
        """Create an optimizer's state in one jit, each array already sharded.

        Args:
          optimizer: Anything with `init(params)`, such as an optax transformation.
          params: Arrays, as `pm.init` returns them.
          annotations: Annotations of the parameters, for instance their `ArraySpec`s.
          overrides: Annotation by path pattern, for leaves that follow no parameter. Defaults to
            none.
          mode: Runtime mode. Defaults to the manager's mode.

        Raises:
          StrategyError: The optimizer has no `init`, or a parameter is not an array.
          MeshSpecError: The mesh is abstract.
          ShardingError: See `state_shardings`.
        """
        return steps.init_state(
            self, optimizer, params, annotations, overrides=overrides, mode=mode
        )

    def jit_step(
        self, step: Callable[..., Any], state: Any, *inputs: Any, donate: bool = True
    ) -> Callable[..., Any]:
        """Jit a training step `(state, *inputs) -> (state, metrics)` that donates its state.

        The new state has the shardings of the old state and reuses its memory. Optimizer state in
        host memory moves to the device before the step, and back after it; the state of
        `sw.offloaded` moves one layer at a time. The step runs under this manager, so a call does
        not need `with pm:`. Every array of the state must have a sharding on the manager's mesh.
        Scalars and PRNG keys without a sharding are replicated.

        The returned function has `lower`, `trace` and the other attributes of a jitted function. It
        takes its arguments by position. It raises a ShardingError if the state has another
        structure, shape or dtype than the argument `state`, if inputs do not fit their annotations,
        if an array has another sharding, and if an array is deleted because an earlier call has
        donated it.

        Args:
          step: Function of the state and the inputs. It returns a pair: the new state, with the
            structure, shapes and dtypes of the old state, and any tree of results, such as the
            loss.
          state: The state, or `ShapeDtypeStruct`s with shardings, as `abstract` and
            `abstract_state` return them.
          *inputs: One per input of the step: an annotation for all of its arrays, or a tree of
            annotations, or arrays or `ShapeDtypeStruct`s with shardings.
          donate: Whether the memory of the old state is reused. Defaults to True.

        Raises:
          StrategyError: An array of the state or of an input has no sharding on the manager's mesh.
          ShapeRequiredError: The sharding of an annotated input depends on its sizes.
          ShardingError: An annotation does not fit the rules or the mesh.
        """
        return steps.jit_step(self, step, state, *inputs, donate=donate)

    def remat_policy(self, *names: str) -> Callable[..., Any]:
        """Return a policy of `jax.checkpoint` that saves values by their names, and no others.

        `[memory.saved]` of the strategy adds names, and says whether the values of a name live on
        the device or on the host. For names that `[memory.saved]` does not have, the rule
        `activations` decides.

        Args:
          *names: Names that the function gives to values by `jax.ad_checkpoint.checkpoint_name`.

        Raises:
          StrategyError: A value lives on the host, and the backend has no memory there. Or a name
            is not text.
        """
        return remat.remat_policy(self, names)

    def plan(
        self,
        function: Callable[..., Any],
        *shapes: Any,
        specs: Any = None,
        outputs: Any = None,
        holds: Any = None,
        donated: Any = (),
        topology: str | Topology | None = None,
    ) -> PlanReport:
        """Return what a function sends and computes under a manager, without a device or a
        compiler.

        The function is traced, and its annotations stay in the trace. Over Explicit mesh axes, the
        types in the trace have shardings too. A walk over the trace follows the sharding of every
        value and records the collectives.

        Args:
          function: The function that you would pass to `jax.jit`.
          *shapes: Per argument, a tree of arrays or ShapeDtypeStructs. Their own shardings are used
            where `specs` gives no annotation.
          specs: Per argument, a tree of annotations, or None. Defaults to None for all.
          outputs: Annotations of the outputs. Defaults to the shardings that the program gives
            them. An output has the role of the arguments with the same annotation and shape.
          holds: Per argument, `parameters`, `optimizer`, `cache`, `inputs`, or a tree of these; a
            name covers a subtree. The name decides the role of the annotations: for example, those
            of `optimizer` have the role `state`. By default, arrays annotated as weights are
            parameters, and all others are inputs.
          donated: Position, or positions, of the arguments whose memory the program may overwrite,
            as in `jax.jit(donate_argnums=)`. Defaults to none.
          topology: The hardware of the mesh: a slice, `v5p:4x4x4`, or hosts of GPUs, `16xh100:8`.
            By default the report has no times and no verdict.

        Raises:
          ShardingError: An annotation does not resolve.
          MeshSpecError: There is no such slice, or it has another number of devices than the mesh.
          StrategyError: A donated position is not one of the arguments, or a topology is not text.
        """
        from shardwright.plan.planner import plan

        return plan(
            self,
            function,
            *shapes,
            specs=specs,
            outputs=outputs,
            holds=holds,
            donated=donated,
            topology=topology,
        )

    def profile(
        self, trace: str | Path, report: PlanReport, *, program: str | None = None
    ) -> Profile:
        """Return the measurements of a profile side by side with the plan of the same program.

        Args:
          trace: Folder that was passed to `jax.profiler.trace`, or a file `*.xplane.pb`.
          report: The plan of the program, from `plan`.
          program: Name of the program, such as `jit_step`. Defaults to the program that took the
            most time.

        Raises:
          ProgramError: There is no profile, or no such program in it.
          MeshMismatchError: The program was compiled for another number of devices.
        """
        from shardwright.plan.profile.measure import profile_trace

        return profile_trace(trace, report, mesh=self.mesh, program=program)

    def plan_reshard(
        self,
        tree: Any,
        specs: Any,
        *,
        source: Any = None,
        piece: int | str = "64MiB",
        donate: bool = False,
        dtype: Any = None,
    ) -> ReshardPlan:
        """Return how `reshard` would move a tree to this manager's shardings, without moving it.

        It compiles nothing and needs no devices. Meshes may be abstract, and leaves may be
        `jax.ShapeDtypeStruct`s. The devices of an abstract mesh are numbered from 0 in mesh order.
        So two abstract meshes of eight devices have the same devices.

        Args:
          tree: Tree of arrays, of NumPy arrays, or of anything with a shape and a dtype.
          specs: Tree of annotations, as for `shardings`; or a tree of shardings, such as that of
            `state_shardings`; or a tree of arrays or `jax.ShapeDtypeStruct`s with the shardings,
            such as that of `abstract`.
          source: Manager or tree of shardings before the move. Defaults to the shardings of the
            arrays.
          piece: Bytes of a piece, summed over all devices, as an integer or as text. Defaults to 64
            MiB. A larger leaf moves in several pieces.
          donate: Whether each source array is deleted after its leaf has moved. Defaults to False.
          dtype: Floating-point dtype of floating-point leaves after the move. Defaults to that of
            each leaf. Leaves are cast before they are sent if that does not make them larger.

        Raises:
          ShardingError: The problems of all leaves at once, each with its path. Arrays of 2 bits,
            such as int2, cannot be moved.

        Bytes are counted as in `nbytes` of an array: an element of 4 bits takes a whole byte.

        >>> import jax, shardwright as sw
        >>> strategy = sw.Strategy.preset("fsdp_tp")
        >>> train, serve = (
        ...     sw.PartitionManager(strategy, mesh=sw.abstract_mesh(mesh))
        ...     for mesh in ("dp:1,fsdp:4,ep:1,tp:2,sp:1", "dp:1,fsdp:2,ep:1,tp:4,sp:1")
        ... )
        >>> tree = {"up": jax.ShapeDtypeStruct((512, 1024), "float32")}
        >>> specs = {"up": (sw.EMBED, sw.MLP_INTERMEDIATE)}
        >>> plan = serve.plan_reshard(tree, specs, source=train)
        >>> plan.bytes_sent, plan.least_bytes
        (1572864, 1572864)
        """
        from shardwright.reshard.tree import plan_reshard

        return plan_reshard(
            self, tree, specs, source=source, piece=piece, donate=donate, dtype=dtype
        )

    def reshard(
        self,
        tree: Any,
        specs: Any,
        *,
        piece: int | str = "64MiB",
        donate: bool = False,
        dtype: Any = None,
        progress: Callable[[Progress], object] | None = None,
    ) -> Any:
        """Move a tree of arrays to this manager's shardings, exactly as `plan_reshard` says.

        A leaf that already has its target sharding is returned as the same object. If all shards of
        a leaf are already on their devices and only the mesh differs, the result shares these
        shards. An array that is in the tree twice moves once. A second move with the same shapes
        and shardings compiles nothing.

        Args:
          tree: Tree of arrays or NumPy arrays, on any mesh or none.
          specs: As for `plan_reshard`.
          piece: As for `plan_reshard`.
          donate: Whether each source array is deleted after its leaf has moved, so that the peak
            memory is lower. Defaults to False.
          dtype: As for `plan_reshard`.
          progress: Called after each piece. Defaults to a line in the log `shardwright.reshard`
            every five seconds.

        Raises:
          MeshSpecError: The manager's mesh is abstract.
          ShardingError: As for `plan_reshard`; or blocks would go directly between the devices of
            different processes.
          AgreementError: Arrays or numbers in the memory of the host differ between processes.
          MoveError: A piece failed. `error.tree` has the moved leaves, and the other leaves as
            before. `pm.reshard(error.tree, specs, ...)` resumes the move. If Ctrl-C or an exit
            stops the move, this error is the `__cause__` of the `KeyboardInterrupt` or
            `SystemExit`.
        """
        from shardwright.reshard.move import reshard

        return reshard(
            self, tree, specs, piece=piece, donate=donate, dtype=dtype, progress=progress
        )


# As an argument of a jitted function, a manager is part of the tree's structure, and so of the key
# of JAX's cache.
jax.tree_util.register_static(PartitionManager)
