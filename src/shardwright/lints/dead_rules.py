"""Lints of what is written: candidates, rules and tables that nothing ever reaches, or that change nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwright.lints.finding import Code, Finding, Severity
from shardwright.lints.subject import NO_PARAMETER_HAS, KeyPath, Subject, axes_of, role_of
from shardwright.resolution.rules import Missing, Rule, default_rule
from shardwright.vocabulary.axes import Role, axis_label
from shardwright.vocabulary.modes import MODES, mode_name

_MODES = ("train", "prefill", "decode", "insert")
_EVERYTHING = ("", ".", ".*", ".+", "^", "^.*", "^.*$")


def unreachable_candidates(subject: Subject) -> Iterator[Finding]:
    """Yield candidates that are never reached: wherever one divides and is free, an earlier one does and is."""
    for path, _, rule in subject.written():
        for at, candidate in enumerate(rule.candidates):
            earlier = next(
                (one for one in rule.candidates[:at] if _beats(subject, one, candidate)), None
            )
            if earlier is None:
                continue
            first, second = "+".join(earlier), "+".join(candidate)
            twice = set(earlier) == set(candidate)
            yield subject.finding(
                Code.UNREACHABLE_CANDIDATE,
                Severity.WARNING,
                path,
                message=f'in "{rule.ref.text}" the candidate {second} is never reached: wherever it fits, {first} before it does',
                fix=f"drop one of {first} and {second}"
                if twice
                else f'write the longer one first, "{second} | {first}", or drop {second}',
            )


def _beats(subject: Subject, earlier: tuple[str, ...], later: tuple[str, ...]) -> bool:
    if set(earlier) == set(later):
        return True
    if (
        subject.rules.policy.missing is Missing.REPLICATE
    ):  # a longer candidate is replicated where the mesh lacks a part of it
        return False
    # As written too: that a mesh makes two candidates of a chain equal is what chains are for.
    return set(earlier) < set(later) and bool(subject.sizes) and bool(subject.live(earlier))


def shadowed_rules(subject: Subject) -> Iterator[Finding]:
    """Yield rules of `[rules]` and `[params]` that every mode replaces."""
    for axis, rule in subject.tables.get(("params",), {}).items():
        if _in_every_mode(subject, axis, "params"):
            yield _shadowed(subject, "params", rule)
    for axis, rule in subject.tables.get(("rules",), {}).items():
        weights = (
            axis in subject.tables.get(("params",), {})
            or _in_every_mode(subject, axis, "params")
            or not _has_parameters(subject, axis)
        )
        if weights and _in_every_mode(subject, axis):
            yield _shadowed(subject, "rules", rule)


def _has_parameters(subject: Subject, axis: str) -> bool:
    return (
        axis not in NO_PARAMETER_HAS
        if subject.tensors is None
        else axis in subject.axes_of(Role.PARAM)
    )


def _in_every_mode(subject: Subject, axis: str, *inner: str) -> bool:
    states = {mode: axis in subject.tables.get(("modes", mode, *inner), {}) for mode in _MODES}
    return states["train"] and states["prefill"] and states["decode"]  # insert inherits from decode


def _shadowed(subject: Subject, table: str, rule: Rule) -> Finding:
    return subject.finding(
        Code.SHADOWED_RULE,
        Severity.WARNING,
        (table, rule.ref.key),
        message=f'{rule.ref.key} = "{rule.ref.text}" is never used: every mode has a rule of its own',
        fix=f"drop it, or drop the rule of the modes that should have it{'' if table == 'rules' else ', under [modes.M.params]'}",
    )


def shadowed_tensors(subject: Subject) -> Iterator[Finding]:
    """Yield rules of `[[tensors]]` that an earlier entry of the same file takes from every tensor."""
    weights = [tensor for tensor in subject.tensors or () if role_of(tensor) is Role.PARAM]
    # The first entry of each pattern, and the one that decides each weight: each pattern is searched once in each path.
    first: dict[tuple[str, str], int] = {}
    deciding: dict[tuple[str, str], int] = {}
    for at, pattern in enumerate(subject.patterns):
        matched = [tensor for tensor in weights if subject.rules.tensors[at].matches(tensor.path)]
        for axis, rule in subject.tables.get(("tensors", str(at)), {}).items():
            mine = [tensor.path for tensor in matched if axis in axes_of(tensor)]
            by = _shadower(axis, pattern, mine, first, deciding)
            first.setdefault((axis, pattern), at)
            for path in mine:
                deciding.setdefault((axis, path), at)
            # That an overlay's entries go before those below them is what overlays are for.
            if by is not None and _file(subject, by) == _file(subject, at):
                source = subject.source("tensors", str(by))
                where = f" ({source})" if source else ""
                earlier = f"the earlier match {subject.patterns[by]!r}{where} goes first"
                yield subject.finding(
                    Code.SHADOWED_TENSORS,
                    Severity.WARNING,
                    ("tensors", str(at), rule.ref.key),
                    message=f"{rule.ref.key} of match {pattern!r} is never used: {earlier}",
                    fix="put the narrower pattern first, or drop this rule",
                )


def _file(subject: Subject, at: int) -> str:
    return subject.source("tensors", str(at)).rpartition(":")[0]


def _shadower(
    axis: str,
    pattern: str,
    mine: Sequence[str],
    first: Mapping[tuple[str, str], int],
    deciding: Mapping[tuple[str, str], int],
) -> int | None:
    """Return the first earlier entry that decides an axis wherever this one would, or None; `mine` are the paths it matches."""
    same = [first[axis, one] for one in (pattern, *_EVERYTHING) if (axis, one) in first]
    if same:
        return min(same)
    takers = [deciding.get((axis, path)) for path in mine]
    return None if not mine or None in takers else takers[0]


def mode_changes_nothing(subject: Subject) -> Iterator[Finding]:
    """Yield tables of modes, or rules in them, that say what holds without them."""
    for table, rules in subject.tables.items():
        if table[0] != "modes" or (not rules and (*table, "params") in subject.tables):
            continue
        same = [rule for axis, rule in rules.items() if rule == _inherited(subject, table, axis)]
        if len(same) == len(rules):
            yield subject.finding(
                Code.MODE_CHANGES_NOTHING,
                Severity.WARNING,
                table,
                message=f"[{'.'.join(table)}] {'says only what holds without it' if rules else 'is empty'}",
                fix="drop the table",
            )
        else:
            for rule in same:
                yield subject.finding(
                    Code.MODE_CHANGES_NOTHING,
                    Severity.NOTE,
                    (*table, rule.ref.key),
                    message=f'{rule.ref.key} = "{rule.ref.text}" holds without this line',
                    fix="drop the line",
                )


def _inherited(subject: Subject, table: KeyPath, axis: str) -> Rule | None:
    """Return the rule that an axis has in a mode if the mode's own table does not say."""
    inner = table[2:]
    chain: list[KeyPath] = [("modes", "decode", *inner)] if table[1] == "insert" else []
    chain += [("params",), ("rules",)] if inner else [("rules",)]
    tables: Mapping[KeyPath, Mapping[str, Rule]] = subject.tables
    found = next((tables[path][axis] for path in chain if axis in tables.get(path, {})), None)
    # A weight layout asks whether a parallelism axis has a rule that is written: writing its default there does change something.
    return found if found is not None or inner else default_rule(axis)


