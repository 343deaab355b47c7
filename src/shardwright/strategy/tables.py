"""Parse the rules of a strategy's tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.errors import Problem, ShardingError, StrategyError
from shardwright.resolution.decisions import RuleRef
from shardwright.resolution.rules import Fallback, Rule, parse_rule
from shardwright.strategy.origin import KeyPath, Origin, source_of, where
from shardwright.vocabulary.axes import REPLICATED, Role, canonical_axis, file_name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTables:
    """The rules of a strategy's data, parsed once.

    Attributes:
      tables: Rules of every table, by key path and then axis. Rules that do not parse are left out.
      gather: Rule of `policy.gather`: one candidate, or "-". None if it is neither.
      zero1: Rule of `policy.zero1`. None if it does not parse.
      idle: Rule of `policy.idle`: one candidate, or "-". None if it is neither.
      problems: Every problem of the rules' texts.
    """

    tables: dict[KeyPath, dict[str, Rule]]
    gather: Rule | None
    zero1: Rule | None
    idle: Rule | None
    problems: tuple[Problem, ...]


def rule_tables(data: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Mapping[str, Any], Role]]:
    """Yield key path, rules and role of every table that holds rules; skip malformed tables."""
    for name, role in (("rules", Role.ACTIVATION), ("params", Role.PARAM)):
        if isinstance(data.get(name), Mapping):
            yield (name,), data[name], role
    modes = data.get("modes")
    for mode, table in modes.items() if isinstance(modes, Mapping) else ():
        if isinstance(table, Mapping):
            yield (
                ("modes", mode),
                {key: rule for key, rule in table.items() if key != "params"},
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


def parse_rules(data: Mapping[str, Any], origin: Origin) -> ParsedTables:
    """Parse the rules of every table and of `[policy]`, and collect the problems of their texts."""
    tables: dict[KeyPath, dict[str, Rule]] = {}
    problems: list[Problem] = []
    for path, table, role in rule_tables(data):
        parsed = tables.setdefault(path, {})
        for key, text in table.items():
            if not (isinstance(key, str) and isinstance(text, str)):
                continue
            full = (*path, key)
            rule = _parse(text, full, origin, problems, key=file_name(canonical_axis(key)))
            if rule is None:
                continue
            if role is Role.PARAM and rule.fallback is Fallback.UNCONSTRAINED:
                problems.append(
                    Problem(
                        error=StrategyError,
                        what='"?" is for activations only: a parameter needs a sharding',
                        path=where(full, origin),
                        rule=str(rule.ref),
                        fix='write "-" for replicated, or mesh axes',
                    )
                )
            parsed[canonical_axis(key)] = rule
    gather, zero1, idle = (
        _policy_rule(key, data, origin, problems) for key in ("gather", "zero1", "idle")
    )
    return ParsedTables(
        tables=tables, gather=gather, zero1=zero1, idle=idle, problems=tuple(problems)
    )


def _parse(
    text: str, path: KeyPath, origin: Origin, problems: list[Problem], *, key: str
) -> Rule | None:
    """Parse the rule of a key. On failure, append to `problems` and return None."""
    try:
        return parse_rule(
            text,
            ref=RuleRef(
                key=key, text=text, table=".".join(path[:-1]), source=source_of(path, origin)
            ),
        )
    except ShardingError as error:
        problems += [at_path(problem, path, origin) for problem in error.problems]
        return None


def _policy_rule(
    key: str, data: Mapping[str, Any], origin: Origin, problems: list[Problem]
) -> Rule | None:
    """Parse a key of `[policy]`.

    "-" if it is absent. On failure, append to `problems` and return None.
    """
    policy = data.get("policy")
    text = policy.get(key, REPLICATED) if isinstance(policy, Mapping) else REPLICATED
    path = ("policy", key)
    rule = _parse(text if isinstance(text, str) else REPLICATED, path, origin, problems, key=key)
    if rule is None:
        return None
    what = fix = ""
    if key != "zero1" and (
        len(rule.candidates) + bool(rule.fallback) != 1 or rule.fallback is Fallback.UNCONSTRAINED
    ):
        what = f'"{text}" is not one set of mesh axes'
        fix = 'write "fsdp+sp", or "-" to gather nothing'
        if key == "idle":
            fix = 'write "replica", "replica+other" for several, or "-" for none'
    elif rule.fallback is Fallback.UNCONSTRAINED:
        what, fix = (
            '"?" is for activations only: optimizer state needs a sharding',
            'write "-", or mesh axes such as "dp | -"',
        )
    if what:
        problems.append(Problem(error=StrategyError, what=what, path=where(path, origin), fix=fix))
        return None
    return rule


def at_path(problem: Problem, path: KeyPath, origin: Origin) -> Problem:
    """Return a problem located at a key of the file."""
    return dataclasses.replace(problem, path=where(path, origin), axis="")
