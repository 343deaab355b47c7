"""Assertions about the shardings of arrays and the collectives of programs.

Each failure names the tensor, the axis and the bytes, and shows everything that was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from shardwright.errors import StrategyError
from shardwright.manager import context
from shardwright.manager.manager import PartitionManager
from shardwright.plan.collectives.collective import Collective, Kind, total
from shardwright.plan.memory import bytes_by_path
from shardwright.show.collectives import collectives_text
from shardwright.show.memory import memory_text
from shardwright.testing.placements import (
    Wanted,
    wanted_by_annotation,
    wanted_by_sharding,
    wrong_placements,
)
from shardwright.testing.programs import Axis, CompiledCollectives, read_program
from shardwright.vocabulary.axes import axis_label
from shardwright.vocabulary.integers import as_integer
from shardwright.vocabulary.units import bytes_text

_ROWS = 20  # largest number of rows of a table in a message
_NOTHING = "the tree has no arrays, so there is nothing to check"
_NOTHING_FIX = "pass the arrays that the test is about; a filter may have removed all of them"

Count = int | range


def assert_sharding(x: Any, expected: Any) -> None:
    """Assert that arrays have the expected shardings. Equivalent specs count as equal.

    `assert_sharding(step(params, batch), state_shardings)`, `assert_sharding(y, P("dp"))`.

    Args:
      x: an array, or a tree of arrays or of other values with a shape, a dtype and a sharding.
      expected: a sharding, a `PartitionSpec` on the array's own mesh, or a tree of them. One entry
        may cover a whole subtree.

    Raises:
      AssertionError: some tensors have another sharding; all are listed.
    """
    __tracebackhide__ = True
    _check_placements(wanted_by_sharding(x, expected))


def assert_spec(
    x: Any,
    *axes: Any,
    manager: PartitionManager | None = None,
    mode: str | None = None,
    role: str | None = None,
) -> None:
    """Assert that arrays are sharded as their annotations resolve, or as literal specs say.

    `assert_spec(q, BATCH, LENGTH, HEAD, HEAD_DIM)`,
    `assert_spec(params, annotations, role="param")`, `assert_spec(y, P("dp"))`.

    Args:
      x: an array, or a tree of arrays or of other values with a shape, a dtype and a sharding.
      *axes: as for `shard`: axes, or one annotation, or a tree of annotations.
      manager: Defaults to the ambient manager. Literal specs need no manager.
      mode: runtime mode. Defaults to the manager's.
      role: Defaults to `param` for weight layouts, else to `activation`.

    Raises:
      AssertionError: some tensors have another sharding; all are listed, with the dims and axes
        that differ.
      ShardingError: an annotation does not resolve, or the tree has no arrays.
    """
    __tracebackhide__ = True
    active = manager if manager is not None else context.current()
    _check_placements(wanted_by_annotation(x, axes, active, mode=mode, role=role))


def _check_placements(wanted: Sequence[Wanted]) -> None:
    __tracebackhide__ = True
    if not wanted:
        raise StrategyError(_NOTHING, fix=_NOTHING_FIX)
    message = wrong_placements(wanted, rows=_ROWS)
    if message:
        raise AssertionError(message)


def assert_max_replicated(
    x: Any,
    shardings: Any = None,
    *,
    bytes: int | None = None,  # noqa: A002  reads well in a call
    fraction: float | None = None,
) -> None:
    """Assert that few bytes of a tree are replicated.

    With `assert_max_replicated(params, fraction=0.02)`, at most 2 % of the bytes on all devices are
    copies.

    Args:
      x: an array or a tree of arrays. With `shardings`, leaves need only a shape and a dtype.
      shardings: a tree of shardings. One entry may cover a whole subtree. Defaults to the
        shardings of the arrays.
      bytes: limit for the copies, in bytes over all devices. A fully sharded array has no copies.
      fraction: limit for the copies as a fraction of all bytes held. If eight devices hold the same
        array, the fraction is 7/8.

    Raises:
      AssertionError: there are more copies than the limit. The message lists the arrays with most
        copies first.
      TypeError: `bytes` and `fraction` are both given, or neither is.
      ValueError: `fraction` is below 0 or above 1, or `bytes` is below 0.
      StrategyError: a leaf has no sharding, there are no leaves, or no leaf is placed on a mesh.
    """
    __tracebackhide__ = True
    if (bytes is None) == (fraction is None):
        raise TypeError("assert_max_replicated needs one limit: bytes=, or fraction=")
    if fraction is not None and not 0 <= fraction <= 1:
        raise ValueError(
            f"fraction={fraction} is not a fraction from 0 to 1 (0.02 for 2 %); for bytes "
            f"write bytes="
        )
    if bytes is not None and not bytes >= 0:
        raise ValueError(f"bytes={bytes!r} is not a number of bytes: it must be 0 or more")
    tree_bytes = bytes_by_path(x, shardings)
    if not tree_bytes.leaves:
        raise StrategyError(_NOTHING, fix=_NOTHING_FIX)
    if all(leaf.devices == 1 and leaf.spec is None for leaf in tree_bytes.leaves):
        what = "every array is on one device and not on a mesh, so nothing is replicated yet"
        raise StrategyError(
            what,
            fix="place the arrays first (pm.shard, pm.init), or pass shardings=pm.shardings(...)",
        )
    if bytes is not None:
        is_within, limit = tree_bytes.replicated <= bytes, f"the limit is {bytes_text(bytes)}"
    else:
        assert fraction is not None
        is_within, limit = tree_bytes.replicated_share <= fraction, f"the limit is {fraction:.1%}"
    if not is_within:
        worst = tree_bytes.most_replicated()
        held = (
            f"{bytes_text(tree_bytes.replicated)} of {bytes_text(tree_bytes.held)} held on all "
            f"devices are copies ({tree_bytes.replicated_share:.1%})"
        )
        first = worst.leaves[0]
        where = (
            f"most are of {first.path or 'the array'}, over "
            f"{' and '.join(first.replicated_over) or 'its devices'}"
        )
        fix = "shard it over those mesh axes, or raise the limit if the copies are intended"
        raise AssertionError(
            f"{held}; {limit}; {where}\n\n{memory_text(worst, rows=_ROWS)}\n  fix   {fix}"
        )


def assert_collectives(
    program: Any,
    *args: Any,
    all_gather: Count | None = None,
    all_reduce: Count | None = None,
    reduce_scatter: Count | None = None,
    all_to_all: Count | None = None,
    permute: Count | None = None,
    broadcast: Count | None = None,
    ragged_all_to_all: Count | None = None,
    only: bool = False,
    axis: Axis | None = None,
    bytes: Count | None = None,  # noqa: A002  reads well in a call
    mesh: Mesh | AbstractMesh | None = None,
    manager: PartitionManager | None = None,
    trips: int | None = None,
) -> None:
    """Assert which collectives a program runs: how often, over which axis, with how many bytes.

    `assert_collectives(step, params, batch, all_gather=2, reduce_scatter=1, axis="fsdp")`. A
    collective in a loop counts once per trip. A collective in a branch counts as if the branch were
    taken. Kinds that are not named may occur, unless `only` is set.

    Args:
      program: a function, jitted or not; the result of `lower` or `compile`; HLO text; or the
        result of `read_collectives`.
      *args: arguments of a function: arrays or `ShapeDtypeStruct`s.
      all_gather: number of runs, as an integer or a `range`.
      all_reduce: see `all_gather`. On CPU, an all-reduce takes the place of each reduce-scatter of
        TPU and GPU.
      reduce_scatter: see `all_gather`.
      all_to_all: see `all_gather`.
      permute: see `all_gather`.
      broadcast: see `all_gather`.
      ragged_all_to_all: see `all_gather`.
      only: forbid kinds that are not named.
      axis: count only collectives over this mesh axis or semantic axis. If several axes are given,
        count only collectives over exactly these axes. Mesh axes of size 1 are ignored.
      bytes: logical bytes of the named kinds, or of all kinds if none is named, as an integer or a
        `range`. Bytes in a loop count once per trip. Bytes are counted with the element types that
        the program has before XLA for CPU widens some of them. A program that is already compiled
        does not show all of these types.
      mesh: Defaults to the manager's mesh, else to the mesh of the program's arguments and results.
      manager: the manager under which a function compiles. Defaults to the ambient manager.
      trips: number of trips of each loop whose end depends on data.

    Raises:
      AssertionError: the program runs other collectives than expected.
      TypeError: no kind and no bytes are named, or a count is neither an integer nor a range.
      ProgramError: the program cannot be read.
      MeshSpecError: the mesh of the program is not known.
      UnknownAxisError: `axis` is neither a mesh axis nor a semantic axis that is sharded over one.
    """
    __tracebackhide__ = True
    counts = (
        all_gather,
        all_reduce,
        reduce_scatter,
        all_to_all,
        permute,
        broadcast,
        ragged_all_to_all,
    )
    # The counts are in the same order as the members of `Kind`.
    wanted = {kind: count for kind, count in zip(Kind, counts, strict=True) if count is not None}
    if not wanted and bytes is None:
        raise TypeError(
            "assert_collectives asserts nothing: name a kind, as in all_reduce=1, or bytes=; "
            "or use assert_no_collectives"
        )
    asked = {**{str(kind): count for kind, count in wanted.items()}, "bytes": bytes}
    for name, given in asked.items():
        if given is not None and not isinstance(given, range) and as_integer(given) is None:
            raise TypeError(
                f"{name}={given!r} is neither an integer nor a range: write {name}=1, or "
                f"{name}=range(1, 4) for 1 to 3"
            )
    # Only bytes depend on element types, and finding the types may take a second compilation.
    compiled = read_program(
        program, args, mesh=mesh, manager=manager, trips=trips, own_types=bytes is not None
    )
    over = compiled.over(axis)
    problems = []
    for kind, count in wanted.items():
        problems += _misfit(kind, count, _runs(kind, over), _count_text(kind, over))
    if only:
        problems += [
            f"{kind}: none is expected, {_count_text(kind, over)} found"
            for kind in _kinds(over)
            if kind not in wanted
        ]
    if bytes is not None:
        moved = total(collective for collective in over if collective.kind in wanted or not wanted)
        problems += _misfit("bytes", bytes, moved, f"{moved} ({bytes_text(moved or 0)})")
    if problems:
        raise AssertionError(_message(compiled, axis, over, problems))


def assert_no_collectives(
    program: Any,
    *args: Any,
    axis: Axis | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    manager: PartitionManager | None = None,
) -> None:
    """Assert that a program runs no collectives, or none over an axis.

    `assert_no_collectives(decode_step, params, cache, token, axis="dp")`.

    Args:
      program: as for `assert_collectives`.
      *args: arguments of a function.
      axis: a mesh axis or a semantic axis, or several. Defaults to all.
      mesh: Defaults to the manager's mesh, else to the mesh of the program's arguments and results.
      manager: the manager under which a function compiles. Defaults to the ambient manager.

    Raises:
      AssertionError: a collective runs.
      ProgramError: nothing is sharded, or the program cannot be read.
      MeshSpecError: the mesh of the program is not known.
      UnknownAxisError: `axis` is neither a mesh axis nor a semantic axis that is sharded over one.
    """
    __tracebackhide__ = True
    compiled = read_program(program, args, mesh=mesh, manager=manager)
    # `exactly=False` also forbids collectives over `axis` together with other mesh axes.
    over = compiled.over(axis, exactly=False)
    if over:
        problems = [
            f"{kind}: none is expected, {_count_text(kind, over)} found" for kind in _kinds(over)
        ]
        raise AssertionError(_message(compiled, axis, over, problems))


def _kinds(collectives: Sequence[Collective]) -> list[Kind]:
    return [kind for kind in Kind if any(collective.kind is kind for collective in collectives)]


def _runs(kind: Kind, collectives: Sequence[Collective]) -> int | None:
    counts = [collective.count for collective in collectives if collective.kind is kind]
    # One loop of unknown length makes the sum unknown.
    return None if None in counts else sum(count for count in counts if count is not None)


def _count_text(kind: Kind, collectives: Sequence[Collective]) -> str:
    runs = _runs(kind, collectives)
    moved = total(collective for collective in collectives if collective.kind is kind)
    if runs is None or moved is None:
        return "an unknown number"
    return f"{runs} ({bytes_text(moved)})" if runs else "none"


def _misfit(name: str, wanted: Count, found: int | None, text: str) -> list[str]:
    """Return a line about a wrong number, or nothing if the number is as expected.

    Args:
      name: What is counted.
      wanted: The expected number or range.
      found: The number. It is None if it depends on a loop of unknown length.
      text: The number as the line shows it.
    """
    expected = f"{wanted} expected"
    if isinstance(wanted, range):
        expected = "nothing fits the empty range"
        if wanted:
            expected = f"{wanted[0]} to {wanted[-1]} expected"
    if found is None:
        what = f"{name}: {expected}, found in a loop whose end depends on data"
        return [f"{what}: pass trips= to say how often it runs"]
    fits = found in wanted if isinstance(wanted, range) else found == wanted
    return [] if fits else [f"{name}: {expected}, {text} found"]


def _message(
    program: CompiledCollectives,
    axis: Axis | None,
    over: Sequence[Collective],
    problems: Sequence[str],
) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in program.sizes.items())
    over_axes = (
        ""
        if axis is None
        else f" over {axis_label(axis) if isinstance(axis, str) else '+'.join(axis)}"
    )
    lines = [
        f"collectives of {program.name}{f' on {sizes}' if sizes else ''}{over_axes}:",
        *(f"  {problem}" for problem in problems),
        "",
    ]
    others = [collective for collective in program.collectives if collective not in over]
    lines += (
        [collectives_text(over, carried=program.carried, rows=_ROWS)] if over or not others else []
    )
    lines += ["", f"not{over_axes}:"] * bool(others and over) + [
        collectives_text(others, carried=program.carried, rows=_ROWS)
    ] * bool(others)
    fix = "check with assert_sharding that the arguments are sharded"
    if program.collectives:
        fix = (
            "shard or constrain the operands at the lines above, or expect these collectives if "
            "they are intended"
        )
    return "\n".join([*lines, f"  fix   {fix}"])
