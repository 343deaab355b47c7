"""Generated requests: rules in every table, meshes, annotations, shapes, policies. One description
for hypothesis and for `random`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from hypothesis import strategies as st

import shardwright as sw
from shardwright.resolution.rules import (
    AxisRules,
    Conflict,
    Indivisible,
    Missing,
    Policy,
    build_rules,
    parse_rule,
)
from shardwright.vocabulary.axes import SEMANTIC_AXES

MESH_AXES = ("dp", "fsdp", "sp", "ep", "tp", "model")
AXES = SEMANTIC_AXES[:8]
TABLES = (
    "rules",
    "params",
    "modes.train",
    "modes.prefill",
    "modes.decode",
    "modes.insert",
    "modes.decode.params",
    "modes.insert.params",
)
MODES = ("train", "prefill", "decode", "insert")
ROLES = ("activation", "param", "use")

Tables = dict[str, dict[str, str]]
Choose = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request, as plain data: the tables are rules as text."""

    tables: Tables
    mesh: dict[str, int]
    policy: Policy
    axes: tuple[Any, ...]
    shape: tuple[int, ...] | None
    mode: str
    role: str

    @property
    def rules(self) -> AxisRules:
        """Fresh rules, with an empty cache."""
        parsed = {
            name: {axis: parse_rule(text) for axis, text in table.items()}
            for name, table in self.tables.items()
        }
        return build_rules(parsed, policy=self.policy)

    @property
    def asked(self) -> dict[str, Any]:
        """The keywords of `resolve`."""
        return {"mode": self.mode, "role": self.role, "shape": self.shape}

    def with_tables(self, change: Callable[[str], str]) -> Case:
        """Return the case with every rule changed."""
        tables = {
            name: {axis: change(text) for axis, text in table.items()}
            for name, table in self.tables.items()
        }
        return dataclasses.replace(self, tables=tables)


def _pool() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Every candidate of one or two mesh axes and some of three; rules of one, two and three of
    them. Simple ones first.
    """
    pairs = ["+".join(pair) for pair in itertools.permutations(MESH_AXES, 2)]
    triples = ["+".join(triple) for triple in itertools.permutations(MESH_AXES, 3)][::7]
    single = (*MESH_AXES, *pairs, *triples)
    random = Random(0)
    chains = [
        " | ".join(random.choices(single, k=count)) for count in (2, 2, 2, 3) for _ in range(40)
    ]
    return single, ("-", *single, *chains, *(f"{text} | -" for text in (*single, *chains)))


CANDIDATES, PARAMETER_RULES = _pool()
RULES = (
    *PARAMETER_RULES,
    "?",
    *(f"{text[:-1]}?" for text in PARAMETER_RULES if text.endswith("| -")),
)
MESHES = tuple(
    dict(zip(names, sizes, strict=True))
    for count in (1, 2, 3, 4, 6)
    for at, names in enumerate(itertools.permutations(MESH_AXES, count))
    if at % (1, 2, 7, 23, 61)[(1, 2, 3, 4, 6).index(count)] == 0
    for sizes in ((2,) * count, (1, 2, 3, 4, 2, 2)[:count], (4, 2, 1, 2, 3, 2)[:count])
)
POLICIES = tuple(
    Policy(indivisible=indivisible, conflict=conflict, missing=missing, gather=gather)
    for missing in Missing
    for conflict in Conflict
    for indivisible in Indivisible
    for gather in ((), ("fsdp", "sp"), ("tp",), MESH_AXES)
)
SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 48, 64)


def candidates() -> st.SearchStrategy[str]:
    """One candidate."""
    return st.sampled_from(CANDIDATES)


@st.composite
def tables(draw: Choose, axes: Sequence[str]) -> Tables:
    """A rule in `[rules]` for most axes, and some in the other tables."""
    drawn: Tables = {name: {} for name in TABLES}
    for axis in axes:
        if draw(st.integers(0, 7)):
            drawn["rules"][axis] = draw(st.sampled_from(RULES))
    for _ in range(draw(st.integers(0, 4)) if axes else 0):
        name = draw(st.sampled_from(TABLES[1:]))
        drawn[name][draw(st.sampled_from(axes))] = draw(
            st.sampled_from(PARAMETER_RULES if "params" in name else RULES)
        )
    return drawn


def policies() -> st.SearchStrategy[Policy]:
    """Every policy; the strict one every other time."""
    return st.one_of(st.just(Policy()), st.sampled_from(POLICIES))


def annotated(dims: Sequence[Any]) -> list[str]:
    """Return the axes of an annotation."""
    return [
        axis
        for dim in dims
        for axis in (dim if isinstance(dim, tuple) else (dim,))
        if axis != sw.EMPTY
    ]


@st.composite
def annotations(draw: Choose, *, composites: bool = False) -> tuple[Any, ...]:
    """Axes, rarely one of them twice, with EMPTY between them; optionally some in one dim."""
    axes = list(AXES[: draw(st.integers(0, 4))])
    if axes and draw(st.integers(0, 7)) == 7:
        axes.insert(draw(st.integers(0, len(axes))), draw(st.sampled_from(axes)))
    dims: list[Any] = []
    while axes:
        if composites and len(axes) > 1 and draw(st.integers(0, 3)) == 3:
            count = draw(st.integers(2, min(3, len(axes))))
            dims.append(tuple(axes[:count]))
            del axes[:count]
        else:
            dims.append(axes.pop(0))
    if draw(st.integers(0, 3)) == 3:
        dims.insert(draw(st.integers(0, len(dims))), sw.EMPTY)
    return tuple(dims)


@st.composite
def cases(
    draw: Choose, *, composites: bool = False, shaped: bool = True, max_dims: int = 9
) -> Case:
    """A whole request; without a shape every other time unless `shaped`."""
    axes = draw(annotations(composites=composites))[:max_dims]
    shape = tuple(draw(st.sampled_from(SIZES)) for _ in axes)
    return Case(
        tables=draw(tables(annotated(axes))),
        mesh=draw(st.sampled_from(MESHES)),
        policy=draw(policies()),
        axes=axes,
        shape=shape if shaped or draw(st.booleans()) else None,
        mode=draw(st.sampled_from(MODES)),
        role=draw(st.sampled_from(ROLES)),
    )
