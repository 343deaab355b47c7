"""Decide one dim. Divisibility, conflicts and fallbacks are decided here, and nowhere else in the
project.

Dims are decided from left to right. (For `policy.order = "rules"` see `rule_order`.)

1. Find the rule of the dim's axis, by mode, role and path (`rule_for`). A composite, which is a dim
   over several axes, has the rules of all of them.
2. Take the first candidate whose mesh axes are free and whose shard count divides the dim
   (`attempt`).
3. If none fits, apply the rule's own fallback, then the policy (`fall_back`).
4. For the role `use`, drop the mesh axes over which the weight is gathered (`gathered`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from shardwright import _jax
from shardwright.errors import (
    AxisConflictError,
    IndivisibleError,
    MissingMeshAxisError,
    NewValue,
    Problem,
    ShapeRequiredError,
    ShardingError,
    StrategyError,
)
from shardwright.resolution.attempts import Attempts, Chain, Failure, PendingDecision
from shardwright.resolution.composites import Composite, TriedCandidate, make_composite, reduced
from shardwright.resolution.decisions import (
    DimDecision,
    Outcome,
    Reason,
    RuleRef,
    Skip,
    rule_text,
)
from shardwright.resolution.rules import (
    AxisRules,
    Conflict,
    Fallback,
    Indivisible,
    Missing,
    Rule,
    default_rule,
)
from shardwright.resolution.unknown_axes import missing_entry_fix, unknown_axis
from shardwright.vocabulary.axes import EXPERT, LAYERS, Role, axis_label
from shardwright.vocabulary.lowering import Dim

_ROUTER = "router weights and logits end in EXPERT_GATE: write it in place of EXPERT, or EMPTY here"


@dataclasses.dataclass(slots=True, kw_only=True)
class Decider:
    """Decides the dims of one request, one after the other.

    Attributes:
      rules: Compiled rules.
      sizes: Size of each mesh axis.
      mode: Canonical mode.
      role: Role of the array.
      shape: Sizes, local along the mesh axes in `manual`; None if unknown.
      path: Path of the tensor, or None.
      manual: Mesh axes that an enclosing `shard_map` has already applied.
      taken: Mesh axis -> position and label of the dim that holds it.
      problems: The problems so far.
      by_semantic_axis: Positions of dims whose rule is that of the axis `Dim.semantic_axis`.
      min_size: Size of the smallest mesh axis that a dim can be sharded over. By default 2, because
        a mesh axis of size 1 shards nothing.
    """

    rules: AxisRules
    sizes: Mapping[str, int]
    mode: str
    role: Role
    shape: tuple[int, ...] | None
    path: str | None
    manual: frozenset[str]
    taken: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    problems: list[Problem] = dataclasses.field(default_factory=list)
    by_semantic_axis: set[int] = dataclasses.field(default_factory=set)
    min_size: int = 2

    def decide(self, position: int, dim: Dim) -> DimDecision:
        """Decide one dim, and record its mesh axes as taken."""
        size = None if self.shape is None else self.shape[position]
        pending = PendingDecision(
            dim=position, label=dim.label, size=dim.size if dim.merged else size
        )
        if dim.literal is not None:
            decision = self._literal(pending, dim.literal)
        elif not dim.axes:
            return pending.decided(Outcome.EMPTY)
        elif self._unknown(dim, position):
            return pending.decided(Outcome.FAILED)
        else:
            rule, size = self.rule_and_size(pending, dim)
            if rule is None:
                return self.without_rule(pending)
            decision = self._choose(pending, rule, size)
        # JAX refuses a spec that names a mesh axis twice (`DuplicateSpecError`), so a mesh axis
        # that shards this dim is not available to later dims. This also holds for the mesh axes of
        # a literal `PartitionSpec`.
        for axis in decision.mesh_axes:
            self.taken[axis] = (position, pending.named)
        return decision

    def gathered(self, decision: DimDecision, dim: Dim) -> DimDecision:
        """Return a stored dim's decision without the mesh axes that the weight is gathered over.

        The weight is gathered over the policy's gather axes, except those that the dim's activation
        rule names.
        """
        if not decision.mesh_axes:
            return decision
        kept: set[str] = set()
        # Activations have no path, so the rule comes from the tables. If this rule names a mesh
        # axis of `policy.gather`, weight and activation are sharded alike along this mesh axis. The
        # weight then stays sharded over it.
        for axis in (dim.semantic_axis,) if decision.dim in self.by_semantic_axis else dim.axes:
            stated = self.rules.stated(axis, mode=self.mode, role=Role.ACTIVATION, path=None)
            rule = stated or default_rule(axis)
            # The activation may have another size than the weight, and so another candidate may
            # apply to it. So keep the mesh axes of all candidates of its rule.
            kept.update(rule.mesh_axes if rule is not None else ())
        dropped = set(self.rules.policy.gather) - kept
        gathered = tuple(axis for axis in decision.mesh_axes if axis in dropped)
        left = tuple(axis for axis in decision.mesh_axes if axis not in dropped)
        return dataclasses.replace(decision, mesh_axes=left, gathered=gathered)

    def fits(self, size: int, axes: tuple[str, ...]) -> bool:
        """Tell whether a size divides over mesh axes.

        Raises:
          _jax.Inconclusive: The size is symbolic, and the answer depends on its value.
        """
        # If the remainder of a symbolic size is unknown, `== 0` would return False. `>= 1` raises
        # `Inconclusive`.
        return not size % self.shards(axes) >= 1

    def shards(self, live: tuple[str, ...]) -> int:
        """Return the number of shards along mesh axes that are not Manual.

        Along Manual mesh axes a size is local already.
        """
        if len(live) == 1 and not self.manual:
            return self.sizes[live[0]]
        return math.prod([self.sizes[axis] for axis in live if axis not in self.manual])

    def rule_and_size(self, pending: PendingDecision, dim: Dim) -> tuple[Chain | None, int | None]:
        """Return the rule of a dim, or None, and the size that must divide."""
        rule = self.rule_for(dim, pending.dim)
        size = pending.size
        if dim.merged:
            pending.judged_as = axis_label(dim.axes[0])
            # A merged dim flattens several axes, such as heads and head dims. It is sharded over
            # its first member only. If the size of that member divides, each shard has whole blocks
            # of the other members, such as whole heads.
            size = dim.merged[0][1]
        # Only a `PartitionAxis` sets `of_one`: in decode, a LENGTH of size 1 has the rule of
        # QUERY_LENGTH.
        if isinstance(rule, Rule) and rule.of_one is not None and self._is_one(size, rule):
            rule = rule.of_one
        return rule, size

    def _is_one(self, size: int | None, rule: Rule) -> bool:
        """Tell whether the global size of a dim is known to be 1."""
        # If the rule has a Manual mesh axis, the size may be local, and the global size larger.
        if size is None or _jax.is_symbolic(size) or not self.manual.isdisjoint(rule.mesh_axes):
            return False
        return size == 1

    def without_rule(self, pending: PendingDecision) -> DimDecision:
        """Decide a dim that has no rule, or whose composite's rules conflict."""
        # In both cases, `rule_for` returns None. It adds a problem only if the rules of a composite
        # conflict.
        failed = bool(self.problems) and self.problems[-1].dim == pending.dim
        return pending.decided(Outcome.FAILED if failed else Outcome.NO_RULE)

    def _literal(self, pending: PendingDecision, names: tuple[str, ...]) -> DimDecision:
        """Decide a dim that a `PartitionSpec` annotates, as if its entry were a rule's candidate.

        A mesh axis that the mesh does not have is an error, except under `missing = "replicate"`.
        """
        pending.literal = True
        ref = RuleRef(key=f"dim {pending.dim}", text="+".join(names) or "-", source="literal spec")
        # An entry None of a spec means replicated, which a rule writes as "-".
        fallback = Fallback.NONE if names else Fallback.REPLICATED
        # Lowering writes `PartitionSpec.UNCONSTRAINED` as the name "?", which is no mesh axis.
        if names == (Fallback.UNCONSTRAINED,):
            fallback = Fallback.UNCONSTRAINED
        known = {*self.sizes, Fallback.UNCONSTRAINED.value}
        absent = next((name for name in names if name not in known), None)
        # A rule serves many meshes, so a mesh axis that one of them lacks is skipped. A literal
        # spec is written for one mesh, so an absent name is misspelled, or is a logical name of
        # flax.
        if absent is not None and self.rules.policy.missing is Missing.SKIP:
            what = f"mesh axis {absent!r} is not in the mesh"
            fix = missing_entry_fix(absent, self.sizes)
            self.add_problem(MissingMeshAxisError, what, pending.dim, "", rule=ref, fix=fix)
            pending.rule = ref
            return pending.decided(Outcome.FAILED)
        rule = Rule(candidates=() if fallback else (names,), fallback=fallback, ref=ref)
        return self._choose(pending, rule, pending.size)

    def _unknown(self, dim: Dim, position: int) -> bool:
        """Tell whether a dim names unknown axes, and add a problem for each unknown axis."""
        names = [axis for axis, _ in dim.merged] if dim.merged else dim.axes
        if self.rules.known_axes.issuperset(names):
            return False
        for axis in names:
            if axis not in self.rules.known_axes:
                self._add(unknown_axis(axis, self.rules.known_axes), dim, position)
        return True

    def _add(self, problem: Problem, dim: Dim, position: int) -> None:
        path = self.path or ""
        self.problems.append(dataclasses.replace(problem, path=path, dim=position, axis=dim.label))

    def _stated(self, axis: str) -> Rule | None:
        return self.rules.stated(axis, mode=self.mode, role=self.role, path=self.path)

    def rule_for(self, dim: Dim, position: int) -> Chain | None:
        """Return the rule of a dim, or None if it has no rule.

        If the rules of a composite conflict, add a problem and return None.
        """
        # A weight layout such as `ColumnWise` stands for semantic axes only if the array is a
        # weight. For an activation, the parallelism axes of the layout are taken literally.
        if dim.semantic_axis and self.role is not Role.ACTIVATION:
            rule = self._semantic_rule(dim)
            if rule is not None:
                self.by_semantic_axis.add(position)
                return rule
        if len(dim.axes) == 1:
            axis = dim.axes[0]
            return self._stated(axis) or default_rule(axis)
        rules = [self._stated(axis) or default_rule(axis) for axis in dim.axes]
        missing = self.rules.policy.missing
        composite = make_composite(dim.axes, rules, self.sizes, missing, self.min_size)
        if isinstance(composite, Problem):
            self._add(composite, dim, position)
            return None
        return composite

    def _semantic_rule(self, dim: Dim) -> Rule | None:
        """Return the rule of `dim.semantic_axis`, or None if the dim keeps its own rule.

        `[[tensors]]` entries come before tables. On both levels, a rule for the parallelism axis
        itself takes precedence over the rule of the semantic axis.
        """
        # Without `[[tensors]]` entries, there is only the level of the tables.
        for find in (self._tensor, self._stated) if self.rules.tensors else (self._stated,):
            # A rule `tensor_parallel = "-"` under [params] counts as a rule of the parallelism
            # axis.
            if [axis for axis in dim.axes if find(axis) is not None]:
                return None
            rule = find(dim.semantic_axis)
            if rule is not None:
                return rule
        return None

    def _tensor(self, axis: str) -> Rule | None:
        return self.rules.tensor_rule(axis, role=self.role, path=self.path)

    def _choose(self, pending: PendingDecision, rule: Chain, size: int | None) -> DimDecision:
        try:
            return self._chosen(pending, rule, size)
        except _jax.Inconclusive:
            # Whether a symbolic size divides is unknown: decide as if no size were given.
            return self._chosen(pending, rule, None)

    def _chosen(self, pending: PendingDecision, rule: Chain, size: int | None) -> DimDecision:
        attempts = self.attempt(self.candidates(rule), size)
        pending.rule, pending.skipped = rule.ref, tuple(attempts.skipped)
        # This test needs no size: without a size, `attempt` sets `dropped_missing` only if no
        # candidate before the one with the missing mesh axis can apply.
        if attempts.dropped_missing:
            return pending.decided(Outcome.POLICY_MISSING)
        if size is None and self.needs_shape(attempts, rule):
            return self.without_shape(pending, rule)
        if attempts.chosen is not None:
            return pending.decided(
                Outcome.CHOSEN, mesh_axes=attempts.chosen, unchecked=size is None
            )
        return fall_back(self, pending, rule, attempts, size)

    def without_shape(self, pending: PendingDecision, rule: Chain) -> DimDecision:
        """Refuse a dim whose candidate depends on its size, because the size is unknown."""
        fix = "pass shape="
        if pending.size is not None:
            fix = f"write {pending.size} as a multiple, such as 8*b, or give the rule one candidate"
        what = "which candidate applies depends on the size"
        self.add_problem(
            ShapeRequiredError, what, pending.dim, pending.label, rule=rule.ref, fix=fix
        )
        return pending.decided(Outcome.FAILED)

    def attempt(self, candidates: Iterable[TriedCandidate], size: int | None) -> Attempts:
        """Try the candidates in order. If the size is unknown, continue after the first candidate
        that fits, to collect all mesh axes that may apply.
        """
        attempts = Attempts()
        for candidate in candidates:
            attempts.skipped += candidate.skipped
            if candidate.misses_axis and size is None and attempts.tried_axes:
                # An earlier candidate applies to some sizes, and this candidate to others. Without
                # a size, list both.
                attempts.tried_axes.append(candidate.written)
                return attempts
            if candidate.misses_axis:
                attempts.dropped_missing = True
                return attempts
            live = candidate.live
            if not live:
                continue
            # `tried_axes` includes candidates that fail, because `needs_shape` counts the possible
            # answers.
            attempts.tried_axes.append(live)
            blocked = self.blocked(live)
            # Test for a conflict before the size is tested. Otherwise a strategy in which two dims
            # claim one mesh axis would be accepted for the sizes that happen not to divide.
            if blocked and not self._dropped(size, live):
                failure = Failure(candidate=candidate, reason=Reason.TAKEN, blocked_by=blocked)
                self._fail(attempts, failure)
            elif size is not None and not self.fits(size, live):
                failure = Failure(candidate=candidate, reason=Reason.INDIVISIBLE)
                self._fail(attempts, failure, size=size)
                if self.rules.policy.conflict is Conflict.NEXT:
                    # Under `conflict = "next"`, a size never leads to the next candidate:
                    # `indivisible` decides.
                    attempts.failure = failure
                    return attempts
            elif size is None:
                # Assume that the size divides over the first free candidate. `needs_shape` refuses
                # the dim if the size could lead to another answer.
                attempts.chosen = attempts.chosen or live
                if self.rules.policy.conflict is Conflict.NEXT:
                    return attempts
            else:
                attempts.chosen = live
                return attempts
        return attempts

    def candidates(self, rule: Chain) -> Iterable[TriedCandidate]:
        """Return the candidates of a rule as they are tried."""
        if isinstance(rule, Composite):
            return rule.candidates()
        missing = self.rules.policy.missing
        return [reduced(written, self.sizes, missing, self.min_size) for written in rule.candidates]

    def _dropped(self, size: int | None, live: tuple[str, ...]) -> bool:
        """Tell whether `indivisible = "drop"` replicates the dim, so that it cannot conflict with
        another dim.
        """
        # eformer drops such a dim before it looks for conflicts, so a dropped dim claims no mesh
        # axis.
        is_drop = self.rules.policy.indivisible is Indivisible.DROP
        return is_drop and size is not None and not self.fits(size, live)

    def blocked(self, live: tuple[str, ...]) -> tuple[str, ...]:
        """Return the mesh axes of a candidate that an earlier dim or an earlier member holds."""
        if len(live) == 1:
            return live if live[0] in self.taken else ()
        # Two members of a composite may name the same mesh axis, so `live` may have an axis twice.
        return tuple(
            axis for at, axis in enumerate(live) if axis in self.taken or axis in live[:at]
        )

    def _fail(self, attempts: Attempts, failure: Failure, *, size: int | None = None) -> None:
        if failure.reason is Reason.TAKEN:
            detail = ", ".join(self.holder(axis) for axis in dict.fromkeys(failure.blocked_by))
        else:
            assert size is not None
            detail = self.remainder(size, failure.live)
        written = failure.candidate.written
        attempts.skipped.append(Skip(reason=failure.reason, candidate=written, detail=detail))
        attempts.failure = attempts.failure or failure

    def needs_shape(self, attempts: Attempts, rule: Chain) -> bool:
        """Tell whether the decision depends on the size."""
        policy = self.rules.policy
        # Under these policies a size that does not divide gives another spec, and not an error.
        if attempts.tried_axes and policy.indivisible is not Indivisible.ERROR:
            return True
        # A single candidate without a fallback has one answer: the size divides over it, or an
        # error is raised.
        answers = {*attempts.tried_axes, *([(rule.fallback.value,)] if rule.fallback else [])}
        # Under `conflict = "next"` the size never selects a candidate.
        return len(answers) > 1 and policy.conflict is not Conflict.NEXT

    def remainder(self, size: int, live: tuple[str, ...]) -> str:
        """Return why a size does not divide: `6 % 4 != 0`."""
        return f"{size} % {self.shards(live)} != 0"

    def holder(self, axis: str) -> str:
        """Return as text which dim holds a mesh axis."""
        if axis not in self.taken:
            return f"{axis} occurs twice"
        position, label = self.taken[axis]
        return f"{axis} is taken by dim {position} {label}".rstrip()

    def add_problem(
        self,
        error: type[ShardingError],
        what: str,
        position: int,
        label: str,
        *,
        rule: RuleRef,
        **fields: Any,
    ) -> None:
        """Add a problem of one dim; `fields` are those of `Problem`."""
        problem = Problem(
            error=error,
            what=what,
            path=self.path or "",
            dim=position,
            axis=label,
            rule=rule_text(rule, self.mode),
            **fields,
        )
        self.problems.append(problem)


