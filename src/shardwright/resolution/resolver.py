"""Resolve an annotation: which mesh axes each dim is sharded over, and why.

The resolver is pure: no arrays, devices, globals or environment. It lowers a request to dims, a
mode and a role. `decide` decides the dims from left to right, or `rule_order` in the order of the
rules. `parts` derives the decisions of parts of a weight and of optimizer state. `AxisRules` caches
the resolutions of recent requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, cast

from shardwright.errors import (
    AxisConflictError,
    IndivisibleError,
    ManualAxisError,
    ShapeRequiredError,
    ShardingError,
    StrategyError,
)
from shardwright.mesh.build import MeshSizes, mesh_sizes
from shardwright.resolution.decide import Decider
from shardwright.resolution.decisions import DimDecision, ModeFrom, Outcome, Resolution
from shardwright.resolution.free_axes import StoredDims, add_largest_dim, add_zero1
from shardwright.resolution.parts import Derived, take_part
from shardwright.resolution.pipeline import STAGES, stage_notes
from shardwright.resolution.request import ShardingRequest, as_role
from shardwright.resolution.rule_order import decide_in_rule_order
from shardwright.resolution.rules import AxisRules, Order
from shardwright.vocabulary.annotations import PartOf, is_annotation
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.lowering import (
    Dim,
    Lowered,
    describe,
    mode_of_layout,
)
from shardwright.vocabulary.modes import MODE_TRAIN, is_mode, parse_mode

# Problems that a shape or a mesh can cause. `hint` leaves dims with such problems to the compiler.
# Other problems, such as an unknown axis, are mistakes of the program, so `hint` reports them.
_LEFT_OPEN = (IndivisibleError, AxisConflictError, ManualAxisError)


def resolve(
    axes: Any,
    rules: AxisRules,
    mesh_shape: Any,
    *,
    mode: str | None = None,
    role: Role | str | None = None,
    shape: Sequence[int] | None = None,
    path: str | None = None,
    manual: frozenset[str] = frozenset(),
) -> Resolution:
    """Resolve an annotation to a spec and the decisions behind it.

    Args:
      axes: Annotation. A list counts as a tuple.
      rules: Compiled rules.
      mesh_shape: A `Mesh`, an `AbstractMesh`, a mapping of mesh axis to size, or pairs of the two.
      mode: Runtime mode. Defaults to the layout's mode, else to train.
      role: activation, param, use or state. Defaults to param for weight layouts and `ArraySpec`s,
        else to activation.
      shape: Global sizes, except that they are local along the mesh axes in `manual`.
      path: Path of the tensor, for `[[tensors]]` and for messages.
      manual: Mesh axes that an enclosing `shard_map` has already applied.

    Raises:
      ShardingError: The annotation does not resolve. The error has all `problems` and the
        `resolution`. Its class is that of the first problem.
    """
    resolution = explain(
        axes, rules, mesh_shape, mode=mode, role=role, shape=shape, path=path, manual=manual
    )
    resolution.require()
    return resolution


def explain(
    axes: Any,
    rules: AxisRules,
    mesh_shape: Any,
    *,
    mode: str | None = None,
    role: Role | str | None = None,
    shape: Sequence[int] | None = None,
    path: str | None = None,
    manual: frozenset[str] = frozenset(),
) -> Resolution:
    """Resolve like `resolve`, but return a `Resolution` with `problems` instead of raising them.

    Equal requests return equal objects. They return the identical object if at most 10,000 other
    requests came in between.
    """
    if isinstance(manual, str):
        raise StrategyError(
            f"manual={manual!r} is one name, not a set of names", fix=f"manual={{{manual!r}}}"
        )
    request = ShardingRequest(axes, shape, mode, role, path, manual)
    return explain_request(request, rules, mesh_sizes(mesh_shape))


def explain_request(request: ShardingRequest, rules: AxisRules, sizes: MeshSizes) -> Resolution:
    """Resolve a request. All resolutions of the project come from here.

    Args:
      request: The request.
      rules: Compiled rules, which cache the resolutions of recent requests.
      sizes: Size of each mesh axis.
    """
    if not isinstance(rules, AxisRules):
        raise StrategyError(f"rules is a {type(rules).__name__}", fix="pass strategy.compile()")
    try:
        normal = request.normalized()
    except ShardingError as error:
        return _refused(request, error)
    # Requests that mean the same, such as one with a list and one with a tuple, share one entry.
    # Managers on different meshes may share the rules, so the sizes are part of the key.
    key = (normal, sizes.pairs)
    resolution: Resolution | None = rules._cache[key]
    if resolution is None:
        resolution = rules._cache.keep(key, _explain(normal, rules, sizes))
    return cast("Resolution", resolution)


def _explain(request: ShardingRequest, rules: AxisRules, sizes: MeshSizes) -> Resolution:
    """Lower a normalized request, decide its dims, and apply the policies for weights and state."""
    annotation, path = request.annotation, request.path
    shape = None if request.shape is None else tuple(request.shape)
    try:
        lowered, notes = request.lowered(rules)
        mode, mode_from = _mode(request, lowered)
        role = as_role(request.role or lowered.role or Role.ACTIVATION)
    except ShardingError as error:
        return _refused(request, error)
    decider = Decider(
        rules=rules,
        sizes=sizes,
        mode=mode,
        role=role,
        shape=shape,
        path=path,
        manual=request.manual,
    )
    array = StoredDims(
        dims=lowered.dims, sizes=sizes, fits=decider.fits, path=path, manual=request.manual
    )
    if isinstance(annotation, PartOf):
        # The whole array of a part resolves under its own shape and path. For state, the whole
        # array is the stored parameter. Below, zero1 adds the mesh axes that only state has.
        of_whole = Role.PARAM if role is Role.STATE else role
        # Factors, scales and moments of one parameter share the same whole array, so its resolution
        # is cached.
        whole = explain_request(
            ShardingRequest(
                annotation.annotation,
                annotation.shape,
                mode,
                of_whole,
                annotation.path or None,
                request.manual,
                mode_from,
            ),
            rules,
            sizes,
        )
        derived = take_part(
            whole, annotation, shape, path=path, fits=decider.fits, policy=rules.policy
        )
    else:
        dims = lowered.dims
        decisions = (
            decide_in_rule_order(decider, dims)
            if rules.policy.order is Order.RULES
            else [decider.decide(position, dim) for position, dim in enumerate(dims)]
        )
        derived = Derived(decisions=tuple(decisions), problems=tuple(decider.problems), notes=notes)
        derived = derived if role is Role.ACTIVATION else _as_weight(derived, decider, array)
    # Apply zero1 before Manual mesh axes are marked, because zero1 adds mesh axes, and these may be
    # Manual too.
    if role is Role.STATE:
        derived = add_zero1(derived, rules.policy.zero1, array)
    unreduced = None
    if lowered.unreduced is not None:
        derived, unreduced = _decide_sum(derived, decider, lowered.unreduced)
    # A part of a parameter, such as a moment, is in the memory that the rule for the parameter's
    # path names.
    owner = annotation.path if isinstance(annotation, PartOf) and annotation.path else path
    memory = rules.memory_rule(role=role, mode=mode, path=owner)
    in_stages = stage_notes(rules.pipeline, derived.decisions, sizes.get(STAGES, 1))
    return Resolution(
        annotation=describe(annotation),
        decisions=marked_manual(derived.decisions, request.manual),
        unreduced=unreduced,
        mode=mode,
        mode_from=mode_from,
        role=role,
        path=path or "",
        problems=derived.problems,
        notes=(*derived.notes, *in_stages),
        # Scalars, such as the step of an optimizer, stay on the device: a transfer would cost more
        # than the few bytes of device memory that it frees.
        memory=memory.ref if memory is not None and derived.decisions else None,
        mesh=sizes.pairs,
    )


def _decide_sum(derived: Derived, decider: Decider, dim: Dim) -> tuple[Derived, DimDecision]:
    """Decide the dim that was summed over.

    The sum stays unreduced over the mesh axes of this dim.
    """
    # JAX refuses a spec in which one mesh axis both shards a dim and is unreduced. A mesh axis over
    # which a weight is gathered shards no dim any more, so leave it out.
    decider.taken = {
        axis: (decision.dim, decision.label)
        for decision in derived.decisions
        for axis in decision.mesh_axes
    }
    # The array does not have the summed dim. So the size of this dim is known only if it is merged.
    decider.shape, decider.problems = None, []
    (decision,) = marked_manual((decider.decide(len(derived.decisions), dim),), decider.manual)
    problems = []
    for problem in decider.problems:
        fix = "complete the sum here: annotate it without Unreduced"
        if problem.error is ShapeRequiredError:
            fix = "give its size, as in over=merged((KV_HEAD, 8))"
        label = f"unreduced over {problem.axis or dim.label}"
        problems.append(dataclasses.replace(problem, dim=None, axis=label, fix=fix))
    return dataclasses.replace(derived, problems=(*derived.problems, *problems)), decision


def _as_weight(derived: Derived, decider: Decider, array: StoredDims) -> Derived:
    """Apply the policies for weights to the decisions that the rules made."""
    derived = add_largest_dim(derived, decider.rules.policy, array)
    if decider.role is not Role.USE:
        return derived
    # Remove gathered mesh axes only after all dims are decided. Otherwise a later dim could take
    # one. So the spec in use is the stored spec without some mesh axes, and gathering moves nothing
    # else.
    pairs = zip(derived.decisions, array.dims, strict=True)
    return dataclasses.replace(
        derived, decisions=tuple(decider.gathered(decision, dim) for decision, dim in pairs)
    )


def marked_manual(
    decisions: tuple[DimDecision, ...], manual: Collection[str]
) -> tuple[DimDecision, ...]:
    """Mark the Manual mesh axes of each decision.

    Call this function once, after the mesh axes are final.
    """
    if not manual:
        return decisions
    return tuple(
        dataclasses.replace(
            decision, manual=tuple(axis for axis in decision.mesh_axes if axis in manual)
        )
        for decision in decisions
    )


def _refused(request: ShardingRequest, error: ShardingError) -> Resolution:
    """Return the resolution of a request whose annotation, mode or role is wrong.

    It has problems and no decisions.
    """
    annotation, mode, role, path = request.annotation, request.mode, request.role, request.path
    problems = tuple(
        dataclasses.replace(problem, path=path or problem.path) for problem in error.problems
    )
    return Resolution(
        annotation=describe(annotation) if is_annotation(annotation) else repr(annotation),
        decisions=(),
        mode=parse_mode(mode) if is_mode(mode) else MODE_TRAIN,
        mode_from=ModeFrom.CALL if is_mode(mode) else ModeFrom.DEFAULT,
        role=Role(role) if role in tuple(Role) else Role.ACTIVATION,
        path=path or "",
        problems=problems,
    )


def _mode(request: ShardingRequest, lowered: Lowered) -> tuple[str, ModeFrom]:
    if request.mode is not None:
        return request.mode, request.mode_from
    if lowered.mode is not None:
        by = ModeFrom.LAYOUT if isinstance(lowered.mode, str) else ModeFrom.LAYOUT_DIM
        return mode_of_layout(lowered.mode, request.shape), by
    return MODE_TRAIN, ModeFrom.DEFAULT


def left_open(resolution: Resolution) -> Resolution:
    """Return the resolution that `hint` uses.

    Indivisible, conflicting and Manual dims are unconstrained. Other problems remain.
    """
    dims = {
        problem.dim
        for problem in resolution.problems
        if issubclass(problem.error, _LEFT_OPEN) and resolution.decisions
    }
    dims |= {decision.dim for decision in resolution.decisions if decision.manual}
    if not dims:
        return resolution
    decisions = tuple(
        # For JAX, None in a constraint means replicated. UNCONSTRAINED leaves the dim to the
        # compiler.
        dataclasses.replace(decision, outcome=Outcome.UNCONSTRAINED, mesh_axes=(), manual=())
        if decision.dim in dims
        else decision
        for decision in resolution.decisions
    )
    problems = tuple(
        problem
        for problem in resolution.problems
        if problem.dim not in dims or not issubclass(problem.error, _LEFT_OPEN)
    )
    return dataclasses.replace(resolution, decisions=decisions, problems=problems)
