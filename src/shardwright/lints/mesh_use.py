"""Lints of the mesh: unknown and idle mesh axes, and minor mesh axes on the slow network."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Final

from shardwright.errors import (
    AxisConflictError,
    ShapeRequiredError,
    did_you_mean,
)
from shardwright.lints.finding import Code, Finding, Severity, dim_key
from shardwright.lints.subject import Subject, role_of
from shardwright.mesh.build import INFER
from shardwright.resolution.decisions import Resolution, RuleRef
from shardwright.resolution.free_axes import policy_notes
from shardwright.resolution.pipeline import STAGES, microbatch_problem
from shardwright.resolution.resolver import explain
from shardwright.vocabulary.axes import (
    EMPTY,
    PARALLELISM_AXES,
    SEMANTIC_AXES,
    STANDARD_MESH_AXES,
    Role,
)
from shardwright.vocabulary.layouts import LAYOUTS
from shardwright.vocabulary.modes import MODES

# Key of the policy -> the code of the finding about it, and the fix.
_ADDED: Final = {
    "zero1": (
        Code.IDLE_ZERO1,
        'name a mesh axis that parameters do not use, such as zero1 = "dp | -", or drop the line',
    ),
    "largest_dim": (
        Code.IDLE_LARGEST_DIM,
        "lower largest_dim_min_size, name a mesh axis that no rule uses, or drop the line",
    ),
}
_REASONS: Final = 2  # number of notes that a finding shows at most


def unknown_mesh_axes(subject: Subject) -> Iterator[Finding]:
    """Yield mesh axes of rules and of the policy that are neither standard nor in the mesh."""
    if not subject.sizes:
        return
    known = {*subject.sizes, *STANDARD_MESH_AXES}
    named = [(path, rule.ref.text, rule.mesh_axes) for path, _, rule in subject.written()]
    policy = subject.rules.policy
    named += [
        (("policy", key), "+".join(names), names)
        for key, names in (("gather", policy.gather), ("idle", policy.idle))
    ]
    for path, text, names in named:
        for axis in (name for name in names if name not in known):
            yield subject.finding(
                Code.UNKNOWN_MESH_AXIS,
                Severity.ERROR,
                path,
                message=f'"{text}" names the mesh axis {axis!r}, '
                f"which the mesh ({', '.join(subject.sizes)}) does not have",
                fix=f"add {axis} to the mesh, or name a mesh axis that it has",
            )


def swapped_letters(subject: Subject) -> Iterator[Finding]:
    """Yield mesh axes whose name has the letters of a standard one in another order: `fdsp`.

    Names of two letters are skipped, because `ps` is rarely meant as `sp`. `idle_mesh_axes` reports
    mesh axes that are in no rule.
    """
    for axis in subject.rules.named_mesh_axes() if subject.own_mesh else ():
        for name in STANDARD_MESH_AXES:
            if (
                len(name) > 2
                and axis in subject.sizes
                and name not in subject.sizes
                and axis != name
                and sorted(axis) == sorted(name)
            ):
                yield subject.finding(
                    Code.UNKNOWN_MESH_AXIS,
                    Severity.NOTE,
                    ("mesh", axis),
                    message=f"{axis} is not a standard mesh axis, and the mesh has no {name}: "
                    f"{name.upper()} in an annotation is replicated",
                    fix=f"did you mean {name!r}?",
                )


def idle_mesh_axes(subject: Subject) -> Iterator[Finding]:
    """Yield mesh axes of size > 1 over which nothing is sharded."""
    named = subject.rules.named_mesh_axes()
    used = _used(subject) if subject.exact and subject.tensors else None
    for axis, size in subject.sizes.items():
        if size == 1 or axis in subject.rules.policy.idle:
            continue
        idle = _idle(subject, axis, named, used)
        if idle is None:
            continue
        what, severity = idle
        fix = (
            f'use {axis} in a rule, such as batch = "{axis}", '
            f'give its devices to another mesh axis, or write [policy] idle = "{axis}"'
        )
        # After a typing error in [mesh], rules name a mesh axis that does not exist.
        missing = [name for name in named if name not in subject.sizes]
        hint = did_you_mean(axis, missing) if axis not in named else ""
        yield Finding(
            code=Code.IDLE_MESH_AXIS,
            severity=severity,
            source=subject.source("mesh", axis) if subject.own_mesh else "",
            key=f"mesh.{axis}" if subject.own_mesh else f"mesh axis {axis}",
            message=f"{axis}{'' if size == INFER else f'={size}'} {what}",
            fix=f"{hint} Rules name that mesh axis, and the mesh does not have it. Otherwise {fix}"
            if hint
            else fix,
        )


def _idle(
    subject: Subject, axis: str, named: tuple[str, ...], used: set[str] | None
) -> tuple[str, Severity] | None:
    """Return why a mesh axis is idle, and the severity; None if it is used.

    Args:
      subject: The strategy to check, with its mesh and tensors.
      axis: A mesh axis of more than one device.
      named: Mesh axes that rules name.
      used: Mesh axes that the tree is sharded over; None without a tree or without known sizes.
    """
    size = subject.sizes[axis]
    those = "all its devices" if size == INFER else f"groups of {size} devices"
    repeated = f"so {those} do the same work"
    if axis not in STANDARD_MESH_AXES and axis not in named:
        severity = Severity.WARNING if size == INFER else Severity.ERROR
        return f"shards nothing: no rule names it, {repeated}", severity
    if used is not None and axis not in used:
        what = "no tensor of the tree is sharded over it in any mode"
        return f"shards nothing: {what}, {repeated}", Severity.WARNING
    if axis in named:
        return None
    # The rules of the parallelism axis that has this mesh axis as its default, such as TP for tp.
    stated = [rule for _, key, rule in subject.written() if PARALLELISM_AXES.get(key) == axis]
    if any(rule.candidates and axis not in rule.mesh_axes for rule in stated):
        what = f"no rule names it, and {_parallelism(axis)} means another mesh axis"
        return f"shards nothing: {what}, {repeated}", Severity.WARNING
    # A mesh that is given only for the check is often used with several strategies, so this
    # strategy may leave some axes of the mesh unused.
    if used is None and subject.own_mesh and not stated:
        what = f"only dims that are annotated {axis.upper()} are sharded over it"
        return f"is in no rule: {what}", Severity.NOTE
    return None


def idle_policies(subject: Subject) -> Iterator[Finding]:
    """Yield `zero1` and `largest_dim` of the policy if they shard nothing.

    Either the mesh does not have the mesh axes of the policy, or no weight of the tree can take
    them.
    """
    for key, (code, fix) in _ADDED.items():
        rule = getattr(subject.rules.policy, key)
        if rule is None or not subject.sizes:
            continue
        answers: list[Resolution] = []
        if not any(subject.live(candidate) for candidate in rule.candidates):
            if not subject.own_mesh:
                continue  # the rule may be meant for another mesh
            names = ", ".join(rule.mesh_axes)
            why = f"the mesh has no axis of more than one device among {names}"
        else:
            answers = _weights(subject, Role.STATE if key == "zero1" else Role.PARAM)
            if not answers or any(
                # The policy may shard a tensor that does not resolve yet.
                not each.ok or any(getattr(decision, key) for decision in each.decisions)
                for each in answers
            ):
                continue
            notes = dict.fromkeys(note for each in answers for note in policy_notes(each, rule))
            # A note may name the size of a weight. The note of the largest weight comes first.
            shown = [*notes][:_REASONS] or ["no dim may be sharded"]
            why = f"for every weight of the tree, {'; '.join(shown)}"
            if len(notes) > _REASONS:
                why += f"; and {len(notes) - _REASONS} more like these"
        yield subject.finding(
            code,
            Severity.WARNING if answers else Severity.NOTE,
            ("policy", key),
            message=f'{key} = "{rule.ref.text}" shards nothing: {why}',
            fix=fix,
        )


def _weights(subject: Subject, role: Role) -> list[Resolution]:
    """Return the resolution, in training, of each weight that has a shape, the largest first."""
    weights = [
        tensor
        for tensor in (subject.tensors or () if subject.exact else ())
        if role_of(tensor) is Role.PARAM and tensor.shape is not None
    ]
    weights.sort(key=lambda tensor: -math.prod(tensor.shape or ()))
    return [
        explain(
            tensor.axes,
            subject.rules,
            subject.sizes,
            role=role,
            shape=tensor.shape,
            path=tensor.path or None,
        )
        for tensor in weights
    ]


def _parallelism(axis: str) -> str:
    return next(label[2:-2].lower() for label, name in PARALLELISM_AXES.items() if name == axis)


def _used(subject: Subject) -> set[str]:
    """Return the mesh axes that shard a tensor of the tree, or would shard it if it resolved.

    For roles that no tensor of the tree has, the mesh axes of the rules are added.
    """
    used: set[str] = set()
    for answer in subject.answers:
        for decision in answer.resolution.decisions:
            used.update(decision.mesh_axes)
        for problem in answer.resolution.problems:
            used.update(problem.mesh_axes)
            if problem.error is ShapeRequiredError and problem.dim is None:
                # Without a shape, any dim may take the mesh axes that the policy adds.
                used.update(subject.rules.policy.added_mesh_axes)
            if problem.error is ShapeRequiredError and problem.dim is not None:
                rule = answer.resolution.decisions[problem.dim].rule
                # Without a size it is unknown which candidate applies, so all mesh axes of the rule
                # count. The pattern skips the parentheses in the text of a composite.
                used.update(re.findall(r"[^\s+|()]+", rule.text if rule is not None else ""))
    for role, tables in (
        (Role.ACTIVATION, subject.rules.activations),
        (Role.PARAM, subject.rules.params),
    ):
        # A tree of parameters alone says nothing about the mesh axes of activations.
        if role not in subject.roles():
            used.update(axis for table in tables for _, rule in table for axis in rule.mesh_axes)
    policy, roles = subject.rules.policy, {tensor.role for tensor in subject.tensors or ()}
    if policy.zero1 is not None and Role.STATE not in roles:
        used.update(policy.zero1.mesh_axes)
    if policy.largest_dim is not None and Role.PARAM not in subject.roles():
        used.update(policy.largest_dim.mesh_axes)
    return used


def dcn_order(subject: Subject) -> Iterator[Finding]:
    """Yield composites in which a mesh axis across slices is minor to a mesh axis inside a slice.

    The major mesh axis of a dim varies slowest, so only this axis should cross the slow network
    between slices. In the other order, every step of a collective over the minor axis crosses that
    network.
    """
    for path, _, rule in subject.written():
        for candidate in rule.candidates:
            pair = _minor(subject, candidate)
            if pair:
                # The sort is stable, so axes of one kind keep their order.
                major = sorted(candidate, key=lambda axis: axis not in subject.crossing)
                yield subject.finding(
                    Code.DCN_MINOR,
                    Severity.WARNING,
                    path,
                    message=f'in "{"+".join(candidate)}", {pair[1]} crosses slices but comes '
                    f"after {pair[0]}, which does not cross them",
                    fix=f'write the crossing axis first: "{"+".join(major)}"',
                )
    seen: set[tuple[str, int]] = set()
    for answer in subject.answers:
        for decision in answer.resolution.decisions:
            # Rules of single axes are checked above, where their candidates are written.
            is_composite = decision.rule is not None and len(decision.rule.members) > 1
            pair = _minor(subject, decision.mesh_axes) if is_composite else ()
            if pair and (answer.tensor.path, decision.dim) not in seen:
                seen.add((answer.tensor.path, decision.dim))
                yield Finding(
                    code=Code.DCN_MINOR,
                    severity=Severity.WARNING,
                    key=dim_key(answer.tensor.path, decision.dim, decision.label),
                    message=f"in the annotation, {pair[1]} crosses slices but comes after "
                    f"{pair[0]}, which does not cross them",
                    fix="write the axis that crosses slices first in the composite",
                )


def _minor(subject: Subject, candidate: tuple[str, ...]) -> tuple[str, ...]:
    """Return (axis inside a slice, axis across slices) if the second is minor to the first.

    Otherwise return an empty tuple.
    """
    live = subject.live(candidate)
    for at, axis in enumerate(live):
        inside = [name for name in live[:at] if name not in subject.crossing]
        if axis in subject.crossing and inside:
            return inside[-1], axis
    return ()


def uneven_microbatches(subject: Subject) -> Iterator[Finding]:
    """Yield a number of microbatches that does not divide over the size of pp."""
    pipeline, stages = subject.rules.pipeline, subject.sizes.get(STAGES, 1)
    if pipeline is None or not pipeline.runs or stages == INFER:
        return
    if problem := microbatch_problem(pipeline, stages):
        yield subject.finding(
            Code.UNEVEN_MICROBATCHES,
            Severity.ERROR,
            ("pipeline", "microbatches"),
            message=problem.what,
            fix=problem.fix,
        )


def shared_mesh_axes(subject: Subject) -> Iterator[Finding]:
    """Yield rules that give one mesh axis to two axes of a standard layout.

    With a tree, yield nothing: `unresolved` reports the arrays of the model.
    """
    if subject.tensors is not None:
        return
    sizes = {name: 2 if size == INFER else size for name, size in subject.sizes.items()} or {
        name: 2 for _, _, rule in subject.written() for name in rule.mesh_axes
    }
    every = math.prod(sizes.values())  # a size that all mesh axes divide
    found: dict[frozenset[str], tuple[str, RuleRef, set[str]]] = {}
    for (layout, each), mode in itertools.product(LAYOUTS.items(), MODES):
        axes = each.semantic_axes or each.default_axes
        if not {EMPTY, *SEMANTIC_AXES}.issuperset(axes):
            continue  # by default, each parallelism axis has its own mesh axis
        shape = [every] * len(axes)
        answer = explain(axes, subject.rules, sizes, mode=mode, role=each.role, shape=shape)
        for problem in answer.problems:
            if problem.error is not AxisConflictError or problem.dim is None:
                continue
            taken = set(problem.mesh_axes)
            holders = [dim for dim in answer.decisions if not taken.isdisjoint(dim.mesh_axes)]
            failed = answer.decisions[problem.dim]
            # Whether a rule with several candidates takes this mesh axis depends on sizes.
            if failed.rule and not any(dim.rule and "|" in dim.rule.text for dim in holders):
                pair = frozenset(dim.label for dim in (*holders, failed))
                found.setdefault(pair, (problem.what, failed.rule, set()))[2].add(layout)
    for what, rule, layouts in found.values():
        yield Finding(
            code=Code.SHARED_MESH_AXIS,
            severity=Severity.WARNING,
            source=rule.source,
            key=f"{rule.table}.{rule.key}",
            message=f"{rule.written} fails in {', '.join(sorted(layouts))}: {what}",
            fix=f'name another mesh axis, or end the rule in a fallback: "{rule.text} | -"',
        )
