"""`shardwright explain`: how each dim of an array, or of a file of tensors, is sharded, and why."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.cli.arguments import (
    EXIT_CODES,
    SHAPE_FIX,
    add_mesh,
    add_output,
    add_strategy,
    make_parser,
)
from shardwright.cli.inputs import (
    Setting,
    read_axes,
    read_setting,
    read_shape,
)
from shardwright.cli.show import print_json, print_lines, width_of
from shardwright.cli.tensors import read_tensors
from shardwright.errors import StrategyError, render
from shardwright.plan.compare import bytes_on_device
from shardwright.resolution.decisions import Outcome, Resolution
from shardwright.resolution.partition_specs import spec_text
from shardwright.resolution.problems import suggest_for_missing_size, without_repeats
from shardwright.show.resolution import HEAD, memory_text, mesh_axes_text, row
from shardwright.show.tables import remarked_table, table
from shardwright.trees.tensors import Tensor
from shardwright.vocabulary.axes import Role, axis_label
from shardwright.vocabulary.lowering import describe
from shardwright.vocabulary.modes import MODE_NAMES, MODES, mode_name
from shardwright.vocabulary.units import bytes_text

_EPILOG = f"""\
axes: one word per dim, or the name of a layout such as ColumnWise. A word is an axis (BATCH or
batch), _ for a dim that is not sharded, DP+FSDP for several axes on one dim, or
KV_HEAD:8*KV_HEAD_DIM:128 for axes flattened into one dim.

examples:
  shardwright explain BATCH QUERY_LENGTH EMBED --strategy fsdp_tp \\
    --mesh dp:1,fsdp:2,tp:4 --shape 16,4096,4096
  shardwright explain EMBED VOCAB --role param --path lm_head/kernel \\
    --strategy "fsdp_tp | mine.toml" --devices 8
  shardwright explain --tensors model.toml --strategy serve_tp --mesh dp:2,tp:4