def fall_back(
    decider: Decider, pending: PendingDecision, rule: Chain, attempts: Attempts, size: int | None
) -> DimDecision:
    """Decide a dim that no candidate fits."""
    failure = attempts.failure
    is_next = decider.rules.policy.conflict is Conflict.NEXT
    if is_next and failure is not None and failure.reason is Reason.INDIVISIBLE:
        # Under `conflict = "next"`, a final `-` or `?` is not used where a size does not divide.
        return _indivisible(decider, pending, rule, failure, failure.live, size)
    if rule.fallback is Fallback.REPLICATED:
        return pending.decided(Outcome.REPLICATED)
    if rule.fallback is Fallback.UNCONSTRAINED:
        return _unconstrained(decider, pending, rule)
    # Each candidate is empty: the mesh lacks its axes, or they have size 1. This is not a failure.
    if failure is None:
        return pending.decided(Outcome.NO_MESH_AXIS)
    if failure.reason is Reason.TAKEN:
        return _conflict(decider, pending, rule, failure, size)
    return _indivisible(decider, pending, rule, failure, failure.live, size)


def _unconstrained(decider: Decider, pending: PendingDecision, rule: Chain) -> DimDecision:
    if decider.role is Role.ACTIVATION:
        return pending.decided(Outcome.UNCONSTRAINED)
    decider.add_problem(
        StrategyError,
        '"?" is for activations only: a parameter needs a sharding',
        pending.dim,
        pending.label,
        rule=rule.ref,
        fix=f'give parameters a rule of their own, [params] {rule.ref.key} = "-"',
    )
    return pending.decided(Outcome.FAILED)


