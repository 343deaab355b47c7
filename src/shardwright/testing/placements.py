"""Expected and actual shardings of arrays, and the differences as text."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardwright.errors import (
    Problem,
    RankMismatchError,
    ShardingError,
    StrategyError,
    raise_problems,
)
from shardwright.manager import context
from shardwright.manager.manager import PartitionManager
from shardwright.mesh.build import mesh_sizes
from shardwright.plan.memory import leaf_bytes
from shardwright.resolution import resolver
from shardwright.resolution.decisions import DimDecision
from shardwright.resolution.partition_specs import entry_names, spec_text
from shardwright.resolution.rules import build_rules
from shardwright.show.tables import table
from shardwright.trees.annotated import annotated_leaves
from shardwright.trees.paths import path_text, structure_differences
from shardwright.vocabulary.annotations import is_annotation, tree_of_annotations
from shardwright.vocabulary.axes import EMPTY
from shardwright.vocabulary.units import bytes_text

_DEVICES = 16  # largest number of device ids in a message
_HEAD = ("tensor", "shape", "found", "per device", "expected", "per device")
_SPECS = (_HEAD.index("found"), _HEAD.index("expected"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An array and its expected sharding.

    Attributes:
      path: the path of the array in its tree; empty for a single array.
      value: anything with a shape and a dtype.
      sharding: the expected sharding.
      decisions: how the rules decided each dim; empty for literal specs and shardings.
    """

    path: str
    value: Any
    sharding: Sharding
    decisions: tuple[DimDecision, ...] = ()


def wanted_by_sharding(x: Any, expected: Any) -> list[Wanted]:
    """Pair arrays with shardings or specs. One sharding or spec may cover a whole subtree.

    Raises:
      StrategyError: the trees differ, a value is neither a sharding nor a spec, or a spec is
        compared with an array without a mesh.
    """
    shardings, structure = jax.tree.flatten(
        expected, is_leaf=lambda value: isinstance(value, (Sharding, PartitionSpec))
    )
    fix = "pass a tree of the same structure, or one sharding for a whole subtree"
    raise_problems(
        [
            Problem(
                error=StrategyError,
                what=f"the expected shardings have {old}, and the tree has {new}",
                path=path_text(path),
                fix=fix,
            )
            for path, old, new in structure_differences(structure, x)
        ]
    )
    parts = structure.flatten_up_to(x)  # type: ignore[attr-defined]
    # Repeat each entry of `expected` for each leaf that it covers.
    each = [
        sharding
        for sharding, part in zip(shardings, parts, strict=True)
        for _ in jax.tree.leaves(part)
    ]
    pairs = jax.tree_util.tree_flatten_with_path(x)[0]
    wanted = []
    problems: list[Problem] = []
    for (path, value), sharding in zip(pairs, each, strict=True):
        try:
            wanted.append(
                Wanted(
                    path=path_text(path),
                    value=value,
                    sharding=_as_sharding(sharding, value, path_text(path)),
                )
            )
        except ShardingError as error:
            problems += error.problems
    raise_problems(problems)
    return wanted


def _as_sharding(expected: Any, value: Any, path: str) -> Sharding:
    if isinstance(expected, Sharding):
        if isinstance(expected, NamedSharding) and len(expected.spec.partitions) > np.ndim(value):
            what = f"{spec_text(expected.spec)} has {len(expected.spec.partitions)} entries, "
            what += f"but the array has {np.ndim(value)} dims"
            fix = "expect a spec with at most one entry for each dim"
            raise RankMismatchError(what, path=path, fix=fix)
        return expected
    if not isinstance(expected, PartitionSpec):
        what = f"{type(expected).__name__} is neither a sharding nor a PartitionSpec"
        raise StrategyError(what, path=path, fix="for annotations use assert_spec")
    own = getattr(value, "sharding", None)
    if not isinstance(own, NamedSharding):
        what = f"{spec_text(expected)} is expected for a {type(value).__name__} that has "
        what += f"the sharding {own} and no mesh"
        fix = "place it first, or expect a NamedSharding"
        raise StrategyError(what, path=path, fix=fix)
    # Check that the entries fit the mesh and the shape. Unreduced axes are compared later.
    resolver.explain(
        PartitionSpec(*expected.partitions),
        build_rules({}),
        own.mesh,
        shape=np.shape(value),
        path=path or None,
    ).require()
    return NamedSharding(own.mesh, expected)


