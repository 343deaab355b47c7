"""`policy.order = "rules"`, compared with a reference that is written from the design."""

from __future__ import annotations

import dataclasses
import math
from random import Random
from typing import Any

from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.resolution.resolver import explain
from shardwright.resolution.rules import (
    AxisRules,
    Conflict,
    Indivisible,
    Missing,
    Order,
    Policy,
    TensorRules,
    build_rules,
    parse_rule,
)
from tests.raising import raises
from tests.resolving import B, E, H, L, M, V, make_rules, spec

RULES = Policy(order=Order.RULES)
NEXT = Policy(order=Order.RULES, conflict=Conflict.NEXT)
MESH_AXES = ("dp", "fsdp", "sp", "tp")
AXES = (B, L, E, M)
Pieces = list[tuple[str, str]]


class RefusedError(Exception):
    """The class of the problem, as text."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request. Tables are pieces (axis, candidate), in the order in which they are written."""

    tables: dict[str, Pieces]
    tensors: Pieces
    mesh: dict[str, int]
    policy: Policy
    axes: tuple[Any, ...]
    shape: tuple[int, ...]
    role: str

    def compiled(self) -> AxisRules:
        tables, orders = {}, {}
        for name, pieces in self.tables.items():
            chains: dict[str, list[str]] = {}
            for axis, text in pieces:
                chains.setdefault(axis, []).append(text)
            tables[name] = {axis: parse_rule(" | ".join(texts)) for axis, texts in chains.items()}
            orders[name] = [axis for axis, text in pieces if text != "-" or chains[axis] == ["-"]]
        entries = [
            TensorRules(match="w", rules=((axis, parse_rule(text)),)) for axis, text in self.tensors
        ]
        return build_rules(tables, tensors=entries, policy=self.policy, orders=orders)


def all_tries(case: Case) -> dict[int, list[tuple[Any, tuple[str, ...]]]]:
    """Return rank and mesh axes of every candidate of every dim."""
    names = ["modes.train.params", "params", "rules"]
    levels = [[piece] for piece in case.tensors] + [case.tables[name] for name in names]
    if case.role == "activation":
        levels = [case.tables["rules"]]
    tries: dict[int, list[tuple[Any, tuple[str, ...]]]] = {}
    for position, dim in enumerate(case.axes):
        chains, written = [], []
        for axis in dim if isinstance(dim, tuple) else (dim,):
            own = next(
                (
                    [((at, line), text) for line, (name, text) in enumerate(level) if name == axis]
                    for at, level in enumerate(levels)
                    if axis in dict(level)
                ),
                [],
            )
            # An absent mesh axis leaves its candidate, an emptied candidate is not tried.
            chain = [
                (rank, tuple(name for name in text.split("+") if name in case.mesh))
                for rank, text in own
            ]
            kept = [(rank, live) for rank, live in chain if live]
            written += [rank for rank, _ in own]
            if isinstance(dim, tuple):
                kept = list({live: (rank, live) for rank, live in reversed(kept)}.values())[::-1]
                kept.sort()
            if (own and own[-1][1] == "-") or not kept:
                kept = [*kept, (None, ())]
            chains.append(kept)
        if not isinstance(dim, tuple):
            tries[position] = chains[0]
            continue
        lowest = min(written, default=None)
        tries[position] = [(lowest, item + two) for _, item in chains[0] for _, two in chains[1]]
    return tries


def shards(case: Case, live: Any) -> int:
    return math.prod(case.mesh[name] for name in live)


def by_policy(
    case: Case, live: tuple[str, ...], size: int, taken: set[str]
) -> tuple[str, ...] | str:
    """Return what the policy makes of a candidate; a text if it is an error."""
    policy = case.policy
    free = [n for at, n in enumerate(live) if n not in taken and n not in live[:at]]
    is_dropped = policy.indivisible is Indivisible.DROP and size % shards(case, live) != 0
    if tuple(free) != live and not is_dropped:
        if policy.conflict is Conflict.NEXT:
            return ()
        if policy.conflict is Conflict.ERROR:
            return "AxisConflictError"
        if size % shards(case, free) == 0:
            return tuple(free)
        live = tuple(free)
    if policy.indivisible is Indivisible.ERROR:
        return "IndivisibleError"
    if policy.indivisible is Indivisible.PREFIX:
        return [live[:end] for end in range(len(live)) if size % shards(case, live[:end]) == 0][-1]
    return ()


