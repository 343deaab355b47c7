"""Turn the rules of a manager into a list of pairs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwright.errors import IndivisibleError, ShapeRequiredError, StrategyError
from shardwright.interop.logical_rules.names import MeshAxes, Names, read_names
from shardwright.resolution.composites import reduced
from shardwright.resolution.partition_specs import UNCONSTRAINED, entry_names
from shardwright.resolution.rule_order import ranks_of
from shardwright.resolution.rules import (
    Conflict,
    Fallback,
    Indivisible,
    Order,
    Rule,
    default_rule,
)
from shardwright.vocabulary.axes import (
    HEAD,
    KV_HEAD,
    LENGTH,
    MLP_INTERMEDIATE,
    VOCAB,
    Role,
    axis_label,
)
from shardwright.vocabulary.modes import MODE_TRAIN

if TYPE_CHECKING:
    from shardwright.manager.manager import PartitionManager


def to_logical_axis_rules(
    pm: PartitionManager, names: Names, *, sizes: Mapping[str, int] | None = None
) -> tuple[tuple[str, MeshAxes], ...]:
    """Return a manager's rules as an ordered list of pairs, in the manager's mode.

    If a rule ends in `?`, its last pair has `PartitionSpec.UNCONSTRAINED`, which flax understands.

    Under `order = "dims"`, if two dims of an array use the same mesh axis, the earlier dim gets it.
    A list cannot express this: in the list, the name that comes first in `names` gets the mesh
    axis.

    Under `conflict = "error"`, two dims with the same mesh axis are an error. A library that reads
    the list replicates one of these dims instead. A `UserWarning` tells if such a conflict is
    likely: if LENGTH has a mesh axis in common with heads, a hidden dim or the vocabulary.

    Args:
      pm: The manager.
      names: Name in the list -> (axis, role), or an axis that has one rule for both roles.
      sizes: Name -> size of its dims, for rules that depend on the size.

    Raises:
      ShapeRequiredError: A rule depends on a size that is not given.
      IndivisibleError: A size does not divide, and the strategy has no fallback for it.
      StrategyError: A list cannot express the rules, because the policy is `conflict = "first_dim"`
        or sets `largest_dim`. Or `names` gives an axis without a role, and the axis has different
        rules for activations and for params. Or `pm` is not a manager.
      UnknownAxisError: `names` maps to axes that the strategy lacks; all are reported at once.
    """
    exported = _ranked_rules(pm, names, sizes)
    if pm.rules.policy.conflict is Conflict.ERROR:
        _warn_of_conflicts(pm, names, exported)
    return exported


def _ranked_rules(
    pm: PartitionManager, names: Names, sizes: Mapping[str, int] | None
) -> tuple[tuple[str, MeshAxes], ...]:
    check_manager(pm)
    names = read_names(names, pm.rules.user_axes, declare="")
    if pm.rules.policy.conflict is Conflict.FIRST_DIM:
        what = 'conflict = "first_dim" cannot be written as a list of rules'
        raise StrategyError(what, fix='use conflict = "next" or "error"')
    if (largest_dim := pm.rules.policy.largest_dim) is not None:
        what = "largest_dim reads the sizes of a weight, which a list of rules cannot express"
        fix = 'shard by name instead, such as [params] embed = "fsdp"'
        raise StrategyError(what, rule=str(largest_dim.ref), fix=fix)
    is_ordered = pm.rules.policy.order is Order.RULES
    ranked: list[tuple[Any, tuple[str, MeshAxes]]] = []
    for place, (name, target) in enumerate(names.items()):
        axis, role = _exported(pm, name, target)
        size = None if sizes is None else sizes.get(name)
        chain, ranks = _chain(pm, axis, role, name, size)
        for at, axes in enumerate(chain):
            # With `order = "rules"`, sort by rank. Entries without a rank, such as a fallback, come
            # last.
            rank = (0, *ranks[at]) if is_ordered and at < len(ranks) else (is_ordered, 0, 0, 0)
            ranked.append(((rank, place, at), (name, axes)))
    return tuple(pair for _, pair in sorted(ranked, key=lambda entry: entry[0]))


def _warn_of_conflicts(
    pm: PartitionManager, names: Names, exported: Sequence[tuple[str, MeshAxes]]
) -> None:
    """Warn of names that share a mesh axis and that probably occur in one activation."""
    first: dict[str, tuple[str, ...]] = {}
    for name, axes in exported:
        # Leave out mesh axes of size 1, because to share such an axis changes nothing.
        sharded = tuple(axis for axis in entry_names(axes) if pm.mesh.shape[axis] > 1)
        first.setdefault(name, sharded)
    targets = read_names(names, pm.rules.user_axes)
    own = {name: _exported(pm, name, target) for name, target in targets.items()}
    own = {name: pair for name, pair in own.items() if pair[1] is Role.ACTIVATION}
    lengths = [name for name, (axis, _) in own.items() if axis == LENGTH]
    pairs = [
        f"{one!r} and {other!r} use {'+'.join(shared)}"
        for one in lengths
        for other, (axis, _) in own.items()
        if axis in (HEAD, KV_HEAD, MLP_INTERMEDIATE, VOCAB)
        if (shared := [mesh_axis for mesh_axis in first[one] if mesh_axis in first[other]])
    ]
    if pairs:
        warnings.warn(
            f"{'; '.join(pairs)}: in an array with both names, a library that reads this list "
            "replicates one of the dims, where pm.explain has a conflict. Use another name for the "
            "length in these arrays, and map it to sw.QUERY_LENGTH.",
            stacklevel=3,
        )


def check_manager(pm: Any) -> None:
    """Check that `pm` is a manager.

    Raises:
      StrategyError: `pm` is not a manager.
    """
    from shardwright.manager.manager import PartitionManager

    if not isinstance(pm, PartitionManager):
        what = f"pm is a {type(pm).__name__}, and not a PartitionManager"
        raise StrategyError(what, fix="pass sw.PartitionManager(strategy, mesh=...)")


def one_rule_each(
    pm: PartitionManager, names: Names, *, sizes: Mapping[str, int] | None = None
) -> dict[str, MeshAxes]:
    """Return the mesh axes of each name, for libraries that have one rule per name.

    Only the first rule of a name is used. The later rules are for a conflict, but these libraries
    cannot have a second rule for a name.

    Args:
      pm: The manager.
      names: Name -> (axis, role), or an axis that has one rule for both roles.
      sizes: Name -> size of its dims, for rules that depend on the size.

    Raises:
      ShapeRequiredError: A rule depends on a size that is not given.
      StrategyError: A rule leaves a dim to the compiler (`?`).
      UnknownAxisError: `names` maps to axes that the strategy lacks; all are reported at once.
    """
    first: dict[str, MeshAxes] = {}
    # The first rule of a name is the one that applies without a conflict.
    for name, axes in _ranked_rules(pm, names, sizes):
        first.setdefault(name, axes)
    for name, axes in first.items():
        if axes is UNCONSTRAINED:
            what = f'the rule of {name!r} is "?", which a table of one rule per name cannot express'
            raise StrategyError(what, fix=f'give {name!r} a rule without "?"')
    return first


def _exported(pm: PartitionManager, name: str, target: Any) -> tuple[str, Role]:
    """Return the axis of a name, and the role whose rules the list gets for this name."""
    if not isinstance(target, str):
        axis, role = target
        return axis, role
    axis = target
    roles = (Role.ACTIVATION, Role.PARAM)
    # In a list, one rule of a name applies to arrays of both roles.
    one, other = (_rule(pm, axis, role) for role in roles)
    if one != other:
        what = f"{axis_label(axis)} has different rules as an activation and as a param"
        raise StrategyError(
            what, fix=f'map {name!r} to ({axis_label(axis)}, "param"), for instance'
        )
    return axis, Role.ACTIVATION


def _rule(pm: PartitionManager, axis: str, role: Role) -> Rule | None:
    stated = pm.rules.stated(axis, mode=pm.mode or MODE_TRAIN, role=role, path=None)
    return stated or default_rule(axis)


def _chain(
    pm: PartitionManager, axis: str, role: Role, name: str, size: int | None
) -> tuple[list[MeshAxes], list[Any]]:
    """Return the mesh axes of each rule of one name, and the ranks of the rules.

    Rules have ranks only under `order = "rules"`. A fallback at the end has no rank. A list cannot
    make a candidate depend on the size. So a candidate is left out if its number of shards does not
    divide the given size.
    """
    rule, policy = _rule(pm, axis, role), pm.rules.policy
    if rule is None:
        return [None], []
    is_ordered = policy.order is Order.RULES
    places: list[Any] = []
    if is_ordered:
        places = ranks_of(pm.rules, axis, mode=pm.mode or MODE_TRAIN, role=role, path=None)
    candidates = [
        (candidate, places[at] if places else None)
        for at, written in enumerate(rule.candidates)
        for candidate in [reduced(written, pm.mesh.shape, policy.missing, 1 if is_ordered else 2)]
        if candidate.live or candidate.misses_axis
    ]
    if size is None:
        # The number of different results that the rule can give, depending on the size.
        answers = len({candidate.live for candidate, _ in candidates}) + bool(rule.fallback)
        is_lenient = policy.indivisible is not Indivisible.ERROR and bool(candidates)
        if is_lenient or (answers > 1 and policy.conflict is not Conflict.NEXT):
            what = f"the mesh axes of {name!r} depend on its size"
            fix = f"pass sizes={{{name!r}: ...}}"
            raise ShapeRequiredError(what, rule=str(rule.ref), fix=fix)
    chain: list[MeshAxes] = []
    ranks: list[Any] = []
    failed: tuple[str, ...] = ()
    for candidate, rank in candidates:
        if candidate.misses_axis:
            # If the mesh lacks an axis of the candidate, the policy replicates the dim.
            return [*chain, None], ranks
        # Leave out a candidate whose number of shards does not divide the size: a reader of the
        # list would use it, because a list has no sizes.
        if size is not None and size % _shards(pm, candidate.live):
            failed = failed or candidate.live
            # As in flax, the next rule is tried after a conflict, but not after a size that does
            # not divide.
            if policy.conflict is Conflict.NEXT:
                return [*chain, _by_policy(pm, rule, name, size, candidate.live)], [*ranks, rank]
            continue
        chain.append(_entry(candidate.live))
        ranks.append(rank)
    if rule.fallback is Fallback.UNCONSTRAINED:
        chain.append(UNCONSTRAINED)
    elif rule.fallback is Fallback.REPLICATED or not (chain or failed):
        chain.append(None)
    elif not chain:
        assert size is not None
        chain.append(_by_policy(pm, rule, name, size, failed))
    return chain, ranks


def candidate_shards(pm: PartitionManager, name: str, target: Any) -> tuple[int, ...]:
    """Return each number of shards that the rule of a name may give to a dim.

    Two sizes get the same mesh axes if the same numbers in the result divide both.
    """
    rule, policy = _rule(pm, *_exported(pm, name, target)), pm.rules.policy
    candidates = [
        reduced(written, pm.mesh.shape, policy.missing, 1).live
        for written in (() if rule is None else rule.candidates)
    ]
    if policy.indivisible is Indivisible.PREFIX:
        # A dim may get only the first mesh axes of a candidate, one or more.
        candidates = [axes[:end] for axes in candidates for end in range(1, len(axes) + 1)]
    return tuple(dict.fromkeys(_shards(pm, axes) for axes in candidates))


def _shards(pm: PartitionManager, axes: Sequence[str]) -> int:
    return math.prod(pm.mesh.shape[axis] for axis in axes)


def _entry(axes: tuple[str, ...]) -> MeshAxes:
    return axes[0] if len(axes) == 1 else axes or None


def _by_policy(
    pm: PartitionManager, rule: Rule, name: str, size: int, axes: tuple[str, ...]
) -> MeshAxes:
    """Return the mesh axes that the policy gives a dim with an indivisible size."""
    policy = pm.rules.policy.indivisible
    if policy is Indivisible.PREFIX:
        ends = range(len(axes) - 1, -1, -1)
        return _entry(next(axes[:end] for end in ends if size % _shards(pm, axes[:end]) == 0))
    if policy is not Indivisible.ERROR:
        return None
    what = f"size {size} of {name!r} does not divide over {'+'.join(axes)}"
    fix = "give the rule a fallback, or choose a size and a mesh that divide"
    raise IndivisibleError(what, rule=str(rule.ref), fix=fix)