def wanted_by_annotation(
    x: Any,
    axes: tuple[Any, ...],
    manager: PartitionManager | None,
    *,
    mode: str | None,
    role: str | None,
) -> list[Wanted]:
    """Pair arrays with the shardings to which their annotations resolve.

    Literal specs need no manager.

    Raises:
      ShardingError: annotations do not resolve; all problems are listed.
      NoManagerError: there are annotations and no manager.
    """
    annotations = tree_of_annotations(axes)
    if manager is None:
        if all(
            isinstance(annotation, PartitionSpec)
            for annotation in jax.tree.leaves(annotations, is_leaf=is_annotation)
        ):
            return wanted_by_sharding(x, annotations)
        context.require("assert_spec", method=False)
    assert manager is not None
    literal = PartitionManager(build_rules({}), mesh=manager.mesh)
    wanted: list[Wanted] = []
    problems: list[Problem] = []
    for leaf in annotated_leaves(x, annotations):
        shape = np.shape(leaf.value)
        # Resolve a literal spec without the manager's policy, because the policy could drop axes
        # and so hide an error.
        pm = literal if isinstance(leaf.annotation, PartitionSpec) else manager
        resolution = pm.explain(
            leaf.annotation, mode=mode, role=role, shape=shape, path=leaf.path or None
        )
        if resolution.ok:
            sharding = pm.sharding(
                leaf.annotation, mode=mode, role=role, shape=shape, path=leaf.path or None
            )
            wanted.append(
                Wanted(
                    path=leaf.path,
                    value=leaf.value,
                    sharding=sharding,
                    decisions=resolution.decisions,
                )
            )
        problems += resolution.problems
    raise_problems(problems)
    return wanted


def wrong_placements(wanted: Sequence[Wanted], *, rows: int) -> str:
    """Return the message about arrays with another sharding; empty if all are as expected."""
    wrong = [pair for pair in wanted if _differences(pair)]
    right = [pair for pair in wanted if not _differences(pair)]
    if not wrong:
        return ""
    count = "1 tensor has" if len(wrong) == 1 else f"{len(wrong)} tensors have"
    of = "" if len(wanted) == 1 else f" (of {len(wanted)})"
    lines = [f"{count} another sharding than expected{of}:"]
    for pair in wrong[:rows]:
        has, wants = _bytes(pair)
        size = f"{has} per device either way" if has == wants else f"{has} per device, not {wants}"
        lines.append(f"  {pair.path or 'the array'}: {'; '.join(_differences(pair))} ({size})")
    lines += [f"  and {len(wrong) - rows} more"] * (len(wrong) > rows)
    lines += [
        "",
        *table(
            # Show wrong placements first, because the table has room for only a few rows.
            [_HEAD, *map(_row, [*wrong, *right][:rows])],
            whole=_SPECS,
        ),
    ]
    by_rule = any(pair.decisions for pair in wrong)
    fix = "place it as expected (sw.shard, jax.device_put, out_shardings=), or " + (
        "change the rule" if by_rule else "change the expectation"
    )
    rules = [
        decision.rule
        for pair in wrong[:rows]
        for decision, (has, wants) in zip(pair.decisions, _pairs(pair), strict=False)
        if decision.rule is not None and has != wants
    ]
    lines += [f"  rule  {rule}".replace("\n", "\n        ") for rule in dict.fromkeys(rules)]
    return "\n".join([*lines, f"  fix   {fix}"])


def _entries(sharding: NamedSharding, rank: int) -> list[tuple[str, ...]]:
    """Return the mesh axes of each dim, without mesh axes of size 1."""
    sizes = mesh_sizes(sharding.mesh)
    axes_by_dim = [
        tuple(axis for axis in entry_names(entry) if sizes[axis] > 1)
        for entry in sharding.spec.partitions
    ]
    return [*axes_by_dim, *[()] * (rank - len(axes_by_dim))]


def _unreduced(sharding: NamedSharding) -> list[str]:
    """Return the mesh axes over which the array is unreduced, in mesh order.

    Along these axes, each device holds one term of a sum.

    Mesh axes of size 1 are left out.
    """
    return [
        axis
        for axis, size in mesh_sizes(sharding.mesh).items()
        if size > 1 and axis in sharding.spec.unreduced
    ]


