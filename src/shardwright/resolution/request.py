"""`ShardingRequest`: one question to the rules, as a frozen value."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardwright.errors import RankMismatchError, StrategyError, did_you_mean, raise_problems
from shardwright.resolution.decisions import ModeFrom
from shardwright.resolution.rules import AxisRules, Rank
from shardwright.resolution.unknown_axes import unknown_axis
from shardwright.vocabulary.annotations import ArraySpec, as_annotation
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.lowering import Dim, Lowered, as_shape, check_merged, lower
from shardwright.vocabulary.modes import parse_mode


class ShardingRequest(NamedTuple):
    """One question: how is an array with this annotation sharded?

    A request is a named tuple, because a frozen dataclass takes four times as long to create, and
    each call of `explain` creates a request.

    Attributes:
      annotation: Any annotation, such as a layout, an `ArraySpec` or a tuple of axes.
      shape: Global sizes, except that they are local along the mesh axes in `manual`. None if they
        are not known.
      mode: Runtime mode. None means the manager's mode, then the layout's, then train.
      role: Role of the array. None means param for weight layouts and `ArraySpec`s, else
        activation.
      path: Path of the array in its tree, for `[[tensors]]` entries and for messages. None if it is
        not known.
      manual: Mesh axes that an enclosing `shard_map` has already applied.
      mode_from: Where `mode` comes from, for explanations.
    """

    annotation: Any
    shape: Sequence[int] | None = None
    mode: str | None = None
    role: Role | str | None = None
    path: str | None = None
    manual: frozenset[str] = frozenset()
    mode_from: ModeFrom = ModeFrom.CALL

    def of(self, role: Role, shape: tuple[int, ...]) -> ShardingRequest:
        """Return a copy with another role and shape."""
        return self._replace(role=role, shape=shape)

    def under(self, mode: str | None) -> ShardingRequest:
        """Return the request with the manager's mode, if the request has no mode of its own."""
        if self.mode is not None or mode is None:
            return self
        return self._replace(mode=mode, mode_from=ModeFrom.MANAGER)

    def normalized(self) -> ShardingRequest:
        """Return the same request in canonical form, with its values checked.

        The canonical forms of two requests that mean the same are equal.

        An `ArraySpec` has its own shape, and its role defaults to param.

        Raises:
          ShardingError: The annotation, its shape, the mode, the role or `manual` is wrong.
        """
        annotation, shape, mode, role, path, manual, mode_from = self
        annotation = as_annotation(annotation)
        shape = None if shape is None else as_shape(shape)
        if isinstance(annotation, ArraySpec):
            # `lower` raises an error if the shape of the call is not that of the spec. If the call
            # has no shape, the request gets the shape of the spec.
            lower(annotation, shape)
            role = Role.PARAM if role is None else role
            annotation, shape = annotation.axes, annotation.shape
        mode = None if mode is None else parse_mode(mode)
        role = None if role is None else as_role(role)
        return ShardingRequest(annotation, shape, mode, role, path, frozenset(manual), mode_from)

    def lowered(self, rules: AxisRules) -> tuple[Lowered, tuple[str, ...]]:
        """Return the annotation as `Dim`s for the request's shape, and a note if it was fitted.

        See `vocabulary.lowering` and `Rank.FIT`.
        """
        shape = None if self.shape is None else tuple(self.shape)
        return _lower_fitted(self.annotation, shape, rules)

    def dims(self, rules: AxisRules) -> tuple[Dim, ...]:
        """Return the annotation as `Dim`s, one per dim of the request's shape."""
        return self.lowered(rules)[0].dims


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


def _lower_fitted(
    annotation: Any, shape: tuple[int, ...] | None, rules: AxisRules
) -> tuple[Lowered, tuple[str, ...]]:
    """Lower an annotation to dims.

    Under `rank = "fit"`, cut or pad the dims to the array's rank, and return a note that says so.
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
    # `lower` got no shape above, so it could not check the sizes of merged dims.
    check_merged(fitted, shape)
    note = f'policy rank = "fit": {len(lowered.dims)} dims fitted to the array\'s {len(shape)}'
    return dataclasses.replace(lowered, dims=fitted), (note,)


def lower_local(annotation: Any, local: tuple[int, ...], rules: AxisRules) -> tuple[Dim, ...]:
    """Return the dims of an annotation for a local array. The ranks must agree, the sizes need not.

    Raises:
      RankMismatchError: The ranks differ.
    """
    try:
        return _lower_fitted(annotation, local, rules)[0].dims
    except RankMismatchError:
        dims = lower(annotation).dims
        if len(dims) != len(local):
            raise
        return dims
