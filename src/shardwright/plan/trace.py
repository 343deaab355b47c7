"""Trace a program once and keep its annotations, to plan it under many strategies."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardwright import _jax
from shardwright.errors import (
    MeshMismatchError,
    ProgramError,
    ShardingError,
    StrategyError,
    located,
)
from shardwright.manager import context
from shardwright.manager.core import Manager
from shardwright.manager.effect import Decided, Effect, constrain, constrain_weight
from shardwright.manager.memory import (
    OffloadedState,
    holds_params,
    host_kind,
    in_host_memory,
    is_host,
)
from shardwright.plan.annotate import Annotation, annotate, annotate_axes_p, annotate_weight
from shardwright.plan.attention_calls import AttentionCalls, read_attention_calls
from shardwright.plan.renaming import Renaming, find_renaming
from shardwright.plan.walk.equations import holds_primitive
from shardwright.plan.walk.events import Walked
from shardwright.plan.walk.ledger import Ledger
from shardwright.plan.walk.program import walk_jaxpr, written_target
from shardwright.plan.walk.values import KEEP, Dims, Origin, ShardedValue, dims_of_spec
from shardwright.resolution import resolver
from shardwright.resolution.decisions import DimDecision, Resolution, RuleRef
from shardwright.resolution.pipeline import STAGES, Pipeline
from shardwright.resolution.request import ShardingRequest
from shardwright.resolution.rules import MemoryRule, SavedActivations, without_mesh_axis
from shardwright.trees.annotated import Leaf, annotated_leaves
from shardwright.vocabulary.annotations import ArraySpec, PartOf
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.modes import MODE_TRAIN


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """A request that was resolved during tracing. Its answer may change the trace.

    Attention, caches, `shard_map` and the model itself make such requests.

    Attributes:
      request: The request.
      spec: Spec that the manager of the trace returned, or None if the request does not resolve.
    """

    request: ShardingRequest
    spec: PartitionSpec | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A traced program that has annotations in place of constraints.

    Attributes:
      jaxpr: The program.
      inputs: Per input, its annotation as a request, or its sharding, or None if it is replicated.
      outputs: Per output, its annotation as a request, or None if the program decides its sharding.
      unclear: Outputs with several possible roles: by annotation and shape, such an output may be
        a weight or its moment, for example. For each of these outputs, one request per role.
      answers: The requests whose answers may have changed the trace.
      mesh: Size of each mesh axis.
      attention: Rules of the strategy that choose an implementation of attention.
      memory: Rules of the strategy that put arrays on the host. They change the types of arrays.
      saved: Rules of the strategy that choose what rematerialization saves.
      pipeline: `[pipeline]` of the strategy, or None.
      attention_calls: The calls of attention, and the implementation that each takes.
      typed_for: The manager, if its mesh has Explicit axes. Then shardings are part of the types of
        all values, and the trace fits this manager only.
      platform: The platform whose kernels the program calls, or None for the platform of the mesh.
    """

    jaxpr: Any
    inputs: tuple[ShardingRequest | NamedSharding | None, ...]
    outputs: tuple[ShardingRequest | None, ...]
    answers: tuple[TracedRequest, ...]
    mesh: Mapping[str, int]
    attention: tuple[tuple[str, RuleRef], ...]
    memory: tuple[MemoryRule, ...]
    saved: SavedActivations
    pipeline: Pipeline | None = None
    unclear: tuple[tuple[ShardingRequest, ...], ...] = ()
    attention_calls: tuple[AttentionCalls, ...] = ()
    typed_for: Manager | None = None
    platform: str | None = None

    @property
    def fits_all(self) -> bool:
        """Whether nothing in the trace depends on the manager.

        If so, the trace fits every Auto mesh.
        """
        if self.typed_for is not None or self.answers:
            return False
        return not holds_primitive(self.jaxpr, "shard_map")

    def renaming(self, manager: Manager) -> Renaming | None:
        """Return a renaming of mesh axes under which the trace fits a manager, else None.

        The renaming is empty if the trace fits as it is. The program must have `any_mesh` set.
        """
        if not self.moves_alike(manager):
            return None
        if self.fits_all and not is_typed(manager):
            return {}
        # Rename nothing if an input has a NamedSharding: `find_renaming` does not see its mesh
        # axes.
        own = any(isinstance(given, NamedSharding) for given in self.inputs)
        if own or not self._runs_alike(manager) or self.typed_for or is_typed(manager):
            return {} if self.fits(manager) else None
        pairs = ((known.spec, manager.answer(known.request).spec) for known in self.answers)
        return find_renaming(pairs, self.mesh, dict(manager.mesh.shape))

    def moves_alike(self, manager: Manager) -> bool:
        """Tell whether a manager puts the same values on the host as the manager of the trace."""
        rules = manager.rules
        return self.memory == rules.memory and self.saved == rules.saved

    def _runs_alike(self, manager: Manager) -> bool:
        """Tell whether a manager has the trace's rules for attention and the trace's pipeline."""
        rules = manager.rules
        return self.attention == rules.attention and self.pipeline == rules.pipeline

    def fits(self, manager: Manager) -> bool:
        """Tell whether a trace under this manager would be the same.

        If the trace has answers or a `shard_map`, it has shapes of shards. Then the manager must
        have the same mesh sizes, the same rules for attention and the same pipeline, and must
        resolve each request to the same spec.
        """
        if not self.moves_alike(manager):
            return False
        if self.typed_for is not None or is_typed(manager):
            return self.typed_for == manager
        return self.fits_all or (
            dict(self.mesh) == dict(manager.mesh.shape)
            and self._runs_alike(manager)
            and all(manager.answer(known.request).spec == known.spec for known in self.answers)
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Recorder:
    """The effect of a plan: annotations stay in the trace, and other requests are recorded.

    Attributes:
      typed: Whether the mesh has Explicit axes. If it has, the trace also keeps the constraints,
        because these decide the types of later values. The requests of the constraints are recorded
        too.
      answers: The requests that were recorded, under all modes of a manager.
    """

    typed: bool = False
    answers: dict[tuple[Any, ...], TracedRequest] = dataclasses.field(default_factory=dict)

    def record(self, request: ShardingRequest, resolution: Resolution) -> None:
        """Record a request whose answer may change the trace."""
        self._keep(request, resolution.spec)

    def _keep(self, request: ShardingRequest, spec: PartitionSpec | None) -> None:
        shape = None if request.shape is None else tuple(request.shape)
        request = request._replace(shape=shape)
        key = (repr(request.annotation), *request[1:])
        self.answers.setdefault(key, TracedRequest(request=request, spec=spec))

    def place(self, x: Any, decided: Decided) -> Any:
        """Annotate an array. Under Manual mesh axes, the trace gets an ordinary constraint."""
        if decided.manual is not None:
            self.record(decided.request, decided.manual)
            return constrain(x, decided)
        if decided.placement is None:
            return x
        if self.typed:
            self._keep(decided.request, decided.placement.spec)
            x = constrain(x, decided)
        # In a stage of a pipeline, the walk leaves the Manual mesh axes out of the rules, so keep
        # `manual`.
        manual = decided.request.manual
        request = decided.request._replace(manual=manual if STAGES in manual else frozenset())
        return annotate(x, Annotation(request, decided.strict))

    def gather(self, w: Any, use: Decided, stored: Decided) -> Any:
        """Annotate a weight for its use, and its gradient like the stored weight."""
        if self.typed:
            assert use.placement is not None
            self._keep(use.request, use.placement.spec)
            return annotate(constrain_weight(w, use, stored), Annotation(use.request))
        if in_host_memory(w):
            w = jax.device_put(w, jax.memory.Space.Device)
        return annotate_weight(w, Annotation(use.request), Annotation(stored.request))


def is_typed(manager: Manager) -> bool:
    """Tell whether the mesh has Explicit axes, so that types of values have shardings."""
    return AxisType.Explicit in manager.mesh.axis_types


def planning_manager(manager: Manager) -> tuple[Manager, Recorder]:
    """Return a manager under which a trace keeps its annotations, and the recorder of its requests.

    The new manager resolves every request like the given one, on the same mesh.
    """
    recorder = Recorder(typed=is_typed(manager))
    # The token is in the keys of JAX's caches. A new token keeps JAX from reusing a trace with
    # annotations under any other manager. JAX never frees the token, so it must be small.
    effect = Effect(recorder.place, recorder.gather, object(), recorder.record)
    return manager.having(effect=effect), recorder


def trace(
    manager: Manager,
    function: Callable[..., Any],
    shapes: Sequence[Any],
    *,
    specs: Any = None,
    outputs: Any = None,
    roles: Sequence[Role | None] | None = None,
    platform: str | None = None,
) -> Trace:
    """Trace a function with its annotations kept. No device is needed, and no backend is started.

    Args:
      manager: Rules and mesh under which the function is traced. If the function asks for specs or
        sizes, the answers may change the trace.
      function: Function to trace.
      shapes: Per argument, a tree of arrays or ShapeDtypeStructs.
      specs: Per argument, a tree of annotations, or None for arguments that have shardings. As in
        `shard`, `ArraySpec`s and weight layouts resolve as parameters, and other annotations as
        activations.
      outputs: Annotations of the outputs. Defaults to the shardings that the program gives them.
      roles: Role of each array of the arguments, or None where its annotation decides.
      platform: The platform whose kernels the program calls. Defaults to the platform of the mesh.
    """
    if specs is not None and (not isinstance(specs, (tuple, list)) or len(specs) != len(shapes)):
        raise StrategyError(
            f"specs is not a tuple with one entry for each of the {len(shapes)} arguments",
            fix="write specs=(annotations of the first argument, ...), with None for an argument "
            "that has its own shardings",
        )
    # All plans of a manager share one planning manager, so that JAX's caches do not grow.
    planning, recorder = manager.remember(("planning",), lambda: planning_manager(manager))
    inputs = read_inputs(planning, shapes, specs, roles)
    leaves, structure = jax.tree.flatten(tuple(shapes))
    if len(inputs) != len(leaves):
        raise StrategyError(
            f"the function has {len(leaves)} array arguments, but {len(inputs)} annotations "
            "were given",
            fix="give one annotation, or a tree of annotations, for each argument",
        )
    # Use `manager`: `planning` would record these requests as requests of the program.
    shardings = [_type_sharding(each, manager) for each in inputs]
    arguments = jax.tree.unflatten(structure, map(argument_of, leaves, shardings))

    def traced_once(*arguments: Any) -> Any:
        # Each `trace` defines a new function. When the function is freed, JAX frees its trace too.
        try:
            return fetching(planning, function)(*arguments)
        except Exception as error:
            # Check inside `jit`: an error that leaves `jit` lacks frames that are needed here.
            if not recorder.typed or not _jax.refuses_shardings(error):
                raise
            reason = " ".join(str(error).split())
            refused = ProgramError(
                f"JAX refuses the program on a mesh with Explicit axes: {reason:.300}",
                fix="say how the result is sharded, with sw.einsum(..., out=axes), sw.shard or "
                "out_sharding=; or use a mesh with Auto axes",
            )
            raise located(refused, _jax.raising_line(error)) from error

    try:
        with planning, context.TARGET(platform):
            traced = jax.jit(traced_once).trace(*arguments)
    except ShardingError as error:
        raise located(error, _jax.raising_line(error)) from error
    # A loop may compute values that nothing uses. JAX keeps them and compilers remove them, so they
    # are removed before the walk.
    whole = _jax.without_refs(traced.jaxpr).jaxpr
    # Keep unused inputs (`instantiate=True`), because `inputs` has an entry for each argument.
    jaxpr, _ = dce_jaxpr(whole, [True] * len(whole.outvars), instantiate=True)
    goals: tuple[ShardingRequest | None, ...] = (None,) * len(traced.jaxpr.jaxpr.outvars)
    if outputs is not None:
        goals = tuple(
            ShardingRequest(leaf.annotation, leaf.value.shape, planning.mode, None, leaf.path)
            for leaf in _annotated(traced.out_info, outputs, "outputs")
        )
    by_role = _roles_by_arguments(goals, inputs, planning)
    with context.TARGET(platform):  # the platform decides which branches run
        attention_calls = read_attention_calls(jaxpr)
    return Trace(
        jaxpr=jaxpr,
        inputs=inputs,
        outputs=tuple(each[0] for each in by_role),
        unclear=tuple(each for each in by_role if len(each) > 1),
        answers=tuple(recorder.answers.values()),
        mesh=dict(manager.mesh.shape),
        attention=manager.rules.attention,
        memory=manager.rules.memory,
        saved=manager.rules.saved,
        pipeline=manager.rules.pipeline,
        attention_calls=attention_calls,
        typed_for=manager if recorder.typed else None,
        platform=platform,
    )


def argument_of(leaf: Any, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
    """Return an argument as a `ShapeDtypeStruct`, with `sharding` in place of its own sharding."""
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    # A Python scalar is weakly typed. Without `weak_type`, it would widen the results.
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak, sharding=sharding)


def sharding_of(given: ShardingRequest | NamedSharding | None, manager: Manager) -> NamedSharding:
    """Return the sharding of an argument on the manager's mesh; replicated if none is given."""
    if isinstance(given, ShardingRequest):
        return manager.sharding_of(manager.answer(given))
    if given is None:
        return NamedSharding(manager.mesh, PartitionSpec())
    # Use the manager's mesh: the mesh of `given` may have devices, or other axis types.
    return NamedSharding(manager.mesh, given.spec, memory_kind=given.memory_kind)


def _type_sharding(
    given: ShardingRequest | NamedSharding | None, manager: Manager
) -> NamedSharding | None:
    """Return the part of an argument's sharding that its type needs during the trace, or None."""
    if is_typed(manager):
        return sharding_of(given, manager)
    # On an Auto mesh, give no spec: the spec would be a part of the trace, which many strategies
    # share.
    if not _is_on_host(given, manager):
        return None
    return NamedSharding(manager.mesh, PartitionSpec(), memory_kind=host_kind(manager.mesh, None))


def _is_on_host(given: ShardingRequest | NamedSharding | None, manager: Manager) -> bool:
    if isinstance(given, ShardingRequest):
        return manager.answer(given).on_host
    return given is not None and is_host(given.memory_kind)


def fetching(manager: Manager, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, but with its arguments first moved from the host, as in `jit_step`.

    If the rules put parameters on the host, return `function` unchanged. Calls of `gather` and
    `offloaded` in the program then move the arguments.
    """
    if holds_params(manager.rules, manager.mode or MODE_TRAIN):
        return function

    def move(x: Any) -> Any:
        if isinstance(x, OffloadedState) or not in_host_memory(x):
            return x
        return jax.device_put(x, jax.memory.Space.Device)

    return lambda *arguments: function(
        *jax.tree.map(move, arguments, is_leaf=lambda x: isinstance(x, OffloadedState))
    )


def hosted_outputs(traced: Trace, manager: Manager, donated: Sequence[bool]) -> list[bool]:
    """Return, per output, whether it is returned in the memory of the host.

    If the output has an annotation, and only one role is possible for it, the annotation decides.
    Otherwise, the output is in the memory of the donated argument that it overwrites: as in JAX,
    this is the first donated argument of the same shape and dtype.
    """
    waiting: dict[Any, list[bool]] = {}
    for given, variable, may in zip(traced.inputs, traced.jaxpr.invars, donated, strict=True):
        if may:
            key = variable.aval.shape, variable.aval.dtype
            waiting.setdefault(key, []).append(_is_on_host(given, manager))
    unclear = {id(requests[0]) for requests in traced.unclear}
    hosted = []
    for goal, variable in zip(traced.outputs, traced.jaxpr.outvars, strict=True):
        same = waiting.get((variable.aval.shape, variable.aval.dtype), [])
        aliased = bool(same) and same.pop(0)
        is_clear = goal is not None and id(goal) not in unclear
        hosted.append(_is_on_host(goal, manager) if is_clear else aliased)
    return hosted


def read_inputs(
    manager: Manager,
    shapes: Sequence[Any],
    specs: Any,
    roles: Sequence[Role | None] | None,
) -> tuple[ShardingRequest | NamedSharding | None, ...]:
    """Return, for each array of the arguments, its request, its sharding or None; see `Trace`."""
    inputs: list[ShardingRequest | NamedSharding | None] = []
    for at, (tree, spec) in enumerate(zip(shapes, specs or [None] * len(shapes), strict=True)):
        if spec is None:
            inputs += [_own_sharding(leaf, manager.mesh) for leaf in jax.tree.leaves(tree)]
            continue
        inputs += [
            ShardingRequest(leaf.annotation, np.shape(leaf.value), manager.mode, None, leaf.path)
            for leaf in _annotated(tree, spec, f"specs[{at}]")
        ]
    return tuple(
        given._replace(role=role)
        if isinstance(given, ShardingRequest) and role is not None
        else given
        for given, role in zip(inputs, roles or [None] * len(inputs), strict=True)
    )


def _own_sharding(leaf: Any, mesh: Any) -> NamedSharding | None:
    """Return the sharding of an argument. Raise an error if the sharding is on another mesh."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    if dict(sharding.mesh.shape) != dict(mesh.shape):
        raise MeshMismatchError(
            f"an argument is sharded on the mesh {dict(sharding.mesh.shape)}, "
            f"but the manager has the mesh {dict(mesh.shape)}",
            fix="pass shapes without shardings, and their annotations in specs=, "
            "or pass pm.abstract(specs) of this manager",
        )
    return sharding


def _roles_by_arguments(
    outputs: Sequence[ShardingRequest | None],
    inputs: Sequence[ShardingRequest | NamedSharding | None],
    manager: Manager,
) -> list[tuple[Any, ...]]:
    """Return each output with the role of the arguments that have its annotation and its shape.

    A training step returns its parameters and state. A weight and its moments may have the same
    annotation, but under `zero1` their specs differ. So an output may have several entries, one per
    role.
    """

    def own_role(request: ShardingRequest) -> Role:
        return manager.decide(request).role

    def key(request: ShardingRequest) -> tuple[str, tuple[int, ...]]:
        annotation = request.annotation
        axes = annotation.axes if isinstance(annotation, ArraySpec) else annotation
        return repr(axes), tuple(request.shape or ())

    # Use a dict in place of a set, so that the roles keep the order of the arguments.
    known: dict[Any, dict[Role, None]] = {}
    for given in inputs:
        if isinstance(given, ShardingRequest):
            known.setdefault(key(given), {})[own_role(given)] = None
    found: list[tuple[Any, ...]] = []
    for goal in outputs:
        if goal is None:
            found.append((None,))
            continue
        roles = dict(known.get(key(goal), {}))
        own = own_role(goal)
        if own is Role.PARAM and not isinstance(goal.annotation, PartOf):
            # The output is annotated as a weight, so it may be a weight that is not an argument.
            roles[own] = None
        found.append(tuple(goal._replace(role=role) for role in roles) or (goal,))
    return found


def check_outputs(traced: Trace, manager: Manager) -> None:
    """Check that each output resolves to one spec, whichever of the possible roles it has.

    Raises:
      StrategyError: The spec of an output depends on its role, and arguments of several roles have
        its annotation.
    """
    for requests in traced.unclear:
        specs = {str(request.role): manager.answer(request).spec for request in requests}
        if len(set(specs.values())) > 1:
            each = " or ".join(f"{role} {spec}" for role, spec in specs.items())
            raise StrategyError(
                f"the sharding of the output depends on its role, {each}, and its annotation does "
                "not name the role",
                path=f"outputs/{requests[0].path}".removesuffix("/"),
                fix="annotate optimizer state with sw.annotate_state(state, specs), "
                "in specs= and in outputs=, and parameters with ArraySpecs",
            )


def _annotated(tree: Any, annotations: Any, name: str) -> list[Leaf]:
    """Pair the leaves of a tree with annotations. An error also names the argument `name`."""
    try:
        return annotated_leaves(tree, annotations)
    except ShardingError as error:
        named = [
            dataclasses.replace(problem, path=f"{name}/{problem.path}".removesuffix("/"))
            for problem in error.problems
        ]
        raise type(error)(problems=named) from None


def _written_rule(decision: DimDecision, axis: str, manager: Manager) -> str:
    """Return the text of the rule or the policy that put a mesh axis on a dim."""
    ref, zero1 = decision.rule, manager.rules.policy.zero1
    if zero1 is not None and axis in decision.zero1:  # zero1 has added this axis
        ref = zero1.ref
    return "" if ref is None else ref.written


def walk(
    traced: Trace,
    manager: Manager,
    *,
    kinds: Sequence[str] | None = None,
    donated: Sequence[bool] | None = None,
    renaming: Renaming = MappingProxyType({}),
) -> Walked:
    """Walk a trace under a manager's rules and mesh.

    Args:
      traced: Trace of the program. It must fit the manager (`traced.fits(manager)`).
      manager: Rules and mesh.
      renaming: Mesh axis in the trace -> the mesh axes that replace it, from
        `traced.renaming(manager)`.
      kinds: Memory category of each input. Defaults to `inputs` for all.
      donated: Per input, whether the program may overwrite it. By default, it may not.
    """
    sizes = {axis: size for axis, size in manager.mesh.shape.items() if size > 1}
    known: dict[int, tuple[Dims, dict[str, DimDecision], str]] = {}
    is_staged = manager.rules.pipeline is not None and manager.rules.pipeline.runs

    @functools.cache
    def manager_of(manual: frozenset[str]) -> Manager:
        if not is_staged or STAGES not in manual or STAGES not in sizes:
            return manager  # not in a stage: only the rules of stages leave out Manual mesh axes
        names = [name for each in sorted(manual) for name in renaming.get(each, (each,))]
        return manager.having(rules=functools.reduce(without_mesh_axis, names, manager.rules))

    def target(equation: Any, ledger: Ledger) -> ShardedValue | None:
        if equation.primitive is not annotate_axes_p:
            return written_target(equation, ledger)
        annotation: Annotation = equation.params["annotation"]
        value = resolved(annotation.request, annotation.strict, _jax.source_line(equation))
        dims = list(value.dims)
        # In ascending order, because an insertion shifts all later dims.
        for at in sorted(equation.params["added"]):
            dims.insert(at, KEEP)
        return dataclasses.replace(value, dims=tuple(dims))

    def resolved(request: ShardingRequest, strict: bool, source: str) -> ShardedValue:
        # The trace keeps its requests alive, so no two requests have the same id.
        key = id(request)
        if key not in known:
            resolution = manager_of(request.manual).answer(request)
            if not strict:
                resolution = resolver.left_open(resolution)
            try:
                spec = resolution.require()
            except ShardingError as error:
                raise located(error, source) from error
            known[key] = (
                dims_of_spec(spec.partitions, len(request.shape or ()), sizes),
                {axis: dim for dim in resolution.decisions for axis in dim.mesh_axes},
                request.path or "",
            )
        dims, decisions, path = known[key]
        origins = {
            axis: Origin(
                axis=decision.label,
                rule=_written_rule(decision, axis, manager),
                source=source,
                path=path,
            )
            for axis, decision in decisions.items()
        }
        return ShardedValue(dims=dims, origins=origins)

    def value_of(given: ShardingRequest | NamedSharding | None, ndim: int) -> ShardedValue:
        if given is None:
            return ShardedValue(dims=((),) * ndim)
        if isinstance(given, NamedSharding):
            return ShardedValue(dims=dims_of_spec(given.spec.partitions, ndim, sizes))
        return resolved(given, True, "")

    pairs = zip(traced.inputs, traced.jaxpr.invars, strict=True)
    inputs = [value_of(given, variable.aval.ndim) for given, variable in pairs]
    outputs = [None if goal is None else resolved(goal, True, "") for goal in traced.outputs]
    with context.TARGET(traced.platform):
        return walk_jaxpr(
            traced.jaxpr,
            inputs,
            sizes,
            outputs=outputs,
            target=target,
            kinds=kinds,
            donated=donated,
            to_host=hosted_outputs(traced, manager, donated or [False] * len(inputs)),
            renaming=renaming,
        )
