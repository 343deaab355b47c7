"""Shard a weight or its state over mesh axes that its rules leave free.

`[policy] largest_dim` adds mesh axes to stored weights, and `zero1` adds some to optimizer state.
Both policies try candidates in order, and one dim gets the free mesh axes of the first candidate
that fits. The policies differ in which dims may get these mesh axes. Whether a size divides is
decided in `decide`: the resolver passes the method `Decider.fits` to this module.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shardwright import _jax
from shardwright.errors import IndivisibleError, Problem, ShapeRequiredError
from shardwright.resolution.decisions import DimDecision, Outcome, Resolution
from shardwright.resolution.parts import Derived, Fits
from shardwright.resolution.rules import Fallback, Policy, Rule
from shardwright.vocabulary.axes import LAYERS
from shardwright.vocabulary.lowering import Dim


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Addition:
    """The differences between the policies that add mesh axes.

    Attributes:
      key: Key of the policy. The field of `DimDecision` with the added mesh axes has the same name.
      only_free: Whether only dims without mesh axes may get the free mesh axes. If so, the largest
        dim is tried first. Otherwise every dim may get them, and dims are tried in order.
      none: Text of notes and errors if no dim fits.
      then: Text that says how an array is sharded if no candidate fits and the rule ends in `-`.
    """

    key: str
    only_free: bool
    none: str
    then: str


_ZERO1: Final = _Addition(
    key="zero1",
    only_free=False,
    none="no dim can also be divided",
    then="such state like its parameter",
)
_LARGEST_DIM: Final = _Addition(
    key="largest_dim",
    only_free=True,
    none="no free dim divides",
    then="such a weight by its rules alone",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredDims:
    """The array that gets mesh axes.

    Attributes:
      dims: The dims of its annotation.
      sizes: Size of each mesh axis.
      fits: Tells whether a size divides over mesh axes.
      path: Path of the array, or None.
      manual: Mesh axes that an enclosing `shard_map` has already applied.
    """

    dims: Sequence[Dim]
    sizes: Mapping[str, int]
    fits: Fits
    path: str | None
    manual: frozenset[str]

    def judged(self, decision: DimDecision) -> int | None:
        """Return the size that must divide. For a merged dim it is the size of the first member."""
        dim = self.dims[decision.dim]
        return dim.merged[0][1] if dim.merged and dim.size == decision.size else decision.size


def add_zero1(param: Derived, rule: Rule | None, array: StoredDims) -> Derived:
    """Shard optimizer state over mesh axes that its parameter does not use.

    The free mesh axes become minor axes of the first dim that divides over its own mesh axes and
    all free ones together. Dims annotated `EMPTY` are never sharded.

    Args:
      param: Decisions of the parameter.
      rule: Candidates in order, or None to add no mesh axes. If no candidate fits the state and the
        rule ends in `-`, the state is sharded like its parameter.
      array: The state.
    """
    if rule is None or param.problems:
        return param
    # This is stage 1 of ZeRO (arXiv:1910.02054). A dim of each state is sharded, and not a flat
    # buffer of all states, so that each state keeps its shape and has a spec.
    able = [decision for decision in param.decisions if decision.outcome is not Outcome.EMPTY]
    return _added(_ZERO1, param, rule, able, array)


def add_largest_dim(weight: Derived, policy: Policy, array: StoredDims) -> Derived:
    """Shard a weight over mesh axes that its rules do not use, along its largest free dim.

    A dim is free if its rule gives it no mesh axis. LAYERS, dims annotated `EMPTY`, and dims of a
    literal `PartitionSpec` are never sharded. A weight keeps its decisions if it has fewer than
    `policy.largest_dim_min_size` elements. For a stack, only the elements of one layer are counted.
    A weight also keeps its decisions if no candidate fits and the rule ends in `-`.

    Args:
      weight: Decisions of the weight by its rules.
      policy: The policy, with the candidates in order.
      array: The weight.
    """
    rule = policy.largest_dim
    if rule is None or weight.problems:
        return weight
    able = [
        decision
        for decision in weight.decisions
        if decision.outcome is not Outcome.EMPTY
        and array.dims[decision.dim].literal is None
        # A scan reads one layer in each step. If the layers were sharded, every step would need a
        # layer that only one device holds.
        and LAYERS not in array.dims[decision.dim].axes
    ]
    try:
        # Sort by the size of the whole dim, although `fits` judges a merged dim by its first member
        # only. The sort is stable, so of equal dims the first one is tried first.
        able.sort(key=lambda decision: -(decision.size or 0))
        # Count the elements of one layer of a stack: in a scan over layers, `gather` asks about one
        # layer.
        elements = math.prod(
            decision.size or 0
            for decision in weight.decisions
            if LAYERS not in array.dims[decision.dim].axes
        )
        # Count elements and not bytes, so that float32 moments follow their bfloat16 parameter.
        is_small = elements < policy.largest_dim_min_size
    except _jax.Inconclusive:
        able, is_small = [dataclasses.replace(decision, size=None) for decision in able], False
    if able and is_small and all(decision.size is not None for decision in able):
        least = f"largest_dim_min_size = {policy.largest_dim_min_size}"
        return _noted(weight, rule, f"{elements} elements are fewer than {least}")
    return _added(_LARGEST_DIM, weight, rule, able, array)


def policy_notes(resolution: Resolution, rule: Rule) -> list[str]:
    """Return what a rule of the policy did to an array, or why it did nothing."""
    mark = f"{rule.ref}: "
    return [note.removeprefix(mark) for note in resolution.notes if note.startswith(mark)]


def _added(
    policy: _Addition, found: Derived, rule: Rule, able: Sequence[DimDecision], array: StoredDims
) -> Derived:
    """Shard one of the dims `able` over the free mesh axes of the first candidate that fits.

    Args:
      policy: The policy.
      found: Decisions by the rules of the axes.
      rule: Candidates in order.
      able: Dims that may be sharded further, in the order in which they are tried.
      array: The array.
    """
    taken = {axis for decision in found.decisions for axis in decision.mesh_axes}
    tried = []
    for candidate in rule.candidates if able else ():
        live = tuple(axis for axis in candidate if array.sizes.get(axis, 1) > 1)
        free = tuple(axis for axis in live if axis not in taken)
        if not free:
            why = f"in the mesh, no axis of {'+'.join(candidate)} has more than one device"
            if live:
                why = f"the parameter is already sharded over {'+'.join(live)}"
            found = _noted(found, rule, why)
            continue
        chosen = _first_fitting(policy, able, free, rule, array)
        if isinstance(chosen, Problem):
            problem = dataclasses.replace(chosen, path=array.path or "")
            return dataclasses.replace(found, problems=(problem,))
        if chosen is not None:
            return _widened(policy, found, chosen, free, rule)
        tried.append(free)
    # If no candidate had free mesh axes, no size was tried, so no size is at fault: raise no error.
    if not tried or rule.fallback is Fallback.REPLICATED:
        return _noted(found, rule, *(f"{policy.none} over {'+'.join(free)}" for free in tried))
    free, tries = tried[0], []
    for decision in able:
        if policy.only_free and decision.mesh_axes:
            over = "+".join(decision.mesh_axes)
            tries.append(f"dim {decision.dim} {decision.label} is sharded over {over}")
            continue
        sizes = [f"{axis}={array.sizes[axis]}" for axis in (*decision.mesh_axes, *free)]
        tries.append(f"{array.judged(decision)} over {', '.join(sizes)}")
    key = policy.key
    fix = f'end {key} in a fallback, {key} = "{rule.ref.text} | -", which shards {policy.then}'
    problem = Problem(
        error=IndivisibleError,
        what=f"{policy.none} over {'+'.join(free)}: {'; '.join(tries)}",
        path=array.path or "",
        rule=str(rule.ref),
        mesh_axes=free,
        fix=fix,
    )
    return dataclasses.replace(found, problems=(problem,))


def _first_fitting(
    policy: _Addition,
    able: Sequence[DimDecision],
    free: tuple[str, ...],
    rule: Rule,
    array: StoredDims,
) -> DimDecision | Problem | None:
    """Return the first dim that divides over `free` in addition to its own mesh axes, or None.

    Return a problem if a size is unknown or symbolic, so that the dim cannot be determined.
    """
    what = f"which dim {policy.key} shards depends on the sizes"
    fix = "pass shape=, with symbolic sizes as multiples, such as 8*b"
    if policy.only_free:
        # Along a Manual mesh axis sizes are local, and another dim may be the largest by its local
        # size. `zero1` does not have this problem: it takes the first dim that divides, and along a
        # Manual mesh axis every dim divides.
        if manual := [axis for axis in free if axis in array.manual]:
            what += f", and inside shard_map over {'+'.join(manual)} the sizes are local"
            fix = "use gather, which finds the global shape or takes it as shape=, or annotate "
            fix += "the value as an activation"
            able = [dataclasses.replace(decision, size=None) for decision in able]
        able = [decision for decision in able if not decision.mesh_axes]
    unknown = Problem(error=ShapeRequiredError, what=what, rule=str(rule.ref), fix=fix)
    # If one size is unknown, it is not known which dim is the first that divides.
    if any(array.judged(decision) is None for decision in able):
        return unknown
    for decision in able:
        size = array.judged(decision)
        try:
            if size is not None and array.fits(size, (*decision.mesh_axes, *free)):
                return decision
        except _jax.Inconclusive:
            what = f"which dim {policy.key} shards depends on the size {size}"
            return dataclasses.replace(unknown, what=what, dim=decision.dim)
    return None


def _noted(found: Derived, rule: Rule, *notes: str) -> Derived:
    return dataclasses.replace(
        found, notes=(*found.notes, *(f"{rule.ref}: {note}" for note in notes))
    )


def _widened(
    policy: _Addition, found: Derived, chosen: DimDecision, free: tuple[str, ...], rule: Rule
) -> Derived:
    # Add the free mesh axes as minor axes, so that the state on a device belongs to the device's
    # shard of the parameter.
    axes = (*chosen.mesh_axes, *free)
    added: dict[str, Any] = {policy.key: free}
    if not chosen.mesh_axes:
        # All mesh axes of the dim come from the policy, so errors and reports name the policy's
        # rule.
        added |= {"rule": rule.ref, "outcome": Outcome.CHOSEN}
    wider = dataclasses.replace(chosen, mesh_axes=axes, **added)
    decisions = tuple(
        wider if decision.dim == chosen.dim else decision for decision in found.decisions
    )
    note = f"{'+'.join(free)} on dim {chosen.dim} {chosen.label}"
    if policy.only_free:
        note += f", the largest free dim that divides ({chosen.size})"
    return _noted(dataclasses.replace(found, decisions=decisions), rule, note)
