"""The problems that only a manager's calls can have, each in its words."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from shardwright.errors import (
    IndivisibleError,
    ManualAxisError,
    MeshMismatchError,
    Problem,
    RankMismatchError,
    ShapeRequiredError,
    StrategyError,
    did_you_mean,
)
from shardwright.resolution.decide import rule_text
from shardwright.resolution.decisions import DimDecision, Resolution
from shardwright.resolution.rules import AxisRules
from shardwright.vocabulary.annotations import ArraySpec, Dim, PartOf
from shardwright.vocabulary.axes import STANDARD_MESH_AXES


def lost_mesh_axis(axis: str, sizes: Mapping[str, int]) -> Problem:
    """A rule's mesh axis that is neither standard nor in the mesh."""
    return Problem(
        error=MeshMismatchError,
        what=f"a rule names the mesh axis {axis!r}, which the mesh {dict(sizes)} does not have",
        mesh_axes=(axis,),
        fix=did_you_mean(axis, sizes)
        or f"add it to the mesh, or name one of {', '.join(dict.fromkeys([*sizes, *STANDARD_MESH_AXES]))}",
    )


def idle_mesh_axis(axis: str, sizes: Mapping[str, int], named: Sequence[str]) -> Problem:
    """A mesh axis of the user's own that no rule names, so that everything would be replicated over it."""
    names = f"the rules name {', '.join(named)}" if named else "the rules name no mesh axis"
    return Problem(
        error=MeshMismatchError,
        what=f"no rule names the mesh axis {axis}={sizes[axis]}, so everything would be replicated over it; {names}",
        mesh_axes=(axis,),
        fix=f'use {axis} in a rule, for instance batch = "{axis}", build the mesh with axes that the rules name, '
        f'or say that it is idle, [policy] idle = "{axis}"',
    )


def local_rank(found: Resolution, local: Any) -> Problem:
    """A local array of another rank than its annotation."""
    return Problem(
        error=RankMismatchError,
        what=f"{found.annotation} has {len(found.decisions)} dims, the local array has shape {local.shape}",
        fix="annotate every dim; the local array has the rank of the global one",
    )


def with_fix(found: Resolution, fix: str) -> list[Problem]:
    """Return the problems, with what to pass here where a size is missing."""
    return [
        dataclasses.replace(one, fix=fix) if one.error is ShapeRequiredError else one
        for one in found.problems
    ]


def in_words_of(found: Resolution, problems: Sequence[Problem]) -> list[Problem]:
    """Return problems of a spec's dims, with the path, axis and rule that the resolution knows of each."""
    return [
        dataclasses.replace(
            one, path=found.path, axis=decision.label, rule=_rule_text(found, decision)
        )
        for one in problems
        for decision in found.decisions
        if decision.dim == one.dim
    ]


def late_manual(found: Resolution) -> list[Problem]:
    """Dims whose rule names a Manual mesh axis after another: `shard_map` has split over it first, so that it is major."""
    late = [
        decision
        for decision in found.decisions
        if decision.mesh_axes[: len(decision.manual)] != decision.manual
    ]
    return [
        Problem(
            error=ManualAxisError,
            what=f"{'+'.join(decision.manual)} is Manual here and so comes first, where {'+'.join(decision.mesh_axes)} puts it later",
            path=found.path,
            dim=decision.dim,
            axis=decision.label,
            rule=_rule_text(found, decision),
            mesh_axes=decision.mesh_axes,
            fix=f"shard_map over {'+'.join(decision.mesh_axes)}, write {'+'.join(decision.manual)} first in the rule, or use hint",
        )
        for decision in late
    ]


def no_dtype(values: Any) -> list[Problem]:
    """Leaves of a tree that have no dtype, where an array's shape and dtype are wanted."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(values)
    return [
        Problem(
            error=StrategyError,
            what=f"{type(leaf).__name__} has no shape and dtype",
            path=jax.tree_util.keystr(path, simple=True, separator="/"),
            fix="pass arrays, ShapeDtypeStructs or ArraySpecs, for instance jax.eval_shape(init, key)",
        )
        for path, leaf in leaves
        if not hasattr(leaf, "dtype")
    ]


def refused_by_jax(values: Any, shardings: Any) -> list[Problem]:
    """Arrays of symbolic sizes for which JAX refuses their sharding as that of an input, since it cannot tell whether they divide."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        values, is_leaf=lambda leaf: isinstance(leaf, ArraySpec)
    )
    problems = []
    for (path, value), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        if all(type(size) is int for size in value.shape):
            continue
        try:
            sharding.shard_shape(value.shape)
        except ValueError as error:
            what = f"JAX refuses {sharding.spec} for the shape {value.shape}: {str(error).splitlines()[0]}"
            at = jax.tree_util.keystr(path, simple=True, separator="/")
            fix = "say more of the size, such as 8*b, or give the axis a rule that leaves it whole"
            problems.append(Problem(error=IndivisibleError, what=what, path=at, fix=fix))
    return problems


