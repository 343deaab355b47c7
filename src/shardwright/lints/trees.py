"""Lints of a tree: axes without rules, rules without tensors, split heads, unresolved tensors."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.errors import (
    IndivisibleError,
    NewValue,
    Problem,
    ShapeRequiredError,
    ShardingError,
    UnknownAxisError,
    in_file,
)
from shardwright.lints.finding import Code, Finding, Severity, dim_key, problem_text
from shardwright.lints.subject import ResolvedTensor, Subject, axes_of, role_of
from shardwright.resolution.decisions import DimDecision, Outcome, Reason
from shardwright.vocabulary.axes import (
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    SEMANTIC_AXES,
    Role,
    axis_label,
    canonical_axis,
    file_name,
)
from shardwright.vocabulary.lowering import lower
from shardwright.vocabulary.modes import MODES, mode_name

_HEADS = {HEAD: HEAD_DIM, KV_HEAD: KV_HEAD_DIM}
_POLICY = (Outcome.POLICY_REPLICATE, Outcome.POLICY_DROP, Outcome.POLICY_PREFIX)


def unresolved(subject: Subject) -> Iterator[Finding]:
    """Yield tensors without a spec, once for all modes that have the same problem."""
    for problem, modes in _problems(subject).items():
        if problem.error is ShapeRequiredError:
            continue
        yield unresolved_finding(
            problem, file=subject.file, modes=_in_modes(list(map(mode_name, modes)))
        )


def unresolved_finding(problem: Problem, *, file: str, modes: str = "") -> Finding:
    """Return the finding of an array without a spec.

    Args:
      problem: The problem of the array.
      file: The file in which the user of the strategy changes rules.
      modes: End of the message: a text that names the modes.
    """
    return Finding(
        code=_code(problem),
        severity=Severity.ERROR,
        key=dim_key(problem.path, problem.dim, problem.axis),
        message=problem_text(problem) + modes,
        fix=in_file(problem, file).fix,
        edit=problem.edit,
    )


def _in_modes(names: list[str]) -> str:
    """Return the modes as text; empty if these are all modes."""
    return "" if len(names) == len(MODES) else f" (in {', '.join(names)})"


def _problems(subject: Subject) -> dict[Problem, list[str]]:
    """Return every problem with the modes that have it.

    Problems that differ only in their rule are one problem, because rules differ between modes.
    """
    first: dict[tuple[object, ...], Problem] = {}
    modes: dict[Problem, list[str]] = {}
    for answer in subject.answers:
        for problem in answer.resolution.problems:
            representative = first.setdefault(
                (answer.tensor.path, problem.error, problem.dim, problem.what), problem
            )
            modes.setdefault(representative, []).append(answer.mode)
    return modes


def _code(problem: Problem) -> Code:
    if problem.error is UnknownAxisError:
        return Code.UNKNOWN_AXIS
    if (
        problem.error is IndivisibleError
        and _axis_of(problem.axis) in _HEADS
        and (problem.shards or 0) > (problem.size or 0)
    ):
        return Code.MORE_SHARDS_THAN_HEADS
    return Code.UNRESOLVED


def _axis_of(label: str) -> str:
    """Return the first axis of a dim's label: `KV_HEAD` of `KV_HEAD*KV_HEAD_DIM`."""
    return canonical_axis(label.partition("*")[0])


def cut_heads(subject: Subject) -> Iterator[Finding]:
    """Yield dims of heads that a policy replicates, and flattened dims whose shards split heads."""
    if not subject.exact:
        return
    flat = _flattened(subject)
    seen: set[tuple[str, int]] = set()
    for answer in subject.answers:
        for decision in answer.resolution.decisions:
            key = (answer.tensor.path, decision.dim)
            message = _cut(subject, answer, decision.dim, flat)
            if message and key not in seen:
                seen.add(key)
                yield Finding(
                    code=Code.MORE_SHARDS_THAN_HEADS,
                    severity=Severity.WARNING,
                    key=dim_key(answer.tensor.path, decision.dim, decision.label),
                    message=message[0],
                    fix=message[1],
                )