exit codes: 0 resolved; 1 a sharding problem;
{EXIT_CODES}."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    command = make_parser(
        "explain",
        "Show how each dim of an array is sharded, and why. Needs no devices.",
        epilog=_EPILOG,
    )
    command.add_argument(
        "axes", nargs="*", metavar="AXIS", help="the array's axes, one per dim, or a layout"
    )
    command.add_argument(
        "--tensors", metavar="FILE", help="a .toml or .json file of named tensors, instead of axes"
    )
    add_strategy(command, required=True)
    add_mesh(command)
    command.add_argument(
        "--shape", type=read_shape, metavar="SIZES", help="global sizes, such as 16,4096,4096"
    )
    command.add_argument(
        "--mode", choices=(*MODE_NAMES, "all"), default="all", help="runtime mode (default: all)"
    )
    command.add_argument(
        "--role",
        choices=list(map(str, Role)),
        help="default: param for weight layouts, else activation",
    )
    command.add_argument(
        "--path",
        metavar="PATH",
        help="the tensor's path, if a [[tensors]] entry may match it",
    )
    add_output(command)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Explain, print and return the exit code.

    Raises:
      ShardingError: The arguments are invalid, or an input cannot be read.
    """
    single = {
        "axes": bool(arguments.axes),
        "--shape": arguments.shape is not None,
        "--role": arguments.role,
        "--path": arguments.path,
    }
    if arguments.tensors is None and not arguments.axes:
        raise StrategyError(
            "nothing to explain",
            fix="give the axes of an array, such as BATCH QUERY_LENGTH EMBED, or --tensors FILE",
        )
    if arguments.tensors is not None and any(single.values()):
        names = ", ".join(name for name, is_given in single.items() if is_given)
        raise StrategyError(
            f"--tensors cannot be combined with {names}",
            fix=f"write {names} in the file, or leave --tensors out",
        )
    setting = read_setting(arguments.strategy, mesh=arguments.mesh, devices=arguments.devices)
    # `MODES` and `MODE_NAMES` have the same order.
    modes = MODES if arguments.mode == "all" else (MODES[MODE_NAMES.index(arguments.mode)],)
    if arguments.tensors is not None:
        answers = [ask(tensor, setting, modes) for tensor in read_tensors(arguments.tensors)]
        lines = tree_lines(answers, width=width_of(arguments.width))
    else:
        role = None if arguments.role is None else Role(arguments.role)
        tensor = Tensor(
            path=arguments.path or "",
            axes=read_axes(arguments.axes),
            shape=arguments.shape,
            role=role,
            dtype="",
        )
        answers = [ask(tensor, setting, modes)]
        lines = array_lines(answers[0], width=width_of(arguments.width))
        lines += imported_lines(answers[0], setting)
    ok = all(answer.ok for answer in answers)
    if arguments.json:
        tree = (
            {"tensors": [answer.to_json() for answer in answers]}
            if arguments.tensors
            else answers[0].to_json()
        )
        print_json({"strategy": setting.strategy, "mesh": setting.sizes, **tree, "ok": ok})
    else:
        print_lines([str(setting), "", *lines])
    return 0 if ok else 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedTensor:
    """A tensor's resolution in each requested mode, and its bytes per device if they are known."""

    tensor: Tensor
    modes: dict[str, Resolution]
    bytes_per_device: dict[str, int | None]

    @property
    def ok(self) -> bool:
        """Whether every mode has a spec."""
        return all(resolution.ok for resolution in self.modes.values())

    @property
    def role(self) -> Role:
        """Role under which the tensor was resolved."""
        # The default role depends on the annotation and not on the mode, so read the role of any
        # mode.
        resolved = next(
            (resolution.role for resolution in self.modes.values() if resolution.decisions), None
        )
        return resolved or self.tensor.role or Role.ACTIVATION

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain data."""
        shape = None if self.tensor.shape is None else list(self.tensor.shape)
        modes = {
            name: {
                **resolution.to_json(),
                "mode": name,
                "bytes_per_device": self.bytes_per_device[name],
            }
            for name, resolution in self.modes.items()
        }
        head = {
            "path": self.tensor.path,
            "axes": describe(self.tensor.axes),
            "role": str(self.role),
            "shape": shape,
            "dtype": self.tensor.dtype or None,
        }
        return {**head, "modes": modes}


def ask(tensor: Tensor, setting: Setting, modes: Sequence[str]) -> ExplainedTensor:
    """Resolve a tensor in each mode."""
    resolutions = {
        mode_name(mode): setting.manager.explain(
            tensor.axes, mode=mode, role=tensor.role, shape=tensor.shape, path=tensor.path or None
        )
        for mode in modes
    }
    return ExplainedTensor(
        tensor=tensor,
        modes=resolutions,
        bytes_per_device={
            name: bytes_on_device(tensor, resolution, setting.manager)
            for name, resolution in resolutions.items()
        },
    )


# One array: a table per group of modes with equal results.


def array_lines(answer: ExplainedTensor, *, width: int) -> list[str]:
    """Return the report on one array."""
    tensor = answer.tensor
    path = f"{tensor.path}  " if tensor.path else ""
    lines = [f"{path}{describe(tensor.axes)} as {answer.role}"]
    for names, resolution in _groups(answer.modes):
        spec = "failed" if resolution.spec is None else spec_text(resolution.spec)
        lines += ["", f"{_modes_text(names, answer.modes)}  ->  {spec}"]
        if resolution.decisions:
            rows = [HEAD, *map(row, resolution.decisions)]
            # Leave out the third column, the size, if no size is known.
            if all(decision.size is None for decision in resolution.decisions):
                rows = [(*cells[:2], *cells[3:]) for cells in rows]
            lines += remarked_table(rows, indent="  ", width=width)
        lines += [f"  {memory_text(resolution.memory)}"] if resolution.memory else []
        lines += [f"  note: {note}" for note in resolution.notes]
        problems = suggest_for_missing_size(resolution.problems, "give the sizes: --shape")
        lines += [f"  {line}" for line in render(problems).splitlines() if problems]
    return lines


def imported_lines(answer: ExplainedTensor, setting: Setting) -> list[str]:
    """Return a note for each axis X without a rule, if the strategy declares LOGICAL_X."""
    declared = set(map(axis_label, setting.manager.rules.user_axes))
    labels = dict.fromkeys(
        decision.label
        for resolution in answer.modes.values()
        for decision in resolution.decisions
        # For a name that it does not know, `shardwright import` declares an axis LOGICAL_NAME.
        if decision.outcome is Outcome.NO_RULE and f"LOGICAL_{decision.label}" in declared
    )
    return [
        f"  note: {label} has no rule, but the strategy declares LOGICAL_{label}"
        for label in labels
    ]


def _groups(modes: Mapping[str, Resolution]) -> list[tuple[list[str], Resolution]]:
    """Group modes with the same decisions and problems."""
    keys: list[Any] = []
    groups: list[tuple[list[str], Resolution]] = []
    for name, resolution in modes.items():
        problems = [(problem.error, problem.what, problem.dim) for problem in resolution.problems]
        # A decision contains its rule. So modes with equal specs from different rules are shown
        # separately.
        key = (resolution.decisions, resolution.memory, resolution.notes, problems)
        if key not in keys:
            keys.append(key)
            groups.append(([], resolution))
        groups[keys.index(key)][0].append(name)
    return groups


def _modes_text(names: Sequence[str], modes: Mapping[str, Any]) -> str:
    # `modes` has one entry if the user asked for a single mode. Then return the name of this mode.
    is_all = len(names) == len(MODE_NAMES) == len(modes)
    return "all modes" if is_all else ", ".join(names)


# A tree: a table per role, with a column per group of modes with equal results.


def tree_lines(answers: Sequence[ExplainedTensor], *, width: int) -> list[str]:
    """Return the report on a tree of tensors."""
    lines: list[str] = []
    for role in Role:
        section = [answer for answer in answers if answer.role is role]
        if section:
            lines += [*([""] if lines else []), str(role), *_section(section, width=width)]
    problems = [
        problem
        for answer in answers
        for resolution in answer.modes.values()
        for problem in resolution.problems
    ]
    # Modes with the same rule have the same problem, which is shown once.
    shown = suggest_for_missing_size(without_repeats(problems), SHAPE_FIX)
    return lines + (["", *render(shown).splitlines()] if shown else [])


def _section(answers: Sequence[ExplainedTensor], *, width: int) -> list[str]:
    # Modes with equal cells in all rows share a column, so that a table of a model fits a terminal.
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for mode in answers[0].modes:
        groups.setdefault(tuple(_cells(answer, mode) for answer in answers), []).append(mode)
    columns = list(groups.values())
    sized = any(
        count is not None for answer in answers for count in answer.bytes_per_device.values()
    )
    head = ["tensor", "axes", "shape"]
    for names in columns:
        head += [_modes_text(names, answers[0].modes), *(["per device"] if sized else [])]
    rows = [tuple(head), *(_tensor_row(answer, columns, sized=sized) for answer in answers)]
    return table(rows, indent="  ", width=width, prose=1) + (
        _totals(answers, columns) if sized else []
    )


def _cells(answer: ExplainedTensor, mode: str) -> tuple[str, str]:
    resolution, count = answer.modes[mode], answer.bytes_per_device[mode]
    placement = ", ".join(mesh_axes_text(decision) for decision in resolution.decisions) or (
        "()" if resolution.ok else "!"
    )
    placement += " on host" if resolution.on_host else ""
    return placement, "" if count is None else bytes_text(count)


def _tensor_row(
    answer: ExplainedTensor, columns: Sequence[Sequence[str]], *, sized: bool
) -> tuple[str, ...]:
    tensor = answer.tensor
    shape = "" if tensor.shape is None else ",".join(map(str, tensor.shape)) or "()"
    row = [tensor.path, describe(tensor.axes), shape]
    first = _cells(answer, columns[0][0])
    for at, names in enumerate(columns):
        placement, count = _cells(answer, names[0])
        same = at > 0 and (placement, count) == first
        # Two columns differ in at least one row of the table, but may be equal in this row.
        row.append("=" if same else placement)
        if sized:
            row.append("=" if same and count else count)
    return tuple(row)


def _totals(answers: Sequence[ExplainedTensor], columns: Sequence[Sequence[str]]) -> list[str]:
    """Return a line with the bytes per device of all tensors that have a dtype and a spec."""
    counted = [
        answer
        for answer in answers
        if any(count is not None for count in answer.bytes_per_device.values())
    ]
    # `bytes_over(1)` returns the bytes of the whole array
    total = sum(answer.tensor.bytes_over(1) or 0 for answer in counted)
    parts = []
    for names in columns:
        per_device = sum(
            count for answer in answers if (count := answer.bytes_per_device[names[0]]) is not None
        )
        parts.append(f"{bytes_text(per_device)} in {_modes_text(names, answers[0].modes)}")
    uncounted = sum(1 for answer in answers if None in answer.bytes_per_device.values())
    note = f" ({uncounted} of {len(answers)} not counted)" if uncounted else ""
    return [f"  per device: {', '.join(parts)}; all together {bytes_text(total)}{note}"]
