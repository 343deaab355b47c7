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
    RankMismatchError,
    ShardingError,
    StrategyError,
    did_you_mean,
    raise_problems,
)
from shardwright.mesh.build import MeshSizes, mesh_sizes
from shardwright.resolution.decide import Decider
from shardwright.resolution.decisions import DimDecision, ModeFrom, Outcome, Resolution
from shardwright.resolution.parts import Derived, add_zero1, take_part
from shardwright.resolution.rule_order import decide_in_rule_order
from shardwright.resolution.rules import AxisRules, Order, Rank
from shardwright.resolution.unknown_axes import unknown_axis
from shardwright.vocabulary.annotations import ArraySpec, PartOf, as_annotation, is_annotation
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.lowering import (
    Dim,
    Lowered,
    as_shape,
    check_merged,
    describe,
    lower,
    mode_of_layout,
)
from shardwright.vocabulary.modes import MODE_TRAIN, is_mode, parse_mode

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
    mode_from: ModeFrom = ModeFrom.CALL,
) -> Resolution:
    """Resolve an annotation to a spec and the decisions behind it.

    Args:
      axes: Annotation. A list counts as a tuple.
      rules: Compiled rules.
      mesh_shape: A `Mesh`, an `AbstractMesh`, a mapping of mesh axis to size, or pairs of them.
      mode: Runtime mode. Defaults to the layout's mode, else to train.
      role: activation, param, use or state. Defaults to param for weight layouts and `ArraySpec`s,
        else to activation.
      shape: Global sizes, but local to the mesh axes in `manual`.
      path: Path of the tensor, for `[[tensors]]` and for messages.
      manual: Mesh axes that an enclosing `shard_map` has already applied.
      mode_from: Where `mode` comes from, for explanations.

    Raises:
      ShardingError: The annotation does not resolve. The error has all `problems`, in the class of
        the first, and the `resolution`.
    """
    resolution = explain(
        axes,
        rules,
        mesh_shape,
        mode=mode,
        role=role,
        shape=shape,
        path=path,
        manual=manual,
        mode_from=mode_from,
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
    mode_from: ModeFrom = ModeFrom.CALL,
) -> Resolution:
    """Resolve like `resolve`, but return a `Resolution` with `problems` instead of raising them.

    Equal requests return equal objects. They return the identical object if at most 10,000 other
    requests came in between.
    """
    sizes = mesh_sizes(mesh_shape)
    if not isinstance(rules, AxisRules):
        raise StrategyError(f"rules is a {type(rules).__name__}", fix="pass strategy.compile()")
    try:
        annotation, dims, role = _unwrap(
            as_annotation(axes), None if shape is None else as_shape(shape), role
        )
        mode = None if mode is None else parse_mode(mode)
        role = None if role is None else as_role(role)
    except ShardingError as error:
        return _refused(axes, error, mode=mode, role=role, path=path)
    if isinstance(manual, str):
        raise StrategyError(
            f"manual={manual!r} is one name, not a set of names", fix=f"manual={{{manual!r}}}"
        )
    manual = frozenset(manual)
    request = (annotation, sizes.pairs, mode, role, dims, path, manual, mode_from)
    resolution: Resolution | None = rules._cache[request]
    if resolution is None:
        fresh = _explain(
            annotation,
            rules,
            sizes,
            mode=mode,
            role=role,
            shape=dims,
            path=path,
            manual=manual,
            mode_from=mode_from,
        )
        resolution = rules._cache.keep(request, fresh)
    return cast("Resolution", resolution)


def _unwrap(
    annotation: Any, shape: tuple[int, ...] | None, role: Any
) -> tuple[Any, tuple[int, ...] | None, Any]:
    """Return the axes, shape and role of an annotation.

    An `ArraySpec` has its own shape, and its role defaults to param.
    """
    if not isinstance(annotation, ArraySpec):
        return annotation, shape, role
    lower(annotation, shape)
    return annotation.axes, annotation.shape, Role.PARAM if role is None else role


def _explain(
    annotation: Any,
    rules: AxisRules,
    sizes: MeshSizes,
    *,
    mode: str | None,
    role: Role | str | None,
    shape: tuple[int, ...] | None,
    path: str | None,
    manual: frozenset[str],
    mode_from: ModeFrom,
) -> Resolution:
    try:
        lowered, notes = lower_fitted(annotation, shape, rules)
        chosen_mode, chosen_by = _mode(lowered, mode, mode_from, shape)
        chosen_role = as_role(role or lowered.role or Role.ACTIVATION)
    except ShardingError as error:
        return _refused(annotation, error, mode=mode, role=role, path=path)
    decider = Decider(
        rules=rules,
        sizes=sizes,
        mode=chosen_mode,
        role=chosen_role,
        shape=shape,
        path=path,
        manual=manual,
    )
    if isinstance(annotation, PartOf):
        whole = _whole(annotation, decider, chosen_by)
        derived = take_part(
            whole, annotation, shape, path=path, fits=decider.fits, policy=rules.policy
        )
    else:
        derived = Derived(
            decisions=_decide_all(decider, lowered.dims),
            problems=tuple(decider.problems),
            notes=notes,
        )
    if chosen_role is Role.STATE:
        zero1 = rules.policy.zero1
        derived = add_zero1(
            derived, zero1, dims=lowered.dims, path=path, sizes=sizes, fits=decider.fits
        )
    return Resolution(
        annotation=describe(annotation),
        decisions=marked_manual(derived.decisions, manual),
        mode=chosen_mode,
        mode_from=chosen_by,
        role=chosen_role,
        path=path or "",
        problems=derived.problems,
        notes=derived.notes,
        mesh=sizes.pairs,
    )