def reference(case: Case) -> list[tuple[str, ...]]:
    """Return the mesh axes of every dim, by the words of the design."""
    tries = all_tries(case)
    policy = case.policy
    taken: set[str] = set()
    result: dict[int, tuple[str, ...]] = {}
    refused: dict[int, str] = {}

    def settle(position: int, live: tuple[str, ...] | str) -> None:
        if isinstance(live, str):
            refused[position] = live
        result[position] = () if isinstance(live, str) else live
        taken.update(result[position])

    events = sorted(
        (rank, position, at)
        for position, chain in tries.items()
        for at, (rank, live) in enumerate(chain)
        if rank is not None and live
    )
    last = {position: at for _, position, at in sorted(events, key=lambda event: event[2])}
    first_failure: dict[int, tuple[str, ...]] = {}
    for _, position, at in events:
        if position in result:
            continue
        live, size = tries[position][at][1], case.shape[position]
        is_free = not taken & {*live} and len({*live}) == len(live)
        divides = size % shards(case, live) == 0
        first_failure.setdefault(position, live)
        if is_free and divides:
            settle(position, live)
        elif policy.conflict is Conflict.NEXT and (
            is_free or (policy.indivisible is Indivisible.DROP and not divides)
        ):
            settle(position, by_policy(case, live, size, taken))
        elif at == last[position]:
            if tries[position][-1][1] == ():
                settle(position, ())
            else:
                settle(position, by_policy(case, first_failure[position], size, taken))
    if refused:
        raise RefusedError(refused[min(refused)])
    return [
        tuple(name for name in result.get(position, ()) if case.mesh[name] > 1)
        for position in range(len(case.axes))
    ]


def random_case(random: Random) -> Case:
    def pieces(most: int) -> Pieces:
        values: Pieces = []
        for _ in range(random.randrange(most)):
            axis = random.choice(AXES)
            if (axis, "-") not in values:
                names = random.sample(MESH_AXES, random.choice((1, 1, 1, 2)))
                values.append((axis, random.choice(("+".join(names),) * 6 + ("-",))))
        return values

    axes: list[Any] = random.sample(AXES, random.randrange(1, 5))
    if len(axes) > 2 and not random.randrange(4):
        axes = [(axes[0], axes[1]), *axes[2:]]
    mesh = {name: random.choice((1, 2, 2, 4)) for name in MESH_AXES if random.randrange(6)}
    return Case(
        tables={"rules": pieces(9), "params": pieces(4), "modes.train.params": pieces(3)},
        tensors=pieces(3),
        mesh=mesh,
        policy=Policy(
            order=Order.RULES,
            conflict=random.choice((*Conflict, Conflict.NEXT)),
            indivisible=random.choice((*Indivisible, Indivisible.ERROR)),
        ),
        axes=tuple(axes),
        shape=tuple(random.choice((1, 2, 4, 4, 8, 8, 16, 32)) for _ in axes),
        role=random.choice(("activation", "param")),
    )


def answer(case: Case) -> Any:
    resolution = explain(
        case.axes, case.compiled(), case.mesh, shape=case.shape, role=case.role, path="w"
    )
    if resolution.problems:
        return resolution.problems[0].error.__name__
    return [decision.mesh_axes for decision in resolution.decisions]


def test_equals_the_reference() -> None:
    random, different, refused = Random(0), [], 0
    for _ in range(2500):
        case = random_case(random)
        try:
            expected: Any = reference(case)
        except RefusedError as error:
            expected = str(error)
            refused += 1
        actual = answer(case)
        if actual != expected:
            different.append((case, expected, actual))
    assert not different, (len(different), different[0])
    assert 200 < refused < 1500


MESH = {"dp": 2, "tp": 2, "sp": 1}


def test_earlier_rule_decides_first() -> None:
    rules = make_rules(NEXT, rules={M: "tp", E: "dp", V: "tp | dp"})
    resolution = explain((V, E, M), rules, MESH, shape=(4, 4, 4))
    assert resolution.spec == P(None, "dp", "tp")
    assert resolution.decisions[0].why == (
        "tp: tp is taken by dim 2 MLP_INTERMEDIATE; dp: dp is taken by dim 1 EMBED; "
        'policy conflict = "next": replicated'
    )
    in_dims = dataclasses.replace(NEXT, order=Order.DIMS)
    by_dim = make_rules(in_dims, rules={M: "tp", E: "dp", V: "tp | dp"})
    assert spec((V, E, M), by_dim, MESH, shape=(4, 4, 4)) == P("tp", "dp")


def test_mesh_axis_of_size_one_is_taken() -> None:
    rules = make_rules(NEXT, rules={E: "sp", M: "sp | tp", H: "sp+dp"})
    resolution = explain((M, E, H), rules, MESH, shape=(4, 3, 4))
    assert [decision.why for decision in resolution.decisions] == [
        "sp: sp is taken by dim 1 EMBED",
        "sp has size 1; no mesh axis left: replicated",
        'sp+dp: sp is taken by dim 1 EMBED; policy conflict = "next": replicated',
    ]
    assert resolution.spec == P("tp")
    alone = explain((H,), rules, MESH, shape=(4,))
    assert alone.spec == P("dp")
    assert alone.decisions[0].why == "sp has size 1"