def _cut(
    subject: Subject, answer: ResolvedTensor, position: int, flat: dict[str, dict[int, int]]
) -> tuple[str, str] | None:
    """Return what is wrong with a dim of heads and how to fix it, or None."""
    decision = answer.resolution.decisions[position]
    axis = _axis_of(decision.label)
    if axis not in _HEADS or decision.size is None:
        return None
    if decision.outcome in _POLICY:
        # A candidate that failed has a detail, such as `6 % 4 != 0`. An empty candidate has no
        # detail.
        failed = next(
            (skip for skip in decision.skipped if skip.detail and not skip.mesh_axis), None
        )
        shards_wanted = 1
        for name in failed.candidate if failed is not None else ():
            shards_wanted *= subject.sizes.get(name, 1)
        if shards_wanted > decision.size:
            names = "+".join(failed.candidate) if failed else "tp"
            fix = f'if intended, write {file_name(axis)} = "{names} | -", or use fewer shards'
            return f"{decision.size} heads for {shards_wanted} shards: {decision.why}", fix
        return None
    shards = 1
    for name in decision.mesh_axes:
        shards *= subject.sizes[name]
    # A merged dim, HEAD*HEAD_DIM, is sharded only along its heads, so no shard splits a head.
    heads = flat.get(axis, {}).get(decision.size) if "*" not in decision.label else None
    if heads is None or heads % shards == 0:
        return None
    label = axis_label(axis)
    width = decision.size // heads
    inner = axis_label(_HEADS[axis])
    fix = f"annotate the flat dim as merged(({label}, {heads}), ({inner}, {width}))"
    return (
        f"size {decision.size} is {heads} flattened heads over {shards} shards, which splits heads",
        fix,
    )


def _flattened(subject: Subject) -> dict[str, dict[int, int]]:
    """Return, for each axis of heads, a dict from the size of a flat dim to its number of heads.

    The sizes come from tensors that have heads and head dims as separate dims.
    """
    flat_sizes: dict[str, dict[int, int]] = {}
    for tensor in subject.tensors or ():
        for axis, inner in _HEADS.items():
            for heads, width in _pairs(tensor.axes, tensor.shape, axis, inner):
                # With a head dim of size 1, the flat size is the number of heads itself.
                if width > 1:
                    flat_sizes.setdefault(axis, {})[heads * width] = heads
    return flat_sizes


def _pairs(
    annotation: object, shape: tuple[int, ...] | None, axis: str, inner: str
) -> Iterator[tuple[int, int]]:
    try:
        dims = lower(annotation, shape).dims
    except ShardingError:
        return
    for dim in dims:
        members = dict(dim.merged)
        # The merged dim HEAD*HEAD_DIM alone gives the number of heads and the head size.
        if axis in members and inner in members:
            yield members[axis], members[inner]
    by_axis = {
        dim.axes[0]: size
        for dim, size in zip(dims, shape or (), strict=False)
        if len(dim.axes) == 1 and not dim.merged
    }
    if axis in by_axis and inner in by_axis:
        yield by_axis[axis], by_axis[inner]


def no_rule(subject: Subject) -> Iterator[Finding]:
    """Yield axes of the tree that have no rule. They are replicated."""
    used: dict[tuple[str, Role], dict[str, list[str]]] = {}
    for answer in subject.answers:
        for decision in answer.resolution.decisions:
            for label in _without_rule(decision):
                paths = used.setdefault((label, role_of(answer.tensor)), {})
                paths.setdefault(answer.tensor.path or "the tensor", []).append(
                    mode_name(answer.mode)
                )
    for (label, role), paths in used.items():
        shown = ", ".join([*list(paths)[:3], *(["..."] if len(paths) > 3 else [])])
        table = "rules" if role is Role.ACTIVATION else "params"
        axis = file_name(_axis_of(label))
        yield subject.finding(
            Code.NO_RULE,
            Severity.WARNING,
            (table,),
            message=f"{label} of {shown} has no rule: replicated"
            + _in_modes(next(iter(paths.values()))),
            fix=f'to replicate the dim, write [{table}] {axis} = "-"; or give {axis} mesh axes',
            edit=NewValue(table=(table,), key=axis, value="-"),
        )