def _decide_all(decider: Decider, dims: Sequence[Dim]) -> tuple[DimDecision, ...]:
    if decider.rules.policy.order is Order.RULES:
        decisions = decide_in_rule_order(decider, dims)
    else:
        decisions = [decider.decide(position, dim) for position, dim in enumerate(dims)]
    if decider.role is Role.USE:
        decisions = [
            decider.gathered(decision, dim) for decision, dim in zip(decisions, dims, strict=True)
        ]
    return tuple(decisions)


def marked_manual(
    decisions: tuple[DimDecision, ...], manual: Collection[str]
) -> tuple[DimDecision, ...]:
    """Mark the Manual mesh axes of each decision. Call it once, after the mesh axes are final."""
    if not manual:
        return decisions
    return tuple(
        dataclasses.replace(
            decision, manual=tuple(axis for axis in decision.mesh_axes if axis in manual)
        )
        for decision in decisions
    )


def _whole(part: PartOf, decider: Decider, mode_from: ModeFrom) -> Resolution:
    """Resolve the whole array of a part, under its own shape and path."""
    return explain(
        part.annotation,
        decider.rules,
        decider.sizes,
        shape=part.shape,
        path=part.path or None,
        mode=decider.mode,
        mode_from=mode_from,
        role=Role.PARAM if decider.role is Role.STATE else decider.role,
        manual=decider.manual,
    )


def _refused(
    axes: Any, error: ShardingError, *, mode: str | None, role: Any, path: str | None
) -> Resolution:
    """Return the resolution of a request whose annotation, mode or role is wrong.

    It has problems and no decisions.
    """
    problems = tuple(
        dataclasses.replace(problem, path=path or problem.path) for problem in error.problems
    )
    return Resolution(
        annotation=describe(axes) if is_annotation(axes) else repr(axes),
        decisions=(),
        mode=parse_mode(mode) if is_mode(mode) else MODE_TRAIN,
        mode_from=ModeFrom.CALL if is_mode(mode) else ModeFrom.DEFAULT,
        role=Role(role) if role in tuple(Role) else Role.ACTIVATION,
        path=path or "",
        problems=problems,
    )


def lower_fitted(
    annotation: Any, shape: tuple[int, ...] | None, rules: AxisRules
) -> tuple[Lowered, tuple[str, ...]]:
    """Lower an annotation.

    Under `rank = "fit"`, cut or pad its dims to the array's rank, and return a note about that.
    """
    try:
        return lower(annotation, shape), ()
    except RankMismatchError:
        lowered = lower(annotation)
        if rules.policy.rank is Rank.ERROR or shape is None or len(lowered.dims) == len(shape):
            # An unknown name, such as a layout in quotes, is the likely cause of a wrong rank, so
            # report the name.
            raise_problems(
                [
                    unknown_axis(axis, rules.known_axes)
                    for dim in lowered.dims
                    for axis in dim.axes
                    if axis not in rules.known_axes
                ]
            )
            raise
    fitted = (*lowered.dims, *[Dim(axes=())] * len(shape))[: len(shape)]
    check_merged(fitted, shape)
    note = f'policy rank = "fit": {len(lowered.dims)} dims fitted to the array\'s {len(shape)}'
    return dataclasses.replace(lowered, dims=fitted), (note,)


def lower_local(annotation: Any, local: tuple[int, ...], rules: AxisRules) -> tuple[Dim, ...]:
    """Return the dims of an annotation for a local array. The ranks must agree, the sizes need not.

    Raises:
      RankMismatchError: The ranks differ.
    """
    try:
        return lower_fitted(annotation, local, rules)[0].dims
    except RankMismatchError:
        dims = lower(annotation).dims
        if len(dims) != len(local):
            raise
        return dims


def _mode(
    lowered: Lowered, mode: str | None, mode_from: ModeFrom, shape: tuple[int, ...] | None
) -> tuple[str, ModeFrom]:
    if mode is not None:
        return parse_mode(mode), mode_from
    if lowered.mode is not None:
        by = ModeFrom.LAYOUT if isinstance(lowered.mode, str) else ModeFrom.LAYOUT_DIM
        return mode_of_layout(lowered.mode, shape), by
    return MODE_TRAIN, ModeFrom.DEFAULT


def as_role(role: object) -> Role:
    """Return a role from its name.

    Raises:
      StrategyError: There is no such role.
    """
    if isinstance(role, Role):
        return role
    known = [str(member) for member in Role]
    if role not in known:
        raise StrategyError(
            f"unknown role {role!r}",
            fix=f"{did_you_mean(str(role), known)} roles are {', '.join(known)}".strip(),
        )
    return Role(str(role))


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
