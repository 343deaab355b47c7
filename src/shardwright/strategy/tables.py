"""Parse the rules of a strategy's tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.errors import Problem, ShardingError
from shardwright.resolution.decisions import RuleRef
from shardwright.resolution.rules import MOST_CANDIDATES, Fallback, Rule, parse_rule
from shardwright.strategy.chains import ARRAYS
from shardwright.strategy.origin import KeyPath, KeySources, problem_at, source_of, where
from shardwright.vocabulary.axes import REPLICATED, Role, canonical_axis, file_name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTables:
    """The rules of a strategy's data, parsed once.

    Attributes:
      tables: Rules of every table, by key path and then axis. Rules that do not parse are left out.
      orders: For each array of tables, the axis of every candidate, in the order written.
      gather: Rule of `policy.gather`: one candidate, or "-". None if it is neither.
      largest_dim: Rule of `policy.largest_dim`. None if it does not parse.
      zero1: Rule of `policy.zero1`. None if it does not parse.
      idle: Rule of `policy.idle`: one candidate, or "-". None if it is neither.
      problems: Every problem of the rules' texts.
    """

    tables: dict[KeyPath, dict[str, Rule]]
    orders: dict[KeyPath, list[str]]
    gather: Rule | None
    largest_dim: Rule | None
    zero1: Rule | None
    idle: Rule | None
    problems: tuple[Problem, ...]


def rule_tables(data: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Mapping[str, Any], Role]]:
    """Yield key path, rules and role of every table that has rules. Skip malformed tables."""
    for name, role in (("rules", Role.ACTIVATION), ("params", Role.PARAM)):
        value = data.get(name)
        if isinstance(value, Mapping):
            yield (name,), value, role
        for at, table in enumerate(value if isinstance(value, list) else ()):
            yield (name, str(at)), table, role
    modes = data.get("modes")
    for mode, table in modes.items() if isinstance(modes, Mapping) else ():
        if isinstance(table, Mapping):
            yield (
                ("modes", mode),
                {key: rule for key, rule in table.items() if key not in ("params", "memory")},
                Role.ACTIVATION,
            )
            if isinstance(table.get("params"), Mapping):
                yield ("modes", mode, "params"), table["params"], Role.PARAM
    tensors = data.get("tensors")
    for at, entry in enumerate(tensors if isinstance(tensors, list) else ()):
        if isinstance(entry, Mapping):
            yield (
                ("tensors", str(at)),
                {key: rule for key, rule in entry.items() if key != "match"},
                Role.PARAM,
            )


def parse_rules(data: Mapping[str, Any], origin: KeySources) -> ParsedTables:
    """Parse the rules of every table and of `[policy]`, and collect the problems of their texts."""
    tables: dict[KeyPath, dict[str, Rule]] = {}
    orders: dict[KeyPath, list[str]] = {}
    problems: list[Problem] = []
    for path, table, role in rule_tables(data):
        is_array = path[0] in ARRAYS and len(path) > 1
        # For look-ups, all `[[rules]]` tables form one table, and so do all `[[params]]` tables.
        # Only `orders` keeps the order of their rules.
        home = path[:1] if is_array else path
        parsed = tables.setdefault(home, {})
        for key, text in table.items():
            if not (isinstance(key, str) and isinstance(text, str)):
                continue
            full = (*path, key)
            axis = canonical_axis(key)
            rule = _parse(text, full, origin, problems, key=file_name(axis), table=".".join(home))
            if rule is None:
                continue
            if is_array:
                # A rule "-" has no candidates. Its axis still gets one place in the order of rules,
                # because a composite may need that place.
                places = len(rule.candidates) or int(axis not in parsed)
                orders.setdefault(home, []).extend([axis] * places)
            if role is Role.PARAM and rule.fallback is Fallback.UNCONSTRAINED:
                what = '"?" is for activations only: a parameter needs a sharding'
                fix = 'write "-" for replicated, or mesh axes'
                problems.append(problem_at(full, origin, what, fix, rule=rule.ref))
            if axis in parsed:
                if fault := _continuation_fault(parsed[axis], rule):
                    problems.append(problem_at(full, origin, *fault, rule=rule.ref))
                # Only an array of tables can have an axis twice; pydantic refuses two spellings in
                # one table.
                rule = _continued(parsed[axis], rule)
            parsed[axis] = rule
    gather, largest_dim, zero1, idle = (
        _policy_rule(key, data, origin, problems)
        for key in ("gather", "largest_dim", "zero1", "idle")
    )
    return ParsedTables(
        tables=tables,
        orders=orders,
        gather=gather,
        largest_dim=largest_dim,
        zero1=zero1,
        idle=idle,
        problems=tuple(problems),
    )


def _continuation_fault(first: Rule, rest: Rule) -> tuple[str, str] | None:
    """Return the fault and the fix if a chain cannot continue in a later table of the array."""
    if first.fallback:
        what = f'nothing may follow "{first.fallback}", which always fits'
        return what, f"drop this line, or the fallback of {first.ref}"
    if (count := len(first.candidates) + len(rest.candidates)) > MOST_CANDIDATES:
        what = f"the rule has {count} candidates, at most {MOST_CANDIDATES} are read"
        return what, "keep the candidates that can apply: the first that fits is chosen"
    return None


def _continued(first: Rule, rest: Rule) -> Rule:
    """Join the two parts of a chain to one rule.

    The second part is in a later table of the array.
    """
    ref = dataclasses.replace(
        first.ref,
        text=f"{first.ref.text} | {rest.ref.text}",
        source=", ".join(dict.fromkeys(filter(None, (first.ref.source, rest.ref.source)))),
    )
    refs = [
        each for rule in (first, rest) for each in rule.refs or (rule.ref,) * len(rule.candidates)
    ]
    return Rule(
        candidates=first.candidates + rest.candidates,
        fallback=rest.fallback,
        ref=ref,
        refs=tuple(refs),
    )


def _parse(
    text: str,
    path: KeyPath,
    origin: KeySources,
    problems: list[Problem],
    *,
    key: str,
    table: str = "policy",
) -> Rule | None:
    """Parse the rule of a key. On failure, append to `problems` and return None."""
    try:
        return parse_rule(
            text,
            ref=RuleRef(key=key, text=text, table=table, source=source_of(path, origin)),
        )
    except ShardingError as error:
        problems += [at_path(problem, path, origin) for problem in error.problems]
        return None


def _policy_rule(
    key: str, data: Mapping[str, Any], origin: KeySources, problems: list[Problem]
) -> Rule | None:
    """Parse the rule of a key of `[policy]`. An absent key counts as "-".

    On failure, append to `problems` and return None.
    """
    policy = data.get("policy")
    text = policy.get(key, REPLICATED) if isinstance(policy, Mapping) else REPLICATED
    path = ("policy", key)
    rule = _parse(text if isinstance(text, str) else REPLICATED, path, origin, problems, key=key)
    if rule is None:
        return None
    what = fix = ""
    if key in ("gather", "idle") and (
        len(rule.candidates) + bool(rule.fallback) != 1 or rule.fallback is Fallback.UNCONSTRAINED
    ):
        what = f'"{text}" is not one set of mesh axes'
        fix = 'write "fsdp+sp", or "-" to gather nothing'
        if key == "idle":
            fix = 'write "replica", "replica+other" for several, or "-" for none'
    elif rule.fallback is Fallback.UNCONSTRAINED:
        what, fix = (
            '"?" is for activations only: what is stored needs a sharding',
            'write "-", or mesh axes such as "dp | -"',
        )
    if what:
        problems.append(problem_at(path, origin, what, fix))
        return None
    return rule


def at_path(problem: Problem, path: KeyPath, origin: KeySources) -> Problem:
    """Return a copy of a problem, located at a key of the file."""
    return dataclasses.replace(problem, path=where(path, origin), axis="")