def _without_rule(decision: DimDecision) -> list[str]:
    """Return the labels of a dim's axes that have no rule."""
    if decision.outcome is Outcome.NO_RULE:
        return [decision.label] if "*" in decision.label else decision.label.split("+")
    return [skip.detail for skip in decision.skipped if skip.reason is Reason.NO_RULE]


def unused_tensors(subject: Subject) -> Iterator[Finding]:
    """Yield `[[tensors]]` entries, and single rules in them, that apply to no weight."""
    weights = [tensor for tensor in subject.tensors or () if role_of(tensor) is Role.PARAM]
    if not weights:
        return
    for at, pattern in enumerate(subject.patterns):
        matched = [tensor for tensor in weights if subject.rules.tensors[at].matches(tensor.path)]
        if not matched:
            example = f"; the tree has the path {weights[0].path}" if weights[0].path else ""
            yield subject.finding(
                Code.UNUSED_TENSORS,
                Severity.WARNING,
                ("tensors", str(at), "match"),
                message=f"match {pattern!r} matches no weight of the tree",
                fix=f"correct the pattern{example}",
            )
            continue
        for axis, rule in subject.tables.get(("tensors", str(at)), {}).items():
            if not any(axis in axes_of(tensor) for tensor in matched):
                yield subject.finding(
                    Code.UNUSED_TENSORS,
                    Severity.WARNING,
                    ("tensors", str(at), rule.ref.key),
                    message=f"match {pattern!r} matches no weight with the axis {axis_label(axis)}",
                    fix="drop the rule, or correct the pattern",
                )


def unused_memory(subject: Subject) -> Iterator[Finding]:
    """Yield `[[memory.tensors]]` entries whose pattern matches no weight of the tree."""
    paths = [tensor.path for tensor in subject.tensors or () if role_of(tensor) is Role.PARAM]
    for rule in subject.rules.memory if paths else ():
        key = (*rule.ref.table.split("."), "match")
        if rule.match is not None and not any(map(rule.matches, paths)):
            yield subject.finding(
                Code.UNUSED_TENSORS,
                Severity.WARNING,
                key,
                message=f"match {rule.match!r} matches no weight of the tree",
                fix=f"correct the pattern; the tree has the path {paths[0]}",
            )


def unused_rules(subject: Subject) -> Iterator[Finding]:
    """Yield rules and declarations of axes that no tensor of the tree has.

    Rules without mesh axes are skipped, because an unused rule that replicates changes nothing.
    Tables of a role that the tree lacks are skipped too. A file with a rule for every axis of the
    vocabulary is meant for any model, so only the axes that it declares are checked.
    """
    if not subject.tensors:
        return
    everything = subject.axes_of(Role.ACTIVATION, Role.PARAM)
    complete = {*SEMANTIC_AXES} <= {*subject.tables.get(("rules",), {})}
    for path, axis, rule in subject.written():
        if complete and axis in SEMANTIC_AXES:
            continue
        # The tables of parameters inherit from [rules], so a rule of [rules] is for both roles.
        roles = {Role.PARAM if "params" in path[:-1] else Role.ACTIVATION}
        if path[0] == "rules":
            roles = {Role.ACTIVATION, Role.PARAM}
        if (
            not rule.candidates
            or path[0] in ("tensors", "policy")
            or not roles <= subject.roles()
            or axis in subject.axes_of(*roles)
        ):
            continue
        yield _unused(subject, path, f'{rule.ref.key} = "{rule.ref.text}"', axis)
    if len(subject.roles()) > 1:
        for name in subject.axes:
            if canonical_axis(name) not in everything:
                yield _unused(subject, ("axes", name), name, canonical_axis(name))


def _unused(subject: Subject, path: tuple[str, ...], what: str, axis: str) -> Finding:
    return subject.finding(
        Code.UNUSED_RULE,
        Severity.NOTE,
        path,
        message=f"{what} is not used: no tensor of the tree has the axis {axis_label(axis)}",
        fix="drop the line, or leave it for other models",
    )
