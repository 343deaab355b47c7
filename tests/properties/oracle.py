"""Resolution once more, from the text of the rules, by search: slow, and written without a look at
how it is done.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from shardwright.resolution.rules import Conflict, Indivisible, Missing
from shardwright.vocabulary.axes import EMPTY
from tests.properties.cases import Case

OPEN = "?"
Entry = tuple[str, ...] | str


class RefusedError(Exception):
    """The first problem, by the name of its class."""


def table_order(mode: str, role: str) -> list[str]:
    """Return the tables that may hold the rule, the first to say something wins."""
    if role == "activation":
        return {"insert": ["modes.insert", "modes.decode", "rules"]}.get(
            mode, [f"modes.{mode}", "rules"]
        )
    own = (
        ["modes.insert.params", "modes.decode.params"]
        if mode == "insert"
        else [f"modes.{mode}.params"]
    )
    return [*own, "params", "rules"]


def rule_of(case: Case, axis: str, role: str) -> str | None:
    """Return the text of the rule, or None."""
    rules = [
        case.tables[name][axis]
        for name in table_order(case.mode, role)
        if axis in case.tables.get(name, {})
    ]
    return rules[0] if rules else None


def split(text: str) -> tuple[list[list[str]], str]:
    """Return candidates and the fallback of a rule's text."""
    parts = [part.strip() for part in text.split("|")]
    end = parts.pop() if parts[-1] in ("-", "?") else ""
    return [[name.strip() for name in part.split("+")] for part in parts], end


def shards(case: Case, names: Any) -> int:
    """Return the product of mesh sizes."""
    return math.prod(case.mesh[name] for name in names)


def candidate_of(case: Case, texts: list[str], size: int, used: set[str]) -> Entry:
    """Return the mesh axes of one dim, given its members' rules and what earlier dims use."""
    first: list[str] | None = None
    for names in product_of(case, texts):
        if names is None:
            return ()
        if not names:
            continue
        divides, free = size % shards(case, names) == 0, used.isdisjoint(names)
        if free and len({*names}) == len(names) and divides:
            return tuple(names)
        if case.policy.conflict is Conflict.NEXT:
            is_dropped = case.policy.indivisible is Indivisible.DROP and not divides
            if is_dropped or (free and len({*names}) == len(names)):
                return policy_of(case, names, size, used)
        first = first or names
    ends = [split(text)[1] for text in texts]
    if OPEN in ends:
        return OPEN
    if first is None or all(nothing(case, text) for text in texts):
        return ()
    return policy_of(case, first, size, used)


def nothing(case: Case, text: str) -> bool:
    """Tell whether a rule lets its dim be replicated: it ends in `-`, or no candidate is left."""
    written, end = split(text)
    return end == "-" or not any(case.mesh.get(name, 1) > 1 for names in written for name in names)


def product_of(case: Case, texts: list[str]) -> list[list[str] | None]:
    """Return the joined candidates in order; None where one names a mesh axis for whose absence the
    dim is dropped.
    """
    chains: list[list[list[str] | None]] = []
    for text in texts:
        chain: list[list[str] | None] = []
        for names in split(text)[0]:
            lost = case.policy.missing is Missing.REPLICATE and not {*names} <= {*case.mesh}
            live = [name for name in names if case.mesh.get(name, 1) != 1]
            if lost:
                chain.append(None)
            elif live:
                chain.append(live)
        chains.append(chain + ([[]] if nothing(case, text) else []))
    return [
        None if None in picks else [name for names in picks for name in names or ()]
        for picks in itertools.product(*chains)
    ]


def policy_of(case: Case, names: list[str], size: int, used: set[str]) -> Entry:
    """Return what the policy makes of the first candidate that is not empty."""
    if case.policy.indivisible is Indivisible.DROP and size % shards(case, names) != 0:
        return ()
    distinct = [
        name for at, name in enumerate(names) if name not in used and name not in names[:at]
    ]
    if distinct != names:
        if case.policy.conflict is Conflict.ERROR:
            raise RefusedError("AxisConflictError")
        if case.policy.conflict is Conflict.NEXT:
            return ()
        if size % shards(case, distinct) == 0:
            return tuple(distinct)
    if case.policy.indivisible is Indivisible.ERROR:
        raise RefusedError("IndivisibleError")
    if case.policy.indivisible in (Indivisible.REPLICATE, Indivisible.DROP):
        return ()
    prefixes = itertools.accumulate(
        ([name] for name in distinct), lambda value, other: value + other, initial=[]
    )
    return tuple(max((prefix for prefix in prefixes if size % shards(case, prefix) == 0), key=len))


def rules_of(case: Case, dim: Any, role: str) -> list[str]:
    """Return the rules of a dim's axes; of a composite, none of which may be open."""
    members = dim if isinstance(dim, tuple) else (dim,)
    texts = [
        text
        for axis in members
        if axis != EMPTY and (text := rule_of(case, axis, role)) is not None
    ]
    if len(members) > 1 and any(split(text)[1] == OPEN for text in texts):
        raise RefusedError("StrategyError")
    return texts


def answer(case: Case) -> list[Entry]:
    """Return the mesh axes of every dim.

    Raises:
      RefusedError: the request has no answer.
    """
    assert case.shape is not None
    role = "activation" if case.role == "activation" else "param"
    stored: list[Entry] = []
    used: set[str] = set()
    for dim, size in zip(case.axes, case.shape, strict=True):
        texts = rules_of(case, dim, role)
        entry: Entry = candidate_of(case, texts, size, used) if texts else ()
        if entry == OPEN and role == "param":
            raise RefusedError("StrategyError")
        used.update(() if entry == OPEN else entry)
        stored.append(entry)
    return (
        [gathered(case, dim, entry) for dim, entry in zip(case.axes, stored, strict=True)]
        if case.role == "use"
        else stored
    )


def gathered(case: Case, dim: Any, entry: Entry) -> Entry:
    """Return a stored dim where it is used: without what is gathered and its activation rule does
    not name.
    """
    members = dim if isinstance(dim, tuple) else (dim,)
    texts = [rule_of(case, axis, "activation") or "" for axis in members]
    named = {name.strip() for text in texts for part in text.split("|") for name in part.split("+")}
    return tuple(name for name in entry if name in named or name not in case.policy.gather)
