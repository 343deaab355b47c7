"""Lints of the file itself: candidates, rules and tables that are never used or change nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwright.lints.finding import Code, Finding, Severity
from shardwright.lints.subject import NO_PARAMETER_HAS, Subject, axes_of, role_of
from shardwright.resolution.rules import Missing, Order, Rule, default_rule
from shardwright.strategy.origin import KeyPath
from shardwright.vocabulary.axes import Role, axis_label
from shardwright.vocabulary.modes import MODES, mode_name

_MODES = ("train", "prefill", "decode", "insert")
# Patterns that match everything. For other patterns, no code decides whether one covers another.
_EVERYTHING = ("", ".", ".*", ".+", "^", "^.*", "^.*$")


def unreachable_candidates(subject: Subject) -> Iterator[Finding]:
    """Yield candidates that are never used, because an earlier candidate fits whenever they fit."""
    for path, _, rule in subject.written():
        for at, candidate in enumerate(rule.candidates):
            earlier = next(
                (other for other in rule.candidates[:at] if _hides(subject, other, candidate)), None
            )
            if earlier is None:
                continue
            first, second = "+".join(earlier), "+".join(candidate)
            same_axes = set(earlier) == set(candidate)
            yield subject.finding(
                Code.UNREACHABLE_CANDIDATE,
                Severity.WARNING,
                path,
                message=f'in "{rule.ref.text}" the candidate {second} is never used: '
                f"whenever it fits, the earlier {first} fits too",
                fix=f"drop one of {first} and {second}"
                if same_axes
                else f'write the longer one first, "{second} | {first}", or drop {second}',
            )


def _hides(subject: Subject, earlier: tuple[str, ...], later: tuple[str, ...]) -> bool:
    """Tell whether an earlier candidate fits whenever a later one fits."""
    if set(earlier) == set(later):
        return True
    if subject.rules.policy.missing is Missing.REPLICATE:
        # Under `missing = "replicate"`, if the mesh lacks an axis of the later candidate, this
        # candidate replicates the dim, even where the earlier one does not fit. So it has an
        # effect.
        return False
    # Compare candidates as written. On a mesh that lacks an axis, two of them may be equal, and a
    # file that is meant for several meshes needs both.
    return set(earlier) < set(later) and bool(subject.sizes) and bool(subject.live(earlier))


def shadowed_rules(subject: Subject) -> Iterator[Finding]:
    """Yield rules of `[rules]` and `[params]` that every mode replaces."""
    for axis, rule in subject.tables.get(("params",), {}).items():
        if _in_every_mode(subject, axis, "params"):
            yield _shadowed(subject, "params", rule)
    for axis, rule in subject.tables.get(("rules",), {}).items():
        # A rule of [rules] also applies to weights, unless [params] or every mode has its own rule.
        weights = (
            axis in subject.tables.get(("params",), {})
            or _in_every_mode(subject, axis, "params")
            or (
                axis in NO_PARAMETER_HAS
                if subject.tensors is None
                else axis not in subject.axes_of(Role.PARAM)
            )
        )
        if weights and _in_every_mode(subject, axis):
            yield _shadowed(subject, "rules", rule)


def _in_every_mode(subject: Subject, axis: str, *inner: str) -> bool:
    states = {mode: axis in subject.tables.get(("modes", mode, *inner), {}) for mode in _MODES}
    return states["train"] and states["prefill"] and states["decode"]  # insert inherits from decode


def _shadowed(subject: Subject, table: str, rule: Rule) -> Finding:
    return subject.finding(
        Code.SHADOWED_RULE,
        Severity.WARNING,
        (table, rule.ref.key),
        message=f'{rule.ref.key} = "{rule.ref.text}" is never used: every mode has its own rule',
        fix="drop it, or drop the rule of the modes that should use it"
        + ("" if table == "rules" else ", under [modes.M.params]"),
    )


def shadowed_tensors(subject: Subject) -> Iterator[Finding]:
    """Yield rules of `[[tensors]]` that an earlier entry of the file always overrides."""
    weights = [tensor for tensor in subject.tensors or () if role_of(tensor) is Role.PARAM]
    # Remember what earlier entries matched, so that each pattern is searched in each path only
    # once.
    first: dict[tuple[str, str], int] = {}
    deciding: dict[tuple[str, str], int] = {}
    for at, pattern in enumerate(subject.patterns):
        matched = [tensor for tensor in weights if subject.rules.tensors[at].matches(tensor.path)]
        for axis, rule in subject.tables.get(("tensors", str(at)), {}).items():
            own_paths = [tensor.path for tensor in matched if axis in axes_of(tensor)]
            # The shadower is the first earlier entry that decides the axis wherever this entry
            # would.
            same = [first[axis, text] for text in (pattern, *_EVERYTHING) if (axis, text) in first]
            entries = [deciding.get((axis, path)) for path in own_paths]
            shadower = min(same, default=None)
            if not same and own_paths and None not in entries:
                shadower = entries[0]
            first.setdefault((axis, pattern), at)
            for path in own_paths:
                deciding.setdefault((axis, path), at)
            # An overlay overrides the file below on purpose, so compare only entries of one file.
            if shadower is not None and _file(subject, shadower) == _file(subject, at):
                source = subject.source("tensors", str(shadower))
                where = f" ({source})" if source else ""
                earlier = f"the earlier match {subject.patterns[shadower]!r}{where} decides first"
                yield subject.finding(
                    Code.SHADOWED_TENSORS,
                    Severity.WARNING,
                    ("tensors", str(at), rule.ref.key),
                    message=f"{rule.ref.key} of match {pattern!r} is never used: {earlier}",
                    fix="put the narrower pattern first, or drop this rule",
                )


def _file(subject: Subject, at: int) -> str:
    return subject.source("tensors", str(at)).rpartition(":")[0]


def mode_changes_nothing(subject: Subject) -> Iterator[Finding]:
    """Yield tables of a mode, or rules in them, that equal what the mode inherits.

    Under `order = "rules"`, even a line that repeats an inherited rule gives that rule a place in
    the order. So under this order, only empty tables are reported.
    """
    is_ordered = subject.rules.policy.order is Order.RULES
    for table, rules in subject.tables.items():
        # Skip an empty [modes.M], which exists in the data only as the parent of [modes.M.params].
        if table[0] != "modes" or (not rules and (*table, "params") in subject.tables):
            continue
        if is_ordered and rules:
            continue
        same = [rule for axis, rule in rules.items() if rule == _inherited(subject, table, axis)]
        if len(same) == len(rules):
            yield subject.finding(
                Code.MODE_CHANGES_NOTHING,
                Severity.WARNING,
                table,
                message=f"[{'.'.join(table)}] "
                + ("changes nothing: the same rules hold without it" if rules else "is empty"),
                fix="drop the table",
            )
        else:
            for rule in same:
                yield subject.finding(
                    Code.MODE_CHANGES_NOTHING,
                    Severity.NOTE,
                    (*table, rule.ref.key),
                    message=f'{rule.ref.key} = "{rule.ref.text}" changes nothing: '
                    "the same rule holds without this line",
                    fix="drop the line",
                )


def _inherited(subject: Subject, table: KeyPath, axis: str) -> Rule | None:
    """Return the rule that an axis has in a mode without the mode's own table."""
    inner = table[2:]
    chain: list[KeyPath] = [("modes", "decode", *inner)] if table[1] == "insert" else []
    chain += [("params",), ("rules",)] if inner else [("rules",)]
    tables: Mapping[KeyPath, Mapping[str, Rule]] = subject.tables
    rule = next((tables[path][axis] for path in chain if axis in tables.get(path, {})), None)
    # A table `[modes.M.params]` inherits no default rule. In a weight layout, the written rule of a
    # parallelism axis wins over the rule of the semantic axis, even if the written rule equals the
    # default rule.
    return rule if rule is not None or inner else default_rule(axis)