def _conflict(
    decider: Decider, pending: PendingDecision, rule: Chain, failure: Failure, size: int | None
) -> DimDecision:
    if decider.rules.policy.conflict is Conflict.NEXT:
        return pending.decided(Outcome.POLICY_NEXT)
    if decider.rules.policy.conflict is Conflict.FIRST_DIM:
        return _leave_to_first(decider, pending, rule, failure, size)
    decider.add_problem(
        AxisConflictError,
        "; ".join(decider.holder(axis) for axis in dict.fromkeys(failure.blocked_by)),
        pending.dim,
        pending.named,
        rule=rule.ref,
        mesh_axes=failure.live,
        fix=_conflict_fix(decider, pending, rule, failure, size),
    )
    return pending.decided(Outcome.FAILED)


def _leave_to_first(
    decider: Decider, pending: PendingDecision, rule: Chain, failure: Failure, size: int | None
) -> DimDecision:
    """Apply `conflict = "first_dim"`: the dim takes only mesh axes that no earlier dim holds."""
    # A composite may name one mesh axis twice, but a spec may not.
    free = tuple(axis for axis in dict.fromkeys(failure.live) if axis not in decider.taken)
    if not free or size is None or decider.fits(size, free):
        unchecked = bool(free) and size is None
        return pending.decided(Outcome.POLICY_FIRST_DIM, mesh_axes=free, unchecked=unchecked)
    remainder = decider.remainder(size, free)
    skip = Skip(reason=Reason.INDIVISIBLE, candidate=free, detail=remainder)
    pending.skipped = (*pending.skipped, skip)
    return _indivisible(decider, pending, rule, failure, free, size)


