"""The input of lints: tables and compiled rules, the mesh if it is known, and resolved tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardwright.errors import NewValue, ShardingError
from shardwright.lints.finding import Code, Finding, Severity
from shardwright.mesh.build import INFER, MeshSpec
from shardwright.resolution.decisions import Resolution
from shardwright.resolution.resolver import explain
from shardwright.resolution.rules import AxisRules, Rule
from shardwright.strategy.files import file_to_edit
from shardwright.strategy.origin import KeyPath
from shardwright.trees.tensors import Tensor
from shardwright.vocabulary.axes import (
    BATCH,
    BIAS_HEAD_SEQ,
    BIAS_KV_SEQ,
    CAPACITY,
    KV_LENGTH,
    PAGE,
    QUERY_LENGTH,
    Role,
)
from shardwright.vocabulary.lowering import lower
from shardwright.vocabulary.modes import MODES

# Axes that only activations and caches have. Their rules do not apply to weights.
NO_PARAMETER_HAS = frozenset(
    {BATCH, QUERY_LENGTH, KV_LENGTH, CAPACITY, BIAS_HEAD_SEQ, BIAS_KV_SEQ, PAGE}
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedTensor:
    """Resolution of a tensor in one mode."""

    tensor: Tensor
    mode: str
    resolution: Resolution


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A strategy, and what it is checked against.

    Attributes:
      tables: Rules of every table as written, by key path and axis.
      patterns: `match` of each `[[tensors]]` entry.
      axes: Axes that the strategy declares.
      rules: Compiled rules.
      source: Function from a key path to `file:line`.
      file: The name of the file in which the user changes rules.
      own_mesh: Whether the mesh is the strategy's own.
      sizes: Size of each mesh axis; -1 if it depends on the number of devices.
      crossing: Mesh axes that cross slices, fully or in part.
      tensors: Tensors of the tree, or None.
      used: Axes of the tree's tensors, by role (activation or param).
      answers: The resolution of each tensor in each mode; on a mesh of one device if sizes are
        unknown.
    """

    tables: Mapping[KeyPath, Mapping[str, Rule]]
    patterns: tuple[str, ...]
    axes: tuple[str, ...]
    rules: AxisRules
    source: Callable[..., str]
    file: str
    own_mesh: bool
    sizes: Mapping[str, int]
    crossing: frozenset[str]
    tensors: tuple[Tensor, ...] | None
    used: Mapping[Role, frozenset[str]]
    answers: tuple[ResolvedTensor, ...]

    @property
    def exact(self) -> bool:
        """Whether every mesh axis has a size."""
        return bool(self.sizes) and INFER not in self.sizes.values()

    def finding(
        self,
        code: Code,
        severity: Severity,
        path: KeyPath,
        *,
        message: str,
        fix: str,
        edit: NewValue | None = None,
    ) -> Finding:
        """Return a finding about a key of the file."""
        return Finding(
            code=code,
            severity=severity,
            source=self.source(*path),
            key=".".join(path),
            message=message,
            fix=fix,
            edit=edit,
        )

    def written(self) -> Iterator[tuple[KeyPath, str, Rule]]:
        """Yield key path, axis and rule of every written rule; rules of the policy come last."""
        for table, rules in self.tables.items():
            for axis, rule in rules.items():
                yield (*table, rule.ref.key), axis, rule
        policy = self.rules.policy
        for key, added in (("largest_dim", policy.largest_dim), ("zero1", policy.zero1)):
            if added is not None:
                yield ("policy", key), "", added

    def live(self, candidate: tuple[str, ...]) -> tuple[str, ...]:
        """Return a candidate without the mesh axes that the mesh lacks or that have size 1.

        Without a mesh, return the candidate unchanged.
        """
        if not self.sizes:
            return candidate
        return tuple(axis for axis in candidate if self.sizes.get(axis, 1) != 1)

    def axes_of(self, *roles: Role) -> frozenset[str]:
        """Return the axes of the tensors of some roles. Members of merged dims count too."""
        return frozenset().union(*(self.used[role] for role in roles if role in self.used))

    def roles(self) -> frozenset[Role]:
        """Return the roles of the tree's tensors."""
        return frozenset(self.used)


