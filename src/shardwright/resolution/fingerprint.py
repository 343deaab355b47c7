"""A digest of compiled rules. Equal rules have equal digests, wherever they are written."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.resolution.rules import AxisRules, Rule, Table


def fingerprint(rules: AxisRules) -> bytes:
    """Return 32 bytes that are equal for equal rules, and different for different rules."""
    text = repr(_plain_values(rules))
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


def _plain_values(rules: AxisRules) -> tuple[Any, ...]:
    """Return everything that equality compares, as tuples, text and numbers.

    Unequal rules give unequal text. Each rule appears once, because tables share rules. Tables
    refer to it by a number: rules are numbered in the order in which they first appear.
    """
    written: dict[Any, int] = {}
    numbers: dict[int, int] = {}

    def table(entries: Table) -> list[tuple[str, int]]:
        numbered = []
        for axis, rule in entries:
            number = numbers.get(id(rule))
            if number is None:
                number = written.setdefault(_plain_rule(rule), len(written))
                numbers[id(rule)] = number
            numbered.append((axis, number))
        return numbered

    tables = [table(entries) for entries in (*rules.activations, *rules.params)]
    tensors = [(entry.match, table(entry.rules)) for entry in rules.tensors]
    names = [field.name for field in dataclasses.fields(rules.policy)]
    policy = {name: getattr(rules.policy, name) for name in names}
    zero1 = policy.pop("zero1")
    settings = {
        name: value if isinstance(value, tuple) else str(value) for name, value in policy.items()
    }
    named = [(mode, line.text) for mode, line in rules.attention]
    return (
        tables,
        tensors,
        list(written),
        settings,
        None if zero1 is None else _plain_rule(zero1),
        rules.user_axes,
        rules.order,
        named,
    )


def _plain_rule(rule: Rule) -> tuple[Any, ...]:
    """Return everything about a rule that equality compares."""
    of_one = None if rule.of_one is None else _plain_rule(rule.of_one)
    return rule.candidates, str(rule.fallback), of_one
