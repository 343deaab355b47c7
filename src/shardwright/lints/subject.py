"""What the lints look at: a strategy's tables and compiled rules, a mesh as far as it is known, a tree and how it resolves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardwright.errors import ShardingError
from shardwright.lints.finding import Code, Finding, Severity
from shardwright.mesh.build import INFER, MeshSpec
from shardwright.resolution.decisions import Resolution
from shardwright.resolution.resolver import explain
from shardwright.resolution.rules import AxisRules, Rule
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

KeyPath = tuple[str, ...]
# Axes that only activations and caches have: no weight keeps their [rules] alive, or is gathered by them.
NO_PARAMETER_HAS = frozenset(
    {BATCH, QUERY_LENGTH, KV_LENGTH, CAPACITY, BIAS_HEAD_SEQ, BIAS_KV_SEQ, PAGE}
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How a tensor resolves in one mode."""

    tensor: Tensor
    mode: str
    found: Resolution


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A strategy, and what it is to be judged against.

    Attributes:
      tables: rules of every table as written, by key path and axis.
      patterns: the `match` of each `[[tensors]]` entry.
      axes: axes that the strategy declares.
      rules: the compiled rules.
      source: `file:line` of a key path.
      own_mesh: whether the mesh is the strategy's own.
      sizes: size of each mesh axis; -1 where it depends on the devices.
      crossing: mesh axes of which a part crosses slices.
      tensors: the tree, or None.
      used: axes of the tree's tensors, by role: activation or param.
      answers: each tensor in each mode; on a mesh of one device where the sizes are not all known.
    """

    tables: Mapping[KeyPath, Mapping[str, Rule]]
    patterns: tuple[str, ...]
    axes: tuple[str, ...]
    rules: AxisRules
    source: Callable[..., str]
    own_mesh: bool
    sizes: Mapping[str, int]
    crossing: frozenset[str]
    tensors: tuple[Tensor, ...] | None
    used: Mapping[Role, frozenset[str]]
    answers: tuple[Answer, ...]

    @property
    def exact(self) -> bool:
        """Whether every mesh axis has a size."""
        return bool(self.sizes) and INFER not in self.sizes.values()

    def finding(
        self, code: Code, severity: Severity, path: KeyPath, *, message: str, fix: str
    ) -> Finding:
        """Return a finding about a key of the file."""
        return Finding(
            code=code,
            severity=severity,
            source=self.source(*path),
            key=".".join(path),
            message=message,
            fix=fix,
        )

    def written(self) -> Iterator[tuple[KeyPath, str, Rule]]:
        """Yield key path, axis and rule of everything written, in the order of the tables."""
        for table, rules in self.tables.items():
            for axis, rule in rules.items():
                yield (*table, rule.ref.key), axis, rule
        if self.rules.policy.zero1 is not None:
            yield ("policy", "zero1"), "", self.rules.policy.zero1

    def live(self, candidate: tuple[str, ...]) -> tuple[str, ...]:
        """Return a candidate's mesh axes of more than one device; all of them where no mesh is known."""
        if not self.sizes:
            return candidate
        return tuple(axis for axis in candidate if self.sizes.get(axis, 1) != 1)

    def axes_of(self, *roles: Role) -> frozenset[str]:
        """Return the axes that the tree's tensors of these roles have, layouts' meanings and merged members included."""
        return frozenset().union(*(self.used[role] for role in roles if role in self.used))

    def roles(self) -> frozenset[Role]:
        """Return the roles that the tree has."""
        return frozenset(self.used)


def role_of(tensor: Tensor) -> Role:
    """Return activation or param: a weight that is used is a weight, and optimizer state lies like one."""
    try:
        role = tensor.role or lower(tensor.axes).role or Role.ACTIVATION
    except ShardingError:  # a refused annotation: the lint of those says so
        role = Role.ACTIVATION
    return Role.ACTIVATION if role is Role.ACTIVATION else Role.PARAM


def axes_of(tensor: Tensor) -> frozenset[str]:
    """Return the axes of a tensor; none where its annotation is refused."""
    try:
        dims = lower(tensor.axes, tensor.shape).dims
    except ShardingError:
        return frozenset()
    named = [
        axis
        for dim in dims
        for axis in (*dim.axes, dim.means, *(member for member, _ in dim.merged))
    ]
    return frozenset(axis for axis in named if axis)


def make_subject(
    strategy: Any, tensors: tuple[Tensor, ...] | None, mesh: MeshSpec | Mapping[str, int] | None
) -> Subject:
    """Return a strategy that compiles, with its mesh or another, and how a tree resolves there.

    Raises:
      ShardingError: the strategy does not compile.
    """
    rules = strategy.compile()
    sizes, crossing = _mesh(strategy, mesh)
    known = sizes if sizes and INFER not in sizes.values() else {"dp": 1}
    answers = tuple(
        Answer(tensor=tensor, mode=mode, found=_ask(tensor, rules, known, mode))
        for tensor in tensors or ()
        for mode in MODES
    )
    return Subject(
        tables=strategy.tables(),
        patterns=tuple(entry.match for entry in strategy.tensors),
        axes=tuple(strategy.axes),
        rules=rules,
        source=strategy.source,
        own_mesh=mesh is None,
        sizes=sizes,
        crossing=crossing,
        tensors=tensors,
        used=_used(tensors or ()),
        answers=answers,
    )


def _used(tensors: tuple[Tensor, ...]) -> dict[Role, frozenset[str]]:
    found: dict[Role, set[str]] = {}
    for tensor in tensors:
        found.setdefault(role_of(tensor), set()).update(axes_of(tensor))
    return {role: frozenset(axes) for role, axes in found.items()}


def _ask(tensor: Tensor, rules: AxisRules, sizes: Mapping[str, int], mode: str) -> Resolution:
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
    """Return the sizes of a mesh, absent: the strategy's own, and the axes of which a part crosses slices."""
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