def _conflict_fix(
    decider: Decider, pending: PendingDecision, rule: Chain, failure: Failure, size: int | None
) -> str:
    holders = [decider.taken.get(axis, (0, ""))[1] for axis in failure.blocked_by]
    if axis_label(EXPERT) in (pending.named, *holders):
        return _ROUTER
    once = "an array uses each mesh axis once: write "
    if pending.literal:
        return once + "None or another mesh axis here"
    if pending.named in holders:
        # Two dims may have the same axis only if its rule shards nothing, as for a conv's window.
        scores = ": attention scores, for instance, are (BATCH, HEAD, QUERY_LENGTH, BIAS_KV_SEQ)"
        return f"give each dim its own axis, or EMPTY{scores if 'LENGTH' in pending.named else ''}"
    end = f', or end the rule in a fallback, "{rule.ref.text} | -"'
    if isinstance(rule, Composite):
        change = _composite_fallback(decider, rule, failure, size)
        end = f", or end a member's rule in a fallback, {change}"
    return f"{once}EMPTY or another axis here{end}"


def _indivisible(
    decider: Decider,
    pending: PendingDecision,
    rule: Chain,
    failure: Failure,
    live: tuple[str, ...],
    size: int | None,
) -> DimDecision:
    assert size is not None
    policy = decider.rules.policy.indivisible
    if policy is Indivisible.REPLICATE:
        return pending.decided(Outcome.POLICY_REPLICATE)
    if policy is Indivisible.DROP:
        return pending.decided(Outcome.POLICY_DROP)
    if policy is Indivisible.PREFIX:
        # The last prefix is empty and has one shard, so some prefix always fits.
        ends = range(len(live) - 1, -1, -1)
        best = next(live[:end] for end in ends if decider.fits(size, live[:end]))
        return pending.decided(Outcome.POLICY_PREFIX, mesh_axes=best)
    shards = decider.shards(live)
    over = ", ".join(f"{axis}={decider.sizes[axis]}" for axis in live)
    count = f" ({shards} shards)" if len(live) > 1 else ""
    judged = f"{pending.judged_as} of " if pending.judged_as else ""
    fallback, edit = "write None there", None
    end = "or choose a size and a mesh that divide"
    pipeline = decider.rules.pipeline
    if pipeline is not None and pipeline.runs and pending.named == axis_label(LAYERS):
        # If the stages of a pipeline run, the rule of LAYERS may not have a fallback.
        each = " per repeat" if pipeline.repeats > 1 else ""
        axes = "+".join(live)
        fallback = f"choose a number of layers{each} that {axes} divides, or another {axes}"
        end = f'or write schedule = "none" under [pipeline] and layers = "{rule.ref.text} | -"'
    elif not pending.literal and decider.rules.policy.conflict is Conflict.NEXT:
        fallback = 'under conflict = "next", fallbacks ignore sizes: set [policy] indivisible'
    elif isinstance(rule, Composite):
        fallback = f"add a fallback, {_composite_fallback(decider, rule, failure, size)}"
    elif not pending.literal:
        ref, text = rule.ref, _with_fallback(decider, rule, live, size)
        fallback = f'add a fallback, {ref.key} = "{text}"'
        if ref.table:  # the rule is written in a file
            table = tuple(ref.table.split("."))
            edit = NewValue(table=table, key=ref.key, value=text, source=ref.source)
    decider.add_problem(
        IndivisibleError,
        f"{judged}size {size} does not divide over {over}{count}",
        pending.dim,
        pending.named,
        rule=rule.ref,
        size=size,
        mesh_axes=live,
        shards=shards,
        fix=f"{fallback}, {end}",
        edit=edit,
    )
    return pending.decided(Outcome.FAILED)


def _with_fallback(decider: Decider, rule: Rule, live: tuple[str, ...], size: int) -> str:
    """Return the text of a rule with an added fallback that fits this size."""
    parts = [
        part
        for end in range(1, len(live))
        # Prefixes and suffixes of the candidate keep the order of its mesh axes, major first.
        for part in (live[:-end], live[end:])
        if decider.fits(size, part)
    ]
    best = max(parts, key=decider.shards, default=())
    then = f"{'+'.join(best)} | -" if best else "-"
    return f"{rule.ref.text} | {then}"


def _composite_fallback(
    decider: Decider, rule: Composite, failure: Failure, size: int | None
) -> str:
    def fits(live: tuple[str, ...]) -> bool:
        return not decider.blocked(live) and (size is None or decider.fits(size, live))

    return rule.with_fallback(failure.candidate.parts, fits)