def not_varying(found: Resolution, varying: Collection[str], path: str | None) -> list[Problem]:
    """Manual mesh axes of a resolution that a value does not vary over."""
    return [
        Problem(
            error=ManualAxisError,
            what=f"{axis} is Manual here, and the value does not vary over it",
            path=path or "",
            dim=decision.dim,
            axis=decision.label,
            rule=_rule_text(found, decision),
            mesh_axes=(axis,),
            fix=f"give the value to shard_map split over {axis}, annotate the dim EMPTY, or use hint",
        )
        for decision in found.decisions
        for axis in decision.manual
        if axis not in varying
    ]


def not_split(found: Resolution, decision: DimDecision, axis: str, path: str) -> Problem:
    """A weight whose use lies over a Manual mesh axis, and a value that is not split over it."""
    return Problem(
        error=ManualAxisError,
        what=f"{axis} is Manual here, and the value does not vary over it, but the weight is used in shards over it",
        path=path,
        dim=decision.dim,
        axis=decision.label,
        rule=_rule_text(found, decision),
        mesh_axes=(axis,),
        fix=f"give the weight to shard_map split over {axis}, or annotate the dim EMPTY",
    )


def not_a_shard(
    found: Resolution,
    decision: DimDecision,
    local: int,
    over: Sequence[str],
    fits: Sequence[Sequence[str]],
) -> Problem:
    """A local size that is not one shard of the size that `shape=` gives, or one in several ways."""
    if fits:
        what = f"local size {local} of {decision.size} is a shard over {' or '.join('+'.join(axes) for axes in fits)}"
        fix = "give the weight to shard_map split over all mesh axes that store it, or use check_vma=True"
    else:
        what = f"local size {local} is neither size {decision.size} nor a shard of it"
        what += f" over {'+'.join(over)}" if over else ""
        fix = "pass the weight's global shape as shape=, and give the weight to shard_map split as it is stored"
    return Problem(
        error=RankMismatchError,
        what=what,
        path=found.path,
        dim=decision.dim,
        axis=decision.label,
        size=local,
        rule=_rule_text(found, decision),
        fix=fix,
    )


def split_elsewhere(found: Resolution, decision: DimDecision, axes: Sequence[str]) -> Problem:
    """An input of `pm.shard_map` that is split over other mesh axes than the weight is stored over."""
    return Problem(
        error=ManualAxisError,
        what=f"the input is split over {'+'.join(axes)}, the weight is stored over {'+'.join(decision.mesh_axes) or '-'}",
        path=found.path,
        dim=decision.dim,
        axis=decision.label,
        rule=_rule_text(found, decision),
        mesh_axes=tuple(axes),
        fix="annotate the input of shard_map as a weight: with a weight layout, an ArraySpec, or the stored spec",
    )


def other_shape(local: Sequence[int], shape: Sequence[int], path: str | None) -> Problem:
    """A weight outside `shard_map` whose shape is not what `shape=` gives."""
    return Problem(
        error=RankMismatchError,
        what=f"the weight has shape {tuple(local)}, shape= says {tuple(shape)}",
        path=path or "",
        fix="leave shape= out, or pass the weight's own shape: outside shard_map every shape is global",
    )


def unknown_shard(local: Sequence[int], path: str) -> Problem:
    """A value inside `shard_map` that may be a shard of a weight, or the weight."""
    return Problem(
        error=ShapeRequiredError,
        what=f"nothing tells which shard of the weight this value of shape {tuple(local)} is",
        path=path,
        fix="gather(..., shape=) takes the weight's global shape; with check_vma=True JAX may tell",
    )


def path_wanted(annotation: Any, dims: Sequence[Dim], rules: AxisRules) -> list[Problem]:
    """A weight that an exception by path may cover, where nothing says which path it has."""
    if not rules.tensors or (isinstance(annotation, PartOf) and annotation.path):
        return []
    names = {name for dim in dims for name in (*dim.axes, dim.means)}
    covering = [
        (entry, rule) for entry in rules.tensors for axis, rule in entry.rules if axis in names
    ]
    return [
        Problem(
            error=StrategyError,
            what=f"[[tensors]] match = {entry.match!r} may cover this weight, and its path is not known here",
            rule=str(rule.ref),
            fix='gather(..., path="layers/mlp/up") says it, path="" at the root; shard knows the paths of a tree\'s leaves',
        )
        for entry, rule in covering[:1]
    ]


def must_lie(found: Resolution, decision: DimDecision) -> Problem:
    """A dim left to the compiler where a sharding is wanted."""
    return Problem(
        error=StrategyError,
        what='"?" leaves this dim to the compiler, but a sharding must say where it lies',
        path=found.path,
        dim=decision.dim,
        axis=decision.label,
        rule=_rule_text(found, decision),
        fix='use shard or hint inside jit, or give the axis a rule without "?"',
    )


def _rule_text(found: Resolution, decision: DimDecision) -> str:
    return "" if decision.rule is None else rule_text(decision.rule, found.mode)