def test_tensors_first_and_defaults_last() -> None:
    rules = make_rules(
        NEXT,
        rules={E: "tp", M: "tp"},
        params={V: "tp"},
        tensors=[("w", {H: "tp"}), ("w", {L: "tp"})],
    )
    for annotation, path, expected in (
        ((E, H), "w", P(None, "tp")),
        ((L, H), "w", P(None, "tp")),
        ((E, V), "w", P(None, "tp")),
        ((M, E), "w", P(None, "tp")),
        ((sw.TENSOR_PARALLEL, E), "w", P(None, "tp")),
        ((E, H), "v", P("tp")),
    ):
        assert spec(annotation, rules, MESH, role="param", path=path, shape=(4, 4)) == expected


def test_without_shape_in_rule_order() -> None:
    assert spec((M, E), make_rules(NEXT, rules={E: "tp | dp", M: "tp | dp"}), MESH) == P("dp", "tp")
    with raises(sw.ShapeRequiredError, "depends", dim=1, axis="EMBED"):
        spec((M, E), make_rules(RULES, rules={E: "tp | dp", M: "-"}), MESH)


def test_absent_mesh_axis_needs_no_shape() -> None:
    policy = dataclasses.replace(RULES, missing=Missing.REPLICATE)
    for order in Order:
        rules = make_rules(dataclasses.replace(policy, order=order), rules={E: "ep+tp | -"})
        assert spec((E,), rules, MESH) == P(), order
    later = make_rules(policy, rules={E: "tp | ep | -"})
    with raises(sw.ShapeRequiredError, "depends", dim=0, axis="EMBED"):
        spec((E,), later, MESH)


def test_replicated_member_gives_a_composite_its_place() -> None:
    tables = [{B: "-", E: "dp", L: "dp"}, {E: "dp", B: "-", L: "dp"}]
    specs = [
        spec((E, (B, L)), make_rules(NEXT, rules=table), MESH, shape=(4, 4)) for table in tables
    ]
    assert specs == [P(None, "dp"), P("dp")]
    entries = [("w", {B: "-"}), ("w", {E: "dp"}), ("w", {L: "dp"})]
    by_path = make_rules(NEXT, tensors=entries)
    assert spec((E, (B, L)), by_path, MESH, role="param", path="w", shape=(4, 4)) == P(None, "dp")
    strategy = sw.Strategy(
        mesh={"dp": 2},
        rules=[{"batch": "-"}, {"embed": "dp"}, {"length": "dp"}],
        policy={"order": "rules", "conflict": "next"},
    )
    assert spec((E, (B, L)), strategy.compile(), {"dp": 2}, shape=(4, 4)) == P(None, "dp")


def test_symbolic_size_in_rule_order() -> None:
    from jax import export

    (size,) = export.symbolic_shape("8*b")
    (open_size,) = export.symbolic_shape("b")
    rules = make_rules(RULES, rules={E: "tp | -", M: "dp"})
    assert spec((M, E), rules, MESH, shape=(4, size)) == P("dp", "tp")
    with raises(sw.ShapeRequiredError, "candidate", "applies", dim=1, axis="EMBED"):
        spec((M, E), rules, MESH, shape=(4, open_size))


def test_problems_are_in_the_order_of_dims() -> None:
    rules = make_rules(RULES, rules={E: "tp", M: "dp", H: "tp"})
    problems = explain(("mine", H, M, E), rules, MESH, shape=(4, 4, 3, 4)).problems
    assert [problem.dim for problem in problems] == [0, 1, 2]


def test_merged_dim_in_rule_order() -> None:
    rules = make_rules(NEXT, rules={H: "tp", E: "tp | dp"})
    annotation = (E, sw.merged((H, 4), (sw.HEAD_DIM, 8)))
    assert spec(annotation, rules, MESH, shape=(4, 32)) == P("dp", "tp")


def test_order_is_part_of_equality_only_in_rule_order() -> None:
    first, other = {E: "tp", M: "dp | tp"}, {M: "dp | tp", E: "tp"}
    assert make_rules(rules=first) == make_rules(rules=other)
    assert make_rules(NEXT, rules=first) != make_rules(NEXT, rules=other)
    assert (
        make_rules(NEXT, rules=first).fingerprint() != make_rules(NEXT, rules=other).fingerprint()
    )
    replicated = make_rules(NEXT, rules={V: "-", **first})
    assert replicated.order[0] == (V, *make_rules(NEXT, rules=first).order[0])
    assert hash(make_rules(NEXT, rules=first)) == hash(make_rules(NEXT, rules=dict(first)))


def test_rules_without_an_order() -> None:
    rules = make_rules(rules={E: "tp"})
    with raises(sw.StrategyError, "order", "rules", fix="build_rules"):
        dataclasses.replace(rules, policy=NEXT)
