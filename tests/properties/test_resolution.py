"""Laws of resolution over generated rules, shapes, meshes, modes, roles and policies."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.resolution.decisions import Outcome, Reason, Resolution
from shardwright.resolution.partition_specs import canonical_spec
from shardwright.resolution.resolver import explain, resolve
from shardwright.resolution.rules import Conflict, Indivisible, Missing
from tests.properties import cases, oracle
from tests.properties.cases import Case


def answer(case: Case) -> Resolution:
    return explain(case.axes, case.rules, case.mesh, **case.asked)


def entries(spec: P) -> list[tuple[str, ...]]:
    """The mesh axes of each entry; none for None and UNCONSTRAINED."""
    named = [
        () if entry is None or entry is P.UNCONSTRAINED else entry for entry in spec.partitions
    ]
    return [(entry,) if isinstance(entry, str) else entry for entry in named]


def spec_entry(names: tuple[str, ...]) -> Any:
    """The entry of a spec for some mesh axes."""
    if not names:
        return None
    return names[0] if len(names) == 1 else names


def outcome(case: Case) -> Any:
    """The spec, or the class of the error."""
    actual = answer(case)
    return actual.problems[0].error.__name__ if actual.problems else actual.spec


def oracles_outcome(case: Case) -> Any:
    try:
        dims = oracle.answer(case)
    except oracle.RefusedError as refused:
        return str(refused)
    spec_entries = [
        P.UNCONSTRAINED if entry == oracle.OPEN else spec_entry(entry) for entry in dims
    ]
    while spec_entries and spec_entries[-1] is None:
        spec_entries.pop()
    return P(*spec_entries)


@settings(max_examples=200)
@given(cases.cases(composites=True))
def test_answer_equals_oracle(case: Case) -> None:
    assert outcome(case) == oracles_outcome(case)


@pytest.mark.full
@settings(settings.get_profile("thorough"), max_examples=20_000)
@given(cases.cases(composites=True))
def test_many_answers_equal_oracle(case: Case) -> None:
    assert outcome(case) == oracles_outcome(case)


@settings(max_examples=150)
@given(cases.cases(composites=True, shaped=False))
def test_a_spec_is_canonical_and_even(case: Case) -> None:
    spec = answer(case).spec
    if spec is None:
        return
    dims = entries(spec)
    flat = [name for names in dims for name in names]
    assert len(flat) == len({*flat})
    assert all(case.mesh[name] > 1 for name in flat)
    assert not spec.partitions or spec.partitions[-1] is not None
    assert not any(isinstance(entry, tuple) and len(entry) < 2 for entry in spec.partitions)
    assert all(type(name) is str for name in flat)
    assert len(dims) <= len(case.axes)
    if case.shape is not None:
        assert all(
            size % math.prod(case.mesh[name] for name in names) == 0
            for size, names in zip(case.shape, dims, strict=False)
        )


@given(cases.cases(composites=True))
def test_jax_accepts_every_spec_as_even(case: Case) -> None:
    spec = answer(case).spec
    if spec is None or P.UNCONSTRAINED in spec.partitions or case.shape is None:
        return
    mesh = AbstractMesh(
        tuple(case.mesh.values()), tuple(case.mesh), axis_types=(AxisType.Auto,) * len(case.mesh)
    )
    local = NamedSharding(mesh, spec).shard_shape(case.shape)
    assert [
        size * math.prod(case.mesh[name] for name in names)
        for size, names in zip(local, entries(spec), strict=False)
    ] == [*case.shape[: len(entries(spec))]]


@given(cases.cases(composites=True, shaped=False))
def test_explain_agrees_with_resolve(case: Case) -> None:
    rules = case.rules
    resolution = explain(case.axes, rules, case.mesh, **case.asked)
    if resolution.problems:
        with pytest.raises(sw.ShardingError, match=r".") as caught:
            resolve(case.axes, rules, case.mesh, **case.asked)
        assert type(caught.value) is resolution.problems[0].error
        assert caught.value.problems == resolution.problems
        assert caught.value.resolution is resolution
        assert resolution.spec is None
        return
    resolved = resolve(case.axes, rules, case.mesh, **case.asked)
    assert resolved is resolution
    assert resolution.spec == canonical_spec(decision.entry for decision in resolution.decisions)
    assert spec_from_json(json.loads(json.dumps(resolution.to_json()))) == resolution.spec
    assert str(resolution).splitlines()[0].endswith(f"  ->  {text_of(resolution.spec)}")


def spec_from_json(data: dict[str, Any]) -> P:
    """Read the spec back from the decisions that were written out, not from the spec."""
    values: list[Any] = []
    for dim in data["dims"]:
        names = [name for name in dim["mesh_axes"] if name not in dim["manual"]]
        is_open = dim["outcome"] == "unconstrained"
        values.append(P.UNCONSTRAINED if is_open else spec_entry(tuple(names)))
    while values and values[-1] is None:
        values.pop()
    return P(*values)


def text_of(spec: P) -> str:
    return (
        "P("
        + ", ".join(
            "UNCONSTRAINED" if entry is P.UNCONSTRAINED else repr(entry)
            for entry in spec.partitions
        )
        + ")"
    )


# The reason that a policy acts on is recorded.
BY_POLICY = {
    Outcome.POLICY_PREFIX: Reason.INDIVISIBLE,
    Outcome.POLICY_REPLICATE: Reason.INDIVISIBLE,
    Outcome.POLICY_DROP: Reason.INDIVISIBLE,
    Outcome.POLICY_FIRST_DIM: Reason.TAKEN,
    Outcome.POLICY_MISSING: Reason.MISSING,
}


@given(cases.cases(composites=True, shaped=False))
def test_every_decision_says_why(case: Case) -> None:
    actual = answer(case)
    for decision in actual.decisions:
        if decision.outcome is Outcome.FAILED:
            assert decision.dim in {problem.dim for problem in actual.problems}
        if decision.outcome not in (Outcome.EMPTY, Outcome.NO_RULE, Outcome.FAILED):
            assert decision.rule is not None
        if not decision.mesh_axes and not decision.gathered:
            assert decision.why != "first candidate fits"
        if decision.outcome in BY_POLICY:
            assert BY_POLICY[decision.outcome] in {skip.reason for skip in decision.skipped}
        written = {name for skip in decision.skipped for name in skip.candidate}
        assert written <= {*cases.MESH_AXES}


@given(cases.cases(composites=True, shaped=False))
def test_answers_are_cached(
    case: Case,
) -> None:
    rules = case.rules
    resolution = explain(case.axes, rules, case.mesh, **case.asked)
    assert explain(list(case.axes), rules, [*case.mesh.items()], **case.asked) is resolution
    assert explain(case.axes, case.rules, case.mesh, **case.asked) == resolution
    assert case.rules == rules
    assert hash(case.rules) == hash(rules)


@given(cases.cases(composites=True))
def test_a_spec_resolves_to_itself(case: Case) -> None:
    spec = answer(case).spec
    if spec is None:
        return
    rules = dataclasses.replace(case, policy=sw.Policy()).rules
    assert resolve(spec, rules, case.mesh, role="activation", shape=case.shape).spec == spec


@given(cases.cases(composites=True, shaped=False), st.randoms(use_true_random=False))
def test_order_of_tables_and_mesh_is_irrelevant(case: Case, random: Any) -> None:
    def shuffled(mapping: dict[str, Any]) -> dict[str, Any]:
        keys = [*mapping]
        random.shuffle(keys)
        return {key: mapping[key] for key in keys}

    tables = {name: shuffled(table) for name, table in shuffled(case.tables).items()}
    assert outcome(dataclasses.replace(case, tables=tables, mesh=shuffled(case.mesh))) == outcome(
        case
    )


@given(cases.cases(composites=True, shaped=False), st.sampled_from(cases.MESH_AXES))
def test_mesh_axis_of_size_one_equals_absent(case: Case, name: str) -> None:
    policy = dataclasses.replace(case.policy, missing=Missing.SKIP)
    without = {axis: size for axis, size in case.mesh.items() if axis != name}
    first, other = (
        dataclasses.replace(case, mesh=mesh, policy=policy)
        for mesh in ({**without, name: 1}, without)
    )
    assert outcome(first) == outcome(other)


@given(cases.cases(composites=True))
def test_unnamed_mesh_axis_changes_nothing(case: Case) -> None:
    assert outcome(dataclasses.replace(case, mesh={**case.mesh, "unnamed": 2})) == outcome(case)


@given(cases.cases(composites=True, shaped=False))
@example(
    Case(
        tables={"rules": {sw.BATCH: "dp | fsdp"}},
        mesh={"dp": 2},
        policy=sw.Policy(missing=Missing.REPLICATE),
        axes=(sw.BATCH,),
        shape=None,
        mode="train",
        role="activation",
    )
)
def test_answer_without_a_shape(case: Case) -> None:
    unshaped = answer(dataclasses.replace(case, shape=None))
    if unshaped.spec is None:
        return
    everything = 48 * math.prod(case.mesh.values())
    shaped = answer(dataclasses.replace(case, shape=(everything,) * len(case.axes)))
    assert shaped.spec == unshaped.spec
    if case.shape is not None:
        assert outcome(case) in (unshaped.spec, "IndivisibleError")


class TestChains:
    """What happens to an answer when a rule, or a size, changes."""

    @given(cases.cases(max_dims=1))
    def test_fallback_replaces_only_refusals(self, case: Case) -> None:
        case = dataclasses.replace(case, policy=sw.Policy())
        before = outcome(case)
        after = outcome(
            case.with_tables(lambda text: text if text.endswith(("-", "?")) else f"{text} | -")
        )
        assert after == (P() if before in ("IndivisibleError", "AxisConflictError") else before)

    @given(cases.cases(), cases.candidates())
    def test_appended_candidate_keeps_choices(self, case: Case, more: str) -> None:
        case = dataclasses.replace(case, policy=sw.Policy())
        before = answer(case)
        after = answer(
            case.with_tables(lambda text: text if text.endswith(("-", "?")) else f"{text} | {more}")
        )
        for decision, other in zip(before.decisions, after.decisions, strict=True):
            if decision.outcome is not Outcome.CHOSEN and decision.mesh_axes != other.mesh_axes:
                return  # From here on other mesh axes are free.
            assert other.mesh_axes == decision.mesh_axes or case.role == "use"

    @given(cases.cases(max_dims=1), st.integers(2, 6))
    def test_multiple_of_a_size_still_fits(self, case: Case, factor: int) -> None:
        case = dataclasses.replace(case, policy=sw.Policy())
        larger = dataclasses.replace(case, shape=tuple(size * factor for size in case.shape or ()))
        for decision, other in zip(answer(case).decisions, answer(larger).decisions, strict=True):
            if decision.outcome is Outcome.CHOSEN:
                assert other.outcome is Outcome.CHOSEN
                assert len(other.skipped) <= len(decision.skipped)

    @given(cases.cases(composites=True))
    def test_a_repeated_candidate_changes_nothing(self, case: Case) -> None:
        doubled = case.with_tables(
            lambda text: (
                text
                if "|" not in text or text.startswith("-")
                else f"{text.split('|')[0]} | {text}"
            )
        )
        assert outcome(doubled) == outcome(case)

    @given(cases.cases(composites=True))
    def test_lenient_policy_keeps_strict_answers(self, case: Case) -> None:
        strict = dataclasses.replace(case, policy=sw.Policy(gather=case.policy.gather))
        if answer(strict).spec is None:
            return
        for indivisible in Indivisible:
            for conflict in (Conflict.ERROR, Conflict.FIRST_DIM):
                policy = sw.Policy(
                    indivisible=indivisible, conflict=conflict, gather=case.policy.gather
                )
                assert outcome(dataclasses.replace(case, policy=policy)) == outcome(strict)

    @given(cases.cases(composites=True))
    def test_lenient_policies_refuse_nothing(self, case: Case) -> None:
        for indivisible in (Indivisible.PREFIX, Indivisible.REPLICATE):
            policy = sw.Policy(indivisible=indivisible, conflict=Conflict.FIRST_DIM)
            actual = answer(dataclasses.replace(case, policy=policy))
            assert {problem.error for problem in actual.problems} <= {sw.StrategyError}

    @given(cases.cases(composites=True, max_dims=1))
    def test_prefix_shards_no_less_than_replicate(self, case: Case) -> None:
        prefix, replicate = (
            answer(
                dataclasses.replace(
                    case, policy=sw.Policy(indivisible=kind, conflict=Conflict.FIRST_DIM)
                )
            )
            for kind in (Indivisible.PREFIX, Indivisible.REPLICATE)
        )
        for decision, other in zip(prefix.decisions, replicate.decisions, strict=True):
            assert {*other.mesh_axes} <= {*decision.mesh_axes}


class TestUse:
    @given(cases.cases(composites=True))
    def test_use_is_stored_without_gathered_axes(self, case: Case) -> None:
        stored = answer(dataclasses.replace(case, role="param"))
        used = answer(dataclasses.replace(case, role="use"))
        assert [problem.error for problem in used.problems] == [
            problem.error for problem in stored.problems
        ]
        for decision, other in zip(stored.decisions, used.decisions, strict=True):
            assert {*other.gathered} <= {*case.policy.gather}
            assert (
                tuple(name for name in decision.mesh_axes if name not in other.gathered)
                == other.mesh_axes
            )
            assert {*other.gathered} <= {*decision.mesh_axes}

    @given(cases.cases(composites=True))
    def test_use_equals_stored_without_gather(self, case: Case) -> None:
        policy = dataclasses.replace(case.policy, gather=())
        stored, used = (
            outcome(dataclasses.replace(case, role=role, policy=policy))
            for role in ("param", "use")
        )
        assert stored == used


class TestManual:
    @given(cases.cases(composites=True), st.sets(st.sampled_from(cases.MESH_AXES)))
    def test_local_sizes_resolve_like_global_ones_outside(
        self, case: Case, manual: set[str]
    ) -> None:
        # One candidate per rule: with more, a smaller local size may pick another one.
        case = dataclasses.replace(case, policy=sw.Policy(gather=case.policy.gather)).with_tables(
            lambda text: text.split("|")[0].strip()
        )
        rules = case.rules
        outside = explain(case.axes, rules, case.mesh, **case.asked)
        if outside.spec is None:
            return
        held = frozenset(manual) & frozenset(case.mesh)
        stored = (
            explain(case.axes, rules, case.mesh, **{**case.asked, "role": "param"})
            if case.role == "use"
            else outside
        )
        shape = tuple(
            size // math.prod(case.mesh[name] for name in decision.mesh_axes if name in held)
            for size, decision in zip(case.shape or (), stored.decisions, strict=True)
        )
        inside = explain(case.axes, rules, case.mesh, **{**case.asked, "shape": shape}, manual=held)
        assert inside.spec is not None
        assert [decision.mesh_axes for decision in inside.decisions] == [
            decision.mesh_axes for decision in outside.decisions
        ]
        assert not {name for names in entries(inside.spec) for name in names} & held