def _devices(sharding: Sharding) -> list[Any]:
    return list(sharding.mesh.devices.flat)  # type: ignore[attr-defined]


def _devices_text(sharding: NamedSharding) -> str:
    ids = [str(device.id) for device in _devices(sharding)]
    return ",".join([*ids[:_DEVICES], *["…"] * (len(ids) > _DEVICES)])


def _pairs(pair: Wanted) -> list[tuple[Any, Any]]:
    """Return a pair for each dim: the mesh axes found and expected.

    If the two shardings cannot be compared, the pair is (None, ()).
    """
    own: Any = getattr(pair.value, "sharding", None)
    wanted: Any = pair.sharding
    rank = np.ndim(pair.value)
    if _on_one_mesh(own, wanted):
        return list(zip(_entries(own, rank), _entries(wanted, rank), strict=True))
    return [(None, ())] * rank


def _on_one_mesh(own: Any, wanted: Any) -> bool:
    if not isinstance(own, NamedSharding) or not isinstance(wanted, NamedSharding):
        return False
    # Compare only the names and sizes of the mesh axes: axis types do not change a sharding, and an
    # abstract mesh never equals a concrete one.
    return bool(own.mesh.shape_tuple == wanted.mesh.shape_tuple)


def _differences(pair: Wanted) -> list[str]:
    """Return each difference, such as `dim 1 HEAD: -, not tp` for the mesh axes of a dim.

    Return nothing if the array is sharded as expected.
    """
    own, wanted = getattr(pair.value, "sharding", None), pair.sharding
    if own is None:
        return ["it has no sharding"]
    if not _on_one_mesh(own, wanted):
        with contextlib.suppress(TypeError, ValueError):  # one of the shardings has no devices
            if own.is_equivalent_to(wanted, np.ndim(pair.value)):
                return []
        if isinstance(own, NamedSharding) and isinstance(wanted, NamedSharding):
            return [f"the mesh: {_mesh_text(own)}, not {_mesh_text(wanted)}"]
        return [f"{type(own).__name__}, not {sharding_text(wanted)}"]
    assert isinstance(wanted, NamedSharding)
    lines = []
    for dim, (has, wants) in enumerate(_pairs(pair)):
        if has != wants:
            label = pair.decisions[dim].label if dim < len(pair.decisions) else ""
            label = f" {label}" if label not in ("", EMPTY) else ""
            lines.append(f"dim {dim}{label}: {'+'.join(has) or '-'}, not {'+'.join(wants) or '-'}")
    has, wants = _unreduced(own), _unreduced(wanted)
    if has != wants:
        lines.append(f"unreduced over: {'+'.join(has) or '-'}, not {'+'.join(wants) or '-'}")
    # Compare devices and their order. A mesh that is abstract has no devices to compare.
    concrete = isinstance(own.mesh, Mesh) and isinstance(wanted.mesh, Mesh)
    if concrete and _devices(own) != _devices(wanted):
        lines.append(f"devices: {_devices_text(own)}, not {_devices_text(wanted)}")
    # A sharding on an abstract mesh has no memory kind, and matches every kind.
    if own.memory_kind not in (None, wanted.memory_kind or own.memory_kind):
        lines.append(f"memory: {own.memory_kind}, not {wanted.memory_kind}")
    return lines


def _mesh_text(sharding: NamedSharding) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh_sizes(sharding.mesh).items())


def _bytes(pair: Wanted) -> tuple[str, str]:
    """Return the actual and the expected bytes per device, as text."""
    texts = []
    for sharding in (getattr(pair.value, "sharding", None), pair.sharding):
        try:
            texts.append(bytes_text(leaf_bytes(pair.value, sharding, path=pair.path).per_device))
        except ShardingError:
            texts.append("?")
    return texts[0], texts[1]


def _row(pair: Wanted) -> tuple[str, ...]:
    own = getattr(pair.value, "sharding", None)
    shape = "x".join(map(str, np.shape(pair.value))) or "scalar"
    has, wants = _bytes(pair)
    return (pair.path or "-", shape, sharding_text(own), has, sharding_text(pair.sharding), wants)


def sharding_text(sharding: Sharding | None) -> str:
    """Return the spec of a sharding as text, or the name of its class if it has no spec."""
    if isinstance(sharding, NamedSharding):
        return spec_text(sharding.spec)
    return "-" if sharding is None else type(sharding).__name__