def weights_move(subject: Subject) -> Iterator[Finding]:
    """Yield axes whose weights are sharded in decode in another way than in prefill or insert."""
    decode = _weights(subject, "decode")
    for mode in ("prefill", "insert"):
        other = _weights(subject, mode)
        for axis in sorted({*decode, *other}):
            left, right = other.get(axis), decode.get(axis)
            if left == right or (left and right and _live(subject, left) == _live(subject, right)):
                continue
            if subject.tensors is not None and not _moved(subject, axis, mode):
                continue
            # Point at the rule that is written for one mode, because the other rule may be written
            # for all modes.
            rule = next(
                rule
                for rule in (right, left)
                if rule is not None and rule.ref.table.startswith("modes.")
            )
            texts = [
                "nothing" if rule_or_none is None else f'"{rule_or_none.ref.text}"'
                for rule_or_none in (left, right)
            ]
            yield subject.finding(
                Code.WEIGHTS_MOVE,
                Severity.WARNING,
                (*rule.ref.table.split("."), rule.ref.key),
                message=f"weights with {axis_label(axis)} are sharded differently "
                f"in {mode} ({texts[0]}) and in decode ({texts[1]}): "
                "a server would move them or keep two copies",
                fix="give these weights one rule, under [params], or serve each mode in its own "
                "process",
            )


def _moved(subject: Subject, axis: str, mode: str) -> bool:
    """Tell whether a weight with an axis is sharded in a mode in another way than in decode.

    If sizes of the mesh are unknown, tell whether there is a weight with the axis.
    """
    answers = [
        answer
        for answer in subject.answers
        if role_of(answer.tensor) is Role.PARAM and axis in axes_of(answer.tensor)
    ]
    if not subject.exact:
        return bool(answers)
    mesh_axes = {
        # `answers` has all modes of one tensor, then all modes of the next tensor. So the quotient
        # is the index of the tensor.
        (at // len(MODES), mode_name(answer.mode)): [
            decision.mesh_axes for decision in answer.resolution.decisions
        ]
        for at, answer in enumerate(answers)
    }
    return any(
        mesh_axes[at, mode] != mesh_axes[at, "decode"] for at, name in mesh_axes if name == mode
    )


def _weights(subject: Subject, mode: str) -> dict[str, Rule]:
    """Return the rules of weights in a mode, for each axis that a `[modes.M.params]` names."""
    stated = {
        axis
        for table, rules in subject.tables.items()
        if table[0] == "modes" and table[2:] == ("params",)
        for axis in rules
    }
    # `rules.params` has one table per mode, in the order of `_MODES`.
    effective = dict(subject.rules.params[_MODES.index(mode)])
    return {axis: effective[axis] for axis in stated if axis in effective}


def _live(subject: Subject, rule: Rule) -> tuple[object, ...]:
    candidates = dict.fromkeys(
        live for candidate in rule.candidates if (live := subject.live(candidate))
    )
    return (*candidates, rule.fallback)