def weights_move(subject: Subject) -> Iterator[Finding]:
    """Yield axes whose weights lie differently while a prompt is read and while it is answered."""
    decode = _weights(subject, "decode")
    for mode in ("prefill", "insert"):
        other = _weights(subject, mode)
        for axis in sorted({*decode, *other}):
            one, two = other.get(axis), decode.get(axis)
            if one == two or (one and two and _live(subject, one) == _live(subject, two)):
                continue
            if subject.tensors is not None and not _moved(subject, axis, mode):
                continue
            # One of the two is written for a mode: that is the line to show.
            rule = next(
                rule
                for rule in (two, one)
                if rule is not None and rule.ref.table.startswith("modes.")
            )
            lies = [
                "nothing" if one_rule is None else f'"{one_rule.ref.text}"'
                for one_rule in (one, two)
            ]
            yield subject.finding(
                Code.WEIGHTS_MOVE,
                Severity.WARNING,
                (*rule.ref.table.split("."), rule.ref.key),
                message=f"weights with {axis_label(axis)} lie differently in {mode} ({lies[0]}) and in decode ({lies[1]}): "
                "one server would move them, or keep them twice",
                fix="give them one rule, under [params], or serve the modes with processes of their own",
            )


def _moved(subject: Subject, axis: str, mode: str) -> bool:
    """Tell whether some weight of the tree with an axis lies differently; where sizes of the mesh are unknown, whether there is one."""
    having = [
        answer
        for answer in subject.answers
        if role_of(answer.tensor) is Role.PARAM and axis in axes_of(answer.tensor)
    ]
    if not subject.exact:
        return bool(having)
    lies = {
        (at // len(MODES), mode_name(answer.mode)): [
            one.mesh_axes for one in answer.found.decisions
        ]
        for at, answer in enumerate(having)
    }
    return any(lies[at, mode] != lies[at, "decode"] for at, name in lies if name == mode)


def _weights(subject: Subject, mode: str) -> dict[str, Rule]:
    """Return the rules of weights in a mode, of the axes that some mode's own table states for weights."""
    stated = {
        axis
        for table, rules in subject.tables.items()
        if table[0] == "modes" and table[2:] == ("params",)
        for axis in rules
    }
    effective = dict(subject.rules.params[_MODES.index(mode)])
    return {axis: effective[axis] for axis in stated if axis in effective}


def _live(subject: Subject, rule: Rule) -> tuple[object, ...]:
    lives = dict.fromkeys(
        live for candidate in rule.candidates if (live := subject.live(candidate))
    )
    return (*lives, rule.fallback)
