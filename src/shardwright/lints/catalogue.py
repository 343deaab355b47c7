"""The list of all lints, and the function that runs them. No devices are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shardwright.errors import ShardingError, StrategyError
from shardwright.lints import dead_rules, gathering, mesh_use, trees
from shardwright.lints.finding import Code, Finding, Severity, from_problem
from shardwright.lints.subject import Subject, make_subject
from shardwright.mesh.build import MeshSpec, mesh_sizes, parse_mesh
from shardwright.trees.tensors import as_tensors

__all__ = ["LINTS", "Code", "Finding", "Severity", "lint"]

# A new lint needs a line here, a code in `lints/finding.py` and a section in docs/lints.md.
LINTS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    mesh_use.unknown_mesh_axes,
    mesh_use.swapped_letters,
    trees.unresolved,
    trees.cut_heads,
    dead_rules.unreachable_candidates,
    dead_rules.shadowed_rules,
    dead_rules.shadowed_tensors,
    dead_rules.mode_changes_nothing,
    dead_rules.weights_move,
    gathering.not_gathered,
    gathering.gathered_in_decode,
    mesh_use.shared_mesh_axes,
    mesh_use.uneven_microbatches,
    mesh_use.dcn_order,
    mesh_use.idle_mesh_axes,
    mesh_use.idle_policies,
    trees.no_rule,
    trees.unused_tensors,
    trees.unused_memory,
    trees.unused_rules,
)
_WORST_FIRST = tuple(Severity)


def lint(strategy: Any, tensors: Any = None, *, mesh: Any = None) -> tuple[Finding, ...]:
    """Return what looks wrong in a strategy, worst first.

    Args:
      strategy: A `Strategy`.
      tensors: Tree of `ArraySpec`s or annotations, or a list of `Tensor`s. If given, rules are
        compared with the axes of these tensors.
      mesh: A `Mesh`, an `AbstractMesh`, a mapping of mesh axis to size, a `MeshSpec`, or text such
        as `"dcn.dp:2,dp:4,tp:4"`. Defaults to the mesh of the strategy. A mesh axis of size -1
        counts as one of unknown size.

    Raises:
      StrategyError: `strategy` is not a `Strategy`, or the tree has leaves that are not
        annotations.
      MeshSpecError: The mesh cannot be read.

    >>> import shardwright as sw
    >>> [finding.message for finding in lint(sw.Strategy(rules={"batch": "dp | dp"}))]
    ['in "dp | dp" the candidate dp is never used: whenever it fits, the earlier dp fits too']
    """
    from shardwright.strategy.model import Strategy

    if not isinstance(strategy, Strategy):
        raise StrategyError(
            f"{strategy!r:.80} is not a Strategy",
            fix="pass Strategy.load(path) or Strategy.preset(name)",
        )
    tree = None if tensors is None else as_tensors(tensors)
    if isinstance(mesh, str):
        mesh = parse_mesh(mesh)
    elif mesh is not None and not isinstance(mesh, MeshSpec):
        mesh = mesh_sizes(mesh)
    try:
        subject = make_subject(strategy, tree, mesh)
    except ShardingError as error:  # the rules do not compile; mesh and tree are valid
        return tuple(from_problem(problem) for problem in error.problems)
    # Equal findings are listed once. `sorted` is stable, so the order of LINTS stays within a
    # severity.
    findings = dict.fromkeys(finding for check in LINTS for finding in check(subject))
    return tuple(sorted(findings, key=lambda finding: _WORST_FIRST.index(finding.severity)))