def role_of(tensor: Tensor) -> Role:
    """Return activation or param. The other roles, `use` and `state`, count as param."""
    try:
        role = tensor.role or lower(tensor.axes).role or Role.ACTIVATION
    except ShardingError:  # an invalid annotation, which the lint `unresolved` reports
        role = Role.ACTIVATION
    return Role.ACTIVATION if role is Role.ACTIVATION else Role.PARAM


def axes_of(tensor: Tensor) -> frozenset[str]:
    """Return the axes of a tensor; none if its annotation is invalid."""
    try:
        dims = lower(tensor.axes, tensor.shape).dims
    except ShardingError:
        return frozenset()
    named = [
        axis
        for dim in dims
        for axis in (*dim.axes, dim.semantic_axis, *(member for member, _ in dim.merged))
    ]
    return frozenset(axis for axis in named if axis)


def make_subject(
    strategy: Any, tensors: tuple[Tensor, ...] | None, mesh: MeshSpec | Mapping[str, int] | None
) -> Subject:
    """Compile a strategy, and resolve a tree on `mesh` or, by default, on the strategy's mesh.

    Raises:
      ShardingError: The strategy does not compile.
    """
    rules = strategy.compile()
    sizes, crossing = _mesh(strategy, mesh)
    # If sizes are unknown, resolve on one device. Every size divides there, so lints cannot find
    # sizes that do not divide.
    known = sizes if sizes and INFER not in sizes.values() else {"dp": 1}
    answers = tuple(
        ResolvedTensor(tensor=tensor, mode=mode, resolution=_resolve(tensor, rules, known, mode))
        for tensor in tensors or ()
        for mode in MODES
    )
    return Subject(
        tables=strategy.tables(),
        patterns=tuple(entry.match for entry in strategy.tensors),
        axes=tuple(strategy.axes),
        rules=rules,
        source=strategy.source,
        file=file_to_edit(strategy.name, strategy.source()),
        own_mesh=mesh is None,
        sizes=sizes,
        crossing=crossing,
        tensors=tensors,
        used=_used(tensors or ()),
        answers=answers,
    )


def _used(tensors: tuple[Tensor, ...]) -> dict[Role, frozenset[str]]:
    axes_by_role: dict[Role, set[str]] = {}
    for tensor in tensors:
        axes_by_role.setdefault(role_of(tensor), set()).update(axes_of(tensor))
    return {role: frozenset(axes) for role, axes in axes_by_role.items()}


def _resolve(tensor: Tensor, rules: AxisRules, sizes: Mapping[str, int], mode: str) -> Resolution:
    # These lints check how a weight is stored. Other lints check how it is gathered.
    role = Role.PARAM if tensor.role is Role.USE else tensor.role
    return explain(
        tensor.axes,
        rules,
        sizes,
        mode=mode,
        role=role,
        shape=tensor.shape,
        path=tensor.path or None,
    )


def _mesh(
    strategy: Any, mesh: MeshSpec | Mapping[str, int] | None
) -> tuple[dict[str, int], frozenset[str]]:
    """Return the sizes of the mesh axes, and the mesh axes that cross slices.

    Both come from the strategy if no mesh is given.
    """
    crossing = frozenset(axis for axis, part in strategy.dcn.items() if part > 1)
    if mesh is None:
        return dict(strategy.mesh), crossing
    if not isinstance(mesh, MeshSpec):
        return dict(mesh), crossing
    if mesh.dcn:
        crossing = frozenset(
            axis for axis, part in zip(mesh.names, mesh.dcn, strict=True) if part > 1
        )
    return dict(zip(mesh.names, mesh.sizes, strict=True)), crossing
