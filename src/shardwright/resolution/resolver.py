"""The pure heart: which mesh axes each dim lies over, and why. No arrays, devices, globals or environment.

A request is lowered to dims, a mode and a role here; `deciding.py` decides each dim, left to right; what is kept of a part's
whole, and what optimizer state takes besides, is `parts.py`'s. Answers are kept with the rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

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
from shardwright.mesh.build import mesh_sizes
from shardwright.resolution.decide import Frame, gathered, unknown_axis
from shardwright.resolution.decisions import DimDecision, ModeFrom, Outcome, Resolution
from shardwright.resolution.parts import Taken, add_zero1, take_part
from shardwright.resolution.rules import AxisRules, Rank
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
      axes: an annotation; a list counts as a tuple.
      rules: compiled rules.
      mesh_shape: a mapping of mesh axis to size, pairs of them, a `Mesh` or an `AbstractMesh`.
      mode: runtime mode; None means the layout's own, else train.
      role: activation, param, use or state; None means param for weight layouts, else activation.
      shape: global sizes; local ones along the mesh axes in `manual`.
      path: the tensor's path, for `[[tensors]]` and for messages.
      manual: mesh axes that a surrounding `shard_map` has already applied.
      mode_from: who said `mode`.

    Raises:
      ShardingError: the class of the first problem, with all of them in `.problems` and the `.resolution`.
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
    """Resolve like `resolve`, but return what went wrong as `problems` instead of raising it.

    The same question returns an equal object, and the identical one for the last 10,000 shapes at least, as long as the rules live.
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
            f"manual={manual!r} is one name, not a set of them", fix=f"manual={{{manual!r}}}"
        )
    manual = frozenset(manual)
    request = (annotation, sizes.pairs, mode, role, dims, path, manual, mode_from)
    found = rules._cache.get(request) or rules._cache.recall(request)
    if found is None:
        made = _explain(
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
        found = rules._cache.keep(request, made)
    answer: Resolution = found
    return answer


def _unwrap(
    annotation: Any, shape: tuple[int, ...] | None, role: Any
) -> tuple[Any, tuple[int, ...] | None, Any]:
    """Return an `ArraySpec`'s axes, shape and role (a stored parameter unless said otherwise); anything else as it is."""
    if not isinstance(annotation, ArraySpec):
        return annotation, shape, role
    lower(annotation, shape)
    return annotation.axes, annotation.shape, Role.PARAM if role is None else role


def _explain(
    annotation: Any,
    rules: AxisRules,
    sizes: Mapping[str, int],
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
        said, said_by = _mode(lowered, mode, mode_from, shape)
        role_ = as_role(role or lowered.role or Role.ACTIVATION)
    except ShardingError as error:
        return _refused(annotation, error, mode=mode, role=role, path=path)
    frame = Frame(
        rules=rules, sizes=sizes, mode=said, role=role_, shape=shape, path=path, manual=manual
    )
    if isinstance(annotation, PartOf):
        taken = take_part(
            _whole(annotation, frame, said_by),
            annotation,
            shape,
            path=path,
            fits=frame.fits,
            policy=rules.policy,
        )
    else:
        decisions = tuple(
            [frame.decide(position, dim) for position, dim in enumerate(lowered.dims)]
        )
        if role_ is Role.USE:
            decisions = tuple(
                gathered(decision, dim, frame)
                for decision, dim in zip(decisions, lowered.dims, strict=True)
            )
        taken = Taken(decisions=decisions, problems=tuple(frame.problems), notes=notes)
    if role_ is Role.STATE:
        taken = add_zero1(
            taken, rules.policy.zero1, dims=lowered.dims, path=path, sizes=sizes, fits=frame.fits
        )
    return Resolution(
        annotation=describe(annotation),
        decisions=marked_manual(taken.decisions, manual),
        mode=said,
        mode_from=said_by,
        role=role_,
        path=path or "",
        problems=taken.problems,
        notes=taken.notes,
        mesh=tuple(sizes.items()),
    )


def marked_manual(
    decisions: tuple[DimDecision, ...], manual: Collection[str]
) -> tuple[DimDecision, ...]:
    """Mark the Manual mesh axes of each decision. It is done once, after the last change of a decision's mesh axes."""
    if not manual:
        return decisions
    return tuple(
        dataclasses.replace(
            decision, manual=tuple(axis for axis in decision.mesh_axes if axis in manual)
        )
        for decision in decisions
    )


def _whole(part: PartOf, frame: Frame, mode_from: ModeFrom) -> Resolution:
    """Resolve the array that a part is of, under its own shape and path."""
    role = Role.PARAM if frame.role is Role.STATE else frame.role
    how: Any = {"mode": frame.mode, "mode_from": mode_from, "role": role, "manual": frame.manual}
    return explain(
        part.annotation, frame.rules, frame.sizes, shape=part.shape, path=part.path or None, **how
    )


def _refused(
    axes: Any, error: ShardingError, *, mode: str | None, role: Any, path: str | None
) -> Resolution:
    """A request whose annotation, mode or role is wrong before any dim is looked at."""
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
    """Lower an annotation; under `rank = "fit"` cut or pad its dims to the array's rank, and say so."""
    try:
        return lower(annotation, shape), ()
    except RankMismatchError:
        lowered = lower(annotation)
        if rules.policy.rank is Rank.ERROR or shape is None or len(lowered.dims) == len(shape):
            # A name that nobody knows explains a wrong rank better than the rank does: a layout's, for instance.
            raise_problems(
                [
                    unknown_axis(axis, rules)
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
    """Return the dims of an annotation for a local array: of its rank, whatever its sizes.

    Raises:
      RankMismatchError: the ranks differ.
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
        found = ModeFrom.LAYOUT if isinstance(lowered.mode, str) else ModeFrom.LAYOUT_DIM
        return mode_of_layout(lowered.mode, shape), found
    return MODE_TRAIN, ModeFrom.DEFAULT


def as_role(role: object) -> Role:
    """Return the role that a value names.

    Raises:
      StrategyError: it names none.
    """
    if isinstance(role, Role):
        return role
    known = [str(known) for known in Role]
    if role not in known:
        raise StrategyError(
            f"unknown role {role!r}",
            fix=f"{did_you_mean(str(role), known)} roles are {', '.join(known)}".strip(),
        )
    return Role(str(role))


def left_open(found: Resolution) -> Resolution:
    """Return what `hint` makes of a resolution: indivisible, conflicting and Manual dims are the compiler's; other problems stay."""
    dims = {
        problem.dim
        for problem in found.problems
        if issubclass(problem.error, _LEFT_OPEN) and found.decisions
    }
    dims |= {decision.dim for decision in found.decisions if decision.manual}
    if not dims:
        return found
    decisions = tuple(
        dataclasses.replace(decision, outcome=Outcome.UNCONSTRAINED, mesh_axes=(), manual=())
        if decision.dim in dims
        else decision
        for decision in found.decisions
    )
    left = tuple(
        problem
        for problem in found.problems
        if problem.dim not in dims or not issubclass(problem.error, _LEFT_OPEN)
    )
    return dataclasses.replace(found, decisions=decisions, problems=left)
